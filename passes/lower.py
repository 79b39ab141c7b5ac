"""From strategies to programs in local sizes.

`ProgramWriter` writes down, in order, each equation on local pieces and each resharding between them: what is priced,
what is counted, and what runs (`emit.py`). `assemble` does it for all stages and plans what crosses between them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from autopar.cost_model.mesh_transfer import TransferPlan
from autopar.cost_model.reshard import Resharder
from autopar.ir.graph import Literal, Phase, Value
from autopar.ir.local import (
    LocalProgram,
    Port,
    Reshard,
    StageSharding,
)
from autopar.ir.mesh import Mesh, XlaBackend
from autopar.ir.program import PlacedStep, Program
from autopar.ir.rule import Rule
from autopar.ir.sharding import Sharding
from autopar.passes import last_microbatch
from autopar.passes.intra_op.traffic import KnownTraffic
from autopar.passes.program_writer import ProgramWriter, results_of

# The cheapest way for a value that lies so on one mesh to lie so on another: see `Prices.transfer_plan`.
TransferFn = Callable[[Value, Sharding, Mesh, Sharding, Mesh], TransferPlan]


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A value that one stage sends to another."""

    value: Value
    source: int  # stage
    target: int  # stage
    plan: TransferPlan


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredStep:
    """Everything that runs, in local sizes."""

    placed: PlacedStep
    rules: Mapping[int, Rule]  # by equation id
    shardings: tuple[StageSharding, ...]  # by stage
    programs: tuple[LocalProgram, ...]  # bridges included, in an order that respects every dependency
    crossings: tuple[Crossing, ...]
    loop_microbatches: int  # for which the programs of the loop run; the last may be in one program with the update
    homes: Mapping[Value, Port]  # graph input -> how it is stored on its home stage
    results: tuple[tuple[int, Port] | None, ...]  # per graph output: (stage, port); None for an input or a literal
    xla: XlaBackend  # the compiler that it was priced for


def assemble(
    placed: PlacedStep,
    shardings: Sequence[StageSharding],
    rules: Mapping[int, Rule],
    resharders: Sequence[Resharder],
    transfer: TransferFn,
    *,
    xla: XlaBackend,
) -> LoweredStep:
    """Local programs of all stages with their ports, and the transfers between stages.

    1. Every value has a layout on the stage that makes or stores it. 2. Where another stage reads it, a transfer is
    planned from that layout to the one wanted there. 3. A sum or a leaf that must first be resharded to be sent
    gets a bridge: a program without equations. 4. Each program is written out with all the ports it must serve.
    5. Of several microbatches the last may be computed in one program with the update, see `last_microbatch`.

    `xla`: the cluster's compiler.
    """
    assembly = _Assembly(placed, shardings, rules, resharders, xla)
    assembly.cross(transfer)
    assembly.leave()
    return assembly.lowered()


