"""What was measured of a machine, as entries of a cluster file."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import resource
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from autopar.calibration.probes import Probe, Timed
from autopar.cost_model.collective import collective_time
from autopar.cost_model.compute import memory_seconds, peak_flops, product_family, product_share, strided_read_seconds
from autopar.cost_model.fusion import memory_traffic, moved_values
from autopar.cost_model.hardware import make_cluster
from autopar.cost_model.slowed import slower_link
from autopar.ir.calibration import Measurement
from autopar.ir.graph import Graph, Value
from autopar.ir.mesh import DeviceKind, Host, Link, Pooling, ProductSizes, ProductSpeed
from autopar.ir.rule import product_sizes
from autopar.ir.sharding import StepKind
from autopar.passes.rules.table import rule_of
from autopar.tracing.trace import trace

LAUNCHES = 256  # in a probe: enough that they take much longer than its start
POOLINGS: tuple[Pooling, ...] = ("result", "gradient")
_FARTHEST = math.log(1e3)  # of a link's latency and bandwidth from those of the preset
_DOUBT = 0.1  # what being farther from these counts, beside the errors of the probes
_SLOW = 0.1  # of a kernel's time: what setting aside the largest takes, if it is worth counting
Products = tuple[tuple[ProductSizes, str, float], ...]  # what a probe computes: sizes, type, FLOPs


@dataclasses.dataclass(frozen=True)
class ProbeTask:
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
    strided: bool = False  # whether an array is read against its order
    pooling: Pooling | None = None
    dtype: str = ""  # of products

    @property
    def kind(self) -> tuple[str, str, int, Pooling | None, bool]:
        """Equal for probes of the same thing in other sizes."""
        return self.group, self.dtype, self.busy, self.pooling, self.strided


@functools.cache
def products_of(probe: Probe) -> Products:
    """The products that a probe computes, as the rules see them."""
    products = []
    for equation in _traced(probe).equations:
        rule = rule_of(equation)
        sizes = product_sizes(rule.sides, {})
        if sizes is not None:
            products.append((sizes, equation.kernel_dtype(True), rule.work({})))
    return tuple(products)


def traffic_of(probe: Probe, kind: DeviceKind) -> tuple[int, int]:
    """Bytes through memory, and the kernels, as the cost model sees them."""
    graph = _traced(probe)
    rules = {equation.id: rule_of(equation) for equation in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    traffic = memory_traffic(graph.equations, rules, graph.inputs, outputs, xla=kind.xla)
    moved = sum(nbytes for e in graph.equations for _, nbytes in moved_values(e, traffic[e.id]))
    return moved, sum(each.launches for each in traffic.values())


@functools.cache
def pooled_by(probe: Probe, of: Pooling) -> float:
    """Elements of windows that a probe goes through."""
    rules = map(rule_of, _traced(probe).equations)
    return sum(rule.work({}) for rule in rules if rule.pooling == of)


def _traced(probe: Probe) -> Graph:
    return trace(probe.function, probe.shapes, {}, name="probe")


class Machine:
    """What the probes say that ran on so many devices at once."""

    def __init__(self, timed: Mapping[ProbeTask, Timed], host: Host, busy: int) -> None:
        self._timed, self._busy = timed, busy
        guess = host.while_busy(busy)
        self._guess, self._link = guess.kind, guess.link
        start, launches = self._one("start of a program"), self._one("launches")
        self._start = start.seconds
        self._launch = max(0.0, launches.least - start.least) / LAUNCHES
        self._guess = self._guess.with_measured(allocations=self._allocations())
        self._fault = self._seconds_of_a_fault() if self._guess.measured.allocations else 0.0
        self._products = {task: products_of(task.probe) for task in timed if task.group in _PRODUCTS}

    def _one(self, group: str) -> Timed:
        return next(timed for task, timed in self._timed.items() if task.group == group)

    def _buffers(self) -> dict[int, tuple[Timed, Timed]]:
        """By bytes: a new result, and one in place of an operand."""
        timings = {(task.moved, task.probe.in_place): timed for task, timed in self._timed.items()
                   if task.group == "buffers"}  # fmt: skip
        return {nbytes: (timings[nbytes, False], timings[nbytes, True]) for nbytes, old in sorted(timings)
                if old and (nbytes, False) in timings}  # fmt: skip

    def _allocations(self) -> tuple[tuple[float, float], ...]:
        """By what a new result takes longer than one in place of an operand."""
        both = {nbytes: (new.seconds, old.seconds) for nbytes, (new, old) in self._buffers().items()}
        if not both or both[max(both)][0] < (1 + _SLOW) * both[max(both)][1]:
            return ()
        return tuple((float(n), n / max(new - old, new / 100)) for n, (new, old) in both.items())

    def _seconds_of_a_fault(self) -> float:
        """What a new buffer takes longer than an old one, for each page more that was not there; 0 if few were not."""
        seconds = []
        for nbytes, (new, old) in self._buffers().items():
            more, pages = new.faults - old.faults, self._busy * nbytes / resource.getpagesize()
            if more > pages / 2:
                seconds.append(max(0.0, new.seconds - old.seconds) / more)
        return statistics.median(seconds) if seconds else 0.0

    def _starting(self, task: ProbeTask) -> float:
        """Seconds before a probe's first kernel."""
        timed = self._timed[task]
        return self._start + min(timed.faults * self._fault, timed.seconds / 2)

    def _of(self, group: str) -> Iterator[tuple[ProbeTask, float]]:
        """The probes of a group, and their seconds once started."""
        for task, timed in self._timed.items():
            if task.group == group:
                yield task, max(timed.seconds - self._starting(task), timed.seconds / 100)

    def fitted(self, every: DeviceKind | None) -> tuple[DeviceKind, Link]:
        """`every`: with all devices busy, for what was not measured with these.

        Products are as much faster than those as the few that were measured.
        """
        curve = self._curve()
        largest = curve[-1][1] if curve else self._guess.memory_bandwidth * self._guess.memory_efficiency
        kind = dataclasses.replace(
            self._guess, dispatch_overhead=self._start, launch_overhead=self._launch,
            memory_bandwidth=max(largest, self._guess.memory_bandwidth),
        )  # fmt: skip
        kind = dataclasses.replace(kind, memory_efficiency=min(1.0, largest / kind.memory_bandwidth)).with_measured(
            bandwidths=curve, strided_reads=self._strided_reads(), pooling=self._pooled(), products=self._speeds()
        )
        if every is not None:
            own, whole = kind.measured, every.measured
            kind = kind.with_measured(
                products=_faster(whole.products, own.products) if whole.products else own.products,
                strided_reads=own.strided_reads or whole.strided_reads, pooling=own.pooling or whole.pooling,
            )  # fmt: skip
        return kind, self._fit_link(kind)

    def _curve(self) -> tuple[tuple[float, float], ...]:
        groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for task, seconds in self._of("memory"):
            each = max(seconds / task.times - self._launch, seconds / task.times / 10)
            groups[math.prod(task.probe.shapes[0].shape)].append((float(task.moved), task.moved / each))
        curve = [tuple(map(statistics.geometric_mean, zip(*some, strict=True))) for _, some in sorted(groups.items())]
        return tuple((nbytes, speed) for nbytes, speed in curve)

    def _strided_reads(self) -> tuple[tuple[float, float], ...]:
        """By what a kernel takes longer that reads one array against its order."""
        per_byte: dict[int, dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
        for task, seconds in self._of("order"):
            nbytes = 4 * math.prod(task.probe.shapes[0].shape)
            per_byte[task.moved][task.strided].append(seconds / task.times / nbytes)
        curve = []
        for nbytes, each in sorted(per_byte.items()):
            if each[True] and each[False]:
                (in_order,) = each[False]
                more = [max(strided - in_order, in_order / 100) for strided in each[True]]
                curve.append((float(nbytes), 1 / statistics.geometric_mean(more)))
        return tuple(curve)

    def _pooled(self) -> dict[Pooling, float]:
        """Elements of windows per second."""
        speeds: dict[Pooling, list[float]] = defaultdict(list)
        for task, seconds in self._of("pooling"):
            if task.pooling is not None:
                elements = pooled_by(task.probe, task.pooling)
                speeds[task.pooling].append(elements / max(seconds - self._launch, seconds / 10))
        both = {of: statistics.geometric_mean(each) for of, each in speeds.items()}
        return both if len(both) == len(POOLINGS) else {}

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

        collectives = [*self._of("collectives")]
        if not collectives:
            return self._link

        def made(logarithms: Sequence[float]) -> Link:
            latency, bandwidth = map(math.exp, logarithms)
            return slower_link(self._link, latency, bandwidth)

        def errors(logarithms: Sequence[float]) -> list[float]:
            link = made(logarithms)
            farther = [_DOUBT * each for each in logarithms]
            return [math.log(self._collective_seconds(task, kind, link) / s) for task, s in collectives] + farther

        return made(scipy.optimize.least_squares(errors, (0.0, 0.0), bounds=(-_FARTHEST, _FARTHEST)).x)

    def _collective_seconds(self, task: ProbeTask, kind: DeviceKind, link: Link) -> float:
        cluster = make_cluster("", 1, self._busy, kind, link, link)
        group = range(task.size)
        each = sum(collective_time(cluster, group, one, task.payload) + kind.launch_overhead for one in task.kinds)
        return task.times * each

    # How well it is said

    def measurements(self, kind: DeviceKind, link: Link) -> Iterator[Measurement]:
        """Of all probes of which the cost model says how long they take."""
        for task, timed in self._timed.items():
            predicted = self._predicted(task, kind, link)
            if predicted is not None:
                yield Measurement(task.group, task.name, task.busy, timed.seconds, self._starting(task) + predicted)

    def _predicted(self, task: ProbeTask, kind: DeviceKind, link: Link) -> float | None:
        if task.group == "memory":
            return task.times * (float(memory_seconds(kind, task.moved)) + self._launch)
        if task.group == "order":
            longer = strided_read_seconds(kind, task.moved, strided=task.strided, copied=0)
            return task.times * float(memory_seconds(kind, 3 * task.moved) + self._launch + longer)
        if task.pooling is not None and kind.measured.pooling:
            return pooled_by(task.probe, task.pooling) / kind.measured.pooling[task.pooling] + self._launch
        if task.group == "collectives":
            return self._collective_seconds(task, kind, link)
        if task.group not in _PRODUCTS:
            return None
        own = {(sizes, dtype) for sizes, dtype, _ in self._products[task]}
        left = tuple(each for each in kind.measured.products if (each.sizes, each.dtype) not in own)
        if not {product_family(s.sizes, s.dtype) for s in left} & {product_family(*each) for each in own}:
            return None
        without = kind.with_measured(products=left)
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
    every = [ratio for group in ratios.values() for ratio in group] or [1.0]
    measured = {(each.sizes, each.dtype) for each in some}
    others = (each for each in all_products if (each.sizes, each.dtype) not in measured)
    scaled = (
        dataclasses.replace(each, flops=each.flops * statistics.geometric_mean(ratios.get(sort(each), every)))
        for each in others
    )
    return (*some, *scaled)
