"""Plans for a next start on fewer or more devices, made beside the job by a program of its own, and kept.

A job that may be of several sizes (`autopar run --elastic` says so in a variable) should not plan when it has lost a
part of its devices and all others wait. So once its own plan is made, process 0 hands the traced step to this module,
run as a program of low priority, which leaves the plans where the next start looks for them (`plan_cache`).

The step travels as a pickle: functions in it by `cloudpickle`, primitives by where they are defined. What arrives has
to have the name in the cache that it had before, which is a hash of all that a plan follows from. Otherwise nothing is
planned.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import jax
import numpy as np
from jax.extend import core, linear_util

from autopar.cost_model.hardware import cluster_from_devices
from autopar.errors import ArgumentError, PlanError, warn
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.planning import plan_cache
from autopar.planning.traced import TracedStep
from autopar.runtime.local_job import ELASTIC, LAUNCHED, bounds_of

if TYPE_CHECKING:
    import pathlib

_NICE = 19  # the lowest priority
_LINES = ("co_filename", "co_name", "co_qualname", "co_firstlineno", "co_linetable")
_OURS = "autopar."
# Variables by which a program finds the job that it is of: modules of the user's, which are imported, might join it.
_OF_A_JOB = re.compile(
    "JAX_(COORDINATOR|NUM_PROC|PROCESS_ID|LOCAL_DEV)|(AUTOPAR|SLURM|OMPI|PMI|PMIX|PRTE|MPI|RAY|TPU)_"
)
_LOOK = 1.0  # seconds between looks whether the job is still there
# What a next start sets again by itself, and this program does not; of the variables of the environment both know.
_SETTINGS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision", "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion", "jax_default_prng_impl",
)  # fmt: skip


class _Wanted(NamedTuple):
    """A plan to be made."""

    path: pathlib.Path
    cluster: Cluster


@dataclasses.dataclass(frozen=True)
class _OtherDevice:
    """What is asked of a `jax.Device` that is not there."""

    platform: str
    device_kind: str
    process_index: int
    partition_index: int | None
    slice_index: int | None


def make_ahead(step: TracedStep, method: Method, devices: Sequence[jax.Device]) -> None:
    """Begin to plan for the next start of this job, where it may be of fewer or more devices and plans are kept.

    In a program beside this one, which ends with it at the latest. Where a step cannot be handed on there is a warning.

    Args:
      devices: all that the job has, as `devices_by_host` sorts them.

    Raises:
      ArgumentError: the variable AUTOPAR_ELASTIC holds no MIN:MAX.
    """
    bounds = _bounds()
    if bounds is not None and os.environ.get(plan_cache.FOLDER):
        try:
            _begin(step, method, [*other_clusters(devices, *bounds)])
        except Exception as error:  # no reason to end a job: what cannot be pickled, memory that is short, ..
            warn(
                f"{step.graph.name}: plans for fewer or more devices are not made ahead, since the step cannot be "
                f"handed to another program: {type(error).__name__}: {error}"
            )


def _begin(step: TracedStep, method: Method, clusters: Sequence[Cluster]) -> None:
    """Have those planned that have not been."""
    wanted = []
    for cluster in clusters:
        entry = plan_cache.entry_of(step, cluster, method)
        if entry is not None and entry.read() is None:
            wanted.append(_Wanted(entry.path, cluster))
    if not wanted:
        return
    settings = {name: getattr(jax.config, name) for name in _SETTINGS if hasattr(jax.config, name)}
    payload = _pickled((settings, _without_constants(step), method, wanted))
    environment = {
        **{name: value for name, value in os.environ.items() if not _OF_A_JOB.match(name)},
        "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        plan_cache.FOLDER: os.environ[plan_cache.FOLDER],
    }  # fmt: skip
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main({os.getpid()})"]
    program = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment,
        start_new_session=True,  # interrupts are for the job
    )  # fmt: skip
    atexit.register(_end, program)
    threading.Thread(target=_hand_on, args=(program, payload), name="autopar: plans ahead", daemon=True).start()


def other_clusters(devices: Sequence[jax.Device], least: int, most: int) -> Iterator[Cluster]:
    """What a job of these devices is planned for when it starts again with fewer of them, and with more.

    Fewer or more by one process where the job is of one machine, as `autopar run` starts it, else by one host; but of
    the processes of a single host one can be lost.

    Args:
      devices: as `devices_by_host` sorts them.
      least, most: of how many processes the job may be.
    """
    is_local = LAUNCHED in os.environ
    start = cluster_from_devices(devices).host_bounds[-2]
    last = max(device.process_index for device in devices)
    host = devices[start:]
    process = [device for device in devices if device.process_index == last]
    left_out = process if is_local or not start else host
    left = [device for device in devices if device not in left_out]
    if least <= _processes(left):
        yield cluster_from_devices(left)
    added = process if is_local else host
    first = min(device.process_index for device in added)
    more = [*devices, *(_another(device, last + 1 - first, in_domain=is_local) for device in added)]
    if _processes(more) <= most:
        yield cluster_from_devices(more)


def _another(device: jax.Device, further: int, *, in_domain: bool) -> Any:
    """Of a process whose number is so much higher; in the domain of the fast interconnect that this is in, or the next.

    `jax.devices()` numbers the domains from 0.
    """
    domains = [getattr(device, name, None) for name in ("partition_index", "slice_index")]
    partition, part = (domain if domain is None or in_domain else domain + 1 for domain in domains)
    return _OtherDevice(device.platform, device.device_kind, device.process_index + further, partition, part)


def _processes(devices: Sequence[jax.Device]) -> int:
    return len({device.process_index for device in devices})


def _bounds() -> tuple[int, int] | None:
    """Of how many processes the job may be; None: of as many as it is."""
    text = os.environ.get(ELASTIC)
    if not text:
        return None
    bounds = bounds_of(text)
    if bounds is None:
        raise ArgumentError(f"{ELASTIC}={text!r} is no MIN:MAX, two numbers of processes such as 1:4.")
    return bounds


# ----------------------------------------------------------------------------------------------------------------------
# A step for another program


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it says nothing of types
    """Of our own nouns the fields, without what was found out from them: hashes are others in another program."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._codes: dict[types.CodeType, Mapping[str, Any]] = {}
        self._places = {
            id(value): (module, name)
            for module, names in list(sys.modules.items())
            if names is not None and names is not sys.modules["__main__"]  # which may have other names, too
            for name, value in list(vars(names).items())
            if isinstance(value, core.Primitive)
        }

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, core.Primitive):
            if id(obj) not in self._places:
                raise pickle.PicklingError(f"no module has the primitive {obj.name!r}")
            return _named, self._places[id(obj)]
        if hasattr(obj, "raw_frames") and not isinstance(obj, _Frames | type):  # a traceback of JAX's
            codes, lasts = obj.raw_frames()
            return _Frames, (tuple(map(self._lines, codes)), tuple(lasts))
        if isinstance(obj, linear_util.WrappedFun):  # how to differentiate what is differentiated already
            return _Unused, (repr(obj),)
        if isinstance(obj, tuple) and type(obj).__new__ is not tuple.__new__ and not hasattr(obj, "_fields"):
            return type(obj), tuple(obj)  # made of its elements one by one, as JAX's are that say a sharding rule
        if isinstance(obj, np.ndarray) and hasattr(obj, "aval"):  # JAX's literals, whose own way loses their types
            return type(obj), (np.asarray(obj), obj.aval)
        if type(obj).__module__.startswith(_OURS) and dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            return _made, (type(obj), {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)})
        return super().reducer_override(obj)

    def _lines(self, code: types.CodeType) -> Mapping[str, Any]:
        """What says of which line an instruction is; `cloudpickle` would leave out the file."""
        if code not in self._codes:
            self._codes[code] = {name: getattr(code, name) for name in _LINES}
        return self._codes[code]


