"""What the search proposes, and what becomes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping
from typing import NamedTuple

from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.passes.lower import LoweredStep
from autopar.passes.submeshes import ShapesFn

Groups = Mapping[tuple[int, int], tuple[int, ...]]  # first device, number of devices -> the shape of their mesh
Finished = tuple[Plan, LoweredStep]


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """What is fixed of a plan before the stage search and the solver choose the rest; None leaves a part to them."""

    num_microbatches: int
    num_stages: int | None = None
    groups: Groups | None = None  # of devices, that stages may have
    # Whether the step is cut into layers that become so many equal stages, or else into those of the whole search.
    own_layers: bool = False
    mesh_shape: tuple[int, ...] | None = None  # of every stage, with layers of its own
    num_layers: int | None = None  # of those, about; None: as many as are usual
    rounds: int = 1  # into which every stage is divided: they are interleaved
    mesh: Mesh | None = None  # of all layers as one stage, whatever the stage search estimates
    like: Plan | None = None  # the plan whose stages it has, interleaved in rounds or without a bubble

    @property
    def bubble_factor(self) -> float:
        """Of equal stages: the seconds of a step over those that it would take without the pipeline's bubble."""
        assert self.num_stages is not None
        return 1 + (self.num_stages - 1) / (self.num_microbatches * self.rounds)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A candidate that a neighbour would have planned next."""

    candidate: Candidate
    # Per step that the neighbour expects: an estimate of the stage search, or what is to be beaten; 0 where it has no
    # reason to let others go first, None where the stage search found nothing.
    seconds: float | None = 0.0


class Outcome(NamedTuple):
    """What became of a proposal."""

    finished: Finished | None  # None: nothing fits, or it is known to take longer than the best plan
    is_better: bool = False  # than all before

    @property
    def better(self) -> Finished | None:
        """The plan, if it is better than all before."""
        return self.finished if self.is_better else None


Proposals = Generator[Proposal, Outcome, None]  # each is answered by what became of it


@dataclasses.dataclass
class Incumbent:
    """The best plan so far, as what another must beat."""

    step_time: float = math.inf  # seconds
    estimate: float = math.inf  # as the stage search estimated it
    first_estimate: float = math.inf  # and with few shapes of meshes, if it began with those
    num_stages: int = 0
    of_equal_groups: Plan | None = None  # the latest of several stages on as many devices each, that was the best


def shapes_on(groups: Groups) -> ShapesFn:
    """Each group as the mesh of its shape, and no others."""
    return lambda _, start, size: (groups[start, size],) if (start, size) in groups else ()


def groups_of(plan: Plan) -> Groups:
    """The groups of devices that a plan's stages have."""
    return {(stage.mesh.devices[0], stage.mesh.size): stage.mesh.shape for stage in plan.stages}


def has_equal_groups(plan: Plan) -> bool:
    """Whether all stages have as many devices."""
    return len({size for _, size in groups_of(plan)}) == 1
