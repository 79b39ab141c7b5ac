"""Lower bounds for networks too wide to eliminate: sequential message passing.

TRW-S (Kolmogorov, "Convergent tree-reweighted message passing", 2006) moves costs from edges to nodes and back so
that a lower bound, that of monotonic chains, does not decrease. What the moves leave behind, `reduced` costs, is the
same problem with the bound taken out: every entry is the least that choosing it adds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.passes.solver import kernels
from autopar.passes.solver.kernels import Flat
from autopar.passes.solver.problem import Array, Integers


class Messages:
    """Messages on the edges of one network; node costs may change between sweeps, the messages stay valid."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.values = np.zeros(int(flat.message_at[-1]))
        self.labels: Integers = np.zeros(flat.nodes.size, dtype=np.int64)  # of least belief at the last sweep
        self.work = 2.5 * flat.pair.size + 20.0 * flat.unary.size + 20_000
        self._belief = np.zeros(int(np.diff(flat.start).max(initial=1)))

    def sweep(self, costs: Array) -> float:
        """Forward along the order, then backward, with these costs of all strategies; a lower bound."""
        return float(kernels.sweep(self.flat, costs, self.values, self._belief, self.labels))

    def belief(self, costs: Array, index: int) -> Array:
        """Cost of each strategy of a node with what the messages say of the rest."""
        f = self.flat
        total = costs[f.start[index] : f.start[index + 1]].copy()
        for link in range(f.links[index], f.links[index + 1]):
            total += self.values[f.message_at[link] : f.message_at[link + 1]]
        return total

    def reduced(self, costs: Array) -> tuple[float, dict[int, Array], dict[tuple[int, int], Array]]:
        """The bound of the last sweep, and the non-negative costs of nodes and of edges (u < v) beyond it."""
        f = self.flat
        terms: list[float] = []
        nodes: dict[int, Array] = {}
        edges: dict[tuple[int, int], Array] = {}
        for index, node in enumerate(f.nodes.tolist()):
            belief = self.belief(costs, index)
            terms.append(float(belief.min()))
            belief -= terms[-1]
            links = range(f.links[index], f.links[index + 1])
            before = [link for link in links if f.other[link] < index]
            share = 1.0 / max(len(before), len(links) - len(before), 1)
            nodes[node] = (1.0 - share * len(before)) * belief
            for link in before:
                back = int(f.back[link])
                pair = f.pair[f.pair_at[back] : f.pair_at[back + 1]].reshape(-1, belief.size)
                pair = pair - self.values[f.message_at[back] : f.message_at[back + 1], None]
                pair += share * belief - self.values[f.message_at[link] : f.message_at[link + 1]]
                terms.append(float(pair.min()))
                edges[int(f.nodes[f.other[link]]), node] = pair - terms[-1]
        return float(np.sum(terms)), nodes, edges

    def decode(self, costs: Array) -> Integers:
        """A choice along the order: the nodes before count exactly, those after by their messages."""
        labels = np.zeros(self.flat.nodes.size, dtype=np.int64)
        kernels.decode(self.flat, costs, self.values, self._belief, labels)
        return labels


def marginal_bounds(
    bound: float, nodes: Mapping[int, Array], edges: Mapping[tuple[int, int], Array]
) -> dict[int, Array]:
    """For each node and strategy a lower bound on the cost of all choices with it, from `Messages.reduced`."""
    bounds = {node: bound + cost for node, cost in nodes.items()}
    for (u, v), pair in edges.items():
        bounds[u] = bounds[u] + pair.min(axis=1)
        bounds[v] = bounds[v] + pair.min(axis=0)
    return bounds
