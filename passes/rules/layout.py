"""Primitives that rename, repeat or renumber dimensions without moving a part of one into another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from autopar.ir.graph import Equation
from autopar.ir.rule import DimMap, Local, Rule, bind
from autopar.passes.rules.building import (
    DimFactors,
    Factors,
    RuleBuilder,
    is_number,
    linear_sets,
    local_shape,
    local_size,
    replicated,
    without_sharding,
)


def common_factors(factors: Factors, old: Sequence[int], new: Sequence[int]) -> tuple[DimMap, DimMap]:
    """Factor two shapes of the same number of elements, major to minor.

    1. Walk both shapes at once; what is left of the two present dimensions shares its greatest common divisor.
    2. Where one of the two is used up, go on to the next dimension on its side: `(B, T, H*D) -> (B*T, H, D)`
       gives B, T, H, D.
    3. Where neither is used up the boundaries don't meet, as in `(2, 3) -> (3, 2)`: what is left of the two, and
       the dimensions that follow on both sides until the products meet again, get whole factors of their own.
    """
    old_dims: list[DimFactors] = [()] * len(old)
    new_dims: list[DimFactors] = [()] * len(new)
    if math.prod(old) == 0:
        return factors.dims(old, range(len(old))), factors.dims(new, range(len(new)))
    i = j = 0
    left, right = (old[0] if old else 1), (new[0] if new else 1)
    while i < len(old) and j < len(new):
        shared = math.gcd(left, right)
        factor = factors.new(shared)
        old_dims[i] += factor
        new_dims[j] += factor
        left, right = left // shared, right // shared
        if left > 1 and right > 1:
            old_dims[i] += factors.new_whole(left)
            new_dims[j] += factors.new_whole(right)
            while left != right:
                if left < right:
                    i += 1
                    old_dims[i] = factors.new_whole(old[i])
                    left *= old[i]
                else:
                    j += 1
                    new_dims[j] = factors.new_whole(new[j])
                    right *= new[j]
            left = right = 1
        if left == 1:
            i += 1
            left = old[i] if i < len(old) else 1
        if right == 1:
            j += 1
            right = new[j] if j < len(new) else 1
    return tuple(old_dims), tuple(new_dims)


def _reshape(eqn: Equation) -> Rule:
    """`dimensions`: the order in which the operand's are read (None: as they are)."""
    if len(eqn.inputs) > 1:  # sizes known at run time only
        return replicated(eqn)
    shape = eqn.inputs[0].shape
    order = eqn.params.get("dimensions") or tuple(range(len(shape)))
    factors = Factors()
    ordered, new = common_factors(factors, [shape[d] for d in order], eqn.outputs[0].shape)
    old = tuple(ordered[order.index(d)] for d in range(len(shape)))

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return bind(eqn, operands, new_sizes=local_shape(local, new), **without_sharding(eqn))

    is_bitcast = order == tuple(range(len(shape)))
    return factors.rule(
        [old], [new], linear=linear_sets(eqn, {0}), emit=emit, flops=0.0, unit="none", is_bitcast=is_bitcast
    )


def _broadcast_in_dim(eqn: Equation) -> Rule:
    if len(eqn.inputs) > 1:  # sizes known at run time only
        return replicated(eqn)
    (operand,), (result,) = eqn.inputs, eqn.outputs
    factors = Factors()
    output = factors.dims(result.shape)
    target = eqn.params["broadcast_dimensions"]
    dims = tuple(output[t] if n == result.shape[t] else () for n, t in zip(operand.shape, target, strict=True))

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return bind(eqn, operands, shape=local_shape(local, output), **without_sharding(eqn))

    return factors.rule([dims], [output], linear=linear_sets(eqn, {0}), emit=emit, flops=0.0, unit="none")


def _transpose(eqn: Equation) -> Rule:
    factors = Factors()
    dims = factors.dims(eqn.inputs[0].shape)
    output = tuple(dims[d] for d in eqn.params["permutation"])
    return factors.rule([dims], [output], linear=linear_sets(eqn, {0}), flops=0.0, unit="none")


def _squeeze(eqn: Equation) -> Rule:
    (operand,) = eqn.inputs
    dropped = {d % len(operand.shape) for d in eqn.params["dimensions"]}
    factors = Factors()
    dims = factors.dims(operand.shape)
    output = tuple(dim for d, dim in enumerate(dims) if d not in dropped)
    return factors.rule([dims], [output], linear=linear_sets(eqn, {0}), flops=0.0, unit="none")


def _rev(eqn: Equation) -> Rule:
    factors = Factors()
    dims = factors.dims(eqn.inputs[0].shape, eqn.params["dimensions"])
    return factors.rule([dims], [dims], linear=linear_sets(eqn, {0}), flops=0.0, unit="none")


def _iota(eqn: Equation) -> Rule:
    if eqn.inputs:  # sizes known at run time only
        return replicated(eqn)
    (result,) = eqn.outputs
    factors = Factors()
    dims = factors.dims(result.shape)
    counted = dims[eqn.params["dimension"]]

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        shape = local_shape(local, dims)
        if not any(local.is_split(f) for f in counted):
            return bind(eqn, operands, shape=shape, **without_sharding(eqn))
        # Counted in integers: in a narrow float the piece's own count plus its start would round differently.
        index = lax.broadcasted_iota("int32", shape, eqn.params["dimension"])
        index = lax.add(index, lax.broadcast(local.start(counted[0]), shape))
        return [lax.convert_element_type(index, result.dtype)]

    return factors.rule([], [dims], emit=emit, flops=0.0, unit="none")


def _tile(eqn: Equation) -> Rule:
    factors = Factors()
    dims = factors.dims(eqn.inputs[0].shape)
    repeats = tuple(factors.new(r) for r in eqn.params["reps"])
    output = tuple(r + dim for r, dim in zip(repeats, dims, strict=True))

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return bind(eqn, operands, reps=tuple(local_size(local, r) for r in repeats))

    return factors.rule([dims], [output], linear=linear_sets(eqn, {0}), emit=emit, flops=0.0, unit="none")


def _optimization_barrier(eqn: Equation) -> Rule:
    """Each operand passes through on its own; sums pass only together."""
    factors = Factors()
    dims = [factors.dims(operand.shape) for operand in eqn.inputs]
    summable = all(is_number(operand) for operand in eqn.inputs)
    every = (frozenset(range(len(eqn.inputs))),) if summable and eqn.inputs else ()
    return factors.rule(dims, dims, linear=every, separable=True, flops=0.0, unit="none")


def _device_put(eqn: Equation) -> Rule:
    """Without a device it says nothing; a place that the user names is not ours to change."""

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return list(operands)

    if any(device is not None for device in eqn.params["devices"]):
        return replicated(eqn)
    return dataclasses.replace(_optimization_barrier(eqn), emit=emit)


RULES: dict[str, RuleBuilder] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "device_put": _device_put,
    "iota": _iota,
    "optimization_barrier": _optimization_barrier,
    "reshape": _reshape,
    "rev": _rev,
    "squeeze": _squeeze,
    "tile": _tile,
    "transpose": _transpose,
}
