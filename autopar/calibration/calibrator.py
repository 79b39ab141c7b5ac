"""Measures the machine it runs on: `calibrate` turns probes into the numbers of a cluster."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import jax

from autopar.calibration import probes
from autopar.calibration.probes import Clock, Probe, Ready, Timed, typical
from autopar.calibration.slowdowns import run_steps, slowed, slower_link
from autopar.cost_model.collective import collective_time
from autopar.cost_model.compute import memory_seconds, peak_flops, product_family, product_share, reordering_seconds
from autopar.cost_model.fusion import memory_traffic, moved_values
from autopar.cost_model.hardware import busy_counts, cluster_from_devices, make_cluster
from autopar.errors import ClusterError
from autopar.ir.calibration import Calibration, Measurement
from autopar.ir.graph import Graph, Value
from autopar.ir.mesh import Busy, Cluster, DeviceKind, Host, Link, Pooling, ProductSizes, ProductSpeed
from autopar.ir.rule import product_sizes
from autopar.ir.sharding import StepKind
from autopar.ir.units import bytes_text
from autopar.passes.rules.table import rule_of
from autopar.reporting.progress import ProgramBar
from autopar.tracing.trace import trace

LEAST_SECONDS = 10.0
_STEPS_SHARE = 0.4  # of the time, for steps as a whole
_RUN = 0.12  # seconds that a probe is run, compiling left out
_REFERENCE = 0.002  # seconds that the reference kernel takes, about
_AT_ONCE = max(4, min(16, os.cpu_count() or 1))  # probes that are compiled side by side
_LONGEST = 0.02  # seconds that one product of a probe may take on the device
_WORK = 0.005  # seconds of work in a probe of products, that its start is not what takes the time
_UNROLLED = 64  # kernels of a probe that has no loop
_LAYERS = 8  # of a probe of products, at most
_LAUNCHES = 256  # in a probe: enough that they take much longer than its start
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
_POOLINGS: tuple[Pooling, ...] = ("result", "gradient")
_BUFFERS = (1 << 26, 1 << 25, 1 << 23, 1 << 20)  # bytes
_FARTHEST = math.log(1e3)  # of a link's latency and bandwidth from those of the preset
_DOUBT = 0.1  # what being farther from these counts, beside the errors of the probes
_SLOW = 0.1  # of a kernel's time: what setting aside the largest takes, if it is worth counting

Products = tuple[tuple[ProductSizes, str, float], ...]  # what a probe computes: sizes, type, FLOPs


@dataclasses.dataclass(frozen=True)
class _Task:
    """A probe and what it is about."""

    group: str
    name: str
    probe: Probe
    busy: int
    size: int = 1  # of the groups of a collective
    payload: int = 0  # bytes, of a collective
    kinds: tuple[StepKind, ...] = ()
    moved: int = 0  # bytes, of each kernel of a probe of memory
    times: int = 1  # kernels or collectives
    against: bool = False  # whether an array is read against its order
    pooling: Pooling | None = None
    dtype: str = ""  # of products

    @property
    def kind(self) -> tuple[str, str, int, Pooling | None, bool]:
        """Equal for probes of the same thing in other sizes."""
        return self.group, self.dtype, self.busy, self.pooling, self.against


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
        self._found: dict[_Task, list[Timed]] = {}
        self._ready: dict[_Task, Ready] = {}
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

    def _measure(self, tasks: Sequence[_Task], ends: float) -> list[_Task]:
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
                self._found |= {task: [self._clock.time(self._ready[task])] for task in chosen}
        return left_out

    def _measure_again(self) -> None:
        """What was measured, one probe after the other, while there is time."""
        with ProgramBar("measuring again", self._show_progress):
            for task, ready in itertools.cycle(self._ready.items()):
                if time.monotonic() > self._ends:
                    return
                self._found[task].append(self._clock.time(ready))

    # What is measured

    def _tasks(self) -> list[_Task]:
        kind = self._host.kind
        found: list[_Task] = []
        for busy in self._counts:
            found += [
                _Task("start of a program", "start", probes.launches(1), busy),
                _Task("launches", "launches", probes.launches(1 + _LAUNCHES), busy, times=_LAUNCHES),
            ]
            found += self._buffers(busy) + self._memory(busy) + self._collectives(busy)
            if self._backend.reorders:
                found += self._reorderings(busy) + self._pooling(busy)
            every = busy == len(self._devices)
            for dtype in self._backend.products:
                found += self._some_products(dtype, busy, peak_flops(kind, dtype, matmul=True), every)
        return found

    @staticmethod
    def _buffers(busy: int) -> list[_Task]:
        return [
            _Task("buffers", f"{'old' if old else 'new'} one of {bytes_text(nbytes)}", probes.buffer(nbytes, old), busy,
                  moved=nbytes)
            for nbytes in _BUFFERS for old in (False, True)
        ]  # fmt: skip

    def _memory(self, busy: int) -> list[_Task]:
        found = []
        for kind, nbytes in itertools.product(probes.ELEMENTWISE, _CACHES):
            times = self._times(nbytes) if self._backend.loops else min(self._times(nbytes), _UNROLLED)
            rows = nbytes // (4 * _WIDTH)
            repeated, once = probes.elementwise(kind, rows, _WIDTH, times, looped=self._backend.loops)
            moved, kernels = _traffic_of(once, self._host.kind)
            name = f"{kind} of {bytes_text(nbytes)}"
            found.append(_Task("memory", name, repeated, busy, moved=moved // kernels, times=kernels * times))
        return found

    def _reorderings(self, busy: int) -> list[_Task]:
        found = []
        shapes = ((_WIDTH, 0), *_TURNED)
        # What tells most first: each size in order and in another one.
        cases = [(nbytes, each) for some in (shapes[:2], shapes[2:]) for nbytes in _REORDERED for each in some]
        for nbytes, (width, blocks) in cases:
            rows = nbytes // (4 * width * max(1, blocks)) * max(1, blocks)
            times = self._times(nbytes)
            name = f"{blocks} of {rows // blocks} x {width}" if blocks else f"{rows} x {width}, in order"
            probe = probes.addition(rows, width, times, blocks)
            found.append(_Task("order", name, probe, busy, moved=nbytes, times=times, against=blocks > 0))
        return found

    @staticmethod
    def _pooling(busy: int) -> list[_Task]:
        found = []
        for (examples, size, channels, window, stride), of in itertools.product(_POOLED, _POOLINGS):
            probe = probes.pooling("float32", examples, size, channels, window, stride, of)
            name = f"{of} of {examples} x {size}² x {channels}, {window}², stride {stride}"
            found.append(_Task("pooling", name, probe, busy, pooling=of))
        return found

    def _times(self, nbytes: int) -> int:
        """How often a kernel goes through arrays of so many bytes in a probe."""
        return max(4, int(_WORK * self._host.kind.memory_bandwidth / (4 * nbytes)))

    def _collectives(self, busy: int) -> list[_Task]:
        sizes = [2**i for i in range(1, busy.bit_length()) if busy % 2**i == 0]
        if busy not in sizes and busy > 1:
            sizes.append(busy)
        return [
            _Task(
                "collectives", f"{' and '.join(kinds)} of {bytes_text(payload)} among {size}".replace("_", "-"),
                probes.collective(kinds, payload, size, _TIMES), busy, size, payload, kinds, times=_TIMES,
            )
            for kinds, size, payload in itertools.product(_COLLECTIVES, sizes, _PAYLOADS)
        ]  # fmt: skip

    def _some_products(self, dtype: str, busy: int, peak: float, every: bool) -> list[_Task]:
        """`every`: else a few, that tell how much faster fewer busy devices are.

        What tells most comes first: the largest, and then each time what is farthest from all before.
        """
        linear = [each for each in _LINEAR if 2.0 * math.prod(each) <= _LONGEST * peak]
        batched = [each for each in _ATTENTION if 2.0 * each[0] * each[1] ** 2 * each[2] <= _LONGEST * peak]

        def filling(most: int, flops: float) -> int:
            """Of what takes so many FLOPs each, how many are enough work for a probe, at most so many."""
            return max(1, min(most, int(_WORK * peak / flops)))

        found = []
        for rows, width, hidden in _spread(linear, None if every else len(_LINEAR) // 5):
            layers = filling(_LAYERS, 12.0 * rows * width * hidden)
            probe = probes.linear(dtype, rows, width, hidden, layers)
            found.append(_Task("products", f"{rows} x {width} x {hidden}, {dtype}", probe, busy, dtype=dtype))
        for batch, length, width in _spread(batched, None if every else 1):
            layers = filling(_LAYERS, 12.0 * batch * length**2 * width)
            probe = probes.attention(dtype, batch, length, width, layers)
            found.append(_Task("batched products", f"{batch} of {length} x {width}, {dtype}", probe, busy, dtype=dtype))
        if dtype in self._backend.convolutions:
            for sizes, of in itertools.product(_CONVOLUTIONS if every else _CONVOLUTIONS[:1], _OF):
                size, channels, filters, window, stride = sizes
                if channels == _COLOURS and of == "image":  # what nobody wants
                    continue
                each = 2.0 * (size // stride) ** 2 * channels * filters * window**2
                examples = filling(self._backend.examples, each)
                images = filling(self._backend.images, examples * each)
                probe = probes.convolution(dtype, examples, size, channels, filters, window, stride, of, images)
                name = f"{of} of {examples} x {size}² x {channels}, {window}² x {filters}, stride {stride}, {dtype}"
                found.append(_Task("convolutions", name, probe, busy, dtype=dtype))
        return found

    # What it says

    def _fitted(self) -> tuple[Cluster, list[tuple[_Machine, Busy]]]:
        """The cluster, and for each number of busy devices what was measured and what it says."""
        reference = self._clock.reference
        every = {task: typical(timings, reference) for task, timings in self._found.items()}
        found: list[tuple[_Machine, Busy]] = []
        for count in self._counts:
            machine = _Machine({t: s for t, s in every.items() if t.busy == count}, self._host, count)
            found.append((machine, Busy(count, *machine.fitted(found[0][1].kind if found else None))))
        whole, *fewer = (busy for _, busy in found)
        host = Host(whole.kind, len(self._devices), whole.link, tuple(reversed(fewer)))
        name = f"{len(self._devices)} x {whole.kind.name}, calibrated"
        return Cluster(name, (host,), self._guess.network), found


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
    found: list[tuple[int, ...]] = []
    while left and (most is None or len(found) < most):
        farthest = max(reversed(left), key=distances.__getitem__)
        found.append(farthest)
        left.remove(farthest)
        for each in left:
            between = sum(math.log(a / b) ** 2 for a, b in zip(each, farthest, strict=True))
            distances[each] = min(distances[each], between)
    return found


def _in_turn(tasks: Sequence[_Task]) -> list[_Task]:
    """One of each group, type and number of devices after the other, lest a short calibration knows all of one only."""
    groups: dict[tuple[str, str, int], list[_Task]] = defaultdict(list)
    for task in tasks:
        groups[task.group, task.dtype, task.busy].append(task)
    rounds = itertools.zip_longest(*groups.values())
    return [task for each in rounds for task in each if task is not None]


@functools.cache
def products_of(probe: Probe) -> Products:
    """The products that a probe computes, as the rules see them."""
    found = []
    for equation in _traced(probe).equations:
        rule = rule_of(equation)
        sizes = product_sizes(rule.sides, {})
        if sizes is not None:
            found.append((sizes, equation.kernel_dtype(True), rule.work({})))
    return tuple(found)


def _traffic_of(probe: Probe, kind: DeviceKind) -> tuple[int, int]:
    """Bytes through memory, and the kernels, as the cost model sees them."""
    graph = _traced(probe)
    rules = {equation.id: rule_of(equation) for equation in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    traffic = memory_traffic(graph.equations, rules, graph.inputs, outputs, single_output=kind.xla.single_output)
    moved = sum(nbytes for e in graph.equations for _, nbytes in moved_values(e, traffic[e.id]))
    return moved, sum(each.launches for each in traffic.values())


@functools.cache
def pooled_by(probe: Probe, of: Pooling) -> float:
    """Elements of windows that a probe goes through."""
    rules = map(rule_of, _traced(probe).equations)
    return sum(rule.work({}) for rule in rules if rule.pooling == of)


def _traced(probe: Probe) -> Graph:
    return trace(probe.function, probe.shapes, {}, name="probe")


class _Machine:
    """What the probes say that ran on so many devices at once."""

    def __init__(self, found: Mapping[_Task, Timed], host: Host, busy: int) -> None:
        self._found, self._busy = found, busy
        guess = host.while_busy(busy)
        self._guess, self._link = guess.kind, guess.link
        start, launches = self._one("start of a program"), self._one("launches")
        self._start = start.seconds
        self._launch = max(0.0, launches.least - start.least) / _LAUNCHES
        self._guess = dataclasses.replace(self._guess, allocations=self._allocations())
        self._fault = self._seconds_of_a_fault() if self._guess.allocations else 0.0
        self._products = {task: products_of(task.probe) for task in found if task.group in _PRODUCTS}

    def _one(self, group: str) -> Timed:
        return next(timed for task, timed in self._found.items() if task.group == group)

    def _buffers(self) -> dict[int, tuple[Timed, Timed]]:
        """By bytes: a new result, and one in place of an operand."""
        found = {(task.moved, task.probe.in_place): timed for task, timed in self._found.items()
                 if task.group == "buffers"}  # fmt: skip
        return {nbytes: (found[nbytes, False], found[nbytes, True]) for nbytes, old in sorted(found)
                if old and (nbytes, False) in found}  # fmt: skip

    def _allocations(self) -> tuple[tuple[float, float], ...]:
        """By what a new result takes longer than one in place of an operand."""
        both = {nbytes: (new.seconds, old.seconds) for nbytes, (new, old) in self._buffers().items()}
        if not both or both[max(both)][0] < (1 + _SLOW) * both[max(both)][1]:
            return ()
        return tuple((float(n), n / max(new - old, new / 100)) for n, (new, old) in both.items())

    def _seconds_of_a_fault(self) -> float:
        """What a new buffer takes longer than an old one, for each page more that was not there; 0 if few were not."""
        found = []
        for nbytes, (new, old) in self._buffers().items():
            more, pages = new.faults - old.faults, self._busy * nbytes / resource.getpagesize()
            if more > pages / 2:
                found.append(max(0.0, new.seconds - old.seconds) / more)
        return statistics.median(found) if found else 0.0

    def _starting(self, task: _Task) -> float:
        """Seconds before a probe's first kernel."""
        timed = self._found[task]
        return self._start + min(timed.faults * self._fault, timed.seconds / 2)

    def _of(self, group: str) -> Iterator[tuple[_Task, float]]:
        """The probes of a group, and their seconds once started."""
        for task, timed in self._found.items():
            if task.group == group:
                yield task, max(timed.seconds - self._starting(task), timed.seconds / 100)

    def fitted(self, every: DeviceKind | None) -> tuple[DeviceKind, Link]:
        """`every`: with all devices busy, for what was not measured with these.

        Products are as much faster than those as the few that were measured.
        """
        curve = self._curve()
        largest = curve[-1][1] if curve else self._guess.memory_bandwidth * self._guess.memory_efficiency
        kind = dataclasses.replace(
            self._guess, dispatch_overhead=self._start, launch_overhead=self._launch, bandwidths=curve,
            reorderings=self._reorderings(), pooling=self._pooled(),
            memory_bandwidth=max(largest, self._guess.memory_bandwidth), products=self._speeds(),
        )  # fmt: skip
        kind = dataclasses.replace(kind, memory_efficiency=min(1.0, largest / kind.memory_bandwidth))
        if every is not None:
            kind = dataclasses.replace(
                kind, products=_faster(every.products, kind.products) if every.products else kind.products,
                reorderings=kind.reorderings or every.reorderings, pooling=kind.pooling or every.pooling,
            )  # fmt: skip
        return kind, self._fit_link(kind)

    def _curve(self) -> tuple[tuple[float, float], ...]:
        groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for task, seconds in self._of("memory"):
            each = max(seconds / task.times - self._launch, seconds / task.times / 10)
            groups[math.prod(task.probe.shapes[0].shape)].append((float(task.moved), task.moved / each))
        curve = [tuple(map(statistics.geometric_mean, zip(*some, strict=True))) for _, some in sorted(groups.items())]
        return tuple((nbytes, speed) for nbytes, speed in curve)

    def _reorderings(self) -> tuple[tuple[float, float], ...]:
        """By what a kernel takes longer that reads one array against its order."""
        found: dict[int, dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
        for task, seconds in self._of("order"):
            nbytes = 4 * math.prod(task.probe.shapes[0].shape)
            found[task.moved][task.against].append(seconds / task.times / nbytes)
        curve = []
        for nbytes, each in sorted(found.items()):
            if each[True] and each[False]:
                (in_order,) = each[False]
                more = [max(against - in_order, in_order / 100) for against in each[True]]
                curve.append((float(nbytes), 1 / statistics.geometric_mean(more)))
        return tuple(curve)

    def _pooled(self) -> dict[Pooling, float]:
        """Elements of windows per second."""
        found: dict[Pooling, list[float]] = defaultdict(list)
        for task, seconds in self._of("pooling"):
            if task.pooling is not None:
                elements = pooled_by(task.probe, task.pooling)
                found[task.pooling].append(elements / max(seconds - self._launch, seconds / 10))
        both = {of: statistics.geometric_mean(speeds) for of, speeds in found.items()}
        return both if len(both) == len(_POOLINGS) else {}

    def _speeds(self) -> tuple[ProductSpeed, ...]:
        speeds: dict[tuple[ProductSizes, str], list[float]] = defaultdict(list)
        for task, seconds in itertools.chain.from_iterable(map(self._of, _PRODUCTS)):
            some = self._products[task]
            speed = sum(flops for *_, flops in some) / max(seconds - self._launch * len(some), seconds / 10)
            for sizes, dtype in {(sizes, dtype) for sizes, dtype, _ in some}:
                speeds[sizes, dtype].append(speed)
        return tuple(
            ProductSpeed(dtype, sizes, statistics.geometric_mean(measured))
            for (sizes, dtype), measured in speeds.items()
        )

    def _fit_link(self, kind: DeviceKind) -> Link:
        """Latency and bandwidth with the least squares of the logarithms' errors, near the preset's where few say."""
        import scipy.optimize  # slow to import, and changes the filters of warnings

        found = [*self._of("collectives")]
        if not found:
            return self._link

        def made(logarithms: Sequence[float]) -> Link:
            latency, bandwidth = map(math.exp, logarithms)
            return slower_link(self._link, latency, bandwidth)

        def errors(logarithms: Sequence[float]) -> list[float]:
            link = made(logarithms)
            farther = [_DOUBT * each for each in logarithms]
            return [math.log(self._collective_seconds(task, kind, link) / s) for task, s in found] + farther

        return made(scipy.optimize.least_squares(errors, (0.0, 0.0), bounds=(-_FARTHEST, _FARTHEST)).x)

    def _collective_seconds(self, task: _Task, kind: DeviceKind, link: Link) -> float:
        cluster = make_cluster("", 1, self._busy, kind, link, link)
        group = range(task.size)
        each = sum(collective_time(cluster, group, one, task.payload) + kind.launch_overhead for one in task.kinds)
        return task.times * each

    # How well it is said

    def measurements(self, kind: DeviceKind, link: Link) -> Iterator[Measurement]:
        """Of all probes of which the cost model says how long they take."""
        for task, timed in self._found.items():
            predicted = self._predicted(task, kind, link)
            if predicted is not None:
                yield Measurement(task.group, task.name, task.busy, timed.seconds, self._starting(task) + predicted)

    def _predicted(self, task: _Task, kind: DeviceKind, link: Link) -> float | None:
        if task.group == "memory":
            return task.times * (float(memory_seconds(kind, task.moved)) + self._launch)
        if task.group == "order":
            longer = reordering_seconds(kind, task.moved, against=task.against, copied=0)
            return task.times * float(memory_seconds(kind, 3 * task.moved) + self._launch + longer)
        if task.pooling is not None and kind.pooling:
            return pooled_by(task.probe, task.pooling) / kind.pooling[task.pooling] + self._launch
        if task.group == "collectives":
            return self._collective_seconds(task, kind, link)
        if task.group not in _PRODUCTS:
            return None
        own = {(sizes, dtype) for sizes, dtype, _ in self._products[task]}
        left = tuple(each for each in kind.products if (each.sizes, each.dtype) not in own)
        if not {product_family(s.sizes, s.dtype) for s in left} & {product_family(*each) for each in own}:
            return None
        without = dataclasses.replace(kind, products=left)
        total = 0.0
        for sizes, dtype, flops in self._products[task]:
            speed = peak_flops(kind, dtype, matmul=True) * kind.matmul_efficiency
            total += flops / (speed * product_share(without, sizes, dtype)) + self._launch
        return total


_PRODUCTS = ("products", "batched products", "convolutions")


def _faster(all_products: Sequence[ProductSpeed], some: Sequence[ProductSpeed]) -> tuple[ProductSpeed, ...]:
    """Speeds measured with all devices busy, as much higher as some of them are with fewer; those where there are."""

    def sort(s: ProductSpeed) -> tuple[tuple[str, bool], bool]:
        return product_family(s.sizes, s.dtype), s.sizes.batch > 1

    slow = {(each.sizes, each.dtype): each.flops for each in all_products}
    ratios: dict[tuple[tuple[str, bool], bool], list[float]] = defaultdict(list)
    for each in some:
        if (each.sizes, each.dtype) in slow:
            ratios[sort(each)].append(each.flops / slow[each.sizes, each.dtype])
    every = [ratio for found in ratios.values() for ratio in found] or [1.0]
    measured = {(each.sizes, each.dtype) for each in some}
    others = (each for each in all_products if (each.sizes, each.dtype) not in measured)
    scaled = (
        dataclasses.replace(each, flops=each.flops * statistics.geometric_mean(ratios.get(sort(each), every)))
        for each in others
    )
    return (*some, *scaled)
