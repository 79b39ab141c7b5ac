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
from autopar.cost_model.reshard import LOCAL_KINDS, SUM_KINDS, AppliedStep, StepPrice, applied_steps
from autopar.cost_model.strided_reads import Held, Strided, StridedReads
from autopar.ir.graph import Phase, Value
from autopar.ir.local import (
    Accumulate,
    Compute,
    LocalKernel,
    LocalOp,
    LocalProgram,
    LocalRound,
    OperatorKind,
    Port,
    Reread,
    Reshard,
    local_bytes,
    port_bytes,
)
from autopar.ir.mesh import DeviceKind, Mesh, ProductSizes
from autopar.ir.sharding import Collective, StepKind

# What XLA's latency-hiding scheduler takes for granted; see `_expected_seconds`.
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
    copies: tuple[Held, ...] = ()  # what is copied into another order for it

    @property
    def seconds(self) -> float:
        return self.compute + self.communication


def program_cost(local: LocalProgram, kind: DeviceKind, price: StepPrice) -> ProgramCost:
    """Price every operation, and what XLA's order of them hides and holds.

    Compute by the roofline with fused elementwise chains, collectives one by one.
    """
    costs = op_costs(local, kind, price)
    in_rounds = [
        hidden_in_rounds(op.round, op.kernels, local.mesh, kind, price)
        if isinstance(op, Compute) and op.round is not None else 0.0
        for op in local.ops
    ]  # fmt: skip
    schedule = _Scheduled(local, kind, price, costs, in_rounds)
    needed = math.ceil(_calibrated_temporaries(local, kind) * schedule.temporaries)
    hidden = sum(in_rounds) + hidden_seconds(schedule.live.order, kind.xla.overlap_slowdown)
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
    sent, strided_reads = _sent(local), StridedReads(local, kind)
    return tuple(_op_cost(op, local.mesh, kind, price, sent, strided_reads.of(op)) for op in local.ops)


def _op_cost(
    op: LocalOp, mesh: Mesh, kind: DeviceKind, price: StepPrice, sent: Collection[Held], strided: Strided
) -> OpCost:
    compute = communication = flops = 0.0
    launches = float(len(strided.copies))
    moved = sum(2.0 * local_bytes(*held, mesh) for held in strided.copies)
    collectives: list[Collective] = []
    if isinstance(op, Compute):
        for k in _kernels_of(op, mesh, sent):
            compute += kernel_seconds(k, kind)
            launches += k.times
            moved += k.nbytes + 2 * k.rounds * partial_sum_bytes(kind, k.product, k.dtype)
        flops = op.flops
        collectives += op.combined
        communication = sum(price(c.kind, c.axes, c.payload) for c in op.combined)
    elif isinstance(op, Accumulate):
        nbytes = local_bytes(op.total, op.sharding, mesh)
        compute, launches, moved = accumulate_seconds(kind, nbytes), launches + 1.0, moved + 3.0 * nbytes
    elif isinstance(op, Reshard):
        for step, axes, payload, _ in _applied(op, mesh):
            if axes:
                communication += price(step.kind, axes, payload)
                if payload and step.kind not in LOCAL_KINDS:
                    collectives.append(Collective(step.kind, axes, payload))
    return OpCost(compute + strided.seconds, communication, flops, tuple(collectives), launches, moved, strided.copies)


def _kernels_of(op: Compute, mesh: Mesh, sent: Collection[Held]) -> tuple[LocalKernel, ...]:
    if op.kernels:
        return op.kernels
    dtype = op.equation.kernel_dtype(op.product is not None)
    moved = _moved_bytes(op, mesh, sent)
    return (LocalKernel(op.flops, moved, op.product, dtype, op.traffic.launches, op.pooling),)


@dataclasses.dataclass(frozen=True)
class KindWork:
    """What operators of one kind do in one run of a program on one device."""

    seconds: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0  # that kernels move; of collectives what is sent, as they count it

    def plus(self, seconds: float, flops: float, nbytes: float) -> KindWork:
        """With more of it."""
        return KindWork(self.seconds + seconds, self.flops + flops, self.nbytes + nbytes)


def work_by_kind(local: LocalProgram, kind: DeviceKind, price: StepPrice) -> dict[OperatorKind, KindWork]:
    """By kind of operator. Collectives take all of their seconds, whether they are hidden or not."""
    found: dict[OperatorKind, KindWork] = defaultdict(KindWork)
    sent = _sent(local)
    for op, cost in zip(local.ops, op_costs(local, kind, price), strict=True):
        rest = cost.compute, cost.moved
        for k in _kernels_of(op, local.mesh, sent) if isinstance(op, Compute) else ():
            if k.product is not None:
                seconds, nbytes = kernel_seconds(k, kind), k.nbytes
                found[_kind_of(k.product)] = found[_kind_of(k.product)].plus(seconds, k.flops, nbytes)
                rest = rest[0] - seconds, rest[1] - nbytes
        if any(rest):
            found["memory"] = found["memory"].plus(max(0.0, rest[0]), 0.0, max(0.0, rest[1]))
        if cost.collectives:
            payload = float(sum(c.payload for c in cost.collectives))
            found["collectives"] = found["collectives"].plus(cost.communication, 0.0, payload)
    return dict(found)


