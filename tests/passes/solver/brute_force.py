"""The oracle of the solver: every choice tried."""

from __future__ import annotations

import itertools
import math

from autopar.passes.solver.problem import Problem, Solution, evaluate, fits


def brute_force(problem: Problem) -> Solution | None:
    """The cheapest choice that fits, by trying all of them; None if there is none."""
    best: Solution | None = None
    for choice in itertools.product(*(range(cost.size) for cost in problem.costs)):
        cost, peak = evaluate(problem, choice)
        if math.isfinite(cost) and fits(problem, peak) and (best is None or cost < best.cost):
            best = Solution(choice, cost, cost, peak)
    return best
