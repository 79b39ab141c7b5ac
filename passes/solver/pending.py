"""What reductions of a network share: nodes that wait, usages of followers, lifts."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

import numpy as np

from autopar.passes.solver.problem import Array, Integers

Lift = Callable[[list[int]], None]  # fills in the strategies of removed nodes, in the problem's own numbering
UsageSpan = tuple[int, int, Array]  # first point in time, one past the last, bytes per strategy


class Pending:
    """Nodes to look at, each once at a time, first come first served."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._order = collections.deque[int]()
        self._waiting = set[int]()
        self.add(nodes)

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            if node not in self._waiting:
                self._waiting.add(node)
                self._order.append(node)

    def pop(self) -> int:
        node = self._order.popleft()
        self._waiting.remove(node)
        return node

    def pop_all(self) -> list[int]:
        nodes = list(self._order)
        self._order.clear()
        self._waiting.clear()
        return nodes


def base_of(matrix: Array) -> Array:
    """The array whose transpose the matrix may be."""
    return matrix.base if isinstance(matrix.base, np.ndarray) else matrix


def gathered_spans(
    leader: int, usages: dict[int, list[UsageSpan]], followers: dict[int, list[tuple[int, Integers]]]
) -> list[UsageSpan]:
    """What a leader and all that follow it use, per strategy of the leader."""
    spans = list(usages[leader])
    waiting = list(followers[leader])
    while waiting:
        node, follows = waiting.pop()
        spans += [(start, end, amount[follows]) for start, end, amount in usages[node]]
        waiting += [(other, by[follows]) for other, by in followers.get(node, ())]
    return spans


def constant_of(node: int, strategy: int) -> Lift:
    """Gives a node that was taken out its strategy."""

    def lift(choice: list[int]) -> None:
        choice[node] = strategy

    return lift
