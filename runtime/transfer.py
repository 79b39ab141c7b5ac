"""Copies between meshes, tile by tile and device to device: no array passes through the host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autopar.ir.sharding import TileCopies


@dataclasses.dataclass(frozen=True)
class TileTransfer:
    """How one value crosses to another mesh."""

    tiles: TileCopies
    shape: tuple[int, ...]
    source: NamedSharding
    target: NamedSharding

    @functools.cached_property
    def aligned(self) -> bool:
        """Device i feeds device i with its tile: JAX copies such arrays shard by shard by itself, in one call."""
        return (
            math.prod(self.tiles.cuts) == math.prod(self.tiles.joins) == 1
            and self.source.mesh.size == self.target.mesh.size
            and all(copy.source == copy.target for copy in self.tiles.copies)
        )


def send(transfer: TileTransfer, array: jax.Array) -> jax.Array:
    """The array on the target mesh. Only issues the copies; does not wait.

    It shares no buffer with the original, which may be given away, though two stages may have the same devices.
    """
    if transfer.aligned:
        moved: jax.Array = jax.device_put(array, transfer.target, may_alias=False)
        return moved
    cuts, joins, copies = transfer.tiles.cuts, transfer.tiles.joins, transfer.tiles.copies
    parts = _cutter(transfer.source, cuts)(array) if math.prod(cuts) > 1 else (array,)
    by_device = [{shard.device: shard.data for shard in part.addressable_shards} for part in parts]
    sources, targets = list(transfer.source.mesh.devices.flat), list(transfer.target.mesh.devices.flat)
    sent = [by_device[copy.cut][sources[copy.source]] for copy in copies]
    arrived: list[Any] = jax.device_put(sent, [targets[copy.target] for copy in copies], may_alias=False)
    shape = tuple(size // n for size, n in zip(transfer.shape, joins, strict=True))
    places = math.prod(joins)
    received = [
        jax.make_array_from_single_device_arrays(shape, transfer.target, arrived[place::places])
        for place in range(places)
    ]
    return received[0] if places == 1 else _joiner(transfer.target, joins)(*received)


@functools.lru_cache(maxsize=4096)
def _cutter(sharding: NamedSharding, cuts: tuple[int, ...]) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """Every device's tile in so many parts along each dimension, numbered row-major."""

    def cut(tile: jax.Array) -> tuple[jax.Array, ...]:
        sizes = [size // n for size, n in zip(tile.shape, cuts, strict=True)]
        starts = itertools.product(*(range(0, n * size, size) for n, size in zip(cuts, sizes, strict=True)))
        return tuple(
            jax.lax.slice(tile, start, [at + size for at, size in zip(start, sizes, strict=True)]) for start in starts
        )

    specs = (sharding.spec,) * math.prod(cuts)
    mapped = jax.shard_map(cut, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=specs, check_vma=False)
    return jax.jit(mapped)


@functools.lru_cache(maxsize=4096)
def _joiner(sharding: NamedSharding, joins: tuple[int, ...]) -> Callable[..., jax.Array]:
    """Every device's tile of so many parts along each dimension, numbered row-major."""

    def join(*parts: jax.Array) -> jax.Array:
        joined = list(parts)
        for dim in reversed(range(len(joins))):
            joined = [jnp.concatenate(joined[at : at + joins[dim]], dim) for at in range(0, len(joined), joins[dim])]
        return joined[0]

    specs = (sharding.spec,) * math.prod(joins)
    mapped = jax.shard_map(join, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
    return jax.jit(mapped)
