"""Rules of equations with a body: `scan`, `while`, `cond`. Each cut of the body is a factor.

What `while` does is counted as one round, what `cond` does as the mean of its branches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from autopar.ir.context import ContextParallel
from autopar.ir.graph import BatchDim, Equation, Operand, Value, least_sum_bytes
from autopar.ir.rule import (
    Branches,
    DimMap,
    Gathering,
    Hinted,
    InnerSum,
    Local,
    Rule,
    Scattering,
    bind,
)
from autopar.ir.same import Signature, program_signature
from autopar.ir.strategy import Gathered
from autopar.passes.collectives import extreme_itemsize
from autopar.passes.rules.building import Factors, RuleBuilder, replicated
from autopar.passes.rules.evaluate import Piece, evaluate
from autopar.passes.rules.gatherings import communicating, find_gatherings, scattering_of, with_scattered
from autopar.passes.rules.loop_kernels import (
    LoopLayout,
    Numbered,
    kernels_of_rounds,
    live_sets_of,
    outer_factors,
    unit_of,
)
from autopar.passes.rules.nested import find_cuts, gathering_path, make_body
from autopar.passes.rules.propagation import PARTIAL, Body, BodyCut
from autopar.passes.rules.random import is_partitionable
from autopar.passes.rules.rounds import SumPlace, round_of
from autopar.passes.rules.scattered import ScatteredCut, find_scattered
from autopar.tracing.axis_collectives import scan_counts
from autopar.tracing.build import Builder, live_equations

Run = Callable[[Local, Sequence[Piece], Equation, Sequence[Any]], Sequence[Any]]  # operands -> results
Each = Callable[[Sequence[Piece], Sequence[Any]], Sequence[Callable[[], Sequence[Any]]]]  # what each branch computes


class LoopRules:
    """The rules of `scan`, `while` and `cond`; `rule_of` gives the rules of equations in a body.

    Bodies and their cuts are kept, since many equations have the same.
    """

    def __init__(self, rule_of: Callable[[Equation], Rule]) -> None:
        self._rule_of = rule_of
        self._scan_bodies = functools.lru_cache(maxsize=256)(self._scan_body)
        self._while_bodies = functools.lru_cache(maxsize=256)(self._while_body)
        self._cond_bodies = functools.lru_cache(maxsize=256)(self._cond_body)
        self.by_primitive: Mapping[str, RuleBuilder] = {"scan": self.scan, "while": self.while_, "cond": self.cond}

    def forget(self) -> None:
        """The bodies seen: rules of equations in them have changed."""
        self._scan_bodies.cache_clear()
        self._while_bodies.cache_clear()
        self._cond_bodies.cache_clear()

    def scan(self, eqn: Equation) -> Rule:
        p = eqn.params
        consts, carries = scan_counts(p)
        body, cuts, stacked_in, scattered = self._scan_bodies(
            program_signature(p["jaxpr"]), consts, carries, least_sum_bytes((), [eqn]), is_partitionable()
        )
        everything = range(len(body.outputs))

        def run(local: Local, pieces: Sequence[Piece], eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
            types = [v.dtype for v in eqn.outputs]
            made_whole = {path[-1]: functools.partial(local.gather, i) for i, path in stacked_in.items()}
            fixed, start = operands[:consts], operands[consts : consts + carries]

            def one_round(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
                outputs = evaluate(body, everything, pieces, [*fixed, *carry, *xs], made_whole)
                ys = [local.scatter(k, y) for k, y in enumerate(outputs[carries:], carries)]
                # What was a partial sum before is rounded, round by round.
                return outputs[:carries], [
                    y if y.dtype == t else y.astype(t) for y, t in zip(ys, types[carries:], strict=True)
                ]

            end, ys = jax.lax.scan(
                one_round, _starts(body, range(consts, consts + carries), start, pieces),
                list(operands[consts + carries :]),
                length=p["length"], reverse=p["reverse"], unroll=p.get("unroll", 1),
            )  # fmt: skip
            return [*end, *ys]

        stacked_out = range(carries, len(body.outputs))
        layout = LoopLayout(tuple(range(len(body.inputs))), tuple(everything), stacked_in, stacked_out, p["length"])
        return _rule(eqn, body, cuts, layout, run, p["length"], scattered=scattered)

    def while_(self, eqn: Equation) -> Rule:
        p = eqn.params
        first = p["cond_nconsts"] + p["body_nconsts"]
        body, cuts = self._while_bodies(
            p["cond_jaxpr"], p["body_jaxpr"], p["cond_nconsts"], p["body_nconsts"], least_sum_bytes((), [eqn])
        )
        carries = range(len(body.outputs) - 1)

        def run(_: Local, pieces: Sequence[Piece], eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
            def go_on(carry: list[Any]) -> Any:
                on = evaluate(body, [len(carries)], pieces, [*operands[:first], *carry])[0]
                return jnp.any(on) if on.shape else on

            def one_round(carry: list[Any]) -> list[Any]:
                return evaluate(body, carries, pieces, [*operands[:first], *carry])

            start = _starts(body, range(first, first + len(carries)), operands[first:], pieces)
            end: list[Any] = jax.lax.while_loop(go_on, one_round, start)
            return end

        return _rule(eqn, body, cuts, LoopLayout(tuple(range(len(body.inputs))), tuple(carries)), run, 1.0)

    def cond(self, eqn: Equation) -> Rule:
        branches = eqn.params["branches"]
        body, cuts = self._cond_bodies(tuple(branches), least_sum_bytes((), [eqn]))
        count = len(eqn.outputs)

        def each(pieces: Sequence[Piece], operands: Sequence[Any]) -> Sequence[Callable[[], Sequence[Any]]]:
            outputs = [range(b * count, (b + 1) * count) for b in range(len(branches))]
            arrays = [
                x if isinstance(v, Value) else jnp.asarray(x, v.dtype)
                for x, v in zip(operands[1:], eqn.inputs[1:], strict=True)
            ]
            return [functools.partial(evaluate, body, wanted, pieces, arrays) for wanted in outputs]

        def run(_: Local, pieces: Sequence[Piece], eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
            results: list[Any] = jax.lax.switch(operands[0], each(pieces, operands))
            return results

        layout = LoopLayout((None, *range(len(body.inputs))), tuple(range(count)))
        for_platforms = eqn.params.get("branches_platforms") is not None
        return _rule(eqn, body, cuts, layout, run, 1 / len(branches), None if for_platforms else each)

    def _scan_body(
        self, program: Signature[Any], consts: int, carries: int, sum_bytes: int, partitionable: bool
    ) -> tuple[Body, list[BodyCut], dict[int, tuple[Value, ...]], ScatteredCut | None]:
        """Also each stacked input's way to where it is gathered if it comes in pieces, and sequence parallelism.

        `partitionable`: the rules in the body depend on it.
        """
        closed = program.of
        carried = {k: consts + k for k in range(carries)}
        body = make_body(
            closed.in_avals,
            [(closed, range(len(closed.in_avals)))],
            self._rule_of,
            carried=carried,
            least_sum_bytes=sum_bytes,
        )
        cuts = find_cuts(body)
        stacked = range(consts + carries, len(body.inputs))
        # Of the cut that splits most of those that leave whole what goes from round to round: an axis takes but one.
        handed_on = [body.inputs[i] for i in carried.values()]
        whole = [cut for cut in cuts if not any(isinstance(cut.state(v), BatchDim) for v in handed_on)]
        whole.sort(key=lambda cut: -sum(body.flops(body.by_id[e]) for e in cut.splits))
        scattered = (find_scattered(body, cut, stacked) for cut in whole)
        return (
            body, cuts, {i: gathering_path(body, cuts, body.inputs[i]) for i in stacked},
            next((way for way in scattered if way is not None), None),
        )  # fmt: skip

    def _while_body(
        self, condition: Any, body: Any, of_condition: int, of_body: int, sum_bytes: int
    ) -> tuple[Body, list[BodyCut]]:
        """Inputs: constants of the condition, of the body, carries. Outputs: carries, whether to go on.

        Whether to go on is an array where a `vmap` made one loop of each example's. Pieces may then turn differently
        often.
        """
        carries = len(body.out_avals)
        first = of_condition + of_body
        carry = range(first, first + carries)
        avals = [*condition.in_avals[:of_condition], *body.in_avals]
        mapped = bool(condition.out_avals[0].shape)
        parts = [(body, [*range(of_condition, first), *carry]), (condition, [*range(of_condition), *carry])]
        if mapped:
            parts[0] = _where_going_on(condition, body, of_condition), list(range(first + carries))
        carried = dict(enumerate(carry))
        whole = () if mapped else (carries,)
        made = make_body(avals, parts, self._rule_of, carried=carried, whole=whole, least_sum_bytes=sum_bytes)
        cuts = find_cuts(made)
        return made, [c for c in cuts if c.leaving(made, carries) is None or not communicating(made, c)]

    def _cond_body(self, branches: tuple[Any, ...], sum_bytes: int) -> tuple[Body, list[BodyCut]]:
        """Outputs: those of the first branch, of the second, .."""
        avals, count = branches[0].in_avals, len(branches[0].out_avals)
        parts = [(branch, range(len(avals))) for branch in branches]
        agreeing = tuple(tuple(range(k, count * len(branches), count)) for k in range(count))
        body = make_body(avals, parts, self._rule_of, agreeing=agreeing, least_sum_bytes=sum_bytes)
        return body, find_cuts(body)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A loop whose rounds may be taken in parts, each a loop of its own with another `params["length"]`."""

    length: int
    stacked_in: range  # operands with a leading axis of rounds
    stacked_out: range  # results with one
    carried: Mapping[int, int]  # result -> the operand that it starts from
    reverse: bool
    adding: frozenset[int]  # carried results that every round only adds to


