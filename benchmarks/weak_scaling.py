"""Weak scaling, executed: `python -m benchmarks.weak_scaling --family gpt|moe|wresnet --processes N`.

A model that grows with the devices, and a batch that stays, as in Alpa's evaluation (OSDI '22, section 8.1): 1, 2, 4,
.. processes of this machine, a core a device, train it by the plan that is found. Throughput is the model's
floating-point operations, as XLA counts those of the plain step, over the time of a step; efficiency is throughput for
each device over that of one. Beside what is measured stand what the plan predicts and Alpa's published efficiency.

On a cluster, each number of devices is a job of its own, and the table is made of what they leave:
    srun autopar run benchmarks/weak_scaling_processes.py points/16.json gpt 10
    python -m benchmarks.weak_scaling --family gpt --points points/*.json
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import common
from benchmarks.weak_scaling_processes import FAMILIES

STEPS = 5
SCRIPT = pathlib.Path(__file__).with_name("weak_scaling_processes.py")
PUBLISHED = pathlib.Path(__file__).parent / "data" / "alpa_osdi22_measured.json"


def measure(family: str, processes: int, devices: int, steps: int) -> dict[str, Any]:
    """One job on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "point.json"
        many = ["--processes", str(processes)] if processes > 1 else []
        command = [
            sys.executable, "-m", "autopar", "run", *many, "--devices-per-process", str(devices), os.fspath(SCRIPT),
            os.fspath(file), family, str(steps),
        ]  # fmt: skip
        # XLA for CPUs takes all cores for one device otherwise.
        environment = {"NPROC": str(devices), **os.environ, "PYTHONPATH": os.fspath(SCRIPT.parents[1])}
        subprocess.run(command, env=environment, check=True)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def published(family: str) -> dict[int, float]:
    """Alpa's efficiency by the number of GPUs."""
    rows = json.loads(PUBLISHED.read_text())["rows"]
    per_gpu = {
        row["num_gpus"]: row["tflops"]
        for row in rows
        if row["exp"] == "e2e" and row["model"] == family and row["method"] == "alpa.auto" and row["tflops"] > 0
    }
    return {count: tflops / per_gpu[1] for count, tflops in sorted(per_gpu.items())}


def rows_of(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Throughput and efficiency; the efficiency is that over the fewest devices."""
    rows: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: p["devices"]):
        median = statistics.median(point["seconds"])
        row = {**point, "median": median, "throughput": point["flops"] / median}
        row["predicted_throughput"] = point["flops"] / point["predicted"]
        first = rows[0] if rows else row
        for name in ("throughput", "predicted_throughput"):
            share = row[name] / row["devices"] / (first[name] / first["devices"])
            row[name.replace("throughput", "efficiency")] = share
        rows.append(row)
    return rows


def table(family: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """For the terminal."""
    alpas = published(family)
    found = Table(title=f"weak scaling, {family}")
    for column in (
        "processes", "devices", "parameters", "plan", "s a step", "predicted", "GFLOP/s", "efficiency", "predicted",
        "Alpa's",
    ):  # fmt: skip
        found.add_column(column, justify="left" if column == "plan" else "right")
    for row in rows:
        alpa = alpas.get(row["devices"])
        found.add_row(
            str(row["processes"]), str(row["devices"]), f"{row['parameters'] / 1e6:.1f} M", row["plan"],
            f"{row['median']:.3f} (n = {len(row['seconds'])})", f"{row['predicted']:.3f}",
            f"{row['throughput'] / 1e9:.1f}", f"{row['efficiency']:.2f}", f"{row['predicted_efficiency']:.2f}",
            "" if alpa is None else f"{alpa:.2f}",
        )  # fmt: skip
    return found


def plot(family: str, rows: Sequence[Mapping[str, Any]], file: pathlib.Path) -> None:
    """A page of two diagrams over the devices: throughput, and efficiency."""
    from bokeh.layouts import row as side_by_side
    from bokeh.plotting import figure, output_file, save

    devices = [row["devices"] for row in rows]
    throughput = figure(title=f"{family}: throughput", x_axis_label="devices", y_axis_label="GFLOP/s")
    efficiency = figure(title=f"{family}: efficiency", x_axis_label="devices", y_axis_label="of one device's")
    series = (("measured", "", "solid", "#1f77b4"), ("predicted", "predicted_", "dashed", "#ff7f0e"))
    for name, prefix, dash, color in series:
        style: dict[str, Any] = {"legend_label": name, "line_dash": dash, "color": color}
        throughput.line(devices, [row[f"{prefix}throughput"] / 1e9 for row in rows], **style)
        efficiency.line(devices, [row[f"{prefix}efficiency"] for row in rows], **style)
    alpas = published(family)
    efficiency.line(
        list(alpas), list(alpas.values()), legend_label="Alpa on V100s", line_dash="dotted", color="#2ca02c"
    )
    output_file(os.fspath(file), title=f"weak scaling, {family}", mode="inline")
    save(side_by_side(throughput, efficiency))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weak_scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--processes", type=int, default=4, help="1, 2, 4, .. up to so many, on this machine")
    parser.add_argument("--devices-per-process", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--points", type=pathlib.Path, nargs="+", help="what jobs have left, instead of new ones")
    parser.add_argument("--plot", type=pathlib.Path, help="write diagrams to this HTML file")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    if arguments.points:
        points = [json.loads(file.read_text()) for file in arguments.points]
    else:
        counts = [2**k for k in range(arguments.processes.bit_length()) if 2**k <= arguments.processes]
        points = [measure(arguments.family, count, arguments.devices_per_process, arguments.steps) for count in counts]
    rows = rows_of(points)
    Console(width=160).print(table(arguments.family, rows))
    if arguments.plot is not None:
        plot(arguments.family, rows, arguments.plot)
    if arguments.json is not None:
        last = rows[-1]
        bars = {
            f"{arguments.family}_efficiency_on_{last['devices']}": common.Bar(last["efficiency"], None),
            f"{arguments.family}_predicted_efficiency_on_{last['devices']}": common.Bar(
                last["predicted_efficiency"], None
            ),
        }
        common.write_json(arguments.json, common.result(bars, rows))


if __name__ == "__main__":
    main()
