"""The solver's inner loops over flat arrays, compiled by Numba and kept in its cache on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import event

from autopar.passes.solver.problem import Array, Integers

Kernel = TypeVar("Kernel", bound=Callable[..., Any])
Seed = npt.NDArray[np.uint64]  # [1] state of the random numbers


class Flat(NamedTuple):  # a tuple, as Numba takes
    """n nodes by their numbers, S strategies of all of them, L links (each edge from both sides), P spans."""

    nodes: Integers  # [n] numbers in the network
    start: Integers  # [n + 1] first strategy of each node
    unary: Array  # [S] seconds
    links: Integers  # [n + 1] first link of each node
    other: Integers  # [L] the neighbour, ascending within a node
    back: Integers  # [L] the same edge from the other side
    pair_at: Integers  # [L] where in `pair` the matrix [K_node, K_other] starts
    message_at: Integers  # [L] where the message from `other` to the node starts, K_node long
    pair: Array  # seconds
    spans: Integers  # [n + 1] first span of each node
    span_start: Integers  # [P] point in time
    span_end: Integers  # [P]
    span_at: Integers  # [P] where in `amount` the bytes start, K_node long
    amount: Array  # bytes
    slack: Array  # [T] bytes


_compiling: Any = event.TimingListener()  # type: ignore[no-untyped-call]
event.register("numba:compile", _compiling)  # type: ignore[no-untyped-call]


def compile_seconds() -> float:
    """How long Numba has compiled in this process."""
    return float(_compiling.duration) if _compiling.done else 0.0


def compiled(function: Kernel) -> Kernel:
    """Compile at the first call; what was compiled is kept on disk where there is a folder to write to."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        made = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # Numba's word for: neither beside this file nor in the user's cache
        made = numba.njit(**options)(function)
    return cast(Kernel, made)


@compiled
def priced(flat: Flat, total: Array, out: Array) -> None:
    """unary + what each strategy's bytes cost; total: sums of prices before each point [T + 1]."""
    start, unary = flat.start, flat.unary
    spans, span_start, span_end, span_at, amount = flat.spans, flat.span_start, flat.span_end, flat.span_at, flat.amount
    out[:] = unary
    for i in range(start.size - 1):
        size = start[i + 1] - start[i]
        for s in range(spans[i], spans[i + 1]):
            rate = total[span_end[s]] - total[span_start[s]]
            if rate > 0:
                for k in range(size):
                    out[start[i] + k] += rate * amount[span_at[s] + k]


@compiled
def _send(flat: Flat, i: int, link: int, share: float, belief: Array, message: Array) -> float:
    """The message to the other node of a link; the least of it, which is taken out."""
    start = flat.start
    other, back, pair_at, message_at, pair = flat.other, flat.back, flat.pair_at, flat.message_at, flat.pair
    j = other[link]
    rows, columns = start[i + 1] - start[i], start[j + 1] - start[j]
    out = message[message_at[back[link]] : message_at[back[link]] + columns]
    matrix = pair[pair_at[link] : pair_at[link] + rows * columns]
    incoming = message[message_at[link] : message_at[link] + rows]
    out[:] = np.inf
    for k in range(rows):
        base = share * belief[k] - incoming[k]
        row = matrix[k * columns : (k + 1) * columns]
        for m in range(columns):
            value = base + row[m]
            out[m] = min(out[m], value)
    least = np.inf
    for m in range(columns):
        least = min(least, out[m])
    for m in range(columns):
        out[m] -= least
    return least


@compiled
def _believe(flat: Flat, i: int, costs: Array, message: Array, belief: Array) -> int:
    """Costs of a node's strategies with what the messages say of the rest; how many strategies there are."""
    start = flat.start
    links, message_at = flat.links, flat.message_at
    size = start[i + 1] - start[i]
    for k in range(size):
        belief[k] = costs[start[i] + k]
    for link in range(links[i], links[i + 1]):
        at = message_at[link]
        for k in range(size):
            belief[k] += message[at + k]
    return int(size)


@compiled
def sweep(flat: Flat, costs: Array, message: Array, belief: Array, labels: Integers) -> float:
    """TRW-S: forward along the order, then backward; a lower bound, and each node's strategy of least belief."""
    start = flat.start
    links, other = flat.links, flat.other
    count = start.size - 1
    total = 0.0
    for step in range(2 * count):
        forward = step < count
        i = step if forward else 2 * count - 1 - step
        before = 0
        for link in range(links[i], links[i + 1]):
            before += other[link] < i
        after = links[i + 1] - links[i] - before
        if forward and after == 0:
            continue
        size = _believe(flat, i, costs, message, belief)
        if not forward:
            label = 0
            for k in range(1, size):
                if belief[k] < belief[label]:
                    label = k
            labels[i] = label
            least = belief[label]
            total += least
            for k in range(size):
                belief[k] -= least
        if before + after == 0:
            continue
        share = 1.0 / max(before, after)
        for link in range(links[i], links[i + 1]):
            if (other[link] > i) == forward:
                least = _send(flat, i, link, share, belief, message)
                if not forward:
                    total += least
    return total


