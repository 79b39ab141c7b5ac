"""One array in several arguments: what is given away is copied before, once, where another argument has it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes

METHODS = pytest.mark.parametrize(
    "method", [recipes.data_parallel(), recipes.zero(3), recipes.gpipe(2, 2)], ids=lambda m: m.name
)
WIDTH = 8


def train_step(state: Any, x: Any) -> Any:
    """Two layers, their moving average, and what is never changed."""
    params, average, fixed = state

    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ fixed["a"]) ** 2)

    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
    return params, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params), fixed


def layers(seed: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed))
    return {name: jax.random.normal(key, (WIDTH, WIDTH)) / 2 for name, key in zip("ab", keys, strict=True)}


def examples() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def assert_close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), autopar.gather(found), wanted)


def same(x: jax.Array) -> jax.Array:
    return x


def other_array_of_the_same_buffers(x: jax.Array) -> jax.Array:
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [s.data for s in x.addressable_shards])


@METHODS
@pytest.mark.parametrize("alias", [same, other_array_of_the_same_buffers])
def test_one_array_in_several_leaves_of_the_state(method: Any, alias: Callable[[Any], Any]) -> None:
    """A moving average that starts from the parameters, and, where that lies with them, what is never changed."""
    step = autopar.parallelize(train_step, method=method, batch_axes=(None, 0), devices=jax.devices()[:4])
    state = step((layers(), layers(1), layers(2)), examples())
    state, expected = step(state, examples()), jax.jit(train_step)((layers(), layers(1), layers(2)), examples())
    expected = jax.jit(train_step)(expected, examples())
    for _ in range(2):
        fixed = 2 if method.num_stages else 0
        state = (state[0], jax.tree.map(alias, state[0]), jax.tree.map(alias, state[fixed]))
        expected = (expected[0], expected[0], expected[fixed])
        for _ in range(2):  # none of the buffers is shared in the second
            state, expected = step(state, examples()), jax.jit(train_step)(expected, examples())
    assert_close(state, expected)


def test_an_array_that_is_state_and_examples() -> None:
    """One is given away, the other not: both are read, wherever the caller has them from."""

    def step(state: Any, x: Any, y: Any) -> Any:
        g = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * g}, jnp.sum(x)

    for devices in (1, 4):
        parallel = autopar.parallelize(step, batch_axes=(None, 0, 0), devices=jax.devices()[:devices])
        state, _ = parallel({"w": layers()["a"]}, examples()[:WIDTH], examples()[:WIDTH])
        x = autopar.gather(state["w"])
        expected = jax.jit(step)({"w": x}, x, examples()[:WIDTH])
        found = parallel(state, state["w"], examples()[:WIDTH])
        assert_close(found, expected)


def test_what_is_given_away_once_is_not_copied() -> None:
    """The array that no other argument has is overwritten in place, and one of two is."""

    def pointers(tree: Any) -> list[int]:
        return [x.addressable_data(0).unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]

    step = autopar.parallelize(train_step, method=recipes.data_parallel(), devices=jax.devices()[:2])
    state = step((layers(), layers(1), layers(2)), examples())
    before = pointers(state[:2])
    state = step(state, examples())
    assert pointers(state[:2]) == before
    state = step((state[0], state[0], state[2]), examples())
    assert pointers(state[0]) == before[:2] and len({*pointers(state), *before}) >= 6
    assert all(not x.is_deleted() for x in jax.tree.leaves(state))


def test_random_keys_shared() -> None:
    def step(state: Any, x: Any) -> Any:
        first, second = jax.random.split(state["key"])[0], jax.random.split(state["other"])[1]
        return {"key": first, "other": second, "w": state["w"] * 0.9}, jnp.sum(x * state["w"][0, 0])

    parallel = autopar.parallelize(step, batch_axes=(None, 0), devices=jax.devices()[:2])
    start = {"key": jax.random.key(0), "other": jax.random.key(1), "w": layers()["a"]}
    state, _ = parallel(start, examples())
    expected, _ = jax.jit(step)(start, examples())
    state["other"] = state["key"]
    expected["other"] = expected["key"]
    found, _ = parallel(state, examples())
    expected, _ = jax.jit(step)(expected, examples())
    for name in ("key", "other"):
        np.testing.assert_array_equal(jax.random.key_data(found[name]), jax.random.key_data(expected[name]))