def chain_of(eqn: Equation) -> Chain | None:
    """The loop as a chain; None for an equation that is none."""
    if eqn.primitive.name != "scan":
        return None
    consts, carries = scan_counts(eqn.params)
    return Chain(
        eqn.params["length"], range(consts + carries, len(eqn.inputs)), range(carries, len(eqn.outputs)),
        {k: consts + k for k in range(carries)}, eqn.params["reverse"],
        _adding(eqn.params["jaxpr"], consts, carries),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _adding(closed: Any, consts: int, carries: int) -> frozenset[int]:
    """The carried results of a body that are what they start from and something more, that nothing else reads."""
    builder = Builder()
    inputs = [builder.value(aval) for aval in closed.in_avals]
    outputs = builder.inline(closed.jaxpr, closed.consts, inputs)
    uses: dict[Operand, list[Equation | None]] = defaultdict(list)  # None: it leaves the body
    for e in live_equations(builder.equations, outputs):
        for v in e.inputs:
            uses[v].append(e)
    for v in outputs:
        uses[v].append(None)
    adding = set()
    for k in range(carries):
        at: Operand | None = inputs[consts + k]
        added = False
        while at is not None and len(uses[at]) == 1 and (reader := uses[at][0]) is not None:
            added |= reader.primitive.name in _ADDING
            at = _passed_on(reader, at)
        if added and at is not None and at is outputs[k] and uses[at] == [None]:
            adding.add(k)
    return frozenset(adding)


_ADDING = frozenset({"add", "add_any", "sub"})
_PASSING = frozenset({"convert_element_type", "copy", "copy_p", "name", "optimization_barrier", "sharding_constraint"})


def _passed_on(eqn: Equation, operand: Operand) -> Value | None:
    """The result that is the operand, or the operand and something more."""
    position = eqn.inputs.index(operand)
    if eqn.primitive.name in _ADDING and (position == 0 or eqn.primitive.name != "sub"):
        result = eqn.outputs[0]
    elif eqn.primitive.name in _PASSING:
        result = eqn.outputs[position]
    else:
        return None
    return result if (result.shape, result.dtype) == (operand.shape, operand.dtype) else None


def _where_going_on(condition: Any, body: Any, of_condition: int) -> Any:
    """One round of a mapped loop: the carries of examples that do not go on stay, as in JAX's own lowering."""
    of_body = len(body.in_avals) - len(body.out_avals)

    def one_round(*operands: Any) -> list[Any]:
        carry = operands[of_condition + of_body :]
        (on,) = jex_core.jaxpr_as_fun(condition)(*operands[:of_condition], *carry)
        new = jex_core.jaxpr_as_fun(body)(*operands[of_condition:])
        major = tuple(range(on.ndim))
        return [
            jax.lax.select(jax.lax.broadcast_in_dim(on, x.shape, major), x, y) for x, y in zip(new, carry, strict=True)
        ]

    avals = [*condition.in_avals[:of_condition], *body.in_avals]
    return jax.make_jaxpr(one_round)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))


