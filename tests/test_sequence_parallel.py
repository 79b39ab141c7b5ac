"""Tensor parallelism as Megatron-LM has it: with what is between products in pieces of the sequence, or whole."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.errors import InfeasiblePlanError, PlanError
from autopar.ir.local import Compute
from benchmarks.models import gpt
from tests.planned import Planned, analysis_of, cluster_of, compiled_collectives, plan_analysis

LAYERS, WIDTH, LENGTH, DEVICES = 3, 32, 16, 4
# Whole copies of values take as long as a product does: pieces always pay.
CLUSTER = cluster_of(1, DEVICES, memory_bandwidth=1e6)
BATCH = 4
FORMS = [(scan, remat) for scan in (False, True) for remat in (False, True)]


def _config(*, scan: bool, remat: bool) -> gpt.GPTConfig:
    return gpt.GPTConfig(
        vocab_size=64, sequence_length=LENGTH, num_layers=LAYERS, width=WIDTH, num_heads=4, dropout=0.0, scan=scan,
        remat=remat,
    )  # fmt: skip


@functools.cache
def _planned(scan: bool, remat: bool, sequence_parallel: bool | None) -> Planned:
    analysis = analysis_of(gpt, _config(scan=scan, remat=remat), BATCH)
    method = recipes.megatron(1, DEVICES, 1, 1, sequence_parallel=sequence_parallel)
    return plan_analysis(analysis, CLUSTER, method, 1)


def _compiled(planned: Planned) -> Counter[str]:
    """How often XLA's programs run each kind of collective, of more than a few numbers per token."""
    worker = planned.build(jax.devices()[:DEVICES])
    [program], [local] = worker.programs, planned.lowered.programs
    large = WIDTH * LENGTH * 4 // DEVICES
    found: Counter[str] = Counter()
    for collective, times in compiled_collectives(program, local).items():
        found[collective.kind] += times * (collective.payload >= large)
    return found


@pytest.mark.parametrize(("scan", "remat"), FORMS)
def test_without_it_values_are_summed_and_nothing_else(scan: bool, remat: bool) -> None:
    """Twice a layer in the forward pass and in the backward pass (Shoeybi et al. 2019)."""
    found = _compiled(_planned(scan, remat, False))
    assert set(found) == {"all_reduce"}
    assert found["all_reduce"] >= 4 * LAYERS


@pytest.mark.parametrize(("scan", "remat"), FORMS)
def test_with_it_sums_are_scattered_and_gathered_again(scan: bool, remat: bool) -> None:
    found = _compiled(_planned(scan, remat, True))
    assert found["reduce_scatter"] >= 4 * LAYERS
    assert found["all_gather"] >= 4 * LAYERS


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_products_are_cut_along_heads_and_hidden_dimensions(sequence_parallel: bool) -> None:
    """As free as can be, the solver cuts them along the sequence, where weights are less than values."""
    planned = _planned(False, False, sequence_parallel)
    [local] = planned.lowered.programs
    rules = planned.lowered.rules
    products = [op for op in local.ops if isinstance(op, Compute) and op.product is not None]
    assert len(products) > 6 * LAYERS
    for op in products:
        along = {f for f, size in enumerate(rules[op.equation.id].factors) if size == LENGTH}
        cut = {choice.factor for choice in op.strategy[0] if hasattr(choice, "factor")}
        assert cut
        assert not cut & along


@pytest.mark.parametrize("sequence_parallel", [True, False, None])
@pytest.mark.parametrize("scan", [False, True])
def test_the_step_is_that_of_one_device(scan: bool, sequence_parallel: bool | None) -> None:
    config, optimizer = _config(scan=scan, remat=True), optax.sgd(0.1)
    state = gpt.make_init(config, optimizer)(jax.random.key(0))
    batch = _tokens(gpt.abstract_batch(config, BATCH))
    step = gpt.make_train_step(config, optimizer)
    expected = jax.jit(step)(state, batch)
    method = recipes.megatron(2, DEVICES // 2, 1, 2, sequence_parallel=sequence_parallel)
    found = autopar.parallelize(step, method=method, devices=jax.devices()[:DEVICES])(state, batch)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for got, wanted in ((a, b) for a, b in pairs if not jnp.issubdtype(b.dtype, jax.dtypes.prng_key)):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-6)


def _tokens(shapes: Any) -> Any:
    keys = iter(jax.random.split(jax.random.key(1), 8))
    return jax.tree.map(lambda leaf: jax.random.randint(next(keys), leaf.shape, 0, 64, leaf.dtype), shapes)


@pytest.mark.parametrize("sequence_parallel", [True, False, None])
def test_a_barrier_takes_weights_as_they_are_kept(sequence_parallel: bool | None) -> None:
    """Each of its operands passes on its own: what is computed again needs no whole copy of the weights it reads."""
    [local] = _planned(False, True, sequence_parallel).lowered.programs
    computed = [op for op in local.ops if isinstance(op, Compute)]
    fences = [op for op in computed if op.equation.primitive.name == "optimization_barrier"]
    assert fences
    for op in fences:
        shapes = [value.shape for value in op.equation.outputs]
        weights = [s for shape, s in zip(shapes, op.results, strict=True) if shape == (WIDTH, 4 * WIDTH)]
        assert weights
        assert all(sharding.axes for sharding in weights)


def test_a_fused_projection_says_why_it_has_no_plan_without_it() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            first, second = jnp.split(x @ params["up"], 2, -1)
            return jnp.mean(jnp.sin(jnp.tanh(first) * second @ params["down"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    shapes = {"up": (WIDTH, 8 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    by = autopar.parallelize(step, cluster=CLUSTER)
    with pytest.raises(InfeasiblePlanError, match=r"whatever the memory.* Leave sequence_parallel open"):
        by.plan(params, x, method=recipes.megatron(1, DEVICES, 1, 1, sequence_parallel=False))
    assert by.plan(params, x, method=recipes.megatron(1, DEVICES, 1, 1)).step_time > 0


@pytest.mark.parametrize("value", [1, "yes"])
def test_it_is_true_or_false_or_open(value: Any) -> None:
    with pytest.raises(PlanError, match=r"megatron\(sequence_parallel=.*\): it must be True, False or None"):
        recipes.megatron(1, 4, 1, sequence_parallel=value)
