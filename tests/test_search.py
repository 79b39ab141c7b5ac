"""The search for a plan: what it tries, what it need not try, and what its planners share."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.cost_model.fusion import memory_traffic
from autopar.cost_model.hardware import load_preset
from autopar.errors import InfeasiblePlanError
from autopar.ir.local import Compute
from autopar.ir.mesh import XLA_FOR_GPUS, Mesh
from autopar.ir.method import AUTO
from autopar.passes.batch import BatchAnalysis
from autopar.passes.intra_op import traffic
from autopar.passes.intra_op.traffic import KnownTraffic
from autopar.passes.submeshes import mesh_at
from autopar.planning.evaluator import Evaluator
from autopar.planning.finisher import Finisher
from autopar.planning.garbage import uncollected
from autopar.planning.layering import Layered
from autopar.planning.planner import Planner
from tests import models
from tests.planned import analyse, cluster_of
from tests.small_steps import rows, sgd, weights

_SMALL = cluster_of(1, 4, flops=1e10, memory_bandwidth=1e11, link=1e9, latency=1e-6, launch=1e-6)


def _mlp(layers: int, width: int = 64, batch: int = 64) -> BatchAnalysis:
    params = {"layers": [{"w": jnp.zeros((width, width)), "b": jnp.zeros(width)}] * layers}
    examples = dict.fromkeys("xy", jnp.zeros((batch, width)))
    return analyse(models.sgd(models.mlp_loss), models.sgd_state(params), examples)


def test_one_stage_has_more_microbatches_where_it_needs_more_memory_than_was_counted() -> None:
    """And is tried before pipelines, so that those which take longer are not."""
    tried: list[tuple[int, int]] = []  # stages, microbatches

    def finish(self: Finisher, layered: Layered, placed: Any, meshes: Sequence[Mesh], *rest: Any, **kw: Any) -> Any:
        tried.append((len(meshes), layered.step.num_microbatches))
        return None if tried[-1] == (1, 1) else finished(self, layered, placed, meshes, *rest, **kw)

    finished = Finisher.finish
    with mock.patch.object(Finisher, "finish", finish):
        plan, _ = Planner(_mlp(4), _SMALL, recipes.auto(baselines=False)).plan()
    assert (len(plan.stages), plan.num_microbatches) == (1, 2)
    assert tried[:2] == [(1, 1), (1, 2)]
    assert len(set(tried)) == len(tried)  # each once


def test_a_recipe_has_more_microbatches_where_it_needs_more_memory_than_was_counted() -> None:
    def finish(self: Finisher, layered: Layered, *rest: Any, **kw: Any) -> Any:
        return None if layered.step.num_microbatches < 4 else finished(self, layered, *rest, **kw)

    finished = Finisher.finish
    planner = Planner(_mlp(4, 256, 512), _SMALL, recipes.auto(baselines=False, num_stages=4))
    planner.plan(1)
    rival = planner.beside(recipes.zero(1, None))
    with mock.patch.object(Finisher, "finish", finish):
        found = planner.better_by(rival, fewest=1)
        assert found is not None
        assert found[0].num_microbatches == 4
        assert planner.better_by(planner.beside(recipes.zero(1, None)), 1) is None


@pytest.mark.parametrize("network", [1e7, 1e9])
@pytest.mark.parametrize("layers", [3, 8])
def test_pipelines_that_compute_too_long_with_fewer_microbatches_are_not_missed(layers: int, network: float) -> None:
    """What is not built is no better: the plan is the same where all is."""
    cluster = cluster_of(2, 2, flops=1e11, memory_bandwidth=1e10, link=1e9, network=network, launch=1e-6)
    method = recipes.auto(baselines=False)
    left_out: list[bool] = []

    def is_vain(self: Evaluator, *asked: Any) -> bool:
        left_out.append(told(self, *asked))
        return left_out[-1]

    told = Evaluator.is_vain
    with mock.patch.object(Evaluator, "is_vain", is_vain):
        plan, _ = Planner(_mlp(layers, 128), cluster, method).plan()
    with mock.patch.object(Evaluator, "is_vain", mock.Mock(return_value=False)):
        whole, _ = Planner(_mlp(layers, 128), cluster, method).plan()
    assert plan == whole
    assert any(left_out)


def test_planners_of_one_step_share_what_no_method_changes() -> None:
    planner = Planner(_mlp(4, 256, 512), cluster_of(2, 2), AUTO)
    rival = planner.beside(recipes.data_parallel(None))
    assert rival.evaluator.layering.layered(2, False) is planner.evaluator.layering.layered(2, False)
    assert rival.evaluator.prices is planner.evaluator.prices
    assert planner.beside(recipes.auto(memory_limit=2**20)).evaluator.prices is not planner.evaluator.prices
    in_three = Evaluator(planner.analysis, planner.cluster, AUTO, 3, planner.evaluator)
    assert in_three.layering.layered(2, False) is not planner.evaluator.layering.layered(2, False)


def test_numbers_of_microbatches_that_give_devices_whole_parts_of_the_batch() -> None:
    """Where norms are taken of parts of 16 examples, a device that has a whole one need ask no other."""

    def train_step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = (x @ w).reshape(24, 16, 32)
            h = (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1e-6)
            return jnp.mean(jax.nn.relu(h) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    analysis = analyse(train_step, jnp.zeros((32, 32)), jnp.zeros((384, 32)), batch_axes=(None, 0))
    assert analysis.most_microbatches == 24
    assert Planner(analysis, cluster_of(1, 8)).evaluator.space.many == [24, 8, 4, 3, 2]
    assert Planner(analysis, cluster_of(1, 1)).evaluator.space.many == [24, 8, 4, 2]


def test_one_stage_in_any_memory_takes_no_longer_than_in_what_there_is() -> None:
    planner = Planner(_mlp(4, 256), cluster_of(1, 4, memory=3 * 2**20, link=1e9), AUTO)
    mesh = mesh_at(0, (4,))
    for m in (1, 4, 16):
        layered = planner.evaluator.layering.layered(m, False)
        least = planner.evaluator.stages.least_of_one(layered, mesh)
        free = planner.evaluator.stages.in_any_memory(layered, mesh)
        cost = planner.evaluator.stages.cost(layered, "1f1b", (0, layered.num_layers), mesh, 1)
        assert cost is not None
        assert least <= free <= 1.02 * (m * cost.per_microbatch + cost.per_step)


def test_garbage_is_looked_for_again_after_planning() -> None:
    seen: list[bool] = []

    @uncollected()
    def look() -> None:
        seen.append(gc.isenabled())
        raise InfeasiblePlanError("no plan")

    assert gc.isenabled()
    with pytest.raises(InfeasiblePlanError):
        look()
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


GARBAGE = """
import gc, weakref
from autopar.planning.garbage import uncollected

