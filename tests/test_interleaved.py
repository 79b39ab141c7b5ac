"""Interleaved pipelines: each mesh has several stages, with those of the others between them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.errors import PlanError
from autopar.ir.plan import Plan, StagePlan
from autopar.planning.candidate import Candidate
from autopar.planning.neighbours import interleaved
from autopar.planning.planner import Planner, better_plans
from autopar.planning.search_space import has_room
from autopar.planning.state import State
from tests.models import chain_loss, sgd
from tests.planned import analyse, cluster_of

VOCABULARY, WIDTH, LAYERS, BATCH, TIME = 32, 16, 8, 16, 4
OPTIMIZER = optax.adam(1e-2)


def init(scan: bool, key: jax.Array) -> Any:
    """A language model whose embedding is tied to its output: the first and the last stage share it."""
    emb, *keys = jax.random.split(key, 1 + LAYERS)
    layers = [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys]
    params = {"emb": jax.random.normal(emb, (VOCABULARY, WIDTH)), "layers": jnp.stack(layers) if scan else layers}
    return {"params": params, "opt": OPTIMIZER.init(params)}


def loss_of(params: Any, batch: Any) -> jax.Array:
    h = params["emb"][batch["x"]]
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            h = h + jnp.tanh(h @ w)
    else:
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, params["layers"])
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(h @ params["emb"].T, batch["y"])
    return losses.mean()


def train_step(state: Any, batch: Any) -> Any:
    loss, g = jax.value_and_grad(loss_of)(state["params"], batch)
    norm = optax.tree.norm(g)
    updates, opt = OPTIMIZER.update(g, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss, "norm": norm}


def examples() -> Any:
    x, y = jax.random.randint(jax.random.key(1), (2, BATCH, TIME), 0, VOCABULARY)
    return {"x": x, "y": y}


METHODS = {
    "2 meshes, 2 rounds": recipes.megatron(dp=2, tp=2, pp=2, num_microbatches=4, chunks=2),
    "2 meshes, 4 rounds": recipes.megatron(dp=1, tp=4, pp=2, num_microbatches=2, chunks=4),
    "4 meshes, 2 rounds": recipes.megatron(dp=2, tp=1, pp=4, num_microbatches=8, chunks=2),
    "uneven": recipes.pipeline([(1, (4,)), (2, (2, 2)), (1, (4,)), (2, (2, 2))], 4, "interleaved"),
    "in broken groups": recipes.pipeline([(1, (2,)), (1, (2,)), (1, (2,)), (1, (2,))] * 2, 2, "interleaved"),
}


TRAINED = [
    pytest.param(
        method, scan, marks=[] if scan == at % 2 else [pytest.mark.slow], id=f"{name}-{'scan' * scan or 'layers'}"
    )
    for at, (name, method) in enumerate(METHODS.items())
    for scan in (False, True)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("method", "scan"), TRAINED)
def test_training_is_that_of_one_device(method: autopar.Method, scan: bool) -> None:
    step = autopar.parallelize(train_step, method=method)
    state, batch = init(scan, jax.random.key(0)), examples()
    executable = step.compile(jax.eval_shape(lambda: state), batch)
    plan = executable.plan
    groups = len({stage.mesh.devices for stage in plan.stages})
    assert plan.schedule == "interleaved"
    assert len(plan.stages) > groups
    assert all(stage.mesh == plan.stages[i % groups].mesh for i, stage in enumerate(plan.stages))
    assert plan.num_devices == 8
    assert Plan.from_json(plan.to_json()) == plan
    wanted_state, wanted = state, {}
    mine = step.init(lambda key: init(scan, key), jax.random.key(0))
    got: Any = {}
    for _ in range(3):
        wanted_state, wanted = jax.jit(train_step)(wanted_state, batch)
        mine, got = step(mine, batch)
    np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=2e-5)
    np.testing.assert_allclose(got["norm"], wanted["norm"], rtol=2e-4)
    for x, y in zip(jax.tree.leaves(autopar.gather(mine)), jax.tree.leaves(wanted_state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5)


def test_another_step_follows_the_state() -> None:
    step = autopar.parallelize(train_step, method=METHODS["2 meshes, 2 rounds"])
    state, batch = init(False, jax.random.key(0)), examples()
    step.compile(state, batch)
    evaluate = autopar.parallelize(lambda state, batch: loss_of(state["params"], batch), follow=step)
    mine = step.init(lambda key: init(False, key), jax.random.key(0))
    np.testing.assert_allclose(evaluate(mine, batch), loss_of(state["params"], batch), rtol=1e-5)
    mine, _ = step(mine, batch)
    smaller = {name: x[: BATCH // 4] for name, x in batch.items()}
    wanted, _ = jax.jit(train_step)(state, batch)
    _, metrics = step(mine, smaller)  # other shapes: planned anew, where the state lies
    np.testing.assert_allclose(metrics["loss"], loss_of(wanted["params"], smaller), rtol=1e-4)


def test_a_plan_with_several_stages_a_device_counts_their_memory_together() -> None:
    step = autopar.parallelize(train_step)
    state, batch = init(False, jax.random.key(0)), examples()
    plan = step.plan(state, batch, method=METHODS["2 meshes, 2 rounds"])
    kind = plan.cluster.hosts[0].kind
    there = kind.memory - kind.memory_reserve
    for first in (0, 1):
        mine = plan.stages[first::2]
        for stage in mine:
            others = sum(other.memory.kept for other in mine if other is not stage)
            assert stage.memory.capacity == there - others
        assert plan.peak_memory >= sum(stage.memory.kept for stage in mine)
    enough = dataclasses.replace(METHODS["2 meshes, 2 rounds"], memory_limit=int(1.3 * plan.peak_memory))
    assert step.plan(state, batch, method=enough).peak_memory <= 1.3 * plan.peak_memory


def test_the_planner_interleaves_where_that_is_quicker() -> None:
    """Few microbatches: a large bubble. Gradients of parameters, a ninth of the work, would fill little of it."""

    def loss(layers: Any, batch: Any) -> Any:
        h = batch["x"]
        for w in layers:
            h = jnp.tanh(jnp.einsum("bts,bsd->btd", jnp.einsum("btd,bsd->bts", h, h), h) @ w)
        return jnp.mean((h - batch["y"]) ** 2)

    layers = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 16
    batch = {name: jax.ShapeDtypeStruct((32, 2048, 2048), jnp.float32) for name in "xy"}
    cluster = autopar.load_preset("dgx-a100", num_hosts=4)
    step = autopar.parallelize(sgd(loss))
    fixed: dict[str, Any] = {"pipeline": True, "num_microbatches": 4, "mesh_shape": (8,)}
    plan = step.plan(layers, batch, cluster=cluster, method=recipes.auto(**fixed))
    plain, other = (
        step.plan(layers, batch, cluster=cluster, method=recipes.auto(schedule=schedule, **fixed))
        for schedule in ("1f1b", "zero-bubble")
    )
    asked = step.plan(layers, batch, cluster=cluster, method=recipes.auto(num_stages=4, **fixed))
    assert (plan.schedule, plain.schedule, asked.schedule) == ("interleaved", "1f1b", "zero-bubble")
    assert len(plan.stages) > len(plain.stages) == len(asked.stages) == 4
    assert plan.step_time < min(asked.step_time, other.step_time)
    assert max(asked.step_time, other.step_time) < plain.step_time
    assert plan.bubble < plain.bubble
    assert step.plan(layers, batch, method=plan) == plan  # restored


def test_equal_stages_are_searched_for_as_if_they_were_interleaved() -> None:
    """So that a number of stages is found that is good only then."""
    state = jax.eval_shape(lambda key: init(True, key), jax.random.key(0))
    cluster, method = cluster_of(4, 1, memory=2**30, flops=1e10), recipes.auto()
    found, estimates = {}, {}
    for rounds in (1, 2):
        planner = Planner(analyse(train_step, state, examples()), cluster, method)
        equal = Candidate(4, 2, mesh_shape=(2,), rounds=rounds)
        better = planner.evaluator.outcome(equal).better
        assert better is not None
        found[rounds], estimates[rounds] = better[0], planner.evaluator.best.estimate
    assert (found[1].schedule, len(found[1].stages)) == ("1f1b", 2)
    assert (found[2].schedule, len(found[2].stages)) == ("interleaved", 4)
    # The bubble of one microbatch at the other stage is halved.
    assert 0.85 < estimates[2] / estimates[1] < 0.95


def test_interleaved_stages_have_fewer_microbatches_by_other_shardings() -> None:
    """As they are, there is no memory for them."""
    layers = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 16
    batch = {name: jax.ShapeDtypeStruct((16384, 4096), jnp.float32) for name in "xy"}
    cluster = autopar.load_preset("dgx-a100", num_hosts=4)
    analysis = analyse(sgd(chain_loss), layers, batch)
    plain, _ = Planner(analysis, cluster, recipes.auto(pipeline=True, mesh_shape=(8,), schedule="1f1b")).plan(16)
    tight = dataclasses.replace(recipes.auto(), memory_limit=int(1.1 * plain.peak_memory))

    def better_than_plain(fixed: int | None, estimate: float = math.inf) -> list[Plan]:
        planner = Planner(analysis, cluster, tight)
        planner.evaluator.best.step_time, planner.evaluator.best.estimate = plain.step_time, estimate
        state = State(planner.evaluator, fixed)
        state.plan = plain
        return [plan for plan, _ in better_plans(state, (interleaved,))]

    more, fewer = better_than_plain(None)
    assert (more.schedule, fewer.schedule) == ("interleaved", "interleaved")
    assert (more.num_microbatches, fewer.num_microbatches) == (16, 8)
    assert fewer.step_time < more.step_time < plain.step_time
    (stage, *_) = more.stages
    assert stage.memory.total + stage.memory.activations > stage.memory.capacity
    assert Planner(analysis, cluster, tight).evaluator.space.fewer(more) == 8  # tried all the same
    assert better_than_plain(16) == [more]
    # The stage search's estimate is not asked: it knows nothing of parts that are more even than whole stages.
    assert better_than_plain(16, estimate=0.0) == [more]


def test_fixed_interleaved_stages_have_few_microbatches_too() -> None:
    layers = [jax.ShapeDtypeStruct((8192, 8192), jnp.float32)] * 8
    batch = {name: jax.ShapeDtypeStruct((131072, 8192), jnp.float32) for name in "xy"}
    cluster = autopar.load_preset("dgx-a100", num_hosts=1)
    stages = [(2, (4,)), (2, (4,))] * 2
    step = autopar.parallelize(sgd(chain_loss))
    plan = step.plan(layers, batch, cluster=cluster, method=recipes.pipeline(stages, None, "interleaved"))
    more = step.plan(layers, batch, cluster=cluster, method=recipes.pipeline(stages, 32, "interleaved"))
    assert plan.num_microbatches < 32
    assert plan.step_time < more.step_time


def test_more_rounds_need_memory_for_more_microbatches_in_flight() -> None:
    state, batch = init(False, jax.random.key(0)), examples()
    plan = autopar.parallelize(train_step).plan(state, batch, method=recipes.pipeline([(4, (4,)), (4, (4,))], 4))
    assert has_room(plan, 2)

    def full(stage: StagePlan) -> StagePlan:
        return dataclasses.replace(stage, memory=dataclasses.replace(stage.memory, capacity=stage.memory.total))

    assert not has_room(dataclasses.replace(plan, stages=tuple(map(full, plan.stages))), 2)


def test_what_divides_a_loop_over_layers_is_tried() -> None:
    """Eight layers of a loop: two stages have them in two or four rounds, as twenty hosts have them in four stages."""
    step = jax.eval_shape(lambda key: init(True, key), jax.random.key(0))
    cluster = cluster_of(20, 2, memory=2**20, flops=1e12)
    space = Planner(analyse(train_step, step, examples()), cluster).evaluator.space
    assert list(space.rounds(2, 4)) == [2, 4]
    # An example for each host of a stage; one microbatch would be no pipeline.
    assert list(space.uniform(None)) == [(4, (5, 2), 2), (20, (2,), 16)]
    assert list(space.uniform(8)) == [(4, (5, 2), 8), (2, (10, 2), 8), (20, (2,), 8)]
    # Each device has twice as many examples in half as many microbatches.
    assert list(space.dividing(16)) == [16, 8, 4, 2]
    assert list(space.dividing(1)) == [1]
    unrolled = jax.eval_shape(lambda key: init(False, key), jax.random.key(0))
    space = Planner(analyse(train_step, unrolled, examples()), cluster).evaluator.space
    assert list(space.rounds(2, 4)) == [2, 3, 4]
    # Half of a bubble of 1 / 65 of the step is not worth it, half of 1 / 21 is; and that none waits for the slowest.
    assert list(space.rounds(2, 64)) == []
    assert list(space.rounds(2, 20)) == [2, 3, 4]
    assert list(space.rounds(2, 64, unevenness=0.02)) == [2, 3, 4]


def test_rounds_must_be_alike() -> None:
    state, batch = init(False, jax.random.key(0)), examples()
    for stages in ([(1, (4,)), (1, (4,)), (1, (4,))], [(1, (4,)), (1, (4,)), (1, (2, 2)), (1, (4,))]):
        method = recipes.pipeline(stages, 4, "interleaved")
        with pytest.raises(PlanError, match=r"each round of interleaved stages|its stages have 4 devices"):
            autopar.parallelize(train_step, method=method).plan(state, batch)
    with pytest.raises(PlanError, match=r"must be a multiple of pp=4"):
        recipes.megatron(dp=2, tp=1, pp=4, num_microbatches=6, chunks=2)
    with pytest.raises(PlanError, match=r"chunks=0.*positive integer"):
        recipes.megatron(dp=2, tp=1, pp=4, num_microbatches=6, chunks=0)
