"""Pipelines over two processes, a core each, beside what they could be at best: `python -m benchmarks.pipeline`.

Each core is calibrated first, both at the same time, and what is between the processes is measured: so the step times
are predicted.

The step is a chain of layers, half of them on each process's one device; a program takes 50 ms or more. Each round
runs, one after the other:
1. The calibration: each process computes all layers of all microbatches by itself, by hand-written calls of one jitted
   function; both do so at the same time, so that they share the machine as the stages do.
2. One step of each pipeline, planned by autopar: the same work, half of it on each process.
The efficiency is half the time of 1 over that of 2. It can be m / (m + p - 1) at most: m microbatches, p stages.

Bars: the best efficiency of the rounds is at least 0.85 of that; so is the CPU time of each process over the wall time.
And stage i of p holds activations of no more of the m microbatches at once than its schedule says: m under GPipe,
min(m, p - i) under 1F1B. The last, which goes backward at once, holds one under both.
The predicted step time is within 10 % of the median.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import common

SCHEDULES = ("gpipe", "1f1b")
MICROBATCHES = (16, 32)
STAGES = 2
ROUNDS = 10
LEAST = 0.85  # of what is possible
SCRIPT = pathlib.Path(__file__).with_name("pipeline_processes.py")
# One thread for XLA's own parallelism: a process has one core.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.fspath(SCRIPT.parents[1]), "JAX_PLATFORMS": "cpu", "NPROC": "1"}
MOST_ERROR = 0.1  # of the predicted step time
SECONDS = 300.0  # of the calibration


def calibrate(folder: str, seconds: float) -> None:
    """Cluster files of a device on each core, measured side by side, as the stages run.

    Raises:
      subprocess.CalledProcessError: one failed.
    """
    cores = sorted(os.sched_getaffinity(0))[:STAGES]
    commands = [
        [
            sys.executable, "-m", "autopar", "calibrate", "--seconds", str(seconds),
            "--output", os.fspath(pathlib.Path(folder) / f"{number}.cluster.json"),
        ]
        for number in range(STAGES)
    ]  # fmt: skip
    started = [
        subprocess.Popen(command, env=ENVIRONMENT, preexec_fn=functools.partial(os.sched_setaffinity, 0, {core}))
        for command, core in zip(commands, cores, strict=True)
    ]
    codes = [job.wait() for job in started]
    for code, command in zip(codes, commands, strict=True):
        if code:
            raise subprocess.CalledProcessError(code, command)


def measure(rounds: int, seconds: float) -> list[list[dict[str, Any]]]:
    """The rows of each process."""
    with tempfile.TemporaryDirectory() as folder:
        calibrate(folder, seconds)
        command = [
            sys.executable, "-m", "autopar", "run", "--processes", "2", "--devices-per-process", "1", os.fspath(SCRIPT),
            folder, str(rounds), ",".join(SCHEDULES), ",".join(map(str, MICROBATCHES)),
        ]  # fmt: skip
        subprocess.run(command, env=ENVIRONMENT, check=True)
        return [json.loads((pathlib.Path(folder) / f"{p}.json").read_text()) for p in range(2)]


def in_flight(schedule: str, microbatches: int, stage: int) -> int:
    """Microbatches of which a stage holds activations at once."""
    return microbatches if schedule == "gpipe" else min(microbatches, STAGES - stage)


def bars_of(rows: list[dict[str, Any]]) -> dict[str, common.Bar]:
    """Of a schedule and a number of microbatches: what is possible over what the best round reached."""
    bars = {}
    for row in rows:
        possible = row["microbatches"] / (row["microbatches"] + 1)
        name = f"{row['schedule']}_{row['microbatches']}".replace("1f1b", "one_f_one_b")
        best = max(row["efficiencies"])
        bars[f"{name}_possible_over_best"] = common.Bar(possible / best, 1 / LEAST, n=len(row["efficiencies"]))
        bars[f"{name}_possible_over_cpu"] = common.Bar(possible / row["cpu"], 1 / LEAST, n=len(row["efficiencies"]))
        error = abs(row["predicted"] / statistics.median(row["step"]) - 1)
        bars[f"{name}_predicted_error"] = common.Bar(error, MOST_ERROR, len(row["step"]), "held out", "%")
        expected = [in_flight(row["schedule"], row["microbatches"], stage) for stage in range(STAGES)]
        beyond = max(found - wanted for found, wanted in zip(row["in_flight"], expected, strict=True))
        bars[f"{name}_in_flight_beyond_formula"] = common.Bar(beyond, 0, n=STAGES)
    return bars


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the calibration of the cores")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    first, second = measure(arguments.rounds, arguments.seconds)
    rows = []
    for a, b in zip(first, second, strict=True):
        calibration = [(x + y) / 2 for x, y in zip(a["alone"], b["alone"], strict=True)]
        steps = [max(x, y) for x, y in zip(a["step"], b["step"], strict=True)]
        efficiencies = [alone / 2 / step for alone, step in zip(calibration, steps, strict=True)]
        cpu = min(max(x / y for x, y in zip(row["cpu"], steps, strict=True)) for row in (a, b))
        rows.append({
            "schedule": a["schedule"], "microbatches": a["microbatches"], "alone": calibration, "step": steps,
            "efficiencies": efficiencies, "cpu": cpu, "in_flight": [a["in_flight"], b["in_flight"]],
            "predicted": a["predicted"],
        })  # fmt: skip
        possible = a["microbatches"] / (a["microbatches"] + 1)
        print(
            f"{a['schedule']}, {a['microbatches']} microbatches: {min(steps):.2f} s a step, efficiency "
            f"{max(efficiencies):.3f} at best of {possible:.3f} possible; CPU time over wall time {cpu:.3f}; "
            f"microbatches in flight {rows[-1]['in_flight']}; predicted {a['predicted']:.2f} s, median "
            f"{statistics.median(steps):.2f} s"
        )
    bars = bars_of(rows)
    for name, bar in bars.items():
        print(f"{name}: {bar}")
    if arguments.json is not None:
        common.write_json(arguments.json, common.result(bars, rows))


if __name__ == "__main__":
    main()
