"""The solver's working graph, and the reductions that keep its optimum exactly, memory included.

1. Strategies with infinite cost, or without a finite partner across some edge, go (arc consistency).
2. A node whose strategy follows from a neighbour's is merged into it (followers).
3. Nodes of degree 0, 1 or 2 that use no memory of their own become costs of their neighbours (Scholz & Eckstein,
   "Register allocation for irregular architectures", LCTES 2002).
4. A strategy goes if another of its node is no dearer whatever the neighbours choose and uses no more memory at any
   time (dead-end elimination, Goldstein 1994); at a node of degree 1 this is decided per strategy of the neighbour.
5. Of the points in time only those stay that no other implies and whose load can exceed the limit at all; limits
   are rounded down to what loads can be.

Every reduction pushes a lift that extends a choice of the rest to the removed nodes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable

import numpy as np

from autopar.passes.solver.dominated import undominated
from autopar.passes.solver.pending import Lift, Pending, UsageSpan, base_of, constant_of, gathered_spans
from autopar.passes.solver.problem import Array, Integers, Mask, Problem, Usage


class NoChoiceLeft(Exception):
    """The infinite costs, or these and the memory limit, exclude every choice."""


class OutOfMemory(NoChoiceLeft):
    """What every node uses at least is above the limit."""


@dataclasses.dataclass
class Network:
    """A pairwise problem in numbers that shrink; copies share the arrays, which are never written to."""

    unary: dict[int, Array]  # seconds per strategy of each node that is left
    adjacent: dict[int, dict[int, Array]]  # seconds [K_u, K_v] at [u][v]; [v][u] holds the transpose
    labels: dict[int, Integers]  # the problem's numbers of the strategies that are left, ascending
    usages: dict[int, list[UsageSpan]]  # what each node uses beyond the least of its strategies
    slack: Array  # bytes that are left at each point in time when every node uses its least
    times: Integers  # number of each point in time, the same in all copies
    offset: float  # seconds that every choice pays
    lifts: list[Lift]
    # Nodes whose costs, strategies or edges changed since infinite costs were followed.
    touched: dict[int, None] = dataclasses.field(default_factory=dict)
    # Nodes that keep their strategies, whatever these cost, and themselves: something is to be asked of them.
    held: Collection[int] = ()

    @staticmethod
    def of(problem: Problem, held: Collection[int] = ()) -> Network:
        """Step 1's form of the problem; raises NoChoiceLeft."""
        count = problem.num_nodes
        network = Network(
            unary=dict(enumerate(problem.costs)),
            adjacent={node: {} for node in range(count)},
            labels={node: np.arange(cost.size) for node, cost in enumerate(problem.costs)},
            usages={node: [] for node in range(count)},
            slack=np.zeros(0),
            times=np.zeros(0, dtype=np.int64),
            offset=0.0,
            lifts=[],
            held=held,
        )
        for u, v, matrix in problem.edges:
            network.add_edge(u, v, matrix)
        if problem.limit is not None:
            network._set_usages(problem.usages, float(np.floor(problem.limit)))
        network.make_consistent(range(count))
        network.touched = {}
        return network

    def copy(self) -> Network:
        return Network(
            dict(self.unary),
            {node: dict(neighbours) for node, neighbours in self.adjacent.items()},
            dict(self.labels),
            {node: list(spans) for node, spans in self.usages.items()},
            self.slack,
            self.times,
            self.offset,
            list(self.lifts),
            dict(self.touched),
            self.held,
        )

    def without_memory(self) -> Network:
        free = self.copy()
        free.usages = {node: [] for node in free.usages}
        free.slack, free.times = np.zeros(0), np.zeros(0, dtype=np.int64)
        return free

    @property
    def edges(self) -> list[tuple[int, int]]:
        return [(u, v) for u, neighbours in self.adjacent.items() for v in neighbours if u < v]

    @property
    def pair_entries(self) -> int:
        return sum(self.adjacent[u][v].size for u, v in self.edges)

    @property
    def num_strategies(self) -> int:
        return sum(unary.size for unary in self.unary.values())

    def most(self) -> float:
        """No choice of finite cost costs more."""
        terms = [*self.unary.values(), *(self.adjacent[u][v] for u, v in self.edges)]
        return self.offset + sum(float(term[np.isfinite(term)].max()) for term in terms)

    def lift(self, positions: dict[int, int], count: int) -> tuple[int, ...]:
        """From positions among the strategies that are left to a choice for all `count` nodes of the problem."""
        choice = [-1] * count
        for node, position in positions.items():
            choice[node] = int(self.labels[node][position])
        for lift in reversed(self.lifts):
            lift(choice)
        return tuple(choice)

    def cost(self, positions: dict[int, int]) -> float:
        """Seconds, with the offset."""
        total = self.offset
        for node, position in positions.items():
            total += self.unary[node].item(position)
            for other, matrix in self.adjacent[node].items():
                if other > node:
                    total += matrix.item(position, positions[other])
        return total

    def load(self, positions: dict[int, int]) -> Array:
        """Bytes at each point in time beyond the least."""
        change = np.zeros(self.slack.size + 1)
        for node, position in positions.items():
            for start, end, amount in self.usages[node]:
                change[start] += amount[position]
                change[end] -= amount[position]
        return np.cumsum(change)[:-1]

    # Changes

    def add_edge(self, u: int, v: int, matrix: Array) -> None:
        if v in self.adjacent[u]:
            matrix = self.adjacent[u][v] + matrix
        self.adjacent[u][v] = matrix
        self.adjacent[v][u] = matrix.T
        self._touch((u, v))

    def _touch(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self.touched[node] = None

    def keep(self, node: int, kept: Mask) -> None:
        """Restrict a node to some of its strategies."""
        if not kept.any():
            raise NoChoiceLeft
        if kept.all():
            return
        self._touch((node, *self.adjacent[node]))
        self.unary[node] = self.unary[node][kept]
        self.labels[node] = self.labels[node][kept]
        for neighbour, matrix in list(self.adjacent[node].items()):
            matrix = np.ascontiguousarray(matrix[kept])
            self.adjacent[node][neighbour] = matrix
            self.adjacent[neighbour][node] = matrix.T
        if self.usages[node]:
            self.slack = self.slack.copy()
            self._set_spans(node, [(start, end, amount[kept]) for start, end, amount in self.usages[node]])

    def make_consistent(self, nodes: Iterable[int]) -> None:
        """Step 1, starting from some nodes and following the consequences; raises NoChoiceLeft."""
        waiting = Pending(nodes)
        while waiting:
            turn = waiting.pop_all()
            finite = self._finite(turn)
            for node in turn:
                kept = np.isfinite(self.unary[node])
                for matrix in self.adjacent[node].values():
                    if id(base_of(matrix)) not in finite:
                        kept &= np.isfinite(matrix.min(axis=1))
                if not kept.all():
                    self.keep(node, kept)
                    waiting.add(self.adjacent[node])

    def _finite(self, nodes: Iterable[int]) -> dict[int, Array]:
        """The arrays by id, of those behind the edges of some nodes, that have no infinite cost; edges share many."""
        wholes = {id(whole): whole for node in nodes for matrix in self.adjacent[node].values()
                  if (whole := base_of(matrix)).size}  # fmt: skip
        if not wholes:
            return {}
        finite = np.isfinite(np.concatenate([whole.ravel() for whole in wholes.values()]))
        starts = np.cumsum([0, *(whole.size for whole in wholes.values())])[:-1]
        are_finite = np.logical_and.reduceat(finite, starts).tolist()
        return {key: whole for (key, whole), is_finite in zip(wholes.items(), are_finite, strict=True) if is_finite}

    def absorb_single(self, nodes: Iterable[int]) -> None:
        """Those of the nodes that have one strategy become costs of their neighbours."""
        single = [node for node in nodes if node in self.unary and self.unary[node].size == 1]
        for node in single:
            if node in self.held:
                continue
            for neighbour, matrix in self.adjacent[node].items():
                self.unary[neighbour] = self.unary[neighbour] + matrix[0]
            self.offset += float(self.unary[node][0])
            strategy = int(self.labels[node][0])
            self._remove(node, constant_of(node, strategy))

    def merge_followers(self, nodes: Collection[int]) -> None:
        """Step 2, at the edges of some nodes."""
        near = ((min(u, v), max(u, v)) for u in nodes if u in self.unary for v in self.adjacent[u])
        waiting = dict.fromkeys(near)  # no set: the order must be the same in all processes
        followers: dict[int, list[tuple[int, Integers]]] = {}
        while waiting:
            u, v = waiting.popitem()[0]
            if v not in self.adjacent.get(u, ()):
                continue
            if len(self.adjacent[u]) > len(self.adjacent[v]):
                u, v = v, u  # few links to move
            either = np.isfinite(self.adjacent[u][v])
            count = np.count_nonzero(either)  # quickly found, and mostly tells
            for node, leader, finite in ((u, v, either), (v, u, either.T)):
                if node not in self.held and count == finite.shape[1] and finite.any(axis=0).all():
                    touched = [other for other in self.adjacent[node] if other != leader]
                    follows = finite.argmax(axis=0)
                    followers.setdefault(leader, []).append((node, follows))
                    self._follow(node, leader, follows)
                    waiting.update(dict.fromkeys((leader, other) for other in touched))
                    break
        usages, self.slack = self.usages, self.slack.copy()
        self.usages = {node: usages[node] for node in self.unary}
        for leader in followers:
            if leader in self.unary:
                self._set_spans(leader, gathered_spans(leader, usages, followers))

    def eliminate_free(self, nodes: Iterable[int]) -> None:
        """Step 3, for those of the nodes that use no memory beyond their least."""
        waiting = Pending(node for node in nodes if node in self.unary)
        while waiting:
            node = waiting.pop()
            if self.usages[node] or len(self.adjacent[node]) > 2 or node in self.held:
                continue
            waiting.add(self.adjacent[node])
            self._eliminate(node)

    def remove_dominated(self, nodes: Iterable[int]) -> None:
        """Step 4, one sweep over some nodes."""
        for node in [node for node in nodes if node in self.unary and node not in self.held]:
            self._drop_pairs(node)
            cost = self.unary[node]
            if cost.size == 1:
                continue
            matrices = self.adjacent[node].values()
            borders = np.array([0, *itertools.accumulate(matrix.shape[1] for matrix in matrices)])
            links = np.concatenate([np.zeros((cost.size, 0)), *matrices], axis=1)  # C order, whatever theirs
            spans = self.usages[node]
            used = np.stack([amount for _, _, amount in spans], axis=1) if spans else np.zeros((cost.size, 0))
            self.keep(node, undominated(cost, links, borders, used))

    def reduce(self, *, dominated: bool, continued: bool = False) -> None:
        """All reductions until none finds anything more, each only where something changed; raises NoChoiceLeft.

        continued: it was reduced before, so that only what was changed since is looked at.
        """
        changed, inconsistent = self.touched if continued else dict.fromkeys(self.unary), self.touched
        while changed:
            self.touched = {}
            self.make_consistent(node for node in inconsistent if node in self.unary)
            self.absorb_single({**changed, **self.touched})
            self.eliminate_free({**changed, **self.touched})
            self.merge_followers({**changed, **self.touched})
            if not dominated:
                break
            self.remove_dominated({**changed, **self.touched})
            changed = inconsistent = self.touched
        self._drop_times()

    # Steps in detail

    def _remove(self, node: int, lift: Lift) -> None:
        self._touch(self.adjacent[node])
        for neighbour in self.adjacent.pop(node):
            del self.adjacent[neighbour][node]
        del self.unary[node], self.usages[node], self.labels[node]
        self.lifts.append(lift)

    def _eliminate(self, node: int) -> None:
        unary, neighbours = self.unary[node], list(self.adjacent[node].items())
        if not neighbours:
            self.offset += float(unary.min())
        elif len(neighbours) == 1:
            ((u, to_u),) = neighbours
            self.unary[u] = self.unary[u] + (unary[:, None] + to_u).min(axis=0)
        else:
            (u, to_u), (v, to_v) = neighbours
            self.add_edge(u, v, ((unary[:, None] + to_u)[:, :, None] + to_v[:, None, :]).min(axis=0))
        own = self.labels[node]
        partners = [(u, self.labels[u], matrix) for u, matrix in neighbours]

        def lift(choice: list[int]) -> None:
            total = unary
            for u, labels, matrix in partners:
                total = total + matrix[:, np.searchsorted(labels, choice[u])]
            choice[node] = int(own[total.argmin()])

        self._remove(node, lift)

    def _follow(self, node: int, leader: int, follows: Integers) -> None:
        """Merge `node`, whose strategy is follows[strategy of leader], into `leader`."""
        matrix = self.adjacent[leader][node]
        self.unary[leader] = self.unary[leader] + self.unary[node][follows] + matrix[np.arange(follows.size), follows]
        for other, link in list(self.adjacent[node].items()):
            if other != leader:
                self.add_edge(leader, other, link[follows])
        labels, own = self.labels[leader], self.labels[node][follows]

        def lift(choice: list[int]) -> None:
            choice[node] = int(own[np.searchsorted(labels, choice[leader])])

        self._touch(self.adjacent[node])
        for neighbour in self.adjacent.pop(node):
            del self.adjacent[neighbour][node]
        del self.unary[node], self.labels[node]  # the usages are gathered when all leaders are known
        self.lifts.append(lift)

    def _drop_pairs(self, node: int) -> None:
        """Step 4 at a leaf: forbid its strategies that are dominated given the neighbour's."""
        if len(self.adjacent[node]) != 1:
            return
        ((neighbour, matrix),) = self.adjacent[node].items()
        total = self.unary[node][:, None] + matrix
        lighter = np.ones((total.shape[0],) * 2, dtype=bool)
        for _, _, amount in self.usages[node]:
            lighter &= amount[:, None] <= amount[None, :]
        same = lighter & lighter.T
        first = np.tri(total.shape[0], k=-1, dtype=bool).T
        dropped = np.zeros(total.shape, dtype=bool)
        for better in range(total.shape[0]):
            cheaper = total[better] < total
            equal = total[better] == total
            strictly = lighter[better][:, None] & (cheaper | (equal & ~same[better][:, None]))
            dropped |= strictly | (equal & (same & first)[better][:, None])
        dropped &= np.isfinite(total)
        if dropped.any():
            matrix = np.where(dropped, np.inf, matrix)
            self.adjacent[node][neighbour] = matrix
            self.adjacent[neighbour][node] = matrix.T
            self._touch((node, neighbour))
            self.make_consistent([node])

    # Memory

    def _set_usages(self, usages: tuple[tuple[Usage, ...], ...], limit: float) -> None:
        """Number the points in time at which a set of live usages is maximal (a start, then an end), see step 5."""
        live = [u for node_usages in usages for u in node_usages if u.end > u.start]
        starts, ends = {u.start for u in live}, {u.end for u in live}
        events = sorted(starts | ends)
        points = [now for now, then in itertools.pairwise(events) if now in starts and then in ends]
        self.slack = np.full(len(points), limit)
        self.times = np.arange(len(points))
        times = np.array(points)
        for node, node_usages in enumerate(usages):
            spans = []
            for usage in node_usages:
                if usage.end > usage.start:
                    first, last = np.searchsorted(times, [usage.start, usage.end])
                    spans.append((int(first), int(last), usage.bytes))
            self._set_spans(node, spans)

    def _set_spans(self, node: int, spans: list[UsageSpan]) -> None:
        """Book what every strategy of the node uses as used, in `slack` itself, and keep the rest.

        The rest are spans that do not overlap, in their order, with neighbours that differ.
        """
        if len(spans) == 1:
            ((start, end, amount),) = spans
            least = amount.min()
            if least > 0:
                self.slack[start:end] -= least
                amount = amount - least
            self.usages[node] = [(start, end, amount)] if end > start and amount.any() else []
            return
        self.usages[node] = []
        if not spans:
            return
        borders, where = np.unique([(start, end) for start, end, _ in spans], return_inverse=True)
        where = where.reshape(-1, 2)
        change = np.zeros((borders.size, spans[0][2].size))
        amounts = np.stack([amount for _, _, amount in spans])
        np.add.at(change, where[:, 0], amounts)
        np.subtract.at(change, where[:, 1], amounts)
        used = np.cumsum(change, axis=0)[:-1]
        least = used.min(axis=1)
        used -= least[:, None]
        self.slack[borders[0] : borders[-1]] -= np.repeat(least, np.diff(borders))
        differs = np.flatnonzero(np.concatenate(([True], (used[1:] != used[:-1]).any(axis=1))))
        ends = np.append(borders[differs[1:]], borders[-1])
        rows = used[differs]
        nonzero = rows.any(axis=1)
        self.usages[node] = [
            (int(start), int(end), row)
            for start, end, row in zip(borders[differs][nonzero], ends[nonzero], rows[nonzero], strict=True)
        ]

    def _drop_times(self) -> None:
        """Step 5: forget points that cannot exceed the limit, or that another with no more slack implies."""
        count = self.slack.size
        if not count:
            return
        if (self.slack < 0).any():
            raise OutOfMemory
        spans = [span for spans in self.usages.values() for span in spans]
        starts = np.array([start for start, _, _ in spans], dtype=np.int64)
        ends = np.array([end for _, end, _ in spans], dtype=np.int64)
        most = np.array([amount.max() for _, _, amount in spans])
        change = np.zeros(count + 1)
        np.add.at(change, starts, most)
        np.subtract.at(change, ends, most)
        possible = np.cumsum(change)[:-1] > self.slack
        # all that is live at t is live from `since` to before `until`
        since, until = np.zeros(count + 1, dtype=np.int64), np.full(count + 1, count)
        np.maximum.at(since, starts, starts)
        np.minimum.at(until, ends - 1, ends)
        for start, end in zip(starts, ends, strict=True):
            since[start:end] = np.maximum(since[start:end], start)
            until[start:end] = np.minimum(until[start:end], end)
        possible &= ~self._outweighed()
        kept = np.zeros(count, dtype=bool)
        for t in np.flatnonzero(possible):
            before, after = self.slack[since[t] : t], self.slack[t + 1 : until[t]]
            # of points with equal slack the first stays
            kept[t] = not (before.min(initial=np.inf) <= self.slack[t] or after.min(initial=np.inf) < self.slack[t])
        if not kept.all():
            self._renumber(kept)
        self._round_slack()

    def _outweighed(self) -> Mask:
        """Points that another implies since, from each point to the next on the way there, loads fall by too little."""
        count = self.slack.size
        fall, rise = np.zeros(count), np.zeros(count)  # at most, from the point before
        for spans in self.usages.values():
            for index, (start, end, amount) in enumerate(spans):
                if not index or spans[index - 1][1] != start:
                    rise[start] += amount.max()
                    fall[start] -= amount.min()
                if end == count:
                    continue
                change = (spans[index + 1][2] if index + 1 < len(spans) and spans[index + 1][0] == end else 0) - amount
                rise[end] += change.max()
                fall[end] -= change.min()
        later = self.slack + np.cumsum(fall)
        earlier = self.slack - np.cumsum(rise)
        by_later, by_earlier = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        # of points that imply each other the first stays, here and among implied points: else both might go
        by_later[:-1] = later[:-1] > np.minimum.accumulate(later[::-1])[::-1][1:]
        by_earlier[1:] = earlier[1:] >= np.minimum.accumulate(earlier)[:-1]
        return by_later | by_earlier

    def _renumber(self, kept: Mask) -> None:
        renumbered = np.concatenate(([0], np.cumsum(kept)))
        self.slack, self.times = self.slack[kept], self.times[kept]
        for node, spans in self.usages.items():
            moved = [(int(renumbered[start]), int(renumbered[end]), amount) for start, end, amount in spans]
            self._set_spans(node, [span for span in moved if span[1] > span[0]])

    def _round_slack(self) -> None:
        """Down to a multiple of what all amounts at that time are multiples of: no load lies between."""
        units = np.zeros(self.slack.size, dtype=np.int64)
        for spans in self.usages.values():
            for start, end, amount in spans:
                units[start:end] = np.gcd(units[start:end], np.gcd.reduce(amount.astype(np.int64)))
        units = np.maximum(units, 1)
        self.slack = np.floor(self.slack / units) * units
