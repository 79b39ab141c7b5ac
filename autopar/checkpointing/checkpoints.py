"""Checkpoints of a state that lies on many devices: written by all processes, restored under any other plan."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from autopar.batches import Batches
from autopar.checkpointing import checksums, writers
from autopar.checkpointing.replanning import Replanning
from autopar.checkpointing.state_handler import (
    BATCHES,
    SavedArgument,
    SavedState,
    StateHandler,
    arguments_of,
    check_present,
    is_pieces,
    key_of,
    leaves_by_key,
    stored_leaf,
)
from autopar.checkpointing.stored_leaves import ReadLeaf
from autopar.errors import CheckpointError, warn
from autopar.executable import HasExecutable
from autopar.planning.slow_hosts import when_slower
from autopar.runtime.preemption import EXIT_CODE, Preemption
from autopar.runtime.processes import this_job
from autopar.runtime.spent import spent_on

_ITEM = "state"  # the folder of a step in which Orbax finds the state
_BYTES = "base64"
_MOST_NAMED = 5  # differences in one message


def save(
    path: Any, state: Any, *, step: int, metrics: Mapping[str, float] | None = None,
    batches: Batches | None = None, options: ocp.CheckpointManagerOptions | None = None,
) -> bool:  # fmt: skip
    """Write a checkpoint of the state after so many steps into the folder `path/step`; whether one was due.

    When this returns the state has been copied to the hosts and may be given away; the files are written while the
    steps go on, and a checkpoint that is not complete is none. The end of the program, the next `save` and `restore`
    wait for it (the end of a job that fails does not). In a job of several processes all of them have to call this,
    with the same state; each writes what its own devices hold. `path` has to be a folder that all of them see.

    If the process was asked to end since the last call (SIGTERM, as a scheduler sends it to jobs that it takes the
    machine from), a checkpoint is written whether one is due or not, and once it is complete the program ends with exit
    code 75, in a job on all processes. The same happens under `autopar run --replan-when-slower` where another plan is
    quicker by then. From the first call on, in the main thread, no SIGTERM ends the program otherwise, but a second
    one. What is saved into another folder than that of the first call ends nothing.

    The state is written as the pytree that it is, whatever the plan: `orbax.checkpoint.PyTreeCheckpointer().restore(
    path/step/"state")` reads it. Of random keys it holds their numbers. Leaves that are neither arrays nor numbers nor
    texts (functions, bytes) are left out.

    Args:
      batches: what `step.batches(..)` returned: its position is kept with the state.
      metrics: numbers by which `options.best_fn` tells the best checkpoints.
      options: which checkpoints are written and kept (`max_to_keep`, `save_interval_steps`, `best_fn`, ..); the first
        call for a path that says so does for all that follow.

    Raises:
      CheckpointError: there is a checkpoint of this or a later step, another `options` was given before, or another
        program writes into this folder: a second one on the same host is refused while the first one runs; of others
        the one that began last goes on.
      StateError: a leaf was donated to a step and is gone.
      OSError, ValueError: the checkpoint before could not be written; what the storage says.
      SystemExit: the process was asked to end, or the job is to be started again under another plan.
    """
    preemption = _preemption()
    if preemption.has_come:
        return False  # as of a script that saves at its end, however it ends
    replanning = _replanning() if preemption.can_end(str(_folder(path))) else None
    with spent_on("checkpoints"):
        ends = preemption.comes_now(str(_folder(path)))
        begins = None if replanning is None else functools.partial(replanning.steps_end, state, step)
        is_saved = write(
            path, state, step, metrics=metrics, batches=batches, options=options, when_due=not ends, begins=begins
        )
        if ends or (is_saved and replanning is not None and replanning.pays()):
            _end(preemption, path, step)
    if is_saved and replanning is not None:
        replanning.goes_on(step)
    return is_saved


def _end(preemption: Preemption, path: Any, step: int) -> NoReturn:
    """End the program once its checkpoint is complete."""
    wait_until_saved()
    preemption.has_come = True
    sys.stderr.write(f"autopar: the checkpoint of step {step} in {_folder(path)} is complete\n")
    sys.exit(EXIT_CODE)


def write(
    path: Any, state: Any, step: int, *, metrics: Mapping[str, float] | None = None, batches: Batches | None = None,
    options: ocp.CheckpointManagerOptions | None = None, when_due: bool = False,
    begins: Callable[[], None] | None = None,
) -> bool:  # fmt: skip
    """As `save`, of which nothing ends the program.

    `when_due`: only if the options say so; `begins`: called before a checkpoint that is written.
    """
    check_present(state)
    manager = _opened(path, options, create=True).manager
    latest = manager.latest_step()
    is_later = latest is None or step > latest
    if is_later and when_due and not manager.should_save(step):
        return False
    _of_first(functools.partial(writers.claim, _folder(path)))
    if not is_later:
        raise CheckpointError(
            f"save(step={step}): {manager.directory} holds a checkpoint of step {latest} already. Save later steps, or "
            "into another folder."
        )
    _agree("autopar.save", manager, step)
    if begins is not None:
        begins()
    stored = jax.tree.map(stored_leaf, state, is_leaf=is_pieces)
    position = None if batches is None else json.dumps(batches.get_state(), default=_bytes)
    items = ocp.args.Composite(**{_ITEM: SavedState(stored, position)})
    return bool(manager.save(step, args=items, metrics=None if metrics is None else dict(metrics), force=True))


@spent_on("checkpoints")
def restore(path: Any, *, like: Any, step: int | None = None, batches: Batches | None = None) -> Any:
    """The state of a checkpoint that `save` has written, each leaf read to where it belongs.

    No host reads more than its devices hold, and the numbers that every process knows. In a job of several processes
    all of them have to call this. Every file is read a first time to compare its checksum, by one of the processes.

    Args:
      like: a parallelized or compiled step, whose argument of the checkpoint's structure says what lies where; or a
        pytree of arrays or `jax.ShapeDtypeStruct`s with shardings (without: onto the first device), NumPy arrays,
        numbers and texts.
      batches: a new `step.batches(..)`, which goes on where that of `save` was: by the position of its iterator, or,
        where that cannot tell it or each process reads another part than then, by reading again what was taken.
      step: default: the latest. If that is damaged it is said, it is set aside as `damaged.STEP`, and the one before
        is taken.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or holds another structure, or other shapes, or no
        position of batches.
      PlanError: `like` has no plan yet.
    """
    wanted = arguments_of(like) if isinstance(like, HasExecutable) else [SavedArgument.of(like)]
    opened = _opened(path, None, create=False)
    manager = opened.manager
    _agree("autopar.restore", manager, step)
    manager.wait_until_finished()
    while True:
        chosen = _chosen(manager, step)
        folder = epath.Path(manager.directory) / str(chosen) / _ITEM
        problem = _damage(folder)
        if not problem:
            position = {} if batches is None else _position(folder, batches)
            state = _read(opened.handler, folder, wanted)
            if batches is not None:
                batches.set_state(position)
            return state
        if step is not None:
            raise CheckpointError(f"the checkpoint {folder.parent} is damaged: {problem}. Restore another step.")
        _set_aside(manager, chosen, problem)


def latest_step(path: Any) -> int | None:
    """The step of the latest complete checkpoint that `save` has written into a folder; None: there is none.

    In a job of several processes all of them have to call this.

    Raises:
      CheckpointError: the folder cannot be read as one of checkpoints.
      OSError, ValueError: a checkpoint that `save` began before could not be written; what the storage says.
    """
    folder = _folder(path)
    if _of_first(lambda: str(int(folder.exists()))) == "0":
        return None
    manager = _opened(path, None, create=False).manager
    manager.wait_until_finished()

    def find() -> str:
        manager.reload()
        return json.dumps(manager.latest_step())

    step: int | None = json.loads(_of_first(find))
    return step


@spent_on("checkpoints")
def wait_until_saved() -> None:
    """Return once all checkpoints of `save` are complete.

    For processes that are ended without coming to the end of their program, as those of a notebook or of Ray are.

    Raises:
      OSError, ValueError: one could not be written; what the storage says.
    """
    failed: Exception | None = None
    for opened in _open.values():
        try:
            opened.manager.wait_until_finished()
        except Exception as error:  # the others are waited for all the same
            failed = failed or error
    if failed is not None:
        raise failed


_preemption = functools.cache(Preemption)  # of the program, from the first `save` on


@functools.cache
def _replanning() -> Replanning | None:
    """Of the program, where it was asked for."""
    slower = when_slower()
    return None if slower is None else Replanning(slower)


# The folder and its manager.


@dataclasses.dataclass(frozen=True, eq=False)
class _Open:
    """A folder of checkpoints that this process uses."""

    manager: ocp.CheckpointManager
    handler: StateHandler
    options: ocp.CheckpointManagerOptions | None


_open: dict[str, _Open] = {}
_managers = itertools.count()  # in the same order on all processes


def _opened(path: Any, options: ocp.CheckpointManagerOptions | None, *, create: bool) -> _Open:
    folder = _folder(path)
    name = str(folder)
    opened = _open.get(name)
    if opened is not None and options is not None and _fields(options) != _fields(opened.options):
        if opened.options is not None:
            raise CheckpointError(f"save: {folder} is open with options={opened.options}, and not with {options}.")
        opened.manager.close()  # so far it was read, or saved into without any
        opened = None
    if opened is None:
        if not _open:
            # Earlier than `atexit`, whose functions are called when no thread can start another any more.
            threading._register_atexit(_finish)  # type: ignore[attr-defined]
        opened = _open[name] = _made(folder, options, create)
    return opened


def _folder(path: Any) -> epath.Path:
    folder = epath.Path(path)
    return folder if "://" in str(path) else epath.Path(str(folder.expanduser().absolute()))


def _of_first(make: Callable[[], str]) -> str:
    """What process 0 makes, on all processes."""
    job = this_job()
    return make() if job is None else job.from_first(make)


def _fields(options: ocp.CheckpointManagerOptions | None) -> Any:
    """To compare options by: functions that are written in place are others each time, of the same code."""
    return {} if options is None else {name: getattr(x, "__code__", x) for name, x in vars(options).items()}


def _made(folder: epath.Path, options: ocp.CheckpointManagerOptions | None, create: bool) -> _Open:
    """Barriers are those of the coordination service: Orbax's others are programs, which would meet those of steps."""
    job = this_job()
    chosen = dataclasses.replace(options or ocp.CheckpointManagerOptions())
    if chosen.step_prefix or chosen.step_format_fixed_length or chosen.step_name_format:
        raise CheckpointError("save: options give the steps' folders other names than their numbers. Leave that out.")

    def find() -> str:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.exists():
            raise CheckpointError(f"restore: there is no folder {folder}.")
        return ""

    _of_first(find)
    if job is not None:
        chosen.multiprocessing_options = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(job.count)), barrier_sync_key_prefix=f"autopar{next(_managers)}"
        )
    chosen.create = False
    handler = StateHandler(chosen.multiprocessing_options)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(_ITEM, SavedState, handler)
    try:
        manager = ocp.CheckpointManager(folder, handler_registry=registry, options=chosen)
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"the metrics of a checkpoint in {folder} cannot be read ({error}): move that checkpoint away."
        ) from error
    return _Open(manager, handler, options)


