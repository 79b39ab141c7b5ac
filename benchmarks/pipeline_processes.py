"""What each process of `benchmarks.pipeline` runs: `pipeline_processes.py FOLDER ROUNDS SCHEDULES MICROBATCHES`.

The folder has a cluster file of each process's host, `0.cluster.json` and `1.cluster.json`.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import autopar
from autopar.ir.graph import Phase
from autopar.ir.instructions import Free, Register, Run
from autopar.runtime.processes import Processes, this_job
from autopar.runtime.worker import Worker

LAYERS = 8
WIDTH = 1024
ROUND_TRIPS = 20
EXAMPLES = 896  # of a microbatch: 50 ms or more for the layers of a stage, forward alone


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


def most_in_flight(worker: Worker, stage: int, least: int) -> int:
    """Microbatches of which a stage holds activations at once, at most, as the worker plays its list.

    What has fewer elements than `least`, such as a loss, is no activation, nor is a running sum. One where a program
    does forward and backward.
    """
    instructions = worker.wiring.instructions
    sources = dict(zip(worker._calls, worker.sources, strict=True))
    held: list[set[Register]] = []  # by microbatch
    most = 1
    for instruction in instructions.of_stages({stage}):
        if isinstance(instruction, Run) and instruction.phase is Phase.FORWARD:
            found = zip(instruction.outputs, sources[instruction.program].outputs, strict=True)
            large = {register for register, array in found if math.prod(array.shape) >= least}
            held.append(large - instructions.sums.keys())
        elif isinstance(instruction, Free):
            for registers in held:
                registers.difference_update(instruction.registers)
        most = max(most, sum(map(bool, held)))
    return most


def measured_link(job: Processes) -> autopar.Link:
    """From process to process, as transfers go: half the time there and back, of a number and of 4 MiB."""
    channel, here = job.channel("a benchmark", ()), jax.local_devices()[0]
    other = 1 - job.index
    job.connect()

    def seconds(count: int) -> float:
        like = jax.ShapeDtypeStruct((count,), np.float32, sharding=SingleDeviceSharding(here))
        array = jax.device_put(np.ones(count, np.float32), here)
        times = []
        for _ in range(ROUND_TRIPS):
            channel.next_step()
            started = time.perf_counter()
            if job.index == 0:
                job.offer(channel.uuid(0, other), [array])
            [array] = jax.block_until_ready(job.pull(channel.uuid(0, job.index), other, [like]))
            if job.index == 1:
                job.offer(channel.uuid(0, other), [array])
            times.append((time.perf_counter() - started) / 2)
        return float(np.median(times))

    many = 1 << 20

    mine = json.dumps([seconds(1), seconds(many)])
    latency, whole = json.loads(job.from_first(lambda: mine))
    return autopar.Link("between processes", latency, bandwidth=4 * many / (whole - latency))


def measured_cluster(folder: pathlib.Path) -> autopar.Cluster:
    """Two hosts of one device, each as fast as the slower of them was found to be, and what is between them."""
    job = this_job()
    assert job is not None
    found = [autopar.cluster_from_json(folder / f"{process}.cluster.json").hosts[0] for process in range(job.count)]
    speeds = [{(each.sizes, each.dtype): each.flops for each in host.kind.measured.products} for host in found]
    both = set.intersection(*map(set, speeds))
    host, _ = min(zip(found, speeds, strict=True), key=lambda pair: statistics.geometric_mean(pair[1][x] for x in both))
    return autopar.make_cluster("two processes", job.count, 1, host.kind, host.link, measured_link(job))


def main(folder: pathlib.Path, rounds: int, schedules: list[Any], counts: list[int]) -> None:
    """Measure; each process writes what it saw."""
    from jax.experimental import multihost_utils

    index = jax.process_index()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    numbers = np.random.default_rng(0)
    scale = np.float32(WIDTH**-0.5)
    params = {f"{k}": numbers.normal(size=(WIDTH, WIDTH)).astype(np.float32) * scale for k in range(LAYERS)}
    found: list[Any] = []
    cluster = measured_cluster(folder)
    for count in counts:
        batch = {name: numbers.normal(size=(count * EXAMPLES, WIDTH)).astype(np.float32) for name in "xy"}
        alone = Alone(params, batch, count)
        alone()
        steps: dict[str, Any] = {}
        flights: dict[str, int] = {}
        predicted: dict[str, float] = {}
        for schedule in schedules:
            method = autopar.recipes.pipeline([(1, (1,)), (1, (1,))], count, schedule)
            step = autopar.parallelize(train_step, cluster=cluster, method=method)
            state, _ = step(params, batch)
            executable = step.compile(params, batch)
            predicted[schedule] = executable.cost
            flights[schedule] = most_in_flight(executable._worker, index, EXAMPLES * WIDTH)
            steps[schedule] = step, state, next(step.batches([batch]))
        rows: dict[str, dict[str, Any]] = {
            schedule: {
                "schedule": schedule, "microbatches": count, "in_flight": flights[schedule], "alone": [], "step": [],
                "cpu": [], "predicted": predicted[schedule],
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