@dataclasses.dataclass(frozen=True, eq=False)
class _Frames:
    """What JAX asks of a traceback, to name a line."""

    codes: tuple[Mapping[str, Any], ...]
    lasts: tuple[int, ...]  # instructions

    def raw_frames(self) -> tuple[Sequence[types.CodeType], Sequence[int]]:
        """The innermost first."""
        return [_Frames.raw_frames.__code__.replace(**lines) for lines in self.codes], self.lasts


@dataclasses.dataclass(frozen=True)
class _Unused:
    """Stands for something that planning does not look into."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _pickled(what: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(what)
    return buffer.getvalue()


def _made(kind: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    return kind(**fields)


def _named(module: str, name: str) -> Any:
    """What a module calls so."""
    return getattr(importlib.import_module(module), name)


def _without_constants(step: TracedStep) -> TracedStep:
    """Of captured arrays, which may be large, a plan needs nothing but the shapes."""
    graph = dataclasses.replace(step.graph, constants=dict.fromkeys(step.graph.constants))
    return dataclasses.replace(step, analysis=dataclasses.replace(step.analysis, graph=graph))


def _hand_on(program: subprocess.Popen[bytes], payload: bytes) -> None:
    """Of another thread, since it takes what it is given only once it has started; until it has ended."""
    assert program.stdin is not None, "it is a pipe"
    with contextlib.suppress(BrokenPipeError), program.stdin as pipe:
        pipe.write(payload)
    program.wait()


def _end(program: subprocess.Popen[bytes]) -> None:
    program.kill()
    program.wait()


# ----------------------------------------------------------------------------------------------------------------------
# The other program


def main(job: int) -> None:
    """Make the plans that are asked for on stdin, as long as the process of this id lives, which has started this."""
    os.nice(_NICE)
    threading.Thread(target=_end_with, args=(job,), daemon=True).start()
    try:
        settings, step, method, wanted = pickle.load(sys.stdin.buffer)
        for name, value in settings.items():
            jax.config.update(name, value)
    except Exception as error:  # a module of the user's is not found here, say
        _say(f"plans for fewer or more devices are not made ahead: {type(error).__name__}: {error}")
        return
    for path, cluster in wanted:
        _make(step, method, path, cluster)


def _make(step: TracedStep, method: Method, path: pathlib.Path, cluster: Cluster) -> None:
    what = f"{step.graph.name}: a plan for {cluster.num_devices} devices"
    try:
        entry = plan_cache.entry_of(step, cluster, method)
        if entry is None or entry.path != path:
            raise PlanError("the step is not the same in another program")
        entry.write(step.search(cluster, method, with_relaxations=False)[0])
    except Exception as error:  # the next start meets it again where it matters
        _say(f"{what} is not made ahead: {error}")
    else:
        _say(f"{what} is made ahead of a start with so many")


def _end_with(job: int) -> None:
    """As soon as the job's process has ended."""
    while os.getppid() == job:
        time.sleep(_LOOK)
    os._exit(0)


def _say(text: str) -> None:
    sys.stderr.write(f"autopar: {text}\n")
    sys.stderr.flush()
