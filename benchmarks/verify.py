"""Plans held against XLA's compiler for H100s that are not there: `python -m benchmarks.verify --json FILE`.

Stage programs of GPT, MoE and Wide-ResNet steps, with and without rematerialisation, under data parallelism, ZeRO-2 and
3, tensor parallelism, both, and pipelines, on 1 to 64 H100s, are compiled ahead of time. Bars: the error of the bytes
that are predicted while a program runs against XLA's `memory_analysis` (median, 95th percentile), plans accepted that
XLA finds more than 5 % over capacity, the error of a stage's collective bytes, that of the seconds that collectives run
beside kernels against XLA's order of both (as a share of the communication of a program), and the seconds that
verifying a whole plan of GPT-39B on 64 devices takes. Programs that only reshard, which are exact, are left out of the
errors.

Then programs as the users of public frameworks write them (`benchmarks.public`), on one H100: the bytes that their
kernels move, the number of these, and their memory.

Needs XLA's compiler for NVIDIA GPUs: `pip install 'autopar[verify]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar import recipes
from autopar.cost_model.hardware import load_preset
from autopar.errors import UserError
from autopar.ir.method import Method
from autopar.ir.verification import Verification
from autopar.planned import Planned
from benchmarks import common, published
from benchmarks.models import gpt, moe, wide_resnet
from benchmarks.verifiable import plan

LARGEST = "gpt 39B on 64"
_GPT = gpt.GPTConfig(51200, 1024, 4, 2048, 32, dropout=0.0, dtype=jnp.bfloat16)
_MOE = moe.MoEConfig(32000, 1024, 4, 1024, 16, num_experts=16, group_size=2048, dropout=0.0, dtype=jnp.bfloat16)
_RESNET = wide_resnet.WideResNetConfig((1, 2, 2, 1), 160, 2, dtype=jnp.bfloat16)
MODELS: Mapping[str, tuple[Any, Any, Callable[[], optax.GradientTransformation]]] = {
    "gpt": (gpt, _GPT, lambda: optax.adamw(1e-3)),
    "gpt scanned": (gpt, dataclasses.replace(_GPT, scan=True, num_layers=8), lambda: optax.adamw(1e-3)),
    "moe": (moe, _MOE, lambda: optax.adafactor(1e-3)),
    "wresnet": (wide_resnet, _RESNET, lambda: optax.sgd(1e-3, momentum=0.9)),
}
# Devices, and how they are used.
METHODS: Mapping[str, tuple[int, Method]] = {
    "one device": (1, recipes.data_parallel(1)),
    "data parallel": (8, recipes.data_parallel(1)),
    "ZeRO-2": (8, recipes.zero(2, 2)),
    "ZeRO-3": (16, recipes.zero(3, 1)),
    "tensor parallel": (8, recipes.megatron(1, 8, 1, 1)),
    "data and tensor parallel": (64, recipes.megatron(8, 8, 1, 2)),
    "pipeline": (16, recipes.megatron(2, 4, 2, 4)),
}
_PER_DEVICE = {"gpt": 4, "gpt scanned": 4, "moe": 8, "wresnet": 16}  # examples
# Batch norm couples the examples of a batch, so that it runs in one microbatch.
COUPLED = {"wresnet"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model under a method; `remat`: each block is computed again in the backward pass."""

    model: str
    method: str
    remat: bool

    @property
    def name(self) -> str:
        return f"{self.model}, {self.method}, {'with' if self.remat else 'without'} remat"


def cases() -> list[Case]:
    """All of them."""
    return [
        Case(model, method, remat)
        for model in MODELS
        for method, (_, how) in METHODS.items()
        for remat in (False, True)
        if model not in COUPLED or how.num_microbatches == 1
    ]


