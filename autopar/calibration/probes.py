"""Small programs whose time says what a machine can do, and the clock that they are timed by.

Every probe runs on all devices of a mesh at once, each on a piece of its own, as the programs of a step do.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autopar.ir.sharding import StepKind
from autopar.runtime.host_memory import keep_memory

T = TypeVar("T")

AXES = ("groups", "group")
_LEAST_RUNS = 3
_REFERENCE = 0.01  # seconds that the reference kernel is run
_SPREAD = 1024  # numbers that a probe's operands repeat, none of them denormal when they are multiplied


@dataclasses.dataclass(frozen=True)
class Probe:
    """A function of one device's pieces."""

    function: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of one device's operands
    in_place: bool = False  # whether its results, as many as its operands and like them, take their places


def linear(dtype: str, rows: int, width: int, hidden: int, layers: int) -> Probe:
    """Products of layers width -> hidden -> width .. and their gradients."""

    def function(x: Any, cotangent: Any, *weights: Any) -> Any:
        def chain(x: Any, *weights: Any) -> Any:
            for weight in weights:
                x = x @ weight
            return x

        y, pullback = jax.vjp(chain, x, *weights)
        return y, pullback(cotangent)

    array = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    weights = [array((width, hidden)), array((hidden, width))] * layers
    return Probe(function, (array((rows, width)), array((rows, width)), *weights))


def product(size: int) -> Probe:
    """One of two square matrices."""
    return Probe(lambda x, y: (x @ y,), (jax.ShapeDtypeStruct((size, size), jnp.float32),) * 2)


def attention(dtype: str, batch: int, length: int, width: int, layers: int) -> Probe:
    """The batched products of layers of attention without their softmax, and their gradients."""

    def function(queries: Any, cotangent: Any, *rest: Any) -> Any:
        def products(queries: Any, *rest: Any) -> Any:
            for keys, values in zip(rest[::2], rest[1::2], strict=True):
                queries = jnp.einsum("bqk,bkd->bqd", jnp.einsum("bqd,bkd->bqk", queries, keys), values)
            return queries

        y, pullback = jax.vjp(products, queries, *rest)
        return y, pullback(cotangent)

    return Probe(function, (jax.ShapeDtypeStruct((batch, length, width), dtype),) * (2 + 2 * layers))


class ConvolutionSizes(NamedTuple):
    """Of a 2-d convolution of square images with square windows."""

    examples: int
    size: int
    channels: int
    filters: int
    window: int
    stride: int


def convolution(dtype: str, sizes: ConvolutionSizes, of: str, times: int) -> Probe:
    """So many 2-d convolutions, channels last: `of` their "result", or the gradient of "image" or "kernel"."""
    examples, size, channels, filters, window, stride = sizes

    def convolve(image: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            image, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    image = jax.ShapeDtypeStruct((examples, size, size, channels), dtype)
    kernel = jax.ShapeDtypeStruct((window, window, channels, filters), dtype)
    if of == "result":
        return _each(convolve, (image, kernel), times)

    def gradient(image: Any, kernel: Any, cotangent: Any) -> Any:
        _, pullback = jax.vjp(convolve, image, kernel)
        return pullback(cotangent)[0 if of == "image" else 1]

    return _each(gradient, (image, kernel, jax.eval_shape(convolve, image, kernel)), times)


def _each(function: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct], times: int) -> Probe:
    """A function of so many sets of operands, one after the other."""
    count = len(shapes)
    return Probe(
        lambda *operands: [function(*operands[i : i + count]) for i in range(0, times * count, count)],
        tuple(shapes) * times,
    )


def pooling(dtype: str, examples: int, size: int, channels: int, window: int, stride: int, of: str) -> Probe:
    """The largest of each window of an image, channels last: `of` the "result", or its "gradient"."""

    def pool(image: Any) -> Any:
        return jax.lax.reduce_window(
            image, -jnp.inf, jax.lax.max, (1, window, window, 1), (1, stride, stride, 1), "SAME"
        )

    def gradient(image: Any, cotangent: Any) -> Any:
        return jax.vjp(pool, image)[1](cotangent)[0]

    image = jax.ShapeDtypeStruct((examples, size, size, channels), dtype)
    return Probe(pool, (image,)) if of == "result" else Probe(gradient, (image, jax.eval_shape(pool, image)))


def elementwise(kind: str, rows: int, width: int, times: int, *, looped: bool) -> tuple[Probe, Probe]:
    """Kernels that wait for memory, so many times one after the other, and once.

    `looped`: in a loop, each turn of which takes as long on a GPU as some kernels.
    """
    shapes = (jax.ShapeDtypeStruct((rows, width), jnp.float32),) * 3
    once = Probe(_ELEMENTWISE[kind], shapes)
    if looped:
        return _repeated(once, times), once

    def function(*operands: Any) -> Any:
        for _ in range(times):
            operands = jax.lax.optimization_barrier(once.function(*operands))
        return operands

    return Probe(function, shapes, in_place=True), once


