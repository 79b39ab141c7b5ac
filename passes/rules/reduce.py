"""Reductions, scans along a dimension and sorting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from autopar.ir.graph import Equation
from autopar.ir.rule import DimMap, Local, ReduceOp, Rule, bind
from autopar.passes.rules.building import (
    Factors,
    RuleBuilder,
    is_number,
    linear_sets,
    without_sharding,
    work_per_point,
)


def _reduction(op: ReduceOp | None) -> RuleBuilder:
    """`op` says how the results of pieces are combined; None where they can't be."""

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if op == "sum":
            operands = [lax.convert_element_type(x, eqn.outputs[0].dtype) for x in operands]
        return bind(eqn, operands, **without_sharding(eqn, "out_sharding"))

    def build(eqn: Equation) -> Rule:
        axes = set(eqn.params["axes"])
        combined = op is not None and (op != "sum" or is_number(eqn.outputs[0]))
        factors = Factors()
        dims = factors.dims(eqn.inputs[0].shape, () if combined else axes)
        output = tuple(dim for d, dim in enumerate(dims) if d not in axes)
        reduced = {f: op for d in axes for f in dims[d] if f not in factors.whole}
        linear = linear_sets(eqn, {0}) if op == "sum" else ()
        return factors.rule([dims], [output], reduced=reduced, linear=linear, emit=emit)

    return build


def _general_reduce(eqn: Equation) -> Rule:
    """A user's own reduction: the operands, then as many scalars to start from."""
    reduced = set(eqn.params["dimensions"])
    count = len(eqn.inputs) // 2
    factors = Factors()
    dims = factors.dims(eqn.inputs[0].shape, reduced)
    output = tuple(dim for d, dim in enumerate(dims) if d not in reduced)
    return factors.rule([*[dims] * count, *[()] * count], [output] * count)


def _along(parameter: str, flops: Callable[[int], float], linear: bool = False) -> RuleBuilder:
    """The dimension that a parameter names is whole, also where the result has another size along it."""

    def build(eqn: Equation) -> Rule:
        shape = eqn.inputs[0].shape
        axis = eqn.params[parameter] % len(shape)
        factors = Factors()
        dims = factors.dims(shape, {axis})
        outputs: list[DimMap] = []
        for value in eqn.outputs:
            size = value.shape[axis]
            along = dims[axis] if size == shape[axis] else factors.new_whole(size)
            outputs.append((*dims[:axis], along, *dims[axis + 1 :]))
        # A shorter result (the k of top_k) adds a factor that is no loop of its own.
        points = math.prod(shape)
        return factors.rule(
            [dims] * len(eqn.inputs),
            outputs,
            linear=linear_sets(eqn, {0}) if linear else (),
            flops=work_per_point(flops(shape[axis]) * points, factors),
        )

    return build


def _comparisons(size: int) -> float:
    return math.log2(max(2, size))


RULES: dict[str, RuleBuilder] = {
    "approx_top_k": _along("reduction_dimension", _comparisons),
    "argmax": _reduction(None),
    "argmin": _reduction(None),
    "cumlogsumexp": _along("axis", lambda size: 4.0),
    "cummax": _along("axis", lambda size: 1.0),
    "cummin": _along("axis", lambda size: 1.0),
    "cumprod": _along("axis", lambda size: 1.0),
    "cumsum": _along("axis", lambda size: 1.0, linear=True),
    "reduce": _general_reduce,
    "reduce_and": _reduction("and"),
    "reduce_max": _reduction("max"),
    "reduce_min": _reduction("min"),
    "reduce_or": _reduction("or"),
    "reduce_prod": _reduction("prod"),
    "reduce_sum": _reduction("sum"),
    "reduce_xor": _reduction(None),
    "sort": _along("dimension", _comparisons),
    "top_k": _along("axis", _comparisons),
}
