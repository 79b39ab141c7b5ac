"""What a loop over layers hands on as it was, or makes alike in every microbatch, comes out of a step as under jit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import InternalError
from autopar.ir.schedule import make_schedule
from autopar.passes.instruction_writer import write_instructions
from tests.planned import analyse, cluster_of, plan_analysis

LAYERS, SIZE = 4, 16
METHODS = [
    recipes.data_parallel(), recipes.data_parallel(2), recipes.gpipe(2, 2), recipes.megatron(1, 8, 1, 2),
    recipes.megatron(2, 2, 2, 4),
]  # fmt: skip


def of_parameters(params: Any, x: Any, y: Any) -> Any:
    """A rematerialized layer that returns its parameters, as NNX's modules do; the update reads them there."""

    def loss_fn(params: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w), (w, w)

        h, stacks = jax.lax.scan(layer, x, params)
        return jnp.mean((h - y) ** 2), stacks

    (loss, (stack, other)), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return stack - 0.1 * gradients, loss, other


def of_parameters_alone(params: Any, x: Any, y: Any) -> Any:
    """Each layer's next vector follows from its matrix and the vector, as those of spectral norms do."""
    matrices, vectors = params

    def loss_fn(matrices: Any) -> Any:
        def layer(h: Any, layer: Any) -> Any:
            w, u = layer
            return h + jnp.tanh(h @ w), jax.lax.stop_gradient(u @ w.T @ w)

        h, vectors_after = jax.lax.scan(layer, x, (matrices, vectors))
        return jnp.mean((h - y) ** 2), vectors_after

    (loss, vectors_after), gradients = jax.value_and_grad(loss_fn, has_aux=True)(matrices)
    return (matrices - 0.1 * gradients, vectors_after), loss


def twice(params: Any, x: Any, y: Any) -> Any:
    """The same sum over examples and the same examples, each as two results of a loop."""

    def loss_fn(params: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            h = h + jnp.tanh(h @ w)
            return h, (h, h, h.sum(0), h.sum(0))

        h, seen = jax.lax.scan(layer, x, params)
        return jnp.mean((h - y) ** 2), seen

    (loss, seen), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return params - 0.1 * gradients, loss, seen


def arguments(step: Callable[..., Any]) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    matrices = (0.2 * rng.normal(size=(LAYERS, SIZE, SIZE))).astype("f")
    x, y = (rng.normal(size=(32, SIZE)).astype("f") for _ in range(2))
    vectors = rng.normal(size=(LAYERS, 1, SIZE)).astype("f")
    return ((matrices, vectors) if step is of_parameters_alone else matrices), x, y


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name} in {method.num_microbatches}")
@pytest.mark.parametrize("step", [of_parameters, of_parameters_alone, twice])
def test_a_step_is_that_of_one_device(step: Callable[..., Any], method: Any) -> None:
    args = arguments(step)
    parallel = autopar.parallelize(step, method=method, donate_argnums=(), batch_axes=(None, 0, 0))
    found, expected = autopar.gather(parallel(*args)), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), found, expected)


def test_a_result_that_nothing_makes_is_no_plan() -> None:
    args = arguments(twice)
    found = plan_analysis(analyse(twice, *args, batch_axes=(None, 0, 0)), cluster_of(1, 8), recipes.data_parallel(2), 2)
    programs = found.lowered.programs
    update = next(p for p in programs if not p.program.in_loop and p.outputs)
    lacking = tuple(p for p in programs if p is not update)
    lowered = dataclasses.replace(found.lowered, programs=lacking)
    with pytest.raises(InternalError, match="nothing makes result"):
        write_instructions(lowered, make_schedule("1f1b", 1, 2), frozenset())
