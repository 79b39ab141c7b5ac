"""What each process of a job of `benchmarks.transfer` runs: `transfer_processes.py FOLDER ROUNDS EVERY`.

One of two processes with 4 devices each measures; alone with 8 devices it looks whether arrays go through the host.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import mmap
import pathlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.cost_model.mesh_transfer import tile_copies
from autopar.cost_model.reshard import shardings
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.passes.emit import partition_spec
from autopar.runtime.mail import Message
from autopar.runtime.processes import Channel, Processes, this_job
from autopar.runtime.transfer import Route, Sending, Tile, TileTransfer, send

WAYS = ("naive", "gather then scatter", "ours")


def _mesh(devices: Sequence[int], *shape: int) -> Mesh:
    return Mesh(tuple(devices), shape, ("x", "y")[: len(shape)])


# The first of two processes has devices 0 to 3.
MESHES = (
    (_mesh(range(4), 4), _mesh(range(4, 8), 4)),
    (_mesh(range(4), 2, 2), _mesh(range(4, 8), 2, 2)),
    (_mesh(range(4, 8), 4), _mesh(range(4), 2, 2)),
    (_mesh(range(4), 4), _mesh([4], 1)),
    (_mesh([0], 1), _mesh(range(4, 8), 2, 2)),
    (_mesh(range(2), 2), _mesh(range(4, 8), 4)),
    (_mesh(range(4, 8), 2, 2), _mesh(range(2, 4), 2)),
    (_mesh(range(3), 3), _mesh(range(4, 6), 2)),
    (_mesh(range(4, 6), 2), _mesh(range(1, 4), 3)),
    (_mesh(range(4), 2, 2), _mesh(range(5, 8), 3)),
    (_mesh(range(8), 2, 4), _mesh(range(4, 8), 4)),
    (_mesh(range(4), 4), _mesh(range(8), 4, 2)),
    (_mesh(range(8), 8), _mesh(range(8), 2, 4)),
    (_mesh(range(2, 6), 2, 2), _mesh(range(3, 5), 2)),
    (_mesh(range(1, 7), 6), _mesh(range(2, 6), 4)),
    (_mesh(range(3, 6), 3), _mesh(range(1, 7), 2, 3)),
)
# 18 KB to 16 MB; dimensions divide by 24.
ARRAYS = (
    ((96, 48), "float32"), ((65520,), "float32"), ((48, 24, 48), "bfloat16"), ((480, 2160), "bfloat16"),
    ((72, 72, 96), "float32"), ((1440, 1440), "int8"), ((1344, 3120), "float32"), ((8388600,), "bfloat16"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pair:
    """An array on a mesh, and where it goes."""

    shape: tuple[int, ...]
    dtype: Any
    source: Mesh
    sent: Sharding
    target: Mesh
    received: Sharding

    def __str__(self) -> str:
        there = (
            f"{sharding} on {min(mesh.devices)}..{max(mesh.devices)} as {'x'.join(map(str, mesh.shape))}"
            for sharding, mesh in ((self.sent, self.source), (self.received, self.target))
        )
        return f"{self.dtype}{list(self.shape)}: {' to '.join(there)}"

    def hop(
        self, start: tuple[Mesh, Sharding], end: tuple[Mesh, Sharding], kind: type[TileTransfer] = TileTransfer
    ) -> TileTransfer:
        """This array from one mesh to another."""
        (source, sent), (target, received) = start, end
        tiles = tile_copies(self.shape, sent, source, received, target)
        return kind(tiles, self.shape, self.dtype, on(source, sent), on(target, received))


def pairs() -> list[Pair]:
    """Each pair of meshes with each array, of shardings that are drawn."""
    numbers = random.Random(0)
    found = []
    for (source, target), (shape, dtype) in itertools.product(MESHES, ARRAYS):
        sent, received = (
            numbers.choice([s for s in shardings(len(shape), mesh) if not s.partial and s.divides(shape, mesh)])
            for mesh in (source, target)
        )
        found.append(Pair(shape, jnp.dtype(dtype), source, sent, target, received))
    return found


def on(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    """The sharding on the devices of this job."""
    devices = np.array([jax.devices()[d] for d in mesh.devices], dtype=object).reshape(mesh.shape)
    return NamedSharding(jax.sharding.Mesh(devices, mesh.axes), partition_spec(sharding))


class Naive(TileTransfer):
    """Every device fetches each part of its tile for itself."""

    @functools.cached_property
    def route(self) -> Route:
        """This process's part of the copies."""
        here = jax.process_index()
        senders, receivers = list(self.source.mesh.devices.flat), list(self.target.mesh.devices.flat)
        offers: dict[int, list[Tile]] = {}
        pulls: dict[int, list[jax.ShapeDtypeStruct]] = {}
        own: list[tuple[Tile, jax.Device]] = []
        arriving: dict[jax.Device, list[tuple[int, int]]] = {}  # (process, number among what that sends)
        for copy in self.tiles.copies:
            giver, taker = senders[copy.source], receivers[copy.target]
            tile = Tile(copy.cut, giver)
            if taker.process_index != here:
                if giver.process_index == here:
                    offers.setdefault(taker.process_index, []).append(tile)
                continue
            if giver.process_index == here:
                number = len(own)
                own.append((tile, taker))
            else:
                structs = pulls.setdefault(giver.process_index, [])
                number = len(structs)
                at = SingleDeviceSharding(taker)
                structs.append(jax.ShapeDtypeStruct(self.part_shape, self.dtype, sharding=at))
            arriving.setdefault(taker, []).append((giver.process_index, number))
        first = dict(zip(pulls, itertools.accumulate(map(len, pulls.values()), initial=len(own)), strict=False))
        first[here] = 0
        return Route(
            bool(self.source.addressable_devices), bool(self.target.addressable_devices), offers, pulls,
            tuple(tile for tile, _ in own), tuple(device for _, device in own),
            {to: [first[process] + k for process, k in numbers] for to, numbers in arriving.items()}, {},
        )  # fmt: skip


