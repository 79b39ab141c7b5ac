"""Runs a schedule in simulated time: when every program and every transfer starts and ends, and what it holds.

What waits for what, for a crossing (source stage, target stage, phase):

    PROLOGUE   the target's first program waits for the source's prologue
    FORWARD    the target's forward of a microbatch waits for the source's forward of it (the target's backward,
               if the target is an earlier stage: forwards run in stage order, so nothing else can read the value)
    BACKWARD   the target's backward of a microbatch waits for the source's backward of it
    UPDATE     the target's update waits for the source's last program (a global norm, a shared gradient)

Besides, a group of devices runs the programs of its stages one after the other in the schedule's order, and a stage's
backward of a microbatch needs its own forward, as the gradients of its parameters, where they are apart, need its
backward. A transfer starts when its program has ended and its link, the ordered pair of stages, is free; the sender
goes on at once.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.errors import InternalError, UserError
from autopar.ir.graph import Phase
from autopar.ir.schedule import Schedule, Task, is_registered

CrossingKey = tuple[int, int, Phase]  # source stage, target stage, when: see above

ONCE = -1  # the microbatch of programs and transfers that run once in a step


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """How long the programs of one stage take."""

    forward: float  # seconds per microbatch
    backward: float  # seconds per microbatch
    prologue: float = 0.0  # seconds per step
    update: float = 0.0  # seconds per step
    weights: float = 0.0  # seconds per microbatch: gradients of parameters that are apart from the backward


@dataclasses.dataclass(frozen=True)
class StageHolds:
    """What one stage holds on each of its devices, in bytes."""

    state: int  # throughout the step
    gradients: int  # throughout the step: sums over microbatches
    throughout: int  # of activations: the whole batch, and what the loop hands on or takes
    # Of activations, for each microbatch: from the start of its first of these phases to the end of its second.
    per_microbatch: Mapping[tuple[Phase, Phase], int]
    running: Mapping[Phase, int]  # while a program of this phase runs


@dataclasses.dataclass(frozen=True)
class Moment:
    """What changes on each device of a stage while a step runs, from this moment on."""

    seconds: float  # since the step began
    activations: int  # bytes
    temporaries: int  # bytes


@dataclasses.dataclass(frozen=True)
class Event:
    """One program on one stage."""

    stage: int
    phase: Phase
    microbatch: int  # ONCE for prologue and update
    start: float  # seconds since the step began
    end: float  # seconds since the step began


@dataclasses.dataclass(frozen=True)
class TransferEvent:
    """One transfer between two stages."""

    source: int
    target: int
    phase: Phase
    microbatch: int  # ONCE for prologue and update
    start: float  # seconds since the step began
    end: float  # seconds since the step began


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step in simulated time. A prologue or update that takes no time has no event."""

    num_groups: int  # of devices; those that take turns are one
    events: tuple[Event, ...]  # by start, then stage
    transfers: tuple[TransferEvent, ...]  # by start, then source and target
    makespan: float  # seconds until the last program has ended

    def busy(self, stage: int) -> float:
        """Seconds during which the stage runs a program."""
        return sum(event.end - event.start for event in self.events if event.stage == stage)

    @property
    def bubble_fraction(self) -> float:
        """Share of the time in which groups of devices run nothing; every group counts the same."""
        if not self.makespan:
            return 0.0
        busy = sum(event.end - event.start for event in self.events)
        return 1.0 - busy / (self.num_groups * self.makespan)


def simulate(
    schedule: Schedule, times: Sequence[StageTimes], transfers: Mapping[CrossingKey, float],
    turns: Sequence[int] | None = None,
) -> Timeline:  # fmt: skip
    """Run the schedule; `times` by stage, `transfers` in seconds for each microbatch (or step) and crossing.

    A crossing that takes no time still makes its target wait. `turns`: a number for each group of devices; groups of
    one number, whose devices are virtual, run one at a time. Default: all at once.

    1. Every stage runs its prologue and sends what others need of it.
    2. As long as some stage's next task has all that it waits for, run it and send its results. Every program and
       link serves in a fixed order, so the times do not depend on which stage is looked at first.
    3. A stage with tasks left then waits forever: a deadlock.
    4. Every stage runs its update, once its own tasks are done and what it waits for has arrived.

    Raises:
      InternalError: times and crossings do not fit the schedule, or the schedule deadlocks.
      UserError: a registered schedule deadlocks.
    """
    _check(schedule, times, transfers)
    return _Simulation(schedule, times, transfers, turns or range(schedule.num_groups)).run()


