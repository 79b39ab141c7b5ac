"""Cuts an equation into pieces by its rule, computes each piece on its own, and puts the results together."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import jaxprs_in_params

from autopar.ir.context import Pairs
from autopar.ir.graph import Equation, Literal, Operand, Phase, Value, accumulator_dtype
from autopar.ir.mesh import Mesh
from autopar.ir.rule import DimMap, Local, ReduceOp, Rule, bind, emit_piece
from autopar.ir.sharding import Collective, Sharding, StepKind
from autopar.ir.strategy import AxisAssignment, Split
from autopar.passes.collectives import Halos, count_collectives
from autopar.passes.emit import SpaceLocal, partition_spec
from autopar.passes.intra_op.strategies import operand_shardings, result_shardings
from autopar.passes.rules.table import find_fault, rule_of

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Application:
    """An equation with the numbers that it was applied to."""

    equation: Equation
    operands: tuple[Any, ...]
    results: tuple[Any, ...]


def equations_of(fun: Callable[..., Any], *args: Any) -> list[Equation]:
    """The equations of a function, calls inlined."""
    closed = jax.make_jaxpr(fun)(*args)
    equations: list[Equation] = []
    values = itertools.count()

    def value_of(aval: Any) -> Value:
        dtype = aval.dtype if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else np.dtype(aval.dtype)
        return Value(next(values), tuple(aval.shape), dtype, bool(getattr(aval, "weak_type", False)))

    def walk(jaxpr: Any, arguments: Sequence[Operand]) -> list[Operand]:
        known: dict[Any, Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
        known.update({var: value_of(var.aval) for var in jaxpr.constvars})

        def read(atom: Any) -> Operand:
            if isinstance(atom, core.Literal):
                aval: Any = atom.aval
                return Literal(atom.val, np.dtype(aval.dtype), bool(getattr(aval, "weak_type", False)))
            return known[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(read(atom) for atom in eqn.invars)
            if eqn.primitive.name in _CALLS:
                inner = eqn.params[_CALLS[eqn.primitive.name]]
                outputs: Sequence[Operand] = walk(getattr(inner, "jaxpr", inner), inputs)
            else:
                made = tuple(value_of(var.aval) for var in eqn.outvars)
                equations.append(Equation(len(equations), eqn.primitive, eqn.params, inputs, made, Phase.UPDATE))
                outputs = made
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    walk(closed.jaxpr, [value_of(var.aval) for var in closed.jaxpr.invars])
    return equations


def last_application(fun: Callable[..., Any], *args: Any) -> Application:
    """The last equation of a function whose operands are the function's own arguments, in order, or literals."""
    equation = equations_of(fun, *args)[-1]
    values = iter(args)
    operands = tuple(
        jnp.asarray(x.value, dtype=x.dtype) if isinstance(x, Literal) else next(values) for x in equation.inputs
    )
    return apply(equation, operands)


def apply(equation: Equation, operands: Sequence[Any]) -> Application:
    return Application(equation, tuple(operands), tuple(_compute(equation, operands)))


