"""Choose one strategy per node at least cost within the memory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from autopar.passes.solver.problem import Infeasible, Problem, Solution, fits

if TYPE_CHECKING:
    from autopar.passes.solver.network import Network

_LOG = logging.getLogger(__name__)


def solve(
    problem: Problem,
    *,
    seconds: float = 10.0,
    patience: float = 1.0,
    seed: int = 0,
    start: Sequence[int] | None = None,
    gap: float = 0.0,
    polish: bool = True,
) -> Solution:
    """The cheapest choice found that fits, with a proven lower bound.

    start: a choice, than which none is returned that is worse, if it fits. seconds: sets the work limit, at about half
    of what a current core does in that time; the time limit is `patience` times as long. The first bound and choice are
    completed whatever they are. gap: choices that are better by less than this share of the cost are not looked for.
    polish: where elimination is too wide, improve what messages find by annealing and by CP-SAT.
    Raises Infeasible if no choice fits, or none was found.
    """
    # Numba and OR-Tools take as long to import as all the rest: only who plans waits for them.
    from autopar.passes.solver.programs import highest, solve_program
    from autopar.passes.solver.search import Search

    search = Search(problem, seconds, seed, highest, solve_program, gap, patience, polish=polish)
    if start is not None:
        search.offer(start)
    solution = search.run()
    _LOG.debug("%d nodes, %.3g above the bound: found by %s", problem.num_nodes, solution.gap, solution.found_by)
    return solution


class Forced:
    """A problem to be solved with one node's strategy after another forced; it is reduced once for all of them.

    First without the memory, which takes little work and is the answer where it fits.
    """

    def __init__(self, problem: Problem, node: int) -> None:
        from autopar.passes.solver.network import Network, NoChoiceLeft

        self.problem, self.node = problem, node
        self._networks: list[tuple[Problem, Network]] = []  # none: nothing fits
        with contextlib.suppress(NoChoiceLeft):
            network = Network.of(problem, held=(node,))
            network.reduce(dominated=True)
            free = network.without_memory()
            free.reduce(dominated=True)
            self._networks.append((dataclasses.replace(problem, limit=None), free))
            if problem.limit is not None:
                self._networks.append((problem, network))

    def solve(
        self, strategy: int, *, seconds: float, patience: float, gap: float, start: Sequence[int] | None = None
    ) -> Solution:
        """As `solve`, with the node's strategy forced; `start` has it, too."""
        from autopar.passes.solver.programs import highest, solve_program
        from autopar.passes.solver.search import Search

        if not self._networks:
            costs = list(self.problem.costs)
            forbidden = np.arange(costs[self.node].size) != strategy
            costs[self.node] = np.where(forbidden, np.inf, costs[self.node])
            problem = dataclasses.replace(self.problem, costs=tuple(costs))
            return solve(problem, seconds=seconds, patience=patience, gap=gap, start=start)
        bound = -math.inf
        for problem, network in self._networks:
            part = network.copy()
            part.held = ()
            wanted = part.labels[self.node] == strategy
            if not wanted.any():  # it goes with no strategies of others
                raise Infeasible(math.inf, self.problem.limit, proved=True)
            part.touched = dict.fromkeys((self.node, *part.adjacent[self.node]))
            part.keep(self.node, wanted)
            search = Search(problem, seconds, 0, highest, solve_program, gap, patience, part, polish=False)
            search.bound = bound
            if start is not None:
                search.offer(start)
            solution = search.run()
            bound = solution.lower_bound
            if problem is self.problem or fits(self.problem, solution.peak):
                break
        return solution
