"""What a user sees of a job: results on every process, one story where something goes wrong, and how it is joined."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError, CheckpointError
from autopar.runtime import local_job
from autopar.runtime.launcher import Membership, membership
from tests.processes.start import free_port, run_job, run_under

SCRIPT = pathlib.Path(__file__).parent / "small.py"
LIMIT = 150


def _lines(text: str, process: int | None = None) -> list[str]:
    """What a process printed, or one alone, without JAX's messages about the machine."""
    prefix = "" if process is None else f"[{process}] "
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def test_a_script_runs_as_it_does_alone() -> None:
    alone = run_job(SCRIPT, [], 1, 1, LIMIT)
    assert alone.returncode == 0, alone.stderr
    said = [line for line in _lines(alone.stdout) if line.startswith(("step", "whole"))]
    means = [line for line in _lines(alone.stdout) if line.startswith("mean")]
    assert len(said) == 5 and len(means) == 3
    several = run_job(SCRIPT, [], 2, 2, LIMIT)  # the script makes it one device each, which it can before JAX is used
    assert several.returncode == 0, several.stderr
    for process in range(2):
        found = _lines(several.stdout, process)
        assert [re.sub(r"\d\b", "", line) for line in found if line.startswith(("step", "whole"))] == [
            re.sub(r"\d\b", "", line) for line in said
        ]
        # Callbacks are called once, by the first process.
        assert len([line for line in found if line.startswith("mean")]) == (3 if process == 0 else 0)


def _failure(what: str, odd: int, processes: int = 2) -> tuple[list[str], list[str]]:
    """What both processes say on stderr when one of them makes a mistake."""
    done = run_job(SCRIPT, [what, str(odd)], processes, 1, LIMIT)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert what == "late" or "whole" not in done.stdout
    return _lines(done.stderr, 0), _lines(done.stderr, 1)


MISTAKES = {  # when, and what is said: before JAX is used for anything, between two steps, when others have ended
    "early": "FileNotFoundError: examples.txt",
    "raise": "ValueError: the disk is full",
    "exit": "SystemExit: no more examples",
    "late": "ValueError: the disk is full",
}


