"""A job of several processes: joined by each of them, started on one machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import jax

from autopar.errors import ArgumentError, warn
from autopar.runtime.preemption import EXIT_CODE
from autopar.runtime.processes import this_job

_COORDINATOR, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_DEVICES, _LAUNCHED = "AUTOPAR_DEVICES_PER_PROCESS", "AUTOPAR_LAUNCHED"
# What launchers that JAX does not know say of a process: its number, and how many there are (Open MPI, also where its
# runtime is PRRTE; MPICH, Intel MPI).
_LAUNCHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_GRACE = 10.0  # seconds that the others have to end by themselves, once one has failed


@dataclasses.dataclass(frozen=True)
class Membership:
    """A process's place in a job; None where JAX finds it out (Slurm, Kubernetes, Open MPI 4, Cloud TPUs)."""

    index: int | None
    count: int | None
    local_index: int | None  # on its host; None: not known, or it sees no devices but its own


def _local_index(environment: Mapping[str, str]) -> int | None:
    names = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    return next((int(environment[name]) for name in names if name in environment), None)


def _numbers(environment: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int]:
    """A process's number, and how many there are."""
    texts = [environment[name] for name in names]
    if all(text.strip().isdecimal() for text in texts):
        index, count = map(int, texts)
        if index < count:
            return index, count
    raise ArgumentError(
        f"{names[0]}={texts[0]!r} and {names[1]}={texts[1]!r} name no process of a job: the first is a whole number "
        "from 0 to one less than the second."
    )


def membership(environment: Mapping[str, str]) -> Membership | None:
    """The job that this process was started in, by the variables of its launcher; None: it is alone.

    Raises:
      ArgumentError: the launcher does not say where process 0 is, and neither does JAX_COORDINATOR_ADDRESS; or what is
        said makes no sense.
    """
    from jax._src import clusters  # what `jax.distributed.initialize` asks; it has no public name

    if _COUNT in environment and _INDEX in environment:
        index, count = _numbers(environment, (_INDEX, _COUNT))
        member = Membership(index, count, index if _LAUNCHED in environment else None)
    elif any(kind.is_env_present() for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method):
        return Membership(None, None, _local_index(environment))
    else:
        said = next((names for names in _LAUNCHERS if names[0] in environment and names[1] in environment), None)
        if said is None:
            for mine, other in ((_INDEX, _COUNT), (_COUNT, _INDEX)):
                if mine in environment:
                    raise ArgumentError(
                        f"{mine} is {environment[mine]!r}, but {other} is not set, so that this process would train "
                        "alone: set both, or neither."
                    )
            return None
        member = Membership(*_numbers(environment, said), _local_index(environment))
    if member.count == 1:
        return None
    if _COORDINATOR not in environment:
        raise ArgumentError(
            f"this is process {member.index} of {member.count}, but nothing says where process 0 is: set "
            f"{_COORDINATOR}=host:port for all of them, the host of process 0 and a free port there."
        )
    return member


def _ray_worker() -> Membership | None:
    """This process's place among the workers of Ray Train; None: it is none of them."""
    ray_train = sys.modules.get("ray.train")  # Ray has imported it before it runs a worker's train loop
    if ray_train is None:
        return None
    from ray.train.v2.api.context import DistributedTrainContext

    try:
        context = ray_train.get_context()
    except (RuntimeError, DeprecationWarning):  # which it raises in the driver, and in trials of Ray Tune
        return None
    # In Ray's local mode, and in a driver before Ray Train 2, the process is one of whatever else has started it.
    if not isinstance(context, DistributedTrainContext):
        return None
    return Membership(context.get_world_rank(), context.get_world_size(), None)


def _rays_coordinator(index: int) -> str:
    """The address that the first worker chooses; all of them come here."""
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    address = f"{get_node_ip_address()}:{_free_port('')}" if index == 0 else None
    return str(broadcast_from_rank_zero(address))


def check_joined() -> None:
    """Before a step is compiled, in no job: whether this process is one of several that should have joined one.

    Only those are known whose number is in their variables, and workers of Ray Train: not what JAX finds by itself.

    Raises:
      ArgumentError: it is a worker of Ray Train, or its launcher's variables make no sense.
    """
    if this_job() is not None:
        return
    remedy = "call autopar.initialize() before JAX is used for anything"
    worker = _ray_worker()
    if worker is not None:
        if worker.count != 1:
            raise ArgumentError(
                f"this process is worker {worker.index} of {worker.count} of Ray Train and has not joined the others, "
                f"so that each would train alone: {remedy}, first thing in the train loop."
            )
        return
    member = membership({_COORDINATOR: "", **os.environ})  # wherever process 0 is
    if member is not None and member.count is not None:
        warn(
            f"this process is {member.index} of {member.count} by its launcher's variables and has not joined the "
            f"others: it trains alone. Start the script by `autopar run`, or {remedy}.",
        )


