"""The last microbatch in one program with the update: the same results, and gradients that are sent meanwhile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.compiling.program_sources import instructions_of
from autopar.ir.instructions import Run
from autopar.ir.mesh import Cluster, XlaBackend
from autopar.ir.method import Method
from autopar.planning.pricing import Prices
from benchmarks.models import gpt
from tests import models
from tests.h100 import needs_cuda_compiler
from tests.planned import Planned, analyse, cluster_of, compiled_by, plan_analysis, plan_step
from tests.test_collectives_end_to_end import agree

WIDTHS = (32, 64, 64, 16)
METHODS = [recipes.data_parallel(), recipes.zero(1), recipes.zero(2), recipes.zero(3), recipes.megatron(2, 4, 1)]


def hiding(cluster: Cluster, threshold: int = 0) -> Cluster:
    """With a compiler that runs collectives beside kernels."""
    return compiled_by(cluster, XlaBackend(collective_combine_threshold=threshold, hides_latency=True))


def plan(method: Method, m: int, cluster: Cluster, loss: Any = models.mlp_loss) -> Planned:
    step, state, batch = models.adam(loss), models.adam_state(models.mlp_params(WIDTHS)), models.mlp_batch(32, WIDTHS)
    return plan_step(step, (state, batch), cluster, method, m)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_step_is_that_of_one_device(method: Method, m: int) -> None:
    step, state, batch = (
        models.adam(models.mlp_loss), models.adam_state(models.mlp_params(WIDTHS)), models.mlp_batch(32, WIDTHS)
    )  # fmt: skip
    found = plan(method, m, hiding(cluster_of(1, 8)))
    assert found.lowered.loop_microbatches == m - 1
    worker = found.build(jax.devices())
    results = worker(jax.tree.leaves((state, batch)))
    for actual, expected in zip(results, jax.tree.leaves(jax.jit(step)(state, batch)), strict=True):
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=2e-4, atol=2e-6)
    agree(found, worker.sources, worker.programs)


def test_gradients_that_the_step_returns_are_added_up_in_place() -> None:
    def step(params: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda params: jnp.mean(jnp.tanh(x @ params) ** 2))(params)

    analysis = analyse(step, jnp.ones((64, 64)), jnp.ones((32, 64)), batch_axes=(None, 0))
    found = plan_analysis(analysis, hiding(cluster_of(1, 8)), recipes.zero(2), 2)
    assert found.lowered.loop_microbatches == 1
    last = found.lowered.programs[-1]
    totals = set(found.lowered.placed.step.accumulate.values())
    returned = {i for i, port in enumerate(last.inputs) if port.value in totals and port in last.outputs}
    runs = [i for i in instructions_of(found.lowered, "1f1b", frozenset()).instructions if isinstance(i, Run)]
    assert returned
    assert returned <= set(runs[-1].donated)


def test_each_microbatch_is_computed_once() -> None:
    found = plan(recipes.zero(2), 4, hiding(cluster_of(1, 8)))
    loop, last = found.lowered.programs
    assert (loop.program.in_loop, last.program.in_loop) == (True, False)
    written = instructions_of(found.lowered, "1f1b", frozenset())
    runs = [i for i in written.instructions if isinstance(i, Run)]
    assert [i.program for i in runs] == [0, 0, 0, 1]
    fed = [{register for register, _ in written.feeds.values()}.intersection(i.inputs) for i in runs]
    assert all(fed)
    assert len(set().union(*fed)) == sum(map(len, fed))  # each has its own examples


def test_gradients_are_sent_while_the_first_layers_are_computed() -> None:
    """The step is shorter by what is hidden, and its parts add up to it."""
    cluster = cluster_of(1, 8, link=1e8)
    apart, together = (plan(recipes.data_parallel(), 4, each) for each in (cluster, hiding(cluster)))
    assert apart.lowered.loop_microbatches == 4
    prices = Prices(together.plan.cluster)
    costs = prices.play(together.lowered, "1f1b").costs
    assert costs[-1].hidden > 0
    assert together.plan.step_time < apart.plan.step_time
    (stage,) = together.plan.stages
    assert 4 * (stage.forward + stage.backward) + stage.once == pytest.approx(together.plan.step_time)
    assert together.plan.flops == pytest.approx(apart.plan.flops)


def test_where_it_does_not_pay() -> None:
    """Compilers that hide nothing, updates that send little, one microbatch, pipelines, and results of examples."""
    cluster = cluster_of(1, 8)
    for found in (
        plan(recipes.zero(2), 4, cluster), plan(recipes.zero(2), 4, hiding(cluster, threshold=10**9)),
        plan(recipes.megatron(2, 2, 2), 4, hiding(cluster)),
    ):  # fmt: skip
        assert found.lowered.loop_microbatches == 4
    assert plan(recipes.zero(2), 1, hiding(cluster)).lowered.loop_microbatches == 1

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            h = jnp.tanh(x @ params)
            return jnp.mean(h**2), h

        (_, h), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return params - 0.1 * gradient, h[:, :3]

    args = jnp.ones((16, 16)), jnp.ones((32, 16))
    assert plan_step(step, args, hiding(cluster), recipes.zero(2), 4).lowered.loop_microbatches == 4


@pytest.mark.slow
@needs_cuda_compiler
def test_xla_sends_them_then() -> None:
    """What is hidden, what is sent and what is held, by XLA's compiled program for H100s."""
    config = gpt.GPTConfig(8192, 512, 2, 1024, 8, dropout=0.0, dtype=jnp.bfloat16)
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(gpt.make_init(config, optimizer), jax.random.key(0))
    step = autopar.parallelize(gpt.make_train_step(config, optimizer), method=recipes.data_parallel(2))
    cluster = autopar.load_preset("dgx-h100", num_hosts=1, devices_per_host=8)
    verdict = step.plan(state, gpt.abstract_batch(config, 32), cluster=cluster).verify_with_xla()
    (last,) = (program for program in verdict.programs if program.names == ("last_microbatch",))
    overlap = last.overlap
    assert overlap.found is not None
    assert overlap.hidden > 0.3 * overlap.communication
    assert abs(overlap.hidden - overlap.found) < 0.15 * overlap.communication
    assert abs(last.memory_error) < 0.1
    assert all(traffic.predicted == traffic.found for traffic in last.traffic)
