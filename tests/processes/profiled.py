"""A profile in a job; each process prints it."""

from __future__ import annotations

import autopar
from tests.test_profile import BATCH, PARAMS, train_step

if __name__ == "__main__":
    step = autopar.parallelize(train_step, method=autopar.recipes.gpipe(2, 4))
    profile = step.compile(PARAMS, BATCH).profile(PARAMS, BATCH, steps=2, kernels=True)
    print(profile.to_json().replace("\n", ""), flush=True)
