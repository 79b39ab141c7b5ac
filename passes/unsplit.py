"""What a plan leaves whole on devices that could have shared it: one note for each cause.

An axis of eight devices splits no dimension of 50257, nor one of 25. So an equation stays whole, or is cut along what
it sums, and a leaf lies whole. Each size that an axis does not divide is one cause, whatever it keeps whole. What could
have been split otherwise stays whole by choice, which is said of leaves that a recipe has an axis for. A recipe that
shares out examples leaves whole what offers none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from autopar.cost_model.compute import compute_time
from autopar.cost_model.reshard import StepPrice
from autopar.ir.graph import Value
from autopar.ir.local import Compute, LocalProgram, local_bytes
from autopar.ir.mesh import DeviceKind, Mesh
from autopar.ir.method import Method
from autopar.ir.sharding import Sharding
from autopar.ir.strategy import REPLICATED, AxisAssignment, Split
from autopar.ir.units import array_text
from autopar.passes.intra_op.limits import Limits, batch_factors, method_limits, sequence_factors
from autopar.passes.intra_op.strategies import pieces
from autopar.passes.lower import LoweredStep

_LEAST_SHARE = 0.05  # of a step's time or of the state on a device: what is less is not worth a note
_DEAR_TIME, _DEAR_MEMORY = 0.25, 0.1  # shares
_NAMED = 3  # leaves or lines in one note
_LITTLE, _MOST_ADDED = 1 / 64, 1 / 3  # of a dimension: so much is padded without need, and no more at all


@dataclasses.dataclass(frozen=True, order=True)
class Cause:
    """Why something is whole."""

    size: int  # of the dimension that is not divisible; 0: there is none to be split
    examples: bool  # whether it tells examples apart
    chosen: bool = False  # some dimension could be split


@dataclasses.dataclass(frozen=True)
class Unsplit:
    """What one cause kept whole."""

    cause: Cause
    stages: tuple[int, ...]
    axes: Mapping[str, int]  # with their devices
    unit: int  # what the size would have to be a multiple of
    leaves: tuple[str, ...]
    lines: tuple[str, ...]
    work: float  # share of the step's time, where it is largest
    state: float  # share of the state on a device, where it is largest
    memory: float  # share of a device's memory, where it is largest

    @property
    def share(self) -> float:
        """Of time or state."""
        return max(self.work, self.state)

    @property
    def is_dear(self) -> bool:
        """Whether it takes much of the step's time or of the devices' memory, and not by choice."""
        return not self.cause.chosen and (self.work >= _DEAR_TIME or self.memory >= _DEAR_MEMORY)

    def __str__(self) -> str:
        over = " and ".join(f"the {devices} devices of axis {axis}" for axis, devices in self.axes.items())
        what = []
        if self.leaves and self.state >= _LEAST_SHARE:
            what.append(f"{_listed(self.leaves)}, {self.state:.0%} of the state on a device")
        if self.lines and self.work >= _LEAST_SHARE:
            what.append(f"{_listed(self.lines)}, {self.work:.0%} of the step's time")
        where = f"stage {', '.join(map(str, self.stages))}"
        size = self.cause.size
        if self.cause.chosen:
            return (
                f"{where}: {what[0]}, could be split over {over} and lie whole by choice: by the predicted times, each "
                "device computes with them sooner alone than in pieces with the sums that those need. step.why tells "
                "these times; hints split them in any case"
            )
        if not size:
            return (
                f"{where}: nothing that tells examples apart can be split over {over} in {' and in '.join(what)}: "
                "every device computes it whole. Compute it per example, or use method='auto'"
            )
        if self.cause.examples:
            remedy = f"Make it a multiple of {self.unit}, or use fewer microbatches or data shards"
        else:
            remedy = f"Pad it from {size} to {_rounded(size, self.unit)}"
        kind = "a dimension of examples" if self.cause.examples else "a dimension"
        return f"{where}: {kind} of size {size} cannot be split over {over} in {' and in '.join(what)}. {remedy}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def find_unsplit(
    lowered: LoweredStep, method: Method, kind_of: Callable[[Mesh], DeviceKind],
    price_of: Callable[[Mesh], StepPrice], step_time: float,
) -> list[Unsplit]:  # fmt: skip
    """The causes that cost something, the dearest first. `step_time`: seconds."""
    by_cause: dict[Cause, list[_UnsplitAxis]] = defaultdict(list)
    step, rules = lowered.placed.step, lowered.rules
    examples, sequences = batch_factors(step, rules), functools.cache(lambda: sequence_factors(step, rules))
    for stage, sharding in enumerate(lowered.shardings):
        mesh = sharding.mesh
        if mesh.size > 1:
            limits = method_limits(method, step, mesh, lambda: examples, sequences)
            here = _Stage(lowered, stage, mesh, kind_of(mesh), price_of(mesh), limits, examples, method)
            for entry in here.axes_left():
                by_cause[entry.cause].append(entry)
    unsplit = [_merged(cause, entries, step_time) for cause, entries in by_cause.items()]
    return sorted((u for u in unsplit if u.share >= _LEAST_SHARE), key=lambda u: -u.share)


def undivided(lowered: LoweredStep) -> dict[int, int]:
    """Sizes of dimensions that axes do not divide and products have which these do not cut by examples.

    With the size that each would have to be padded to. What takes part in few of the step's operations is left out.
    """
    examples = batch_factors(lowered.placed.step, lowered.rules)
    flops: dict[int, float] = defaultdict(float)
    units: dict[int, int] = defaultdict(lambda: 1)
    total = 0.0
    for local in lowered.programs:
        often = lowered.loop_microbatches if local.program.in_loop else 1
        for op in local.ops:
            if not isinstance(op, Compute) or op.product is None:
                continue
            rule, told_apart = lowered.rules[op.equation.id], examples.get(op.equation.id, frozenset())
            total += often * op.flops
            missed: dict[int, int] = {}
            for axis, chosen in zip(local.mesh.axes, op.strategy[0], strict=True):
                devices = local.mesh.axis_size(axis)
                if devices > 1 and rule.factor_of(chosen) not in told_apart:
                    for f in rule.splittable:
                        if f not in told_apart and rule.factors[f] % devices:
                            missed[rule.factors[f]] = math.lcm(devices, missed.get(rule.factors[f], 1))
            for size, unit in missed.items():
                flops[size] += often * op.flops
                whole = _rounded(size, local.mesh.size)
                units[size] = math.lcm(units[size], local.mesh.size if whole <= (1 + _LITTLE) * size else unit)
    found = {size: _rounded(size, units[size]) for size in sorted(flops) if flops[size] >= _LEAST_SHARE * total}
    return {size: to for size, to in found.items() if to <= (1 + _MOST_ADDED) * size}


def _rounded(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit


@dataclasses.dataclass
class _UnsplitAxis:
    """What one cause keeps whole on one axis of one stage."""

    cause: Cause
    stage: int
    axis: str
    devices: int
    unit: int = 1
    lines: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))  # with the seconds lost
    leaves: dict[str, float] = dataclasses.field(default_factory=dict)  # with their bytes on a device
    nbytes: float = 0.0  # of the state on a device of the stage, in all
    memory: float = 0.0  # bytes of a device


def _merged(cause: Cause, entries: Sequence[_UnsplitAxis], step_time: float) -> Unsplit:
    def names(each: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
        most: dict[str, float] = {}
        for sizes in each:
            for name, size in sizes.items():
                most[name] = max(size, most.get(name, 0.0))
        return tuple(sorted(most, key=lambda name: -most[name]))

    return Unsplit(
        cause,
        tuple(sorted({entry.stage for entry in entries})),
        {entry.axis: entry.devices for entry in sorted(entries, key=lambda entry: entry.axis)},
        math.lcm(*(entry.unit for entry in entries)),
        names([entry.leaves for entry in entries]),
        names([entry.lines for entry in entries]),
        max(sum(entry.lines.values()) for entry in entries) / step_time if step_time else 0.0,
        max(sum(entry.leaves.values()) / max(1.0, entry.nbytes) for entry in entries),
        max(sum(entry.leaves.values()) / entry.memory for entry in entries),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Stage:
    lowered: LoweredStep
    stage: int
    mesh: Mesh
    kind: DeviceKind
    price: StepPrice
    limits: Limits
    examples: Mapping[int, frozenset[int]]  # factors, by equation id
    method: Method

    def axes_left(self) -> list[_UnsplitAxis]:
        step, placed = self.lowered.placed.step, self.lowered.placed
        entries: dict[tuple[str, Cause], _UnsplitAxis] = {}

        def at(axis: str, cause: Cause, unit: int) -> _UnsplitAxis:
            new = _UnsplitAxis(cause, self.stage, axis, self.mesh.axis_size(axis))
            entry = entries.setdefault((axis, cause), new)
            entry.unit = math.lcm(entry.unit, unit)
            return entry

        for local in self.lowered.programs:
            if local.program.stage == self.stage:
                self._program(local, at)
        batch = {source for source, _ in step.feeds.values()}
        stored = {
            v: port.sharding for v, port in self.lowered.homes.items()
            if placed.home[v] == self.stage and v not in batch and not v.is_key
        }  # fmt: skip
        held = {v: v.nbytes / math.prod(s.tiles(self.mesh)) for v, s in stored.items()}
        paths = dict(zip(step.graph.inputs, step.graph.input_paths, strict=True))
        fixed = bool(self.method.mesh_shape or self.method.stages)
        for axis in self.mesh.axes:
            split = sum(v.nbytes for v, s in stored.items() if axis in s.axes)
            asked = bool(self.method.zero) and axis in self.method.data_axes
            asked |= fixed and axis in self.method.model_axes
            usual = asked or 2 * split >= sum(v.nbytes for v in stored)
            for v, sharding in stored.items():
                name = f"{paths[v]} {array_text(v.dtype, v.shape)}"
                size, could = self._undivided(v, sharding, axis)
                if usual and size is not None:
                    at(axis, Cause(size[0], False), size[1]).leaves[name] = held[v]
                if could and axis in self.method.model_axes and fixed:
                    at(axis, Cause(0, False, True), 1).leaves[name] = held[v]
        for entry in entries.values():
            entry.nbytes, entry.memory = sum(held.values()), self.kind.memory
        return list(entries.values())

    def _program(self, local: LocalProgram, at: Callable[[str, Cause, int], _UnsplitAxis]) -> None:
        """Notes which equations of a program are whole."""
        often = self.lowered.loop_microbatches if local.program.in_loop else 1
        for op in local.ops:
            if isinstance(op, Compute) and op.flops > 0:
                for axis in self.mesh.axes:
                    reason = self._reason(op, axis)
                    if reason is not None:
                        line = f"{op.equation.primitive.name} at {op.equation.source or 'an unknown line'}"
                        at(axis, *reason).lines[line] += self._seconds(op, axis) * often

    def _seconds(self, op: Compute, axis: str) -> float:
        """What it takes too much: its operations (not its traffic, which fusion may save), or its sum over the axis."""
        if any(axis in s.partial for s in op.results):
            nbytes = sum(local_bytes(v, s, self.mesh) for v, s in zip(op.equation.outputs, op.results, strict=True))
            return self.price("all_reduce", (axis,), nbytes)
        matmul = op.product is not None
        kernels = [(k.flops, k.dtype, k.product is not None) for k in op.kernels]
        kernels = kernels or [(op.flops, op.equation.kernel_dtype(matmul), matmul)]
        seconds = sum(
            compute_time(self.kind, flops=flops, bytes_moved=0.0, dtype=dtype, matmul=is_product)
            for flops, dtype, is_product in kernels
        )
        return seconds * (1 - 1 / self.mesh.axis_size(axis))

    def _reason(self, op: Compute, axis: str) -> tuple[Cause, int] | None:
        """Why an axis does not split an equation as it should, and what the size must be a multiple of."""
        eqn, devices = op.equation, self.mesh.axis_size(axis)
        rule = self.lowered.rules[eqn.id]
        if devices == 1 or rule.separable:
            return None
        assignment, place = op.strategy[0], self.mesh.axes.index(axis)
        choice, examples = assignment[place], self.examples.get(eqn.id, frozenset())
        factor = rule.factor_of(choice)
        summed = factor is not None and factor not in examples and any(axis in s.partial for s in op.results)
        if choice != REPLICATED and not summed:
            return None
        cut = pieces(rule, assignment, self.mesh)
        held = {f for dims in rule.outputs for dim in dims for f in dim}
        undivided: list[tuple[Cause, int]] = []
        instead: list[int] = []
        for f in rule.splittable:
            unit = cut.get(f, 1) * devices
            wanted: AxisAssignment = (*assignment[:place], Split(f), *assignment[place + 1 :])
            if (summed and f not in held) or not self.limits.allow_assignment(eqn, rule, wanted):
                continue
            if rule.factors[f] % unit == 0:
                instead.append(rule.factors[f])
            elif f in examples or rule.factors[f] > unit:
                undivided.append((Cause(rule.factors[f], f in examples), unit))
        if not undivided:
            alike = examples and axis in self.method.data_axes and choice == REPLICATED and not instead
            return (Cause(0, True), 1) if alike else None
        largest = max(undivided)
        # Where a large result is summed, it would rather be cut along its largest dimension.
        by_choice = largest[0].size <= max(instead, default=0) if summed else bool(instead)
        return None if by_choice else largest

    def _undivided(self, v: Value, sharding: Sharding, axis: str) -> tuple[tuple[int, int] | None, bool]:
        """The largest dimension that keeps a leaf whole over an axis, and what it must be a multiple of.

        And whether it is whole though some dimension could be split.
        """
        devices = self.mesh.axis_size(axis)
        if devices == 1 or axis in sharding.axes:
            return None, False
        undivided = []
        for d, (size, tiles) in enumerate(zip(v.shape, sharding.tiles(self.mesh), strict=True)):
            dims = (*sharding.dims[:d], (*sharding.dims[d], axis), *sharding.dims[d + 1 :])
            if size > 1 and self.limits.allow_layout(v, Sharding(dims)):
                if size % (tiles * devices) == 0:
                    return None, True
                if size > tiles * devices:
                    undivided.append((size, tiles * devices))
        return max(undivided, default=None), False
