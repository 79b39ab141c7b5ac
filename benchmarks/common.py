"""What the benchmarks share: virtual devices, what a result depends on, bars, and the JSON file."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax

from autopar.ir.json_file import finite
from benchmarks.sources import ROOT, Sources

_STARTED = time.time()  # this process, or nearly so

# Of what a figure is: data that nothing was fitted to, that a constant was fitted to, or that was there to be looked at
# while the code was developed.
Sample = Literal["held out", "fitted", "developed on"]

T = TypeVar("T")
R = TypeVar("R")


def use_virtual_devices(count: int) -> None:
    """Let this process have so many CPU devices. Before JAX is used; JAX refuses the setting afterwards."""
    # An older way to say the same, which JAX does not accept beside the setting.
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = flags.strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _cpu_model() -> str:
    try:
        information = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", information, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def num_cores() -> int:
    """Of those that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _gpus() -> list[str]:
    """Names of the GPUs of this machine, without starting JAX's backend, which would take their memory.

    None where this process uses CPUs alone.
    """
    if jax.config.values["jax_platforms"] == "cpu":
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return told.stdout.strip().splitlines()


def machine() -> dict[str, Any]:
    """What a measurement depends on besides the code."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        **({"gpus": gpus} if (gpus := _gpus()) else {}),
    }


def provenance(suite: str, arguments: Sequence[str], root: pathlib.Path = ROOT) -> dict[str, Any]:
    """Where a result comes from: the module that ran and what it was told, its sources' hash, commit, date, seconds.

    A source that was changed while the benchmark ran leaves no hash: nobody knows what was measured. A run that may
    have gone on where another one was ended leaves no seconds.
    """
    sources = Sources(root)
    files = sources.files(suite)
    changed = [path for path in files if path.stat().st_mtime > _STARTED]
    if changed:
        print(f"changed while this ran, so that nobody knows what was measured: {', '.join(map(str, changed))}")
    return {
        "suite": suite, "arguments": list(arguments), "sources": None if changed else sources.fingerprint(suite),
        "commit": _commit(root, files), "date": str(datetime.datetime.now(datetime.UTC).date()),
        "seconds": None if any(each.startswith("--keep") for each in sys.argv) else round(time.time() - _STARTED, 1),
    }  # fmt: skip


def _commit(root: pathlib.Path, files: Sequence[pathlib.Path]) -> str:
    """The commit that is checked out, or "unknown"; a + says that some of the files have changed since."""
    paths = [str(path.resolve()) for path in files]  # git looks behind no link
    try:
        name, changes = (
            subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for command in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", *paths))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changes else "")


_FOLDERS = ("--json", "--keep")  # options


def _running() -> tuple[str, list[str]]:
    """The module that `python -m` was told to run, and its arguments but for where results go."""
    arguments, rest = [], iter(sys.argv[1:])
    for argument in rest:
        if argument in _FOLDERS:
            next(rest, None)
        elif argument.split("=")[0] not in _FOLDERS:
            arguments.append(argument)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else "", arguments


def each_in_a_process(work: Callable[[T], R], items: Iterable[T], at_once: int = 1) -> Iterator[R]:
    """`work` of each item in order, each in a fresh process, so many at once."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(at_once, mp_context=context, max_tasks_per_child=1) as pool:
        yield from pool.map(work, items)


def most_memory() -> int:
    """Bytes of memory that this process has had at most. (`ru_maxrss` begins with what its parent had.)"""
    status = pathlib.Path("/proc/self/status").read_text()
    (kilobytes,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


@dataclasses.dataclass(frozen=True)
class Bar:
    """A measured value, and the limit that it must not exceed; without one it is told, and not judged."""

    value: float
    limit: float | None
    n: int | None = None  # what it is a mean, a quantile or the largest of
    sample: Sample | None = None
    unit: Literal["%", "s", "GiB", "MB"] | None = None  # %: of a ratio that is written as a percentage

    @property
    def holds(self) -> bool:
        return self.limit is None or self.value <= self.limit  # False for NaN

    def __str__(self) -> str:
        number = "" if self.n is None else f" (n = {self.n})"
        if self.limit is None:
            return f"{self.value:.4f}{number}"
        return f"{self.value:.4f} <= {self.limit}: {'holds' if self.holds else 'BROKEN'}{number}"


def result(bars: Mapping[str, Bar], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The common form of every benchmark's JSON file."""
    suite, arguments = _running()
    return {
        # Nothing but a benchmark has sources; a test calls this, too.
        "provenance": provenance(suite, arguments) if suite.startswith("benchmarks.") else None,
        "machine": machine(),
        "bars": {
            name: {
                "value": bar.value, "limit": bar.limit, "holds": bar.holds,
                **{k: v for k, v in dataclasses.asdict(bar).items() if k in ("n", "sample", "unit") and v is not None},
            }
            for name, bar in bars.items()
        },
        "rows": [dict(row) for row in rows],
    }  # fmt: skip


def report(bars: Mapping[str, Bar], rows: Sequence[Mapping[str, Any]], path: pathlib.Path | None) -> None:
    """Print the bars; write them and the rows behind them to a JSON file, if there is to be one."""
    for name, bar in bars.items():
        print(f"{name}: {bar}")
    if path is not None:
        write_json(path, result(bars, rows))


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Write `content`, the folder made where it is missing; NaN and infinity become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(content), indent=1) + "\n")
