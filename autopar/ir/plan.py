"""The plan: a step's stages, meshes, shardings, schedule and microbatches, to be printed, saved and loaded."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from autopar.errors import PlanError
from autopar.ir.json_file import read_path, write_path
from autopar.ir.plan_json import parse_plan, plan_to_json
from autopar.ir.plan_record import LeafPlan, PlanRecord, StageMemory, StagePlan
from autopar.ir.plan_text import plan_parts, render
from autopar.ir.rendering import as_html

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["LeafPlan", "Plan", "StageMemory", "StagePlan"]

_OF_A_STEP = ("as_text", "compile", "report", "verify_with_xla", "why")  # see `Planned`


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(PlanRecord):
    """A step's stages, meshes, shardings, schedule and microbatches, with predicted costs.

    `print(plan)` shows it as tables. Two plans are equal if all that they hold is, whether one knows its step or not.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.fields() == other.fields()

    __hash__ = None  # type: ignore[assignment]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Says how to get what needs the step, which no plan file holds."""
            if name not in _OF_A_STEP:
                raise AttributeError(f"a plan has no {name!r}", name=name, obj=self)
            raise AttributeError(
                f"{name}: the plan for {self.function!r} has no step at hand, as one from a file. Use "
                "step.plan(state, batch, method=plan), which is the same plan.", name=name, obj=self,
            )  # fmt: skip

    def to_json(self) -> str:
        """The text of a plan file; `from_json` gives an equal plan back.

        Raises:
          PlanError: the plan holds what no plan file may hold, such as a sharding over an axis that its mesh lacks.
        """
        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan from the text of a plan file.

        Raises:
          PlanError: not JSON, another format or version, or a field that is missing, unknown or does not fit the
            others: the message says where, what was met and what is expected.
        """
        return Plan(**parse_plan(text, "plan text"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
          PlanError: the file cannot be written, or as for `to_json`.
        """
        write_path(path, self.to_json(), "plan file", PlanError)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file that `save` wrote, perhaps edited since.

        Raises:
          PlanError: no such file, or as for `from_json`.
        """
        return Plan(**parse_plan(read_path(path, "plan file", PlanError), f"plan file {os.fspath(path)!r}"))

    def to_text(self, max_rows: int | None = 40) -> str:
        """What `print(plan)` shows, with at most `max_rows` rows of state leaves (None: all)."""
        return render(plan_parts(self, max_rows))

    def __str__(self) -> str:
        return self.to_text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from plan_parts(self)

    def _repr_html_(self) -> str:
        return as_html(plan_parts(self))
