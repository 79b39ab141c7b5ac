"""`autopar run --elastic`: when a job is started again, of how many processes, and when not."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import threading
import types
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.errors import ArgumentError
from autopar.runtime import local_job
from autopar.runtime.liveness import LOST_CODE
from autopar.runtime.local_job import Elastic, launch_elastic
from tests.processes.start import REPOSITORY, environment
from tests.processes.test_preemption import NUMBER, expected

# Each start adds its processes to a file; what a process of a start does then is in the arguments.
SCRIPT = """
import os, pathlib, signal, sys, time
folder, index = pathlib.Path(sys.argv[1]), os.environ["JAX_PROCESS_ID"]
starts = folder / f"starts-{index}"
number = len(starts.read_text().split()) if starts.exists() else 0
with starts.open("a") as file:
    file.write(os.environ["JAX_NUM_PROCESSES"] + "\\n")
what = (sys.argv[2:] + ["0"] * 9)[number] if index == "0" else "0"
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "gpu":
    (folder / "gpus").write_text("0, GPU-a\\n")
    os.kill(os.getpid(), signal.SIGKILL)
if what == "back":
    (folder / "gpus").write_text("0, GPU-a\\n1, GPU-b\\nUnable to determine the device handle for GPU2\\n")
    sys.exit(69)
if what == "asked":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
if what in ("grows", "ignores"):
    (folder / "gpus").write_text("0, GPU-a\\n1, GPU-b\\n")
    while not os.path.exists(os.environ["AUTOPAR_ROOM"]):  # as `autopar.save` looks there
        time.sleep(0.05)
    what = "75" if what == "grows" else "0"
if what == "flickers":
    (folder / "flickers").touch()
    (folder / "gpus").write_text("0, GPU-a\\n1, GPU-b\\n")
    looks = len((folder / "looks").read_text())
    while len((folder / "looks").read_text()) < looks + 6:
        time.sleep(0.05)
    what = str(int(os.path.exists(os.environ["AUTOPAR_ROOM"])))
if what == "gone":  # and back after a while
    looks = len((folder / "looks").read_text())
    (folder / "gone").write_text(str(looks + 4 if len(sys.argv) > 3 else 1000))
    sys.exit(69)
if what == "plans":
    (folder / "plans").write_text(os.environ["AUTOPAR_PLAN_CACHE"])
    what = "0"