def _agree(what: str, manager: ocp.CheckpointManager, step: int | None) -> None:
    job = this_job()
    if job is not None:
        job.agree(what, {"the path": str(manager.directory), "the step": str(step)})


def _finish() -> None:
    """At the end of the program: a checkpoint that cannot be written is a failure of it."""
    failed = False
    for opened in _open.values():
        try:
            opened.manager.close()
        except BaseException as error:
            failed = True
            sys.excepthook(type(error), error, error.__traceback__)
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _chosen(manager: ocp.CheckpointManager, step: int | None) -> int:
    """A step that there is, for all processes the same."""

    def choose() -> str:
        manager.reload()
        steps = sorted(manager.all_steps())
        if not steps or (step is not None and step not in steps):
            there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "there is none"
            which = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise CheckpointError(f"restore: {manager.directory} holds no complete {which}; {there}.")
        return str(steps[-1] if step is None else step)

    return int(_of_first(choose))


def _damage(folder: epath.Path) -> str:
    job = this_job()
    if job is None:
        return checksums.damage(folder, 0, 1)
    mine = checksums.damage(folder, job.index, job.count)
    return job.combined(mine, lambda said: next(filter(None, said), ""), "to compare checksums")


def _set_aside(manager: ocp.CheckpointManager, step: int, problem: str) -> None:
    directory = epath.Path(manager.directory)

    def move() -> str:
        names = itertools.chain([f"damaged.{step}"], (f"damaged.{step}.{k}" for k in itertools.count(2)))
        name = next(name for name in names if not (directory / name).exists())
        (directory / str(step)).rename(directory / name)
        return name

    aside = _of_first(move)
    manager.reload()
    warn(
        f"the checkpoint {directory / str(step)} is damaged: {problem}. It is set aside as {aside}, and the one "
        "before is restored.",
    )


