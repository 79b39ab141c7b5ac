"""Gathers what a report says of a plan and its step.

Everything comes from what the plan itself was priced by: the operations of its programs with their seconds, the
schedule played in simulated time, and what its stages hold when.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar.cost_model.compute import peak_flops
from autopar.cost_model.program_cost import KindWork, op_costs, work_by_kind
from autopar.cost_model.reshard import SUM_KINDS
from autopar.cost_model.timeline import Timeline, memory_over_time, reading_phase
from autopar.ir.graph import Equation, Graph, Phase, Value
from autopar.ir.local import OperatorKind, Reshard
from autopar.ir.mesh import Cluster
from autopar.ir.plan import Plan
from autopar.ir.why import Why
from autopar.passes.layers import cluster_layers, default_num_layers
from autopar.passes.lower import LoweredStep
from autopar.passes.rules.table import rule_of
from autopar.planning.alternatives import Solved
from autopar.planning.finisher import Finisher, Restored
from autopar.planning.layering import Layered
from autopar.planning.operators import PricedProgram, links_used, rows_of_operators
from autopar.planning.pricing import Played, stage_holds
from autopar.reporting import profile
from autopar.reporting.record import (
    Copying,
    Details,
    Group,
    Layer,
    MemoryCurve,
    ReportRecord,
    TimelineSpan,
    TimeSplit,
)
from autopar.tracing.build import source_of

_MOST_LAYERS = 64
_MOST_OPERATORS = 60  # that are listed


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
        programs.append(PricedProgram(local, runs, costs, cost.start, cost.hidden))
    groups = ReportRecord(plan, None).groups
    parameters = _parameters(layered.analysis.graph, plan)
    layers, layer_of = _layers(layered, lowered)
    rows = rows_of_operators(lowered, programs, layer_of)
    solved = Solved(finisher, plan, layered, lowered, tied=True)
    listed = rows[:_MOST_OPERATORS]
    whys: dict[int, Sequence[Why]] = {}
    for k in sorted(range(len(listed)), key=lambda k: not listed[k].is_heavy):
        if len(whys) == most_explained:
            break
        if why := listed[k].why(solved):
            whys[k] = why
    operators = [row.operator(whys.get(k, ())) for k, row in enumerate(listed)]
    own_flops, ideal_seconds = model_flops(finisher.graph, plan.cluster)
    return Details(
        own_flops, ideal_seconds,
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
        links_used(plan, lowered, programs, finisher), parameters, planning_seconds,
    )  # fmt: skip


def work_of(finisher: Finisher, lowered: LoweredStep) -> dict[OperatorKind, KindWork]:
    """What a step's operators do, by their kinds, on all devices together."""
    prices = finisher.stages.prices
    total: dict[OperatorKind, KindWork] = defaultdict(KindWork)
    for local in lowered.programs:
        alone = prices.while_busy(local.mesh)
        runs = local.mesh.size * (lowered.loop_microbatches if local.program.in_loop else 1)
        for kind, work in work_by_kind(local, alone.kind(local.mesh), alone.resharder(local.mesh)[1]).items():
            total[kind] = total[kind].plus(runs * work.seconds, runs * work.flops, runs * work.nbytes)
    return dict(total)


_ROUNDING = 1e-9  # relative: sums of seconds in another order may differ by this


# Time


def _beside(group: Group, groups: Sequence[Group], cluster: Cluster) -> frozenset[int]:
    """The stages that this group takes turns with: of other virtual devices of its host."""
    host = cluster.host_of(group.devices[0])
    if not cluster.hosts[host].busy:
        return frozenset()
    there = (other.stages for other in groups if other is not group and cluster.host_of(other.devices[0]) == host)
    return frozenset(stage for stages in there for stage in stages)


