"""The order in which XLA for GPUs runs kernels beside collectives: its `LatencyHidingScheduler`, step by step.

Kernels are chosen from the last to the first, each once all that reads its results has been; a clock runs backwards
along with them. A collective is two steps, its end, chosen first, and its start, which is due when the collective's
seconds have gone by; one is under way at a time. Of what can be chosen:

1. The end of a collective, where none is under way.
2. What is due before what is not. What a step reads is due a little before that begins (`_EDGE`), which matters after
   steps that take no longer, such as the start of a collective.
3. The start of the collective under way, if another one's end waits for it.
4. What has most collectives on its way from the arguments, one after the other. A start without any comes last.
5. While something is not due yet, the kernel that takes nearest to as long as it is until the first of that.
6. What reads the result of a collective; then what came last in the order before.

So what leads to nothing but a collective, as products that give gradients of parameters do, runs beside another one or
just before its own, and holds what it reads until then. Of XLA's rules (`ReadySetLt`) those are left out that heed a
limit of memory, and one that prefers what makes more kernels ready, which changes little.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Sequence

_EDGE = 1e-6  # seconds between a step and what feeds it: XLA's `kLowLatency`

_Rank = tuple[bool, int]  # the smallest is chosen


@dataclasses.dataclass(frozen=True)
class IssuedKernel:
    """A kernel, or one end of a collective."""

    kernel: int
    starts: bool = True  # it begins here
    ends: bool = True


class _Due:
    """Kernels of equally many collectives on their way that could be chosen now."""

    def __init__(self) -> None:
        self._ranked: list[tuple[_Rank, int]] = []  # a heap, as are those by seconds; both hold some that are gone
        self._by_seconds: dict[float, list[tuple[_Rank, int]]] = {}
        self._seconds: list[float] = []  # ascending
        self._gone: set[int] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, kernel: int, rank: _Rank, seconds: float) -> None:
        heapq.heappush(self._ranked, (rank, kernel))
        if seconds not in self._by_seconds:
            self._by_seconds[seconds] = []
            bisect.insort(self._seconds, seconds)
        heapq.heappush(self._by_seconds[seconds], (rank, kernel))
        self._count += 1

    def take(self, left: float | None) -> int:
        """The kernel that takes nearest to so many seconds, if that matters."""
        kernel = self._first(self._ranked) if left is None else self._nearest(left)
        self._gone.add(kernel)
        self._count -= 1
        return kernel

    def _first(self, heap: list[tuple[_Rank, int]]) -> int:
        while heap[0][1] in self._gone:
            heapq.heappop(heap)
        return heap[0][1]

    def _nearest(self, left: float) -> int:
        while True:
            at = bisect.bisect_left(self._seconds, left)
            near = self._seconds[max(0, at - 1) : at + 1]
            seconds = min(near, key=lambda each: abs(each - left))
            heap = self._by_seconds[seconds]
            while heap and heap[0][1] in self._gone:
                heapq.heappop(heap)
            if heap:
                return heap[0][1]
            del self._by_seconds[seconds]
            self._seconds.remove(seconds)


class _Scheduler:
    def __init__(
        self, order: Sequence[int], before: Sequence[Sequence[int]], seconds: Sequence[float],
        collective: Sequence[bool],
    ) -> None:  # fmt: skip
        count = len(order)
        self._before, self._seconds, self._collective = before, seconds, collective
        self._unchosen = [0] * count  # readers
        self._due_at = [0.0] * count
        deep = [0] * count  # collectives on the way, one after the other; a collective's own is not in it
        position = {kernel: at for at, kernel in enumerate(order)}
        for kernel in order:
            deep[kernel] = max((deep[k] + collective[k] for k in before[kernel]), default=0)
            for k in before[kernel]:
                self._unchosen[k] += 1
        self._deep = deep
        self._rank = [(not any(collective[b] for b in before[k]), -position[k]) for k in range(count)]
        self._now = 0.0
        self._ends: list[tuple[int, _Rank, int]] = []  # a heap of collectives whose ends could be chosen
        self._start: tuple[float, int] | None = None  # of the collective under way: when its start is due
        self._later: list[tuple[float, int]] = []  # a heap of kernels that are not due yet
        self._due: dict[int, _Due] = {}  # by how deep they are
        self._levels: list[int] = []  # a heap of these, negative
        self.issued: list[IssuedKernel] = []

    def run(self, order: Sequence[int]) -> list[IssuedKernel]:
        for kernel in [kernel for kernel in reversed(order) if not self._unchosen[kernel]]:
            self._release(kernel)
        while self._step():
            pass
        return self.issued[::-1]

    def _step(self) -> bool:
        if self._start is None and self._ends:
            *_, kernel = heapq.heappop(self._ends)
            self._now = max(self._now, self._due_at[kernel])
            self._start = self._now + self._seconds[kernel], kernel
            self.issued.append(IssuedKernel(kernel, starts=False))
            return True
        self._make_all_due(self._now)
        deepest = self._deepest()
        if self._start is not None and self._start[0] <= self._now and self._is_start_next(self._start[1], deepest):
            self._begin(self._start[1])
        elif deepest >= 0:
            self._choose(self._due[deepest].take(self._left()))
        elif self._start is not None and (not self._later or self._start[0] <= self._later[0][0]):
            self._begin(self._start[1])
        elif self._later:  # nothing is due, but this will be first
            left, self._now = self._left(), self._later[0][0]
            self._make_all_due(self._now)
            self._choose(self._due[self._deepest()].take(left))
        else:
            return False
        return True

    def _left(self) -> float | None:
        """Seconds until the next that is not due yet will be."""
        ahead = [at for at, _ in (*self._later[:1], *([self._start] if self._start else [])) if at > self._now]
        return min(ahead) - self._now if ahead else None

    def _make_all_due(self, until: float) -> None:
        while self._later and self._later[0][0] <= until:
            self._make_due(heapq.heappop(self._later)[1])

    def _deepest(self) -> int:
        """The level of the deepest kernels that are due; -1: none is."""
        while self._levels and not self._due[-self._levels[0]]:
            del self._due[-heapq.heappop(self._levels)]
        return -self._levels[0] if self._levels else -1

    def _is_start_next(self, kernel: int, deepest: int) -> bool:
        """Whether a start that is due comes before all kernels that are."""
        return bool(self._ends) or deepest < 0 or self._deep[kernel] > deepest

    def _begin(self, kernel: int) -> None:
        assert self._start is not None
        self._now = max(self._now, self._start[0])
        self._start = None
        self.issued.append(IssuedKernel(kernel, ends=False))
        self._fed(kernel, self._now)

    def _choose(self, kernel: int) -> None:
        self.issued.append(IssuedKernel(kernel))
        began = self._now
        self._now += self._seconds[kernel]
        self._fed(kernel, began)

    def _fed(self, kernel: int, began: float) -> None:
        """What feeds it can be chosen, if nothing else that reads it still has to be."""
        for k in self._before[kernel]:
            self._unchosen[k] -= 1
            self._due_at[k] = max(self._due_at[k], began + _EDGE)
            if not self._unchosen[k]:
                self._release(k)

    def _release(self, kernel: int) -> None:
        if self._collective[kernel]:
            heapq.heappush(self._ends, (-self._deep[kernel], self._rank[kernel], kernel))
        elif self._due_at[kernel] > self._now:
            heapq.heappush(self._later, (self._due_at[kernel], kernel))
        else:
            self._make_due(kernel)

    def _make_due(self, kernel: int) -> None:
        deep = self._deep[kernel]
        if deep not in self._due:
            self._due[deep] = _Due()
            heapq.heappush(self._levels, -deep)
        self._due[deep].add(kernel, self._rank[kernel], self._seconds[kernel])


def hide_latency(
    order: Sequence[int], before: Sequence[Sequence[int]], seconds: Sequence[float], collective: Sequence[bool]
) -> list[IssuedKernel]:
    """Kernels and the ends of collectives in the order in which they run.

    Args:
      order: all kernels, each after those that it needs, as they would run without collectives.
      before: by kernel, those that it needs.
      seconds: by kernel, how long it takes; of a collective, how long after its start its end is.
      collective: by kernel, whether it is one.
    """
    return _Scheduler(order, before, seconds, collective).run(order)
