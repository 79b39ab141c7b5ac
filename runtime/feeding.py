"""Examples from where they are read to where a step wants them: of several processes each reads its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from autopar.ir.graph import BatchDim
from autopar.ir.instructions import Register
from autopar.runtime.gathering import box_of
from autopar.runtime.placement import Array, arrays_of, private

Feeds = Mapping[Register, tuple[int, BatchDim, int, Array]]  # (argument leaf, its batch, microbatch, array)


class DataShard(NamedTuple):
    """Which part of each batch a process reads: number `shard_index` of `shard_count` equal ones, as loaders say."""

    shard_index: int
    shard_count: int


class Rows(NamedTuple):
    """Of a batch: a shard, and the examples of the whole batch that are in it, in their order."""

    shard: DataShard
    numbers: np.ndarray[Any, Any]


def rows_of(feeds: Feeds, process: int) -> Rows:
    """What a process reads. Those whose devices hold an example in common read the same shard.

    A pipeline's first stage takes the inputs and its last the labels, so that the processes of one pipeline share a
    shard; those of other replicas have others. Where this does not cut the batch into equal parts all read the whole.
    """
    sizes = {batch.size for _, batch, _, _ in feeds.values()}
    whole = Rows(DataShard(0, 1), np.arange(max(sizes, default=0)))
    if len(sizes) != 1 or any(batch.outer != 1 or batch.inner != 1 for _, batch, _, _ in feeds.values()):
        return whole
    (size,) = sizes
    needs: dict[int, np.ndarray[Any, Any]] = {}
    for _, batch, microbatch, array in feeds.values():
        index_of: Mapping[Any, tuple[slice, ...]] = array.sharding.devices_indices_map(array.shape)
        for device, index in index_of.items():
            start, stop = _examples(index, batch, microbatch, array)
            needs.setdefault(device.process_index, np.zeros(size, bool))[start:stop] = True
    shards: list[np.ndarray[Any, Any]] = []
    for rows in needs.values():
        common = [shard for shard in shards if (shard & rows).any()]
        shards = [shard for shard in shards if not (shard & rows).any()] + [np.logical_or.reduce([rows, *common])]
    counts = {int(shard.sum()) for shard in shards}
    if counts != {size // len(shards)}:
        return whole
    shards.sort(key=lambda shard: int(shard.argmax()))
    mine = needs.get(process)
    # A process that takes no examples may read any shard.
    number = 0 if mine is None else next(k for k, shard in enumerate(shards) if (shard & mine).any())
    return Rows(DataShard(number, len(shards)), np.flatnonzero(shards[number]))


def place_rows(leaves: Mapping[int, np.ndarray[Any, Any]], feeds: Feeds, rows: Rows) -> dict[Register, jax.Array]:
    """Examples of a shard, or of the whole batch, on this process's devices, by register.

    Nobody waits: the copies go on while steps run.
    """
    held = []
    leaves = {at: private(leaf) for at, leaf in leaves.items()}  # loaders may fill theirs anew
    for at, batch, microbatch, array in feeds.values():
        leaf = leaves[at]
        is_part = leaf.shape[batch.dim] != batch.size
        index_of: Mapping[Any, tuple[slice, ...]] = array.sharding.addressable_devices_indices_map(array.shape)  # type: ignore[assignment]
        pieces = {}
        for device, index in index_of.items():
            start, stop = _examples(index, batch, microbatch, array)
            if is_part:
                start, stop = np.searchsorted(rows.numbers, (start, stop))
            pieces[device] = leaf[(*index[: batch.dim], slice(start, stop), *index[batch.dim + 1 :])]
        held.append((array.shape, array.sharding, pieces))
    return dict(zip(feeds, arrays_of(held), strict=True))


def _examples(index: tuple[slice, ...], batch: BatchDim, microbatch: int, array: Array) -> tuple[int, int]:
    """Of the whole batch, those of a microbatch that a device holds."""
    first = microbatch * array.shape[batch.dim]
    start, stop = box_of(index, array.shape)[batch.dim]
    return first + start, first + stop
