"""The plan: a step's stages, meshes, shardings, schedule and microbatches, to be printed, saved and loaded."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Protocol

from autopar.errors import PlanError, ReportError
from autopar.ir.json_file import read_path, write_path
from autopar.ir.plan_diff import PlanDiff
from autopar.ir.plan_json import parse_plan, plan_to_json
from autopar.ir.plan_record import LeafPlan, PlanRecord, StageMemory, StagePlan
from autopar.ir.plan_text import plan_parts, render
from autopar.ir.rendering import as_html
from autopar.ir.report import Report

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from autopar.ir.verification import Verification

__all__ = ["LeafPlan", "Plan", "StageMemory", "StagePlan"]


class Origin(Protocol):
    """The traced step that a plan was made for."""

    def verify(self, plan: Plan, target: str | None, show_progress: bool, most_operations: int | None) -> Verification:
        """Hold the plan against XLA."""
        ...

    def report(
        self, plan: Plan, compare: bool, verification: Verification | None, against: Plan | None, explain: int,
        show_progress: bool,
    ) -> Report:  # fmt: skip
        """All that is known and predicted of the plan."""
        ...


@dataclasses.dataclass(frozen=True)
class Plan(PlanRecord):
    """A step's stages, meshes, shardings, schedule and microbatches, with predicted costs.

    `print(plan)` shows it as tables. Two plans are equal if all that they hold is.
    """

    # Of a plan that a parallelized step has given; a plan from a file has none.
    origin: Origin | None = dataclasses.field(default=None, compare=False, repr=False)

    def verify_with_xla(
        self, target: str | None = None, *, show_progress: bool = False, most_operations: int | None = 200_000
    ) -> Verification:
        """XLA's verdict: every program compiled ahead of time for the cluster, which need not be there.

        Args:
          target: a chip ("h100", ..), a file with XLA's description of one, or "cpu" for virtual CPU devices. Default:
            the chips of the plan's cluster.
          show_progress: a progress bar on the terminal.
          most_operations: of all programs together, lest this takes long.

        Raises:
          TargetError: the target is not known, its compiler is not installed, or there is too much to compile.
          PlanError: the plan was read from a file; `step.plan(.., method=plan)` gives one that knows its step.
          PlanMismatchError: the plan was edited inconsistently.
        """
        if self.origin is None:
            raise PlanError(
                f"the plan for {self.function!r} was read from a file and has no step to compile: verify "
                "step.plan(state, batch, method=plan), which is the same plan."
            )
        return self.origin.verify(self, target, show_progress, most_operations)

    def report(
        self, *, compare: bool = False, verification: Verification | None = None, against: Plan | None = None,
        explain: int = 12, show_progress: bool = False,
    ) -> Report:  # fmt: skip
        """All that is known and predicted of the plan: `print` it, or `save("report.html")` one page of it.

        Args:
          compare: plan by every usual recipe, too, which takes about as long as planning did for each.
          verification: XLA's verdict on this plan, to be shown beside what is only predicted.
          against: another plan, to say what differs.
          explain: of so many operators, those that take longest, say what other shardings would cost, and why.
          show_progress: a progress bar on the terminal.

        Of a plan that was read from a file there is only what the file holds; `step.plan(.., method=plan)` gives one
        that knows its step.

        Raises:
          ReportError: `explain` is no whole number of 0 or more, or a plan from a file shall be compared.
          PlanMismatchError: the plan was edited inconsistently.
        """
        if type(explain) is not int or explain < 0:
            raise ReportError(f"report(explain={explain!r}): explain must be a whole number of 0 or more.")
        if self.origin is not None:
            return self.origin.report(self, compare, verification, against, explain, show_progress)
        if compare:
            raise ReportError(
                f"report(compare=True): the plan for {self.function!r} was read from a file and has no step to plan: "
                "report on step.plan(state, batch, method=plan), which is the same plan."
            )
        diff = None if against is None else PlanDiff.of(self, against)
        return Report(self, None, None, verification, diff)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "origin": None}

    def to_json(self) -> str:
        """The text of a plan file; `from_json` gives an equal plan back.

        Raises:
          PlanError: the plan holds what no plan file may hold, such as a sharding over an axis that its mesh lacks.
        """
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from the text of a plan file.

        Raises:
          PlanError: not JSON, another format or version, or a field that is missing, unknown or does not fit the
            others: the message says where, what was met and what is expected.
        """
        return cls(**parse_plan(text, "plan text"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
          PlanError: the file cannot be written, or as for `to_json`.
        """
        write_path(path, self.to_json(), "plan file", PlanError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file that `save` wrote, perhaps edited since.

        Raises:
          PlanError: no such file, or as for `from_json`.
        """
        return cls(**parse_plan(read_path(path, "plan file", PlanError), f"plan file {os.fspath(path)!r}"))

    def to_text(self, max_rows: int | None = 40) -> str:
        """What `print(plan)` shows, with at most `max_rows` rows of state leaves (None: all)."""
        return render(plan_parts(self, max_rows))

    def __str__(self) -> str:
        return self.to_text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from plan_parts(self)

    def _repr_html_(self) -> str:
        return as_html(plan_parts(self))
