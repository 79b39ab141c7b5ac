"""The order in which a compiled program issues its kernels and collectives, read from XLA's text.

XLA's compilers for GPUs write a computation in the order in which it runs. A collective that runs beside kernels is two
instructions, its start and its end (`…-done`).
"""

from __future__ import annotations

import dataclasses

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Collective
from autopar.runtime.hlo import HloCollectives
from autopar.runtime.hlo_text import Module, parse
from autopar.runtime.hlo_traffic import HloKernel, HloKernels


@dataclasses.dataclass(frozen=True)
class HloIssued:
    """What one instruction issues: kernels, collectives, or the one end of collectives; a loop all of its rounds."""

    kernels: tuple[HloKernel, ...]
    collectives: tuple[Collective, ...]
    starts: bool = True
    ends: bool = True
    # Of a loop, what one of its rounds issues, in order, and how many there are.
    round: tuple[HloIssued, ...] = ()
    rounds: int = 0


def schedule_in_hlo(text: str, mesh: Mesh) -> tuple[HloIssued, ...]:
    """What the instructions of the entry computation issue, in their order.

    Raises InternalError for what cannot be counted: see `kernels_in_hlo`, `collectives_in_hlo`.
    """
    module = parse(text)
    return _issued(module, HloKernels(module), HloCollectives(module, mesh), module.entry)


def _issued(
    module: Module, kernels: HloKernels, collectives: HloCollectives, computation: str
) -> tuple[HloIssued, ...]:  # fmt: skip
    body = module.computations[computation]
    under_way: dict[str, tuple[Collective, ...]] = {}
    issued: list[HloIssued] = []
    for instruction in body.values():
        if instruction.opcode.endswith("-done"):
            if sent := under_way.pop(instruction.operands[0], ()):
                issued.append(HloIssued((), sent, starts=False))
            continue
        sent = tuple(collectives.of(instruction, computation))
        if sent and instruction.opcode.endswith("-start"):
            under_way[instruction.name] = sent
            issued.append(HloIssued((), sent, ends=False))
        elif launched := tuple(kernels.of(instruction, body)):
            called = instruction.computations("body") if instruction.opcode == "while" else ()
            inside = tuple(each for name in called for each in _issued(module, kernels, collectives, name))
            issued.append(HloIssued(launched, sent, round=inside, rounds=instruction.trips or 0))
        elif sent:
            issued.append(HloIssued((), sent))
    return tuple(issued)
