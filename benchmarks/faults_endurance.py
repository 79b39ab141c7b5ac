"""Ten thousand steps with a checkpoint every so many; what each process holds on the way: `faults_endurance.py FOLDER`.

FOLDER/held-N is what process N held at each checkpoint.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import autopar
from benchmarks.faults_processes import batch_of, train_step

STEPS, EVERY = 10_000, 500
WIDTH = 16


def held() -> dict[str, int]:
    """By this process."""
    autopar.wait_until_saved()
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    (resident,) = (int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    (threads,) = (int(line.split()[1]) for line in status if line.startswith("Threads:"))
    arrays = jax.live_arrays()
    return {
        "resident_kib": resident, "threads": threads, "files": len(os.listdir("/proc/self/fd")),
        "arrays": len(arrays), "array_bytes": sum(x.nbytes for x in arrays),
    }  # fmt: skip


def main(folder: pathlib.Path) -> None:
    """Train a tiny model."""
    params = {name: np.eye(WIDTH, dtype=np.float32) for name in "abc"}
    state: Any = {"params": params, "momentum": jax.tree.map(np.zeros_like, params), "steps": np.int32(0)}
    batches = [{name: x[:, :WIDTH] for name, x in batch_of(k).items()} for k in range(4)]
    step = autopar.parallelize(train_step, method=autopar.recipes.zero(3)).compile(state, batches[0])
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    found = []
    for number in range(1, STEPS + 1):
        state, _ = step(state, batches[number % len(batches)])
        if number % EVERY == 0:
            autopar.save(folder / "checkpoints", state, step=number, options=options)
            found.append(held())
    (folder / f"held-{jax.process_index()}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
