"""A job of several processes, joined by each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax

from autopar.errors import ArgumentError, warn
from autopar.runtime.liveness import HEARTBEAT_TIMEOUT, LOST_CODE, start_coordinator
from autopar.runtime.local_job import COORDINATOR, COUNT, DEVICES, INDEX, LAUNCHED, free_port
from autopar.runtime.preemption import EXIT_CODE
from autopar.runtime.processes import say, this_job

_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
# What launchers that JAX does not know say of a process: its number, and how many there are (Open MPI, also where its
# runtime is PRRTE; MPICH, Intel MPI).
_LAUNCHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_JOINING = 300  # seconds in which all processes have to join, as JAX has it
_SOON = 30.0  # seconds after which it is said that some are waited for
_LATER = 60  # seconds longer that JAX waits, which aborts the process


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

    if COUNT in environment and INDEX in environment:
        index, count = _numbers(environment, (INDEX, COUNT))
        member = Membership(index, count, index if LAUNCHED in environment else None)
    elif any(kind.is_env_present() for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method):
        return Membership(None, None, _local_index(environment))
    else:
        said = next((names for names in _LAUNCHERS if names[0] in environment and names[1] in environment), None)
        if said is None:
            for mine, other in ((INDEX, COUNT), (COUNT, INDEX)):
                if mine in environment:
                    raise ArgumentError(
                        f"{mine} is {environment[mine]!r}, but {other} is not set, so that this process would train "
                        "alone: set both, or neither."
                    )
            return None
        member = Membership(*_numbers(environment, said), _local_index(environment))
    if member.count == 1:
        return None
    if COORDINATOR not in environment:
        raise ArgumentError(
            f"this is process {member.index} of {member.count}, but nothing says where process 0 is: set "
            f"{COORDINATOR}=host:port for all of them, the host of process 0 and a free port there."
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

    address = f"{get_node_ip_address()}:{free_port('')}" if index == 0 else None
    return str(broadcast_from_rank_zero(address))


@dataclasses.dataclass(frozen=True)
class _Place:
    """What `jax.distributed.initialize` has to be told."""

    coordinator: str  # host:port
    count: int
    index: int
    local: Sequence[int] | None  # the devices of this host that the process sees; None: all

    @property
    def port(self) -> str:
        return self.coordinator.rpartition(":")[2]


def _found_place(member: Membership, local: Sequence[int] | None, seconds: int) -> _Place:
    """With what JAX finds out by itself, within so many seconds."""
    from jax._src import clusters

    if local is None and (numbers := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        local = [int(number) for number in numbers.split(",")]
    coordinator, count, index, local = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get(COORDINATOR), member.count, member.index, local, None, seconds
    )
    if coordinator is None or count is None or index is None:
        raise ArgumentError(
            f"what has started this process does not say enough of its job: {COORDINATOR} is {coordinator}, the "
            f"number of processes {count}, that of this one {index}. Set {COORDINATOR}, {COUNT} and {INDEX}."
        )
    return _Place(coordinator, count, index, local)


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
    member = membership({COORDINATOR: "", **os.environ})  # wherever process 0 is
    if member is not None and member.count is not None:
        warn(
            f"this process is {member.index} of {member.count} by its launcher's variables and has not joined the "
            f"others: it trains alone. Start the script by `autopar run`, or {remedy}.",
        )


def _seconds(name: str, given: int | None, default: int) -> int:
    """A timeout, as told by an argument, or by the environment in capitals."""
    variable = f"AUTOPAR_{name.upper()}"
    text = os.environ.get(variable, str(default))
    said, where = (text, variable) if given is None else (str(given), name)
    if not said.strip().isdecimal() or not 2 <= int(said) <= 10**6:
        raise ArgumentError(f"{where}={said!r} is no number of seconds: a whole number from 2 to 1000000.")
    return int(said)


@contextlib.contextmanager
def _joining(place: _Place, seconds: int) -> Iterator[None]:
    """In it this process waits for all others of its job. Where they do not come, it says so, and ends."""
    joined = threading.Event()
    me = f"process {place.index} on {platform.node()}"

    def watch() -> None:
        soon = min(_SOON, seconds / 2)
        if joined.wait(soon):
            return
        say(f"{me} waits for all {place.count} processes of this job to join it at {place.coordinator}")
        if joined.wait(seconds - soon):
            return
        say(
            f"stopped, since not all {place.count} processes of this job have joined it at {place.coordinator} within "
            f"{seconds} seconds; {me} has. One that is missing was not started, cannot reach that address, or ended "
            "before: see what it has printed. To wait longer, set AUTOPAR_INITIALIZATION_TIMEOUT."
        )
        os._exit(LOST_CODE)

    threading.Thread(target=watch, name="autopar: others that join", daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def initialize(
    devices_per_process: int | None = None, heartbeat_timeout: int | None = None,
    initialization_timeout: int | None = None,
) -> bool:  # fmt: skip
    """Join the job that this process was started in; True if there is one. A process that is alone goes on as it is.

    To be called before JAX is used: by scripts that are not started by `autopar run`, which does it by itself. What
    `jax.distributed.initialize` knows is joined (Slurm, Open MPI, Kubernetes, Cloud TPUs), what mpirun starts, the
    workers of a trainer of Ray Train, and what JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name. From
    then on a process that fails ends all. One that is lost is named on all others, with where it was last seen, and
    these end with exit code 69: at once where it is killed or crashes, else once it has not answered for
    `heartbeat_timeout` seconds. Where nothing moves for that long, those that wait say who was last seen where; where
    all are in a step and nothing moves for ten times that long, they end with exit code 70.

    Args:
      devices_per_process: so many virtual devices on CPUs; of the GPUs of a host its process number i takes the i-th
        so many. Default: JAX's own, which is one GPU under Slurm and Open MPI 4, and else all.
      heartbeat_timeout: in seconds, the same on all processes. Default: the variable AUTOPAR_HEARTBEAT_TIMEOUT, or 60.
      initialization_timeout: so many seconds this process waits for all others to join the job; then it says who waits
        where, and ends with exit code 69. Default: the variable AUTOPAR_INITIALIZATION_TIMEOUT, or 300.

    Raises:
      ArgumentError: the launcher does not say where process 0 is, or process 0 cannot listen there.
    """
    heartbeat = _seconds("heartbeat_timeout", heartbeat_timeout, HEARTBEAT_TIMEOUT)
    joining = _seconds("initialization_timeout", initialization_timeout, _JOINING)
    devices = devices_per_process or int(os.environ.get(DEVICES, "0")) or None
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
    if worker is not None and worker.index is not None and worker.count is not None:
        # Of whatever started Ray itself, its workers have inherited variables that name other jobs and addresses.
        place = _Place(_rays_coordinator(worker.index), worker.count, worker.index, local)
        bind = f"[::]:{place.port}"
    else:
        place = _found_place(member, local, joining)
        bind = os.environ.get(_BIND, f"[::]:{place.port}")
    coordinator = start_coordinator(bind, place.count, heartbeat) if place.index == 0 else None
    try:
        with _joining(place, joining):
            # JAX starts a service on process 0 in any case: one that nobody asks.
            jax.distributed.initialize(
                coordinator_address=place.coordinator, num_processes=place.count, process_id=place.index,
                local_device_ids=place.local, cluster_detection_method="deactivate",
                initialization_timeout=joining + _LATER, heartbeat_timeout_seconds=heartbeat,
                coordinator_bind_address=f"127.0.0.1:{free_port('127.0.0.1')}",
            )  # fmt: skip
        job = this_job()
        if job is not None:
            job.keep_lifeline(coordinator, place.coordinator.rpartition(":")[0].strip("[]"))
    except BaseException:
        if coordinator is not None:
            coordinator.let_go()
        raise
    return True


def is_launched() -> bool:
    """Whether `launch` has started this process."""
    return LAUNCHED in os.environ


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
