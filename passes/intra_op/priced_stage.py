"""What a stage costs with different numbers of microbatches in flight, for as few solutions as possible.

More microbatches in flight need more memory and nothing else: a choice that fits with many fits with few, and costs
rise with their number.
"""

from __future__ import annotations

import dataclasses
import functools

from autopar.passes.intra_op.numbers import StageNumbers
from autopar.passes.solver.problem import Infeasible, Solution
from autopar.passes.solver.solve import solve

PATIENCE = 100.0  # of the solver: plans depend on the work done, not on how busy the machine is
_ALIKE = 0.015  # relative: a solution that costs no more than this over a bound need not be improved


class PricedStage:
    """Solutions of one stage's problem."""

    def __init__(self, numbers: StageNumbers, most_in_flight: int, seconds: float) -> None:
        """`seconds` sets the solver's work limit for each solution."""
        self.numbers = numbers
        self.most_in_flight = most_in_flight
        self.seconds = seconds
        self._solutions: dict[int, Solution] = {}  # by microbatches in flight
        self._refused: dict[int, Infeasible] = {}

    def solution(self, in_flight: int) -> Solution:
        """A choice that fits, within 1 % of the best that the solver finds.

        Raises Infeasible if nothing fits.
        """
        self._check(in_flight)
        # One solution serves several numbers where the memory allows; what it costs with fewer says how good it is.
        more = min(1 << (in_flight - 1).bit_length(), self.most_in_flight)
        fewer = 1 << (in_flight.bit_length() - 1)
        for number in dict.fromkeys((more, fewer, in_flight)):
            known = self._fitting(in_flight)
            if known is not None and known.cost <= self._least_cost(in_flight) * (1 + _ALIKE):
                return known
            self._solve(number)
            self._check(in_flight)
        known = self._fitting(in_flight)
        assert known is not None  # that of `in_flight`, if no other
        return known

    def bound(self, in_flight: int) -> Solution:
        """A choice that costs no more than what fits.

        Raises Infeasible if it is known, or can be told without a solution, that nothing fits.
        """
        self._check(in_flight)
        return self.cheapest

    def _check(self, in_flight: int) -> None:
        for number, error in self._refused.items():
            if number <= in_flight:
                raise error
        limit = self.numbers.memory_limit
        if limit is not None and (least := self.numbers.least_bytes(in_flight)) > limit:
            raise Infeasible(least, limit, proved=True)

    @functools.cached_property
    def cheapest(self) -> Solution:
        """A choice that costs least, whatever memory it takes."""
        return solve(
            dataclasses.replace(self.numbers.problem(1), limit=None),
            seconds=self.seconds,
            patience=PATIENCE,
            gap=_ALIKE,
        )

    def lower_bound(self, gap: float) -> float:
        """What no choice costs less than, in any memory: within this share of the best, if found."""
        if self.cheapest.lower_bound < (1 - gap) * self.cheapest.cost:
            problem = dataclasses.replace(self.numbers.problem(1), limit=None)
            start = self.cheapest.choice
            self.cheapest = solve(problem, seconds=self.seconds, patience=PATIENCE, gap=gap, start=start)
        return self.cheapest.lower_bound

    @property
    def known_cost(self) -> float:
        """What it costs with one microbatch in flight, if that is known; else what it does whatever the memory."""
        return self._least_cost(2)

    def _least_cost(self, in_flight: int) -> float:
        """What no choice that fits is likely to beat: the costs with fewer in flight."""
        return max([self.cheapest.cost, *(s.cost for number, s in self._solutions.items() if number < in_flight)])

    def _fitting(self, in_flight: int) -> Solution | None:
        """The cheapest known choice that fits."""
        limit = self.numbers.memory_limit
        for solution in sorted((self.cheapest, *self._solutions.values()), key=lambda s: s.cost):
            peak = self.numbers.peak_bytes(solution.choice, in_flight)
            if limit is None or peak <= limit:
                return dataclasses.replace(solution, peak=peak)
        return None

    def _solve(self, in_flight: int) -> None:
        if in_flight in self._solutions or in_flight in self._refused:
            return
        known = self._fitting(in_flight)
        start = None if known is None else known.choice
        try:
            problem = self.numbers.problem(in_flight)
            self._solutions[in_flight] = solve(
                problem, seconds=self.seconds, patience=PATIENCE, gap=_ALIKE, start=start
            )
        except Infeasible as error:
            self._refused[in_flight] = error
