"""What a program in local sizes costs: seconds, collectives and bytes, from the very operations that will run."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from autopar.cost_model.compute import (
    INDEX_BYTES,
    accumulate_seconds,
    allocation_seconds,
    compute_time,
    memory_seconds,
    partial_sum_bytes,
    peak_flops,
    product_share,
    strided_read_seconds,
)
from autopar.cost_model.order import Combining, Live, ProgramKernels, held_by, live
from autopar.cost_model.overlap import hidden_seconds
from autopar.cost_model.reshard import LOCAL_KINDS, SUM_KINDS, AppliedStep, StepPrice, applied_steps, step_axes
from autopar.ir.graph import Phase, Value
from autopar.ir.local import Accumulate, Compute, LocalKernel, LocalOp, LocalProgram, Port, Reread, Reshard
from autopar.ir.mesh import DeviceKind, Mesh
from autopar.ir.sharding import Collective, Sharding

_Held = tuple[Value, Sharding]

# What XLA's latency-hiding scheduler takes for granted; see `_estimated_seconds`.
_CONVOLUTION = 1e-5  # seconds
_WIDENING = 60.0  # times as slow as other products


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """One run of one program on one device."""

    compute: float  # seconds
    communication: float  # seconds
    hidden: float  # seconds by which it is shorter than both together, since collectives run beside kernels
    flops: float  # on one device
    collectives: tuple[Collective, ...]
    temporaries: int  # bytes live at once beyond the inputs and outputs
    launches: float  # of kernels
    moved: float  # bytes that kernels read from memory and write to it
    start: float  # seconds before the first operation: to be issued, and to set memory aside
    by_phase: Mapping[Phase, float]  # seconds of the operations of each phase; of the first one with the start

    @property
    def seconds(self) -> float:
        """Of the operations."""
        return self.compute + self.communication - self.hidden


@dataclasses.dataclass(frozen=True)
class OpCost:
    """One operation of a program, once, on one device."""

    compute: float  # seconds
    communication: float  # seconds
    flops: float
    collectives: tuple[Collective, ...]
    launches: float  # of kernels
    moved: float  # bytes that kernels read from memory and write to it

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
    """Price every operation, and what XLA's order of them hides and holds.

    Compute by the roofline with fused elementwise chains, collectives one by one.
    """
    costs = op_costs(local, kind, price)
    schedule = _Scheduled(local, kind, price, costs)
    needed = math.ceil(_calibrated_temporaries(local, kind) * schedule.temporaries)
    hidden = hidden_seconds(schedule.live.order, kind.xla.overlap_slowdown)
    start = kind.dispatch_overhead + _set_aside(local, kind, needed)
    communication = sum(c.communication for c in costs)
    shown = 1 - hidden / communication if hidden else 1.0  # of all collectives alike, to say of each phase
    phases = phases_of(local)
    by_phase: dict[Phase, float] = defaultdict(float)
    by_phase[phases[0] if phases else local.program.phase] = start
    for phase, cost in zip(phases, costs, strict=True):
        by_phase[phase] += cost.compute + shown * cost.communication
    return ProgramCost(
        sum(c.compute for c in costs), communication, hidden, sum(c.flops for c in costs),
        tuple(each for c in costs for each in c.collectives), needed,
        sum(c.launches for c in costs), sum(c.moved for c in costs), start, by_phase,
    )  # fmt: skip


def _calibrated_temporaries(local: LocalProgram, kind: DeviceKind) -> float:
    """By a calibration (`Measured.temporaries`): how many times as large as `temporaries` says the buffer is."""
    computed = [op for op in local.ops if isinstance(op, Compute)]
    products = [op.product for op in computed] + [each.product for op in computed for each in op.kernels]
    convolves = any(product is not None and product.patches is not None for product in products)
    return kind.measured.temporaries.get("convolutions" if convolves else "others", 1.0)


def phases_of(local: LocalProgram) -> tuple[Phase, ...]:
    """By operation of a program: the phase of its equation, or of the equation before it."""
    phase = local.program.phase
    if phase not in _FUSED:
        return (phase,) * len(local.ops)
    phases = []
    for op in local.ops:
        if isinstance(op, Compute):
            phase = op.equation.phase
        phases.append(phase)
    return tuple(phases)


_FUSED = (Phase.FORWARD, Phase.UPDATE)  # phases of programs that may have equations of several


def _set_aside(local: LocalProgram, kind: DeviceKind, needed: int) -> float:
    """Seconds for the buffer of all temporaries, and for each result that does not take an operand's place."""
    if not kind.measured.allocations:
        return 0.0
    taken = Counter(_signature(port) for port in local.inputs) if local.program.phase is Phase.UPDATE else Counter()
    fresh = [needed]
    for port in local.outputs:
        if taken[_signature(port)]:
            taken[_signature(port)] -= 1
        elif port not in local.inputs:
            fresh.append(port_bytes(port, local.mesh))
    return sum(allocation_seconds(kind, nbytes) for nbytes in fresh)


