"""What OR-Tools does for the search.

GLOP finds the next prices among cuts; CP-SAT gets what is too wide for elimination.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

from autopar.passes.solver.dual import CuttingPlane
from autopar.passes.solver.network import Network
from autopar.passes.solver.problem import Array, Integers
from autopar.passes.solver.residual import Outcome, Residual

_RESOLUTION = 2.0**40  # steps into which CP-SAT divides the distance from the bound to the best


def solve_program(residual: Residual) -> Outcome:
    """`IntegerProgram` by CP-SAT, in whole numbers rounded down: its bound holds for the residual's costs too."""
    program = _Program(residual)
    if residual.hint is not None:
        program.hint(residual.network, residual.hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # several are deterministic only in lockstep, which is slower on few cores
    solver.parameters.random_seed = residual.seed
    solver.parameters.max_deterministic_time = residual.work_seconds
    solver.parameters.max_time_in_seconds = residual.wall_seconds
    status = solver.solve(program.model)
    seconds = float(solver.response_proto.deterministic_time)
    if status == cp_model.INFEASIBLE:
        return Outcome(None, math.inf, seconds)
    choice = program.choice(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return Outcome(choice, max(solver.best_objective_bound, 0.0) * residual.room / _RESOLUTION, seconds)


class _Program:
    """The network as a model of CP-SAT.

    Per node one Boolean per strategy; per edge one Boolean per pair of classes of strategies with the same costs, whose
    sums over rows and columns are those of the nodes; per point in time the free bytes, if they have a price.
    Everything that costs at least `room`, seconds, is forbidden.
    """

    def __init__(self, residual: Residual) -> None:
        network, nodes, edges, room = residual.network, residual.nodes, residual.edges, residual.room
        self.model = cp_model.CpModel()
        self._variables: list[cp_model.IntVar] = []
        self._coefficients: list[int] = []
        self._room = room
        self._chosen = {node: [self.model.new_bool_var("") for _ in range(cost.size)] for node, cost in nodes.items()}
        for node, cost in nodes.items():
            self.model.add_exactly_one(self._chosen[node])
            for variable, amount in zip(self._chosen[node], self._whole(cost), strict=True):
                self._add_cost(variable, amount)
        for (u, v), pair in edges.items():
            self._add_edge(u, v, self._whole(pair))
        for point in residual.points.tolist():
            self._add_limit(network, point, int(network.slack[point]), float(residual.prices[point]))
        objective = cp_model.LinearExpr.weighted_sum(self._variables, self._coefficients)
        self.model.minimize(objective)

    def hint(self, network: Network, choice: Sequence[int]) -> None:
        for node, variables in self._chosen.items():
            for label, variable in zip(network.labels[node], variables, strict=True):
                self.model.add_hint(variable, bool(label == choice[node]))

    def choice(self, solver: cp_model.CpSolver) -> dict[int, int]:
        return {
            node: next(index for index, variable in enumerate(variables) if solver.boolean_value(variable))
            for node, variables in self._chosen.items()
        }

    def _whole(self, cost: Array) -> Integers:
        """Costs as whole numbers, rounded down; -1 = forbidden."""
        inside = cost < self._room
        return np.where(inside, np.floor(np.where(inside, cost, 0.0) * (_RESOLUTION / self._room)), -1).astype(np.int64)

    def _add_cost(self, variable: cp_model.IntVar, amount: int) -> None:
        if amount < 0:
            self.model.add(variable == 0)
        elif amount > 0:
            self._variables.append(variable)
            self._coefficients.append(int(amount))

    def _add_edge(self, u: int, v: int, pair: Integers) -> None:
        if not pair.any():
            return
        rows, row_of = np.unique(pair, axis=0, return_inverse=True)
        table, column_of = np.unique(rows, axis=1, return_inverse=True)
        links = [[self.model.new_bool_var("") if amount >= 0 else None for amount in row] for row in table]
        for row, amounts in zip(links, table, strict=True):
            for link, amount in zip(row, amounts, strict=True):
                if link is not None:
                    self._add_cost(link, amount)
        for node, classes, lines in ((u, row_of, links), (v, column_of, list(zip(*links, strict=True)))):
            for index, line in enumerate(lines):
                members = [self._chosen[node][strategy] for strategy in np.flatnonzero(classes.reshape(-1) == index)]
                self.model.add(sum(link for link in line if link is not None) == sum(members))

    def _add_limit(self, network: Network, point: int, slack: int, price: float) -> None:
        terms = [
            (variable, int(amount))
            for node, spans in network.usages.items()
            for start, end, amounts in spans
            if start <= point < end
            for variable, amount in zip(self._chosen[node], amounts, strict=True)
            if amount
        ]
        unit = math.gcd(*(amount for _, amount in terms)) or 1
        load = cp_model.LinearExpr.weighted_sum([variable for variable, _ in terms], [a // unit for _, a in terms])
        worth = math.floor(price * unit * (_RESOLUTION / self._room))
        if worth == 0:
            self.model.add(load <= slack // unit)
            return
        # free bytes worth `room` cannot be afforded
        free = self.model.new_int_var(0, min(slack // unit, int(_RESOLUTION) // worth), "")
        self.model.add(load + free == slack // unit)
        self._add_cost(free, worth)


def highest(cuts: Sequence[CuttingPlane], lower: Array, upper: Array) -> tuple[float, Array]:
    """The prices within limits at which the least of all cuts is greatest: dual.Master by a linear program."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    # bytes and seconds differ by many orders of magnitude: count prices in units of the largest, values from the best
    unit = float(upper.max(initial=0.0)) or 1.0
    best = max(cut.value for cut in cuts)
    scale = max(abs(best), 1e-300)
    moving = np.flatnonzero(upper > lower)
    prices = {int(index): solver.NumVar(lower[index] / unit, upper[index] / unit, "") for index in moving}
    value = solver.NumVar(-solver.infinity(), solver.infinity(), "")
    for cut in cuts:
        # value <= cut.value + slope·(prices - cut.prices), relative to the best
        slope = cut.slope * (unit / scale)
        constant = (cut.value - best) / scale + float(cut.slope @ (lower - cut.prices)) / scale
        constant -= sum(float(slope[index]) * float(lower[index]) / unit for index in prices)
        row = solver.Constraint(-solver.infinity(), constant)
        row.SetCoefficient(value, 1.0)
        for index, variable in prices.items():
            row.SetCoefficient(variable, -float(slope[index]))
    solver.Maximize(value)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return best, lower
    best_prices = lower.copy()
    for index, variable in prices.items():
        best_prices[index] = min(max(variable.solution_value() * unit, lower[index]), upper[index])
    return best + value.solution_value() * scale, best_prices
