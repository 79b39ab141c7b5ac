"""Programs that are asked to end: each saves, ends with the code that asks for another turn, and goes on then."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

import autopar
from tests.processes.start import run_job

SCRIPT = pathlib.Path(__file__).parent / "preempted.py"
LIMIT = 300
NUMBER = 300


def expected() -> float:
    """Of all steps in a row."""
    a = np.float32(0)
    for k in range(NUMBER):
        a = np.float32(0.9) * a + np.float32(k % 5)
    return float(a)


@pytest.mark.parametrize(("processes", "asked"), [(1, 0), (2, 1), (2, 0)])
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
