"""Transfers between meshes over two processes, beside other ways: `python -m benchmarks.transfer`.

128 pairs of a mesh and a sharding and another mesh and sharding, on two processes of 4 devices: from one to the other,
from one to both, within what both have, of equal and of uneven sizes, 18 KB to 16 MB. Each is transferred three ways,
on the same primitive:
- naive: every device fetches each part of its tile for itself;
- gather then scatter: a device of the source gathers the whole, which one of the target takes and scatters;
- ours.
What arrives is compared with the array. The bytes are those of the arrays that a process really takes from the other;
the fewest are those of each element once that it needs and has not got. A time is the median of rounds, in which the
ways take turns in changing order, from when both processes are there until both have what they should.

In one process of 8 devices the same transfers are watched: JAX reads arrays on the host through one property. That the
watch would see it is seen from `jax.device_put` of whole arrays to the same places, most of which it reads.

Then one simple transfer by what else JAX has, in turns with ours: a compiled collective permute, and `jax.device_put`
between processes.

Bars: the bytes are the fewest for at least 90 % of the pairs, and at most 1.5 times them for any; ours takes at most
1.25 times the best of the three, or 150 us more; no transfer within a process reads an array on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import common
from benchmarks.transfer_alternatives import ALTERNATIVES
from benchmarks.transfer_processes import WAYS

ROUNDS = 36
PAIRS = 100  # at least
FACTOR, SLACK = 1.25, 150e-6  # what ours may take: times the best, or seconds more
MOST_OVER, MOST_BYTES = 0.1, 1.5  # of the pairs over the fewest bytes; times these
LIMIT = 1800  # seconds of a job
ALTERNATIVE_LIMIT = 120  # of one by another way, which may hang
FOLDER = pathlib.Path(__file__).parent


@contextlib.contextmanager
def finished_job(script: str, processes: int, *arguments: object, limit: float = LIMIT) -> Iterator[pathlib.Path]:
    """The folder in which a job on this machine has left its results.

    Raises:
      subprocess.CalledProcessError: it failed.
      subprocess.TimeoutExpired: it took longer than `limit` seconds, and has been ended.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "meeting").write_bytes(bytes(16))
        many = ["--processes", str(processes)] if processes > 1 else []
        command = [
            sys.executable, "-m", "autopar", "run", *many, "--devices-per-process", str(8 // processes),
            os.fspath(FOLDER / script), name, *map(str, arguments),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.fspath(FOLDER.parent), "JAX_PLATFORMS": "cpu"}
        job = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = job.wait(limit)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        if code:
            raise subprocess.CalledProcessError(code, command)
        yield folder


def both(folder: pathlib.Path) -> Iterator[tuple[Any, Any]]:
    """What the two processes of a job say, row by row."""
    yield from zip(*(json.loads((folder / f"{process}.json").read_text()) for process in range(2)), strict=True)


def seconds(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """The median over rounds, of which each process saw beginning and end, by one clock."""
    rounds = zip(first, second, strict=True)
    return statistics.median(max(a[1], b[1]) - max(a[0], b[0]) for a, b in rounds)


def row_of(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Of what the two processes say of a pair."""
    row = {"pair": first["pair"], "nbytes": first["nbytes"], "fewest": first["fewest"] + second["fewest"]}
    for way in WAYS:
        a, b = first[way], second[way]
        row[way] = {"bytes": a["bytes"] + b["bytes"], "seconds": seconds(a["times"], b["times"])}
    return row


def alternatives(rounds: int) -> list[dict[str, Any]]:
    """Seconds by way and size, or why there are none."""
    rows: list[dict[str, Any]] = []
    for way in ALTERNATIVES:
        with socket.socket() as first, socket.socket() as second:
            for probe in (first, second):
                probe.bind(("127.0.0.1", 0))
            ports = [probe.getsockname()[1] for probe in (first, second)]
        try:
            with finished_job("transfer_alternatives.py", 2, rounds, way, *ports, limit=ALTERNATIVE_LIMIT) as folder:
                for a, b in both(folder):
                    found = {"seconds": seconds(a[way], b[way]), "ours": seconds(a["ours"], b["ours"])}
                    rows.append({"alternative": way, "nbytes": a["nbytes"], **found})
        except subprocess.SubprocessError as error:
            rows.append({"alternative": way, "failed": str(error)})
    return rows


def over_fewest(row: Mapping[str, Any]) -> float:
    """The bytes of our transfer over the fewest."""
    found, fewest = row["ours"]["bytes"], row["fewest"]
    return float(found / fewest) if fewest else math.inf if found else 1.0


def over_allowed(row: Mapping[str, Any]) -> float:
    """The time of our transfer over what it may take."""
    best = min(row[way]["seconds"] for way in WAYS)
    return float(row["ours"]["seconds"] / max(FACTOR * best, best + SLACK))


def bars_of(
    rows: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> dict[str, common.Bar]:
    """What is asked of pairs over two processes, and in one; beside it what alternatives take."""
    n = len(rows)
    ratios = [over_fewest(row) for row in rows]

    def median(of: str, over: str) -> common.Bar:
        return common.Bar(statistics.median(row[of]["seconds"] / row[over]["seconds"] for row in rows), None, n=n)

    beside: dict[str, list[float]] = {}
    for row in others:
        if "failed" not in row:
            beside.setdefault(row["alternative"], []).append(row["seconds"] / row["ours"])
    return {
        "pairs_missing": common.Bar(max(0, PAIRS - n), 0),
        "pairs_over_fewest_bytes": common.Bar(sum(ratio > 1 for ratio in ratios) / n, MOST_OVER, n=n, unit="%"),
        "most_bytes_over_fewest": common.Bar(max(ratios), MOST_BYTES, n=n),
        "most_seconds_over_allowed": common.Bar(max(map(over_allowed, rows)), 1.0, n=n),
        "naive_over_ours": median("naive", "ours"),
        "gather_then_scatter_over_ours": median("gather then scatter", "ours"),
        "read_on_the_host_in_one_process": common.Bar(sum(row["read"] for row in alone), 0, n=len(alone)),
        "read_by_device_put_in_one_process": common.Bar(
            sum(row["read_by_device_put"] for row in alone), None, n=len(alone)
        ),
        **{
            f"{way.replace(' ', '_')}_over_ours": common.Bar(statistics.median(found), None, n=len(found))
            for way, found in beside.items()
        },
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--every", type=int, default=1, help="one in so many of the pairs")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    with finished_job("transfer_processes.py", 2, arguments.rounds, arguments.every) as folder:
        rows = [row_of(a, b) for a, b in both(folder)]
    for row in rows:
        took = ", ".join(f"{way} {1e6 * row[way]['seconds']:.0f}" for way in WAYS)
        said = "" if over_allowed(row) <= 1 else " TOO SLOW"
        print(f"{row['pair']}: {row['ours']['bytes']} bytes, {row['fewest']} at least; us: {took}{said}")
    with finished_job("transfer_processes.py", 1, arguments.rounds, arguments.every) as folder:
        alone = json.loads((folder / "alone.json").read_text())
    if not any(row["read_by_device_put"] for row in alone):
        raise RuntimeError("the watch saw no array read on the host, not even by jax.device_put: it says nothing")
    others = alternatives(arguments.rounds)
    for row in others:
        found = row.get("failed") or (
            f"{row['nbytes']} bytes in {1e6 * row['seconds']:.0f} us, ours in {1e6 * row['ours']:.0f} us"
        )
        print(f"{row['alternative']}: {found}")
    common.report(bars_of(rows, alone, others), [*rows, *alone, *others], arguments.json)


if __name__ == "__main__":
    main()
