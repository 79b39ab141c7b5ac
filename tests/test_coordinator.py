"""What the coordinator tells processes of one another."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from autopar.errors import ArgumentError
from autopar.runtime import coordinator, liveness
from autopar.runtime.coordinator import Hub
from tests.processes.start import free_port


class _Process:
    """A connection such as processes keep."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def say(self, **what: Any) -> None:
        self._writer.write(json.dumps(what).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        line = await asyncio.wait_for(self._reader.readline(), 20)
        said: dict[str, Any] = json.loads(line)
        return said

    async def end(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def _with_processes(
    connected: int, timeout: float, story: Callable[[Hub, list[_Process]], Awaitable[None]], count: int | None = None
) -> None:
    """Of a hub to which so many processes are connected, of a job of so many, or `count`."""

    async def run() -> None:
        hub = Hub(count or connected, timeout)
        server = await asyncio.start_server(hub.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        processes = [_Process(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(connected)]
        for index, process in enumerate(processes):
            process.say(process=index, where=f"process id {index} on host")
            process.say(seen=f"at line {index}", waits=False, plays=False)
        watching = asyncio.create_task(hub.watch())
        await story(hub, processes)
        watching.cancel()
        for process in processes:
            await process.end()
        await asyncio.wait_for(hub.is_empty.wait(), 20)
        server.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator, "_LOOK", 0.01)
        asyncio.run(run())


async def _heard(hub: Hub, holds: Callable[[Hub], bool]) -> None:
    """What was sent has arrived."""
    async with asyncio.timeout(20):
        while not holds(hub):
            await asyncio.sleep(0.01)


def _sees(texts: dict[int, str]) -> Callable[[Hub], bool]:
    return lambda hub: {i: member.seen for i, member in hub._members.items()}.items() >= texts.items()


def test_all_others_hear_the_first_that_is_lost() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        await _heard(hub, _sees(dict(enumerate(f"at line {i}" for i in range(4)))))
        await processes[2].end()
        for index in (0, 1, 3):
            assert await processes[index].hear() == {
                "lost": 2,
                "why": "process 2 of this job (process id 2 on host) is gone: it crashed or was killed, or its host is "
                "lost. It was last seen at line 2",
            }
        await processes[3].end()  # what follows from that is told to nobody
        await _heard(hub, lambda hub: len(hub._members) == 2)
        processes[0].say(silent=[1])
        processes[0].say(seen="at the end", waits=False, plays=False)
        await _heard(hub, _sees({0: "at the end"}))
        assert not processes[1]._reader._buffer  # type: ignore[attr-defined]

    _with_processes(4, 60, story)


def test_one_that_does_not_answer_is_named_and_hears_it_itself() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        await _heard(hub, _sees({1: "at line 1"}))
        processes[0].say(silent=[1])
        for process in processes:
            said = await process.hear()
            assert said["lost"] == 1
            assert "does not answer (heartbeat timeout 60 s): it is stopped, or cannot be reached" in said["why"]

    _with_processes(3, 60, story)


def test_one_that_says_goodbye_is_not_lost() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        processes[0].say(parts=True)
        await processes[0].end()
        await _heard(hub, lambda hub: len(hub._members) == 1)
        processes[1].say(silent=[0])  # JAX no longer hears it either
        processes[1].say(seen="later", waits=False, plays=False)
        await _heard(hub, _sees({1: "later"}))
        assert hub._verdict is None

    _with_processes(2, 60, story)


def test_those_that_wait_hear_who_is_where() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        for index in (0, 1, 2, 4):
            processes[index].say(seen="in call 3 of step", waits=True, plays=True)
        for index in (0, 1, 2, 4):
            said = (await processes[index].hear())["waits"]
            assert said.endswith("process 3 is at line 3; processes 0-2, 4 are in call 3 of step.")
        await asyncio.sleep(0.3)  # told once
        processes[3].say(seen="in call 3 of step", waits=True, plays=True)
        await _heard(hub, _sees({3: "in call 3 of step"}))
        assert not hub._told and hub._verdict is None
        assert not processes[3]._reader._buffer  # type: ignore[attr-defined]

    _with_processes(5, 0.2, story)


def test_a_job_in_which_nothing_ever_moves_is_ended() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        for process in processes:
            process.say(seen="in call 3 of step", waits=True, plays=True)
        for process in processes:
            assert "waits" in await process.hear()
            said = await process.hear()
            assert said["lost"] is None
            assert said["why"].startswith("no process of this job has moved for")
            assert said["why"].endswith("processes 0-1 are in call 3 of step.")

    _with_processes(2, 0.1, story)


def test_a_job_that_waits_outside_of_steps_is_not_ended() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        processes[0].say(seen="in call 3 of step", waits=True, plays=True)
        processes[1].say(seen="at line 7", waits=True, plays=False)
        for process in processes:
            assert "waits" in await process.hear()
        await asyncio.sleep(1.5)
        assert hub._verdict is None

    _with_processes(2, 0.1, story)


def test_what_goes_on_at_the_same_place_moves() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        for progress in range(10):
            for process in processes:
                process.say(seen="at line 7", waits=True, plays=True, progress=progress)
            await asyncio.sleep(0.1)
        assert not hub._told and hub._verdict is None

    _with_processes(2, 0.5, story)


def test_one_that_is_lost_before_it_connects_is_named() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        await _heard(hub, _sees({0: "at line 0", 1: "at line 1"}))
        processes[0].say(silent=[2])
        said = await processes[1].hear()
        assert said["lost"] == 2 and said["why"].startswith("process 2 of this job does not answer")
        assert said["why"].endswith("It was last seen before it connected")

    _with_processes(2, 60, story, count=3)


def test_one_that_has_not_connected_is_told_of() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        processes[0].say(seen="in call 1 of step", waits=True, plays=True)
        assert (await processes[0].hear())["waits"].endswith(
            "process 2 is not connected yet; process 0 is in call 1 of step."
        )

    _with_processes(2, 0.1, story, count=3)


def test_others_that_connect_disturb_nobody() -> None:
    async def story(hub: Hub, processes: list[_Process]) -> None:
        server = processes[0]._writer.get_extra_info("peername")
        for said in (b"GET / HTTP/1.0\r\n\r\n", b'{"process": 1}\n', b'{"process": 1, "where": "elsewhere"}\n', b""):
            reader, writer = await asyncio.open_connection(*server)
            writer.write(said)
            writer.write_eof()
            assert not await reader.read()
            writer.close()
        processes[0].say(seen="later", waits=False, plays=False)
        await _heard(hub, _sees({0: "later"}))
        assert hub._verdict is None

    _with_processes(2, 60, story)


def test_it_starts_without_jax_and_ends_with_process_0() -> None:
    started = liveness.start_coordinator("127.0.0.1:0", 2, 60)
    assert started.port > 0
    started.let_go()
    assert started.program.wait(60) == 0


def test_where_it_cannot_listen_says_how_it_is_told() -> None:
    with pytest.raises(Exception, match=r"cannot be started at 192\.0\.2\.1:1: .* JAX_COORDINATOR_ADDRESS has to name"):
        liveness.start_coordinator("192.0.2.1:1", 2, 60)


def test_a_second_one_is_refused_where_one_listens() -> None:
    """gRPC would share the port, and each process would get to either."""
    address = f"[::]:{free_port()}"
    first = liveness.start_coordinator(address, 2, 60)
    with pytest.raises(ArgumentError, match=r"cannot be started at \[::\]:\d+: .*in use"):
        liveness.start_coordinator(address, 2, 60)
    first.let_go()
    assert first.program.wait(60) == 0


@pytest.mark.slow
def test_it_ends_when_process_0_has_though_one_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    started = liveness.start_coordinator(f"[::]:{free_port()}", 2, 60)
    with socket.create_connection(("127.0.0.1", started.port)) as stopped:
        stopped.sendall(b'{"process": 1, "where": "here"}\n')
        started.let_go()
        assert started.program.wait(60) == 0


def test_it_imports_neither_jax_nor_autopar() -> None:
    script = "import sys, runpy; runpy.run_path(sys.argv[1]); import jaxlib; print({'jax', 'autopar'} & {*sys.modules})"
    command = [sys.executable, "-P", "-c", script, coordinator.__file__]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "set()"