def _split(group: Group, programs: Sequence[PricedProgram], timeline: Timeline, beside: Collection[int]) -> TimeSplit:
    compute = collectives = resharding = launches = hidden = 0.0
    for program in programs:
        if program.stage not in group.stages:
            continue
        launches += program.runs * program.launch
        hidden += program.runs * program.hidden
        for op, cost in zip(program.local.ops, program.costs, strict=True):
            compute += program.runs * cost.compute
            exposed = program.runs * program.exposed * cost.communication
            if isinstance(op, Reshard) and not any(step.kind in SUM_KINDS for step in op.steps):
                resharding += exposed
            else:
                collectives += exposed
    idle = timeline.makespan - compute - collectives - resharding - launches
    if idle < _ROUNDING * timeline.makespan:
        idle = 0.0
    waiting = min(idle, _waiting(group, timeline, beside))
    return TimeSplit(
        group.stages, group.devices, compute, collectives, resharding, launches, waiting, idle - waiting, hidden
    )


def _waiting(group: Group, timeline: Timeline, beside: Collection[int]) -> float:
    """Seconds in which a group runs nothing while something is sent to it, or while it is the turn of others."""
    busy = _union((e.start, e.end) for e in timeline.events if e.stage in group.stages)
    sent = ((t.start, t.end) for t in timeline.transfers if t.target in group.stages)
    turns = ((e.start, e.end) for e in timeline.events if e.stage in beside)
    both = _union((*busy, *sent, *turns))
    return sum(b - a for a, b in both) - sum(b - a for a, b in busy)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _spans(groups: Sequence[Group], programs: Sequence[PricedProgram], timeline: Timeline) -> tuple[TimelineSpan, ...]:
    """The programs that run, those of several phases divided by what their operations take."""
    group_of = {stage: k for k, group in enumerate(groups) for stage in group.stages}
    shares: dict[tuple[int, Phase], dict[Phase, float]] = defaultdict(lambda: defaultdict(float))
    for program in programs:
        inside = shares[program.stage, program.phase]
        inside[program.phases[0] if program.phases else program.phase] += program.launch
        for phase, cost in zip(program.phases, program.costs, strict=True):
            inside[phase] += cost.compute + program.exposed * cost.communication
    spans = []
    for event in timeline.events:
        if event.end == event.start:
            continue
        inside = shares[event.stage, event.phase]
        total = sum(inside.values())
        at = event.start
        parts = [(phase, inside[phase]) for phase in Phase if inside.get(phase)]
        for k, (phase, seconds) in enumerate(parts):
            end = event.end if k == len(parts) - 1 else at + (event.end - event.start) * seconds / total
            spans.append(TimelineSpan(group_of[event.stage], event.stage, phase.value, event.microbatch, at, end))
            at = end
    return tuple(spans)


def played_timeline(finisher: Finisher, restored: Restored) -> profile.Timeline:
    """A step by the plan, program by program."""
    plan, lowered, _ = restored
    timeline = finisher.stages.prices.play(lowered, plan.schedule).timeline
    of_stage = {stage: k for k, group in enumerate(ReportRecord(plan, None).groups) for stage in group.stages}
    programs = (
        TimelineSpan(of_stage[e.stage], e.stage, e.phase.value, e.microbatch, e.start, e.end)
        for e in timeline.events
        if e.end > e.start
    )
    copies = (Copying(t.source, t.target, "", t.microbatch, t.start, t.end) for t in timeline.transfers)
    return profile.Timeline(plan.step_time, timeline.num_groups, tuple(programs), tuple(copies))


def model_flops(graph: Graph, cluster: Cluster) -> tuple[float, float]:
    """FLOPs of a step's matrix products, without those computed again, and the seconds that all devices at their peak
    would take for them."""
    flops: dict[str, float] = defaultdict(float)
    for eqn in graph.equations:
        rule = rule_of(eqn)
        if eqn.rematerialized:
            continue
        if rule.kernels:
            for kernel in rule.kernels:
                if kernel.sides and not kernel.rematerialized:
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


def _layers(layered: Layered, lowered: LoweredStep) -> tuple[tuple[Layer, ...], Mapping[int, int]]:
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
    roots_of: dict[Value, frozenset[Value]] = {v: frozenset({v}) for v in state}
    for eqn in step.equations:
        if eqn.id in step.replicable or not eqn.phase.in_loop:
            roots = frozenset().union(*(roots_of[v] for v in eqn.values if v in roots_of))
            if roots:
                roots_of.update((v, roots) for v in eqn.outputs if v not in roots_of)
    return roots_of


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
