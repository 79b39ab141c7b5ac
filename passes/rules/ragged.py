"""Grouped products (`ragged_dot`): rows in groups of known sizes, each with a matrix of its own.

Rows and groups can both be cut. A piece of the rows counts how much of each group it holds. A piece of the groups
puts the rows before them in one more group, which is left out of the result or multiplied by zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.ir.graph import Equation
from autopar.ir.rule import Local, ReduceOp, Rule, bind
from autopar.passes.rules.building import (
    DimFactors,
    Factors,
    RuleBuilder,
    is_number,
    linear_if_wide,
    without_sharding,
    work_per_point,
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

    # A row meets one group only, so that their number is no loop.
    free = (n for d, n in enumerate(right.shape) if d not in partner and d not in group_dims)
    work = 2.0 * math.prod(left.shape) * math.prod(free)

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
        flops=work_per_point(work, factors),
        unit="matmul",
    )


RULES: dict[str, RuleBuilder] = {"ragged_dot_general": _ragged_dot_general}
