"""The simulator against closed forms, hand-drawn timelines and two independent computations."""

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import networkx as nx
import pytest

from autopar.cost_model.timeline import (
    ONCE,
    CrossingKey,
    Event,
    Moment,
    StageHolds,
    StageTimes,
    TransferEvent,
    memory_over_time,
    simulate,
)
from autopar.errors import InternalError
from autopar.ir.graph import Phase
from autopar.ir.schedule import Schedule, ScheduleName, Task, make_schedule

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def _chain(num_stages: int, forward: float = 0.0, backward: float = 0.0) -> dict[CrossingKey, float]:
    """Each stage sends activations to the next one and gradients to the one before."""
    ahead = {(s, s + 1, FORWARD): forward for s in range(num_stages - 1)}
    return ahead | {(s + 1, s, BACKWARD): backward for s in range(num_stages - 1)}


# Closed forms


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 1), (4, 2), (4, 4), (4, 16), (7, 9)])
def test_equal_stages_without_transfers(name: ScheduleName, stages: int, microbatches: int) -> None:
    # Narayanan et al. 2021, section 2.2: both take (m + S - 1)(f + b); the bubble is (S - 1) / (m + S - 1) of it.
    f, b = 3.0, 5.0
    timeline = simulate(make_schedule(name, stages, microbatches), [StageTimes(f, b)] * stages, _chain(stages))
    assert timeline.makespan == (microbatches + stages - 1) * (f + b)
    assert timeline.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert len(timeline.events) == 2 * stages * microbatches
    assert not timeline.transfers


@pytest.mark.parametrize("groups", [2, 3, 4, 7])
@pytest.mark.parametrize("rounds", [2, 3, 4])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_interleaved_stages_without_transfers(groups: int, rounds: int, times: int) -> None:
    # Narayanan et al. 2021, section 2.2.2: the bubble is 1 / v of (S - 1)(f + b), with v stages for each device.
    microbatches, f, b = times * groups, 3.0, 5.0
    schedule = make_schedule("interleaved", groups * rounds, microbatches, groups)
    each = StageTimes(f / rounds, b / rounds)
    timeline = simulate(schedule, [each] * (groups * rounds), _chain(groups * rounds))
    assert timeline.makespan == pytest.approx((microbatches + (groups - 1) / rounds) * (f + b))
    busy = microbatches * (f + b)
    assert timeline.bubble_fraction == pytest.approx(1 - busy / timeline.makespan)


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (2.0, 3.0, 2.0), (3.0, 5.0, 1.0)])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 10), (7, 9)])
def test_stages_without_bubble_without_transfers(f: float, b: float, w: float, stages: int, microbatches: int) -> None:
    # Qi et al. 2024, table 1: the bubble of ZB-H1 is (S - 1)(f + b - w); that of 1F1B is (S - 1)(f + b + w).
    timeline = simulate(
        make_schedule("zero-bubble", stages, microbatches), [StageTimes(f, b, weights=w)] * stages, _chain(stages)
    )
    assert timeline.makespan == microbatches * (f + b + w) + (stages - 1) * (f + b - w)
    assert len(timeline.events) == 3 * stages * microbatches


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", range(1, 13))
def test_every_schedule_ends_and_runs_every_task_once(groups: int, rounds: int, microbatches: int) -> None:
    stages = groups * rounds
    names: tuple[ScheduleName, ...] = ("gpipe", *(("interleaved",) if rounds > 1 else ("1f1b", "zero-bubble")))
    for name in names:
        schedule = make_schedule(name, stages, microbatches, groups)
        simulate(schedule, [StageTimes(1.0, 2.0)] * stages, _chain(stages))
        tasks = [task for row in schedule.tasks for task in row]
        phases = (FORWARD, BACKWARD, *([Phase.WEIGHTS] * schedule.weights_apart))
        every = itertools.product(range(stages), phases, range(microbatches))
        assert sorted(map(str, tasks)) == sorted(str(Task(*one)) for one in every)


def test_gpipe_with_transfers() -> None:
    # Forward: the last stage starts after 3 forwards and 3 transfers, then runs all 8 without a gap.
    # The backwards likewise: the first stage starts its own after 3 * 4 + 3 * 1.5 more and runs 8 * 4.
    timeline = simulate(make_schedule("gpipe", 4, 8), [StageTimes(2.0, 4.0)] * 4, _chain(4, 1.0, 1.5))
    assert timeline.makespan == (3 * 2 + 3 * 1 + 8 * 2) + (3 * 4 + 3 * 1.5 + 8 * 4)


