"""Host time that a program spends on its steps, and on other things."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

_OTHERS = ("input", "checkpoints")


class _Spent(threading.local):
    """Of each thread: what one that reads batches ahead waits for is no time of the steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)


_SPENT = _Spent()


@contextlib.contextmanager
def spent_on(what: str) -> Iterator[None]:
    """What is done in here takes time from the steps: "input" or "checkpoints". Also a decorator."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _SPENT.seconds[what] += time.perf_counter() - began


def seconds_spent() -> Mapping[str, float]:
    """Since the program began, in this thread, by what they were spent on."""
    return dict(_SPENT.seconds)


@dataclasses.dataclass(frozen=True)
class Since:
    """When a span of steps began."""

    number: int  # of the step before
    time: float
    spent: Mapping[str, float]

    @staticmethod
    def now(number: int) -> Since:
        """From now on."""
        return Since(number, time.perf_counter(), seconds_spent())

    def spent_per_step(self, now: Since) -> dict[str, float]:
        """Seconds of a step until now that were spent on other things, by what on."""
        steps = now.number - self.number
        return {what: (now.spent.get(what, 0.0) - self.spent.get(what, 0.0)) / steps for what in _OTHERS}

    def whole_seconds(self, now: Since) -> float:
        """Seconds of a step until now, with all that the program does."""
        return (now.time - self.time) / (now.number - self.number)

    def step_seconds(self, now: Since) -> float:
        """.. without what was spent on other things."""
        return max(0.0, self.whole_seconds(now) - sum(self.spent_per_step(now).values()))


def wait_for(results: Any) -> None:
    """Until a step has ended, as far as this process has a part in its results and they are not given away."""
    arrays = (x for x in jax.tree.leaves(results) if isinstance(x, jax.Array) and not x.is_deleted())
    jax.block_until_ready([x for x in arrays if x.addressable_shards])
