"""What else JAX has to reach another process's devices: `transfer_alternatives.py FOLDER ROUNDS WAY PORT PORT`.

Each of two processes with 4 devices runs this, in a job for each way, which takes turns with ours. The array lies in 4
tiles on the devices of the first, and comes to those of the second, tile by tile, which suits all.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.runtime.placement import Array, absent
from autopar.runtime.processes import this_job
from benchmarks.transfer_processes import Meeting, Pair, check, moved, on, values, ways

SIZES = (16 << 10, 256 << 10, 2 << 20, 16 << 20)  # bytes
LINE = Sharding((("x",),))


def by_permute(pair: Pair, array: jax.Array | None) -> Callable[[], Any]:
    """One program on the union of both meshes; the second gives tiles that nobody takes."""
    devices = np.array(jax.devices(), dtype=object).reshape(2, -1)
    union = NamedSharding(jax.sharding.Mesh(devices, ("process", "x")), PartitionSpec(("process", "x")))
    shape, target = (2 * pair.shape[0],), on(pair.target, LINE)

    def permute(tile: jax.Array) -> Any:
        return jax.lax.ppermute(tile, "process", [(0, 1)])

    mapped = jax.shard_map(permute, mesh=union.mesh, in_specs=union.spec, out_specs=union.spec)
    program = jax.jit(mapped).lower(jax.ShapeDtypeStruct(shape, pair.dtype, sharding=union)).compile()
    nothing = np.zeros(pair.shape[0] // devices.shape[1], pair.dtype)
    given = (
        [jax.device_put(nothing, device) for device in jax.local_devices()]
        if array is None
        else [shard.data for shard in array.addressable_shards]
    )

    def run() -> Any:
        result = program(jax.make_array_from_single_device_arrays(shape, union, given))
        arrived = [shard.data for shard in result.addressable_shards] if array is None else []
        return jax.make_array_from_single_device_arrays(pair.shape, target, arrived, dtype=pair.dtype)

    return run


def by_device_put(pair: Pair, array: jax.Array | None) -> Callable[[], Any]:
    """Both processes say what goes where; one has the array, the other what it looks like."""
    target = on(pair.target, LINE)
    given = absent(Array(pair.shape, pair.dtype, on(pair.source, LINE))) if array is None else array
    return lambda: jax.device_put(given, target)


ALTERNATIVES = {"collective permute": by_permute, "device_put": by_device_put}


def main(folder: pathlib.Path, rounds: int, way: str, ports: list[int]) -> None:
    """Each process writes when its rounds begin and end."""
    job = this_job()
    assert job is not None, "one of two"
    if way == "device_put":
        # Of CPUs, which have no other way; with port 0 each would look for the other at port 0.
        jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{ports[job.index]}")
    meeting, channel = Meeting(folder / "meeting", job.index), job.channel("a benchmark", ())
    job.connect()
    half = jax.device_count() // 2
    source, target = (Mesh(tuple(range(at, at + half)), (half,), ("x",)) for at in (0, half))
    rows = []
    for nbytes in SIZES:
        pair = Pair((nbytes // 4,), np.dtype(np.float32), source, LINE, target, LINE)
        whole = values(pair)
        array = None if job.index else jax.device_put(whole, on(source, LINE))
        (hop,) = ways(pair)["ours"]
        runs: dict[str, Callable[[], Any]] = {
            "ours": functools.partial(moved, [hop], array, channel, job), way: ALTERNATIVES[way](pair, array),
        }  # fmt: skip
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for name in [name for number in range(rounds + 1) for name in list(runs)[:: 1 - 2 * (number % 2)]]:
            started = meeting.wait()
            result = jax.block_until_ready(runs[name]())
            times[name].append((started, time.monotonic()))
            check(result if job.index else None, whole, name)
        rows.append({"nbytes": nbytes, **{name: each[1:] for name, each in times.items()}})
    meeting.wait()
    (folder / f"{job.index}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], [int(port) for port in sys.argv[4:]])
