"""Exact minimisation of a pairwise network by eliminating one variable after the other (bucket elimination).

1. `plan_elimination` fixes the order (weighted min-fill) and every table's shape. Both depend on the graph and the
   numbers of strategies only, so that one plan serves many evaluations with other node costs.
2. `Elimination.minimise` sums a node's tables and takes the minimum over its strategies, which is a table over its
   neighbours that go later; choices are read off in the opposite order (Dechter, "Bucket elimination", 1999).
3. `Elimination.marginals` sends tables back down the same tree: for each strategy the least cost of all choices
   that contain it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from autopar.passes.solver.elimination_order import min_fill
from autopar.passes.solver.problem import Array

Unary = Mapping[int, Array]
Adjacent = Mapping[int, Mapping[int, Array]]

MAX_TABLE = 1 << 21  # entries of one table between buckets
MAX_WORK = 1 << 31  # additions of one evaluation: about two seconds
MAX_STORED = 1 << 26  # entries of all tables of one evaluation: 512 MiB
_MAX_EFFORT = 1 << 25  # pairs of neighbours looked at for an order: some seconds
_LARGE = 1 << 14  # entries of a sum from which on a new array for it takes longer than the additions
_WHOLE = 1 << 17  # entries up to which a bucket is summed in one piece; beyond, slices stay in the cache


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The elimination of one node."""

    node: int
    scope: tuple[int, ...]  # the neighbours at that time, in the order of their own elimination
    partners: tuple[int, ...]  # neighbours in the network that are eliminated later
    children: tuple[int, ...]  # earlier nodes whose tables are summed here
    shapes: tuple[tuple[int, ...], ...]  # of partners' and children's tables, spread over (node, *scope)
    table: tuple[int, ...]  # shape over scope


@dataclasses.dataclass(frozen=True)
class Elimination:
    """An order of elimination with the shapes of its tables."""

    buckets: tuple[Bucket, ...]  # in order
    fixed: tuple[int, ...]  # nodes that keep a given strategy because the tables would grow too large
    work: int  # additions of one evaluation

    def minimise(
        self, unary: Unary, adjacent: Adjacent, given: Mapping[int, int] | None = None
    ) -> tuple[float, dict[int, int]]:
        """The least cost and a choice (positions) that has it; `given` holds the strategies of the fixed nodes."""
        start, unary = self._with_fixed(unary, adjacent, given or {})
        tables: dict[int, Array] = {}
        for bucket in self.buckets:
            tables[bucket.node] = _minimum(_parts(bucket, unary, adjacent, tables), bucket.table)
        value = start + math.fsum(float(tables[b.node]) for b in self.buckets if not b.scope)
        return value, self._read_off(unary, adjacent, tables, given or {})

    def marginals(self, unary: Unary, adjacent: Adjacent) -> tuple[float, dict[int, int], dict[int, Array]]:
        """`minimise`, and for each node and strategy the least cost with it; nothing may be fixed."""
        tables: dict[int, Array] = {}
        for bucket in self.buckets:
            tables[bucket.node] = _minimum(_parts(bucket, unary, adjacent, tables), bucket.table)
        value = math.fsum(float(tables[b.node]) for b in self.buckets if not b.scope)
        by_node = {bucket.node: bucket for bucket in self.buckets}
        down: dict[int, Array] = {}  # cost of everything outside the node's subtree, over its scope
        marginals: dict[int, Array] = {}
        for bucket in reversed(self.buckets):
            # other roots' components do not depend on this one: their sum is a constant
            above = down.pop(bucket.node) if bucket.scope else np.array(value - float(tables[bucket.node]))
            parts = [*_parts(bucket, unary, adjacent, tables), above.reshape((1, *bucket.table))]
            views = [_projection(bucket, by_node[child].scope) for child in bucket.children]
            marginals[bucket.node], projected = _project(parts, bucket.table, views)
            for child, total in zip(bucket.children, projected, strict=True):
                own = tables[child]
                with np.errstate(invalid="ignore"):
                    down[child] = np.where(np.isinf(own), np.inf, total - own)
        return value, self._read_off(unary, adjacent, tables, {}), marginals

    def _with_fixed(self, unary: Unary, adjacent: Adjacent, given: Mapping[int, int]) -> tuple[float, Unary]:
        if not self.fixed:
            return 0.0, unary
        start, changed, fixed = 0.0, dict(unary), set(self.fixed)
        for node in self.fixed:
            start += float(unary[node][given[node]])
            for neighbour, matrix in adjacent[node].items():
                if neighbour not in fixed:
                    changed[neighbour] = changed[neighbour] + matrix[given[node]]
                elif neighbour > node:
                    start += float(matrix[given[node], given[neighbour]])
        return start, changed

    def _read_off(
        self, unary: Unary, adjacent: Adjacent, tables: Mapping[int, Array], given: Mapping[int, int]
    ) -> dict[int, int]:
        choice = {node: given[node] for node in self.fixed}
        scopes = {bucket.node: bucket.scope for bucket in self.buckets}
        for bucket in reversed(self.buckets):
            total = unary[bucket.node]
            for partner in bucket.partners:
                total = total + adjacent[bucket.node][partner][:, choice[partner]]
            for child in bucket.children:
                where: tuple[Any, ...] = (slice(None), *(choice[node] for node in scopes[child][1:]))
                total = total + tables[child][where]
            choice[bucket.node] = int(total.argmin())
        return choice


