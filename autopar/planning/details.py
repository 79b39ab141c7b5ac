"""Gathers what a report says of a plan and its step.

Everything comes from what the plan itself was priced by: the operations of its programs with their seconds, the
schedule played in simulated time, and what its stages hold when.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar.cost_model.compute import peak_flops
from autopar.cost_model.program import OpCost, local_bytes, op_costs, phases_of
from autopar.cost_model.reshard import SUM_KINDS
from autopar.cost_model.timeline import Timeline, memory_over_time, reading_phase
from autopar.ir.graph import Equation, Graph, Phase, Value
from autopar.ir.local import Accumulate, Compute, LocalOp, LocalProgram, Reread, Reshard
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.plan import Plan
from autopar.ir.sharding import Sharding
from autopar.ir.units import bytes_text
from autopar.ir.why import Why
from autopar.passes.layers import cluster_layers, default_num_layers
from autopar.passes.lower import LoweredStep
from autopar.passes.rules.table import rule_of
from autopar.planning.finisher import Finisher, Restored
from autopar.planning.layering import Layered
from autopar.planning.pricing import Played, crossing_phase, stage_holds
from autopar.planning.why import Solved
from autopar.reporting.record import (
    Copying,
    Details,
    Group,
    Layer,
    LinkUse,
    MemoryCurve,
    Operator,
    ReportRecord,
    Span,
    Split,
)
from autopar.tracing.build import source_of

_MOST_LAYERS = 64
_MOST_OPERATORS = 60  # that are listed
_MOST_ALTERNATIVES = 8  # that are asked for, of each operator
_TITLES = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather",
           "all_to_all": "all-to-all"}  # fmt: skip


def gather_details(
    finisher: Finisher, restored: Restored, most_explained: int, planning_seconds: float | None
) -> Details:
    """What a traced step tells of its plan; the operators that take longest, at most so many, say why they are so."""
    plan, lowered, layered = restored
    prices = finisher.stages.prices
    played = prices.play(lowered, plan.schedule)
    programs = []
    for local, cost in zip(lowered.programs, played.costs, strict=True):
        alone, kind = prices.while_busy(local.mesh), prices.while_busy(local.mesh).kind(local.mesh)
        costs = op_costs(local, kind, alone.resharder(local.mesh)[1])
        runs = played.rows.num_microbatches if local.program.in_loop else 1
        programs.append(_Priced(local, runs, costs, cost.start))
    groups = ReportRecord(plan, None).groups
    parameters = _parameters(layered.analysis.graph, plan)
    layers, layer_of = _layers(layered, lowered, plan)
    rows = _operators(lowered, programs, layer_of)
    solved = Solved(finisher, plan, layered, lowered, tied=True)
    listed = rows[:_MOST_OPERATORS]
    whys: dict[int, Sequence[Why]] = {}
    for k in sorted(range(len(listed)), key=lambda k: not listed[k].is_heavy):
        if len(whys) == most_explained:
            break
        if found := listed[k].why(solved):
            whys[k] = found
    operators = [row.operator(whys.get(k, ())) for k, row in enumerate(listed)]
    model_flops, ideal_seconds = _model_flops(finisher.graph, plan.cluster)
    return Details(
        model_flops, ideal_seconds,
        tuple(_split(group, programs, played.timeline, _beside(group, groups, plan.cluster)) for group in groups),
        _spans(groups, programs, played.timeline),
        tuple(
            Copying(
                t.source, t.target, reading_phase(t.source, t.target, t.phase).value, t.microbatch, t.start, t.end
            )
            for t in played.timeline.transfers
        ),
        tuple(_curve(group, plan, parameters, lowered, played) for group in groups),
        layers, tuple(operators), len(rows[_MOST_OPERATORS:]),
        math.fsum(row.operator(()).seconds for row in rows[_MOST_OPERATORS:]),
        _links(plan, lowered, programs, finisher), parameters, planning_seconds,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class _Priced:
    """A program with the price of each of its operations."""

    local: LocalProgram
    runs: int  # per step
    costs: tuple[OpCost, ...]  # of one run
    launch: float  # seconds to start it

    @property
    def stage(self) -> int:
        return self.local.program.stage

    @property
    def phase(self) -> Phase:
        return self.local.program.phase

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """By operation: that of its equation, or of the equation before it."""
        return phases_of(self.local)

    @property
    def seconds(self) -> float:
        """Of one run."""
        return self.launch + sum(cost.seconds for cost in self.costs)


_ROUNDING = 1e-9  # relative: sums of seconds in another order may differ by this


# Time


def _beside(group: Group, groups: Sequence[Group], cluster: Cluster) -> frozenset[int]:
    """The stages that this group takes turns with: of other virtual devices of its host."""
    host = cluster.host_of(group.devices[0])
    if not cluster.hosts[host].busy:
        return frozenset()
    there = (other.stages for other in groups if other is not group and cluster.host_of(other.devices[0]) == host)
    return frozenset(stage for stages in there for stage in stages)


def _split(group: Group, programs: Sequence[_Priced], timeline: Timeline, beside: Collection[int]) -> Split:
    compute = collectives = resharding = launches = 0.0
    for program in programs:
        if program.stage not in group.stages:
            continue
        launches += program.runs * program.launch
        for op, cost in zip(program.local.ops, program.costs, strict=True):
            compute += program.runs * cost.compute
            if isinstance(op, Reshard) and not any(step.kind in SUM_KINDS for step in op.steps):
                resharding += program.runs * cost.communication
            else:
                collectives += program.runs * cost.communication
    idle = timeline.makespan - compute - collectives - resharding - launches
    if idle < _ROUNDING * timeline.makespan:
        idle = 0.0
    waiting = min(idle, _waiting(group, timeline, beside))
    return Split(group.stages, group.devices, compute, collectives, resharding, launches, waiting, idle - waiting)


def _waiting(group: Group, timeline: Timeline, beside: Collection[int]) -> float:
    """Seconds in which a group runs nothing while something is sent to it, or while it is the turn of others."""
    busy = _union((e.start, e.end) for e in timeline.events if e.stage in group.stages)
    sent = ((t.start, t.end) for t in timeline.transfers if t.target in group.stages)
    turns = ((e.start, e.end) for e in timeline.events if e.stage in beside)
    both = _union((*busy, *sent, *turns))
    return sum(b - a for a, b in both) - sum(b - a for a, b in busy)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _spans(groups: Sequence[Group], programs: Sequence[_Priced], timeline: Timeline) -> tuple[Span, ...]:
    """The programs that run, those of several phases divided by what their operations take."""
    group_of = {stage: k for k, group in enumerate(groups) for stage in group.stages}
    shares: dict[tuple[int, Phase], dict[Phase, float]] = defaultdict(lambda: defaultdict(float))
    for program in programs:
        inside = shares[program.stage, program.phase]
        inside[program.phases[0] if program.phases else program.phase] += program.launch
        for phase, cost in zip(program.phases, program.costs, strict=True):
            inside[phase] += cost.seconds
    found = []
    for event in timeline.events:
        if event.end == event.start:
            continue
        inside = shares[event.stage, event.phase]
        total = sum(inside.values())
        at = event.start
        parts = [(phase, inside[phase]) for phase in Phase if inside.get(phase)]
        for k, (phase, seconds) in enumerate(parts):
            end = event.end if k == len(parts) - 1 else at + (event.end - event.start) * seconds / total
            found.append(Span(group_of[event.stage], event.stage, phase.value, event.microbatch, at, end))
            at = end
    return tuple(found)


def _model_flops(graph: Graph, cluster: Cluster) -> tuple[float, float]:
    """FLOPs of a step's matrix products, without those computed again, and the seconds that all devices at their peak
    would take for them."""
    flops: dict[str, float] = defaultdict(float)
    for eqn in graph.equations:
        rule = rule_of(eqn)
        if eqn.again:
            continue
        if rule.kernels:
            for kernel in rule.kernels:
                if kernel.sides and not kernel.again:
                    flops[kernel.dtype] += kernel.flops
        elif rule.products:
            flops[eqn.kernel_dtype(True)] += rule.products
    peaks = {
        dtype: sum(host.num_devices * peak_flops(host.kind, dtype, matmul=True) for host in cluster.hosts)
        for dtype in flops
    }
    return sum(flops.values()), sum(number / peaks[dtype] for dtype, number in flops.items())


# Memory


def _parameters(graph: Graph, plan: Plan) -> tuple[bool, ...]:
    """By leaf of the plan: whether it is state that the forward pass reads."""
    needed: set[Value] = set()
    for eqn in reversed(graph.equations):
        if eqn.phase is Phase.FORWARD or any(v in needed for v in eqn.outputs):
            needed.update(eqn.values)
    return tuple(leaf.state and v in needed for leaf, v in zip(plan.leaves, graph.inputs, strict=True))


def _curve(
    group: Group, plan: Plan, parameters: Sequence[bool], lowered: LoweredStep, played: Played
) -> MemoryCurve:  # fmt: skip
    state = gradients = 0
    moments = []
    for stage in group.stages:
        mine = [
            (local, cost)
            for local, cost in zip(lowered.programs, played.costs, strict=True)
            if local.program.stage == stage
        ]
        holds = stage_holds(lowered, stage, mine, played.rows.held(stage))
        state += holds.state
        gradients += holds.gradients
        moments.append(memory_over_time(played.timeline, stage, holds))
    times = sorted({moment.seconds for each in moments for moment in each})
    activations, temporaries = ([0] * len(times) for _ in range(2))
    for each in moments:
        starts = [moment.seconds for moment in each]
        for k, time in enumerate(times):
            now = each[bisect.bisect_right(starts, time) - 1]
            activations[k] += now.activations
            temporaries[k] += now.temporaries
    of_parameters = sum(
        math.prod(leaf.sharding.local_shape(leaf.shape, plan.stages[leaf.stage].mesh)) * value.itemsize
        for leaf, value, is_parameter in zip(plan.leaves, lowered.placed.step.graph.inputs, parameters, strict=True)
        if is_parameter and leaf.stage in group.stages
    )
    return MemoryCurve(
        group.stages, {"parameters": of_parameters, "other state": state - of_parameters}, gradients, tuple(times),
        tuple(activations), tuple(temporaries), group.capacity,
    )  # fmt: skip


# Layers


def _layers(layered: Layered, lowered: LoweredStep, plan: Plan) -> tuple[tuple[Layer, ...], Mapping[int, int]]:
    """The layers of the forward pass, equal ones in a row as one, and the layer of each equation of a step by id.

    Layers are found as for the search, but as many as the model has blocks, and cut where stages end.
    """
    step, rules, m = layered.step, layered.rules, layered.step.num_microbatches
    placed_at = {e.id: (p.index, p.stage) for p in lowered.placed.programs for e in p.equations}
    forward = [e for e in step.forward if e.id in placed_at]
    if not forward:
        return (), {}

    def work(eqn: Equation) -> float:
        return rules[eqn.id].products

    number = default_num_layers(forward, work, _MOST_LAYERS)
    block = cluster_layers(forward, number, work, lambda v: v in step.batched)
    members: dict[tuple[int, int], list[Equation]] = defaultdict(list)
    for eqn, k in zip(forward, block, strict=True):
        members[placed_at[eqn.id][1], k].append(eqn)
    runs: list[tuple[Hashable, list[list[Equation]]]] = []
    for (stage, _), equations in members.items():
        strategies = lowered.shardings[stage].strategies
        key = stage, tuple((e.signature, strategies[placed_at[e.id][0], e.id]) for e in equations)
        if runs and runs[-1][0] == key:
            runs[-1][1].append(equations)
        else:
            runs.append((key, [equations]))
    layer_of = {e.id: k for k, (_, alike) in enumerate(runs) for equations in alike for e in equations}
    roots = _roots(layered)
    owner: dict[Value, int] = {}  # the layer that reads a parameter first
    made = {v: layer_of[e.id] for e in forward for v in e.outputs}
    layers = []
    read: list[Counter[tuple[int, bool]]] = [Counter() for _ in runs]
    given: list[dict[Value, None]] = [{} for _ in runs]
    of_layer = [0] * len(runs)
    for k, (_, alike) in enumerate(runs):
        seen: set[Value] = set()
        for eqn in itertools.chain.from_iterable(alike):
            for v in eqn.values:
                for leaf in roots.get(v, ()):
                    if leaf not in owner:
                        owner[leaf] = k
                        of_layer[k] += leaf.nbytes
                    elif owner[leaf] != k and leaf not in seen:
                        read[k][owner[leaf], True] += leaf.nbytes
                    seen.add(leaf)
                if made.get(v, k) != k and v not in seen:
                    read[k][made[v], False] += v.nbytes * m
                    given[made[v]][v] = None
                    seen.add(v)
    for k, (_, alike) in enumerate(runs):
        first = alike[0]
        layers.append(
            Layer(
                _name_of(first, work), placed_at[first[0].id][1], len(alike), len(first), of_layer[k] // len(alike),
                m * sum(map(work, first)), m * sum(v.nbytes for v in given[k]),
                tuple((source, nbytes, shared) for (source, shared), nbytes in sorted(read[k].items())),
            )
        )  # fmt: skip
    # What belongs to a layer in other phases: what reads its values or parameters, and what follows from that.
    forward_at = {**made, **owner}
    follows: dict[Value, int] = {}
    for eqn in step.equations:
        if eqn.id in layer_of or eqn.id in step.replicable:
            continue
        near = [forward_at[v] for v in eqn.values if v in forward_at]
        near = near or [forward_at[leaf] for v in eqn.values for leaf in roots.get(v, ()) if leaf in forward_at]
        near = near or [follows[v] for v in eqn.values if v in follows]
        if near:
            layer_of[eqn.id] = max(near)
            follows.update((v, max(near)) for v in eqn.outputs)
    return tuple(layers), layer_of


def _roots(layered: Layered) -> Mapping[Value, frozenset[Value]]:
    """The state that a value is, or that it is made of by cheap equations which are copied to wherever it is used."""
    step = layered.step
    state = {step.graph.inputs[i] for i in step.graph.carried.values()}
    found: dict[Value, frozenset[Value]] = {v: frozenset({v}) for v in state}
    for eqn in step.equations:
        if eqn.id in step.replicable or not eqn.phase.in_loop:
            roots = frozenset().union(*(found[v] for v in eqn.values if v in found))
            if roots:
                found.update((v, roots) for v in eqn.outputs if v not in found)
    return found


_FUNCTION = re.compile(r"\(([^()]*)\)")
_MOST_NAMES = 3  # of functions, for a layer
_LEAST_SHARE = 0.02  # of its work


def _name_of(equations: Sequence[Equation], work: Callable[[Equation], float]) -> str:
    """The functions of the user's code that do most of the work, in their order, or else its operators; and loops."""
    done: dict[str, float] = defaultdict(float)
    loops = []
    for eqn in equations:
        sources = [*_sources_inside(eqn.params)] or [eqn.source]
        for source in sources:
            named = _FUNCTION.findall(source)
            name = named[0].split(".")[-1] if named else eqn.primitive.name
            done[name] += (work(eqn) or _LIGHT) / len(sources)
        if eqn.primitive.name == "scan" and work(eqn) > _LEAST_SHARE * sum(map(work, equations)):
            loops.append(f"scan of {eqn.params['length']} rounds")
    heaviest = sorted(done, key=lambda name: -done[name])[:_MOST_NAMES]
    total = sum(done.values())
    names = ", ".join(name for name in done if name in heaviest and done[name] > _LEAST_SHARE * total)
    return f"{names} ({', '.join(loops)})" if loops else names


