"""Arrays from process to process, by themselves."""

from __future__ import annotations

import pathlib

from tests.processes.start import run_job

SCRIPT = pathlib.Path(__file__).parent / "offers.py"


def test_arrays_arrive_whenever_they_are_asked_for_and_empty_ones_too() -> None:
    done = run_job(SCRIPT, [], processes=2, devices=2, limit=120)
    assert done.returncode == 0, done.stderr
    assert "[1] all arrived" in done.stdout
