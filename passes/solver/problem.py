"""The problem of choosing one strategy per node: what it is, and what a choice is worth.

Minimise the sum of node and edge costs such that at every time the live nodes' bytes stay within a limit. The form is
that of Alpa's integer program (OSDI'22, section 4.2) with lifetimes instead of one memory total.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class MalformedProblem(ValueError):
    """A cost, edge or usage has the wrong shape or an impossible value; the message names which."""


class Infeasible(Exception):
    """No choice has a finite cost and keeps within the memory limit.

    smallest_peak: bytes, the least peak that a search found among choices of finite cost; inf if there is no such
        choice. limit: bytes, None if the infinite costs alone exclude every choice. proved: False if the search
        ran out of its work limit without finding a choice.
    """

    def __init__(self, smallest_peak: float, limit: float | None, proved: bool) -> None:
        self.smallest_peak = smallest_peak
        self.limit = limit
        self.proved = proved
        if math.isinf(smallest_peak) and proved:
            message = "every choice has an infinite cost: the forbidden strategies and pairs exclude each other"
        else:
            verdict = "no choice fits" if proved else "no choice that fits was found within the work limit"
            message = f"{verdict}: the smallest peak found is {smallest_peak:.0f} bytes, the limit is {limit} bytes"
        super().__init__(message)


def _frozen(values: Any) -> Array:
    """A read-only float64 copy."""
    array = np.array(values, dtype=np.float64)
    array.flags.writeable = False
    return array


@dataclasses.dataclass(frozen=True, eq=False)
class Usage:
    """Bytes that a node holds over one half-open lifetime; never live if start == end."""

    start: int  # integer time
    end: int  # integer time, exclusive
    bytes: Array  # per strategy of its node; fractions are rounded up, so that sums of bytes are exact

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", _frozen(np.ceil(np.asarray(self.bytes, dtype=np.float64))))
        if self.end < self.start:
            raise MalformedProblem(f"a usage ends at {self.end}, before it starts at {self.start}")
        if self.bytes.ndim != 1 or not np.all(np.isfinite(self.bytes)) or np.any(self.bytes < 0):
            raise MalformedProblem(f"a usage needs finite, non-negative bytes per strategy, got {self.bytes}")


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Nodes 0..n-1 with strategies, edges between them, and memory over time."""

    costs: tuple[Array, ...]  # seconds per strategy of each node; inf = forbidden
    edges: tuple[tuple[int, int, Array], ...]  # u != v, seconds [K_u, K_v]; inf = forbidden; parallel edges add up
    usages: tuple[tuple[Usage, ...], ...]  # per node its lifetimes; several that are live at once add up
    limit: float | None  # bytes at every integer time; None = no limit

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", tuple(_frozen(cost) for cost in self.costs))
        object.__setattr__(self, "edges", tuple((int(u), int(v), _frozen(matrix)) for u, v, matrix in self.edges))
        object.__setattr__(self, "usages", tuple(tuple(usages) for usages in self.usages))
        for node, cost in enumerate(self.costs):
            if cost.ndim != 1 or cost.size == 0:
                raise MalformedProblem(f"node {node} needs a vector of at least one cost, got shape {cost.shape}")
            if not _is_cost(cost):
                raise MalformedProblem(f"node {node} has a cost that is NaN or -inf: {cost}")
        for index, (u, v, matrix) in enumerate(self.edges):
            if not (0 <= u < len(self.costs) and 0 <= v < len(self.costs)) or u == v:
                raise MalformedProblem(
                    f"edge {index} joins {u} and {v}: two different nodes of {len(self.costs)} needed"
                )
            if matrix.shape != (self.costs[u].size, self.costs[v].size):
                raise MalformedProblem(
                    f"edge {index} from {u} to {v} has shape {matrix.shape}, its nodes have "
                    f"{self.costs[u].size} and {self.costs[v].size} strategies"
                )
            if not _is_cost(matrix):
                raise MalformedProblem(f"edge {index} from {u} to {v} has a cost that is NaN or -inf")
        if len(self.usages) != len(self.costs):
            raise MalformedProblem(f"{len(self.usages)} nodes have usages, {len(self.costs)} have costs")
        for node, usages in enumerate(self.usages):
            for usage in usages:
                if usage.bytes.size != self.costs[node].size:
                    raise MalformedProblem(
                        f"node {node} has {self.costs[node].size} strategies, one of its usages {usage.bytes.size}"
                    )
        if self.limit is not None and not self.limit >= 0:
            raise MalformedProblem(f"the memory limit must be None or a number of bytes, got {self.limit}")

    @property
    def num_nodes(self) -> int:
        return len(self.costs)


