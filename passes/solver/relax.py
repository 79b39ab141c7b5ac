"""Messages and prices on memory together: bounds and choices for networks too wide to eliminate.

1. `ascend`: a sweep of messages at the present prices, then a step of the prices along the load that the beliefs
   choose (a supergradient of the bound at fixed messages), as long as Polyak's rule says. Directions are averaged
   (Camerini, Fratta & Maffioli, "On improving gradient methods by modified gradient techniques", 1975); after steps
   in vain it goes on from the best prices and messages with shorter ones.
2. `choose`: what the messages decode to at prices that are a little higher than the best, so that whole strategies
   nearly fit; moved to where it fits by sweeps of single nodes at growing prices.
3. `improve`: moves of trees of nodes that keep to the memory (`kernels.improve`), with or without annealing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.passes.solver import kernels
from autopar.passes.solver.flat import flatten
from autopar.passes.solver.kernels import Flat
from autopar.passes.solver.messages import Messages
from autopar.passes.solver.network import Network
from autopar.passes.solver.problem import Array, Integers

_AVERAGE = 0.3  # weight of the last slope in the direction
_LASTING = 0.95  # how long a large slope keeps steps short
_PATIENCE = 15  # steps in vain
_SHORTER = 0.6
_SHORTEST = 1e-3  # steps below which the ascent has ended, relative to Polyak's
_PROGRESS = 1e-3  # of the distance to the target by which the bound must rise within them
_REPAIRS, _GROWTH = 100, 1.3  # sweeps, and growth of the prices at points that lack memory
_SETTLING = 5  # sweeps at changed prices before a choice
_SMALLER = 4  # than the largest is a tree, on average
_TREE = 1024  # nodes of the largest: larger ones, most of whose nodes stay as they are, take longer for the same gain


class Relaxation:
    """The bound of one network at one state of messages and prices."""

    def __init__(self, network: Network, prices: Array, seed: int) -> None:
        self.network = network
        self.flat = flatten(network)
        self.prices = prices  # seconds per byte at each point in time; the best so far
        self.value = -np.inf  # the best bound, seconds
        self.work = 0.0
        self._messages = Messages(self.flat)
        self._best_messages = self._messages.values.copy()
        self._current = prices
        self._direction = np.zeros(prices.size)
        self._largest = 0.0
        self._length = 1.0
        self._in_vain = 0
        self._mark = -np.inf  # the best bound when it last rose noticeably
        self._labels = dict(network.labels)  # the network shrinks later
        self._state = np.array([seed * 2 + 88172645463325253], dtype=np.uint64)

    def inherit(self, other: Relaxation) -> None:
        """Start from the best messages of another state of the same problem, as far as nodes and edges are left."""
        known = {link: at for at, link in enumerate(_links(other.flat))}
        for link, (node, neighbour) in enumerate(_links(self.flat)):
            at = known.get((node, neighbour))
            if at is not None:
                labels = other._labels[node]
                message = other._best_messages[other.flat.message_at[at] : other.flat.message_at[at + 1]]
                kept = message[np.searchsorted(labels, self._labels[node])]
                self._messages.values[self.flat.message_at[link] : self.flat.message_at[link + 1]] = kept

    @property
    def ended(self) -> bool:
        """Whether steps have become so short that they change little."""
        return self._length < _SHORTEST

    def costs(self, prices: Array) -> Array:
        """Costs of all strategies with the price of what they use."""
        total = np.concatenate(([0.0], np.cumsum(prices)))
        out = np.empty_like(self.flat.unary)
        kernels.priced(self.flat, total, out)
        return out

    def sweep(self) -> float:
        """The bound at the present prices; the best is kept."""
        value = self._messages.sweep(self.costs(self._current)) + self.network.offset
        value -= float(self._current @ self.flat.slack)
        self.work += self._messages.work
        if value > self.value:
            self.value, self.prices = value, self._current
            self._best_messages[:] = self._messages.values
        return value

    def ascend(self, target: float) -> None:
        """A sweep, then a step of the prices towards a bound of `target`, seconds."""
        self.sweep()
        self._in_vain += 1
        if self.value - self._mark > _PROGRESS * abs(target - self.value):
            self._in_vain, self._mark = 0, self.value
        if self._in_vain >= _PATIENCE:
            self._in_vain = 0
            self._length *= _SHORTER
            self._direction = np.zeros(self.prices.size)
            self.restore()
            return
        slope = self._load(self._messages.labels) - self.flat.slack
        if self._direction.any():
            slope = (1 - _AVERAGE) * self._direction + _AVERAGE * slope
        self._direction = slope
        step = np.where((self._current <= 0) & (slope < 0), 0.0, slope)
        square = float(step @ step)
        if square > 0:
            self._largest = max(square, _LASTING * self._largest)
            length = self._length * max(target - self.value, 0.0) / self._largest
            self._current = np.maximum(self._current + length * step, 0.0)

    def restore(self) -> None:
        """Back to the best prices and messages."""
        self._current = self.prices
        self._messages.values[:] = self._best_messages

    def reduced(self) -> tuple[float, dict[int, Array], dict[tuple[int, int], Array]]:
        """`Messages.reduced` at the best prices, without the network's offset and the price of the slack."""
        self.restore()
        self._messages.sweep(costs := self.costs(self.prices))
        self.work += 3 * self._messages.work
        return self._messages.reduced(costs)

    def choose(self, scale: float) -> Integers | None:
        """A choice that fits, from the best prices times `scale`; None if decoding or repairing it fails."""
        f, kept = self.flat, self._messages.values.copy()
        prices = self.prices * scale
        self._messages.values[:] = self._best_messages
        for _ in range(_SETTLING):
            self._messages.sweep(costs := self.costs(prices))
        choice = self._messages.decode(costs)
        self._messages.values[:] = kept
        self.work += (_SETTLING + 1) * self._messages.work
        if not np.isfinite(self.cost(choice)):
            return None
        if not f.slack.size:
            return choice
        load = self._load(choice)
        prices = np.maximum(prices, 1e-3 * prices.max())
        if not prices.any():
            lacking = np.maximum(load - f.slack, 0.0).sum()
            prices = np.full(f.slack.size, float(np.abs(self.cost(choice)) / max(lacking, 1.0)) * 1e-3 + 1e-300)
        fits = kernels.repair(f, choice, f.slack - load, prices, _GROWTH, _REPAIRS)
        self.work += 5 * self._messages.work
        return choice if fits else None

    def improve(self, choice: Integers, visits: float, heat: float) -> Integers:
        """A choice that fits after moves of trees that come to each node so often, on average.

        heat: seconds by which one may raise the cost at first.
        """
        f = self.flat
        choice = choice.copy()
        largest = min(_TREE, choice.size)
        moves = round(_SMALLER * visits * choice.size / largest)
        head = f.slack - self._load(choice)
        price = self.costs(self.prices) - f.unary
        work = kernels.improve(f, price, choice, head, self._state, moves, largest, (heat, heat / 100))
        self.work += 2 * work + 1000 * moves
        return choice

    def cost(self, choice: Integers) -> float:
        """Seconds, without the network's offset."""
        f = self.flat
        sizes = np.diff(f.start)
        owner = np.repeat(np.arange(f.nodes.size), np.diff(f.links))
        once = f.other > owner
        owner, other = owner[once], f.other[once]
        pairs = f.pair[f.pair_at[:-1][once] + choice[owner] * sizes[other] + choice[other]]
        return float(f.unary[f.start[:-1] + choice].sum() + pairs.sum())

    def _load(self, choice: Integers) -> Array:
        load = np.zeros(self.flat.slack.size + 1)
        kernels.load_of(self.flat, choice, load)
        return load[:-1]


def _links(flat: Flat) -> Iterator[tuple[int, int]]:
    """Numbers of the node and its neighbour of each link."""
    nodes = np.repeat(flat.nodes, np.diff(flat.links))
    return zip(nodes.tolist(), flat.nodes[flat.other].tolist(), strict=True)
