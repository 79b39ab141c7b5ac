"""What the rule builders share: numbering factors, local shapes, linear sets, and the rule of last resort."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from autopar.ir.graph import Equation, Literal, Operand
from autopar.ir.rule import BodyKernel, DimMap, Local, Rule, Sides

RuleBuilder = Callable[[Equation], Rule]

DimFactors = tuple[int, ...]  # the factors of one dimension, major to minor


class Factors:
    """Numbers the factors of one rule while its dimension maps are written."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.whole: set[int] = set()

    def new(self, size: int) -> DimFactors:
        """A factor of its own; nothing for size 1, and an empty dimension stays whole."""
        if size == 1:
            return ()
        self.sizes.append(size)
        if size == 0:
            self.whole.add(len(self.sizes) - 1)
        return (len(self.sizes) - 1,)

    def new_whole(self, size: int) -> DimFactors:
        """A factor that cannot be split."""
        dim = self.new(size)
        self.whole.update(dim)
        return dim

    def dims(self, shape: Sequence[int], whole: Iterable[int] = ()) -> DimMap:
        """A factor for each dimension; those of the dimensions `whole` cannot be split."""
        keep = set(whole)
        return tuple(self.new_whole(n) if d in keep else self.new(n) for d, n in enumerate(shape))

    def rule(self, inputs: Sequence[DimMap], outputs: Sequence[DimMap], **fields: Any) -> Rule:
        return Rule(
            factors=tuple(self.sizes),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            whole=frozenset(self.whole | set(fields.pop("whole", ()))),
            halos=tuple(fields.pop("halos", ())),
            **fields,
        )


def local_size(local: Local, dim: DimFactors) -> int:
    """Size of the piece along one dimension."""
    return math.prod(local.size(factor) for factor in dim)


def local_shape(local: Local, dims: DimMap) -> tuple[int, ...]:
    """Shape of the piece of an array with this dimension map."""
    return tuple(local_size(local, dim) for dim in dims)


def is_zero(operand: Operand) -> bool:
    """Whether the operand is a literal zero: partial sums of zero are zeros."""
    return isinstance(operand, Literal) and bool(np.all(np.asarray(operand.value) == 0))


def is_inexact(operand: Operand) -> bool:
    """Whether the operand is floating or complex."""
    return isinstance(operand.dtype, np.dtype) and jnp.issubdtype(operand.dtype, jnp.inexact)


def is_number(operand: Operand) -> bool:
    """Whether partial sums of this dtype can be summed: floating, complex or integer, but neither bool nor key.

    Nor floats of 8 bits and less: their sum would overflow, or lose most of what is added.
    """
    if is_inexact(operand):
        return bool(operand.dtype.itemsize >= 2)
    return isinstance(operand.dtype, np.dtype) and jnp.issubdtype(operand.dtype, jnp.integer)


def linear_sets(eqn: Equation, *sets: Iterable[int]) -> tuple[frozenset[int], ...]:
    """The sets of operands in which sums pass through the equation, as far as dtypes and literals allow.

    Integers wrap: their sums pass only where operand and result wrap alike. Literal zeros need not be partial,
    so they leave the set; other literals can't be partial, so their set goes.
    """
    result = []
    for candidate in sets:
        members = frozenset(i for i in candidate if not is_zero(eqn.inputs[i]))
        if not members or any(isinstance(eqn.inputs[i], Literal) for i in members):
            continue
        pairs = [(eqn.inputs[i], out) for i in members for out in eqn.outputs]
        if all(
            (is_inexact(a) and is_inexact(b) and is_number(a) and is_number(b))
            or (is_number(a) and not is_inexact(a) and a.dtype == b.dtype)
            for a, b in pairs
        ):
            result.append(members)
    return tuple(dict.fromkeys(result))


def linear_if_wide(eqn: Equation, *sets: Iterable[int]) -> tuple[frozenset[int], ...]:
    """`linear_sets`, but none of results in fewer than 32 bits.

    Such partial sums are held in 32 bits, unless the step's `reduce_dtype` is None: a product of matrices takes several
    times as long then, and windows exchange twice as many bytes with their neighbours.
    """
    return linear_sets(eqn, *sets) if eqn.outputs[0].dtype.itemsize >= 4 else ()


def without_sharding(eqn: Equation, name: str = "sharding") -> dict[str, Any]:
    """Parameters to change so that a piece carries no sharding of the whole array."""
    return {name: None} if name in eqn.params else {}


def work_per_point(work: float, factors: Factors) -> float:
    """FLOPs per point where the product of the factors says nothing about the work.

    An exact fraction, which counts as a number, where the points are more than a float can say, as those of all
    dimensions of many operands may be.
    """
    points = max(1, math.prod(factors.sizes))
    return work / points if points < sys.float_info.max else Fraction(work) / points  # type: ignore[return-value]


def replicated(eqn: Equation) -> Rule:
    """The rule of last resort: every dimension whole, the same primitive on whole operands everywhere."""
    factors = Factors()
    inputs = [factors.dims(operand.shape, range(len(operand.shape))) for operand in eqn.inputs]
    outputs = [factors.dims(value.shape, range(len(value.shape))) for value in eqn.outputs]
    work = float(sum(math.prod(x.shape) for x in (*eqn.inputs, *eqn.outputs)))
    return factors.rule(inputs, outputs, replicates=True, flops=work_per_point(work, factors))


def opaque_kernel(
    eqn: Equation, maps: Sequence[DimMap], held: frozenset[int], jaxpr: Any, *, times: int = 1,
    flops: float | None = None,
) -> BodyKernel:  # fmt: skip
    """One kernel that reads its operands and writes its results once, and computes so often what a jaxpr says.

    Args:
      eqn: what is computed.
      maps: of operands and results.
      held: factors that cut it.
      jaxpr: what it computes; loops of unknown length are counted once.
      times: how often that is computed, in steps that are computed apart.
      flops: of all, where that is known.
    """
    counted = flops_of(jaxpr)
    products = counted.get("matmul", 0.0) > 0
    total = flops if flops is not None else times * counted.get("matmul" if products else "vector", 0.0)
    traffic = tuple(
        (float(math.prod(v.shape) * v.dtype.itemsize), held.intersection(f for dim in dims for f in dim))
        for v, dims in zip((*eqn.inputs, *eqn.outputs), maps, strict=True)
    )
    # As fast as a square product of so many operations in one step.
    edge = (total / (2 * max(1, times))) ** (1 / 3)
    none: frozenset[int] = frozenset()
    sides = Sides((times, held), (edge, none), (edge, none), (edge, none)) if products and total else None
    return BodyKernel(total, held, traffic, sides, eqn.kernel_dtype(products), times=1.0)


def flops_of(jaxpr: Any) -> Mapping[str, float]:
    """Operations of matrix products ("matmul") and of others ("vector").

    Loops of unknown length are counted once, and of a condition's branches the mean.
    """
    total: dict[str, float] = defaultdict(float)
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = [flops_of(sub) for sub in core.jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total["matmul"] += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contracted)
        elif inner:
            often = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            if "branches" in eqn.params:
                often = 1 / len(inner)
            for each in inner:
                for unit, n in each.items():
                    total[unit] += often * n
        else:
            total["vector"] += sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)
    return total
