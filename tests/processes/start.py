"""Jobs for tests: started, waited for, and ended whatever happens."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

REPOSITORY = pathlib.Path(__file__).parents[2]
LIMIT = 600  # seconds; a job that hangs is ended


def free_address() -> str:
    """Of a port on the loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run_job(
    script: str | os.PathLike[str], arguments: Sequence[str], processes: int, devices: int, limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """`autopar run` of a script as so many processes with so many devices each; all are ended after the limit."""
    many = ["--processes", str(processes)] if processes > 1 else []
    command = [
        sys.executable, "-m", "autopar", "run", *many, "--devices-per-process", str(devices), os.fspath(script),
        *arguments,
    ]  # fmt: skip
    # Eigen cuts convolutions by the number of threads, and so adds up in another order where a process has more.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": str(processes * devices)}
    environment["PYTHONPATH"] = os.fspath(REPOSITORY)
    started = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = started.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        out, err = started.communicate()
        raise AssertionError(f"{script} was not done after {limit} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, started.returncode, out, err)
