"""A job of several processes on this machine: started, watched, and started again where processes are lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import jax

from autopar.errors import ArgumentError
from autopar.runtime.liveness import HANGS_CODE, LOST_CODE
from autopar.runtime.preemption import EXIT_CODE, ROOM
from autopar.runtime.processes import say

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
DEVICES, LAUNCHED = "AUTOPAR_DEVICES_PER_PROCESS", "AUTOPAR_LAUNCHED"
_PLANS = "AUTOPAR_PLAN_CACHE"  # see `autopar.planning.plan_cache`
WHEN_SLOWER = "AUTOPAR_REPLAN_WHEN_SLOWER"  # see `autopar.planning.slow_hosts`
ELASTIC = "AUTOPAR_ELASTIC"  # of how many processes a job may be, MIN:MAX; see `autopar.planning.plans_ahead`
_SIGNALS = 128  # exit codes above are of processes that a signal ended, as shells tell it
_GRACE = 10.0  # seconds that the others have to end by themselves, once one has failed
_ASKING = 60.0  # seconds that nvidia-smi may take
_LOOK = 60.0  # seconds between looks whether there are more devices than the job has
_PATIENCE = 600.0  # seconds that a job waits for devices, where there are too few to start it again


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Of how many processes a job may be, and how often it is started again."""

    least: int
    most: int
    restarts: int
    replans: bool = False  # whether exit code 75 asks for a start under another plan


def launch_elastic(command: Sequence[str], elastic: Elastic, devices_per_process: int | None) -> int:
    """As `launch`, as many processes as there is room for; once processes are lost, all are started again.

    A job whose script fails is not started again, nor one that was asked to end. When there is room for more processes
    than there are, the job is asked to save, to end, and is started with as many. Plans are kept, so that a step that
    was planned for as many devices before is not planned again.

    Raises:
      ArgumentError: there is no room for so few; when it is to be started again, not for ten minutes.
    """
    variables = {_PLANS: os.environ.get(_PLANS) or os.fspath(cache_folder() / "plans")}
    restarts, patience = 0, 0.0  # after processes were lost; what is gone then may come back
    while True:
        room = _room_for(elastic.least, devices_per_process, patience)
        count = elastic.most if room is None else min(elastic.most, room)
        if count < elastic.least:
            raise ArgumentError(
                f"--elastic {elastic.least}:{elastic.most}: there is room for {count} processes "
                f"({devices_per_process} GPUs each), and that is too few."
            )
        patience = _PATIENCE
        if restarts:
            say(f"start {count} processes again ({restarts} of {elastic.restarts} times at most)")
        if elastic.replans and restarts == elastic.restarts:  # nobody would start it again
            variables[WHEN_SLOWER] = ""
        most = count  # in the end: on CPUs the next start has as many
        if room is not None:
            most, variables[ELASTIC] = elastic.most, f"{elastic.least}:{elastic.most}"
        with _forwarding() as forwarding, _asking_to_grow(count, most, devices_per_process) as file:
            code = _run(command, count, devices_per_process, {**variables, ROOM: os.fspath(file)}, forwarding)
            grows = code == EXIT_CODE and file.exists()
        codes = {LOST_CODE, HANGS_CODE} | ({EXIT_CODE} if elastic.replans else set())
        is_lost = code in codes or code > _SIGNALS
        if forwarding.has_asked or not (grows or (is_lost and restarts < elastic.restarts)):
            return code
        restarts += not grows


@contextlib.contextmanager
def _asking_to_grow(count: int, most: int, devices_per_process: int | None) -> Iterator[pathlib.Path]:
    """A file that is made once there is room for more processes than `count`, of which there are `most` at most."""
    with tempfile.TemporaryDirectory(prefix="autopar-", ignore_cleanup_errors=True) as folder:
        file, over = pathlib.Path(folder) / "room", threading.Event()

        def look() -> None:
            last = count
            while not over.wait(_LOOK):
                room = min(most, _room(devices_per_process) or 0)
                if count < room == last and not over.is_set():  # twice, since what has just come back may go again
                    say(f"there is room for {room} processes: after the next autopar.save they are started as so many")
                    file.parent.mkdir(exist_ok=True)  # those who clean up such folders may have come by
                    file.touch()
                    return
                last = room

        if count < most:
            threading.Thread(target=look, name="autopar: room", daemon=True).start()
        try:
            yield file
        finally:
            over.set()


def bounds_of(text: str) -> tuple[int, int] | None:
    """Of how many processes a job may be, by MIN:MAX; None: the text says something else."""
    least, _, most = text.partition(":")
    if least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most):
        return int(least), int(most)
    return None


