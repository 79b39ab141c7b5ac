"""Reshard steps carried out on local pieces, and the collectives of a jaxpr counted.

One step is one collective, over several mesh axes at once where it names several: what was priced is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from autopar.cost_model.reshard import permutation, step_result
from autopar.errors import InternalError
from autopar.ir.context import Pairs
from autopar.ir.graph import Value, accumulator_dtype
from autopar.ir.mesh import Mesh
from autopar.ir.rule import halo_hops
from autopar.ir.sharding import Collective, ReshardStep, Sharding, StepKind


def apply_steps(
    x: Any, steps: Sequence[ReshardStep], before: Sharding, mesh: Mesh, dtype: Any, summed: Any = None
) -> Any:
    """Carry the steps out on a local piece, inside a `jax.shard_map` that is manual over all axes of the mesh.

    `before` is the sharding of the piece, `dtype` that of the whole, `summed` that of partial sums (default: see
    `accumulator_dtype`). PRNG keys travel as their words, which are never summed. Of arrays without elements nothing is
    sent.
    """
    if steps and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(x)
        extra = words.ndim - x.ndim
        whole = Sharding(before.dims + ((),) * extra, before.partial)
        return jax.random.wrap_key_data(
            apply_steps(words, steps, whole, mesh, words.dtype), impl=jax.random.key_impl(x)
        )
    summed = accumulator_dtype(dtype) if summed is None else summed
    whole_shape = tuple(size * n for size, n in zip(x.shape, before.tiles(mesh), strict=True))
    for step in steps:
        before = step_result(step, before)
        # XLA refuses some collectives of arrays without elements.
        x = _apply(x, step, mesh) if x.size else jnp.zeros(before.local_shape(whole_shape, mesh), x.dtype)
        x = x.astype(summed if before.partial else dtype)
    return x


def sum_kinds(size: int, itemsize: int, summed: int, count: int) -> tuple[tuple[StepKind, int], ...]:
    """The collectives of a sum over `count` devices of so many elements, each with the bytes of an element in it.

    What is summed in a wider type than its own (`summed` bytes) is gathered in its own: three quarters of the bytes.
    """
    if summed == itemsize or not size or size % count:
        return (("all_reduce", summed),)
    return (("reduce_scatter", summed), ("all_gather", itemsize))


def psum_at_once(x: Any, axes: Sequence[str], value: Value) -> Any:
    """The sum over mesh axes of partial sums of a value, by `sum_kinds`."""
    x = x.astype(value.accumulator_dtype)
    if len(sum_kinds(x.size, value.itemsize, value.sum_itemsize, jax.lax.axis_size(tuple(axes)))) == 1:
        return jax.lax.psum(x, tuple(axes))
    return all_gather(psum_scatter(x.reshape(-1), axes, 0).astype(value.dtype), axes, 0).reshape(x.shape)


def extreme_itemsize(dtype: Any) -> int:
    """Bytes of an element while the largest or smallest over devices is looked for: floats have four at least."""
    itemsize = int(jnp.dtype(dtype).itemsize)
    return max(itemsize, 4) if jnp.issubdtype(dtype, jnp.floating) else itemsize


def extreme(x: Any, axes: Sequence[str], largest: bool) -> Any:
    """The largest (or smallest) over mesh axes, element by element; a NaN anywhere is a NaN, as on one device.

    Neither XLA's all-reduce for CPUs nor NCCL's has NaN win over numbers, and which of two zeros wins is left open.
    Floats therefore travel as integers of the same order.
    """
    reduce: Any = jax.lax.pmax if largest else jax.lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, tuple(axes))
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    number: Any = np.int32 if wide.dtype.itemsize == 4 else np.int64
    limits = np.iinfo(number)
    # The bits of floats below zero rise as the floats fall; those of NaN stand above or below all others by their sign.
    keys = _as_ordered(jax.lax.bitcast_convert_type(wide, number), limits.max)
    keys = jnp.where(jnp.isnan(wide), jnp.asarray(limits.max if largest else limits.min, number), keys)
    bits = _as_ordered(reduce(keys, tuple(axes)), limits.max)
    return jax.lax.bitcast_convert_type(bits, wide.dtype).astype(x.dtype)


def _as_ordered(bits: Any, most: int) -> Any:
    """Integers in the order of the floats that have these bits, and back again."""
    return jnp.where(bits < 0, bits ^ jnp.asarray(most, bits.dtype), bits)


def psum_scatter(x: Any, axes: Sequence[str], dim: int) -> Any:
    """A piece along `dim` of the sum over mesh axes."""
    return jax.lax.psum_scatter(x, tuple(axes), scatter_dimension=dim, tiled=True)


def all_gather(x: Any, axes: Sequence[str], dim: int) -> Any:
    """The pieces along `dim` from all positions along mesh axes."""
    return jax.lax.all_gather(x, tuple(axes), axis=dim, tiled=True)


def take_piece(x: Any, axes: Sequence[str], dim: int) -> Any:
    """This device's piece along `dim` of what all positions along mesh axes have."""
    size = x.shape[dim] // jax.lax.axis_size(tuple(axes))
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(tuple(axes)) * size, size, dim)


