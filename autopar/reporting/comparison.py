"""Plans of one step by several methods, side by side."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from autopar.errors import UserError
from autopar.ir.plan_text import render
from autopar.ir.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from autopar.ir.mesh import Cluster
    from autopar.ir.plan_record import PlanRecord

    Trial = tuple[str, Cluster, Callable[[], PlanRecord]]  # its name, and what makes its plan


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What became of one method: a plan, or the reason why there is none."""

    name: str
    cluster: Cluster
    plan: PlanRecord | None
    error: str = ""

    def __str__(self) -> str:
        """One line."""
        if self.plan is None:
            return f"{self.name}: no plan: {self.reason}"
        number = count_text(self.plan.num_microbatches, "microbatch", "es")
        return (
            f"{self.name}: {seconds_text(self.plan.step_time)}, {bytes_text(self.plan.peak_memory)} per device, "
            f"{count_text(len(self.plan.stages), 'stage')}, {number}"
        )

    @property
    def reason(self) -> str:
        """The error in few words: what stands behind its first colon, up to the end of the sentence."""
        _, _, rest = self.error.partition(": ")
        return (rest or self.error).partition(". ")[0].rstrip(".")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The quickest first, what does not fit last."""

    function: str
    candidates: tuple[Candidate, ...]

    @staticmethod
    def of(function: str, candidates: Sequence[Candidate]) -> Comparison:
        """In the order of their step times."""
        return Comparison(function, tuple(sorted(candidates, key=_seconds)))

    @staticmethod
    def tried(
        function: str, trials: Sequence[Trial], progress: Callable[[int, int], None], say: Callable[[str], None]
    ) -> Comparison:
        """One plan after the other; `progress` is told how many were tried, of how many.

        `say` gets a line of each as soon as it is there.
        """
        candidates = []
        for number, (name, cluster, planned) in enumerate(trials):
            progress(number, len(trials))
            try:
                candidates.append(Candidate(name, cluster, planned()))
            except UserError as error:
                candidates.append(Candidate(name, cluster, None, str(error)))
            say(str(candidates[-1]))
        return Comparison.of(function, candidates)

    @property
    def best(self) -> PlanRecord | None:
        """The quickest plan, if there is any."""
        return self.candidates[0].plan if self.candidates else None

    def to_json(self) -> str:
        """All of it but the plans themselves, as JSON."""
        rows = []
        for each in self.candidates:
            row: dict[str, Any] = {
                "method": each.name,
                "cluster": each.cluster.name,
                "num_devices": each.cluster.num_devices,
                "fits": each.plan is not None,
            }
            if each.plan is None:
                row["error"] = each.error
            else:
                row |= {
                    "step_time": each.plan.step_time, "ratio": self._ratio(each.plan),
                    "peak_memory": each.plan.peak_memory, "num_microbatches": each.plan.num_microbatches,
                    "num_stages": len(each.plan.stages), "schedule": each.plan.schedule,
                }  # fmt: skip
            rows.append(row)
        content = {"format": "autopar-comparison", "version": 1, "function": self.function, "methods": rows}
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        return render(self._parts())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._parts()

    def _ratio(self, plan: PlanRecord) -> float:
        return plan.step_time / self.best.step_time if self.best is not None and self.best.step_time else 1.0

    def _parts(self) -> Sequence[RenderableType]:
        clusters = dict.fromkeys(_cluster_text(each.cluster) for each in self.candidates)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("method", overflow="fold")
        for header in ("step time", "ratio", "peak memory", "microbatches", "stages"):
            table.add_column(header, justify="right")
        table.add_column("schedule" if len(clusters) == 1 else "schedule, cluster")
        for each in self.candidates:
            if (plan := each.plan) is not None:
                table.add_row(
                    Text(each.name), seconds_text(plan.step_time), f"{self._ratio(plan):.3f}",
                    bytes_text(plan.peak_memory), str(plan.num_microbatches), str(len(plan.stages)),
                    plan.schedule if len(clusters) == 1 else f"{plan.schedule}, {_cluster_text(each.cluster)}",
                )  # fmt: skip
        head = Text(f"{self.function} on {', '.join(clusters)}, predicted")
        refused = [Text(f"{each.name}: {each.reason}") for each in self.candidates if each.plan is None]
        parts: list[RenderableType] = [head, Text(), table] if self.best is not None else [head]
        return [*parts, Text(), Text("No plan by"), *refused] if refused else parts


def _seconds(candidate: Candidate) -> float:
    return math.inf if candidate.plan is None else candidate.plan.step_time


def _cluster_text(cluster: Cluster) -> str:
    return f"{cluster.name} ({count_text(cluster.num_devices, 'device')})"
