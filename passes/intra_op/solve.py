"""Choose one strategy per node at least cost within the memory, and prove how good the choice is.

1. Reduce the network exactly (`network.py`).
2. Without memory: eliminate all nodes exactly (`eliminate.py`). If the result fits, it is the optimum.
3. If the memory binds: climb with prices on bytes (`dual.py`), one elimination per evaluation, first on a few
   strategies of each node (column generation); repair and improve what the evaluations choose (`moves.py`); forbid
   every strategy whose least cost is above the best choice's; reduce again and repeat with what is left.
4. Branch on what is left: halve the strategies of the node about which the best prices are most of two minds, and
   treat each half as in 3 (branch and bound, least bound first).
5. Where elimination is too wide (`oracles.py`), messages (`messages.py`) give weaker bounds instead. Branching would
   not end; CP-SAT gets all that is left if it is small enough, then neighbourhoods of the best choice.

Work is counted, not timed, and every step is deterministic: if the work limit is reached before the time limit, equal
input gives equal output.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

from autopar.passes.intra_op.dual import Cut, climb, priced
from autopar.passes.intra_op.dual import evaluate as evaluate_prices
from autopar.passes.intra_op.eliminate import plan_elimination
from autopar.passes.intra_op.messages import Messages
from autopar.passes.intra_op.moves import Moves
from autopar.passes.intra_op.network import Contradiction, Network
from autopar.passes.intra_op.oracles import STEP, Oracle, oracle_for
from autopar.passes.intra_op.problem import Array, Infeasible, Integers, Mask, Problem, Solution, evaluate, fits

_RATE = 5e8  # units of work (see oracles.py) per second of the limit; a current core does about twice as many
_TOLERANCE = 1e-10  # relative: choices that are not better by this much are not looked for
_WORTH_REDUCING = 1 << 26  # work of an elimination that takes longer than looking for dominated strategies
_COLUMNS, _COLUMN_CLIMB = 8, 15  # evaluations of the whole network, and of a few strategies between them
_COLUMNS_CLOSE = 2e-3  # relative distance of the few strategies' bound from the whole network's that is good enough
_FIRST_CLIMB, _COLD_CLIMB = 4, 16  # evaluations of the whole network, from good prices and from none
_CLIMBS = (12, 12, 12)  # of what is left then
_BRANCH_CLIMBS = (5, 8)
_MIXTURE = 4  # of a climb's best cuts
_LIGHT = 60  # evaluations in search of the least memory
_WHOLE = 200_000  # pair entries up to which CP-SAT gets all that is left
_BLOCK = 5_000  # pair entries of a neighbourhood
_BLOCK_SECONDS = 0.2  # CP-SAT's deterministic time for one
_STALL = 20  # neighbourhoods without success after which the search ends
_SWEEPS = 30  # of messages, to take the costs that CP-SAT gets down to what is over the bound
_RESOLUTION = 2.0**40  # steps into which CP-SAT divides the distance from the bound to the best


def solve(problem: Problem, *, seconds: float = 10.0, seed: int = 0) -> Solution:
    """The cheapest choice found that fits, with a proven lower bound.

    seconds: sets the work limit, at about half of what a current core does in that time, and is the time limit; the
    first bound and choice are completed whatever it is. Raises Infeasible if no choice fits, or none was found.
    """
    return _Search(problem, seconds, seed).run()


class _Search:
    """The state of one search: the best choice, the best bound, the work that is left."""

    def __init__(self, problem: Problem, seconds: float, seed: int) -> None:
        self.problem = problem
        self.work = seconds * _RATE
        self.deadline = time.monotonic() + seconds
        self.seed = seed
        self.random = np.random.default_rng(seed)
        self.best: Solution | None = None
        self.bound = -math.inf
        self.smallest_peak = math.inf
        self.cheapest: tuple[int, ...] = ()  # choice without regard to memory
        self.exact = True  # whether the last climb's bounds were minima

    # The course

    def run(self) -> Solution:
        try:
            network = Network.of(self.problem)
            self._without_memory(network.without_memory())
        except Contradiction:
            self.bound = self.best.cost if self.best else math.inf
        else:
            if not self._closed() and network.slack.size:
                self._with_memory(network)
        if self.best is None:
            raise Infeasible(self.smallest_peak, self.problem.limit, proved=self.bound == math.inf)
        return dataclasses.replace(self.best, lower_bound=min(self.bound, self.best.cost))

    def _without_memory(self, network: Network) -> None:
        network.reduce(dominated=False)
        plan = plan_elimination({node: cost.size for node, cost in network.unary.items()}, network.adjacent)
        if plan is None or plan.work > _WORTH_REDUCING:
            network.reduce(dominated=True)
        self._close(network, relaxed=self.problem.limit is not None)

    def _with_memory(self, network: Network) -> None:
        full = network.copy()
        try:
            network.reduce(dominated=True)
            self._close(network, relaxed=False)
        except Contradiction:
            self.bound = self.best.cost if self.best else math.inf
            if self.best is None:
                self._lightest(full)

    def _close(self, network: Network, *, relaxed: bool) -> None:
        """Steps 2 to 5; raises Contradiction if nothing better than the best is left.

        relaxed: the network is without the memory, so that finding a choice that fits is not its business.
        """
        prices = self._prices_from_columns(network) if network.slack.size else np.zeros(0)
        bound, cuts = self._tighten(network, prices, (_FIRST_CLIMB if prices.any() else _COLD_CLIMB, *_CLIMBS))
        self.bound = max(self.bound, bound)
        if self._closed() or self._spent() or (relaxed and self.best is None):
            return
        if self.exact:
            self._branch(network, bound, cuts)
        else:
            if network.pair_entries <= _WHOLE:
                found = self._cp_sat(network, cuts[0].prices, self.work / _RATE / 2)
                self.bound = max(self.bound, found)
            self._neighbourhoods(network, cuts[0].prices)

    def _prices_from_columns(self, network: Network) -> Array:
        """Good prices for few evaluations of the whole network, by climbing on a few strategies of each node.

        Those are the lightest ones, that of the cheapest choice, and what the whole network then chooses at the
        prices found. The few strategies' optimum, which mixes them freely, says much more about prices than cuts do.
        """
        oracle, moves, known = oracle_for(network, self.random), Moves(network), dict(enumerate(self.cheapest))
        columns = {
            node: _lightest(network, node) | (labels == known.get(node, -1)) for node, labels in network.labels.items()
        }
        best, prices = -math.inf, np.zeros(network.slack.size)
        for _ in range(_COLUMNS):
            part = network.copy()
            try:
                for node, column in columns.items():
                    part.keep(node, column)
                part.reduce(dominated=True)
            except Contradiction:
                break  # the few do not go together, or do not fit
            top: Cut | None = None
            inner, part_moves = oracle_for(part, self.random), Moves(part)
            priced_before = dict(zip(network.times, prices, strict=True))
            start = np.array([priced_before[time] for time in part.times])
            for cut in itertools.islice(climb(part, inner.evaluate, highest, start), _COLUMN_CLIMB):
                self._spend(inner)
                self._offer(part, cut.choice)
                if part.slack.size and (improved := part_moves.improve(cut.choice)):
                    self._offer(part, improved)
                if top is None or cut.value > top.value:
                    top = cut
            assert top is not None  # a climb makes at least one evaluation
            found = dict(zip(part.times, top.prices, strict=True))
            whole = evaluate_prices(
                network, oracle.evaluate, np.array([found.get(time, 0.0) for time in network.times])
            )
            self._spend(oracle)
            self._offer(network, whole.choice)
            if improved := moves.improve(whole.choice):
                self._offer(network, improved)
            self.bound = max(self.bound, whole.value)
            if whole.value > best:
                best, prices = whole.value, whole.prices
            if top.value - whole.value <= _COLUMNS_CLOSE * abs(whole.value) or self._spent():
                break
            for node, position in whole.choice.items():
                columns[node][position] = True
        return prices

    def _tighten(self, network: Network, prices: Array, climbs: Sequence[int]) -> tuple[float, list[Cut]]:
        """Steps 3 and 4: a lower bound on what is worth finding in the network, and the last climb, best cut first.

        Shrinks the network; raises Contradiction if nothing is left in it that is better than the best.
        """
        bound = -math.inf
        for index, evaluations in enumerate(climbs):
            oracle, moves, cuts = oracle_for(network, self.random), Moves(network), list[Cut]()
            for cut in climb(network, oracle.evaluate, highest, prices):
                self._spend(oracle)
                cuts.append(cut)
                self._offer(network, cut.choice)
                if network.slack.size and (improved := moves.improve(cut.choice)):
                    self._offer(network, improved)
                if len(cuts) >= evaluations or self._spent() or (self.best and cut.value >= self._worth(self.best)):
                    break
            self.exact = oracle.exact
            if math.isinf(cuts[0].value):
                raise Contradiction  # infinite costs exclude every choice, whatever the memory
            cuts.sort(key=lambda cut: -cut.value)
            bound = max(bound, cuts[0].value)
            if self.best is None and network.slack.size:
                if bound > (most := network.most()) + _TOLERANCE * abs(most):
                    raise Contradiction  # no choice of finite cost fits
                self._lightest(network)
            if self.best is None:
                break
            if oracle.exact and not network.slack.size:
                return self.best.cost, cuts  # the choice that was offered is the minimum, whatever the rounding
            if bound >= self._worth(self.best):
                return self._worth(self.best), cuts
            if self._spent() or index == len(climbs) - 1:
                break
            known = dict(zip(network.times, cuts[0].prices, strict=True))
            self._fix(network, oracle.marginals(priced(network, cuts[0].prices)), cuts[0].prices)
            self._spend(oracle)
            prices = np.array([known[time] for time in network.times])
        return bound, cuts

    def _branch(self, network: Network, bound: float, cuts: list[Cut]) -> None:
        """Split what is left in two, the part with the least bound first, until no part can hold a better choice."""
        parts = [(bound, 0, network, cuts)]
        count = 0
        while parts and not self._spent():
            self.bound = max(self.bound, parts[0][0])
            if self._closed():
                return
            least, _, network, cuts = heapq.heappop(parts)
            node, kept = _split(network, cuts)
            for side in (kept, ~kept):
                part = network.copy()
                try:
                    part.keep(node, side)
                    known = dict(zip(part.times, cuts[0].prices, strict=True))
                    part.reduce(dominated=True)
                    bound, found = self._tighten(part, np.array([known[time] for time in part.times]), _BRANCH_CLIMBS)
                except Contradiction:
                    continue
                if self.best is None or bound < self._worth(self.best):
                    count += 1
                    heapq.heappush(parts, (max(bound, least), count, part, found))
        if not parts:
            raise Contradiction

    def _fix(self, network: Network, marginals: dict[int, Array], prices: Array) -> None:
        """Forbid the strategies with which no choice is better than the best, and reduce again."""
        assert self.best is not None
        limit = self._worth(self.best) - network.offset + float(prices @ network.slack)
        for node, bounds in marginals.items():
            network.keep(node, bounds < limit)
        network.reduce(dominated=True)

    def _neighbourhoods(self, network: Network, prices: Array) -> None:
        """Improve the best choice block by block until that stalls."""
        stalled = 0
        while self.best is not None and stalled < _STALL and not self._closed() and not self._spent():
            before = self.best
            self._neighbourhood(network, prices)
            stalled = stalled + 1 if self.best is before else 0

    def _neighbourhood(self, network: Network, prices: Array) -> None:
        """Look for a better choice that differs from the best in a random connected block only."""
        assert self.best is not None
        nodes = list(network.unary)
        waiting, block, entries = [nodes[int(self.random.integers(len(nodes)))]], set[int](), 0
        while waiting and entries < _BLOCK:
            node = waiting.pop(int(self.random.integers(len(waiting))))
            if node not in block:
                block.add(node)
                entries += sum(matrix.size for other, matrix in network.adjacent[node].items() if other in block)
                waiting += network.adjacent[node]
            if not waiting and len(block) < len(nodes):  # a component is complete: go on in another
                waiting = [node for node in nodes if node not in block][:1]
        part = network.copy()
        self.work -= STEP * len(nodes)
        try:
            for node in nodes:
                same = part.labels[node] == self.best.choice[node]
                # a strategy that was reduced away has an equal or better one among those that are left
                if node not in block and same.any():
                    part.keep(node, same)
            part.reduce(dominated=True)
            known = dict(zip(network.times, prices, strict=True))
            self._cp_sat(part, np.array([known[time] for time in part.times]), _BLOCK_SECONDS)
        except Contradiction:
            return

    # The books

    def _spend(self, oracle: Oracle) -> None:
        self.work -= oracle.work
        oracle.work = 0.0

    def _spent(self) -> bool:
        return self.work <= 0 or time.monotonic() > self.deadline

    def _closed(self) -> bool:
        return self.best is not None and self.bound >= self._worth(self.best)

    def _worth(self, solution: Solution) -> float:
        """What a choice must cost less than to be looked for."""
        return solution.cost - _TOLERANCE * abs(solution.cost)

    def _offer(self, network: Network, positions: dict[int, int]) -> None:
        choice = network.lift(positions, self.problem.num_nodes)
        cost, peak = evaluate(self.problem, choice)
        if math.isfinite(cost):
            self.cheapest = self.cheapest or choice
            self.smallest_peak = min(self.smallest_peak, peak)
            if fits(self.problem, peak) and (self.best is None or cost < self.best.cost):
                self.best = Solution(choice, cost, -math.inf, peak)

    # Step 5, and the least memory

    def _lightest(self, network: Network) -> None:
        """Look for a choice with a small peak, whatever it costs, by weights on the points in time that grow with load.

        Raises Contradiction if a weighted sum of loads proves that none fits.
        """
        pattern, moves = network.copy(), Moves(network)
        pattern.offset = 0.0
        pattern.unary = {node: np.zeros(cost.size) for node, cost in network.unary.items()}
        for u, v in network.edges:
            forbidden = np.isinf(network.adjacent[u][v])
            del pattern.adjacent[u][v], pattern.adjacent[v][u]
            if forbidden.any():
                pattern.add_edge(u, v, np.where(forbidden, np.inf, 0.0))
        oracle = oracle_for(pattern, self.random)
        limit = self.problem.limit or 0.0
        weights = np.full(network.slack.size, 1 / network.slack.size)
        for _ in range(_LIGHT):
            cut = evaluate_prices(pattern, oracle.evaluate, weights)
            self._spend(oracle)
            self._offer(network, cut.choice)
            if math.isfinite(cut.value) and (improved := moves.improve(cut.choice)):
                self._offer(network, improved)
            if self.best is not None or self._spent():
                return
            if cut.value > 1e-9 * limit and self.bound < math.inf:
                raise Contradiction
            load = limit + cut.slope
            weights = weights * np.exp(4 * (load / load.max() - 1))
            weights /= weights.sum()

    def _cp_sat(self, network: Network, prices: Array, seconds: float) -> float:
        """Give the network to CP-SAT; a lower bound on what a choice within it costs, as far as it is of interest.

        The costs are what messages at these prices leave over their bound, in whole numbers rounded down; the price of
        what a choice leaves free of the memory is part of its cost. So the objective starts at the bound.
        """
        costs, messages = priced(network, prices), Messages(network.unary, network.adjacent)
        for _ in range(_SWEEPS):
            messages.sweep(costs)
        self.work -= _SWEEPS * messages.work
        base, nodes, edges = messages.reduced(costs)
        base += network.offset - float(prices @ network.slack)
        if self.best is not None:
            room = self._worth(self.best) - base
            if room <= 0:
                return base + room
        else:
            most = network.most()
            room = 1.001 * (most - base) + 1e-6 * abs(most) + 1e-300  # above every choice of finite cost
        program = _Program(network, nodes, edges, prices, room)
        if self.best is not None:
            program.hint(network, self.best.choice)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # several are deterministic only in lockstep, which is slower here
        solver.parameters.random_seed = self.seed
        solver.parameters.max_deterministic_time = max(seconds, 1e-3)
        solver.parameters.max_time_in_seconds = max(self.deadline - time.monotonic(), 1e-3)
        status = solver.solve(program.model)
        self.work -= _RATE * solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return base + room if self.best else math.inf
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self._offer(network, program.choice(solver))
        return base + max(solver.best_objective_bound, 0.0) * room / _RESOLUTION


def _split(network: Network, cuts: list[Cut]) -> tuple[int, Mask]:
    """A node and a half of its strategies, such that the best cuts' choices, whose mixture the bound is, fall apart."""
    unpriced = dataclasses.replace(network, unary={node: np.zeros(cost.size) for node, cost in network.unary.items()})
    weights = priced(unpriced, cuts[0].prices)
    best = (-1.0, -1, 0.0)
    for node, weight in weights.items():
        chosen = [float(weight[cut.choice[node]]) for cut in cuts[:_MIXTURE]]
        best = max(best, (max(chosen) - min(chosen), node, (max(chosen) + min(chosen)) / 2))
    spread, node, middle = best
    if spread > 0:
        return node, weights[node] <= middle
    node = max(network.unary, key=lambda node: network.unary[node].size)
    return node, np.arange(network.unary[node].size) == cuts[0].choice[node]


def _lightest(network: Network, node: int) -> Mask:
    """The strategy that uses least over all points in time."""
    used = np.zeros(network.unary[node].size)
    for start, end, amount in network.usages[node]:
        used += (end - start) * amount
    return np.arange(used.size) == used.argmin()


class _Program:
    """The network as a model of CP-SAT.

    Per node one Boolean per strategy; per edge one Boolean per pair of classes of strategies with the same costs, whose
    sums over rows and columns are those of the nodes; per point in time the free bytes, if they have a price.
    Everything that costs at least `room`, seconds, is forbidden.
    """

    def __init__(
        self,
        network: Network,
        nodes: dict[int, Array],
        edges: dict[tuple[int, int], Array],
        prices: Array,
        room: float,
    ) -> None:
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
        for point, (slack, price) in enumerate(zip(network.slack, prices, strict=True)):
            self._add_limit(network, point, int(slack), float(price))
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


def highest(cuts: Sequence[Cut], lower: Array, upper: Array) -> tuple[float, Array]:
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
    found = lower.copy()
    for index, variable in prices.items():
        found[index] = min(max(variable.solution_value() * unit, lower[index]), upper[index])
    return best + value.solution_value() * scale, found
