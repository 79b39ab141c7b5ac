"""The files of `docs/launch.md`, as two processes in the variables that each launcher sets."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
from typing import Any

import pytest
import yaml

from autopar.runtime.liveness import LOST_CODE
from autopar.runtime.preemption import EXIT_CODE
from tests.processes.start import REPOSITORY, finished, free_port, run_job, run_under

LAUNCH = REPOSITORY / "examples" / "launch"
LIMIT = 150
# Starts what it is told twice, as a launcher would on two hosts; numbers by variables of its own.
SHIM = """#!{python}
import os, subprocess, sys
command = sys.argv[sys.argv.index("autopar"):]
command = [sys.executable, "-m", *command]
numbered = [{{name: value.format(index) for name, value in {variables}.items()}} for index in range(2)]
jobs = [subprocess.Popen(command, env=dict(os.environ, **each)) for each in numbered]
sys.exit(max(job.wait({limit}) for job in jobs))
"""


def _losses(text: str) -> list[str]:
    return re.findall(r"step \d+: loss [\d.]+", text)


@pytest.fixture(scope="module")
def alone() -> list[str]:
    done = run_job(LAUNCH / "train.py", [], 1, 1, LIMIT)
    assert done.returncode == 0, done.stderr
    assert len(_losses(done.stdout)) == 4
    return _losses(done.stdout)


def _slurm(port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(port - (2**16 - 2**12)), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "{}", "SLURM_LOCALID": "0",
    }  # fmt: skip


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("launcher", "file"), [("srun", "slurm.sbatch"), pytest.param("mpirun", "mpi.sh", marks=pytest.mark.slow)]
)
def test_scripts_for_launchers(launcher: str, file: str, tmp_path: pathlib.Path, alone: list[str]) -> None:
    port = free_port(2**16 - 2**12)
    shim = tmp_path / launcher
    variables = _slurm(port) if launcher == "srun" else OPEN_MPI
    shim.write_text(SHIM.format(python=sys.executable, variables=variables, limit=LIMIT))
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    environment = {
        **os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.fspath(REPOSITORY),
    }  # fmt: skip
    if launcher == "mpirun":
        environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    done = subprocess.run(
        ["bash", str(LAUNCH / file)], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert _losses(done.stdout) == alone
    assert (done.stdout + done.stderr).count("batch of") == 1  # by one of the processes


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [
        (75, 0, "17"),
        (75, 99, "17"),
        (69, 0, "17"),
        (70, 9, "17"),
        (137, 9, "17"),
        (139, 0, "17"),
        (69, 10, ""),
        (1, 0, ""),
        (0, 0, ""),
        (143, 0, ""),
        (130, 0, ""),
    ],
)
def test_a_job_of_slurm_that_was_asked_to_end_or_lost_a_process_is_queued_again(
    code: int, restarts: int, requeued: str, tmp_path: pathlib.Path
) -> None:
    for name, text in (("srun", f"exit {code}"), ("scontrol", f'echo "$2" > {tmp_path}/$1')):
        stand_in = tmp_path / name
        stand_in.write_text(f"#!/bin/bash\n{text}\n")
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "17",
        "SLURM_RESTART_COUNT": str(restarts),
    }  # fmt: skip
    done = subprocess.run(["bash", str(LAUNCH / "slurm.sbatch")], env=environment, check=False, timeout=LIMIT)
    assert done.returncode == code
    said = tmp_path / "requeue"
    assert (said.read_text().strip() if said.exists() else "") == requeued


@pytest.mark.slow
def test_ray_goes_on_with_the_hosts_that_are_left(tmp_path: pathlib.Path, alone: list[str]) -> None:
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.fspath(REPOSITORY),
        "RAY_DEDUP_LOGS": "0",
        # Of workers on a host of which Ray does not know yet that it is lost.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
        # A host that is asked for its health and refuses the connection is lost after these, not after 15 seconds.
        "RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3",
    }  # fmt: skip
    script = REPOSITORY / "tests" / "processes" / "ray_job.py"
    (done,) = finished([[sys.executable, os.fspath(script), os.fspath(tmp_path)]], [environment], LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"step \d+: loss [\d.]+ of \d processes", done.stdout)
    # The tenth step is not told of: it is after its checkpoint that the host is lost. Ray may say a line again.
    numbers = zip((alone[at] for at in (0, 2, 3)), (2, 1, 1), strict=True)
    assert list(dict.fromkeys(said)) == [f"{text} of {count} processes" for text, count in numbers]


def _environment(container: dict[str, Any], index: int) -> dict[str, str]:
    """As a pod of the Job gets it."""
    completion = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    found = {}
    for variable in container["env"]:
        if "valueFrom" in variable:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == completion
        found[variable["name"]] = variable.get("value", str(index))
    return found


def test_the_manifest_for_kubernetes(alone: list[str]) -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    rules = spec["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert codes == {"Ignore": [EXIT_CODE, LOST_CODE, 128 + signal.SIGABRT], "FailJob": [1]}
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    variables = [_environment(container, index) for index in range(2)]
    assert spec["completions"] == spec["parallelism"] == int(variables[0]["JAX_NUM_PROCESSES"])
    # The name of the first pod, as the service knows it.
    host, _ = variables[0]["JAX_COORDINATOR_ADDRESS"].split(":")
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    # A pod has the last, by which JAX would look for the job itself.
    here = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }  # fmt: skip
    assert container["command"][:2] == ["autopar", "run"]
    done = run_under([{**each, **here} for each in variables], REPOSITORY / container["command"][2], LIMIT)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert _losses(done[0].stdout) == alone
