"""What is slower in a train step than alone: a few steps are run as a whole, and factors fitted to their seconds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax

from autopar import recipes
from autopar.api import Parallelized, parallelize
from autopar.errors import InfeasiblePlanError
from autopar.ir.calibration import Measurement
from autopar.ir.mesh import Busy, Cluster, DeviceKind, Host, Link
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.probe_steps import ProbeStep, probe_steps
from autopar.progress import ProgramBar
from autopar.timer import time_steps


@dataclasses.dataclass(frozen=True)
class Factors:
    """How many times as long it takes in a step as alone.

    A kernel finds less of what it reads in a cache, and devices come to a collective at different times, all the more
    where more of them are virtual than there are cores. `allocation`: how many times as large the temporaries are that
    the compiler sets aside as those of the cost model.
    """

    memory: float = 1.0
    products: float = 1.0
    latency: float = 1.0
    bandwidth: float = 1.0
    allocation: float = 1.0

    def kind(self, kind: DeviceKind) -> DeviceKind:
        """A device so much slower."""
        return dataclasses.replace(
            kind,
            bandwidths=tuple((nbytes, speed / self.memory) for nbytes, speed in kind.bandwidths),
            memory_efficiency=min(1.0, kind.memory_efficiency / self.memory),
            products=tuple(dataclasses.replace(each, flops=each.flops / self.products) for each in kind.products),
            allocations=tuple((nbytes, speed / self.allocation) for nbytes, speed in kind.allocations),
        )

    def link(self, link: Link) -> Link:
        """A link so much slower."""
        pair = None if link.pair_bandwidth is None else link.pair_bandwidth / self.bandwidth
        return dataclasses.replace(
            link, latency=link.latency * self.latency, bandwidth=link.bandwidth / self.bandwidth, pair_bandwidth=pair
        )

    def host(self, host: Host) -> Host:
        """A host so much slower, whatever of it is busy."""
        busy = (Busy(each.num_devices, self.kind(each.kind), self.link(each.link)) for each in host.busy)
        return Host(self.kind(host.kind), host.num_devices, self.link(host.link), tuple(busy))

    def cluster(self, cluster: Cluster) -> Cluster:
        """All of a cluster but its network so much slower."""
        return dataclasses.replace(cluster, hosts=tuple(map(self.host, cluster.hosts)))


# The fitted ones, and what a factor's squared logarithm weighs beside those of the steps' errors: chosen by the ranking
# of the plans of `benchmarks.calibration` in a few runs. How long devices wait for one another is known least.
_DOUBTS = {"memory": 3.0, "products": 3.0, "latency": 0.3, "bandwidth": 1.0}
_NOTHING = 1e-3  # a factor that makes it as good as free
_DOUBLINGS = 8  # of the sizes of steps, at most
_EXAMPLES = 8  # of a step, on each device
_RUNS = 5
_SHORT, _LONG = 0.02, 0.3  # predicted seconds of the steps that are run


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """A step that was run, and what its predicted seconds are made of."""

    name: str
    seconds: float
    parts: tuple[float, ...]  # by fitted factor
    rest: float  # of the prediction

    def predicted(self, factors: Sequence[float]) -> float:
        """Seconds, with all factors that are fitted."""
        return self.rest + sum(f * part for f, part in zip(factors, self.parts, strict=True))


def fit_factors(steps: Sequence[TimedStep]) -> tuple[float, ...]:
    """Those with the least squares of the logarithms' errors, unlikely ones counted as errors, too."""

    def error(factors: Sequence[float]) -> float:
        doubt = sum(math.log(factor) ** 2 * w for factor, w in zip(factors, _DOUBTS.values(), strict=True))
        return doubt + sum(math.log(step.predicted(factors) / step.seconds) ** 2 for step in steps)

    return least(error, len(_DOUBTS))


