"""Steps by several processes give the same bits as by one, for the same plan."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping

import pytest

from tests.processes import cases
from tests.processes.start import free_port, run_job

JOB = pathlib.Path(__file__).parent / "job.py"
RANDOM_JOB = pathlib.Path(__file__).parent / "random_job.py"
BY_DEFAULT, A_JOB, ALL = 4, 20, 204  # plans drawn by lot


def _digests(folder: pathlib.Path, names: Iterable[str], processes: int, job: pathlib.Path) -> list[dict[str, str]]:
    """What each process of a job says of the cases."""
    arguments = [f"127.0.0.1:{free_port()}", str(folder), *names]
    done = run_job(job, arguments, processes, cases.DEVICES // processes)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads((folder / f"{processes}-{index}.json").read_text()) for index in range(processes)]


def _check(
    folder: pathlib.Path, names: list[str], job: pathlib.Path = JOB, by: Mapping[int, list[str]] | None = None
) -> None:
    """First one process, which has all devices; then others run the same plans: all by 2 and by 4, or `by` so many."""
    (alone,) = _digests(folder, names, 1, job)
    assert len(set(alone.values())) == len(names)  # a digest that says nothing would be equal
    for processes, some in (by or dict.fromkeys((2, 4), names)).items():
        for index, digests in enumerate(_digests(folder, some, processes, job)):
            assert digests == {name: alone[name] for name in some}, f"process {index} of {processes}"


@pytest.mark.slow
def test_several_processes_compute_what_one_does(tmp_path: pathlib.Path) -> None:
    """Two processes; also four in `test_further_models_and_methods`."""
    names = list(cases.CASES)
    _check(tmp_path, names, by={2: names})


SEEDS = [
    range(BY_DEFAULT),
    *(pytest.param(range(k, k + A_JOB), marks=pytest.mark.slow) for k in range(BY_DEFAULT, ALL, A_JOB)),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_random_steps_under_plans_drawn_by_lot(tmp_path: pathlib.Path, seeds: range) -> None:
    """The one process compares them with `jax.jit`, too. The first few are run by two processes or four."""
    names = list(map(str, seeds))
    _check(tmp_path, names, RANDOM_JOB, None if seeds.start else {2: names[::2], 4: names[1::2]})


@pytest.mark.slow
def test_further_models_and_methods(tmp_path: pathlib.Path) -> None:
    _check(tmp_path, [*cases.CASES, *cases.SLOW])
