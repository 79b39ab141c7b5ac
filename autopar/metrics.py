"""What a training run does, in numbers: `meter`, and where the numbers go."""

from __future__ import annotations

import atexit
import csv as csv_files
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.api import Parallelized
from autopar.errors import ArgumentError
from autopar.executable import Executable
from autopar.planning.details import model_flops
from autopar.profiling import Recording
from autopar.reporting.record import tokens_per_step
from autopar.runtime.processes import this_job
from autopar.runtime.spent import Since, wait_for
from autopar.wrapped import CountedStep, WrappedStep, check_step


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Of the steps since the numbers before, means of a step. Seconds are of the clock on the wall.

    Attributes:
      function: the step's name.
      step: the number of the last of them.
      step_seconds: from one step to the next, with all that the program does between them.
      predicted_seconds: what the plan says.
      input_seconds: of these, waiting for `step.batches(..)`; 0 where batches come from elsewhere.
      checkpoint_seconds: of these, in `save`, `restore` and `wait_until_saved`.
      examples_per_second: of the whole job.
      tokens_per_second: of the whole job; None where nobody says how many a step has.
      mfu: model FLOPs utilisation, the FLOPs of the step's own matrix products over what all devices could do at their
        peak, by the cluster's description.
      predicted_bubble: the share of the stages' time that is idle, by the plan.
      bubble: the same of the last of these steps, as it ran; None where there is one stage, or that step was not
        recorded.
      peak_bytes: the most memory that a device of this process has had in use; None: its backend does not say.
    """

    function: str
    step: int
    step_seconds: float
    predicted_seconds: float
    input_seconds: float
    checkpoint_seconds: float
    examples_per_second: float
    tokens_per_second: float | None
    mfu: float
    predicted_bubble: float
    bubble: float | None
    peak_bytes: int | None

    def numbers(self) -> dict[str, float]:
        """Those that are known, by name, without the step's."""
        fields = dataclasses.asdict(self)
        return {name: x for name, x in fields.items() if name not in ("function", "step") and x is not None}

    def __str__(self) -> str:
        rate = self.tokens_per_second or self.examples_per_second
        of = "examples" if self.tokens_per_second is None else "tokens"
        parts = [
            f"{self.function} {self.step}: {1e3 * self.step_seconds:.4g} ms a step "
            f"(predicted {1e3 * self.predicted_seconds:.4g})",
            f"{rate:,.0f} {of}/s", f"MFU {self.mfu:.1%}",
        ]  # fmt: skip
        if self.bubble is not None:
            parts.append(f"bubble {self.bubble:.1%} (predicted {self.predicted_bubble:.1%})")
        if self.peak_bytes is not None:
            parts.append(f"{self.peak_bytes / 2**30:.2f} GiB")
        for what, seconds in (("input", self.input_seconds), ("checkpoints", self.checkpoint_seconds)):
            if seconds > 0.01 * self.step_seconds:
                parts.append(f"{what} {seconds / self.step_seconds:.0%}")
        return ", ".join(parts)


Sink = Callable[[StepMetrics], None]


class Metered(CountedStep):
    """A step whose calls are counted and timed: see `meter`."""

    def __init__(
        self, step: Parallelized | WrappedStep, sinks: Sequence[Sink], every: int, tokens: int | None, start: int
    ) -> None:
        super().__init__(step, start)
        self._sinks, self._every, self._tokens = sinks, every, tokens
        self._since, self._ideal_seconds = Since.now(start), 0.0
        self._recording: Recording | None = None  # of the executable
        self._is_warm = False  # what records has compiled what it needs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recording = self._recording
        if recording is None or (self._is_warm and not self._is_due(self._number + 1)):
            return super().__call__(*args, **kwargs)
        wait_for((args, kwargs))
        with recording:
            recording.begin()
            return super().__call__(*args, **kwargs)

    def _is_due(self, number: int) -> bool:
        return number - self._since.number >= self._every

    def _begin(self, executable: Executable | None) -> None:
        self._recording, self._is_warm = None, False
        if executable is not None:
            _, self._ideal_seconds = model_flops(executable.graph, executable.plan.cluster)
            self._recording = Recording(executable) if len(executable.plan.stages) > 1 else None
        self._since = Since.now(self._number)

    def _count(self, executable: Executable, result: Any) -> None:
        was_warm, self._is_warm = self._is_warm, True
        if not self._is_due(self._number):
            return
        wait_for(result)
        bubble = None if self._recording is None or not was_warm else self._recording.bubble()
        job = this_job()
        if job is None or job.index == 0:
            metrics = self._measured(executable, Since.now(self._number), bubble)
            for sink in self._sinks:
                sink(metrics)
        self._since = Since.now(self._number)

    def _measured(self, executable: Executable, now: Since, bubble: float | None) -> StepMetrics:
        since, ideal = self._since, self._ideal_seconds
        plan, steps = executable.plan, now.number - since.number
        seconds = (now.time - since.time) / steps
        tokens = self._tokens or tokens_per_step(plan)
        spent = since.spent_per_step(now)
        return StepMetrics(
            plan.function, now.number, seconds, plan.step_time, spent["input"], spent["checkpoints"],
            plan.batch_size / seconds, None if tokens is None else tokens / seconds, ideal / seconds, plan.bubble,
            bubble, _peak_bytes(),
        )  # fmt: skip


