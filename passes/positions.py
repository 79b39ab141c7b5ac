"""Indexing by an example's own position becomes indexing within each example.

`logits[arange(B), labels]` is a gather whose index vectors point anywhere into the batch, as far as its parameters say:
it would couple the examples. One component of the vectors is known to be the position itself, so that the dimension
it points into is a batching dimension, as in `take_along_axis`. The same holds of the scatter in its gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.ir.graph import Equation, Graph, Literal, Operand, Value
from autopar.tracing.rewrite import Replacement, rewritten

_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
_LARGEST_CONSTANT = 2**20  # elements of a captured array that are looked at


def index_within_examples(graph: Graph) -> Graph:
    """The graph with batching dimensions wherever a component of the indices is a position along them."""
    made = {v: eqn for eqn in graph.equations for v in eqn.outputs}
    known = _Known(made, graph.constants)
    plans = {eqn.id: plan for eqn in graph.equations if (plan := _plan(eqn, known)) is not None}
    return rewritten(graph, {eqn.id: _replacement(eqn, plans[eqn.id]) for eqn in graph.equations if eqn.id in plans})


def _replacement(eqn: Equation, plan: _Plan) -> Replacement:
    arrays = [eqn.inputs[0], *eqn.inputs[2:]]
    count = len(arrays)

    def emit(*values: Any) -> list[Any]:
        (x, *updates), vectors = values[:count], lax.concatenate(values[count:], len(eqn.inputs[1].shape) - 1)
        params = {**eqn.params, "dimension_numbers": plan.numbers}
        return [eqn.primitive.bind(x, vectors, *updates, **params)]

    return [*arrays, *plan.columns], emit


@dataclasses.dataclass(frozen=True)
class _Plan:
    numbers: Any  # the dimension numbers with more batching dimensions
    columns: tuple[Operand, ...]  # what is left of the index vectors: arrays [.., 1], one per component


def _plan(eqn: Equation, known: _Known) -> _Plan | None:
    """None where no component of the indices is a position, or every one is."""
    if eqn.primitive.name != "gather" and eqn.primitive.name not in _SCATTERS:
        return None
    columns = known.columns(eqn.inputs[1])
    if columns is None:
        return None
    table, numbers = eqn.inputs[0], eqn.params["dimension_numbers"]
    names = _GATHER if eqn.primitive.name == "gather" else _SCATTER
    collapsed, pointed, of_table, of_indices = (tuple(getattr(numbers, name)) for name in names)
    kept = list(range(len(columns)))
    batching = list(zip(of_table, of_indices, strict=True))
    for component, column in enumerate(columns):
        dim, position = pointed[component], known.position(column)
        taken = any(position == d for _, d in batching)
        if position is None or taken or dim not in collapsed or table.shape[dim] != column.shape[position]:
            continue
        batching.append((dim, position))
        kept.remove(component)
    if not kept or len(kept) == len(columns):
        return None
    batching.sort()
    changed = (
        tuple(d for d in collapsed if d not in dict(batching)),
        tuple(pointed[k] for k in kept),
        tuple(d for d, _ in batching),
        tuple(d for _, d in batching),
    )
    numbers = numbers._replace(**dict(zip(names, changed, strict=True)))
    return _Plan(numbers, tuple(columns[k] for k in kept))


_GATHER = ("collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims")
_SCATTER = (
    "inserted_window_dims", "scatter_dims_to_operand_dims", "operand_batching_dims", "scatter_indices_batching_dims",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Known:
    """What a graph says of integer arrays."""

    made: Mapping[Value, Equation]
    constants: Mapping[Value, Any]

    def columns(self, indices: Operand) -> tuple[Operand, ...] | None:
        """The components of index vectors that are put together from arrays [.., 1]."""
        eqn = self._maker(indices)
        if eqn is None or eqn.primitive.name != "concatenate" or eqn.params["dimension"] != len(indices.shape) - 1:
            return None
        return eqn.inputs if all(x.shape[-1] == 1 for x in eqn.inputs) else None

    def position(self, x: Operand) -> int | None:
        """The dimension along which every element of `x` says where it stands."""
        if isinstance(x, Value) and x in self.constants:
            return _position_in(self.constants[x])
        eqn = self._maker(x)
        if eqn is None or x.dtype.kind not in "iu" or max(x.shape, default=0) > np.iinfo(x.dtype).max:
            return None
        match eqn.primitive.name:
            case "iota":
                return int(eqn.params["dimension"])
            case "convert_element_type":
                return self.position(eqn.inputs[0])
            case "broadcast_in_dim":
                source = self.position(eqn.inputs[0])
                if source is None:
                    return None
                target: int = eqn.params["broadcast_dimensions"][source]
                return target if x.shape[target] == eqn.inputs[0].shape[source] else None
            case "select_n" if self._is_false(eqn.inputs[0]):  # how indices from the end are written
                return self.position(eqn.inputs[1])
        return None

    def _is_false(self, condition: Operand) -> bool:
        """Whether it asks if a position is below zero, or is a constant that says no."""
        if isinstance(condition, Value) and condition in self.constants:
            return math.prod(condition.shape) <= _LARGEST_CONSTANT and not np.any(np.asarray(self.constants[condition]))
        eqn = self._maker(condition)
        if eqn is None or eqn.primitive.name != "lt":
            return False
        left, right = eqn.inputs
        return isinstance(right, Literal) and right.value == 0 and self.position(left) is not None

    def _maker(self, x: Operand) -> Equation | None:
        return self.made.get(x) if isinstance(x, Value) else None


def _position_in(constant: Any) -> int | None:
    if not jnp.issubdtype(constant.dtype, jnp.integer) or not 0 < constant.size <= _LARGEST_CONSTANT:
        return None
    array = np.asarray(constant)
    for dim, size in enumerate(array.shape):
        line = np.arange(size).reshape([size if d == dim else 1 for d in range(array.ndim)])
        if size > 1 and np.array_equal(array, np.broadcast_to(line, array.shape)):
            return dim
    return None
