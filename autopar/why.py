"""Why a plan is as it is: of an operator the strategy chosen, what others cost, and what they would cost the stage."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from autopar.errors import PlanError
from autopar.finisher import Finisher
from autopar.ir.graph import Equation, Phase
from autopar.ir.plan import Plan
from autopar.ir.plan_text import render
from autopar.ir.schedule import schedule_for
from autopar.ir.sharding import Sharding
from autopar.ir.strategy import Lane
from autopar.ir.units import seconds_text
from autopar.layering import Layered
from autopar.passes.intra_op.priced_stage import PATIENCE
from autopar.passes.intra_op.problem import Infeasible, evaluate
from autopar.passes.intra_op.shard import StageProblem
from autopar.passes.intra_op.solve import solve
from autopar.passes.lower import LoweredStep

_SECONDS = 0.2  # the work limit of the solver for each alternative
_GAP = 0.002  # relative to the stage's seconds


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One strategy of an operator, with everything else of its stage at its best for it."""

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    seconds: float  # of the operator itself, per step; its operands have to be brought there besides
    stage_seconds: float  # per step, that the stage takes more than by the plan; inf: it does not fit in the memory

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.operands)) or '()'} -> {' '.join(map(str, self.results))}"


@dataclasses.dataclass(frozen=True)
class Why:
    """An operator of a plan: the strategy that it has and all others, the next best first."""

    stage: int
    phase: Phase
    operator: str  # the name of its primitive
    source: str  # the user's line
    chosen: Alternative
    others: tuple[Alternative, ...]

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("strategy: operands -> results")
        table.add_column("operator", justify="right")
        table.add_column("stage", justify="right")
        table.add_row(Text(str(self.chosen)), seconds_text(self.chosen.seconds), "chosen")
        for other in self.others:
            more = other.stage_seconds
            text = "does not fit" if math.isinf(more) else f"{'+-'[more < 0]}{seconds_text(abs(more))}"
            table.add_row(Text(str(other)), seconds_text(other.seconds), text)
        place = f"stage {self.stage}, {self.phase.value}" + (f", {self.source}" if self.source else "")
        return render([Text(f"{self.operator} ({place})"), table])


def explain(finisher: Finisher, plan: Plan, where: str, most: int) -> tuple[Why, ...]:
    """Of the operators of a plan whose name or line of code contains `where` those of most work, at most so many.

    Raises:
      PlanError: `most` is no whole number above 0, or there is no such operator.
    """
    if type(most) is not int or most < 1:
        raise PlanError(f"why(most={most!r}): most must be a whole number above 0.")
    _, lowered, layered = finisher.restore(plan)
    rules = layered.rules
    m = layered.step.num_microbatches
    found = [
        ((m if program.in_loop else 1) * rules[eqn.id].work({}), program.stage, program.index, eqn)
        for program in lowered.placed.programs
        for eqn in program.equations
        if where in eqn.primitive.name or where in eqn.source
    ]
    if not found:
        names = {e.primitive.name for p in lowered.placed.programs for e in p.equations}
        raise PlanError(
            f"why(where={where!r}): no operator of {plan.function} has this in its name or line of code; its operators "
            f"are {', '.join(sorted(names))}."
        )
    found.sort(key=lambda one: -one[0])
    chosen = sorted(found[:most], key=lambda one: (one[2], one[3].id))
    stages = {k: _Solved(finisher, plan, layered, lowered, k) for k in {stage for _, stage, _, _ in chosen}}
    return tuple(why for _, stage, program, eqn in chosen for why in stages[stage].why(program, eqn))


class _Solved:
    """The problem of one stage, with the choice that the plan has made."""

    def __init__(self, finisher: Finisher, plan: Plan, layered: Layered, lowered: LoweredStep, stage: int) -> None:
        self.stage = stage
        mesh, capacity = plan.stages[stage].mesh, plan.stages[stage].memory.capacity
        withheld = finisher.stages.prices.memory(mesh) - capacity  # by a limit, or for other stages of these devices
        rows = schedule_for(plan.schedule, [s.mesh for s in plan.stages], plan.num_microbatches)
        self.problem = finisher.stages.problem(layered, lowered.placed, stage, mesh, withheld=withheld, rows=rows)
        self.phases = {p.index: p.phase for p in lowered.placed.programs}
        self.in_flight = rows.in_flight(stage)
        self.choice = _choice(self.problem, plan, stage)
        self.cost, _ = evaluate(self.problem.numbers.problem(self.in_flight), self.choice)

    def why(self, program: int, eqn: Equation) -> list[Why]:
        """One for each lane of an operator."""
        found = []
        for (at, eqn_id, _), (node, options) in self.problem.lanes.items():
            if (at, eqn_id) != (program, eqn.id) or len(options.lanes) < 2:
                continue
            costs = self.problem.numbers.costs[node]

            def alternative(k: int, more: float, options: Any = options, costs: Any = costs) -> Alternative:
                operands, results = (tuple(s.each[k] for s in side) for side in (options.operands, options.results))
                return Alternative(operands, results, float(costs[k]), more)

            mine = self.choice[node]
            others = [alternative(k, self._more(node, k)) for k in range(len(options.lanes)) if k != mine]
            others.sort(key=lambda one: one.stage_seconds)
            phase = self.phases[program]
            found.append(Why(self.stage, phase, eqn.primitive.name, eqn.source, alternative(mine, 0.0), tuple(others)))
        return found

    def _more(self, node: int, strategy: int) -> float:
        """Seconds per step that the stage would take more if a node had this strategy."""
        costs = list(self.problem.numbers.costs)
        forced = np.full(len(costs[node]), np.inf)
        forced[strategy] = costs[node][strategy]
        costs[node] = forced
        start = [*self.choice]
        start[node] = strategy
        problem = dataclasses.replace(self.problem.numbers, costs=costs).problem(self.in_flight)
        try:
            found = solve(problem, seconds=_SECONDS, patience=PATIENCE, gap=_GAP, start=start)
        except Infeasible:
            return math.inf
        return found.cost - self.cost


def _choice(problem: StageProblem, plan: Plan, stage: int) -> list[int]:
    """The plan's, by node; what it does not say, such as how something is sent, as cheap as can be."""
    numbers, kept = problem.numbers, plan.stages[stage]
    found: dict[int, int] = {}
    for (program, eqn_id, lane), (node, options) in problem.lanes.items():
        chosen: Lane = kept.strategies[program, eqn_id][lane]
        found[node] = options.lanes.index(chosen)
    for (program_or_none, value), (node, shardings) in problem.layouts.items():
        found[node] = shardings.each.index(kept.layouts[program_or_none, value.id])
    for node, costs in enumerate(numbers.costs):
        if node not in found:
            total = costs.copy()
            for u, v, matrix in numbers.edges:
                if u == node and v in found:
                    total = total + matrix[:, found[v]]
                elif v == node and u in found:
                    total = total + matrix[found[u]]
            found[node] = int(total.argmin())
    return [found[node] for node in range(len(numbers.costs))]
