"""Why an operator of a plan is cut as it is: its strategy beside the others."""

from __future__ import annotations

import dataclasses
import math

from rich.table import Table
from rich.text import Text

from autopar.ir.graph import Phase
from autopar.ir.plan_text import render
from autopar.ir.sharding import Sharding
from autopar.ir.units import bytes_text, seconds_text


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One strategy of an operator, with everything else of its stage at its best for it."""

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    seconds: float  # of the operator itself, per step; its operands have to be brought there besides
    stage_seconds: float  # per step, that the stage takes more than by the plan; inf: it does not fit in the memory
    operators_seconds: float = 0.0  # of these, those that operators take more, this one included
    resharding_seconds: float = 0.0  # .. and those that bringing values from one to another takes more
    changed: int = 0  # other operators that would have to be cut in another way
    needed: float | None = None  # where it does not fit: bytes of the least hungry choice found, if there is one
    limit: float | None = None  # .. and bytes that there are

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.operands)) or '()'} -> {' '.join(map(str, self.results))}"

    @property
    def fits(self) -> bool:
        return not math.isinf(self.stage_seconds)

    @property
    def verdict(self) -> str:
        """What it would do to the stage, in a few words."""
        if not self.fits:
            if self.needed is None or self.limit is None or self.needed <= self.limit:
                return "does not fit"
            return f"does not fit: needs {bytes_text(self.needed)} of {bytes_text(self.limit)}"
        return f"{'+-'[self.stage_seconds < 0]}{seconds_text(abs(self.stage_seconds))}"


@dataclasses.dataclass(frozen=True)
class Why:
    """An operator of a plan: the strategy that it has and others, the next best first."""

    stage: int
    phase: Phase
    operator: str  # the name of its primitive
    source: str  # the user's line
    chosen: Alternative
    others: tuple[Alternative, ...]
    besides: str = ""  # another way to compute it, in words

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("strategy: operands -> results")
        table.add_column("operator", justify="right")
        table.add_column("stage", justify="right")
        table.add_row(Text(str(self.chosen)), seconds_text(self.chosen.seconds), "chosen")
        for other in self.others:
            table.add_row(Text(str(other)), seconds_text(other.seconds), other.verdict)
        place = f"stage {self.stage}, {self.phase.value}" + (f", {self.source}" if self.source else "")
        besides = [Text(self.besides)] if self.besides else []
        return render([Text(f"{self.operator} ({place})"), table, *besides])
