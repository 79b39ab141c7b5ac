"""The operators and collectives of a plan that take longest, for a report."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

from autopar.cost_model.program_cost import OpCost, phases_of
from autopar.ir.graph import Equation, Phase, Value
from autopar.ir.local import Accumulate, Compute, LocalOp, LocalProgram, Reread, Reshard, local_bytes
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.sharding import Sharding
from autopar.ir.units import array_text, bytes_text
from autopar.ir.why import Why
from autopar.passes.lower import LoweredStep
from autopar.planning.alternatives import Solved
from autopar.planning.finisher import Finisher
from autopar.planning.pricing import crossing_phase
from autopar.reporting.record import LinkUse, Operator

_MOST_ALTERNATIVES = 8  # that are asked for, of each operator
_TITLES = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather",
           "all_to_all": "all-to-all"}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class PricedProgram:
    """A program with the price of each of its operations."""

    local: LocalProgram
    runs: int  # per step
    costs: tuple[OpCost, ...]  # of one run
    launch: float  # seconds to start it
    hidden: float  # seconds by which a run is shorter, since collectives run beside kernels

    @functools.cached_property
    def exposed(self) -> float:
        """The share of the seconds of communication by which a run is longer."""
        communication = sum(cost.communication for cost in self.costs)
        return 1 - self.hidden / communication if self.hidden else 1.0

    @property
    def stage(self) -> int:
        return self.local.program.stage

    @property
    def phase(self) -> Phase:
        return self.local.program.phase

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """By operation: that of its equation, or of the equation before it."""
        return phases_of(self.local)

    @property
    def seconds(self) -> float:
        """Of one run."""
        return self.launch + sum(cost.seconds for cost in self.costs) - self.hidden


@dataclasses.dataclass(eq=False)
class OperatorRow:
    """Equal operators."""

    name: str
    source: str
    phase: Phase
    mesh: Mesh
    operands: tuple[str, ...]
    results: tuple[str, ...]
    collectives: tuple[str, ...]
    runs: int
    example: tuple[int, int, Equation] | None  # stage, program, equation
    is_heavy: bool  # a product, a convolution, or an equation with a body
    count: int = 0
    layers: set[int] = dataclasses.field(default_factory=set)
    compute: dict[int, float] = dataclasses.field(default_factory=lambda: defaultdict(float))  # by stage
    communication: dict[int, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        return max(self.compute[stage] + self.communication[stage] for stage in self.compute)

    def operator(self, whys: Sequence[Why]) -> Operator:
        busiest = max(self.compute, key=lambda stage: self.compute[stage] + self.communication[stage])
        return Operator(
            self.name, self.source, self.phase.value, tuple(sorted(self.compute)), tuple(sorted(self.layers)),
            self.mesh.text, self.count, self.runs, self.operands, self.results, self.compute[busiest],
            self.communication[busiest], self.collectives, tuple(whys),
        )  # fmt: skip

    def why(self, solved: Solved) -> Sequence[Why]:
        if self.example is None:
            return ()
        return solved.why(*self.example, _MOST_ALTERNATIVES)


def rows_of_operators(
    lowered: LoweredStep, programs: Sequence[PricedProgram], layer_of: Mapping[int, int]
) -> list[OperatorRow]:
    """All operators, equal ones as one, those that take longest first."""
    step = lowered.placed.step
    maker = {v: e for e in step.equations for v in e.outputs}
    paths = dict(zip(step.graph.inputs, step.graph.input_paths, strict=True))
    rows: dict[Hashable, OperatorRow] = {}
    for program in programs:
        mesh, where = program.local.mesh, (program.stage, program.local.program.index)
        names = {op.copy: op.value for op in program.local.ops if isinstance(op, Reread)}
        for op, cost, phase in zip(program.local.ops, program.costs, program.phases, strict=True):
            if isinstance(op, Reread):
                continue
            value = None if isinstance(op, Compute) else names.get(_value(op), _value(op))
            eqn = op.equation if isinstance(op, Compute) else maker.get(value) if value is not None else None
            source = (
                eqn.source if eqn is not None else _INDEX.sub("*", paths.get(value, "")) if value is not None else ""
            )
            key: Hashable
            if isinstance(op, Compute):
                # What is read anew is the same operator.
                key = op.equation.signature, op.operands, op.results
            elif isinstance(op, Reshard):
                key = op.value.shape, op.value.dtype, op.source, op.target
            else:
                key = op.partial_sum.shape, op.partial_sum.dtype, op.sharding
            key = key, type(op), source, phase, mesh.shape, mesh.axes, program.runs
            if key not in rows:
                rows[key] = _row(op, cost, source, phase, program, where, eqn)
            row = rows[key]
            row.count += 1
            row.compute[program.stage] += program.runs * cost.compute
            row.communication[program.stage] += program.runs * cost.communication
            if eqn is not None and eqn.id in layer_of:
                row.layers.add(layer_of[eqn.id])
    return sorted(rows.values(), key=lambda row: -row.seconds)


_INDEX = re.compile(r"(?<=\[)\d+(?=\])|(?<=_)\d+")


def _value(op: LocalOp) -> Value:
    assert isinstance(op, Reshard | Accumulate), "all others are equations"
    return op.value if isinstance(op, Reshard) else op.partial_sum


def _row(
    op: LocalOp, cost: OpCost, source: str, phase: Phase, program: PricedProgram, where: tuple[int, int],
    eqn: Equation | None,
) -> OperatorRow:  # fmt: skip
    sent = Counter((c.kind, c.axes, c.payload) for c in cost.collectives)
    collectives = tuple(
        f"{f'{number} × ' if number > 1 else ''}{_TITLES.get(kind, kind)} over {'·'.join(axes)}, {bytes_text(payload)}"
        for (kind, axes, payload), number in sent.items()
    )
    if isinstance(op, Compute):
        pairs = zip(op.equation.inputs, op.operands, strict=True)
        operands = [_array(v, s) for v, s in pairs if isinstance(v, Value) and s is not None]
        results = [_array(v, s) for v, s in zip(op.equation.outputs, op.results, strict=True)]
        name, example = op.equation.primitive.name, (*where, op.equation)
    elif isinstance(op, Reshard):
        operands, results = [_array(op.value, op.source)], [_array(op.value, op.target)]
        made = f" of {eqn.primitive.name}" if eqn is not None else ""
        name, example = f"{_TITLES.get(op.steps[0].kind, op.steps[0].kind)}{made}", None
    else:
        assert isinstance(op, Accumulate)
        operands, results = [_array(op.partial_sum, op.sharding)], [_array(op.total, op.sharding)]
        name, example = f"add to the sum{f' of {eqn.primitive.name}' if eqn is not None else ''}", None
    is_heavy = isinstance(op, Compute) and (op.product is not None or bool(op.kernels))
    return OperatorRow(
        name, source, phase, program.local.mesh, tuple(operands), tuple(results), collectives, program.runs, example,
        is_heavy,
    )  # fmt: skip


def _array(value: Value, sharding: Sharding) -> str:
    return f"{array_text(value.dtype, value.shape)} {sharding}"


def links_used(
    plan: Plan, lowered: LoweredStep, programs: Sequence[PricedProgram], finisher: Finisher
) -> tuple[LinkUse, ...]:
    """Collectives and transfers by kind, link, axes, stage and phase, the longest first."""
    prices = finisher.stages.prices
    totals: dict[tuple[str, str, str, int, str], tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))

    def add(key: tuple[str, str, str, int, str], number: int, nbytes: int, seconds: float) -> None:
        before = totals[key]
        totals[key] = before[0] + number, before[1] + number * nbytes, before[2] + number * seconds

    for program in programs:
        mesh = program.local.mesh
        price = prices.resharder(mesh)[1]
        for cost, phase in zip(program.costs, program.phases, strict=True):
            for c in cost.collectives:
                link = plan.cluster.link_among(mesh.group(c.axes)).name
                key = _TITLES.get(c.kind, c.kind), link, "·".join(c.axes), program.stage, phase.value
                add(key, program.runs, c.payload, price(c.kind, c.axes, c.payload))
    for crossing in lowered.crossings:
        phase = crossing_phase(crossing.value, lowered.placed)
        meshes = [lowered.shardings[stage].mesh for stage in (crossing.source, crossing.target)]
        link = plan.cluster.link_among([device for mesh in meshes for device in mesh.devices]).name
        key = "transfer", link, f"stage {crossing.source} → {crossing.target}", crossing.source, phase.value
        runs = plan.num_microbatches if phase.in_loop else 1
        add(key, runs, local_bytes(crossing.value, crossing.plan.received, meshes[1]), crossing.plan.seconds)
    uses = [LinkUse(*key, *numbers) for key, numbers in totals.items()]
    return tuple(sorted(uses, key=lambda use: -use.seconds))
