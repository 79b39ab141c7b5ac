"""What a step's instructions took when it ran, beside what was predicted for them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from autopar.errors import ReportError
from autopar.ir.cluster_json import cluster_data
from autopar.ir.json_file import write_path
from autopar.ir.local import OperatorKind
from autopar.ir.plan_record import PlanRecord
from autopar.ir.plan_text import render
from autopar.ir.rendering import as_html
from autopar.ir.units import count_text, metric_text, ranges_text, seconds_text
from autopar.reporting.perfetto import name_of, slice_of
from autopar.reporting.profile_page import profile_page
from autopar.reporting.record import Copying, ReportRecord, TimelineSpan

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step: what the groups of devices run, and what stages send to one another."""

    seconds: float
    num_groups: int  # of devices; those that take turns, as virtual ones of a host do, are one
    programs: tuple[TimelineSpan, ...]
    copies: tuple[Copying, ...]

    def busy(self, group: int) -> float:
        """Seconds in which the devices of a group run programs."""
        return sum(span.end - span.start for span in self.programs if span.group == group)

    @property
    def bubble(self) -> float:
        """The share of the groups' time in which they run no program."""
        return 1.0 - sum(span.end - span.start for span in self.programs) / (self.num_groups * self.seconds)

    @property
    def unaccounted(self) -> float:
        """The share of the step in which nothing is under way, neither a program nor a copy."""
        spans = [(x.start, x.end) for x in self.programs] + [(x.start, x.end) for x in self.copies]
        return 1.0 - _covered(spans) / self.seconds


@dataclasses.dataclass(frozen=True)
class Row:
    """What a stage's programs of a phase take in a step, or what two stages take to copy from one to the other.

    Of copies it is the time in which any is under way.
    """

    what: str
    stage: int
    to: int | None  # the stage that receives; None: it is of programs
    count: int  # of programs that ran, or of messages
    measured: float
    predicted: float | None  # None: it was not predicted as such

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else None


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """What operators of one kind take of a device in a step, in the mean over devices and steps.

    Attributes:
      kind: "products" of matrices, "convolutions", fused "attention", what waits for "memory", or "collectives", which
        wait for one another, too.
      kernels: how many there are.
      measured, predicted: seconds.
      flops, nbytes: what they compute and go through, by the plan.
    """

    kind: OperatorKind
    kernels: float
    measured: float
    predicted: float
    flops: float
    nbytes: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else None

    @property
    def speed(self) -> str:
        """What it reaches: FLOP/s, or bytes per second where it computes nothing; "" where neither is known."""
        amount, unit = (self.flops, "FLOP/s") if self.flops else (self.nbytes, "B/s")
        return metric_text(amount / self.measured, unit) if amount and self.measured else ""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Steps as they ran, beside the plan's prediction: `print` it, or `save` one page of it.

    Attributes:
      plan: what ran.
      seconds: of each step, by the clock on the wall.
      measured: means over the steps, in seconds since a step began.
      predicted: the same by the plan.
      payloads: bytes that go from stage to stage in a step, by sender and receiver.
      kernels: by kind of operator, what takes longest first; empty unless asked for.
      result: what the last step returned, to go on with.
    """

    plan: PlanRecord
    seconds: tuple[float, ...]
    measured: Timeline
    predicted: Timeline
    payloads: Mapping[tuple[int, int], int]
    kernels: tuple[KernelRow, ...] = ()
    result: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Programs, those of the first stage first, then copies."""
        groups = ReportRecord(self.plan, None).groups
        of_stage = {stage: k for k, group in enumerate(groups) for stage in group.stages}
        found, expected = (_by_kind(timeline) for timeline in (self.measured, self.predicted))
        rows = []
        for key in sorted(found, key=lambda key: (key[1] is not None, of_stage[key[0]], key[0], key[1] or 0, key[2])):
            stage, to, what = key
            predicted = _seconds(expected[key], to) if key in expected else None
            rows.append(Row(what, stage, to, len(found[key]), _seconds(found[key], to), predicted))
        return tuple(rows)

    def bandwidth(self, row: Row) -> str:
        """Of copies from one stage to another; "" where nothing is sent."""
        sent = 0 if row.to is None else self.payloads.get((row.stage, row.to), 0)
        return metric_text(sent / row.measured, "B/s") if sent and row.measured else ""

    def to_json(self) -> str:
        """All of it but what the last step returned."""
        content = {
            "format": "autopar-profile", "version": 1, "function": self.plan.function, "method": self.plan.method,
            "cluster": self.plan.cluster.name, "described": cluster_data(self.plan.cluster),
            "seconds": self.seconds, "bubble": self.measured.bubble,
            "predicted_bubble": self.plan.bubble, "rows": [dataclasses.asdict(row) for row in self.rows],
            "kernels": [dataclasses.asdict(row) for row in self.kernels],
            **{
                name: {"seconds": line.seconds, **{part: [dataclasses.asdict(x) for x in getattr(line, part)]
                                                   for part in ("programs", "copies")}}
                for name, line in (("measured", self.measured), ("predicted", self.predicted))
            },
        }  # fmt: skip
        return json.dumps(content, indent=1)

    def to_trace(self) -> str:
        """Both timelines as JSON that Perfetto and Chrome's about:tracing read."""
        groups = ReportRecord(self.plan, None).groups
        events: list[dict[str, Any]] = []
        for at, (name, line) in enumerate((("measured", self.measured), ("predicted", self.predicted))):
            for k, group in enumerate(groups):
                title = f"{name}: stage {ranges_text(group.stages)} on devices {ranges_text(group.devices)}"
                events.append(name_of("process_name", len(groups) * at + k, 0, title))
                events.append(name_of("thread_name", len(groups) * at + k, 0, "programs"))
            of_stage = {stage: len(groups) * at + k for k, group in enumerate(groups) for stage in group.stages}
            links = {pair: 1 + k for k, pair in enumerate(sorted({(c.source, c.target) for c in line.copies}))}
            for (source, target), thread in links.items():
                events.append(name_of("thread_name", of_stage[source], thread, f"stage {source} sends to {target}"))
            events += [
                slice_of(x.phase, "program", of_stage[x.stage], 0, x.start, x.end, x.microbatch, stage=x.stage)
                for x in line.programs
            ]
            for copy in line.copies:
                title = f"{copy.source} → {copy.target}"
                process, thread = of_stage[copy.source], links[copy.source, copy.target]
                events.append(slice_of(title, "transfer", process, thread, copy.start, copy.end, copy.microbatch))
        about = {"function": self.plan.function, "method": self.plan.method, "cluster": self.plan.cluster.name}
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, separators=(",", ":"))

    def to_html(self) -> str:
        """One page that needs no network: both timelines, one above the other, and what took how long.

        Raises:
          ReportError: what draws it is not installed.
        """
        return profile_page(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, whole or not at all.

        Raises:
          ReportError: the file cannot be written, or as for `to_html`.
        """
        write_path(path, self.to_html(), "profile", ReportError)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write both timelines to a file, whole or not at all.

        Raises:
          ReportError: the file cannot be written.
        """
        write_path(path, self.to_trace(), "trace", ReportError)

    def to_text(self) -> str:
        """What `print(profile)` shows."""
        return render(self._parts())

    def __str__(self) -> str:
        return self.to_text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._parts()

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> list[RenderableType]:
        seconds, plan = self.seconds, self.plan
        mean = statistics.fmean(seconds)
        lines = [
            f"Profile of {plan.function} by method {plan.method} on {plan.cluster.name} "
            f"({count_text(plan.cluster.num_devices, 'device')}): {count_text(len(seconds), 'step')}",
            f"measured   {seconds_text(mean)} per step, {seconds_text(min(seconds))} to {seconds_text(max(seconds))}, "
            f"idle {self.measured.bubble:.1%}",
            f"predicted  {seconds_text(plan.step_time)} per step: {plan.step_time / mean:.2f} times the measured, idle "
            f"{plan.bubble:.1%}",
        ]
        tables = [self._programs(), Text(), *self._copies(), *self._kernels(), self._devices()]
        return [Text("\n".join(lines)), Text(), *tables]

    def _programs(self) -> Table:
        table = _table("Programs", "stage", "phase", "programs", "measured", "predicted", "ratio")
        for row in self.rows:
            if row.to is None:
                table.add_row(str(row.stage), row.what, str(row.count), *_compared(row))
        return table

    def _kernels(self) -> list[RenderableType]:
        if not self.kernels:
            return []
        table = _table("Kernels of a device", "kind", "kernels", "measured", "predicted", "ratio", "speed")
        for row in self.kernels:
            table.add_row(row.kind, f"{row.kernels:,.0f}", *_compared(row), row.speed)
        return [table, Text()]

    def _copies(self) -> list[RenderableType]:
        rows = [row for row in self.rows if row.to is not None]
        if not rows:
            return []
        table = _table("Transfers", "from", "to", "messages", "measured", "predicted", "ratio", "bandwidth")
        for row in rows:
            assert row.to is not None, "those of programs are left out"
            table.add_row(str(row.stage), str(row.to), str(row.count), *_compared(row), self.bandwidth(row))
        return [table, Text()]

    def _devices(self) -> Table:
        table = _table("Devices", "stages", "devices", "programs", "idle", "predicted idle")
        for k, group in enumerate(ReportRecord(self.plan, None).groups):
            idle, expected = (1 - line.busy(k) / line.seconds for line in (self.measured, self.predicted))
            busy = seconds_text(self.measured.busy(k))
            table.add_row(ranges_text(group.stages), ranges_text(group.devices), busy, f"{idle:.1%}", f"{expected:.1%}")
        return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k < 2 else "right")
    return table


