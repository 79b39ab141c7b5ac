"""Plans drawn by lot: any mesh, any legal strategies, any number of stages and microbatches.

A solver chooses sensibly and so meets few of the combinations that the rules allow; here a solver that draws
lots takes its place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

from autopar.ir.graph import Block, Equation
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import ScheduleName
from autopar.passes.batch import BatchAnalysis
from autopar.passes.solver.problem import Problem, Solution
from autopar.planning import finisher
from tests.planned import Planned, cluster_of

MESHES = ((1,), (2,), (4,), (8,), (2, 2), (2, 4))


def draw(problem: Problem, random: np.random.Generator) -> Solution:
    """A choice of finite cost: node by node, any that goes with those chosen before."""
    neighbours: list[list[tuple[int, Any]]] = [[] for _ in range(problem.num_nodes)]
    for u, v, matrix in problem.edges:
        neighbours[u].append((v, matrix))
        neighbours[v].append((u, matrix.T))
    choice: dict[int, int] = {}
    for node in random.permutation(problem.num_nodes).tolist():
        cost = problem.costs[node] + sum(m[:, choice[v]] for v, m in neighbours[node] if v in choice)
        choice[node] = int(random.choice(np.flatnonzero(np.isfinite(cost))))
    return Solution(tuple(choice[node] for node in range(problem.num_nodes)), 0.0, 0.0, 0.0)


def blocks_by_lot(forward: Sequence[Equation], random: np.random.Generator) -> list[Block]:
    """Some of the forward pass to be computed again, or nothing: blocks in order, some of what they make kept."""
    bounds = np.sort(random.integers(0, len(forward) + 1, 2 * int(random.integers(0, 3)))).tolist()
    return [
        Block(start, stop, tuple((int(i), 0) for i in range(start, stop) if random.random() < 0.2))
        for start, stop in zip(bounds[::2], bounds[1::2], strict=True)
        if start < stop
    ]


def plan_by_lot(
    analysis: BatchAnalysis, shape: tuple[int, ...], num_stages: int, num_microbatches: int, random: np.random.Generator
) -> Planned:
    """A plan of at most `num_stages` stages, each on a mesh of this shape, all choices drawn by lot."""
    size = math.prod(shape)
    with mock.patch.object(finisher, "solve", lambda problem, **_: draw(problem, random)):
        search = finisher.Finisher(analysis, cluster_of(1, size * num_stages), num_layers=num_stages)
        layered = search.layering.layered(num_microbatches, False)
        layered = layered.recomputing(blocks_by_lot(layered.forward, random))
        stages = min(num_stages, layered.num_layers)
        schedules: tuple[ScheduleName, ...] = ("1f1b", "zero-bubble", "gpipe", "interleaved")
        schedule = schedules[int(random.integers(len(schedules) - stages % 2))]
        groups = stages // 2 if schedule == "interleaved" else stages
        meshes = [
            Mesh(tuple(range(group * size, (group + 1) * size)), shape, ("x", "y")[: len(shape)])
            for group in (stage % groups for stage in range(stages))
        ]
        layered, placed = search.layering.placed(layered, range(1, stages), schedule)
        finished = search.finish(layered, placed, meshes, schedule)
    assert finished is not None
    plan, lowered = finished
    if random.integers(2):
        again = [dataclasses.replace(sharding, reshard_after_forward=True) for sharding in lowered.shardings]
        lowered = search.lower(layered, lowered.placed, again)
        plan = search._price(layered, lowered, plan.schedule, 0.0, 0.0)
    return Planned(plan, lowered)
