"""Memory traffic of programs, found once for all that do the same.

The update of a layer is the same program in any number of microbatches, and in every layer; stages with the same layers
run the same programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

from autopar.cost_model.fusion import memory_traffic
from autopar.ir.graph import Equation, Operand, Value
from autopar.ir.local import Traffic
from autopar.ir.mesh import XlaBackend
from autopar.ir.program import Program
from autopar.ir.rule import Rule


class KnownTraffic:
    """That of the programs which were asked for."""

    def __init__(self) -> None:
        # By what the equations do and how they are wired: their traffic, in order, each with that of them with which
        # its kernel begins.
        self._known: dict[Hashable, list[tuple[Traffic, int]]] = {}

    def of(
        self, program: Program, rules: Mapping[int, Rule], xla: XlaBackend,
        shapes: Mapping[Value, tuple[int, ...]] = MappingProxyType({}),
    ) -> dict[int, Traffic]:  # fmt: skip
        """See `memory_traffic`."""
        equations = program.equations
        key = (xla, *_signature(program, shapes))
        known = self._known.get(key)
        if known is None:
            traffic = memory_traffic(equations, rules, program.inputs, program.outputs, xla=xla, shapes=shapes)
            at = {eqn.id: k for k, eqn in enumerate(equations)}
            self._known[key] = [(traffic[eqn.id], at[traffic[eqn.id].kernel]) for eqn in equations]
            return traffic
        return {
            eqn.id: dataclasses.replace(traffic, kernel=equations[first].id)
            for eqn, (traffic, first) in zip(equations, known, strict=True)
        }


def _signature(program: Program, shapes: Mapping[Value, tuple[int, ...]]) -> Sequence[Hashable]:
    """Equal for programs that do the same, to pieces of the same shapes."""
    numbers: dict[Value, int] = {}

    def name(operand: Operand) -> int:
        return numbers.setdefault(operand, len(numbers)) if isinstance(operand, Value) else -1

    def signature(eqn: Equation) -> Hashable:
        return eqn.signature, *map(name, (*eqn.inputs, *eqn.outputs))

    does = [*map(signature, program.equations), *map(name, (*program.inputs, *program.outputs)), len(program.inputs)]
    return [*does, *map(shapes.get, numbers)] if shapes else does