def _kind_of(sizes: ProductSizes) -> OperatorKind:
    return "attention" if sizes.attention else "convolutions" if sizes.patches else "products"


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


def _sent(local: LocalProgram) -> set[Held]:
    """What collectives take, from memory."""
    names = {op.copy: op.value for op in local.ops if isinstance(op, Reread)}
    return {
        (names.get(op.value, op.value), op.source)
        for op in local.ops
        if isinstance(op, Reshard) and any(step.kind not in LOCAL_KINDS for step in op.steps)
    }


def _moved_bytes(op: Compute, mesh: Mesh, sent: Collection[Held]) -> float:
    """Bytes that go through one device's memory."""
    results = [*zip(op.equation.outputs, op.results, strict=True)]
    made = max((math.prod(v.shape) / math.prod(s.tiles(mesh)) for v, s in results), default=0.0)
    moved = 0.0
    for position, (v, sharding) in enumerate(zip(op.equation.inputs, op.operands, strict=True)):
        if isinstance(v, Value) and sharding is not None:
            moved += op.traffic.read_bytes(position, v, local_bytes(v, sharding, mesh), made)
    written = (local_bytes(*key, mesh) for k, key in enumerate(results) if op.traffic.is_own(k) or key in sent)
    return moved + sum(written)


def hidden_in_rounds(
    round_: LocalRound, kernels: Sequence[LocalKernel], mesh: Mesh, kind: DeviceKind, price: StepPrice
) -> float:
    """Seconds by which a loop is shorter, since collectives in each of its rounds run beside kernels.

    `kernels`: those of the loop, in all rounds; a step of the round says which of them are its own.
    """
    if not kind.xla.hides_latency:
        return 0.0
    told, times = ProgramKernels(), round_.times
    for number, step in enumerate(round_.steps):
        before: list[Hashable] = [*step.before]
        if step.kernels:
            each = [kernels[k] for k in step.kernels]
            told.run(
                before, [(number, step.nbytes)], seconds=sum(_expected_seconds(k, kind) for k in each) / times,
                cost=sum(kernel_seconds(k, kind) for k in each) / times,
            )  # fmt: skip
        elif not step.collectives:
            told.fuse(number, told.buffers(before))
        if step.pipelined:
            before = []
        for c in step.collectives:
            seconds = price(c.kind, c.axes, c.payload)
            collective = _combining(c.kind, c.axes, step.dtype, price)
            count = math.prod(mesh.axis_size(axis) for axis in c.axes)
            made = c.payload // count if c.kind == "reduce_scatter" else c.payload
            told.run(before, [(number, made)], collective=collective, seconds=seconds, cost=seconds)
            before = [number]
    for number in range(len(round_.steps)):
        told.leave(number)
    order = live(
        told, combined=kind.xla.collective_combine_threshold, contiguous=kind.xla.combines_contiguously,
        hides_latency=True,
    ).order  # fmt: skip
    return times * hidden_seconds(order, kind.xla.overlap_slowdown)


def _combining(kind: StepKind, axes: Sequence[str], dtype: str, price: StepPrice) -> Combining:
    """What a collective may be combined with."""
    is_sum = kind in SUM_KINDS
    alike = (kind, tuple(axes), dtype) if is_sum or kind == "all_gather" else None
    return Combining(alike, is_sum, price(kind, tuple(axes), 0))


def _expected_seconds(kernel: LocalKernel, kind: DeviceKind) -> float:
    """How long XLA expects a kernel to take in all its rounds, for its order beside collectives.

    That is not how long it takes. XLA knows no speed of products of 16-bit numbers with results of 32, which it expects
    to be far slower than others, and takes all convolutions to be the same (`SolLatencyEstimator`; read from its log,
    jaxlib 0.10.2).
    """
    if kernel.product is None:
        return kernel.nbytes / kind.memory_bandwidth
    if kernel.product.patches is not None:
        return _CONVOLUTION * kernel.rounds
    speed = peak_flops(kind, kernel.dtype, matmul=True) * kind.matmul_efficiency
    return kernel.flops * (_WIDENING if kernel.widens else 1) / speed


