"""What a program in local sizes costs: seconds, collectives and bytes, from the very operations that will run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any

from autopar.cost_model.compute import accumulate_seconds, compute_time, product_share
from autopar.cost_model.reshard import SUM_KINDS, StepPrice, step_axes, step_payload, step_result
from autopar.ir.graph import Value
from autopar.ir.liveness import Step, last_reads
from autopar.ir.local import Accumulate, Compute, LocalKernel, LocalOp, LocalProgram, Port, Reread, Reshard
from autopar.ir.mesh import DeviceKind, Mesh
from autopar.ir.sharding import Collective, Sharding


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """One run of one program on one device."""

    compute: float  # seconds
    communication: float  # seconds
    flops: float  # on one device
    collectives: tuple[Collective, ...]
    temporaries: int  # bytes live at once beyond the inputs and outputs

    @property
    def seconds(self) -> float:
        return self.compute + self.communication


@dataclasses.dataclass(frozen=True)
class OpCost:
    """One operation of a program, once, on one device."""

    compute: float  # seconds
    communication: float  # seconds
    flops: float
    collectives: tuple[Collective, ...]

    @property
    def seconds(self) -> float:
        return self.compute + self.communication


def local_bytes(value: Value, sharding: Sharding, mesh: Mesh) -> int:
    """Bytes of one device's piece."""
    return (value.sum_nbytes if sharding.partial else value.nbytes) // math.prod(sharding.tiles(mesh))


def port_bytes(port: Port, mesh: Mesh) -> int:
    """Bytes of one device's piece of what crosses a program's border."""
    return local_bytes(port.value, port.sharding, mesh)


def program_cost(local: LocalProgram, kind: DeviceKind, price: StepPrice) -> ProgramCost:
    """Price every operation: compute by the roofline with fused elementwise chains, collectives one by one."""
    costs = op_costs(local, kind, price)
    return ProgramCost(
        sum(c.compute for c in costs), sum(c.communication for c in costs), sum(c.flops for c in costs),
        tuple(each for c in costs for each in c.collectives), temporaries(local, kind.combined_sums),
    )  # fmt: skip


def op_costs(local: LocalProgram, kind: DeviceKind, price: StepPrice) -> tuple[OpCost, ...]:
    """The price of each operation of a program, in order."""
    sent = _sent(local)
    return tuple(_op_cost(op, local.mesh, kind, price, sent) for op in local.ops)


def _op_cost(op: LocalOp, mesh: Mesh, kind: DeviceKind, price: StepPrice, sent: Collection[_Held]) -> OpCost:
    compute = communication = flops = 0.0
    collectives: list[Collective] = []
    if isinstance(op, Compute):
        moved = _moved_bytes(op, mesh, sent)
        dtype = "" if op.kernels else op.equation.kernel_dtype(op.product is not None)
        kernels = op.kernels or (LocalKernel(op.flops, moved, op.product, dtype, op.traffic.launches),)
        for k in kernels:
            compute += compute_time(
                kind, flops=k.flops, bytes_moved=k.nbytes, dtype=k.dtype,
                matmul=k.product is not None, share=product_share(kind, k.product),
            ) + kind.launch_overhead * k.times  # fmt: skip
        flops = op.flops
        collectives += op.combined
        communication = sum(price(c.kind, c.axes, c.payload) for c in op.combined)
    elif isinstance(op, Accumulate):
        compute = accumulate_seconds(kind, local_bytes(op.total, op.sharding, mesh))
    elif isinstance(op, Reshard):
        at = op.source
        for step in op.steps:
            axes = step_axes(step, mesh)
            if axes:
                payload = step_payload(step, op.value.shape, op.value.itemsize, at, mesh, op.value.narrow)
                communication += price(step.kind, axes, payload)
                if payload and step.kind not in ("slice", "mask"):
                    collectives.append(Collective(step.kind, axes, payload))
            at = step_result(step, at)
    return OpCost(compute, communication, flops, tuple(collectives))


_Held = tuple[Value, Sharding]


def _sent(local: LocalProgram) -> set[_Held]:
    """What collectives take, from memory."""
    names = {op.copy: op.value for op in local.ops if isinstance(op, Reread)}
    return {
        (names.get(op.value, op.value), op.source)
        for op in local.ops
        if isinstance(op, Reshard) and any(step.kind not in ("slice", "mask") for step in op.steps)
    }


