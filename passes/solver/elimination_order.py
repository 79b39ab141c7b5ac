"""The order in which a network's nodes are eliminated: weighted min-fill, compiled by Numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.passes.solver.kernels import compiled
from autopar.passes.solver.problem import Array, Integers, Mask

_HUGE = 1 << 62  # entries are not counted beyond
_BLOCK = 64  # nodes of which the first to go is remembered


class Order(NamedTuple):
    """m eliminated nodes in order."""

    is_done: bool  # no limit was passed
    nodes: Integers  # [m]
    scope_at: Integers  # [m + 1] where the neighbours of each at its time start in `scopes`
    scopes: Integers
    is_fixed: Mask  # [n] nodes that were taken out instead
    work: int  # additions of one evaluation


class _Adjacency(NamedTuple):
    """n nodes with the lists of their neighbours in one array, with room to grow."""

    other: Integers
    start: Integers  # [n] where a node's list starts
    degree: Integers  # [n]
    room: Integers  # [n]


@compiled
def _with_link(graph: _Adjacency, node: int, other: int, end: int) -> tuple[_Adjacency, int]:
    """`other` added to the list of `node`, which moves behind all others, at `end`, where it has no room."""
    nodes, start, degree, room = graph.other, graph.start, graph.degree, graph.room
    size = degree[node]
    if size == room[node]:
        more = max(4, 2 * size)
        if end + more > nodes.size:
            longer = np.empty(2 * (end + more), dtype=np.int64)
            longer[:end] = nodes[:end]
            nodes = longer
        nodes[end : end + size] = nodes[start[node] : start[node] + size]
        start[node], room[node] = end, more
        end += more
    nodes[start[node] + size] = other
    degree[node] += 1
    return _Adjacency(nodes, start, degree, room), end


@compiled
def _unlink(graph: _Adjacency, node: int, other: int) -> None:
    first, last = graph.start[node], graph.start[node] + graph.degree[node] - 1
    for at in range(first, last + 1):
        if graph.other[at] == other:
            graph.other[at] = graph.other[last]
            graph.degree[node] -= 1
            return


@compiled
def _fill(graph: _Adjacency, sizes: Integers, node: int, marks: Integers, mark: int) -> int:
    """Pair entries that the elimination of a node adds; uses the marks from `mark`, as many as it has neighbours."""
    first, count, total = graph.start[node], graph.degree[node], 0
    for a in range(count):
        u = graph.other[first + a]
        for at in range(graph.start[u], graph.start[u] + graph.degree[u]):
            marks[graph.other[at]] = mark + a
        for b in range(a + 1, count):
            v = graph.other[first + b]
            if marks[v] != mark + a:
                total += sizes[u] * sizes[v]
    return total


@compiled
def _entries(graph: _Adjacency, sizes: Integers, node: int) -> int:
    """Of the table that the elimination of a node makes."""
    total = 1
    for at in range(graph.start[node], graph.start[node] + graph.degree[node]):
        size = sizes[graph.other[at]]
        if total > _HUGE // size:
            return _HUGE
        total *= size
    return total


@compiled
def _is_before(node: int, other: int, fills: Integers, tables: Integers) -> bool:
    """Whether a node goes before another with a lower number; -1: there is none."""
    if node < 0 or other < 0:
        return other < 0 <= node
    return bool(fills[node] < fills[other] or (fills[node] == fills[other] and tables[node] < tables[other]))


@compiled
def _first_of(block: int, fills: Integers, tables: Integers, is_left: Mask) -> int:
    """The node of a block that goes first; -1 if none is left."""
    best = -1
    for node in range(block * _BLOCK, min((block + 1) * _BLOCK, fills.size)):
        if is_left[node] and _is_before(node, best, fills, tables):
            best = node
    return best


@compiled
def _preferred(graph: _Adjacency, node: int, preference: Array) -> int:
    """Of a node and its neighbours the most preferred, the first of equal ones."""
    best = node
    for at in range(graph.start[node], graph.start[node] + graph.degree[node]):
        other = graph.other[at]
        if preference[other] > preference[best] or (preference[other] == preference[best] and other < best):
            best = other
    return best


@compiled
def min_fill(
    sizes: Integers, starts: Integers, neighbours: Integers, preference: Array,
    most_table: int, most_work: int, most_stored: int, most_effort: int,
) -> Order:  # fmt: skip
    """The fewest new pair entries first, then the smallest table, then the first node.

    sizes: strategies of each node [n]; its neighbours: those from starts[i] to starts[i + 1]. preference [n], or empty:
    which node of a table is taken out where that, or the work, would be too large; else the order ends there. It also
    ends after so much effort: pairs of neighbours looked at.
    """
    count, can_fix = sizes.size, preference.size > 0
    degree = starts[1:] - starts[:-1]
    graph, end = _Adjacency(neighbours.copy(), starts[:-1].copy(), degree, degree.copy()), neighbours.size
    is_left, is_fixed = np.ones(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    fills, tables = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    marks, mark = np.full(count, -1), 0
    waiting, num_waiting, waits = np.arange(count), count, np.ones(count, dtype=np.bool_)  # whose entries changed
    firsts = np.full((count + _BLOCK - 1) // _BLOCK, -1)
    order, scope_at = np.empty(count, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    scopes = np.empty(max(16, 2 * neighbours.size), dtype=np.int64)
    done = taken = effort = work = stored = 0
    is_done = True
    while taken < count:
        for at in range(num_waiting):
            node = waiting[at]
            waits[node] = False
            if is_left[node]:
                effort += graph.degree[node] ** 2
                fills[node], tables[node] = _fill(graph, sizes, node, marks, mark), _entries(graph, sizes, node)
                mark += graph.degree[node]
                firsts[node // _BLOCK] = -2
        num_waiting = 0
        node = -1
        for block in range(firsts.size):
            if firsts[block] == -2:
                firsts[block] = _first_of(block, fills, tables, is_left)
            if _is_before(firsts[block], node, fills, tables):
                node = firsts[block]
        if effort > most_effort and not can_fix:
            is_done = False
            break
        table, size = tables[node], graph.degree[node]
        is_large = table > most_table or work + table * sizes[node] > most_work or stored + table > most_stored
        if is_large and not can_fix:
            is_done = False
            break
        if is_large:
            node = _preferred(graph, node, preference)
            size = graph.degree[node]
            is_fixed[node] = True
        mine = graph.other[graph.start[node] : graph.start[node] + size].copy()
        for other in mine:
            if not waits[other]:
                waits[other], waiting[num_waiting] = True, other
                num_waiting += 1
        if not is_large:
            work, stored = work + table * sizes[node], stored + table
            order[done] = node
            if scope_at[done] + size > scopes.size:
                longer = np.empty(2 * (scope_at[done] + size), dtype=np.int64)
                longer[: scope_at[done]] = scopes[: scope_at[done]]
                scopes = longer
            scopes[scope_at[done] : scope_at[done] + size] = mine
            scope_at[done + 1] = scope_at[done] + size
            done += 1
            for a in range(size):
                u = mine[a]
                for at in range(graph.start[u], graph.start[u] + graph.degree[u]):
                    marks[graph.other[at]] = mark
                for b in range(a + 1, size):
                    v = mine[b]
                    if marks[v] == mark:
                        continue  # linked before
                    for at in range(graph.start[v], graph.start[v] + graph.degree[v]):
                        other = graph.other[at]
                        if marks[other] == mark and not waits[other]:
                            waits[other], waiting[num_waiting] = True, other
                            num_waiting += 1
                    graph, end = _with_link(graph, u, v, end)
                    graph, end = _with_link(graph, v, u, end)
                mark += 1
        for other in mine:
            _unlink(graph, other, node)
        is_left[node] = False
        firsts[node // _BLOCK] = -2
        taken += 1
    return Order(is_done, order[:done], scope_at[: done + 1], scopes[: scope_at[done]], is_fixed, work)
