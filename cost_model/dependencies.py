"""What needs what among kernels that grow: an acyclic graph whose nodes come to need more."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Dependencies:
    """Nodes by number. A node's level is above those of all that it needs."""

    def __init__(self) -> None:
        self._needs: list[set[int]] = []
        self._needed_by: list[set[int]] = []
        self._levels: list[int] = []

    def add(self, needs: Iterable[int]) -> int:
        """A new node, which needs these; its number."""
        node = len(self._needs)
        self._needs.append(set())
        self._needed_by.append(set())
        self._levels.append(0)
        self.extend(node, needs)
        return node

    def extend(self, node: int, needs: Iterable[int]) -> None:
        """The node needs these, too; none of them may need it (`can_extend`)."""
        for other in needs:
            if other != node:
                self._needs[node].add(other)
                self._needed_by[other].add(node)
                self._raise(node, self._levels[other] + 1)

    def can_extend(self, node: int, needs: Iterable[int]) -> bool:
        """Whether none of these needs the node, directly or not."""
        level, seen = self._levels[node], {node}
        todo = [other for other in needs if other != node and self._levels[other] > level]
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            if node in self._needs[at]:
                return False
            todo += [other for other in self._needs[at] if self._levels[other] > level]
        return True

    def _raise(self, node: int, level: int) -> None:
        todo = [(level, node)]  # a heap, so that few nodes are raised twice
        while todo:
            least, at = heapq.heappop(todo)
            if self._levels[at] < least:
                self._levels[at] = least
                for each in self._needed_by[at]:
                    heapq.heappush(todo, (least + 1, each))
