"""A profile in a job, which each process prints, and the bubble of steps that are metered."""

from __future__ import annotations

import json

import autopar
from tests.test_profile import BATCH, PARAMS, train_step

if __name__ == "__main__":
    step = autopar.parallelize(train_step, method=autopar.recipes.gpipe(2, 4))
    profile = step.compile(PARAMS, BATCH).profile(PARAMS, BATCH, steps=2, kernels=True)
    print(profile.to_json().replace("\n", ""), flush=True)
    bubbles: list[float | None] = []
    metered = autopar.meter(step, lambda metrics: bubbles.append(metrics.bubble), every=2)
    state, _ = metered(PARAMS, BATCH)
    for _ in range(4):
        state, _ = metered(state, BATCH)
    print(json.dumps(bubbles), flush=True)
