"""What the stage search asks its oracle, and what it finds out without asking."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.schedule import ScheduleName, make_schedule
from autopar.passes.stage_oracle import Span, StageCost, in_flight
from tests.passes.oracles import cluster, search


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
