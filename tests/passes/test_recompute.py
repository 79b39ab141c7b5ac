"""Rematerialisation that the planner chooses: what is computed again, what is kept, and that it pays where it shall."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import InfeasiblePlanError
from autopar.ir.graph import Block, Equation, Phase, StepGraph
from autopar.ir.plan import Plan
from autopar.passes.microbatch import split_batch
from autopar.passes.recompute import Forward, best_saved, recompute
from autopar.tracing.build import Builder, barrier
from tests.planned import analyse, cluster_of, plan_step
from tests.test_reshard_after_forward import step_of

LAYERS, WIDTH, BATCH = 6, 64, 64
FAST = {"flops": 1e12, "memory_bandwidth": 1e11, "link": 1e9}  # of a cluster on which many bytes take long


def layer(w: Any, x: Any) -> Any:
    return x + jnp.tanh(jnp.sin(x @ w["a"])) @ w["b"]


def arguments(wide: int = 4 * WIDTH) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.normal(size=s) / 16, jnp.float32) for s in ((WIDTH, wide), (wide, WIDTH)))
    return [{"a": a, "b": b}] * LAYERS, jnp.asarray(random.normal(size=(BATCH, WIDTH)), jnp.float32)


def graph(m: int = 1, step: Any = None) -> StepGraph:
    return split_batch(analyse(step or step_of(layer), *arguments(), batch_axes=(None, 0)), m)


def test_residuals_are_read_from_the_second_computation_behind_a_fence() -> None:
    step = graph(2)
    size = len(step.forward) // LAYERS
    block = Block(size, 2 * size)
    found, repeats = recompute(step, [block])
    forward = Forward(step)
    again = forward.rematerialization(block)
    assert again.residuals and set(repeats.values()) == {step.forward[i].id for i in again.equations}
    backward = [e for e in found.equations if e.phase is Phase.BACKWARD]
    read = {v for e in backward for v in e.values}
    assert not read & set(again.residuals)
    (fence,) = (e for e in backward if e.primitive is barrier())
    assert set(again.sources) <= set(fence.inputs)
    (tie,) = set(fence.inputs) - set(again.sources)  # a cotangent, which comes before
    assert any(tie in e.outputs for e in backward[: backward.index(fence)])
    assert not any(tie in e.values for e in backward[backward.index(fence) + 1 :])
    assert [e for e in found.equations if e.phase is Phase.FORWARD] == [
        e for e in step.equations if e.phase is Phase.FORWARD
    ]
    assert found.recomputed == (block,)


def test_what_comes_from_nothing_is_not_computed_again() -> None:
    step = graph(2)
    builder = Builder(step.next_value_id)
    closed = jax.make_jaxpr(lambda: jnp.full((3,), 2.0))()
    made = builder.inline(closed.jaxpr, closed.consts, [], phase=Phase.FORWARD)
    closed = jax.make_jaxpr(jnp.sin)(jnp.zeros(3))
    builder.inline(closed.jaxpr, closed.consts, made, phase=Phase.BACKWARD)
    ids = 1 + max(e.id for e in step.equations)
    first, last = (dataclasses.replace(e, id=ids + e.id) for e in builder.equations)
    batched = step.batched | {*first.outputs, *last.outputs}
    step = dataclasses.replace(step, equations=(first, *step.equations, last), batched=batched)
    found, repeats = recompute(step, [Block(0, 1)])
    assert not repeats
    assert found.equations == step.equations


def test_what_other_blocks_read_and_what_is_saved_is_kept() -> None:
    step = graph()
    size = len(step.forward) // LAYERS
    whole = Block(size, 2 * size)
    forward = Forward(step)
    residuals = forward.rematerialization(whole).residuals
    for v in residuals:
        saved = dataclasses.replace(whole, saved=(forward.place[v],))
        again = forward.rematerialization(saved)
        assert v not in again.residuals
        assert forward.place[v][0] not in again.equations
        assert forward.kept_bytes([saved]) == forward.kept_bytes([whole]) + v.nbytes
    handed_on = step.forward[2 * size - 1].outputs
    assert all(not forward.is_residual(v, whole) for v in handed_on)


def test_the_steps_own_rematerialisation_stays() -> None:
    step = graph(1, step_of(jax.checkpoint(layer)))
    forward = Forward(step)
    assert forward.kept_bytes([Block(0, len(step.forward))]) > 0.5 * forward.kept_bytes(())
    plan = plan_step(step_of(jax.checkpoint(layer)), arguments(), cluster_of(1, 2), recipes.auto(remat=True), 1).plan
    assert not any(stage.recomputed for stage in plan.stages)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_what_is_saved_is_the_best_there_is(share: float) -> None:
    step = graph()
    size = len(step.forward) // LAYERS
    block = Block(size, 2 * size)
    forward = Forward(step)
    random = np.random.default_rng(int(10 * share))
    seconds = dict(zip((e.id for e in step.forward), random.integers(1, 9, len(step.forward)).tolist(), strict=True))

    def cost(eqn: Equation) -> float:
        return float(seconds[eqn.id])

    whole = forward.rematerialization(block)
    budget = int(share * sum(v.nbytes for v in whole.residuals))
    values = [v for i in whole.equations for v in step.forward[i].outputs if forward.is_residual(v, block)]

    def time(saved: Any) -> float:
        again = forward.rematerialization(dataclasses.replace(block, saved=tuple(saved)))
        return sum(cost(step.forward[i]) for i in again.equations)

    fitting = [
        time(map(forward.place.__getitem__, some))
        for n in range(len(values) + 1)
        for some in itertools.combinations(values, n)
        if sum(v.nbytes for v in some) <= budget
    ]
    found = best_saved(forward, block, share, cost)
    assert sum(step.forward[i].outputs[k].nbytes for i, k in found) <= budget
    assert time(found) == min(fitting)


CASES = [(1, 1, 1), (1, 1, 4), (2, 2, 4), (2, 4, 4)]  # stages, devices, microbatches


@pytest.mark.parametrize(("stages", "devices", "m"), CASES)
def test_it_computes_the_same(stages: int, devices: int, m: int) -> None:
    args = arguments()
    method = recipes.auto(remat=True, num_stages=stages, baselines=False)
    planned = plan_step(step_of(layer), args, cluster_of(1, devices), method, m)
    assert any(stage.recomputed for stage in planned.plan.stages)
    outputs = planned.build(jax.devices()[:devices])(jax.tree.leaves(args))
    for found, expected in zip(outputs, jax.tree.leaves(jax.jit(step_of(layer))(*args)), strict=True):
        assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=1e-6)


def test_dropout_drops_the_same_again() -> None:
    def noisy(params: Any, x: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for i, w in enumerate(params):
                kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (BATCH, 4 * WIDTH))
                h = h + jnp.where(kept, jnp.tanh(jnp.sin(h @ w["a"])), 0.0) @ w["b"]
            return (h**2).mean()

        value, g = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, g), value

    args = (*arguments(), jax.random.key(1))
    planned = plan_step(noisy, args, cluster_of(1, 2), recipes.auto(remat=True, baselines=False), 4)
    assert any(stage.recomputed for stage in planned.plan.stages)
    outputs = planned.build(jax.devices()[:2])(jax.tree.leaves(args))
    for found, expected in zip(outputs, jax.tree.leaves(jax.jit(noisy)(*args)), strict=True):
        assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=1e-5)


def peaks(memory: int, remat: bool | None, devices: int = 2, m: int | None = 1) -> Plan:
    x = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    cluster = cluster_of(1, devices, memory=memory, **FAST)
    method = recipes.auto(remat=remat, num_microbatches=m, baselines=False)
    step = autopar.parallelize(step_of(layer), cluster=cluster, method=method, batch_axes=(None, 0))
    plan: Plan = step.plan(arguments()[0], x)
    return plan


def test_it_is_chosen_where_memory_is_short_and_only_there() -> None:
    plenty = peaks(2**40, None)
    assert not any(stage.recomputed for stage in plenty.stages)
    always = peaks(2**40, True)
    assert all(stage.recomputed for stage in always.stages)
    assert always.peak_memory < 0.7 * plenty.peak_memory
    short = (always.peak_memory + plenty.peak_memory) // 2
    found = peaks(short, None)
    assert any(stage.recomputed for stage in found.stages)
    assert found.peak_memory <= short
    assert found.step_time < 1.5 * plenty.step_time
    with pytest.raises(InfeasiblePlanError, match="What works: without remat=False"):
        peaks(short, False)


@pytest.mark.parametrize("devices", [1, 2])
def test_to_be_free_to_compute_again_costs_nothing(devices: int) -> None:
    plenty = peaks(2**40, None, devices, None)
    for share in (0.8, 0.5, 0.25):  # of the memory; smaller microbatches need less, too
        memory = int(share * plenty.peak_memory)
        free = peaks(memory, None, devices, None)
        assert free.peak_memory <= memory
        assert free.step_time <= 1.02 * peaks(memory, False, devices, None).step_time


def test_a_plan_says_what_it_computes_again_and_is_restored_and_followed() -> None:
    params, x = arguments()
    method = recipes.auto(remat=True, num_stages=2, num_microbatches=2, baselines=False)
    step = autopar.parallelize(step_of(layer), cluster=cluster_of(1, 2), method=method, batch_axes=(None, 0))
    plan = step.plan(params, x)
    assert all(stage.recomputed for stage in plan.stages[:-1])
    for stage in plan.stages:
        assert all(stage.equations[0] <= b.start < b.stop <= stage.equations[1] for b in stage.recomputed)
    assert Plan.from_json(plan.to_json()) == plan
    assert "computed again" in str(plan)
    again = autopar.parallelize(step_of(layer), cluster=cluster_of(1, 2), method=plan, batch_axes=(None, 0))
    assert [s.recomputed for s in again.plan(params, x).stages] == [s.recomputed for s in plan.stages]
    new, value = again(params, x)
    expected, value_expected = jax.jit(step_of(layer))(params, x)
    assert float(value) == pytest.approx(float(value_expected), rel=1e-5)
    shorter = again(new, x[: BATCH // 2])[1]  # other shapes follow the plan
    assert float(shorter) == pytest.approx(float(jax.jit(step_of(layer))(expected, x[: BATCH // 2])[1]), rel=1e-5)
