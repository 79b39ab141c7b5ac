"""How fast the devices and links of a job are now, by a few small probes that take a moment between two steps.

It says nothing of how fast they should be: readings are compared with earlier ones of the same part, and with those of
other parts that are alike.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from autopar.runtime.processes import Processes
from autopar.runtime.source import compiler_options

What = Literal["products", "memory", "link"]
_RUNS = 5  # of which the fastest counts: what else the machine does only adds to it
_AXIS = "ends"


class _Sizes(NamedTuple):
    """Of the probes of a backend, so that each runs for some milliseconds."""

    side: int  # of the matrices of a product
    products: int
    moved: int  # bytes of an array that kernels go through
    passes: int
    sent: int  # bytes


_SIZES = {"cpu": _Sizes(512, 1, 1 << 24, 2, 1 << 20)}
_OTHERS = _Sizes(4096, 16, 1 << 27, 16, 1 << 25)


class Part(NamedTuple):
    """What a reading is of; devices by their numbers in a plan."""

    what: What
    device: int  # of a link the first of its two devices, which are neighbours by their numbers


Readings = Mapping[Part, float]  # seconds


def readings(devices: Sequence[jax.Device], job: Processes | None) -> Readings:
    """Of all devices, and of the links between neighbours; the same on all processes, which all have to come here.

    `devices`: of the whole job, in the order of a plan.
    """
    here = jax.process_index()
    mine = {index: device for index, device in enumerate(devices) if device.process_index == here}
    found: dict[Part, float] = {}
    for index, device in mine.items():
        for what, probe in (("products", _products), ("memory", _memory)):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # as where there is no memory left for it
                found[Part(what, index)] = _fastest(probe(device))  # type: ignore[arg-type]
    # All are compiled before one is run: those between processes wait for one another, from the first to the last.
    links = {i: _link(devices[i], devices[i + 1]) for i in range(len(devices) - 1) if i in mine or i + 1 in mine}
    found |= {Part("link", index): _fastest(link) for index, link in links.items()}
    if job is None:
        return found
    return _read(job.combined(_written(found), _merged, "to say how fast its devices are"))


def _fastest(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, after one that warms up."""
    durations = []
    for _ in range(1 + _RUNS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        durations.append(time.perf_counter() - started)
    return min(durations[1:])


def _sizes(device: jax.Device) -> _Sizes:
    return _SIZES.get(device.platform, _OTHERS)


def _products(device: jax.Device) -> Callable[[], Any]:
    sizes = _sizes(device)
    # Random, as in training: for equal numbers a GPU draws less power. Powers of such a matrix neither grow nor fade.
    numbers = np.random.default_rng(0).standard_normal((sizes.side, sizes.side), np.float32) / np.sqrt(sizes.side)
    x = jax.device_put(numbers, device).astype(jnp.float32 if device.platform == "cpu" else jnp.bfloat16)
    return _compiled(lambda x: jax.lax.fori_loop(0, sizes.products, lambda _, y: x @ y, x), x)


def _memory(device: jax.Device) -> Callable[[], Any]:
    sizes = _sizes(device)
    x = jax.device_put(np.ones(sizes.moved // 4, np.float32), device)
    return _compiled(lambda x: jax.lax.fori_loop(0, sizes.passes, lambda _, y: y * 0.5 + 1.0, x), x)


def _compiled(function: Callable[[Any], Any], x: jax.Array) -> Callable[[], Any]:
    """Ready to run, with what this process has of its result."""
    program = jax.jit(function).lower(x).compile(compiler_options=compiler_options(x.sharding.device_set))
    return lambda: [shard.data for shard in program(x).addressable_shards]


def _link(first: jax.Device, second: jax.Device) -> Callable[[], Any]:
    """What sends from each to the other, ready to run; of two processes both have to."""
    elements = _sizes(first).sent // 4
    mesh = jax.sharding.Mesh(np.array([first, second]), (_AXIS,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(_AXIS))
    exchange = jax.shard_map(
        lambda x: jax.lax.ppermute(x, _AXIS, [(0, 1), (1, 0)]),
        mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec,
    )  # fmt: skip
    pieces = [
        jax.device_put(np.ones(elements, np.float32), d)
        for d in (first, second) if d.process_index == jax.process_index()
    ]  # fmt: skip
    x = jax.make_array_from_single_device_arrays((2 * elements,), sharding, pieces)
    return _compiled(exchange, x)


def _written(found: Readings) -> str:
    return json.dumps([[*part, seconds] for part, seconds in found.items()])


def _read(text: str) -> dict[Part, float]:
    return {Part(what, device): seconds for what, device, seconds in json.loads(text)}


def _merged(texts: Iterable[str]) -> str:
    """Of a link between processes both have read: the quicker reading has waited less for the other."""
    found: dict[Part, float] = {}
    for text in texts:
        for part, seconds in _read(text).items():
            found[part] = min(seconds, found.get(part, seconds))
    return _written(found)
