"""When the instructions of a step begin and end, as this process sees it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from autopar.ir.instructions import Copy, Instruction, Register, Run
from autopar.runtime.random_keys import is_key, plain


class Event(NamedTuple):
    """An instruction that was launched and has ended, in seconds since the step began."""

    position: int  # among the instructions of all stages
    stage: int  # whose program it is, or which sends
    to: int | None  # the stage that receives; None: it is a program
    phase: str  # of a program; "" of a copy
    launched: float
    ended: float
    is_waited_for: bool  # nothing else is launched before it has ended
    reads: Sequence[Register]
    writes: Sequence[Register]


class Span(NamedTuple):
    """An instruction while it ran, in seconds since the step began."""

    stage: int
    to: int | None
    phase: str
    start: float
    end: float


class Recorder:
    """What a worker plays in one step. It is asked to say what it plays; see `Worker.recorder`.

    Where programs are not waited for, one thread for each group of devices waits for what they make. Results may be
    given away to the next program before, so it waits for one element of each, which is copied out right after the
    program.
    """

    def __init__(self, instructions: Sequence[Instruction], group_of: Mapping[int, int], channel: Any = None) -> None:
        """`group_of`: of stages, those that share devices have one; `channel`: is told what is played, too."""
        self._runs = {id(i): k for k, i in enumerate(instructions) if isinstance(i, Run)}
        self._copies = {i.target: k for k, i in enumerate(instructions) if isinstance(i, Copy)}
        self._group_of, self._channel = group_of, channel
        self._began = 0.0
        self._launched: list[tuple[Event, concurrent.futures.Future[float] | None]] = []
        self._pools: dict[Hashable, concurrent.futures.ThreadPoolExecutor] = {}
        self._current: tuple[Any, float] = (None, 0.0)

    @property
    def instruction(self) -> Any:
        """What is played now."""
        return self._current[0]

    @instruction.setter
    def instruction(self, instruction: Any) -> None:
        self._current = instruction, time.perf_counter()
        if self._channel is not None:
            self._channel.instruction = instruction

    def begin(self) -> None:
        """A step begins."""
        self._launched, self._began = [], time.perf_counter()

    def ran(self, outputs: Sequence[jax.Array], is_over: bool) -> None:
        """The program that is played now was launched; `is_over`: it has ended, too."""
        run, launched = self._current
        now, later = time.perf_counter(), None
        if not is_over:
            later = self._pool(self._group_of[run.stage]).submit(_when_there, _marked(outputs))
        event = Event(
            self._runs[id(run)], run.stage, None, run.phase.value, launched, now, is_over, run.inputs, run.outputs
        )
        self._launched.append((event, later))

    def brought(
        self, stage: int, to: int, registers: Iterable[tuple[Register, Register]], arrays: Sequence[Any]
    ) -> None:
        """The copies that are played now were launched, from registers to registers; `arrays`: what arrives."""
        here = [x for x in arrays if isinstance(x, jax.Array) and x.addressable_shards]
        if here:
            later = self._pool((stage, to)).submit(_when_there, here)
            reads, writes = zip(*registers, strict=True)
            position = min(self._copies[register] for register in writes)
            event = Event(position, stage, to, "", self._current[1], 0.0, False, reads, writes)
            self._launched.append((event, later))

    def ended(self) -> list[Event]:
        """What the step has launched, when all of it is over."""
        events = []
        for event, later in self._launched:
            ended = event.ended if later is None else later.result()
            events.append(event._replace(launched=event.launched - self._began, ended=ended - self._began))
        return events

    def close(self) -> None:
        """No step will be recorded any more."""
        for pool in self._pools.values():
            pool.shutdown()

    def _pool(self, key: Hashable) -> concurrent.futures.ThreadPoolExecutor:
        if key not in self._pools:
            self._pools[key] = concurrent.futures.ThreadPoolExecutor(1, "autopar: profile")
        return self._pools[key]


def spans_of(events: Iterable[Event], group_of: Mapping[int, int]) -> list[Span]:
    """When they ran, in the order of the instructions of all stages.

    A program begins once it is launched, its devices are free and what it reads is there; a copy likewise, of which any
    number may be under way.
    """
    spans: list[Span] = []
    free: dict[int, float] = {}
    ready: dict[Register, float] = {}
    for event in sorted(events, key=lambda event: event.position):
        start = max([event.launched, *(ready.get(register, 0.0) for register in event.reads)])
        if event.to is None:
            group = group_of[event.stage]
            start = max(start, free.get(group, 0.0))
            free[group] = max(free.get(group, 0.0), event.ended)
        ready.update(dict.fromkeys(event.writes, event.ended))
        spans.append(Span(event.stage, event.to, event.phase, min(start, event.ended), event.ended))
    return spans


@jax.jit
def _first(x: Any) -> Any:
    return x.ravel()[:1]


def _marked(outputs: Sequence[jax.Array]) -> list[jax.Array]:
    """An element of the last result, on the first device of this process that has a part of it."""
    if not outputs:
        return []
    last = outputs[-1].addressable_data(0)
    return [_first(plain(last) if is_key(last) else last)]


def _when_there(arrays: Sequence[jax.Array]) -> float:
    with contextlib.suppress(RuntimeError):  # given away meanwhile: it was there
        jax.block_until_ready(arrays)
    return time.perf_counter()
