"""Shardings that users pin: `hint` inside a step, or by the paths of arguments."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding

FREE = PartitionSpec.UNCONSTRAINED  # the planner chooses how a dimension is cut
ALL = -1  # pieces: as many as the stage has devices

Entry = Any  # None, a number of pieces, the name of a mesh axis, a tuple of such names, or FREE


@dataclasses.dataclass(frozen=True)
class Hint:
    """How an array has to be cut: an entry per dimension, dimensions beyond the entries are whole.

    None: whole. A number: into so many pieces, over whatever axes; -1: over all devices of the stage. A name or a tuple
    of names: over just these axes of the mesh; an axis that a mesh does not have is one of a single device. `FREE`: as
    the planner finds best.
    """

    entries: tuple[Entry, ...]

    @staticmethod
    def of(spec: Any, where: str) -> Hint:
        """The hint that a user's spec means; raises PlanError, whose message names `where` it was given."""
        if isinstance(spec, str) or not isinstance(spec, tuple | list | PartitionSpec):
            raise PlanError(f"{where}: the spec is {spec!r}; {_EXPECTED}")
        entries = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in spec)
        for dim, entry in enumerate(entries):
            if not _is_entry(entry):
                raise PlanError(f"{where}: dimension {dim} of the spec is {entry!r}; {_EXPECTED}")
        names = [name for entry in entries for name in _names(entry)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(f"{where}: the spec {spec!r} uses axis {twice[0]!r} twice; an axis cuts one dimension.")
        return Hint(entries)

    def check(self, shape: Sequence[int], where: str) -> None:
        """Raise PlanError if no array of this shape can be cut so."""
        if len(self.entries) > len(shape):
            raise PlanError(
                f"{where}: the spec {self} has {len(self.entries)} entries for an array of shape {tuple(shape)}; give "
                "one for each dimension, or fewer: those left out are whole."
            )
        for dim, (entry, size) in enumerate(zip(self.entries, shape, strict=False)):
            if isinstance(entry, int) and entry > 0 and size % entry:
                raise PlanError(
                    f"{where}: dimension {dim} of an array of shape {tuple(shape)} cannot be cut into {entry} equal "
                    "pieces; choose a divisor."
                )

    def allows(self, dims: Sequence[Collection[str]], mesh: Mesh) -> bool:
        """Whether an array may be cut over these axes of the mesh, given per dimension."""
        for dim, axes in enumerate(dims):
            entry = self.entries[dim] if dim < len(self.entries) else None
            cut = {axis for axis in axes if mesh.axis_size(axis) > 1}
            if entry is FREE:
                continue
            if isinstance(entry, int):
                if math.prod(map(mesh.axis_size, cut)) != (mesh.size if entry == ALL else entry):
                    return False
            elif cut != {a for a in _names(entry) if a in mesh.axes and mesh.axis_size(a) > 1}:
                return False
        return True

    def shardings(self, shape: tuple[int, ...], mesh: Mesh) -> list[Sharding]:
        """All that it allows an array of this shape."""
        shardings: dict[Sharding, None] = {}
        axes = [axis for axis in mesh.axes if mesh.axis_size(axis) > 1]
        for where in itertools.product(range(-1, len(shape)), repeat=len(axes)):
            dims = tuple(tuple(a for a, d in zip(axes, where, strict=True) if d == dim) for dim in range(len(shape)))
            sharding = Sharding(dims)
            if self.allows(dims, mesh) and sharding.divides(shape, mesh):
                shardings[sharding] = None
        return list(shardings)

    def __str__(self) -> str:
        return f"({', '.join('FREE' if entry is FREE else repr(entry) for entry in self.entries)})"


_EXPECTED = (
    "give a tuple or PartitionSpec with an entry for each dimension: None (whole), a number of pieces, -1 (over all "
    "devices), the name of a mesh axis ('x', 'y') or a tuple of names, or PartitionSpec.UNCONSTRAINED (free)."
)


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, bool):
        return False
    if isinstance(entry, int):
        return entry >= 1 or entry == ALL
    if isinstance(entry, tuple):
        return all(isinstance(name, str) for name in entry)
    return entry is None or entry is FREE or isinstance(entry, str)


def _names(entry: Entry) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def hint(x: Any, spec: Any) -> Any:
    """`x`, cut over the devices of its stage as `spec` says, wherever a parallelized step computes it.

    Args:
      x: an array, or a pytree of arrays that all are cut alike.
      spec: a tuple or `jax.sharding.PartitionSpec` with an entry per dimension; those left out are whole. None: whole.
        A number: into so many equal pieces; -1: over all devices of the stage. 'x', 'y' or a tuple of them: over these
        axes of the stage's mesh, whose shape a method may fix. `PartitionSpec.UNCONSTRAINED`: as the planner likes.

    Outside of a parallelized step it does nothing. How its cotangent is cut, the planner chooses.

    Raises:
      PlanError: the spec is malformed, or does not fit the array's shape.
    """
    wanted = Hint.of(spec, "hint")

    def one(leaf: Any) -> Any:
        wanted.check(jax.numpy.shape(leaf), "hint")
        return hint_p.bind(leaf, hint=wanted)

    return jax.tree.map(one, x)


hint_p = core.Primitive("autopar_hint")
hint_p.def_impl(lambda x, **_: x)
hint_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(hint_p, lambda ctx, x, **_: [x])


def _jvp(primals: Any, tangents: Any, *, hint: Hint) -> Any:
    return hint_p.bind(*primals, hint=hint), tangents[0]


def _batch(operands: Any, dims: Any, *, hint: Hint) -> Any:
    (x,), (dim,) = operands, dims
    entries = list(hint.entries) + [None] * (x.ndim - 1 - len(hint.entries))
    entries.insert(dim, FREE)
    return hint_p.bind(x, hint=Hint(tuple(entries))), dim


ad.primitive_jvps[hint_p] = _jvp
batching.primitive_batchers[hint_p] = _batch