@compiled
def load_of(flat: Flat, labels: Integers, load: Array) -> None:
    """Bytes at each point in time [T], and a zero [T + 1]."""
    spans, span_start, span_end, span_at, amount = flat.spans, flat.span_start, flat.span_end, flat.span_at, flat.amount
    load[:] = 0.0
    for i in range(labels.size):
        for s in range(spans[i], spans[i + 1]):
            used = amount[span_at[s] + labels[i]]
            load[span_start[s]] += used
            load[span_end[s]] -= used
    for t in range(1, load.size):
        load[t] += load[t - 1]


@compiled
def decode(flat: Flat, costs: Array, message: Array, belief: Array, labels: Integers) -> None:
    """A choice along the order: the nodes before count exactly, those after by their messages."""
    start = flat.start
    links, other, pair_at, message_at, pair = flat.links, flat.other, flat.pair_at, flat.message_at, flat.pair
    for i in range(start.size - 1):
        size = start[i + 1] - start[i]
        for k in range(size):
            belief[k] = costs[start[i] + k]
        for link in range(links[i], links[i + 1]):
            j = other[link]
            if j < i:
                columns = start[j + 1] - start[j]
                for k in range(size):
                    belief[k] += pair[pair_at[link] + k * columns + labels[j]]
            else:
                for k in range(size):
                    belief[k] += message[message_at[link] + k]
        labels[i] = 0
        for k in range(size):
            if belief[k] < belief[labels[i]]:
                labels[i] = k


BLOCK = 64  # points in time whose least head room is kept


