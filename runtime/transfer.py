"""Copies between meshes, tile by tile and device to device: no array passes through the host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.ir.sharding import TileCopies
from autopar.runtime.mail import Message
from autopar.runtime.processes import compiler_options


class Tile(NamedTuple):
    """A part of what a device of this process holds."""

    cut: int  # which part
    device: jax.Device


@dataclasses.dataclass(frozen=True)
class Route:
    """What one process does for a transfer: parts are numbered as taken within it, then as pulled, sender by sender."""

    sends: bool  # it has devices of the source
    receives: bool  # it has devices of the target
    offers: Mapping[int, Sequence[Tile]]  # by the receiving process
    pulls: Mapping[int, Sequence[jax.ShapeDtypeStruct]]  # by the sending process
    tiles: tuple[Tile, ...]  # taken within the process
    devices: tuple[jax.Device, ...]  # where these go
    parts: Mapping[jax.Device, Sequence[int]]  # the numbers of those that a device makes its tile of, by place
    again: Mapping[jax.Device, jax.Device]  # devices that take their whole tile from another of this process


@dataclasses.dataclass(frozen=True)
class TileTransfer:
    """How one value crosses to another mesh."""

    tiles: TileCopies
    shape: tuple[int, ...]
    dtype: Any
    source: NamedSharding
    target: NamedSharding

    @functools.cached_property
    def destination(self) -> jax.Device | NamedSharding:
        """The target as `jax.device_put` is told: to be told a device takes it less time."""
        devices = self.target.mesh.devices.flat
        return devices[0] if len(devices) == 1 else self.target

    @functools.cached_property
    def aligned(self) -> bool:
        """Device i feeds device i with its tile: JAX copies such arrays shard by shard by itself, in one call."""
        return (
            not (self.is_cut or self.is_joined)
            and self.source.mesh.size == self.target.mesh.size
            and all(copy.source == copy.target for copy in self.tiles.copies)
        )

    @functools.cached_property
    def is_cut(self) -> bool:
        """Whether tiles are sent in parts."""
        return math.prod(self.tiles.cuts) > 1

    @functools.cached_property
    def is_joined(self) -> bool:
        """Whether tiles arrive in parts."""
        return math.prod(self.tiles.joins) > 1

    @functools.cached_property
    def cutters(self) -> Mapping[jax.Device, tuple[Sequence[Tile], Callable[..., Sequence[jax.Array]]]]:
        """By device of this process that sends parts of its tile: which, and the program that makes these alone."""
        if not self.is_cut:
            return {}
        shape, by_device = self.source.shard_shape(self.shape), dict[jax.Device, list[Tile]]()
        for tile in dict.fromkeys([*self.route.tiles, *itertools.chain(*self.route.offers.values())]):
            by_device.setdefault(tile.device, []).append(tile)
        return {
            device: (tiles, _cutter(shape, self.dtype, self.tiles.cuts, tuple(tile.cut for tile in tiles), device))
            for device, tiles in by_device.items()
        }

    @functools.cached_property
    def joiners(self) -> Mapping[jax.Device, Callable[..., Sequence[jax.Array]]]:
        """By device of this process that makes its tile of several parts: the program that does so."""
        if not self.is_joined:
            return {}
        return {device: _joiner(self.part_shape, self.dtype, self.tiles.joins, device) for device in self.route.parts}

    @functools.cached_property
    def part_shape(self) -> tuple[int, ...]:
        """Of one part of a tile."""
        tile = self.target.shard_shape(self.shape)
        return tuple(size // n for size, n in zip(tile, self.tiles.joins, strict=True))

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether both meshes are this process's alone."""
        return self.source.is_fully_addressable and self.target.is_fully_addressable

    @functools.cached_property
    def route(self) -> Route:
        """This process's part of the copies.

        1. A device takes a part from itself, or else from a device of its own process, where one holds it.
        2. A tile of which other processes send something is made once in each process that takes it, by the first of
           its devices that want it, and copied whole to the others: what crosses does so once. So is any that is made
           of several parts on virtual CPU devices, whose copies go through one memory: the fewer, the better.
        3. Both processes number what one sends the other in the order of the copies.
        """
        here = jax.process_index()
        senders, receivers = list(self.source.mesh.devices.flat), list(self.target.mesh.devices.flat)
        held = {device: _key(at) for device, at in self.source.devices_indices_map(self.shape).items()}
        wanted = {device: _key(at) for device, at in self.target.devices_indices_map(self.shape).items()}
        holders: dict[tuple[Any, int], Any] = {}  # (tile, process) -> its first device that holds the tile
        for device in senders:
            holders.setdefault((held[device], device.process_index), device)
        makers: dict[tuple[Any, int], Any] = {}  # (tile, process) -> its device that makes the tile
        offers: dict[int, list[Tile]] = {}
        pulls: dict[int, list[jax.ShapeDtypeStruct]] = {}
        taken: list[tuple[Tile, Any]] = []  # within this process, and where to
        found: dict[Any, list[tuple[int, int]]] = {}  # by device: (process, number among what that gives)
        again: dict[Any, Any] = {}
        for position, copies in itertools.groupby(self.tiles.copies, lambda copy: copy.target):
            to, parts = receivers[position], []
            process = to.process_index
            for cut, sender in ((copy.cut, senders[copy.source]) for copy in copies):
                if held.get(to) == held[sender]:
                    parts.append(Tile(cut, to))
                elif sender.process_index == process:
                    parts.append(Tile(cut, sender))
                else:
                    parts.append(Tile(cut, holders.get((held[sender], process), sender)))
            is_shared = self.is_joined and to.platform == "cpu"
            if is_shared or any(tile.device.process_index != process for tile in parts):
                maker = makers.setdefault((wanted[to], process), to)
                if maker is not to:
                    if process == here:
                        again[to] = maker
                    continue
            for tile in parts:
                giver = tile.device.process_index
                if process != here:
                    if giver == here:
                        offers.setdefault(process, []).append(tile)
                elif giver == here:
                    found.setdefault(to, []).append((here, len(taken)))
                    taken.append((tile, to))
                else:
                    numbered = pulls.setdefault(giver, [])
                    found.setdefault(to, []).append((giver, len(numbered)))
                    at = SingleDeviceSharding(to)
                    numbered.append(jax.ShapeDtypeStruct(self.part_shape, self.dtype, sharding=at))
        sizes = itertools.accumulate(map(len, pulls.values()), initial=len(taken))
        before = {here: 0, **dict(zip(pulls, sizes, strict=False))}
        return Route(
            bool(self.source.addressable_devices), bool(self.target.addressable_devices), offers, pulls,
            tuple(tile for tile, _ in taken), tuple(to for _, to in taken),
            {to: [before[giver] + number for giver, number in numbers] for to, numbers in found.items()}, again,
        )  # fmt: skip

    def compile(self) -> None:
        """Compile what cuts and joins tiles where it runs, ahead of the first transfer."""
        _ = self.cutters, self.joiners


