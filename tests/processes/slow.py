"""Steps of a job of which process 1 becomes slow at step 6: `slow.py FOLDER NUMBER`.

Its devices are said to compute, and to go through memory, eight times as slowly; each step waits for it.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

import autopar
from autopar.runtime import processes, pulse

LAYERS, WIDTH, BATCH = 12, 256, 256
SLOW_FROM = 6


def train_step(params: Any, batch: Any) -> Any:
    """Layers, so that there are stages to make."""

    def loss(params: Any) -> Any:
        x = batch
        for w in params:
            x = jax.numpy.tanh(x @ w)
        return (x * x).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def main(folder: pathlib.Path, number: int) -> None:
    """Train, and save each third step."""
    index = jax.process_index()
    job = processes.this_job()
    assert job is not None
    job.__dict__["hosts"] = tuple(f"node{process}" for process in range(job.count))  # each on one of its own
    parts = sorted(pulse.readings(jax.devices(), job).items())  # for real
    print("parts", [tuple(part) for part, _ in parts], sum(seconds for _, seconds in parts), flush=True)
    marker = folder / "slow"
    begins_slow = marker.exists()  # as it was when the job was started again

    def readings(devices: Any, _: Any) -> dict[pulse.Part, float]:
        slow = json.loads(job.combined(json.dumps(marker.exists() and not begins_slow), lambda said: said[0], "to ask"))
        return {
            pulse.Part(what, device): 1e-3 * (8.0 if slow and devices[device].process_index == 1 else 1.0)
            for what in ("products", "memory") for device in range(len(devices))
        }  # fmt: skip

    pulse.readings = readings  # type: ignore[assignment]
    step = autopar.parallelize(train_step)
    params: Any = [np.eye(WIDTH, dtype=np.float32) for _ in range(LAYERS)]
    executable = step.compile(params, np.zeros((BATCH, WIDTH), np.float32))
    if index == 0:
        stages = [[stage.mesh.devices, stage.layers[1] - stage.layers[0]] for stage in executable.plan.stages]
        print("plan", json.dumps(stages), flush=True)
        print("kinds", [host.kind.name for host in executable.plan.cluster.hosts], flush=True)
    longest = 0.0  # seconds of a step
    start = autopar.latest_step(folder / "run") or 0
    if start:
        params = autopar.restore(folder / "run", like=step)
    for k in range(start, number):
        if k == SLOW_FROM and index == 1:
            marker.write_text("")
        if k >= SLOW_FROM and index == 1 and not begins_slow:
            time.sleep(max(0.5, 10 * longest))
        began = time.perf_counter()
        params, loss = step(params, np.full((BATCH, WIDTH), 0.1 * (k % 5), np.float32))
        jax.block_until_ready([w for w in params if w.is_fully_addressable])
        if 0 < k < SLOW_FROM:
            longest = max(longest, time.perf_counter() - began)
        if (k + 1) % 3 == 0:
            autopar.save(folder / "run", params, step=k + 1)
    print("ended", float(loss), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