def send(x: Any, kind: StepKind, axes: Sequence[str], dim: int, to_dim: int, pairs: Pairs) -> Any:
    """A collective over all pieces along mesh axes (major first).

    What is gathered or scattered lies along `dim`; an all-to-all cuts `to_dim` and puts pieces together along `dim`.
    """
    match kind:
        case "all_gather":
            return all_gather(x, axes, dim)
        case "reduce_scatter":
            return psum_scatter(x, axes, dim)
        case "all_to_all":
            return jax.lax.all_to_all(x, tuple(axes), split_axis=to_dim, concat_axis=dim, tiled=True)
        case "permute":
            moves = any(i != j for i, j in pairs)
            return jax.lax.ppermute(x, tuple(axes), pairs) if moves else x
        case _:
            raise InternalError(f"pieces of an equation send nothing by {kind}")


def _apply(x: Any, step: ReshardStep, mesh: Mesh) -> Any:
    # Axes of size 1 hold everything already: leaving them out keeps the lowered program free of empty collectives.
    axes = tuple(axis for axis in step.axes if mesh.axis_size(axis) > 1)
    if not axes:
        return x
    match step.kind:
        case "all_reduce":
            return jax.lax.psum(x, axes)
        case "reduce_scatter":
            return psum_scatter(x, axes, step.dim)
        case "all_gather":
            return all_gather(x, axes, step.dim)
        case "all_to_all":
            return jax.lax.all_to_all(x, axes[0], split_axis=step.to_dim, concat_axis=step.dim, tiled=True)
        case "slice":
            return take_piece(x, axes, step.dim)
        case "mask":
            return jnp.where(jax.lax.axis_index(axes) == 0, x, jnp.zeros_like(x))
        case "permute":
            moved, pairs = permutation(step, mesh)
            return jax.lax.ppermute(x, moved, pairs) if moved else x


def shift(axes: Sequence[str], distance: int, mesh: Mesh) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The axes along which something moves that goes so many positions on along `axes` (major first, not around).

    Also (from, to) for each position along these axes.
    """
    size = math.prod(mesh.axis_size(axis) for axis in axes)
    pairs = tuple((i, i + distance) for i in range(size) if 0 <= i + distance < size)
    return moved_axes(axes, pairs, mesh), pairs


class Halos:
    """What the pieces of one program borrow from one another; what two equations need alike is sent once."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # By the array's identity, so that the arrays must stay alive: (array, what was sent or made of it).
        self._sent: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._grown: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def borrow(self, x: Any, dim: int, before: int, after: int, fill: Any, axes: tuple[str, ...]) -> Any:
        """A local piece between what the pieces before and after it along `axes` (major first) hold next to it.

        `before` and `after` elements along `dim`; `fill` (None: zeros) beyond the ends of the whole array.
        """
        key = (id(x), dim, before, after, id(fill) if isinstance(fill, jax.Array) else fill)
        if key not in self._grown:
            parts = [*self._side(x, dim, before, 1, fill, axes)[::-1], x, *self._side(x, dim, after, -1, fill, axes)]
            self._grown[key] = x, jax.lax.concatenate(parts, dim)
        return self._grown[key][1]

    def _side(self, x: Any, dim: int, width: int, way: int, fill: Any, axes: tuple[str, ...]) -> list[Any]:
        """What comes from one side: from the piece beside this one to the one farthest away."""
        count = math.prod(self._mesh.axis_size(axis) for axis in axes)
        parts = []
        for distance, length in halo_hops(width, x.shape[dim], count):
            part = self._send(x, dim, way * distance, length, axes)
            if fill is not None:
                at = jax.lax.axis_index(axes)
                missing = at < distance if way > 0 else at >= count - distance
                part = jnp.where(missing, jnp.asarray(fill, x.dtype), part)
            parts.append(part)
        beyond = width - sum(part.shape[dim] for part in parts)
        if beyond:
            shape = (*x.shape[:dim], beyond, *x.shape[dim + 1 :])
            parts.append(jnp.full(shape, 0 if fill is None else fill, x.dtype))
        return parts

    def _send(self, x: Any, dim: int, distance: int, length: int, axes: tuple[str, ...]) -> Any:
        """The last elements of the piece so far before this one, or the first ones of one after it; else zeros."""
        key = (id(x), dim, distance, length)
        if key not in self._sent:
            start = x.shape[dim] - length if distance > 0 else 0
            part = jax.lax.slice_in_dim(x, start, start + length, axis=dim)
            self._sent[key] = x, jax.lax.ppermute(part, axes, shift(axes, distance, self._mesh)[1])
        return self._sent[key][1]


