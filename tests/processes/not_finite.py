"""A process of a job in whose step a NaN arises, in a stage that several processes share: `not_finite.py METHOD`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import recipes

METHODS = {"zero": recipes.zero(3), "data_parallel": recipes.data_parallel(), "gpipe": recipes.gpipe(2, 2)}
WIDTH, EXAMPLES = 16, 24


def loss_of(params: Any, batch: Any) -> Any:
    """Of a chain of layers."""
    h = batch["x"]
    for w in params:
        h = jnp.tanh(h @ w)
    return jnp.mean(jnp.log(2.0 + h - batch["margin"]))


def train_step(params: Any, batch: Any) -> Any:
    """Gradient descent."""
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


if __name__ == "__main__":
    step = autopar.debug(autopar.parallelize(train_step, method=METHODS[sys.argv[1]]))
    params = [np.eye(WIDTH, dtype=np.float32) for _ in range(4)]
    batch = {"x": np.ones((EXAMPLES, WIDTH), np.float32), "margin": np.zeros((EXAMPLES, 1), np.float32)}
    state, loss = step(params, batch)
    batch["margin"][EXAMPLES - 1] = 100.0
    try:
        step(state, batch)
    except FloatingPointError as error:
        print(f"told {error}", flush=True)