def initialize(devices_per_process: int | None = None) -> bool:
    """Join the job that this process was started in; True if there is one. A process that is alone goes on as it is.

    To be called before JAX is used: by scripts that are not started by `autopar run`, which does it by itself. What
    `jax.distributed.initialize` knows is joined (Slurm, Open MPI, Kubernetes, Cloud TPUs), what mpirun starts, the
    workers of a trainer of Ray Train, and what JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name. From
    then on a process that fails ends all.

    Args:
      devices_per_process: so many virtual devices on CPUs; of the GPUs of a host its process number i takes the i-th
        so many. Default: JAX's own, which is one GPU under Slurm and Open MPI 4, and else all.

    Raises:
      ArgumentError: the launcher does not say where process 0 is.
    """
    devices = devices_per_process or int(os.environ.get(_DEVICES, "0")) or None
    if devices is not None:
        jax.config.update("jax_num_cpu_devices", devices)
    if jax.distributed.is_initialized():
        return this_job() is not None
    worker = _ray_worker()
    member = worker or membership(os.environ)
    if member is None or member.count == 1:
        return False
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would keep a process that is asked to end from ending.
    jax.config.update("jax_enable_preemption_service", False)
    on_cpus = (jax.config.values["jax_platforms"] or "").split(",")[0] == "cpu"
    local: Sequence[int] | None = None
    if devices is not None and member.local_index is not None and not on_cpus:
        local = range(member.local_index * devices, (member.local_index + 1) * devices)
    given: dict[str, Any] = {"num_processes": member.count, "process_id": member.index, "local_device_ids": local}
    if worker is not None and worker.index is not None:
        # Of whatever started Ray itself, its workers have inherited variables that name other jobs and addresses.
        address = _rays_coordinator(worker.index)
        given |= {
            "coordinator_address": address, "cluster_detection_method": "deactivate",
            "coordinator_bind_address": f"[::]:{address.rpartition(':')[2]}",
        }  # fmt: skip
    jax.distributed.initialize(**{name: value for name, value in given.items() if value is not None})
    this_job()
    return True


def is_launched() -> bool:
    """Whether `launch` has started this process."""
    return _LAUNCHED in os.environ


def leave_job(error: BaseException, code: int) -> None:
    """Where this process is one of a job: end it, and tell the others why. Else nothing happens."""
    job = this_job()
    if job is not None:
        job.fail(error, code)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """As `python path arguments` does; of a job, the others are told if it fails.

    Raises:
      ArgumentError: there is no such file.
      SystemExit: it failed, or asked to end.
    """
    if not os.path.isfile(path):
        raise ArgumentError(f"TARGET {path!r}: there is no such script.")
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if code and code != EXIT_CODE:
            if isinstance(asked.code, str):
                sys.stderr.write(f"{asked.code}\n")
            leave_job(asked, code)
        raise
    except Exception as error:  # as the interpreter itself does
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def launch(command: Sequence[str], processes: int, devices_per_process: int | None, *, bare: bool = False) -> int:
    """Run a command as so many processes of one job on this machine; its exit code.

    What they print comes line by line, with the number of the process before it (but for `bare` not what the first
    prints on stdout). Once one has failed, the others have ten seconds to end by themselves.
    """
    here = f"127.0.0.1:{_free_port('127.0.0.1')}"
    job = {_COORDINATOR: here, _COUNT: str(processes), _LAUNCHED: "1", "PYTHONUNBUFFERED": "1"}
    if devices_per_process is not None:
        job[_DEVICES] = str(devices_per_process)
    lock = threading.Lock()
    children: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    with _forwarding(children):
        for index in range(processes):
            environment = {**os.environ, **job, _INDEX: str(index)}
            child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            children.append(child)
            for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                assert source is not None, "they are pipes"
                if bare and source is child.stdout and index:
                    target = sys.stderr
                prefix = "" if bare and source is child.stdout and not index else f"[{index}] "
                readers.append(threading.Thread(target=_copy_lines, args=(source, target, prefix, lock), daemon=True))
                readers[-1].start()
        code = _wait(children)
    for reader in readers:
        reader.join(timeout=_GRACE)
    return code


def _free_port(address: str) -> int:
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
    return code if code >= 0 else 128 - code  # as shells tell of signals


@contextlib.contextmanager
def _forwarding(children: Sequence[subprocess.Popen[bytes]]) -> Any:
    """Interrupts and requests to end go on to the children; none is left behind."""

    def forward(number: int, _: Any) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, forward) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