def _is_cost(values: Array) -> bool:
    return values.size == 0 or bool(values.min() > -math.inf)  # the least is NaN where one of them is


class FoundBy(enum.StrEnum):
    """The part of the solver that offered a choice first."""

    START = "start"  # it was given
    ELIMINATION = "elimination"  # of all nodes, at some prices on bytes
    COLUMNS = "columns"  # elimination with few strategies of each node
    LIGHTEST = "lightest"  # the least memory is looked for, since nothing fitted
    REPAIR = "repair"  # moves that make a choice of these fit, or cheaper
    MESSAGES = "messages"  # that climb with the prices, where elimination is too wide
    ANNEALING = "annealing"
    INTEGER_PROGRAM = "integer_program"


@dataclasses.dataclass(frozen=True)
class Solution:
    """A choice that fits, and how much better another one could be."""

    choice: tuple[int, ...]  # strategy of each node
    cost: float  # seconds
    lower_bound: float  # seconds; no choice that fits costs less
    peak: float  # bytes
    found_by: FoundBy = dataclasses.field(default=FoundBy.START, compare=False)

    @property
    def gap(self) -> float:
        """By which fraction of the cost a better choice could at most be cheaper."""
        if self.cost <= self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / abs(self.cost) if self.cost else math.inf

    @property
    def optimal(self) -> bool:
        """Proved up to the rounding of float sums."""
        return self.gap <= 1e-9


def peak_memory(problem: Problem, choice: Sequence[int]) -> float:
    """The largest sum of live bytes over time."""
    times: list[int] = []
    changes: list[float] = []
    for node, usages in enumerate(problem.usages):
        for usage in usages:
            if usage.end > usage.start:
                amount = float(usage.bytes[choice[node]])
                times += (usage.start, usage.end)
                changes += (amount, -amount)
    if not times:
        return 0.0
    instants, where = np.unique(np.array(times), return_inverse=True)
    load = np.zeros(instants.size)
    np.add.at(load, where.reshape(-1), changes)
    return float(np.cumsum(load).max())


def evaluate(problem: Problem, choice: Sequence[int]) -> tuple[float, float]:
    """Cost in seconds and peak memory in bytes of one strategy per node."""
    if len(choice) != problem.num_nodes:
        raise ValueError(f"a choice of {len(choice)} strategies for {problem.num_nodes} nodes")
    for node, strategy in enumerate(choice):
        if not 0 <= strategy < problem.costs[node].size:
            raise ValueError(f"node {node} has {problem.costs[node].size} strategies, strategy {strategy} was chosen")
    terms = [float(cost[strategy]) for cost, strategy in zip(problem.costs, choice, strict=True)]
    terms += [float(matrix[choice[u], choice[v]]) for u, v, matrix in problem.edges]
    # fsum: the cost does not depend on the order of nodes and edges
    return (math.inf if math.inf in terms else math.fsum(terms)), peak_memory(problem, choice)


def fits(problem: Problem, peak: float) -> bool:
    """Whether a peak, in bytes, keeps to the problem's limit."""
    return problem.limit is None or peak <= problem.limit
