"""Grouped products (`ragged_dot`): rows in groups of known sizes, each with a matrix of its own.

Rows and groups can both be cut. A piece of the rows counts how much of each group it holds. A piece of the groups
puts the rows before them in one more group, which is left out of the result or multiplied by zeros.

JAX lowers a grouped product for CPUs and GPUs to an ordinary one of all rows with all groups: the rows are copied once
for each group, with zeros where they belong to others. So that is what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.ir.graph import Equation
from autopar.ir.rule import BodyKernel, DimMap, LiveSet, Local, ReduceOp, Rule, Sides, bind
from autopar.ir.strategy import Gathered
from autopar.passes.rules.building import (
    DimFactors,
    Factors,
    RuleBuilder,
    is_number,
    linear_if_wide,
    without_sharding,
)


def _overlap(sizes: Any, start: Any, length: int) -> Any:
    """How many rows of each group lie in `start .. start + length`; sizes: [.., groups]."""
    ends = lax.cumsum(sizes, sizes.ndim - 1)
    low = lax.convert_element_type(start, sizes.dtype)
    high = low + lax.full_like(low, length)
    return lax.clamp(low, ends, high) - lax.clamp(low, ends - sizes, high)


def _with_rest_in_front(sizes: Any, start: Any, count: int) -> Any:
    """[.., groups] -> [.., 1 + count]: the rows before group `start`, and the groups `start .. start + count`."""
    axis = sizes.ndim - 1
    earlier = lax.broadcasted_iota(jnp.int32, sizes.shape, axis) < start
    before = jnp.sum(jnp.where(earlier, sizes, 0), axis, keepdims=True, dtype=sizes.dtype)
    mine = lax.dynamic_slice_in_dim(sizes, start, count, axis)
    return lax.concatenate([before, mine], axis)


def _ragged_dot_general(eqn: Equation) -> Rule:
    left, right, sizes = eqn.inputs
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left_contract, right_contract), (left_batch, right_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    group_dims = tuple(numbers.rhs_group_dimensions)
    summable = is_number(eqn.outputs[0])
    factors = Factors()
    left_dims = factors.dims(left.shape)
    partner = dict(zip((*right_batch, *right_contract), (*left_batch, *left_contract), strict=True))
    right_dims = tuple(
        left_dims[partner[d]] if d in partner else factors.new(size) for d, size in enumerate(right.shape)
    )
    kept = [d for d in range(len(left.shape)) if d not in left_batch and d not in left_contract]
    output: list[DimFactors] = [
        *(left_dims[d] for d in left_batch),
        *(left_dims[d] for d in kept),
        *(dim for d, dim in enumerate(right_dims) if d not in partner and d not in group_dims),
    ]
    if ragged in left_contract:
        groups = factors.new(sizes.shape[-1])
        output.insert(0, groups)
        before = (*left_batch, *left_contract[: left_contract.index(ragged)])
    elif ragged in kept:
        groups = right_dims[group_dims[0]]
        before = (*left_batch, *kept[: kept.index(ragged)])
    else:  # the sizes say nothing: a row is a matrix of the batch
        groups = ()
        before = left_batch[: left_batch.index(ragged)]
    rows = left_dims[ragged] if groups or ragged not in left_batch else ()
    shared = tuple(left_dims[d] for d in before) if len(sizes.shape) > 1 else ()
    size_dims = (*shared, factors.new_whole(sizes.shape[-1]))

    summed = [f for d in left_contract for f in left_dims[d]]
    if ragged in kept:
        summed += groups
    reduced: dict[int, ReduceOp] = dict.fromkeys(summed, "sum") if summable else {}

    maps = [left_dims, right_dims, size_dims, tuple(output)]
    kernel, live_set = _masked_product(eqn, factors, maps, groups, is_summed=ragged in kept)

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        first, second, counts = operands
        for f in rows:
            if local.is_split(f):
                counts = _overlap(counts, local.start(f), local.size(f))
        split = [f for f in groups if local.is_split(f)]
        for f in split:
            counts = _with_rest_in_front(counts, local.start(f), local.size(f))
            if group_dims:
                padding = [(int(d in group_dims), 0, 0) for d in range(second.ndim)]
                second = lax.pad(second, lax.full_like(second, 0, shape=()), padding)
        results = bind(
            eqn, (first, second, counts), preferred_element_type=eqn.outputs[0].dtype,
            **without_sharding(eqn, "out_sharding"),
        )  # fmt: skip
        if split and not group_dims:
            results = [lax.slice_in_dim(x, 1, None, axis=0) for x in results]
        return results

    return factors.rule(
        [left_dims, right_dims, size_dims],
        [tuple(output)],
        reduced={f: op for f, op in reduced.items() if f not in factors.whole},
        whole=() if summable else summed,
        linear=linear_if_wide(eqn, {0}, {1}),
        emit=emit,
        unit="matmul",
        kernels=(kernel,),
        live_sets=(live_set,),
    )


def _masked_product(
    eqn: Equation, factors: Factors, maps: Sequence[DimMap], groups: DimFactors, *, is_summed: bool
) -> tuple[BodyKernel, LiveSet]:
    """The product of the rows, copied for each group, and the copies that are held with it.

    Args:
      eqn: the grouped product.
      factors: all there are.
      maps: of the operands and the result.
      groups: the factors of their number; () if the sizes say nothing, and nothing is copied.
      is_summed: over the groups; else the result has one matrix for each.
    """
    left, right, result = ({f for dim in maps[at] for f in dim} for at in (0, 1, 3))
    if groups:  # they multiply the rows
        left |= {*groups}
    both, rows, columns = result & left & right, result & left - right, result & right - left

    def side(of: set[int]) -> tuple[int, frozenset[int]]:
        return math.prod(factors.sizes[f] for f in of), frozenset(of)

    sides = Sides(side(both), side(rows), side(columns), side((left | right) - result))
    flops = 2.0 * math.prod(size for size, _ in sides.each)
    copy = math.prod(factors.sizes[f] for f in left) * eqn.inputs[0].dtype.itemsize, frozenset[int | Gathered](left)
    # Written and read; where groups are summed, XLA brings them beside what else is before the product, in a copy more.
    copies = (2 if is_summed else 1) if groups else 0
    traffic = [
        (float(math.prod(x.shape) * x.dtype.itemsize), frozenset[int | Gathered](f for dim in dims for f in dim))
        for x, dims in zip((*eqn.inputs, *eqn.outputs), maps, strict=True)
    ]
    traffic += [(2.0 * copy[0], copy[1])] * copies
    held = frozenset(left | right | result)
    return BodyKernel(flops, held, tuple(traffic), sides, eqn.kernel_dtype(True), times=1.0), (copy,) * copies


RULES: dict[str, RuleBuilder] = {"ragged_dot_general": _ragged_dot_general}