def _slow(*values: object) -> Any:
    """The same with the processes, or the launchers, the other way round."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("what", "odd"),
    [
        ("early", 1),
        ("raise", 0),
        _slow("exit", 1),
        _slow("late", 0),
        _slow("early", 0),
        _slow("raise", 1),
        _slow("late", 1),
    ],
)
def test_a_mistake_on_one_process_ends_all_with_its_message(what: str, odd: int) -> None:
    said = _failure(what, odd)
    assert said[odd][-1] and MISTAKES[what].endswith(said[odd][-1])
    other = [line for line in said[1 - odd] if "I0000" not in line and "WARNING" not in line]
    assert f"autopar: stopped, since process {odd} of this job failed: {MISTAKES[what]}" in other
    assert not any(line.startswith("Traceback") for line in other)
    assert not any("Traceback" in line or "Check failure" in line for line in other)


@pytest.mark.parametrize(
    ("what", "odd", "missed"),
    [
        ("steps", 0, "ended after 3 calls of train_step, of which process 1 has begun number 4"),
        _slow("steps", 1, "ended after 3 calls of train_step, of which process 0 has begun number 4"),
        _slow(
            "gather",
            1,
            "ended after 0 calls of autopar.gather or a callback, of which process 0 has begun number 1",
        ),
        _slow("other", 0, "has ended, while process 1 waits for it to agree about <lambda>"),
        _slow("other", 1, "has ended, while process 0 waits for it to agree about <lambda>"),
    ],
)
def test_a_process_that_ends_before_the_others_do_is_said(what: str, odd: int, missed: str) -> None:
    """Those that still wait for it would do so for ever."""
    for said in _failure(what, odd):
        assert any(re.search(f"process {odd} of this job {missed}", line) for line in said), said


@pytest.mark.slow
def test_a_save_that_fails_on_one_process_ends_all(tmp_path: pathlib.Path) -> None:
    """The other would wait for it as long as Orbax does."""
    done = run_job(SCRIPT, ["save", "1", str(tmp_path / "saved")], 2, 1, LIMIT)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    (stopped,) = [line for line in _lines(done.stderr, 0) if line.startswith("autopar: stopped")]
    assert "process 1 of this job failed" in stopped and "File too large" in stopped
    with pytest.raises(CheckpointError):
        autopar.restore(tmp_path / "saved", like={"count": 0})


@pytest.mark.parametrize(
    ("what", "differs"),
    [
        _slow("versions", r"the version of jax is \S+ on process 0, but jax of long ago on process 1"),
        (
            "shapes",
            r"state\['params'\]\['a'\] is float32\[16, 16\] on process 0, but float32\[32, 32\] on process 1",
        ),
        _slow(
            "code", r"the step is of (\d+) equations, fingerprint \w+ on process 0, but of (?!\1 )\d+ .* on process 1"
        ),
        _slow("method", r"the method is .*'gpipe'.*num_microbatches=2.* on process 0, but .*num_microbatches=4"),
    ],
)
def test_processes_that_are_told_different_things_say_in_what_they_differ(what: str, differs: str) -> None:
    for said in _failure(what, 1):
        text = "\n".join(said)
        assert re.search(f"the processes of this job do not agree about train_step: {differs}", text), text


def test_a_plan_that_cannot_be_made_is_said_once() -> None:
    """Also by a process that is slow to say it, while the other has nothing to wait for."""
    first, second = _failure("stages", 0)
    assert any("PlanError" in line for line in first), first
    assert not any("Traceback" in line for line in second)


def test_a_plan_for_other_devices_says_what_there_is() -> None:
    first, _ = _failure("devices", 0)
    assert any("the plan is for 8 devices, there are 2 (of 2 processes)" in line for line in first)


@pytest.mark.parametrize("what", ["leave", _slow("alone")])
def test_a_process_that_ends_before_the_others_do_and_that_nobody_waits_for_ends_nobody(what: str) -> None:
    done = run_job(SCRIPT, [what, "1"], 2, 1, LIMIT)
    assert done.returncode == 0, done.stderr
    assert "step 3" in "\n".join(_lines(done.stdout, 0))


@pytest.mark.slow
def test_who_reads_what_lies_elsewhere_is_told_how() -> None:
    first, second = _failure("read", 0)
    for said in (first, second):
        assert "autopar.gather(tree), which all processes have to call, gives each the whole arrays." in said


@pytest.mark.slow
def test_a_process_that_a_plan_leaves_out_is_named_and_runs_along() -> None:
    done = run_job(SCRIPT, ["idle"], 2, 1, LIMIT)
    assert done.returncode == 0, done.stderr
    told = "autopar: train_step: the plan is for 1 of 2 devices; those of process 1 have no part in it"
    assert _lines(done.stderr, 0).count(told) == 1 and told not in _lines(done.stderr, 1)
    first, second = (
        [line for line in _lines(done.stdout, process) if line.startswith(("step", "whole"))] for process in (0, 1)
    )
    assert first == second and len(first) == 5


@pytest.mark.slow
def test_what_is_not_a_number_is_found_wherever_it_is() -> None:
    """Also by the process that has nothing of the array."""
    first, second = _failure("nan", 0)
    told = "NotFiniteError: invalid value (nan) encountered in output"
    for line in (*first, *second):
        assert told not in line or "of train_step, which was called with such in batch['y']." in line
    assert any(told in line for line in (*first, *second))


@pytest.mark.slow
def test_where_it_arises_is_known_to_all_who_save_the_step(tmp_path: pathlib.Path) -> None:
    done = run_job(SCRIPT, ["overflow", "1", str(tmp_path / "bad")], 2, 1, LIMIT)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    arose = r"It arises in dot_general at \S*small.py:\d+:\d+ \(.*\), in the backward pass, stage \d of 2"
    assert re.search(f"{arose}, microbatch 0 of 2", done.stderr), done.stderr
    array = np.zeros((16, 16), np.float32)
    state = {
        "params": dict.fromkeys("abc", array), "count": 0, "key": jax.random.key(0), "rate": 0.1, "one": array[0, :1],
    }  # fmt: skip
    saved = autopar.restore(tmp_path / "bad", like={"args": [state, dict.fromkeys("xy", array[:8])], "kwargs": {}})
    assert saved["args"][0]["count"] == 3 and np.isinf(saved["args"][1]["y"]).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "processes", "where"),
    [
        ("zero", 2, "in the forward pass."),
        ("gpipe", 4, "in the forward pass, stage 1 of 2, microbatch 1 of 2."),
        _slow("data_parallel", 3, "in the forward pass."),
    ],
)
def test_the_line_is_known_where_processes_share_a_stage(method: str, processes: int, where: str) -> None:
    done = run_job(SCRIPT.with_name("not_finite.py"), [method], processes, 1, LIMIT)
    assert done.returncode == 0, done.stderr
    for process in range(processes):
        (told,) = (line for line in _lines(done.stdout, process) if line.startswith("told"))
        assert re.search(rf"It arises in log at \S*not_finite.py:\d+:\d+ \(loss_of\), {re.escape(where)}", told), told


# Joining


SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "node[001-004]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "4",
}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_alone() -> None:
    assert membership({}) is None
    assert membership({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_what_jax_knows_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert membership({**SLURM}) == Membership(None, None, 0)


@pytest.mark.parametrize(
    ("launcher", "local", "expected"),
    [
        ("slurm", "1", "range(8, 16)"), ("mpi", "0", "range(0, 8)"),
        _slow("slurm", "0", "range(0, 8)"), _slow("mpi", "1", "range(8, 16)"),
    ],
)  # fmt: skip
def test_a_process_has_as_many_gpus_as_it_is_told(launcher: str, local: str, expected: str) -> None:
    """JAX would give it one under Slurm, and all of its host under Open MPI 5."""
    variables = {**SLURM, "SLURM_LOCALID": local}
    if launcher == "mpi":
        variables = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": local, "JAX_COORDINATOR_ADDRESS": "node1:1234"}
    script = (
        "import jax\nfrom autopar.runtime import launcher\n"
        "jax.distributed.initialize = lambda **given: print(given['local_device_ids'])\n"
        "launcher.this_job = lambda: None\nlauncher.initialize(8)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | variables
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout.strip() == expected, done.stderr


def test_open_mpi_5_and_mpich() -> None:
    where = {"JAX_COORDINATOR_ADDRESS": "node1:1234"}
    assert membership({**OPEN_MPI, **where}) == Membership(3, 4, 1)
    assert membership({"PMI_RANK": "1", "PMI_SIZE": "2", **where}) == Membership(1, 2, None)
    with pytest.raises(ArgumentError, match="process 3 of 4, but nothing says where process 0 is: set JAX_COORD"):
        membership(OPEN_MPI)


def _slurm(index: int, port: int) -> dict[str, str]:
    """Process 0 is on this host; JAX finds the port from the number of the job."""
    return {
        **SLURM, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index), "SLURM_JOB_ID": str(port - (2**16 - 2**12)),
    }  # fmt: skip


def _mpich(index: int, port: int) -> dict[str, str]:
    return {"PMI_RANK": str(index), "PMI_SIZE": "2", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}


@pytest.mark.parametrize(
    "launcher", [pytest.param(_slurm, id="slurm", marks=pytest.mark.slow), pytest.param(_mpich, id="mpich")]
)
def test_a_job_that_a_launcher_started(launcher: Callable[[int, int], dict[str, str]]) -> None:
    port = free_port(2**16 - 2**12)
    done = run_under([launcher(index, port) for index in range(2)], SCRIPT, LIMIT)
    said = [[line for line in one.stdout.splitlines() if line.startswith(("step", "whole"))] for one in done]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    assert said[0] == said[1] and len(said[0]) == 5


def test_one_that_is_killed_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where those before it still run."""
    monkeypatch.setattr(local_job, "_GRACE", 0.1)
    script = "import os, signal, time; os.environ['JAX_PROCESS_ID'] == '1' and os.kill(os.getpid(), signal.SIGKILL)"
    command = [sys.executable, "-c", f"{script}; time.sleep({LIMIT})"]
    assert local_job.launch(command, 3, None) == 128 + signal.SIGKILL