def test_a_slow_link_sets_the_pace() -> None:
    # Transfers of 5 s after forwards of 1 s queue up on the link; the 4th arrives at 1 + 4 * 5 = 21. Then the last
    # stage has its 4th forward until 22 and 4 backwards until 26, and the first stage its last backward until 27.
    timeline = simulate(make_schedule("gpipe", 2, 4), [StageTimes(1.0, 1.0)] * 2, _chain(2, 5.0, 0.0))
    assert [(t.start, t.end) for t in timeline.transfers] == [(1.0, 6.0), (6.0, 11.0), (11.0, 16.0), (16.0, 21.0)]
    assert timeline.makespan == 27.0
    # The sender never waits for its transfers.
    assert [e.end for e in timeline.events if e.stage == 0 and e.phase is FORWARD] == [1.0, 2.0, 3.0, 4.0]


def test_timeline_by_hand() -> None:
    #        0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    # s0     F0 F1          .  .  .  .  B0 B0    B1 B1 U
    # 0->1      t0 t1
    # s1           F0 F0 B0 B0 B0 F1 F1 B1 B1 B1 U  U
    # 1->0                        g0          g1
    schedule = make_schedule("1f1b", 2, 2)
    times = [StageTimes(1.0, 2.0, update=1.0), StageTimes(2.0, 3.0, update=2.0)]
    timeline = simulate(schedule, times, _chain(2, 1.0, 1.0))
    assert timeline.events == (
        Event(0, FORWARD, 0, 0.0, 1.0),
        Event(0, FORWARD, 1, 1.0, 2.0),
        Event(1, FORWARD, 0, 2.0, 4.0),
        Event(1, BACKWARD, 0, 4.0, 7.0),
        Event(1, FORWARD, 1, 7.0, 9.0),
        Event(0, BACKWARD, 0, 8.0, 10.0),
        Event(1, BACKWARD, 1, 9.0, 12.0),
        Event(1, Phase.UPDATE, ONCE, 12.0, 14.0),
        Event(0, BACKWARD, 1, 13.0, 15.0),
        Event(0, Phase.UPDATE, ONCE, 15.0, 16.0),
    )
    assert timeline.transfers == (
        TransferEvent(0, 1, FORWARD, 0, 1.0, 2.0),
        TransferEvent(0, 1, FORWARD, 1, 2.0, 3.0),
        TransferEvent(1, 0, BACKWARD, 0, 7.0, 8.0),
        TransferEvent(1, 0, BACKWARD, 1, 12.0, 13.0),
    )
    assert timeline.makespan == 16.0
    assert (timeline.busy(0), timeline.busy(1)) == (7.0, 12.0)
    assert timeline.bubble_fraction == pytest.approx(1 - 19 / 32)


def test_prologue_and_update_crossings() -> None:
    schedule = make_schedule("gpipe", 2, 1)
    times = [StageTimes(1.0, 1.0, prologue=4.0, update=1.0), StageTimes(1.0, 1.0, update=1.0)]
    # Alone: stage 0 prologue 0-4, F 4-5, stage 1 F 5-6, B 6-7, U 7-8, stage 0 B 7-8, U 8-9.
    assert simulate(schedule, times, _chain(2)).makespan == 9.0
    # Stage 1 waits for stage 0's prologue, sent until 4 + 3 = 7: F 7-8, B 8-9; stage 0 B 9-10, U 10-11.
    crossings = {**_chain(2), (0, 1, Phase.PROLOGUE): 3.0}
    assert simulate(schedule, times, crossings).makespan == 11.0
    # A norm over both stages: stage 1's update waits for stage 0's last program, sent until 8 + 2 = 10: U 10-11.
    crossings = {**_chain(2), (0, 1, Phase.UPDATE): 2.0, (1, 0, Phase.UPDATE): 0.0}
    timeline = simulate(schedule, times, crossings)
    assert timeline.makespan == 11.0
    assert Event(0, Phase.UPDATE, ONCE, 8.0, 9.0) in timeline.events
    assert TransferEvent(0, 1, Phase.UPDATE, ONCE, 8.0, 10.0) in timeline.transfers


