"""A job of which a process becomes slow: it is named, and the job goes on under a plan that gives it less to do."""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from tests.processes import slow
from tests.processes.start import environment, finished

NUMBER = 20


def expected() -> float:
    """The last loss, of one device."""
    params = [np.eye(slow.WIDTH, dtype=np.float32) for _ in range(slow.LAYERS)]
    step = jax.jit(slow.train_step)
    for k in range(NUMBER):
        params, loss = step(params, np.full((slow.BATCH, slow.WIDTH), 0.1 * (k % 5), np.float32))
    return float(loss)


@pytest.mark.slow
def test_a_job_is_planned_anew_when_a_process_becomes_slow(tmp_path: pathlib.Path) -> None:
    command = [
        sys.executable, "-m", "autopar", "run", "--elastic", "2:2", "--devices-per-process", "1",
        "--replan-when-slower", "3", os.fspath(pathlib.Path(slow.__file__)), os.fspath(tmp_path), str(NUMBER),
    ]  # fmt: skip
    variables = {**environment(2), "XDG_CACHE_HOME": os.fspath(tmp_path / "cache")}
    variables.pop("AUTOPAR_PLAN_CACHE", None)
    (done,) = finished([command], [variables], 300)
    text = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0 and "Traceback" not in text, text
    assert (
        "Slower than before: memory of device 1 (process 1 on node1), 8.0 times as slow; "
        "products on device 1 (process 1 on node1), 8.0 times as slow." in done.stderr
    ), text
    before, after = (json.loads(plan) for plan in re.findall(r"plan (.*)", done.stdout))
    assert [devices for devices, _ in before] == [[0, 1]], text
    assert [devices for devices, _ in after] == [[0], [1]], text
    assert after[0][1] > 3 * after[1][1], text  # layers
    kinds = re.findall(r"kinds \[(.*)\]", done.stdout)
    assert kinds == ["'cpu', 'cpu'", "'cpu', 'cpu, products 8 and memory 8 times as slow'"], text
    (seconds,) = re.findall(r"this plan takes (\S+) s a step, the best that was found (\S+) s: the job is", done.stderr)
    assert float(seconds[1]) < 0.5 * float(seconds[0])
    assert done.stderr.count("start 2 processes again") == 1
    parts = re.findall(r"parts (.*)", done.stdout)  # of both processes, at both starts
    assert len(parts) == 4 and sorted(map(parts.count, parts)) == [2] * 4, text
    assert "('link', 0), ('memory', 0), ('memory', 1), ('products', 0), ('products', 1)" in parts[0]
    losses = [float(x) for x in re.findall(r"ended (\S+)", done.stdout)]
    np.testing.assert_allclose(losses, [expected()] * 2, rtol=1e-4)
