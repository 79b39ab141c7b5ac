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
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.ir.sharding import TileCopies
from autopar.runtime.mail import Message
from autopar.runtime.source import compiler_options

# Bytes; to send a smaller part to another process takes about as long, whatever its size (CPUs, over loopback).
_SMALL = 32 * 2**10


class Tile(NamedTuple):
    """What a device of this process holds, or a part of it."""

    cut: int | None  # which part, 0 where tiles are not cut; None: all parts
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
    # By device that makes tiles: the numbers of what it makes them of, in the order of its program's arguments.
    parts: Mapping[jax.Device, Sequence[int]]
    # Devices that take their tile from another of this process: that, and which of the tiles that it makes.
    again: Mapping[jax.Device, tuple[jax.Device, int]]
    # Where one device makes the tiles of all, of what came whole: the parts of each, as (its argument, which part).
    assembled: tuple[tuple[tuple[int, int], ...], ...] = ()


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
        """Whether the target needs parts of the source's tiles."""
        return math.prod(self.tiles.cuts) > 1

    @functools.cached_property
    def is_joined(self) -> bool:
        """Whether a tile of the target consists of parts of several."""
        return math.prod(self.tiles.joins) > 1

    @functools.cached_property
    def cutters(self) -> Mapping[jax.Device, tuple[Sequence[Tile], Callable[..., Sequence[jax.Array]]]]:
        """By device of this process that sends parts of its tile: which, and the program that makes these alone."""
        if not self.is_cut:
            return {}
        shape, by_device = self.source.shard_shape(self.shape), dict[jax.Device, dict[Tile, tuple[tuple[int, int]]]]()
        for tile in dict.fromkeys([*self.route.tiles, *itertools.chain(*self.route.offers.values())]):
            if tile.cut is not None:
                by_device.setdefault(tile.device, {})[tile] = ((0, tile.cut),)
        apart = (1,) * len(shape)
        return {
            device: (list(of), _assembler(shape, self.dtype, self.tiles.cuts, apart, 1, tuple(of.values()), device))
            for device, of in by_device.items()
        }

    @functools.cached_property
    def joiners(self) -> Mapping[jax.Device, Callable[..., Sequence[jax.Array]]]:
        """By device of this process that makes its tile of several parts, or all tiles: the program that does so."""
        if not self.is_joined:
            return {}
        if of := self.route.assembled:
            shape, cuts = self.source.shard_shape(self.shape), self.tiles.cuts
        else:
            of = (tuple((k, 0) for k in range(math.prod(self.tiles.joins))),)
            shape, cuts = self.part_shape, (1,) * len(self.shape)
        return {
            device: _assembler(shape, self.dtype, cuts, self.tiles.joins, len(numbers), of, device)
            for device, numbers in self.route.parts.items()
        }

    @functools.cached_property
    def part_shape(self) -> tuple[int, ...]:
        """Of one part of a tile."""
        tile = self.target.shard_shape(self.shape)
        return tuple(size // n for size, n in zip(tile, self.tiles.joins, strict=True))

    @functools.cached_property
    def is_put(self) -> bool:
        """Whether one call of `jax.device_put` does it all: of tiles between devices of this process alone."""
        return self.aligned and self.source.is_fully_addressable and self.target.is_fully_addressable

    @functools.cached_property
    def route(self) -> Route:
        """This process's part of the copies."""
        return self.route_of(jax.process_index())

    def route_of(self, here: int) -> Route:
        """A process's part of the copies.

        1. A device takes a part from itself, or else from a device of its own process, where one holds it.
        2. A tile of which other processes send something is made once in each process that takes it, by the first of
           its devices that want it, and copied whole to the others: what crosses does so once. So is any that is made
           of several parts on virtual CPU devices, whose copies go through one memory: the fewer, the better.
        3. To virtual CPU devices tiles come whole, and one device makes of them the tiles of all, where they are both
           cut and joined, a process needs every part of those that it takes from, not all of which it holds, and the
           parts are small.
        4. Both processes number what one sends the other in the order of the copies.
        """
        senders, receivers = list(self.source.mesh.devices.flat), list(self.target.mesh.devices.flat)
        sends, receives = (any(d.process_index == here for d in devices) for devices in (senders, receivers))
        if not sends and not receives:
            return Route(sends, receives, {}, {}, (), (), {}, {})
        held = {device: _key(at) for device, at in self.source.devices_indices_map(self.shape).items()}
        wanted = {device: _key(at) for device, at in self.target.devices_indices_map(self.shape).items()}
        holders: dict[tuple[Any, int], Any] = {}  # (tile, process) -> its first device that holds the tile
        for device in senders:
            holders.setdefault((held[device], device.process_index), device)
        makers: dict[tuple[Any, int], Any] = {}  # (tile, process) -> its device that makes the tile
        offers: dict[int, list[Tile]] = {}
        pulls: dict[int, list[jax.ShapeDtypeStruct]] = {}
        taken: list[tuple[Tile, Any]] = []  # within this process, and where to
        origins: dict[Any, list[tuple[int, int]]] = {}  # by device: (process, number among what that gives)
        again: dict[Any, Any] = {}
        assembled: dict[Any, list[tuple[tuple[int, int], ...]]] = {}  # by device that makes tiles of several

        def near(to: jax.Device, sender: jax.Device) -> jax.Device:
            if held.get(to) == held[sender]:
                return to
            inside = sender.process_index == to.process_index
            return sender if inside else holders.get((held[sender], to.process_index), sender)

        def takes(tile: Tile, to: jax.Device, shape: tuple[int, ...]) -> None:
            giver, process = tile.device.process_index, to.process_index
            if process != here:
                if giver == here:
                    offers.setdefault(process, []).append(tile)
            elif giver == here:
                origins.setdefault(to, []).append((here, len(taken)))
                taken.append((tile, to))
            else:
                numbered = pulls.setdefault(giver, [])
                origins.setdefault(to, []).append((giver, len(numbered)))
                numbered.append(jax.ShapeDtypeStruct(shape, self.dtype, sharding=SingleDeviceSharding(to)))

        copies = [
            (receivers[position], [(copy.cut, senders[copy.source]) for copy in copies])
            for position, copies in itertools.groupby(self.tiles.copies, lambda copy: copy.target)
        ]
        for process, own in _by_process(copies).items():
            if not self._assembles(process, own, held):
                continue
            (maker, _), numbers, made = own[0], dict[Any, int](), dict[Any, int]()
            makes = assembled.setdefault(maker, [])
            for to, parts in own:
                for _, sender in parts:
                    if held[sender] not in numbers:
                        numbers[held[sender]] = len(numbers)
                        takes(Tile(None, near(maker, sender)), maker, self.source.shard_shape(self.shape))
                if wanted[to] not in made:
                    made[wanted[to]] = len(makes)
                    makes.append(tuple((numbers[held[sender]], cut) for cut, sender in parts))
                if to is not maker and process == here:
                    again[to] = maker, made[wanted[to]]
        done = {maker.process_index for maker in assembled}
        for to, given in copies:
            process = to.process_index
            if process in done:
                continue
            tiles = [Tile(cut, near(to, sender)) for cut, sender in given]
            is_shared = self.is_joined and to.platform == "cpu"
            if is_shared or any(tile.device.process_index != process for tile in tiles):
                maker = makers.setdefault((wanted[to], process), to)
                if maker is not to:
                    if process == here:
                        again[to] = maker, 0
                    continue
            for tile in tiles:
                takes(tile, to, self.part_shape)
        sizes = itertools.accumulate(map(len, pulls.values()), initial=len(taken))
        before = {here: 0, **dict(zip(pulls, sizes, strict=False))}
        return Route(
            sends, receives, offers, pulls,
            tuple(tile for tile, _ in taken), tuple(to for _, to in taken),
            {to: [before[giver] + number for giver, number in numbers] for to, numbers in origins.items()}, again,
            next((tuple(tiles) for maker, tiles in assembled.items() if maker.process_index == here), ()),
        )  # fmt: skip

    def _assembles(self, process: int, copies: Sequence[_Copies], held: Mapping[jax.Device, Any]) -> bool:
        """Whether the tiles of a process's devices are made of tiles of the source that come whole."""
        small = math.prod(self.part_shape) * self.dtype.itemsize < _SMALL
        if not (self.is_cut and self.is_joined and small and copies[0][0].platform == "cpu"):
            return False
        taken: dict[Any, set[int]] = {}
        for _, parts in copies:
            for cut, sender in parts:
                taken.setdefault(held[sender], set()).add(cut)
        inside = {tile for device, tile in held.items() if device.process_index == process}
        every = math.prod(self.tiles.cuts)
        return not inside.issuperset(taken) and all(len(cuts) == every for cuts in taken.values())

    def compile(self) -> None:
        """Compile what cuts and joins tiles where it runs, ahead of the first transfer."""
        _ = self.cutters, self.joiners


_Copies = tuple[jax.Device, list[tuple[int, jax.Device]]]  # to a device: which part of the tile that another holds


def _by_process(copies: Sequence[_Copies]) -> dict[int, list[_Copies]]:
    by_process: dict[int, list[_Copies]] = {}
    for to, parts in copies:
        by_process.setdefault(to.process_index, []).append((to, parts))
    return by_process


def _key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((s.start, s.stop) for s in index)


@functools.lru_cache(maxsize=4096)
def _assembler(
    shape: tuple[int, ...], dtype: Any, cuts: tuple[int, ...], joins: tuple[int, ...], count: int,
    of: tuple[tuple[tuple[int, int], ...], ...], device: jax.Device,
) -> Callable[..., Sequence[jax.Array]]:  # fmt: skip
    """Of so many tiles others, each joined of some of their parts: (number of the tile, which part of it)."""

    def assemble(*tiles: jax.Array) -> list[jax.Array]:
        return [_joined([_part(tiles[number], cuts, cut) for number, cut in parts], joins) for parts in of]

    return _compiled(assemble, [shape] * count, dtype, device)


def _part(tile: jax.Array, cuts: Sequence[int], number: int) -> jax.Array:
    """One of the parts of a tile, which are numbered row-major."""
    sizes = [size // n for size, n in zip(tile.shape, cuts, strict=True)]
    starts = [int(i) * size for i, size in zip(np.unravel_index(number, cuts), sizes, strict=True)]
    return jax.lax.slice(tile, starts, [start + size for start, size in zip(starts, sizes, strict=True)])


def _joined(parts: Sequence[jax.Array], joins: Sequence[int]) -> jax.Array:
    """The tile that consists of these parts, row-major."""
    joined = list(parts)
    for dim in reversed(range(len(joins))):
        n = joins[dim]
        joined = [jnp.concatenate(joined[at : at + n], dim) for at in range(0, len(joined), n)]
    return joined[0]


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
        bits = function(*[jax.lax.bitcast_convert_type(x, jnp.uint16) for x in xs])
        return [jax.lax.bitcast_convert_type(x, dtype) for x in bits]

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


@dataclasses.dataclass(frozen=True, eq=False)
class Sending:
    """An array that goes from mesh to mesh."""

    transfer: TileTransfer
    array: jax.Array | None  # None: this process has no device of the source
    may_alias: bool = False  # whether what arrives on a device may be what was there, since neither is given away
    is_fragile: bool = False  # whether it may be given away before another process has fetched it


def send(sendings: Sequence[Sending], message: Message | None = None) -> list[jax.Array | None]:
    """The arrays on their target meshes; what goes to another process, or comes from one, goes as one message.

    Only issues the work, and waits for it on the CPU where tiles are cut or joined. No array shares a buffer with the
    original, though two stages may have the same devices, unless it may. Where the meshes span processes, each calls
    this; those without devices of a target get None for it. On a mesh of one device the sharding is that of the device.
    """
    made = [_made(each) for each in sendings]
    if message is not None:
        offers: dict[int, list[jax.Array]] = {}
        for sending, (parts, cut) in zip(sendings, made, strict=True):
            for receiver, tiles in sending.transfer.route.offers.items():
                own = sending.is_fragile and not cut.keys() >= {*tiles}  # nobody else holds those that were cut
                offers.setdefault(receiver, []).extend(parts[tile].copy() if own else parts[tile] for tile in tiles)
        for receiver, arrays in offers.items():
            message.offer(receiver, arrays)
    pulled = _pulled(sendings, message)
    results = [
        _arrived(sending, parts, arrays) for sending, (parts, _), arrays in zip(sendings, made, pulled, strict=True)
    ]
    for sending, (_, cut), result in zip(sendings, made, results, strict=True):
        transfer = sending.transfer
        # Programs of the source and of the target, if they are this process's.
        if cut and needs_waits(transfer.source.mesh):
            jax.block_until_ready(list(cut.values()))
        if result is not None and transfer.joiners and needs_waits(transfer.target.mesh):
            jax.block_until_ready(result)
    return results


def _made(sending: Sending) -> tuple[dict[Tile, jax.Array], dict[Tile, jax.Array]]:
    """The tiles that this process has of the source, and those of them that were cut now."""
    transfer = sending.transfer
    if sending.array is None or transfer.is_put or not transfer.route.sends:
        return {}, {}
    whole = None if transfer.is_cut else 0
    parts = {Tile(whole, shard.device): shard.data for shard in sending.array.addressable_shards}
    cutters = transfer.cutters.items()
    made = {device: program(parts[Tile(None, device)]) for device, (_, program) in cutters}
    cut = {tile: part for device, (tiles, _) in cutters for tile, part in zip(tiles, made[device], strict=True)}
    return parts | cut, cut


def _pulled(sendings: Sequence[Sending], message: Message | None) -> list[list[jax.Array]]:
    """What comes from other processes, for each."""
    if message is None:
        return [[] for _ in sendings]
    routes = [each.transfer.route for each in sendings]
    wanted: dict[int, list[jax.ShapeDtypeStruct]] = {}
    for route in routes:
        for sender, structs in route.pulls.items():
            wanted.setdefault(sender, []).extend(structs)
    came = {sender: iter(message.pull(sender, structs)) for sender, structs in wanted.items()}
    return [[next(came[sender]) for sender, structs in route.pulls.items() for _ in structs] for route in routes]


def _arrived(sending: Sending, parts: Mapping[Tile, jax.Array], pulled: Sequence[jax.Array]) -> jax.Array | None:
    """What this process has of the target."""
    transfer = sending.transfer
    if transfer.is_put:
        moved: jax.Array = jax.device_put(sending.array, transfer.destination, may_alias=sending.may_alias)
        return moved
    route = transfer.route
    if not route.receives:
        return None
    # What a device takes from itself needs no copy where a program makes a new array of it, or has made it.
    is_new = bool(transfer.joiners) or (transfer.is_cut and not route.offers)
    arrived = [*_put([parts[tile] for tile in route.tiles], route.devices, None if is_new else False), *pulled]
    tiles: dict[jax.Device, Sequence[jax.Array]] = {}
    for to, numbers in route.parts.items():
        of = [arrived[k] for k in numbers]
        tiles[to] = transfer.joiners[to](*of) if transfer.joiners else of
    copied = _put([tiles[maker][k] for maker, k in route.again.values()], route.again, False)
    held = [*(made[0] for made in tiles.values()), *copied]
    return jax.make_array_from_single_device_arrays(transfer.shape, transfer.target, held)


def _put(arrays: Sequence[jax.Array], devices: Collection[jax.Device], may_alias: bool | None) -> list[jax.Array]:
    """Each onto its device."""
    copies: list[jax.Array] = jax.device_put(arrays, list(devices), may_alias=may_alias) if arrays else []
    return copies