def test_skip_connections() -> None:
    schedule = make_schedule("gpipe", 3, 1)
    times = [StageTimes(1.0, 1.0)] * 3
    # F0 0-1, F1 1-2, but stage 2 waits for the skip until 1 + 6 = 7: F2 7-8, then three backwards: 11.
    assert simulate(schedule, times, {**_chain(3), (0, 2, FORWARD): 6.0}).makespan == 11.0
    # The gradient's skip: F2 2-3, B2 3-4, arrives at 4 + 6 = 10: B0 10-11.
    assert simulate(schedule, times, {**_chain(3), (2, 0, BACKWARD): 6.0}).makespan == 11.0
    # A forward value of stage 2 that stage 0 reads in its backward: F2 2-3, arrives at 3 + 6 = 9: B0 9-10.
    assert simulate(schedule, times, {**_chain(3), (2, 0, FORWARD): 6.0}).makespan == 10.0


def test_nothing_to_do() -> None:
    timeline = simulate(make_schedule("gpipe", 2, 1), [StageTimes(0.0, 0.0)] * 2, {})
    assert timeline.makespan == 0.0
    assert timeline.bubble_fraction == 0.0


# Independent computations


def _seconds(times: StageTimes, phase: Phase) -> float:
    return {FORWARD: times.forward, BACKWARD: times.backward, Phase.WEIGHTS: times.weights}[phase]


def _random_case(seed: int) -> tuple[Schedule, list[StageTimes], dict[CrossingKey, float]]:
    random_ = random.Random(seed)
    names: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")
    name = random_.choice(names)
    groups, rounds = random_.randint(1, 5), random_.randint(2, 3) if name == "interleaved" else 1
    stages, microbatches = groups * rounds, groups * random_.randint(1, 2) if rounds > 1 else random_.randint(1, 7)
    schedule = make_schedule(name, stages, microbatches, groups)
    of = 5 if schedule.weights_apart else 4
    times = [StageTimes(*(random_.uniform(0.5, 2.0) for _ in range(of))) for _ in range(stages)]
    crossings: dict[CrossingKey, float] = {}
    for source, target in itertools.permutations(range(stages), 2):
        for phase in (FORWARD, BACKWARD):
            onward = (source < target) == (phase is FORWARD)
            if onward and (abs(source - target) == 1 or random_.random() < 0.3):
                crossings[source, target, phase] = random_.random()
        if random_.random() < 0.3:
            crossings[source, target, Phase.UPDATE] = random_.random()
    return schedule, times, crossings


@pytest.mark.parametrize("seed", range(30))
def test_longest_path_when_no_link_is_contended(seed: int) -> None:
    """With transfers no longer than their sender's programs, the makespan is the task graph's longest path."""
    schedule, times, crossings = _random_case(seed)
    # Programs take at least 0.5.
    crossings = {key: seconds * 0.5 for key, seconds in crossings.items() if key[2].in_loop}
    graph = nx.DiGraph()

    def seconds(stage: int, phase: Phase) -> float:
        return _seconds(times[stage], phase)

    for group, row in enumerate(schedule.tasks):
        mine = times[group :: schedule.num_groups]
        graph.add_edge("start", row[0], weight=sum(each.prologue for each in mine))
        for before, after in itertools.pairwise(row):
            graph.add_edge(before, after, weight=seconds(before.stage, before.phase))
        graph.add_edge(row[-1], "end", weight=seconds(row[-1].stage, row[-1].phase) + sum(t.update for t in mine))
    for (source, target, phase), transfer in crossings.items():
        for i in range(schedule.num_microbatches):
            weight = seconds(source, phase) + transfer
            graph.add_edge(Task(source, phase, i), Task(target, phase, i), weight=weight)
    expected = nx.dag_longest_path_length(graph)
    assert simulate(schedule, times, crossings).makespan == pytest.approx(expected, rel=1e-12)


