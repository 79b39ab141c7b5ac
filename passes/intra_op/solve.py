"""Choose one strategy per node at least cost within the memory."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.passes.intra_op.problem import Problem, Solution


def solve(
    problem: Problem,
    *,
    seconds: float = 10.0,
    patience: float = 1.0,
    seed: int = 0,
    start: Sequence[int] | None = None,
    gap: float = 0.0,
) -> Solution:
    """The cheapest choice found that fits, with a proven lower bound.

    start: a choice, than which none is returned that is worse, if it fits. seconds: sets the work limit, at about half
    of what a current core does in that time; the time limit is `patience` times as long. The first bound and choice are
    completed whatever they are. gap: choices that are better by less than this share of the cost are not looked for.
    Raises Infeasible if no choice fits, or none was found.
    """
    # Numba and OR-Tools take as long to import as all the rest: only who plans waits for them.
    from autopar.passes.intra_op.programs import highest, solve_program
    from autopar.passes.intra_op.search import Search

    search = Search(problem, seconds, seed, highest, solve_program, gap, patience)
    if start is not None:
        search.offer(start)
    return search.run()
