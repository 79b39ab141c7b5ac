"""Primitives that compute each element of the result from the same element of the operands.

Operands of rank 0, and dimensions of size 1 against larger ones, broadcast implicitly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autopar.ir.graph import Equation
from autopar.ir.rule import FUNCTION, DimMap, Emit, Hinted, Local, Rule, emit_cast, emit_same
from autopar.passes.rules.building import Factors, RuleBuilder, is_inexact, linear_sets

LinearOperands = Callable[[Equation], Iterable[Iterable[int]]]


def broadcast_dims(shape: Sequence[int], result: Sequence[int], dims: DimMap) -> DimMap:
    """The map of an operand of `shape` whose dimensions broadcast against those of the result."""
    if not shape:
        return ()
    return tuple(dim if size == full else () for size, full, dim in zip(shape, result, dims, strict=True))


def elementwise(linear: LinearOperands, flops: float, unit: str = "vector", emit: Emit = emit_same) -> RuleBuilder:
    """The rule builder of an elementwise primitive; `linear` names the operands that sums pass through."""

    def build(eqn: Equation) -> Rule:
        factors = Factors()
        shape = eqn.outputs[0].shape
        dims = factors.dims(shape)
        return factors.rule(
            [broadcast_dims(operand.shape, shape, dims) for operand in eqn.inputs],
            [dims] * len(eqn.outputs),
            linear=linear_sets(eqn, *linear(eqn)),
            emit=emit,
            flops=flops,
            unit=unit,
        )

    return build


def _nowhere(eqn: Equation) -> Iterable[Iterable[int]]:
    return ()


def _in_first(eqn: Equation) -> Iterable[Iterable[int]]:
    return ({0},)


def _in_all_at_once(eqn: Equation) -> Iterable[Iterable[int]]:
    return (range(len(eqn.inputs)),)


def _in_each(eqn: Equation) -> Iterable[Iterable[int]]:
    return tuple({i} for i in range(len(eqn.inputs)))


def _in_cases(eqn: Equation) -> Iterable[Iterable[int]]:
    return (range(1, len(eqn.inputs)),)


def _in_first_if_inexact(eqn: Equation) -> Iterable[Iterable[int]]:
    """Quotients of integers round each partial sum, those of floats the sum just as well."""
    return ({0},) if is_inexact(eqn.inputs[0]) and is_inexact(eqn.outputs[0]) else ()


def _in_first_if_it_holds_partial_sums(eqn: Equation) -> Iterable[Iterable[int]]:
    """A cast to 16 bits rounds the sum, not what is summed: that is held in 32 (`emit_piece`). float8 holds none."""
    inexact = is_inexact(eqn.inputs[0]) and is_inexact(eqn.outputs[0])
    return ({0},) if inexact and eqn.outputs[0].dtype.itemsize > 1 else ()


def _in_first_if_power_is_one(eqn: Equation) -> Iterable[Iterable[int]]:
    return ({0},) if eqn.params["y"] == 1 else ()


def _bitcast(eqn: Equation) -> Rule:
    """Between dtypes of different width the last dimension appears or vanishes, and stays whole."""
    (operand,), (result,) = eqn.inputs, eqn.outputs
    rank = min(len(operand.shape), len(result.shape))
    factors = Factors()
    shared = factors.dims(operand.shape[:rank])
    inputs = shared + factors.dims(operand.shape[rank:], range(1))
    outputs = shared + factors.dims(result.shape[rank:], range(1))
    return factors.rule([inputs], [outputs], flops=0.0, unit="none")


def _constraint(eqn: Equation) -> Rule:
    """A sharding or layout that the user's code asks for: the plan decides instead, and nothing is left to compute."""

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return list(operands)

    factors = Factors()
    dims = factors.dims(eqn.outputs[0].shape)
    return factors.rule([dims], [dims], linear=linear_sets(eqn, {0}), emit=emit, flops=0.0, unit="none")


def _hint(eqn: Equation) -> Rule:
    """What the user pins of it only limits the strategies."""
    rule = _constraint(eqn)
    dims = tuple(frozenset(dim) for dim in rule.outputs[0])
    return dataclasses.replace(rule, hints=(Hinted(eqn.params["hint"], dims, frozenset()),), emit=emit_same)


