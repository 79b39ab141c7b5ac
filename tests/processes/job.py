"""What a process of a test's job runs: `autopar run [--processes N] tests/processes/job.py ADDRESS FOLDER CASE...`.

Alone it makes the plans; in a job it runs them. Digests go to FOLDER/PROCESSES-PROCESS.json.
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax

import autopar
from tests.processes import cases


def start(address: str) -> None:
    """Compile as in a job; `address` is for a process that is alone."""
    jax.config.update("jax_enable_compilation_cache", False)
    if not jax.distributed.is_initialized():  # the same collectives as in a job
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, 1, 0)


def main(address: str, folder: pathlib.Path, names: list[str]) -> None:
    """Run the cases."""
    start(address)
    digests = {}
    for name in names:
        file = folder / f"{name}.plan.json"
        plan = autopar.Plan.load(file) if jax.process_count() > 1 else None
        plan, digests[name] = cases.train({**cases.CASES, **cases.SLOW}[name], plan)
        if jax.process_count() == 1:
            plan.save(file)
        print(name, digests[name], flush=True)
    (folder / f"{jax.process_count()}-{jax.process_index()}.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:])