def addition(rows: int, width: int, times: int, blocks: int = 0) -> Probe:
    """Adds an array to another, so many times.

    `blocks`: the other is read against its order, in each of so many blocks of it rows and columns change places; 0: it
    is read in order.
    """

    def add(x: Any, y: Any) -> Any:
        if not blocks:
            return x + y, y
        turned = jnp.swapaxes(x.reshape(blocks, width, rows // blocks), 1, 2)
        return turned.reshape(rows, width) + y, y

    return _repeated(Probe(add, (jax.ShapeDtypeStruct((rows, width), jnp.float32),) * 2), times)


def _repeated(once: Probe, times: int) -> Probe:
    def function(*operands: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, carry: once.function(*carry), operands)

    return Probe(function, once.shapes, in_place=True)


def _adam(x: Any, mean: Any, square: Any) -> Any:
    mean, square = 0.9 * mean + 0.1 * x, 0.99 * square + 0.01 * x * x
    return x - 1e-3 * mean / (jnp.sqrt(square) + 1e-3), mean, square


def _gelu(x: Any, y: Any, z: Any) -> Any:
    return jax.nn.gelu(x + y), y, z


def _softmax(x: Any, y: Any, z: Any) -> Any:
    return jax.nn.softmax(x * y), y, z


def _norm(x: Any, y: Any, z: Any) -> Any:
    shifted = x - x.mean(-1, keepdims=True)
    return shifted * jax.lax.rsqrt((shifted * shifted).mean(-1, keepdims=True) + 1e-5) * y, y, z


_ELEMENTWISE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "adam": _adam, "gelu": _gelu, "softmax": _softmax, "norm": _norm,
}  # fmt: skip
ELEMENTWISE = tuple(_ELEMENTWISE)


def buffer(nbytes: int, in_place: bool) -> Probe:
    """A result of so many bytes, where its operand was or in memory that is set aside for it."""
    return Probe(lambda x: (x + 1.0,), (jax.ShapeDtypeStruct((nbytes // 4,), jnp.float32),), in_place)


def launches(times: int) -> Probe:
    """So many products too small to take time, each waiting for the one before."""

    def function(x: Any) -> Any:
        for _ in range(times):
            x = x @ x
        return x

    return Probe(function, (jax.ShapeDtypeStruct((8, 8), jnp.float32),))


def collective(kinds: Sequence[StepKind], payload: int, size: int, times: int) -> Probe:
    """Collectives of so many bytes within the groups of a mesh, one kind after the other, so many times."""
    elements = max(size, payload // 4 // size * size)

    def once(kind: StepKind, x: Any) -> Any:
        group = AXES[1]
        if kind == "all_reduce":
            return jax.lax.psum(x, group)
        if kind == "reduce_scatter":
            return jax.lax.psum_scatter(x, group, tiled=True)
        if kind == "all_gather":
            return jax.lax.all_gather(x, group, tiled=True)
        if kind == "all_to_all":
            return jax.lax.all_to_all(x, group, 0, 0, tiled=True)
        return jax.lax.ppermute(x, group, [(i, (i + 1) % size) for i in range(size)])

    def function(x: Any) -> Any:
        for _ in range(times):
            for kind in kinds:
                x = jax.lax.optimization_barrier(once(kind, x))
        return (x,)

    return Probe(function, (jax.ShapeDtypeStruct((elements,), jnp.float32),), in_place=True)


@dataclasses.dataclass(frozen=True)
class Timed:
    """What some runs of a probe took, one after the other."""

    seconds: float  # the median
    least: float  # of the fastest: what else the machine does only adds to it
    faults: float = 0.0  # pages of the host's memory that were not there (getrusage(2)), mean
    reference: float = 1.0  # seconds that the reference kernel took then

    @classmethod
    def of(cls, runs: Sequence[float], faults: float = 0.0, reference: float = 1.0) -> Timed:
        """`runs`: seconds of each."""
        return cls(statistics.median(runs), min(runs), faults, reference)


def typical(timings: Sequence[Timed], reference: float) -> Timed:
    """The medians of several timings of a probe, each normalised to so many seconds of the reference kernel."""
    factors = [reference / each.reference for each in timings]
    return Timed(
        statistics.median(each.seconds * factor for each, factor in zip(timings, factors, strict=True)),
        statistics.median(each.least * factor for each, factor in zip(timings, factors, strict=True)),
        statistics.median(each.faults for each in timings), reference,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ready:
    """A probe that is compiled for some devices."""

    operands: Any  # the program that makes them
    program: Any
    in_place: bool


class Clock:
    """Times probes on the devices of a host, and beside each a reference kernel: a product on all devices.

    The speed of a machine that others share changes for some seconds at a time, that of arithmetic and that of memory
    traffic alike. What was timed at different speeds is compared by what the reference kernel took then.
    """

    def __init__(self, devices: Sequence[jax.Device], seconds: float, side: int | None) -> None:
        """`seconds`: how long each probe is run; `side`: of the product's matrices; None: there is no such kernel."""
        self._devices, self._seconds = tuple(devices), seconds
        keep_memory(devices)  # as where steps run
        self.references: list[float] = []  # all that were taken
        self._reference: Callable[[], Any] | None = None
        if side is not None:
            (ready,) = self.compile([(product(side), len(self._devices), 1)])
            matrices = jax.block_until_ready(ready.operands())
            self._reference = lambda: ready.program(*matrices)
            self._take_reference()  # the first run warms up

    def compile(self, wanted: Sequence[tuple[Probe, int, int]]) -> list[Ready]:
        """Probes, each on so many devices, in groups of so many; side by side, as XLA compiles outside Python's lock.

        On a GPU to compile a probe takes many times as long as to run it.
        """
        lowered = [self._lowered(*each) for each in wanted]
        with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(wanted))) as pool:
            programs = list(pool.map(lambda low: low.compile(), itertools.chain.from_iterable(lowered)))
        pairs = zip(programs[::2], programs[1::2], strict=True)
        return [Ready(made, run, probe.in_place) for (made, run), (probe, _, _) in zip(pairs, wanted, strict=True)]

    def _lowered(self, probe: Probe, busy: int, group: int) -> tuple[Any, Any]:
        """What makes its operands, and itself."""
        devices = np.array(self._devices[:busy]).reshape(busy // group, group)
        mesh = jax.sharding.Mesh(devices, AXES)
        spec = PartitionSpec(AXES)
        mapped = jax.shard_map(
            lambda *pieces: jax.tree.map(lambda x: x[None], probe.function(*(x[0] for x in pieces))),
            mesh=mesh, in_specs=(spec,) * len(probe.shapes), out_specs=spec, check_vma=False,
        )  # fmt: skip
        sharding = jax.sharding.NamedSharding(mesh, spec)
        shapes = [jax.ShapeDtypeStruct((busy, *s.shape), s.dtype, sharding=sharding) for s in probe.shapes]
        operands = jax.jit(lambda: [_numbers(s.shape, s.dtype) for s in shapes], out_shardings=sharding)
        donated = tuple(range(len(shapes))) if probe.in_place else ()
        return operands.lower(), jax.jit(mapped, donate_argnums=donated).lower(*shapes)

    @property
    def reference(self) -> float:
        """Seconds of the reference kernel: the median of all that were taken."""
        return statistics.median(self.references)

    def _take_reference(self) -> float:
        """Seconds of the reference kernel, now; 1 where there is none."""
        if self._reference is None:
            return 1.0
        durations: list[float] = []
        ends = time.perf_counter() + _REFERENCE
        while len(durations) < _LEAST_RUNS or time.perf_counter() < ends:
            started = time.perf_counter()
            jax.block_until_ready(self._reference())
            durations.append(time.perf_counter() - started)
        return statistics.median(durations)

    def with_reference(self, work: Callable[[], T]) -> tuple[T, float]:
        """Do some work; also the geometric mean of what the reference kernel takes before and after it."""
        before = self._take_reference()
        result = work()
        self.references.append(math.sqrt(before * self._take_reference()))
        return result, self.references[-1]

    def time(self, ready: Ready) -> Timed:
        """How long it takes."""
        operands = jax.block_until_ready(ready.operands())
        (runs, faults), reference = self.with_reference(lambda: self._run(ready, operands))
        return Timed.of(runs, faults, reference)

    def _run(self, ready: Ready, operands: Any) -> tuple[tuple[float, ...], float]:
        """Seconds of each run but the first, and the faults of one."""
        durations: list[float] = []
        faults = 0
        ends = math.inf  # the first run warms up
        while len(durations) <= _LEAST_RUNS or time.perf_counter() < ends:
            started = time.perf_counter()
            results = jax.block_until_ready(ready.program(*operands))
            durations.append(time.perf_counter() - started)
            if len(durations) == 1:
                ends, faults = time.perf_counter() + self._seconds, _faults()
            if ready.in_place:
                operands = results
            del results
        return tuple(durations[1:]), (_faults() - faults) / (len(durations) - 1)


def _faults() -> int:
    """Pages that this process had to wait for so far, those that no disk has."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _numbers(shape: tuple[int, ...], dtype: Any) -> Any:
    """Around 0, small enough that chains of products of them stay finite."""
    size = int(np.prod(shape))
    return (((jnp.arange(size) % _SPREAD) - _SPREAD / 2) / (_SPREAD * 16)).astype(dtype).reshape(shape)
