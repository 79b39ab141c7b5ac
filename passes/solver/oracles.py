"""Two ways to bound the cost of a network from below and to choose: exact where it is narrow, messages elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from autopar.passes.solver.eliminate import Elimination, plan_elimination
from autopar.passes.solver.flat import flatten
from autopar.passes.solver.messages import Messages, marginal_bounds
from autopar.passes.solver.network import Network
from autopar.passes.solver.problem import Array

LARGE = 1_000_000  # pair entries of a network beyond which it takes long to look for dominated strategies
STEP = 20_000  # units of work that a small numpy step costs, whatever its size


class Oracle(Protocol):
    """For given node costs; a unit of work is about an addition within numpy."""

    work: float  # done so far
    exact: bool  # whether the bounds so far were minima

    def evaluate(self, costs: dict[int, Array]) -> tuple[float, dict[int, int]]:
        """A lower bound on the sum of costs, and a choice."""

    def marginals(self, costs: dict[int, Array]) -> dict[int, Array]:
        """For each node and strategy a lower bound on the cost of all choices with it."""


@dataclasses.dataclass
class Exact:
    """By elimination: the bound is the minimum, and the choice has it."""

    network: Network
    plan: Elimination
    work: float = 0.0
    exact: bool = True

    def evaluate(self, costs: dict[int, Array]) -> tuple[float, dict[int, int]]:
        self.work += self.plan.work + STEP * len(self.plan.buckets)
        return self.plan.minimise(costs, self.network.adjacent)

    def marginals(self, costs: dict[int, Array]) -> dict[int, Array]:
        self.work += 4 * self.plan.work + 5 * STEP * len(self.plan.buckets)
        return self.plan.marginals(costs, self.network.adjacent)[2]


class Wide:
    """For networks that can be eliminated only without what is dominated at the given costs, or not at all.

    Then by message passing; the choice is improved by exact elimination of all but a few nodes.
    """

    def __init__(self, network: Network, random: np.random.Generator) -> None:
        self.work = 0.0
        self.exact = network.pair_entries <= LARGE
        self._network = network
        self._random = random
        self._messages = Messages(flatten(network))
        self._sizes = {node: cost.size for node, cost in network.unary.items()}

    def evaluate(self, costs: dict[int, Array]) -> tuple[float, dict[int, int]]:
        return self._without_dominated(costs) or self._by_messages(costs)

    @property
    def narrow(self) -> bool:
        """Whether it can be eliminated without what is dominated when memory has no price."""
        return self._without_dominated(self._network.unary) is not None

    def _without_dominated(self, costs: dict[int, Array]) -> tuple[float, dict[int, int]] | None:
        """Memory has its price in the costs, so that dominance need not look at it."""
        if not self.exact:
            return None  # it was in vain before
        network = self._network.without_memory()
        network.unary, network.lifts, network.offset = dict(costs), [], 0.0
        network.reduce(dominated=True)
        sizes = {node: cost.size for node, cost in network.unary.items()}
        plan = plan_elimination(sizes, network.adjacent)
        self.work += 5 * self._messages.work
        self.exact = plan is not None
        if plan is None:
            return None
        self.work += plan.work + STEP * len(plan.buckets)
        value, positions = plan.minimise(network.unary, network.adjacent)
        chosen = network.lift(positions, max(self._sizes, default=-1) + 1)
        labels = self._network.labels
        return value + network.offset, {n: int(np.searchsorted(labels[n], chosen[n])) for n in self._sizes}

    def _by_messages(self, costs: dict[int, Array]) -> tuple[float, dict[int, int]]:
        joined = self._joined(costs)
        bound = -np.inf
        for _ in range(_MAX_SWEEPS // _SWEEPS):
            before = bound
            for _ in range(_SWEEPS):
                bound = self._messages.sweep(joined)
            self.work += _SWEEPS * self._messages.work
            if bound - before <= 1e-4 * abs(bound):
                break
        labels, nodes = self._messages.decode(joined), self._messages.flat.nodes.tolist()
        choice = dict(zip(nodes, labels.tolist(), strict=True))
        # a node that is far from undecided is fixed first; later rounds free others
        preference = {node: _margin(self._messages.belief(joined, index)) for index, node in enumerate(nodes)}
        value, failures = np.inf, 0
        while failures < _FAILURES:
            plan = plan_elimination(self._sizes, self._network.adjacent, prefer_fixed=preference)
            assert plan is not None  # nodes are fixed until it fits
            self.work += plan.work + STEP * len(plan.buckets)
            before = value
            value, choice = plan.minimise(costs, self._network.adjacent, choice)
            failures += not value < before - 1e-9 * abs(before)
            preference = dict(zip(self._sizes, self._random.random(len(self._sizes)), strict=True))
        return bound, choice

    def marginals(self, costs: dict[int, Array]) -> dict[int, Array]:
        joined = self._joined(costs)
        for _ in range(_SWEEPS):
            self._messages.sweep(joined)
        self.work += (_SWEEPS + 1) * self._messages.work
        return marginal_bounds(*self._messages.reduced(joined))

    def _joined(self, costs: dict[int, Array]) -> Array:
        return np.concatenate([costs[node] for node in self._messages.flat.nodes.tolist()] or [np.zeros(0)])


_SWEEPS, _MAX_SWEEPS = 10, 100
_FAILURES = 4  # to improve, after which the choice is taken


def _margin(cost: Array) -> float:
    return float(np.partition(cost, 1)[1] - cost.min()) if cost.size > 1 else np.inf


def oracle_for(network: Network, random: np.random.Generator) -> Oracle:
    """The exact one if its tables stay within the limits of `eliminate.py`."""
    sizes = {node: cost.size for node, cost in network.unary.items()}
    plan = plan_elimination(sizes, network.adjacent)
    return Wide(network, random) if plan is None else Exact(network, plan)
