"""Steps until a process of the job is lost: `lost.py WHAT VICTIM [FOLDER]`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np

import autopar

AT = 4  # the step at which it happens


def train_step(weights: Any, x: Any) -> Any:
    """Gradient descent on one layer after the other."""

    def loss_of(weights: Any) -> Any:
        y = x
        for w in weights:
            y = jax.numpy.tanh(y @ w)
        return (y**2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


def wait_for_examples(seconds: float) -> None:
    """As a loader does."""
    time.sleep(seconds)


def happen(what: str) -> None:
    """To this process."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "crash":
        os.abort()
    elif what == "slow":
        wait_for_examples(15.0)
    elif what == "fork":  # the child goes on when this process is gone, as a loader's may
        if os.fork() == 0:
            time.sleep(10)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def main(what: str, victim: int) -> None:
    """Train until it happens; of what is slow a few steps more."""
    method = autopar.recipes.gpipe(2, num_microbatches=2) if jax.process_count() == 2 else autopar.recipes.zero(3)
    step = autopar.parallelize(train_step, method=method)
    weights: Any = [np.eye(16, dtype=np.float32)] * 2
    x = np.ones((12, 16), np.float32)
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 400_000, lambda _, y: jax.numpy.sin(y) + x, x))
    for number in range(1, {"slow": 8, "devices": 60}.get(what, 10_000)):
        if number == AT and jax.process_index() == victim:
            time.sleep(2.5)  # so that all have told where they are
            happen(what)
        weights, loss = step(weights, x)
        if what == "devices":
            work(loss).block_until_ready()
        float(loss)
        if number == AT - 1:
            print(f"process id {os.getpid()}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
