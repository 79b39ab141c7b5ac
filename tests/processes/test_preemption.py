"""Programs that are asked to end: each saves, ends with the code that asks for another turn, and goes on then."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import autopar
from tests.processes.start import REPOSITORY, environment, run_job

SCRIPT = pathlib.Path(__file__).parent / "preempted.py"
LIMIT = 300
NUMBER = 300


def expected() -> float:
    """Of all steps in a row."""
    a = np.float32(0)
    for k in range(NUMBER):
        a = np.float32(0.9) * a + np.float32(k % 5)
    return float(a)


@pytest.mark.parametrize(
    ("processes", "asked"),
    [pytest.param(1, 0, marks=pytest.mark.slow), (2, 0), pytest.param(2, 1, marks=pytest.mark.slow)],
)
def test_a_job_that_is_asked_to_end_saves_and_goes_on(tmp_path: pathlib.Path, processes: int, asked: int) -> None:
    folder = tmp_path / "run"
    done = run_job(SCRIPT, [str(folder), str(asked), "7", str(NUMBER)], processes, 1, LIMIT)
    assert done.returncode == 75, f"{done.stdout}\n{done.stderr}"
    assert "autopar: asked to end" in done.stderr and "Traceback" not in done.stderr
    reached = autopar.latest_step(folder)
    assert reached is not None and 8 <= reached < NUMBER
    assert f"the checkpoint of step {reached} in {folder} is complete" in done.stderr
    again = run_job(SCRIPT, [str(folder), "0", "-1", str(NUMBER)], processes, 1, LIMIT)
    assert again.returncode == 0, f"{again.stdout}\n{again.stderr}"
    ended = re.findall(r"ended (\S+)", again.stdout)
    assert len(ended) == processes
    np.testing.assert_allclose([float(text) for text in ended], expected(), rtol=1e-5)


def begun(folder: pathlib.Path, processes: int) -> subprocess.Popen[str]:
    """A job in a group of its own whose first step is over."""
    command = [sys.executable, "-m", "autopar", "run", "--devices-per-process", "1"]
    command += ["--processes", str(processes)] if processes > 1 else []
    started = subprocess.Popen(
        [*command, os.fspath(SCRIPT), str(folder), "0", "-2", "1000000"], cwd=REPOSITORY, text=True,
        env=environment(processes), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert started.stdout is not None and started.stderr is not None, "they are pipes"
    for line in started.stdout:
        if "begun" in line:
            return started
    raise AssertionError(started.stderr.read())


def ended(job: subprocess.Popen[str]) -> str:
    """What a job says till it ends."""
    try:
        _, told = job.communicate(timeout=LIMIT)
    finally:
        if job.returncode is None:
            os.killpg(job.pid, signal.SIGKILL)
    return told


@pytest.mark.slow
def test_a_request_to_the_whole_group_is_one(tmp_path: pathlib.Path) -> None:
    """Though the launcher hands on what its processes get, too."""
    job = begun(tmp_path / "run", 2)
    os.killpg(job.pid, signal.SIGTERM)
    told = ended(job)
    assert job.returncode == 75, told
    assert autopar.latest_step(tmp_path / "run") is not None


def test_a_second_request_seconds_later_ends_a_program_at_once() -> None:
    script = """
import os, signal, time
from autopar.runtime.preemption import Preemption
heard = Preemption()
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
assert heard.comes_now("a") and not heard.comes_now("b")
time.sleep(2.5)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=environment(1), check=False, capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stderr.count("autopar: asked to end") == 1
