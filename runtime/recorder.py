"""When the instructions of a step begin and end, as this process sees it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from autopar.ir.instructions import Run
from autopar.runtime.random_keys import is_key, plain


@dataclasses.dataclass(frozen=True)
class Span:
    """An instruction of a step, in seconds since the step began."""

    stage: int  # whose program it is, or which sends
    to: int | None  # the stage that receives; None: it is a program
    phase: str  # of a program; "" of a copy
    run: int  # of its program in the step; of copies between these stages
    start: float
    end: float


class Recorder:
    """What a worker plays in one step. It is asked to say what it plays; see `Worker.record`.

    Where programs are not waited for, one thread for each stage waits for what they make. Results may be given away to
    the next program before, so it waits for one element of each, which is copied out right after the program.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._launched: list[tuple[Any, float, float | concurrent.futures.Future[float]]] = []
        self._pools: dict[Any, concurrent.futures.ThreadPoolExecutor] = {}
        self._current: tuple[Any, float] = (None, 0.0)

    @property
    def instruction(self) -> Any:
        """What is played now."""
        return self._current[0]

    @instruction.setter
    def instruction(self, instruction: Any) -> None:
        self._current = instruction, time.perf_counter()

    def begin(self) -> None:
        """A step begins."""
        self._launched, self._began = [], time.perf_counter()

    def ran(self, outputs: Sequence[jax.Array], is_over: bool) -> None:
        """The program that is played now was launched; `is_over`: it has ended, too."""
        instruction, launched = self._current
        end: float | concurrent.futures.Future[float] = time.perf_counter()
        if not is_over:
            end = self._pool(instruction.stage).submit(_when_there, _marked(outputs))
        self._launched.append((instruction, launched, end))

    def brought(self, stage: int, to: int, arrays: Sequence[Any]) -> None:
        """The copies that are played now were launched; `arrays`: where they go to."""
        here = [x for x in arrays if isinstance(x, jax.Array) and x.addressable_shards]
        if here:
            end = self._pool((stage, to)).submit(_when_there, here)
            self._launched.append(((stage, to), self._current[1], end))

    def ended(self) -> list[Span]:
        """When all that the step has launched is over."""
        spans: list[Span] = []
        free: dict[int, float] = {}  # by stage: when its devices have ended what they did, and what they need is there
        runs: dict[Any, int] = {}
        for what, launched, later in self._launched:
            end = later if isinstance(later, float) else later.result()
            key = (what.stage, what.program) if isinstance(what, Run) else what
            number = runs[key] = runs.get(key, -1) + 1
            if isinstance(what, Run):
                start, stage, to, phase = max(launched, free.get(what.stage, 0.0)), what.stage, None, what.phase.value
                free[stage] = end
            else:
                (stage, to), start, phase = what, launched, ""
                free[to] = max(free.get(to, 0.0), end)
            begin, end = min(start, end) - self._began, end - self._began
            spans.append(Span(stage, to, phase, number, begin, end))
        return spans

    def close(self) -> None:
        """No step will be recorded any more."""
        for pool in self._pools.values():
            pool.shutdown()

    def _pool(self, key: Any) -> concurrent.futures.ThreadPoolExecutor:
        if key not in self._pools:
            self._pools[key] = concurrent.futures.ThreadPoolExecutor(1, "autopar: profile")
        return self._pools[key]


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