# What a primitive is, and whether its payload is the result (else the operand); see `Collective`.
_PRIMITIVES: Mapping[str, tuple[StepKind, bool]] = {
    "psum": ("all_reduce", True),
    "psum_invariant": ("all_reduce", True),
    "pmax": ("all_reduce", True),
    "pmin": ("all_reduce", True),
    "reduce_scatter": ("reduce_scatter", False),
    "all_gather": ("all_gather", True),
    "all_gather_invariant": ("all_gather", True),
    "all_to_all": ("all_to_all", True),
    "ppermute": ("permute", True),
}
_SILENT = frozenset({"axis_index", "pvary", "pcast"})  # name mesh axes, send nothing


def count_collectives(jaxpr: Any, mesh: Mesh) -> tuple[Collective, ...]:
    """The collectives of a jaxpr (closed or not) and of all jaxprs in it, in program order.

    Axes are in mesh order without those of size 1; every operand counts separately. A scan repeats its body's.
    Raises InternalError where the number is not known: a `while` whose body communicates, a `cond` whose branches
    communicate differently, a communicating primitive that is not in the table.
    """
    collectives: list[Collective] = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        axes = _mesh_axes(eqn.params, mesh)
        inner = [count_collectives(sub, mesh) for sub in jax.extend.core.jaxprs_in_params(eqn.params)]
        if name in _PRIMITIVES and axes:
            collectives += _collectives_of(eqn, axes, mesh)
        elif axes and name not in _SILENT and not inner:
            raise InternalError(f"cannot count the collective `{name}` over {axes}")
        elif name == "scan":
            collectives += [c for body in inner for c in body] * eqn.params["length"]
        elif name == "while" and any(inner):
            raise InternalError("collectives inside a `while`: nobody knows how often they run")
        elif name == "cond":
            if any(branch != inner[0] for branch in inner):
                raise InternalError("the branches of a `cond` communicate differently")
            collectives += inner[0]
        else:
            collectives += [c for body in inner for c in body]
    return tuple(collectives)


def _collectives_of(eqn: Any, axes: tuple[str, ...], mesh: Mesh) -> list[Collective]:
    if eqn.params.get("axis_index_groups") is not None:
        raise InternalError(f"cannot count `{eqn.primitive.name}` over groups that are no mesh axes")
    kind, payload_is_result = _PRIMITIVES[eqn.primitive.name]
    if kind == "permute":
        names = eqn.params["axis_name"]
        named = (names,) if isinstance(names, str) else tuple(names)
        axes = moved_axes(named, eqn.params["perm"], mesh)
    pieces = eqn.outvars if payload_is_result else eqn.invars
    return [Collective(kind, axes, _nbytes(piece.aval)) for piece in pieces] if axes else []


def _mesh_axes(params: Mapping[str, Any], mesh: Mesh) -> tuple[str, ...]:
    """The axes of more than one device that an equation names, in mesh order."""
    names = params.get("axes", params.get("axis_name", ()))
    named = (names,) if isinstance(names, str) else names if isinstance(names, (tuple, list, frozenset, set)) else ()
    return tuple(axis for axis in mesh.axes if axis in named and mesh.axis_size(axis) > 1)


def moved_axes(axes: Sequence[str], pairs: Sequence[tuple[int, int]], mesh: Mesh) -> tuple[str, ...]:
    """The axes along which source and target of some pair differ."""
    if not pairs:
        return ()
    ends = np.unravel_index(np.array(pairs).T, [mesh.axis_size(axis) for axis in axes])
    moved = {axis for axis, at in zip(axes, ends, strict=True) if (at[0] != at[1]).any()}
    return tuple(axis for axis in mesh.axes if axis in moved)


def _nbytes(aval: Any) -> int:
    # A PRNG key counts 8 bytes, as in `Value.nbytes`.
    itemsize = 8 if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.dtype.itemsize
    return int(math.prod(aval.shape) * itemsize)
