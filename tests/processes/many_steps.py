"""A thousand steps of a GPT in a pipeline over two processes; prints what each holds after 200 and at the end."""

from __future__ import annotations

import gc
import json
import pathlib
from typing import Any

import jax
import numpy as np

import autopar
from benchmarks.models import gpt, shared

PAGE = 4096  # bytes
CONFIG = gpt.GPTConfig(vocab_size=64, sequence_length=16, num_layers=2, width=32, num_heads=4)


def held() -> tuple[int, int, int]:
    """Bytes of this process, JAX's arrays, and the bytes of these."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    arrays = jax.live_arrays()
    return pages * PAGE, len(arrays), sum(x.nbytes for x in arrays)


def main() -> None:
    """Train."""
    optimizer = shared.make_optimizer(1e-3, warmup_steps=10, decay_steps=10_000)
    train_step, init = gpt.make_train_step(CONFIG, optimizer), gpt.make_init(CONFIG, optimizer)
    step = autopar.parallelize(train_step, method=autopar.recipes.gpipe(2, 2))
    batches = [jax.tree.map(np.asarray, gpt.random_batch(CONFIG, 8, jax.random.key(k))) for k in range(4)]
    step.compile(jax.eval_shape(init, jax.random.key(0)), batches[0])
    state: Any = step.init(init, jax.random.key(0))
    found = []
    for number in range(1200):
        state, metrics = step(state, batches[number % len(batches)])
        if number in (199, 1199):
            assert np.isfinite(float(metrics["loss"]))
            found.append(held())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
