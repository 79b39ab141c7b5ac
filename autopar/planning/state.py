"""What the neighbours of a search may know."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from autopar.ir.plan import Plan
from autopar.planning.candidate import Candidate
from autopar.planning.evaluator import Evaluator


class State:
    """What neighbours may know: what was asked for, and the best plan so far."""

    def __init__(self, evaluator: Evaluator, fixed: int | None) -> None:
        """`fixed`: the number of microbatches, if it is."""
        self.evaluator, self.space, self.fixed = evaluator, evaluator.space, fixed
        self.plan: Plan | None = None  # the best
        self.found_by: dict[str, Plan] = {}  # by neighbour: its latest plan that was better than all before
        self.proposals: Counter[str] = Counter()  # that were planned, by neighbour
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of CPU: a neighbour's with its candidates'
        self.in_one_stage: set[int] = set()  # numbers of microbatches that were proposed in one stage
        self.equal_stages: list[tuple[Candidate, Plan]] = []  # what became a plan, the best or not
        self.no_better: set[tuple[int, int, int]] = set()  # numbers of equal stages, of microbatches and of rounds
        self.least_expected = math.inf  # seconds per step, of the neighbours of a phase that were heard before

    @property
    def estimate(self) -> float:
        """Seconds per step of the best plan, as the stage search estimated it."""
        return self.evaluator.best.estimate
