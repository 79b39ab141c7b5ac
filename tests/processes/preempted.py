"""Steps that are saved now and then, until a process is asked to end: `preempted.py FOLDER PROCESS AT NUMBER`.

Where AT is -2, it is asked from outside as soon as it has said "begun". Each hundredth step goes to a second folder.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import autopar


def train_step(state: Any, batch: Any) -> Any:
    """What the state is depends on all batches."""
    return {"count": state["count"] + 1, "a": 0.9 * state["a"] + batch.mean(0)}, (batch @ state["a"]).mean()


def main(folder: pathlib.Path, process: int, at: int, number: int) -> None:
    """Train, save each thousandth step, and be asked to end before step `at`."""
    step = autopar.parallelize(train_step, method=autopar.recipes.zero(3))
    every = itertools.cycle(np.random.default_rng(k).normal(size=(8, 64)).astype(np.float32) for k in range(5))
    state: Any = {"count": 0, "a": np.zeros(64, np.float32)}
    step.compile(state, next(every))
    start = autopar.latest_step(folder) or 0
    batches = step.batches(itertools.cycle([np.full((8, 64), k, np.float32) for k in range(5)]))
    if start:
        state = autopar.restore(folder, like=step, batches=batches)
    options = ocp.CheckpointManagerOptions(save_interval_steps=1000)
    rarely = ocp.CheckpointManagerOptions(save_interval_steps=100)
    for k in range(start, number):
        if k == at and jax.process_index() == process:
            os.kill(os.getpid(), signal.SIGTERM)
        state, _ = step(state, next(batches))
        autopar.save(folder, state, step=k + 1, batches=batches, options=options)
        autopar.save(folder.with_name("milestones"), state, step=k + 1, options=rarely)
        if k == start:
            print("begun", flush=True)
    print("ended", float(autopar.gather(state)["a"][0]), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5]))
