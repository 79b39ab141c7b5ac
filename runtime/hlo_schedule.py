"""The order in which a compiled program issues its kernels and collectives, read from XLA's text.

XLA's compilers for GPUs write a computation in the order in which it runs. A collective that runs beside kernels is two
instructions, its start and its end (`…-done`).
"""

from __future__ import annotations

import dataclasses

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Collective
from autopar.runtime.hlo import HloCollectives
from autopar.runtime.hlo_text import parse
from autopar.runtime.hlo_traffic import HloKernel, HloKernels


@dataclasses.dataclass(frozen=True)
class HloIssued:
    """What one instruction issues: kernels, collectives, or the one end of collectives; a loop all of its rounds."""

    kernels: tuple[HloKernel, ...]
    collectives: tuple[Collective, ...]
    starts: bool = True
    ends: bool = True


def schedule_in_hlo(text: str, mesh: Mesh) -> tuple[HloIssued, ...]:
    """What the instructions of the entry computation issue, in their order.

    Raises InternalError for what cannot be counted: see `kernels_in_hlo`, `collectives_in_hlo`.
    """
    module = parse(text)
    kernels, collectives = HloKernels(module), HloCollectives(module, mesh)
    body = module.computations[module.entry]
    under_way: dict[str, tuple[Collective, ...]] = {}
    issued: list[HloIssued] = []
    for instruction in body.values():
        if instruction.opcode.endswith("-done"):
            if sent := under_way.pop(instruction.operands[0], ()):
                issued.append(HloIssued((), sent, starts=False))
            continue
        sent = tuple(collectives.of(instruction, module.entry))
        if sent and instruction.opcode.endswith("-start"):
            under_way[instruction.name] = sent
            issued.append(HloIssued((), sent, ends=False))
        elif launched := tuple(kernels.of(instruction, body)):
            issued.append(HloIssued(launched, sent))
        elif sent:
            issued.append(HloIssued((), sent))
    return tuple(issued)
