"""What each process of a job of `benchmarks.weak_scaling` runs: `weak_scaling_processes.py FILE FAMILY STEPS`."""

from __future__ import annotations

import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

import autopar
from benchmarks.models import gpt, moe, shared, wide_resnet

BATCH = 16  # examples, on however many devices


def _gpt(devices: int) -> tuple[Any, Any]:
    return gpt, gpt.GPTConfig(256, 128, 2 * devices, width=128, num_heads=8)


def _moe(devices: int) -> tuple[Any, Any]:
    """A group spans two examples."""
    return moe, moe.MoEConfig(
        256, 128, 2 * devices, width=128, num_heads=8, num_experts=8, group_size=256, mlp_factor=2
    )  # fmt: skip


def _wide_resnet(devices: int) -> tuple[Any, Any]:
    """Four times the devices are twice the width, as in Alpa's models."""
    channels = 8 * round(2 * math.sqrt(devices))
    return wide_resnet, wide_resnet.WideResNetConfig((2, 2), channels, 2, num_classes=16, image_size=32)


FAMILIES: dict[str, Callable[[int], tuple[Any, Any]]] = {"gpt": _gpt, "moe": _moe, "wresnet": _wide_resnet}


def main(file: pathlib.Path, family: str, num_steps: int) -> None:
    """Train; the first process writes what was measured."""
    model, config = FAMILIES[family](jax.device_count())
    optimizer = shared.make_optimizer(1e-3, warmup_steps=1, decay_steps=num_steps + 1)
    init = model.make_init(config, optimizer)
    plain = model.make_train_step(config, optimizer)
    key = jax.random.key(0)
    shapes, batch = jax.eval_shape(init, key), model.abstract_batch(config, BATCH)
    step = autopar.parallelize(plain)
    executable = step.compile(shapes, batch)
    state = step.init(init, key)
    batches = step.batches(
        jax.tree.map(jax.device_get, model.random_batch(config, BATCH, jax.random.key(k))) for k in range(num_steps + 1)
    )
    seconds = []
    for examples in batches:
        started = time.perf_counter()
        state, metrics = step(state, examples)
        jax.block_until_ready((state, metrics))
        loss = float(metrics["loss"])
        seconds.append(time.perf_counter() - started)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}")
    if jax.process_index() == 0:
        plan = executable.plan
        cost: Any = jax.jit(plain).lower(shapes, batch).cost_analysis()
        found = {
            "family": family, "processes": jax.process_count(), "devices": jax.device_count(),
            "device": jax.devices()[0].device_kind, "parameters": sum(
                math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["params"])
            ),
            "plan": f"{plan.method}, {len(plan.stages)} stages, {plan.num_microbatches} microbatches",
            "predicted": plan.step_time, "seconds": seconds[1:], "flops": float(cost["flops"]), "loss": loss,
        }  # fmt: skip
        file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
