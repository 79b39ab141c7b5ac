"""Copies between meshes, tile by tile and device to device: no array passes through the host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
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
    dtype: Any
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

    @functools.cached_property
    def cut(self) -> Callable[[jax.Array], Sequence[jax.Array]] | None:
        """Compiled: every device's tile in parts, numbered row-major; None if tiles stay whole."""
        cuts = self.tiles.cuts
        if math.prod(cuts) == 1:
            return None

        def cut(tile: jax.Array) -> tuple[jax.Array, ...]:
            sizes = [size // n for size, n in zip(tile.shape, cuts, strict=True)]
            parts = []
            for at in itertools.product(*map(range, cuts)):
                start = [i * size for i, size in zip(at, sizes, strict=True)]
                parts.append(jax.lax.slice(tile, start, [i + size for i, size in zip(start, sizes, strict=True)]))
            return tuple(parts)

        return _compiled(cut, [self.shape], self.dtype, self.source, (self.source.spec,) * math.prod(cuts))

    @functools.cached_property
    def join(self) -> Callable[..., jax.Array] | None:
        """Compiled: every device's tile of its parts; None if tiles arrive whole."""
        joins = self.tiles.joins
        if math.prod(joins) == 1:
            return None

        def join(*parts: jax.Array) -> jax.Array:
            joined = list(parts)
            for dim in reversed(range(len(joins))):
                n = joins[dim]
                joined = [jnp.concatenate(joined[at : at + n], dim) for at in range(0, len(joined), n)]
            return joined[0]

        shapes = [self.part_shape] * math.prod(joins)
        return _compiled(join, shapes, self.dtype, self.target, self.target.spec)

    @functools.cached_property
    def part_shape(self) -> tuple[int, ...]:
        """Of the array of all devices' first parts, say, on the target mesh."""
        return tuple(size // n for size, n in zip(self.shape, self.tiles.joins, strict=True))

    def compile(self) -> None:
        """Compile what cuts and joins tiles, ahead of the first transfer."""
        _ = self.cut, self.join


def _compiled(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: Any, sharding: NamedSharding, results: Any
) -> Callable[..., Any]:
    """A function of every device's pieces."""
    specs = (sharding.spec,) * len(shapes)
    mapped = jax.shard_map(function, mesh=sharding.mesh, in_specs=specs, out_specs=results, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    compiled: Callable[..., Any] = jax.jit(mapped).lower(*arguments).compile()
    return compiled


def send(transfer: TileTransfer, array: jax.Array) -> jax.Array:
    """The array on the target mesh. Only issues the work, and waits for it on the CPU where tiles are cut or joined.

    It shares no buffer with the original, which may be given away, though two stages may have the same devices.
    """
    if transfer.aligned:
        moved: jax.Array = jax.device_put(array, transfer.target, may_alias=False)
        return moved
    copies = transfer.tiles.copies
    parts = (array,) if transfer.cut is None else transfer.cut(array)
    by_device = [{shard.device: shard.data for shard in part.addressable_shards} for part in parts]
    sources, targets = list(transfer.source.mesh.devices.flat), list(transfer.target.mesh.devices.flat)
    sent = [by_device[copy.cut][sources[copy.source]] for copy in copies]
    arrived: list[Any] = jax.device_put(sent, [targets[copy.target] for copy in copies], may_alias=False)
    places = math.prod(transfer.tiles.joins)
    received = [
        jax.make_array_from_single_device_arrays(transfer.part_shape, transfer.target, arrived[place::places])
        for place in range(places)
    ]
    result = received[0] if transfer.join is None else transfer.join(*received)
    if sources[0].platform == "cpu" and (transfer.cut or transfer.join):
        jax.block_until_ready((parts, result))  # programs must not overlap there: see `Executable`
    return result
