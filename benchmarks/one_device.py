"""One device, filled: predicted against measured step time and peak memory: `python -m benchmarks.one_device`.

Calibrates one device, or takes a preset's as it is, then plans and runs steps of GPT, MoE and Wide-ResNet that the
calibration has not seen, with and without rematerialisation, in one microbatch and in several, each with as many
examples (doubled from two a microbatch) as fit by the plan. Bars: the median errors of step time and of peak memory
(`memory_stats`, which CPUs have not). Meant for a GPU; `--most-examples` keeps it short elsewhere, and `--limit` where
there is little time.

Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import pathlib
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import autopar
from autopar import recipes
from autopar.calibration.timer import time_steps
from autopar.errors import InfeasiblePlanError, UserError
from benchmarks import common
from benchmarks.verify import COUPLED, MODELS

STEPS = 10
_MICROBATCHES = (1, 4)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is run."""

    model: str
    num_microbatches: int
    remat: bool


def cases() -> list[Case]:
    """All of them."""
    return [
        Case(model, m, remat)
        for m in _MICROBATCHES
        for remat in (False, True)
        for model in MODELS
        if m == 1 or model not in COUPLED
    ]


def filled(module: Any, config: Any, optimizer: Any, cluster: autopar.Cluster, m: int, most: int) -> dict[str, Any]:
    """A step with as many examples as fit, at most so many: seconds and bytes, predicted and measured.

    Raises:
      InfeasiblePlanError: not even two examples a microbatch fit.
    """
    method = recipes.data_parallel(m)
    step = autopar.parallelize(module.make_train_step(config, optimizer), cluster=cluster, method=method)
    state = jax.eval_shape(module.make_init(config, optimizer), jax.random.key(0))
    examples = 2 * m  # of one alone, MoE's tokens would not fill a group
    plan = step.plan(state, module.abstract_batch(config, examples))
    while 2 * examples <= most:
        try:
            plan = step.plan(state, module.abstract_batch(config, 2 * examples))
        except InfeasiblePlanError:
            break
        examples *= 2
    found = time_steps(step.compile(state, module.abstract_batch(config, examples)), STEPS)
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {
        "device": found.device_kind, "examples": examples, "predicted": plan.step_time, "measured": found.median,
        "seconds": found.seconds, "error": plan.step_time / found.median - 1.0, "predicted_bytes": plan.peak_memory,
        "measured_bytes": peak, "memory_error": None if peak is None else plan.peak_memory / peak - 1.0,
    }  # fmt: skip


def _measured(cluster_file: pathlib.Path, most: int, case: Case) -> dict[str, Any]:
    """In a process of its own: a device's peak is that of its whole life."""
    module, config, optimizer = MODELS[case.model]
    config = dataclasses.replace(config, remat=case.remat)
    cluster = autopar.cluster_from_json(cluster_file)
    with warnings.catch_warnings(action="ignore"):
        try:
            found = filled(module, config, optimizer(), cluster, case.num_microbatches, most)
        except UserError as error:
            return {**dataclasses.asdict(case), "failed": f"{type(error).__name__}: {error}"}
    return {**dataclasses.asdict(case), **found}


def _device(path: pathlib.Path, preset: str | None, seconds: float) -> str:
    """Write what steps are predicted with, and say what it is."""
    if preset is not None:
        cluster = autopar.load_preset(preset, num_hosts=1, devices_per_host=1)
        path.write_text(autopar.cluster_to_json(cluster))
        return f"one device of {preset}, as it is"
    found = autopar.calibrate(jax.local_devices()[:1], seconds=seconds)
    found.save(path)
    return str(found)


def bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, common.Bar]:
    """Of the cases that were run; memory only where the device tells it."""
    ran = [row for row in rows if "failed" not in row]
    found = {
        "cases_failed": common.Bar(len(rows) - len(ran), 0),
        "median_error": common.Bar(_median([row["error"] for row in ran]), 0.10, len(ran), "held out", "%"),
    }
    told = [row["memory_error"] for row in ran if row["memory_error"] is not None]
    if told:
        found["memory_median_error"] = common.Bar(_median(told), 0.05, len(told), "held out", "%")
    return found


def _median(errors: Sequence[float]) -> float:
    return float(np.median(np.abs(errors))) if errors else float("nan")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_device", description="Predicted against measured steps that fill one device."
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="for the calibration")
    parser.add_argument("--preset", choices=autopar.preset_names(), help="predict with this, and do not calibrate")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further case is begun")
    parser.add_argument("--most-examples", type=int, default=1 << 16, help="of a step")
    parser.add_argument("--only", help="models whose name contains this text")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()

    chosen = [case for case in cases() if arguments.only is None or arguments.only in case.model]
    rows, started = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "cluster.json"
        device = functools.partial(_device, preset=arguments.preset, seconds=arguments.seconds)
        print(*common.each_in_a_process(device, [path]), flush=True)
        measure = functools.partial(_measured, path, arguments.most_examples)
        in_time = itertools.takewhile(lambda _: time.monotonic() - started < arguments.limit, chosen)
        for row in (row for case in in_time for row in common.each_in_a_process(measure, [case])):
            rows.append(row)
            name = f"{row['model']}, {row['num_microbatches']} microbatches{', remat' if row['remat'] else ''}"
            if "failed" in row:
                print(f"{name}: {row['failed']}", flush=True)
                continue
            memory = "" if row["memory_error"] is None else f", memory {row['memory_error']:+.1%}"
            print(
                f"{name}, {row['examples']} examples: measured {row['measured']:.4f} s, predicted "
                f"{row['predicted']:.4f} s, {row['error']:+.1%}{memory}", flush=True,
            )  # fmt: skip
    common.report(bars(rows), rows, arguments.json)


if __name__ == "__main__":
    main()
