"""A search by eliminations: steps 3 and 4 of its course, which search.py tells.

Every evaluation of prices on bytes is one elimination: a lower bound, and a choice that is cheapest at these prices.
Prices climb, choices are repaired, strategies are forbidden, and what is left is halved. Beside them stands what is
looked for where no choice fits yet: the one with the least memory.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar.passes.solver.dual import CuttingPlane, Master, climb, priced
from autopar.passes.solver.dual import evaluate as evaluate_prices
from autopar.passes.solver.moves import Moves
from autopar.passes.solver.network import Network, NoChoiceLeft
from autopar.passes.solver.oracles import Wide, oracle_for
from autopar.passes.solver.problem import Array, FoundBy, Mask, Problem
from autopar.passes.solver.search_state import TOLERANCE, SearchState

_COLUMNS, _COLUMN_CLIMB = 8, 15  # evaluations of the whole network, and of a few strategies between them
_COLUMNS_CLOSE = 2e-3  # relative distance of the few strategies' bound from the whole network's that is good enough
_FIRST_CLIMB, _COLD_CLIMB = 4, 16  # evaluations of the whole network, from good prices and from none
_CLIMBS = (12, 12, 12)  # of what is left then
_BRANCH_CLIMBS = (5, 8)
_MIXTURE = 4  # of a climb's best cuts
_LIGHT = 60  # evaluations in search of the least memory


class ClimbingSearch(SearchState):
    """What a search knows of a network narrow enough to eliminate."""

    def __init__(
        self, problem: Problem, seconds: float, seed: int, master: Master, gap: float, patience: float
    ) -> None:
        super().__init__(problem, seconds, patience, gap)
        self.master = master
        self.random = np.random.default_rng(seed)
        self.exact = True  # whether the last climb's bounds were minima

    def _is_wide(self, network: Network) -> bool:
        oracle = oracle_for(network, self.random)
        # Only prices on memory can make more dominated than what is gone.
        return isinstance(oracle, Wide) and not (network.slack.size and oracle.narrow)

    def _climb(self, network: Network, prices: Array, *, relaxed: bool) -> None:
        """Steps 3 and 4; `exact` says whether the bounds were minima, without which it does not branch."""
        bound, cuts = self._tighten(network, prices, (_FIRST_CLIMB if prices.any() else _COLD_CLIMB, *_CLIMBS))
        self.bound = max(self.bound, bound)
        if relaxed or self._closed() or self._spent():
            return
        if self.exact:
            self._branch(network, bound, cuts)

    def _prices_from_columns(self, network: Network) -> Array:
        """Good prices for few evaluations of the whole network, by climbing on a few strategies of each node.

        Those are the light and cheap ones, that of the cheapest choice, and what the whole network then chooses at the
        prices found. The few strategies' optimum, which mixes them freely, says much more about prices than cuts do.
        """
        oracle, moves, known = oracle_for(network, self.random), Moves(network), dict(enumerate(self.cheapest))
        columns = {
            node: _promising(network, node) | (labels == known.get(node, -1)) for node, labels in network.labels.items()
        }
        best, prices = -math.inf, np.zeros(network.slack.size)
        for _ in range(_COLUMNS):
            part = network.copy()
            try:
                for node, column in columns.items():
                    part.keep(node, column)
                part.reduce(dominated=True)
            except NoChoiceLeft:
                break  # the few do not go together, or do not fit
            top: CuttingPlane | None = None
            inner, part_moves = oracle_for(part, self.random), Moves(part)
            priced_before = dict(zip(network.times, prices, strict=True))
            start = np.array([priced_before[time] for time in part.times])
            for cut in itertools.islice(climb(part, inner.evaluate, self.master, start), _COLUMN_CLIMB):
                self._spend(inner)
                self._offer(part, cut.choice, FoundBy.COLUMNS)
                if part.slack.size and (improved := part_moves.improve(cut.choice)):
                    self._offer(part, improved, FoundBy.REPAIR)
                if top is None or cut.value > top.value:
                    top = cut
                if self._spent():
                    break
            assert top is not None  # a climb makes at least one evaluation
            top_prices = dict(zip(part.times, top.prices, strict=True))
            whole = evaluate_prices(
                network, oracle.evaluate, np.array([top_prices.get(time, 0.0) for time in network.times])
            )
            self._spend(oracle)
            self._offer(network, whole.choice, FoundBy.ELIMINATION)
            if improved := moves.improve(whole.choice):
                self._offer(network, improved, FoundBy.REPAIR)
            self.bound = max(self.bound, whole.value)
            if whole.value > best:
                best, prices = whole.value, whole.prices
            if top.value - whole.value <= _COLUMNS_CLOSE * abs(whole.value) or self._spent():
                break
            for node, position in whole.choice.items():
                columns[node][position] = True
        return prices

    def _tighten(self, network: Network, prices: Array, climbs: Sequence[int]) -> tuple[float, list[CuttingPlane]]:
        """Steps 3 and 4: a lower bound on what is worth finding in the network, and the last climb, best cut first.

        Shrinks the network; raises NoChoiceLeft if nothing is left in it that is better than the best.
        """
        bound = -math.inf
        for index, evaluations in enumerate(climbs):
            oracle, moves, cuts = oracle_for(network, self.random), Moves(network), list[CuttingPlane]()
            for cut in climb(network, oracle.evaluate, self.master, prices):
                self._spend(oracle)
                cuts.append(cut)
                self._offer(network, cut.choice, FoundBy.ELIMINATION)
                if network.slack.size and (improved := moves.improve(cut.choice)):
                    self._offer(network, improved, FoundBy.REPAIR)
                if len(cuts) >= evaluations or self._spent() or (self.best and cut.value >= self._worth(self.best)):
                    break
            self.exact = oracle.exact
            if math.isinf(cuts[0].value):
                raise NoChoiceLeft  # infinite costs exclude every choice, whatever the memory
            cuts.sort(key=lambda cut: -cut.value)
            bound = max(bound, cuts[0].value)
            if self.best is None and network.slack.size:
                if bound > (most := network.most()) + TOLERANCE * abs(most):
                    raise NoChoiceLeft  # no choice of finite cost fits
                self._lightest(network)
            if self.best is None:
                break
            if oracle.exact and not network.slack.size:
                # The choice that was offered is the minimum, whatever the rounding; it may not fit.
                is_best = self.best.cost <= bound + TOLERANCE * abs(bound)
                return self.best.cost if is_best else bound, cuts
            if bound >= self._worth(self.best):
                return self._worth(self.best), cuts
            if self._spent() or index == len(climbs) - 1:
                break
            known = dict(zip(network.times, cuts[0].prices, strict=True))
            self._fix(network, oracle.marginals(priced(network, cuts[0].prices)), cuts[0].prices)
            self._spend(oracle)
            prices = np.array([known[time] for time in network.times])
        return bound, cuts

    def _branch(self, network: Network, bound: float, cuts: list[CuttingPlane]) -> None:
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
                    bound, part_cuts = self._tighten(
                        part, np.array([known[time] for time in part.times]), _BRANCH_CLIMBS
                    )
                except NoChoiceLeft:
                    continue
                if self.best is None or bound < self._worth(self.best):
                    count += 1
                    heapq.heappush(parts, (max(bound, least), count, part, part_cuts))
        if not parts:
            raise NoChoiceLeft

    def _fix(self, network: Network, marginals: dict[int, Array], prices: Array) -> None:
        """Forbid the strategies with which no choice is better than the best, and reduce again."""
        assert self.best is not None
        limit = self._worth(self.best) - network.offset + float(prices @ network.slack)
        for node, bounds in marginals.items():
            network.keep(node, bounds < limit)
        network.reduce(dominated=True)

    def _lightest(self, network: Network) -> None:
        """Look for a choice with a small peak, whatever it costs, by weights on the points in time that grow with load.

        Raises NoChoiceLeft if a weighted sum of loads proves that none fits.
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
        points = network.slack.size
        weights = np.full(points, 1 / max(points, 1))
        for _ in range(_LIGHT if points else 1):
            cut = evaluate_prices(pattern, oracle.evaluate, weights)
            self._spend(oracle)
            self._offer(network, cut.choice, FoundBy.LIGHTEST)
            if math.isfinite(cut.value) and (improved := moves.improve(cut.choice)):
                self._offer(network, improved, FoundBy.REPAIR)
            if self.best is not None or self._spent() or not points:
                return
            if cut.value > 1e-9 * limit and self.bound < math.inf:
                raise NoChoiceLeft
            load = limit + cut.slope
            weights = weights * np.exp(4 * (load / load.max() - 1))
            weights /= weights.sum()


def _split(network: Network, cuts: list[CuttingPlane]) -> tuple[int, Mask]:
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


def _promising(network: Network, node: int) -> Mask:
    """The strategies that no other beats both in memory over all time and in cost, with links at their mean."""
    cost, used = network.unary[node], np.zeros(network.unary[node].size)
    for matrix in network.adjacent[node].values():
        finite = np.isfinite(matrix)
        cost = cost + np.where(finite, matrix, 0.0).sum(axis=1) / finite.sum(axis=1)
    for start, end, amount in network.usages[node]:
        used += (end - start) * amount
    order = np.lexsort((used, cost))  # cheapest first
    before = np.minimum.accumulate(np.concatenate(([np.inf], used[order][:-1])))
    kept = np.zeros(used.size, dtype=bool)
    kept[order] = used[order] < before
    return kept
