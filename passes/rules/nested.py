"""Ways to split an equation with a body (`scan`, `while`, `cond`), from the rules of the equations in the body.

A *cut* is one way to split the whole: some dimensions of what enters the body are split, and every equation in it
splits a factor of its own, keeps its partial sums, or runs alike on every piece. Cuts are found by propagation from
each dimension that enters, forward through the equations and backward to what they need split, until the carry comes
out as it went in and branches agree. Partial sums that something cannot take as such are summed on the spot: a
collective in the loop. Each cut becomes a factor of the equation's rule; `evaluate.py` runs the body on pieces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from autopar.ir.graph import BatchDim, Operand, Value
from autopar.ir.rule import RuleOf, emit_cast, emit_same
from autopar.passes.rules.building import is_number
from autopar.passes.rules.propagation import PARTIAL, Body, BodyCut, Propagation, State, widens
from autopar.tracing.build import Builder, live_equations


def make_body(
    avals: Sequence[Any], parts: Sequence[tuple[Any, Sequence[int]]], rule_of: RuleOf, *,
    carried: Mapping[int, int] | None = None, agreeing: tuple[tuple[int, ...], ...] = (), whole: tuple[int, ...] = (),
    least_sum_bytes: int = 4,
) -> Body:  # fmt: skip
    """The body of closed jaxprs, each with the positions of its inputs; outputs follow one another. Calls inlined."""
    # It counts so that whether all examples are done is known to every piece.
    builder = Builder(counting=True, least_sum_bytes=least_sum_bytes)
    inputs = tuple(builder.value(aval) for aval in avals)
    outputs: list[Operand] = []
    for closed, positions in parts:
        outputs += builder.inline(closed.jaxpr, closed.consts, [inputs[i] for i in positions])
    equations = tuple(live_equations(builder.equations, outputs))
    rules = {eqn.id: rule_of(eqn) for eqn in equations}
    return Body(equations, inputs, tuple(outputs), builder.constants, rules, carried or {}, agreeing, whole)


def find_cuts(body: Body) -> list[BodyCut]:
    """Cuts that share no work, those that split most first; others are merged into cuts in need of sums.

    A mesh axis can take one cut of a loop: heads and hidden units, say, are worth more as one than apart.
    """
    cuts: list[BodyCut] = []
    for value in body.inputs:
        if value.is_key:
            continue
        for dim, size in enumerate(value.shape):
            if size < 2 or any(_holds(cut.states.get(value), dim) for cut in cuts):
                continue
            cut = Propagation(body).run({value: BatchDim(dim, 1, size, 1)})
            if cut is not None and cut.splits:
                cuts.append(cut)
    work = {e.id: body.flops(e) for e in body.equations}
    cuts.sort(key=lambda cut: -sum(work[i] for i in cut.splits))
    chosen: list[BodyCut] = []
    improved = functools.cache(functools.partial(_improved, body=body))
    for cut in cuts:
        if any(clash(cut, other) for other in chosen):
            continue
        for index, other in enumerate(chosen):
            if not other.sums or not improved(other).sums:
                continue  # it does without the other
            if (merged := _merged(cut, other, body)) is not None:
                chosen[index] = merged
                break
        else:
            chosen.append(cut)
    for index, cut in enumerate(chosen):  # after merging: partial sums in the carry would be a state that cuts share
        if not any(clash(improved(cut), other) for other in chosen if other is not cut):
            chosen[index] = improved(cut)
    return chosen


def gathering_path(body: Body, cuts: Sequence[BodyCut], value: Value) -> tuple[Value, ...]:
    """From an input that comes in pieces to where it is best gathered.

    That is what follows from it alone, element by element, and is no larger, such as its conversion to 16 bits.
    """
    sliced = {at for cut in cuts for at in cut.slices}
    path = [value]
    while True:
        readers = body.readers.get(value, ())
        if len(readers) != 1 or value in body.outputs:
            return tuple(path)
        eqn, i = readers[0]
        rule = body.rules[eqn.id]
        if rule.separable:
            following = eqn.outputs[i]
        elif (
            rule.emit in (emit_same, emit_cast)
            and not rule.whole
            and len(eqn.values) == 1
            and rule.outputs == (rule.inputs[i],)
        ):
            following = eqn.outputs[0]
        else:
            return tuple(path)
        if (eqn.id, i) in sliced or following.nbytes > value.nbytes:
            return tuple(path)
        path.append(value := following)


def _improved(cut: BodyCut, body: Body) -> BodyCut:
    """The cut with less to add up in each round."""
    # What is added up before it becomes wider no longer meets the carry that has the wider sum.
    ways = dict.fromkeys((_with_sums_before_widening(cut, body), cut))
    best = min((_with_partial_sums_carried(way, body) for way in ways), key=lambda way: way.sent)
    if not best.sums and not _summed_carries(best, body):
        return best
    other = Propagation(body, on_first=True).run(_seeds(cut, body))
    if other is None or not cut.splits.keys() <= other.splits.keys():
        return best
    # What is whole counts on the first piece, rather than be carried as a partial sum to meet one.
    other = _with_partial_sums_carried(other, body, on_first=True)
    return min(best, other, key=lambda way: (way.sent, _summed_carries(way, body)))


def _summed_carries(cut: BodyCut, body: Body) -> int:
    """How many values go from round to round as partial sums."""
    return sum(cut.states.get(body.inputs[i]) is PARTIAL for i in body.carried.values())


def _with_sums_before_widening(cut: BodyCut, body: Body) -> BodyCut:
    """The cut with sums made before partial sums become wider, where less is sent for it."""
    if not any(widens(e) and e.id in cut.passing for e in body.equations):
        return cut
    other = Propagation(body, before_widening=True).run(_seeds(cut, body))
    if other is None or not cut.splits.keys() <= other.splits.keys():
        return cut

    return other if other.sent < cut.sent else cut


def _seeds(cut: BodyCut, body: Body) -> dict[Value, State]:
    return {v: s for v in body.inputs if (s := cut.states.get(v)) is not None}


def _with_partial_sums_carried(cut: BodyCut, body: Body, *, on_first: bool = False) -> BodyCut:
    """The cut in which carries are partial sums, added up after the loop, where that saves sums in every round."""
    entering = (v for i in body.carried.values() if is_number(v := body.inputs[i]))
    return _carrying(cut, body, [v for v in entering if _meets(cut.sums, v, body)], on_first)


def _meets(sums: Set[Value], value: Value, body: Body) -> bool:
    """Whether a value, or what is linear in it, goes into an equation with one of these sums."""
    seen, waiting = {value}, [value]
    while waiting:
        v = waiting.pop()
        for eqn, position in body.readers.get(v, ()):
            rule = body.rules[eqn.id]
            if rule.separable:
                after = [eqn.outputs[position]]
            elif not sums.isdisjoint(eqn.values):
                return True
            else:
                after = [*eqn.outputs] if any(position in operands for operands in rule.linear) else []
            waiting += [out for out in after if out not in seen]
            seen.update(after)
    return False


def _carrying(cut: BodyCut, body: Body, entering: Sequence[Value], on_first: bool) -> BodyCut:
    """The cut with all of these as running sums if each saves a sum, else with what each half saves.

    Gradients that a loop adds up are as many as there are parameters: one propagation shows that all can be.
    """
    entering = [v for v in entering if v not in cut.states]
    if not entering or not cut.sums:
        return cut
    other = Propagation(body, on_first=on_first).run({**_seeds(cut, body), **dict.fromkeys(entering, PARTIAL)})
    if other is not None:
        kept = [v for v in entering if other.states.get(v) is PARTIAL]
        if len(kept) < len(entering):
            return _carrying(cut, body, kept, on_first)
        if len(other.sums) >= len(cut.sums) or cut.splits.keys() - other.splits.keys():
            return cut
        if len(other.sums) + len(kept) <= len(cut.sums):
            return other
    if len(entering) > 1:
        for part in (entering[: len(entering) // 2], entering[len(entering) // 2 :]):
            cut = _carrying(cut, body, part, on_first)
    return cut


def _holds(state: State, dim: int) -> bool:
    return isinstance(state, BatchDim) and state.dim == dim


def _merged(a: BodyCut, b: BodyCut, body: Body) -> BodyCut | None:
    """Both at once, if they have nothing in common but fences, and neither loses pieces by it."""
    common = (a.splits.keys() | a.passing) & (b.splits.keys() | b.passing)
    if a.states.keys() & b.states.keys() or any(not body.rules[i].separable for i in common):
        return None
    units = math.gcd(a.units, b.units)
    if units < min(a.units, b.units):
        return None
    return BodyCut(
        units, {**a.states, **b.states}, {**a.splits, **b.splits}, a.passing | b.passing, a.sums | b.sums,
        {**a.slices, **b.slices}, a.ends | b.ends, a.on_first | b.on_first,
    )  # fmt: skip


def clash(a: BodyCut, b: BodyCut) -> bool:
    """Whether both split the same dimension of a value or the same factor of an equation."""
    values = any(_holds(b.states.get(v), s.dim) for v, s in a.states.items() if isinstance(s, BatchDim))
    equations = any(i in b.splits and b.splits[i].factor == s.factor for i, s in a.splits.items())
    slices = any(at in b.slices and b.slices[at].dim == s.dim for at, s in a.slices.items())
    return values or equations or slices
