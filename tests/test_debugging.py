"""JAX's switches for debugging: what they find is found here, too, and said in our words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import NotFiniteError, TraceError, UserError

METHODS = pytest.mark.parametrize("method", [recipes.zero(3), recipes.gpipe(2, 2)], ids=lambda m: m.name)


def train_step(w: Any, x: Any, shift: Any) -> Any:
    """Its mask has infinities between programs, and none in the results unless `shift` is too small."""

    def loss(w: Any) -> Any:
        scores = jnp.where(jnp.arange(4) < 2, jnp.tanh(x @ w["a"]) @ w["b"], -jnp.inf)
        return -jnp.mean(jax.nn.log_softmax(scores)[:, 0])

    value, g = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), jnp.log(value + shift)


def arguments(shift: float) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    w = {name: jax.random.normal(key, (4, 4)) for name, key in zip("ab", keys, strict=False)}
    return w, jax.random.normal(keys[2], (16, 4)), jnp.float32(shift)


@METHODS
def test_nans_are_found_in_results(method: Any) -> None:
    step = autopar.parallelize(train_step, batch_axes=(None, 0, None), method=method)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            jax.jit(train_step)(*arguments(-100.0))
        with pytest.raises(NotFiniteError, match=r"^invalid value \(nan\) encountered in output\[1\] of train_step"):
            step(*arguments(-100.0))
        found = step(*arguments(1.0))
    np.testing.assert_allclose(found[1], jax.jit(train_step)(*arguments(1.0))[1], rtol=1e-5)
    assert np.isnan(step(*arguments(-100.0))[1])
    assert issubclass(NotFiniteError, UserError) and issubclass(NotFiniteError, FloatingPointError)


def test_infinities_are_found_in_results() -> None:
    step = autopar.parallelize(train_step, batch_axes=(None, 0, None), method=recipes.data_parallel())
    infinite, finite = arguments(np.inf), arguments(1.0)
    with jax.debug_infs(True):
        with pytest.raises(NotFiniteError, match=r"^invalid value \(inf\) encountered in output\[1\] of train_step"):
            step(*infinite)
        step(*finite)


@METHODS
def test_the_state_of_a_bad_step_is_still_there(method: Any) -> None:
    """And the steps that follow are as if there had been none."""
    step = autopar.parallelize(train_step, batch_axes=(None, 0, None), method=method)
    w, x, shift = arguments(1.0)
    w, _ = step(w, x, shift)
    with jax.debug_nans(True), pytest.raises(NotFiniteError):
        step(w, x, jnp.float32(-100.0))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(w))
    with jax.debug_nans(True):
        w, _ = step(w, x, shift)
    w, _ = step(w, x, shift)
    expected = arguments(1.0)[0]
    for _ in range(3):
        expected, _ = jax.jit(train_step)(expected, x, shift)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), autopar.gather(w), expected)


def test_a_placed_batch_without_jit_is_refused() -> None:
    step = autopar.parallelize(train_step, batch_axes=(None, 0, None), method=recipes.data_parallel())
    w, x, shift = arguments(1.0)
    step.compile(w, x, shift)
    (batch,) = step.batches([x])
    with jax.disable_jit(), pytest.raises(TraceError, match=r"under jax.disable_jit with a batch"):
        step(w, batch, shift)


@METHODS
def test_without_jit_the_plain_function_runs(method: Any) -> None:
    """On values that can be looked at, wherever the state lies; and then in parallel again."""
    seen = []

    def step(w: Any, x: Any, shift: Any) -> Any:
        seen.append(isinstance(w["a"], jax.core.Tracer))
        return train_step(w, x, shift)

    parallel = autopar.parallelize(step, batch_axes=(None, 0, None), method=method)
    w, x, shift = arguments(1.0)
    expected = w
    for disable in (True, False, True, False):
        with jax.disable_jit(disable):
            w, _ = parallel(w, x, shift)
        expected, _ = jax.jit(train_step)(expected, x, shift)
    assert seen == [False, True, False]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), autopar.gather(w), expected)


def test_what_is_compiled_ahead_runs_without_jit() -> None:
    """As traced, loops and all; where jit is off, it is compiled nevertheless."""

    def step(w: Any, x: Any) -> Any:
        return w * 0.9, jax.lax.fori_loop(0, 3, lambda i, s: s + jnp.sum(x @ w), 0.0)

    parallel = autopar.parallelize(step, batch_axes=(None, 0), method=recipes.data_parallel())
    w, x = jnp.ones((4, 4)), jnp.ones((16, 4))
    with jax.disable_jit():
        executable = parallel.compile(w, x)
        _, total = executable(w, x)
    assert float(total) == 3 * 16 * 16
