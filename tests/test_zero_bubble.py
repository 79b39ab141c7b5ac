"""Zero-bubble pipelines: gradients of parameters are computed where a stage would wait."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.ir.graph import Phase
from autopar.ir.instructions import Free, Run
from autopar.ir.plan import Plan
from autopar.ir.program import PlacedStep
from autopar.ir.schedule import ScheduleName, make_schedule, schedule_for
from autopar.passes.instruction_writer import _Writer
from autopar.planning.finisher import Finisher
from autopar.planning.planner import Planner
from tests.models import chain_loss, sgd
from tests.planned import analyse, cluster_of
from tests.test_interleaved import examples, init, loss_of, train_step

METHODS = {
    "4 stages": recipes.pipeline([(2, (2,))] * 4, 8, "zero-bubble"),
    "2 stages": recipes.pipeline([(4, (4,)), (4, (2, 2))], 4, "zero-bubble"),
    "more stages than microbatches": recipes.pipeline([(2, (2,))] * 4, 2, "zero-bubble"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scan", [False, True], ids=["layers", "scan"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_training_is_that_of_one_device(method: autopar.Method, scan: bool) -> None:
    step = autopar.parallelize(train_step, method=method)
    state, batch = init(scan, jax.random.key(0)), examples()
    plan = step.compile(jax.eval_shape(lambda: state), batch).plan
    assert plan.schedule == "zero-bubble"
    assert all(stage.weights > 0 for stage in plan.stages)
    assert "weights ms" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert step.plan(state, batch, method=plan) == plan  # restored
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


def test_one_stage_is_as_of_any_schedule() -> None:
    step = autopar.parallelize(train_step)
    state, batch = jax.eval_shape(lambda key: init(True, key), jax.random.key(0)), examples()
    fixed: dict[str, Any] = {"num_stages": 1, "num_microbatches": 4}
    plan, plain = (
        step.plan(state, batch, method=recipes.auto(schedule=schedule, **fixed)) for schedule in ("zero-bubble", "1f1b")
    )
    assert plan.stages == plain.stages
    assert plan.step_time == plain.step_time


def test_another_step_follows_the_state() -> None:
    step = autopar.parallelize(train_step, method=METHODS["2 stages"])
    state, batch = init(False, jax.random.key(0)), examples()
    step.compile(state, batch)
    evaluate = autopar.parallelize(lambda state, batch: loss_of(state["params"], batch), follow=step)
    mine = step.init(lambda key: init(False, key), jax.random.key(0))
    np.testing.assert_allclose(evaluate(mine, batch), loss_of(state["params"], batch), rtol=1e-5)


def test_every_operator_says_why() -> None:
    step = autopar.parallelize(train_step, method=METHODS["4 stages"])
    state, batch = init(False, jax.random.key(0)), examples()
    reasons = step.why(state, batch, where="dot_general", most=30)
    assert {why.phase for why in reasons} == {Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS}


def placed(scan: bool) -> PlacedStep:
    state = jax.eval_shape(lambda key: init(scan, key), jax.random.key(0))
    finisher = Finisher(analyse(train_step, state, examples()), cluster_of(1, 8), METHODS["4 stages"])
    layered = finisher.layering.layered(8, True)
    return finisher.layering.placed(layered, [2, 4, 6], "zero-bubble")[1]


@pytest.mark.parametrize("scan", [False, True], ids=["layers", "scan"])
def test_no_other_stage_waits_for_gradients_of_parameters(scan: bool) -> None:
    found = placed(scan)
    late = [p for p in found.programs if p.phase is Phase.WEIGHTS]
    assert {p.stage for p in late} == {0, 1, 2, 3}
    made = {v: p for p in late for v in p.outputs}
    assert not any(v in made for p in found.programs for v in p.inputs if made.get(v, p) is not p)
    totals = found.step.accumulate
    parameters = [v for v in totals if v.shape[-2:] == (16, 16)]
    assert parameters
    assert all(v in made for v in parameters)
    # What a stage sends back is there before: at no other place is a product of matrices for it alone.
    backward = [p for p in found.programs if p.phase is Phase.BACKWARD]
    sent = {v for p in found.programs for v in p.inputs if v in found.producer and found.stage_of(v) != p.stage}
    assert all(any(v in sent for v in p.outputs) for p in backward if p.stage)


def test_the_planner_finds_that_it_is_quicker() -> None:
    """Few microbatches: a large bubble."""
    layers = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 16
    batch = {name: jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for name in "xy"}
    cluster = autopar.load_preset("dgx-a100", num_hosts=4)
    step = autopar.parallelize(sgd(chain_loss))
    fixed: dict[str, Any] = {"pipeline": True, "num_microbatches": 8, "mesh_shape": (2, 4)}
    plan, plain, forced = (
        step.plan(layers, batch, cluster=cluster, method=recipes.auto(**fixed, schedule=schedule))
        for schedule in (None, "1f1b", "zero-bubble")
    )
    assert (plan.schedule, plain.schedule, forced.schedule) == ("zero-bubble", "1f1b", "zero-bubble")
    assert plan.step_time == forced.step_time < 0.96 * plain.step_time
    assert plan.bubble < plain.bubble
    spans = [stage.layers for stage in plain.stages]
    assert [stage.layers for stage in plan.stages] == spans
    # No stage has more microbatches in flight than the first one of 1F1B.
    assert plan.peak_memory <= 1.05 * plain.peak_memory


def test_it_is_found_where_one_stage_has_nothing_to_put_off() -> None:
    """A last layer without parameters, as long as the others."""

    def loss(layers: Any, batch: Any) -> Any:
        h = batch["x"]
        for w in layers:
            h = jnp.tanh(h @ w)
        return jnp.mean((jnp.einsum("bts,bsd->btd", jnp.einsum("btd,bsd->bts", h, h), h) - batch["y"]) ** 2)

    layers = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 3
    batch = {name: jax.ShapeDtypeStruct((16, 1024, 1024), jnp.float32) for name in "xy"}
    cluster = cluster_of(4, 1, flops=1e13, memory_bandwidth=1e12, link=1e11, network=1e11)
    fixed: dict[str, Any] = {"num_stages": 4, "num_microbatches": 4}
    step = autopar.parallelize(sgd(loss))
    plan, plain = (
        step.plan(layers, batch, cluster=cluster, method=recipes.auto(**fixed, schedule=schedule))
        for schedule in (None, "1f1b")
    )
    assert plan.schedule == "zero-bubble"
    assert plan.stages[-1].weights == 0 < plan.stages[0].weights
    assert plan.step_time < plain.step_time


def test_values_are_held_until_they_are_read_last() -> None:
    schedule = make_schedule("zero-bubble", 4, 8)
    for stage in range(4):
        held = schedule.held(stage)
        assert held[Phase.FORWARD, Phase.BACKWARD] == 4 - stage  # as of 1F1B
        assert held[Phase.FORWARD, Phase.WEIGHTS] == 4 == schedule.in_flight(stage)
        assert held[Phase.BACKWARD, Phase.WEIGHTS] == stage + 1
        assert schedule.shares(stage)[Phase.BACKWARD, Phase.WEIGHTS] == (stage + 1) / 4


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("scan", [False, True], ids=["layers", "scan"])
def test_as_many_values_are_held_as_instructions_hold(name: ScheduleName, scan: bool) -> None:
    state = jax.eval_shape(lambda key: init(scan, key), jax.random.key(0))
    method = recipes.pipeline([(2, (2,))] * 4, 8, name)
    _, lowered = Planner(analyse(train_step, state, examples()), cluster_of(1, 8), method).plan()
    schedule = schedule_for(name, [s.mesh for s in lowered.shardings], 8)
    writer = _Writer(lowered, schedule, frozenset())
    instructions = writer.run()
    key_of: dict[int, Any] = {register: key for key, register in writer.numbers.items()}
    made = {v: p.phase for p in lowered.placed.programs for v in p.outputs if p.in_loop}
    checked = 0
    for stage in range(4):
        held = schedule.held(stage)
        read = {v: p.phase for p in lowered.placed.programs if p.in_loop and p.stage == stage for v in p.inputs}
        here: dict[Any, int] = defaultdict(int)
        most: dict[Any, int] = defaultdict(int)
        for instruction in instructions.of_stages({stage}):
            match instruction:
                case Run(outputs=registers):
                    keys = [key_of[r] for r in registers]
                    values = [key[1] for key in keys if key[3] is not None]
                    for v in values:
                        here[v] += 1
                        most[v] = max(most[v], here[v])
                case Free(registers=registers):
                    for key in (key_of[r] for r in registers):
                        if key[1] in here and key[3] is not None:
                            here[key[1]] -= 1
        for v, number in most.items():
            if v in read:
                checked += 1
                assert number == held[made[v], read[v]]
    assert checked > 8