@compiled
def _settle(head: Array, least: Array, first: int, last: int) -> None:
    """The least of the blocks from that of `first` to that of `last`."""
    for b in range(first // BLOCK, last // BLOCK + 1):
        value = np.inf
        for t in range(b * BLOCK, min((b + 1) * BLOCK, head.size)):
            value = min(value, head[t])
        least[b] = value


@compiled
def _take(head: Array, least: Array, pending: Array, first: int, end: int, used: float) -> None:
    """Take bytes from [first, end).

    head[t] + pending[t // BLOCK] is free; least[b] is that of the block without pending.
    """
    t = first
    while t < end:
        b = t // BLOCK
        stop = (b + 1) * BLOCK
        if t == b * BLOCK and stop <= end:
            pending[b] -= used
            t = stop
        else:
            stop = min(stop, end)
            for s in range(t, stop):
                head[s] -= used
            _settle(head, least, b * BLOCK, b * BLOCK)
            t = stop


@compiled
def _switch(flat: Flat, i: int, old: int, new: int, head: Array, least: Array, pending: Array) -> None:
    """Move node i from one strategy to another."""
    spans, span_start, span_end, span_at, amount = flat.spans, flat.span_start, flat.span_end, flat.span_at, flat.amount
    for s in range(spans[i], spans[i + 1]):
        used = amount[span_at[s] + new] - amount[span_at[s] + old]
        if used != 0:
            _take(head, least, pending, span_start[s], span_end[s], used)


@compiled
def _uniform(state: Seed) -> float:
    """xorshift64*, so that compiled and other numbers depend on the seed alone."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@compiled
def _local(flat: Flat, i: int, k: int, labels: Integers) -> float:
    """Seconds of a strategy with the neighbours as they are."""
    start, unary = flat.start, flat.unary
    links, other, pair_at, pair = flat.links, flat.other, flat.pair_at, flat.pair
    total = unary[start[i] + k]
    for link in range(links[i], links[i + 1]):
        j = other[link]
        total += pair[pair_at[link] + k * (start[j + 1] - start[j]) + labels[j]]
    return float(total)


class _Tree(NamedTuple):
    """Room for a tree of nodes, by its places; the first is the root."""

    nodes: Integers
    parent: Integers  # place of the parent; -1: the root's
    joined_by: Integers  # the link from the parent
    old: Integers  # the strategy before
    cost: Array  # [place, strategy]
    argument: Integers  # [place, strategy of the parent] -> the best strategy
    inside: Integers  # [node] -> its place, -1: outside


@compiled
def _grow(flat: Flat, tree: _Tree, wanted: int, state: Seed) -> int:
    """Draw a tree of at most so many nodes, of which no two are linked otherwise; how many it has."""
    links, other, inside = flat.links, flat.other, tree.inside
    tree.nodes[0] = int(_uniform(state) * (flat.start.size - 1))
    tree.parent[0] = -1
    inside[tree.nodes[0]] = 0
    size, at = 1, 0
    while at < size and size < wanted:
        i = tree.nodes[at]
        degree = links[i + 1] - links[i]
        skip = int(_uniform(state) * degree)
        for step in range(degree):
            link = links[i] + (step + skip) % degree
            j = other[link]
            if size < wanted and inside[j] < 0:
                touching = 0
                for m in range(links[j], links[j + 1]):
                    touching += inside[other[m]] >= 0
                if touching == 1:
                    inside[j] = size
                    tree.nodes[size], tree.parent[size], tree.joined_by[size] = j, at, link
                    size += 1
        at += 1
    return size


@compiled
def _fill_costs(
    flat: Flat, tree: _Tree, size: int, labels: Integers, price: Array, share: float, temperature: float, state: Seed
) -> tuple[float, float]:
    """The costs of the tree's strategies with the rest as it is, at a share of the prices, with noise.

    Returns what they cost now, without either, and the work.
    """
    start, unary = flat.start, flat.unary
    links, other, pair_at, pair = flat.links, flat.other, flat.pair_at, flat.pair
    now = work = 0.0
    for place in range(size):
        i = tree.nodes[place]
        tree.old[place] = labels[i]
        for k in range(start[i + 1] - start[i]):
            tree.cost[place, k] = unary[start[i] + k] + share * price[start[i] + k]
            if temperature > 0:
                tree.cost[place, k] -= 0.5 * temperature * np.log(max(_uniform(state), 1e-300))
        now += unary[start[i] + labels[i]]
        for link in range(links[i], links[i + 1]):
            j = other[link]
            columns = start[j + 1] - start[j]
            if tree.inside[j] < 0:
                for k in range(start[i + 1] - start[i]):
                    tree.cost[place, k] += pair[pair_at[link] + k * columns + labels[j]]
                now += pair[pair_at[link] + labels[i] * columns + labels[j]]
            elif tree.inside[j] < place:
                now += pair[pair_at[link] + labels[i] * columns + labels[j]]
            work += start[i + 1] - start[i]
    return now, work


@compiled
def _choose_best(flat: Flat, tree: _Tree, size: int, labels: Integers) -> tuple[bool, float]:
    """Up the tree, then down: the best choice of all its nodes; whether it is another, and the work."""
    start, pair_at, pair = flat.start, flat.pair_at, flat.pair
    work = 0.0
    for place in range(size - 1, 0, -1):
        i, above = tree.nodes[place], tree.parent[place]
        rows, columns = start[tree.nodes[above] + 1] - start[tree.nodes[above]], start[i + 1] - start[i]
        work += rows * columns
        for r in range(rows):
            value, chosen = np.inf, 0
            for k in range(columns):
                total = tree.cost[place, k] + pair[pair_at[tree.joined_by[place]] + r * columns + k]
                if total < value:
                    value, chosen = total, k
            tree.cost[above, r] += value
            tree.argument[place, r] = chosen
    changed = False
    for place in range(size):
        i = tree.nodes[place]
        if place == 0:
            chosen = 0
            for k in range(1, start[i + 1] - start[i]):
                if tree.cost[0, k] < tree.cost[0, chosen]:
                    chosen = k
        else:
            chosen = tree.argument[place, labels[tree.nodes[tree.parent[place]]]]
        changed |= chosen != labels[i]
        labels[i] = chosen
    return changed, work


@compiled
def _cost_of_tree(flat: Flat, tree: _Tree, size: int, labels: Integers) -> float:
    start, links, other = flat.start, flat.links, flat.other
    total = 0.0
    for place in range(size):
        i = tree.nodes[place]
        total += flat.unary[start[i] + labels[i]]
        for link in range(links[i], links[i + 1]):
            j = other[link]
            if tree.inside[j] < place:
                total += flat.pair[flat.pair_at[link] + labels[i] * (start[j + 1] - start[j]) + labels[j]]
    return total


@compiled
def improve(
    flat: Flat, price: Array, labels: Integers, head: Array, state: Seed, moves: int, largest: int,
    heat: tuple[float, float],
) -> float:  # fmt: skip
    """Moves of trees of nodes, each to its optimum with the rest as it is; every choice keeps to the memory.

    A tree's strategies are chosen by dynamic programming at costs with a random share of the memory's prices
    (price, seconds per strategy) and random noise; taken if the cost rises by little, less and less, from the first to
    the second `heat` in seconds, not at all in the last fifth. labels and head, the choice and the bytes that it leaves
    free, are changed. Returns the work.
    """
    start = flat.start
    count, (hot, cold) = start.size - 1, heat
    blocks = (head.size + BLOCK - 1) // BLOCK
    least, pending = np.zeros(blocks), np.zeros(blocks)
    if head.size:
        _settle(head, least, 0, head.size - 1)
    widest = 0
    for i in range(count):
        widest = max(widest, start[i + 1] - start[i])
    tree = _Tree(
        np.empty(largest, dtype=np.int64), np.empty(largest, dtype=np.int64), np.empty(largest, dtype=np.int64),
        np.empty(largest, dtype=np.int64), np.empty((largest, widest)), np.empty((largest, widest), dtype=np.int64),
        np.full(count, -1),
    )  # fmt: skip
    work = 0.0
    for move in range(moves):
        temperature = hot * (cold / hot) ** (1.25 * move / moves) if 5 * move < 4 * moves and hot > 0 else 0.0
        wanted = 1 + int(_uniform(state) * _uniform(state) * largest)
        size = _grow(flat, tree, wanted, state)
        share = 0.0
        if head.size:
            draw = _uniform(state)
            share = 0.0 if draw < 0.2 else (1.0 if draw < 0.5 else 2.0 * _uniform(state))
        before, filled = _fill_costs(flat, tree, size, labels, price, share, temperature, state)
        changed, chosen = _choose_best(flat, tree, size, labels)
        work += filled + chosen
        if changed:
            change = _cost_of_tree(flat, tree, size, labels) - before
            taken = change <= 0 or (temperature > 0 and _uniform(state) < np.exp(-change / temperature))
            if taken and head.size:
                for place in range(size):
                    i = tree.nodes[place]
                    if labels[i] != tree.old[place]:
                        _switch(flat, i, tree.old[place], labels[i], head, least, pending)
                for b in range(blocks):
                    taken &= least[b] + pending[b] >= 0
                if not taken:
                    for place in range(size):
                        i = tree.nodes[place]
                        if labels[i] != tree.old[place]:
                            _switch(flat, i, labels[i], tree.old[place], head, least, pending)
            if not taken:
                for place in range(size):
                    labels[tree.nodes[place]] = tree.old[place]
        for place in range(size):
            tree.inside[tree.nodes[place]] = -1
    for t in range(head.size):
        head[t] += pending[t // BLOCK]
    return work


@compiled
def repair(flat: Flat, labels: Integers, head: Array, prices: Array, growth: float, sweeps: int) -> bool:
    """Sweeps over the nodes, each to its best strategy at prices (seconds per byte [T]) that grow where memory lacks.

    labels, head and prices are changed. Returns whether the choice fits.
    """
    start = flat.start
    spans, span_start, span_end, span_at, amount = flat.spans, flat.span_start, flat.span_end, flat.span_at, flat.amount
    count = start.size - 1
    blocks = (head.size + BLOCK - 1) // BLOCK
    least, pending = np.zeros(blocks), np.zeros(blocks)
    if head.size == 0:
        return True
    _settle(head, least, 0, head.size - 1)
    total = np.zeros(head.size + 1)
    for sweep_ in range(sweeps):
        lacking = False
        for t in range(head.size):
            head[t] += pending[t // BLOCK]
            if head[t] < 0:
                lacking = True
                prices[t] *= growth
            total[t + 1] = total[t] + prices[t]
        if not lacking:
            return True
        pending[:] = 0.0
        _settle(head, least, 0, head.size - 1)
        for step in range(count):
            i = step if sweep_ % 2 == 0 else count - 1 - step
            size = start[i + 1] - start[i]
            if size == 1 or spans[i] == spans[i + 1]:
                continue
            chosen, value = labels[i], np.inf
            for k in range(size):
                cost = _local(flat, i, k, labels)
                if cost < np.inf:
                    for s in range(spans[i], spans[i + 1]):
                        cost += amount[span_at[s] + k] * (total[span_end[s]] - total[span_start[s]])
                if cost < value:
                    chosen, value = k, cost
            if chosen != labels[i]:
                _switch(flat, i, labels[i], chosen, head, least, pending)
                labels[i] = chosen
    for t in range(head.size):
        head[t] += pending[t // BLOCK]
        if head[t] < 0:
            return False
    return True