def plan_elimination(
    sizes: Mapping[int, int],
    neighbours: Mapping[int, Iterable[int]],
    *,
    prefer_fixed: Mapping[int, float] | None = None,
) -> Elimination | None:
    """Order all nodes by weighted min-fill: the fewest new pair entries first, then the smallest table.

    None if a limit above is passed. With `prefer_fixed`, nodes are fixed instead where a table would grow too large:
    of the nodes that the table spans the one with the largest preference.
    """
    graph = tuple((node, sizes[node], tuple(neighbours[node])) for node in sorted(sizes))
    if prefer_fixed is None:
        return _exact_elimination(graph, _Limits(MAX_TABLE, MAX_WORK, MAX_STORED))
    # a plan with fixed nodes is run many times: it must be much cheaper than an exact one
    return _elimination(graph, _Limits(MAX_TABLE >> 5, MAX_WORK >> 6, MAX_STORED), prefer_fixed)


_Linked = tuple[tuple[int, int, tuple[int, ...]], ...]  # nodes, ascending, with their sizes and neighbours


class _Limits(NamedTuple):
    table: int  # entries of one
    work: int
    stored: int  # entries of all tables


@functools.lru_cache(maxsize=4)  # a solver asks for that of the network at hand in several places
def _exact_elimination(graph: _Linked, limits: _Limits) -> Elimination | None:
    return _elimination(graph, limits, {})


def _elimination(graph: _Linked, limits: _Limits, prefer_fixed: Mapping[int, float]) -> Elimination | None:
    nodes = np.array([node for node, _, _ in graph], dtype=np.int64)
    linked = np.array([*itertools.chain.from_iterable(others for _, _, others in graph)], dtype=np.int64)
    elimination_order = min_fill(
        np.array([size for _, size, _ in graph], dtype=np.int64),
        np.cumsum([0, *(len(others) for _, _, others in graph)]),
        np.searchsorted(nodes, linked),
        np.array([prefer_fixed[node] for node, _, _ in graph] if prefer_fixed else [], dtype=np.float64),
        *limits,
        _MAX_EFFORT,
    )
    if not elimination_order.is_done:
        return None
    scopes, ends = nodes[elimination_order.scopes].tolist(), elimination_order.scope_at.tolist()
    order = [
        (node, scopes[start:end])
        for node, (start, end) in zip(nodes[elimination_order.nodes].tolist(), itertools.pairwise(ends), strict=True)
    ]
    fixed = nodes[elimination_order.is_fixed].tolist()
    sizes, neighbours = {node: size for node, size, _ in graph}, {node: others for node, _, others in graph}
    return Elimination(_buckets(order, sizes, neighbours, set(fixed)), tuple(fixed), int(elimination_order.work))


