"""Programs in local sizes: what each device computes and every collective in between, before JAX sees it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from autopar.ir.graph import Equation, Value
from autopar.ir.mesh import Mesh, Pooling, ProductSizes
from autopar.ir.program import Program
from autopar.ir.sharding import Collective, ReshardStep, Sharding
from autopar.ir.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Port:
    """A value at the border of a program, with the sharding it has there."""

    value: Value
    sharding: Sharding


def local_bytes(value: Value, sharding: Sharding, mesh: Mesh) -> int:
    """Bytes of one device's piece."""
    return (value.sum_nbytes if sharding.partial else value.nbytes) // math.prod(sharding.tiles(mesh))


def port_bytes(port: Port, mesh: Mesh) -> int:
    """Bytes of one device's piece of what crosses a program's border."""
    return local_bytes(port.value, port.sharding, mesh)


@dataclasses.dataclass(frozen=True)
class LocalKernel:
    """One equation of a body on local pieces, in all rounds."""

    flops: float
    nbytes: float  # read from memory and written to it
    product: ProductSizes | None  # of one round
    dtype: str
    times: float  # that it is launched
    pooling: Pooling | None = None
    rounds: float = 1.0
    plain_attention: bool = False  # see `BodyKernel`
    widens: bool = False  # a product whose result has more bytes an element than its operands


OperatorKind = Literal["products", "convolutions", "attention", "memory", "collectives"]


@dataclasses.dataclass(frozen=True)
class LocalStep:
    """Kernels that a round of a loop runs as one, or what it sends, on local pieces."""

    before: tuple[int, ...]  # the steps, by number, whose results it reads
    nbytes: int  # of what it makes
    kernels: tuple[int, ...]  # of the loop's, by number
    collectives: tuple[Collective, ...]  # one after the other
    dtype: str  # of what is sent
    # XLA sends what leaves a round beside the next one (`CollectivePipeliner`).
    pipelined: bool


@dataclasses.dataclass(frozen=True)
class LocalRound:
    """What a loop runs and sends in one of its rounds."""

    steps: tuple[LocalStep, ...]
    times: int

    @property
    def handed_on(self) -> tuple[int, ...]:
        """Bytes of each array that is held until the next round, beside which it is sent."""
        return tuple(step.nbytes for step in self.steps if step.pipelined and step.collectives)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """An equation's part in the memory traffic of the kernels that compute it and others."""

    reads: tuple[int, ...]  # by operand: kernels that read it from memory and have it first here
    writes: tuple[bool, ...]  # by result: whether it goes to a place of its own in memory
    launches: int  # kernels that begin here
    # The equation with which the kernel begins that computes this one, if it has results in memory. It makes no
    # difference to what an equation costs, and so none to whether traffic is equal.
    kernel: int = dataclasses.field(compare=False)
    elementwise: bool  # each element of a result needs but one of each operand
    in_place: tuple[bool, ...]  # by operand: whether a result of its size may take its place if nothing reads it later
    # Results that lie where an operand did, in which little is written, and those that rounds fill (None).
    aliases: tuple[tuple[int, int | None], ...]
    # By operand, where kernels have a single output: how often it is read against its order in memory, and how often it
    # is copied into another order before.
    strided: tuple[int, ...]
    copied: tuple[int, ...]

    def is_own(self, result: int) -> bool:
        """Whether a result goes to memory where no operand was."""
        return self.writes[result] and all(result != k for k, _ in self.aliases)

    def read_bytes(self, position: int, operand: Value, nbytes: Any, made: Any) -> Any:
        """Bytes read of an operand, or a piece of it, that has so many, to make so many elements."""
        if any(position == i for _, i in self.aliases):
            return 0
        return self.reads[position] * (np.minimum(nbytes, operand.itemsize * made) if self.elementwise else nbytes)


@dataclasses.dataclass(frozen=True)
class Compute:
    """One equation on local pieces."""

    equation: Equation
    strategy: Strategy
    operands: tuple[Sharding | None, ...]  # None for a literal
    results: tuple[Sharding, ...]
    flops: float  # on one device
    product: ProductSizes | None
    traffic: Traffic
    fence: bool  # hands on the buffers that it takes
    kernels: tuple[LocalKernel, ...]  # of an equation with a body, instead of itself
    temporaries: int  # bytes that a body holds at once, beyond operands and results
    combined: tuple[Collective, ...]  # that belong to the equation: of results, of sums inside it, halos
    pooling: Pooling | None = None
    round: LocalRound | None = None  # of a loop that sends something


@dataclasses.dataclass(frozen=True)
class Reshard:
    """A value that exists in one sharding is made in another, too."""

    value: Value
    source: Sharding
    target: Sharding
    steps: tuple[ReshardStep, ...]


@dataclasses.dataclass(frozen=True)
class Reread:
    """A value's piece under another name, so that what is made of it is made anew."""

    value: Value
    sharding: Sharding
    copy: Value
    after: tuple[Value, Sharding] | None  # it is not there before this is


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Add this microbatch's partial sum to the running sum (both in `sharding`)."""

    partial_sum: Value
    total: Value
    sharding: Sharding


LocalOp = Compute | Reshard | Reread | Accumulate


@dataclasses.dataclass(frozen=True, eq=False)
class LocalProgram:
    """One program on its mesh."""

    program: Program
    mesh: Mesh
    ops: tuple[LocalOp, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]  # the running sums are inputs and outputs


@dataclasses.dataclass(frozen=True, eq=False)
class StageSharding:
    """What the intra-op pass decides for one stage."""

    mesh: Mesh
    strategies: Mapping[tuple[int, int], Strategy]  # (program index, equation id) -> strategy
    # Where a value is kept after it was made or has arrived; else as its equation leaves it. Values that several
    # programs compute for themselves (`Program.copies`) are keyed by the program, all others by None.
    layouts: Mapping[tuple[int | None, Value], Sharding]
    objective: float  # seconds per step, the solver's
    lower_bound: float  # seconds per step: no choice of strategies can be cheaper
    # Whether what does not depend on examples is gathered when it is read, and in the backward pass again: a program
    # that has both passes need not keep it. Else it is gathered as soon, and kept as long, as XLA likes.
    reshard_after_forward: bool = False

    def layout(self, program: Program, value: Value) -> Sharding | None:
        """Where a program takes or leaves a value; None: as its equation leaves it."""
        return self.layouts.get((program.index if value in program.copies else None, value))