def test_by_variables() -> None:
    job = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    assert membership(job) == Membership(2, 3, None)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES is '2', but JAX_PROCESS_ID is not set, so that this process"),
        ({"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID is '0', but JAX_NUM_PROCESSES is not set"),
        ({"JAX_PROCESS_ID": "2", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID='2' and JAX_NUM_PROCESSES='2' name no"),
        ({"JAX_PROCESS_ID": "one", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID='one' and JAX_NUM_PROCESSES='2' name"),
        ({"PMI_RANK": "-1", "PMI_SIZE": "2"}, "PMI_RANK='-1' and PMI_SIZE='2' name no process of a job"),
    ],
)
def test_variables_that_make_no_sense(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        membership({"JAX_COORDINATOR_ADDRESS": "a:1", **variables})


def test_one_that_has_not_joined_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step = autopar.parallelize(lambda w, x: w - (w * x).sum(0), batch_axes=(None, 0))
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=r"process is 3 of 4 by its launcher's variables and has not joined"):
        step(np.ones(4, np.float32), np.ones((8, 4), np.float32))


@pytest.mark.slow
def test_a_thousand_steps_hold_no_more_than_two_hundred() -> None:
    done = run_job(SCRIPT.parent / "many_steps.py", [], 2, 1, 600)
    assert done.returncode == 0, done.stderr
    for process in range(2):
        (line,) = _lines(done.stdout, process)
        early, late = json.loads(line)
        assert late[0] <= 1.02 * early[0]
        assert late[1:] <= early[1:]


@pytest.mark.slow
def test_all_processes_have_the_whole_profile() -> None:
    done = run_job(SCRIPT.parent / "profiled.py", [], 2, 1, LIMIT)
    assert done.returncode == 0, done.stderr
    (first, bubbles), (second, untold) = (_lines(done.stdout, process) for process in range(2))
    assert first == second
    measured = json.loads(bubbles)
    assert len(measured) == 2 and all(0 < bubble < 1 for bubble in measured)
    assert json.loads(untold) == []  # process 0 tells of the job
    kernels = {row["kind"]: row for row in json.loads(first)["kernels"]}
    assert kernels.keys() == {"products", "memory"} and all(row["measured"] > 0 for row in kernels.values())
    rows = {(row["stage"], row["to"], row["what"]): row["count"] for row in json.loads(first)["rows"]}
    assert {
        (0, None, "forward"): 4,
        (1, None, "forward"): 4,
        (0, 1, "copy"): 4,
        (1, 0, "copy"): 4,
    }.items() <= rows.items()
