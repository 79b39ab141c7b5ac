"""The order of kernels beside collectives: against the rules read literally, and by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from autopar.cost_model.latency_hiding import IssuedKernel, hide_latency

EDGE = 1e-6  # seconds


def by_the_rules(
    order: Sequence[int], before: Sequence[Sequence[int]], seconds: Sequence[float], collective: Sequence[bool]
) -> list[IssuedKernel]:
    """The same with one list of all that could be chosen, gone through each time. Times are in whole nanoseconds."""
    position = {kernel: at for at, kernel in enumerate(order)}
    readers: list[set[int]] = [set() for _ in order]
    deep = [0] * len(order)
    for kernel in order:
        deep[kernel] = max((deep[k] + collective[k] for k in before[kernel]), default=0)
        for k in before[kernel]:
            readers[k].add(kernel)
    now, found = 0.0, list[IssuedKernel]()
    fed_at = [0.0] * len(order)
    free: dict[tuple[int, str], float] = {}  # (kernel, "start" or "end" or "whole") -> when it is due
    under_way = False

    def release(kernel: int) -> None:
        free[kernel, "end" if collective[kernel] else "whole"] = max(now, fed_at[kernel])

    for kernel in order:
        if not readers[kernel]:
            release(kernel)
    while free:
        ends_wait = any(what == "end" for _, what in free)
        ahead = min((due for (_, what), due in free.items() if due > now and what != "end"), default=None)

        def key(
            choice: tuple[int, str], now: float = now, ahead: float | None = ahead, ends_wait: bool = ends_wait
        ) -> Any:
            kernel, what = choice
            starts = what == "start"
            waste = 0.0 if ahead is None else math.inf if starts else abs(ahead - now - seconds[kernel])
            feeds_on = any(collective[k] for k in before[kernel])
            return (
                what != "end", 0.0 if what == "end" else max(free[choice] - now, 0.0), starts and not deep[kernel] and
                not ends_wait, not (starts and ends_wait), -deep[kernel], 0.0 if what == "end" else waste,
                starts, not feeds_on, -position[kernel],
            )  # fmt: skip

        choice = min((c for c in free if not (under_way and c[1] == "end")), key=key)
        kernel, what = choice
        now = max(now, free.pop(choice))
        if what == "end":
            found.append(IssuedKernel(kernel, starts=False))
            free[kernel, "start"] = now + seconds[kernel]
            under_way = True
            continue
        began = now
        if what == "start":
            found.append(IssuedKernel(kernel, ends=False))
            under_way = False
        else:
            found.append(IssuedKernel(kernel))
            now += seconds[kernel]
        for k in before[kernel]:
            readers[k].discard(kernel)
            fed_at[k] = max(fed_at[k], began + EDGE)
            if not readers[k]:
                release(k)
    return found[::-1]


@pytest.mark.parametrize("seed", range(60))
def test_it_is_what_the_rules_say(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 40)
    before = [sorted(draw.sample(range(k), min(k, draw.randint(0, 3)))) for k in range(count)]
    collective = [draw.random() < 0.3 for _ in range(count)]
    seconds = [draw.choice([0.0, 3e-6, 17e-6, 170e-6, 1e-3]) + k * 1e-9 for k in range(count)]
    order = range(count)
    found = hide_latency(order, before, seconds, collective)
    assert found == by_the_rules(order, before, seconds, collective)


@pytest.mark.parametrize("seed", range(20))
def test_everything_runs_once_after_what_it_needs_and_one_collective_at_a_time(seed: int) -> None:
    draw = random.Random(seed)
    count = 200
    before = [sorted(draw.sample(range(k), min(k, 2))) for k in range(count)]
    collective = [draw.random() < 0.2 for _ in range(count)]
    found = hide_latency(range(count), before, [1e-5] * count, collective)
    begun = {step.kernel: at for at, step in enumerate(found) if step.starts}
    ended = {step.kernel: at for at, step in enumerate(found) if step.ends}
    assert sorted(begun) == sorted(ended) == [*range(count)]
    assert all(ended[k] < begun[kernel] for kernel in range(count) for k in before[kernel])
    under_way = 0
    for step in found:
        under_way += collective[step.kernel] * (step.starts - step.ends)
        assert under_way in (0, 1)


def test_a_gradient_waits_for_a_later_collective_to_run_beside() -> None:
    """Two layers backward, the second after a gather of what comes of the first, whose gradient is read at the end."""
    gathers, layers, gradient, update = (0, 2), (1, 3), 4, 5
    before = [[], [0], [1], [1, 2], [1], [3, 4]]
    order = [0, 1, 4, 2, 3, 5]
    seconds = [5e-4 if k in gathers else 1e-3 for k in range(6)]
    found = hide_latency(order, before, seconds, [k in gathers for k in range(6)])
    assert [step.kernel for step in found] == [0, 0, 1, 2, gradient, 2, layers[1], update]
