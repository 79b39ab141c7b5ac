"""Leaves of a state in Orbax's files: every process writes and reads the tiles that are its own.

A leaf is stored whole, as the one array that it is to the user, whatever mesh holds it, and in however many pieces.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import type_handlers

from autopar.ir.pieces import Pieces
from autopar.runtime.gathering import Box, box_of, holders
from autopar.runtime.placement import Home, absent, weakly_typed
from autopar.runtime.processes import this_job
from autopar.runtime.random_keys import as_wanted, plain, plain_struct

_CHUNK_BYTES = 2**26  # most of one chunk: who wants a part of it has to read it whole
_READ_AT_ONCE = 8  # leaves: the host holds no more of them beside what is on its devices


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A leaf to store: an array on one mesh, or its pieces, each with where it begins along the axis of the cut."""

    shape: tuple[int, ...]
    dtype: Any
    axis: int
    parts: tuple[tuple[int, jax.Array], ...]

    @classmethod
    def of(cls, leaf: jax.Array | Pieces) -> StoredLeaf:
        if isinstance(leaf, Pieces):
            return cls(leaf.shape, leaf.dtype, leaf.cut.axis, tuple(zip(leaf.cut.bounds, leaf.pieces, strict=False)))
        return cls(leaf.shape, leaf.dtype, 0, ((0, leaf),))

    @functools.cached_property
    def tiles(self) -> dict[Box, Sequence[int]]:
        """The processes that can store each tile."""
        job = this_job()
        processes_of: dict[Box, Sequence[int]] = {}
        for start, array in self.parts:
            apart = job is not None and (job.shares(array.sharding) or not array.sharding.is_fully_addressable)
            if apart and array.shape:
                there: Mapping[Box, Sequence[int]] = holders(array)
            else:  # known to all processes, and the same to all
                there = {box_of(i, array.shape): [0] for i in array.sharding.devices_indices_map(array.shape).values()}
            processes_of.update({_moved(box, self.axis, start): processes for box, processes in there.items()})
        return processes_of

    def own_tiles(self) -> dict[Box, jax.Array]:
        """The tiles that this process stores, on their way to the host: its share of those that several hold."""
        here = jax.process_index()
        mine = {box for k, (box, there) in enumerate(self.tiles.items()) if there[k % len(there)] == here}
        own_tiles: dict[Box, jax.Array] = {}
        for start, array in self.parts:
            for shard in array.addressable_shards:
                box = _moved(box_of(shard.index, array.shape), self.axis, start)
                if box in mine:
                    own_tiles.setdefault(box, plain(shard.data))
        for tile in own_tiles.values():
            tile.copy_to_host_async()
        return own_tiles


@dataclasses.dataclass
class ReadLeaf(ocp.RestoreArgs):  # type: ignore[misc]
    """To Orbax: read a leaf to where it belongs, whatever it was when it was stored; nowhere: it is not wanted."""

    restore_type: Any = StoredLeaf
    home: Home | None = None


