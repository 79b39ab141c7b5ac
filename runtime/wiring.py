"""What the worker needs to know besides programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.ir.graph import BatchDim, Value
from autopar.ir.instructions import InstructionList, Register
from autopar.runtime.feeding import Feeds
from autopar.runtime.placement import Array, guards_transfers, sliceable
from autopar.runtime.transfer import TileTransfer


@dataclasses.dataclass(frozen=True, eq=False)
class Wiring:
    """What the worker needs to know besides programs: how arguments become registers and registers results."""

    function: str  # the step's name
    instructions: InstructionList
    num_microbatches: int
    inputs: tuple[Value, ...]  # the graph's, in the order of the arguments' leaves
    input_paths: tuple[str, ...]
    homes: Mapping[Value, Array]  # inputs stored on a mesh
    feeds: Feeds
    constants: Mapping[Register, tuple[Any, Array]]
    microbatch: Mapping[Register, tuple[int, Array]]
    sums: Mapping[Register, Array]
    transfers: tuple[TileTransfer, ...]  # by crossing
    results: tuple[Callable[[Sequence[Any]], Any] | None, ...]  # from the arguments; None: from the registers
    kept: Mapping[int, Value]  # results that are inputs stored on a mesh, and come out from there
    donated: frozenset[int]  # argument leaves that are given away
    renewed: Mapping[int, int]  # argument leaf -> the result that takes its place in the next step
    made: Mapping[Register, Array]  # results that are made by programs
    known: frozenset[Register]  # of these: brought to all processes
    carried: frozenset[Register]  # of these: state
    processes: tuple[frozenset[int], ...]  # by stage: those that have devices of it

    def stages_of(self, process: int) -> frozenset[int]:
        """Those that a process has devices of."""
        return frozenset(stage for stage, there in enumerate(self.processes) if process in there)


def slice_of(leaf: Any, batch: BatchDim, index: int, count: int) -> Any:
    """One microbatch's slice of a batch argument (on the host, if that is where it is)."""
    if count == 1:
        return leaf
    size = batch.size // count
    window = (slice(None),) * batch.dim + (slice(index * size, (index + 1) * size),)
    if not guards_transfers():
        return sliceable(leaf)[window]
    with jax.transfer_guard_host_to_device("allow"):  # of the window's bounds: what a caller forbids are arrays
        return sliceable(leaf)[window]