def _kernels(
    local: LocalProgram, kind: DeviceKind, price: StepPrice, costs: Sequence[OpCost], in_rounds: Sequence[float]
) -> ProgramKernels:
    """What runs, as XLA fuses it: equations whose results go to memory, collectives, additions to running sums.

    What an operation costs that is fused into others is of the kernel that is the first to need it.
    `in_rounds`: by operation, seconds by which a loop is shorter, see `hidden_in_rounds`.
    """
    mesh, sent, told = local.mesh, _sent(local), ProgramKernels()
    copied: set[Held] = set()  # as results, which lie in rows
    # Bytes that are moved for a value, and the seconds that it takes, by the kernel that is the first to need it.
    fused: dict[Held, tuple[float, float]] = {}

    def copy(held: Held, name: Hashable) -> None:
        """What reads this name reads the copy."""
        nbytes = local_bytes(*held, mesh)
        seconds = 2 * nbytes / kind.memory_bandwidth
        told.run([held], [(name, nbytes)], seconds=seconds, cost=_copy_seconds(held, mesh, kind))

    for op, priced, shorter in zip(local.ops, costs, in_rounds, strict=True):
        for held in priced.copies:
            if isinstance(op, Reshard) and held == (op.value, op.target):
                copied.add(held)
            else:
                copy(held, held)
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
            own = priced.seconds - sum(_copy_seconds(held, mesh, kind) for held in priced.copies)
            moved = _moved_bytes(op, mesh, sent)
            for held in reads:
                with_it = fused.pop(held, (0.0, 0.0))
                moved, own = moved + with_it[0], own + with_it[1]
            if op.kernels:
                seconds = sum(kernel_seconds(k, kind) for k in op.kernels)
                told.run_rounds(reads, makes, aliases, op.temporaries, seconds, own - shorter)
            elif written:
                lie: dict[Hashable, Hashable] = {results[k]: place for k, place in aliases.items()}
                shared = zip(op.equation.inputs, op.operands, op.traffic.in_place, strict=True)
                taken_over = [(v, s) for v, s, may_be_taken in shared if may_be_taken]
                seconds = _estimated_seconds(op, moved, kind)
                part_of = None if aliases else op.traffic.kernel  # what is written where something lies is apart
                beside = 0 if kind.xla.single_output else _indices_bytes(op, mesh)
                told.run(
                    reads, makes, held=beside, aliases=lie, in_place=taken_over, seconds=seconds, cost=own,
                    part_of=part_of,
                )  # fmt: skip
            else:
                fused.update(dict.fromkeys(results[:1], (moved, own)))
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
    for port in local.outputs:
        key = (port.value, port.sharding)
        if key in copied:
            copy(key, port)
        else:
            told.fuse(port, told.buffers([key]))
        told.leave(port)
    return told


def _copy_seconds(held: Held, mesh: Mesh, kind: DeviceKind) -> float:
    return float(strided_read_seconds(kind, local_bytes(*held, mesh), strided=0, copied=1))


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
    """`_expected_seconds` of the kernel of an equation that reads and writes so many bytes."""
    widens = False
    if op.product is not None:
        result, sharding = op.equation.outputs[0], op.results[0]
        narrowest = min(v.itemsize for v in op.equation.values)
        widens = result.held_dtype(bool(sharding.partial)).itemsize > 2 and narrowest <= 2
    dtype = op.equation.kernel_dtype(op.product is not None)
    return _expected_seconds(LocalKernel(op.flops, nbytes, op.product, dtype, 1.0, widens=widens), kind)


def _reshard(op: Reshard, mesh: Mesh, told: ProgramKernels, price: StepPrice) -> None:
    """Step by step. What is summed is held in the type of the sum until it is read."""
    value = op.value
    here: Any = (value, op.source)
    for number, (step, axes, payload, after) in enumerate(_applied(op, mesh)):
        there: Any = (op, number)
        if not axes or step.kind in LOCAL_KINDS:
            told.fuse(there, told.buffers([here]))
        else:
            wide = step.kind in SUM_KINDS or bool(after.partial)
            nbytes = (value.sum_nbytes if wide else value.nbytes) // math.prod(after.tiles(mesh))
            seconds = price(step.kind, axes, payload)
            collective = _combining(step.kind, axes, str(value.held_dtype(wide)), price)
            aliases = {there: here} if step.kind == "all_reduce" else {}
            told.run([here], [(there, nbytes)], aliases=aliases, collective=collective, seconds=seconds, cost=seconds)
        here = there
    told.fuse((value, op.target), told.buffers([here]))


class _Scheduled:
    """The kernels of a program in XLA's order."""

    def __init__(
        self, local: LocalProgram, kind: DeviceKind, price: StepPrice, costs: Sequence[OpCost],
        in_rounds: Sequence[float],
    ) -> None:  # fmt: skip
        told, xla = _kernels(local, kind, price, costs, in_rounds), kind.xla
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
    return _Scheduled(local, kind, price, op_costs(local, kind, price), [0.0] * len(local.ops)).temporaries
