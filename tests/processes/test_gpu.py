"""Several processes that share one GPU: `make test-gpu`, where there is one."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from tests.processes.start import environment, finished

JOB = pathlib.Path(__file__).parent / "gpu_job.py"
LIMIT = 300
# No kernel is chosen by trying, which takes most of the time; each process takes the memory that it needs.
ENVIRONMENT = {
    **environment(4), "JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}  # fmt: skip


@pytest.mark.gpu
def test_a_pipeline_of_four_processes_trains_and_its_state_is_restored_by_one(tmp_path: pathlib.Path) -> None:
    for arguments in (["--processes", "4"], []):
        command = [sys.executable, "-m", "autopar", "run", *arguments, os.fspath(JOB), os.fspath(tmp_path / "saved")]
        (done,) = finished([command], [ENVIRONMENT], LIMIT)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "restored: losses" in done.stdout
