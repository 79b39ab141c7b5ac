"""Reductions, scans along a dimension, sorting and windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autopar.ir.graph import Equation
from autopar.passes.rules.base import DimMap, Local, ReduceOp, Rule, bind
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


def _windows(count: int, linear: bool = False) -> RuleBuilder:
    """`count` arrays, then scalars to start from; dimensions without a window are ordinary ones."""

    def build(eqn: Equation) -> Rule:
        arrays = count or len(eqn.inputs) // 2
        shape = eqn.outputs[0].shape
        ones = (1,) * len(shape)
        params = eqn.params
        plain = [
            window == stride == base == dilation == 1 and tuple(padding) == (0, 0)
            for window, stride, base, dilation, padding in zip(
                params["window_dimensions"],
                params["window_strides"],
                params.get("base_dilation", ones),
                params.get("window_dilation", ones),
                params["padding"],
                strict=True,
            )
        ]
        factors = Factors()
        ordinary = [factors.new(size) if is_plain else () for size, is_plain in zip(shape, plain, strict=True)]

        def place(sizes: Sequence[int]) -> DimMap:
            return tuple(
                dim if is_plain else factors.new_whole(size)
                for dim, size, is_plain in zip(ordinary, sizes, plain, strict=True)
            )

        inputs = [place(operand.shape) if i < arrays else () for i, operand in enumerate(eqn.inputs)]
        outputs = [place(value.shape) for value in eqn.outputs]
        work = float(math.prod(params["window_dimensions"]) * math.prod(shape))
        sums = linear_sets(eqn, {0}) if linear else ()
        return factors.rule(inputs, outputs, linear=sums, flops=work_per_point(work, factors))

    return build


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
    "reduce_window": _windows(0),
    "reduce_window_max": _windows(1),
    "reduce_window_min": _windows(1),
    "reduce_window_sum": _windows(1, linear=True),
    "reduce_xor": _reduction(None),
    "select_and_gather_add": _windows(2, linear=True),
    "select_and_scatter": _windows(2),
    "select_and_scatter_add": _windows(2, linear=True),
    "sort": _along("dimension", _comparisons),
    "top_k": _along("axis", _comparisons),
}