class Counted:
    """The bytes that this process takes from others."""

    def __init__(self, job: Processes) -> None:
        self._job, self.index = job, job.index
        self.offer = job.offer
        self.nbytes = 0

    def pull(self, uuid: int, sender: int, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """As that of the job."""
        found = self._job.pull(uuid, sender, arrays)
        self.nbytes += sum(x.nbytes for x in found)
        return found


def ways(pair: Pair) -> dict[str, list[TileTransfer]]:
    """The transfers that bring an array to where it goes, one after the other."""
    source, target = (pair.source, pair.sent), (pair.target, pair.received)
    whole = Sharding.replicated(len(pair.shape))
    there = [source, *((Mesh(mesh.devices[:1], (1,), ("x",)), whole) for mesh in (pair.source, pair.target)), target]
    hops = [pair.hop(*ends) for ends in itertools.pairwise(there) if ends[0] != ends[1]]
    return {"naive": [pair.hop(source, target, Naive)], "gather then scatter": hops, "ours": [pair.hop(source, target)]}


def moved(hops: Sequence[TileTransfer], array: Any, channel: Channel, job: Any) -> Any:
    """The array after these transfers, or None where this process has nothing of it."""
    channel.next_step()
    for number, hop in enumerate(hops):
        (array,) = send([Sending(hop, array)], Message(job, channel, number))
    return jax.block_until_ready(array)


def fewest_bytes(pair: Pair) -> int:
    """What this process needs of the array for its devices and has not got: every element once."""
    masks = []
    for mesh, sharding in ((pair.target, pair.received), (pair.source, pair.sent)):
        mask = np.zeros(pair.shape, bool)
        for index in on(mesh, sharding).addressable_devices_indices_map(pair.shape).values():
            mask[index] = True
        masks.append(mask)
    return int((masks[0] & ~masks[1]).sum() * pair.dtype.itemsize)


class Meeting:
    """Of the two processes, to the microsecond: they look at a number of the other's in memory that both see."""

    def __init__(self, file: pathlib.Path, index: int) -> None:
        self._index = index
        with file.open("r+b") as opened:
            self._counts = np.ndarray(2, np.int64, mmap.mmap(opened.fileno(), 16))

    def wait(self) -> float:
        """Until both are here; the time when they are."""
        self._counts[self._index] += 1
        while self._counts[1 - self._index] < self._counts[self._index]:
            time.sleep(0)
        return time.monotonic()


def measured(pair: Pair, rounds: int, job: Processes, channel: Channel, meeting: Meeting) -> dict[str, Any]:
    """Bytes that arrive here, and when rounds begin and end, by way."""
    whole = values(pair)
    source = on(pair.source, pair.sent)
    array = (
        jax.make_array_from_callback(pair.shape, source, lambda index: whole[index])
        if source.addressable_devices
        else None
    )
    row: dict[str, Any] = {"pair": str(pair), "nbytes": whole.nbytes, "fewest": fewest_bytes(pair)}
    there = ways(pair)
    for way, hops in there.items():
        for hop in hops:
            hop.compile()
        counted = Counted(job)
        check(moved(hops, array, channel, counted), whole, f"{way}: {pair}")
        row[way] = {"bytes": counted.nbytes, "times": []}
    orders = list(itertools.permutations(there))  # so that none always comes after the same
    for number in range(rounds):
        for way in orders[number % len(orders)]:
            started = meeting.wait()
            moved(there[way], array, channel, job)
            row[way]["times"].append((started, time.monotonic()))
    meeting.wait()
    return row


def values(pair: Pair) -> np.ndarray[Any, Any]:
    """Of the whole array: numbers that differ wherever they should."""
    return np.random.default_rng(0).integers(0, 127, pair.shape, np.int8).astype(pair.dtype)


def check(array: jax.Array | None, whole: np.ndarray[Any, Any], what: str) -> None:
    """Every device has its tile."""
    for shard in () if array is None else array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index], err_msg=what)