def _peak_bytes() -> int | None:
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((x for x in found if x is not None), default=None)


def meter(
    step: Parallelized | WrappedStep, to: Sink | Sequence[Sink] | None = None, *, every: int = 10,
    tokens: int | None = None, start: int = 0,
) -> Metered:  # fmt: skip
    """A step that tells, every so many calls, how long a step takes, what it achieves, and what else takes time.

    The first call for arguments of certain shapes, which plans and compiles, is left out. A report waits for the step
    to end, so `every` should not be 1 where steps are short; of a pipeline its last step also waits for the one before,
    and it is recorded when its programs run. In a job of several processes, process 0 reports.

    Args:
      to: what is called with `StepMetrics`: one or several of `autopar.metrics.terminal()`, `.csv(path)`,
        `.tensorboard(folder)`, `.opentelemetry()`, or functions of your own. Default: the terminal.
      tokens: how many a step of the whole job has; default: examples times length, where the examples have whole
        numbers of shape (examples, length).
      start: the steps that were made before, as of a checkpoint.

    Raises:
      PlanError: `step` is a plain function.
      ArgumentError: `every` or `tokens` is no number above 0.
    """
    check_step("meter", step)
    for name, number in (("every", every), ("tokens", 1 if tokens is None else tokens)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ArgumentError(f"meter({name}={number!r}): pass a whole number of 1 or more.")
    sinks = [terminal()] if to is None else [to] if callable(to) else [*to]
    return Metered(step, sinks, every, tokens, start)


def terminal() -> Sink:
    """A line on stderr, which changes in place where that is a terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    if not sys.stderr.isatty():
        return lambda metrics: print(f"autopar: {metrics}", file=sys.stderr, flush=True)  # noqa: T201
    # What the program prints comes above the line, unless it goes elsewhere.
    live = Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=sys.stdout.isatty())

    def show(metrics: StepMetrics) -> None:
        if not live.is_started:
            live.start()
            atexit.register(live.stop)
        live.update(Text(str(metrics)), refresh=True)

    return show


def csv(path: Any) -> Sink:
    """Lines of a CSV file, which a run that goes on adds to."""
    file = pathlib.Path(path)
    names = [field.name for field in dataclasses.fields(StepMetrics)]

    def write(metrics: StepMetrics) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+", newline="") as lines:
            lines.seek(0)
            there = next(csv_files.reader(lines), None)  # which an earlier version may have begun, with other columns
            writer = csv_files.DictWriter(lines, there or names, extrasaction="ignore")
            if there is None:
                writer.writeheader()
            writer.writerow(dataclasses.asdict(metrics))

    return write


def tensorboard(folder: Any) -> Sink:
    """Scalars for TensorBoard, as `autopar/step_seconds`; needs autopar[metrics]."""
    from tensorboardX import SummaryWriter

    @functools.cache
    def writer() -> Any:  # of the process that reports alone
        made = SummaryWriter(str(folder))
        atexit.register(made.close)
        return made

    def write(metrics: StepMetrics) -> None:
        for name, number in metrics.numbers().items():
            writer().add_scalar(f"autopar/{name}", number, metrics.step)
        writer().flush()

    return write


_UNITS = {"seconds": "s", "second": "1/s", "bytes": "By"}


def opentelemetry() -> Sink:
    """Gauges of OpenTelemetry's meter "autopar", as `autopar.step_seconds`; needs autopar[metrics].

    They go where the program, or the variables `OTEL_…` of `opentelemetry-instrument`, send OpenTelemetry's metrics.
    """
    from opentelemetry import metrics as telemetry

    of = telemetry.get_meter("autopar")
    names = [field.name for field in dataclasses.fields(StepMetrics) if field.name not in ("function", "step")]
    gauges = {name: of.create_gauge(f"autopar.{name}", _UNITS.get(name.rpartition("_")[2], "1")) for name in names}
    steps = of.create_gauge("autopar.step", "1")

    def record(metrics: StepMetrics) -> None:
        labels = {"autopar.function": metrics.function}
        steps.set(metrics.step, labels)
        for name, number in metrics.numbers().items():
            gauges[name].set(number, labels)

    return record
