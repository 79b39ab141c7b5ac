"""Matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Equation
from autopar.ir.rule import Local, Rule, bind
from autopar.passes.rules.building import (
    DimFactors,
    Factors,
    RuleBuilder,
    is_number,
    linear_if_wide,
    without_sharding,
    work_per_point,
)


def _emit_product(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    return bind(eqn, operands, preferred_element_type=eqn.outputs[0].dtype, **without_sharding(eqn, "out_sharding"))


def _dot_general(eqn: Equation) -> Rule:
    """`bik,bkj->bij`: batch, left and right dimensions are shared with the result, contracted ones are summed."""

    left, right = eqn.inputs
    (left_contract, right_contract), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    factors = Factors()
    left_dims = factors.dims(left.shape)
    partner = dict(zip((*right_batch, *right_contract), (*left_batch, *left_contract), strict=True))
    right_dims = tuple(
        left_dims[partner[d]] if d in partner else factors.new(size) for d, size in enumerate(right.shape)
    )
    output = (
        *(left_dims[d] for d in left_batch),
        *(dim for d, dim in enumerate(left_dims) if d not in left_batch and d not in left_contract),
        *(dim for d, dim in enumerate(right_dims) if d not in partner),
    )
    contracted = [f for d in left_contract for f in left_dims[d]]
    summable = is_number(eqn.outputs[0])
    return factors.rule(
        [left_dims, right_dims],
        [output],
        reduced=dict.fromkeys(contracted, "sum") if summable else {},
        whole=() if summable else contracted,
        linear=linear_if_wide(eqn, {0}, {1}),
        emit=_emit_product,
        flops=2.0,
        unit="matmul",
    )


def _scaled_dot(eqn: Equation) -> Rule:
    """A product of blocks with a scale each: a contracted dimension is (blocks, what is in one)."""
    left, right, left_scale, right_scale = eqn.inputs
    (left_contract, right_contract), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    factors = Factors()
    left_dims = list(factors.dims([1 if d in left_contract else n for d, n in enumerate(left.shape)]))
    partner = dict(zip(right_batch, left_batch, strict=True))
    right_dims = [
        left_dims[partner[d]] if d in partner else factors.new(1 if d in right_contract else n)
        for d, n in enumerate(right.shape)
    ]
    left_scales, right_scales = list(left_dims), list(right_dims)
    contracted: DimFactors = ()
    for a, b in zip(left_contract, right_contract, strict=True):
        counts = (left_scale.shape[a], right_scale.shape[b])
        blocks = factors.new(math.gcd(*counts))
        left_dims[a] = right_dims[b] = blocks + factors.new_whole(left.shape[a] // math.gcd(*counts))
        left_scales[a] = blocks + factors.new_whole(counts[0] // math.gcd(*counts))
        right_scales[b] = blocks + factors.new_whole(counts[1] // math.gcd(*counts))
        contracted += blocks
    output = (
        *(left_dims[d] for d in left_batch),
        *(dim for d, dim in enumerate(left_dims) if d not in left_batch and d not in left_contract),
        *(dim for d, dim in enumerate(right_dims) if d not in right_batch and d not in right_contract),
    )
    work = 2.0 * math.prod(eqn.outputs[0].shape) * math.prod(left.shape[d] for d in left_contract)
    return factors.rule(
        [tuple(left_dims), tuple(right_dims), tuple(left_scales), tuple(right_scales)],
        [output],
        reduced={f: "sum" for f in contracted if f not in factors.whole},
        emit=_emit_product,
        flops=work_per_point(work, factors),
        unit="matmul",
    )


RULES: dict[str, RuleBuilder] = {
    "dot_general": _dot_general,
    "scaled_dot": _scaled_dot,
}
