"""Grouped products cost what JAX makes of them for GPUs: all rows with all groups."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.passes.rules.table import rule_of
from tests.h100 import needs_cuda_compiler
from tests.passes.rules.harness import equations_of

ROWS, DEPTH, WIDTH = 65536, 1024, 1024  # of much smaller ones XLA holds one copy more, or less


def step(weights: Any, x: Any, sizes: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        return jnp.mean(jnp.square(jax.lax.ragged_dot(x, weights, sizes).astype(jnp.float32)))

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return weights - 0.1 * gradients, loss


def arguments(groups: int) -> tuple[Any, ...]:
    weights = jax.ShapeDtypeStruct((groups, DEPTH, WIDTH), jnp.bfloat16)
    return weights, jax.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16), jax.ShapeDtypeStruct((groups,), jnp.int32)


@pytest.mark.parametrize("groups", [2, 4, 16])
def test_the_work_grows_with_the_number_of_groups(groups: int) -> None:
    products = [eqn for eqn in equations_of(step, *arguments(groups)) if eqn.primitive.name == "ragged_dot_general"]
    assert len(products) == 2
    for eqn in products:
        rule = rule_of(eqn)
        assert rule.work({}) == rule.products == 2.0 * groups * ROWS * DEPTH * WIDTH
        for factor in rule.splittable:
            assert rule.work({factor: 2}) == rule.work({}) / 2
            assert rule.temporaries({factor: 2}) <= rule.temporaries({})
    summed, apart = (rule_of(eqn).temporaries({}) for eqn in products)
    assert (summed, apart) == (2 * 2.0 * groups * ROWS * DEPTH, 2.0 * groups * ROWS * DEPTH)


@needs_cuda_compiler
@pytest.mark.parametrize("groups", [8, 32])
def test_memory_and_traffic_are_those_of_xla(groups: int) -> None:
    cluster = autopar.load_preset("dgx-h100", num_hosts=1, devices_per_host=1)
    parallel = autopar.parallelize(step, method=recipes.data_parallel(), batch_axes=(None, 0, None))
    (program,) = parallel.plan(*arguments(groups), cluster=cluster).verify_with_xla().programs
    assert abs(program.memory_error) < 0.05
    assert program.found_kernels is not None
    assert abs(program.kernels.nbytes / program.found_kernels.nbytes - 1) < 0.2