def _signature(port: Port) -> Hashable:
    """The same for arrays of which one can take the place of the other."""
    return port.value.shape, port.value.dtype, port.sharding


def op_costs(local: LocalProgram, kind: DeviceKind, price: StepPrice) -> tuple[OpCost, ...]:
    """The price of each operation of a program, in order."""
    sent, strided_reads = _sent(local), _StridedReads(local, kind)
    return tuple(_op_cost(op, local.mesh, kind, price, sent, strided_reads.seconds(op)) for op in local.ops)


def _op_cost(
    op: LocalOp, mesh: Mesh, kind: DeviceKind, price: StepPrice, sent: Collection[_Held], strided_reads: float
) -> OpCost:
    """`strided_reads`: seconds for what lies in another order than it is wanted in."""
    compute = communication = flops = launches = moved = 0.0
    collectives: list[Collective] = []
    if isinstance(op, Compute):
        dtype = "" if op.kernels else op.equation.kernel_dtype(op.product is not None)
        kernels = op.kernels or (
            LocalKernel(op.flops, _moved_bytes(op, mesh, sent), op.product, dtype, op.traffic.launches, op.pooling),
        )
        for k in kernels:
            compute += kernel_seconds(k, kind)
            launches += k.times
            moved += k.nbytes + 2 * k.rounds * partial_sum_bytes(kind, k.product, k.dtype)
        flops = op.flops
        collectives += op.combined
        communication = sum(price(c.kind, c.axes, c.payload) for c in op.combined)
    elif isinstance(op, Accumulate):
        nbytes = local_bytes(op.total, op.sharding, mesh)
        compute, launches, moved = accumulate_seconds(kind, nbytes), 1.0, 3.0 * nbytes
    elif isinstance(op, Reshard):
        for step, axes, payload, _ in _applied(op, mesh):
            if axes:
                communication += price(step.kind, axes, payload)
                if payload and step.kind not in LOCAL_KINDS:
                    collectives.append(Collective(step.kind, axes, payload))
    return OpCost(compute + strided_reads, communication, flops, tuple(collectives), launches, moved)


def _applied(op: Reshard, mesh: Mesh) -> Iterator[AppliedStep]:
    value = op.value
    return applied_steps(op.steps, value.shape, value.itemsize, op.source, mesh, value.sum_itemsize)


def kernel_seconds(kernel: LocalKernel, kind: DeviceKind) -> float:
    """Of all its rounds."""
    partial = kernel.rounds * partial_sum_bytes(kind, kernel.product, kernel.dtype)
    seconds = compute_time(
        kind, flops=kernel.flops, bytes_moved=kernel.nbytes + partial, dtype=kernel.dtype,
        matmul=kernel.product is not None, share=product_share(kind, kernel.product, kernel.dtype),
        pooling=kernel.pooling,
    )  # fmt: skip
    return seconds + float(memory_seconds(kind, partial)) + kind.launch_overhead * kernel.times


