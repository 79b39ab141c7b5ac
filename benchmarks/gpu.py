"""A GPU, filled: plans of one device against `jax.jit` and against what was predicted: `python -m benchmarks.gpu`.

Calibrates one device, or takes a preset's as it is, then plans and runs steps of GPT with plain and with fused
attention, MoE and Wide-ResNet that the calibration has not seen, each with as many examples (doubled from two a
microbatch) as fit by the plan. Those in one microbatch without rematerialisation come first, and run under `jax.jit`,
too, in a process of their own; the others follow while there is time. Bars: the largest step time and peak memory over
those under `jax.jit`, the largest and the median error of the predicted step time, and the median error of the
predicted memory. Memory is what `memory_stats` tells, which CPUs have not.

Meant for a GPU, where it is to end within nine minutes; `--most-examples` keeps it short elsewhere. Nothing else should
run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import recipes
from autopar.calibration.timer import time_steps
from autopar.errors import InfeasiblePlanError, UserError
from benchmarks import common
from benchmarks.verify import COUPLED, MODELS

STEPS = 10
_MICROBATCHES = (1, 4)
_GPT, _CONFIG, _OPTIMIZER = MODELS["gpt"]
FILLING = {
    "gpt": MODELS["gpt"],
    "gpt, fused attention": (_GPT, dataclasses.replace(_CONFIG, fused_attention=True), _OPTIMIZER),
    **{name: model for name, model in MODELS.items() if name != "gpt"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is run."""

    model: str
    num_microbatches: int
    remat: bool

    @property
    def is_compared(self) -> bool:
        """Whether `jax.jit` runs the same step as it stands."""
        return self.num_microbatches == 1 and not self.remat


def cases() -> list[Case]:
    """All of them, those first that are compared with `jax.jit`."""
    return [
        Case(model, m, remat)
        for m in _MICROBATCHES
        for remat in (False, True)
        for model in FILLING
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
    peak = _peak()
    return {
        "device": found.device_kind, "examples": examples, "predicted": plan.step_time, "measured": found.median,
        "seconds": found.seconds, "error": plan.step_time / found.median - 1.0, "predicted_bytes": plan.peak_memory,
        "measured_bytes": peak, "memory_error": None if peak is None else plan.peak_memory / peak - 1.0,
    }  # fmt: skip


def under_jit(module: Any, config: Any, optimizer: Any, examples: int) -> dict[str, Any]:
    """The same step under `jax.jit`, which takes its state over: seconds, their median, and bytes."""
    step = jax.jit(module.make_train_step(config, optimizer), donate_argnums=0)
    shapes = jax.eval_shape(module.make_init(config, optimizer), jax.random.key(0))
    state, batch = jax.tree.map(_made_up, (shapes, module.abstract_batch(config, examples)))
    seconds = []
    for _ in range(STEPS + 1):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - started)
    return {"jit_seconds": seconds[1:], "jit_measured": float(np.median(seconds[1:])), "jit_bytes": _peak()}


def _made_up(shape: Any) -> Any:
    """As `time_steps` does: ones, zeros, and keys of zero bits."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape.shape, shape.dtype)
    return np.broadcast_to(np.full((), jnp.issubdtype(shape.dtype, jnp.inexact), shape.dtype), shape.shape)


def _peak() -> int | None:
    """Bytes, of the device's whole life in this process; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _measured_under_jit(examples: int, case: Case) -> dict[str, Any]:
    module, config, optimizer = FILLING[case.model]
    try:
        return under_jit(module, config, optimizer(), examples)
    except jax.errors.JaxRuntimeError as error:  # its memory ends where the plan's does not
        return {"jit_failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def _measured(cluster_file: pathlib.Path, most: int, case: Case) -> dict[str, Any]:
    """In a process of its own: a device's peak is that of its whole life."""
    module, config, optimizer = FILLING[case.model]
    config = dataclasses.replace(config, remat=case.remat)
    cluster = autopar.cluster_from_json(cluster_file)
    with warnings.catch_warnings(action="ignore"):
        try:
            found = filled(module, config, optimizer(), cluster, case.num_microbatches, most)
        except (UserError, jax.errors.JaxRuntimeError) as error:
            return {**dataclasses.asdict(case), "failed": f"{type(error).__name__}: {error}".splitlines()[0]}
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


def bars(rows: Sequence[Mapping[str, Any]], left_out: int = 0) -> dict[str, common.Bar]:
    """Of the cases that were run; memory only where the device tells it."""
    ran = [row for row in rows if "failed" not in row]
    errors = [row["error"] for row in ran]
    found = {
        "cases_failed": common.Bar(len(rows) - len(ran), 0),
        "cases_left_out": common.Bar(left_out, None),
        "median_error": common.Bar(_median(errors), 0.10, len(ran), "held out", "%"),
        "largest_error": common.Bar(max(map(abs, errors), default=float("nan")), 0.10, len(ran), "held out", "%"),
        "cases_that_jit_could_not_run": common.Bar(sum("jit_failed" in row for row in ran), None),
    }
    for name, ours, theirs in (
        ("time_over_jit", "measured", "jit_measured"), ("memory_over_jit", "measured_bytes", "jit_bytes")
    ):  # fmt: skip
        ratios = [row[ours] / row[theirs] for row in ran if row.get(theirs) is not None]
        if ratios:
            found[name] = common.Bar(max(ratios), 1.01, len(ratios))
    told = [row["memory_error"] for row in ran if row["memory_error"] is not None]
    if told:
        found["memory_median_error"] = common.Bar(_median(told), 0.05, len(told), "held out", "%")
    return found


def _median(errors: Sequence[float]) -> float:
    return float(np.median(np.abs(errors))) if errors else float("nan")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Steps that fill one device, against jax.jit and as predicted."
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="for the calibration")
    parser.add_argument("--preset", choices=autopar.preset_names(), help="predict with this, and do not calibrate")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no further case is begun")
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
        for case in chosen:
            if time.monotonic() - started > arguments.limit:
                break
            row = next(common.each_in_a_process(measure, [case]))
            if case.is_compared and "failed" not in row:
                again = functools.partial(_measured_under_jit, row["examples"])
                row |= next(common.each_in_a_process(again, [case]))
            rows.append(row)
            name = f"{row['model']}, {row['num_microbatches']} microbatches{', remat' if row['remat'] else ''}"
            if "failed" in row:
                print(f"{name}: {row['failed']}", flush=True)
                continue
            memory = "" if row["memory_error"] is None else f", memory {row['memory_error']:+.1%}"
            jit = f"; under jax.jit {row['jit_measured']:.4f} s" if "jit_measured" in row else ""
            jit += f"; under jax.jit {row['jit_failed']}" if "jit_failed" in row else ""
            print(
                f"{name}, {row['examples']} examples: measured {row['measured']:.4f} s, predicted "
                f"{row['predicted']:.4f} s, {row['error']:+.1%}{memory}{jit}", flush=True,
            )  # fmt: skip
    common.report(bars(rows, len(chosen) - len(rows)), rows, arguments.json)


if __name__ == "__main__":
    main()
