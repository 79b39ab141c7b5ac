"""Local programs as functions for a fully manual `shard_map`, with the shapes and shardings of their ports."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import InternalError
from autopar.ir.context import Pairs
from autopar.ir.graph import Literal, Value
from autopar.ir.local import Accumulate, Compute, LocalOp, LocalProgram, Port, Reread, Reshard
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Local, Rule, emit_piece
from autopar.ir.sharding import Collective, Sharding, StepKind
from autopar.ir.strategy import AxisAssignment
from autopar.passes.collectives import (
    Halos,
    all_gather,
    apply_steps,
    extreme,
    extreme_itemsize,
    psum_at_once,
    psum_scatter,
    send,
    take_piece,
)
from autopar.passes.intra_op.strategies import (
    Kept,
    combined_axes,
    kept_operands,
    kept_results,
    pieces,
    scatters,
    splitting_axes,
)

# The operations for which there is an all-reduce, and whether it is of the largest. Booleans go as bytes, for which
# "and" is the smallest and "or" the largest.
_EXTREMES: Mapping[str, bool] = {"max": True, "min": False}
_EXTREMES_OF_BOOLEANS: Mapping[str, bool] = {**_EXTREMES, "and": False, "or": True}
# What all pieces are gathered for.
_REDUCE: Mapping[str, Callable[..., Any]] = {
    "prod": jax.lax.reduce_prod,
    "and": jax.lax.reduce_and,
    "or": jax.lax.reduce_or,
    "max": jax.lax.reduce_max,
    "min": jax.lax.reduce_min,
}


@dataclasses.dataclass
class SpaceLocal(Local):
    """The piece of one device, for `emit`."""

    rule: Rule
    cut: Mapping[int, int]
    axes: Mapping[int, tuple[str, ...]]  # factor -> mesh axes that split it, major first
    mesh: Mesh
    halos: Halos
    kept_operands: Mapping[int, Kept] = dataclasses.field(default_factory=dict)
    kept_results: Mapping[int, Kept] = dataclasses.field(default_factory=dict)
    scatters: frozenset[int] = frozenset()  # see `is_scattered`

    @staticmethod
    def of(rule: Rule, assignment: AxisAssignment, mesh: Mesh, halos: Halos) -> SpaceLocal:
        cut = pieces(rule, assignment, mesh)
        axes = {f: splitting_axes(rule, f, assignment, mesh) for f in cut}
        kept = kept_operands(rule, assignment, mesh), kept_results(rule, assignment, mesh)
        return SpaceLocal(rule, cut, axes, mesh, halos, *kept, scatters(rule, assignment, mesh))

    def size(self, factor: int) -> int:
        return self.rule.factors[factor] // self.cut.get(factor, 1)

    def is_split(self, factor: int) -> bool:
        return self.cut.get(factor, 1) > 1

    def start(self, factor: int) -> Any:
        if not self.is_split(factor):
            return 0
        index = jnp.int32(0)
        for axis in self.axes[factor]:
            index = index * self.mesh.axis_size(axis) + jax.lax.axis_index(axis).astype(jnp.int32)
        return index * self.size(factor)

    def total(self, factor: int, x: Any, value: Value) -> Any:
        return psum_at_once(x, self.axes[factor], value) if self.is_split(factor) else x

    def extreme(self, factor: int, x: Any, largest: bool) -> Any:
        return _combine("max" if largest else "min", x, self.axes[factor]) if self.is_split(factor) else x

    def halo(self, factor: int, x: Any, dim: int, before: int, after: int, fill: Any) -> Any:
        if not self.is_split(factor) or not (before or after):
            return x
        return self.halos.borrow(x, dim, before, after, fill, self.axes[factor])

    def send(self, factor: int, x: Any, kind: StepKind, dim: int = 0, to_dim: int = 0, pairs: Pairs = ()) -> Any:
        return send(x, kind, self.axes[factor], dim, to_dim, pairs) if self.is_split(factor) else x

    def gather(self, operand: int, x: Any) -> Any:
        kept = self.kept_operands.get(operand)
        return x if kept is None else all_gather(x, kept.axes, x.ndim + kept.dim)

    def is_scattered(self, index: int) -> bool:
        return index in self.scatters

    def scatter(self, result: int, x: Any) -> Any:
        kept = self.kept_results.get(result)
        if kept is None:
            return x
        scatter = take_piece if kept.collective is None else psum_scatter
        return scatter(x, kept.axes, x.ndim + kept.dim)


def emit(local: LocalProgram, rules: Mapping[int, Rule]) -> Callable[..., tuple[Any, ...]]:
    """The program as a function of local pieces, to be run under `jax.shard_map` over all axes of its mesh.

    Takes the input ports' pieces and returns the output ports'. A partial port's piece has a leading axis of size 1.
    What it does carries the names of `scope_of`, which compilers hand on.
    """
    mesh = local.mesh

    def run(*pieces_in: Any) -> tuple[Any, ...]:
        env: dict[tuple[Value, Sharding], Any] = {}
        halos = Halos(mesh)
        for port, piece in zip(local.inputs, pieces_in, strict=True):
            env[port.value, port.sharding] = piece[0] if port.sharding.partial else piece
        for ops in in_turn(local.ops, rules):
            with jax.named_scope(scope_of(ops[0])):
                if len(ops) > 1:
                    _emit_as_one(ops, env, rules, mesh, halos)
                else:
                    _emit_op(ops[0], env, rules, mesh, halos)
        return tuple(
            env[p.value, p.sharding][None] if p.sharding.partial else env[p.value, p.sharding] for p in local.outputs
        )

    return run


_Held = tuple[Value, Sharding]


def in_turn(ops: Sequence[LocalOp], rules: Mapping[int, Rule]) -> list[list[LocalOp]]:
    """The operations in an order in which they can run, those together that are emitted as one.

    Conditions with the same index (`Rule.branches`) become one, as they were written: a device that branches waits for
    its index, which is worth it once, not for each parameter. So they wait until nothing else can run without them.
    """
    indices = Counter(index for op in ops if (index := _index_of(op, rules)) is not None)
    if max(indices.values(), default=0) < 2:
        return [[op] for op in ops]
    groups: list[list[LocalOp]] = []
    left = list(ops)
    while left:
        waiting: dict[_Held, list[LocalOp]] = {}
        later: list[LocalOp] = []
        unmade: set[_Held] = set()  # what conditions that wait make, and what follows from it
        unread: set[_Held] = set()  # what an operation that waits will read, so that nothing may be added to it yet
        for op in left:
            read, made = set(_read(op)), _made(op)
            index = _index_of(op, rules)
            if read & unmade or (isinstance(op, Accumulate) and unread.intersection(made)):
                later.append(op)
            elif index is not None and indices[index] > 1:
                waiting.setdefault(index, []).append(op)
            else:
                groups.append([op])
                continue
            unmade.update(made)
            unread.update(read)
        groups += waiting.values()
        left = later
    return groups


def _index_of(op: LocalOp, rules: Mapping[int, Rule]) -> _Held | None:
    """The index of a condition, unless results or operands are partial sums, which are widened."""
    if not isinstance(op, Compute) or rules[op.equation.id].branches is None:
        return None
    shardings = [s for s in (*op.operands, *op.results) if s is not None]
    if any(s.partial for s in shardings) or not isinstance(index := op.equation.inputs[0], Value):
        return None
    assert op.operands[0] is not None
    return index, op.operands[0]


def _read(op: LocalOp) -> list[_Held]:
    if isinstance(op, Reshard):
        return [(op.value, op.source)]
    if isinstance(op, Reread):
        return [(op.value, op.sharding), *([op.after] if op.after else [])]
    if isinstance(op, Accumulate):
        return [(op.total, op.sharding), (op.partial_sum, op.sharding)]
    return [(v, s) for v, s in zip(op.equation.inputs, op.operands, strict=True) if isinstance(v, Value) and s]


def _made(op: LocalOp) -> list[_Held]:
    if isinstance(op, Reshard):
        return [(op.value, op.target)]
    if isinstance(op, Reread):
        return [(op.copy, op.sharding)]
    if isinstance(op, Accumulate):
        return [(op.total, op.sharding)]
    return list(zip(op.equation.outputs, op.results, strict=True))


def scope_of(op: LocalOp) -> str:
    """The name scope of an operation in the emitted program: "e7" of equation 7, "v7" of what is done to value 7."""
    if isinstance(op, Compute):
        return f"e{op.equation.id}"
    return f"v{op.partial_sum.id if isinstance(op, Accumulate) else op.value.id}"


def _emit_op(
    op: LocalOp, env: dict[tuple[Value, Sharding], Any], rules: Mapping[int, Rule], mesh: Mesh, halos: Halos
) -> None:
    if isinstance(op, Reshard):
        env[op.value, op.target] = apply_steps(
            env[op.value, op.source], op.steps, op.source, mesh, op.value.dtype, op.value.accumulator_dtype
        )
    elif isinstance(op, Reread):
        # Later readers take both results: XLA drops operands of a barrier whose results nobody reads, and then merges
        # those barriers of one value that it cannot tell apart any more.
        given = [(op.value, op.sharding), *([op.after] if op.after else [])]
        env[op.copy, op.sharding], *rest = jax.lax.optimization_barrier([env[key] for key in given])
        env.update(zip(given[1:], rest, strict=True))
    elif isinstance(op, Accumulate):
        key = (op.total, op.sharding)
        env[key] = env[key] + env[op.partial_sum, op.sharding]
    else:
        results = _emit_equation(op, rules[op.equation.id], _operands(op, env), mesh, halos)
        env.update(zip(_made(op), results, strict=True))


def _operands(op: Compute, env: Mapping[_Held, Any]) -> list[Any]:
    return [
        v.value if isinstance(v, Literal) else env[v, sharding]  # type: ignore[index]
        for v, sharding in zip(op.equation.inputs, op.operands, strict=True)
    ]


def _emit_as_one(
    ops: Sequence[LocalOp], env: dict[_Held, Any], rules: Mapping[int, Rule], mesh: Mesh, halos: Halos
) -> None:
    """Several conditions with the same index."""
    conditions = [op for op in ops if isinstance(op, Compute)]
    parts = []
    for op in conditions:
        rule = rules[op.equation.id]
        assert rule.branches is not None
        local = SpaceLocal.of(rule, op.strategy[0], mesh, halos)
        parts.append(rule.branches(local, op.equation, _operands(op, env)))

    def branch(number: int) -> Callable[[], list[Sequence[Any]]]:
        return lambda: [list(part[number]()) for part in parts]

    index = env[_read(conditions[0])[0]]
    all_results = jax.lax.switch(index, [branch(b) for b in range(len(parts[0]))])
    for op, results in zip(conditions, all_results, strict=True):
        env.update(zip(_made(op), _combined(op, rules[op.equation.id], results, mesh), strict=True))


def _emit_equation(op: Compute, rule: Rule, operands: Sequence[Any], mesh: Mesh, halos: Halos) -> Sequence[Any]:
    partial_sums = [bool(sharding.partial) for sharding in op.results]
    if rule.separable:
        return emit_piece(rule, SpaceLocal(rule, {}, {}, mesh, halos), op.equation, operands, partial_sums)
    local = SpaceLocal.of(rule, op.strategy[0], mesh, halos)
    return _combined(op, rule, emit_piece(rule, local, op.equation, operands, partial_sums), mesh)


def _combined(op: Compute, rule: Rule, results: Sequence[Any], mesh: Mesh) -> Sequence[Any]:
    """The results, combined over the pieces of factors that are reduced by other operations than sums."""
    assignment = op.strategy[0]
    for kind, over in combined_axes(rule, assignment, mesh).items():
        results = [_combine(kind, x, over) for x in results]
    actual = [(tuple(np.shape(x)), x.dtype) for x in results]
    expected = [
        (s.local_shape(v.shape, mesh), v.held_dtype(bool(s.partial)))
        for v, s in zip(op.equation.outputs, op.results, strict=True)
    ]
    if actual != expected:
        raise InternalError(f"{op.equation!r} with strategy {assignment} gives {actual}, not {expected}")
    return results


def combination(operation: str, axes: tuple[str, ...], value: Value, sharding: Sharding, mesh: Mesh) -> Collective:
    """The collective that `_combine` needs for one result."""
    count = math.prod(value.shape) // math.prod(sharding.tiles(mesh))
    if _is_extreme(operation, value.dtype):
        return Collective("all_reduce", axes, count * extreme_itemsize(value.dtype))
    pieces = math.prod(mesh.axis_size(axis) for axis in axes)
    return Collective("all_gather", axes, count * value.itemsize * pieces)


def _is_extreme(operation: str, dtype: Any) -> bool:
    """Whether an all-reduce combines the pieces; complex numbers have no order that one knows."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    return operation in (_EXTREMES_OF_BOOLEANS if dtype == jnp.bool_ else _EXTREMES)