def _rule(
    eqn: Equation,
    body: Body,
    cuts: Sequence[BodyCut],
    layout: LoopLayout,
    run: Run,
    times: float,
    each: Each | None = None,
    scattered: ScatteredCut | None = None,
) -> Rule:
    """One factor a cut; `times` is how often the body runs; `each` gives the branches of a `cond`."""

    def run_or_bind(local: Local, pieces: Sequence[Piece], eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if eqn.params.get("branches_platforms") is not None and not pieces:
            return bind(eqn, operands)  # branches for other platforms than this one
        return run(local, pieces, eqn, operands)

    def branches_with(pieces_of: Callable[[Local], Sequence[Piece]]) -> Branches | None:
        return None if each is None else lambda local, eqn, xs: each(pieces_of(local), xs)

    aliases = {
        k: layout.inputs.index(body.carried[o]) if o in body.carried else None
        for k, o in enumerate(layout.outputs)
        if o in body.carried or o in layout.stacked_out
    }
    if not cuts:
        whole = replicated(eqn)
        kernels = tuple(kernel for kernel, _ in kernels_of_rounds(body, [], layout, times))
        return dataclasses.replace(
            whole, unit=unit_of(kernels), kernels=kernels, aliases=aliases,
            live_sets=live_sets_of(body, [], layout, ()), hints=_hints(body, []),
            emit=lambda local, eqn, xs: run_or_bind(local, [], eqn, xs), branches=branches_with(lambda local: []),
        )  # fmt: skip
    factors = Factors()
    numbers = [factors.new(cut.units)[0] for cut in cuts]
    numbered = list(zip(numbers, cuts, strict=True))

    def dims(operand: Any, stacked: bool) -> DimMap:
        lead = (factors.new_whole(layout.length),) if stacked else ()
        return (*lead, *(_dim(operand, d, n, numbered, factors) for d, n in enumerate(operand.shape)))

    inputs = [() if i is None else dims(body.inputs[i], i in layout.stacked_in) for i in layout.inputs]
    outputs = [dims(body.outputs[o], o in layout.stacked_out) for o in layout.outputs]

    gatherings = find_gatherings(body, numbered, layout, int(times))
    between = Gathered(len(gatherings))  # the scattering, if there is one
    everything: Numbered = [*numbered, *([(between, scattered.between)] if scattered else [])]

    def pieces_of(local: Local) -> Sequence[Piece]:
        pieces = [Piece(cut, f, local) for f, cut in numbered if local.is_split(f)]
        if scattered is None or not local.is_scattered(between.index):
            return pieces
        piece = next(p for p in pieces if p.cut is scattered.of)
        pieces[pieces.index(piece)] = dataclasses.replace(piece, cut=scattered.sums)
        return [*pieces, dataclasses.replace(piece, cut=scattered.between, sums=scattered.sums)]

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return run_or_bind(local, pieces_of(local), eqn, operands)

    placed = kernels_of_rounds(body, everything, layout, times, gatherings)
    kernels = tuple(kernel for kernel, _ in placed)
    sums = _sums(body, numbered, max(1, int(times)))
    ways: list[Gathering | Scattering] = [*gatherings]
    if scattered is not None:
        factor = next(f for f, cut in numbered if cut is scattered.of)
        sums = with_scattered(sums, numbered, factor, scattered, between, max(1, int(times)))
        ways.append(scattering_of(body, numbered, layout, factor, scattered))
    left = {f: [cut.leaving(body, o) for o in layout.outputs] for f, cut in numbered}
    return factors.rule(
        inputs, outputs, emit=emit, sums=tuple(each for each, _ in sums),
        contexts=_contexts(body, numbered, max(1, int(times))), kernels=kernels,
        reduced={f: "sum" for f, states in left.items() if PARTIAL in states},
        unaffected={f: frozenset(k for k, s in enumerate(states) if s is None) for f, states in left.items()},
        unit=unit_of(kernels), gatherings=tuple(ways), hints=_hints(body, numbered), aliases=aliases,
        live_sets=live_sets_of(body, everything, layout, gatherings),
        round=None if each else round_of(body, everything, layout, placed, [place for _, place in sums], gatherings),
        branches=branches_with(pieces_of),
    )  # fmt: skip


def _hints(body: Body, numbered: Sequence[tuple[int, BodyCut]]) -> tuple[Hinted, ...]:
    """Of the equations in the body, in the factors of the whole."""
    hints: dict[Hinted, None] = {}
    for e in body.equations:
        outer = {f: cut.splits[e.id].factor for f, cut in numbered if e.id in cut.splits}
        passing = [f for f, cut in numbered if e.id in cut.passing and e.id not in cut.splits]
        hints.update((hinted.renamed(outer, passing), None) for hinted in body.rules[e.id].hints)
    return tuple(hints)


def _sums(body: Body, numbered: Sequence[tuple[int, BodyCut]], times: int) -> list[tuple[InnerSum, SumPlace]]:
    sums: list[tuple[InnerSum, SumPlace]] = []
    for f, cut in numbered:
        for v in sorted(cut.sums, key=lambda v: v.id):
            held = frozenset(g for g, other in numbered if isinstance(other.states.get(v), BatchDim))
            sums.append((InnerSum(f, math.prod(v.shape), v.dtype.itemsize, v.sum_itemsize, held, times), v))
        for e in body.equations:
            if e.id in cut.splits and body.rules[e.id].is_extreme(cut.splits[e.id].factor):
                for v in e.outputs:
                    held = frozenset(g for g, other in numbered if isinstance(other.states.get(v), BatchDim))
                    itemsize = extreme_itemsize(v.dtype)
                    sums.append((InnerSum(f, math.prod(v.shape), itemsize, itemsize, held, times), e.id))
            elif e.id in cut.splits:
                for s in body.rules[e.id].sums:
                    if s.factor == cut.splits[e.id].factor:
                        cuts = ((g, other.splits.get(e.id)) for g, other in numbered)
                        held = frozenset(g for g, split in cuts if split is not None and split.factor in s.held)
                        sums.append((dataclasses.replace(s, factor=f, held=held, times=s.times * times), e.id))
    return sums


def _contexts(
    body: Body, numbered: Sequence[tuple[int, BodyCut]], times: int
) -> tuple[ContextParallel, ...]:  # fmt: skip
    """Of the attentions whose positions are cut in the body, in the factors of the whole."""
    contexts: list[ContextParallel] = []
    for e in body.equations:
        splits = {f: cut.splits[e.id].factor for f, cut in numbered if e.id in cut.splits}
        outer = functools.partial(outer_factors, splits=splits)
        for context in body.rules[e.id].contexts:
            contexts += [context.inside(f, outer, times) for f, inner in splits.items() if inner == context.factor]
    return tuple(contexts)


def _dim(
    operand: Any, dim: int, size: int, numbered: Sequence[tuple[int, BodyCut]], factors: Factors
) -> tuple[int, ...]:
    """The factors of one dimension of what enters or leaves the body."""
    for factor, cut in numbered:
        state = cut.state(operand)
        if isinstance(state, BatchDim) and state.dim == dim:
            inner = size // state.outer // cut.units
            return (*factors.new_whole(state.outer), factor, *factors.new_whole(inner))
    return factors.new_whole(size)


def _starts(body: Body, positions: Sequence[int], values: Sequence[Any], pieces: Sequence[Piece]) -> list[Any]:
    """A running sum starts with its first value on the first piece, with zero on the others."""
    starts = []
    for i, x in zip(positions, values, strict=True):
        for piece in pieces:
            if piece.cut.states.get(body.inputs[i]) is PARTIAL:
                x = jnp.where(piece.is_first(), x, jnp.zeros_like(x)).astype(body.inputs[i].accumulator_dtype)
        starts.append(x)
    return starts
