"""Jobs for tests: started, waited for, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

REPOSITORY = pathlib.Path(__file__).parents[2]
LIMIT = 600  # seconds; a job that hangs is ended


def free_port(least: int = 0) -> int:
    """A port of the loopback that nobody uses; any, or one of at least so much."""
    for port in range(least, 2**16) if least else [0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise AssertionError(f"no port from {least} on is free")


def environment(devices: int) -> dict[str, str]:
    """Of a process of a job with so many devices in all."""
    # Eigen cuts convolutions by the number of threads, and so adds up in another order where a process has more.
    return {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": str(devices), "PYTHONPATH": os.fspath(REPOSITORY)}


def finished(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], limit: float
) -> list[subprocess.CompletedProcess[str]]:
    """Of commands that run side by side; all are ended after the limit, with what they have started."""
    started = [
        subprocess.Popen(
            command, cwd=REPOSITORY, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )
        for command, variables in zip(commands, environments, strict=True)
    ]  # fmt: skip
    until = time.monotonic() + limit
    found = []
    try:
        for process in started:
            out, err = process.communicate(timeout=max(1.0, until - time.monotonic()))
            found.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in started:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return found


def run_job(
    script: str | os.PathLike[str], arguments: Sequence[str], processes: int, devices: int, limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """`autopar run` of a script as so many processes with so many devices each."""
    many = ["--processes", str(processes)] if processes > 1 else []
    command = [
        sys.executable, "-m", "autopar", "run", *many, "--devices-per-process", str(devices), os.fspath(script),
        *arguments,
    ]  # fmt: skip
    (done,) = finished([command], [environment(processes * devices)], limit)
    return done


def run_under(
    launcher: Sequence[dict[str, str]], script: str | os.PathLike[str], limit: float = LIMIT
) -> list[subprocess.CompletedProcess[str]]:
    """`autopar run` of a script as processes with one device each, in the variables that a launcher gives each."""
    command = [sys.executable, "-m", "autopar", "run", "--devices-per-process", "1", os.fspath(script)]
    environments = [{**environment(len(launcher)), **variables} for variables in launcher]
    return finished([command] * len(launcher), environments, limit)
