"""What the benchmarks share: virtual devices, the description of the machine, bars, and the JSON file."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from autopar.ir.json_file import finite

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


def machine() -> dict[str, Any]:
    """What a measurement depends on besides the code."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def each_in_a_process(work: Callable[[T], R], items: Iterable[T], at_once: int = 1) -> Iterator[R]:
    """`work` of each item in order, each in a fresh process, so many at once."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(at_once, mp_context=context, max_tasks_per_child=1) as pool:
        yield from pool.map(work, items)


@dataclasses.dataclass(frozen=True)
class Bar:
    """A limit that a measured value must not exceed."""

    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit  # False for NaN

    def __str__(self) -> str:
        return f"{self.value:.4f} <= {self.limit}: {'holds' if self.holds else 'BROKEN'}"


def result(bars: Mapping[str, Bar], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The common form of every benchmark's JSON file."""
    return {
        "machine": machine(),
        "bars": {name: {**dataclasses.asdict(bar), "holds": bar.holds} for name, bar in bars.items()},
        "rows": [dict(row) for row in rows],
    }


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
