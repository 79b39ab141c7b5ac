"""What a process of a job about checkpoints runs: `checkpoint_job.py ADDRESS FOLDER save|restore|both CASE...`.

Each case is saved to FOLDER/CASE-PROCESSES after one step, with its digest in FOLDER/saved-CASE-PROCESSES; each
restores all that there are. What differs ends the job with an error.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import autopar
from tests.processes import cases
from tests.processes.job import start


def main(address: str, folder: pathlib.Path, what: str, names: list[str]) -> None:
    """Save, restore, or first the one and then the other."""
    start(address)
    ready = {}
    for name in names:
        file = folder / f"{name}.plan.json"
        ready[name] = cases.compiled(cases.CHECKPOINTS[name], autopar.Plan.load(file) if file.exists() else None)
        if jax.process_count() == 1:
            ready[name].executable.plan.save(file)
    if what != "restore":
        for name, case in ready.items():
            save(folder, f"{name}-{jax.process_count()}", case)
        multihost_utils.sync_global_devices("all are saved")
    wrong = []
    if what != "save":
        for name, case in ready.items():
            for saved in sorted(folder.glob("saved-*")):
                source = saved.name.removeprefix("saved-")
                parts, others = batches(case), batches(case)
                state = autopar.restore(folder / source, like=case.step, batches=parts)
                if cases.digest(autopar.gather(state)) != saved.read_text():
                    wrong.append(f"{name} of {jax.process_count()} processes restores {source} wrongly")
                next(others)  # what the step before the checkpoint has seen
                if here(next(parts)) != here(next(others)):
                    wrong.append(f"{name} of {jax.process_count()} processes goes on with other examples: {source}")
    if wrong:
        raise AssertionError(wrong)


def batches(case: cases.Compiled) -> Any:
    """This process's part of each."""
    rows = case.executable._worker.rows.numbers
    return case.step.batches(jax.tree.map(lambda x: x[rows], batch) for batch in case.batches)


def here(examples: Any) -> list[bytes]:
    """What the devices of this process hold of a batch."""
    arrays = [array for leaf in jax.tree.leaves(examples) for array in leaf.arrays.values()]
    return [np.asarray(shard.data).tobytes() for array in arrays for shard in array.addressable_shards]


def save(folder: pathlib.Path, name: str, case: cases.Compiled) -> None:
    """The state after a step on this process's part of a batch; the next is given it while it is written."""
    parts = batches(case)
    state, _ = case.step(case.start(), next(parts))
    whole = autopar.gather(state)
    autopar.save(folder / name, state, step=1, batches=parts)
    case.step(state, next(parts))
    if jax.process_index() == 0:
        (folder / f"saved-{name}").write_text(cases.digest(whole))
        (folder / f"shards-{name}").write_text(str(case.step.data_shard.shard_count))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