class _Events:
    """The step from a queue of events: programs and transfers end, and whoever waited for them looks again."""

    def __init__(self, schedule: Schedule, times: list[StageTimes], crossings: dict[CrossingKey, float]) -> None:
        self.times, self.crossings, self.group_of = times, crossings, schedule.group_of
        groups = range(schedule.num_groups)
        self.heap: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = itertools.count()
        self.rows = [list(row) for row in schedule.tasks]
        self.updates = [list(range(group, schedule.num_stages, schedule.num_groups)) for group in groups]
        self.free = [False for _ in groups]
        self.finished: dict[int, float] = {}
        self.waits: dict[object, set[tuple[int, Phase, int]]] = defaultdict(set)  # task or stage -> messages missing
        self.queues: dict[tuple[int, int], list[tuple[Phase, int]]] = defaultdict(list)  # the first is under way
        for source, target, phase in crossings:
            if phase is Phase.UPDATE:
                self.waits[target].add((source, phase, ONCE))
            else:
                for i in range(schedule.num_microbatches):
                    self.waits[Task(target, phase, i)].add((source, phase, i))

    def makespan(self) -> float:
        for group, stages in enumerate(self.updates):
            self.at(sum(self.times[stage].prologue for stage in stages), partial(self.group_free, group))
        while self.heap:
            now, _, act = heapq.heappop(self.heap)
            act(now)
        assert len(self.finished) == len(self.times)
        return max(self.finished.values())

    def at(self, moment: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self.heap, (moment, next(self.order), act))

    def group_free(self, group: int, now: float) -> None:
        self.free[group] = True
        self.look(group, now)

    def look(self, group: int, now: float) -> None:
        if not self.free[group]:
            return
        if self.rows[group]:
            task = self.rows[group][0]
            if not self.waits[task]:
                self.free[group] = False
                del self.rows[group][0]
                self.at(now + _seconds(self.times[task.stage], task.phase), partial(self.task_ends, task))
        elif self.updates[group] and not self.waits[self.updates[group][0]]:
            stage = self.updates[group].pop(0)
            self.free[group] = False
            self.finished[stage] = now + self.times[stage].update
            self.at(self.finished[stage], partial(self.group_free, group))

    def task_ends(self, task: Task, now: float) -> None:
        self.send(task.stage, task.phase, task.microbatch, now)
        group = self.group_of(task.stage)
        if not self.rows[group]:
            for stage in self.updates[group]:
                self.send(stage, Phase.UPDATE, ONCE, now)
        self.group_free(group, now)

    def send(self, source: int, phase: Phase, microbatch: int, now: float) -> None:
        for origin, target, when in self.crossings:
            if (origin, when) == (source, phase):
                queue = self.queues[source, target]
                queue.append((phase, microbatch))
                if len(queue) == 1:
                    self.start_transfer(source, target, now)

    def start_transfer(self, source: int, target: int, now: float) -> None:
        phase, _ = self.queues[source, target][0]
        self.at(now + self.crossings[source, target, phase], partial(self.transfer_ends, source, target))

    def transfer_ends(self, source: int, target: int, now: float) -> None:
        phase, microbatch = self.queues[source, target].pop(0)
        if self.queues[source, target]:
            self.start_transfer(source, target, now)
        reader = target if phase is Phase.UPDATE else Task(target, phase, microbatch)
        self.waits[reader].discard((source, phase, microbatch))
        self.look(self.group_of(target), now)


@pytest.mark.parametrize("seed", range(60))
def test_event_simulation_with_contended_links(seed: int) -> None:
    schedule, times, crossings = _random_case(1000 + seed)
    crossings = {key: seconds * 4 for key, seconds in crossings.items()}
    timeline = simulate(schedule, times, crossings)
    assert timeline.makespan == pytest.approx(_Events(schedule, times, crossings).makespan(), rel=1e-12)
    # Nothing overlaps on a group of devices or on a link.

    def group(event: Event) -> int:
        return schedule.group_of(event.stage)

    for _, runs in itertools.groupby(sorted(timeline.events, key=lambda e: (group(e), e.start)), key=group):
        assert all(before.end <= after.start for before, after in itertools.pairwise(runs))
    links = sorted(timeline.transfers, key=lambda t: (t.source, t.target, t.start))
    for _, sent in itertools.groupby(links, key=lambda t: (t.source, t.target)):
        assert all(before.end <= after.start for before, after in itertools.pairwise(sent))


# Memory


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (3, 2), (4, 8)])
def test_peak_memory_is_that_of_the_schedule(name: ScheduleName, stages: int, microbatches: int) -> None:
    schedule = make_schedule(name, stages, microbatches)
    timeline = simulate(schedule, [StageTimes(1.0, 2.0)] * stages, _chain(stages, 0.1, 0.1))
    last = Phase.WEIGHTS if name == "zero-bubble" else BACKWARD
    holds = StageHolds(0, 0, 100, {(FORWARD, last): 10}, dict.fromkeys(Phase, 1))
    # GPipe holds all m microbatches everywhere, 1F1B min(m, S - s), zero-bubble min(m, S).
    behind = [0 if name == "zero-bubble" else s for s in range(stages)]
    in_flight = [microbatches if name == "gpipe" else min(microbatches, stages - s) for s in behind]
    assert [schedule.in_flight(s) for s in range(stages)] == in_flight
    for s in range(stages):
        moments = memory_over_time(timeline, s, holds)
        assert max(moment.activations for moment in moments) == 100 + 10 * in_flight[s]
        assert {moment.temporaries for moment in moments} <= {0, 1}
        assert moments[-1] == Moment(moments[-1].seconds, 100, 0)