class _Assembly:
    """What is known of a lowered step while it is put together."""

    def __init__(
        self, placed: PlacedStep, shardings: Sequence[StageSharding], rules: Mapping[int, Rule],
        resharders: Sequence[Resharder], xla: XlaBackend,
    ) -> None:  # fmt: skip
        self.placed, self.shardings, self.rules, self.resharders, self.xla = placed, shardings, rules, resharders, xla
        self.step = step = placed.step
        self.stored = set(step.accumulate.values())
        self.read = {(value, program.stage) for program in placed.programs for value in program.inputs}
        self.sent_as_held: set[Value] = set()
        self.layouts = [_natural_layouts(placed, s, i, rules) for i, s in enumerate(shardings)]
        self.shapes = [
            {v: s.local_shape(v.shape, sharding.mesh) for v, s in layouts.items()}
            for layouts, sharding in zip(self.layouts, shardings, strict=True)
        ]
        self.traffic = KnownTraffic()
        self.homes = {
            v: Port(v, self.layouts[placed.home[v]].get(v, Sharding.replicated(len(v.shape))))
            for v in step.graph.inputs
        }
        self.crossings: list[Crossing] = []
        self.arrivals: list[dict[Value, Sharding]] = [{} for _ in shardings]
        self.departures: dict[Value, list[Sharding]] = defaultdict(list)  # from the program that makes the value
        self.bridged: dict[tuple[int, Phase], list[tuple[Port, Port]]] = defaultdict(list)
        self.results: list[tuple[int, Port] | None] = []
        self.renewed: dict[Value, list[Sharding]] = defaultdict(list)
        self.replaced: dict[Port, Port] = {}  # the next value of a leaf -> the leaf

    def layout_at_source(self, value: Value, stage: int) -> Sharding:
        """How the stage that makes a value has it."""
        return self.layouts[stage][self.step.kept.get(value, value)]

    def cross(self, transfer: TransferFn) -> None:
        """Steps 2 and 3: what other stages read."""
        placed, step = self.placed, self.step
        for program in placed.programs:
            for value in program.inputs:
                if value is step.microbatch or value in step.feeds or value in step.constants or value in step.copied:
                    continue
                source = placed.stage_of(value)
                if source == program.stage or value in self.arrivals[program.stage]:
                    continue
                held = self.layout_at_source(value, source)
                meshes = [self.shardings[stage].mesh for stage in (source, program.stage)]
                plan = transfer(value, held, meshes[0], self.layouts[program.stage][value], meshes[1])
                self.crossings.append(Crossing(value, source, program.stage, plan))
                self.arrivals[program.stage][value] = plan.received
                if plan.sent == held:
                    self.sent_as_held.add(value)
                    continue
                if value in self.stored or value in step.kept:
                    self.bridged[source, Phase.UPDATE].append((Port(value, held), Port(value, plan.sent)))
                elif value in placed.producer:
                    self.departures[value].append(plan.sent)
                else:
                    self.bridged[source, Phase.PROLOGUE].append((Port(value, held), Port(value, plan.sent)))

    def leave(self) -> None:
        """Where the step's results lie: the next values of leaves as these do."""
        step = self.step
        given = {*step.graph.inputs, *step.constants}
        for k, out in enumerate(step.outputs):
            if isinstance(out, Literal) or out in given:
                self.results.append(None)
                continue
            stage = self.placed.stage_of(out)
            leaf = step.graph.inputs[step.graph.carried[k]] if k in step.graph.carried else None
            sharding = self.homes[leaf].sharding if leaf is not None else self.layout_at_source(out, stage)
            if sharding.partial:
                sharding = Sharding(sharding.dims)
            is_held = out in self.stored or out in step.kept  # at the end of the loop, as it lies there
            if is_held and (held := self.layout_at_source(out, stage)) != sharding:
                self.bridged[stage, Phase.UPDATE].append((Port(out, held), Port(out, sharding)))
            self.renewed[out].append(sharding)
            self.results.append((stage, Port(out, sharding)))
            if leaf is not None:
                self.replaced[Port(out, sharding)] = self.homes[leaf]

    def lowered(self) -> LoweredStep:
        """Step 4: all programs."""
        programs = [self._written(program) for program in self.placed.programs]
        for (stage, phase), pairs in self.bridged.items():
            programs.append(self._bridge(stage, phase, pairs))
        order = list(Phase)
        programs.sort(key=lambda p: (order.index(p.program.phase), bool(p.program.equations), p.program.index))
        number = self.step.num_microbatches
        alone = self.placed.num_stages == 1 and number > 1 and not self.step.keep
        if alone and last_microbatch.pays(programs, self.xla):
            leaving = {result[1] for result in self.results if result is not None}
            programs = last_microbatch.merged(programs, leaving, self.replaced, self.rules)
            number -= 1
        return LoweredStep(
            self.placed, self.rules, tuple(self.shardings), tuple(programs), tuple(self.crossings), number, self.homes,
            tuple(self.results), self.xla,
        )  # fmt: skip

    def _written(self, program: Program) -> LocalProgram:
        step, stage = self.step, program.stage
        layouts = self.layouts[stage]
        traffic = self.traffic.of(program, self.rules, self.xla, self.shapes[stage])
        writer = ProgramWriter(
            program, self.shardings[stage], self.rules, self.resharders[stage], step.batched, traffic, self.xla
        )
        for value in program.inputs:
            writer.arrive(value, self.arrivals[stage].get(value) or self.layout_at_source(value, stage))
        last_use = {v: eqn.id for eqn in program.equations for v in (*eqn.values, *eqn.outputs)}
        due: dict[int, list[Value]] = defaultdict(list)  # partial sums are added as soon as nothing else reads them
        for value in program.outputs:
            if value in step.accumulate:
                due[last_use[value]].append(value)
        for eqn in program.equations:
            writer.compute(eqn)
            for value in due[eqn.id]:
                total = step.accumulate[value]
                writer.accumulate(value, total, layouts[total])
        for value in program.outputs:
            if (value, stage) in self.read or value in step.keep or value in self.sent_as_held:
                writer.leave(value, layouts[value])
            for sharding in (*self.departures[value], *self.renewed[value]):
                writer.leave(value, sharding)
        return writer.finish(self.replaced)

    def _bridge(self, stage: int, phase: Phase, pairs: Sequence[tuple[Port, Port]]) -> LocalProgram:
        """A program that only reshards."""
        inputs = tuple(dict.fromkeys(port.value for port, _ in pairs))
        program = Program(-1 - stage, f"bridge_{phase.value}_{stage}", phase, stage, (), inputs, inputs, frozenset())
        sharding = dataclasses.replace(self.shardings[stage], layouts={})
        writer = ProgramWriter(program, sharding, self.rules, self.resharders[stage], (), {}, self.xla)
        for port, _ in pairs:
            if port.value not in writer.have:
                writer.arrive(port.value, port.sharding)
        for _, port in pairs:
            writer.leave(port.value, port.sharding)
        return writer.finish({})


def keeps_gathered(lowered: LoweredStep, stage: int) -> bool:
    """Whether a stage may keep what the forward pass has gathered until the backward pass, in one program."""
    for local in lowered.programs:
        phases = {eqn.phase for eqn in local.program.equations}
        if local.program.stage == stage and {Phase.FORWARD, Phase.BACKWARD} <= phases:
            batched = lowered.placed.step.batched
            gathers = (op for op in local.ops if isinstance(op, Reshard) and op.value not in batched)
            if any(step.kind == "all_gather" for op in gathers for step in op.steps):
                return True
    return False


def _natural_layouts(
    placed: PlacedStep, sharding: StageSharding, stage: int, rules: Mapping[int, Rule]
) -> dict[Value, Sharding]:
    """How each value lies on a stage: its layout, or as its equation leaves it."""
    layouts: dict[Value, Sharding] = {}
    for program in placed.programs:
        if program.stage != stage:
            continue
        for eqn in program.equations:
            strategy = sharding.strategies[program.index, eqn.id]
            results = zip(eqn.outputs, results_of(rules[eqn.id], strategy, sharding.mesh), strict=True)
            layouts.update((v, lies) for v, lies in results if v not in program.copies or v not in layouts)
        for value in (*program.inputs, *program.outputs):
            layout = sharding.layout(program, value)
            if layout is not None:
                layouts[value] = layout
    for (program_index, value), layout in sharding.layouts.items():
        if program_index is None:
            layouts[value] = layout
    return layouts
