"""The body of an equation computed on pieces, by its equations' own rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.errors import InternalError
from autopar.ir.context import Pairs
from autopar.ir.graph import BatchDim, Equation, Literal, Value
from autopar.ir.rule import Local, Rule, emit_piece
from autopar.ir.sharding import StepKind
from autopar.passes.rules.propagation import PARTIAL, Body, BodyCut, is_gathered
from autopar.passes.rules.split import Split, check_position, slice_units
from autopar.tracing.build import live_equations


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Which piece of a cut is computed."""

    cut: BodyCut
    factor: int  # the cut's factor in the rule of the whole
    local: Local
    sums: BodyCut | None = None  # that with the factor, if this one is between its sums; see `ScatteredCut`

    @property
    def count(self) -> int:
        return (self.cut if self.sums is None else self.sums).units // self.local.size(self.factor)

    def gathers(self, eqn: Equation, v: Value) -> bool:
        """Whether an equation needs a value whole that comes in pieces."""
        return self.sums is not None and is_gathered(eqn, v, self.sums, self.cut)

    def index(self) -> Any:
        """int32 scalar, traced; of pieces that are consecutive, so that it says where they lie."""
        return self.local.start(self.factor) // self.local.size(self.factor)

    def is_first(self) -> Any:
        """True on one of all pieces, which need not be consecutive: a bool scalar, traced."""
        return self.local.number(self.factor) == 0


@dataclasses.dataclass(frozen=True, eq=False)
class _InBody(Local):
    """The piece of one equation of the body."""

    rule: Rule
    pieces: Sequence[tuple[Split, Piece]]

    def _cuts(self, factor: int) -> Iterator[tuple[Split, Piece]]:
        return ((s, p) for s, p in self.pieces if s.factor == factor)

    def size(self, factor: int) -> int:
        return self.rule.factors[factor] // math.prod(p.count for _, p in self._cuts(factor))

    def is_split(self, factor: int) -> bool:
        return any(True for _ in self._cuts(factor))

    def start(self, factor: int) -> Any:
        for split, piece in self._cuts(factor):
            check_position(split.batch)
            return piece.index() * self.size(factor)
        return 0

    def number(self, factor: int) -> Any:
        return next((piece.local.number(piece.factor) for _, piece in self._cuts(factor)), 0)

    def total(self, factor: int, x: Any, value: Value) -> Any:
        for _, piece in self._cuts(factor):
            x = piece.local.total(piece.factor, x, value)
        return x

    def extreme(self, factor: int, x: Any, largest: bool) -> Any:
        for _, piece in self._cuts(factor):
            x = piece.local.extreme(piece.factor, x, largest)
        return x

    def halo(self, factor: int, x: Any, dim: int, before: int, after: int, fill: Any) -> Any:
        if (before or after) and self.is_split(factor):
            raise InternalError("the body of an equation was cut where windows reach over the cut")
        return x

    def send(self, factor: int, x: Any, kind: StepKind, dim: int = 0, to_dim: int = 0, pairs: Pairs = ()) -> Any:
        for _, piece in self._cuts(factor):
            x = piece.local.send(piece.factor, x, kind, dim, to_dim, pairs)
        return x


def evaluate(
    body: Body, outputs: Sequence[int], pieces: Sequence[Piece], arguments: Sequence[Any],
    made_whole: Mapping[Value, Callable[[Any], Any]] | None = None,
) -> list[Any]:  # fmt: skip
    """Some outputs of one round, in the states that the cuts say, from inputs in the states that they say.

    `made_whole` tells how to gather those values that come in pieces, or are made from what comes in pieces.
    """
    made_whole = made_whole or {}
    values: dict[Value, Any] = {}

    def define(v: Value, x: Any) -> None:
        values[v] = made_whole[v](x) if v in made_whole else x

    for v, x in zip(body.inputs, arguments, strict=True):
        define(v, x)
    values.update({v: jnp.asarray(c) if not v.is_key else c for v, c in body.constants.items()})
    totals: dict[tuple[Value, tuple[int, ...]], Any] = {}
    gathered: dict[tuple[Value, tuple[int, ...]], Any] = {}
    between = {piece.factor: piece for piece in pieces if piece.sums is not None}

    def adding(v: Value) -> tuple[Piece, ...]:
        """The pieces whose values of `v` are partial sums."""
        return tuple(piece for piece in pieces if piece.cut.states.get(v) is PARTIAL)

    def total(v: Value, over: tuple[Piece, ...]) -> Any:
        key = (v, tuple(p.factor for p in over))
        if key not in totals:
            x = values[v]
            for piece in over:
                lies = between[piece.factor].cut.states.get(v) if piece.factor in between else None
                if isinstance(lies, BatchDim):
                    wide = x.astype(v.accumulator_dtype)
                    x = piece.local.send(piece.factor, wide, "reduce_scatter", lies.dim)
                else:
                    x = piece.local.total(piece.factor, x, v)
            totals[key] = x.astype(v.held_dtype(any(p not in over for p in adding(v))))
        return totals[key]

    def whole(v: Value, summed: tuple[Piece, ...], over: tuple[Piece, ...]) -> Any:
        x, key = total(v, summed), (v, tuple(p.factor for p in summed))
        if key not in gathered:
            for piece in over:
                lies = piece.cut.states[v]
                assert isinstance(lies, BatchDim)
                x = piece.local.send(piece.factor, x, "all_gather", lies.dim)
            gathered[key] = x
        return gathered[key]

    def on_first(x: Any, over: Sequence[Piece]) -> Any:
        for piece in over:
            x = jnp.where(piece.is_first(), x, jnp.zeros_like(x))
        return x

    def read(eqn: Equation, position: int) -> Any:
        v = eqn.inputs[position]
        first = [piece for piece in pieces if (eqn.id, position) in piece.cut.on_first]
        if isinstance(v, Literal):
            return v.value if not first else on_first(jnp.asarray(v.value, v.dtype), first)
        summed = tuple(p for p in adding(v) if eqn.id not in p.cut.passing)
        gathering = tuple(piece for piece in between.values() if piece.gathers(eqn, v))
        x = whole(v, summed, gathering) if gathering else total(v, summed)
        for piece in pieces:
            batch = piece.cut.slices.get((eqn.id, position))
            if batch is not None:
                x = slice_units(x, batch, piece.count, piece.index())
        return on_first(x, first)

    for eqn in live_equations(body.equations, [body.outputs[o] for o in outputs]):
        rule = body.rules[eqn.id]
        operands = [read(eqn, i) for i in range(len(eqn.inputs))]
        splits = [(p.cut.splits[eqn.id], p) for p in pieces if eqn.id in p.cut.splits]
        partial_sums = [bool(adding(v)) for v in eqn.outputs]
        local = _InBody(rule, splits)
        for v, x in zip(eqn.outputs, emit_piece(rule, local, eqn, operands, partial_sums), strict=True):
            for factor in {split.factor for split, _ in splits if rule.is_extreme(split.factor)}:
                x = local.extreme(factor, x, rule.reduced[factor] == "max")
            define(v, x)
    results = []
    for o in outputs:
        out = body.outputs[o]
        if isinstance(out, Literal):
            results.append(jnp.asarray(out.value, out.dtype))
        else:
            results.append(total(out, tuple(p for p in pieces if o in p.cut.ends)))
    return results
