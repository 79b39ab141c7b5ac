"""How examples lie in the dimensions of arrays, and which factor of an equation carries them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.ir.graph import BatchDim
from autopar.ir.rule import DimMap, Rule


@dataclasses.dataclass(frozen=True)
class Split:
    """The factor of an equation that carries the batch, as (outer, units, inner)."""

    factor: int
    batch: BatchDim  # `dim` unused


class Unsplittable(Exception):
    """The equation cannot be split along the batch; the message says why."""


def check_position(batch: BatchDim) -> None:
    """Raise where the pieces of a dimension are scattered over it, so that none of them has a first element.

    Raises:
      Unsplittable: the batch is not the major dimension.
    """
    if batch.outer > 1:
        raise Unsplittable("the position of an example is needed where the batch is not the major dimension")


def slice_units(x: Any, batch: BatchDim, count: int, index: Any) -> Any:
    """Piece number `index` of `count` of an array that is whole along the batch."""
    before, after = x.shape[: batch.dim], x.shape[batch.dim + 1 :]
    parts = x.reshape(*before, batch.outer, batch.units, batch.inner, *after)
    size = batch.units // count
    part = jax.lax.dynamic_slice_in_dim(parts, index * size, size, batch.dim + 1)
    return part.reshape(*before, batch.outer * size * batch.inner, *after)


def _coarsen(batch: BatchDim, divisor: int) -> BatchDim:
    """Group units until `inner` is divisible by `divisor`."""
    k = divisor // math.gcd(batch.inner, divisor)
    if batch.units % k:
        raise Unsplittable("a reshape cuts across examples")
    return BatchDim(batch.dim, batch.outer, batch.units // k, batch.inner * k)


def batch_to_factor(batch: BatchDim, dim: tuple[int, ...], sizes: Sequence[int]) -> Split:
    """Which factor of a dimension (factors major to minor) carries the batch."""
    for index, factor in enumerate(dim):
        outer = math.prod(sizes[f] for f in dim[:index])
        inner = math.prod(sizes[f] for f in dim[index + 1 :])
        if batch.outer % outer:
            break  # the batch begins inside an earlier factor
        if batch.outer // outer >= sizes[factor] > 1 or sizes[factor] == 1:
            continue  # the batch begins further inside
        try:
            fine = _coarsen(batch, inner)
        except Unsplittable:
            continue
        return Split(factor, BatchDim(-1, batch.outer // outer, fine.units, fine.inner // inner))
    raise Unsplittable("a reshape cuts across examples")


def batch_in_dims(split: Split, dims: DimMap, sizes: Sequence[int]) -> BatchDim | None:
    """Where the batch lies in an array of these dimensions; None if it does not."""
    for index, dim in enumerate(dims):
        if split.factor in dim:
            at = dim.index(split.factor)
            outer = math.prod(sizes[f] for f in dim[:at])
            inner = math.prod(sizes[f] for f in dim[at + 1 :])
            b = split.batch
            return BatchDim(index, b.outer * outer, b.units, b.inner * inner)
    return None


def _merge(splits: Sequence[Split]) -> Split:
    """The common split of several operands, in units that suit all."""
    first = splits[0]
    for other in splits[1:]:
        a, b = first.batch, other.batch
        if first.factor != other.factor:
            raise Unsplittable("the examples of two operands are combined with one another")
        if a.outer != b.outer or a.size != b.size:
            raise Unsplittable("two operands hold their examples in different orders")
        units = math.gcd(a.units, b.units)
        first = Split(first.factor, BatchDim(-1, a.outer, units, a.size // a.outer // units))
    return first


def split_of(rule: Rule, batches: Mapping[int, BatchDim], *, takes_extremes: bool = False) -> Split:
    """The one factor along which the equation splits; `batches` are its batched operands by position.

    `takes_extremes`: it may be one of which the largest or smallest is taken.
    """
    splits = []
    for position, batch in batches.items():
        dim = rule.inputs[position][batch.dim]
        splits.append(batch_to_factor(batch, dim, rule.factors))
    split = _merge(splits)
    factor = split.factor
    if factor in rule.whole:
        raise Unsplittable("it works along the batch")
    reduction = rule.reduced.get(factor)
    is_extreme = takes_extremes and rule.is_extreme(factor)
    if reduction not in (None, "sum") and not is_extreme:
        raise Unsplittable(f"it takes the {reduction} over the batch")
    for k, dims in enumerate(rule.outputs):
        alike = is_extreme or rule.is_partial_sum(factor, k) or k in rule.unaffected.get(factor, ())
        if not alike and batch_in_dims(split, dims, rule.factors) is None:
            raise Unsplittable("it mixes examples")
    for position, dims in enumerate(rule.inputs):
        held = [d for d in dims if factor in d]
        if len(held) > 1:
            raise Unsplittable("an operand holds the batch twice")
        if position in batches and not held:
            raise Unsplittable("it mixes examples")
    return split