# What is read.


def _read(handler: StateHandler, folder: epath.Path, arguments: Sequence[SavedArgument]) -> Any:
    tree = handler.metadata(folder)
    stored = leaves_by_key(tree)
    if not arguments:
        raise CheckpointError("restore: the step that is given as like has no arguments.")
    differing = [argument.differences(stored) for argument in arguments]
    argument, differences = min(zip(arguments, differing, strict=True), key=lambda pair: len(pair[1]))
    if differences:
        more = f", and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
        raise CheckpointError(
            f"the checkpoint {folder.parent} holds something else than what shall be restored: "
            f"{'; '.join(differences[:_MOST_NAMED])}{more}."
        )
    wanted = {key: argument.wanted.get(key_of(key), ReadLeaf()) for key in ocp.tree.to_flat_dict(tree)}
    return argument.filled(leaves_by_key(handler.restore(folder, ocp.tree.from_flat_dict(wanted, target=tree))))


def _position(folder: epath.Path, batches: Batches) -> Any:
    """Of the iterator over batches of a process that read the same part, if there was one."""
    files = sorted(folder.glob(f"{BATCHES}.*.json"))
    if not files:
        raise CheckpointError(f"the checkpoint {folder.parent} holds no position of batches: leave out batches.")
    positions = [json.loads(file.read_text(), object_hook=_from_bytes) for file in files]
    shard = batches.get_state()["shard"]
    return next((position for position in positions if position["shard"] == shard), positions[0])


def _bytes(x: Any) -> Any:
    """Bytes as JSON: Grain's positions are such."""
    if isinstance(x, bytes):
        return {_BYTES: base64.b64encode(x).decode()}
    if isinstance(x, np.generic | np.ndarray):
        return x.tolist()
    raise CheckpointError(f"save: the position of batches holds {type(x).__name__}, which is neither text nor number.")


def _from_bytes(x: dict[str, Any]) -> Any:
    return base64.b64decode(x[_BYTES]) if set(x) == {_BYTES} else x
