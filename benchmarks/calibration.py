"""Predicted against measured step times on this machine: `python -m benchmarks.calibration --json FILE`.

Calibrates the devices at hand (8 virtual ones on a CPU), then plans and runs steps that the calibration has not seen:
GPT, MoE and Wide-ResNet, each by data parallelism, ZeRO-3, data and tensor parallelism and a pipeline. Bars: the median
error of the predicted step times, and how far Spearman's rank correlation of predicted and measured ones is from 1.
Each pair is also profiled: its programs and transfers, which take turns on virtual devices, have to make up the whole
step, and a profiled step to take no longer than others.

Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import scipy.stats

import autopar
from autopar import recipes
from autopar.calibration.timer import made_up_arguments, time_steps
from autopar.ir.method import Method
from benchmarks import common
from benchmarks.models import gpt, moe, wide_resnet
from benchmarks.verify import COUPLED

DEVICES = 8
STEPS = 7
_GPT = gpt.GPTConfig(2048, 128, 4, 256, 8, dropout=0.0)
_MOE = moe.MoEConfig(2048, 128, 4, 256, 8, num_experts=8, group_size=512, dropout=0.0)
_RESNET = wide_resnet.WideResNetConfig((1, 1, 1, 1), 32, 1)
# Module, sizes, optimizer, examples.
MODELS: Mapping[str, tuple[Any, Any, Callable[[], optax.GradientTransformation], int]] = {
    "gpt": (gpt, _GPT, lambda: optax.adamw(1e-3), 32),
    "moe": (moe, _MOE, lambda: optax.adafactor(1e-3), 32),
    "wresnet": (wide_resnet, _RESNET, lambda: optax.sgd(1e-3, momentum=0.9), 32),
}
METHODS: Mapping[str, Method] = {
    "data parallel": recipes.data_parallel(1),
    "ZeRO-3": recipes.zero(3, 1),
    "data and tensor parallel": recipes.megatron(4, 2, 1, 1),
    "pipeline": recipes.megatron(2, 2, 2, 4),
}


def pairs() -> list[tuple[str, str]]:
    """Of a model and a method."""
    return [(model, method) for model in MODELS for method in METHODS]


def measured(model: str, method: str, cluster: autopar.Cluster) -> dict[str, Any]:
    """Predicted and measured seconds of a step."""
    module, config, optimizer, examples = MODELS[model]
    how = METHODS[method]
    if model in COUPLED:
        how = dataclasses.replace(how, num_microbatches=1)
    step = autopar.parallelize(module.make_train_step(config, optimizer()), cluster=cluster, method=how)
    state = jax.eval_shape(module.make_init(config, optimizer()), jax.random.key(0))
    executable = step.compile(state, module.abstract_batch(config, examples))
    found = time_steps(executable, STEPS)
    args, kwargs = made_up_arguments(executable)
    profile = executable.profile(*args, steps=STEPS, **kwargs)
    return {
        "model": model, "method": method, "predicted": found.predicted, "measured": found.median,
        "seconds": found.seconds, "error": found.predicted / found.median - 1.0,
        "profiled": statistics.median(profile.seconds), "unaccounted": profile.measured.unaccounted,
        "profile": [dataclasses.asdict(row) for row in profile.rows],
    }  # fmt: skip


def bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, common.Bar]:
    """Of the pairs that were run."""
    predicted, seconds = [row["predicted"] for row in rows], [row["measured"] for row in rows]
    errors = [abs(row["error"]) for row in rows]
    correlation = float(scipy.stats.spearmanr(predicted, seconds).statistic)
    return {
        "pairs_missing": common.Bar(max(0, 12 - len(rows)), 0),
        "median_error": common.Bar(float(np.median(errors)), 0.15, len(rows), "held out", "%"),
        "largest_error": common.Bar(max(errors), None, len(rows), "held out", "%"),
        "rank_distance": common.Bar(1.0 - correlation, 0.1, len(rows), "held out"),
        "profile_unaccounted": common.Bar(max(row["unaccounted"] for row in rows), 0.05, len(rows), unit="%"),
        "profile_overhead": common.Bar(
            float(np.median([row["profiled"] / row["measured"] - 1 for row in rows])), 0.1, len(rows), unit="%"
        ),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration", description="Predicted against measured step times on this machine."
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="for the calibration")
    parser.add_argument("--only", help="models whose name contains this text")
    parser.add_argument("--cluster", type=pathlib.Path, help="a cluster file instead of a calibration")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()

    common.use_virtual_devices(DEVICES)
    if arguments.cluster is None:
        found = autopar.calibrate(seconds=arguments.seconds)
        print(found, flush=True)
        cluster = found.cluster
    else:
        cluster = autopar.cluster_from_json(arguments.cluster)
    rows = []
    for model, method in pairs():
        if arguments.only is not None and arguments.only not in model:
            continue
        with warnings.catch_warnings(action="ignore"):
            row = measured(model, method, cluster)
        rows.append(row)
        print(
            f"{model}, {method}: measured {row['measured']:.3f} s, predicted {row['predicted']:.3f} s, "
            f"{row['error']:+.1%}; profiled {row['profiled']:.3f} s, of which {row['unaccounted']:.1%} is nothing's",
            flush=True,
        )  # fmt: skip
    common.report(bars(rows), rows, arguments.json)


if __name__ == "__main__":
    main()
