"""What a plan holds: everything that was decided about a step, with what it is predicted to cost."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from autopar.ir.graph import Block, LeafCut
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.schedule import ScheduleName
from autopar.ir.sharding import Sharding
from autopar.ir.strategy import StrategyNumbers


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Predicted bytes on one device of a stage at its peak, by kind."""

    state: int  # parameters, optimizer state and other leaves that lie here
    gradients: int  # running sums over microbatches
    activations: int  # held between programs, for all microbatches in flight
    temporaries: int  # inside the hungriest program
    capacity: int  # bytes that one device offers to arrays of this stage

    @property
    def kept(self) -> int:
        """Also while another stage of the device runs."""
        return self.state + self.gradients + self.activations

    @property
    def total(self) -> int:
        return self.kept + self.temporaries


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One pipeline stage."""

    mesh: Mesh
    layers: tuple[int, int]  # [start, stop) of the layers that the forward pass was clustered into
    equations: tuple[int, int]  # [start, stop) among the forward equations, in program order
    strategies: Mapping[tuple[int, int], StrategyNumbers]  # (program, equation id) -> strategy
    layouts: Mapping[tuple[int | None, int], Sharding]  # (program or None, value id) -> sharding
    reshard_after_forward: bool  # see `StageSharding`
    # Of each phase, whatever program does it; all microbatches' and what is done once are the stage's time.
    forward: float  # predicted seconds per microbatch
    backward: float  # predicted seconds per microbatch
    once: float  # predicted seconds per step: prologue, gradient synchronisation and update
    compute: float  # predicted seconds per step of these that compute
    communication: float  # predicted seconds per step of these in collectives
    memory: StageMemory
    recomputed: tuple[Block, ...] = ()  # of its equations, what the backward pass computes again
    weights: float = 0.0  # predicted seconds per microbatch: parameters' gradients, if apart from `backward`

    @property
    def per_microbatch(self) -> float:
        """Predicted seconds of all that is done for a microbatch."""
        return self.forward + self.backward + self.weights


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Where one argument leaf lies between steps, or one piece of a leaf that is cut between stages."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    stage: int
    sharding: Sharding
    state: bool  # carried from step to step
    batch_axis: int | None
    window: tuple[int, int, int] | None = None  # of a piece: axis, start, stop


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """The fields of a `Plan`, for those that print and store it."""

    function: str  # name of the step
    fingerprint: str  # of the traced graph
    method: str  # how it was found
    cluster: Cluster
    num_microbatches: int
    batch_size: int
    schedule: ScheduleName
    stages: tuple[StagePlan, ...]
    leaves: tuple[LeafPlan, ...]  # one per argument leaf, or per piece of one, in order
    step_time: float  # predicted seconds per step
    bubble: float  # predicted share of the stages' time that is idle
    flops: float  # of one step, whole cluster, as computed (rematerialisation and replication included)
    lower_bound: float  # seconds; of the sum of the stages' solver objectives
    gap: float  # (objective - lower bound) / objective of the stages' solvers
    notes: tuple[str, ...]  # what was left whole, and why
    padding: tuple[tuple[int, int], ...] = ()  # sizes of dimensions of products, and what they are within the step

    def fields(self) -> dict[str, Any]:
        """What it holds, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(PlanRecord)}

    @property
    def leaf_cuts(self) -> dict[int, LeafCut]:
        """How argument leaves are cut between stages, by their number."""
        cuts: dict[int, LeafCut] = {}
        for i, pieces in enumerate(self.pieces):
            windows = [piece.window for piece in pieces if piece.window is not None]
            if windows:
                cuts[i] = LeafCut(windows[0][0], (0, *(stop for _, _, stop in windows)))
        return cuts

    @property
    def pieces(self) -> tuple[tuple[LeafPlan, ...], ...]:
        """`leaves`, those of one argument leaf together."""
        pieces: list[list[LeafPlan]] = []
        for leaf in self.leaves:
            if leaf.window is not None and leaf.window[1] > 0:
                pieces[-1].append(leaf)
            else:
                pieces.append([leaf])
        return tuple(map(tuple, pieces))

    @property
    def num_devices(self) -> int:
        return sum(map(len, {stage.mesh.devices for stage in self.stages}))

    @property
    def peak_memory(self) -> int:
        """Predicted bytes on the device that needs most."""
        kept: dict[tuple[int, ...], int] = defaultdict(int)
        temporaries: dict[tuple[int, ...], int] = defaultdict(int)
        for stage in self.stages:
            devices, memory = stage.mesh.devices, stage.memory
            kept[devices] += memory.kept
            temporaries[devices] = max(temporaries[devices], memory.temporaries)
        return max(kept[devices] + temporaries[devices] for devices in kept)
