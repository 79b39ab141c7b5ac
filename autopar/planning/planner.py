"""The search for a plan: from the batch analysis of a traced step to stages, meshes and shardings.

It is a variable neighbourhood descent (Mladenović and Hansen, 1997): the neighbours of the best plan so far propose
candidates, phase by phase, those that are likely to bring most first, and whatever is better becomes the best plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
import time
import warnings
from collections.abc import Iterator, Sequence

from autopar.cost_model.reshard import StepPrice
from autopar.errors import InfeasiblePlanError, InternalError, PlanError, UnsplitWarning, UserError, warn
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.passes.batch import BatchAnalysis
from autopar.passes.lower import LoweredStep
from autopar.passes.rules.table import rule_of
from autopar.passes.unfused import unfused_hint, unfused_notes
from autopar.passes.unsplit import find_unsplit
from autopar.planning.candidate import Candidate, Finished, Incumbent, Outcome, Proposal, Proposals
from autopar.planning.evaluator import DEAR, Evaluator, OutOfTime
from autopar.planning.neighbours import PHASES, Neighbour, Phases, one_stage_from
from autopar.planning.parts import Part
from autopar.planning.state import State

# Relative: what the stage search estimates to be slower than the best plan by more than this is not made, both of one
# stage: its errors are much alike for plans of one step.
_EQUALLY_OFF = 0.02


class Planner:
    """Finds a plan for one traced step on one cluster."""

    def __init__(
        self,
        analysis: BatchAnalysis,
        cluster: Cluster,
        method: Method = AUTO,
        num_layers: int | None = None,
        like: Planner | None = None,
    ) -> None:
        """`like`: another one for the same step and cluster, with which it shares what both need and the best plan."""
        self.analysis, self.cluster, self.method = analysis, cluster, method
        known = None if like is None else like.evaluator
        self.evaluator: Evaluator = Evaluator(analysis, cluster, method, num_layers, known)
        self.state: State | None = None  # of the latest search
        names = {*Part, *(neighbour.__name__ for phase in PHASES for neighbour in phase)}
        if unknown := method.without - names:
            raise InternalError(f"no part of the search is called {', '.join(map(repr, sorted(unknown)))}")

    def plan(self, num_microbatches: int | None = None) -> Finished:
        """The best plan found and its programs, without notes: see `noted`.

        Raises:
          InfeasiblePlanError: nothing fits; says what is missing where.
          OutOfTime: before any plan was found.
        """
        best: Finished | None = None
        try:
            for better in self._improving(num_microbatches):
                best = better
        except OutOfTime:
            if best is None:
                raise
        if best is None:
            equations = self.analysis.graph.equations
            error = self.evaluator.stages.infeasible(self.analysis.graph.name)
            hint = unfused_hint(equations, {eqn.id: rule_of(eqn) for eqn in equations})
            raise InfeasiblePlanError(f"{error} {hint}".strip()) from None
        return best

    def any_plan(self, num_microbatches: int | None = None) -> Plan | None:
        """The first plan that fits, if one is found."""
        with contextlib.suppress(OutOfTime, PlanError):
            for plan, _ in self._improving(num_microbatches):
                return plan
        return None

    @property
    def best_estimate(self) -> float:
        """Seconds of the best plan found, as the stage search estimates plans of one stage."""
        best = self.evaluator.best
        return best.estimate if best.num_stages == 1 else best.step_time

    @property
    def most_estimate(self) -> float:
        """Seconds that the stage search may estimate for a plan of one stage which is quicker than the best."""
        best = self.evaluator.best
        return (1 + (_EQUALLY_OFF if best.num_stages == 1 else DEAR)) * best.estimate

    def better_on(self, mesh: Mesh, num_microbatches: int) -> Finished | None:
        """The plan of one stage on a mesh, if by what is known of it now it is quicker than the best, and it is."""
        with contextlib.suppress(OutOfTime, UserError):
            self.evaluator.check_time()
            if self.evaluator.seconds_on(num_microbatches, mesh) < self.evaluator.best.estimate:
                return self.evaluator.outcome(Candidate(num_microbatches, 1, mesh=mesh)).better
        return None

    def beside(self, method: Method) -> Planner:
        """A planner by another method that looks for what is better than what this has found."""
        return Planner(self.analysis, self.cluster, method, like=self)

    def better_by(
        self, rival: Planner, num_microbatches: int | None = None, fewest: int | None = None
    ) -> Finished | None:
        """The best plan that a rival finds, if it is quicker than the best so far.

        `fewest`: it has one stage, for which no fewer microbatches than these are enough.
        """
        best: Finished | None = None
        rival.evaluator.best = Incumbent(self.evaluator.best.step_time, self.most_estimate, self.most_estimate)
        # What is to be warned of was when the search began.
        quietly = warnings.catch_warnings(action="ignore")
        phases = PHASES if fewest is None else ((one_stage_from(fewest),),)
        with quietly, contextlib.suppress(OutOfTime, UserError):
            for better in rival._improving(num_microbatches, phases):
                best = better
        if best is None:
            return None
        self.evaluator.best = rival.evaluator.best
        return best

    def _improving(self, num_microbatches: int | None, phases: Phases = PHASES) -> Iterator[Finished]:
        """Plans, each better than all before."""
        fixed = num_microbatches if num_microbatches is not None else self.method.num_microbatches
        if fixed is not None:
            self.evaluator.layering.layered(fixed, self.method.num_stages != 1)  # raises what is wrong with it
        self.state = state = State(self.evaluator, fixed)
        for phase in phases:
            yield from better_plans(state, phase)

    def noted(self, finished: Finished) -> Finished:
        """A plan of this planner with what is to be said of it; what costs much is warned of, too."""
        plan, lowered = finished
        return dataclasses.replace(plan, notes=self._notes(lowered, plan.step_time)), lowered

    def _notes(self, lowered: LoweredStep, step_time: float) -> tuple[str, ...]:
        """What is left whole for want of a divisor, where what costs most is a warning, too; unfused attention."""
        prices = self.evaluator.prices

        def price_of(mesh: Mesh) -> StepPrice:
            return prices.resharder(mesh)[1]

        causes = find_unsplit(lowered, self.method, prices.kind, price_of, step_time)
        for cause in causes:
            if cause.is_dear:
                warn(f"{self.analysis.graph.name}, method {self.method.name!r}: {cause}", UnsplitWarning)
        return (*map(str, causes), *unfused_notes(lowered, prices.kind, price_of, step_time))


def better_plans(state: State, neighbours: Sequence[Neighbour]) -> Iterator[Finished]:
    """What is better than all before of what some neighbours propose; the one that expects least is heard first."""
    # Whether the stage search found nothing for a proposal, the seconds that it expects; in the order of proposals.
    pending: list[tuple[bool, float, int, Proposal, Proposals, str]] = []
    order = itertools.count()

    def hear(name: str, proposals: Proposals, answer: Outcome | None) -> None:
        started = time.process_time()
        with contextlib.suppress(StopIteration):
            proposal = next(proposals) if answer is None else proposals.send(answer)
            seconds = math.inf if proposal.seconds is None else proposal.seconds
            heapq.heappush(pending, (proposal.seconds is None, seconds, next(order), proposal, proposals, name))
        state.seconds[name] += time.process_time() - started

    for neighbour in neighbours:
        name = neighbour.__name__
        if state.evaluator.method.has(name):
            state.least_expected = pending[0][1] if pending else math.inf
            hear(name, neighbour(state), None)
    while pending:
        *_, proposal, proposals, name = heapq.heappop(pending)
        started = time.process_time()
        outcome = state.evaluator.outcome(proposal.candidate)
        state.seconds[name] += time.process_time() - started
        state.proposals[name] += 1
        if outcome.better is not None:
            state.plan = state.found_by[name] = outcome.better[0]
            yield outcome.better
        hear(name, proposals, outcome)
