"""The last microbatch computed in one program with the update, so that XLA sends gradients while it still computes.

In a program of its own the update first sums the gradients over devices, and nothing runs meanwhile. In one with the
last microbatch, the gradients of the last layers can be on their way while those of the first are computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from autopar.ir.graph import Phase
from autopar.ir.local import Compute, LocalProgram, Port, Reshard
from autopar.ir.mesh import XlaBackend
from autopar.ir.rule import Rule
from autopar.ir.sharding import StepKind
from autopar.passes.merge_ops import merge_equal_ops
from autopar.passes.program_writer import in_order_of, live_ops

_SENDING: frozenset[StepKind] = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute"})


def pays(programs: Sequence[LocalProgram], xla: XlaBackend) -> bool:
    """Whether a step of these programs, all of one stage and several microbatches, is worth a program more.

    It is where XLA hides what is sent behind kernels, and the update sends more than XLA would combine in one
    collective. There must be one program for a microbatch.
    """
    if not xla.hides_latency or sum(p.program.in_loop for p in programs) != 1:
        return False
    return sum(map(_sent, _updates(programs))) > xla.collective_combine_threshold


def merged(
    programs: Sequence[LocalProgram], results: Collection[Port], replaced: Mapping[Port, Port],
    rules: Mapping[int, Rule],
) -> list[LocalProgram]:  # fmt: skip
    """The programs with one instead of those of the update, which begins with a microbatch.

    Args:
      programs: in order.
      results: what the step leaves.
      replaced: the next value of a leaf -> the leaf.
      rules: by equation id.
    """
    (loop,) = (p for p in programs if p.program.in_loop)
    updates = _updates(programs)
    made = set(loop.outputs)
    inputs = dict.fromkeys(loop.inputs)
    for update in updates:
        inputs.update(dict.fromkeys(port for port in update.inputs if port not in made))
        made.update(update.outputs)
    both = (loop, *updates)
    outputs = in_order_of(inputs, [port for p in both for port in p.outputs if port in results], replaced)
    ops = live_ops(merge_equal_ops([op for p in both for op in p.ops], outputs, rules), outputs)
    program = dataclasses.replace(
        next((p.program for p in updates if p.program.equations), updates[-1].program), name="last_microbatch",
        equations=tuple(eqn for p in both for eqn in p.program.equations),
        inputs=tuple(dict.fromkeys(port.value for port in inputs)),
        outputs=tuple(dict.fromkeys(port.value for port in outputs)),
        copies=frozenset(v for p in both for v in p.program.copies),
    )  # fmt: skip
    last = LocalProgram(program, loop.mesh, ops, tuple(inputs), outputs)
    return [*(p for p in programs if p not in updates), last]


def _updates(programs: Sequence[LocalProgram]) -> list[LocalProgram]:
    return [p for p in programs if p.program.phase is Phase.UPDATE]


def _sent(local: LocalProgram) -> int:
    """Bytes of all that a device sends in a program."""
    total = 0
    for op in local.ops:
        if isinstance(op, Reshard) and any(step.kind in _SENDING for step in op.steps):
            ends = (op.source, op.target)
            total += op.value.itemsize * max(math.prod(s.local_shape(op.value.shape, local.mesh)) for s in ends)
        elif isinstance(op, Compute):
            total += sum(each.payload for each in op.combined)
    return total