def _key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((s.start, s.stop) for s in index)


@functools.lru_cache(maxsize=4096)
def _cutter(
    shape: tuple[int, ...], dtype: Any, cuts: tuple[int, ...], numbers: tuple[int, ...], device: jax.Device
) -> Callable[..., Sequence[jax.Array]]:
    """Of a tile some of its parts, which are numbered row-major."""
    sizes = [size // n for size, n in zip(shape, cuts, strict=True)]
    grid = list(itertools.product(*map(range, cuts)))

    def cut(tile: jax.Array) -> tuple[jax.Array, ...]:
        parts = []
        for number in numbers:
            start = [i * size for i, size in zip(grid[number], sizes, strict=True)]
            parts.append(jax.lax.slice(tile, start, [i + size for i, size in zip(start, sizes, strict=True)]))
        return tuple(parts)

    return _compiled(cut, [shape], dtype, device)


@functools.lru_cache(maxsize=4096)
def _joiner(
    shape: tuple[int, ...], dtype: Any, joins: tuple[int, ...], device: jax.Device
) -> Callable[..., Sequence[jax.Array]]:
    """A tile of its parts."""

    def join(*parts: jax.Array) -> tuple[jax.Array]:
        joined = list(parts)
        for dim in reversed(range(len(joins))):
            n = joins[dim]
            joined = [jnp.concatenate(joined[at : at + n], dim) for at in range(0, len(joined), n)]
        return (joined[0],)

    return _compiled(join, [shape] * math.prod(joins), dtype, device)


def _compiled(
    function: Callable[..., Sequence[jax.Array]], shapes: Sequence[tuple[int, ...]], dtype: Any, device: jax.Device
) -> Callable[..., Sequence[jax.Array]]:
    """A function that only moves elements, for one device."""
    # As integers: XLA for CPUs widens bfloat16 for that, which takes five times as long and changes bits of what is not
    # a number (jaxlib 0.10.2).
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2

    def moved(*xs: jax.Array) -> list[jax.Array]:
        if not is_narrow:
            return list(function(*xs))
        found = function(*[jax.lax.bitcast_convert_type(x, jnp.uint16) for x in xs])
        return [jax.lax.bitcast_convert_type(x, dtype) for x in found]

    here = SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape in shapes]
    compiled: Callable[..., Sequence[jax.Array]] = jax.jit(moved).lower(*arguments).compile(compiler_options([device]))
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
    those without devices of the target get None. On a mesh of one device its sharding is that of the device.
    """
    if transfer.aligned and transfer.is_local:
        moved: jax.Array = jax.device_put(array, transfer.destination, may_alias=False)
        return moved
    route = transfer.route
    parts: dict[Tile, jax.Array] = {}
    if route.sends:
        parts = {Tile(0, shard.device): shard.data for shard in array.addressable_shards}
        if transfer.is_cut:
            cutters = transfer.cutters.items()
            cut = {device: program(parts[Tile(0, device)]) for device, (_, program) in cutters}
            parts = {
                tile: part for device, (tiles, _) in cutters for tile, part in zip(tiles, cut[device], strict=True)
            }
    pulled: list[jax.Array] = []
    if message is not None:
        for receiver, offered in route.offers.items():
            message.offer(receiver, [parts[tile] for tile in offered], fresh=transfer.is_cut)
        for sender, structs in route.pulls.items():
            pulled += message.pull(sender, structs)
    result = None
    if route.receives:
        # What a device takes from itself needs no copy where a program makes a new array of it, or has made it.
        is_new = transfer.is_joined or (transfer.is_cut and not route.offers)
        arrived = _put([parts[tile] for tile in route.tiles], route.devices, None if is_new else False) + pulled
        if transfer.is_joined:
            made = {to: transfer.joiners[to](*[arrived[k] for k in numbers])[0] for to, numbers in route.parts.items()}
        else:
            made = {to: arrived[number] for to, (number,) in route.parts.items()}
        copied = _put([made[maker] for maker in route.again.values()], route.again, False)
        made.update(zip(route.again, copied, strict=True))
        result = jax.make_array_from_single_device_arrays(transfer.shape, transfer.target, list(made.values()))
    # Of the source's programs and the target's, if they are this process's.
    if route.sends and transfer.is_cut and needs_waits(transfer.source.mesh):
        jax.block_until_ready(list(parts.values()))
    if route.receives and transfer.is_joined and needs_waits(transfer.target.mesh):
        jax.block_until_ready(result)
    return result


def _put(arrays: Sequence[jax.Array], devices: Collection[jax.Device], may_alias: bool | None) -> list[jax.Array]:
    """Each onto its device."""
    found: list[jax.Array] = jax.device_put(arrays, list(devices), may_alias=may_alias) if arrays else []
    return found