# What is compared is one primitive at a time: there is nothing to optimize, and much to compile.
_compile = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def _compute(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    return tuple(_compile(lambda *xs: tuple(bind(equation, xs)))(*operands))


@dataclasses.dataclass(frozen=True)
class Piece(Local):
    """A `Local`: the piece of number `index[f]` among `split[f]` along each split factor."""

    rule: Rule
    split: Mapping[int, int]
    starts: Mapping[int, Any]  # traced

    def size(self, factor: int) -> int:
        return self.rule.factors[factor] // self.split.get(factor, 1)

    def is_split(self, factor: int) -> bool:
        return factor in self.split

    def start(self, factor: int) -> Any:
        return self.starts.get(factor, 0)

    def total(self, factor: int, x: Any, value: Value) -> Any:
        raise NotImplementedError("these pieces are computed apart")

    def extreme(self, factor: int, x: Any, largest: bool) -> Any:
        raise NotImplementedError("these pieces are computed apart")

    def halo(self, factor: int, x: Any, dim: int, before: int, after: int, fill: Any) -> Any:
        assert not before and not after, "these pieces are computed apart"
        return x

    def send(self, factor: int, x: Any, kind: StepKind, dim: int = 0, to_dim: int = 0, pairs: Pairs = ()) -> Any:
        raise NotImplementedError("these pieces are computed apart")


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """As numbers; a key becomes its words, in a dimension of their own."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def _window(rule: Rule, dims: DimMap, split: Mapping[int, int], index: Mapping[int, int]) -> tuple[slice, ...]:
    """The piece in an array whose dimensions have been unfolded into its factors."""
    window = []
    for f in itertools.chain.from_iterable(dims):
        size = rule.factors[f] // split.get(f, 1)
        window.append(slice(index.get(f, 0) * size, (index.get(f, 0) + 1) * size))
    return tuple(window)


def _unfold(rule: Rule, dims: DimMap, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    sizes = [rule.factors[f] for dim in dims for f in dim]
    return array.reshape((*sizes, *array.shape[len(dims) :]))


def cut(rule: Rule, dims: DimMap, split: Mapping[int, int], index: Mapping[int, int], array: Any) -> Any:
    """The piece of an operand."""
    numbers = to_numpy(array)
    piece = _unfold(rule, dims, numbers)[_window(rule, dims, split, index)]
    sizes = [math.prod(rule.factors[f] // split.get(f, 1) for f in dim) for dim in dims]
    piece = piece.reshape((*sizes, *numbers.shape[len(dims) :]))
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(piece), impl=jax.random.key_impl(array))
    return piece


def compute_on_devices(application: Application, rule: Rule, split: Mapping[int, int]) -> list[np.ndarray[Any, Any]]:
    """The results of an application, from pieces that send one another what they need, a mesh axis a factor."""
    axes = tuple(f"f{f}" for f in split)
    mesh = Mesh(tuple(range(math.prod(split.values()))), tuple(split.values()), axes)
    return compute_assignment(application, rule, tuple(map(Split, split)), mesh)


def compute_assignment(
    application: Application, rule: Rule, assignment: AxisAssignment, mesh: Mesh
) -> list[np.ndarray[Any, Any]]:
    """The results of an application split over a mesh."""
    return [to_numpy(x) for x in _compile(_mapped(application, rule, assignment, mesh))(*application.operands)]


def collectives_of(
    application: Application, rule: Rule, assignment: AxisAssignment, mesh: Mesh
) -> tuple[Collective, ...]:  # fmt: skip
    """What an application sends that is split over a mesh, without the sums of its results."""
    mapped = _mapped(application, rule, assignment, mesh, summed=False)
    return count_collectives(jax.make_jaxpr(mapped)(*application.operands), mesh)


def _mapped(
    application: Application, rule: Rule, assignment: AxisAssignment, mesh: Mesh, summed: bool = True
) -> Callable[..., Any]:
    equation = application.equation
    results = result_shardings(rule, assignment, mesh)

    def run(*operands: Any) -> Sequence[Any]:
        pieces = rule.emit(SpaceLocal.of(rule, assignment, mesh, Halos(mesh)), equation, operands)
        return [jax.lax.psum(x, s.partial) if s.partial and summed else x for x, s in zip(pieces, results, strict=True)]

    def specs(shardings: Sequence[Sharding]) -> tuple[Any, ...]:
        return tuple(partition_spec(Sharding(s.dims)) for s in shardings)

    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.shape)
    return jax.shard_map(
        run, mesh=jax.sharding.Mesh(devices, mesh.axes), in_specs=specs(operand_shardings(rule, assignment, mesh)),
        out_specs=list(specs(results)), check_vma=False,
    )  # fmt: skip


_COMBINE: Mapping[ReduceOp, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


def compute_in_pieces(application: Application, rule: Rule, split: Mapping[int, int]) -> list[np.ndarray[Any, Any]]:
    """The results of an application, from pieces that know only their operands and where they start."""
    equation = application.equation

    @_compile
    def emit(starts: Mapping[int, Any], operands: Sequence[Any]) -> Sequence[Any]:
        return list(rule.emit(Piece(rule, split, starts), equation, operands))

    results: list[Any] = [None] * len(equation.outputs)
    seen: list[set[tuple[int, ...]]] = [set() for _ in equation.outputs]
    for numbers in itertools.product(*(range(n) for n in split.values())):
        index = dict(zip(split, numbers, strict=True))
        starts = {f: np.int32(i * (rule.factors[f] // split[f])) for f, i in index.items()}
        operands = [
            cut(rule, dims, split, index, array) for dims, array in zip(rule.inputs, application.operands, strict=True)
        ]
        for position, piece in enumerate(emit(starts, operands)):
            dims, whole = rule.outputs[position], to_numpy(application.results[position])
            sizes = tuple(math.prod(rule.factors[f] // split.get(f, 1) for f in dim) for dim in dims)
            assert piece.shape == sizes
            assert piece.dtype == application.results[position].dtype
            if results[position] is None:
                results[position] = np.zeros(whole.shape, whole.dtype)
            unfolded = _unfold(rule, dims, results[position])
            window = _window(rule, dims, split, index)
            target = unfolded[window]
            value = to_numpy(piece).reshape(target.shape)
            place = tuple(index[f] for f in split if any(f in dim for dim in dims))
            combine = [rule.reduced[f] for f in split if f in rule.reduced]
            if place not in seen[position]:
                unfolded[window] = value
            elif combine:
                unfolded[window] = _COMBINE[combine[0]](target, value)
            else:  # this result does not depend on what is split
                np.testing.assert_array_equal(target, value)
            seen[position].add(place)
            results[position] = unfolded.reshape(whole.shape)
    return results


def splits(rule: Rule) -> Iterator[dict[int, int]]:
    """Each factor in four, three or two, as divides it; neighbouring pairs of factors in two, and all in two."""
    free = [f for f in range(len(rule.factors)) if f not in rule.whole]
    for f in free:
        pieces = next((n for n in (4, 3, 2) if rule.factors[f] % n == 0), None)
        if pieces is not None:
            yield {f: pieces}
    even = [f for f in free if rule.factors[f] % 2 == 0]
    for pair in itertools.pairwise(even):
        yield dict.fromkeys(pair, 2)
    if len(even) > 2:
        yield dict.fromkeys(even, 2)


def assert_close(actual: Any, expected: Any, exact: bool, what: str) -> None:
    if exact or not np.issubdtype(expected.dtype, np.inexact):
        np.testing.assert_array_equal(actual, expected, err_msg=what)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=what)


def check_pieces(application: Application, exact: bool = False) -> int:
    """Compare every split with the whole; returns how many were tried."""
    rule = rule_of(application.equation)
    assert find_fault(application.equation, rule) is None, find_fault(application.equation, rule)
    count = 0
    for split in splits(rule):
        if any(map(rule.communicates, split)):
            split = {f: n for f, n in split.items() if f in rule.splittable}
            while math.prod(split.values()) > jax.device_count():
                split.pop(next(iter(split)))  # the batch is in front, what communicates behind
            results = compute_on_devices(application, rule, split)
        else:
            results = compute_in_pieces(application, rule, split)
        for actual, expected in zip(results, application.results, strict=True):
            assert_close(actual, to_numpy(expected), exact, f"{application.equation!r} split {split} of {rule}")
        count += 1
    return count


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and accumulator_dtype(dtype) != dtype


def _of_partial_sums(rule: Rule, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """The whole results, as partial sums, of operands of which some are partial sums."""
    return emit_piece(rule, Piece(rule, {}, {}), equation, operands, [True] * len(equation.outputs))


def check_linear(application: Application, tolerance: float = 1e-4) -> int:
    """f(x + y) = f(x) + f(y) in each linear set; returns how many sets there are.

    As partial sums are held: what has a result of 16 bits is not rounded.
    """
    rng = np.random.default_rng(1)
    equation = application.equation
    rule = rule_of(equation)
    narrow = any(_is_narrow(v.dtype) for v in equation.outputs)
    compute = _compile(lambda xs: tuple(_of_partial_sums(rule, equation, xs) if narrow else bind(equation, xs)))
    for members in rule.linear:
        first, second = list(application.operands), list(application.operands)
        for i in sorted(members):
            noise = 4 * rng.standard_normal(first[i].shape)
            second[i] = jnp.asarray(noise).astype(first[i].dtype)
            if narrow and _is_narrow(first[i].dtype):
                first[i], second[i] = (x.astype(jnp.float32) for x in (first[i], second[i]))
        total = [x + y if i in members else x for i, (x, y) in enumerate(zip(first, second, strict=True))]
        partial_sums = zip(compute(first), compute(second), strict=True)
        for sum_of_parts, result in zip((a + b for a, b in partial_sums), compute(total), strict=True):
            what = f"{equation!r} is not linear in {set(members)}"
            np.testing.assert_allclose(
                to_numpy(sum_of_parts).astype(complex),
                to_numpy(result).astype(complex),
                rtol=tolerance,
                atol=tolerance,
                err_msg=what,
            )
    return len(rule.linear)


def check_narrow_partial_sums(fun: Callable[..., Any], args: Sequence[Any], narrow: Any = jnp.bfloat16) -> int:
    """Partial sums of an application in 16 bits are what it is in 32, not rounded; returns how many there are.

    Those of convolutions are rounded once, since no GPU computes them otherwise from operands in 16 bits.
    """

    def cast(dtype: Any) -> list[Any]:
        return [x.astype(narrow).astype(dtype) if x.dtype == jnp.float32 else x for x in args]

    equations = equations_of(fun, *cast(narrow))
    if not equations:  # a conversion to what it is already
        return 0
    equation = equations[-1]
    rule = rule_of(equation)
    has_body = bool(rule.kernels) and any(True for _ in jaxprs_in_params(equation.params))
    if equation.outputs[0].dtype != narrow or has_body or rule.separable:
        return 0
    wide = last_application(fun, *cast(jnp.float32))
    operands = last_application(fun, *cast(narrow)).operands
    sets = [*rule.linear, *([frozenset[int]()] if "sum" in rule.reduced.values() else [])]
    for members in sets:
        given = [wide.operands[i] if i in members else x for i, x in enumerate(operands)]
        for x, expected in zip(_of_partial_sums(rule, equation, given), wide.results, strict=True):
            assert x.dtype == expected.dtype == jnp.float32
            if equation.primitive is jax.lax.conv_general_dilated_p:
                assert (x == x.astype(narrow).astype(x.dtype)).all()
                np.testing.assert_allclose(to_numpy(x), to_numpy(expected), rtol=1e-2, atol=1e-2)
                continue
            assert_close(to_numpy(x), to_numpy(expected), False, f"{equation!r} of partial sums {set(members)}")
    return len(sets)
