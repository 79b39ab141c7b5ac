"""This process among those of a job that `jax.distributed` has started: agreements, and arrays sent to others.

Small texts go through the store of JAX's coordination service. Arrays go from device to device by
`jax.experimental.transfer`: the sender offers arrays under a number, the receiver pulls them by it; neither waits, in
whatever order they come to it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.experimental import transfer

from autopar import errors
from autopar.errors import PeerError, PlanMismatchError, UserError
from autopar.runtime import last_seen
from autopar.runtime.addresses import address_towards
from autopar.runtime.liveness import LOST_CODE, Coordinator, Lifeline, Seen
from autopar.runtime.random_keys import as_wanted, plain, plain_struct

_PREFIX = "autopar"
_FAILED = f"{_PREFIX}/failed"
_HEARD = f"{_PREFIX}/heard"
_LIFELINES = f"{_PREFIX}/lifelines"
_DONE, _PARTED = f"{_PREFIX}/done", f"{_PREFIX}/parted"
_ALIKE = "Every process has to run the same script, on the same versions, with the same shapes and options."
_POLL = 1.0  # seconds between looks for a failure of others
_SOON = 30.0  # seconds after which it is said whom a process waits for
_PATIENCE = 5.0  # seconds that a process waits, before it ends, for others to hear why, or to say why themselves
_PARTING = 0.5  # seconds that it leaves them to end then: JAX aborts those whose coordinator is gone
_FOLLOWS = 2.0  # seconds after an error of a device within which one hears that another process is lost
_STEPS = 1 << 20  # numbers of messages are unique for so many steps
_CHANNELS = 1 << 11  # and for so many executables


class Transport(NamedTuple):
    """How `jax.experimental.transfer` brings arrays to another process."""

    connections: int  # over which arrays and parts of them go side by side
    raw_buffers: bool  # reads the arrays where they lie, without a copy before


# By backend what is fastest: see `benchmarks.transfer`. Others keep JAX's own; its plugin for GPUs cannot read arrays
# where they lie (jaxlib 0.11.2).
TRANSPORTS = {"cpu": Transport(4, raw_buffers=True)}
DEFAULT_TRANSPORT = Transport(1, raw_buffers=False)


class Channel:
    """Numbers of the messages of one executable: equal on all processes, and different for all messages under way."""

    def __init__(self, number: int, name: str, members: Collection[int]) -> None:
        """`name`: what is called; `members`: the processes that run programs of it together with this one."""
        self._number = number and 1 + (number - 1) % (_CHANNELS - 1)
        self.name, self._members = name, frozenset(members)
        self.steps = 0  # that this process has begun
        self._awaited: dict[int, int] = {}  # by sender, the last step of which something is awaited
        self.instruction: Any = None  # that is played now
        self.describe: Callable[[Any], str] = str  # says which one it is

    def next_step(self) -> None:
        """The numbers that follow are those of the next step."""
        self.steps += 1

    def awaits(self, sender: int) -> None:
        """This step needs what the sender sends in it."""
        self._awaited[sender] = self.steps

    def needs(self, process: int) -> int:
        """How many steps another process has to begin for those of this one to end."""
        return max(self.steps if process in self._members else 0, self._awaited.get(process, 0))

    def uuid(self, message: int, receiver: int) -> int:
        """63 bits for message `message`, below 2^20, of this step to a process below 2^12."""
        return ((receiver << 11 | self._number) << 20 | self.steps % _STEPS) << 20 | message


class Processes:
    """What this process knows of the others."""

    def __init__(self, state: Any) -> None:
        """`state`: JAX's, of its coordination service. No backend is started: the script may still say which."""
        self.index, self.count = state.process_id, state.num_processes
        self._client, self._coordinator = state.client, str(state.coordinator_address)
        self._agreements = itertools.count()
        self._channels: list[Channel] = []
        self.gatherings = self.channel("autopar.gather or a callback", ())
        self._connections: dict[int, Any] = {}
        self._meshes: set[Any] = set()
        self._stopping = threading.RLock()
        self._needs_nobody = False  # at the end of the script
        self._thread = threading.get_ident()  # that runs the script
        self._busyness, self._busy = last_seen.Busyness(self._thread), 0
        self._coordinator_program: Coordinator | None = None
        self._lifeline: Lifeline | None = None
        self._client.key_value_set(f"{_PREFIX}/host/{self.index}", platform.node())
        self._watch()

    @functools.cached_property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts of all processes, in their order."""
        return tuple(self._wait_for(f"{_PREFIX}/host/{process}") for process in range(self.count))

    # Texts.

    def agree(self, what: str, mine: Mapping[str, str]) -> None:
        """All processes come here, and go on if they all say the same.

        Raises:
          PlanMismatchError: they do not; names the processes that differ from process 0, and in what. Or one has ended.
          PeerError: a process failed before it came here.
        """
        verdict = self.combined(json.dumps(dict(mine)), _differences, f"to agree about {what}")
        if verdict:
            raise PlanMismatchError(f"the processes of this job do not agree about {what}: {verdict}. {_ALIKE}")

    def combined(self, mine: str, combine: Callable[[Sequence[str]], str], subject: str) -> str:
        """What process 0 makes of what each process says, on all of them; all come here.

        `subject`: what for, as in "waits for process 1 to".

        Raises:
          PeerError: a process failed before it came here.
          PlanMismatchError: a process ended before it came here.
        """
        key = f"{_PREFIX}/agreement/{next(self._agreements)}"
        if self.index:
            self._client.key_value_set(f"{key}/{self.index}", mine)
            return self._wait_for(f"{key}/all", subject, "process 0 or others", needs=range(self.count))
        others = range(1, self.count)
        combined = combine([mine, *(self._wait_for(f"{key}/{p}", subject, f"process {p}", needs=[p]) for p in others)])
        self._client.key_value_set(f"{key}/all", combined)
        return combined

    def from_first(self, make: Callable[[], str]) -> str:
        """What process 0 makes, on all of them.

        Raises:
          UserError: what `make` raised on process 0, on all of them; or process 0 has ended.
          PeerError: process 0 failed otherwise.
        """
        key = f"{_PREFIX}/made/{next(self._agreements)}"
        if self.index:
            kind, text = json.loads(self._wait_for(key, needs=[0]))  # may take as long as planning does
            if kind:
                error = getattr(errors, kind)(text)
                error.of_peer = True
                raise error
            return str(text)
        try:
            made = make()
        except BaseException as error:
            kind = type(error) if isinstance(error, UserError) else PeerError
            text = str(error) if isinstance(error, UserError) else f"process 0 of this job failed: {error!r}"
            self._client.key_value_set(key, json.dumps([kind.__name__, text]))
            raise
        self._client.key_value_set(key, json.dumps(["", made]))
        return made

    def all_say(self, what: str, mine: str, subject: str) -> list[str]:
        """What each process says under a name, once, whatever else is agreed meanwhile; raises as `combined`."""
        self._client.key_value_set(f"{_PREFIX}/{what}/{self.index}", mine)
        keys = {p: f"{_PREFIX}/{what}/{p}" for p in range(self.count)}
        return [self._wait_for(key, subject, f"process {p}", needs=[p]) for p, key in keys.items()]

    def anyone_said(self, what: str) -> bool:
        """Whether some process has said something under a name."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return bool(self._client.key_value_dir_get(f"{_PREFIX}/{what}/"))
        return False

    def _wait_for(self, key: str, subject: str = "", whom: str = "", needs: Collection[int] = ()) -> str:
        """A text that another process puts into the store. Where that should be soon, it is said whom it waits for.

        `needs`: the processes without which it would never come.
        """
        started, said = time.monotonic(), not subject
        while True:
            try:
                return str(self._client.blocking_key_value_get(key, int(1000 * _POLL)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            self._check_others()
            gone = self._done().keys() & {*needs} - {self.index} if needs else ()
            if gone:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # it may have put it there since
                    return str(self._client.key_value_try_get(key))
                raise PlanMismatchError(
                    f"process {min(gone)} of this job has ended, while process {self.index} waits for it "
                    f"{subject or 'to plan or to look for a checkpoint'}. {_ALIKE}"
                )
            if not said and time.monotonic() - started > _SOON:
                said = True
                say(
                    f"process {self.index} waits for {whom} {subject}: has every process called it, with arguments of "
                    "the same shapes?"
                )

    def _check_others(self) -> None:
        failed = self._failed()
        if failed is not None:
            raise PeerError(_of_peer(failed))

    def _done(self) -> dict[int, dict[int, int]]:
        """The processes that have come to the ends of their scripts, and the calls of each channel that they made."""
        try:
            entries = self._client.key_value_dir_get(f"{_DONE}/")
        except jax.errors.JaxRuntimeError:
            return {}
        said = ((key.rpartition("/")[2], text) for key, text in entries)
        return {int(who): {int(n): k for n, k in json.loads(text).items()} for who, text in said if who.isdigit()}

    def _missed(self) -> str:
        """What a call of this process waits for that will never come, since a process that it needs has ended."""
        for process, calls in self._done().items():
            for number, channel in reversed([*enumerate(self._channels)]):  # steps first, then what gathers
                there, needed = calls.get(number, 0), channel.needs(process)
                if needed > there:
                    return (
                        f"process {process} of this job ended after {there} calls of {channel.name}, of which process "
                        f"{self.index} has begun number {needed}. {_ALIKE}"
                    )
        return ""

    def _failed(self) -> Any:
        """The first failure that a process told of, if there is one."""
        try:
            return json.loads(self._client.key_value_try_get(_FAILED))
        except jax.errors.JaxRuntimeError:
            return None

    # Meshes.

    def share(self, meshes: Iterable[jax.sharding.Mesh]) -> None:
        """Meshes of a plan, known to all processes."""
        self._meshes.update(meshes)

    def shares(self, sharding: jax.sharding.Sharding) -> bool:
        """Whether an array lies on a mesh of a plan: then it does so for all processes, whosever devices these are."""
        return isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh in self._meshes

    # Failures.

    def keep_lifeline(self, coordinator: Coordinator | None, host: str) -> None:
        """Have the others hear when this process is lost, and hear it of them. All processes come here.

        `coordinator`: on process 0, what it has started; `host`: where that runs.
        """
        self._coordinator_program = coordinator
        if coordinator is not None:
            os.register_at_fork(after_in_child=coordinator.let_go)
            self._client.key_value_set(_LIFELINES, str(coordinator.port))
        port = int(self._wait_for(_LIFELINES, "to start the coordinator", "process 0", needs=[0]))
        self._lifeline = Lifeline(
            self._client, self.index, self.count, (host, port), self._seen, self._lose,
            lambda said: say(f"process {self.index} waits, and {said}"),
        )  # fmt: skip

    def _seen(self) -> Seen:
        """Where this process is."""
        line = last_seen.line_of(self._thread) or "an unknown line"
        waits = self._busyness.is_idle() or last_seen.waits_for_others(self._thread)
        self._busy += not waits
        progress = self._busy + sum(channel.steps for channel in self._channels)
        for channel in self._channels:
            if (instruction := channel.instruction) is not None:
                text = f"in call {channel.steps} of {channel.name}, {channel.describe(instruction)}, at {line}"
                return Seen(text, waits, True, progress)
        activity = last_seen.activity_of(self._thread)
        return Seen(f"{activity}, at {line}" if activity else f"at {line}", waits, False, progress)

    def _lose(self, why: str, code: int | None) -> None:
        """End, since a process is lost or nothing moves; a process that has said why it ends is not lost.

        `code`: None where the coordination service is gone, which need not be asked then.
        """
        failed = None if code is None else self._failed()
        self._stop(why if failed is None else _of_peer(failed), (code or LOST_CODE) if failed is None else 1)

    def fail(self, error: BaseException, code: int = 1) -> NoReturn:
        """End this process, and tell the others what ended it; of several that fail the first is heard."""
        if is_of_peer(error):
            # That one is about to say so. If this one were gone before, that one would take it for lost, and say that.
            with self._stopping:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._client.blocking_key_value_get(_FAILED, int(1000 * _PATIENCE))
                self._stop(str(error), code)
        failed = self._failed()
        if failed is not None:  # this error may follow from that failure, as one of a lost connection does
            self._stop(_of_peer(failed), code)
        self._tell("".join(traceback.format_exception_only(type(error), error)).strip())
        self._stop("", code)

    def _tell(self, error: str) -> None:
        """The others, why this process fails."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another failed before
            self._client.key_value_set(_FAILED, json.dumps({"process": self.index, "error": error}))

    def _stop(self, reason: str, code: int) -> NoReturn:
        """End at once: at exit, JAX would wait for the other processes."""
        with self._stopping:  # for ever: this process says one thing, and ends
            if reason:
                say(f"stopped, since {reason}")
            sys.stdout.flush()
            sys.stderr.flush()
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_set(f"{_HEARD}/{self.index}", "")
            if (
                not self.index and self._lifeline is None
            ):  # which hosts the coordination service: JAX aborts those whose coordinator is gone
                until = time.monotonic() + _PATIENCE
                for other in range(1, self.count):
                    left = max(1, int(1000 * (until - time.monotonic())))
                    with contextlib.suppress(jax.errors.JaxRuntimeError):
                        self._client.blocking_key_value_get(f"{_HEARD}/{other}", left)
                time.sleep(_PARTING)
            os._exit(code)

    def _watch(self) -> None:
        """Tell others when this process fails, and end it when another has, whatever it waits for then."""
        said = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if isinstance(error, RuntimeError) and "non-addressable" in str(error):  # JAX's advice would wait for ever
                error.add_note("autopar.gather(tree), which all processes have to call, gives each the whole arrays.")
            elif self._lifeline is not None and _is_of_devices(error):
                time.sleep(_FOLLOWS)  # it may follow from the loss of another process, of which one hears now
            if self._failed() is None and not is_of_peer(error):
                said(kind, error, trace)
            self.fail(error)

        sys.excepthook = hook
        ended = threading.Event()
        watcher = threading.Thread(
            target=self._watch_others, args=(ended,), name="autopar: other processes", daemon=True
        )
        watcher.start()

        @atexit.register
        def end() -> None:
            """Not before all have come to their ends: one that fails till then is heard."""
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                try:
                    self._settle()
                    self._needs_nobody = True
                    self._meet(_DONE, json.dumps({n: channel.steps for n, channel in enumerate(self._channels)}))
                    self._disconnect()
                    self._meet(_PARTED)
                    if self._lifeline is not None:
                        self._lifeline.part()
                except PeerError as error:
                    self._stop(str(error), 1)
            self._disconnect()  # where there is no coordination service any more, too
            if self._coordinator_program is not None:
                self._coordinator_program.let_go()
            ended.set()
            watcher.join()

    def _meet(self, where: str, mine: str = "") -> None:
        """All come here before one goes on; `mine`: what the others can read of this one then."""
        self._client.key_value_set(f"{where}/{self.index}", mine)
        for other in range(1, self.count) if not self.index else ():
            self._wait_for(f"{where}/{other}")
        if not self.index:
            self._client.key_value_set(f"{where}/all", "")
        self._wait_for(f"{where}/all")

    def _watch_others(self, ended: threading.Event) -> None:
        while not ended.wait(_POLL):
            failed = self._failed()
            if failed is not None and failed["process"] != self.index:
                self._stop(_of_peer(failed), 1)
            if not self._needs_nobody and (missed := self._missed()):
                self._tell(missed)
                self._stop(missed, 1)

    # Arrays.

    def channel(self, name: str, members: Collection[int]) -> Channel:
        """Of one executable; all processes make theirs in the same order. See `Channel`."""
        made = Channel(len(self._channels), name, members)
        self._channels.append(made)
        return made

    def offer(self, uuid: int, arrays: Sequence[jax.Array]) -> None:
        """Let another process pull these arrays, each of one device. Never waits; the arrays may not be given away."""
        sent = [plain(x) for x in arrays if x.size]  # what is empty would never arrive (jaxlib 0.10.2)
        if sent:
            self._server.await_pull(uuid, sent)

    def pull(self, uuid: int, sender: int, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Arrays that the sender offers under this number. Never waits: they arrive as results of programs do."""
        if sender not in self._connections:
            address = self._wait_for(f"{_PREFIX}/address/{sender}", "to be reached", needs=[sender])
            self._connections[sender] = self._server.connect(address)
        wanted = [plain_struct(x) for x in arrays]
        sent = iter(self._connections[sender].pull(uuid, [x for x in wanted if x.size]))
        pulled = [next(sent) if x.size else jnp.zeros(x.shape, x.dtype, device=x.sharding) for x in wanted]
        return [as_wanted(struct, x) for struct, x in zip(arrays, pulled, strict=True)]

    @functools.cached_property
    def _server(self) -> Any:
        here = f"[{ip}]:0" if ":" in (ip := address_towards(self._coordinator)) else f"{ip}:0"
        transport = TRANSPORTS.get(jax.default_backend(), DEFAULT_TRANSPORT)
        server = transfer.start_transfer_server(
            jax.local_devices()[0].client, here, [here] * transport.connections, use_raw_buffers=transport.raw_buffers
        )
        self._client.key_value_set(f"{_PREFIX}/address/{self.index}", server.address())
        return server

    def _settle(self) -> None:
        """Wait for what this process's devices have been given to do: some of it may wait for arrays of others."""
        if "_server" not in self.__dict__:
            return
        with contextlib.suppress(RuntimeError):  # a step that failed has been told of
            # Those that nobody holds any more are waited for, too: a GPU runs programs in the order of their launch.
            last = [jnp.zeros((), device=device) for device in jax.local_devices()]
            jax.block_until_ready([last, jax.live_arrays()])

    def _disconnect(self) -> None:
        """Close what arrays go over. Once both ends have, and nothing is under way, the threads that serve it end.

        They hold memory of the backend. One that lived on while this process ends would free it when the driver of the
        GPU is gone, at which jaxlib 0.11.2 aborts.
        """
        self._connections.clear()
        self.__dict__.pop("_server", None)

    def connect(self) -> None:
        """Others can pull from this process from now on."""
        _ = self._server


def is_of_peer(error: BaseException) -> bool:
    """Whether another process, where the error arose, says all about it."""
    return isinstance(error, PeerError) or getattr(error, "of_peer", False)


def _is_of_devices(error: BaseException | None) -> bool:
    """Whether it is, or follows from, an error of a program or a transfer."""
    return error is not None and (isinstance(error, jax.errors.JaxRuntimeError) or _is_of_devices(error.__cause__))


def _differences(texts: Sequence[str]) -> str:
    """Who differs from process 0 in what; empty if nobody does."""
    said = [json.loads(text) for text in texts]
    mine = said[0]
    for name in dict.fromkeys(name for each in said for name in each):
        differing = [p for p, other in enumerate(said) if other.get(name) != mine.get(name)]
        if differing:
            first = differing[0]
            who = f"process {first}" if len(differing) == 1 else f"{len(differing)} others, {first} the first of them"
            theirs, ours = (each.get(name, "not given") for each in (said[first], mine))
            return f"{name} is {ours} on process 0, but {theirs} on {who}"
    return ""


def _of_peer(failed: Mapping[str, Any]) -> str:
    return f"process {failed['process']} of this job failed: {failed['error']}"


def say(text: str) -> None:
    """On stderr, whole."""
    sys.stderr.write(f"autopar: {text}\n")
    sys.stderr.flush()


@functools.cache
def _of_job(client: Any) -> Processes:
    return Processes(_coordination())


def _coordination() -> Any:
    from jax._src import distributed  # JAX has no public name for its coordination service's client

    return distributed.global_state


def this_job() -> Processes | None:
    """The processes of this job; None where there is one alone."""
    state = _coordination()
    return None if state.client is None or state.num_processes == 1 else _of_job(state.client)
