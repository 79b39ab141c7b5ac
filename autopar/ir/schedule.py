"""A schedule: for each stage, the order in which its programs run over the microbatches."""

from __future__ import annotations

import dataclasses
from typing import Literal

from autopar.ir.graph import Phase

ScheduleName = Literal["gpipe", "1f1b"]


@dataclasses.dataclass(frozen=True)
class Task:
    """Run the programs of one phase of one stage on one microbatch."""

    stage: int
    phase: Phase  # FORWARD or BACKWARD
    microbatch: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which task each stage runs when."""

    name: ScheduleName
    num_stages: int
    num_microbatches: int
    tasks: tuple[tuple[Task, ...], ...]  # by stage, in execution order

    def in_flight(self, stage: int) -> int:
        """Most microbatches whose forward is done and whose backward is not, at this stage."""
        now = most = 0
        for task in self.tasks[stage]:
            now += 1 if task.phase is Phase.FORWARD else -1
            most = max(most, now)
        return most


def make_schedule(name: ScheduleName, num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe (Huang et al. 2019: all forwards, then all backwards) or 1F1B (Narayanan et al. 2021, section 2.2)."""
    rows = []
    for stage in range(num_stages):
        warmup = num_microbatches if name == "gpipe" else min(num_microbatches, num_stages - stage)
        forward = [Task(stage, Phase.FORWARD, i) for i in range(num_microbatches)]
        backward = [Task(stage, Phase.BACKWARD, i) for i in range(num_microbatches)]
        row = forward[:warmup]
        for i, task in enumerate(backward):
            row.append(task)
            row += forward[warmup + i : warmup + i + 1]
        rows.append(tuple(row))
    return Schedule(name, num_stages, num_microbatches, tuple(rows))
