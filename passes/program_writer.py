"""Writes one program of a stage as a list of local equations, reshard steps and accumulations."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from autopar.cost_model.reshard import Resharder, step_result
from autopar.ir.graph import Equation, Phase, Value
from autopar.ir.local import (
    Accumulate,
    Compute,
    LocalKernel,
    LocalOp,
    LocalProgram,
    LocalRound,
    Port,
    Reread,
    Reshard,
    StageSharding,
    Traffic,
)
from autopar.ir.mesh import Mesh, ProductSizes, XlaBackend
from autopar.ir.program import Program
from autopar.ir.rule import Rule, product_sizes
from autopar.ir.sharding import Collective, Sharding
from autopar.ir.strategy import REPLICATED, AxisAssignment, Split, Strategy
from autopar.passes.emit import combination
from autopar.passes.intra_op.strategies import (
    combined_axes,
    cut_and_gathered,
    exchanges,
    inner_collectives,
    local_kernels,
    local_round,
    operand_shardings,
    packing,
    result_shardings,
    temporaries,
)
from autopar.passes.merge_ops import merge_equal_ops

# Steps of a resharding that send each element as it is.
_SENDING = frozenset({"all_gather", "all_to_all", "permute"})


def results_of(rule: Rule, strategy: Sequence[AxisAssignment], mesh: Mesh) -> tuple[Sharding, ...]:
    """How a strategy leaves the results of an equation."""
    return tuple(
        s for part, assignment in zip(rule.parts, strategy, strict=True)
        for s in result_shardings(part, assignment, mesh)
    )  # fmt: skip


def _operands(rule: Rule, strategy: Sequence[AxisAssignment], mesh: Mesh) -> tuple[Sharding, ...]:
    return tuple(
        s for part, assignment in zip(rule.parts, strategy, strict=True)
        for s in operand_shardings(part, assignment, mesh)
    )  # fmt: skip


def _assignment_that_cuts(rule: Rule, sharding: Sharding, mesh: Mesh) -> AxisAssignment:
    """The assignment with the operand in the pieces of a sharding, whatever the order of its axes."""
    split = {axis: Split(dim[0]) for along, dim in zip(sharding.dims, rule.inputs[0], strict=True) for axis in along}
    return tuple(split.get(axis, REPLICATED) for axis in mesh.axes)


@dataclasses.dataclass(frozen=True, eq=False)
class _Way:
    """What all equations that are alike come to on local pieces by one strategy; see `Compute`."""

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    flops: float
    product: ProductSizes | None
    kernels: tuple[LocalKernel, ...]
    temporaries: int
    combined: tuple[Collective, ...]
    round: LocalRound | None


class ProgramWriter:
    """Writes one local program."""

    def __init__(
        self, program: Program, sharding: StageSharding, rules: Mapping[int, Rule], resharder: Resharder,
        batched: Collection[Value], traffic: Mapping[int, Traffic], xla: XlaBackend,
    ) -> None:  # fmt: skip
        """`batched`: the values that depend on examples; `traffic`: of the local equations, by id."""
        self.program, self.sharding, self.rules, self.resharder = program, sharding, rules, resharder
        self.batched, self.hides_latency = batched, xla.hides_latency
        self.traffic = traffic
        self.ops: list[LocalOp] = []
        self.inputs: list[Port] = []
        self.outputs: dict[Port, None] = {}
        self.have: dict[Value, list[Sharding]] = {}
        self.written: dict[Value, int] = {}  # how many operations there were when it was made in memory
        self.readers: dict[Value, list[Equation]] = defaultdict(list)
        for eqn in program.equations:
            for value in eqn.values:
                self.readers[value].append(eqn)
        self.named: dict[tuple[Value, Phase], Value] = {}  # what stands for a value in a pass that gathers it
        self._ways: dict[Hashable, _Way] = {}

    def arrive(self, value: Value, sharding: Sharding) -> None:
        self.inputs.append(Port(value, sharding))
        self.have[value] = [sharding]

    def want(self, value: Value, target: Sharding) -> None:
        """Make a value available in a sharding, by way of its layout."""
        layout = self.sharding.layout(self.program, value)
        for goal in ([layout] if layout is not None else []) + [target]:
            have = self.have[value]
            if goal in have or target in have:
                continue

            def effort(source: Sharding, goal: Sharding = goal) -> tuple[bool, int, float]:
                seconds = self.resharder.time(value.shape, value.itemsize, source, goal)
                return math.isinf(seconds), len(set(source.partial) - set(goal.partial)), seconds

            # What has been summed is not summed again in another way: readers would see different rounding, and the
            # gradient of a maximum, which looks for the elements that equal it, might find none.
            source = min(have, key=effort)
            # Step by step, so that what lies between serves other goals too and nothing is sent twice.
            for step in self.resharder.plan(value.shape, value.itemsize, source, goal):
                reached = step_result(step, source)
                if reached not in have:
                    self.ops.append(Reshard(value, source, reached, (step,)))
                    have.append(reached)
                source = reached

    def _way(self, eqn: Equation, strategy: Strategy) -> _Way:
        """Found once for all that are alike."""
        rule = self.rules[eqn.id]
        key = (eqn.signature, id(rule), strategy)
        if key not in self._ways:
            self._ways[key] = self._found(eqn, rule, strategy)
        return self._ways[key]

    def _found(self, eqn: Equation, rule: Rule, strategy: Strategy) -> _Way:
        mesh = self.sharding.mesh
        operands, results = _operands(rule, strategy, mesh), results_of(rule, strategy, mesh)
        if rule.separable:
            work, product = rule.work({}), product_sizes(rule.sides, {})
            return _Way(operands, results, work, product, local_kernels(rule, {}, None), 0, (), None)
        cut = cut_and_gathered(rule, strategy[0], mesh)
        combined = tuple(
            combination(operation, axes, v, s, mesh)
            for operation, axes in combined_axes(rule, strategy[0], mesh).items()
            for v, s in zip(eqn.outputs, results, strict=True)
        ) + tuple(
            collective
            for collective, times in inner_collectives(rule, strategy[0], mesh)
            for _ in range(times)
        )  # fmt: skip
        round_ = local_round(rule, strategy[0], mesh) if combined and self.hides_latency else None
        inside = math.ceil(temporaries(rule, strategy[0], mesh)) + (0 if round_ is None else sum(round_.handed_on))
        kernels = local_kernels(rule, cut, round_) + self._packing(eqn, rule, strategy)
        work, product = rule.work(cut), product_sizes(rule.sides, cut)
        return _Way(operands, results, work, product, kernels, inside, combined, round_)

    def compute(self, eqn: Equation) -> None:
        rule = self.rules[eqn.id]
        strategy = self.sharding.strategies[self.program.index, eqn.id]
        way = self._way(eqn, strategy)
        wanted, results = way.operands, way.results
        held = self._held_to_narrow(eqn, wanted[0]) if self._narrows(eqn) else None
        if held is not None:
            strategy, wanted, results = (_assignment_that_cuts(rule, held, self.sharding.mesh),), (held,), (held,)
            way = self._way(eqn, strategy)
        operands = []
        if self.sharding.reshard_after_forward and eqn.phase.in_loop:
            eqn = self._anew(eqn, wanted)
        for v, sharding in zip(eqn.inputs, wanted, strict=True):
            if isinstance(v, Value):
                self.want(v, sharding)
            operands.append(sharding if isinstance(v, Value) else None)
        self.ops.append(
            Compute(
                eqn,
                strategy,
                tuple(operands),
                results,
                way.flops,
                way.product,
                self.traffic[eqn.id],
                rule.separable,
                way.kernels,
                way.temporaries,
                way.combined,
                rule.pooling,
                way.round,
            )
        )
        for v, sharding, written in zip(eqn.outputs, results, self.traffic[eqn.id].writes, strict=True):
            self.have[v] = [sharding]
            if written:
                self.written[v] = len(self.ops)

    def _packing(self, eqn: Equation, rule: Rule, strategy: Strategy) -> tuple[LocalKernel, ...]:
        """Moving what pieces of positions send one another in memory, as one kernel."""
        nbytes, launches = packing(rule, strategy[0], self.sharding.mesh) if rule.contexts else (0.0, 0.0)
        return (LocalKernel(0.0, nbytes, None, str(eqn.outputs[0].dtype), launches),) if launches else ()

    def _narrows(self, eqn: Equation) -> bool:
        """Whether each element of the result is made of one of the operand's, alone, and has fewer bytes."""
        if len(eqn.inputs) != 1 or not isinstance(eqn.inputs[0], Value) or len(eqn.outputs) != 1:
            return False
        rule = self.rules[eqn.id]
        alone = rule.inputs == rule.outputs and all(len(dim) == 1 for dim in rule.inputs[0]) and not rule.kernels
        return alone and eqn.outputs[0].itemsize < eqn.inputs[0].itemsize

    def _held_to_narrow(self, eqn: Equation, wanted: Sharding) -> Sharding | None:
        """How the operand lies, if it would be sent for nothing else than to be narrowed: what is sent is less then.

        XLA exchanges a collective and a conversion, too, but not on every backend.
        """
        value = eqn.inputs[0]
        assert isinstance(value, Value)
        held = self.have[value][0]
        if held.partial or wanted.partial or wanted in self.have[value] or value in self.program.outputs:
            return None
        if not all(self._narrows(other) for other in self.readers[value]):
            return None
        rule = self.rules[eqn.id]
        cut = {factor for along, dim in zip(held.dims, rule.inputs[0], strict=True) if along for factor in dim}
        steps = self.resharder.plan(value.shape, value.itemsize, held, wanted)
        sent = bool(steps) and all(step.kind in _SENDING for step in steps)
        return held if sent and cut <= set(rule.splittable) else None

    def _anew(self, eqn: Equation, wanted: Sequence[Sharding]) -> Equation:
        """The equation, reading what does not depend on examples, and is gathered, under a name of its pass.

        The gathers wait for what was made last of its operands, if that is in memory: else XLA would do all of them
        when a program begins.
        """
        made = {v: s for v, s in zip(eqn.inputs, wanted, strict=True) if isinstance(v, Value) and v in self.written}
        latest = sorted(made, key=self.written.__getitem__, reverse=True)
        inputs = list(eqn.inputs)
        for i, (v, target) in enumerate(zip(eqn.inputs, wanted, strict=True)):
            if not isinstance(v, Value) or v in self.batched:
                continue
            held = self.sharding.layout(self.program, v) or self.have[v][0]
            if held.partial or target in (held, self.have[v][0]):
                continue
            steps = self.resharder.plan(v.shape, v.itemsize, held, target)
            if (v, eqn.phase) not in self.named and any(step.kind == "all_gather" for step in steps):
                after = next((u for u in latest if u is not v), None)
                if after is not None:
                    self.want(after, made[after])
                copy = self.named[v, eqn.phase] = dataclasses.replace(v)
                self.want(v, held)
                self.ops.append(Reread(v, held, copy, None if after is None else (after, made[after])))
                self.have[copy] = [held]
            inputs[i] = self.named.get((v, eqn.phase), v)
        return dataclasses.replace(eqn, inputs=tuple(inputs))

    def accumulate(self, value: Value, total: Value, sharding: Sharding) -> None:
        self.want(value, sharding)
        self.ops.append(Accumulate(value, total, sharding))
        self.inputs.append(Port(total, sharding))
        self.outputs[Port(total, sharding)] = None

    def leave(self, value: Value, sharding: Sharding) -> None:
        self.want(value, sharding)
        self.outputs[Port(value, sharding)] = None

    def finish(self, replaced: Mapping[Port, Port]) -> LocalProgram:
        """The program. Outputs that replace an input stand in the inputs' order: JAX pairs donated buffers with
        outputs of their shape one by one, and XLA copies what lands in a buffer that is still to be read."""
        ops = live_ops(merge_equal_ops(self.ops, self.outputs, self.rules), self.outputs)
        ops = _with_exchanges(ops, self.rules, self.sharding.mesh)
        outputs = in_order_of(self.inputs, self.outputs, replaced)
        return LocalProgram(self.program, self.sharding.mesh, ops, tuple(self.inputs), outputs)