def test_memory_over_time() -> None:
    # One stage: prologue 0-1, F0 1-2, B0 2-4, F1 4-5, B1 5-7.
    timeline = simulate(make_schedule("1f1b", 1, 2), [StageTimes(1.0, 2.0, prologue=1.0)], {})
    running = {Phase.PROLOGUE: 1, FORWARD: 2, BACKWARD: 3}
    holds = StageHolds(7, 5, 100, {(FORWARD, BACKWARD): 10}, running)
    assert [(m.seconds, m.activations, m.temporaries) for m in memory_over_time(timeline, 0, holds)] == [
        (0.0, 100, 1), (1.0, 110, 2), (2.0, 110, 3), (4.0, 110, 2), (5.0, 110, 3), (7.0, 100, 0),
    ]  # fmt: skip


def test_memory_of_a_schedule_without_backwards() -> None:
    row = tuple(Task(0, FORWARD, i) for i in range(3))
    timeline = simulate(Schedule("gpipe", 1, 3, (row,)), [StageTimes(1.0, 0.0)], {})
    moments = memory_over_time(timeline, 0, StageHolds(0, 0, 100, {(FORWARD, BACKWARD): 10}, {FORWARD: 1}))
    assert max(moment.activations for moment in moments) == 110
    assert moments[-1] == Moment(3.0, 100, 0)


# Our own mistakes


def test_a_deadlock_names_the_tasks() -> None:
    # Stage 1 wants microbatch 1 first, stage 0 wants its backward of 0 before it sends 1.
    first = (Task(0, FORWARD, 0), Task(0, BACKWARD, 0), Task(0, FORWARD, 1), Task(0, BACKWARD, 1))
    second = (Task(1, FORWARD, 1), Task(1, BACKWARD, 1), Task(1, FORWARD, 0), Task(1, BACKWARD, 0))
    with pytest.raises(InternalError) as error:
        simulate(Schedule("1f1b", 2, 2, (first, second)), [StageTimes(1.0, 1.0)] * 2, _chain(2))
    assert str(error.value) == (
        "the schedule '1f1b' deadlocks: "
        "backward(stage 0, microbatch 0) waits for backward(stage 1, microbatch 0); "
        "forward(stage 1, microbatch 1) waits for forward(stage 0, microbatch 1)"
    )


def test_a_backward_needs_its_own_forward() -> None:
    schedule = Schedule("gpipe", 1, 1, ((Task(0, BACKWARD, 0), Task(0, FORWARD, 0)),))
    with pytest.raises(InternalError, match=r"backward\(stage 0, microbatch 0\) waits for forward\(stage 0"):
        simulate(schedule, [StageTimes(1.0, 1.0)], {})


TASK = Task(0, FORWARD, 0)


@pytest.mark.parametrize(
    ("schedule", "times", "crossings", "message"),
    [
        (make_schedule("gpipe", 2, 1), 1, {}, "2 stages has tasks for 2 and times for 1"),
        (make_schedule("interleaved", 4, 2, 2), 2, {}, "4 stages has tasks for 2 and times for 2"),
        (make_schedule("gpipe", 2, 1), 2, {(0, 2, FORWARD): 1.0}, r"no crossing from stage 0 to stage 2 \(forward\)"),
        (make_schedule("gpipe", 2, 1), 2, {(1, 1, FORWARD): 1.0}, "no crossing from stage 1 to stage 1"),
        (make_schedule("gpipe", 2, 1), 2, {(0, 1, FORWARD): -1.0}, "forward transfer from stage 0 to 1 takes -1.0 s"),
        (Schedule("gpipe", 1, 1, ((TASK, TASK),)), 1, {}, "group 0 has a task twice"),
        (Schedule("gpipe", 2, 1, ((TASK,), (TASK,))), 2, {}, "stands among the tasks of group 1"),
        (Schedule("gpipe", 1, 1, ((Task(0, FORWARD, 1),),)), 1, {}, r"forward\(stage 0, microbatch 1\) stands among"),
    ],
)
def test_inputs_that_do_not_fit(
    schedule: Schedule, times: int, crossings: dict[CrossingKey, float], message: str
) -> None:
    with pytest.raises(InternalError, match=message):
        simulate(schedule, [StageTimes(1.0, 1.0)] * times, crossings)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_durations_are_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(InternalError, match="stage 0 cannot take"):
        simulate(make_schedule("gpipe", 1, 1), [StageTimes(1.0, bad)], {})
