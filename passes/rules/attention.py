"""Attention as one operator (`autopar.dot_product_attention`): examples and heads can be cut.

One kernel computes all of it, so that the scores are never in memory: it reads its operands once and writes its
results, with statistics of a number for each query and head instead of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.ir.graph import Equation
from autopar.ir.mesh import Attention
from autopar.ir.rule import BodyKernel, DimMap, Local, Rule, Sides, bind
from autopar.passes.rules.building import DimFactors, Factors, RuleBuilder, is_number, linear_if_wide


class _Sizes:
    """The factors of attention: examples B, shared heads K, heads that share one G; positions and widths stay whole."""

    def __init__(self, eqn: Equation) -> None:
        batch, length, heads, width = eqn.inputs[0].shape
        _, keys, shared, wide = eqn.inputs[2].shape
        self.factors = Factors()
        new, whole = self.factors.new, self.factors.new_whole
        self.batch, self.shared, self.each = new(batch), new(shared), new(heads // shared if shared else 0)
        self.length, self.keys, self.width, self.wide = whole(length), whole(keys), whole(width), whole(wide)
        self.heads: DimFactors = self.shared + self.each
        self.query: DimMap = (self.batch, self.length, self.heads, self.width)
        self.key: DimMap = (self.batch, self.keys, self.shared, self.width)
        self.value: DimMap = (self.batch, self.keys, self.shared, self.wide)
        self.result: DimMap = (self.batch, self.length, self.heads, self.wide)
        self.statistics: DimMap = (self.batch, self.heads, self.length)
        self.numbers = (batch * heads, length, keys)
        self.widths = (width, wide)
        self.cut = frozenset((*self.batch, *self.heads))

    def optional(self, eqn: Equation) -> list[DimMap]:
        """Of the bias, the mask and the lengths that there are."""
        scores = (self.batch, self.heads, self.length, self.keys)
        found: list[DimMap] = []
        for name, operand in zip(eqn.params["optional"], eqn.inputs[3:], strict=False):
            if name in ("bias", "mask"):
                found.append(tuple(() if n == 1 else dim for n, dim in zip(operand.shape, scores, strict=True)))
            else:
                found.append((self.batch,))
        return found

    def kernel(self, eqn: Equation, maps: Sequence[DimMap], work: float, *, backward: bool) -> BodyKernel:
        """What it computes: `work` is FLOPs for each pair of a query and a key that it sees."""
        batch, length, keys = self.numbers
        form = eqn.params["form"]
        pairs = seen_pairs(form, length, keys)
        flops = work * batch * pairs
        masked = form.left is not None or form.right is not None
        each = pairs / length if length else 0.0
        attention = Attention(2 * each if masked else each, masked, sum(self.widths) / 2, backward)
        traffic = tuple(
            (float(math.prod(x.shape) * x.dtype.itemsize), self.cut.intersection(f for dim in dims for f in dim))
            for x, dims in zip((*eqn.inputs, *eqn.outputs), maps, strict=True)
        )
        depth = flops / (2 * batch * length * keys) if batch * length * keys else 0.0
        none: frozenset[int] = frozenset()
        sides = Sides((batch, self.cut), (length, none), (keys, none), (depth, none), None, attention)
        return BodyKernel(flops, self.cut, traffic, sides, eqn.kernel_dtype(True), times=1.0)


def seen_pairs(form: Any, length: int, keys: int) -> float:
    """Pairs of a query and a key that it sees by its position."""
    at = np.arange(length, dtype=np.int64)
    first = np.zeros_like(at) if form.left is None else np.maximum(0, at - form.left)
    last = np.full_like(at, keys - 1) if form.right is None else np.minimum(keys - 1, at + form.right)
    return float(np.maximum(0, last - first + 1).sum())


def _attention(eqn: Equation) -> Rule:
    sizes = _Sizes(eqn)
    inputs = [sizes.query, sizes.key, sizes.value, *sizes.optional(eqn)]
    outputs = [sizes.result, sizes.statistics]
    width, wide = sizes.widths
    kernel = sizes.kernel(eqn, [*inputs, *outputs], 2.0 * (width + wide), backward=False)
    return sizes.factors.rule(inputs, outputs, unit="matmul", kernels=(kernel,))


def _emit_backward(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    return bind(eqn, operands, dtypes=tuple(v.dtype for v in eqn.outputs))


def _attention_backward(eqn: Equation) -> Rule:
    """The scores are computed again: five products instead of two."""
    sizes = _Sizes(eqn)
    optional = sizes.optional(eqn)
    inputs = [sizes.query, sizes.key, sizes.value, *optional, sizes.result, sizes.statistics, sizes.result]
    outputs = [sizes.query, sizes.key, sizes.value]
    if "bias" in eqn.params["optional"]:
        outputs.append(optional[0])
    held = [{f for dim in dims for f in dim} for dims in outputs]
    summed = sorted(f for f in sizes.cut if not all(f in each for each in held))
    summable = all(is_number(v) for v in eqn.outputs)
    width, wide = sizes.widths
    kernel = sizes.kernel(eqn, [*inputs, *outputs], 2.0 * (3 * width + 2 * wide), backward=True)
    # The gradient of the queries is added up in 32 bits, block by block of the keys.
    sums = 4 * math.prod(eqn.outputs[0].shape)
    return sizes.factors.rule(
        inputs,
        outputs,
        reduced=dict.fromkeys(summed, "sum") if summable else {},
        unaffected=dict.fromkeys(summed, frozenset()) if summable else {},
        whole=() if summable else summed,
        linear=linear_if_wide(eqn, {len(inputs) - 1}),
        emit=_emit_backward,
        unit="matmul",
        kernels=(kernel,),
        live_sets=(((sums, sizes.cut),),) if sums else (),
    )


RULES: Mapping[str, RuleBuilder] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
}
