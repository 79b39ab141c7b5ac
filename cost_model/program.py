"""What a program in local sizes costs: seconds, collectives and bytes, from the very operations that will run."""

from __future__ import annotations

import dataclasses
import math

from autopar.cost_model.compute import compute_time
from autopar.cost_model.reshard import SUM_KINDS, StepPrice, step_axes, step_payload, step_result
from autopar.ir.graph import Value
from autopar.ir.local import Accumulate, Compute, LocalKernel, LocalProgram, Port, Reshard
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


def local_bytes(value: Value, sharding: Sharding, mesh: Mesh) -> int:
    """Bytes of one device's piece."""
    return (value.sum_nbytes if sharding.partial else value.nbytes) // math.prod(sharding.tiles(mesh))


def port_bytes(port: Port, mesh: Mesh) -> int:
    """Bytes of one device's piece of what crosses a program's border."""
    return local_bytes(port.value, port.sharding, mesh)


def program_cost(local: LocalProgram, kind: DeviceKind, price: StepPrice) -> ProgramCost:
    """Price every operation: compute by the roofline with fused elementwise chains, collectives one by one."""
    mesh = local.mesh
    in_memory = materialised(local)
    read: set[Value] = set()
    compute = communication = flops = 0.0
    collectives: list[Collective] = []
    for op in local.ops:
        if isinstance(op, Compute):
            moved = 0
            for v, sharding in zip(op.equation.inputs, op.operands, strict=True):
                if isinstance(v, Value) and sharding is not None and v in in_memory and v not in read:
                    read.add(v)
                    moved += local_bytes(v, sharding, mesh)
            for v, result in zip(op.equation.outputs, op.results, strict=True):
                if v in in_memory:
                    moved += local_bytes(v, result, mesh)
            matmul = op.unit == "matmul"
            dtype = "" if op.kernels else op.equation.kernel_dtype(matmul)
            kernels = op.kernels or (LocalKernel(op.flops, moved, matmul, dtype, 1.0),)
            for k in kernels:
                compute += compute_time(kind, flops=k.flops, bytes_moved=k.nbytes, dtype=k.dtype, matmul=k.matmul)
                compute += kind.launch_overhead * k.times if k.nbytes else 0.0
            flops += op.flops
            collectives += op.combined
            communication += sum(price(c.kind, c.axes, c.payload) for c in op.combined)
        elif isinstance(op, Accumulate):
            nbytes = 3 * local_bytes(op.total, op.sharding, mesh)
            compute += compute_time(kind, flops=0.0, bytes_moved=nbytes, dtype=str(op.total.dtype), matmul=False)
        else:
            itemsize = op.value.nbytes // max(1, math.prod(op.value.shape))
            at = op.source
            for step in op.steps:
                axes = step_axes(step, mesh)
                if axes:
                    payload = step_payload(step, op.value.shape, itemsize, at, mesh)
                    communication += price(step.kind, axes, payload)
                    if payload and step.kind not in ("slice", "mask"):
                        collectives.append(Collective(step.kind, axes, payload))
                at = step_result(step, at)
    return ProgramCost(compute, communication, flops, tuple(collectives), temporaries(local, in_memory))


def materialised(local: LocalProgram) -> set[Value]:
    """Values that go through memory: what crosses the border, and what kernels that cannot be fused read or write."""
    found = {p.value for p in (*local.inputs, *local.outputs)}
    for op in local.ops:
        if isinstance(op, Compute):
            if op.unit == "matmul":
                found.update(op.equation.values)
            if not op.fusible:
                found.update(op.equation.outputs)
        elif isinstance(op, Reshard) and any(step.kind not in ("slice", "mask") for step in op.steps):
            found.add(op.value)
    return found


def temporaries(local: LocalProgram, in_memory: set[Value]) -> int:
    """Most bytes of values live at once that are neither inputs nor outputs."""
    mesh = local.mesh
    outside = {(p.value, p.sharding) for p in (*local.inputs, *local.outputs)}
    born: dict[tuple[Value, Sharding], int] = {}
    dies: dict[tuple[Value, Sharding], int] = {}

    fences = [op.equation for op in local.ops if isinstance(op, Compute) and op.fence]
    in_memory = in_memory | {v for eqn in fences for v in (*eqn.values, *eqn.outputs)}

    def use(key: tuple[Value, Sharding], position: int) -> None:
        if key not in outside and key[0] in in_memory:
            dies[key] = max(position, born.setdefault(key, position))

    for position, op in enumerate(local.ops):
        if isinstance(op, Compute):
            for v, sharding in zip(op.equation.inputs, op.operands, strict=True):
                if isinstance(v, Value) and sharding is not None:
                    use((v, sharding), position - op.fence)
            for v, result in zip(op.equation.outputs, op.results, strict=True):
                use((v, result), position)
        elif isinstance(op, Reshard):
            use((op.value, op.source), position)
            use((op.value, op.target), position)
        else:
            use((op.addend, op.sharding), position)
    changes = [0] * (len(local.ops) + 1)
    for position, op in enumerate(local.ops):
        if isinstance(op, Compute):
            changes[position] += op.temporaries
            changes[position + 1] -= op.temporaries
        if not isinstance(op, Reshard) or op.value.sum_nbytes == op.value.nbytes:
            continue
        if any(step.kind in SUM_KINDS for step in op.steps):  # the sum, before it is rounded
            size = op.value.sum_nbytes // math.prod(op.target.tiles(mesh))
            changes[position] += size
            changes[position + 1] -= size
    for key, at in born.items():
        size = local_bytes(*key, mesh)
        changes[at] += size
        changes[dies[key] + 1] -= size
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most