class Weak:
    pass

frozen = gc.get_freeze_count()
with uncollected():
    made = [[number] for number in range(100_000)]
assert len(gc.get_objects(generation=0)) < len(made)
assert gc.get_freeze_count() == frozen
assert gc.is_tracked(made[0])
cycle = made[0]
cycle.append(cycle)
known = weakref.ref(made_of := Weak())
cycle.append(made_of)
del made, cycle, made_of
gc.collect()
assert known() is None  # it is collected all the same
"""


def test_what_planning_leaves_is_old_garbage() -> None:
    """Else the next search, of what is young, would go through all of it at once.

    In another process: here each search would go through what all tests before have left.
    """
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("layers", [2, 6])
def test_programs_that_do_the_same_have_the_same_traffic(layers: int) -> None:
    """Updates of layers, forward and backward passes of alike layers, and all of that in other microbatches."""
    planner = Planner(_mlp(layers), _SMALL, recipes.auto(), num_layers=layers)
    known = KnownTraffic()
    looked = 0
    with mock.patch.object(traffic, "memory_traffic", wraps=memory_traffic) as asked:
        for m in (1, 2, 4):
            layered = planner.evaluator.layering.layered(m, True)
            for program in layered.finest.programs:
                looked += 1
                found = known.of(program, layered.rules, XLA_FOR_GPUS)
                expected = memory_traffic(program.equations, layered.rules, program.inputs, program.outputs)
                assert found == expected
                assert {k: one.kernel for k, one in found.items()} == {k: one.kernel for k, one in expected.items()}
    assert asked.call_count < looked


def test_stages_with_the_same_layers_have_the_same_local_traffic() -> None:
    """Of eight stages the first and the last differ; pieces of other shapes are looked at by themselves."""
    cluster = cluster_of(1, 8, flops=1e10, memory_bandwidth=1e11, link=1e9, latency=1e-6, launch=1e-6)
    with mock.patch.object(traffic, "memory_traffic", wraps=memory_traffic) as asked:
        _, lowered = Planner(_mlp(8), cluster, recipes.pipeline([(1, (1,))] * 8, 8)).plan()
        looked = asked.call_count
        program = lowered.programs[1].program
        halves = {v: (v.shape[0] // 2, *v.shape[1:]) for v in program.inputs if v.shape}
        known = KnownTraffic()
        for shapes in ({}, halves, {}, halves):
            known.of(program, lowered.rules, XLA_FOR_GPUS, shapes)
        assert asked.call_count == looked + 2
    computing = [local for local in lowered.programs if local.program.equations]
    assert len(computing) >= 23
    assert looked < len(computing)  # while stages were solved, and while they were lowered
    for local in computing:
        sharding = lowered.shardings[local.program.stage]
        ops = {op.equation.id: op.traffic for op in local.ops if isinstance(op, Compute)}
        shapes = {port.value: port.sharding.local_shape(port.value.shape, sharding.mesh) for port in local.inputs}
        program = local.program
        expected = memory_traffic(program.equations, lowered.rules, program.inputs, program.outputs, shapes=shapes)
        assert ops.items() <= expected.items()


@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("is_free", [True, False])
def test_what_a_phase_gathers_for_several_readers_it_gathers_once(times: int, is_free: bool) -> None:
    """Forward and backward: what is estimated is what is priced, with one layer or the same one several times."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for _ in range(times):
            x = x @ params["w"]
        return ((x - batch["y"]) ** 2).mean()

    batch = dict.fromkeys("xy", jnp.zeros((64, 128)))
    graph = analyse(models.sgd(loss), models.sgd_state({"w": jnp.zeros((128, 128))}), batch)
    # So fast are the devices and so slow are the links that nothing but what is sent counts.
    cluster = cluster_of(1, 4, flops=1e15, memory_bandwidth=1e15, link=1e6, latency=1e-9, launch=1e-12)
    planner = Planner(graph, cluster, recipes.auto(baselines=False) if is_free else recipes.zero(3, None))
    plan, _ = planner.plan(1)
    layered = planner.evaluator.layering.layered(1, False)
    cost = planner.evaluator.stages.cost(layered, "1f1b", (0, layered.num_layers), mesh_at(0, (4,)), 1)
    assert cost is not None
    assert cost.per_microbatch + cost.per_step == pytest.approx(plan.step_time, rel=1e-3)


