"""Measures the machine it runs on: `calibrate` turns probes into the numbers of a cluster."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence

import jax

from autopar.calibration import probes
from autopar.calibration.machine import LAUNCHES, POOLINGS, Machine, ProbeTask, traffic_of
from autopar.calibration.probes import Clock, Ready, Timed, typical
from autopar.calibration.step_factors import run_steps, slowed
from autopar.cost_model.compute import peak_flops
from autopar.cost_model.hardware import busy_counts, cluster_from_devices
from autopar.errors import ClusterError
from autopar.ir.calibration import Calibration
from autopar.ir.mesh import Busy, Cluster, Host, Pooling
from autopar.ir.sharding import StepKind
from autopar.ir.units import bytes_text
from autopar.reporting.progress import ProgramBar

LEAST_SECONDS = 10.0
_STEPS_SHARE = 0.4  # of the time, for steps as a whole
_RUN = 0.12  # seconds that a probe is run, compiling left out
_REFERENCE = 0.002  # seconds that the reference kernel takes, about
_AT_ONCE = max(4, min(16, os.cpu_count() or 1))  # probes that are compiled side by side
_LONGEST = 0.02  # seconds that one product of a probe may take on the device
_WORK = 0.005  # seconds of work in a probe of products, that its start is not what takes the time
_UNROLLED = 64  # kernels of a probe that has no loop
_LAYERS = 8  # of a probe of products, at most
_COLLECTIVES: tuple[tuple[StepKind, ...], ...] = (
    ("all_reduce",), ("reduce_scatter", "all_gather"), ("all_to_all",), ("permute",),
)  # fmt: skip
_PAYLOADS = (1 << 12, 1 << 23, 1 << 16, 1 << 20)  # a short calibration knows of both ends
_TIMES = 8  # collectives in a probe
_CACHES = (1 << 23, 1 << 14, 1 << 20, 1 << 17, 1 << 25)  # bytes of an array
_WIDTH = 256  # of an array
_REORDERED = (1 << 23, 1 << 17, 1 << 20)  # bytes of an array that is read against its order
_TURNED = ((_WIDTH, 1), (2048, 1), (1000, 1), (576, 8))  # width, and blocks in which rows and columns change places
_POOLED = ((8, 56, 64, 3, 2), (8, 28, 128, 2, 2))  # examples, size, channels, window, stride
_BUFFERS = (1 << 26, 1 << 25, 1 << 23, 1 << 20)  # bytes


def calibrate(
    devices: Sequence[jax.Device] | None = None, *, seconds: float = 300.0, show_progress: bool = False
) -> Calibration:
    """Measure what devices (default: all of this process) do, for a cluster that plans are made with.

    Products, batched products and convolutions with their gradients over sizes and types, kernels that wait for memory
    (on CPUs also those that read arrays against their order, and pooling), launches, the start of a program, and
    collectives over groups of 2, 4, .. devices. Virtual devices are measured with all of them busy and with fewer.
    Nothing else should run on the machine meanwhile.

    Args:
      seconds: how long it may take; the most telling probes come first, and one of each kind is always made. The time
        that is left when all are made goes to making them again.
      show_progress: a progress bar on the terminal.

    Raises:
      ClusterError: too little time, or devices of several processes or kinds.
    """
    if not LEAST_SECONDS <= seconds < math.inf:
        raise ClusterError(f"seconds is {seconds!r}: measuring takes at least {LEAST_SECONDS:g}; give it more.")
    devices = tuple(jax.local_devices() if devices is None else devices)
    processes = {device.process_index for device in devices}
    if len(processes) > 1:
        raise ClusterError(
            f"devices belong to {len(processes)} processes: a calibration measures one host, whose file says "
            "num_hosts; pass the devices of one process (jax.local_devices()), which has all of its host."
        )
    guess = cluster_from_devices(devices)
    if len(guess.hosts) > 1:
        raise ClusterError("devices belong to several domains of the fast interconnect; pass those of one.")
    return _Calibrator(devices, guess, seconds, show_progress).run()


class _Calibrator:
    """One calibration."""

    def __init__(self, devices: tuple[jax.Device, ...], guess: Cluster, seconds: float, show_progress: bool) -> None:
        self._devices, self._guess, self._show_progress = devices, guess, show_progress
        self._host = guess.hosts[0]
        self._backend = _CPU if self._host.kind.xla.single_output else _GPU
        self._started = time.monotonic()
        self._ends = self._started + seconds
        self._steps_start = self._ends - _STEPS_SHARE * seconds
        counts = [*busy_counts(len(devices))][::-1] if self._host.busy else []
        self._counts = (len(devices), *counts)
        self._clock = Clock(self._devices, _RUN, self._side())
        self._timed: dict[ProbeTask, list[Timed]] = {}
        self._ready: dict[ProbeTask, Ready] = {}
        self._kinds: set[tuple[str, str, int, Pooling | None, bool]] = set()  # of what was measured

    def _side(self) -> int | None:
        """Of the matrices of the reference kernel."""
        if not self._backend.is_shared:
            return None
        peak = peak_flops(self._host.kind, "float32", matmul=True)
        return int(2 ** round(math.log2((_REFERENCE * peak / 2) ** (1 / 3))))

    def run(self) -> Calibration:
        left_out = self._measure(_in_turn(self._tasks()), self._steps_start)
        first, _ = self._fitted()
        runs, late = run_steps(first, self._devices, self._clock, self._ends, self._show_progress)
        left_out = self._measure(left_out, self._ends)
        self._measure_again()
        reference = self._clock.reference
        fitted, machines = self._fitted()
        measurements = [each for machine, busy in machines for each in machine.measurements(busy.kind, busy.link)]
        cluster, steps = slowed(fitted, [run.normalised(reference) for run in runs])
        sources = {"memory of a device": "what the system or the preset says", "the network": "the preset's"}
        if len(self._devices) == 1:
            sources["the link between devices"] = "the preset's"
        took = time.monotonic() - self._started
        return Calibration(cluster, (*measurements, *steps), took, len(left_out) + late, sources)

    def _measure(self, tasks: Sequence[ProbeTask], ends: float) -> list[ProbeTask]:
        """Every probe once, or fewer where there is no time for more until `ends`; which were left out."""
        left_out = []
        with ProgramBar("measuring", self._show_progress) as bar:
            for first in range(0, len(tasks), _AT_ONCE):
                bar(first, len(tasks))
                is_late, chosen = time.monotonic() > ends, []
                for task in tasks[first : first + _AT_ONCE]:
                    # One of each kind is measured however slow the machine is: a cluster that lacks one is none.
                    if is_late and task.kind in self._kinds and task.group not in _FIRST:
                        left_out.append(task)
                        continue
                    self._kinds.add(task.kind)
                    chosen.append(task)
                ready = self._clock.compile([(task.probe, task.busy, task.size) for task in chosen])
                self._ready |= zip(chosen, ready, strict=True)
                self._timed |= {task: [self._clock.time(self._ready[task])] for task in chosen}
        return left_out

    def _measure_again(self) -> None:
        """What was measured, one probe after the other, while there is time."""
        with ProgramBar("measuring again", self._show_progress):
            for task, ready in itertools.cycle(self._ready.items()):
                if time.monotonic() > self._ends:
                    return
                self._timed[task].append(self._clock.time(ready))

    # What is measured

    def _tasks(self) -> list[ProbeTask]:
        kind = self._host.kind
        tasks: list[ProbeTask] = []
        for busy in self._counts:
            tasks += [
                ProbeTask("start of a program", "start", probes.launches(1), busy),
                ProbeTask("launches", "launches", probes.launches(1 + LAUNCHES), busy, times=LAUNCHES),
            ]
            tasks += self._buffers(busy) + self._memory(busy) + self._collectives(busy)
            if self._backend.reorders:
                tasks += self._strided_reads(busy) + self._pooling(busy)
            every = busy == len(self._devices)
            for dtype in self._backend.products:
                tasks += self._some_products(dtype, busy, peak_flops(kind, dtype, matmul=True), every)
        return tasks

    @staticmethod
    def _buffers(busy: int) -> list[ProbeTask]:
        return [
            ProbeTask(
                "buffers", f"{'old' if old else 'new'} one of {bytes_text(nbytes)}", probes.buffer(nbytes, old), busy,
                moved=nbytes,
            )
            for nbytes in _BUFFERS for old in (False, True)
        ]  # fmt: skip

    def _memory(self, busy: int) -> list[ProbeTask]:
        tasks = []
        for kind, nbytes in itertools.product(probes.ELEMENTWISE, _CACHES):
            times = self._times(nbytes) if self._backend.loops else min(self._times(nbytes), _UNROLLED)
            rows = nbytes // (4 * _WIDTH)
            repeated, once = probes.elementwise(kind, rows, _WIDTH, times, looped=self._backend.loops)
            moved, kernels = traffic_of(once, self._host.kind)
            name = f"{kind} of {bytes_text(nbytes)}"
            tasks.append(ProbeTask("memory", name, repeated, busy, moved=moved // kernels, times=kernels * times))
        return tasks

    def _strided_reads(self, busy: int) -> list[ProbeTask]:
        tasks = []
        shapes = ((_WIDTH, 0), *_TURNED)
        # What tells most first: each size in order and in another one.
        cases = [(nbytes, each) for some in (shapes[:2], shapes[2:]) for nbytes in _REORDERED for each in some]
        for nbytes, (width, blocks) in cases:
            rows = nbytes // (4 * width * max(1, blocks)) * max(1, blocks)
            times = self._times(nbytes)
            name = f"{blocks} of {rows // blocks} x {width}" if blocks else f"{rows} x {width}, in order"
            probe = probes.addition(rows, width, times, blocks)
            tasks.append(ProbeTask("order", name, probe, busy, moved=nbytes, times=times, strided=blocks > 0))
        return tasks

    @staticmethod
    def _pooling(busy: int) -> list[ProbeTask]:
        tasks = []
        for (examples, size, channels, window, stride), of in itertools.product(_POOLED, POOLINGS):
            probe = probes.pooling("float32", examples, size, channels, window, stride, of)
            name = f"{of} of {examples} x {size}² x {channels}, {window}², stride {stride}"
            tasks.append(ProbeTask("pooling", name, probe, busy, pooling=of))
        return tasks

    def _times(self, nbytes: int) -> int:
        """How often a kernel goes through arrays of so many bytes in a probe."""
        return max(4, int(_WORK * self._host.kind.memory_bandwidth / (4 * nbytes)))

    def _collectives(self, busy: int) -> list[ProbeTask]:
        sizes = [2**i for i in range(1, busy.bit_length()) if busy % 2**i == 0]
        if busy not in sizes and busy > 1:
            sizes.append(busy)
        return [
            ProbeTask(
                "collectives", f"{' and '.join(kinds)} of {bytes_text(payload)} among {size}".replace("_", "-"),
                probes.collective(kinds, payload, size, _TIMES), busy, size, payload, kinds, times=_TIMES,
            )
            for kinds, size, payload in itertools.product(_COLLECTIVES, sizes, _PAYLOADS)
        ]  # fmt: skip

    def _some_products(self, dtype: str, busy: int, peak: float, every: bool) -> list[ProbeTask]:
        """`every`: else a few, that tell how much faster fewer busy devices are.

        What tells most comes first: the largest, and then each time what is farthest from all before.
        """
        linear = [each for each in _LINEAR if 2.0 * math.prod(each) <= _LONGEST * peak]
        batched = [each for each in _ATTENTION if 2.0 * each[0] * each[1] ** 2 * each[2] <= _LONGEST * peak]

        def filling(most: int, flops: float) -> int:
            """Of what takes so many FLOPs each, how many are enough work for a probe, at most so many."""
            return max(1, min(most, int(_WORK * peak / flops)))

        tasks = []
        for rows, width, hidden in _spread(linear, None if every else len(_LINEAR) // 5):
            layers = filling(_LAYERS, 12.0 * rows * width * hidden)
            probe = probes.linear(dtype, rows, width, hidden, layers)
            tasks.append(ProbeTask("products", f"{rows} x {width} x {hidden}, {dtype}", probe, busy, dtype=dtype))
        for batch, length, width in _spread(batched, None if every else 1):
            layers = filling(_LAYERS, 12.0 * batch * length**2 * width)
            probe = probes.attention(dtype, batch, length, width, layers)
            name = f"{batch} of {length} x {width}, {dtype}"
            tasks.append(ProbeTask("batched products", name, probe, busy, dtype=dtype))
        if dtype in self._backend.convolutions:
            for sizes, of in itertools.product(_CONVOLUTIONS if every else _CONVOLUTIONS[:1], _OF):
                size, channels, filters, window, stride = sizes
                if channels == _COLOURS and of == "image":  # what nobody wants
                    continue
                each = 2.0 * (size // stride) ** 2 * channels * filters * window**2
                examples = filling(self._backend.examples, each)
                images = filling(self._backend.images, examples * each)
                probe = probes.convolution(
                    dtype, probes.ConvolutionSizes(examples, size, channels, filters, window, stride), of, images
                )
                name = f"{of} of {examples} x {size}² x {channels}, {window}² x {filters}, stride {stride}, {dtype}"
                tasks.append(ProbeTask("convolutions", name, probe, busy, dtype=dtype))
        return tasks

    # What it says

    def _fitted(self) -> tuple[Cluster, list[tuple[Machine, Busy]]]:
        """The cluster, and for each number of busy devices what was measured and what it says."""
        reference = self._clock.reference
        every = {task: typical(timings, reference) for task, timings in self._timed.items()}
        machines: list[tuple[Machine, Busy]] = []
        for count in self._counts:
            machine = Machine({t: s for t, s in every.items() if t.busy == count}, self._host, count)
            machines.append((machine, Busy(count, *machine.fitted(machines[0][1].kind if machines else None))))
        whole, *fewer = (busy for _, busy in machines)
        host = Host(whole.kind, len(self._devices), whole.link, tuple(reversed(fewer)))
        name = f"{len(self._devices)} x {whole.kind.name}, calibrated"
        return Cluster(name, (host,), self._guess.network), machines


_SIDES = (64, 256, 1024, 4096)
# Rows, width, hidden: the sizes of a training step are between these.
_LINEAR = tuple(
    (rows, width, hidden)
    for rows in (512, 128, 2048, 8192)
    for width, hidden in itertools.combinations_with_replacement(_SIDES, 2)
)
_ATTENTION = tuple((batch, length, width) for batch in (16, 128) for length in (128, 512, 2048) for width in (32, 128))
# Size, channels, filters, window, stride.
_CONVOLUTIONS = (
    (32, 64, 64, 3, 1), (16, 128, 256, 3, 1), (8, 256, 256, 3, 1), (56, 32, 64, 3, 1), (7, 512, 512, 3, 1),
    (32, 64, 128, 3, 2), (14, 256, 512, 3, 2), (56, 64, 256, 1, 1), (14, 512, 256, 1, 1), (28, 256, 512, 1, 2),
    (112, 3, 64, 7, 2), (56, 32, 32, 1, 1), (56, 64, 32, 1, 1), (28, 128, 128, 3, 1), (28, 128, 64, 1, 1),
    (28, 64, 256, 1, 1), (56, 64, 128, 3, 2), (28, 128, 256, 3, 2), (56, 128, 256, 1, 2), (14, 256, 256, 3, 1),
    (14, 128, 512, 1, 1), (7, 512, 1024, 1, 1), (7, 1024, 512, 1, 1), (28, 64, 64, 3, 1), (112, 3, 32, 3, 2),
    (112, 3, 32, 7, 2), (32, 3, 16, 3, 1), (224, 3, 384, 16, 16),
)  # fmt: skip
_OF = ("result", "image", "kernel")
_COLOURS = 3
_FIRST = ("start of a program", "launches")


@dataclasses.dataclass(frozen=True)
class _Backend:
    """What is measured of devices whose programs one of XLA's backends makes, and how."""

    products: tuple[str, ...]  # types, those of most steps first
    convolutions: tuple[str, ...]  # types
    examples: int  # of a convolution, at most
    images: int  # convolutions of a probe, at most
    loops: bool  # kernels are repeated in a loop
    reorders: bool  # how an array is read matters, and pooling is arithmetic
    is_shared: bool  # others use the same cores, so that their speed changes from second to second


