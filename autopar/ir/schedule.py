"""A schedule: for each stage, the order in which its programs run over the microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from autopar.ir.graph import Phase
from autopar.ir.mesh import Mesh

_LOOP = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS)

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


@dataclasses.dataclass(frozen=True)
class Task:
    """Run the programs of one phase of one stage on one microbatch."""

    stage: int
    phase: Phase  # FORWARD, BACKWARD or WEIGHTS
    microbatch: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which task each group of devices runs when; stage i is on group i modulo their number."""

    name: ScheduleName
    num_stages: int
    num_microbatches: int
    tasks: tuple[tuple[Task, ...], ...]  # by group, in execution order

    @property
    def num_groups(self) -> int:
        return len(self.tasks)

    def group_of(self, stage: int) -> int:
        return stage % len(self.tasks)

    @property
    def weights_apart(self) -> bool:
        """Whether gradients of parameters are computed apart from what stages send back."""
        return self.name == "zero-bubble"

    def in_flight(self, stage: int) -> int:
        """Most microbatches that are under way at once at this stage."""
        return max(self.held(stage).values())

    def held(self, stage: int) -> Mapping[tuple[Phase, Phase], int]:
        """Of how many microbatches values are held at once at this stage, by when they are made and last read.

        What other stages send counts as made in the forward pass: it may come long before it is read.
        """
        returning = self._most(stage, Phase.FORWARD, Phase.BACKWARD)
        counts: dict[tuple[Phase, Phase], int] = {}
        for made in _LOOP:
            counts |= {(made, Phase.FORWARD): returning, (made, Phase.BACKWARD): returning}
        if self.weights_apart:
            counts |= {(made, Phase.WEIGHTS): self._most(stage, made, Phase.WEIGHTS) for made in _LOOP}
        return counts

    def shares(self, stage: int) -> Mapping[tuple[Phase, Phase], float]:
        """`held`, relative to the microbatches in flight."""
        held = self.held(stage)
        return {when: number / max(held.values()) for when, number in held.items()}

    def _most(self, stage: int, first: Phase, last: Phase) -> int:
        """Most microbatches of which the first of these phases has begun and the last is not over."""
        now = most = 0
        for task in self.tasks[self.group_of(stage)]:
            if task.stage == stage:
                now += task.phase is first
                most = max(most, now)
                now -= task.phase is last
        return most


def make_schedule(
    name: ScheduleName, num_stages: int, num_microbatches: int, num_groups: int | None = None
) -> Schedule:
    """GPipe (Huang et al. 2019: all forwards, then all backwards), 1F1B or interleaved 1F1B (Narayanan et al. 2021),
    or zero-bubble (ZB-H1 of Qi et al. 2024: 1F1B, but stage i computes the gradients of its parameters i microbatches
    later than what it sends back; so no stage has more microbatches under way than the first).

    `num_groups` of devices, a divisor of `num_stages` that is smaller where stages are interleaved: each group has
    several stages, with all others between them, so that a pipeline fills and drains in shorter steps.
    """
    groups = num_stages if num_groups is None else num_groups
    rounds = num_stages // groups
    rows = []
    for group in range(groups):
        order = _order(groups, rounds, num_microbatches)
        forward = [Task(k * groups + group, Phase.FORWARD, i) for k, i in order]
        backward = [Task((rounds - 1 - k) * groups + group, Phase.BACKWARD, i) for k, i in order]
        weights = [dataclasses.replace(task, phase=Phase.WEIGHTS) for task in backward]
        warmup = len(order)
        # Interleaved, microbatches must come in whole groups, lest devices wait for one another.
        if name != "gpipe" and (rounds == 1 or num_microbatches % groups == 0):
            # Section 2.2: what follows in the same round, and twice the distance to the end where rounds follow.
            behind = groups - group - 1
            warmup = min(warmup, 1 + (behind if rounds == 1 else 2 * behind + (rounds - 1) * groups))
        row = forward[:warmup]
        for i, task in enumerate(backward):
            row.append(task)
            if name == "zero-bubble" and i >= group:
                row.append(weights[i - group])
            row += forward[warmup + i : warmup + i + 1]
        if name == "zero-bubble":
            row += weights[max(0, len(weights) - group) :]
        rows.append(tuple(row))
    return Schedule(name, num_stages, num_microbatches, tuple(rows))


def schedule_for(name: ScheduleName, meshes: Sequence[Mesh], num_microbatches: int) -> Schedule:
    """The schedule of stages on these meshes, in order; stages with the same devices are interleaved."""
    return make_schedule(name, len(meshes), num_microbatches, len({mesh.devices for mesh in meshes}))


def _order(groups: int, rounds: int, num_microbatches: int) -> list[tuple[int, int]]:
    """(round, microbatch): as many microbatches as there are groups go through all rounds together."""
    return [
        (k, i)
        for first in range(0, num_microbatches, groups)
        for k in range(rounds)
        for i in range(first, min(first + groups, num_microbatches))
    ]
