"""Lower bounds for networks too wide to eliminate: sequential message passing.

TRW-S (Kolmogorov, "Convergent tree-reweighted message passing", 2006) moves costs from edges to nodes and back so
that the sum of all nodes' and edges' minima, a lower bound, does not decrease. What the moves leave behind,
`reduced` costs, is the same problem with the bound taken out: every entry is the least that choosing it adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autopar.passes.intra_op.eliminate import Adjacent, Unary
from autopar.passes.intra_op.problem import Array


class Messages:
    """Messages on the edges of one network; node costs may change between sweeps, the messages stay valid."""

    def __init__(self, unary: Unary, adjacent: Adjacent) -> None:
        self._adjacent = adjacent
        self._order = sorted(adjacent)
        rank = {node: index for index, node in enumerate(self._order)}
        self._before = {node: [u for u in adjacent[node] if rank[u] < rank[node]] for node in self._order}
        self._after = {node: [u for u in adjacent[node] if rank[u] > rank[node]] for node in self._order}
        self._message: dict[tuple[int, int], Array] = {
            (u, v): np.zeros(unary[v].size) for u in self._order for v in adjacent[u]
        }
        self.work = sum(4 * matrix.size + 20_000 for links in adjacent.values() for matrix in links.values())

    def sweep(self, unary: Unary) -> None:
        """Forward along the order, then backward."""
        for order, targets in ((self._order, self._after), (self._order[::-1], self._before)):
            for node in order:
                if not targets[node]:
                    continue
                belief = self.belief(unary, node)
                share = 1.0 / max(len(self._before[node]), len(self._after[node]))
                for other in targets[node]:
                    rest = share * belief - self._message[other, node]
                    message = (rest[:, None] + self._adjacent[node][other]).min(axis=0)
                    self._message[node, other] = message - message.min()

    def belief(self, unary: Unary, node: int) -> Array:
        total = unary[node]
        for other in self._adjacent[node]:
            total = total + self._message[other, node]
        return total

    def reduced(self, unary: Unary) -> tuple[float, dict[int, Array], dict[tuple[int, int], Array]]:
        """The bound, and the non-negative costs of nodes and of edges (u < v) beyond it."""
        terms: list[float] = []
        nodes: dict[int, Array] = {}
        edges: dict[tuple[int, int], Array] = {}
        for node in self._order:
            belief = self.belief(unary, node)
            terms.append(float(belief.min()))
            nodes[node] = belief - terms[-1]
            for other in self._adjacent[node]:
                if other > node:
                    moved = self._message[other, node][:, None] + self._message[node, other]
                    pair = self._adjacent[node][other] - moved
                    terms.append(float(pair.min()))
                    edges[node, other] = pair - terms[-1]
        return math.fsum(terms), nodes, edges

    def decode(self, unary: Unary) -> dict[int, int]:
        """A choice along the order: the nodes before count exactly, those after by their messages."""
        choice: dict[int, int] = {}
        for node in self._order:
            total = unary[node]
            for other in self._before[node]:
                total = total + self._adjacent[node][other][:, choice[other]]
            for other in self._after[node]:
                total = total + self._message[other, node]
            choice[node] = int(total.argmin())
        return choice


def marginal_bounds(
    bound: float, nodes: Mapping[int, Array], edges: Mapping[tuple[int, int], Array]
) -> dict[int, Array]:
    """For each node and strategy a lower bound on the cost of all choices with it, from `Messages.reduced`."""
    bounds = {node: bound + cost for node, cost in nodes.items()}
    for (u, v), pair in edges.items():
        bounds[u] = bounds[u] + pair.min(axis=1)
        bounds[v] = bounds[v] + pair.min(axis=0)
    return bounds
