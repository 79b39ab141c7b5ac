"""What a recipe forbids, as limits on strategies and layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from autopar.ir.graph import BatchDim, Equation, StepGraph, Value
from autopar.ir.mesh import Mesh
from autopar.ir.method import Method
from autopar.ir.program import Program
from autopar.ir.sharding import Sharding
from autopar.ir.strategy import Lane
from autopar.passes.batch import Split, Unsplittable, batch_in_dims, batch_to_factor
from autopar.passes.intra_op.shard import Limits
from autopar.passes.intra_op.strategies import splittable
from autopar.passes.rules.base import Rule


def batch_factors(step: StepGraph, rules: Mapping[int, Rule]) -> dict[int, int]:
    """The factor that carries the examples, by equation id, as far as it can be followed from the batch arguments."""
    where: dict[Value, BatchDim] = {v: batch for v, (_, batch) in _local_feeds(step).items()}
    found: dict[int, int] = {}
    for eqn in step.equations:
        rule = rules[eqn.id]
        split: Split | None = None
        for v, dims in zip(eqn.inputs, rule.inputs, strict=True):
            if isinstance(v, Value) and v in where and split is None:
                try:
                    split = batch_to_factor(where[v], dims[where[v].dim], rule.factors)
                except Unsplittable:
                    continue
        if split is None:
            continue
        found[eqn.id] = split.factor
        for v, dims in zip(eqn.outputs, rule.outputs, strict=True):
            batch = batch_in_dims(split, dims, rule.factors)
            if batch is not None:
                where[v] = batch
        _note_operands(eqn, rule, split, where)
    for eqn in reversed(step.equations):  # batch-free values that meet examples: masks, positions, random bits
        rule = rules[eqn.id]
        for v, dims in zip(eqn.outputs, rule.outputs, strict=True):
            if eqn.id in found or v not in where:
                continue
            try:
                split = batch_to_factor(where[v], dims[where[v].dim], rule.factors)
            except Unsplittable:
                continue
            found[eqn.id] = split.factor
            _note_operands(eqn, rule, split, where)
    return found


def _note_operands(eqn: Equation, rule: Rule, split: Split, where: dict[Value, BatchDim]) -> None:
    """The operands of a split equation hold the batch where its rule says so."""
    for v, dims in zip(eqn.inputs, rule.inputs, strict=True):
        batch = batch_in_dims(split, dims, rule.factors)
        if isinstance(v, Value) and batch is not None:
            where.setdefault(v, batch)


def _local_feeds(step: StepGraph) -> dict[Value, tuple[Value, BatchDim]]:
    m = step.num_microbatches
    return {v: (source, BatchDim(b.dim, b.outer, b.units // m, b.inner)) for v, (source, b) in step.feeds.items()}


def method_limits(method: Method, step: StepGraph, rules: Mapping[int, Rule], mesh: Mesh) -> Limits:
    """The limits of a recipe on this mesh; none for a method that leaves the shardings to the solver."""
    if not method.data_axes and not method.model_axes:
        return Limits()
    batch = batch_factors(step, rules)
    data = [a for a in mesh.axes if a in method.data_axes and mesh.axis_size(a) > 1]
    in_loop = _read_in_loop(step)
    leaves = {step.graph.inputs[i] for i in step.graph.carried.values()}
    totals = set(step.accumulate.values())
    examples = step.batched - step.partial  # sums over examples are none
    zero = method.zero or 0

    def allow_lane(program: Program, eqn: Equation, rule: Rule, lane: Lane) -> bool:
        factor = batch.get(eqn.id)
        varies = eqn.phase.in_loop and any(v in examples for v in (*eqn.values, *eqn.outputs))
        least_zero = 3 if eqn.phase.in_loop or eqn.id in step.replicable else 1  # that may split what holds no examples
        for axis, choice in zip(mesh.axes, lane, strict=True):
            size = mesh.axis_size(axis)
            if size == 1:
                continue
            can = [f for f in splittable(rule) if rule.factors[f] % size == 0]
            if axis in method.data_axes:
                if factor in can and choice != factor:
                    return False  # examples are split wherever they can be
                if choice >= 0 and choice != factor and (factor is not None or (not varies and zero < least_zero)):
                    return False
            elif axis in method.model_axes:
                if choice >= 0 and choice == factor:
                    return False
                products = rule.unit == "matmul" and any(f != factor for f in can)
                if products and eqn.phase.in_loop and choice < 0:
                    return False  # and so are the matrix products
        return True

    def allow_layout(value: Value, sharding: Sharding) -> bool:
        if value in leaves and _is_tensor(value):
            wanted = zero >= 3 if value in in_loop else zero >= 1
        elif value in totals:
            if zero < 2:
                return True
            wanted = True
        else:
            return True
        if not wanted:
            return not any(a in sharding.axes for a in data)
        sizes = [mesh.axis_size(a) for a in data]
        if not any(n % math.prod(sizes) == 0 for n in value.shape):
            return True  # cannot be cut
        return all(a in sharding.axes for a in data)

    return Limits(allow_lane, allow_layout)


def _is_tensor(value: Value) -> bool:
    return bool(value.shape) and isinstance(value.dtype, np.dtype) and bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _read_in_loop(step: StepGraph) -> set[Value]:
    """Inputs that the forward or backward pass reads, through copied equations too."""
    needed: set[Value] = set()
    for eqn in reversed(step.equations):
        if eqn.phase.in_loop or any(v in needed for v in eqn.outputs):
            needed.update(eqn.values)
    return needed
