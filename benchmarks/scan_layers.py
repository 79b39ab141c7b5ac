"""A model whose layers are one `lax.scan` plans like the unrolled one: `python -m benchmarks.scan_layers --json FILE`.

Bars: the planned step time of a GPT written as a scan over its layers is within 2 % of that of the same GPT
unrolled; and the time that planning takes does not depend on the number of layers (within 20 %, from 12 to 96).
Nothing runs on devices: the cluster is a preset of 8 V100s. Planning time is CPU time of this process.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar
from benchmarks import common
from benchmarks.models import gpt

CLUSTER = "p3.16xlarge"
BATCH_SIZE = 64
LAYERS = (12, 24, 48, 96)
ROUNDS = 3
CONFIG = gpt.GPTConfig(
    8192, sequence_length=512, num_layers=LAYERS[0], width=1024, num_heads=16, dropout=0.0, dtype=jnp.bfloat16,
    remat=True,
)  # fmt: skip


def planned(config: gpt.GPTConfig) -> dict[str, Any]:
    """One plan, and what it took to find it."""
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(gpt.make_init(config, optimizer), jax.random.key(0))
    batch = gpt.abstract_batch(config, BATCH_SIZE)
    step = autopar.parallelize(gpt.make_train_step(config, optimizer), cluster=autopar.load_preset(CLUSTER))
    started = time.process_time()
    plan = step.plan(state, batch)
    return {
        "layers": config.num_layers,
        "scan": config.scan,
        "planning_seconds": time.process_time() - started,
        "step_seconds": plan.step_time,
        "peak_memory": plan.peak_memory,
        "stages": [list(stage.mesh.shape) for stage in plan.stages],
        "microbatches": plan.num_microbatches,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scan_layers", description="A scan over layers against the unrolled model."
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in which all are planned; the shortest time counts")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()

    common.use_virtual_devices(1)
    planned(dataclasses.replace(CONFIG, num_layers=2, scan=True))  # imports and compilations of the solver
    configs = [CONFIG, *(dataclasses.replace(CONFIG, num_layers=layers, scan=True) for layers in LAYERS)]
    rows = [planned(config) for config in configs]
    for _ in range(arguments.rounds - 1):  # noise only adds
        for row, config in zip(rows, configs, strict=True):
            row["planning_seconds"] = min(row["planning_seconds"], planned(config)["planning_seconds"])
    for row in rows:
        print(
            f"{'scan' if row['scan'] else 'unrolled'} of {row['layers']} layers: {row['step_seconds'] * 1e3:.1f} ms a "
            f"step, {row['peak_memory'] / 2**30:.2f} GiB, stages {row['stages']}, "
            f"{row['microbatches']} microbatches; planned in {row['planning_seconds']:.1f} s"
        )
    unrolled, first, *deeper = rows
    cost = abs(first["step_seconds"] / unrolled["step_seconds"] - 1)
    slower = max(abs(row["planning_seconds"] / first["planning_seconds"] - 1) for row in deeper)
    bars = {"plan_cost": common.Bar(cost, 0.02, unit="%"), "planning_time": common.Bar(slower, 0.2, unit="%")}
    for row in rows:
        name = f"planning_{'scanned' if row['scan'] else 'unrolled'}_{row['layers']}_layers"
        bars[name] = common.Bar(row["planning_seconds"], None, n=arguments.rounds, unit="s")
    common.report(bars, rows, arguments.json)


if __name__ == "__main__":
    main()