class LeafHandler(type_handlers.ArrayHandler):  # type: ignore[misc]
    """Orbax's handler of arrays, for leaves that lie on some processes only, or in pieces on several meshes."""

    def __init__(self) -> None:
        super().__init__(enable_write_sharding_file=False, use_replica_parallel=False, array_metadata_store=None)

    def typestr(self) -> str:
        """What a leaf is to who reads the files and says nothing about it: a JAX array would need its devices again."""
        return "np.ndarray"

    async def serialize(self, values: Sequence[StoredLeaf], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """What is given away afterwards has been copied when this returns; it is written then."""
        own = [leaf.own_tiles() for leaf in values]
        # Copies also on CPUs, where an array may be given away before it is written.
        writes = [
            (info, leaf, {box: np.array(tile) for box, tile in tiles.items()})
            for info, leaf, tiles in zip(infos, values, own, strict=True)
            if tiles
        ]
        return [ocp.future.CommitFutureAwaitingContractedSignals(_write_all(writes), name="autopar_leaves")]

    async def deserialize(self, infos: Sequence[Any], args: Sequence[ReadLeaf] | None = None) -> Sequence[Any]:
        limit = asyncio.Semaphore(_READ_AT_ONCE)

        async def read(info: Any, wanted: ReadLeaf) -> Any:
            async with limit:
                return None if wanted.home is None else await _read(info, wanted.home)

        return await asyncio.gather(*itertools.starmap(read, zip(infos, args or (), strict=True)))


async def _write_all(writes: Iterable[tuple[Any, StoredLeaf, Mapping[Box, np.ndarray[Any, Any]]]]) -> None:
    await asyncio.gather(*(_write(info, leaf, tiles) for info, leaf, tiles in writes))


async def _write(info: Any, leaf: StoredLeaf, tiles: Mapping[Box, np.ndarray[Any, Any]]) -> None:
    await info.await_path_creation()
    first = next(iter(tiles.values()))
    inner = first.shape[len(leaf.shape) :]  # of random keys: their numbers
    spec = type_handlers.get_json_tspec_write(
        info, use_ocdbt=info.is_ocdbt_checkpoint, global_shape=(*leaf.shape, *inner),
        local_shape=(*chunk_shape(leaf.tiles, leaf.shape), *inner), dtype=first.dtype,
        process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
        arg=ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES),
    )  # fmt: skip
    store = await tensorstore.open(tensorstore.Spec(spec), create=True, open=True, context=info.ts_context)
    await asyncio.gather(
        *(
            store[_slices(box)].write(tile, can_reference_source_data_indefinitely=True)
            for box, tile in tiles.items()
            if tile.size
        )
    )


def chunk_shape(tiles: Iterable[Box], shape: Sequence[int]) -> tuple[int, ...]:
    """The largest chunks of which every tile is made: two processes must not write into one."""
    borders = list(zip(*tiles, strict=True)) or [((0, size),) for size in shape]
    return tuple(max(1, math.gcd(*itertools.chain.from_iterable(along))) for along in borders)


async def _read(info: Any, home: Home) -> jax.Array | Pieces:
    spec = type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
    store = await tensorstore.open(tensorstore.Spec(spec), open=True, read=True, context=info.ts_context)
    if home.cut is None:
        return await _read_piece(store, home.arrays[0], 0, 0)
    starts = zip(home.arrays, home.cut.bounds, strict=False)
    return Pieces(tuple([await _read_piece(store, piece, home.cut.axis, start) for piece, start in starts]), home.cut)


async def _read_piece(store: Any, piece: jax.ShapeDtypeStruct, axis: int, start: int) -> jax.Array:
    """The part of a leaf that begins there: this process's tiles of it, each read once."""
    sharding = piece.sharding
    if sharding is not None and not sharding.addressable_devices:
        if piece.shape:
            return absent(piece)
        sharding = None  # a number: known to all processes
    if sharding is None:
        window = dict.fromkeys(jax.local_devices()[:1], tuple((0, size) for size in piece.shape))
    else:
        index_of = sharding.addressable_devices_indices_map(piece.shape)
        window = {device: box_of(index or (), piece.shape) for device, index in index_of.items()}
    boxes = {box: _slices(_moved(box, axis, start)) for box in window.values()}
    numbers = dict(zip(boxes, await asyncio.gather(*(store[at].read() for at in boxes.values())), strict=True))
    wanted = plain_struct(jax.ShapeDtypeStruct((), piece.dtype)).dtype
    tiles = jax.device_put([numbers[box].astype(wanted) for box in window.values()], list(window), may_alias=False)
    tiles = [as_wanted(piece, tile) for tile in tiles]
    array: jax.Array = tiles[0]
    if sharding is not None:
        array = jax.make_array_from_single_device_arrays(piece.shape, sharding, tiles)
    return weakly_typed(array) if piece.weak_type else array


def _moved(box: Box, axis: int, by: int) -> Box:
    return tuple((start + by, stop + by) if d == axis else (start, stop) for d, (start, stop) in enumerate(box))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
