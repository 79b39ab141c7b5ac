"""Arrays that lie in another order than they are wanted in, and the copies that XLA makes of them.

XLA cuts and joins the outermost dimension in memory. What a collective cuts or joins along another one lies with that
one outermost: before it, and afterwards. Elementwise kernels read and write any order; the caller, loops and libraries'
kernels want rows. A product takes an operand, and gives a result, in which the dimension is the only one of its group
(contracted, of both operands, of one of them); else a copy is made. Kernels with a single output are slower where they
read against an order, and their products always take a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from autopar.cost_model.compute import strided_read_seconds
from autopar.cost_model.reshard import LOCAL_KINDS, step_axes
from autopar.ir.graph import Equation, Value
from autopar.ir.local import Accumulate, Compute, LocalOp, LocalProgram, Reshard, local_bytes
from autopar.ir.mesh import DeviceKind, Mesh
from autopar.ir.sharding import Sharding

Held = tuple[Value, Sharding]

_OTHER = -1  # an order that is not known


def sent_along_inner(
    shape: Sequence[int], before: Sequence[Sharding], after: Sequence[Sharding], mesh: Mesh
) -> np.ndarray[Any, Any]:
    """[before, after] Whether a collective cuts or joins, from one sharding to another, a dimension within others.

    Pieces are joined along a dimension that is cut less afterwards; they are cut along one that is cut more, where
    there are partial sums to be added, or where another dimension is joined.
    """
    cuts = np.array([s.tiles(mesh) for s in before])[:, None, :]
    wanted = np.array([s.tiles(mesh) for s in after])[None, :, :]
    is_inner = np.zeros(wanted.shape, bool)
    is_inner[:, :, 1:] = np.cumprod(np.asarray(shape) // wanted, axis=-1)[:, :, :-1] > 1
    joined = wanted < cuts
    summed = np.array([[bool({*s.partial} - {*t.partial}) for t in after] for s in before])
    split = (wanted > cuts) & (summed | joined.any(axis=-1))[:, :, None]
    return np.asarray((is_inner & (joined | split)).any(axis=-1))


def copying_seconds(
    kind: DeviceKind, mesh: Mesh, shape: Sequence[int], nbytes: np.ndarray[Any, Any], before: Sequence[Sharding],
    after: Sequence[Sharding],
) -> np.ndarray[Any, Any]:  # fmt: skip
    """[before, after] Seconds in which XLA copies what lies in rows for the collectives from one sharding to another.

    nbytes: [before] bytes that one device holds.
    """
    each = strided_read_seconds(kind, nbytes, strided=float(kind.xla.single_output), copied=1.0)
    return np.where(sent_along_inner(shape, before, after, mesh), each[:, None], 0.0)


class Strided(NamedTuple):
    """What an operation takes for what lies in another order than it is wanted in."""

    seconds: float
    copies: tuple[Held, ...] = ()  # what is copied for it


class StridedReads:
    """What collectives leave in another order, as a program goes on, and what it and transposes take."""

    def __init__(self, local: LocalProgram, kind: DeviceKind) -> None:
        self._mesh, self._kind = local.mesh, kind
        self._leaving = {(port.value, port.sharding) for port in local.outputs}
        self._rows = {(port.value, port.sharding) for port in local.inputs}  # in the order of rows
        self._made: dict[Held, tuple[Compute, int]] = {}  # by products
        self._outermost: dict[Held, int] = {}  # the dimension, of what lies in another order than that of rows

    def of(self, op: LocalOp) -> Strided:
        """Of one operation, in the order of the program."""
        if isinstance(op, Reshard):
            return self._resharding(op)
        if isinstance(op, Compute):
            operands = zip(op.equation.inputs, op.operands, strict=True)
            taken = _all_of([self._reading(op, position, *held) for position, held in enumerate(operands)])
            for k, held in enumerate(zip(op.equation.outputs, op.results, strict=True)):
                if op.product is not None and not op.kernels:
                    self._made[held] = op, k
                elif op.kernels:
                    self._rows.add(held)
            return taken
        if isinstance(op, Accumulate):
            held = op.partial_sum, op.sharding
            return self._of(held, strided=held in self._outermost, copied=0)
        if (op.value, op.sharding) in self._outermost:
            self._outermost[op.copy, op.sharding] = self._outermost[op.value, op.sharding]
        return Strided(0.0)

    def _resharding(self, op: Reshard) -> Strided:
        before, after = (op.value, op.source), (op.value, op.target)
        inner = _inner_dim(op, self._mesh)
        if inner is not None:
            self._outermost[after] = inner
            leaves, copied = after in self._leaving, self._is_copied(before, inner)
            return _all_of([self._of(before, strided=1, copied=copied), self._of(after, strided=leaves, copied=leaves)])
        if before in self._outermost and all(step.kind in LOCAL_KINDS for step in op.steps):
            self._outermost[after] = self._outermost[before]
        return Strided(0.0)

    def _is_copied(self, held: Held, dim: int) -> bool:
        """Whether a copy is made of what a collective takes with this dimension outermost."""
        if self._kind.xla.single_output or held in self._rows:
            return True
        if held in self._outermost:
            return self._outermost[held] != dim
        if held not in self._made:
            return False
        op, result = self._made[held]
        return not _is_alone(_result_groups(op.equation), dim, _local_shape(held, self._mesh)) or result > 0

    def _reading(self, op: Compute, position: int, value: Any, sharding: Sharding | None) -> Strided:
        if sharding is None:
            return Strided(0.0)
        held, traffic = (value, sharding), op.traffic
        strided, copied = traffic.strided[position], traffic.copied[position]
        if held in self._outermost:
            dim = self._outermost[held]
            if op.fence:
                self._outermost[op.equation.outputs[position], op.results[position]] = dim
            elif op.product is not None or (op.kernels and not self._kind.xla.single_output):
                groups = _operand_groups(op.equation, position)
                if self._kind.xla.single_output or not _is_alone(groups, dim, _local_shape(held, self._mesh)):
                    strided, copied = max(strided, 1), max(copied, 1)
                    del self._outermost[held]  # others read the copy, too
            elif not (traffic.launches or any(traffic.reads)):  # a view
                self._outermost[op.equation.outputs[0], op.results[0]] = _seen_through(op.equation, dim)
            else:
                strided = max(strided, traffic.reads[position])
        return self._of(held, strided=strided, copied=copied)

    def _of(self, held: Held, *, strided: int, copied: int) -> Strided:
        strided = strided if self._kind.xla.single_output else 0
        if not (strided or copied):
            return Strided(0.0)
        nbytes = local_bytes(*held, self._mesh)
        seconds = strided_read_seconds(self._kind, nbytes, strided=strided, copied=copied)
        return Strided(float(seconds), (held,) * copied)


def _all_of(each: Sequence[Strided]) -> Strided:
    return Strided(sum(one.seconds for one in each), tuple(held for one in each for held in one.copies))


def _seen_through(view: Equation, dim: int) -> int:
    """Which dimension a view has outermost, of an array that has this one."""
    if view.primitive.name == "transpose":
        return int(view.params["permutation"].index(dim)) if dim != _OTHER else _OTHER
    same = view.outputs[0].shape == view.inputs[0].shape
    return dim if same else _OTHER


def _inner_dim(op: Reshard, mesh: Mesh) -> int | None:
    """The dimension along which pieces are cut or joined; None where it is the outermost in memory."""
    step = op.steps[-1]
    if step.kind not in ("all_gather", "reduce_scatter", "all_to_all") or not step_axes(step, mesh):
        return None
    dim = max(step.dim, step.to_dim)
    outside = op.target.local_shape(op.value.shape, mesh)[:dim]
    return dim if math.prod(outside) > 1 else None


def _local_shape(held: Held, mesh: Mesh) -> tuple[int, ...]:
    value, sharding = held
    return sharding.local_shape(value.shape, mesh)


def _is_alone(groups: Sequence[Sequence[int]], dim: int, shape: Sequence[int]) -> bool:
    """Whether a dimension is the only one of its group that has more than one place."""
    return any(dim in group and all(shape[d] == 1 for d in group if d != dim) for group in groups)


def _operand_groups(eqn: Equation, position: int) -> list[Sequence[int]]:
    """Dimensions of an operand of a product that are one to it; [] if it is no product of two arrays."""
    if eqn.primitive.name != "dot_general":
        return []
    contracting, batch = (sides[position] for sides in eqn.params["dimension_numbers"])
    rank = len(eqn.inputs[position].shape)
    return [contracting, batch, [d for d in range(rank) if d not in contracting and d not in batch]]


def _result_groups(eqn: Equation) -> list[Sequence[int]]:
    """Dimensions of a result that are one to the product that makes it."""
    if eqn.primitive.name != "dot_general":
        return []
    batch, left = (len(_operand_groups(eqn, 0)[k]) for k in (1, 2))
    rank = len(eqn.outputs[0].shape)
    return [range(batch), range(batch, batch + left), range(batch + left, rank)]