sys.exit(int(what))
"""


def _starts(folder: pathlib.Path, *what: str, elastic: Elastic = Elastic(1, 2, 10)) -> tuple[int, list[int]]:  # noqa: B008
    """The exit code, and of how many processes each start was."""
    code = launch_elastic([sys.executable, "-c", SCRIPT, os.fspath(folder), *what], elastic, 1)
    return code, [int(count) for count in (folder / "starts-0").read_text().split()]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(local_job, "_GRACE", 5.0)
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.delenv("AUTOPAR_PLAN_CACHE", raising=False)


@pytest.mark.parametrize(
    ("what", "code", "starts"),
    [
        (("0",), 0, 1), (("kill",), 0, 2), ((str(LOST_CODE), "kill"), 0, 3), (("1",), 1, 1), (("kill", "3"), 3, 2),
        (("75",), 75, 1), (("kill",) * 9, 128 + signal.SIGKILL, 4), (("asked",), 128 + signal.SIGTERM, 1),
    ],
)  # fmt: skip
def test_what_is_lost_is_started_again(what: Sequence[str], code: int, starts: int, tmp_path: pathlib.Path) -> None:
    assert _starts(tmp_path, *what, elastic=Elastic(1, 2, 3)) == (code, [2] * starts)


def test_a_job_that_is_to_be_planned_anew_is_started_again(tmp_path: pathlib.Path) -> None:
    assert _starts(tmp_path, "75", "0", elastic=Elastic(1, 2, 3, replans=True)) == (0, [2, 2])
    assert _starts(tmp_path, *"00", "asked", elastic=Elastic(1, 2, 3, replans=True))[1] == [2] * 3


@pytest.fixture
def gpus(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """What a stand-in for `nvidia-smi` says.

    Where there is a file `flickers`, every other time one line; nothing until as many looks as a file `gone` says.
    """
    stand_in, file = tmp_path / "nvidia-smi", tmp_path / "gpus"
    stand_in.write_text(
        f"#!/bin/bash\ncd {tmp_path}\necho >> looks\n"
        "if [ -e gone ] && [ $(wc -l < looks) -lt $(cat gone) ]; then exit; fi\n"
        "if [ -e flickers ] && [ $(($(wc -l < looks) % 2)) = 0 ]; then head -n 1 gpus; else cat gpus; fi\n"
    )
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    file.write_text("0, GPU-a\n1, GPU-b\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    config = types.SimpleNamespace(values={"jax_platforms": ""})  # not for CPUs alone, as tests are
    monkeypatch.setattr(local_job, "jax", types.SimpleNamespace(config=config))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local_job, "_LOOK", 0.1)
    return file


def test_as_many_as_there_are_gpus_for(
    gpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _starts(tmp_path, "gpu", "back", elastic=Elastic(1, 2, 5)) == (0, [2, 1, 2])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert _starts(tmp_path, elastic=Elastic(1, 2, 5)) == (0, [2, 1, 2, 1])
    gpus.write_text("0, GPU-a\n2, GPU-c\n")  # the second that is visible has failed
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,1")
    assert _starts(tmp_path, elastic=Elastic(1, 2, 5))[1][-1] == 1
    with pytest.raises(ArgumentError, match=r"--elastic 2:4: there is room for 1 processes \(1 GPUs each\)"):
        launch_elastic(["true"], Elastic(2, 4, 5), 1)


def test_a_job_that_was_there_waits_for_devices(
    gpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _starts(tmp_path, "gone", "0", elastic=Elastic(1, 2, 5)) == (0, [2, 2])
    assert "there is room for 0 processes: wait up to 10 minutes for room for 1" in capsys.readouterr().err
    (tmp_path / "gone").unlink()
    monkeypatch.setattr(local_job, "_PATIENCE", 0.3)
    (tmp_path / "starts-0").unlink()
    with pytest.raises(ArgumentError, match="there is room for 0 processes"):
        _starts(tmp_path, "gone", elastic=Elastic(1, 2, 5))


@pytest.mark.parametrize(
    ("what", "code", "starts"),
    [
        (("grows", "0"), 0, [1, 2]),
        (("ignores",), 0, [1]),  # it never saves, and so goes on
        (("flickers",), 0, [1]),  # what comes back goes again
        (("grows", "kill", "kill", "kill"), 128 + signal.SIGKILL, [1, 2, 2]),  # to grow is no restart
    ],
)  # fmt: skip
def test_a_job_becomes_larger_when_there_is_room(
    what: Sequence[str], code: int, starts: Sequence[int], gpus: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    gpus.write_text("0, GPU-a\n")
    assert _starts(tmp_path, *what, elastic=Elastic(1, 2, 1)) == (code, starts)


@pytest.mark.slow
def test_the_next_save_ends_a_job_that_can_grow(
    gpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment(1).items():
        monkeypatch.setenv(name, value)
    gpus.write_text("0, GPU-a\n")
    timer = threading.Timer(0.5, gpus.write_text, ["0, GPU-a\n1, GPU-b\n"])
    timer.start()
    script = REPOSITORY / "tests" / "processes" / "preempted.py"
    steps = [os.fspath(tmp_path / "run"), "0", "-1", str(NUMBER)]
    command = [sys.executable, "-m", "autopar", "run", os.fspath(script), *steps]
    code, said = launch_elastic(command, Elastic(1, 2, 0), 1), capsys.readouterr()
    timer.join()
    assert code == 0, said.err
    assert "there is room for 2 processes" in said.err and f"in {tmp_path / 'run'} is complete" in said.err
    ended = re.findall(r"ended (\S+)", said.out)
    np.testing.assert_allclose([float(text) for text in ended], [expected()] * 2, rtol=1e-5)


def test_what_a_script_starts_is_not_asked_to_grow(tmp_path: pathlib.Path) -> None:
    inner = "import os; print(os.environ.get('AUTOPAR_ROOM'))"
    outer = f"import autopar, subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    room = {"AUTOPAR_ROOM": os.fspath(tmp_path / "room")}
    done = subprocess.run(
        [sys.executable, "-c", outer], env={**environment(1), **room}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["None"], done.stderr


def test_plans_are_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _starts(tmp_path, "plans") == (0, [2])
    assert (tmp_path / "plans").read_text() == os.fspath(tmp_path / "cache" / "autopar" / "plans")
    monkeypatch.setenv("AUTOPAR_PLAN_CACHE", "/elsewhere")
    assert _starts(tmp_path, "0", "plans") == (0, [2, 2])
    assert (tmp_path / "plans").read_text() == "/elsewhere"


@pytest.mark.parametrize(
    ("said", "target"),
    [
        (("--elastic", "4:2"), "script.py"), (("--elastic", "2"), "script.py"),
        (("--elastic", "1:2", "--processes", "2"), "script.py"), (("--replan-when-slower", "1"), "script.py"),
        (("--replan-when-slower", "1.5"), "model:train"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(said: Sequence[str], target: str) -> None:
    command = [sys.executable, "-m", "autopar", "run", *said, target]
    done = subprocess.run(command, env=environment(1), cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and said[0] in done.stderr


@pytest.mark.slow
def test_a_job_goes_on_from_its_latest_checkpoint(tmp_path: pathlib.Path) -> None:
    script = """
