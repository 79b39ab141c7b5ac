"""What a loop may keep in pieces that a plain split of a factor leaves whole: see `Gathering` and `Scattering`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from autopar.ir.graph import BatchDim, Value
from autopar.ir.rule import Gathering, InnerSum, RoundSlice, Scattering
from autopar.ir.strategy import Gathered
from autopar.passes.rules.loop_kernels import LoopLayout
from autopar.passes.rules.nested import clash
from autopar.passes.rules.propagation import PARTIAL, Body, BodyCut
from autopar.passes.rules.rounds import SumPlace
from autopar.passes.rules.scattered import ScatteredCut

_SMALL = 0.01  # of what a round's slices hold together: biases and scales, which are not worth a collective each


def find_gatherings(
    body: Body, numbered: Sequence[tuple[int, BodyCut]], layout: LoopLayout, times: int
) -> tuple[Gathering, ...]:  # fmt: skip
    """One for the cut of what goes from round to round that sends least, where that leaves parameters whole.

    More would be more strategies than they are worth. What holds little stays as it is.
    """
    carries = [body.inputs[i] for i in body.carried.values()]
    candidates = [(f, cut) for f, cut in numbered if any(isinstance(cut.state(v), BatchDim) for v in carries)]
    if not candidates:
        return ()
    factor, cut = min(candidates, key=lambda numbered_cut: communicating(body, numbered_cut[1]))
    operands = {i: path[-1] for i, path in layout.stacked_in.items() if cut.state(body.inputs[i]) is None}
    results = {o: out for o in layout.stacked_out if isinstance(out := body.outputs[o], Value)}
    partial_sums = {o for o in results if cut.leaving(body, o) is PARTIAL}
    results = {o: out for o, out in results.items() if o in partial_sums or cut.leaving(body, o) is None}
    large_operands = _large({i: at.nbytes for i, at in operands.items() if not at.is_key})
    large_results = _large({o: out.sum_nbytes for o, out in results.items() if not out.is_key})
    if not partial_sums & large_results.keys() and not _meet_products(body, cut, [operands[i] for i in large_operands]):
        return ()
    return (
        Gathering(
            factor,
            tuple(RoundSlice(i, n) for i, n in large_operands.items()),
            tuple(RoundSlice(o, n if o in partial_sums else 0) for o, n in large_results.items()),
            times,
        ),
    )


def _meet_products(body: Body, cut: BodyCut, values: Sequence[Value]) -> bool:
    """Whether some matrix product reads one of the values, or what all pieces make of them alike."""
    alike = set(values)
    for e in body.equations:
        if alike.intersection(e.values):
            if body.rules[e.id].unit == "matmul":
                return True
            if e.id not in cut.splits:
                alike.update(e.outputs)
    return False


def _large(nbytes: Mapping[int, int]) -> dict[int, int]:
    least = _SMALL * sum(nbytes.values())
    return {i: n for i, n in nbytes.items() if n > least}


def scattering_of(
    body: Body, numbered: Sequence[tuple[int, BodyCut]], layout: LoopLayout, factor: int, way: ScatteredCut
) -> Scattering:  # fmt: skip
    """A scattered cut in the factors, operands and results of the loop."""
    operands, results, partial_sums = [], [], set()
    for position, i in enumerate(layout.inputs):
        if i is not None and isinstance(lies := way.between.state(body.inputs[i]), BatchDim):
            operands.append((position, lies.dim + (i in layout.stacked_in)))
    for k, o in enumerate(layout.outputs):
        states = way.sums.leaving(body, o), way.between.leaving(body, o)
        if PARTIAL in states:
            partial_sums.add(k)
        elif isinstance(lies := states[1], BatchDim):
            results.append((k, lies.dim + (o in layout.stacked_out)))
    apart = frozenset(f for f, cut in numbered if clash(cut, way.between))
    return Scattering(factor, tuple(operands), tuple(results), frozenset(partial_sums), way.between.units, apart)


def with_scattered(
    sums: Sequence[tuple[InnerSum, SumPlace]], numbered: Sequence[tuple[int, BodyCut]], factor: int,
    way: ScatteredCut, scattering: Gathered, times: int,
) -> list[tuple[InnerSum, SumPlace]]:  # fmt: skip
    """The sums of a loop and what else it sends within a scattering of a factor, each with its place."""
    before = [f for f, _ in numbered][: [f for f, _ in numbered].index(factor)]  # factors that are summed over before
    placed: list[tuple[InnerSum, SumPlace]] = []
    for each, v in sums:
        if isinstance(v, Value) and each.factor == factor:
            each = dataclasses.replace(each, without=scattering)
        elif isinstance(v, Value) and way.is_in_pieces(v) and (v not in way.sums.sums or each.factor not in before):
            each = dataclasses.replace(each, held=each.held | {scattering})
        placed.append((each, v))
    sent: list[tuple[Value, Literal["sum", "scatter", "gather"]]]
    sent = [(v, "scatter" if way.is_in_pieces(v) else "sum") for v in way.sums.sums]
    sent += [(v, "sum") for v in way.between.sums] + [(v, "gather") for v in way.gathered]
    for v, kind in sorted(sent, key=lambda each: (each[0].id, each[1] == "gather")):
        held = frozenset(g for g, cut in numbered if isinstance(cut.states.get(v), BatchDim))
        size, itemsize = math.prod(v.shape), v.dtype.itemsize
        placed.append((InnerSum(factor, size, itemsize, v.sum_itemsize, held, times, kind, within=scattering), v))
    return placed


def communicating(body: Body, cut: BodyCut) -> int:
    """How many sums a round makes, and equations within which pieces send something."""
    inside = ((body.rules[e], split.factor) for e, split in cut.splits.items())
    return len(cut.sums) + sum(rule.communicates(factor) or rule.is_extreme(factor) for rule, factor in inside)
