"""A process that trains the GPT of `make train` from its latest checkpoint on: `faults_gpt.py FOLDER STEPS VICTIM`.

In the first start the process number VICTIM kills itself after half of the steps. FOLDER/killed says when, and
FOLDER/log has a line of JSON for each step: both by the clock of the machine.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time

import jax

import autopar
from benchmarks import text
from benchmarks.train import BATCH_SIZE, CONFIG, planned


def main(folder: pathlib.Path, steps: int, victim: int) -> None:
    """Train, with a checkpoint after each step."""
    checkpoints, killed, corpus = folder / "checkpoints", folder / "killed", text.standard_library()
    ready = planned(None, steps)
    start = autopar.latest_step(checkpoints) or 0
    if start:
        state = autopar.restore(checkpoints, like=ready.step)
    else:
        state = ready.step.init(ready.init, jax.random.key(0))
    for number in range(start + 1, steps + 1):
        batch = text.train_batch(corpus, BATCH_SIZE, CONFIG.sequence_length, 0, number)
        state, metrics = ready.step(state, batch)
        loss = float(metrics["loss"])
        if jax.process_index() == 0:
            with (folder / "log").open("a") as log:
                log.write(json.dumps({"step": number, "loss": loss, "at": time.monotonic()}) + "\n")
        autopar.save(checkpoints, state, step=number)
        if number == steps // 2 and jax.process_index() == victim and not killed.exists():
            autopar.wait_until_saved()
            killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
