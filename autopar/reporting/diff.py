"""What differs between two plans: their predictions, their stages, and where their leaves lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autopar.ir.plan_record import LeafPlan, PlanRecord, StagePlan
from autopar.ir.units import bytes_text, metric_text, ranges_text, seconds_text


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that differs."""

    what: str
    mine: Any  # a number or a text; None: it is not there
    other: Any
    mine_text: str  # with its unit
    other_text: str
    ratio: float | None  # mine to the other's, where both are numbers above 0

    @staticmethod
    def of(what: str, mine: Any, other: Any, text: Callable[[Any], str] = str) -> Change:
        both = all(isinstance(x, int | float) and x > 0 for x in (mine, other))
        here, there = ("-" if x is None else text(x) for x in (mine, other))
        return Change(what, mine, other, here, there, mine / other if both else None)


@dataclasses.dataclass(frozen=True)
class PlanDiff:
    """What differs between a plan and another one."""

    other: str  # its method and cluster
    plan: tuple[Change, ...]  # predictions and choices of the whole
    stages: tuple[Change, ...]
    leaves: tuple[Change, ...]  # shardings and stages, by path
    same_leaves: int

    @staticmethod
    def of(mine: PlanRecord, other: PlanRecord) -> PlanDiff:
        """Of two plans, perhaps for other clusters or other steps."""
        differing = []
        for what, read, text in _WHOLE:
            if (a := read(mine)) != (b := read(other)):
                differing.append(Change.of(what, a, b, text))
        stages = []
        for index in range(max(len(mine.stages), len(other.stages))):
            sides = [plan.stages[index] if index < len(plan.stages) else None for plan in (mine, other)]
            for what, read_stage, text in _STAGE:
                a, b = (None if stage is None else read_stage(stage) for stage in sides)
                if a != b:
                    stages.append(Change.of(f"stage {index}: {what}", a, b, text))
        lie = [{_name(leaf): f"stage {leaf.stage} {leaf.sharding}" for leaf in plan.leaves} for plan in (mine, other)]
        names = list(dict.fromkeys([*lie[0], *lie[1]]))
        moved = [name for name in names if lie[0].get(name) != lie[1].get(name)]
        return PlanDiff(
            f"{other.method} on {other.cluster.name} ({other.cluster.num_devices} devices)", tuple(differing),
            tuple(stages), tuple(Change.of(name, lie[0].get(name), lie[1].get(name)) for name in moved),
            len(names) - len(moved),
        )  # fmt: skip

    def content(self) -> dict[str, Any]:
        """As JSON has it."""
        content: dict[str, Any] = {"other": self.other, "same_leaves": self.same_leaves}
        for name in ("plan", "stages", "leaves"):
            content[name] = [
                {"what": c.what, "mine": c.mine, "other": c.other, "ratio": c.ratio} for c in getattr(self, name)
            ]
        return content


def _name(leaf: LeafPlan) -> str:
    return leaf.path if leaf.window is None else f"{leaf.path} {leaf.window[1]}:{leaf.window[2]}"


def _mesh(stage: StagePlan) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(stage.mesh.axes, stage.mesh.shape, strict=True))


def _flops(number: float) -> str:
    return metric_text(number, "FLOP")


def _share(number: float) -> str:
    return f"{number:.1%}"


_WHOLE: tuple[tuple[str, Callable[[PlanRecord], Any], Callable[[Any], str]], ...] = (
    ("function", lambda p: p.function, str),
    ("method", lambda p: p.method, str),
    ("cluster", lambda p: f"{p.cluster.name} ({p.cluster.num_devices} devices)", str),
    ("step time", lambda p: p.step_time, seconds_text),
    ("peak memory", lambda p: p.peak_memory, bytes_text),
    ("idle share", lambda p: p.bubble, _share),
    ("computed", lambda p: p.flops, _flops),
    ("batch", lambda p: p.batch_size, str),
    ("microbatches", lambda p: p.num_microbatches, str),
    ("schedule", lambda p: p.schedule, str),
    ("stages", lambda p: len(p.stages), str),
    ("solver gap", lambda p: p.gap, lambda gap: f"{gap:.2%}"),
)
_STAGE: tuple[tuple[str, Callable[[StagePlan], Any], Callable[[Any], str]], ...] = (
    ("devices", lambda s: ranges_text(s.mesh.devices), str),
    ("mesh", _mesh, str),
    ("layers", lambda s: ranges_text(range(*s.layers)), str),
    ("seconds per microbatch", lambda s: s.per_microbatch, seconds_text),
    ("seconds once", lambda s: s.once, seconds_text),
    ("state", lambda s: s.memory.state, bytes_text),
    ("gradients", lambda s: s.memory.gradients, bytes_text),
    ("activations", lambda s: s.memory.activations, bytes_text),
    ("temporaries", lambda s: s.memory.temporaries, bytes_text),
    ("blocks computed again", lambda s: len(s.recomputed), str),
)
