"""The report of a plan: everything that is known and predicted about it, gathered once, as text, JSON and a page.

What a plan file holds is enough for a part of it; the rest (`Details`) needs the traced step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from autopar.errors import ReportError
from autopar.ir.json_file import write_path
from autopar.ir.plan_diff import PlanDiff
from autopar.ir.plan_record import LeafPlan, PlanRecord
from autopar.ir.plan_text import render
from autopar.ir.report_text import report_parts
from autopar.ir.verification import Verification
from autopar.ir.why import Alternative, Why

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from autopar.ir.comparison import Comparison


@dataclasses.dataclass(frozen=True)
class Split:
    """What a group of devices does with the seconds of a step: the parts add up to the step time."""

    stages: tuple[int, ...]  # that are on these devices
    devices: tuple[int, ...]
    compute: float  # in kernels
    collectives: float  # sums over devices, and what operators exchange by themselves
    resharding: float  # gathering and moving values from one sharding to another, within the stage
    launches: float  # starting programs
    waiting: float  # idle while a transfer from another stage is under way
    bubble: float  # idle otherwise: filling and draining the pipeline, or a slower stage elsewhere

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the name of the part."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = ("compute", "collectives", "resharding", "launches", "waiting", "bubble")


@dataclasses.dataclass(frozen=True)
class Span:
    """A part of a program in simulated time. What a program does for several phases is drawn one after the other."""

    group: int  # of devices, in the order of `Report.groups`
    stage: int
    phase: str
    microbatch: int  # -1 for what runs once in a step
    start: float  # seconds since the step began
    end: float


@dataclasses.dataclass(frozen=True)
class Copying:
    """A transfer between two stages in simulated time."""

    source: int  # stage
    target: int
    phase: str
    microbatch: int  # -1 for what is sent once in a step
    start: float  # seconds since the step began
    end: float


@dataclasses.dataclass(frozen=True)
class MemoryCurve:
    """What is held on each device of a group while a step runs; state and gradients stay the same."""

    stages: tuple[int, ...]
    state: dict[str, int]  # bytes: of parameters, of the optimizer's and other state
    gradients: int  # bytes: running sums over microbatches
    seconds: tuple[float, ...]  # of each change, since the step began
    activations: tuple[int, ...]  # bytes from then on
    temporaries: tuple[int, ...]  # bytes from then on
    capacity: int  # bytes, without the reserve

    @property
    def peak(self) -> int:
        """Most bytes at any moment."""
        held = zip(self.activations, self.temporaries, strict=True)
        return sum(self.state.values()) + self.gradients + max(map(sum, held), default=0)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Consecutive operators of the forward pass, for as many equal layers in a row as `count` says."""

    name: str  # the functions of the user's code that do most of its work
    stage: int
    count: int
    operators: int  # of one of the layers
    parameters: int  # bytes of one layer's, whole
    flops: float  # of one layer's forward pass per step, in matrix products, whole
    handed_on: int  # bytes of what one of them gives to others in a step, whole
    reads: tuple[tuple[int, int, bool], ...]  # of which earlier layer, how many bytes; whether that is shared state


@dataclasses.dataclass(frozen=True)
class Operator:
    """Equal operators of a plan: of one line of code, split alike on meshes of one shape."""

    name: str  # of the primitive, or of the collective that brings a value from one sharding to another
    source: str  # the user's line
    phase: str
    stages: tuple[int, ...]
    layers: tuple[int, ...]  # of `Details.layers`
    mesh: str  # "x=2 y=4"
    count: int  # of equal ones, in all stages
    runs: int  # of each per step
    operands: tuple[str, ...]  # "bfloat16[8,1024] [x,-]"
    results: tuple[str, ...]
    compute: float  # seconds per step, of all on the devices of one stage
    communication: float  # .. and in collectives
    collectives: tuple[str, ...]  # what they send: "2 x all_reduce over y, 64.0 MiB"
    whys: tuple[Why, ...] = ()  # why it is so, if that was asked for

    @property
    def seconds(self) -> float:
        """Per step, on the devices of one stage."""
        return self.compute + self.communication


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """Collectives of one kind, or transfers, over the same link."""

    kind: str
    link: str
    over: str  # the mesh axes, or the stages from and to
    stage: int  # that sends
    phase: str
    count: int  # per step
    nbytes: int  # per step and device: payload as `Collective` has it, or of a transfer the pieces that are received
    seconds: float  # per step


