"""What ZeRO-3 gathers for the forward pass is gathered again for the backward pass, and not kept in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.compiling import compiler
from autopar.ir.local import Reread
from autopar.ir.mesh import Cluster, XlaBackend
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from tests.h100 import h100_devices, needs_cuda_compiler
from tests.planned import (
    as_xla_for_cpus_merges,
    cluster_of,
    compiled_by,
    compiled_collectives,
    lowered_collectives,
    plan_step,
    temporaries_of,
)

LAYERS, WIDTH, BATCH = 6, 256, 64
WEIGHT = 4 * WIDTH * WIDTH  # bytes


def layer(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


def step_of(layer: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = layer(w, x)
        return (x**2).mean()

    def step(params: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, g), value

    return step


STEPS = {"plain": step_of(layer), "rematerialized": step_of(jax.checkpoint(layer))}


def arguments() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    params = [{k: jnp.asarray(random.normal(size=(WIDTH, WIDTH)) / 64, jnp.float32) for k in "ab"}] * LAYERS
    return params, jnp.asarray(random.normal(size=(BATCH, WIDTH)), jnp.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
def test_zero_3_gathers_twice_and_keeps_nothing(name: str) -> None:
    args = arguments()
    planned = plan_step(STEPS[name], args, cluster_of(1, 4), recipes.zero(3), 1)
    (local,) = planned.lowered.programs
    gathered = [c for c in planned.priced(local).elements() if c.kind == "all_gather"]
    count = 2 * LAYERS - 1 if name == "plain" else 2 * LAYERS  # the first layer's input has no gradient
    assert [c.payload for c in gathered] == [WEIGHT] * (2 * LAYERS + count)
    held = temporaries_of(local, planned.plan.cluster)
    assert held < LAYERS * WEIGHT  # were they kept, it would be twice as much and more

    executable = planned.build(jax.devices()[:4])
    assert lowered_collectives(executable.sources[0], local) == planned.priced(local)
    assert compiled_collectives(executable.programs[0], local) == planned.priced(as_xla_for_cpus_merges(local))
    outputs = executable(jax.tree.leaves(args))
    for found, expected in zip(outputs, jax.tree.leaves(jax.jit(STEPS[name])(*args)), strict=True):
        assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=1e-6)


@needs_cuda_compiler
@pytest.mark.parametrize("name", STEPS)
def test_xla_for_gpus_keeps_nothing_either(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "Worker", lambda sources, *_: sources)
    width = 4096  # of small arrays, XLA makes one of many gathers
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    args = [{"a": weight, "b": weight}] * LAYERS, jax.ShapeDtypeStruct((BATCH, width), jnp.float32)
    planned = plan_step(STEPS[name], args, cluster_of(1, 8, memory=2**40), recipes.zero(3), 1)
    (local,) = planned.lowered.programs
    sources: Any = planned.build(h100_devices(8))
    program = sources[0].lower().compile()
    assert compiled_collectives(program, local) == planned.priced(local)
    # Six gradients wait to be summed, three at a time. Were weights gathered when the step begins, all twelve of them
    # would be there at once.
    assert program.memory_analysis().temp_size_in_bytes < 7 * weight.size * 4


def test_the_planner_keeps_what_fits_and_gathers_again_what_does_not() -> None:
    """Weights can only be gathered: a mesh of one axis that splits examples."""
    method = Method("data", 1, 1, (-1,), data_axes=("x",))
    args = arguments()

    def plan(memory: int) -> Plan:
        step = autopar.parallelize(STEPS["plain"], cluster=cluster_of(1, 8, memory=memory), method=method)
        return step.plan(*args)

    kept = plan(2**30)
    assert not kept.stages[0].reshard_after_forward
    weights = 2 * LAYERS * WEIGHT
    again = plan(weights)
    assert again.stages[0].reshard_after_forward
    assert again.peak_memory <= weights < kept.peak_memory
    assert kept.step_time < again.step_time

    restored = Plan.from_json(again.to_json())
    step = autopar.parallelize(STEPS["plain"], cluster=again.cluster, method=restored)
    assert step.plan(*args).step_time == again.step_time


def test_other_shapes_follow() -> None:
    """A shorter batch gathers again, too."""
    params, x = arguments()
    step = autopar.parallelize(STEPS["plain"], method=recipes.zero(3), devices=jax.devices()[:4])
    assert step.compile(params, x).plan.stages[0].reshard_after_forward
    assert step.compile(params, x[: BATCH // 2]).plan.stages[0].reshard_after_forward


def test_what_a_gather_waits_for_may_be_what_another_equation_made() -> None:
    """Two layers read the same activations, computed for each and merged."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            first, second = (jnp.tanh(x @ params["a"]) @ params[name] for name in "bc")
            return (first**2 + second**4).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    weight = jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / 64, jnp.float32)
    args = dict.fromkeys("abc", weight), arguments()[1]
    planned = plan_step(step, args, cluster_of(1, 4), recipes.zero(3), 1)
    assert any(isinstance(op, Reread) and op.after for op in planned.lowered.programs[0].ops)
    outputs = planned.build(jax.devices()[:4])(jax.tree.leaves(args))
    for found, expected in zip(outputs, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=1e-6)


def combining(cluster: Cluster, nbytes: int, *, hides_latency: bool = False) -> Cluster:
    return compiled_by(cluster, XlaBackend(collective_combine_threshold=nbytes, hides_latency=hides_latency))


def test_sums_that_the_compiler_makes_one_are_all_there_at_once() -> None:
    """With gradients in pieces of a quarter, each is whole until it is summed."""

    def most(nbytes: int) -> int:
        cluster = combining(cluster_of(1, 4), nbytes)
        plan = plan_step(STEPS["plain"], arguments(), cluster, recipes.zero(3), 1).plan
        return plan.stages[0].memory.temporaries

    each, four, every = most(0), most(WEIGHT), most(100 * WEIGHT)  # bytes of results, which are quarters
    assert each < four < every
    assert every >= 2 * LAYERS * WEIGHT
    assert four < 2 * LAYERS * WEIGHT


def test_what_leads_to_sums_alone_waits_where_latency_is_hidden() -> None:
    """In turn, a layer's gradient is summed before that of the next is made; else what all of them need is held."""

    def most(name: str, hides_latency: bool) -> int:
        cluster = combining(cluster_of(1, 4), 0, hides_latency=hides_latency)
        plan = plan_step(STEPS[name], arguments(), cluster, recipes.data_parallel(), 1).plan
        return plan.stages[0].memory.temporaries

    assert most("plain", False) < LAYERS / 2 * WEIGHT
    assert most("plain", True) > 2 * LAYERS * WEIGHT
    assert most("rematerialized", True) == most("plain", True)