def read_on_the_host(do: Callable[[], Any]) -> bool:
    """Whether arrays are read on the host meanwhile: JAX does so through their value."""
    kind: Any = type(jnp.zeros(()))
    value, reads = kind._value, []

    def read(array: Any) -> Any:
        reads.append(array)
        return value.fget(array)

    kind._value = property(read)
    try:
        jax.block_until_ready(do())
    finally:
        kind._value = value
    return bool(reads)


def through_host(pair: Pair) -> dict[str, Any]:
    """Whether the transfer, and JAX's own way for whole arrays, read the array on the host of this one process."""
    whole = values(pair)
    array = jax.device_put(whole, on(pair.source, pair.sent))
    (hop,) = ways(pair)["ours"]
    hop.compile()
    check(send([Sending(hop, array)])[0], whole, str(pair))
    return {
        "pair": str(pair), "read": read_on_the_host(lambda: send([Sending(hop, array)])),
        "read_by_device_put": read_on_the_host(lambda: jax.device_put(array, hop.target, may_alias=False)),
    }  # fmt: skip


def main(folder: pathlib.Path, rounds: int, every: int) -> None:
    """Each process writes what it saw of one in so many of the pairs."""
    job, chosen = this_job(), pairs()[::every]
    if job is None:
        (folder / "alone.json").write_text(json.dumps([through_host(pair) for pair in chosen]))
        return
    channel = job.channel("a benchmark", ())
    job.connect()
    meeting = Meeting(folder / "meeting", job.index)
    rows = [measured(pair, rounds, job, channel, meeting) for pair in chosen]
    (folder / f"{job.index}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