# Names that only some of the supported versions of JAX know are no burden to the others.
_SIMPLE = """abs and ceil clamp clz eq eq_to floor ge gt is_finite le le_to lt lt_to max min mulhi ne nextafter not
    one_minus_square or population_count rem round shift_left shift_right_arithmetic shift_right_logical sign square
    xor"""
_FUNCTIONS = """acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf exp exp2 expm1 log log1p log2 logistic pow
    rsqrt sin sinh sqrt tan tanh"""
# Functions that XLA has no instruction for, and how many operations it makes of one for GPUs (jaxlib 0.10.2). What a
# loop repeats counts once.
EXPANDED = {
    "bessel_i0e": 87.0, "bessel_i1e": 87.0, "digamma": 85.0, "erf_inv": 45.0, "erfc": 64.0, "igamma": 220.0,
    "igamma_grad_a": 370.0, "igammac": 220.0, "lgamma": 68.0, "polygamma": 320.0,
    "regularized_incomplete_beta": 360.0, "zeta": 164.0,
}  # fmt: skip

THREEFRY_FLOPS = 115.0  # 20 rounds of add, rotate (3) and xor, and five key injections of 3

RULES: dict[str, RuleBuilder] = {
    **{name: elementwise(_nowhere, 1.0) for name in _SIMPLE.split()},
    **{name: elementwise(_nowhere, FUNCTION) for name in _FUNCTIONS.split()},
    **{name: elementwise(_nowhere, operations) for name, operations in EXPANDED.items()},
    "add": elementwise(_in_all_at_once, 1.0),
    "add_any": elementwise(_in_all_at_once, 1.0),
    "bitcast_convert_type": _bitcast,
    "complex": elementwise(_in_all_at_once, 0.0, "none"),
    "conj": elementwise(_in_first, 1.0),
    "convert_element_type": elementwise(_in_first_if_it_holds_partial_sums, 1.0, emit=emit_cast),
    "copy": elementwise(_in_first, 0.0, "none"),
    "copy_p": elementwise(_in_first, 0.0, "none"),
    "div": elementwise(_in_first_if_inexact, 1.0),
    "empty2": elementwise(_nowhere, 0.0, "none"),  # residuals of the branch of a cond that was not taken
    "imag": elementwise(_in_first, 0.0, "none"),
    "integer_pow": elementwise(_in_first_if_power_is_one, 2.0),
    "mul": elementwise(_in_each, 1.0),
    "name": elementwise(_in_first, 0.0, "none"),
    "neg": elementwise(_in_first, 1.0),
    "polynomial": elementwise(_in_cases, 4.0),  # of the first operand; the others are its coefficients
    "philox2x32": elementwise(_nowhere, 60.0),  # 10 rounds of a product and three more operations
    "philox4x32": elementwise(_nowhere, 100.0),
    "platform_index": elementwise(_nowhere, 0.0, "none"),
    "random_clone": elementwise(_nowhere, 0.0, "none"),
    "random_fold_in": elementwise(_nowhere, THREEFRY_FLOPS),
    "random_seed": elementwise(_nowhere, 1.0),
    "real": elementwise(_in_first, 0.0, "none"),
    "reduce_precision": elementwise(_nowhere, 1.0),
    "select_n": elementwise(_in_cases, 1.0),
    "autopar_hint": _hint,
    "layout_constraint": _constraint,
    "sharding_constraint": _constraint,
    "relayout": _constraint,
    "reshard": _constraint,
    "stage": elementwise(_in_first, 0.0, "none"),
    "stop_gradient": elementwise(_in_first, 0.0, "none"),
    "sub": elementwise(_in_all_at_once, 1.0),
    "threefry2x32": elementwise(_nowhere, THREEFRY_FLOPS),
    "threefry4x32": elementwise(_nowhere, 2 * THREEFRY_FLOPS),
    "zeros_like": elementwise(_nowhere, 0.0, "none"),
}