def _combine(operation: str, x: Any, axes: tuple[str, ...]) -> Any:
    if not _is_extreme(operation, x.dtype):
        pieces = jax.lax.all_gather(x, axes)
        return _REDUCE[operation](pieces, (0,))
    if x.dtype == jnp.bool_:
        return extreme(x.astype(jnp.uint8), axes, _EXTREMES_OF_BOOLEANS[operation]).astype(jnp.bool_)
    return extreme(x, axes, _EXTREMES[operation])


def partition_spec(sharding: Sharding) -> jax.sharding.PartitionSpec:
    """The spec of a port's global array; a partial value is stacked along a leading axis over its partial axes."""
    dims = tuple((dim if len(dim) > 1 else dim[0]) if dim else None for dim in sharding.dims)
    if sharding.partial:
        dims = (sharding.partial if len(sharding.partial) > 1 else sharding.partial[0], *dims)
    return jax.sharding.PartitionSpec(*dims)


def port_dtype(port: Port) -> Any:
    """Type of a port's global array."""
    return port.value.held_dtype(bool(port.sharding.partial))


def port_shape(port: Port, mesh: Mesh) -> tuple[int, ...]:
    """Shape of a port's global array."""
    if not port.sharding.partial:
        return port.value.shape
    return (math.prod(mesh.axis_size(a) for a in port.sharding.partial), *port.value.shape)
