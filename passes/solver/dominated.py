"""Strategies that others beat in whatever their neighbours choose."""

from __future__ import annotations

import numpy as np

from autopar.passes.solver.kernels import compiled
from autopar.passes.solver.problem import Array, Integers, Mask


@compiled
def undominated(cost: Array, links: Array, borders: Integers, amounts: Array) -> Mask:
    """Which strategies of a node [K] no other one replaces, whatever its neighbours choose, at no more memory.

    links: seconds [K, strategies of all neighbours], each neighbour's from borders[i] to borders[i + 1]; amounts: bytes
    [K, spans]. Of equal ones the first stays.
    """
    size, count = cost.size, borders.size - 1
    # rest[e, k]: the least of k over the neighbours from e on: what is left can differ by their difference at least
    rest = np.zeros((count + 1, size))
    for e in range(count - 1, -1, -1):
        for k in range(size):
            least = np.inf
            for m in range(borders[e], borders[e + 1]):
                least = min(least, links[k, m])
            rest[e, k] = rest[e + 1, k] + least
    kept = np.ones(size, dtype=np.bool_)
    order = np.argsort(cost + rest[0])
    for at_worse in range(size - 1, -1, -1):
        worse = order[at_worse]
        for at_better in range(size):
            better = order[at_better]
            if better == worse or not kept[better]:
                continue
            if cost[better] + rest[0, better] > cost[worse] + rest[0, worse]:
                break
            lighter, equal = True, True
            for s in range(amounts.shape[1]):
                if amounts[better, s] > amounts[worse, s]:
                    lighter = False
                    break
                equal &= amounts[better, s] == amounts[worse, s]
            if not lighter:
                continue
            gap = cost[better] - cost[worse]  # how much dearer `better` can turn out
            equal &= gap == 0
            for e in range(count):
                if gap + rest[e, better] - rest[e, worse] > 0:
                    gap = np.inf
                    break
                largest = -np.inf
                for m in range(borders[e], borders[e + 1]):
                    a, b = links[better, m], links[worse, m]
                    if b < np.inf:  # otherwise the partner excludes `worse` at least
                        largest = max(largest, a - b)
                        equal &= a == b
                    else:
                        equal &= a == np.inf
                gap += largest
            if gap < 0 or (gap == 0 and (not equal or better < worse)):
                kept[worse] = False
                break
    return kept
