"""A step that trains two layers, of which the second has no activation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

BATCH, WIDTH = 8, 16


def params(width: int = WIDTH) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=(width, width)).astype(np.float32) for name in ("v", "w")}


def examples(batch: int = BATCH) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=(batch, WIDTH)).astype(np.float32)}


def mean_square(p: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"]) ** 2)


def train_step(p: Any, batch: Any) -> Any:
    loss, g = jax.value_and_grad(mean_square)(p, batch)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), loss


def assert_close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), autopar.gather(found), wanted)