_LIGHT = 1e-9  # the work of an equation that does none
_HEAVY_PRIMITIVES = ("dot_general", "conv_general_dilated")


def _sources_inside(params: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the products inside the body of an equation."""
    for value in params.values():
        jaxpr = getattr(value, "jaxpr", value)
        for eqn in getattr(jaxpr, "eqns", ()):
            if eqn.primitive.name in _HEAVY_PRIMITIVES:
                yield source_of(eqn)
            yield from _sources_inside(eqn.params)


# Operators


@dataclasses.dataclass(eq=False)
class _Row:
    """Equal operators."""

    name: str
    source: str
    phase: Phase
    mesh: Mesh
    operands: tuple[str, ...]
    results: tuple[str, ...]
    collectives: tuple[str, ...]
    runs: int
    example: tuple[int, int, Equation] | None  # stage, program, equation
    is_heavy: bool  # a product, a convolution, or an equation with a body
    count: int = 0
    layers: set[int] = dataclasses.field(default_factory=set)
    compute: dict[int, float] = dataclasses.field(default_factory=lambda: defaultdict(float))  # by stage
    communication: dict[int, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        return max(self.compute[stage] + self.communication[stage] for stage in self.compute)

    def operator(self, whys: Sequence[Why]) -> Operator:
        busiest = max(self.compute, key=lambda stage: self.compute[stage] + self.communication[stage])
        return Operator(
            self.name, self.source, self.phase.value, tuple(sorted(self.compute)), tuple(sorted(self.layers)),
            mesh_text(self.mesh), self.count, self.runs, self.operands, self.results, self.compute[busiest],
            self.communication[busiest], self.collectives, tuple(whys),
        )  # fmt: skip

    def why(self, solved: Solved) -> Sequence[Why]:
        if self.example is None:
            return ()
        return solved.why(*self.example, _MOST_ALTERNATIVES)


def _operators(lowered: LoweredStep, programs: Sequence[_Priced], layer_of: Mapping[int, int]) -> list[_Row]:
    """All operators, equal ones as one, those that take longest first."""
    step = lowered.placed.step
    maker = {v: e for e in step.equations for v in e.outputs}
    paths = dict(zip(step.graph.inputs, step.graph.input_paths, strict=True))
    found: dict[Hashable, _Row] = {}
    for program in programs:
        mesh, where = program.local.mesh, (program.stage, program.local.program.index)
        names = {op.copy: op.value for op in program.local.ops if isinstance(op, Reread)}
        for op, cost, phase in zip(program.local.ops, program.costs, program.phases, strict=True):
            if isinstance(op, Reread):
                continue
            value = None if isinstance(op, Compute) else names.get(_value(op), _value(op))
            eqn = op.equation if isinstance(op, Compute) else maker.get(value) if value is not None else None
            source = (
                eqn.source if eqn is not None else _INDEX.sub("*", paths.get(value, "")) if value is not None else ""
            )
            key: Hashable
            if isinstance(op, Compute):
                # What is read anew is the same operator.
                key = op.equation.signature, op.operands, op.results
            elif isinstance(op, Reshard):
                key = op.value.shape, op.value.dtype, op.source, op.target
            else:
                key = op.addend.shape, op.addend.dtype, op.sharding
            key = key, type(op), source, phase, mesh.shape, mesh.axes, program.runs
            if key not in found:
                found[key] = _row(op, cost, source, phase, program, where, eqn)
            row = found[key]
            row.count += 1
            row.compute[program.stage] += program.runs * cost.compute
            row.communication[program.stage] += program.runs * cost.communication
            if eqn is not None and eqn.id in layer_of:
                row.layers.add(layer_of[eqn.id])
    return sorted(found.values(), key=lambda row: -row.seconds)


_INDEX = re.compile(r"(?<=\[)\d+(?=\])|(?<=_)\d+")


def _value(op: LocalOp) -> Value:
    assert isinstance(op, Reshard | Accumulate), "all others are equations"
    return op.value if isinstance(op, Reshard) else op.addend


def _row(
    op: LocalOp, cost: OpCost, source: str, phase: Phase, program: _Priced, where: tuple[int, int],
    eqn: Equation | None,
) -> _Row:  # fmt: skip
    sent = Counter((c.kind, c.axes, c.payload) for c in cost.collectives)
    collectives = tuple(
        f"{f'{number} × ' if number > 1 else ''}{_TITLES.get(kind, kind)} over {'·'.join(axes)}, {bytes_text(payload)}"
        for (kind, axes, payload), number in sent.items()
    )
    if isinstance(op, Compute):
        pairs = zip(op.equation.inputs, op.operands, strict=True)
        operands = [_array(v, s) for v, s in pairs if isinstance(v, Value) and s is not None]
        results = [_array(v, s) for v, s in zip(op.equation.outputs, op.results, strict=True)]
        name, example = op.equation.primitive.name, (*where, op.equation)
    elif isinstance(op, Reshard):
        operands, results = [_array(op.value, op.source)], [_array(op.value, op.target)]
        made = f" of {eqn.primitive.name}" if eqn is not None else ""
        name, example = f"{_TITLES.get(op.steps[0].kind, op.steps[0].kind)}{made}", None
    else:
        assert isinstance(op, Accumulate)
        operands, results = [_array(op.addend, op.sharding)], [_array(op.total, op.sharding)]
        name, example = f"add to the sum{f' of {eqn.primitive.name}' if eqn is not None else ''}", None
    is_heavy = isinstance(op, Compute) and (op.product is not None or bool(op.kernels))
    return _Row(
        name, source, phase, program.local.mesh, tuple(operands), tuple(results), collectives, program.runs, example,
        is_heavy,
    )  # fmt: skip


def _array(value: Value, sharding: Sharding) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}] {sharding}"


def mesh_text(mesh: Mesh) -> str:
    """ "x=2 y=4"."""
    return " ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))


# Links


def _links(plan: Plan, lowered: LoweredStep, programs: Sequence[_Priced], finisher: Finisher) -> tuple[LinkUse, ...]:
    """Collectives and transfers by kind, link, axes, stage and phase, the longest first."""
    prices = finisher.stages.prices
    found: dict[tuple[str, str, str, int, str], tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))

    def add(key: tuple[str, str, str, int, str], number: int, nbytes: int, seconds: float) -> None:
        before = found[key]
        found[key] = before[0] + number, before[1] + number * nbytes, before[2] + number * seconds

    for program in programs:
        mesh = program.local.mesh
        price = prices.resharder(mesh)[1]
        for cost, phase in zip(program.costs, program.phases, strict=True):
            for c in cost.collectives:
                link = plan.cluster.link_among(mesh.group(c.axes)).name
                key = _TITLES.get(c.kind, c.kind), link, "·".join(c.axes), program.stage, phase.value
                add(key, program.runs, c.payload, price(c.kind, c.axes, c.payload))
    for crossing in lowered.crossings:
        phase = crossing_phase(crossing.value, lowered.placed)
        meshes = [lowered.shardings[stage].mesh for stage in (crossing.source, crossing.target)]
        link = plan.cluster.link_among([device for mesh in meshes for device in mesh.devices]).name
        key = "transfer", link, f"stage {crossing.source} → {crossing.target}", crossing.source, phase.value
        runs = plan.num_microbatches if phase.in_loop else 1
        add(key, runs, local_bytes(crossing.value, crossing.plan.received, meshes[1]), crossing.plan.seconds)
    uses = [LinkUse(*key, *numbers) for key, numbers in found.items()]
    return tuple(sorted(uses, key=lambda use: -use.seconds))
