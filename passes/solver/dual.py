"""Prices on bytes at points in time: a lower bound under a memory limit, and choices close to the best.

For prices p >= 0 in seconds per byte, min over choices of cost + p·(load - slack) is a lower bound (Lagrangian
relaxation). It is concave in p, and each evaluation gives its choice's load - slack as a slope. The best prices are
found by cutting planes within a trust region (Marsten, Hogan & Blankenship, "The boxstep method", 1975):

1. at zero prices; if nothing is violated, that is the optimum;
2. at prices that make memory all that matters, on the violated points: sets the scale of the prices;
3. at the maximum of the cuts within a box around the best prices, which grows after a step up that ends on its
   side and shrinks after one that does not go up, until the cuts promise no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autopar.passes.solver.network import Network
from autopar.passes.solver.problem import Array


@dataclasses.dataclass(frozen=True)
class CuttingPlane:
    """One evaluation of the bound."""

    prices: Array  # seconds per byte at each point in time
    value: float  # seconds: no choice that fits costs less
    slope: Array  # bytes over the slack at each point in time
    choice: dict[int, int]  # what the oracle chose at these prices


Oracle = Callable[[dict[int, Array]], tuple[float, dict[int, int]]]  # node costs -> a lower bound, a choice
# cuts, lower and upper limits of the prices -> the cuts' maximum and where it is
Master = Callable[[Sequence[CuttingPlane], Array, Array], tuple[float, Array]]


def priced(network: Network, prices: Array) -> dict[int, Array]:
    """Node costs with the price of what each strategy uses."""
    total = np.concatenate(([0.0], np.cumsum(prices)))
    costs = dict(network.unary)
    for node, spans in network.usages.items():
        for start, end, amount in spans:
            if total[end] > total[start]:
                costs[node] = costs[node] + (total[end] - total[start]) * amount
    return costs


def climb(network: Network, oracle: Oracle, master: Master, start: Array) -> Iterator[CuttingPlane]:
    """Evaluate at better and better prices from `start` on; ends when the cuts promise no more."""
    best = evaluate(network, oracle, start)
    cuts = [best]
    yield best
    if np.isinf(best.value):
        return
    if start.any():
        radius = float(start.max()) / 8
    elif (best.slope > 0).any():
        radius = _first_scale(network, best)
        while True:  # step 2
            cut = evaluate(network, oracle, np.where(cuts[0].slope > 0, radius, 0.0))
            cuts.append(cut)
            yield cut
            if cut.value <= best.value:
                break
            best, radius = cut, radius * 4
        radius /= 4
    else:
        return
    largest = radius * 1e6
    active = np.any([cut.slope > 0 for cut in cuts], axis=0) | (start > 0)
    while radius <= largest:
        lower = np.where(active, np.maximum(best.prices - radius, 0.0), 0.0)
        upper = np.where(active, best.prices + radius, 0.0)
        promise, prices = master(cuts, lower, upper)
        on_side = bool((active & ((prices >= upper) | ((prices <= lower) & (lower > 0)))).any())
        if promise - best.value <= 1e-7 * abs(best.value):
            if not on_side:
                return
            radius *= 4
            continue
        cut = evaluate(network, oracle, prices)
        cuts.append(cut)
        yield cut
        active |= cut.slope > 0
        if cut.value <= best.value + 0.1 * (promise - best.value):
            radius /= 2
        elif on_side:
            radius *= 2
        if cut.value > best.value:
            best = cut


def evaluate(network: Network, oracle: Oracle, prices: Array) -> CuttingPlane:
    """The bound at some prices, in seconds per byte at each point in time."""
    value, choice = oracle(priced(network, prices))
    value += network.offset - float(prices @ network.slack)
    return CuttingPlane(prices, value, network.load(choice) - network.slack, choice)


def _first_scale(network: Network, cut: CuttingPlane) -> float:
    """Seconds per byte at which the violated bytes are worth what a node's costs typically differ by.

    One point's price may have to do it alone, or all violated points' together: between the two.
    """
    spread = [float(np.ptp(cost)) for cost in network.unary.values()]
    for u, v in network.edges:
        matrix = network.adjacent[u][v]
        spread.append(float(np.ptp(matrix[np.isfinite(matrix)])))
    return (float(np.mean(spread)) or 1.0) / max(float(cut.slope.max()), 1.0) / float(np.sqrt((cut.slope > 0).sum()))