@pytest.mark.parametrize("memory", [1.5, 3.0])
def test_microbatches_that_need_nothing_computed_again_are_found_behind_some_that_do(memory: float) -> None:
    """A number of them in between takes longer than fewer: there is still too little memory to keep all."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer in params:
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    up, down, rows = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 4096), (4096, 1024), (65536, 1024)))
    params, batch = [{"up": up, "down": down}] * 8, {"x": rows, "y": rows}
    cluster = load_preset("p3.16xlarge", num_hosts=1, devices_per_host=1)
    step = autopar.parallelize(models.sgd(loss), cluster=cluster)
    free, kept = (
        step.plan(params, batch, method=recipes.auto(memory_limit=int(memory * 2**30), remat=remat))
        for remat in (None, False)
    )
    assert free.step_time <= kept.step_time


@pytest.mark.parametrize("size", [1, 16])
def test_one_possible_number_of_microbatches_on_several_hosts(size: int) -> None:
    """One example, or examples that are coupled."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, g = jax.value_and_grad(lambda w: jnp.mean((x @ w - jnp.mean(x @ w, 0)) ** 2))(w)
        return w - 0.1 * g, value

    arguments = jnp.ones((8, 8)), jnp.ones((size, 8))
    plan = autopar.parallelize(step).plan(*arguments, cluster=autopar.load_preset("dgx-a100", num_hosts=2))
    assert plan.num_microbatches == 1


def test_more_hosts_than_layers() -> None:
    """A stage per host is impossible."""
    method = recipes.auto(baselines=False)
    plan = autopar.parallelize(sgd, method=method).plan(
        weights(), rows(), cluster=autopar.load_preset("dgx-a100", num_hosts=8)
    )
    assert sum(stage.mesh.size for stage in plan.stages) == 64
    assert len(plan.stages) < 8
