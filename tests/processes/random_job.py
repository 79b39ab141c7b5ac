"""Random steps under plans drawn by lot: `autopar run [--processes N] random_job.py ADDRESS FOLDER SEED...`.

Every process draws the same by itself. Digests of the results go to FOLDER/PROCESSES-PROCESS.json.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys

import jax
import numpy as np

import autopar
from autopar.runtime.processes import this_job
from tests.planned import analyse
from tests.processes import cases
from tests.processes.job import start
from tests.random_plans import MESHES, plan_by_lot
from tests.random_steps import RandomStep, random_step

SHAPES = [shape for shape in MESHES if math.prod(shape) <= cases.DEVICES]


def run(seed: int) -> tuple[RandomStep, list[np.ndarray]]:
    """A step and its results; stages inside processes, across and over several."""
    random = np.random.default_rng(seed)
    case = random_step(random)
    shape = SHAPES[seed % len(SHAPES)]
    most = cases.DEVICES // math.prod(shape)
    stages, microbatches = int(random.integers(1, most + 1)), int(2 ** random.integers(0, 3))
    analysis = analyse(case.step, case.weights, case.x, batch_axes=(None, 0))
    microbatches = math.gcd(microbatches, analysis.max_microbatches)
    planned = plan_by_lot(analysis, shape, stages, microbatches, random)
    devices = [jax.devices()[i] for i in (random.permutation(cases.DEVICES) if seed % 2 else range(cases.DEVICES))]
    results = planned.build(devices, this_job())(jax.tree.leaves((case.weights, case.x)))
    return case, [np.asarray(x) for x in autopar.gather(results)]


def check(case: RandomStep, results: list[np.ndarray]) -> None:
    """As under `jax.jit`: the change of the weights, up to rounding in float32."""
    expected = jax.tree.leaves(jax.jit(case.step)(case.weights, case.x))
    for result, reference, before in zip(results, expected, [*case.weights, 0.0, 0.0], strict=True):
        change, kept = np.linalg.norm(np.asarray(reference) - before), np.linalg.norm(before)
        difference = np.linalg.norm(result - np.asarray(reference))
        assert difference <= 1e-4 * change + 1e-6 * kept + 1e-5, (difference, change)


def main(address: str, folder: pathlib.Path, seeds: list[str]) -> None:
    """Run the cases."""
    start(address)
    digests = {}
    for seed in seeds:
        case, results = run(int(seed))
        if jax.process_count() == 1:
            check(case, results)
        digests[seed] = cases.digest(results)
        print(seed, digests[seed], flush=True)
    (folder / f"{jax.process_count()}-{jax.process_index()}.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:])
