"""What the stage search asks, and what it is told: spans, meshes, microbatches in flight, and costs."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Sequence

from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.schedule import ScheduleName, first_in_flight, is_registered
from autopar.passes.submeshes import ShapesFn, candidate_shapes

Span = tuple[int, int]  # layers [start, stop)


@dataclasses.dataclass(frozen=True)
class StageCost:
    """What a span of layers costs on a mesh."""

    per_microbatch: float  # seconds, forward + backward of one microbatch, incoming transfers included
    per_step: float  # seconds once a step: prologue, gradient synchronisation, update
    memory: float  # bytes per device at the peak, with the number of microbatches in flight asked for


class StageOracle(abc.ABC):
    """What a stage costs, for a search that asks for as little as it can.

    No cost may be negative. Costs must rise with the microbatches in flight, and what does not fit must not fit with
    more layers, nor with more in flight.
    """

    @abc.abstractmethod
    def cost(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        """What it costs; None if it does not fit. It is asked for once, and only of stages that may be the best."""

    def least(self, span: Span, mesh: Mesh) -> StageCost | None:
        """What no cost is below; None if the span fits on no such mesh. It is asked for of every stage: it is quick."""
        return StageCost(0.0, 0.0, 0.0)

    def bound(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        """What no cost is below, found with less work; None if it does not fit.

        A cost is that of any number in flight, None of so many and more.
        """
        return self.least(span, mesh)

    def overhead(self, layer: int, mesh: Mesh) -> tuple[float, float]:
        """The least cost of a layer, and how many times that it costs at least, by all that is known so far.

        It is asked again when costs have become known.
        """
        return 1.0, 1.0

    def alike(self, start: int, size: int) -> Hashable:
        """Equal for groups of devices on whose meshes a span costs the same: one of them is asked for."""
        return start, size


@dataclasses.dataclass(frozen=True)
class StageSpace:
    """What stages may be made of."""

    num_layers: int
    cluster: Cluster
    num_stages: int | None = None  # None: as many as are best
    # Asked for groups inside a host and groups of whole hosts. More than 128 hosts are not divided, 256 and more are
    # dealt out in equal units, and more than 16 units form a group only if their number has four binary digits and
    # zeros, or divides that of all.
    shapes: ShapesFn = candidate_shapes


@dataclasses.dataclass(frozen=True)
class Turns:
    """How the stages take turns."""

    num_microbatches: int
    schedule: ScheduleName
    rounds: int = 1  # into so many parts each stage is divided later; priced with the memory of a whole one


def pipeline_time(costs: Sequence[StageCost], num_microbatches: int, rounds: int = 1) -> float:
    """Seconds per step of a pipeline of these stages: the formulas of `inter_op`.

    >>> pipeline_time([StageCost(2.0, 1.0, 0), StageCost(3.0, 0.5, 0)], num_microbatches=4)  # 5 + 3 * 3 + 1
    15.0
    >>> pipeline_time([StageCost(2.0, 1.0, 0), StageCost(3.0, 0.5, 0)], 4, rounds=2)  # 2 / 2 + 4 * 3 + 1
    14.0
    """
    micro = [cost.per_microbatch for cost in costs]
    return sum(micro) / rounds + (num_microbatches - 1 / rounds) * max(micro) + max(cost.per_step for cost in costs)


def in_flight(schedule: ScheduleName, num_microbatches: int, remaining: int) -> int:
    """`Schedule.in_flight` of the stage that has so many stages from itself to the end, itself included.

    Of a zero-bubble schedule it is that of 1F1B: how many stages come before is not known yet. Of a registered one it
    is that of the first of so many stages, for the same reason.
    """
    if is_registered(schedule):
        return first_in_flight(schedule, remaining, num_microbatches)
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, remaining)
