"""Sequence parallelism in the body of a loop: what lies between the sums of a cut is computed in pieces, too.

A cut with sums, such as that by heads and hidden units, leaves whole values on every piece between one sum and the next
equation that it splits: norms, residual sums, dropout. They can be split along another dimension (Korthikanti et al.
2022). Then a sum is a reduce-scatter, what the cut's own equations read is gathered, and what goes from round to round
comes in pieces, and so do stacks.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.ir.graph import BatchDim, Equation, Value
from autopar.passes.rules.propagation import PARTIAL, Body, BodyCut, Propagation, is_gathered
from autopar.passes.rules.split import Unsplittable, batch_in_dims, split_of

_DEAREST = 2.0  # times the bytes of the sums may be sent at most
_AS_MUCH = 0.9  # of the bytes that can be in pieces counts as all of them


@dataclasses.dataclass(frozen=True, eq=False)
class ScatteredCut:
    """How a body is split between the sums of a cut."""

    of: BodyCut  # the cut with the sums
    sums: BodyCut  # .. in which these are made before they meet what is whole, which may be in pieces
    between: BodyCut  # of what it leaves whole
    gathered: frozenset[Value]  # what comes in pieces, but is read whole by some

    @property
    def sent(self) -> int:
        """Bytes that are sent in each round, as they are before and after sums."""
        scattered = sum(v.sum_nbytes if self.is_in_pieces(v) else v.nbytes + v.sum_nbytes for v in self.sums.sums)
        return scattered + sum(v.nbytes for v in self.gathered) + self.between.sent

    @property
    def kept(self) -> int:
        """Bytes of what comes in pieces."""
        return sum(v.nbytes for v in self.between.states if self.is_in_pieces(v))

    def is_in_pieces(self, v: Value) -> bool:
        """Whether a value is cut between the sums."""
        return isinstance(self.between.states.get(v), BatchDim)


def find_scattered(body: Body, cut: BodyCut, stacked: Sequence[int]) -> ScatteredCut | None:
    """The way to split what a cut leaves whole that sends least of those that split most; None if there is none.

    `stacked`: the inputs that are slices of stacks.
    """
    early = _with_early_sums(body, cut)
    sums = sorted((v for v in early.sums if v.shape), key=lambda v: (-v.nbytes, v.id))
    if not sums:
        return None
    rest, ways = _rest(body, early), []
    for dim, size in enumerate(sums[0].shape):
        # All sums of this shape: not every reader of one asks for pieces, as reductions of it do not.
        seeds = {v: BatchDim(dim, 1, size, 1) for v in sums if v.shape == sums[0].shape}
        between = Propagation(rest, gathers=True).run(seeds) if size > 1 else None
        if between is not None and between.splits and _is_local(body, between):
            way = _completed(body, cut, early, between, stacked)
            if way.between.units > 1 and way.is_in_pieces(sums[0]) and way.sent <= _DEAREST * early.sent:
                ways.append(way)
    most = max((way.kept for way in ways), default=0)
    # Of examples and positions those that there are more of: examples may be few, and other axes cut them.
    return min(
        (way for way in ways if way.kept > _AS_MUCH * most),
        key=lambda way: (way.sent, -way.between.units), default=None,
    )  # fmt: skip


def _with_early_sums(body: Body, cut: BodyCut) -> BodyCut:
    """The cut with partial sums added up before they meet what is whole, if it is the same otherwise."""
    seeds = {v: s for v in body.inputs if (s := cut.states.get(v)) is not None}
    early = Propagation(body, before_widening=True, alone=True).run(seeds)
    if early is None or early.splits != cut.splits or early.units != cut.units:
        return cut
    pieces = [(cut.state(v), early.state(v)) for v in body.inputs]
    pieces += [(cut.leaving(body, o), early.leaving(body, o)) for o in range(len(body.outputs))]
    return early if all(a == b or not any(isinstance(s, BatchDim) for s in (a, b)) for a, b in pieces) else cut


def _rest(body: Body, cut: BodyCut) -> Body:
    """What a cut leaves whole. Its sums are inputs that may come in pieces, what else it makes whole are constants."""
    equations: list[Equation] = []
    for e in body.equations:
        if body.rules[e.id].separable:
            pairs = [(v, out) for v, out in zip(e.inputs, e.outputs, strict=True) if v not in cut.states]
            taken, handed_on = tuple(v for v, _ in pairs), tuple(out for _, out in pairs)
            equations += [dataclasses.replace(e, inputs=taken, outputs=handed_on)] if pairs else []
        elif e.id not in cut.splits and e.id not in cut.passing:
            equations.append(e)
    made = {v for e in equations for v in e.outputs}
    whole = {v: None for e in body.equations for v in e.outputs if v not in made and v not in cut.sums}
    inputs = [v for v in body.inputs if v not in cut.states]
    carried = {o: inputs.index(v) for o, i in body.carried.items() if (v := body.inputs[i]) not in cut.states}
    inputs += [v for v in sorted(cut.sums, key=lambda v: v.id) if v not in body.inputs]
    return dataclasses.replace(
        body, equations=tuple(equations), inputs=tuple(inputs), constants={**body.constants, **whole}, carried=carried
    )


def _is_local(body: Body, between: BodyCut) -> bool:
    """Whether pieces need nothing of one another but sums, and nobody has said how what they make is to lie."""
    rules = [(body.rules[e], split.factor) for e, split in between.splits.items()]
    return not any(rule.communicates(f) or rule.is_extreme(f) or rule.hints for rule, f in rules)


def _completed(body: Body, of: BodyCut, cut: BodyCut, between: BodyCut, stacked: Sequence[int]) -> ScatteredCut:
    """With the slices of stacks that only the cut's own equations read, and what these gather and sum."""
    states = {**between.states, **_slices(body, cut, between, stacked)}
    units = math.gcd(between.units, *(s.units for s in states.values() if isinstance(s, BatchDim)))
    between = dataclasses.replace(between, units=units, states=states)
    readers = {v: [e for e, _ in body.readers.get(v, ())] for v in states}
    gathered = {v for v, each in readers.items() if any(is_gathered(e, v, cut, between) for e in each)}
    summed = {v for v, s in states.items() if s is PARTIAL and any(e.id not in between.passing for e in readers[v])}
    sums = between.sums | summed
    return ScatteredCut(of, cut, dataclasses.replace(between, sums=sums), frozenset(gathered))


