"""What candidates come to, where the costs of stages are given."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.ir.mesh import Mesh
from autopar.ir.method import AUTO, Method
from autopar.ir.schedule import ScheduleName
from autopar.passes.batch import BatchAnalysis
from autopar.passes.stage_oracle import StageCost
from autopar.passes.submeshes import mesh_at
from autopar.planning.candidate import Candidate, Incumbent
from autopar.planning.evaluator import Evaluator, OutOfTime
from autopar.planning.layering import Layered
from autopar.planning.parts import Part
from autopar.planning.planner import Planner
from autopar.planning.stage_costs import StageCosts
from tests import models
from tests.planned import analyse, cluster_of

_CLUSTER = cluster_of(2, 2)
Seconds = Callable[[int, Mesh, int], float]  # layers, mesh, microbatches -> of a microbatch at a stage


@functools.cache
def _analysis() -> BatchAnalysis:
    params = {"layers": [{"w": jnp.zeros((256, 256)), "b": jnp.zeros(256)}] * 4}
    batch = dict.fromkeys("xy", jnp.zeros((64, 256)))
    return analyse(models.sgd(models.mlp_loss), models.sgd_state(params), batch)


class GivenCosts(StageCosts):
    """Seconds of a function, and half of them at least. Notes what was asked for at all."""

    seconds: Seconds
    asked: list[tuple[tuple[int, int], Mesh]]

    def _cost(self, layered: Layered, span: tuple[int, int], mesh: Mesh, share: float) -> StageCost:
        return StageCost(share * self.seconds(span[1] - span[0], mesh, layered.step.num_microbatches), 0.0, 0.0)

    def cost(
        self, layered: Layered, schedule: ScheduleName, span: tuple[int, int], mesh: Mesh, in_flight: int
    ) -> StageCost | None:
        return self._cost(layered, span, mesh, 1.0)

    def bound(
        self, layered: Layered, schedule: ScheduleName, span: tuple[int, int], mesh: Mesh, in_flight: int
    ) -> StageCost | None:
        return self._cost(layered, span, mesh, 0.5)

    def least(self, layered: Layered, span: tuple[int, int], mesh: Mesh) -> StageCost | None:
        self.asked.append((span, mesh))
        return self._cost(layered, span, mesh, 0.5)

    def overhead(self, layered: Layered, layer: int, mesh: Mesh) -> tuple[float, float]:
        return 1.0, 1.0

    def least_of_pipelines(self, layered: Layered) -> float:
        return 10.0


def evaluator_of(seconds: Seconds, method: Method = AUTO) -> tuple[Evaluator, GivenCosts]:
    found = Evaluator(_analysis(), _CLUSTER, method)
    costs = GivenCosts(found.prices, method)
    costs.seconds, costs.asked = seconds, []
    found.stages = costs
    return found, costs


def test_the_stages_that_take_least() -> None:
    # Four layers of 8 / n seconds on n devices of one host, and of 8 on two hosts: a stage for each host, of 2 layers.
    def seconds(layers: int, mesh: Mesh, m: int) -> float:
        return layers * 8.0 / m if mesh.size > 2 else layers * 8.0 / mesh.size / m

    evaluator, _ = evaluator_of(seconds)
    found = evaluator.estimate(Candidate(8))
    assert found is not None
    assert [(stage.span, stage.mesh.devices) for stage in found.stages] == [((0, 2), (0, 1)), ((2, 4), (2, 3))]
    assert found.step_time == 2 * 1.0 + 7 * 1.0  # 1 second of a microbatch at each stage
    # All devices as one stage: 4 layers of 8 seconds.
    one = evaluator.estimate(Candidate(8, 1))
    assert one is not None and one.step_time == 4 * 8.0
    # Nothing is quicker than what it must be quicker than.
    assert evaluator.estimate(Candidate(8), below=9.0) is None


def test_interleaved_stages_wait_less() -> None:
    evaluator, _ = evaluator_of(lambda layers, mesh, m: layers * 8.0 / mesh.size / m)
    plain = evaluator.estimate(Candidate(4, 2))
    dealt_out = evaluator.estimate(Candidate(4, 2, rounds=2))
    assert plain is not None and dealt_out is not None
    # 2 seconds of a microbatch at each of 2 stages: a bubble of 2, or of 1.
    assert (plain.step_time, dealt_out.step_time) == (2 + 4 * 2.0, 1 + 4 * 2.0)


def test_pipelines_that_compute_too_long_are_vain() -> None:
    """With more microbatches than those of which it is known, and by what is known alone."""
    evaluator, costs = evaluator_of(lambda layers, mesh, m: 100.0)
    assert not evaluator.is_vain(8, None, 5.0)
    assert evaluator.estimate(Candidate(8, 2), below=5.0) is None
    assert evaluator.is_vain(8, None, 5.0) and evaluator.is_vain(16, None, 5.0)
    assert not evaluator.is_vain(4, None, 5.0)
    assert not evaluator.is_vain(8, 1, 5.0)  # one stage is no pipeline
    assert not evaluator.is_vain(8, None, 20.0)  # they take 10 seconds at least
    costs.asked.clear()
    assert evaluator.estimate(Candidate(16, 2), below=5.0) is None
    assert not costs.asked
    assert evaluator.estimate(Candidate(4, 2), below=5.0) is None
    assert costs.asked
    without = dataclasses.replace(AUTO, without=frozenset({Part.BOUND_OF_PIPELINES}))
    evaluator, _ = evaluator_of(lambda layers, mesh, m: 100.0, without)
    assert evaluator.estimate(Candidate(8, 2), below=5.0) is None
    assert not evaluator.is_vain(8, None, 5.0)


def test_what_is_better_is_what_others_must_beat() -> None:
    evaluator = Evaluator(_analysis(), _CLUSTER, AUTO)
    first = evaluator.outcome(Candidate(8, 2))
    assert first.is_better and first.finished is not None
    assert evaluator.best.step_time == first.finished[0].step_time
    assert evaluator.best.of_equal_groups is first.finished[0]
    again = evaluator.outcome(Candidate(8, 2))
    assert not again.is_better and again.better is None


@pytest.mark.parametrize("objective", ["step", "microbatch"])
def test_memory_is_dear_where_more_of_it_would_save_time(objective: Any) -> None:
    params = {"layers": [{"w": jnp.zeros((256, 256)), "b": jnp.zeros(256)}] * 4}
    batch = dict.fromkeys("xy", jnp.zeros((4096, 256)))
    analysis = analyse(models.sgd(models.mlp_loss), models.sgd_state(params), batch)
    one_host = cluster_of(1, 4, flops=1e10, memory_bandwidth=1e11, link=1e8, latency=1e-6, launch=1e-6)
    method = dataclasses.replace(recipes.auto(remat=False), objective=objective)
    mesh, seconds, dear, needed = mesh_at(0, (4,)), {}, {}, math.inf
    for m in (1, 2, 4, 8):
        roomy = Evaluator(analysis, one_host, method)
        pipeline, finished = roomy.estimate(Candidate(m, 1)), roomy.outcome(Candidate(m, 1)).finished
        assert pipeline is not None and finished is not None
        assert not roomy.is_memory_dear(m, mesh)
        seconds[m], needed = pipeline.step_time, min(needed, finished[0].peak_memory)
    for m in seconds:
        tight = Evaluator(analysis, one_host, dataclasses.replace(method, memory_limit=int(needed)))
        pipeline = tight.estimate(Candidate(m, 1))
        dear[m] = tight.is_memory_dear(m, mesh)
        assert dear[m] == (pipeline is None or pipeline.step_time > 1.015 * seconds[m])
    assert set(dear.values()) == {True, False}


def test_layers_of_its_own_share_the_best_plan() -> None:
    """What one is quicker than, the other must beat."""
    evaluator = Evaluator(_analysis(), _CLUSTER, AUTO)
    assert evaluator.num_layers(Candidate(8, num_layers=2)) == 2
    assert evaluator.num_layers(Candidate(8)) == 4
    whole = evaluator.outcome(Candidate(8, 2))
    assert whole.finished is not None
    assert evaluator.outcome(Candidate(8, 2, num_layers=2)).finished is None
    # Also one that was made before, when another plan becomes the best.
    evaluator.best = Incumbent()
    assert evaluator.outcome(Candidate(8, 2, num_layers=2)).is_better
    evaluator.best = Incumbent(step_time=0.0, estimate=0.0, first_estimate=0.0)
    assert evaluator.outcome(Candidate(8, 2, num_layers=2)).finished is None


def test_equal_stages_of_a_shape() -> None:
    evaluator = Evaluator(_analysis(), _CLUSTER, AUTO)
    found = evaluator.outcome(Candidate(8, 4, mesh_shape=(1,))).finished
    assert found is not None
    assert [stage.mesh.shape for stage in found[0].stages] == [(1,)] * 4
    assert evaluator.outcome(Candidate(8, 3, mesh_shape=(1,))) == (None, False)  # of 4 devices


def test_one_stage_on_a_given_mesh() -> None:
    """Whatever it is expected to take, even if one stage on another mesh was planned before."""
    evaluator = Evaluator(_analysis(), _CLUSTER, AUTO)
    mesh = mesh_at(0, (4,))
    assert evaluator.outcome(Candidate(1, 1)).is_better
    evaluator.best = Incumbent(step_time=1e3, estimate=0.0)
    found = evaluator.outcome(Candidate(1, 1, mesh=mesh))
    assert found.is_better and found.finished is not None
    plan = found.finished[0]
    assert [(stage.mesh, stage.layers) for stage in plan.stages] == [(mesh, (0, 4))]
    assert evaluator.best.step_time == plan.step_time
    assert evaluator.best.estimate == evaluator.seconds_on(1, mesh) == pytest.approx(plan.step_time, rel=0.02)
    # Found to be no quicker.
    evaluator.best = Incumbent(step_time=plan.step_time / 2, estimate=1e3)
    assert not evaluator.outcome(Candidate(1, 1, mesh=mesh)).is_better
    assert evaluator.best == Incumbent(step_time=plan.step_time / 2, estimate=1e3)


def test_one_stage_on_another_mesh_is_planned_where_it_is_expected_to_be_quicker() -> None:
    planner = Planner(_analysis(), _CLUSTER, AUTO)
    best, _ = planner.plan(1)
    mesh = mesh_at(0, (4,))
    planner.evaluator.best = Incumbent(best.step_time, estimate=0.0)
    assert planner.better_on(mesh, 1) is None
    planner.evaluator.best = Incumbent(step_time=1e3, estimate=1e3)
    better = planner.better_on(mesh, 1)
    assert better is not None and better[0].stages[0].mesh == mesh


def test_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = Evaluator(_analysis(), _CLUSTER, recipes.auto(time_limit=100.0))
    evaluator.check_time()
    monkeypatch.setattr(time, "monotonic", lambda: math.inf)
    with pytest.raises(OutOfTime):
        evaluator.outcome(Candidate(8, 2))
