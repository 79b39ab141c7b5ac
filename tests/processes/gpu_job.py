"""What a process of a test on GPUs runs: `gpu_job.py FOLDER`.

Several share one GPU, each with a stage of a pipeline; alone it goes on from what they have saved. All is compared with
`jax.jit`.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import numpy as np

import autopar
from autopar import recipes
from benchmarks.models import gpt, shared

SCHEDULES: tuple[Any, ...] = ("gpipe", "1f1b", "zero-bubble")
STEPS = 3
STAGES, MICROBATCHES = 4, 8
CONFIG = gpt.GPTConfig(vocab_size=512, sequence_length=64, num_layers=STAGES, width=128, num_heads=4)


def main(folder: pathlib.Path) -> None:
    """Train by each schedule, save one's state; alone, restore it and go on."""
    jax.config.update("jax_default_matmul_precision", "highest")  # no TF32, which rounds otherwise in other kernels
    optimizer = shared.make_optimizer(1e-3, warmup_steps=1, decay_steps=10)
    init, step = gpt.make_init(CONFIG, optimizer), gpt.make_train_step(CONFIG, optimizer)
    key = jax.random.key(0)
    batches = [
        jax.tree.map(np.asarray, gpt.random_batch(CONFIG, 2 * MICROBATCHES, jax.random.key(i)))
        for i in range(2 * STEPS)
    ]
    expected, losses = jax.jit(init)(key), []
    for batch in batches:
        expected, metrics = jax.jit(step)(expected, batch)
        losses.append(float(metrics["loss"]))

    def check(name: str, parallel: Any, state: Any, numbers: range) -> Any:
        found = []
        for number in numbers:
            state, metrics = parallel(state, batches[number])
            found.append(float(metrics["loss"]))
        np.testing.assert_allclose(found, losses[numbers.start : numbers.stop], rtol=1e-5, err_msg=name)
        print(f"{name}: losses {found}", flush=True)
        return state

    if jax.process_count() == 1:
        parallel = autopar.parallelize(step)
        parallel.compile(jax.eval_shape(init, key), batches[0])
        check("restored", parallel, autopar.restore(folder, like=parallel), range(STEPS, 2 * STEPS))
        return
    for schedule in SCHEDULES:
        method = recipes.pipeline([(1, (1,))] * STAGES, MICROBATCHES, schedule)
        parallel = autopar.parallelize(step, method=method)
        parallel.compile(jax.eval_shape(init, key), batches[0])
        state = check(schedule, parallel, parallel.init(init, key), range(STEPS))
    autopar.save(folder, state, step=STEPS)
    autopar.wait_until_saved()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
