"""Random problems: tiny ones for brute force, and ones with the shape of a traced train step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from autopar.passes.solver.problem import Array, Integers, Problem, Usage


def problem_of(costs: Any, edges: Any = (), usages: Any = None, limit: float | None = None) -> Problem:
    """A problem from nested lists."""
    return Problem(tuple(costs), tuple(edges), tuple(usages or [()] * len(costs)), limit)


def use(start: int, end: int, amounts: Iterable[float]) -> Usage:
    return Usage(start, end, np.array(list(amounts)))


def tiny_problem(seed: int, *, memory: bool, forbidden: bool) -> Problem:
    """At most 6 nodes with 1 to 4 strategies, whole-number costs (many ties), parallel edges, isolated nodes."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    sizes = rng.integers(1, 5, count)

    def costs(*shape: int) -> Array:
        values = rng.integers(0, 8, shape).astype(float)
        return np.where(rng.random(shape) < 0.25, np.inf, values) if forbidden else values

    edges = []
    for _ in range(int(rng.integers(0, 2 * count + 1)) if count > 1 else 0):
        u, v = (int(node) for node in rng.choice(count, 2, replace=False))
        edges.append((u, v, costs(sizes[u], sizes[v])))
    usages = []
    for node in range(count):
        spans = []
        for _ in range(int(rng.integers(0, 3))):
            start, end = sorted(int(time) for time in rng.integers(0, 8, 2))
            spans.append(Usage(start, end, rng.integers(0, 10, sizes[node])))
        usages.append(tuple(spans))
    limit = float(rng.integers(3, 30)) if memory else None
    return Problem(tuple(costs(size) for size in sizes), tuple(edges), tuple(usages), limit)


