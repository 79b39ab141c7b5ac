"""What each process of `benchmarks.pipeline` runs: `pipeline_processes.py FOLDER ROUNDS SCHEDULES MICROBATCHES`."""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import autopar
from autopar.ir.graph import Phase
from autopar.ir.instructions import Free, InstructionList, Register, Run

LAYERS = 8
WIDTH = 1024
EXAMPLES = 320  # of a microbatch: some 50 ms for the layers of a stage


def loss_of(params: Any, batch: Any) -> Any:
    """Mean squared error of a chain of layers."""
    hidden = batch["x"]
    for name in sorted(params):
        hidden = jnp.tanh(hidden @ params[name])
    return ((hidden - batch["y"]) ** 2).mean()


def train_step(params: Any, batch: Any) -> Any:
    """Gradient descent."""
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), loss


class Alone:
    """A step by hand on one device: calls of one program, which adds a microbatch's gradients to those before."""

    def __init__(self, params: Any, batch: Any, microbatches: int) -> None:
        here = jax.local_devices()[0]
        self._params = jax.device_put(params, here)
        cut = [jax.tree.map(lambda x, k=k: x[k * EXAMPLES : (k + 1) * EXAMPLES], batch) for k in range(microbatches)]
        self._batches = jax.device_put(cut, here)
        self._add = jax.jit(
            lambda total, params, batch: jax.tree.map(jnp.add, total, jax.grad(loss_of)(params, batch)),
            donate_argnums=0,
        )
        self._zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params))

    def __call__(self) -> None:
        total = self._zeros(self._params)
        for batch in self._batches:
            total = self._add(total, self._params, batch)
        jax.block_until_ready(total)


def most_in_flight(instructions: InstructionList, stage: int, sizes: Mapping[int, Sequence[int]], least: int) -> int:
    """Microbatches of which a stage holds activations at once, at most, as a worker plays its list.

    `sizes`: the elements of each result of the stage's programs; what is smaller than `least`, such as a loss, is no
    activation, nor is a running sum. One where a program does forward and backward.
    """
    held: list[set[Register]] = []  # by microbatch
    most = 1
    for instruction in instructions.of_stages({stage}):
        if isinstance(instruction, Run) and instruction.phase is Phase.FORWARD:
            found = zip(instruction.outputs, sizes[instruction.program], strict=True)
            held.append({register for register, size in found if size >= least and register not in instructions.sums})
        elif isinstance(instruction, Free):
            for registers in held:
                registers.difference_update(instruction.registers)
        most = max(most, sum(map(bool, held)))
    return most


def main(folder: pathlib.Path, rounds: int, schedules: list[Any], counts: list[int]) -> None:
    """Measure; each process writes what it saw."""
    index = jax.process_index()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    numbers = np.random.default_rng(0)
    scale = np.float32(WIDTH**-0.5)
    params = {f"{k}": numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) * scale for k in range(LAYERS)}
    found: list[Any] = []
    for count in counts:
        batch = {name: numbers.normal(size=(count * EXAMPLES, WIDTH)).astype(np.float32) for name in "xy"}
        alone = Alone(params, batch, count)
        alone()
        steps: dict[str, Any] = {}
        flights: dict[str, int] = {}
        for schedule in schedules:
            method = autopar.recipes.pipeline([(1, (1,)), (1, (1,))], count, schedule)
            step = autopar.parallelize(train_step, method=method)
            state, _ = step(params, batch)
            worker = step.compile(params, batch)._runtime
            programs = zip(worker._calls, worker.sources, strict=True)
            sizes = {number: [math.prod(a.shape) for a in source.outputs] for number, source in programs}
            flights[schedule] = most_in_flight(worker.wiring.instructions, index, sizes, EXAMPLES * WIDTH)
            steps[schedule] = step, state, next(step.batches([batch]))
        rows: dict[str, dict[str, Any]] = {
            schedule: {
                "schedule": schedule, "microbatches": count, "in_flight": flights[schedule], "alone": [], "step": [],
                "cpu": [],
            }
            for schedule in schedules
        }  # fmt: skip
        for _ in range(rounds):
            multihost_utils.sync_global_devices("alone")
            started = time.perf_counter()
            alone()
            seconds = time.perf_counter() - started
            for schedule in schedules:
                step, state, placed = steps[schedule]
                multihost_utils.sync_global_devices("step")
                started, cpu = time.perf_counter(), time.process_time()
                state, _ = jax.block_until_ready(step(state, placed))
                took = time.perf_counter() - started
                steps[schedule] = step, state, placed
                rows[schedule]["cpu"].append(time.process_time() - cpu)
                rows[schedule]["step"].append(took)
                rows[schedule]["alone"].append(seconds)
        found += rows.values()
    (folder / f"{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), [int(n) for n in sys.argv[4].split(",")])
