"""Arrays of the host onto meshes, of which a process may have only some devices, or none."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from autopar.errors import StateError
from autopar.ir.graph import LeafCut


@dataclasses.dataclass(frozen=True)
class Array:
    """A global array at the border of a program."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.NamedSharding
    weak_type: bool = False  # of a result


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a leaf of an argument lies: whole, or in pieces."""

    shape: tuple[int, ...]  # of the whole
    dtype: Any
    weak_type: bool
    shardings: tuple[jax.sharding.Sharding | None, ...]  # of each piece; None: anywhere, since no program reads it
    cut: LeafCut | None = None

    @property
    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """Each piece."""
        shapes = [self.shape]
        if self.cut is not None:
            axis = self.cut.axis
            shapes = [(*self.shape[:axis], stop - start, *self.shape[axis + 1 :]) for start, stop in self.cut.windows]
        made = zip(shapes, self.shardings, strict=True)
        return [jax.ShapeDtypeStruct(n, self.dtype, sharding=at, weak_type=self.weak_type) for n, at in made]


def is_here(mesh: Any) -> bool:
    """Whether this process has devices of a mesh."""
    return bool(mesh.local_devices)


def private(x: Any) -> Any:
    """A value that its owner may change at once, as one that nobody changes.

    JAX reads NumPy arrays after `device_put` has returned, `may_alias=False` or not (jaxlib 0.10.2).
    """
    return x.copy() if isinstance(x, np.ndarray) else x


def place(values: Sequence[Any], shardings: Sequence[jax.sharding.NamedSharding]) -> list[jax.Array]:
    """The values as arrays of these shardings; of meshes over several processes each places what its devices hold.

    They share no buffers with the originals, and nobody waits for another process, as `jax.device_put` would.

    Raises:
      StateError: a value lies on devices of other processes.
    """
    local = [sharding.is_fully_addressable for sharding in shardings]
    arrays: dict[int, jax.Array] = {}
    whole = [i for i, is_local in enumerate(local) if is_local]
    moved = jax.device_put([private(values[i]) for i in whole], [shardings[i] for i in whole], may_alias=False)
    arrays.update(zip(whole, moved, strict=True))
    shared = [i for i, is_local in enumerate(local) if not is_local]
    held = [
        (tuple(jax.numpy.shape(values[i])), shardings[i], _pieces(private(values[i]), shardings[i])) for i in shared
    ]
    for i, array in zip(shared, arrays_of(held), strict=True):
        arrays[i] = weakly_typed(array) if jax.typeof(values[i]).weak_type else array
    return [arrays[i] for i in range(len(values))]


def arrays_of(
    held: Sequence[tuple[tuple[int, ...], jax.sharding.Sharding, Mapping[jax.Device, Any]]],
) -> list[jax.Array]:
    """Arrays of these shapes and shardings, of what each of this process's devices holds, copied in one call.

    Of the host's values nobody may change any (`private`).
    """
    devices = [device for _, _, pieces in held for device in pieces]
    copies = jax.device_put([x for _, _, pieces in held for x in pieces.values()], devices, may_alias=False)
    placed = iter(copies)
    return [
        jax.make_array_from_single_device_arrays(shape, sharding, list(itertools.islice(placed, len(pieces))))
        for shape, sharding, pieces in held
    ]


def _pieces(value: Any, sharding: jax.sharding.NamedSharding) -> dict[jax.Device, Any]:
    """What each of this process's devices holds of a value."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return {shard.device: shard.data for shard in value.addressable_shards}
        if not value.is_fully_replicated:
            raise StateError(
                f"an argument of {value.dtype}{list(value.shape)} lies on devices of several processes as "
                f"{value.sharding}, where {sharding} is wanted. Pass the whole as a NumPy array, the same on all "
                "processes; autopar.gather(..) gives it."
            )
        value = value.addressable_data(0)
    index = sharding.addressable_devices_indices_map(tuple(jax.numpy.shape(value)))
    value = sliceable(value)
    return {device: value[at] if at else value for device, at in index.items()}


def sliceable(value: Any) -> Any:
    """The same value, which no mesh with `Explicit` axes keeps from being cut eagerly: its axes are `Auto`."""
    sharding = value.sharding if isinstance(value, jax.Array) else None
    if not isinstance(sharding, jax.sharding.NamedSharding) or not sharding.mesh.explicit_axes:
        return value
    mesh = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.device_put(value, jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))


def absent(array: Array | jax.ShapeDtypeStruct) -> jax.Array:
    """An array of other processes: its shape, type and sharding, and no data."""
    empty = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [], dtype=array.dtype)
    return weakly_typed(empty) if array.weak_type else empty


def guards_transfers() -> bool:
    """Whether JAX guards copies to devices; asked before a context is entered, which takes longer."""
    config: Any = jax.config
    return config.jax_transfer_guard_host_to_device not in (None, "allow")


def weakly_typed(x: Any) -> Any:
    """The same array, with a type that gives way to others', as those of Python numbers do."""
    return convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
