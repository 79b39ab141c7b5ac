"""Copies between meshes, tile by tile and device to device: no array passes through the host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.ir.sharding import TileCopies
from autopar.runtime.mail import Message


class Tile(NamedTuple):
    """A part of what a device of this process holds."""

    cut: int  # which part
    device: jax.Device


class _Wanted(NamedTuple):
    """A part that a device of this process takes."""

    device: jax.Device
    place: int  # in its tile
    source: Tile | tuple[int, int]  # of this process, or a number among what another process sends
    is_first: bool  # it takes from another process, and no device before it takes the same


@dataclasses.dataclass(frozen=True)
class Route:
    """What one process does for a transfer: tiles are numbered as copies within it, then those from other processes."""

    sends: bool  # it has devices of the source
    receives: bool  # it has devices of the target
    offers: Mapping[int, Sequence[Tile]]  # by the receiving process
    pulls: Mapping[int, Sequence[jax.ShapeDtypeStruct]]  # by the sending process
    tiles: tuple[Tile, ...]  # copied within the process
    again: tuple[int, ...]  # of what has been pulled: copied to further devices
    devices: tuple[jax.Device, ...]  # where `tiles` and `again` go
    places: tuple[tuple[int, ...], ...]  # for each place in a tile the numbers of its parts, by device


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

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether both meshes are this process's alone."""
        return self.source.is_fully_addressable and self.target.is_fully_addressable

    @functools.cached_property
    def route(self) -> Route:
        """This process's part of the copies.

        A device takes a tile from a device of its own process that holds it, if there is one. What several devices of a
        process take from others comes to the first of them, and goes on from there: it crosses once.
        """
        here = jax.process_index()
        senders, receivers = list(self.source.mesh.devices.flat), list(self.target.mesh.devices.flat)
        held = self.source.devices_indices_map(self.shape)
        holders: dict[tuple[Any, int], Any] = {}  # (tile, process) -> its first device that holds the tile
        for device in senders:
            holders.setdefault((_key(held[device]), device.process_index), device)
        offers: dict[int, list[Tile]] = {}
        pulls: dict[int, list[jax.ShapeDtypeStruct]] = {}
        first: dict[tuple[Any, int, int], tuple[int, int]] = {}  # (tile, part, process) -> sender, number of its tiles
        wanted: list[_Wanted] = []
        for copy in self.tiles.copies:
            to, tile = receivers[copy.target], _key(held[senders[copy.source]])
            process = to.process_index
            near = holders.get((tile, process))
            if near is not None:
                if process == here:
                    own = senders[copy.source] if senders[copy.source].process_index == here else near
                    wanted.append(_Wanted(to, copy.place, Tile(copy.cut, own), False))
                continue
            met = (tile, copy.cut, process)
            is_first = met not in first
            if is_first:
                sender = senders[copy.source]
                shape = self.target.shard_shape(self.part_shape)
                if sender.process_index == here:
                    offers.setdefault(process, []).append(Tile(copy.cut, sender))
                numbered = pulls.setdefault(sender.process_index, []) if process == here else []
                first[met] = sender.process_index, len(numbered)
                numbered.append(jax.ShapeDtypeStruct(shape, self.dtype, sharding=SingleDeviceSharding(to)))
            if process == here:
                wanted.append(_Wanted(to, copy.place, first[met], is_first))
        return _route(self, offers, pulls, wanted)

    def compile(self) -> None:
        """Compile what cuts and joins tiles where it runs, ahead of the first transfer."""
        if self.source.addressable_devices:
            _ = self.cut
        if self.target.addressable_devices:
            _ = self.join


def _key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((s.start, s.stop) for s in index)


def _route(
    transfer: TileTransfer, offers: Mapping[int, Sequence[Tile]], pulls: Mapping[int, Sequence[jax.ShapeDtypeStruct]],
    wanted: Sequence[_Wanted],
) -> Route:  # fmt: skip
    """Numbers for all that arrives: copies within the process first, then what is pulled, sender by sender."""
    before = dict(zip(pulls, itertools.accumulate(map(len, pulls.values()), initial=0), strict=False))
    own = [w for w in wanted if isinstance(w.source, Tile)]
    again = [w for w in wanted if not isinstance(w.source, Tile) and not w.is_first]
    pulled_at = {w: before[w.source[0]] + w.source[1] for w in wanted if not isinstance(w.source, Tile)}
    number = {w: k for k, w in enumerate((*own, *again))}
    number |= {w: len(number) + pulled_at[w] for w in wanted if w.is_first}
    places: list[list[int]] = [[] for _ in range(math.prod(transfer.tiles.joins))]
    for w in wanted:
        places[w.place].append(number[w])
    return Route(
        bool(transfer.source.addressable_devices), bool(transfer.target.addressable_devices), offers, pulls,
        tuple(w.source for w in own if isinstance(w.source, Tile)), tuple(pulled_at[w] for w in again),
        tuple(w.device for w in (*own, *again)), tuple(map(tuple, places)),
    )  # fmt: skip


def _compiled(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: Any, sharding: NamedSharding, results: Any
) -> Callable[..., Any]:
    """A function of every device's pieces."""
    specs = (sharding.spec,) * len(shapes)
    mapped = jax.shard_map(function, mesh=sharding.mesh, in_specs=specs, out_specs=results, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    compiled: Callable[..., Any] = jax.jit(mapped).lower(*arguments).compile()
    return compiled


def needs_waits(mesh: Any) -> bool:
    """Whether programs of this mesh must not overlap with others on this process.

    Launching a program on virtual CPU devices while the one before still runs on some of them, XLA can leave a device
    out for which the others then wait; it ends the process after 40 seconds (jaxlib 0.10.2).
    """
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu" and jax.local_device_count() > 1


def send(transfer: TileTransfer, array: jax.Array, message: Message | None = None) -> jax.Array | None:
    """The array on the target mesh. Only issues the work, and waits for it on the CPU where tiles are cut or joined.

    It shares no buffer with the original, which may be given away, though two stages may have the same devices. Where
    the meshes span processes, each calls this: those without devices of the source have nothing to give for `array`,
    those without devices of the target get None.
    """
    if transfer.aligned and transfer.is_local:
        moved: jax.Array = jax.device_put(array, transfer.target, may_alias=False)
        return moved
    route = transfer.route
    parts: Sequence[jax.Array] = ()
    by_device: list[dict[Any, jax.Array]] = []
    if route.sends:
        parts = (array,) if transfer.cut is None else transfer.cut(array)
        by_device = [{shard.device: shard.data for shard in part.addressable_shards} for part in parts]
    pulled: list[jax.Array] = []
    if message is not None:
        for receiver, tiles in route.offers.items():
            offered = [by_device[tile.cut][tile.device] for tile in tiles]
            message.offer(receiver, offered, fresh=transfer.cut is not None)
        for sender, structs in route.pulls.items():
            pulled += message.pull(sender, structs)
    result = None
    if route.receives:
        sent = [by_device[tile.cut][tile.device] for tile in route.tiles] + [pulled[k] for k in route.again]
        arrived = [*jax.device_put(sent, list(route.devices), may_alias=False), *pulled]
        received = [
            jax.make_array_from_single_device_arrays(transfer.part_shape, transfer.target, [arrived[k] for k in place])
            for place in route.places
        ]
        result = received[0] if transfer.join is None else transfer.join(*received)
    # Of the source's program and the target's, if they are this process's.
    if route.sends and transfer.cut and needs_waits(transfer.source.mesh):
        jax.block_until_ready(parts)
    if route.receives and transfer.join and needs_waits(transfer.target.mesh):
        jax.block_until_ready(result)
    return result