@dataclasses.dataclass(frozen=True)
class Details:
    """What only the traced step tells."""

    model_flops: float  # of a step's matrix products, whole cluster, what is computed again left out
    ideal_seconds: float  # that these would take with all devices of the cluster at their peak
    splits: tuple[Split, ...]  # by group of devices
    spans: tuple[Span, ...]
    copies: tuple[Copying, ...]
    memory: tuple[MemoryCurve, ...]  # by group of devices
    layers: tuple[Layer, ...]
    operators: tuple[Operator, ...]  # those that take longest, the longest first
    other_operators: int  # equal ones counted once
    other_seconds: float  # per step, of those, on the devices of one stage each
    links: tuple[LinkUse, ...]  # the longest first
    parameters: tuple[bool, ...]  # by leaf of the plan: state that the forward pass reads
    planning_seconds: float | None  # of the search; None: the plan was given


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that work together; interleaved, they have several stages."""

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    kept: int  # bytes on each device throughout
    temporaries: int  # bytes, of the hungriest program
    capacity: int  # bytes that one device offers
    reserve: int  # bytes that are kept free besides

    @property
    def total(self) -> int:
        """Predicted bytes at the peak."""
        return self.kept + self.temporaries


@dataclasses.dataclass(frozen=True)
class Report:
    """A plan with all that is known and predicted about it."""

    plan: PlanRecord
    details: Details | None  # None: the plan was read from a file and knows no step
    comparison: Comparison | None = None
    verification: Verification | None = None
    diff: PlanDiff | None = None

    # The answer

    @property
    def examples_per_second(self) -> float:
        return self.plan.batch_size / self.plan.step_time if self.plan.step_time else math.inf

    @property
    def tokens_per_second(self) -> float | None:
        """Where whole numbers of shape (examples, length) are among the examples, all of one length."""
        found = [
            leaf.shape[1 - leaf.batch_axis]
            for leaf in self.plan.leaves
            if leaf.batch_axis is not None and len(leaf.shape) == 2 and leaf.batch_axis < 2 and _is_whole(leaf)
        ]
        return self.examples_per_second * found[0] if len(set(found)) == 1 else None

    @property
    def utilisation(self) -> float | None:
        """Model FLOPs utilisation: the share of the cluster's peak that the model's own matrix products take."""
        if self.details is None or not self.plan.step_time:
            return None
        return self.details.ideal_seconds / self.plan.step_time

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of devices, in the order of their first stages."""
        stages: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, stage in enumerate(self.plan.stages):
            stages[stage.mesh.devices].append(index)
        found = []
        for devices, mine in stages.items():
            memories = [self.plan.stages[k].memory for k in mine]
            kept = sum(memory.kept for memory in memories)
            found.append(
                Group(
                    tuple(mine), devices, kept, max(memory.temporaries for memory in memories),
                    memories[0].capacity + kept - memories[0].kept,
                    max(kind.memory_reserve for kind in self.plan.cluster.kinds_of(devices)),
                )
            )  # fmt: skip
        return tuple(found)

    @property
    def fullest(self) -> Group:
        """The group whose devices have least memory left."""
        return max(self.groups, key=lambda group: group.total - group.capacity)

    @property
    def split(self) -> Split | None:
        """The mean over the groups of devices, each of which counts the same."""
        if self.details is None:
            return None
        splits = self.details.splits
        mean = {name: math.fsum(split.parts[name] for split in splits) / len(splits) for name in PARTS}
        return Split(tuple(range(len(self.plan.stages))), (), **mean)

    # Forms

    def to_json(self) -> str:
        """All of it but the search's choices, which are in the plan file, as JSON."""
        return json.dumps(_finite(self._content()), indent=1)

    def to_text(self, max_rows: int | None = 40) -> str:
        """What `print(report)` shows, with at most `max_rows` rows a table (None: all)."""
        return render(report_parts(self, max_rows))

    def to_html(self) -> str:
        """One page that needs no network.

        Raises:
          ReportError: what draws it is not installed.
        """
        from autopar.ir.report_page import page

        return page(self)

    def to_trace(self) -> str:
        """The timeline as JSON that Perfetto and Chrome's about:tracing read.

        Raises:
          ReportError: the plan was read from a file, so that there is no timeline.
        """
        from autopar.ir.report_trace import trace_json

        return trace_json(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, whole or not at all.

        Raises:
          ReportError: the file cannot be written, or as for `to_html`.
        """
        write_path(path, self.to_html(), "report", ReportError)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to a file, whole or not at all.

        Raises:
          ReportError: the file cannot be written, or as for `to_trace`.
        """
        write_path(path, self.to_trace(), "trace", ReportError)

    def __str__(self) -> str:
        return self.to_text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from report_parts(self, 40)

    def _content(self) -> dict[str, Any]:
        plan, details = self.plan, self.details
        split = self.split
        return {
            "format": "autopar-report",
            "version": 1,
            "function": plan.function,
            "fingerprint": plan.fingerprint,
            "method": plan.method,
            "cluster": {"name": plan.cluster.name, "num_devices": plan.cluster.num_devices},
            "schedule": plan.schedule,
            "num_microbatches": plan.num_microbatches,
            "batch_size": plan.batch_size,
            "step_time": plan.step_time,
            "examples_per_second": self.examples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "utilisation": self.utilisation,
            "flops": plan.flops,
            "peak_memory": plan.peak_memory,
            "split": None if split is None else split.parts,
            "search": {
                "seconds": None if details is None else details.planning_seconds,
                "gap": plan.gap,
                "lower_bound": plan.lower_bound,
            },
            "notes": plan.notes,
            "groups": [dataclasses.asdict(group) for group in self.groups],
            "stages": [
                {
                    "devices": stage.mesh.devices, "mesh": dict(zip(stage.mesh.axes, stage.mesh.shape, strict=True)),
                    "layers": stage.layers, "forward": stage.forward, "backward": stage.backward,
                    "weights": stage.weights, "once": stage.once, "memory": dataclasses.asdict(stage.memory),
                    "recomputed_blocks": len(stage.recomputed),
                }
                for stage in plan.stages
            ],
            "leaves": [
                {
                    "path": leaf.path, "shape": leaf.shape, "dtype": leaf.dtype, "stage": leaf.stage,
                    "sharding": str(leaf.sharding), "state": leaf.state, "batch_axis": leaf.batch_axis,
                    "window": leaf.window,
                }
                for leaf in plan.leaves
            ],
            "details": None if details is None else _details(details),
            "comparison": None if self.comparison is None else json.loads(self.comparison.to_json()),
            "verification": None if self.verification is None else json.loads(self.verification.to_json()),
            "diff": None if self.diff is None else self.diff.content(),
        }  # fmt: skip


def _details(details: Details) -> dict[str, Any]:
    content = {
        field.name: getattr(details, field.name) for field in dataclasses.fields(details) if field.name != "operators"
    }
    rows = {
        name: [dataclasses.asdict(row) for row in content[name]]
        for name in ("splits", "spans", "copies", "memory", "layers", "links")
    }
    operators = [
        {**dataclasses.asdict(dataclasses.replace(each, whys=())), "whys": [_why(why) for why in each.whys]}
        for each in details.operators
    ]
    return {**content, **rows, "operators": operators}


def _why(why: Why) -> dict[str, Any]:
    return {"stage": why.stage, "chosen": _alternative(why.chosen), "others": [_alternative(o) for o in why.others]}


def _alternative(one: Alternative) -> dict[str, Any]:
    sides = {"operands": [str(s) for s in one.operands], "results": [str(s) for s in one.results]}
    numbers = ("seconds", "stage_seconds", "operators_seconds", "resharding_seconds", "changed", "needed", "limit")
    return {**sides, **{name: getattr(one, name) for name in numbers}, "fits": one.fits}


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_whole(leaf: LeafPlan) -> bool:
    return leaf.dtype.startswith(("int", "uint"))
