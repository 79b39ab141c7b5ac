"""What a recipe forbids, as limits on strategies and layouts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from autopar.ir.graph import BatchDim, Equation, Operand, Phase, StepGraph, Value
from autopar.ir.mesh import Mesh
from autopar.ir.method import Method
from autopar.ir.rule import DimMap, Gathering, Rule, Scattering
from autopar.ir.sharding import Sharding
from autopar.ir.strategy import AxisAssignment, AxisChoice, Gathered, Partial
from autopar.passes.intra_op.stage import most_pieces
from autopar.passes.intra_op.strategies import factor_by_axis, pieces
from autopar.passes.rules.split import Unsplittable, batch_to_factor


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a recipe or a user forbids; the planner itself forbids nothing."""

    # The rule is that of what is assigned: a part of the equation, or all of it.
    allow_assignment: Callable[[Equation, Rule, AxisAssignment], bool] = lambda equation, rule, assignment: True
    allow_layout: Callable[[Value, Sharding], bool] = lambda value, sharding: True
    # Whether a strategy cuts as it has to be what the user has pinned.
    heeds_hints: Callable[[Rule, AxisAssignment], bool] = lambda rule, assignment: True
    # Axes over which values are summed, and neither scattered, gathered nor moved.
    summing: tuple[str, ...] = ()
    # Equal for equations of one rule that are allowed the same assignments.
    kind: Callable[[Equation], Hashable] = lambda equation: None


def batch_factors(step: StepGraph, rules: Mapping[int, Rule]) -> dict[int, frozenset[int]]:
    """The factors that carry examples, by equation id, as far as they can be followed from the batch arguments.

    They are several after a reshape such as `(32,) -> (4, 8)`: each of the two dimensions tells examples apart.
    """
    return _followed(step, rules, {v: (batch,) for v, (_, batch) in _local_feeds(step).items()})


def sequence_factors(step: StepGraph, rules: Mapping[int, Rule]) -> dict[int, frozenset[int]]:
    """The factors along which the elements of an example lie in the batch arguments, such as its tokens, as above."""
    return _followed(
        step,
        rules,
        {
            v: tuple(BatchDim(d, 1, size, 1) for d, size in enumerate(v.shape) if d != batch.dim)
            for v, (_, batch) in _local_feeds(step).items()
        },
    )


def _followed(
    step: StepGraph, rules: Mapping[int, Rule], where: dict[Value, tuple[BatchDim, ...]]
) -> dict[int, frozenset[int]]:
    """The factors, by equation id, that carry what lies so in some values; `where` is added to."""
    by_equation: dict[int, frozenset[int]] = {}

    def follow(eqn: Equation, values: Sequence[Operand], maps: Sequence[DimMap]) -> None:
        rule = rules[eqn.id]
        factors = {f for v, dims in zip(values, maps, strict=True) if isinstance(v, Value)
                   for batch in where.get(v, ()) for f in _factors(batch, dims[batch.dim], rule)}  # fmt: skip
        if factors:
            by_equation[eqn.id] = frozenset(factors)
            for v, dims in (*zip(eqn.outputs, rule.outputs, strict=True), *zip(eqn.inputs, rule.inputs, strict=True)):
                held = _held(factors, dims, rule)
                if isinstance(v, Value) and held:
                    where.setdefault(v, held)

    for eqn in step.equations:
        follow(eqn, eqn.inputs, rules[eqn.id].inputs)
    for eqn in reversed(step.equations):  # batch-free values that meet examples: masks, positions, random bits
        if eqn.id not in by_equation:
            follow(eqn, eqn.outputs, rules[eqn.id].outputs)
    return by_equation


def _factors(batch: BatchDim, dim: Sequence[int], rule: Rule) -> set[int]:
    """The factors of a dimension that tell examples apart."""
    inside, inner = set(), 1
    for factor in reversed(dim):
        size = rule.factors[factor]
        if inner % batch.inner == 0 and (batch.units * batch.inner) % (inner * size) == 0:
            inside.add(factor)
        inner *= size
    if not inside:
        with contextlib.suppress(Unsplittable):
            inside.add(batch_to_factor(batch, tuple(dim), rule.factors).factor)
    return inside


def _held(factors: set[int], dims: DimMap, rule: Rule) -> tuple[BatchDim, ...]:
    """Where the factors lie in an array."""
    batch_dims = []
    for d, dim in enumerate(dims):
        places = [i for i, f in enumerate(dim) if f in factors]
        if places:
            sizes = [rule.factors[f] for f in dim]
            first, last = places[0], places[-1] + 1
            parts = (math.prod(sizes[:first]), math.prod(sizes[first:last]), math.prod(sizes[last:]))
            batch_dims.append(BatchDim(d, *parts))
    return tuple(batch_dims)


