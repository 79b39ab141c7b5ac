"""States of which a leaf comes out in another's place: it lies where the next call wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes

METHODS = [recipes.zero(2), recipes.zero(3, 2), recipes.megatron(2, 2, 2, 2), recipes.gpipe(2, 2), "auto"]
Step = Callable[[Any, Any], Any]


def loss(p: Any, b: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(b["x"] @ p["w"]) @ p["v"] - b["y"]) ** 2)


def new_of(p: Any, b: Any, pull: Any) -> Any:
    value, g = jax.value_and_grad(lambda p: loss(p, b) + 0.1 * loss(jax.tree.map(jnp.subtract, p, pull), b))(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, g), value


def previous(state: Any, b: Any) -> Any:
    new, value = new_of(state["p"], b, state["old"])
    return {"p": new, "old": state["p"]}, value


def exchanged(state: Any, b: Any) -> Any:
    new, value = new_of(state["p"], b, state["old"])
    return {"p": state["old"], "old": new}, value


def the_same_twice(state: Any, b: Any) -> Any:
    new, value = new_of(state["p"], b, state["old"])
    return {"p": new, "old": new}, value


def history(state: Any, b: Any) -> Any:
    new, value = new_of(state["p"], b, state["old"])
    return {"p": new, "old": state["p"], "older": state["old"]}, value


def lbfgs(state: Any, b: Any) -> Any:
    value, g = jax.value_and_grad(lambda p: loss(p, b))(state["p"])
    updates, inner = LBFGS.update(g, state["old"], state["p"])
    return {"p": optax.apply_updates(state["p"], updates), "old": inner}, value


LBFGS = optax.lbfgs(0.1, memory_size=3, linesearch=None)
PARAMS = {"w": np.ones((16, 32), np.float32), "v": np.full((32, 8), 0.5, np.float32)}
BATCH = {"x": np.linspace(-1, 1, 16 * 16, dtype=np.float32).reshape(16, 16), "y": np.ones((16, 8), np.float32)}
ZEROS = jax.tree.map(np.zeros_like, PARAMS)
STEPS: dict[str, tuple[Step, Any]] = {
    "previous": (previous, {"p": PARAMS, "old": ZEROS}),
    "exchanged": (exchanged, {"p": PARAMS, "old": ZEROS}),
    "twice": (the_same_twice, {"p": PARAMS, "old": ZEROS}),
    "history": (history, {"p": PARAMS, "old": ZEROS, "older": ZEROS}),
    "lbfgs": (lbfgs, {"p": PARAMS, "old": LBFGS.init(jax.tree.map(jnp.asarray, PARAMS))}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_calls_one_after_the_other(name: str, method: Any) -> None:
    function, state = STEPS[name]
    expected, plain = state, jax.jit(function)
    step = autopar.parallelize(function, method=method, batch_axes=(None, 0))
    for _ in range(3):
        state, value = step(state, BATCH)
        expected, other = plain(expected, BATCH)
        np.testing.assert_allclose(value, other, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), autopar.gather(state), expected)


def test_two_leaves_that_shardings_tell_apart() -> None:
    hints = {"state['p']['w']": (-1, None), "state['old']['w']": (None, -1)}
    step = autopar.parallelize(exchanged, hints=hints, batch_axes=(None, 0))
    state, plain = STEPS["exchanged"][1], jax.jit(exchanged)
    expected = state
    for _ in range(3):
        state, _ = step(state, BATCH)
        expected, _ = plain(expected, BATCH)
    np.testing.assert_allclose(autopar.gather(state)["p"]["w"], expected["p"]["w"], rtol=1e-4)


@pytest.mark.parametrize("method", [recipes.gpipe(2, 2), recipes.megatron(2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("weight", [2.0, 3, np.float32(2.0), jnp.bfloat16(2.0), True], ids=repr)
def test_an_argument_that_only_the_update_of_a_later_stage_reads(method: Any, weight: Any) -> None:
    """Cast first, which each stage does by itself."""

    def step(p: Any, b: Any, weight: Any) -> Any:
        value, g = jax.value_and_grad(loss)(p, b)
        last = p["v"] - 0.1 * g["v"] * weight
        return {"w": p["w"] - 0.1 * g["w"], "v": last}, value * weight

    run = autopar.parallelize(step, method=method, batch_axes=(None, 0, None))
    p, value = run(PARAMS, BATCH, weight)
    expected, other = jax.jit(step)(PARAMS, BATCH, weight)
    np.testing.assert_allclose(value, other, rtol=1e-5)
    np.testing.assert_allclose(autopar.gather(p)["v"], expected["v"], rtol=1e-5)


def test_results_of_one_equation_that_are_wanted_alike_are_cut_together() -> None:
    """Residuals of a checkpointed body whose rotation splits an array in two."""
    width, length, examples = 16, 8, 16
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def rotated(y: Any, at: Any) -> Any:
        s, c = (f(at[..., None, None] * jnp.ones(4)) for f in (jnp.sin, jnp.cos))
        a, b = jnp.split(y.reshape(y.shape[0], length, 2, 8), 2, -1)
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1).reshape(y.shape)

    def step(p: Any, x: Any) -> Any:
        def value(p: Any) -> Any:
            at = jnp.broadcast_to(jnp.arange(length), x.shape[:2])
            body = jax.checkpoint(lambda x, w: (x + rotated(x @ w, at) * rotated(x, at), None), policy=keep)
            return jnp.mean(jax.lax.scan(body, x, p)[0] ** 2)

        loss, g = jax.value_and_grad(value)(p)
        return p - 0.1 * g, loss

    p, x = 0.1 * jnp.ones((2, width, width)), jnp.linspace(0, 1, examples * length * width).reshape(16, length, width)
    run = autopar.parallelize(step, method=recipes.gpipe(2, 2), batch_axes=(None, 0))
    found, loss = run(p, x)
    expected, other = jax.jit(step)(p, x)
    np.testing.assert_allclose(loss, other, rtol=1e-5)
    np.testing.assert_allclose(autopar.gather(found), expected, rtol=1e-4, atol=1e-6)
    assert run.plan(p, x).num_microbatches == 2
