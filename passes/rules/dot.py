"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Equation
from autopar.passes.rules.base import Local, Rule, bind
from autopar.passes.rules.building import (
    Factors,
    RuleBuilder,
    is_number,
    linear_sets,
    without_sharding,
)


def _dot_general(eqn: Equation) -> Rule:
    """`bik,bkj->bij`: batch, left and right dimensions are shared with the result, contracted ones are summed."""

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return bind(eqn, operands, **without_sharding(eqn, "out_sharding"))

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
        linear=linear_sets(eqn, {0}, {1}),
        emit=emit,
        flops=2.0,
        unit="matmul",
    )


RULES: dict[str, RuleBuilder] = {
    "dot_general": _dot_general,
}
