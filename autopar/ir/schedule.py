"""A schedule: for each stage, the order in which its programs run over the microbatches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from autopar.errors import UserError
from autopar.ir.graph import Phase
from autopar.ir.mesh import Mesh

_LOOP = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS)

ScheduleName = str  # one of `schedule_names()`
Order = Callable[[int, int, int], Iterable[tuple[str, int]]]

_BUILT_IN: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "interleaved", "zero-bubble")
_REGISTERED: dict[ScheduleName, Order] = {}


def schedule_names() -> tuple[ScheduleName, ...]:
    """The built-in schedules, and those that were registered."""
    return *_BUILT_IN, *_REGISTERED


def registered() -> dict[ScheduleName, Order]:
    """Those that were registered."""
    return dict(_REGISTERED)


def register_schedule(name: ScheduleName) -> Callable[[Order], Order]:
    """Decorator: give a schedule of one's own a name, for the `schedule` of `recipes.auto` and `recipes.pipeline`.

    The decorated function takes a stage (the first is 0), the number of stages and that of microbatches. It returns
    what the stage does, in order: `("forward", i)` and `("backward", i)` once for each microbatch `i`. That is checked
    when a plan is made; and where stages wait for one another for ever, the simulation of the plan finds it.

    Raises:
      UserError: the name is no text or that of a built-in schedule, or what is decorated is no function.
    """
    if not isinstance(name, str) or not name or name in _BUILT_IN:
        raise UserError(
            f"register_schedule takes a name that is not {', '.join(_BUILT_IN)}, such as 'my_schedule', but got "
            f"{name!r}: write @autopar.register_schedule('my_schedule') above the function that orders a stage's work"
        )

    def register(order: Order) -> Order:
        if not callable(order):
            raise UserError(
                f"schedule {name!r} must be a function from a stage, the number of stages and that of microbatches to "
                f"what the stage does in order, but is {order!r}"
            )
        _REGISTERED[name] = order
        first_in_flight.cache_clear()
        return order

    return register


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

    Raises:
      UserError: a registered schedule leaves something out for so many stages and microbatches, or does it twice.
    """
    groups = num_stages if num_groups is None else num_groups
    if name in _REGISTERED:
        if groups < num_stages:
            raise UserError(f"schedule {name!r}: each stage needs devices of its own; only 'interleaved' shares them.")
        return Schedule(name, num_stages, num_microbatches, _registered(name, num_stages, num_microbatches))
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


@functools.cache
def first_in_flight(name: ScheduleName, num_stages: int, num_microbatches: int) -> int:
    """`Schedule.in_flight` of the first stage."""
    return make_schedule(name, num_stages, num_microbatches).in_flight(0)


def is_registered(name: ScheduleName) -> bool:
    """Whether it is no built-in schedule."""
    return name in _REGISTERED


def _registered(name: ScheduleName, num_stages: int, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """What the stages do by a registered schedule; raises UserError if that is not everything, once."""
    phases = {phase.value: phase for phase in (Phase.FORWARD, Phase.BACKWARD)}
    wanted = Counter(itertools.product(phases, range(num_microbatches)))
    where = f"schedule {name!r} of {num_stages} stages and {num_microbatches} microbatches: stage"
    rows = []
    for stage in range(num_stages):
        expected = f"('forward', i) and ('backward', i), with i from 0 to {num_microbatches - 1}"
        given: list[tuple[str, int]] = []
        try:
            for phase, i in _REGISTERED[name](stage, num_stages, num_microbatches):
                given.append((str(phase), operator.index(i)))
        except (TypeError, ValueError) as error:
            raise UserError(f"{where} {stage} must do {expected}; task {len(given)} cannot be read: {error}") from error
        if wrong := [task for task in given if task not in wanted]:
            raise UserError(f"{where} {stage} does {wrong[0]!r}; it must do {expected}.")
        done = Counter(given)
        if off := next((task for task in wanted if done[task] != 1), None):
            raise UserError(f"{where} {stage} does {off!r} {done[off]} times; everything must be done once.")
        rows.append(tuple(Task(stage, phases[phase], i) for phase, i in given))
    return tuple(rows)


def _order(groups: int, rounds: int, num_microbatches: int) -> list[tuple[int, int]]:
    """(round, microbatch): as many microbatches as there are groups go through all rounds together."""
    return [
        (k, i)
        for first in range(0, num_microbatches, groups)
        for k in range(rounds)
        for i in range(first, min(first + groups, num_microbatches))
    ]
