"""The course of the search for the cheapest choice within the memory, and for a proof of how good it is.

1. Reduce the network exactly (`network.py`).
2. Without memory: eliminate all nodes exactly (`eliminate.py`). If the result fits, it is the optimum. Where that is
   too wide it is tried again without the strategies that are dominated, memory included.
3. If the memory binds: climb with prices on bytes (`dual.py`), one elimination per evaluation, first on a few
   strategies of each node (column generation); repair and improve what the evaluations choose (`moves.py`); forbid
   every strategy whose least cost is above the best choice's; reduce again and repeat with what is left.
4. Branch on what is left: halve the strategies of the node about which the best prices are most of two minds, and
   treat each half as in 3 (branch and bound, least bound first).
5. Where elimination is too wide (`oracles.py`), messages and prices climb together instead (`relax.py`); what they
   decode to is repaired and improved; strategies are forbidden, the network reduced and the climb repeated as in 3.
   CP-SAT gets all that is left if it is small enough; otherwise the best choice is improved by annealing, and by
   CP-SAT block by block.

Steps 3 and 4 are in `climbing.py`, the others here.

Work is counted, not timed, and every step is deterministic: if the work limit is reached before the time limit, equal
input gives equal output.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import numpy as np

from autopar.passes.solver.climbing import ClimbingSearch
from autopar.passes.solver.dual import Master
from autopar.passes.solver.dual import evaluate as evaluate_prices
from autopar.passes.solver.eliminate import plan_elimination
from autopar.passes.solver.messages import marginal_bounds
from autopar.passes.solver.moves import Moves
from autopar.passes.solver.network import Network, NoChoiceLeft, OutOfMemory
from autopar.passes.solver.oracles import LARGE, STEP, oracle_for
from autopar.passes.solver.problem import Array, FoundBy, Infeasible, Integers, Problem, Solution
from autopar.passes.solver.relax import Relaxation
from autopar.passes.solver.residual import IntegerProgram, Residual
from autopar.passes.solver.search_state import RATE, TOLERANCE, now

_WORTH_REDUCING = 1 << 26  # work of an elimination that takes longer than looking for dominated strategies
_WHOLE = 200_000  # pair entries up to which CP-SAT gets all that is left
_TOLD = 1e4  # work for each of them, to tell CP-SAT of it
_BLOCK = 5_000  # pair entries of a neighbourhood
_BLOCK_SECONDS = 0.2  # CP-SAT's deterministic time for one
_STALL = 20  # neighbourhoods without success after which the search ends
_SWEEPS = 30  # of messages, to take the costs that CP-SAT gets down to what is over the bound
_ROUNDS = 4  # of climbing by messages and forbidding what cannot be better
_SHRUNK = 0.9  # of the strategies are left: what another round would forbid is not worth its work
_WARM = 50  # sweeps before prices move
_CHOICES = 20  # steps of the prices between choices
_SCALES = (1.0, 1.02, 1.05, 1.1, 1.2)  # of the prices for choices, in turn
_STEPS = 3000  # of the prices in a round, at most
_SHARE = 0.35  # of the work that is left, for a round
_GUESS = 0.1  # relative distance from the bound beyond which the best choice is not thought to lie
_MOVES = 20  # times that trees come to a node, to improve a choice
_ANNEALED = 500  # in an annealing
_HEAT = (1e-3, 1e-4, 1e-5)  # of the gap per move, in turn
_POINTS = 200  # in time that CP-SAT gets at once; of more only those that matter


class Search(ClimbingSearch):
    """One search."""

    def __init__(
        self,
        problem: Problem,
        seconds: float,
        seed: int,
        master: Master,
        integer_program: IntegerProgram,
        gap: float = 0.0,
        patience: float = 1.0,
        network: Network | None = None,
        polish: bool = True,
    ) -> None:
        """`network`: of the problem, or of a part of it, reduced already. `polish`: improve what messages find."""
        super().__init__(problem, seconds, seed, master, gap, patience)
        self.network = network
        self.polish = polish
        self.integer_program = integer_program
        self.seed = seed

    # The course

    def run(self) -> Solution:
        try:
            network = Network.of(self.problem) if self.network is None else self.network
            full = network.copy()
            network.reduce(dominated=self.network is not None, continued=self.network is not None)
            binds = network.slack.size > 0
            if not binds or not math.isfinite(self.bound):
                self._without_memory(network.without_memory(), binds=binds)
        except OutOfMemory:
            self._note_all_excluded()
            if self.best is None:
                self._lightest(full)
        except NoChoiceLeft:
            self._note_all_excluded()
        else:
            if not self._closed() and binds:
                self._with_memory(network, full)
        if self.best is None:
            raise Infeasible(self.smallest_peak, self.problem.limit, proved=self.bound == math.inf)
        return dataclasses.replace(self.best, lower_bound=min(self.bound, self.best.cost))

    def _without_memory(self, network: Network, *, binds: bool) -> None:
        """Step 2; if the memory may bind, `_with_memory` looks again at what it leaves, where it is too wide here."""
        network.reduce(dominated=False)
        plan = plan_elimination({node: cost.size for node, cost in network.unary.items()}, network.adjacent)
        if plan is None and binds:
            return
        if plan is None or plan.work > _WORTH_REDUCING:
            network.reduce(dominated=True)
        self._close(network, relaxed=binds)

    def _with_memory(self, network: Network, full: Network) -> None:
        """`full`: before any reduction."""
        try:
            if self.network is None:
                network.reduce(dominated=True)
            if not math.isfinite(self.bound) and network.pair_entries <= LARGE:  # else step 5 takes the memory along
                free = network.without_memory()
                free.reduce(dominated=True)
                if self._is_wide(free):
                    self._relax(network)
                    return
                self._close(free, relaxed=True)
            if not self._closed():
                self._close(network, relaxed=False)
        except NoChoiceLeft:
            self._note_all_excluded()
            if self.best is None:
                self._lightest(full)

    def _close(self, network: Network, *, relaxed: bool) -> None:
        """Steps 2 to 5; raises NoChoiceLeft if nothing better than the best is left.

        relaxed: the network is without the memory, so that finding a choice that fits is not its business.
        """
        if self._is_wide(network):
            if not relaxed:
                self._relax(network)
            return
        prices = self._prices_from_columns(network) if network.slack.size else np.zeros(0)
        if self._closed() or (self.best is not None and self._spent()):
            return
        self._climb(network, prices, relaxed=relaxed)
        if not self.exact and not relaxed:
            self._relax(network)

    # Step 5

    def _relax(self, network: Network) -> None:
        """Climb by messages, forbid, reduce, repeat; then improve the best choice until the work is spent."""
        prices = np.zeros(network.slack.size)
        relaxation: Relaxation | None = None
        for _ in range(_ROUNDS):
            relaxation = self._relaxation(network, prices, relaxation)
            self._ascend(relaxation)
            if self.best is None:
                self._lightest(network)
            if self._closed() or self._spent() or self.best is None:
                break
            known = dict(zip(network.times, relaxation.prices, strict=True))
            base, nodes, edges = relaxation.reduced()
            self._spend(relaxation)
            before = network.num_strategies
            self._fix(network, marginal_bounds(base, nodes, edges), relaxation.prices)
            prices = np.array([known[time] for time in network.times])
            if not self._is_wide(network):
                self._climb(network, prices, relaxed=False)
                if self.exact:
                    return
            if network.num_strategies > _SHRUNK * before:
                break
        if self._closed() or self._spent() or not self.polish:
            return
        if network.pair_entries <= min(_WHOLE, self.work / _TOLD / 2):
            self.bound = max(self.bound, self._by_program(network, prices, self.work / RATE / 2))
        self._anneal(self._relaxation(network, prices, relaxation))
        self._neighbourhoods(network, prices)

    def _relaxation(self, network: Network, prices: Array, before: Relaxation | None) -> Relaxation:
        """At these prices, with the messages of a relaxation before the network shrank."""
        relaxation = Relaxation(network, prices, self.seed)
        if before is not None:
            relaxation.inherit(before)
        return relaxation

    def _ascend(self, relaxation: Relaxation) -> None:
        """Climb, and offer choices on the way; raises NoChoiceLeft if none fits."""
        network, until = relaxation.network, self.work * (1 - _SHARE)
        most = network.most() if self.best is None else math.inf  # no choice costs more
        most += TOLERANCE * abs(most)
        for step in range(_STEPS):
            if step < _WARM:
                relaxation.sweep()
            else:
                relaxation.ascend(self._target(relaxation))
            self._spend(relaxation)
            if step % _CHOICES == _CHOICES - 1 or self._spent():
                self._choose(relaxation, _SCALES[step // _CHOICES % len(_SCALES)])
            self.bound = max(self.bound, relaxation.value)
            if self._closed() or self._spent() or relaxation.ended or (self.work < until and self.best is not None):
                break
            if self.best is None and self.bound > most:
                raise NoChoiceLeft  # nothing that fits has a finite cost

    def _target(self, relaxation: Relaxation) -> float:
        guess = relaxation.value + _GUESS * abs(relaxation.value)
        return min(guess, self.best.cost) if self.best is not None else guess

    def _choose(self, relaxation: Relaxation, scale: float) -> None:
        """Offer what the relaxation chooses at its prices times `scale`, improved."""
        choice = relaxation.choose(scale)
        if choice is not None:
            visits = 0 if self._spent() else _MOVES
            self._offer_flat(relaxation, relaxation.improve(choice, visits, 0.0), FoundBy.MESSAGES)
        self._spend(relaxation)

    def _anneal(self, relaxation: Relaxation) -> None:
        """Improve the best choice by moves of trees, and offer others, until that stalls."""
        for _ in range(_WARM):
            relaxation.sweep()
        stalled, turn, longest = 0, 0, 0.0
        before: Solution | None = None
        choice: Integers | None = None
        while self.best is not None and stalled < _STALL and not self._closed() and not self._spent():
            if self.best is not before:
                before, choice = self.best, self._flat_choice(relaxation, self.best)
            started = now()
            if choice is None or started + longest > self.deadline:
                return
            gap = self.best.cost - max(self.bound, 0.5 * self.best.cost)
            heat = _HEAT[turn % len(_HEAT)] * gap
            self._offer_flat(relaxation, relaxation.improve(choice, _ANNEALED, heat), FoundBy.ANNEALING)
            self._spend(relaxation)
            longest = max(longest, now() - started)
            if not self._spent():
                self._choose(relaxation, 1.0 + 0.2 * float(self.random.random()))
            turn, stalled = turn + 1, stalled + 1 if self.best is before else 0

    def _flat_choice(self, relaxation: Relaxation, solution: Solution) -> Integers | None:
        """The solution in positions; where a strategy of it was reduced away, the best with the others as they are."""
        network, chosen = relaxation.network, solution.choice
        if not all((labels == chosen[node]).any() for node, labels in network.labels.items()):
            try:
                part = self._around(network, solution, set())
                choice = self._cheapest_that_fits(part)
            except NoChoiceLeft:
                choice = None
            if choice is None:
                return relaxation.choose(1.0)
            chosen = part.lift(choice, self.problem.num_nodes)
        at = [int(np.searchsorted(network.labels[node], chosen[node])) for node in relaxation.flat.nodes.tolist()]
        return np.array(at, dtype=np.int64)

    def _cheapest_that_fits(self, network: Network) -> dict[int, int] | None:
        """The cheapest choice, or one close to it if that does not fit."""
        oracle = oracle_for(network, self.random)
        cut = evaluate_prices(network, oracle.evaluate, np.zeros(network.slack.size))
        self._spend(oracle)
        if (network.load(cut.choice) <= network.slack).all():
            return cut.choice
        return Moves(network).improve(cut.choice)

    def _around(self, network: Network, solution: Solution, block: Collection[int]) -> Network:
        """What is left where all nodes but a block choose as the solution; raises NoChoiceLeft if nothing is."""
        part = network.copy()
        self.work -= STEP * len(network.unary)
        for node in network.unary:
            same = part.labels[node] == solution.choice[node]
            # a strategy that was reduced away has an equal or better one among those that are left
            if node not in block and same.any():
                part.keep(node, same)
        part.reduce(dominated=True)
        return part

    def _offer_flat(self, relaxation: Relaxation, choice: Integers, found_by: FoundBy) -> None:
        cost = relaxation.cost(choice) + relaxation.network.offset
        if self.best is None or cost < self._worth(self.best):
            positions = dict(zip(relaxation.flat.nodes.tolist(), choice.tolist(), strict=True))
            self._offer(relaxation.network, positions, found_by)

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
        try:
            part = self._around(network, self.best, block)
            known = dict(zip(network.times, prices, strict=True))
            self._by_program(part, np.array([known[time] for time in part.times]), _BLOCK_SECONDS)
        except NoChoiceLeft:
            return

    def _by_program(self, network: Network, prices: Array, seconds: float) -> float:
        """Give the network to the integer program; a lower bound on what a choice within it that is of interest costs.

        The costs are what messages at these prices leave over their bound; the price of what a choice leaves free of
        the memory is part of its cost. So the objective starts at the bound.
        """
        self.work -= _TOLD * network.pair_entries
        relaxation = Relaxation(network, prices, self.seed)
        for _ in range(_SWEEPS):
            relaxation.sweep()
        base, nodes, edges = relaxation.reduced()
        self._spend(relaxation)
        base += network.offset - float(prices @ network.slack)
        if self.best is not None:
            room = self._worth(self.best) - base
            if room <= 0:
                return base + room
        else:
            most = network.most()
            room = 1.001 * (most - base) + 1e-6 * abs(most) + 1e-300  # above every choice of finite cost
        hint = self.best.choice if self.best else None
        points = np.ones(prices.size, dtype=bool) if prices.size <= _POINTS else prices > 0
        bound = 0.0
        while seconds > 0:
            wall = max(self.deadline - now(), 1e-3)
            outcome = self.integer_program(
                Residual(network, nodes, edges, prices, np.flatnonzero(points), room, hint, self.seed, seconds, wall)
            )
            self.work -= RATE * outcome.seconds
            seconds -= max(outcome.seconds, 1e-3)
            bound = max(bound, outcome.bound)
            if outcome.positions is None or self._spent():
                break
            self._offer(network, outcome.positions, FoundBy.INTEGER_PROGRAM)
            lacking = network.load(outcome.positions) > network.slack
            if not (lacking & ~points).any():
                break
            starts = np.flatnonzero(np.diff(np.concatenate(([False], lacking & ~points)).astype(np.int8)) == 1)
            points[starts] = True
        if math.isinf(bound):
            return base + room if hint else math.inf
        return base + bound
