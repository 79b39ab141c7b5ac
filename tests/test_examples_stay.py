"""Examples are no state: they are neither given away nor taken for what a step carries on, whatever it returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from tests import models

BATCH, WIDTH = 8, 16


def weights(width: int = WIDTH) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (WIDTH, width)) / 4


def examples(batch: int = BATCH) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, WIDTH))


def autoencoder(w: jax.Array, x: jax.Array) -> Any:
    """Returns a reconstruction in the place of the examples, and of their shape."""
    g = jax.grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)
    return w - 0.1 * g, x @ w


def assert_close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), autopar.gather(found), wanted)


@pytest.mark.parametrize("donate", ["auto", (0, 1)], ids=str)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("microbatches", ["auto", 2])
def test_a_named_batch_is_never_given_away(devices: int, microbatches: Any, donate: Any) -> None:
    """Wherever it lies: where it comes from, and where a step has left what looks like it."""
    step = autopar.parallelize(
        autoencoder, batch_axes=(None, 0), donate_argnums=donate, num_microbatches=microbatches,
        devices=jax.devices()[:devices],
    )  # fmt: skip
    w, x = weights(), examples()
    expected = jax.jit(autoencoder)(w, x)
    again = jax.jit(autoencoder)(*expected)
    assert_close(step(w, x), expected)
    first = step(w, x)  # never looked at: what numpy looks at cannot be given away
    assert not x.is_deleted()
    second = step(*first)
    assert first[0].is_deleted() and not first[1].is_deleted()
    assert_close(second, again)


def test_a_named_batch_takes_no_place_of_the_state() -> None:
    """The examples come first, and look like the only result: it is the weights' next value."""

    def step(x: jax.Array, w: jax.Array) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    x, w = examples(WIDTH), weights()
    parallel = autopar.parallelize(step, batch_axes=(0, None), method=recipes.zero(3))
    graph = parallel.trace(x, w).graph
    assert {graph.output_paths[k]: graph.input_paths[i] for k, i in graph.carried.items()} == {"output": "w"}
    parallel.compile(x, w)
    born = parallel.init(weights)
    moved = parallel(x, born)
    assert born.is_deleted() and not x.is_deleted()
    assert moved.sharding == born.sharding and not moved.sharding.is_fully_replicated
    assert_close(moved, jax.jit(step)(x, w))


def test_following_takes_no_examples_for_state() -> None:
    """A function on another's state, with examples of the state's shape where that has the state."""

    def update(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.sum(x)

    def score(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.mean(x @ w, 1)

    step = autopar.parallelize(update, batch_axes=(None, 0), method=recipes.zero(3))
    w, _ = step(weights(), examples())
    follower = autopar.parallelize(score, batch_axes=(0, None), follow=step)
    x = np.asarray(examples(WIDTH))
    plan = follower.plan(x, w)
    assert {leaf.path: leaf.batch_axis for leaf in plan.leaves} == {"x": 0, "w": None}
    lies = {leaf.path: leaf.sharding for leaf in step.plan(w, examples()).leaves}
    assert {leaf.path: leaf.sharding for leaf in plan.leaves}["w"] == lies["w"]
    assert_close(follower(x, w), score(jnp.asarray(x), autopar.gather(w)))


def test_examples_that_are_found_are_not_given_away(capsys: pytest.CaptureFixture[str]) -> None:
    """What comes out in place of an argument with a row for each example holds examples, too, though nobody said so."""

    def step(w: jax.Array, x: jax.Array, weight: jax.Array) -> Any:
        g = jax.grad(lambda w: jnp.mean(weight[:, None] * (x @ w - x) ** 2))(w)
        return w - 0.1 * g, x @ w

    parallel = autopar.parallelize(step, num_microbatches=2)
    w, x, weight = weights(), examples(), jnp.linspace(0.0, 1.0, BATCH)
    expected = jax.jit(step)(w, x, weight)
    assert_close(parallel(w, x, weight), expected)
    assert "batch of 8 along axis 0 of x, weight\n" in capsys.readouterr().err
    found = parallel(w, x, weight)
    parallel(*found, weight)
    assert found[0].is_deleted() and not found[1].is_deleted() and not x.is_deleted()


@pytest.mark.parametrize("named", [True, False])
def test_a_batch_that_comes_out_in_its_own_structure(named: bool) -> None:
    """Augmented examples beside the loss."""

    def step(state: Any, batch: Any, labels: jax.Array) -> Any:
        def loss(w: jax.Array) -> Any:
            return jnp.mean((batch["x"] @ w - labels) ** 2)

        value, g = jax.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - 0.1 * g}, {"x": batch["x"] * 2, "mask": batch["mask"]}, value

    parallel = autopar.parallelize(step, batch_axes=(None, 0, 0) if named else "auto")
    arguments = {"w": weights(1)}, {"x": examples(), "mask": jnp.ones(BATCH)}, jnp.ones((BATCH, 1))
    expected = jax.jit(step)(*arguments)
    assert_close(parallel(*arguments), expected)
    state, batch, _ = parallel(*arguments)
    parallel(state, batch, arguments[2])
    assert state["w"].is_deleted() and not any(x.is_deleted() for x in jax.tree.leaves((batch, arguments[1])))


def test_square_weights_of_the_batch_size_are_state() -> None:
    """Eight rows are no sign of examples by themselves: what replaces the weights has no row for each example."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.sum(x)

    w, x = jnp.ones((BATCH, 4)), jnp.ones((BATCH, BATCH))
    graph = autopar.parallelize(step).trace(w, x).graph
    assert {graph.input_paths[i] for i in graph.carried.values()} == {"w"}


def test_as_many_examples_as_every_parameter_has_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Each leaf of the state has a row for each of 32 examples, and so has each one's replacement."""
    widths = [32] * 5
    state, batch = models.mlp_params(widths), models.mlp_batch(32, widths)
    step = models.sgd(models.mlp_loss)
    parallel = autopar.parallelize(step, num_microbatches=4)
    expected = jax.jit(step)(state, batch)
    assert_close(parallel(state, batch), expected)
    assert "batch of 32 along axis 0 of batch['x'], batch['y']\n" in capsys.readouterr().err