def _buckets(
    order: Sequence[tuple[int, Iterable[int]]],
    sizes: Mapping[int, int],
    neighbours: Mapping[int, Iterable[int]],
    fixed: set[int],
) -> tuple[Bucket, ...]:
    rank = {node: index for index, (node, _) in enumerate(order)}
    scopes = {node: tuple(sorted((u for u in scope if u not in fixed), key=rank.__getitem__)) for node, scope in order}
    children: dict[int, list[int]] = {node: [] for node, _ in order}
    buckets: list[Bucket] = []
    for node, _ in order:
        scope = scopes[node]
        partners = tuple(u for u in neighbours[node] if u not in fixed and rank[u] > rank[node])
        spans = [{u} for u in partners] + [set(scopes[child][1:]) for child in children[node]]
        shapes = tuple((sizes[node], *(sizes[u] if u in span else 1 for u in scope)) for span in spans)
        table = tuple(sizes[u] for u in scope)
        buckets.append(Bucket(node, scope, partners, tuple(children[node]), shapes, table))
        if scope:
            children[scope[0]].append(node)
    return tuple(buckets)


def _parts(bucket: Bucket, unary: Unary, adjacent: Adjacent, tables: Mapping[int, Array]) -> list[Array]:
    """The tables of a bucket, each shaped to broadcast over (node, *scope)."""
    links = adjacent[bucket.node]
    sources = [links[u] for u in bucket.partners] + [tables[child] for child in bucket.children]
    own = unary[bucket.node].reshape((-1,) + (1,) * len(bucket.scope))
    return [own] + [source.reshape(shape) for source, shape in zip(sources, bucket.shapes, strict=True)]


def _sum(parts: Sequence[Array]) -> Array:
    """Broadcasting sum, small parts first so that few additions are of full size."""
    first, *rest = sorted(parts, key=np.size)
    is_new = False
    for part in rest:
        if is_new and first.size >= _LARGE and all(n in (1, m) for n, m in zip(part.shape, first.shape, strict=True)):
            first += part
        else:
            first, is_new = first + part, True
    return first


def _minimum(parts: Sequence[Array], table: tuple[int, ...]) -> Array:
    """Sum the parts and take the minimum over the first axis."""
    count = parts[0].shape[0]
    if count * math.prod(table) <= _WHOLE:
        return np.asarray(np.broadcast_to(_sum(parts), (count, *table)).min(axis=0))
    least = np.full(table, np.inf)
    for strategy in range(count):
        np.minimum(least, _sum([part[strategy] for part in parts]), out=least)
    return least


def _projection(bucket: Bucket, scope: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of the bucket's table that a child's table, whose first axis is the bucket's node, lacks."""
    return tuple(axis for axis, node in enumerate(bucket.scope) if node not in scope)


def _project(
    parts: Sequence[Array], table: tuple[int, ...], reduced: Sequence[tuple[int, ...]]
) -> tuple[Array, list[Array]]:
    """Sum the parts; minima over all of the table, and over the given axes of it, per strategy of the first axis."""
    count = max(part.shape[0] for part in parts)
    if count * math.prod(table) <= _WHOLE:
        whole = np.broadcast_to(_sum(parts), (count, *table))
        beyond = [tuple(axis + 1 for axis in axes) for axes in reduced]
        return whole.reshape(count, -1).min(axis=1), [np.asarray(whole.min(axis=axes)) for axes in beyond]
    marginal = np.empty(count)
    rows: list[list[Array]] = [[] for _ in reduced]
    for strategy in range(count):
        total = _sum([part[strategy if part.shape[0] > 1 else 0] for part in parts])
        total = np.broadcast_to(total, table)
        marginal[strategy] = total.min()
        for row, axes in zip(rows, reduced, strict=True):
            row.append(np.asarray(total.min(axis=axes)))
    return marginal, [np.stack(row) for row in rows]