def _sent(local: LocalProgram) -> set[_Held]:
    """What collectives take, from memory."""
    names = {op.copy: op.value for op in local.ops if isinstance(op, Reread)}
    return {
        (names.get(op.value, op.value), op.source)
        for op in local.ops
        if isinstance(op, Reshard) and any(step.kind not in LOCAL_KINDS for step in op.steps)
    }


class _StridedReads:
    """What collectives leave in another order, as a program goes on, and the seconds that it and transposes take.

    XLA cuts and joins the outermost dimension in memory: what is cut or joined along another one is copied before, and
    lies in another order afterwards. Kernels read it against its order, products and the caller a copy.
    """

    def __init__(self, local: LocalProgram, kind: DeviceKind) -> None:
        self._mesh, self._kind = local.mesh, kind
        self._leaving = {(port.value, port.sharding) for port in local.outputs}
        self._turned: set[_Held] = set()

    def seconds(self, op: LocalOp) -> float:
        """Of one operation, in the order of the program."""
        if not self._kind.xla.single_output:
            return 0.0
        if isinstance(op, Reshard):
            return self._resharding(op)
        if isinstance(op, Compute):
            operands = zip(op.equation.inputs, op.operands, strict=True)
            return sum(self._reading(op, position, *held) for position, held in enumerate(operands))
        if isinstance(op, Accumulate):
            return self._of(
                (op.partial_sum, op.sharding), strided=(op.partial_sum, op.sharding) in self._turned, copied=0
            )
        if (op.value, op.sharding) in self._turned:
            self._turned.add((op.copy, op.sharding))
        return 0.0

    def _resharding(self, op: Reshard) -> float:
        before, after = (op.value, op.source), (op.value, op.target)
        if _is_inner(op, self._mesh):
            self._turned.add(after)
            leaves = after in self._leaving
            return self._of(before, strided=1, copied=1) + self._of(after, strided=leaves, copied=leaves)
        if before in self._turned and all(step.kind in LOCAL_KINDS for step in op.steps):
            self._turned.add(after)
        return 0.0

    def _reading(self, op: Compute, position: int, value: Any, sharding: Sharding | None) -> float:
        if sharding is None:
            return 0.0
        held, traffic = (value, sharding), op.traffic
        strided, copied = traffic.strided[position], traffic.copied[position]
        if held in self._turned:
            if op.fence:
                self._turned.add((op.equation.outputs[position], op.results[position]))
            elif op.product is not None:
                strided, copied = max(strided, 1), max(copied, 1)
                self._turned.remove(held)  # others read the copy, too
            elif not (op.kernels or traffic.launches or any(traffic.reads)):  # a view
                self._turned.add((op.equation.outputs[0], op.results[0]))
            else:
                strided = max(strided, traffic.reads[position])
        return self._of(held, strided=strided, copied=copied)

    def _of(self, held: _Held, *, strided: int, copied: int) -> float:
        if not (strided or copied):
            return 0.0
        return float(strided_read_seconds(self._kind, local_bytes(*held, self._mesh), strided=strided, copied=copied))


def _is_inner(op: Reshard, mesh: Mesh) -> bool:
    """Whether pieces are cut or joined along another dimension than the outermost."""
    step = op.steps[-1]
    if step.kind not in ("all_gather", "reduce_scatter", "all_to_all") or not step_axes(step, mesh):
        return False
    outside = op.target.local_shape(op.value.shape, mesh)[: max(step.dim, step.to_dim)]
    return math.prod(outside) > 1


def _moved_bytes(op: Compute, mesh: Mesh, sent: Collection[_Held]) -> float:
    """Bytes that go through one device's memory."""
    results = [*zip(op.equation.outputs, op.results, strict=True)]
    made = max((math.prod(v.shape) / math.prod(s.tiles(mesh)) for v, s in results), default=0.0)
    moved = 0.0
    for position, (v, sharding) in enumerate(zip(op.equation.inputs, op.operands, strict=True)):
        if isinstance(v, Value) and sharding is not None:
            moved += op.traffic.read_bytes(position, v, local_bytes(v, sharding, mesh), made)
    written = (local_bytes(*key, mesh) for k, key in enumerate(results) if op.traffic.is_own(k) or key in sent)
    return moved + sum(written)


