"""Steps by several processes give the same bits as by one, for the same plan."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

import pytest

from tests.processes import cases
from tests.processes.start import free_address, run_job

JOB = pathlib.Path(__file__).parent / "job.py"


def _digests(folder: pathlib.Path, names: Iterable[str], processes: int) -> list[dict[str, str]]:
    """What each process of a job says of the cases."""
    arguments = [free_address(), str(folder), *names]
    done = run_job(JOB, arguments, processes, cases.DEVICES // processes)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads((folder / f"{processes}-{index}.json").read_text()) for index in range(processes)]


def _check(folder: pathlib.Path, names: list[str], processes: int, alone: dict[str, str]) -> None:
    for digests in _digests(folder, names, processes):
        assert digests == alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def alone(folder: pathlib.Path) -> dict[str, str]:
    """By one process, which has all devices; the plans are in the folder then."""
    (digests,) = _digests(folder, cases.CASES, 1)
    assert len(set(digests.values())) == len(cases.CASES)  # a digest that says nothing would be equal
    return digests


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_compute_what_one_does(folder: pathlib.Path, alone: dict[str, str], processes: int) -> None:
    _check(folder, list(cases.CASES), processes, alone)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_further_models_and_methods(tmp_path: pathlib.Path, processes: int) -> None:
    (alone,) = _digests(tmp_path, cases.SLOW, 1)
    _check(tmp_path, list(cases.SLOW), processes, alone)
