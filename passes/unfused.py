"""Attention with all scores in memory: what it costs in a plan, and what it would as one operator."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core

from autopar.cost_model.attention import attention_share
from autopar.cost_model.compute import peak_flops
from autopar.cost_model.program_cost import kernel_seconds, op_costs
from autopar.cost_model.reshard import StepPrice
from autopar.ir.graph import Equation, Phase
from autopar.ir.local import Compute, LocalKernel
from autopar.ir.mesh import Attention, DeviceKind, Mesh
from autopar.ir.rule import BodyKernel, Rule, product_sizes
from autopar.ir.units import seconds_text
from autopar.ops.attention import in_one_block
from autopar.passes.lower import LoweredStep
from autopar.passes.rules.loop_kernels import LoopLayout, kernels_of_rounds
from autopar.passes.rules.nested import make_body
from autopar.passes.rules.plain_attention import plain_attention
from autopar.passes.rules.table import rule_of
from autopar.tracing.build import source_of

_LEAST_SHARE = 0.1  # of a step's time: what is less is not worth a note
_LONG, _WIDTH = 4096.0, 128.0  # positions and width of a head for which the speed of a kernel is estimated


@dataclasses.dataclass
class _Line:
    """Attention in one line of the user's, on a device of the stage where it takes longest."""

    seconds: float = 0.0  # of a step
    fused: float = 0.0  # of the kernels that would do the same
    in_loop: bool = False  # whose backward pass is another loop, where nothing tells what the scores are
    backward: bool = False  # whether some of it is of the backward pass

    @property
    def told(self) -> str:
        """Whether it is all that there is."""
        return "in its forward pass" if self.in_loop and not self.backward else "about"


def unfused_notes(
    lowered: LoweredStep, kind_of: Callable[[Mesh], DeviceKind], price_of: Callable[[Mesh], StepPrice],
    step_time: float,
) -> list[str]:  # fmt: skip
    """For each line with attention that takes over a tenth of the step on GPUs: what fused attention would take.

    Args:
      lowered: the programs of the plan.
      kind_of, price_of: of a stage's mesh the kind of device, and the price of collectives.
      step_time: seconds.
    """
    equations = {eqn.id: eqn for program in lowered.placed.programs for eqn in program.equations}
    plain = plain_attention([*equations.values()], lowered.rules)
    stages: dict[int, dict[str, _Line]] = defaultdict(lambda: defaultdict(_Line))
    for local in lowered.programs:
        kind = kind_of(local.mesh)
        if not kind.multiprocessors:
            continue
        often = lowered.loop_microbatches if local.program.in_loop else 1
        for op, cost in zip(local.ops, op_costs(local, kind, price_of(local.mesh)), strict=True):
            if not isinstance(op, Compute):
                continue
            inside = [kernel for kernel in op.kernels if kernel.plain_attention]
            if inside:
                line, seconds = _line_inside(op.equation), sum(kernel_seconds(kernel, kind) for kernel in inside)
                products = [(kernel.flops, kernel.dtype) for kernel in inside if kernel.product is not None]
            elif op.equation.id in plain:
                line, seconds = plain[op.equation.id].source, cost.seconds
                products = [(op.flops, op.equation.kernel_dtype(True))] if op.product is not None else []
            else:
                continue
            entry = stages[local.program.stage][line or "an unknown line"]
            entry.seconds += often * seconds
            entry.fused += often * sum(_fused_seconds(*product, op.equation, kind) for product in products)
            entry.in_loop |= bool(inside)
            entry.backward |= op.equation.phase is Phase.BACKWARD
    worst: dict[str, _Line] = {}
    for lines in stages.values():
        for line, entry in lines.items():
            if entry.seconds > worst.get(line, _Line()).seconds:
                worst[line] = entry
    return [
        f"attention at {line} has all its scores in memory and takes {entry.told} {entry.seconds / step_time:.0%} of "
        f"the step ({seconds_text(entry.seconds)}): autopar.dot_product_attention would take about "
        f"{seconds_text(entry.fused)}"
        for line, entry in sorted(worst.items(), key=lambda item: -item[1].seconds)
        if step_time and entry.seconds >= _LEAST_SHARE * step_time and entry.fused < entry.seconds
    ]


@dataclasses.dataclass(frozen=True)
class Unfused:
    """What a piece of attention as one operator would be as two products around a softmax."""

    seconds: float
    scores: int  # bytes of one array of them


def as_products(eqn: Equation, shapes: Sequence[Sequence[int]], kind: DeviceKind) -> Unfused | None:
    """Of operands of these shapes, those of one device; None if the equation is no attention as one operator."""
    if eqn.primitive.name not in ("attention", "attention_backward"):
        return None
    avals = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, eqn.inputs, strict=True)]
    closed = jax.make_jaxpr(in_one_block(eqn.primitive.name, eqn.params))(*avals)
    positions = range(len(avals))
    body = make_body(avals, [(closed, positions)], rule_of)
    kernels = [kernel for kernel, _ in kernels_of_rounds(body, [], LoopLayout(positions, ()), 1.0)]
    seconds = sum(kernel_seconds(_whole(kernel), kind) for kernel in kernels)
    (batch, length, heads, _), (_, keys, *_) = shapes[:2]
    return Unfused(seconds, 4 * batch * heads * length * keys)


def _whole(kernel: BodyKernel) -> LocalKernel:
    moved = sum(nbytes for nbytes, _ in kernel.traffic)
    product = product_sizes(kernel.sides, {})
    return LocalKernel(kernel.flops, moved, product, kernel.dtype, kernel.times, kernel.pooling, kernel.rounds)


def unfused_hint(equations: Sequence[Equation], rules: Mapping[int, Rule]) -> str:
    """For a step that does not fit: where attention has all its scores in memory, and what does without; or ""."""
    lines = [anchor.source for anchor in plain_attention(equations, rules).values()]
    lines += [_line_inside(eqn) for eqn in equations if any(k.plain_attention for k in rules[eqn.id].kernels)]
    if not lines:
        return ""
    return f"Attention at {lines[0]} has all its scores in memory; autopar.dot_product_attention does without them."


def _line_inside(loop: Equation) -> str:
    """The line of the largest exponential in the body of an equation; its own where the body says none."""

    def exponentials(params: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
        for jaxpr in jex_core.jaxprs_in_params(params):
            for eqn in jaxpr.eqns:
                if eqn.primitive.name == "exp":
                    result: Any = eqn.outvars[0].aval
                    yield math.prod(result.shape), source_of(eqn)
                yield from exponentials(eqn.params)

    lines = sorted((size, line) for size, line in exponentials(loop.params) if line)
    return lines[-1][1] if lines else loop.source


def _fused_seconds(flops: float, dtype: str, eqn: Equation, kind: DeviceKind) -> float:
    """Of a product that is a part of fused attention; its backward pass has five instead of four of them."""
    backward = eqn.phase is Phase.BACKWARD and not eqn.rematerialized
    speed = attention_share(Attention(_LONG, False, _WIDTH, backward)) * peak_flops(kind, dtype, matmul=True)
    return (1.25 if backward else 1.0) * flops / speed
