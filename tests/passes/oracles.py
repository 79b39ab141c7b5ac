"""Searches for stages whose costs are functions, on devices that are all the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

from autopar.ir.mesh import Cluster, DeviceKind, Host, Link, Mesh
from autopar.ir.schedule import ScheduleName
from autopar.passes.inter_op import Pipeline, plan_stages
from autopar.passes.stage_oracle import Span, StageCost, StageOracle, StageSpace, Turns
from autopar.passes.submeshes import ShapesFn, candidate_shapes

StageCostFn = Callable[[Span, Mesh, int], StageCost | None]

KIND = DeviceKind("test", 1, 1.0, {}, 1.0, 1.0, 0.0, 0.0)
LINK = Link("test", 0.0, 1.0)


def cluster(*devices: int) -> Cluster:
    return Cluster("test", tuple(Host(KIND, n, LINK) for n in devices), LINK)


class Oracle(StageOracle):
    """Of functions; what is None is as the search takes it where nothing is known."""

    def __init__(
        self, cost: StageCostFn, least: Callable[[Span, Mesh], StageCost | None] | None, bound: StageCostFn | None,
        overhead: Callable[[int, Mesh], tuple[float, float]] | None, alike: Callable[[int, int], Hashable] | None,
    ) -> None:  # fmt: skip
        self._cost, self._least, self._bound, self._overhead, self._alike = cost, least, bound, overhead, alike

    def cost(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        return self._cost(span, mesh, in_flight)

    def least(self, span: Span, mesh: Mesh) -> StageCost | None:
        return super().least(span, mesh) if self._least is None else self._least(span, mesh)

    def bound(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        return super().bound(span, mesh, in_flight) if self._bound is None else self._bound(span, mesh, in_flight)

    def overhead(self, layer: int, mesh: Mesh) -> tuple[float, float]:
        return super().overhead(layer, mesh) if self._overhead is None else self._overhead(layer, mesh)

    def alike(self, start: int, size: int) -> Hashable:
        return super().alike(start, size) if self._alike is None else self._alike(start, size)


def search(
    num_layers: int, where: Cluster, cost: StageCostFn, m: int, schedule: ScheduleName, *,
    num_stages: int | None = None, rounds: int = 1, shapes: ShapesFn = candidate_shapes, below: float = math.inf,
    gain: float = 0.0, least: Any = None, bound: Any = None, overhead: Any = None, alike: Any = None,
) -> Pipeline | None:  # fmt: skip
    space = StageSpace(num_layers, where, num_stages, shapes)
    oracle = Oracle(cost, least, bound, overhead, alike)
    return plan_stages(space, oracle, Turns(m, schedule, rounds), below=below, gain=gain)