def _compared(row: Row | KernelRow) -> tuple[str, str, str]:
    if row.predicted is None or row.ratio is None:
        return seconds_text(row.measured), "", ""
    return seconds_text(row.measured), seconds_text(row.predicted), f"{row.ratio:.2f}"


Spans = list[tuple[float, float]]


def _by_kind(timeline: Timeline) -> dict[tuple[int, int | None, str], Spans]:
    """When programs of a stage and phase ran, and copies between two stages were under way."""
    found: dict[tuple[int, int | None, str], Spans] = defaultdict(list)
    for span in timeline.programs:
        found[span.stage, None, span.phase].append((span.start, span.end))
    for copy in timeline.copies:
        found[copy.source, copy.target, "copy"].append((copy.start, copy.end))
    return found


def _seconds(spans: Spans, to: int | None) -> float:
    """Of programs the sum; of copies, which may go side by side, of what they cover."""
    return sum(end - start for start, end in spans) if to is None else _covered(spans)


def _covered(spans: Spans) -> float:
    """Seconds in which any of them is."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def mean_of(steps: Sequence[Timeline]) -> Timeline:
    """Of steps that have run the same in the same order, span by span; those that begin first come first."""

    def means(parts: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        means = [
            dataclasses.replace(
                same[0], start=statistics.fmean(x.start for x in same), end=statistics.fmean(x.end for x in same)
            )
            for same in zip(*parts, strict=True)
        ]
        return tuple(sorted(means, key=lambda mean: mean.start))

    return Timeline(
        statistics.fmean(step.seconds for step in steps), steps[0].num_groups, means([step.programs for step in steps]),
        means([step.copies for step in steps]),
    )  # fmt: skip
