"""Primitives that cut a dimension or put parts of one together.

A part that is an equal share of its dimension is a minor factor of it (the index of the part is the whole major
factor), so that a batch in the part can be followed. Other parts keep their dimension whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from autopar.ir.graph import Equation
from autopar.ir.rule import DimMap, Local, Rule, bind
from autopar.passes.rules.building import DimFactors, Factors, RuleBuilder, linear_sets, local_size


def _slice(eqn: Equation) -> Rule:
    (operand,), (result,) = eqn.inputs, eqn.outputs
    starts = eqn.params["start_indices"]
    limits = eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    factors = Factors()
    dims: list[DimFactors] = []
    output: list[DimFactors] = []
    for size, taken, start, stride in zip(operand.shape, result.shape, starts, strides, strict=True):
        if stride == 1 and taken and size % taken == 0 and start % taken == 0:  # one of size/taken equal parts
            part = factors.new(taken)
            dims.append(factors.new_whole(size // taken) + part)
            output.append(part)
        elif stride > 1 and taken * stride == size:  # one of every `stride` elements
            part = factors.new(taken)
            dims.append(part + factors.new_whole(stride))
            output.append(part)
        else:
            dims.append(factors.new_whole(size))
            output.append(factors.new_whole(taken))

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        local_starts, local_limits = list(starts), list(limits)
        for d, dim in enumerate(output):
            taken = local_size(local, dim)
            if taken == result.shape[d]:
                continue
            if strides[d] == 1:
                local_starts[d] = starts[d] // result.shape[d] * taken
            local_limits[d] = local_starts[d] + (taken - 1) * strides[d] + 1
        return bind(eqn, operands, start_indices=tuple(local_starts), limit_indices=tuple(local_limits))

    return factors.rule([tuple(dims)], [tuple(output)], linear=linear_sets(eqn, {0}), emit=emit, flops=0.0, unit="none")


def _pad(eqn: Equation) -> Rule:
    """The transpose of a slice: the operand is an equal part of the result, or one of every so many elements."""
    operand, result = eqn.inputs[0], eqn.outputs[0]
    config = eqn.params["padding_config"]
    factors = Factors()
    dims: list[DimFactors] = []
    output: list[DimFactors] = []
    for size, full, (low, high, interior) in zip(operand.shape, result.shape, config, strict=True):
        if interior == 0 and low >= 0 and high >= 0 and size and full % size == 0 and low % size == 0:
            part = factors.new(size)
            dims.append(part)
            output.append(factors.new_whole(full // size) + part)
        elif interior > 0 and full == size * (interior + 1) and 0 <= low <= interior:
            part = factors.new(size)
            dims.append(part)
            output.append(part + factors.new_whole(interior + 1))
        else:
            dims.append(factors.new_whole(size))
            output.append(factors.new_whole(full))

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        local_config = []
        for size, full, dim, (low, high, interior) in zip(operand.shape, result.shape, dims, config, strict=True):
            piece = local_size(local, dim)
            if interior == 0 and piece != size:
                low = low // size * piece
                high = full // size * piece - piece - low
            local_config.append((low, high, interior))
        return bind(eqn, operands, padding_config=tuple(local_config))

    return factors.rule(
        [tuple(dims), ()], [tuple(output)], linear=linear_sets(eqn, {0, 1}), emit=emit, flops=0.0, unit="none"
    )


def _clamped(start: Any, limit: int) -> Any:
    """The start (traced, or a literal's value) within 0 .. limit."""
    if not isinstance(start, jax.Array):
        return np.clip(start, 0, limit).astype(np.asarray(start).dtype)
    return lax.clamp(start.dtype.type(0), start, start.dtype.type(min(limit, np.iinfo(start.dtype).max)))


def _dynamic_slice(eqn: Equation) -> Rule:
    """Where the slice takes the full extent its start is clamped to zero, so that the dimension is an ordinary one."""
    operand, result = eqn.inputs[0], eqn.outputs[0]
    factors = Factors()
    dims: list[DimFactors] = []
    output: list[DimFactors] = []
    for size, taken in zip(operand.shape, result.shape, strict=True):
        dims.append(factors.new(size) if size == taken else factors.new_whole(size))
        output.append(dims[-1] if size == taken else factors.new_whole(taken))

    limits = [size - taken for size, taken in zip(operand.shape, result.shape, strict=True)]

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        array, *starts = operands
        # XLA merges this with a slice of its result, and clamps the sum of the starts where it should clamp this one.
        starts = [_clamped(start, limit) for start, limit in zip(starts, limits, strict=True)]
        return bind(eqn, (array, *starts), slice_sizes=tuple(local_size(local, dim) for dim in output))

    inputs: list[DimMap] = [tuple(dims), *(() for _ in eqn.inputs[1:])]
    return factors.rule(inputs, [tuple(output)], linear=linear_sets(eqn, {0}), emit=emit, flops=0.0, unit="none")


def _dynamic_update_slice(eqn: Equation) -> Rule:
    operand, update = eqn.inputs[:2]
    factors = Factors()
    dims: list[DimFactors] = []
    update_dims: list[DimFactors] = []
    for size, written in zip(operand.shape, update.shape, strict=True):
        dims.append(factors.new(size) if size == written else factors.new_whole(size))
        update_dims.append(dims[-1] if size == written else factors.new_whole(written))
    inputs: list[DimMap] = [tuple(dims), tuple(update_dims), *(() for _ in eqn.inputs[2:])]
    return factors.rule(inputs, [tuple(dims)], linear=linear_sets(eqn, {0, 1}), flops=0.0, unit="none")


def _parts(factors: Factors, whole: Sequence[int], sizes: Sequence[int], axis: int) -> tuple[DimMap, list[DimMap]]:
    """The maps of an array and of its parts along an axis."""
    dims = list(factors.dims([1 if d == axis else n for d, n in enumerate(whole)]))
    if len(set(sizes)) == 1:
        part = factors.new(sizes[0])
        dims[axis] = factors.new_whole(len(sizes)) + part
        parts = [part] * len(sizes)
    else:
        dims[axis] = factors.new_whole(whole[axis])
        parts = [factors.new_whole(size) for size in sizes]
    return tuple(dims), [(*dims[:axis], part, *dims[axis + 1 :]) for part in parts]


def _split(eqn: Equation) -> Rule:
    axis = eqn.params["axis"]
    factors = Factors()
    sizes = [int(size) for size in eqn.params["sizes"]]
    dims, parts = _parts(factors, eqn.inputs[0].shape, sizes, axis)

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return bind(eqn, operands, sizes=tuple(local_size(local, part[axis]) for part in parts))

    return factors.rule([dims], parts, linear=linear_sets(eqn, {0}), emit=emit, flops=0.0, unit="none")


def _concatenate(eqn: Equation) -> Rule:
    axis = eqn.params["dimension"]
    factors = Factors()
    sizes = [operand.shape[axis] for operand in eqn.inputs]
    dims, parts = _parts(factors, eqn.outputs[0].shape, sizes, axis)
    return factors.rule(parts, [dims], linear=linear_sets(eqn, range(len(parts))), flops=0.0, unit="none")


def _stack(eqn: Equation) -> Rule:
    axis = eqn.params["axis"]
    factors = Factors()
    part = factors.dims(eqn.inputs[0].shape)
    dims = (*part[:axis], factors.new_whole(len(eqn.inputs)), *part[axis:])
    every = range(len(eqn.inputs))
    return factors.rule([part for _ in every], [dims], linear=linear_sets(eqn, every), flops=0.0, unit="none")


def _unstack(eqn: Equation) -> Rule:
    axis = eqn.params["axis"]
    factors = Factors()
    dims = factors.dims(eqn.inputs[0].shape, {axis})
    part = (*dims[:axis], *dims[axis + 1 :])
    return factors.rule([dims], [part] * len(eqn.outputs), linear=linear_sets(eqn, {0}), flops=0.0, unit="none")


RULES: dict[str, RuleBuilder] = {
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
}

# Parameters that say where in an array a piece lies, by primitive: for a plan the rule's factors say enough of it.
PLACES: dict[str, frozenset[str]] = {"slice": frozenset({"start_indices", "limit_indices"})}