def memory_over_time(timeline: Timeline, stage: int, holds: StageHolds) -> tuple[Moment, ...]:
    """What one stage holds beside its state and gradients, at every change.

    Values that have arrived for a program that has not begun count from the start of the microbatch's forward pass.
    """
    events = [event for event in timeline.events if event.stage == stage]
    start = {(event.microbatch, event.phase): event.start for event in events}
    end = {(event.microbatch, event.phase): event.end for event in events}
    loop = {event.microbatch for event in events if event.phase.in_loop}
    last = {event.microbatch: event.end for event in sorted(events, key=lambda event: event.end)}
    activations: dict[float, int] = defaultdict(int)
    temporaries: dict[float, int] = defaultdict(int)
    for event in events:
        temporaries[event.start] += holds.running.get(event.phase, 0)
        temporaries[event.end] -= holds.running.get(event.phase, 0)
    for (made, read), nbytes in holds.per_microbatch.items():
        for microbatch in loop:
            activations[start[microbatch, made]] += nbytes
            activations[end.get((microbatch, read), last[microbatch])] -= nbytes
    held, running = holds.throughout, 0
    moments = []
    for moment in sorted({0.0, *activations, *temporaries}):
        held += activations[moment]
        running += temporaries[moment]
        moments.append(Moment(moment, held, running))
    return tuple(moments)


class _Simulation:
    """The clocks of one simulated step."""

    def __init__(
        self,
        schedule: Schedule,
        times: Sequence[StageTimes],
        transfers: Mapping[CrossingKey, float],
        turns: Sequence[int],
    ) -> None:
        self._schedule = schedule
        self._turns = turns
        self._times = times
        self._events: list[Event] = []
        self._sent: list[TransferEvent] = []
        self._clock = dict.fromkeys(turns, 0.0)  # when the groups that take turns are free
        self._link: dict[tuple[int, int], float] = defaultdict(float)  # when the link is free
        self._done: set[Task] = set()
        # When all transfers so far have arrived that these wait for.
        self._arrived: dict[Task, float] = defaultdict(float)
        self._arrived_first = [0.0] * schedule.num_stages
        self._arrived_update = [0.0] * schedule.num_stages
        self._outgoing: dict[tuple[int, Phase], list[tuple[int, float]]] = defaultdict(list)
        self._sources: dict[tuple[int, Phase], list[tuple[int, Phase]]] = defaultdict(list)  # of a task: its senders
        for (source, target, phase), seconds in transfers.items():
            self._outgoing[source, phase].append((target, seconds))
            if phase.in_loop:
                self._sources[target, reading_phase(source, target, phase)].append((source, phase))
        for stage in range(schedule.num_stages):
            self._sources[stage, Phase.BACKWARD].append((stage, Phase.FORWARD))
            self._sources[stage, Phase.WEIGHTS].append((stage, Phase.BACKWARD))

    def run(self) -> Timeline:
        stages = range(self._schedule.num_stages)
        for stage in stages:
            end = self._run(stage, Phase.PROLOGUE, ONCE, 0.0, self._times[stage].prologue)
            for target, arrival in self._send(stage, Phase.PROLOGUE, ONCE, end):
                self._arrived_first[target] = max(self._arrived_first[target], arrival)
        for stage in stages:
            group = self._turn(stage)
            self._clock[group] = max(self._clock[group], self._arrived_first[stage])
        self._run_tasks()
        for stage in stages:
            for target, arrival in self._send(stage, Phase.UPDATE, ONCE, self._clock[self._turn(stage)]):
                self._arrived_update[target] = max(self._arrived_update[target], arrival)
        for stage in stages:
            self._run(stage, Phase.UPDATE, ONCE, self._arrived_update[stage], self._times[stage].update)
        return Timeline(
            len(self._clock),
            tuple(sorted(self._events, key=lambda event: (event.start, event.stage))),
            tuple(sorted(self._sent, key=lambda event: (event.start, event.source, event.target))),
            max(self._clock.values(), default=0.0),
        )

    def _turn(self, stage: int) -> int:
        return self._turns[self._schedule.group_of(stage)]

    def _run_tasks(self) -> None:
        rows = self._schedule.tasks
        position = [0] * len(rows)
        moved = True
        while moved:
            moved = False
            for group, row in enumerate(rows):
                while position[group] < len(row) and not self._missing(row[position[group]]):
                    self._run_task(row[position[group]])
                    position[group] += 1
                    moved = True
        stuck = [row[at] for row, at in zip(rows, position, strict=True) if at < len(row)]
        if stuck:
            waits = "; ".join(f"{_name(task)} waits for {', '.join(map(_name, self._missing(task)))}" for task in stuck)
            error = UserError if is_registered(self._schedule.name) else InternalError
            raise error(f"the schedule {self._schedule.name!r} deadlocks: {waits}")

    def _missing(self, task: Task) -> list[Task]:
        """The tasks that this one waits for and that have not run."""
        sources = self._sources.get((task.stage, task.phase), ())
        needed = (Task(stage, phase, task.microbatch) for stage, phase in sources)
        return [each for each in needed if each not in self._done]

    def _run_task(self, task: Task) -> None:
        times = self._times[task.stage]
        seconds = {Phase.FORWARD: times.forward, Phase.BACKWARD: times.backward, Phase.WEIGHTS: times.weights}
        end = self._run(task.stage, task.phase, task.microbatch, self._arrived[task], seconds[task.phase])
        for target, arrival in self._send(task.stage, task.phase, task.microbatch, end):
            reader = Task(target, reading_phase(task.stage, target, task.phase), task.microbatch)
            self._arrived[reader] = max(self._arrived[reader], arrival)
        self._done.add(task)

    def _run(self, stage: int, phase: Phase, microbatch: int, ready: float, seconds: float) -> float:
        """Run a program as soon as its devices are free and its operands are ready; gives its end."""
        group = self._turn(stage)
        if not seconds and microbatch == ONCE:
            # Nothing to show, but an update that does nothing still ends no earlier than what it waits for.
            self._clock[group] = max(self._clock[group], ready)
            return self._clock[group]
        start = max(self._clock[group], ready)
        self._clock[group] = start + seconds
        self._events.append(Event(stage, phase, microbatch, start, start + seconds))
        return start + seconds

    def _send(self, source: int, phase: Phase, microbatch: int, ready: float) -> list[tuple[int, float]]:
        """Start the transfers of one program's results; gives (target, arrival)."""
        arrivals = []
        for target, seconds in self._outgoing.get((source, phase), ()):
            if not seconds:
                arrivals.append((target, ready))  # nothing is moved, so no link is needed
                continue
            start = max(ready, self._link[source, target])
            self._link[source, target] = start + seconds
            self._sent.append(TransferEvent(source, target, phase, microbatch, start, start + seconds))
            arrivals.append((target, start + seconds))
        return arrivals