def cache_folder() -> pathlib.Path:
    """This user's folder for what can be made again."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "autopar"


def _room_for(least: int, devices_per_process: int | None, patience: float) -> int | None:
    """As `_room`, once it is enough for so many processes, or after so many seconds."""
    until, is_said = time.monotonic() + patience, False
    while (room := _room(devices_per_process)) is not None and room < least and time.monotonic() < until:
        if not is_said:
            is_said = True
            say(f"there is room for {room} processes: wait up to {patience / 60:.0f} minutes for room for {least}")
        time.sleep(_LOOK)
    return room


def _room(devices_per_process: int | None) -> int | None:
    """For so many processes this machine has GPUs that work; None: they train on CPUs, of which each has its own."""
    platforms = (jax.config.values["jax_platforms"] or "").split(",")
    if platforms[0] == "cpu" or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    # One that has failed is said in other words, and the exit code may be another one.
    told = ""
    with contextlib.suppress(subprocess.TimeoutExpired):  # it can hang where a GPU has failed
        told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_ASKING).stdout
    rows = [line.split(",") for line in told.splitlines()]
    gpus = [(row[0].strip(), row[1].strip()) for row in rows if len(row) == 2 and row[0].strip().isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # by number, or by the beginning of what identifies them
        names = [name.strip() for name in visible.split(",") if name.strip()]
        gpus = [(index, uuid) for index, uuid in gpus if any(name == index or uuid.startswith(name) for name in names)]
    if devices_per_process is None:
        raise ArgumentError("--elastic: say how many GPUs each process has, by --devices-per-process.")
    return len(gpus) // devices_per_process


def launch(command: Sequence[str], processes: int, devices_per_process: int | None, *, bare: bool = False) -> int:
    """Run a command as so many processes of one job on this machine; its exit code.

    What they print comes line by line, with the number of the process before it (but for `bare` not what the first
    prints on stdout). Once one has failed, the others have ten seconds to end by themselves.
    """
    with _forwarding() as forwarding:
        return _run(command, processes, devices_per_process, {}, forwarding, bare=bare)


def _run(
    command: Sequence[str], processes: int, devices_per_process: int | None, variables: Mapping[str, str],
    forwarding: _Forwarding, *, bare: bool = False,
) -> int:  # fmt: skip
    here = f"127.0.0.1:{free_port('127.0.0.1')}"
    job = {COORDINATOR: here, COUNT: str(processes), LAUNCHED: "1", "PYTHONUNBUFFERED": "1"}
    if devices_per_process is not None:
        job[DEVICES] = str(devices_per_process)
    lock = threading.Lock()
    readers: list[threading.Thread] = []
    for index in range(processes):
        environment = {**os.environ, **job, **variables, INDEX: str(index)}
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        forwarding.children.append(child)
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            assert source is not None, "they are pipes"
            if bare and source is child.stdout and index:
                target = sys.stderr
            prefix = "" if bare and source is child.stdout and not index else f"[{index}] "
            readers.append(threading.Thread(target=_copy_lines, args=(source, target, prefix, lock), daemon=True))
            readers[-1].start()
    code = _wait(forwarding.children)
    for reader in readers:
        reader.join(timeout=_GRACE)
    return code


def free_port(address: str) -> int:
    """One that nobody on this machine uses now, at one of its addresses or, for "", at all of them."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _copy_lines(source: IO[bytes], target: Any, prefix: str, lock: threading.Lock) -> None:
    with source:
        for line in source:
            with lock:
                target.write(f"{prefix}{line.decode(errors='replace').rstrip()}\n")
                target.flush()


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """The exit code of the first that failed, or 0."""
    first: int | None = None
    until = float("inf")
    while None in (codes := [child.poll() for child in children]):
        failed = [code for code in codes if code]
        if failed and first is None:
            first, until = failed[0], time.monotonic() + _GRACE
        if time.monotonic() > until:
            for child in children:
                child.kill()
        time.sleep(0.05)
    code = next((code for code in (first, *codes) if code), 0)
    if code == LOST_CODE and time.monotonic() <= until:  # one that is killed may end after those that have heard of it
        code = min(each for each in codes if each)
    return code if code >= 0 else _SIGNALS - code


@dataclasses.dataclass(eq=False)
class _Forwarding:
    """Whom signals go on to, and whether any has come."""

    children: list[subprocess.Popen[bytes]]
    has_asked: bool = False


@contextlib.contextmanager
def _forwarding() -> Iterator[_Forwarding]:
    """Interrupts and requests to end go on to the children; none is left behind."""
    forwarding = _Forwarding([])
    children = forwarding.children

    def forward(number: int, _: Any) -> None:
        forwarding.has_asked = True
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, forward) for number in numbers} if is_main else {}
    try:
        yield forwarding
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
