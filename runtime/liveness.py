"""Which processes of a job live: each keeps a lifeline to the program that hosts the coordination service."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from autopar.errors import ArgumentError

LOST_CODE = os.EX_UNAVAILABLE  # 69: what a process ends with since another is lost
HANGS_CODE = os.EX_SOFTWARE  # 70: .. since nothing has moved for long, though nobody is lost
HEARTBEAT_TIMEOUT = 60  # seconds
_PARTING = 30.0  # seconds that the last question may take at the end
_REPORT = 1.0  # seconds between reports of where this process is, and looks at who answers
_PROGRAM = pathlib.Path(__file__).with_name("coordinator.py")
_HOST_LOST = "the program that hosts the coordination service, on the host of process 0, is gone"


class Seen(NamedTuple):
    """Where a process is."""

    seen: str
    waits: bool  # for its devices, other processes or anything else: its Python does nothing
    plays: bool  # it is in an instruction of a step
    progress: int  # whatever has changed since the last look


@dataclasses.dataclass(frozen=True, eq=False)
class Coordinator:
    """The program that hosts the coordination service of a job, as process 0 knows it."""

    program: subprocess.Popen[str]
    port: int  # of lifelines

    def let_go(self) -> None:
        """It ends once all processes have."""
        assert self.program.stdin is not None, "it is a pipe"
        self.program.stdin.close()


def start_coordinator(address: str, processes: int, heartbeat: int) -> Coordinator:
    """Start it on this host; `address`: where it listens for JAX, `host:port`.

    Raises:
      ArgumentError: it cannot listen there.
    """
    command = [sys.executable, "-P", os.fspath(_PROGRAM), address, str(processes), str(heartbeat)]
    program = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,  # signals to the group of process 0, such as interrupts, are not for it
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert program.stdout is not None, "it is a pipe"
    with program.stdout as said:
        answer: Mapping[str, Any] = json.loads(said.readline() or '{"error": "it ended without a word"}')
    coordinator = Coordinator(program, answer.get("port", 0))
    if "error" in answer:
        coordinator.let_go()
        program.wait()
        raise ArgumentError(
            f"the coordination service of this job cannot be started at {address}: {answer['error']}. "
            "JAX_COORDINATOR_ADDRESS has to name the host of process 0 and a port that is free there."
        )
    return coordinator


class Lifeline:
    """This process's connection to the coordinator; threads report where it is, and hear of others that are lost."""

    def __init__(
        self, client: Any, index: int, count: int, address: tuple[str, int], seen: Callable[[], Seen],
        lose: Callable[[str, int | None], None], tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Connect.

        Args:
          client: JAX's, of its coordination service.
          index: the number of this process among `count`.
          address: where the coordinator listens for lifelines.
          seen: says where this process is.
          lose: called once, with why and an exit code, when another process is lost or nothing moves; with None when
            the coordinator itself is gone. Ends this process.
          tell: called when nothing has moved for long.
        """
        self._client, self._count = client, count
        self._seen, self._lose, self._tell = seen, lose, tell
        self._socket = socket.create_connection(address)
        self._sending, self._ended = threading.Lock(), threading.Event()
        # Else children would keep it open when this one ends.
        os.register_at_fork(after_in_child=lambda: os.close(self._socket.detach()))
        self._send({"process": index, "where": f"process id {os.getpid()} on {platform.node()}"})
        self._asking = threading.Thread(target=self._ask, name="autopar: who answers", daemon=True)
        self._asking.start()
        for work, name in ((self._listen, "lifeline"), (self._report, "reports")):
            threading.Thread(target=work, name=f"autopar: {name}", daemon=True).start()

    def part(self) -> None:
        """This process ends as it should, and all others have come to their ends, too."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._send({"parts": True})
        # A thread that is in JAX's client when Python ends would abort the process. It waits for those to answer that
        # have not parted yet, which ends when they have.
        self._asking.join(_PARTING)

    def _send(self, said: Mapping[str, Any]) -> None:
        with self._sending:
            self._socket.sendall(json.dumps(said).encode() + b"\n")

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                said = json.loads(line)
                if self._ended.is_set():
                    return
                if "why" in said:
                    self._lose(said["why"], HANGS_CODE if said["lost"] is None else LOST_CODE)
                else:
                    self._tell(said["waits"])
        if not self._ended.is_set():
            self._lose(_HOST_LOST, None)

    def _report(self) -> None:
        last = None
        while not self._ended.wait(_REPORT):
            seen = self._seen()
            if seen != last:
                last = seen
                with contextlib.suppress(OSError):  # the other thread hears of it
                    self._send(seen._asdict())

    def _ask(self) -> None:
        """JAX's heartbeats do not need Python to run: a process that is busy answers."""
        everybody = set(range(self._count))
        while not self._ended.wait(_REPORT):
            # It waits for all that still answer to ask, too. An error: the coordinator is gone, or this process ends.
            with contextlib.suppress(jax.errors.JaxRuntimeError, OSError):
                silent = everybody - self._client.get_live_nodes([*everybody]).keys()
                if silent:
                    self._send({"silent": sorted(silent)})