def reading_phase(source: int, target: int, phase: Phase) -> Phase:
    """The phase in which the target reads what a loop program of the source sends."""
    return Phase.BACKWARD if phase is Phase.FORWARD and target < source else phase


def _name(task: Task) -> str:
    return f"{task.phase.value}(stage {task.stage}, microbatch {task.microbatch})"


def _check(schedule: Schedule, times: Sequence[StageTimes], transfers: Mapping[CrossingKey, float]) -> None:
    if len(times) != schedule.num_stages or not schedule.tasks or schedule.num_stages % schedule.num_groups:
        raise InternalError(
            f"a schedule of {schedule.num_stages} stages has tasks for {len(schedule.tasks)} and times for {len(times)}"
        )
    for group, row in enumerate(schedule.tasks):
        if len(set(row)) < len(row):
            raise InternalError(f"group {group} has a task twice in the schedule {schedule.name!r}")
        for task in row:
            fits = schedule.group_of(task.stage) == group and 0 <= task.stage < schedule.num_stages
            if not fits or not task.phase.in_loop or not 0 <= task.microbatch < schedule.num_microbatches:
                raise InternalError(f"{_name(task)} stands among the tasks of group {group}")
    for stage, each in enumerate(times):
        times_fit = all(0 <= seconds < float("inf") for seconds in dataclasses.astuple(each))
        if not times_fit or (each.weights and not schedule.weights_apart):
            raise InternalError(f"stage {stage} cannot take {each}")
    for (source, target, phase), seconds in transfers.items():
        if source == target or not {source, target} <= set(range(schedule.num_stages)):
            raise InternalError(f"there is no crossing from stage {source} to stage {target} ({phase.value})")
        if not 0 <= seconds < float("inf"):
            raise InternalError(f"the {phase.value} transfer from stage {source} to {target} takes {seconds} s")