def _kernels(local: LocalProgram, kind: DeviceKind, price: StepPrice, costs: Sequence[OpCost]) -> ProgramKernels:
    """What runs, as XLA fuses it: equations whose results go to memory, collectives, additions to running sums.

    What an operation costs that is fused into others is of none of their kernels: it takes next to nothing.
    """
    mesh, sent, told = local.mesh, _sent(local), ProgramKernels()
    gathered: set[_Held] = set()  # in another layout than results have
    fused: dict[_Held, float] = {}  # bytes that are moved for a value, by the kernel that is the first to need it
    for op, priced in zip(local.ops, costs, strict=True):
        if isinstance(op, Compute):
            operands = zip(op.equation.inputs, op.operands, strict=True)
            reads = [(v, s) for v, s in operands if isinstance(v, Value) and s is not None]
            results = [*zip(op.equation.outputs, op.results, strict=True)]
            if op.fence:
                told.fence(zip(results, zip(op.equation.inputs, op.operands, strict=True), strict=True))
                continue
            written = [k for k, own in zip(results, op.traffic.writes, strict=True) if own or k in sent]
            if op.equation.generates and not op.kernels and not sent.intersection(results):
                written = []
            taken = told.buffers(reads)
            makes = [(key, local_bytes(*key, mesh)) for key in written]
            aliases = {k: None if i is None else (op.equation.inputs[i], op.operands[i])
                      for k, i in op.traffic.aliases}  # fmt: skip
            moved = _moved_bytes(op, mesh, sent) + sum(fused.pop(held, 0.0) for held in reads)
            if op.kernels:
                seconds = sum(kernel_seconds(k, kind) for k in op.kernels)
                told.run_rounds(reads, makes, aliases, op.temporaries, seconds, priced.seconds)
            elif written:
                lie: dict[Hashable, Hashable] = {results[k]: place for k, place in aliases.items()}
                shared = zip(op.equation.inputs, op.operands, op.traffic.in_place, strict=True)
                taken_over = [(v, s) for v, s, may_be_taken in shared if may_be_taken]
                seconds = _estimated_seconds(op, moved, kind)
                part_of = None if aliases else op.traffic.kernel  # what is written where something lies is apart
                held = 0 if kind.xla.single_output else _indices_bytes(op, mesh)
                told.run(
                    reads, makes, held=held, aliases=lie, in_place=taken_over, seconds=seconds, cost=priced.seconds,
                    part_of=part_of,
                )  # fmt: skip
            else:
                fused.update(dict.fromkeys(results[:1], moved))
            for key in results:
                if key not in written:
                    told.fuse(key, taken)
        elif isinstance(op, Reread):
            told.fence([((op.copy, op.sharding), (op.value, op.sharding))], [] if op.after is None else [op.after])
        elif isinstance(op, Accumulate):
            seconds = accumulate_seconds(kind, local_bytes(op.total, op.sharding, mesh))
            told.run([(op.partial_sum, op.sharding), (op.total, op.sharding)], [], seconds=seconds, cost=seconds)
        else:
            _reshard(op, mesh, told, price)
            last = op.steps[-1]
            if last.kind == "all_gather" and last.dim > 0 and step_axes(last, mesh):
                gathered.add((op.value, op.target))
    for port in local.outputs:
        key = (port.value, port.sharding)
        if key in gathered:
            told.run_last(key, port, port_bytes(port, mesh))
        else:
            told.fuse(port, told.buffers([key]))
        told.leave(port)
    return told


def _indices_bytes(op: Compute, mesh: Mesh) -> int:
    """Bytes of the positions of maxima over windows, which one kernel writes and the one that adds gradients reads."""
    if op.pooling != "gradient":
        return 0
    gradients, sharding = op.equation.inputs[0], op.operands[0]
    if not isinstance(gradients, Value) or sharding is None:
        return 0
    elements = local_bytes(gradients, sharding, mesh) // gradients.itemsize
    return len(gradients.shape) * INDEX_BYTES * elements


