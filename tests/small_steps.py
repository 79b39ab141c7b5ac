"""Two small steps, a language model's and a matrix's, with their states and batches, and ways to plan them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar import recipes

VOCABULARY, WIDTH, BATCH, TIME = 16, 8, 8, 4
OPTIMIZER = optax.adam(1e-2)

DATA_PARALLEL = recipes.data_parallel()
ZERO = recipes.zero(3)
PIPELINE = recipes.gpipe(2, 2)


class State(NamedTuple):
    params: Any
    opt: Any
    step: Any


def init(key: jax.Array) -> State:
    """A language model whose embedding is tied to its output."""
    emb, w, v = jax.random.split(key, 3)
    params = {
        "emb": jax.random.normal(emb, (VOCABULARY, WIDTH)),
        "layers": [jax.random.normal(k, (WIDTH, WIDTH)) / 3 for k in (w, v)],
        "nothing": None,
    }
    return State(params, OPTIMIZER.init(params), jnp.zeros((), jnp.int32))


def loss_of(params: Any, batch: Any) -> jax.Array:
    h = params["emb"][batch["x"]]
    for w in params["layers"]:
        h = h + jnp.tanh(h @ w)
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(h @ params["emb"].T, batch["y"])
    return losses.mean()


def train_step(state: State, batch: Any) -> Any:
    loss, g = jax.value_and_grad(loss_of)(state.params, batch)
    updates, opt = OPTIMIZER.update(g, state.opt, state.params)
    return State(optax.apply_updates(state.params, updates), opt, state.step + 1), {"loss": loss}


def batch_of(batch: int = BATCH, time: int = TIME) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, batch, time), np.int32)
    return {"x": ids[0], "y": ids[1]}


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def placements(tree: Any) -> list[Any]:
    return [x.sharding for x in jax.tree.leaves(tree)]


def assert_close(found: Any, wanted: Any) -> None:
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(wanted)]
    assert structures[0] == structures[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), autopar.gather(found), wanted)


def parallelized(method: autopar.Method, **options: Any) -> autopar.Parallelized:
    return autopar.parallelize(train_step, method=method, devices=jax.devices()[:4], **options)


@functools.cache
def reference() -> tuple[State, ...]:
    """States after 0, 1, 2, .. steps on one device: whole batch, shorter batch, other length, whole batch."""
    states = [init(jax.random.key(0))]
    for batch in (batch_of(), batch_of(4), batch_of(time=2), batch_of()):
        states.append(jax.jit(train_step)(states[-1], batch)[0])
    return tuple(states)


def mean_square(p: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ p["w"]) ** 2)


def sgd(p: Any, x: Any, rate: float = 0.1, name: str = "sgd") -> Any:
    loss, g = jax.value_and_grad(mean_square)(p, x)
    assert isinstance(rate, float)
    return jax.tree.map(lambda a, b: a - rate * b, p, g), loss


def weights() -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)}


def rows(n: int = BATCH) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(n, 4)).astype(np.float32)


ONE: dict[str, Any] = {"method": DATA_PARALLEL, "devices": jax.devices()[:2]}
