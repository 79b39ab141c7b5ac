"""Steps that are watched for becoming slower: `watch`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from autopar.api import Parallelized
from autopar.errors import ArgumentError
from autopar.executable import Executable
from autopar.runtime.pace import Pace, Slowdown
from autopar.runtime.processes import this_job
from autopar.runtime.spent import Since, wait_for
from autopar.wrapped import CountedStep, WrappedStep, check_step

_FIRST = 5  # steps after which it is known how many there are between two looks


class Watched(CountedStep):
    """A step whose pace is watched: see `watch`."""

    def __init__(
        self, step: Parallelized | WrappedStep, slower: float, every: float, to: Callable[[Slowdown], None], start: int
    ) -> None:
        super().__init__(step, start)
        self._slower, self._every, self._to = slower, every, to
        self._pace: Pace | None = None
        self._since, self._next, self._is_first = Since.now(start), start, True

    def _begin(self, executable: Executable | None) -> None:
        self._pace, self._is_first = None, True
        if executable is not None:
            self._pace = Pace(executable.graph.name, executable._devices, self._slower, this_job())
        self._since, self._next = Since.now(self._number), self._number + _FIRST

    def _count(self, executable: Executable, result: Any) -> None:
        if self._pace is None or self._number < self._next:
            return
        wait_for(result)
        self._look(self._pace, Since.now(self._number))
        self._since = Since.now(self._number)

    def _look(self, pace: Pace, now: Since) -> None:
        seconds, whole = pace.agreed(self._since.step_seconds(now), self._since.whole_seconds(now))
        slowdown = None if self._is_first else pace.look(self._number, seconds)
        self._is_first = False
        self._next = self._number + max(1, round(self._every / whole))
        job = this_job()
        if slowdown is not None and (job is None or job.index == 0):
            self._to(slowdown)


def watch(
    step: Parallelized | WrappedStep, *, slower: float = 1.2, every: float = 60.0,
    to: Callable[[Slowdown], None] | None = None, start: int = 0,
) -> Watched:  # fmt: skip
    """A step that says when it has become slower, and which device or link between devices has.

    Every so many seconds it is looked at what a step takes, without the time in `step.batches(..)` and in checkpoints.
    At the first look small probes measure the products and the memory of each device and the links between
    neighbours, which takes some seconds. When two looks, one after the other, find the step slower than it was at its
    best, they are measured again, and what is slower than before, or than the others of its kind, is named. A look
    waits for the step to end. In a job of several processes all of them have to make the same calls.

    Args:
      slower: so many times as long is slower.
      every: seconds between looks.
      to: called with each slowdown, in a job on process 0. Default: it is said on stderr.
      start: the steps that were made before, as of a checkpoint.

    Raises:
      PlanError: `step` is a plain function.
      ArgumentError: `slower` is not above 1, or `every` not above 0.
    """
    check_step("watch", step)
    for name, number, least in (("slower", slower, 1), ("every", every, 0)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > least:
            raise ArgumentError(f"watch({name}={number!r}): pass a number above {least}.")
    return Watched(step, slower, every, to or say, start)


def say(slowdown: Slowdown) -> None:
    """On stderr."""
    print(f"autopar: {slowdown}", file=sys.stderr, flush=True)  # noqa: T201
