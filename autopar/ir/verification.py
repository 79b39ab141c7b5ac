"""XLA's verdict on a plan: for each program and stage what was predicted and what the compiler found."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from autopar.errors import TargetError
from autopar.ir.json_file import write_path
from autopar.ir.plan_text import render
from autopar.ir.units import bytes_text, count_text, ranges_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

MEMORY_TOLERANCE = 0.05  # of the bytes that XLA sets aside
TRAFFIC_TOLERANCE = 0.05  # of the bytes that XLA sends

LEFT_OUT = (
    "XLA's figure leaves out the workspaces of cuDNN and cuBLAS (which a target that is not there reports as none), "
    "the buffers of NCCL, the context and fragmentation: the cluster's reserve is for these."
)


@dataclasses.dataclass(frozen=True)
class ProgramBytes:
    """Bytes on one device while a program runs."""

    arguments: int
    outputs: int  # those that take an argument's place included
    aliased: int  # of these
    temporaries: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class CollectiveTraffic:
    """The collectives of one kind over the same axes of a mesh, in one run of a program."""

    kind: str
    axes: tuple[str, ...]
    link: str  # over which they go
    predicted: tuple[int, int]  # how many, and their payload in bytes as `Collective` has it
    found: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class KernelTraffic:
    """What one run of a program launches, and the bytes that this reads from one device's memory and writes to it."""

    launches: float
    nbytes: float


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Seconds of a run of a program that collectives take, and of it what is hidden, since kernels run beside them."""

    communication: float  # predicted
    hidden: float  # predicted
    # With starts and ends of collectives as XLA has ordered them, and its kernels priced by what they move and compute.
    # None: on targets that hide nothing, and where a loop turns as often as its numbers say.
    found: float | None


@dataclasses.dataclass(frozen=True)
class ProgramCheck:
    """One program as XLA compiled it, for all stages that have the same."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    phase: str
    predicted: ProgramBytes
    found: ProgramBytes
    traffic: tuple[CollectiveTraffic, ...]
    kernels: KernelTraffic  # predicted
    found_kernels: KernelTraffic | None  # none where a loop turns as often as its numbers say
    overlap: Overlap
    remarks: tuple[str, ...]  # what differs, and the operators it comes from
    seconds: float  # that XLA took

    @property
    def memory_error(self) -> float:
        """Relative: above 0 where more was predicted than XLA sets aside."""
        return self.predicted.total / self.found.total - 1 if self.found.total else 0.0

    @property
    def bytes_sent(self) -> tuple[int, int]:
        """Payloads of all collectives: predicted, found."""
        return sum(t.predicted[1] for t in self.traffic), sum(t.found[1] for t in self.traffic)


@dataclasses.dataclass(frozen=True)
class StageCheck:
    """One stage: all that lies on each of its devices at its peak."""

    stage: int
    predicted: int  # bytes
    found: int  # bytes: what is kept from program to program, and XLA's figure of the hungriest
    capacity: int  # bytes, without the reserve
    reserve: int  # bytes

    @property
    def memory_error(self) -> float:
        """Relative: above 0 where more was predicted than XLA sets aside."""
        return self.predicted / self.found - 1 if self.found else 0.0

    @property
    def fits(self) -> bool:
        """With the reserve for what XLA's figure leaves out."""
        return self.found <= self.capacity


@dataclasses.dataclass(frozen=True)
class Verification:
    """XLA's verdict on all programs of a plan."""

    function: str
    target: str
    versions: str  # of what compiled
    stages: tuple[StageCheck, ...]
    programs: tuple[ProgramCheck, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage does, with the reserve."""
        return all(stage.fits for stage in self.stages)

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than the tolerances."""
        return not any(program.remarks for program in self.programs)

    def to_json(self) -> str:
        """All of it, as JSON."""
        content: dict[str, Any] = {"format": "autopar-verification", "version": 1, **dataclasses.asdict(self)}
        return json.dumps({**content, "fits": self.fits, "agrees": self.agrees}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file as JSON, whole or not at all. Raises TargetError if the file cannot be written."""
        write_path(path, self.to_json(), "verification file", TargetError)

    def __str__(self) -> str:
        return render(self._parts())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._parts()

    def _parts(self) -> Sequence[RenderableType]:
        number = sum(len(program.names) for program in self.programs)
        verdict = "fits" if self.fits else "DOES NOT FIT"
        head = (
            f"{self.function} for {self.target}, compiled by {self.versions}: {verdict}\n"
            f"{count_text(number, 'program')}, {len(self.programs)} of them different, compiled in "
            f"{sum(program.seconds for program in self.programs):.1f} s"
        )
        remarks = [Text(f"{program.names[0]}: {each}") for program in self.programs for each in program.remarks]
        end = [Text(), *remarks] if remarks else []
        left_out = [Text(), Text(LEFT_OUT)] if any(stage.reserve for stage in self.stages) else []
        return [Text(head), Text(), self._stages(), Text(), self._programs(), *end, *left_out]

    def _stages(self) -> Table:
        table = _table("stage", "predicted", "XLA", "error", "of memory", "reserve")
        for s in self.stages:
            table.add_row(
                str(s.stage), bytes_text(s.predicted), bytes_text(s.found), f"{s.memory_error:+.1%}",
                f"{s.found / s.capacity:.1%}" if s.capacity else "-", bytes_text(s.reserve),
            )  # fmt: skip
        return table

    def _programs(self) -> Table:
        hides = any(p.overlap.hidden or p.overlap.found for p in self.programs)
        titles = ["program", "stages", "predicted", "XLA", "error", "moved", "XLA moves", "sent", "XLA sends"]
        table = _table(*titles, *(("hidden", "XLA hides") if hides else ()))
        for p in self.programs:
            hidden = "-" if p.overlap.found is None else seconds_text(p.overlap.found)
            sent, xla_sends = p.bytes_sent
            moves = "?" if p.found_kernels is None else bytes_text(round(p.found_kernels.nbytes))
            table.add_row(
                Text(p.names[0]), ranges_text(p.stages), bytes_text(p.predicted.total), bytes_text(p.found.total),
                f"{p.memory_error:+.1%}", bytes_text(round(p.kernels.nbytes)), moves, bytes_text(sent),
                bytes_text(xla_sends), *((seconds_text(p.overlap.hidden), hidden) if hides else ()),
            )  # fmt: skip
        return table


def _table(first: str, *headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    return table
