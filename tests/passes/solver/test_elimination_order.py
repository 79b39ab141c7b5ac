"""The compiled order of elimination against its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.passes.solver.elimination_order import Order, min_fill

Graph = dict[int, set[int]]
LARGE = 1 << 40


def random_graph(seed: int) -> tuple[list[int], Graph]:
    """Sizes, and neighbours: sparse or dense, so that lists grow."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 90))
    share = float(random.choice([0.02, 0.1, 0.4]))
    linked: Graph = {node: set() for node in range(count)}
    for u, v in itertools.combinations(range(count), 2):
        if random.random() < share:
            linked[u].add(v)
            linked[v].add(u)
    return random.integers(1, 9, count).tolist(), linked


def compiled(
    sizes: list[int], linked: Graph, table: int, preference: list[float], effort: int = LARGE, stored: int = LARGE
) -> Order:
    starts = np.cumsum([0, *(len(linked[node]) for node in range(len(sizes)))])
    neighbours = np.array([v for node in range(len(sizes)) for v in sorted(linked[node])], dtype=np.int64)
    preferred = np.array(preference, dtype=np.float64)
    return min_fill(np.array(sizes), starts, neighbours, preferred, table, LARGE, stored, effort)


def defined(
    sizes: list[int], linked: Graph, table: int, preference: list[float]
) -> tuple[list[int], list[set[int]], set[int]] | None:
    """Order, scopes and fixed nodes, all looked at anew at each turn."""
    left = {node: set(others) for node, others in linked.items()}
    order, scopes, fixed = [], [], set()

    def key(node: int) -> tuple[int, int, int]:
        missing = [(u, v) for u, v in itertools.combinations(left[node], 2) if v not in left[u]]
        return sum(sizes[u] * sizes[v] for u, v in missing), math.prod(sizes[u] for u in left[node]), node

    while left:
        node = min(left, key=key)
        if key(node)[1] > table:
            if not preference:
                return None
            node = max(sorted({node, *left[node]}), key=preference.__getitem__)
            fixed.add(node)
        else:
            order.append(node)
            scopes.append(set(left[node]))
            for u, v in itertools.permutations(left[node], 2):
                left[u].add(v)
        for other in left.pop(node):
            left[other].discard(node)
    return order, scopes, fixed


@pytest.mark.parametrize("seed", range(40))
def test_is_as_defined(seed: int) -> None:
    sizes, linked = random_graph(seed)
    preference = np.random.default_rng(seed).permutation(len(sizes)).tolist() if seed % 2 else []
    table = 1 << (6 if seed % 4 < 2 else 20)
    found, expected = compiled(sizes, linked, table, preference), defined(sizes, linked, table, preference)
    assert found.is_done == (expected is not None)
    if expected is not None:
        order, scopes, fixed = expected
        ends = found.scope_at.tolist()
        assert found.nodes.tolist() == order
        assert [set(found.scopes[a:b].tolist()) for a, b in itertools.pairwise(ends)] == scopes
        assert set(np.flatnonzero(found.is_fixed).tolist()) == fixed
        entries = [(node, math.prod(sizes[v] for v in scope)) for node, scope in zip(order, scopes, strict=True)]
        assert found.work == sum(size * sizes[node] for node, size in entries)


def test_ends_where_a_limit_is_passed() -> None:
    sizes, linked = [2] * 30, {node: {other for other in range(30) if other != node} for node in range(30)}
    assert compiled(sizes, linked, 1 << 29, []).is_done
    assert not compiled(sizes, linked, (1 << 29) - 1, []).is_done
    assert not compiled(sizes, linked, 1 << 29, [], effort=30 * 29**2 - 1).is_done
    assert not compiled(sizes, linked, 1 << 29, [], stored=1 << 29).is_done
