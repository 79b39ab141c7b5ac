"""What the rounds of a loop hold in memory, and the kernels that they run."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autopar.cost_model.fusion import memory_traffic, moved_values, stored
from autopar.cost_model.order import ProgramKernels, held_by, live
from autopar.ir.graph import BatchDim, Equation, Operand, Value
from autopar.ir.local import Traffic
from autopar.ir.rule import (
    BodyKernel,
    Gathering,
    LiveSet,
    Sides,
    Unit,
)
from autopar.ir.strategy import Gathered
from autopar.passes.rules.plain_attention import plain_attention
from autopar.passes.rules.propagation import PARTIAL, Body, BodyCut

_STRETCHES = 6  # of a body, for each of which the most live bytes are looked for


@dataclasses.dataclass(frozen=True)
class LoopLayout:
    """Which inputs and outputs of the body the operands and results of the equation are."""

    inputs: Sequence[int | None]  # None: a scalar beside the body
    outputs: Sequence[int]
    # Of the body's inputs those with a leading axis of rounds, each with its way to where it is gathered.
    stacked_in: Mapping[int, tuple[Value, ...]] = dataclasses.field(default_factory=dict)
    stacked_out: Sequence[int] = ()
    length: int = 1


def live_sets_of(
    body: Body, numbered: Numbered, layout: LoopLayout, gatherings: Sequence[Gathering]
) -> tuple[LiveSet, ...]:  # fmt: skip
    """When most bytes of what a round makes are live, in whole sizes, once for each of a few stretches of it."""
    in_pieces = {
        v: Gathered(k)
        for k, way in enumerate(gatherings)
        for s in way.operands
        for v in layout.stacked_in[s.position][:-1]
    }
    # To the next round, in an order that is the same in each process.
    kept = dict.fromkeys(v for o in body.carried if isinstance(v := body.outputs[o], Value))
    slices = [body.inputs[i] for i in layout.stacked_in]
    made = {v for o in layout.stacked_out if isinstance(v := body.outputs[o], Value)}
    traffic = memory_traffic(body.equations, body.rules, body.inputs, made.union(kept))
    in_memory = stored(body.equations, body.rules, (), made.union(kept))
    told = ProgramKernels()
    inner: dict[Value, list[LiveSet]] = {}  # by the first value that the equation makes

    for v in slices:  # taken from stacks where they are read, and copied if a library's kernel reads them
        if v in in_memory:
            told.run((), [(v, v.nbytes)])
    for e in body.equations:
        rule, moved = body.rules[e.id], traffic[e.id]
        aliases = {k: None if i is None else e.inputs[i] for k, i in moved.aliases}
        if rule.separable:
            told.fence(zip(e.outputs, e.inputs, strict=True))
            continue
        written = [v for v, own in zip(e.outputs, moved.writes, strict=True) if own]
        if e.generates and not rule.kernels:
            written = []
        taken = told.buffers(e.values)
        if written:
            if rule.live_sets:
                splits = {f: cut.splits[e.id].factor for f, cut in numbered if e.id in cut.splits}
                inner[written[0]] = [
                    tuple((nbytes, outer_factors(held, splits)) for nbytes, held in live_set)
                    for live_set in rule.live_sets
                ]
            held = max((sum(nbytes for nbytes, _ in live_set) for live_set in rule.live_sets), default=0)
            makes = [(v, v.nbytes) for v in written]
            if rule.kernels:
                told.run_rounds(e.values, makes, aliases, held)
            else:
                taken_over = [v for v, shared in zip(e.inputs, moved.in_place, strict=True) if shared]
                told.run(
                    e.values, makes, aliases={e.outputs[k]: place for k, place in aliases.items()}, in_place=taken_over,
                    part_of=None if aliases else moved.kernel,
                )  # fmt: skip
        for v in e.outputs:
            if v not in written:
                told.fuse(v, taken)
    for v in kept:
        told.leave(v)
    schedule = live(told)
    totals, count = held_by(schedule.ranges, told.sizes, schedule.order), len(schedule.order)
    live_sets: list[LiveSet] = []
    for k in range(_STRETCHES):
        stretch = range(k * count // _STRETCHES, (k + 1) * count // _STRETCHES)
        if not stretch:
            continue
        at = max(stretch, key=lambda p: totals[p])
        held_here: dict[frozenset[int | Gathered], int] = defaultdict(int)
        for buffer, (first, last) in schedule.ranges.items():
            if first <= at <= last and isinstance(held_value := told.values[buffer], Value):
                piece = [in_pieces[held_value]] if held_value in in_pieces else []
                held_here[_held(body, held_value, numbered).union(piece)] += held_value.nbytes
        now = tuple((nbytes, factors) for factors, nbytes in held_here.items())
        first_made: Any = told.values[schedule.order[at].makes[0]]
        live_sets += [(*now, *live_set) for live_set in inner.get(first_made, [()])]
    return tuple(live_sets)


# The cuts of a body, each with its factor in the loop's rule, or with the scattering between whose sums it is.
Numbered = Sequence[tuple[int | Gathered, BodyCut]]


def cut_by(v: Value, numbered: Numbered) -> frozenset[int | Gathered]:
    """The factors that cut a value of the body, and the scatterings."""
    return frozenset(f for f, cut in numbered if isinstance(cut.states.get(v), BatchDim))


def _for(e: Equation, numbered: Numbered) -> Numbered:
    """Without the scatterings that gather what the equation reads."""
    return [(f, cut) for f, cut in numbered if isinstance(f, int) or e.id in cut.splits or e.id in cut.passing]


def _held(body: Body, v: Value, numbered: Numbered) -> frozenset[int | Gathered]:
    """What cuts a value in memory, where scatterings that gather it do not."""
    readers = [e for e, _ in body.readers.get(v, ())]
    return cut_by(v, [(f, cut) for f, cut in numbered if all((f, cut) in _for(e, [(f, cut)]) for e in readers)])


def outer_factors(held: Collection[int | Gathered], splits: Mapping[Any, int]) -> frozenset[Any]:
    """The outer factors, each with the inner one that it splits, of a body in a body."""
    return frozenset(f for f, inner in splits.items() if inner in held)


def _outer_sides(sides: Sides | None, splits: Mapping[Any, int]) -> Sides | None:
    if sides is None:
        return None
    batch, rows, columns, depth = ((size, outer_factors(held, splits)) for size, held in sides.each)
    return sides._replace(batch=batch, rows=rows, columns=columns, depth=depth)


PlacedKernel = tuple[BodyKernel, int | Value | None]  # of which equation it is, or which slice of a stack it copies


def unit_of(kernels: Sequence[BodyKernel]) -> Unit:
    """What computes them: matrix units where any is a product."""
    return "matmul" if any(kernel.sides for kernel in kernels) else "vector"


def kernels_of_rounds(
    body: Body, numbered: Numbered, layout: LoopLayout, times: float,
    gatherings: Sequence[Gathering] = (),
) -> list[PlacedKernel]:  # fmt: skip
    """Every equation of the body, with what goes through memory; fused ones of a kind as one, which is nowhere."""
    traffic = body.traffic
    plain = plain_attention(body.equations, body.rules)
    kernels: list[PlacedKernel] = []
    fused: dict[tuple[frozenset[int | Gathered], str], float] = defaultdict(float)
    ways = [(Gathered(k), layout.stacked_in[s.position]) for k, way in enumerate(gatherings) for s in way.operands]
    # What is made before it is gathered, and what is made as a piece of that.
    before: dict[Operand, Gathered] = {v: gathering for gathering, path in ways for v in path[:-1]}
    gathered: dict[Operand, Gathered] = {path[-1]: gathering for gathering, path in ways}
    for e in body.equations:
        rule = body.rules[e.id]
        splits = {f: cut.splits[e.id].factor for f, cut in numbered if e.id in cut.splits}
        if rule.kernels:
            kernels += [(_renamed(kernel, splits, times), e.id) for kernel in rule.kernels]
            continue
        reading = _for(e, numbered)
        moved = tuple(
            (times * nbytes, _cut_or_kept(v, reading, before if v not in e.outputs else {**before, **gathered}))
            for v, nbytes in moved_values(e, traffic[e.id])
        )
        sides = _outer_sides(rule.sides, splits)
        dtype, flops, held = e.kernel_dtype(sides is not None), times * body.flops(e), frozenset(splits)
        if moved or sides:
            launches = times * traffic[e.id].launches
            kernel = BodyKernel(
                flops,
                held,
                moved,
                sides,
                dtype,
                launches,
                e.rematerialized,
                rule.pooling,
                times,
                e.id in plain,
                _widened(e, traffic[e.id], reading, times),
                sides is not None and _widens(e),
            )
            kernels.append((kernel, e.id))
        else:
            fused[held, dtype] += flops
    kept = {v: Gathered(k) for k, way in enumerate(gatherings) for v in _kept_in_pieces(body, layout, way)}
    for v, often, count in _stacked(body, layout):
        sliced = ((times * often * v.nbytes, _cut_or_kept(v, numbered, kept)),)
        kernels.append((BodyKernel(0.0, frozenset(), sliced, None, str(v.dtype), times * count), v))
    together = (BodyKernel(flops, held, (), None, dtype, 0.0) for (held, dtype), flops in fused.items())
    return [*kernels, *((kernel, None) for kernel in together)]


def _widens(product: Equation) -> bool:
    return product.outputs[0].itemsize > 2 and min(v.itemsize for v in product.values) <= 2


def _widened(
    e: Equation, traffic: Traffic, numbered: Numbered, times: float
) -> tuple[tuple[float, frozenset[int | Gathered], frozenset[int | Gathered]], ...]:
    """See `BodyKernel`: of what it makes, and of what it reads before that is summed."""
    widened = []
    for v, nbytes in moved_values(e, traffic):
        made = v in e.outputs
        partial = frozenset(f for f, cut in numbered if cut.states.get(v) is PARTIAL and (made or e.id in cut.passing))
        if partial and v.sum_nbytes > v.nbytes:
            widened.append((times * nbytes * (v.sum_nbytes / v.nbytes - 1), cut_by(v, numbered), partial))
    return tuple(widened)


def _cut_or_kept(
    v: Value, numbered: Numbered, kept: Mapping[Operand, Gathered]
) -> frozenset[int | Gathered]:  # fmt: skip
    return cut_by(v, numbered).union([kept[v]] if v in kept else [])


def _kept_in_pieces(body: Body, layout: LoopLayout, way: Gathering) -> list[Operand]:
    """The slices of stacks that a gathering keeps in pieces."""
    taken = [body.inputs[s.position] for s in way.operands]
    return [*taken, *(body.outputs[layout.outputs[s.position]] for s in way.results)]


def _stacked(body: Body, layout: LoopLayout) -> list[tuple[Value, int, int]]:
    """What a round copies from stacks and to them: how often it is read or written for that, by how many kernels.

    What products read is copied from a stack before, and what is read in the round to a stack afterwards. A stack is
    filled with zeros before all rounds.
    """
    outputs = [v for o in layout.stacked_out if isinstance(v := body.outputs[o], Value)]
    in_memory = stored(body.equations, body.rules, (), outputs)
    read = {v for e in body.equations for v in e.values}.union(v for v in body.inputs if isinstance(v, Value))
    taken = [(v, 2, 1) for i in layout.stacked_in if (v := body.inputs[i]) in in_memory]
    return taken + [(v, 3, 1) if v in read else (v, 1, 0) for v in outputs]


def _renamed(kernel: BodyKernel, splits: Mapping[Any, int], times: float) -> BodyKernel:
    """A kernel of a body in a body, in the outer one's factors."""
    traffic = tuple((times * nbytes, outer_factors(held, splits)) for nbytes, held in kernel.traffic)
    sides = _outer_sides(kernel.sides, splits)
    widened = tuple(
        (times * nbytes, outer_factors(held, splits), outer_factors(partial, splits))
        for nbytes, held, partial in kernel.widened
    )
    return dataclasses.replace(
        kernel, flops=times * kernel.flops, held=outer_factors(kernel.held, splits), traffic=traffic, sides=sides,
        times=times * kernel.times, rounds=times * kernel.rounds, widened=widened,
    )  # fmt: skip