def _moved_bytes(op: Compute, mesh: Mesh, sent: Collection[_Held]) -> float:
    """Bytes that go through one device's memory."""
    results = [*zip(op.equation.outputs, op.results, strict=True)]
    made = max((math.prod(v.shape) / math.prod(s.tiles(mesh)) for v, s in results), default=0.0)
    moved = 0.0
    for position, (v, sharding) in enumerate(zip(op.equation.inputs, op.operands, strict=True)):
        if isinstance(v, Value) and sharding is not None:
            moved += op.traffic.read_bytes(position, v, local_bytes(v, sharding, mesh), made)
    written = (local_bytes(*k, mesh) for k, w in zip(results, op.traffic.writes, strict=True) if w or k in sent)
    return moved + sum(written)


def _step(op: LocalOp) -> Step[_Held]:
    if isinstance(op, Reshard):
        return Step([(op.value, op.source)], [(op.value, op.target)], here=True)
    if isinstance(op, Accumulate):
        return Step([(op.addend, op.sharding)], [], here=True)
    if isinstance(op, Reread):
        return Step([(op.value, op.sharding), op.after], [(op.copy, op.sharding)], here=False)
    operands = zip(op.equation.inputs, op.operands, strict=True)
    reads = [(v, s) if isinstance(v, Value) and s is not None else None for v, s in operands]
    makes = [*zip(op.equation.outputs, op.results, strict=True)]
    return Step(reads, makes, any(op.traffic.writes), op.fence)


def _combined(local: LocalProgram, most: int) -> dict[int, int]:
    """The position at which each sum over devices runs that becomes one with later ones, of up to so many bytes.

    Those of one kind and type over the same axes do, unless one needs the result of another.
    """
    groups: list[list[int]] = []  # positions of sums that are one
    before: list[set[int]] = []  # the groups that each needs
    needs: dict[_Held, frozenset[int]] = {}  # the groups that a value needs
    joined: dict[Any, tuple[int, int]] = {}  # the group of a kind that takes more, and its bytes

    def closed(some: Iterable[int]) -> set[int]:
        found, todo = set(some), list(some)
        while todo:
            new = before[todo.pop()] - found
            found |= new
            todo += new
        return found

    for position, op in enumerate(local.ops):
        step = _step(op)
        needed = frozenset[int]().union(*(needs[read] for read in step.reads if read in needs))
        if isinstance(op, Reshard) and any(each.kind in SUM_KINDS for each in op.steps):
            key = (op.steps[0].kind, step_axes(op.steps[0], local.mesh), op.value.dtype)
            nbytes = local_bytes(op.value, op.source, local.mesh)
            group, size = joined.get(key, (-1, most))
            if size + nbytes > most or group in closed(needed):
                group, size = len(groups), 0
                groups.append([])
                before.append(set())
            groups[group].append(position)
            before[group] |= needed
            joined[key] = group, size + nbytes
            needed = frozenset({group})
        if needed:
            needs.update(dict.fromkeys(step.makes, needed))
    return {position: group[-1] for group in groups for position in group}


def temporaries(local: LocalProgram, combined_sums: int = 0) -> int:
    """Most bytes of values live at once that are neither inputs nor outputs."""
    mesh = local.mesh
    dies = last_reads([_step(op) for op in local.ops], [(p.value, p.sharding) for p in local.outputs])
    sent = _sent(local)
    combined = _combined(local, combined_sums) if combined_sums else {}
    count = len(local.ops)
    born: dict[_Held, int] = {}
    given = {(p.value, p.sharding) for p in local.inputs}
    for position, op in enumerate(local.ops):
        if isinstance(op, Compute):
            results = zip(op.equation.outputs, op.results, strict=True)
            for key, written in zip(results, op.traffic.writes, strict=True):
                if written or key in sent:
                    born.setdefault(key, position)
        elif isinstance(op, Reread):
            given.add((op.copy, op.sharding))  # its buffer is the value's
        elif isinstance(op, Reshard) and ((op.value, op.source) in born or (op.value, op.source) in given):
            born.setdefault((op.value, op.target), position)
            run = combined.get(position, position)
            if run > position:
                source, target = (op.value, op.source), (op.value, op.target)
                in_place = op.steps[0].kind == "all_reduce"
                dies[source] = max(dies[source], run - in_place)
                born[target] = min(run, dies.get(target, run))
    changes = [0] * (count + 1)
    for position, op in enumerate(local.ops):
        if isinstance(op, Compute):
            changes[position] += op.temporaries
            changes[position + 1] -= op.temporaries
        if not isinstance(op, Reshard) or op.value.sum_nbytes == op.value.nbytes:
            continue
        if any(step.kind in SUM_KINDS for step in op.steps):  # the sum, before it is rounded
            size, run = op.value.sum_nbytes // math.prod(op.target.tiles(mesh)), combined.get(position, position)
            changes[run] += size
            changes[run + 1] -= size
    for key, at in born.items():
        if (end := dies.get(key, at)) < count:  # others are outputs
            size = local_bytes(*key, mesh)
            changes[at] += size
            changes[end + 1] -= size
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most