def _slices(body: Body, cut: BodyCut, between: BodyCut, stacked: Sequence[int]) -> Mapping[Value, BatchDim]:
    """Slices that the equations of the cut read together with what lies in pieces before they gather it.

    Such are the operands of products that a forward loop has kept for the gradients of weights.
    """
    lying = {v: s for v, s in between.states.items() if isinstance(s, BatchDim)}
    wishes: dict[Value, list[BatchDim]] = defaultdict(list)
    candidates = {v for i in stacked if (v := body.inputs[i]) not in cut.states and v not in between.states}
    # What hands them on, to the next round or past a fence, has not been told of pieces.
    candidates.difference_update(body.outputs[o] for o in body.carried)
    candidates.difference_update(v for e in body.equations if body.rules[e.id].separable for v in e.inputs)
    for e in body.equations:
        rule = body.rules[e.id]
        if rule.separable:
            pairs = zip(e.inputs, e.outputs, strict=True)
            lying.update((out, lying[v]) for v, out in pairs if isinstance(v, Value) and v in lying)
            continue
        if e.id in between.splits or e.id in between.passing:
            continue
        batches = {i: lying[v] for i, v in enumerate(e.inputs) if isinstance(v, Value) and v in lying}
        try:
            split = split_of(rule, batches, takes_extremes=True) if batches else None
        except Unsplittable:
            split = None
        if split is None:
            continue
        for at, dims in zip((*e.inputs, *e.outputs), (*rule.inputs, *rule.outputs), strict=True):
            piece = batch_in_dims(split, dims, rule.factors)
            if piece is None or not isinstance(at, Value):
                continue
            if at in candidates:
                wishes[at].append(piece)
            elif at in e.outputs:
                lying.setdefault(at, piece)
    return {
        v: wish[0] for v, wish in wishes.items()
        if wish[0].outer == 1 and len({(w.dim, w.outer, w.size) for w in wish}) == 1
    }  # fmt: skip
