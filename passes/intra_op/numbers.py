"""The sharding problem of a stage in numbers, for any number of microbatches in flight."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from autopar.passes.solver.problem import Array, Problem, Solution, Usage


class Held(NamedTuple):
    """When a node holds bytes: a half-open range of times."""

    start: int
    end: int
    per_microbatch: bool  # as often as there are microbatches in flight

    def times(self, in_flight: int) -> int:
        return in_flight if self.per_microbatch else 1


@dataclasses.dataclass
class StageNumbers:
    """Nodes and edges, with what they cost and hold."""

    memory_limit: float | None  # bytes per device
    costs: list[Array] = dataclasses.field(default_factory=list)  # by node: [strategy]
    edges: list[tuple[int, int, Array]] = dataclasses.field(default_factory=list)
    node_in_loop: list[bool] = dataclasses.field(default_factory=list)  # what it costs, it costs per microbatch
    edge_in_loop: list[bool] = dataclasses.field(default_factory=list)
    held: list[dict[Held, Array]] = dataclasses.field(default_factory=list)  # by node: [strategy], whole bytes

    def problem(self, in_flight: int) -> Problem:
        """The problem where so many microbatches are held at once.

        It has no limit where even the hungriest choices would stay within it.
        """
        usages = tuple(
            tuple(Usage(when.start, when.end, nbytes * when.times(in_flight)) for when, nbytes in held.items())
            for held in self.held
        )
        limit = self.memory_limit
        if limit is not None and self.most_bytes(in_flight) <= limit:
            limit = None
        return Problem(tuple(self.costs), tuple(self.edges), usages, limit)

    def is_like(self, other: StageNumbers) -> bool:
        """Whether every choice costs and holds what it does there, with no more memory."""
        return (
            _or_inf(self.memory_limit) <= _or_inf(other.memory_limit)
            and len(self.costs) == len(other.costs)
            and len(self.edges) == len(other.edges)
            and all(map(np.array_equal, self.costs, other.costs))
            and all(
                edge[:2] == same[:2] and np.array_equal(edge[2], same[2])
                for edge, same in zip(self.edges, other.edges, strict=True)
            )
            and all(
                held.keys() == same.keys() and all(np.array_equal(held[when], same[when]) for when in held)
                for held, same in zip(self.held, other.held, strict=True)
            )
        )

    def most_bytes(self, in_flight: int) -> float:
        """The peak if everything were held in the hungriest way; no choice has a higher one."""
        return self._peak(in_flight, lambda node, nbytes: float(nbytes.max()))

    def least_bytes(self, in_flight: int) -> float:
        """The peak if everything were held in the leanest way; no choice has a lower one."""
        return self._peak(in_flight, lambda node, nbytes: float(nbytes.min()))

    def peak_bytes(self, choice: Sequence[int], in_flight: int) -> float:
        """The peak of a choice."""
        return self._peak(in_flight, lambda node, nbytes: float(nbytes[choice[node]]))

    def _peak(self, in_flight: int, size: Callable[[int, Array], float]) -> float:
        changes: dict[int, float] = defaultdict(float)
        for node, held in enumerate(self.held):
            for when, nbytes in held.items():
                amount = size(node, nbytes) * when.times(in_flight)
                changes[when.start] += amount
                changes[when.end] -= amount
        return max(itertools.accumulate(changes[t] for t in sorted(changes)), default=0.0)

    def loop_seconds(self, solution: Solution) -> float:
        """Seconds per step that the programs of the microbatches take, of the solution's cost."""
        choice = solution.choice
        nodes = sum(cost[k] for cost, k, loop in zip(self.costs, choice, self.node_in_loop, strict=True) if loop)
        edges = sum(matrix[choice[u], choice[v]]
                    for (u, v, matrix), loop in zip(self.edges, self.edge_in_loop, strict=True) if loop)  # fmt: skip
        return float(nodes + edges)


def _or_inf(limit: float | None) -> float:
    return math.inf if limit is None else limit
