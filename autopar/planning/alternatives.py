"""Why a plan is as it is: of an operator the strategy chosen, what others cost, and what they would cost the stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.errors import PlanError
from autopar.ir.graph import Equation, Phase
from autopar.ir.local import StageSharding
from autopar.ir.plan import Plan
from autopar.ir.schedule import schedule_for
from autopar.ir.units import bytes_text, seconds_text
from autopar.ir.why import Alternative, Why
from autopar.passes.intra_op.priced_stage import PATIENCE
from autopar.passes.intra_op.shard import StageProblem
from autopar.passes.lower import LoweredStep
from autopar.passes.solver.problem import Infeasible
from autopar.passes.solver.solve import Forced
from autopar.passes.unfused import as_products
from autopar.planning.finisher import Finisher, Restored
from autopar.planning.layering import Layered

_SECONDS = 0.2  # the work limit of the solver for each alternative
_TIED_SECONDS = 0.0  # .. where alike operators choose alike: the first bound and choice are as good as any
_GAP = 0.002  # relative to the stage's seconds


def explain(finisher: Finisher, restored: Restored, where: str, most: int) -> tuple[Why, ...]:
    """Of the operators of a plan whose name or line of code contains `where` those of most work, at most so many.

    Raises:
      PlanError: `most` is no whole number above 0, or there is no such operator.
    """
    if type(most) is not int or most < 1:
        raise PlanError(f"why(most={most!r}): most must be a whole number above 0.")
    plan, lowered, layered = restored
    rules = layered.rules
    m = layered.step.num_microbatches
    operators = [
        ((m if program.in_loop else 1) * rules[eqn.id].work({}), program.stage, program.index, eqn)
        for program in lowered.placed.programs
        for eqn in program.equations
        if where in eqn.primitive.name or where in eqn.source
    ]
    if not operators:
        names = {e.primitive.name for p in lowered.placed.programs for e in p.equations}
        raise PlanError(
            f"why(where={where!r}): no operator of {plan.function} has this in its name or line of code; its operators "
            f"are {', '.join(sorted(names))}."
        )
    operators.sort(key=lambda one: -one[0])
    chosen = sorted(operators[:most], key=lambda one: (one[2], one[3].id))
    solved = Solved(finisher, plan, layered, lowered)
    return tuple(why for _, stage, program, eqn in chosen for why in solved.why(stage, program, eqn))


class Solved:
    """The problems of a plan's stages, with the choices that the plan has made.

    `tied`: operators that are alike (`alike.py`) are asked about together, so that a model of many layers takes no
    longer than one of two.
    """

    def __init__(
        self, finisher: Finisher, plan: Plan, layered: Layered, lowered: LoweredStep, *, tied: bool = False
    ) -> None:
        self._of = (finisher, plan, layered, lowered)
        self._tied = tied
        self._stages: dict[int, _Stage] = {}

    def why(self, stage: int, program: int, eqn: Equation, most: int | None = None) -> list[Why]:
        """One for each part of an operator, with at most so many alternatives: those that could be best."""
        if stage not in self._stages:
            self._stages[stage] = _Stage(*self._of, stage, self._tied)
        return self._stages[stage].why(program, eqn, most)


class _Stage:
    def __init__(
        self, finisher: Finisher, plan: Plan, layered: Layered, lowered: LoweredStep, stage: int, tied: bool
    ) -> None:
        self.stage = stage
        mesh, capacity = plan.stages[stage].mesh, plan.stages[stage].memory.capacity
        withheld = finisher.stages.prices.memory(mesh) - capacity  # by a limit, or for other stages of these devices
        rows = schedule_for(plan.schedule, [s.mesh for s in plan.stages], plan.num_microbatches)
        self.problem = finisher.stages.problem(
            layered, lowered.placed, stage, mesh, tied=tied, withheld=withheld, rows=rows
        )
        self.phases = {p.index: p.phase for p in lowered.placed.programs}
        self.in_flight = rows.in_flight(stage)
        self.mesh, self.kind, self.num_microbatches = mesh, finisher.stages.prices.kind(mesh), plan.num_microbatches
        self.choice = _choice(self.problem, lowered.shardings[stage])
        self.operators = {node for node, _ in self.problem.parts.values()}
        self.tied = tied
        self._problem = self.problem.numbers.problem(self.in_flight)
        self._asked: Forced | None = None

    def why(self, program: int, eqn: Equation, most: int | None) -> list[Why]:
        """One for each part of an operator."""
        whys = []
        for (at, eqn_id, _), (node, options) in self.problem.parts.items():
            if (at, eqn_id) != (program, eqn.id) or len(options.assignments) < 2:
                continue
            mine = self.choice[node]
            # Tied, the plan's own choice may not be one: what it is compared with is the best that there is.
            start = self._forced(node, mine) if self.tied else self.choice
            base = self.choice if isinstance(start, Infeasible) else start
            chosen = self._alternative(node, options, mine, base, base)
            others = [
                self._alternative(node, options, k, base, self._forced(node, k)) for k in self._likely(node, mine, most)
            ]
            others.sort(key=lambda one: one.stage_seconds)
            # A program of several phases is named by the first.
            phase = eqn.phase if self.phases[program] in (Phase.FORWARD, Phase.UPDATE) else self.phases[program]
            besides = self._as_products(eqn, program, chosen)
            whys.append(Why(self.stage, phase, eqn.primitive.name, eqn.source, chosen, tuple(others), besides))
        return whys

    def _as_products(self, eqn: Equation, program: int, chosen: Alternative) -> str:
        """Of attention as one operator: what it would take with all its scores in memory."""
        shapes = [
            tuple(n // tiles for n, tiles in zip(v.shape, sharding.tiles(self.mesh), strict=True))
            for v, sharding in zip(eqn.inputs, chosen.operands, strict=True)
        ]
        found = as_products(eqn, shapes, self.kind)
        if found is None:
            return ""
        seconds = found.seconds * (self.num_microbatches if self.phases[program].in_loop else 1)
        return (
            f"As two products around a softmax it would take {seconds_text(seconds)}, with scores of "
            f"{bytes_text(found.scores)} an array."
        )

    def _likely(self, node: int, mine: int, most: int | None) -> list[int]:
        """The other strategies that cost least with neighbours at their best for them."""
        costs = self.problem.numbers.costs[node].copy()
        for u, v, matrix in self.problem.numbers.edges:
            if u == node:
                costs += matrix.min(axis=1)
            elif v == node:
                costs += matrix.min(axis=0)
        return [k for k in np.argsort(costs, kind="stable").tolist() if k != mine][:most]

    def _forced(self, node: int, strategy: int) -> Sequence[int] | Infeasible:
        """The best choice of all where a node has this strategy, or why there is none."""
        if self._asked is None or self._asked.node != node:
            self._asked = Forced(self._problem, node)
        start = [*self.choice]
        start[node] = strategy
        seconds = _TIED_SECONDS if self.tied else _SECONDS
        try:
            return self._asked.solve(strategy, seconds=seconds, patience=PATIENCE, gap=_GAP, start=start).choice
        except Infeasible as error:
            return error

    def _alternative(
        self, node: int, options: Any, strategy: int, base: Sequence[int], choice: Sequence[int] | Infeasible
    ) -> Alternative:
        operands, results = (tuple(s.each[strategy] for s in side) for side in (options.operands, options.results))
        seconds = float(self.problem.numbers.costs[node][strategy])
        if isinstance(choice, Infeasible):
            needed = None if math.isinf(choice.smallest_peak) else choice.smallest_peak
            return Alternative(operands, results, seconds, math.inf, needed=needed, limit=choice.limit)
        here, there = self._seconds(choice), self._seconds(base)
        changed = sum(choice[k] != base[k] for k in self.operators - {node})
        of_operators, of_resharding = here[0] - there[0], here[1] - there[1]
        return Alternative(
            operands, results, seconds, of_operators + of_resharding, of_operators, of_resharding, changed
        )

    def _seconds(self, choice: Sequence[int]) -> tuple[float, float]:
        """Per step: of all operators, and of bringing values from one to another."""
        numbers = self.problem.numbers
        return (
            math.fsum(float(costs[k]) for costs, k in zip(numbers.costs, choice, strict=True)),
            math.fsum(float(matrix[choice[u], choice[v]]) for u, v, matrix in numbers.edges),
        )


def _choice(problem: StageProblem, sharding: StageSharding) -> list[int]:
    """The plan's, by node; what it does not say, such as how something is sent, as cheap as can be.

    So is a layout that the problem does not have: with other alternatives there may be too many to have all of them.
    """
    numbers = problem.numbers
    choice: dict[int, int] = {}
    for (program, eqn_id, part), (node, options) in problem.parts.items():
        choice[node] = options.assignments.index(sharding.strategies[program, eqn_id][part])
    for slot, (node, shardings) in problem.layouts.items():
        if sharding.layouts[slot] in shardings.each:
            choice[node] = shardings.each.index(sharding.layouts[slot])
    for node, costs in enumerate(numbers.costs):
        if node not in choice:
            total = costs.copy()
            for u, v, matrix in numbers.edges:
                if u == node and v in choice:
                    total = total + matrix[:, choice[v]]
                elif v == node and u in choice:
                    total = total + matrix[choice[u]]
            choice[node] = int(total.argmin())
    return [choice[node] for node in range(len(numbers.costs))]
