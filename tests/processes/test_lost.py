"""A process of a job that is killed, crashes, stops or keeps others waiting: all others say which, and where it was."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.processes.start import REPOSITORY, environment, free_port

SCRIPT = pathlib.Path(__file__).parent / "lost.py"
LIMIT = 120
HEARTBEAT = 4
LOST = 69  # EX_UNAVAILABLE


@contextlib.contextmanager
def _started(what: str, victim: int, processes: int) -> Iterator[Sequence[subprocess.Popen[str]]]:
    address = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable, "-m", "autopar", "run", "--devices-per-process", "1", "--heartbeat-timeout", str(HEARTBEAT),
        os.fspath(SCRIPT), what, str(victim),
    ]  # fmt: skip
    job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    started = [
        subprocess.Popen(
            command, cwd=REPOSITORY, env={**environment(processes), **job, "JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for index in range(processes)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=LIMIT)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("what", "victim", "processes", "how"),
    [
        ("kill", 0, 3, "is gone: it crashed or was killed, or its host is lost"),
        pytest.param("kill", 1, 2, "is gone", marks=pytest.mark.slow),
        ("stop", 0, 2, rf"does not answer \(heartbeat timeout {HEARTBEAT} s\): it is stopped, or cannot be reached"),
        pytest.param("stop", 1, 3, "does not answer", marks=pytest.mark.slow),
        pytest.param("crash", 1, 3, "is gone", marks=pytest.mark.slow),
        pytest.param("fork", 1, 2, "is gone", marks=pytest.mark.slow),
    ],
)
def test_one_that_is_lost_is_named_on_all_others(what: str, victim: int, processes: int, how: str) -> None:
    with _started(what, victim, processes) as job:
        for index in set(range(processes)) - {victim}:
            out, err = job[index].communicate(timeout=LIMIT)
            assert job[index].returncode == LOST, f"{out}\n{err}"
            (said,) = [line for line in err.splitlines() if line.startswith("autopar: stopped")]
            who = rf"process {victim} of this job \(process id {job[victim].pid} on \S+\) {how}"
            assert re.search(rf"since {who}.* It was last seen at \S+lost\.py:\d+ \(main\)", said), said
            assert "Traceback" not in err and "Check failure" not in err, err
            assert "done" not in out


def test_one_that_never_joins_is_not_waited_for_longer_than_is_said() -> None:
    job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "3"}
    timeout = {"AUTOPAR_INITIALIZATION_TIMEOUT": "6"}
    started = {
        index: subprocess.Popen(
            [sys.executable, "-m", "autopar", "run", os.fspath(SCRIPT), "stop", "1"], cwd=REPOSITORY, text=True,
            env={**environment(3), **job, **timeout, "JAX_PROCESS_ID": str(index)}, stderr=subprocess.PIPE,
        )
        for index in (0, 2)
    }  # fmt: skip
    try:
        for index, process in started.items():
            _, err = process.communicate(timeout=LIMIT)
            assert process.returncode == LOST, err
            waits, stops = [line for line in err.splitlines() if line.startswith("autopar: ")]
            assert f"process {index} on" in waits and "waits for all 3 processes of this job" in waits
            assert f"not all 3 processes of this job have joined it at {job['JAX_COORDINATOR_ADDRESS']}" in stops
            assert "within 6 seconds" in stops and "Check failure" not in err
    finally:
        for process in started.values():
            process.kill()
            process.wait()


@pytest.mark.slow
def test_who_keeps_the_others_waiting_is_said_and_goes_on() -> None:
    with _started("slow", 1, 3) as job:
        for index, process in enumerate(job):
            out, err = process.communicate(timeout=LIMIT)
            assert process.returncode == 0 and "done" in out, err
            waits = [line for line in err.splitlines() if line.startswith("autopar: process")]
            (said,) = waits
            assert re.search(rf"process {index} waits, and nothing has moved for \d+ s. ", said)
            assert re.search(r"process 1 is at \S+lost\.py:\d+ \(wait_for_examples\)", said)


@pytest.mark.slow
def test_a_job_that_waits_for_its_devices_again_and_again_goes_on() -> None:
    """Each look may find it at the same line, with nothing to do for Python."""
    with _started("devices", 0, 2) as job:
        for process in job:
            out, err = process.communicate(timeout=LIMIT)
            assert process.returncode == 0 and "done" in out, err
            assert "nothing has moved" not in err
