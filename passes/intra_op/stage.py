"""What of a stage's programs no mesh changes: it is found once for all problems of the stage."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from autopar.cost_model.compute import accumulate_seconds
from autopar.ir.graph import Equation, Value
from autopar.ir.local import Traffic
from autopar.ir.mesh import DeviceKind, XlaBackend
from autopar.ir.program import PlacedStep, Program
from autopar.ir.rule import Rule
from autopar.ir.same import signature_of
from autopar.ir.sharding import Sharding
from autopar.passes.intra_op.alike import alike_equations
from autopar.passes.intra_op.lifetimes import least_seconds, lifetimes, peak_positions
from autopar.passes.intra_op.strategies import can_sum, part_operands
from autopar.passes.intra_op.traffic import KnownTraffic


class EquationPart(NamedTuple):
    """What of an equation of a stage gets one axis assignment: all of it, or one result, see `Rule.parts`."""

    equation: Equation
    rule: Rule  # the equation's
    at: int  # among those of the equation
    partial_sums: frozenset[int]  # operands of the part that can be partial sums
    traffic: Traffic  # the equation's
    role: Hashable  # equal where `at`, `partial_sums` and `traffic` are
    signature: Hashable  # equal for parts that have the same strategies, but for limits, at the same costs
    inputs: Sequence[tuple[int, Value]]  # with their places among the operands of the part
    outputs: Sequence[Value]


class Stage:
    """One stage of a placed step."""

    def __init__(
        self, placed: PlacedStep, index: int, rules: Mapping[int, Rule], pinned: Mapping[Value, Sharding],
        xla: XlaBackend, traffic: KnownTraffic,
    ) -> None:  # fmt: skip
        """`rules` by equation id; `pinned`: inputs of the stage that lie somewhere already.

        `xla`: the cluster's compiler. `traffic`: of other stages, too.
        """
        self.placed, self.index, self.rules, self.pinned = placed, index, rules, pinned
        self.step = placed.step
        self.programs = [p for p in placed.programs if p.stage == index]
        self._xla, self._known_traffic = xla, traffic
        self._least: dict[str, list[tuple[float, float]]] = {}
        self._state: dict[tuple[int, ...], float] = {}

    @functools.cached_property
    def traffic(self) -> Mapping[int, Mapping[int, Traffic]]:
        """By program and equation id: what each equation reads and writes."""
        return {p.index: self._known_traffic.of(p, self.rules, self._xla) for p in self.programs}

    def state_bytes(self, mesh_shape: tuple[int, ...]) -> float:
        """Bytes of the state on each device of a mesh of this shape, every leaf cut as finely as it can be."""
        if mesh_shape not in self._state:
            graph = self.step.graph
            carried = [graph.inputs[i] for i in graph.carried.values()]
            mine = [v for v in carried if self.placed.home[v] == self.index]
            self._state[mesh_shape] = sum(v.nbytes / most_pieces(v.shape, mesh_shape) for v in mine)
        return self._state[mesh_shape]

    @functools.cached_property
    def _summed(self) -> int:
        """Bytes of the running sums that each microbatch reads with its partial sums, and writes."""
        made = {v for p in self.programs if p.in_loop for v in p.outputs}
        return sum(total.nbytes for partial_sum, total in self.step.accumulate.items() if partial_sum in made)

    @functools.cached_property
    def lives(self) -> Mapping[int, Mapping[Value, tuple[int, int]]]:
        """By program: the positions between which each value that it writes to memory is live."""
        partial_sums = self.step.accumulate.keys() - set(self.step.outputs)
        return {p.index: lifetimes(p, self.rules, self.traffic[p.index], partial_sums) for p in self.programs}

    @functools.cached_property
    def peaks(self) -> Mapping[int, list[int]]:
        """By program: positions where most is live."""
        return {p.index: peak_positions(p, self.rules, self.lives[p.index]) for p in self.programs}

    @functools.cached_property
    def partial_sums(self) -> frozenset[Value]:
        """Values that can be partial sums: a sum over a split factor, or linear in such a value."""
        sums: set[Value] = set()
        for program in self.programs:
            for eqn in program.equations:
                rule = self.rules[eqn.id]
                for index, part in enumerate(rule.parts):
                    positions = part_operands(eqn, rule, index)
                    partial = {i for i, p in enumerate(positions) if eqn.inputs[p] in sums}
                    if can_sum(part) or any(partial & operands for operands in part.linear):
                        sums.update([eqn.outputs[index]] if rule.separable else eqn.outputs)
            sums.update(w for v, w in self.step.accumulate.items() if v in sums)
            sums.update(w for v, ws in self.step.keep.items() if v in sums for w in ws)
        return frozenset(sums)

    @functools.cached_property
    def parts(self) -> Mapping[int, list[EquationPart]]:
        """Those of all equations in order, by program."""
        by_program: dict[int, list[EquationPart]] = {}
        for program in self.programs:
            traffic, parts = self.traffic[program.index], by_program.setdefault(program.index, [])
            for eqn in program.equations:
                rule = self.rules[eqn.id]
                for index in range(len(rule.parts)):
                    operands = [eqn.inputs[p] for p in part_operands(eqn, rule, index)]
                    inputs = [(place, v) for place, v in enumerate(operands) if isinstance(v, Value)]
                    partial_sums = frozenset([place for place, v in inputs if v in self.partial_sums])
                    role = signature_of(None, (index, partial_sums, traffic[eqn.id]))
                    signature = signature_of(None, (eqn.signature, role))
                    outputs = [eqn.outputs[index]] if rule.separable else eqn.outputs
                    parts.append(
                        EquationPart(eqn, rule, index, partial_sums, traffic[eqn.id], role, signature, inputs, outputs)
                    )
        return by_program

    @functools.cached_property
    def alike(self) -> Mapping[tuple[int, int], int]:
        """A number per (program, equation id), the same for equations that may be tied."""
        step = self.step
        inputs, outputs = set(step.graph.inputs), {v for v in step.outputs if isinstance(v, Value)}

        def signature(program: Program, eqn: Equation) -> Hashable:
            arrays = tuple((v.shape, v.dtype, v in self.partial_sums) for v in (*eqn.inputs, *eqn.outputs))
            return (program.index, self.rules[eqn.id].key, arrays)

        def kind(v: Value) -> Hashable:
            at_home = self.placed.home[v] == self.index if v in inputs else v in step.constants
            pins = self.pinned.get(v), step.hints.get(v)
            return (v.shape, v.dtype, v in inputs, at_home, v in outputs, pins)

        return alike_equations(self.programs, signature, kind)

    def least_seconds(self, kind: DeviceKind, num_devices: int) -> tuple[float, float]:
        """Seconds per microbatch, and once a step, that no sharding over so many devices can beat."""
        if kind.name not in self._least:
            self._least[kind.name] = [least_seconds(p, self.rules, self.traffic[p.index], kind) for p in self.programs]
        seconds = [accumulate_seconds(kind, self._summed / num_devices), 0.0]
        for program, (shared, fixed) in zip(self.programs, self._least[kind.name], strict=True):
            seconds[not program.in_loop] += shared / num_devices + fixed
        return seconds[0], seconds[1]


@functools.cache
def most_pieces(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> int:
    """Into how many pieces, at most, a mesh cuts an array: each of its axes cuts one dimension, or none.

    >>> most_pieces((3, 8192), (24,)), most_pieces((3, 8192), (3, 8)), most_pieces((), (2,))
    (1, 24, 1)
    """
    most = 1
    for where in itertools.product(range(-1, len(shape)), repeat=len(mesh_shape)):
        pieces = [1] * len(shape)
        for size, dim in zip(mesh_shape, where, strict=True):
            if dim >= 0:
                pieces[dim] *= size
        if all(length % n == 0 for length, n in zip(shape, pieces, strict=True)):
            most = max(most, math.prod(pieces))
    return most