# XLA for CPUs computes convolutions of 16 bits in 32.
_CPU = _Backend(("float32", "bfloat16"), ("float32",), examples=32, images=1, loops=True, reorders=True, is_shared=True)
# A turn of a loop takes as long as some kernels.
_GPU = _Backend(
    ("bfloat16", "float32"), ("bfloat16", "float32"), examples=128, images=8, loops=False, reorders=False,
    is_shared=False,
)  # fmt: skip


def _spread(sizes: Sequence[tuple[int, ...]], most: int | None) -> list[tuple[int, ...]]:
    """The largest, and then each time what is farthest from all before; at most so many.

    Of logarithms of sides (Gonzalez 1985, "Clustering to minimize the maximum intercluster distance").
    """
    left = sorted(sizes, key=math.prod)
    distances = dict.fromkeys(left, math.inf)
    chosen: list[tuple[int, ...]] = []
    while left and (most is None or len(chosen) < most):
        farthest = max(reversed(left), key=distances.__getitem__)
        chosen.append(farthest)
        left.remove(farthest)
        for each in left:
            between = sum(math.log(a / b) ** 2 for a, b in zip(each, farthest, strict=True))
            distances[each] = min(distances[each], between)
    return chosen


def _in_turn(tasks: Sequence[ProbeTask]) -> list[ProbeTask]:
    """One of each group, type and number of devices after the other, lest a short calibration knows all of one only."""
    groups: dict[tuple[str, str, int], list[ProbeTask]] = defaultdict(list)
    for task in tasks:
        groups[task.group, task.dtype, task.busy].append(task)
    rounds = itertools.zip_longest(*groups.values())
    return [task for each in rounds for task in each if task is not None]
