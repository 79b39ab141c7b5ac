"""What each process of leg 3 of `benchmarks.train` runs: `train_processes.py FOLDER HALF STEPS SEED`.

Trains the first half of the steps, and saves the state.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax
from rich.console import Console

import autopar
from benchmarks import text
from benchmarks.train import CHECKPOINTS, FIRST_HALF, planned, train


def main(folder: pathlib.Path, half: int, steps: int, seed: int) -> None:
    """Train and save; the first process tells of it."""
    is_first = jax.process_index() == 0
    out = Console(quiet=not is_first)
    corpus = text.standard_library()
    ready = planned(None, steps)
    out.print(str(ready.plan), markup=False, highlight=False)
    state = ready.step.init(ready.init, jax.random.key(seed))
    run, state = train("two processes", ready.step, ready.evaluate, state, corpus, range(half), seed, out)
    autopar.save(folder / CHECKPOINTS, state, step=half)
    if is_first:
        (folder / FIRST_HALF).write_text(json.dumps(dataclasses.asdict(run)))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
