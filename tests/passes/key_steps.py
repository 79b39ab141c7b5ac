"""Train steps that draw random bits: dropout and noise, with keys of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.passes.step_case import BATCH, WIDTH, Case, Cases, examples, listed_in, losses, params, sgd

CASES: Cases = {}
case = listed_in(CASES)


@case
def dropout() -> Case:
    def step(state: Any, b: Any) -> Any:
        key, sub = jax.random.split(state["key"])

        def loss(p: Any) -> Any:
            h = jnp.tanh(b["x"] @ p["w"])
            mask = jax.random.bernoulli(sub, 0.5, h.shape)
            each = optax.softmax_cross_entropy_with_integer_labels(jnp.where(mask, h / 0.5, 0) @ p["v"], b["y"])
            return each.mean(), mask

        (value, mask), g = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"params": sgd(state["params"], g), "key": key}, (value, mask)

    return Case(step, {"params": params(), "key": jax.random.key(0)}, examples())


@case
def noise_with_a_raw_key() -> Case:
    def step(state: Any, b: Any) -> Any:
        p, key = state
        key, sub = jax.random.split(key)
        noisy = {**b, "x": b["x"] + jax.random.normal(sub, b["x"].shape)}
        value, g = jax.value_and_grad(lambda p: losses(p, noisy).mean())(p)
        return (sgd(p, g), key), (value, noisy["x"])

    return Case(step, (params(), jax.random.PRNGKey(0)), examples())


@case
def a_key_per_example() -> Case:
    def step(state: Any, b: Any) -> Any:
        key, sub = jax.random.split(state["key"])

        def loss(p: Any) -> Any:
            keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (WIDTH,)))(jax.random.split(sub, BATCH))
            return losses(p, {**b, "x": jnp.where(keep, b["x"], 0)}).mean(), keep

        (value, keep), g = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"params": sgd(state["params"], g), "key": key}, (value, keep)

    return Case(step, {"params": params(), "key": jax.random.key(0)}, examples())


def with_dropout(loss: Callable[[Any, Any, Any], Any]) -> Case:
    """A step that renews the key which its loss(parameters, batch, key) draws from."""

    def step(state: Any, b: Any) -> Any:
        key, sub = jax.random.split(state["key"])
        value, g = jax.value_and_grad(loss)(state["params"], b, sub)
        return {"params": sgd(state["params"], g), "key": key}, value

    return Case(step, {"params": params(), "key": jax.random.key(0)}, examples())


def mean_entropy(h: Any, p: Any, b: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(h @ p["v"], b["y"]).mean()


@case
def rematerialized_dropout() -> Case:
    def loss(p: Any, b: Any, key: Any) -> Any:
        @jax.checkpoint
        def block(w: Any, x: Any) -> Any:
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ w), 0)

        return mean_entropy(block(p["w"], block(p["w"], b["x"])), p, b)

    return with_dropout(loss)


@case
def rematerialized_dropout_of_split_keys() -> Case:
    @jax.checkpoint
    def block(w: Any, x: Any, key: Any) -> Any:
        first, second = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(first, 0.5, x.shape), x, 0)
        return jnp.where(jax.random.bernoulli(second, 0.5, x.shape), jnp.tanh(x @ w), 0)

    def loss(p: Any, b: Any, key: Any) -> Any:
        return mean_entropy(block(p["w"], block(p["w"], b["x"], key), jax.random.fold_in(key, 1)), p, b)

    return with_dropout(loss)


@case
def rematerialized_dropout_by_example() -> Case:
    """A key for each example, made in the block and before it."""

    def masked(keys: Any, x: Any) -> Any:
        return jnp.where(jax.vmap(lambda k, row: jax.random.bernoulli(k, 0.5, row.shape))(keys, x), x, 0)

    @jax.checkpoint
    def block(w: Any, x: Any, key: Any, keys: Any) -> Any:
        return masked(keys, jnp.tanh(masked(jax.random.split(key, len(x)), x) @ w))

    def loss(p: Any, b: Any, key: Any) -> Any:
        keys = jax.random.split(jax.random.fold_in(key, 1), len(b["x"]))
        return mean_entropy(block(p["w"], b["x"], key, keys), p, b)

    return with_dropout(loss)


@case
def rematerialized_dropout_by_batch() -> Case:
    """A key that depends on the whole batch, which the recomputation must draw from alike."""

    @jax.checkpoint
    def block(w: Any, x: Any, y: Any, key: Any) -> Any:
        key = jax.random.split(jax.random.fold_in(key, jnp.sum(y.astype(jnp.uint32), dtype=jnp.uint32)))[0]
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ w), 0)

    return with_dropout(lambda p, b, key: mean_entropy(block(p["w"], b["x"], b["y"], key), p, b))
