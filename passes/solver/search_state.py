"""The state of a search: the best choice, the best bound, what is left of the work and of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

from autopar.passes.solver import kernels
from autopar.passes.solver.network import Network
from autopar.passes.solver.problem import FoundBy, Problem, Solution, evaluate, fits

RATE = 5e8  # units of work (see oracles.py) per second of the limit; a current core does about twice as many
TOLERANCE = 1e-10  # relative: choices that are not better by this much are not looked for


class SolverPart(Protocol):
    """Counts its work."""

    work: float  # units that are not subtracted yet


class SearchState:
    """Of the search for a solution of one problem, `gap` from the best (relative)."""

    def __init__(self, problem: Problem, seconds: float, patience: float, gap: float) -> None:
        self.problem = problem
        self.gap = gap
        self.work = seconds * RATE
        self.deadline = now() + seconds * patience
        self.best: Solution | None = None
        self.bound = -math.inf
        self.smallest_peak = math.inf
        self.cheapest: tuple[int, ...] = ()  # choice without regard to memory

    def _spend(self, part: SolverPart) -> None:
        self.work -= part.work
        part.work = 0.0

    def _spent(self) -> bool:
        return self.work <= 0 or now() > self.deadline

    def _closed(self) -> bool:
        return self.best is not None and self.bound >= self._worth(self.best)

    def _worth(self, solution: Solution) -> float:
        """What a choice must cost less than to be looked for."""
        return solution.cost - max(self.gap, TOLERANCE) * abs(solution.cost)

    def _note_all_excluded(self) -> None:
        """Nothing is left that is worth finding."""
        self.bound = self.best.cost - self.gap * abs(self.best.cost) if self.best else math.inf

    def _offer(self, network: Network, positions: dict[int, int], found_by: FoundBy) -> None:
        if self.best is not None:
            is_cheaper = network.cost(positions) < self.best.cost
            if not is_cheaper or (network.load(positions) > network.slack).any():
                return
        self.offer(network.lift(positions, self.problem.num_nodes), found_by)

    def offer(self, choice: Sequence[int], found_by: FoundBy = FoundBy.START) -> None:
        """Take a choice as the best if it is."""
        choice = tuple(choice)
        cost, peak = evaluate(self.problem, choice)
        if math.isfinite(cost):
            self.cheapest = self.cheapest or choice
            self.smallest_peak = min(self.smallest_peak, peak)
            if fits(self.problem, peak) and (self.best is None or cost < self.best.cost):
                self.best = Solution(choice, cost, -math.inf, peak, found_by)


def now() -> float:
    """Seconds, of which none passes while the loops are compiled: that happens once on a machine."""
    return time.monotonic() - kernels.compile_seconds()