def plan_on_h100s(model: Any, config: Any, optimizer: Any, devices: int, per_device: int, method: Method) -> Planned:
    """Of a train step of so many examples a device."""
    cluster = load_preset("dgx-h100", num_hosts=-(-devices // 8), devices_per_host=min(8, devices))
    batch = model.abstract_batch(config, per_device * devices)
    state = jax.eval_shape(model.make_init(config, optimizer), jax.random.key(0))
    return plan(model.make_train_step(config, optimizer), state, batch, cluster=cluster, method=method)


def _seconds(case: Case) -> tuple[Verification, float]:
    model, config, optimizer = MODELS[case.model]
    devices, method = METHODS[case.method]
    config = dataclasses.replace(config, remat=case.remat)
    started = time.perf_counter()
    found = plan_on_h100s(model, config, optimizer(), devices, _PER_DEVICE[case.model], method)
    return found.verify_with_xla(), time.perf_counter() - started


def verified(case: Case) -> tuple[Verification | None, float, str]:
    """XLA's verdict, the seconds that planning and verifying took, and why there is none."""
    common.use_virtual_devices(1)
    with warnings.catch_warnings(action="ignore"):
        try:
            return *_seconds(case), ""
        except UserError as error:
            return None, 0.0, f"{type(error).__name__}: {error}"


def largest(_: None) -> tuple[Verification, float, float]:
    """GPT-39B on 64 devices: XLA's verdict, the seconds that it took, and those to plan it."""
    common.use_virtual_devices(1)
    spec = {"family": "gpt", "alpa": False, "dtype": "bf16", "remat": True, **_SIZES_39B}
    started = time.perf_counter()
    function, state, batch = published.train_step(spec, 1024, 64, scan=True)
    cluster = load_preset("dgx-h100", num_hosts=8)
    with warnings.catch_warnings(action="ignore"):
        found = plan(function, state, batch, cluster=cluster)
    planned = time.perf_counter()
    verdict = found.verify_with_xla()
    return verdict, time.perf_counter() - planned, planned - started


_SIZES_39B = {"vocab_size": 51200, "seq_len": 1024, "num_layers": 48, "hidden_size": 8192, "num_heads": 64}


def rows_of(case: str, found: Verification) -> list[dict[str, Any]]:
    """A row for each program that computes."""
    here = f"{pathlib.Path.cwd()}/"
    return [
        {
            "case": case, "program": program.names[0], "programs": len(program.names), "phase": program.phase,
            "predicted": dataclasses.asdict(program.predicted), "found": dataclasses.asdict(program.found),
            "memory_error": program.memory_error, "traffic": [dataclasses.asdict(t) for t in program.traffic],
            "overlap": dataclasses.asdict(program.overlap),
            "remarks": [each.replace(here, "") for each in program.remarks], "seconds": program.seconds,
        }
        for program in found.programs
        if not program.names[0].startswith("bridge")
    ]  # fmt: skip


def traffic_error(found: Verification) -> float:
    """The largest relative error of the bytes that a stage's programs send, by kind and axes."""
    worst = 0.0
    for program in found.programs:
        for each in program.traffic:
            if max(each.predicted[1], each.found[1]) > _SMALL:
                worst = max(worst, abs(each.predicted[1] - each.found[1]) / max(each.found[1], 1))
    return worst


_SMALL = 1 << 16  # bytes: such collectives are of losses and norms


def overlap_errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """By how much what is hidden differs from XLA's order, as shares of the communication of programs with enough."""
    overlaps = [row["overlap"] for row in rows if row["overlap"]["found"] is not None]
    return [
        abs(each["hidden"] - each["found"]) / each["communication"]
        for each in overlaps if each["communication"] > _BRIEF
    ]  # fmt: skip


_BRIEF = 1e-4  # seconds: less communication is of losses and norms


def bars(verdicts: Sequence[Verification], rows: Sequence[Mapping[str, Any]]) -> dict[str, common.Bar]:
    """Of the cases that were run."""
    errors = np.abs([row["memory_error"] for row in rows])
    hidden = overlap_errors(rows) or [0.0]
    wrong = sum(stage.found > 1.05 * stage.capacity for found in verdicts for stage in found.stages)
    return {
        "programs_missing": common.Bar(max(0, 60 - len(rows)), 0),
        "memory_median": common.Bar(float(np.median(errors)), 0.05, len(rows), "developed on", "%"),
        "memory_95th_percentile": common.Bar(float(np.quantile(errors, 0.95)), 0.15, len(rows), "developed on", "%"),
        "accepted_over_capacity": common.Bar(wrong, 0),
        "collective_bytes": common.Bar(max(map(traffic_error, verdicts)), 0.05),
        "hidden_median": common.Bar(float(np.median(hidden)), 0.1, len(hidden), "developed on", "%"),
        "hidden_95th_percentile": common.Bar(float(np.quantile(hidden, 0.95)), 0.3, len(hidden), "developed on", "%"),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verify", description="Plans held against XLA's compiler for absent H100s."
    )
    parser.add_argument("--only", help="cases whose name contains this text")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()

    chosen = [case for case in cases() if arguments.only is None or arguments.only in case.name]
    verdicts, rows = [], []
    all_verified = common.each_in_a_process(verified, chosen, common.num_cores())
    for case, (found, seconds, why) in zip(chosen, all_verified, strict=True):
        if found is None:
            print(f"{case.name}: not planned: {why}", flush=True)
            continue
        mine = rows_of(case.name, found)
        verdicts.append(found)
        rows += mine
        print(f"{case.name}: {seconds:.1f} s, bytes sent {traffic_error(found):+.1%}", flush=True)
        for row in mine:
            print(f"  {row['program']}: memory {row['memory_error']:+.1%}", *row["remarks"], sep="\n    ", flush=True)
    if arguments.only is None or arguments.only in LARGEST:  # alone: its time counts
        ((found, seconds, planning),) = common.each_in_a_process(largest, [None])
        print(f"{LARGEST}: planned in {planning:.1f} s, verified in {seconds:.1f} s\n{found}", flush=True)
        verdicts.append(found)
        rows += rows_of(LARGEST, found)
    found_bars = bars(verdicts, rows) if rows else {}
    if arguments.only is None or arguments.only in LARGEST:
        found_bars["seconds_gpt_39B"] = common.Bar(seconds, 300.0)
    from benchmarks.public import verified as public  # frameworks that the other cases' processes need not import

    rows_of_public = public.run(arguments.only)
    found_bars |= public.bars(rows_of_public)
    common.report(found_bars, rows + [dataclasses.asdict(row) for row in rows_of_public], arguments.json)


if __name__ == "__main__":
    main()
