"""What takes longer in a train step than alone: a few steps are run as a whole.

A kernel finds less of what it reads in a cache, devices come to a collective at different times, and XLA copies what
the cost model takes for free. One factor for all says more of steps of another kind than factors for kernels, products
and collectives apart: these change places with one another from one kind of step to the next.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence

import jax

from autopar import recipes
from autopar.calibration.probe_steps import ProbeStep, probe_steps
from autopar.calibration.probes import Clock
from autopar.calibration.timer import time_steps
from autopar.cost_model.slowed import Factors, changed, slower_kind, slower_link
from autopar.errors import InfeasiblePlanError
from autopar.ir.calibration import Measurement
from autopar.ir.mesh import Cluster, DeviceKind
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.passes.rules.table import rule_of
from autopar.reporting.progress import ProgramBar
from autopar.stages import Options, Traced, trace

_DOUBLINGS = 8  # of the sizes of steps, at most
_EXAMPLES = 8  # of a step, on each device
_RUNS = 5
_SHORT, _LONG = 0.02, 0.3  # predicted seconds of the steps that are run


@dataclasses.dataclass(frozen=True)
class StepRun:
    """A step that was run."""

    probe: ProbeStep
    traced: Traced
    plan: Plan
    seconds: float
    reference: float  # seconds of the reference kernel then
    temporaries: float  # how many times as large as predicted they are
    convolves: bool

    def predicted(self, cluster: Cluster) -> float:
        """Seconds on this cluster."""
        plan = dataclasses.replace(self.plan, cluster=cluster)
        return self.traced.plan(method=plan).step_time

    def normalised(self, reference: float) -> StepRun:
        """With what it would have taken where the reference kernel takes so many seconds."""
        return dataclasses.replace(self, seconds=self.seconds * reference / self.reference, reference=reference)


def run_steps(
    cluster: Cluster, devices: Sequence[jax.Device], clock: Clock, ends: float, show_progress: bool
) -> tuple[list[StepRun], int]:
    """Of the sizes that take neither too little time nor too much, until `ends`, and how many were left out then."""
    wanted: list[tuple[ProbeStep, Method]] = []
    for size in (2**i for i in range(_DOUBLINGS)):
        for probe in probe_steps(size, _EXAMPLES * len(devices)):
            with warnings.catch_warnings(action="ignore"):
                options = Options(cluster=cluster, method=recipes.data_parallel(1))
                seconds = trace(probe.step, (probe.state, probe.batch), options).plan().step_time
            if _SHORT < seconds < _LONG:
                wanted += [(probe, method) for method in _methods(len(devices), probe.couples)]
        if wanted and seconds > _LONG:
            break
    runs, late = [], 0
    with ProgramBar("measuring steps", show_progress) as bar, warnings.catch_warnings(action="ignore"):
        for done, (probe, method) in enumerate(wanted):
            bar(done, len(wanted))
            if time.monotonic() > ends:
                late += 1
            elif (run := _run(probe, method, cluster, devices, clock)) is not None:
                runs.append(run)
    return runs, late


def slowed(cluster: Cluster, runs: Sequence[StepRun]) -> tuple[Cluster, list[Measurement]]:
    """A cluster on which all takes as much longer as in the steps, and each of these beside what the others predict."""
    if not runs:
        return cluster, []
    cluster = _with_temporaries(cluster, runs)
    alone = [run.predicted(cluster) for run in runs]
    ratios = [run.seconds / seconds for run, seconds in zip(runs, alone, strict=True)]
    measurements = []
    for at, (run, seconds) in enumerate(zip(runs, alone, strict=True)):
        others = [*ratios[:at], *ratios[at + 1 :]] or [1.0]
        predicted = seconds * statistics.geometric_mean(others)
        name = f"{run.probe.name}, {run.plan.method}"
        measurements.append(Measurement("steps", name, cluster.num_devices, run.seconds, predicted))
    factor = statistics.geometric_mean(ratios)
    all_alike = Factors(factor, factor, factor, factor, factor)
    slower = changed(cluster, lambda kind: slower_kind(kind, all_alike), lambda link: slower_link(link, factor, factor))
    return slower, measurements


def _with_temporaries(cluster: Cluster, runs: Sequence[StepRun]) -> Cluster:
    """Whose programs set aside as much as those of steps did, where nothing else says how much that is."""
    factors = {}
    for name, convolves in (("convolutions", True), ("others", False)):
        ratios = [run.temporaries for run in runs if run.convolves is convolves] or [run.temporaries for run in runs]
        factors[name] = statistics.median(ratios)

    def kind(of: DeviceKind) -> DeviceKind:
        return of if of.xla.hides_latency else of.with_measured(temporaries=factors)

    return changed(cluster, kind, lambda link: link)


def _methods(num_devices: int, couples: bool) -> Iterator[Method]:
    yield recipes.data_parallel(1)
    if num_devices > 1:
        yield recipes.zero(3, 1)
        yield recipes.megatron(1, num_devices, 1, 1)
    if num_devices % 2 == 0 and num_devices > 2:
        yield recipes.megatron(num_devices // 2, 2, 1, 1)
    if num_devices % 4 == 0:
        yield recipes.megatron(num_devices // 4, 2, 2, 1 if couples else 4)


def _run(
    probe: ProbeStep, method: Method, cluster: Cluster, devices: Sequence[jax.Device], clock: Clock
) -> StepRun | None:
    options = Options(cluster=cluster, devices=tuple(devices), method=method)
    traced = trace(probe.step, (probe.state, probe.batch), options)
    try:
        executable = traced.compile()
    except InfeasiblePlanError:
        return None
    timing, reference = clock.with_reference(lambda: time_steps(executable, _RUNS))
    actual = max(executable.temporaries.values())
    predicted = max(stage.memory.temporaries for stage in executable.plan.stages)
    rules = map(rule_of, traced.graph.equations)
    convolves = any(rule.patches is not None for rule in rules)
    more = actual / predicted if actual and predicted else 1.0
    return StepRun(probe, traced, executable.plan, timing.median, reference, more, convolves)
