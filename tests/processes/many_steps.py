"""A thousand steps of a pipeline over two processes; prints what each holds after 200 of them and at the end."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

PAGE = 4096  # bytes


def train_step(state: Any, batch: Any) -> Any:
    """Two layers and a loss."""

    def loss_of(params: Any) -> Any:
        hidden = jnp.tanh(jnp.tanh(batch["x"] @ params["a"]) @ params["b"])
        return ((hidden @ params["c"] - batch["y"]) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
    return {"params": params, "count": state["count"] + 1}, loss


def held() -> tuple[int, int]:
    """Bytes of this process, and JAX's arrays."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * PAGE, len(jax.live_arrays())


def main() -> None:
    """Train."""
    step = autopar.parallelize(train_step, method=autopar.recipes.gpipe(2, 2))
    numbers = np.random.default_rng(0)
    params = {name: numbers.normal(size=(64, 64)).astype(np.float32) * 0.2 for name in "abc"}
    state: Any = {"params": params, "count": 0}
    batch = {name: numbers.normal(size=(256, 64)).astype(np.float32) for name in "xy"}
    found = []
    for number in range(1200):
        state, loss = step(state, batch)
        if number in (199, 1199):
            assert np.isfinite(float(loss))
            found.append(held())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
