"""One stage's programs as a problem for the solver, and its solution as shardings.

Nodes are of two kinds. An *equation* (a part of it) chooses a strategy: its seconds are the local compute's.
A *layout* stands for a value that has several readers, crosses programs or is stored: it chooses the sharding in
which the value is kept. Edges price the resharding from maker to layout to reader, times how often it happens
(once per microbatch or once per step). State leaves are layouts that the renewed leaf must return to; where one phase
of a program reads such a leaf several times, it does so from one more layout: what it gathers, it gathers once. Memory
is counted at a few times per program, where most is live.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from autopar.cost_model.compute import accumulate_seconds
from autopar.cost_model.reshard import Resharder, StepPrice
from autopar.cost_model.strided_reads import copying_seconds
from autopar.ir.graph import Equation, Phase, Value
from autopar.ir.local import StageSharding
from autopar.ir.mesh import DeviceKind, Mesh
from autopar.ir.program import Program
from autopar.ir.rule import Rule
from autopar.ir.sharding import Sharding
from autopar.ir.strategy import AxisAssignment
from autopar.passes.intra_op.candidate_layouts import (
    End,
    candidate_layouts,
    is_finer,
    strategies_by_round,
    with_sums_alone,
    without_copies,
)
from autopar.passes.intra_op.limits import Limits
from autopar.passes.intra_op.numbers import Held, StageNumbers
from autopar.passes.intra_op.seconds import StrategySeconds
from autopar.passes.intra_op.stage import EquationPart, Stage
from autopar.passes.intra_op.strategies import OptionsCache, PartOptions, Shardings, temporaries
from autopar.passes.solver.problem import Solution

Slot = tuple[int | None, Value]
ProgramPhase = tuple[int, Phase]  # the index of a program, and a phase of it
_ROOMY = 0.5  # of the memory: where the leanest choices need less, whole copies of stacks are offered
_LARGE_COPY = 0.01  # of a device's memory


class Contradiction(Exception):
    """What the user has pinned cannot be had on a mesh, or not together with what the method wants.

    what: the hint, in words. shape: that of the mesh.
    """

    def __init__(self, what: str, shape: tuple[int, ...]) -> None:
        super().__init__(f"{what} cannot be had on a mesh of shape {shape}")
        self.what, self.shape = what, shape


class Remembered:
    """What problems of one step on meshes of one kind have in common."""

    def __init__(self, options: OptionsCache, like: Remembered | None) -> None:
        """`like`: that of another method, with which it has all in common that no limit has a part in."""
        self.options = options  # of all meshes of this shape
        self.equations: dict[Any, tuple[PartOptions, Any]] = {}  # with the seconds of each strategy
        # Edges' seconds per step (None: all free), and the shardings in which values may be kept.
        self.matrices: dict[Any, Any] = {} if like is None else like.matrices
        self.candidates: dict[Any, list[Sharding]] = {} if like is None else like.candidates


@dataclasses.dataclass(frozen=True)
class StageSetting:
    """A stage on a mesh, as the problem sees it."""

    stage: Stage
    mesh: Mesh
    kind: DeviceKind
    resharder: Resharder
    price: StepPrice
    link_bandwidth: float  # bytes per second to the neighbouring stages, per device
    limits: Limits
    memory_limit: float | None  # bytes per device
    remembered: Remembered
    tied: bool = False  # alike equations choose alike (`alike.py`)
    # The share of the microbatches in flight whose values are held, by when these are made and last read.
    held: Mapping[tuple[Phase, Phase], float] = dataclasses.field(default_factory=dict)
    objective: Literal["step", "microbatch"] = "step"  # see `Method.objective`
    hides_collectives: bool = True  # whether those in rounds of loops count for less where kernels run beside them

    def often(self, in_loop: bool) -> int:
        """How often something counts that happens for each microbatch, or once a step."""
        return self.stage.step.num_microbatches if in_loop and self.objective == "step" else 1


class StageProblem:
    """Builds the problem, `numbers`, and reads its solution."""

    def __init__(self, setting: StageSetting) -> None:
        self.setting = setting
        self.stage = stage = setting.stage
        self.programs, self.step = stage.programs, stage.step
        self.stored = set(self.step.graph.inputs) | set(self.step.constants)
        self.state = {self.step.graph.inputs[i] for i in self.step.graph.carried.values()}
        self.numbers = StageNumbers(setting.memory_limit)
        self._edges: dict[tuple[int, int, int], int] = {}  # the index of each in `edges`
        self._edge_counts: list[int] = []
        self._equations: dict[Any, int] = {}  # the nodes of tied ones
        self._layouts: dict[Any, tuple[int, Shardings]] = {}  # tied ones
        self._ends: dict[int, tuple[list[End], ...]] = {}  # by node of equations: of operands, of results
        # By program, id of the equation, and number of the part.
        self.parts: dict[tuple[int, int, int], tuple[int, PartOptions]] = {}
        self.layouts: dict[Slot, tuple[int, Shardings]] = {}
        self.makers: dict[Slot, End] = {}
        self.readers: dict[Slot, list[End]] = defaultdict(list)
        self._readers_in: dict[tuple[Slot, ProgramPhase], list[End]] = defaultdict(list)  # .. in one phase
        self._copies: dict[Any, End] = {}  # tied ones
        # The nodes of layouts in which a phase reads a leaf or a sum.
        self.copies: dict[tuple[Slot, ProgramPhase], int] = {}
        self._seconds = StrategySeconds(setting.mesh, setting.kind, setting.price, setting.hides_collectives)
        self._own_matrices: dict[Any, Any] = {}  # those that memory has a part in
        alike = stage.alike if setting.tied else {}
        for program in self.programs:
            self._add_equations(program, alike)
        self._add_layouts()
        self._add_memory()
        self._short_of_memory = self._may_be_short()
        self.is_restricted = False  # whether shardings are left out that might fit
        self._connect()
        self._count_edges()

    def _count_edges(self) -> None:
        """Each edge costs as often as there are such; equal costs stay one array."""
        times: dict[tuple[int, int], Any] = {}
        for index, ((u, v, matrix), n) in enumerate(zip(self.numbers.edges, self._edge_counts, strict=True)):
            if n > 1:
                if (id(matrix), n) not in times:
                    times[id(matrix), n] = matrix * n
                self.numbers.edges[index] = (u, v, times[id(matrix), n])

    def _may_be_short(self) -> bool:
        """Whether whole copies of all stacks that loops read or make may be more than there is room for.

        There is where the hungriest choices leave as much, or the leanest leave half of the memory with them.
        """
        limit = self.setting.memory_limit
        ends = [*self.makers.items(), *((slot, end) for slot, ends in self.readers.items() for end in ends)]
        stacks = {slot[1] for slot, end in ends if end.stacked is not None and end.stacked.any()}
        copies = sum(v.nbytes for v in stacks)
        if limit is None or self.numbers.most_bytes(self.step.num_microbatches) + copies <= limit:
            return False
        return self.numbers.least_bytes(self.step.num_microbatches) + copies > _ROOMY * limit

    def untied(self, tied: StageProblem, choice: Sequence[int]) -> list[int]:
        """A choice of the same stage's problem with ties, in this one, which has none."""
        chosen: dict[int, int] = {}
        for key, (node, _) in self.parts.items():
            chosen[node] = choice[tied.parts[key][0]]
        for slot, (node, _) in self.layouts.items():
            chosen[node] = choice[tied.layouts[slot][0]]
        for place, node in self.copies.items():
            chosen[node] = choice[tied.copies[place]]
        taken = {*(node for node, _ in (*tied.parts.values(), *tied.layouts.values())), *tied.copies.values()}
        rest = [n for n in range(len(self.numbers.costs)) if n not in chosen]  # what is sent or returned is not tied
        chosen.update(zip(rest, (choice[n] for n in range(len(tied.numbers.costs)) if n not in taken), strict=True))
        return [chosen[n] for n in range(len(self.numbers.costs))]

    def read(self, solution: Solution) -> StageSharding:
        strategies: dict[tuple[int, int], list[AxisAssignment]] = defaultdict(list)
        for (program, eqn_id, _), (node, options) in self.parts.items():
            strategies[program, eqn_id].append(options.assignments[solution.choice[node]])
        layouts: dict[Slot, Sharding] = {(None, v): lies for v, lies in self.stage.pinned.items()}  # read or not
        layouts.update({slot: held.each[solution.choice[node]] for slot, (node, held) in self.layouts.items()})
        return StageSharding(
            self.setting.mesh, {k: tuple(v) for k, v in strategies.items()}, layouts,
            solution.cost, solution.lower_bound,
        )  # fmt: skip

    # Nodes.

    def _node(self, costs: Any, in_loop: bool) -> int:
        self.numbers.costs.append(np.asarray(costs, np.float64) * self.setting.often(in_loop))
        self.numbers.node_in_loop.append(in_loop)
        self.numbers.held.append({})
        return len(self.numbers.costs) - 1

    def _slot(self, program: Program, value: Value) -> Slot:
        return (program.index if value in program.copies else None, value)

    def _strategies(self, part: EquationPart) -> tuple[PartOptions, Any]:
        """The options of a part of an equation, and the seconds of each."""
        known, limits = self.setting.remembered.equations, self.setting.limits
        eqn, rule, index = part.equation, part.rule, part.at
        key = (part.signature, limits.kind(eqn))
        if key not in known:
            of_part, allowed = rule.parts[index], functools.partial(limits.allow_assignment, eqn, rule.parts[index])
            options = self.setting.remembered.options.of(of_part, part.partial_sums, allowed)
            if not limits.heeds_hints(rule, options.assignments[0]):
                raise Contradiction(_hint_text(rule, eqn), self.setting.mesh.shape)
            known[key] = (options, self._seconds.of(eqn, rule, index, options, part.traffic))
        return known[key]

    def _add_equations(self, program: Program, alike: Mapping[tuple[int, int], int]) -> None:
        in_loop, index, copies = program.in_loop, program.index, program.copies
        tied: dict[int, list[Any]] = defaultdict(list)  # by node: the seconds of more equations
        for part in self.stage.parts[index]:
            eqn = part.equation
            options, seconds = self._strategies(part)
            number = alike.get((index, eqn.id))
            key = (number, part.role, id(options))
            node = None if number is None else self._equations.get(key)
            if node is None:
                node = self._equations[key] = self._node(seconds, in_loop)
            else:
                tied[node].append(seconds)
            self.parts[index, eqn.id, part.at] = (node, options)
            if node not in self._ends:  # tied equations have the same
                by_round = strategies_by_round(part.rule.parts[part.at], options)
                in_rows = bool(part.rule.kernels)  # what loops and libraries' kernels make
                self._ends[node] = tuple(
                    [End(node, each, in_loop, is_finer(each, by_round), in_rows) for each in side]
                    for side in (options.operands, options.results)
                )
            operands, results = self._ends[node]
            for place, v in part.inputs:
                slot = (index if v in copies else None, v)
                self.readers[slot].append(operands[place])
                self._readers_in[slot, (index, eqn.phase)].append(operands[place])
            for v, end in zip(part.outputs, results, strict=True):
                self.makers[index if v in copies else None, v] = end
        often = self.setting.often(in_loop)
        for node, each in tied.items():
            self.numbers.costs[node] = np.add.reduce([self.numbers.costs[node], *(np.array(each) * often)])

    def _add_layouts(self) -> None:
        """A layout for every value that is stored, crosses programs or has several readers."""
        setting, step = self.setting, self.step
        inputs = set(step.graph.inputs)
        outputs = {v for v in step.outputs if isinstance(v, Value)}
        leaving = {self._slot(p, v) for p in self.programs for v in p.outputs}
        stored = [v for v in self.state if self.stage.placed.home[v] == self.stage.index]
        for v in sorted(stored, key=lambda v: v.id):
            self.readers.setdefault((None, v), [])
        sums: dict[Slot, End] = {}  # running sums of this stage's partial sums
        for partial_sum, total in step.accumulate.items():
            maker = self.makers.get((None, partial_sum))
            if maker is not None:
                sums[None, total] = maker
                self.readers.setdefault((None, total), [])
        kept = step.kept
        for slot in list(dict.fromkeys([*self.readers, *self.makers])):
            value = slot[1]
            maker, readers = self.makers.get(slot), self.readers.get(slot, [])
            if maker is not None and slot not in leaving and len(readers) < 2:
                continue
            source = maker or sums.get(slot)
            if value in kept and (None, kept[value]) in self.makers:
                continue  # stored as its loop value is
            ends = tuple((end.node, id(end.shardings)) for end in ((source, *readers) if source else readers))
            here = value in step.constants or value in step.feeds or value is step.microbatch
            if value in inputs:
                here = self.stage.placed.home[value] == self.stage.index
            lies = (source is None, here, value in inputs, value in outputs, slot in sums, value in self.state)
            pins = self.stage.pinned.get(value), self.step.hints.get(value)
            key = (ends, lies, value.shape, value.dtype, value in step.batched, pins)
            tied = self._layouts.get(key) if setting.tied else None
            if tied is None:
                partial = source is not None and (value not in outputs or slot in sums)
                choices = self._layout_choices(value, source, readers, partial)
                in_loop = value in step.batched or slot in sums
                tied = self._layouts[key] = (self._node(np.zeros(len(choices.each)), in_loop), choices)
            node, choices = self.layouts[slot] = tied
            if slot in sums:
                self.numbers.costs[node] = self.numbers.costs[node] + self._adding(value, choices)
            if source is None and not here:
                transfer = choices.nbytes(value) / setting.link_bandwidth
                self.numbers.costs[node] = self.numbers.costs[node] + transfer * setting.often(value in step.batched)
        self._sums = sums

    def _adding(self, total: Value, choices: Shardings) -> Any:
        """Seconds per step in which each microbatch adds to a running sum."""
        return accumulate_seconds(self.setting.kind, choices.nbytes(total)) * self.setting.often(True)

    def _layout_choices(
        self, value: Value, source: End | None, readers: Sequence[End], may_be_partial: bool
    ) -> Shardings:
        """The shardings in which a value may be kept."""
        setting = self.setting
        ends = {id(end.shardings): end.shardings for end in ([source, *readers] if source else readers)}
        key = (value.shape, *ends, may_be_partial, value in self.stored)
        known = setting.remembered.candidates
        if key not in known:
            known[key] = candidate_layouts(value, [*ends.values()], may_be_partial, value in self.stored, setting.mesh)
        candidates, replicated = known[key], Sharding.replicated(len(value.shape))
        hint = self.step.hints.get(value)
        if value in self.stage.pinned:
            candidates = [self.stage.pinned[value]]
        elif hint is not None:
            every = hint.shardings(value.shape, setting.mesh)
            candidates = [s for s in every if setting.limits.allow_layout(value, s)]
            if not candidates:
                raise Contradiction(f"the hint {hint} for an argument of shape {value.shape}", setting.mesh.shape)
        elif value.is_key:
            candidates = [replicated]
        else:
            candidates = [s for s in candidates if setting.limits.allow_layout(value, s)] or [replicated]
        return setting.remembered.options.shardings(candidates)

    # Edges.

    def _connect(self) -> None:
        step, placed, listed = self.step, self.stage.placed, self.setting.remembered.options.shardings
        for slot, (node, shardings) in self.layouts.items():
            maker = self.makers.get(slot) or self._sums.get(slot)
            if maker is not None:
                self._edge(slot[1], maker, End(node, shardings, maker.in_loop))
        sent = self._sent()
        for (slot, phase), readers in self._readers_in.items():
            source = self._source(slot)
            is_shared = slot[1] in self.state or slot in self._sums
            if is_shared and len(readers) > 1 and all(end.stacked is None for end in readers):
                source = self._copy(slot, phase, source, readers)
            for reader in readers:
                self._edge(slot[1], source, reader)
        for value in sent:
            source = self._source((None, value))
            full = [s for s in dict.fromkeys(source.shardings.each) if not s.partial]
            candidates = listed(full or [Sharding.replicated(len(value.shape))])
            varies = value in step.batched
            # The receiver pays for the copy; here partial sums must only become whole.
            node = self._node(np.zeros(len(candidates.each)), varies)
            self._edge(value, source, End(node, candidates, varies))
        for slot in self._sums.keys() & {(None, v) for v in step.outputs}:  # returned: reduced once, after the loop
            node, held = self.layouts[slot]
            whole = listed(dict.fromkeys(Sharding(s.dims) for s in held.each))
            returned = End(self._node(np.zeros(len(whole.each)), False), whole, False)
            self._edge(slot[1], End(node, held, False), returned)
        for k, i in step.graph.carried.items():
            leaf, out = step.graph.inputs[i], step.outputs[k]
            if not isinstance(out, Value) or out is leaf or (None, leaf) not in self.layouts:
                continue
            if placed.home[leaf] == self.stage.index and out in placed.producer:
                program = placed.programs[placed.producer[out]]
                if program.stage == self.stage.index:
                    node, shardings = self.layouts[None, leaf]
                    self._edge(out, self._source(self._slot(program, out)), End(node, shardings, False))

    def _copy(self, slot: Slot, phase: ProgramPhase, source: End, readers: Sequence[End]) -> End:
        """A layout in which a phase of a program takes a leaf of the state, or a sum, for all that read it there.

        Running sums stay partial over the microbatches, and are reduced once for all readers.
        """
        key = (source.node, id(source.shardings), *sorted((end.node, id(end.shardings)) for end in readers))
        copy = self._copies.get(key) if self.setting.tied else None
        if copy is None:
            ends = [source, *readers]
            shardings = dict.fromkeys(s for end in ends for s in end.shardings.each if not s.partial)
            choices = self.setting.remembered.options.shardings(
                [s for s in shardings if s.divides(slot[1].shape, self.setting.mesh)]
            )
            in_loop = any(end.in_loop for end in readers)
            node = self._node(np.zeros(len(choices.each)), in_loop)
            copy = self._copies[key] = End(node, choices, in_loop, in_rows=source.in_rows)
        self._edge(slot[1], source, copy)
        self.copies[slot, phase] = copy.node
        return copy

    def _source(self, slot: Slot) -> End:
        """Where readers take a value from: its layout, or else its maker."""
        if slot in self.layouts:
            node, shardings = self.layouts[slot]
            maker = self.makers.get(slot)
            in_rows = maker.in_rows if maker is not None else slot[1] in self.stored or slot in self._sums
            return End(node, shardings, False, in_rows=in_rows)
        if slot in self.makers:
            return self.makers[slot]
        return self._source((None, self.step.kept[slot[1]]))

    def _sent(self) -> list[Value]:
        """Values made here that another stage reads."""
        here = {v for p in self.programs for v in p.outputs}
        sent: dict[Value, None] = {}
        for program in self.stage.placed.programs:
            if program.stage != self.stage.index:
                for v in program.inputs:
                    is_kept = self.step.loop_values.get(v) in here and (None, v) in self.layouts
                    if is_kept or (v in here and v not in self.step.copied):
                        sent[v] = None
        return list(sent)

    def _edge(self, value: Value, source: End, target: End) -> None:
        in_rows, summing = source.in_rows or self.setting.kind.xla.single_output, self.setting.limits.summing
        key: Any = (
            value.shape, value.itemsize, value.sum_nbytes, id(source.shardings), id(target.shardings), target.in_loop,
            in_rows, summing,
        )  # fmt: skip
        matrices = self.setting.remembered.matrices
        limit, ends = self.setting.memory_limit, [source, target]
        if limit is not None and value.nbytes >= _LARGE_COPY * limit:
            ends = [
                end if self._short_of_memory else dataclasses.replace(end, stacked=None) for end in (source, target)
            ]
            stacked = [None if end.stacked is None else end.stacked.tobytes() for end in ends]
            self.is_restricted |= stacked != [None, None]
            if stacked != [None, None] or value.nbytes > limit:
                key, matrices = (*key, *stacked), self._own_matrices
        if key not in matrices:
            each = source.shardings.each, target.shardings.each
            matrix = self.setting.resharder.matrix(value.shape, value.itemsize, *each)
            if in_rows and len(value.shape) > 1:
                nbytes, setting = source.shardings.nbytes(value), self.setting
                matrix = matrix + copying_seconds(setting.kind, setting.mesh, value.shape, nbytes, *each)
            matrix = with_sums_alone(matrix, source.shardings, target.shardings, summing)
            if matrices is self._own_matrices:
                matrix = without_copies(matrix, ends[0], ends[1], target.shardings.nbytes(value) <= limit)
            matrices[key] = matrix * self.setting.often(target.in_loop) if matrix.any() else None
        costs = matrices[key]
        if costs is None:
            return
        if source.node == target.node:  # tied: whatever it chooses, both choose
            self.numbers.costs[source.node] = self.numbers.costs[source.node] + costs.diagonal()
            return
        place = (source.node, target.node, id(costs))
        if place not in self._edges:
            self._edges[place] = len(self.numbers.edges)
            self._edge_counts.append(0)
            self.numbers.edges.append((source.node, target.node, costs))
            self.numbers.edge_in_loop.append(target.in_loop)
        self._edge_counts[self._edges[place]] += 1

    # Memory.

    def _hold(self, node: int, when: Held, nbytes: Any) -> None:
        self.numbers.held[node][when] = self.numbers.held[node].get(when, 0.0) + np.ceil(nbytes)

    def _add_memory(self) -> None:
        setting, stage = self.setting, self.stage
        times: dict[int, tuple[int, int]] = {}  # program -> its range of times
        positions: list[int] = []  # time -> position in its program
        for program in self.programs:
            peaks = stage.peaks[program.index]
            times[program.index] = (len(positions), len(positions) + len(peaks))
            positions += peaks
        if not positions:
            return
        loop = [times[p.index] for p in self.programs if p.in_loop]
        loop_range = (loop[0][0], loop[-1][1]) if loop else (0, 0)
        always = (0, len(positions))
        made_in = {self._slot(p, v): p for p in self.programs for e in p.equations for v in e.outputs}
        read_in: dict[Slot, list[Program]] = defaultdict(list)
        for program in self.programs:
            for v in program.inputs:
                read_in[self._slot(program, v)].append(program)
        for slot in dict.fromkeys([*self.layouts, *self.makers]):
            value = slot[1]
            end = self._source(slot)
            size = end.shardings.nbytes(value)
            maker = made_in.get(slot)
            if value in self.step.feeds:  # the whole batch is there when a step begins
                self._hold(end.node, Held(*always, False), size * self.step.num_microbatches)
                continue
            if value in self.stored or slot in self._sums:
                start = loop_range[0] if slot in self._sums else 0
                self._hold(end.node, Held(start, always[1], False), size)
                continue
            users = read_in.get(slot, [])
            if users:  # it crosses programs, or arrives from elsewhere
                since, until = maker or users[0], users[-1]
                first, last = times[since.index][0], times[until.index][1]
                share = setting.held.get((maker.phase if maker else Phase.FORWARD, until.phase), 1.0)
                self._hold(end.node, Held(first, last, since.in_loop), size * share)
        graph = self.step.graph
        in_place = {
            out for k, i in graph.carried.items()
            if isinstance(out := self.step.outputs[k], Value) and (None, graph.inputs[i]) in self.layouts
        }  # fmt: skip
        for program in self.programs:
            start, stop = times[program.index]
            for t in range(start, stop):
                eqn = program.equations[positions[t]]
                rule = stage.rules[eqn.id]
                if rule.live_sets:
                    node, options = self.parts[program.index, eqn.id, 0]
                    held = np.array([temporaries(rule, assignment, setting.mesh) for assignment in options.assignments])
                    self._hold(node, Held(t, t + 1, False), held)
            for value, (born, dies) in stage.lives[program.index].items():
                live = [t for t in range(start, stop) if born <= positions[t] <= dies]
                slot = self._slot(program, value)
                if live and slot not in read_in and slot in made_in and value not in in_place:
                    end = self._source(slot)
                    size = end.shardings.nbytes(value)
                    self._hold(end.node, Held(live[0], live[-1] + 1, False), size)


def _hint_text(rule: Rule, eqn: Equation) -> str:
    hints = ", ".join(dict.fromkeys(str(hinted.hint) for hinted in rule.hints))
    return f"the hint {hints} at {eqn.source or 'an unknown line'}, for arrays in {eqn.primitive.name}"
