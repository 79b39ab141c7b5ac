"""The stage search against exhaustive enumeration, and against sums made by hand."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import ScheduleName, make_schedule
from autopar.passes.stage_oracle import Span, StageCost, pipeline_time
from tests.passes.oracles import StageCostFn, cluster, search


def groups(hosts: tuple[int, ...], start: int) -> list[int]:
    """Sizes that a group from device `start` may have, written out for hosts of 2 and 4 devices."""
    inside = {4: {0: [1, 2, 4], 1: [1, 2], 2: [1, 2], 3: [1]}, 2: {0: [1, 2], 1: [1]}}
    first = 0
    for index, devices in enumerate(hosts):
        if start < first + devices:
            more = [sum(hosts[index : k + 1]) for k in range(index + 1, len(hosts))] if start == first else []
            return inside[devices][start - first] + more
        first += devices
    return []


SHAPES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,)],
    4: [(4,), (2, 2)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (4, 2)],
    10: [(10,), (2, 5), (5, 2)],
}


def tilings(hosts: tuple[int, ...], number: int, start: int = 0) -> Iterator[tuple[Mesh, ...]]:
    """All ways to cover the devices from `start` by so many consecutive meshes."""
    if number == 0:
        if start == sum(hosts):
            yield ()
        return
    for size in groups(hosts, start):
        for rest in tilings(hosts, number - 1, start + size):
            for shape in SHAPES[size]:
                yield (Mesh(tuple(range(start, start + size)), shape, ("x", "y")[: len(shape)]), *rest)


def enumerate_plans(
    num_layers: int, hosts: tuple[int, ...], cost: StageCostFn, m: int, schedule: ScheduleName, stages: range,
    rounds: int = 1,
) -> Iterator[float]:  # fmt: skip
    """The step time of every plan that fits, straight from the definitions."""
    for number in stages:
        timeline = make_schedule(schedule, number, m)
        flights = [timeline.in_flight(stage) for stage in range(number)]
        spans = [
            tuple(itertools.pairwise((0, *cuts, num_layers)))
            for cuts in itertools.combinations(range(1, num_layers), number - 1)
        ]
        for meshes in tilings(hosts, number):
            for cut in spans:
                costs = [cost(*stage) for stage in zip(cut, meshes, flights, strict=True)]
                fitting = [c for c in costs if c is not None]
                if len(fitting) == number:
                    micro = [c.per_microbatch for c in fitting]
                    filling = (sum(micro) - max(micro)) / rounds
                    yield filling + m * max(micro) + max(c.per_step for c in fitting)


class Table:
    """Random costs, drawn when asked for; whole numbers, so that sums are exact. Counts its calls.

    Costs rise with the number in flight, and what does not fit does not fit with more layers either. They differ from
    mesh to mesh, or are the same on all meshes of one shape.
    """

    def __init__(self, seed: int, *, same_everywhere: bool) -> None:
        self.draw = random.Random(seed)
        self.missing = self.draw.choice([0.0, 0.2, 0.5])
        self.scaling = self.draw.choice([0.0, 0.3, 0.8])  # work shrinks with this power of the number of devices
        self.once = self.draw.choice([3, 100])  # largest cost once a step
        self.same_everywhere = same_everywhere
        self.drawn: dict[tuple[Span, Mesh, int], StageCost | None] = {}
        self.calls: Counter[tuple[Span, Mesh, int]] = Counter()

    def _draw(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        key = (span, mesh, in_flight)
        if key not in self.drawn:
            work = round(40 * (span[1] - span[0]) / mesh.size**self.scaling)
            micro = self.draw.randint(work // 2, work)
            cost = StageCost(micro, self.draw.randint(0, self.once), self.draw.random())
            self.drawn[key] = None if self.draw.random() < self.missing else cost
        return self.drawn[key]

    def look(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        if self.same_everywhere:
            mesh = Mesh(tuple(range(mesh.size)), mesh.shape, mesh.axes)
        parts = [part for part in ((span[0] + 1, span[1]), (span[0], span[1] - 1)) if part[0] < part[1]]
        if not all(self.look(part, mesh, in_flight) for part in parts):
            return None
        found = [self._draw(span, mesh, number) for number in range(1, in_flight + 1)]
        fitting = [cost for cost in found if cost is not None]
        if len(fitting) < len(found):
            return None
        return StageCost(max(c.per_microbatch for c in fitting), max(c.per_step for c in fitting), 1.0)

    def __call__(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        self.calls[span, mesh, in_flight] += 1
        return self.look(span, mesh, in_flight)

    def least(self, span: Span, mesh: Mesh) -> StageCost | None:
        cost = self.look(span, mesh, 1)
        return cost and StageCost(cost.per_microbatch // 2, cost.per_step // 3, 0.0)

    def bound(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        """As with one in flight; it tells of some stages that they do not fit."""
        cost = self.look(span, mesh, 1)
        fits = in_flight % 2 or self.look(span, mesh, in_flight) is not None
        return cost and StageCost(cost.per_microbatch * 0.9, cost.per_step, 0.0) if fits else None


HOSTS = [(4,), (2, 2), (4, 4), (4, 2), (2, 4, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_equals_exhaustive_enumeration(hosts: tuple[int, ...], schedule: ScheduleName, seed: int) -> None:
    draw = random.Random(seed)
    num_layers, m = draw.randint(1, 5), draw.choice([1, 2, 4, 16])
    table = Table(seed, same_everywhere=False)
    most, rounds = min(num_layers, sum(hosts)), draw.choice([1, 1, 2, 4])
    for fixed in (None, *range(1, most + 1)):
        stages = range(fixed, fixed + 1) if fixed else range(1, most + 1)
        plan = search(num_layers, cluster(*hosts), table, m, schedule, num_stages=fixed, rounds=rounds)
        best = min(enumerate_plans(num_layers, hosts, table.look, m, schedule, stages, rounds), default=None)
        assert (plan and plan.step_time) == best
        # Each cost is asked for once in a search, whatever it was.
        assert max(table.calls.values(), default=0) <= 1
        table.calls.clear()
        if plan is None:
            continue
        # The plan is what it says: all layers, all devices, its stages' costs for their numbers in flight.
        assert plan.stages[0].span[0] == 0
        assert plan.stages[-1].span[1] == num_layers
        assert all(a.span[1] == b.span[0] for a, b in itertools.pairwise(plan.stages))
        assert [d for stage in plan.stages for d in stage.mesh.devices] == list(range(sum(hosts)))
        assert len(plan.stages) in stages
        timeline = make_schedule(schedule, len(plan.stages), m)
        for index, stage in enumerate(plan.stages):
            assert stage.cost == table.look(stage.span, stage.mesh, timeline.in_flight(index))
        assert plan.step_time == pipeline_time([stage.cost for stage in plan.stages], m, rounds)


def test_nothing_fits() -> None:
    assert search(4, cluster(2, 2), lambda span, mesh, held: None, 4, "1f1b") is None


def test_memory_forces_a_pipeline() -> None:
    """One layer fits per device and at most two microbatches of it: four stages need m = 2 under GPipe."""

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost | None:
        memory = (span[1] - span[0]) * 10 * (1 + held) / mesh.size
        return StageCost(1.0, 0.0, memory) if memory <= 30 and len(mesh.shape) == 1 and mesh.size == 1 else None

    assert search(4, cluster(4), cost, 8, "gpipe") is None
    assert search(4, cluster(4), cost, 8, "1f1b") is None  # the first of four stages holds four
    plan = search(4, cluster(4), cost, 2, "gpipe")
    assert plan is not None
    assert [stage.cost.memory for stage in plan.stages] == [30.0] * 4
    assert plan.step_time == 5.0  # 4 * 1 + (2 - 1) * 1


def test_once_a_step_costs_are_part_of_the_choice() -> None:
    """Two stages are quicker per microbatch (2 + 2 + 2 = 6 against 7), but synchronise for longer than that saves."""

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost | None:
        if len(mesh.shape) == 2:
            return None
        return StageCost(3.5, 0.0, 0) if span == (0, 2) else StageCost(2.0, per_step[span], 0)

    per_step = {(0, 1): 0.5, (1, 2): 0.5}
    plan = search(2, cluster(2), cost, 2, "1f1b")
    assert plan is not None
    assert (len(plan.stages), plan.step_time) == (2, 6.5)
    per_step = {(0, 1): 0.5, (1, 2): 1.5}  # the larger counts: 7.5
    plan = search(2, cluster(2), cost, 2, "1f1b")
    assert plan is not None
    assert (len(plan.stages), plan.step_time) == (1, 7.0)


@pytest.mark.parametrize("shapes", list(itertools.permutations([(8,), (2, 4), (4, 2)])), ids=str)
def test_the_quickest_rest_is_not_always_the_best_rest(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Behind a stage (1, 10) with m = 2, host 1 may take (3.25, 0), (3, 10) or (2.5, 11.25) s per microbatch and step.

    By themselves they take 3.25 + 3.25 + 0 = 6.5, 3 + 3 + 10 = 16 and 2.5 + 2.5 + 11.25 = 16.25 seconds. Behind the
    first stage, where 10 seconds are spent anyway, 1 + 3.25 + 3.25 + 10 = 17.5, 1 + 3 + 3 + 10 = 17 and
    1 + 2.5 + 2.5 + 11.25 = 17.25: neither the quickest rest nor the one of least sum is best.
    """
    second = dict(zip(shapes, [(3.25, 0.0), (3.0, 10.0), (2.5, 11.25)], strict=True))

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost | None:
        return StageCost(1.0, 10.0, 0) if mesh.size == 1 else StageCost(*second[mesh.shape], 0)

    plan = search(3, cluster(1, 8), cost, 2, "1f1b", num_stages=2)
    assert plan is not None
    assert plan.step_time == 17.0
    assert plan.stages[1].mesh.shape == shapes[1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bounds", [False, True])
def test_with_bounds_too(hosts: tuple[int, ...], schedule: ScheduleName, seed: int, bounds: bool) -> None:
    draw = random.Random(seed)
    num_layers, m, fixed = draw.randint(1, 5), draw.choice([1, 2, 4, 16]), draw.choice([None, 1, 2, 3])
    table = Table(seed, same_everywhere=True)
    most = min(num_layers, sum(hosts))
    stages = range(min(fixed, most), min(fixed, most) + 1) if fixed else range(1, most + 1)
    number = stages[0] if fixed else None
    plan = search(
        num_layers, cluster(*hosts), table, m, schedule, num_stages=number, least=table.least,
        bound=table.bound if bounds else None, alike=lambda start, size: size,
    )  # fmt: skip
    best = min(enumerate_plans(num_layers, hosts, table.look, m, schedule, stages), default=None)
    assert (plan and plan.step_time) == best
    if plan is not None:
        assert plan.step_time == pipeline_time([stage.cost for stage in plan.stages], m)
    # Once on all meshes of a shape.
    shapes = Counter((span, mesh.shape, held) for span, mesh, held in table.calls.elements())
    assert max(shapes.values(), default=0) <= 1


def test_small_gains_are_not_looked_for() -> None:
    def cost(span: Span, mesh: Mesh, held: int) -> StageCost:
        return StageCost(float(span[1] - span[0]) / mesh.size, 0.0, 0.0)

    def least(span: Span, mesh: Mesh) -> StageCost:
        return cost(span, mesh, 1)

    best = search(4, cluster(2), cost, 8, "1f1b")
    assert best is not None
    assert search(4, cluster(2), cost, 8, "1f1b", below=best.step_time, least=least) is None
    assert search(4, cluster(2), cost, 8, "1f1b", below=best.step_time * 1.05, gain=0.1, least=least) is None
    assert search(4, cluster(2), cost, 8, "1f1b", below=best.step_time * 1.2, gain=0.1, least=least) == best


def test_a_slow_host_gets_less_work() -> None:
    """Host 0 needs 3 s a layer and host 1 needs 1 s: with two stages over four layers, 1 + 3 is the balance."""

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost:
        return StageCost((span[1] - span[0]) * (3.0 if 0 in mesh.devices else 1.0), 0.0, 0)

    plan = search(4, cluster(2, 2), cost, 10, "1f1b", num_stages=2)
    assert plan is not None
    assert [stage.span for stage in plan.stages] == [(0, 1), (1, 4)]
    assert [stage.mesh.devices for stage in plan.stages] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("number", [-1, 0, 4])
def test_impossible_number_of_stages(number: int) -> None:
    with pytest.raises(PlanError, match=rf"num_stages={number}, but there are 3 layers and 4 devices.*choose 1 to 3"):
        search(3, cluster(4), lambda span, mesh, held: None, 4, "1f1b", num_stages=number)


def test_impossible_number_of_stages_for_one_layer() -> None:
    message = "num_stages=2, but there is 1 layer and 4 devices, and each stage needs one of both: choose 1 stage"
    with pytest.raises(PlanError, match=message):
        search(1, cluster(4), lambda span, mesh, held: None, 4, "1f1b", num_stages=2)
