"""Gathers and scatters: table look-ups and their gradients, `take_along_axis`, `x.at[i].add(y)`.

A dimension that indices point into ("table" below: the vocabulary of an embedding) can be cut too. Each piece
shifts the indices by its start. A gather puts zeros where an index points into another piece, so that the
results of the pieces add up; a scatter drops what belongs to another piece.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from autopar.ir.graph import Equation
from autopar.ir.rule import Local, ReduceOp, Rule, bind
from autopar.passes.rules.building import (
    DimFactors,
    Factors,
    RuleBuilder,
    is_inexact,
    is_number,
    linear_sets,
    local_size,
    work_per_point,
)

_CLIP = lax.GatherScatterMode.CLIP
_DROP = lax.GatherScatterMode.FILL_OR_DROP


def _components(indices: Any) -> list[Any]:
    """The index vectors (the last dimension) as one signed array per component."""
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        # What a signed integer can't hold is out of bounds, and must not come out negative or small.
        if indices.dtype.itemsize >= 4:
            limit = 2 ** (8 * indices.dtype.itemsize - 1) - 1
            indices = lax.min(indices, lax.full_like(indices, limit))
        indices = lax.convert_element_type(indices, jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32)
    elif indices.dtype.itemsize < 4:
        indices = lax.convert_element_type(indices, jnp.int32)
    last = indices.ndim - 1
    return [lax.index_in_dim(indices, k, last, keepdims=False) for k in range(indices.shape[last])]


def _vectors(components: Sequence[Any]) -> Any:
    rank = components[0].ndim
    return lax.concatenate([lax.expand_dims(c, (rank,)) for c in components], rank)


def _within(index: Any, low: Any, high: Any) -> Any:
    """Whether low <= index < high; the bounds are scalars."""
    low, high = (lax.convert_element_type(bound, index.dtype) for bound in (low, high))
    shape = index.shape
    return lax.bitwise_and(lax.ge(index, lax.broadcast(low, shape)), lax.lt(index, lax.broadcast(high, shape)))


def _clipped(index: Any, size: int) -> Any:
    return lax.clamp(lax.full_like(index, 0, shape=()), index, lax.full_like(index, size - 1, shape=()))


def _shifted(index: Any, start: Any) -> Any:
    return lax.sub(index, lax.broadcast(lax.convert_element_type(start, index.dtype), index.shape))


def _all_of(conditions: Iterable[Any]) -> Any:
    return functools.reduce(lax.bitwise_and, conditions)


def _is_first_piece(local: Local, factors: Iterable[int]) -> Any:
    """A traced bool: whether the piece is the first along every split one of the factors."""
    return _all_of(lax.eq(jnp.int32(local.start(f)), jnp.int32(0)) for f in factors if local.is_split(f))


def _gather(eqn: Equation) -> Rule:
    operand, indices = eqn.inputs
    (result,) = eqn.outputs
    numbers, mode, slice_sizes = (eqn.params[name] for name in ("dimension_numbers", "mode", "slice_sizes"))
    factors = Factors()
    index_dims = [factors.new(size) for size in indices.shape[:-1]]
    batch_positions = [d for d in range(len(result.shape)) if d not in numbers.offset_dims]
    output: list[DimFactors] = [()] * len(result.shape)
    for d, dim in zip(batch_positions, index_dims, strict=True):
        output[d] = dim

    combine: ReduceOp | None = "sum" if is_number(result) else "or" if result.dtype == jnp.bool_ else None
    reduced: dict[int, ReduceOp] = {}
    tables: dict[int, tuple[int, int]] = {}  # component of the index vector -> factor and dimension it points into
    windows: dict[int, DimFactors] = {}  # dimension of the operand -> factors of the window along it
    shared = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    offsets = iter(numbers.offset_dims)
    dims: list[DimFactors] = []
    for d, (size, window) in enumerate(zip(operand.shape, slice_sizes, strict=True)):
        if d in shared:
            dims.append(index_dims[shared[d]])
        elif d in numbers.collapsed_slice_dims:
            if d in numbers.start_index_map and combine is not None:
                dims.append(factors.new(size))
                for f in dims[-1]:
                    tables[numbers.start_index_map.index(d)] = (f, d)
                    reduced[f] = combine
            else:
                dims.append(factors.new_whole(size))
        else:
            dims.append(factors.new(size) if size == window else factors.new_whole(size))
            windows[d] = dims[-1] if size == window else factors.new_whole(window)
            output[next(offsets)] = windows[d]

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        array, vectors = operands
        sizes = tuple(local_size(local, windows[d]) if d in windows else n for d, n in enumerate(slice_sizes))
        split = {k: table for k, table in tables.items() if local.is_split(table[0])}
        if not split:
            return bind(eqn, operands, slice_sizes=sizes)
        components = _components(vectors)
        owned, inside = [], []
        for k, (f, d) in split.items():
            start, piece, size = local.start(f), local.size(f), operand.shape[d]
            # XLA clips the indices of a gather that promises to be in bounds.
            index = components[k] if mode == _DROP else _clipped(components[k], size)
            shifted = _shifted(index, start)
            owned.append(_within(shifted, 0, piece))
            zeros = lax.full_like(index, 0)
            if mode == _DROP:
                inside.append(_within(index, 0, size))
                zeros = lax.select(inside[-1], zeros, lax.full_like(index, piece))
            components[k] = lax.select(owned[-1], shifted, zeros)
        keep = _all_of(owned)
        if mode == _DROP:  # what lies in no piece is filled in by the first
            first = _is_first_piece(local, (f for f, _ in split.values()))
            missing = lax.bitwise_not(_all_of(inside))
            keep = lax.bitwise_or(keep, lax.bitwise_and(missing, lax.broadcast(first, missing.shape)))
        (rows,) = bind(
            eqn,
            (array, _vectors(components)),
            slice_sizes=sizes,
            indices_are_sorted=False,
            unique_indices=False,
        )
        keep = lax.broadcast_in_dim(keep, rows.shape, batch_positions)
        return [lax.select(keep, rows, lax.full_like(rows, 0))]

    # A filled-in value would be counted once per partial sum; not a number stays what it is.
    fill = eqn.params.get("fill_value")
    fill_adds_up = mode != _DROP or fill == 0 or (is_inexact(result) and (fill is None or fill != fill))
    return factors.rule(
        [tuple(dims), (*index_dims, factors.new_whole(indices.shape[-1]))],
        [tuple(output)],
        reduced=reduced,
        linear=linear_sets(eqn, {0}) if fill_adds_up else (),
        emit=emit,
        flops=0.0,
    )


def _update_in(dtype: Any, eqn: Equation) -> dict[str, Any]:
    """The parameter of a scatter that says how an update meets what is there, for numbers of this type."""
    update = eqn.params.get("update_jaxpr")
    if update is None or dtype == eqn.inputs[0].dtype:
        return {}
    number = jax.ShapeDtypeStruct((), dtype)
    combine = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(update, eqn.params["update_consts"]))
    return {"update_jaxpr": jax.make_jaxpr(combine)(number, number).jaxpr, "update_consts": ()}


def _scatter(op: ReduceOp | None, neutral: int | None, linear: Sequence[set[int]]) -> RuleBuilder:
    """`op` combines the results of pieces of the updates; None where the last update wins.

    The operand counts once: all pieces of the updates but the first start from `neutral`, or from the operand
    itself where repeating it does no harm (None).
    """

    def build(eqn: Equation) -> Rule:
        operand, indices, updates = eqn.inputs
        numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
        factors = Factors()
        shared = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
        combined = op is not None and is_number(operand)
        index_dims = [
            factors.new(size) if combined or d in shared.values() else factors.new_whole(size)
            for d, size in enumerate(indices.shape[:-1])
        ]
        reduced: dict[int, ReduceOp] = {}
        if op is not None and combined:
            reduced = {f: op for d, dim in enumerate(index_dims) if d not in shared.values() for f in dim}
            reduced = {f: op for f in reduced if f not in factors.whole}

        update_dims: list[DimFactors] = [()] * len(updates.shape)
        scatter_positions = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
        for d, dim in zip(scatter_positions, index_dims, strict=True):
            update_dims[d] = dim
        tables: dict[int, int] = {}  # component of the index vector -> factor of the dimension it points into
        limits: dict[int, tuple[int, int]] = {}  # component -> dimension and window size, for clipping
        windows = iter(numbers.update_window_dims)
        dims: list[DimFactors] = []
        for d, size in enumerate(operand.shape):
            window = 1
            if d in shared:
                dims.append(index_dims[shared[d]])
            elif d in numbers.inserted_window_dims:
                dims.append(factors.new(size))
                if d in numbers.scatter_dims_to_operand_dims:
                    for f in dims[-1]:
                        tables[numbers.scatter_dims_to_operand_dims.index(d)] = f
                else:
                    factors.whole.update(dims[-1])
            else:
                position = next(windows)
                window = updates.shape[position]
                dims.append(factors.new(size) if size == window else factors.new_whole(size))
                update_dims[position] = dims[-1] if size == window else factors.new_whole(window)
            if d in numbers.scatter_dims_to_operand_dims:
                limits[numbers.scatter_dims_to_operand_dims.index(d)] = (d, size - window + 1)

        def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
            array, vectors, changes = operands
            dtype = eqn.outputs[0].dtype
            array, changes = (lax.convert_element_type(x, dtype) for x in (array, changes))
            eqn = dataclasses.replace(eqn, params={**eqn.params, **_update_in(dtype, eqn)})
            if neutral is not None and any(local.is_split(f) for f in reduced):
                array = lax.select(_is_first_piece(local, reduced), array, lax.full_like(array, neutral))
            split = {k: f for k, f in tables.items() if local.is_split(f)}
            if not split:
                return bind(eqn, (array, vectors, changes))
            components = _components(vectors)
            for k, index in enumerate(components):
                if mode == _CLIP:
                    index = _clipped(index, limits[k][1])
                if k in split:
                    shifted = _shifted(index, local.start(split[k]))
                    piece = local.size(split[k])
                    # Just beyond the piece: out of bounds, so dropped.
                    index = lax.select(_within(shifted, 0, piece), shifted, lax.full_like(index, piece))
                components[k] = index
            return bind(
                eqn,
                (array, _vectors(components), changes),
                mode=_DROP,
                indices_are_sorted=False,
                unique_indices=False,
            )

        # A plain scatter may also apply a function of the user's to what is there.
        applies = eqn.primitive.name == "scatter" and eqn.params.get("update_jaxpr") is not None
        return factors.rule(
            [tuple(dims), (*index_dims, factors.new_whole(indices.shape[-1])), tuple(update_dims)],
            [tuple(dims)],
            reduced=reduced,
            linear=() if applies else linear_sets(eqn, *linear),
            emit=emit,
            flops=work_per_point(math.prod(updates.shape), factors),
            aliases={0: 0},
        )

    return build


_SCATTERS: dict[str, RuleBuilder] = {
    "scatter": _scatter(None, None, [{0, 2}]),
    "scatter-add": _scatter("sum", 0, [{0, 2}]),
    "scatter-max": _scatter("max", None, []),
    "scatter-min": _scatter("min", None, []),
    "scatter-mul": _scatter("prod", 1, [{0}]),
    "scatter-sub": _scatter("sum", 0, [{0, 2}]),
}

RULES: dict[str, RuleBuilder] = {"gather": _gather, **_SCATTERS}
