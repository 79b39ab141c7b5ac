"""How one value lies on a mesh, and the steps that move it from one sharding to another."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

from autopar.ir.mesh import Mesh

StepKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "slice", "mask"]


def sum_itemsize(itemsize: int, least_bytes: int = 4) -> int:
    """Bytes of an element while partial sums are added up: see `autopar.ir.graph.accumulator_dtype`."""
    return itemsize if itemsize >= least_bytes else 4


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Mesh axes per array dimension (major axis first), and the axes over which the value is a partial sum.

    `Sharding((("x",), ()), ("y",))`: dimension 0 is cut over axis x; each device along y holds one partial sum.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()  # sorted

    @staticmethod
    def replicated(rank: int) -> Sharding:
        return Sharding(((),) * rank)

    @property
    def axes(self) -> frozenset[str]:
        """Axes that shard a dimension."""
        return frozenset(axis for dim in self.dims for axis in dim)

    def tiles(self, mesh: Mesh) -> tuple[int, ...]:
        """In how many pieces each dimension is cut."""
        return _tiles(self.dims, mesh.axes, mesh.shape)

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """Shape of one device's piece. Every dimension must be divisible."""
        return tuple(size // n for size, n in zip(shape, self.tiles(mesh), strict=True))

    def divides(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        return all(size % n == 0 for size, n in zip(shape, self.tiles(mesh), strict=True))

    def __str__(self) -> str:
        dims = ",".join("·".join(dim) or "-" for dim in self.dims)
        return f"[{dims}]" + (f"+{'·'.join(self.partial)}" if self.partial else "")


@functools.lru_cache(maxsize=1 << 16)
def _tiles(dims: tuple[tuple[str, ...], ...], axes: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = dict(zip(axes, shape, strict=True))
    return tuple(math.prod(sizes[axis] for axis in dim) for dim in dims)


@dataclasses.dataclass(frozen=True)
class ReshardStep:
    """One step of a resharding, on the local pieces.

    kind            axes                  dim              to_dim
    all_reduce      summed over                            partial sums become full sums
    reduce_scatter  summed and cut over   cut
    all_gather      gathered over         concatenated
    all_to_all      one axis              gathered         cut
    permute         all axes of one dim   reordered        `order` = the new order of its axes
    slice           cut over (local)      cut
    mask            made partial (local)                   all partial sums but the first become zero
    """

    kind: StepKind
    axes: tuple[str, ...]
    dim: int = -1
    to_dim: int = -1
    order: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as priced, lowered or found in compiled HLO: what the three are compared by."""

    kind: StepKind
    axes: tuple[str, ...]
    payload: int  # bytes: the local result, but the local operand for a reduce-scatter


class TileCopy(NamedTuple):
    """A part of a device's tile on the way to another device; parts are numbered row-major within their tile."""

    source: int  # position in the source mesh
    target: int  # position in the target mesh
    cut: int  # the part of the source's tile
    place: int  # the part of the target's tile


@dataclasses.dataclass(frozen=True)
class TileCopies:
    """How a value crosses to another mesh tile by tile."""

    cuts: tuple[int, ...]  # per dimension: the parts of a tile of the source
    joins: tuple[int, ...]  # per dimension: the parts of a tile of the target
    copies: tuple[TileCopy, ...]  # by target, then by place
