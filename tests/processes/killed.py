"""Steps that are saved one after another, until one of the processes is killed: `killed.py FOLDER SEED`."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import sys
import threading
from typing import Any

import jax
import numpy as np

import autopar


def train_step(state: Any, batch: Any) -> Any:
    """What the state is after so many steps is easy to say."""
    return {"count": state["count"] + 1, "a": state["a"] + 0.5}, (batch @ state["a"]).mean()


def main(folder: pathlib.Path, numbers: random.Random) -> None:
    """Train, save, and die."""
    step = autopar.parallelize(train_step, method=autopar.recipes.zero(3))
    batch = np.ones((8, 1024), np.float32)
    state: Any = {"count": 0, "a": np.zeros((1024, 512), np.float32)}
    moment, victim = numbers.uniform(0, 3), numbers.randrange(2)
    for number in range(1, 10_000):
        state, _ = step(state, batch)
        autopar.save(folder, state, step=number)
        if number == 2 and jax.process_index() == victim:  # step 1 is complete
            threading.Timer(moment, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), random.Random(int(sys.argv[2])))