import os, signal, sys, jax, pathlib, benchmarks.faults_processes as job
marker, real = pathlib.Path(sys.argv[1]) / f"killed-{jax.process_index()}", job.batch_of
def batch_of(step):
    if step == 10 + 10 * jax.process_index() and not marker.exists():  # each once, process 0 first
        marker.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return real(step)
job.batch_of = batch_of
job.main(pathlib.Path(sys.argv[1]), 30)
"""
    (tmp_path / "script.py").write_text(script)
    command = [
        sys.executable, "-m", "autopar", "run", "--elastic", "1:2", "--devices-per-process", "1",
        os.fspath(tmp_path / "script.py"), os.fspath(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(2), cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    starts = [line["start"] for line in log if "start" in line]
    assert starts[0] == 0 and 0 < starts[1] <= 9 and 9 < starts[2] <= 19
    assert log[-1]["step"] == 30
    assert done.stderr.count("start 2 processes again") == 2


@pytest.mark.slow
def test_a_job_that_grows_goes_on_under_a_plan_that_was_made_ahead(
    gpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = """
import os, pathlib, sys, time, jax, benchmarks.faults_processes as job
from autopar.planning.traced import TracedStep
folder, real = pathlib.Path(sys.argv[1]), job.batch_of
def search(*_, **__):
    raise AssertionError("it is planned again")
def batch_of(step):
    if step == 5:
        while len(list((folder / "cache" / "autopar" / "plans").glob("*.json"))) < 2:
            time.sleep(0.1)
        (folder / "gpus").write_text("0, GPU-a\\n1, GPU-b\\n")
    if 5 < step < 100 and jax.process_count() == 1:
        time.sleep(0.05)
    return real(step)
job.batch_of = batch_of
if jax.process_count() == 2:
    TracedStep.search = search
job.main(folder, 200)
"""
    gpus.write_text("0, GPU-a\n")
    (tmp_path / "script.py").write_text(script)
    for name, value in environment(2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    command = [sys.executable, "-m", "autopar", "run", os.fspath(tmp_path / "script.py"), os.fspath(tmp_path)]
    assert launch_elastic(command, Elastic(1, 2, 1), 1) == 0
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    starts = [(line["start"], line["processes"]) for line in log if "start" in line]
    assert [count for _, count in starts] == [1, 2]
    losses: dict[int, float] = {}
    for line in log:
        if "step" in line:
            assert losses.setdefault(line["step"], line["loss"]) == pytest.approx(line["loss"], rel=1e-5)
    assert sorted(losses) == list(range(1, 201))
    last = max(line["step"] for line in log[: [bool(x.get("start")) for x in log].index(True)] if "step" in line)
    assert starts[1][0] == last  # nothing was lost
    said = capsys.readouterr().err
    assert "a plan for 2 devices is made ahead" in said and "there is room for 2 processes" in said
