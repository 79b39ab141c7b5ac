"""What a report holds: everything that is known and predicted about a plan, gathered once.

What a plan file holds is enough for a part of it; the rest (`Details`) needs the traced step.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import TYPE_CHECKING

from autopar.ir.mesh import LATENCY_HIDING_FLAG
from autopar.ir.plan_record import LeafPlan, PlanRecord
from autopar.ir.verification import Verification
from autopar.ir.why import Why
from autopar.reporting.diff import PlanDiff

if TYPE_CHECKING:
    from autopar.reporting.comparison import Comparison


@dataclasses.dataclass(frozen=True)
class TimeSplit:
    """What a group of devices does with the seconds of a step: the parts add up to the step time."""

    stages: tuple[int, ...]  # that are on these devices
    devices: tuple[int, ...]
    compute: float  # in kernels
    collectives: float  # sums over devices, and what operators exchange by themselves, beside no kernels
    resharding: float  # gathering and moving values from one sharding to another, within the stage, beside no kernels
    launches: float  # starting programs
    # Idle while a transfer from another stage is under way, or while it is the turn of other virtual devices.
    waiting: float
    bubble: float  # idle otherwise: filling and draining the pipeline, or a slower stage elsewhere
    hidden: float  # besides: seconds of communication that kernels run beside, so that the step is shorter by them

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the name of the part."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = ("compute", "collectives", "resharding", "launches", "waiting", "bubble")


@dataclasses.dataclass(frozen=True)
class TimelineSpan:
    """A part of a program in simulated time. What a program does for several phases is drawn one after the other."""

    group: int  # of devices, in the order of `ReportRecord.groups`
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
    splits: tuple[TimeSplit, ...]  # by group of devices
    spans: tuple[TimelineSpan, ...]
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
class ReportRecord:
    """The fields of a `Report`, and what follows from them, for those that print and draw it."""

    plan: PlanRecord
    details: Details | None = None  # None: the plan was read from a file and knows no step
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
        tokens = tokens_per_step(self.plan)
        if tokens is None:
            return None
        return tokens / self.plan.step_time if self.plan.step_time else math.inf

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
        groups = []
        for devices, mine in stages.items():
            memories = [self.plan.stages[k].memory for k in mine]
            kept = sum(memory.kept for memory in memories)
            groups.append(
                Group(
                    tuple(mine), devices, kept, max(memory.temporaries for memory in memories),
                    memories[0].capacity + kept - memories[0].kept,
                    max(kind.memory_reserve for kind in self.plan.cluster.kinds_of(devices)),
                )
            )  # fmt: skip
        return tuple(groups)

    @property
    def fullest(self) -> Group:
        """The group whose devices have least memory left."""
        return max(self.groups, key=lambda group: group.total - group.capacity)

    @property
    def split(self) -> TimeSplit | None:
        """The mean over the groups of devices, each of which counts the same."""
        if self.details is None:
            return None
        splits = self.details.splits
        mean = {name: math.fsum(split.parts[name] for split in splits) / len(splits) for name in PARTS}
        hidden = math.fsum(split.hidden for split in splits) / len(splits)
        return TimeSplit(tuple(range(len(self.plan.stages))), (), **mean, hidden=hidden)

    @property
    def xla_flags(self) -> tuple[str, ...]:
        """XLA's flags that the step time counts on; programs are compiled so, unless XLA_FLAGS names them."""
        is_any_hidden = self.details is not None and any(split.hidden for split in self.details.splits)
        return (LATENCY_HIDING_FLAG,) if is_any_hidden else ()


def tokens_per_step(plan: PlanRecord) -> int | None:
    """Where whole numbers of shape (examples, length) are among a step's examples, all of one length."""
    lengths = {
        leaf.shape[1 - leaf.batch_axis]
        for leaf in plan.leaves
        if leaf.batch_axis is not None and len(leaf.shape) == 2 and leaf.batch_axis < 2 and _is_whole(leaf)
    }
    return plan.batch_size * lengths.pop() if len(lengths) == 1 else None


def _is_whole(leaf: LeafPlan) -> bool:
    return leaf.dtype.startswith(("int", "uint"))