@dataclasses.dataclass(frozen=True)
class StepRun:
    """A step that was run."""

    probe: ProbeStep
    step: Parallelized
    plan: Plan
    seconds: float
    temporaries: float  # how many times as large as predicted they are

    def timed(self, cluster: Cluster) -> TimedStep:
        """With the parts that its prediction has on this cluster."""

        def seconds(factors: Factors) -> float:
            plan = dataclasses.replace(self.plan, cluster=factors.cluster(cluster))
            return self.step.plan(self.probe.state, self.probe.batch, method=plan).step_time

        total = seconds(Factors())
        parts = [total - seconds(Factors(**{name: _NOTHING})) for name in _DOUBTS]
        parts = [max(0.0, part) / (1 - _NOTHING) for part in parts]
        name = f"{self.probe.name}, {self.plan.method}"
        return TimedStep(name, self.seconds, tuple(parts), max(0.0, total - sum(parts)))


def run_steps(
    cluster: Cluster, devices: Sequence[jax.Device], ends: float, show_progress: bool
) -> tuple[list[StepRun], int]:
    """Of the sizes that take neither too little time nor too much, until `ends`, and how many were left out then."""
    wanted: list[tuple[ProbeStep, Method]] = []
    for size in (2**i for i in range(_DOUBLINGS)):
        for probe in probe_steps(size, _EXAMPLES * len(devices)):
            with warnings.catch_warnings(action="ignore"):
                step = parallelize(probe.step, cluster=cluster, method=recipes.data_parallel(1))
                seconds = step.plan(probe.state, probe.batch).step_time
            if _SHORT < seconds < _LONG:
                wanted += [(probe, method) for method in _methods(len(devices), probe.couples)]
        if wanted and seconds > _LONG:
            break
    found, late = [], 0
    with ProgramBar("measuring steps", show_progress) as bar, warnings.catch_warnings(action="ignore"):
        for done, (probe, method) in enumerate(wanted):
            bar(done, len(wanted))
            if time.monotonic() > ends:
                late += 1
            elif (run := _run(probe, method, cluster, devices)) is not None:
                found.append(run)
    return found, late


def slowed(cluster: Cluster, runs: Sequence[StepRun]) -> tuple[Cluster, list[Measurement]]:
    """A cluster that is as slow as steps say, and each of these beside what the others predict."""
    if not runs:
        return cluster, []
    cluster = Factors(allocation=statistics.median(run.temporaries for run in runs)).cluster(cluster)
    steps = [run.timed(cluster) for run in runs]
    found = []
    for at, step in enumerate(steps):
        predicted = step.predicted(fit_factors([*steps[:at], *steps[at + 1 :]]))
        found.append(Measurement("steps", step.name, cluster.num_devices, step.seconds, predicted))
    return Factors(*fit_factors(steps)).cluster(cluster), found


def _methods(num_devices: int, couples: bool) -> Iterator[Method]:
    yield recipes.data_parallel(1)
    if num_devices > 1:
        yield recipes.zero(3, 1)
        yield recipes.megatron(1, num_devices, 1, 1)
    if num_devices % 2 == 0 and num_devices > 2:
        yield recipes.megatron(num_devices // 2, 2, 1, 1)
    if num_devices % 4 == 0:
        yield recipes.megatron(num_devices // 4, 2, 2, 1 if couples else 4)


def _run(probe: ProbeStep, method: Method, cluster: Cluster, devices: Sequence[jax.Device]) -> StepRun | None:
    step = parallelize(probe.step, cluster=cluster, devices=devices, method=method)
    try:
        timing = time_steps(step, (probe.state, probe.batch), {}, _RUNS)
    except InfeasiblePlanError:
        return None
    executable = step.compile(probe.state, probe.batch)
    found = max(executable.temporaries.values())
    predicted = max(stage.memory.temporaries for stage in executable.plan.stages)
    return StepRun(probe, step, executable.plan, timing.median, found / max(predicted, 1))


def least(error: Callable[[Sequence[float]], float], count: int) -> tuple[float, ...]:
    """The positive factors with the least error, by a search along one and two of them at a time, in finer steps."""
    best, least = (1.0,) * count, error((1.0,) * count)
    for step in (4.0, 2.0, 1.4, 1.1, 1.03):
        better = True
        while better:
            better = False
            for changed in itertools.chain(
                itertools.combinations(range(count), 1), itertools.combinations(range(count), 2)
            ):
                for ways in itertools.product((step, 1 / step), repeat=len(changed)):
                    tried = list(best)
                    for i, way in zip(changed, ways, strict=True):
                        tried[i] *= way
                    if (found := error(tried)) < least * (1 - 1e-6):
                        best, least, better = tuple(tried), found, True
    return best