def _local_feeds(step: StepGraph) -> dict[Value, tuple[Value, BatchDim]]:
    m = step.num_microbatches
    return {v: (source, BatchDim(b.dim, b.outer, b.units // m, b.inner)) for v, (source, b) in step.feeds.items()}


def _heeds_hints(mesh: Mesh, rule: Rule, assignment: AxisAssignment) -> bool:
    if not rule.hints:
        return True
    split = {a: f for a, f in factor_by_axis(rule, assignment, mesh).items() if mesh.axis_size(a) > 1}
    adds = any(size > 1 and isinstance(choice, Partial) for size, choice in zip(mesh.shape, assignment, strict=True))
    return all(
        hinted.hint.allows([[a for a, f in split.items() if f in dim] for dim in hinted.dims], mesh)
        and not (adds or any(f in hinted.partial_sum for f in split.values()))
        for hinted in rule.hints
    )


Factors = Callable[[], Mapping[int, frozenset[int]]]


def method_limits(method: Method, step: StepGraph, mesh: Mesh, examples: Factors, sequences: Factors) -> Limits:
    """The limits of a recipe on this mesh, and of the user's hints.

    `examples`, `sequences`: the `batch_factors` and the `sequence_factors` of the step.
    """
    recipe = _recipe_limits(method, step, mesh, examples, sequences)
    heeds = functools.partial(_heeds_hints, mesh) if step.graph.heeds_hints else recipe.heeds_hints

    def is_spatial(rule: Rule, assignment: AxisAssignment) -> bool:
        return any(number > 1 and factor in rule.windows for factor, number in pieces(rule, assignment, mesh).items())

    def allow_assignment(equation: Equation, rule: Rule, assignment: AxisAssignment) -> bool:
        if not method.spatial and is_spatial(rule, assignment):
            return False
        return heeds(rule, assignment) and recipe.allow_assignment(equation, rule, assignment)

    def allow_layout(value: Value, sharding: Sharding) -> bool:
        hint = step.hints.get(value)
        if hint is not None and not hint.allows(sharding.dims, mesh):
            return False
        return recipe.allow_layout(value, sharding)

    return Limits(allow_assignment, allow_layout, heeds, recipe.summing, recipe.kind)


def _recipe_limits(method: Method, step: StepGraph, mesh: Mesh, examples: Factors, sequences: Factors) -> Limits:
    """None for a method that leaves the shardings to the solver."""
    if not method.data_axes and not method.model_axes:
        return Limits()
    batch = examples()
    # What the model axes leave whole in products, and elsewhere too unless values may be cut along it between them.
    along = {} if method.sequence_parallel is None else sequences()
    data = [a for a in mesh.axes if a in method.data_axes and mesh.axis_size(a) > 1]
    in_loop = _read_in_loop(step)
    leaves = {step.graph.inputs[i] for i in step.graph.carried.values()}
    totals = set(step.accumulate.values())
    varying = step.batched - step.partial  # sums over examples are not
    zero = 3 if method.zero is None else method.zero  # as far as it may go
    free = method.zero is None

    # By equation id and phase: a sum of gradients may be in another phase where stages begin elsewhere.
    known: dict[tuple[int, Phase], tuple[frozenset[int], bool, int, frozenset[int]]] = {}

    def of(eqn: Equation) -> tuple[frozenset[int], bool, int, frozenset[int]]:
        """The factors that hold examples, whether it varies with them, which ZeRO may split what holds none, and..

        .. the factors that hold elements of an example.
        """
        if (eqn.id, eqn.phase) not in known:
            known[eqn.id, eqn.phase] = _of(eqn)
        return known[eqn.id, eqn.phase]

    def _of(eqn: Equation) -> tuple[frozenset[int], bool, int, frozenset[int]]:
        varies = eqn.phase.in_loop and any(v in varying for v in (*eqn.values, *eqn.outputs))
        least_zero = 3 if eqn.phase.in_loop or any(v in in_loop for v in eqn.outputs) else 1
        examples, elements = batch.get(eqn.id, frozenset()), along.get(eqn.id, frozenset())
        return examples, varies, least_zero, elements - examples

    def kind(eqn: Equation) -> Hashable:
        return (*of(eqn), eqn.phase.in_loop)

    def allow_assignment(eqn: Equation, rule: Rule, assignment: AxisAssignment) -> bool:
        factors, varies, least_zero, elements = of(eqn)
        factors &= {f for dims in (*rule.inputs, *rule.outputs) for dim in dims for f in dim}  # of a part, its own
        for axis, choice in zip(mesh.axes, assignment, strict=True):
            size = mesh.axis_size(axis)
            if size == 1:
                continue
            factor = rule.factor_of(choice)
            can = [f for f in rule.splittable if rule.factors[f] % size == 0]
            if axis in method.data_axes:
                if factor not in factors and any(f in can for f in factors):
                    return False  # examples are split wherever they can be
                gathering = any(isinstance(way, Gathering) and way.factor == factor for way in rule.gatherings)
                if gathering and not free and isinstance(choice, Gathered) != (zero == 3):
                    return False  # parameters are gathered layer by layer just where they are kept in pieces
                if factor is not None and factor not in factors and (factors or (not varies and zero < least_zero)):
                    return False
            elif axis in method.model_axes:
                if factor in factors:
                    return False
                of_products = rule.unit == "matmul"
                if factor in elements and (of_products or not method.sequence_parallel):
                    return False
                if method.sequence_parallel is False and _is_scattering(rule, choice):
                    return False
                if of_products and eqn.phase.in_loop and factor is None and {*can} - factors - elements:
                    return False  # and so are the matrix products
        return True

    def allow_layout(value: Value, sharding: Sharding) -> bool:
        if free:
            return True
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
        # As far as an array of this shape can be.
        most = most_pieces(value.shape, tuple(mesh.axis_size(a) for a in data))
        return math.prod(mesh.axis_size(a) for a in data if a in sharding.axes) >= most

    summing = method.model_axes if method.sequence_parallel is False else ()
    return Limits(allow_assignment, allow_layout, summing=summing, kind=kind)


def _is_scattering(rule: Rule, choice: AxisChoice) -> bool:
    return isinstance(choice, Gathered) and isinstance(rule.gatherings[choice.index], Scattering)


def _is_tensor(value: Value) -> bool:
    return bool(value.shape) and isinstance(value.dtype, np.dtype) and bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _read_in_loop(step: StepGraph) -> set[Value]:
    """What the forward or backward pass reads, through copied equations too."""
    needed: set[Value] = set()
    for eqn in reversed(step.equations):
        if eqn.phase.in_loop or any(v in needed for v in eqn.outputs):
            needed.update(eqn.values)
    return needed
