"""Largest, smallest, all and any of a batch in two steps: within each example, then over the examples.

A sum over the batch is the sum of what microbatches and devices make of their examples, and many equations are linear
in it. The largest value of a batch is not: whatever is made of it has to wait for the last example, and so would all
that it is the largest of. Within each example it is one number, which is little to wait with. So is the running scale
of products in 8 bits, which follows the largest values of the last steps (Micikevicius et al. 2022), computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from autopar.ir.graph import BatchDim, Equation, Graph
from autopar.tracing.rewrite import Replacement, rewritten

EXTREMES: Mapping[str, Callable[..., Any]] = {
    "reduce_max": lax.reduce_max,
    "reduce_min": lax.reduce_min,
    "reduce_and": lax.reduce_and,
    "reduce_or": lax.reduce_or,
}


def within_examples(name: str, x: Any, axes: Sequence[int], batch: BatchDim) -> Any:
    """The first step of a reduction over `axes`, that of the examples (`batch.dim`) among them."""
    dim = batch.dim
    if batch.outer == batch.inner == 1:
        return EXTREMES[name](x, [axis for axis in axes if axis != dim])
    apart = x.reshape(*x.shape[:dim], batch.outer, batch.units, batch.inner, *x.shape[dim + 1 :])
    others = [dim, dim + 2, *(axis + 2 * (axis > dim) for axis in axes if axis != dim)]
    return EXTREMES[name](apart, sorted(others))


def over_examples(name: str, each: Any, axes: Sequence[int], batch: BatchDim) -> Any:
    """The second step: of what the first one makes."""
    return EXTREMES[name](each, [batch.dim - sum(axis < batch.dim for axis in axes)])


def is_of_more(eqn: Equation, batch: BatchDim) -> bool:
    """Whether a reduction is over more than the examples, so that there is a first step."""
    return bool(math.prod(eqn.inputs[0].shape[axis] for axis in eqn.params["axes"]) > batch.units)


def in_two_steps(graph: Graph, reductions: Mapping[int, BatchDim]) -> Graph:
    """The graph with these reductions, by equation id, in two steps; how each one's operand holds the examples."""

    def replacement(eqn: Equation, batch: BatchDim) -> Replacement:
        name, axes = eqn.primitive.name, eqn.params["axes"]

        def reduce(x: Any) -> list[Any]:
            return [over_examples(name, within_examples(name, x, axes, batch), axes, batch)]

        return eqn.inputs, reduce

    each = {eqn.id: eqn for eqn in graph.equations}
    return rewritten(graph, {number: replacement(each[number], batch) for number, batch in reductions.items()})