def in_order_of(inputs: Iterable[Port], outputs: Iterable[Port], replaced: Mapping[Port, Port]) -> tuple[Port, ...]:
    """The outputs, those that replace an input in the inputs' order, each once."""
    position = {port: i for i, port in enumerate(inputs)}
    once = dict.fromkeys(outputs)
    return tuple(sorted(once, key=lambda port: position.get(replaced.get(port, port), len(position))))


def live_ops(ops: Sequence[LocalOp], outputs: Iterable[Port]) -> tuple[LocalOp, ...]:
    """The operations that some output needs: readers may find a shorter way than by a value's layout."""
    needed = {(port.value, port.sharding) for port in outputs}
    kept: list[LocalOp] = []
    for op in reversed(ops):
        if isinstance(op, Accumulate):
            needed.add((op.partial_sum, op.sharding))
        elif isinstance(op, Reread):
            if (op.copy, op.sharding) not in needed:
                continue
            needed.update({(op.value, op.sharding), *([op.after] if op.after else [])})
        elif isinstance(op, Reshard):
            if (op.value, op.target) not in needed:
                continue
            needed.add((op.value, op.source))
        else:
            eqn = op.equation
            if not any(made in needed for made in zip(eqn.outputs, op.results, strict=True)):
                continue
            wanted = zip(eqn.inputs, op.operands, strict=True)
            needed.update((v, s) for v, s in wanted if isinstance(v, Value) and s is not None)
        kept.append(op)
    return tuple(reversed(kept))


def _with_exchanges(ops: Sequence[LocalOp], rules: Mapping[int, Rule], mesh: Mesh) -> tuple[LocalOp, ...]:
    """Each exchange of a halo at the first equation that needs it."""
    made: set[tuple[object, ...]] = set()
    with_exchanges: list[LocalOp] = []
    for op in ops:
        if isinstance(op, Compute) and (rule := rules[op.equation.id]).halos:
            new = []
            for exchange in exchanges(rule, op.strategy[0], mesh):
                i = exchange.operand
                key = (op.equation.inputs[i], op.operands[i], dataclasses.replace(exchange, operand=0))
                if key not in made:
                    made.add(key)
                    new.append(exchange.collective)
            op = dataclasses.replace(op, combined=(*op.combined, *new))
        with_exchanges.append(op)
    return tuple(with_exchanges)
