"""`jax.custom_partitioning` with a rule of Shardy's (`sharding_rule`): the user's own rule, read as one of ours.

Factors that operands and results share are cut; what a piece is computed by is what the user's `partition` gives for
such shardings. A factor stays whole where the rule says so (reductions, permutations, what needs replication), and
where `partition` asks for other shardings than the rule has, or for an axis of the mesh by name. That is tried for a
factor beside those that have been taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
from jax._src.custom_partitioning_sharding_rule import BATCHING, str_to_sdy_sharding_rule
from jax.extend import core

from autopar.errors import InternalError
from autopar.ir.graph import Equation
from autopar.ir.rule import DimMap, Local, Rule
from autopar.passes.rules.building import Factors, RuleBuilder, opaque_kernel, replicated
from autopar.passes.rules.loop_kernels import unit_of

_MOST_TRIED = 8  # pieces of one factor, for each number of which `partition` is asked

_Names = tuple[tuple[str, ...], ...]  # of the factors of each dimension, major to minor


def _custom_partitioning(eqn: Equation) -> Rule:
    told = _told(eqn)
    arrays = (*eqn.inputs, *eqn.outputs)
    mappings = (*told.operand_mappings, *told.result_mappings)
    names = [_names(mapping, len(v.shape)) for mapping, v in zip(mappings, arrays, strict=True)]
    sizes = dict(told.factor_sizes)
    for dims, v in zip(names, arrays, strict=True):
        sizes.update((dim[0], n) for dim, n in zip(dims, v.shape, strict=True) if len(dim) == 1)
    read = {f for dims in names[: len(eqn.inputs)] for dim in dims for f in dim}
    made = {f for dims in names[len(eqn.inputs) :] for dim in dims for f in dim}
    kept = {*told.reduction_factors, *told.need_replication_factors, *told.permutation_factors}
    candidates = (read & made) - kept
    cut: list[str] = []
    for f in sorted(candidates):
        beside = {g: _counts(sizes[g])[0] for g in cut}
        if sizes[f] > 1 and all(_agrees(eqn, names, {**beside, f: n}) for n in _counts(sizes[f])):
            cut.append(f)
    if not cut:
        return replicated(eqn)
    factors = Factors()
    numbers = {f: factors.new(n) if f in cut else factors.new_whole(n) for f, n in sizes.items()}
    maps: list[DimMap] = [tuple(tuple(k for f in dim for k in numbers[f]) for dim in dims) for dims in names]

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        counts = {f: sizes[f] // math.prod(local.size(k) for k in numbers[f]) for f in cut}
        split = {f: n for f, n in counts.items() if n > 1}
        if not split:
            results: Sequence[Any] = core.jaxpr_as_fun(eqn.params["call"])(*operands)
            return results
        function, agreed = _partition(eqn, names, split)
        if not agreed:
            raise InternalError(f"{eqn!r} is not partitioned as its rule says, in {split}")
        return jax.tree.leaves(function(*eqn.params["in_tree"].unflatten(operands)))

    held = frozenset(k for f in cut for k in numbers[f])
    kernel = opaque_kernel(eqn, maps, held, eqn.params["call"])
    inputs, outputs = maps[: len(eqn.inputs)], maps[len(eqn.inputs) :]
    return factors.rule(inputs, outputs, emit=emit, unit=unit_of((kernel,)), kernels=(kernel,))


def _told(eqn: Equation) -> Any:
    """The user's rule; where it is a function, for these shapes."""
    rule, options = eqn.params["sharding_rule"], {}
    if callable(rule):
        types = [[SimpleNamespace(shape=v.shape, rank=len(v.shape)) for v in vs] for vs in (eqn.inputs, eqn.outputs)]
        rule = rule(*eqn.params["static_args"], jax.sharding.AbstractMesh((1,), ("x",)), *types)
        if isinstance(rule, tuple | list):
            rule, options = rule
    return str_to_sdy_sharding_rule(rule, **options) if isinstance(rule, str) else rule


def _names(mapping: Sequence[Any], rank: int) -> _Names:
    """The factors of each dimension; those of an ellipsis are numbered."""
    first = mapping[0] if mapping else ""
    if not (isinstance(first, str) and first.startswith(BATCHING)):
        dims = [*mapping]
    else:
        dims = [f"{first}.{i}" for i in range(rank - len(mapping) + 1)] + [*mapping[1:]]
    return tuple((dim,) if isinstance(dim, str) else tuple(dim) for dim in dims)


def _counts(size: int) -> list[int]:
    """Into how many pieces a factor may be cut, up to as many as a host has devices."""
    return [n for n in range(2, min(size, _MOST_TRIED) + 1) if size % n == 0] or [size]


def _agrees(eqn: Equation, names: Sequence[_Names], split: Mapping[str, int]) -> bool:
    """Whether so many pieces of factors, together, are computed apart, as they lie."""
    pieces = [
        jax.ShapeDtypeStruct(
            tuple(n // math.prod(split.get(f, 1) for f in dim) for n, dim in zip(v.shape, dims, strict=True)), v.dtype
        )
        for v, dims in zip((*eqn.inputs, *eqn.outputs), names, strict=True)
    ]
    operands, results = pieces[: len(eqn.inputs)], pieces[len(eqn.inputs) :]
    try:
        function, agreed = _partition(eqn, names, split)
        if not agreed:
            return False
        traced = jax.make_jaxpr(function)(*eqn.params["in_tree"].unflatten(operands))
    except Exception:  # the user's code, for a mesh that it may not know
        return False
    made = [(tuple(aval.shape), aval.dtype) for aval in traced.out_avals]
    return made == [(x.shape, x.dtype) for x in results] and not _names_axes(traced)


def _names_axes(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr is about an axis of a mesh."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        dims = eqn.params.get("axes", ())  # dimensions of arrays are numbers
        if "axis_name" in eqn.params or not all(isinstance(dim, int) for dim in dims):
            return True
        if any(map(_names_axes, core.jaxprs_in_params(eqn.params))):
            return True
    return False


def _partition(eqn: Equation, names: Sequence[_Names], split: Mapping[str, int]) -> tuple[Any, bool]:
    """What computes a piece, and whether it takes and gives pieces as they lie."""
    mesh = jax.sharding.AbstractMesh(tuple(split.values()), tuple(f"axis_{k}" for k in range(len(split))))
    axis = dict(zip(split, mesh.axis_names, strict=True))

    def sharding(dims: _Names) -> Any:
        along = (tuple(axis[f] for f in dim if f in axis) for dim in dims)
        spec = jax.sharding.PartitionSpec(*(a if len(a) > 1 else a[0] if a else None for a in along))
        return jax.sharding.NamedSharding(mesh, spec)

    arrays = (*eqn.inputs, *eqn.outputs)
    given = [
        jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding(dims)) for v, dims in zip(arrays, names, strict=True)
    ]
    params, count = eqn.params, len(eqn.inputs)
    _, function, results, operands = params["partition"](
        *params["static_args"], mesh, params["in_tree"].unflatten(given[:count]),
        params["out_tree"].unflatten(given[count:]),
    )  # fmt: skip
    wanted = [*params["in_tree"].flatten_up_to(operands), *params["out_tree"].flatten_up_to(results)]
    return function, all(
        s.is_equivalent_to(x.sharding, len(x.shape)) for s, x in zip(wanted, given, strict=True)
    )  # fmt: skip


RULES: Mapping[str, RuleBuilder] = {"custom_partitioning": _custom_partitioning}
