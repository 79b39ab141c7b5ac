"""Whole arrays on every process, of arrays whose pieces lie on several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.runtime.processes import Channel, Processes
from autopar.runtime.random_keys import is_key, plain

Box = tuple[tuple[int, int], ...]  # a tile: its start and stop along each dimension of the whole


def whole_arrays(arrays: Mapping[int, jax.Array], job: Processes, receivers: Collection[int] = ()) -> dict[int, Any]:
    """On the host, on the receivers or all processes; all have to call this for the same arrays. Random keys stay keys.

    Every process pulls the pieces that it does not have, each once, those that several have from them in turn. Numbers
    (arrays of no dimension) are known to all processes already: see `Mail`.
    """
    channel = job.gatherings
    tiles = {number: holders(array) for number, array in arrays.items()}
    if any(tiles.values()):  # else nothing is sent, and one process may do so alone
        channel.next_step()
    for number, array in arrays.items():
        mine = {box_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        for receiver in receivers or range(job.count):
            wanted = [key for key, there in tiles[number].items() if _sender(there, receiver) == job.index]
            if wanted:
                # The caller may give the arrays away before the others have fetched them.
                job.offer(channel.uuid(number, receiver), [mine[key].copy() for key in wanted])
    if receivers and job.index not in receivers:
        return {}
    return {number: _whole(array, tiles[number], number, job, channel) for number, array in arrays.items()}


def _whole(array: jax.Array, tiles: dict[Box, list[int]], number: int, job: Processes, channel: Channel) -> Any:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    pieces = {box_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    by_sender: dict[int, list[Box]] = {}
    for key, there in tiles.items():
        sender = _sender(there, job.index)
        if sender is not None:
            by_sender.setdefault(sender, []).append(key)
    for sender, keys in by_sender.items():
        shapes = [tuple(stop - start for start, stop in key) for key in keys]
        channel.awaits(sender)
        structs = [jax.ShapeDtypeStruct(shape, array.dtype, sharding=here) for shape in shapes]
        pieces.update(zip(keys, job.pull(channel.uuid(number, job.index), sender, structs), strict=True))
    numbers = {key: np.asarray(plain(piece)) for key, piece in pieces.items()}
    first = next(iter(numbers.values()))
    result = np.empty((*array.shape, *first.shape[array.ndim :]), first.dtype)
    for key, piece in numbers.items():
        result[tuple(slice(start, stop) for start, stop in key)] = piece
    return jax.random.wrap_key_data(result, impl=jax.random.key_impl(array)) if is_key(array) else result  # type: ignore[arg-type]


def holders(array: jax.Array) -> dict[Box, list[int]]:
    """The processes that hold each tile of an array, in the order of its mesh; empty for numbers, which all know."""
    if array.ndim == 0:
        return {}
    processes_of: dict[Box, list[int]] = {}
    index_of: Mapping[Any, tuple[slice, ...]] = array.sharding.devices_indices_map(array.shape)
    for device, index in index_of.items():
        there = processes_of.setdefault(box_of(index, array.shape), [])
        if device.process_index not in there:
            there.append(device.process_index)
    return processes_of


def _sender(there: Sequence[int], receiver: int) -> int | None:
    """Who sends a piece to a process; nobody where it has the piece."""
    return None if receiver in there else there[receiver % len(there)]


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The tile of an array that an index of its sharding or of a shard stands for."""
    dims = zip(index, shape, strict=False)  # pieces of random keys have one more, of their numbers
    return tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in dims)
