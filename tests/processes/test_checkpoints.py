"""What one job has saved every other restores, to the bit; one that is killed leaves what it saved before."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import autopar
from benchmarks.models import shared
from tests.equivalence.subjects import SUBJECTS
from tests.processes import cases
from tests.processes.start import free_port, run_job

JOB = pathlib.Path(__file__).parent / "checkpoint_job.py"


def _job(folder: pathlib.Path, what: str, names: Sequence[str], processes: int) -> None:
    arguments = [f"127.0.0.1:{free_port()}", str(folder), what, *names]
    done = run_job(JOB, arguments, processes, cases.DEVICES // processes)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_two_processes_restore_what_one_has_saved_and_the_other_way_round(tmp_path: pathlib.Path) -> None:
    """Under another plan, too; every plan with every other in the next test."""
    alone, several = list(cases.CHECKPOINTS)[:2]
    _job(tmp_path, "save", [alone], 1)
    _job(tmp_path, "both", [several], 2)
    subject = SUBJECTS["gpt_scan"]
    optimizer = shared.make_optimizer(1e-3, warmup_steps=1, decay_steps=10)
    shapes = jax.eval_shape(subject.model.make_init(subject.config(4), optimizer), jax.random.key(0))
    saved = sorted(tmp_path.glob("saved-*"))
    assert [file.name for file in saved] == [f"saved-{alone}-1", f"saved-{several}-2"]
    # Each of two processes reads half of a batch where they share the examples.
    assert (tmp_path / f"shards-{several}-2").read_text() == "2"
    for file in saved:
        folder = tmp_path / file.name.removeprefix("saved-")
        whole = autopar.restore(folder, like=shapes)
        assert cases.digest(whole) == file.read_text()
        # To Orbax it is the user's own pytree, whatever the plan was.
        plain = ocp.PyTreeCheckpointer().restore(folder / "1" / "state")
        found, expected = (ocp.tree.to_flat_dict(tree) for tree in (plain, whole))
        assert [tuple(map(str, key)) for key in found] == [tuple(map(str, key)) for key in expected]
        assert cases.digest(list(found.values())) == cases.digest(list(expected.values()))


@pytest.mark.slow
def test_every_plan_restores_every_other_s_checkpoints_on_one_two_and_four_processes(tmp_path: pathlib.Path) -> None:
    names = list(cases.CHECKPOINTS)
    _job(tmp_path, "save", names, 1)
    _job(tmp_path, "save", names, 2)
    _job(tmp_path, "both", names, 4)
    _job(tmp_path, "restore", names, 2)
    _job(tmp_path, "restore", names, 1)
    assert len(list(tmp_path.glob("saved-*"))) == 3 * len(names)
    for name in names:
        assert (tmp_path / f"saved-{name}-1").read_text() == (tmp_path / f"saved-{name}-2").read_text()


@pytest.mark.slow
def test_what_is_killed_at_any_moment_leaves_what_it_saved_before(tmp_path: pathlib.Path) -> None:
    shapes = {"count": 0, "a": jax.ShapeDtypeStruct((1024, 512), np.float32)}
    latest = set()
    for seed in range(20):
        folder = tmp_path / str(seed)
        done = run_job(JOB.parent / "killed.py", [str(folder), str(seed)], 2, 1, 120)
        assert done.returncode == 128 + 9, f"{done.stdout}\n{done.stderr}"
        complete = [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()]
        found = autopar.restore(folder, like=shapes)
        assert found["count"] == max(complete)
        assert np.all(np.asarray(found["a"]) == np.float32(found["count"]) / 2)
        latest.add(found["count"])
    assert len(latest) > 5
