"""What XLA sets aside for temporaries beside what its schedule, as `order` knows it, needs: learned from programs.

A factor for each kind of program: for GPUs in a file that `python -m benchmarks.memory_corpus` makes, else what a
calibration found (`Measured.temporaries`).
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping

from autopar.ir.local import Compute, LocalProgram, Reread, Reshard
from autopar.ir.mesh import DeviceKind


def temporaries_factor(local: LocalProgram, kind: DeviceKind) -> float:
    """How many times as large as `program_cost.temporaries` says the buffer is."""
    if kind.xla.hides_latency:  # XLA for GPUs
        return memory_factors().get(program_kind(local), 1.0)
    return kind.measured.temporaries.get("convolutions" if _convolves(local) else "others", 1.0)


def _convolves(local: LocalProgram) -> bool:
    computed = [op for op in local.ops if isinstance(op, Compute)]
    products = [op.product for op in computed] + [each.product for op in computed for each in op.kernels]
    return any(product is not None and product.patches is not None for product in products)


def program_kind(local: LocalProgram) -> str:
    """What makes XLA's figure differ: convolutions, sums over devices, what is computed or gathered again, loops."""
    computed = [op for op in local.ops if isinstance(op, Compute)]
    traits = {
        "convolutions": _convolves(local),
        "collectives": any(isinstance(op, Reshard) for op in local.ops),
        "again": any(op.fence for op in computed) or any(isinstance(op, Reread) for op in local.ops),
        "loops": any(op.kernels for op in computed),
    }
    return " ".join(name for name, has in traits.items() if has) or "plain"


@functools.cache
def memory_factors() -> Mapping[str, float]:
    """By the kind of a program, for NVIDIA GPUs; of other kinds it is 1."""
    file = importlib.resources.files("autopar.cost_model").joinpath("data").joinpath("memory").joinpath("gpu.json")
    factors: Mapping[str, float] = json.loads(file.read_text(encoding="utf-8"))["factors"]
    return factors
