"""A script that any launcher starts: alone, or as one of several processes. It says nothing of how many there are.

autopar run --processes 2 examples/launch/train.py [FOLDER]

With a folder for checkpoints it goes on from the latest one.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

WIDTH, EXAMPLES, STEPS = 64, 32, 20


def loss_of(params: Any, batch: Any) -> Any:
    """Of two layers."""
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return ((hidden @ params["down"] - batch["y"]) ** 2).mean()


@autopar.parallelize
def train_step(params: Any, batch: Any) -> Any:
    """Gradient descent."""
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def main() -> None:
    """Every process does the same: those of a job give and take what belongs together."""
    numbers = np.random.default_rng(0)  # the same on all processes
    params: Any = {name: numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for name in ("up", "down")}
    batch = {name: numbers.normal(size=(EXAMPLES, WIDTH)).astype(np.float32) for name in "xy"}
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    start = 0
    if folder is not None and (latest := autopar.latest_step(folder)) is not None:
        train_step.compile(params, batch)
        params, start = autopar.restore(folder, like=train_step), latest
    for step in range(start, STEPS):
        params, loss = train_step(params, batch)
        if folder is not None:
            autopar.save(folder, params, step=step + 1)
        if step % 5 == 4 and jax.process_index() == 0:
            print(f"step {step + 1}: loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    autopar.initialize()  # joins the job, if there is one; `autopar run` has done so before
    main()
