"""Moves of one node at a time: make a choice fit the memory, then cheaper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from autopar.passes.solver.network import Network
from autopar.passes.solver.problem import Array, Integers


class Moves:
    """The strategies of all nodes of a network side by side, so that all moves are judged at once.

    A move is an index into the concatenation of all nodes' strategies.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._nodes = list(network.unary)
        sizes = [network.unary[node].size for node in self._nodes]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        self._owner = np.repeat(np.arange(len(self._nodes)), sizes)  # index of the node of each move
        self._start = {node: int(starts[index]) for index, node in enumerate(self._nodes)}
        spans = [(node, span) for node in self._nodes for span in network.usages[node]]
        self._current: Integers = np.zeros(len(self._nodes), dtype=np.int64)  # the move to each node's present strategy
        self._moved = np.concatenate(
            [self._start[node] + np.arange(amount.size) for node, (_, _, amount) in spans] or [np.zeros(0, dtype=int)]
        )
        self._bytes = np.concatenate([amount for _, (_, _, amount) in spans] or [np.zeros(0)])
        counts = [amount.size for _, (_, _, amount) in spans]
        self._first = np.repeat(np.array([start for _, (start, _, _) in spans], dtype=int), counts)
        self._last = np.repeat(np.array([end for _, (_, end, _) in spans], dtype=int), counts)

    def improve(self, positions: Mapping[int, int]) -> dict[int, int] | None:
        """Repair, then descend while every move keeps to the memory; None if the repair fails."""
        choice = dict(positions)
        self._current = np.array([self._start[node] + choice[node] for node in self._nodes], dtype=np.int64)
        local = self._local_costs(choice)
        load = self._network.load(choice)
        repaired = self._repair(choice, local, load)
        if repaired is None:
            return None
        self._descend(choice, local, repaired)
        return choice

    def _local_costs(self, choice: Mapping[int, int]) -> Array:
        """Cost of each move's strategy with the neighbours as they are."""
        parts = []
        for node in self._nodes:
            total = self._network.unary[node]
            for other, matrix in self._network.adjacent[node].items():
                total = total + matrix[:, choice[other]]
            parts.append(total)
        return np.concatenate(parts or [np.zeros(0)])

    def _change(self, values: Array) -> Array:
        """By how much each move changes the values of its node's strategies."""
        with np.errstate(invalid="ignore"):
            return np.asarray(values - values[self._current][self._owner])

    def _apply(self, move: int, choice: dict[int, int], local: Array) -> None:
        node = self._nodes[self._owner[move]]
        old, new = choice[node], move - self._start[node]
        choice[node] = new
        self._current[self._owner[move]] = move
        for other, matrix in self._network.adjacent[node].items():
            span = slice(self._start[other], self._start[other] + matrix.shape[1])
            with np.errstate(invalid="ignore"):
                local[span] += matrix[new] - matrix[old]
            if not np.isfinite(matrix[old]).all():  # inf - inf: sum anew
                total = self._network.unary[other]
                for third, link in self._network.adjacent[other].items():
                    total = total + link[:, choice[third]]
                local[span] = total

    def _load_after(self, move: int, choice: Mapping[int, int], load: Array) -> Array:
        node = self._nodes[self._owner[move]]
        old, new = choice[node], move - self._start[node]
        after = load.copy()
        for start, end, amount in self._network.usages[node]:
            after[start:end] += amount[new] - amount[old]
        return after

    def _repair(self, choice: dict[int, int], local: Array, load: Array) -> Array | None:
        """Make the move that costs least per byte of violation it takes away, until none is left."""
        slack = self._network.slack
        while (load > slack).any():
            violated = np.concatenate(([0], np.cumsum(load > slack)))
            weight = self._bytes * (violated[self._last] - violated[self._first])
            held = np.bincount(self._moved, weight, minlength=local.size).astype(np.float64)
            relief = -self._change(held)
            useful = np.flatnonzero((relief > 0) & np.isfinite(local))
            cost = self._change(local)[useful]
            # a move that is free or better is taken first; those that save more come first among them
            score = np.where(cost > 0, cost / relief[useful], cost * relief[useful])
            excess = np.maximum(load - slack, 0).sum()
            for move in _ascending(useful, score):
                after = self._load_after(move, choice, load)
                if np.maximum(after - slack, 0).sum() < excess:
                    self._apply(move, choice, local)
                    load = after
                    break
            else:
                return None
        return load

    def _descend(self, choice: dict[int, int], local: Array, load: Array) -> None:
        """Make the move that saves most and keeps to the memory, until none is left."""
        scale = 1e-12 * max(1e-300, float(np.abs(local[np.isfinite(local)]).max(initial=0.0)))
        while True:
            saving = -self._change(local)
            candidates = np.flatnonzero(saving > scale)
            for move in _ascending(candidates, -saving[candidates]):
                after = self._load_after(move, choice, load)
                if (after <= self._network.slack).all():
                    self._apply(move, choice, local)
                    load = after
                    break
            else:
                return


def _ascending(moves: Integers, scores: Array) -> Iterator[int]:
    """Moves by score; the first mostly does, so that the rest is sorted only when asked for."""
    if moves.size:
        yield int(moves[scores.argmin()])
        yield from (int(move) for move in moves[np.argsort(scores, kind="stable")][1:])
