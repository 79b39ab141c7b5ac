"""What needs what among kernels that grow: an acyclic graph whose nodes come to need more.

Most of what is asked is answered by two things that are quickly compared: levels, and a forest in which each node's
parent is the first one of the highest level that it needed when it was added. What remains is searched for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Dependencies:
    """Nodes by number. A node's level is above those of all that it needs."""

    def __init__(self) -> None:
        self._needs: list[set[int]] = []
        self._needed_by: list[set[int]] = []
        self._levels: list[int] = []
        # Of the forest: each node's depth, its parent, and an ancestor further up (Myers 1983); roots have themselves.
        self._depths: list[int] = []
        self._parents: list[int] = []
        self._jumps: list[int] = []

    def add(self, needs: Iterable[int]) -> int:
        """A new node, which needs these; its number."""
        node, needs = len(self._needs), [*needs]
        self._needs.append(set())
        self._needed_by.append(set())
        self._levels.append(0)
        self._plant(node, max(needs, key=self._levels.__getitem__, default=node))
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
        """Whether none of these needs the node, directly or not.

        The search goes down from the needs and up from the node in turn, until either has nothing left: one of them
        mostly has little.
        """
        levels, level = self._levels, self._levels[node]
        down = [other for other in needs if other != node and levels[other] > level]
        top = max((levels[other] for other in down), default=0)
        needed, needing, up = set(down), {node}, [node]
        while down and up:
            at = down.pop()
            if node in self._needs[at] or self._is_ancestor(node, at):
                return False
            below = [other for other in self._needs[at] if levels[other] > level and other not in needed]
            needed.update(below)
            down += below
            above = self._needed_by[up.pop()]
            if not needed.isdisjoint(above):
                return False
            further = [other for other in above if levels[other] < top and other not in needing]
            needing.update(further)
            up += further
        return True

    def _plant(self, node: int, parent: int) -> None:
        is_root = parent == node
        self._depths.append(0 if is_root else self._depths[parent] + 1)
        self._parents.append(parent)
        jump = node if is_root else self._jumps[parent]
        further = jump if is_root else self._jumps[jump]
        depths = self._depths
        is_even = not is_root and depths[parent] - depths[jump] == depths[jump] - depths[further]
        self._jumps.append(further if is_even else parent)

    def _is_ancestor(self, node: int, of: int) -> bool:
        """In the forest."""
        depths, depth = self._depths, self._depths[node]
        while depths[of] > depth:
            jump = self._jumps[of]
            of = jump if depths[jump] >= depth else self._parents[of]
        return of == node

    def _raise(self, node: int, level: int) -> None:
        todo = [(level, node)]  # a heap, so that few nodes are raised twice
        while todo:
            least, at = heapq.heappop(todo)
            if self._levels[at] < least:
                self._levels[at] = least
                for each in self._needed_by[at]:
                    heapq.heappush(todo, (least + 1, each))
