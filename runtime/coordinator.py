"""The program that hosts JAX's coordination service of a job, and hears which of the job's processes live.

    coordinator.py ADDRESS PROCESSES HEARTBEAT

Process 0 starts it, and it outlives process 0: where JAX's coordinator is gone, JAX aborts all others without a word of
ours. Each process keeps a connection open (`Lifeline` in `liveness`). The system closes that of a process that ends,
however it ends, and what is left is told within milliseconds. Of one that is stopped JAX's own heartbeats tell.

It imports neither JAX nor autopar, so that it is there soon and takes little memory. What it says is JSON, one object a
line.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

_LOOK = 1.0  # seconds between looks at whether anything moves
_LONGER = 3.0  # a wait is told of if it is so many times as long as those before that ended
_HANGS = 10.0  # times that, after which a job of which every process waits is ended
_LEAVING = 15.0  # seconds that the others have to end once process 0 has
_BROKEN = (OSError, ValueError, LookupError, TypeError)  # connections that are reset, or somebody else's
_MOST = 8  # places that are named


@dataclasses.dataclass
class _Member:
    """A process of the job."""

    number: int
    where: str  # its host and process id
    writer: asyncio.StreamWriter
    seen: str = "before its first report"
    waits: bool = False  # by what it said last
    plays: bool = False  # it is in an instruction of a step
    since: float = dataclasses.field(default_factory=time.monotonic)


class Hub:
    """What the processes of a job say of themselves, and what all hear of one that is lost."""

    def __init__(self, count: int, timeout: float) -> None:
        """`timeout`: seconds without a sign of life after which a process is lost, and waits are told of."""
        self._count, self._timeout = count, timeout
        self._members: dict[int, _Member] = {}
        self._parted: set[int] = set()
        self._verdict: dict[str, Any] | None = None
        self._longest, self._told = 0.0, False  # seconds of the longest wait that ended; whether this one was told of
        self.is_empty = asyncio.Event()
        self.is_empty.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One process, from when it joins to when it ends."""
        member = None
        with contextlib.suppress(*_BROKEN):
            hello = json.loads(await reader.readline())
            member = _Member(int(hello["process"]), str(hello["where"]), writer)
        if member is None or not 0 <= member.number < self._count or member.number in self._members:
            writer.close()
            return
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._members[member.number] = member
        self.is_empty.clear()
        if self._verdict is not None:
            self._send(member, self._verdict)
        with contextlib.suppress(*_BROKEN):
            async for line in reader:
                self._hear(member, json.loads(line))
        del self._members[member.number]
        if member.number not in self._parted:
            self._lose(member.number, member, "is gone: it crashed or was killed, or its host is lost")
        writer.close()
        if not self._members:
            self.is_empty.set()

    def _hear(self, member: _Member, said: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if "seen" in said:
            if any(each.waits for each in self._members.values()):
                self._longest = max(self._longest, now - self._last_moved())
            self._told = False
            member.seen, member.waits, member.plays = str(said["seen"]), bool(said["waits"]), bool(said["plays"])
            member.since = now
        for other in said.get("silent", ()):
            if other not in self._parted:
                silent = f"does not answer (heartbeat timeout {self._timeout:g} s): it is stopped, or cannot be reached"
                self._lose(int(other), self._members.get(other), silent)
        if said.get("parts"):
            self._parted.add(member.number)

    def _lose(self, number: int, member: _Member | None, how: str) -> None:
        where, seen = ("", "before it connected") if member is None else (f" ({member.where})", member.seen)
        self._end(number, f"process {number} of this job{where} {how}. It was last seen {seen}")

    def _end(self, process: int | None, why: str) -> None:
        """The first verdict holds: what follows from it is not told."""
        if self._verdict is None:
            self._verdict = {"lost": process, "why": why}  # None: nobody is lost, and nothing moves
            for each in self._members.values():
                self._send(each, self._verdict)

    def _send(self, member: _Member, said: Mapping[str, Any]) -> None:
        member.writer.write(json.dumps(said).encode() + b"\n")

    def _last_moved(self) -> float:
        return max((member.since for member in self._members.values()), default=time.monotonic())

    async def watch(self) -> None:
        """Tell of processes that wait for others which do not come, or for devices that do not end."""
        while True:
            await asyncio.sleep(_LOOK)
            waiting = [member for member in self._members.values() if member.waits]
            if not waiting or self._parted:
                continue
            playing = [member for member in waiting if member.plays]
            still = time.monotonic() - self._last_moved()
            if still > _HANGS * max(self._timeout, self._longest) and len(playing) == self._count:
                self._end(None, f"no process of this job has moved for {still:.0f} s. {self._places()}")
            elif still > max(self._timeout, _LONGER * self._longest) and not self._told:
                self._told = True
                for member in waiting:
                    self._send(member, {"waits": f"nothing has moved for {still:.0f} s. {self._places()}"})

    def _places(self) -> str:
        """Who was last seen where; those that are in no step first."""
        at: dict[tuple[bool, str], list[int]] = {}
        for number in range(self._count):
            member = self._members.get(number)
            where = (False, "not connected yet") if member is None else (member.plays, member.seen)
            at.setdefault(where, []).append(number)
        said = []
        for (_, seen), numbers in sorted(at.items())[:_MOST]:
            said.append(f"{_named(numbers)} {'is' if len(numbers) == 1 else 'are'} {seen}")
        return "; ".join(said) + (f"; and {len(at) - _MOST} more places." if len(at) > _MOST else ".")


def _named(numbers: Sequence[int]) -> str:
    """As "processes 0, 2-5"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join('-'.join(map(str, span)) for span in spans)}"


async def _host(address: str, count: int, heartbeat: int) -> None:
    from jaxlib import _jax  # JAX has no public name for its coordination service

    # Recoverable: one that is lost is told of by the hub; JAX would abort the others.
    _check_free(address)
    service = _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=heartbeat, recoverable=True)
    hub = Hub(count, heartbeat)
    listening = _listening(count)
    server = await asyncio.start_server(hub.serve, sock=listening)
    _answer({"port": listening.getsockname()[1]})
    watching = asyncio.create_task(hub.watch())
    parent = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(parent), sys.stdin)
    await parent.read()  # until process 0 has ended
    with contextlib.suppress(TimeoutError):  # one may be stopped, and never end
        await asyncio.wait_for(hub.is_empty.wait(), _LEAVING)
    watching.cancel()
    server.close()
    service.shutdown()


def _listening(count: int) -> socket.socket:
    """On a port that the system chooses, by IPv6 and IPv4, or by IPv4 where there is no other."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=count)
    except (OSError, ValueError):
        return socket.create_server(("", 0), backlog=count)


def _check_free(address: str) -> None:
    """Raise OSError where something listens there: gRPC would share the port with it, and clients get to either.

    What else is wrong with an address gRPC says itself; on a host without IPv6 it makes do with IPv4.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise


def _answer(said: Mapping[str, Any]) -> None:
    """To process 0, once. Whoever reads what it prints does not wait for this program."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)


def main() -> None:
    """Run until process 0 and all that are connected have ended."""
    address, count, heartbeat = sys.argv[1:]
    try:
        asyncio.run(_host(address, int(count), int(heartbeat)))
    except Exception as error:
        _answer({"error": str(error)})


if __name__ == "__main__":
    main()
