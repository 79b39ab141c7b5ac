"""How planning time grows: a part of `benchmarks.planner`.

A GPT of ever more layers, as one scan and unrolled, on 64 A100s; and one of 48 layers on 8 to 8,192 of them, its batch
growing with their number. The exponent is the slope of the least-squares line through the logarithms; the first point
of each series pays for what is loaded and compiled once, so that is done before. Planning time is CPU time.

Bars: at most linear in the layers, at most quadratic in the hosts.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.cost_model.hardware import load_preset
from autopar.ir.method import AUTO
from autopar.planning.traced import TracedStep
from benchmarks import common
from benchmarks.models import gpt
from benchmarks.traced import trace

LAYERS = {True: (24, 48, 96, 192, 384, 768), False: (24, 48, 96, 192)}  # as one scan, and unrolled
HOSTS = (1, 4, 16, 64, 256, 1024)
CONFIG = gpt.GPTConfig(
    51200, sequence_length=1024, num_layers=48, width=2048, num_heads=16, dropout=0.0, dtype=jnp.bfloat16, remat=True,
    scan=True,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Point:
    """One plan of a series."""

    series: str
    number: int  # of layers, or of hosts
    config: gpt.GPTConfig
    hosts: int
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """What it took to find it."""

    series: str
    number: int
    equations: int  # of the traced step
    tracing: float  # CPU seconds
    planning: float  # CPU seconds, without tracing
    seconds: float  # of a step
    plan: str


def points() -> list[Point]:
    """All series."""
    found = []
    for scan, numbers in LAYERS.items():
        name = "layers, scanned" if scan else "layers, unrolled"
        for layers in numbers:
            config = dataclasses.replace(CONFIG, num_layers=layers, scan=scan)
            found.append(Point(name, layers, config, hosts=8, batch_size=512))
    return found + [Point("hosts", hosts, CONFIG, hosts, batch_size=64 * hosts) for hosts in HOSTS]


def measure(point: Point) -> Measured:
    """Plan it."""
    common.use_virtual_devices(1)
    _planned(Point("", 2, dataclasses.replace(CONFIG, num_layers=2), hosts=1, batch_size=8))
    return _planned(point)


def traced(point: Point) -> TracedStep:
    """Its train step."""
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(gpt.make_init(point.config, optimizer), jax.random.key(0))
    batch = gpt.abstract_batch(point.config, point.batch_size)
    return trace(gpt.make_train_step(point.config, optimizer), state, batch)


def _planned(point: Point) -> Measured:
    cluster = load_preset("dgx-a100", num_hosts=point.hosts)
    started = time.process_time()
    step = traced(point)
    then = time.process_time()
    plan, _ = step.search(cluster, AUTO)
    planned = time.process_time()
    stages = " + ".join("x".join(map(str, stage.mesh.shape)) for stage in plan.stages)
    return Measured(
        point.series, point.number, len(step.graph.equations), then - started, planned - then,
        float(plan.step_time), f"{plan.num_microbatches} microbatches, {stages}",
    )  # fmt: skip


def exponent(numbers: Sequence[float], seconds: Sequence[float]) -> float:
    """Of the power law that fits best.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    return float(np.polyfit(np.log(numbers), np.log(seconds), 1)[0])


def bars(rows: Sequence[Measured]) -> dict[str, common.Bar]:
    """The exponents of planning time, tracing included."""
    found = {}
    for series in dict.fromkeys(row.series for row in rows):
        mine = [row for row in rows if row.series == series]
        seconds = [row.tracing + row.planning for row in mine]
        name = series.replace(", ", "_")
        found[f"exponent_{name}"] = common.Bar(
            exponent([row.number for row in mine], seconds), 2.0 if series == "hosts" else 1.0, len(mine)
        )
        if mine[-1].equations > mine[0].equations:
            found["exponent_operators"] = common.Bar(exponent([row.equations for row in mine], seconds), 1.0, len(mine))
    return found


def run(only: str | None, path: pathlib.Path | None) -> None:
    """Measure all, or those series whose name contains a text, each point in a process of its own, and report."""
    rows = []
    for row in common.each_in_a_process(measure, [each for each in points() if only is None or only in each.series]):
        print(
            f"{row.series}: {row.number}, {row.equations} equations traced in {row.tracing:.1f} s, planned in "
            f"{row.planning:.1f} s; {row.seconds:.4g} s a step, {row.plan}",
            flush=True,
        )
        rows.append(row)
    common.report(bars(rows), [dataclasses.asdict(row) for row in rows], path)
