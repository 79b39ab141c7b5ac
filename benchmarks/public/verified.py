"""Public programs on one H100, held against XLA's compiler: a part of `benchmarks.verify`.

Each is planned whole, as one program, and compiled ahead of time. The ratio of what is predicted to what XLA's program
has: bytes that kernels read from memory and write to it, kernels launched, bytes of memory while it runs. Bars: median
and 95th percentile of the ratios' distance from 1, and their trend with depth: the slope of the line through the
logarithms, of ratio over layers, that families of several depths have in common (each about its own mean).
"""

from __future__ import annotations

import collections
import dataclasses
import time
import warnings
from collections.abc import Sequence

import numpy as np

from autopar import recipes
from autopar.cost_model.hardware import load_preset
from autopar.errors import TargetError
from autopar.ir.verification import ProgramCheck
from benchmarks import common
from benchmarks.public.program import Program
from benchmarks.public.programs import programs
from benchmarks.verifiable import plan

QUANTITIES = ("moved", "launches", "memory")
_LIMITS = {"moved": (0.10, 0.25), "launches": (0.10, 0.25), "memory": (0.05, 0.15)}  # median, 95th percentile
_SLOPE = 0.03


@dataclasses.dataclass(frozen=True)
class Row:
    """One program: what was predicted, and what XLA made of it."""

    case: str
    family: str
    layers: int
    moved: tuple[float, float]  # bytes
    launches: tuple[float, float]
    memory: tuple[float, float]  # bytes
    planning: float  # seconds
    compiling: float  # seconds

    def ratio(self, quantity: str) -> float:
        """Predicted over found."""
        predicted, found = getattr(self, quantity)
        return float(predicted / found)

    def __str__(self) -> str:
        told = ", ".join(f"{quantity} {self.ratio(quantity):.2f}" for quantity in QUANTITIES)
        seconds = f"planned in {self.planning:.1f} s, compiled in {self.compiling:.1f} s"
        return f"{self.case}: {told} of XLA's ({self.moved[1] / 1e9:.1f} GB, {self.launches[1]:.0f} kernels); {seconds}"


def compiled(name: str) -> Row | str:
    """Plan a program, and have XLA compile it; or what XLA says of one that it cannot compile."""
    common.use_virtual_devices(1)
    (program,) = (program for program in programs() if program.name == name)
    step = program.make()
    cluster = load_preset("dgx-h100", num_hosts=1, devices_per_host=1)
    started = time.perf_counter()
    with warnings.catch_warnings(action="ignore"):
        planned = plan(step.function, *step.abstract(), cluster=cluster, method=recipes.data_parallel(1))
        planning = time.perf_counter() - started
        try:
            (check,) = planned.verify_with_xla().programs
        except TargetError as error:  # XLA's compiler for GPUs fails on some programs where there is no GPU to tune for
            return f"{name}: {error}"[:300]
    return row_of(program, check, planning)


def row_of(program: Program, check: ProgramCheck, planning: float) -> Row:
    """Of XLA's verdict."""
    if check.found_kernels is None:
        raise ValueError(f"{program.name} has a loop of unknown length")
    return Row(
        program.name, program.family, program.variant.layers, (check.kernels.nbytes, check.found_kernels.nbytes),
        (check.kernels.launches, check.found_kernels.launches), (check.predicted.total, check.found.total), planning,
        check.seconds,
    )  # fmt: skip


def slope(rows: Sequence[Row], quantity: str) -> float:
    """Of the logarithm of the ratio over that of the layers, within families; NaN where none has several depths.

    >>> deeper = [Row("", "mlp", n, (n**1.5, n), (1, 1), (1, 1), 0, 0) for n in (2, 8, 24)]
    >>> round(slope(deeper, "moved"), 6)
    0.5
    """
    families: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        families[row.family].append(row)
    above = below = 0.0
    for mine in families.values():
        layers = np.log([row.layers for row in mine])
        ratios = np.log([row.ratio(quantity) for row in mine])
        centred = layers - layers.mean()
        above += float(centred @ ratios)
        below += float(centred @ centred)
    return above / below if below else float("nan")


def bars(rows: Sequence[Row]) -> dict[str, common.Bar]:
    """Of the programs that were run."""
    found = {}
    for quantity, (median, rarely) in _LIMITS.items() if rows else ():
        errors = np.abs([row.ratio(quantity) - 1 for row in rows])
        found[f"public_{quantity}_median"] = common.Bar(float(np.median(errors)), median)
        found[f"public_{quantity}_95th_percentile"] = common.Bar(float(np.quantile(errors, 0.95)), rarely)
        trend = slope(rows, quantity)
        if not np.isnan(trend):
            found[f"public_{quantity}_slope"] = common.Bar(abs(trend), _SLOPE)
    return found


def run(only: str | None) -> list[Row]:
    """All whose name, after "public ", contains this text, the deepest first; rows are printed as they come."""
    chosen = [p for p in programs() if only is None or only in f"public {p.name}"]
    names = [p.name for p in sorted(chosen, key=lambda p: -p.variant.layers)]
    rows = []
    for row in common.each_in_a_process(compiled, names, common.num_cores()):
        print(row, flush=True)
        if isinstance(row, Row):
            rows.append(row)
    return rows
