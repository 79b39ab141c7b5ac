"""Indices that are positions: what is recognised, and that the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.passes.positions import index_within_examples
from autopar.tracing.trace import trace

BATCH, TIME, CLASSES = 16, 4, 8
CONSTANT = np.arange(BATCH)


def batching_dims(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> list[Any]:
    """Of every gather and scatter: (the operand's batching dimensions, those of the indices)."""
    values, *indices = shapes
    specs = [jax.ShapeDtypeStruct(values, jnp.float32), *(jax.ShapeDtypeStruct(s, jnp.int32) for s in indices)]
    graph = index_within_examples(trace(fun, tuple(specs), {}, name="fun"))
    found = []
    for eqn in graph.equations:
        numbers: Any = eqn.params.get("dimension_numbers")
        if eqn.primitive.name == "gather":
            found.append((numbers.operand_batching_dims, numbers.start_indices_batching_dims))
        elif eqn.primitive.name.startswith("scatter"):
            found.append((numbers.operand_batching_dims, numbers.scatter_indices_batching_dims))
    return found


@pytest.mark.parametrize(
    ("fun", "shapes", "expected"),
    [
        (lambda x, i: x[jnp.arange(BATCH), i], [(BATCH, CLASSES), (BATCH,)], [((0,), (0,))]),
        (lambda x, i: x[CONSTANT, i], [(BATCH, CLASSES), (BATCH,)], [((0,), (0,))]),
        (lambda x, i: x[i, jnp.arange(BATCH)], [(CLASSES, BATCH), (BATCH,)], [((1,), (0,))]),
        (
            lambda x, i: x[jnp.arange(BATCH)[:, None], jnp.arange(TIME), i],
            [(BATCH, TIME, CLASSES), (BATCH, TIME)],
            [((0, 1), (0, 1))],
        ),
        (
            lambda x, i: jax.grad(lambda x: x[jnp.arange(BATCH), i].sum())(x),
            [(BATCH, CLASSES), (BATCH,)],
            [((0,), (0,))],  # the scatter
        ),
        (lambda x, i: x.at[jnp.arange(BATCH), i].set(0.0), [(BATCH, CLASSES), (BATCH,)], [((0,), (0,))]),
        # Not positions, or not along the dimension that they point into.
        (lambda x, i: x[jnp.arange(BATCH) + 1, i], [(BATCH, CLASSES), (BATCH,)], [((), ())]),
        (lambda x, i: x[jnp.arange(BATCH), i], [(BATCH + 1, CLASSES), (BATCH,)], [((), ())]),
        (lambda x, i: x[CONSTANT[::-1].copy(), i], [(BATCH, CLASSES), (BATCH,)], [((), ())]),
        (lambda x, i: x[i], [(BATCH, CLASSES), (BATCH,)], [((), ())]),
    ],
)
def test_what_is_recognised(fun: Any, shapes: Any, expected: Any) -> None:
    assert batching_dims(fun, *shapes) == expected


@pytest.mark.parametrize("method", [recipes.data_parallel(2), recipes.gpipe(2, 2)], ids=lambda m: m.name)
def test_a_cross_entropy_by_position_runs_in_microbatches(method: Any) -> None:
    def loss_fn(p: Any, x: Any, y: Any) -> Any:
        log_probabilities = jax.nn.log_softmax(jnp.tanh(x @ p["w"]) @ p["v"])
        return -log_probabilities[jnp.arange(BATCH), y].mean()

    def step(p: Any, x: Any, y: Any) -> Any:
        loss, g = jax.value_and_grad(loss_fn)(p, x, y)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), loss

    random = np.random.default_rng(0)
    p = {"w": random.normal(size=(6, 16)), "v": random.normal(size=(16, CLASSES))}
    p = jax.tree.map(lambda x: x.astype(np.float32), p)
    x, y = random.normal(size=(BATCH, 6)).astype(np.float32), random.integers(-CLASSES, CLASSES, BATCH)
    parallel = autopar.parallelize(step, method=method)
    found = autopar.gather(parallel(p, x, y))
    assert parallel.plan(p, x, y).num_microbatches == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, jax.jit(step)(p, x, y))
