"""A process of a job that goes on from its latest checkpoint: `faults_processes.py FOLDER STEPS [SKEWED]`.

What it did is in FOLDER/log, a line of JSON for each start and each step. The clock of process number SKEWED is an hour
behind.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

WIDTH, EXAMPLES, EVERY = 192, 24, 3
PAUSE = 0.05  # seconds of a step that are no computation


def train_step(state: Any, batch: Any) -> Any:
    """Descent with momentum on three layers; the state counts its steps."""

    def loss_of(params: Any) -> Any:
        hidden = batch["x"]
        for name in ("a", "b"):
            hidden = jnp.tanh(hidden @ params[name])
        return ((hidden @ params["c"] - batch["y"]) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.05 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "steps": state["steps"] + 1}, loss


def batch_of(step: int) -> dict[str, Any]:
    """The same for any number of processes."""
    numbers = np.random.default_rng(step)
    return {name: numbers.normal(size=(EXAMPLES, WIDTH)).astype(np.float32) for name in "xy"}


def main(folder: pathlib.Path, steps: int) -> None:
    """Train from the latest checkpoint on, with one after some steps each."""
    numbers = np.random.default_rng(0)
    params = {name: numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 14 for name in "abc"}
    state: Any = {"params": params, "momentum": jax.tree.map(np.zeros_like, params), "steps": np.int32(0)}
    checkpoints, is_first = folder / "checkpoints", jax.process_index() == 0
    with (folder / "log").open("a") as log:

        def say(**what: Any) -> None:
            if is_first:
                log.write(json.dumps(what) + "\n")
                log.flush()

        step = autopar.parallelize(train_step, method=autopar.recipes.zero(3)).compile(state, batch_of(0))
        if autopar.latest_step(checkpoints) is not None:
            state = autopar.restore(checkpoints, like=step)
        start = int(state["steps"])
        say(start=start, processes=jax.process_count())
        for number in range(start + 1, steps + 1):
            state, loss = step(state, batch_of(number))
            say(step=number, loss=float(loss), at=time.monotonic())
            time.sleep(PAUSE)
            if number % EVERY == 0:
                autopar.save(checkpoints, state, step=number)
    autopar.wait_until_saved()


if __name__ == "__main__":
    if len(sys.argv) > 3 and jax.process_index() == int(sys.argv[3]):
        right = time.time
        time.time = lambda: right() - 3600.0
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