def wide_problem(count: int, seed: int) -> Problem:
    """A random graph of degree 4 on average, too wide to eliminate from about 40 nodes on, with memory that binds."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 9, count)
    pairs = {tuple(sorted(int(node) for node in rng.choice(count, 2, replace=False))) for _ in range(2 * count)}
    edges = tuple((u, v, np.floor(100 * rng.random((sizes[u], sizes[v])) ** 3)) for u, v in sorted(pairs))
    usages = []
    for node, size in enumerate(sizes):
        usages.append((Usage(node, node + int(rng.integers(2, count // 2)), rng.integers(0, 100, size)),))
    costs = tuple(np.floor(200 * (1 - usage.bytes / 100) * rng.random(usage.bytes.size)) for (usage,) in usages)
    load = np.zeros(2 * count)
    for (usage,) in usages:
        load[usage.start : usage.end] += usage.bytes.min() + 0.3 * np.ptp(usage.bytes)
    return Problem(costs, edges, tuple(usages), float(np.floor(load.max())))


class _Step:
    """Collects the operators of a train step; a strategy is a layout per operand and one of the result.

    Layouts are 0 to 8: (unsharded, first, second dimension) for each of two mesh axes.
    """

    def __init__(self, seed: int, largest: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.largest = largest
        self.costs: list[Array] = []
        self.results: list[Integers] = []
        self.edges: list[tuple[int, int, Array]] = []
        self.sizes: list[float] = []
        self.last_use: list[int] = []

    def add(self, operands: Sequence[int], flops: float, size: float) -> int:
        """An operator; elementwise (flops == 0) ones pass the layout on, others change it."""
        node = len(self.costs)
        count = 9 if flops == 0 else int(self.rng.integers(min(12, self.largest), self.largest + 1))
        result = np.arange(9) if flops == 0 else self.rng.integers(0, 9, count)
        cut = np.array([1, 2, 2, 4, 8, 8, 4, 8, 8])
        self.costs.append(flops / cut[self.rng.integers(0, 9, count)] if flops else size / 100 / cut[result])
        for operand in operands:
            wanted = result if flops == 0 else self.rng.integers(0, 9, count)
            self.edges.append((operand, node, self._reshard(self.results[operand], wanted, self.sizes[operand])))
            self.last_use[operand] = node
        self.results.append(result)
        self.sizes.append(size)
        self.last_use.append(node)
        return node

    def _reshard(self, source: Integers, target: Integers, size: float) -> Array:
        first = (source[:, None] // 3 != target[None, :] // 3) & (source[:, None] // 3 != 0)
        second = (source[:, None] % 3 != target[None, :] % 3) & (source[:, None] % 3 != 0)
        return np.asarray(size * (first + 3.0 * second))


def train_step_problem(layers: int, seed: int, *, largest: int = 32, tightness: float | None = None) -> Problem:
    """About 32 nodes a layer: forward, backward linked by residuals, and the update of three weights a layer.

    tightness: the limit, from 0 = what no choice can go below to 1 = what every choice keeps; None = no limit.
    """
    step = _Step(seed, largest)
    weights = [[step.add([], 0, 4.0) for _ in range(3)] for _ in range(layers)]
    stream = step.add([], 0, 1.0)
    saved: list[tuple[int, ...]] = []
    for qkv, project, feed in weights:
        normed = step.add([stream], 0, 1.0)
        heads = step.add([normed, qkv], 3.0, 3.0)
        scores = step.add([heads], 1.0, 2.0)
        soft = step.add([scores], 0, 2.0)
        mixed = step.add([soft, heads], 1.0, 1.0)
        out = step.add([mixed, project], 1.0, 1.0)
        added = step.add([stream, out], 0, 1.0)
        hidden = step.add([added, feed], 8.0, 4.0)
        active = step.add([hidden], 0, 4.0)
        saved.append((stream, normed, heads, soft, mixed, added, hidden))
        stream = step.add([added, active], 8.0, 1.0)
    gradient = step.add([stream], 0, 1.0)
    updates: list[tuple[int, int]] = []
    for (qkv, project, feed), (_, normed, heads, soft, mixed, added, hidden) in zip(
        reversed(weights), reversed(saved), strict=True
    ):
        d_hidden = step.add([gradient, hidden], 8.0, 4.0)
        d_feed = step.add([d_hidden, added], 8.0, 4.0)
        d_added = step.add([d_hidden, feed], 8.0, 1.0)
        d_sum = step.add([gradient, d_added], 0, 1.0)
        d_project = step.add([d_sum, mixed], 1.0, 4.0)
        d_mixed = step.add([d_sum, project], 1.0, 1.0)
        d_soft = step.add([d_mixed, heads], 1.0, 2.0)
        d_scores = step.add([d_soft, soft], 0, 2.0)
        d_heads = step.add([d_scores, heads], 2.0, 3.0)
        d_qkv = step.add([d_heads, normed], 3.0, 4.0)
        d_normed = step.add([d_heads, qkv], 3.0, 1.0)
        gradient = step.add([d_sum, d_normed], 0, 1.0)
        updates += [(qkv, d_qkv), (project, d_project), (feed, d_feed)]
    for weight, d_weight in updates:
        moments = step.add([], 0, 8.0)
        step.add([weight, moments, d_weight], 0, 4.0)
    unit = 1 << 20
    cut = np.array([1, 2, 2, 2, 4, 4, 2, 4, 4])  # pieces of each layout
    usages = tuple(
        (Usage(node, last + 1, np.ceil(size * unit / cut[result])),)
        for node, (last, size, result) in enumerate(zip(step.last_use, step.sizes, step.results, strict=True))
    )
    costs, edges = tuple(step.costs), tuple(step.edges)
    if tightness is None:
        return Problem(costs, edges, usages, None)
    least, most = np.zeros(len(costs) + 1), np.zeros(len(costs) + 1)
    for (usage,) in usages:
        least[usage.start : usage.end] += usage.bytes.min()
        most[usage.start : usage.end] += usage.bytes.max()
    return Problem(costs, edges, usages, float(np.floor((1 - tightness) * least.max() + tightness * most.max())))