def _estimated_seconds(op: Compute, nbytes: float, kind: DeviceKind) -> float:
    """How long XLA expects a kernel to take that reads and writes so many bytes, for its order beside collectives.

    That is not how long it takes. XLA knows no speed of products of 16-bit numbers with results of 32, which it expects
    to be far slower than others, and takes all convolutions to be the same (`SolLatencyEstimator`; read from its log,
    jaxlib 0.10.2).
    """
    if op.product is None:
        return nbytes / kind.memory_bandwidth
    if op.product.patches is not None:
        return _CONVOLUTION
    dtype = op.equation.kernel_dtype(True)
    result, sharding = op.equation.outputs[0], op.results[0]
    widens = result.held_dtype(bool(sharding.partial)).itemsize > 2 and min(v.itemsize for v in op.equation.values) <= 2
    speed = peak_flops(kind, dtype, matmul=True) * kind.matmul_efficiency / (_WIDENING if widens else 1)
    return op.flops / speed


def _reshard(op: Reshard, mesh: Mesh, told: ProgramKernels, price: StepPrice) -> None:
    """Step by step. What is summed is held in the type of the sum until it is read."""
    value = op.value
    here: Any = (value, op.source)
    for number, (step, axes, payload, after) in enumerate(_applied(op, mesh)):
        there: Any = (op, number)
        if not axes or step.kind in LOCAL_KINDS:
            told.fuse(there, told.buffers([here]))
        else:
            sums = step.kind in SUM_KINDS
            wide = sums or bool(after.partial)
            nbytes = (value.sum_nbytes if wide else value.nbytes) // math.prod(after.tiles(mesh))
            dtype = value.held_dtype(wide)
            combines = sums or step.kind == "all_gather"
            seconds, latency = price(step.kind, axes, payload), price(step.kind, axes, 0)
            collective = Combining((step.kind, axes, dtype) if combines else None, sums, latency)
            aliases = {there: here} if step.kind == "all_reduce" else {}
            told.run([here], [(there, nbytes)], aliases=aliases, collective=collective, seconds=seconds, cost=seconds)
        here = there
    told.fuse((value, op.target), told.buffers([here]))


class _Scheduled:
    """The kernels of a program in XLA's order."""

    def __init__(self, local: LocalProgram, kind: DeviceKind, price: StepPrice, costs: Sequence[OpCost]) -> None:
        told, xla = _kernels(local, kind, price, costs), kind.xla
        given = Counter(_signature(port) for port in local.inputs)
        renewed: set[int] = set()  # results that lie where an argument does
        if local.program.phase is Phase.UPDATE:
            for port in local.outputs:
                if given[_signature(port)]:
                    given[_signature(port)] -= 1
                    renewed.update(told.buffers([port]))
            told.lie_elsewhere(renewed)
        self.live: Live = live(
            told, combined=xla.collective_combine_threshold, contiguous=xla.combines_contiguously,
            hides_latency=xla.hides_latency,
        )  # fmt: skip
        self._sizes, self._renewed = told.sizes, renewed

    @property
    def temporaries(self) -> int:
        """Bytes that are set aside beside inputs and outputs: until a result is made, other values lie in its place."""
        order = self.live.order
        ranges = {buffer: at for buffer, at in self.live.ranges.items() if buffer not in self._renewed}
        results = sum(self._sizes[buffer] for buffer, (_, end) in ranges.items() if end == len(order))
        return max(0, max(held_by(ranges, self._sizes, order), default=0) - results)


def temporaries(local: LocalProgram, kind: DeviceKind, price: StepPrice) -> int:
    """Bytes that XLA sets aside beside inputs and outputs, by its schedule alone (without what a calibration found)."""
    return _Scheduled(local, kind, price, op_costs(local, kind, price)).temporaries
