"""The stage search against exhaustive enumeration."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.ir.mesh import Cluster, DeviceKind, Host, Link, Mesh
from autopar.ir.schedule import ScheduleName, make_schedule
from autopar.passes.inter_op import Pipeline, plan_stages
from autopar.passes.stage_oracle import Span, StageCost, StageOracle, StageSpace, Turns, in_flight, pipeline_time
from autopar.passes.submeshes import ShapesFn, candidate_shapes, mesh_at

StageCostFn = Callable[[Span, Mesh, int], StageCost | None]

KIND = DeviceKind("test", 1, 1.0, {}, 1.0, 1.0, 0.0, 0.0)
LINK = Link("test", 0.0, 1.0)


def cluster(*devices: int) -> Cluster:
    return Cluster("test", tuple(Host(KIND, n, LINK) for n in devices), LINK)


class Oracle(StageOracle):
    """Of functions; what is None is as the search takes it where nothing is known."""

    def __init__(
        self, cost: StageCostFn, least: Callable[[Span, Mesh], StageCost | None] | None, bound: StageCostFn | None,
        overhead: Callable[[int, Mesh], tuple[float, float]] | None, alike: Callable[[int, int], Hashable] | None,
    ) -> None:  # fmt: skip
        self._cost, self._least, self._bound, self._overhead, self._alike = cost, least, bound, overhead, alike

    def cost(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        return self._cost(span, mesh, in_flight)

    def least(self, span: Span, mesh: Mesh) -> StageCost | None:
        return super().least(span, mesh) if self._least is None else self._least(span, mesh)

    def bound(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        return super().bound(span, mesh, in_flight) if self._bound is None else self._bound(span, mesh, in_flight)

    def overhead(self, layer: int, mesh: Mesh) -> tuple[float, float]:
        return super().overhead(layer, mesh) if self._overhead is None else self._overhead(layer, mesh)

    def alike(self, start: int, size: int) -> Hashable:
        return super().alike(start, size) if self._alike is None else self._alike(start, size)


def search(
    num_layers: int, where: Cluster, cost: StageCostFn, m: int, schedule: ScheduleName, *,
    num_stages: int | None = None, rounds: int = 1, shapes: ShapesFn = candidate_shapes, below: float = math.inf,
    gain: float = 0.0, least: Any = None, bound: Any = None, overhead: Any = None, alike: Any = None,
) -> Pipeline | None:  # fmt: skip
    space = StageSpace(num_layers, where, num_stages, shapes)
    oracle = Oracle(cost, least, bound, overhead, alike)
    return plan_stages(space, oracle, Turns(m, schedule, rounds), below=below, gain=gain)


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


def test_what_bounds_exclude_is_not_asked_for() -> None:
    """Two stages over four layers on two devices: once the balanced cut is known, no other can be better."""
    asked = []

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost:
        asked.append(span)
        return StageCost(1.1 * (span[1] - span[0]), 0.0, 0.0)

    def least(span: Span, mesh: Mesh) -> StageCost:
        return StageCost(float(span[1] - span[0]), 0.0, 0.0)

    plan = search(4, cluster(2), cost, 8, "1f1b", num_stages=2, least=least)
    assert plan is not None
    assert [stage.span for stage in plan.stages] == [(0, 2), (2, 4)]
    assert sorted(asked) == [(0, 2), (2, 4)]


@pytest.mark.parametrize("unknown", [(), (0,)])
def test_overheads_spare_what_they_exclude(unknown: tuple[int, ...]) -> None:
    """Communication makes stages on several devices bad choices: after one of them no other is asked for.

    Not if nothing is known of a layer either, as long as the others are dear enough.
    """
    asked: list[int] = []

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost:
        asked.append(mesh.size)
        return StageCost((span[1] - span[0]) / mesh.size * (5 if mesh.size > 1 else 1.2), 0.0, 0.0)

    def least(span: Span, mesh: Mesh) -> StageCost:
        return StageCost((span[1] - span[0]) / mesh.size, 0.0, 0.0)

    def overhead(layer: int, mesh: Mesh) -> tuple[float, float]:
        return 1 / mesh.size, 5.0 if mesh.size > 1 and mesh.size in asked and layer not in unknown else 1.0

    exact = search(8, cluster(2, 2), cost, 16, "1f1b", least=least)
    often = len(asked)
    asked.clear()
    assert search(8, cluster(2, 2), cost, 16, "1f1b", least=least, overhead=overhead) == exact
    assert len(asked) < 0.7 * often


def test_what_quick_bounds_exclude_is_not_asked_for() -> None:
    """Stages on two devices would be the best, but for what the bound tells."""
    asked: list[int] = []

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost:
        asked.append(mesh.size)
        return StageCost((span[1] - span[0]) / mesh.size * (5 if mesh.size > 1 else 1.2), 0.0, 0.0)

    def bound(span: Span, mesh: Mesh, held: int) -> StageCost:
        return StageCost((span[1] - span[0]) / mesh.size * (4 if mesh.size > 1 else 1.1), 0.0, 0.0)

    def least(span: Span, mesh: Mesh) -> StageCost:
        return StageCost((span[1] - span[0]) / mesh.size, 0.0, 0.0)

    exact = search(8, cluster(2, 2), cost, 16, "1f1b", least=least)
    assert 2 in asked
    asked.clear()
    assert search(8, cluster(2, 2), cost, 16, "1f1b", least=least, bound=bound) == exact
    assert set(asked) == {1}


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


def test_only_useful_stages_are_priced() -> None:
    """Two stages over two layers of a (1, 1, 1) cluster: (0,1) on 1 or 2 devices, (1,2) on the rest, and no other."""
    asked = set()

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost:
        asked.add((span, mesh.devices, held))
        return StageCost(1.0, 0.0, 0.0)

    search(2, cluster(1, 1, 1), cost, 4, "1f1b", num_stages=2)
    assert asked == {((0, 1), (0,), 2), ((0, 1), (0, 1), 2), ((1, 2), (2,), 1), ((1, 2), (1, 2), 1)}


def test_nothing_is_priced_where_a_layer_fits_nowhere() -> None:
    """The last layer does not."""
    asked = []

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost | None:
        asked.append(span)
        return StageCost(1.0, 0.0, 0)

    def least(span: Span, mesh: Mesh) -> StageCost | None:
        return None if span[1] == 4 else StageCost(1.0, 0.0, 0)

    assert search(4, cluster(4), cost, 4, "1f1b", least=least) is None
    assert asked == []


def test_good_plans_save_calls() -> None:
    """A stage that alone takes longer than the best plan so far is not continued.

    All layers on all devices take 4 s in all with m = 4; on fewer devices, every layer takes 100 s.
    """
    asked = []

    def least(span: Span, mesh: Mesh) -> StageCost:
        return StageCost(1.0 if mesh.size == 4 else 100.0, 0.0, 0)

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost:
        asked.append(held)
        return least(span, mesh)

    plan = search(4, cluster(4), cost, 4, "1f1b", least=least)
    assert plan is not None
    assert plan.step_time == 4.0
    assert set(asked) == {1}  # stages with another one behind them would hold 2


@pytest.mark.parametrize(("name", "m"), [(n, m) for n in ("gpipe", "1f1b") for m in (1, 2, 3, 5)])
def test_in_flight_is_that_of_the_schedule(name: ScheduleName, m: int) -> None:
    for number in range(1, 6):
        timeline = make_schedule(name, number, m)
        for stage in range(number):
            assert in_flight(name, m, number - stage) == timeline.in_flight(stage)


@pytest.mark.parametrize(
    ("start", "size", "shapes"),
    [
        (0, 1, [(1,)]),
        (3, 2, [(2,)]),
        (1, 4, [(4,), (2, 2)]),
        (2, 3, [(3,)]),  # divides 6
        (0, 5, []),  # neither divides 6 nor is a power of two
        (0, 6, [(6,), (2, 3), (3, 2)]),
        (4, 4, []),  # over the border of a host
        (6, 2, [(2,)]),
        (0, 8, [(8,), (2, 4), (4, 2)]),  # hosts 0 and 1
        (6, 8, [(8,), (2, 4), (4, 2)]),  # hosts 1 and 2
        (6, 3, []),  # a host and a half
        (8, 4, [(4,), (2, 2)]),
        (0, 14, [(14,), (2, 7), (7, 2)]),
        (8, 7, []),
        (14, 1, []),
        (0, 0, []),
    ],
)
def test_candidate_shapes(start: int, size: int, shapes: list[tuple[int, ...]]) -> None:
    """Hosts of 6, 2 and 6 devices: 0-5, 6-7, 8-13."""
    assert list(candidate_shapes(cluster(6, 2, 6), start, size)) == shapes
    meshes = [mesh_at(start, shape) for shape in shapes]
    for mesh in meshes:
        assert mesh.devices == tuple(range(start, start + size))
        assert mesh.axes == ("x", "y")[: len(mesh.shape)]
    for mesh in meshes[1:]:
        assert mesh.group(("y",)) == tuple(range(start, start + mesh.shape[1]))


@pytest.mark.parametrize("number", [-1, 0, 4])
def test_impossible_number_of_stages(number: int) -> None:
    with pytest.raises(PlanError, match=rf"num_stages={number}, but there are 3 layers and 4 devices.*choose 1 to 3"):
        search(3, cluster(4), lambda span, mesh, held: None, 4, "1f1b", num_stages=number)


def test_impossible_number_of_stages_for_one_layer() -> None:
    message = "num_stages=2, but there is 1 layer and 4 devices, and each stage needs one of both: choose 1 stage"
    with pytest.raises(PlanError, match=message):
        search(1, cluster(4), lambda span, mesh, held: None, 4, "1f1b", num_stages=2)


def test_shapes_can_be_restricted() -> None:
    def one_dimensional(where: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        return candidate_shapes(where, start, size)[:1]

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost:
        assert len(mesh.shape) == 1
        return StageCost(1.0, 0.0, 0)

    assert search(2, cluster(4, 4), cost, 4, "gpipe", shapes=one_dimensional) is not None


@pytest.mark.parametrize("hosts", [130, 315, 384, 1024])
def test_thousands_of_devices(hosts: int) -> None:
    """Layers of like work: stages of like numbers of hosts, each asked for once."""
    asked: Counter[tuple[Span, int, int]] = Counter()

    def cost(span: Span, mesh: Mesh, held: int) -> StageCost | None:
        asked[span, mesh.size, held] += 1
        if mesh.size > 8 * hosts // 3:  # as if it had no more examples to split
            return None
        return StageCost((span[1] - span[0]) / mesh.size, 0.0, 1.0)

    def least(span: Span, mesh: Mesh) -> StageCost:
        return StageCost((span[1] - span[0]) / mesh.size, 0.0, 0.0)

    plan = search(
        12, cluster(*(8,) * hosts), cost, 512, "1f1b", shapes=lambda where, start, size: ((size,),) if size else (),
        least=least, alike=lambda start, size: size,
    )  # fmt: skip
    assert plan is not None
    devices = [d for stage in plan.stages for d in stage.mesh.devices]
    assert devices == list(range(8 * hosts))
    perfect = 512 * 12 / (8 * hosts)  # without a bubble
    assert plan.step_time < 1.15 * perfect
    assert max(asked.values()) == 1


def test_groups_of_mixed_hosts_begin_where_hosts_differ() -> None:
    """Units of several hosts never have hosts of both kinds, if the kinds' numbers allow it."""
    slow = Host(DeviceKind("slow", 1, 1.0, {}, 1.0, 1.0, 0.0, 0.0), 8, LINK)
    fast = Host(KIND, 8, LINK)
    mixed = Cluster("mixed", (slow,) * 96 + (fast,) * 192, LINK)
    seen: set[tuple[int, int]] = set()

    def shapes(where: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        seen.add((start, start + size))
        return ((size,),)

    search(2, mixed, lambda span, mesh, held: StageCost(1.0, 0.0, 1.0), 4, "1f1b", shapes=shapes)
    borders = {at for group in seen for at in group}
    assert borders == set(range(0, 288 * 8 + 1, 2 * 8))
    assert 96 * 8 in borders
