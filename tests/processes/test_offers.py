"""Arrays from process to process, by themselves."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from tests.processes.start import environment, finished, free_port, run_job

SCRIPT = pathlib.Path(__file__).parent / "offers.py"
TILES = pathlib.Path(__file__).parent / "tiles.py"
PARTING = pathlib.Path(__file__).parent / "parting.py"


def test_arrays_arrive_whenever_they_are_asked_for_and_empty_ones_too() -> None:
    done = run_job(SCRIPT, [], processes=2, devices=2, limit=120)
    assert done.returncode == 0, done.stderr
    assert "[1] all arrived" in done.stdout


@pytest.mark.slow
def test_every_tile_crosses_whole_or_in_parts() -> None:
    done = run_job(TILES, [], processes=2, devices=2, limit=300)
    assert done.returncode == 0, done.stderr
    assert all(f"[{process}] all crossed" in done.stdout for process in range(2))


def test_the_threads_that_serve_transfers_end_before_the_process_does() -> None:
    """With a GPU they would free memory of a driver that is gone."""
    job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    environments = [{**environment(2), **job, "JAX_PROCESS_ID": str(index)} for index in range(2)]
    for index, done in enumerate(finished([[sys.executable, os.fspath(PARTING)]] * 2, environments, 120)):
        assert done.returncode == 0, done.stderr
        assert f"[{1 - index}. {1 - index}. {1 - index}.] has come" in done.stdout
        assert "\n0 threads are left" in done.stdout and not done.stdout.startswith("0 threads")
