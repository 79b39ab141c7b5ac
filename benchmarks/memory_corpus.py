"""What XLA sets aside for programs of many kinds, beside what is predicted.

Models other than those that `benchmarks.verify` holds plans by, or of other sizes, on other numbers of H100s. Nothing
is fitted to them. Bars: the median and the 95th percentile of the errors, relative to all bytes of a program, of
programs of 1 MiB and more.

Needs XLA's compiler for NVIDIA GPUs: `pip install 'autopar[verify]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from autopar import recipes
from autopar.cost_model.program_cost import temporaries
from autopar.errors import UserError
from autopar.ir.method import Method
from autopar.planning.finisher import Finisher
from benchmarks import common
from benchmarks.models import encoder_decoder, gpt, moe, unet, wide_resnet
from benchmarks.verify import plan_on_h100s

_LEAST = 1 << 20  # bytes of a program: of what smaller ones take nothing depends
_GPT = gpt.GPTConfig(32000, 512, 3, 1536, 12, dropout=0.0, dtype=jnp.bfloat16)
_RESNET = wide_resnet.WideResNetConfig((1, 1, 2, 1), 128, 2, image_size=192, dtype=jnp.bfloat16)
# The family, the module, its configuration, the optimizer, examples a device, whether a block can be computed again.
_MODELS: Mapping[str, tuple[str, Any, Any, Callable[[], Any], int, bool]] = {
    "gpt": ("gpt", gpt, _GPT, lambda: optax.adamw(1e-3), 8, True),
    "gpt scanned": ("gpt", gpt, dataclasses.replace(_GPT, scan=True, num_layers=6), lambda: optax.sgd(1e-3), 8, True),
    "moe": (
        "moe", moe, moe.MoEConfig(16000, 512, 4, 768, 12, 8, 1024, dropout=0.0, dtype=jnp.bfloat16),
        lambda: optax.adamw(1e-3), 8, True,
    ),
    "wresnet": ("wresnet", wide_resnet, _RESNET, lambda: optax.sgd(1e-3, momentum=0.9), 24, True),
    "unet": (
        "unet", unet, unet.UNetConfig(32, 128, (1, 2, 2), 1, dropout=0.0, dtype=jnp.bfloat16),
        lambda: optax.adamw(1e-3), 32, False,
    ),
    "encoder and decoder": (
        "encoder_decoder", encoder_decoder,
        encoder_decoder.EncoderDecoderConfig(32000, 512, 256, 2, 1024, 16, 64, 2816, dropout=0.0, dtype=jnp.bfloat16),
        lambda: optax.adafactor(1e-3), 8, True,
    ),
}  # fmt: skip
_METHODS: Mapping[str, tuple[int, Method]] = {
    "data parallel": (4, recipes.data_parallel(1)),
    "ZeRO-3": (8, recipes.zero(3, 1)),
    "tensor parallel": (4, recipes.megatron(1, 4, 1, 1)),
    "pipeline": (8, recipes.megatron(2, 2, 2, 2)),
}
_COUPLED = {"wresnet"}  # whose batch norm needs all examples at once


@dataclasses.dataclass(frozen=True)
class Row:
    """A program that was compiled."""

    case: str
    family: str
    program: str
    rest: int  # bytes of arguments and results
    predicted: int  # bytes of temporaries
    found: int  # bytes of temporaries

    @property
    def error(self) -> float:
        """Relative, of all bytes of the program."""
        return (self.predicted - self.found) / max(1, self.rest + self.found)


def cases() -> list[tuple[str, str, bool]]:
    """Model, method, and whether blocks are computed again."""
    return [
        (model, method, remat)
        for method, (_, how) in _METHODS.items()
        for model, (*_, can) in _MODELS.items()
        for remat in ((False, True) if can else (False,))
        if model not in _COUPLED or how.num_microbatches == 1
    ]


def compiled(case: tuple[str, str, bool]) -> tuple[list[Row], str]:
    """Each program of a case that computes, and why there is none."""
    common.use_virtual_devices(1)
    model, method, remat = case
    family, module, config, optimizer, per_device, can = _MODELS[model]
    config = dataclasses.replace(config, remat=remat) if can else config
    devices, how = _METHODS[method]
    name = f"{model}, {method}, {'with' if remat else 'without'} remat"
    with warnings.catch_warnings(action="ignore"):
        try:
            plan = plan_on_h100s(module, config, optimizer(), devices, per_device, how)
            verdict = plan.verify_with_xla()
        except UserError as error:
            return [], f"{name}: {type(error).__name__}: {error}"
    finisher = Finisher(plan.step.analysis, plan.cluster)
    programs = {local.program.name: local for local in finisher.restore(plan)[1].programs}
    rows = []
    for check in verdict.programs:
        local = programs[check.names[0]]
        kind = finisher.stages.prices.kind(local.mesh)
        if not check.names[0].startswith("bridge") and check.found.total >= _LEAST:
            rest, found = check.found.total - check.found.temporaries, check.found.temporaries
            predicted = temporaries(local, kind, finisher.stages.prices.resharder(local.mesh)[1])
            rows.append(Row(name, family, check.names[0], rest, predicted, found))
    return rows, name


def bars(rows: Sequence[Row]) -> dict[str, common.Bar]:
    """Of the relative errors, whichever way."""
    errors = [abs(row.error) for row in rows]
    return {
        name: common.Bar(float(np.quantile(errors, quantile)), limit, len(errors), "held out", "%")
        for name, quantile, limit in (("median", 0.5, 0.05), ("95th_percentile", 0.95, 0.15))
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_corpus", description="How far predicted memory is from XLA's."
    )
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    parser.add_argument("--rows", type=pathlib.Path, help="take the rows of such a file instead of compiling")
    arguments = parser.parse_args()

    rows: list[Row] = []
    if arguments.rows is not None:
        rows = [Row(**row) for row in json.loads(arguments.rows.read_text(encoding="utf-8"))["rows"]]
    else:
        chosen = [case for case in cases() if arguments.only in ", ".join(map(str, case))]
        for mine, text in common.each_in_a_process(compiled, chosen, common.num_cores()):
            print(text, flush=True)
            for row in mine:
                print(f"  {row.program}: {row.error:+.1%}", flush=True)
            rows += mine
    common.report(bars(rows) if rows else {}, [dataclasses.asdict(row) for row in rows], arguments.json)


if __name__ == "__main__":
    main()
