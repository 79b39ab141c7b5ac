"""Every split of every primitive, computed piece by piece, equals the whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec

from autopar.passes.rules.random import flat_indices, random_bits_window_p
from autopar.passes.rules.table import find_fault, rule_of
from tests.passes.rules.cases import CLOSE, EXACT, OUTSIDE, ROWS, floats, integers, rows
from tests.passes.rules.harness import (
    Piece,
    apply,
    check_linear,
    check_narrow_partial_sums,
    check_pieces,
    compute_in_pieces,
    equations_of,
    last_application,
    splits,
)


@pytest.mark.parametrize("name", EXACT)
def test_pieces_are_exactly_the_whole(name: str) -> None:
    fun, args = EXACT[name]
    application = last_application(fun, *args)
    assert check_pieces(application, exact=True) > 0
    check_linear(application)


@pytest.mark.parametrize("name", CLOSE)
def test_pieces_give_the_whole(name: str) -> None:
    fun, args = CLOSE[name]
    application = last_application(fun, *args)
    assert check_pieces(application) > 0
    check_linear(application)


@pytest.mark.parametrize("name", ["scatter-add", "scatter-sub", "convolution", "gather"])
def test_partial_sums_of_16_bits_are_in_32(name: str) -> None:
    fun, args = {**EXACT, **CLOSE}[name]
    assert check_narrow_partial_sums(fun, args) > 0


def test_sums_and_products_in_16_bits_are_not_rounded() -> None:
    x = floats(4, 6)
    assert check_narrow_partial_sums(lambda x: lax.reduce_sum(x, (0,)), [x]) == 2  # of pieces, and of partial sums
    assert check_narrow_partial_sums(lax.mul, [x, x]) == 2
    assert check_narrow_partial_sums(lambda x: lax.mul(x, x.dtype.type(0.125)), [x]) == 1
    assert check_narrow_partial_sums(lambda x: lax.pad(x, x.dtype.type(0), ((0, 1, 0), (0, 0, 0))), [x]) == 1
    # Partial sums of operands are summed first: a product of float32 would take several times as long.
    assert check_narrow_partial_sums(lax.dot, [x, x.T]) == 1
    assert check_narrow_partial_sums(lax.ragged_dot, [x, floats(2, 6, 3), jnp.asarray([1, 3])]) == 1


@pytest.mark.slow
def test_no_partial_sums_of_16_bits_are_rounded() -> None:
    count = 0
    for fun, args in {**EXACT, **CLOSE}.values():
        if any(x.dtype == jnp.float32 for x in args):
            try:
                jax.jit(fun).lower(*(x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in args))
            except (KeyError, NotImplementedError, TypeError, ValueError):
                continue  # not defined in bfloat16
            count += check_narrow_partial_sums(fun, args)
    assert count > 80


def test_inner_factors_are_cut_too() -> None:
    """(2, 4, 3) -> (24,): cutting the 4 leaves every piece scattered over the result: outer 2, inner 3."""
    application = last_application(lambda x: lax.reshape(x, (24,)), floats(2, 4, 3))
    rule = rule_of(application.equation)
    assert rule.outputs == (((0, 1, 2),),)
    (piece,) = compute_in_pieces(application, rule, {1: 4})
    np.testing.assert_array_equal(piece, np.asarray(application.results[0]))


def test_reshape_keeps_what_does_not_meet_whole() -> None:
    # (4, 6) -> (8, 3): 4 divides 8, then 2 divides 6. (6, 5) -> (10, 3): 2 is common, 3x5 and 5x3 never meet.
    rule = rule_of(equations_of(lambda x: lax.reshape(x, (8, 3)), floats(4, 6))[0])
    assert (rule.factors, rule.inputs, rule.outputs) == ((4, 2, 3), (((0,), (1, 2)),), (((0, 1), (2,)),))
    rule = rule_of(equations_of(lambda x: lax.reshape(x, (10, 3)), floats(6, 5))[0])
    assert rule.factors == (2, 3, 5, 5, 3)
    assert (rule.inputs, rule.outputs) == ((((0, 1), (3,)),), (((0, 2), (4,)),))
    assert rule.whole == {1, 2, 3, 4}


def test_windows_of_a_draw_beyond_32_bits() -> None:
    """Counters of a draw of 2**48 elements, against Python's integers."""
    global_shape, starts, shape = (2**20, 3, 2**28 + 1), (2**20 - 2, 1, 2**28 - 2), (2, 2, 3)
    high, low = jax.jit(lambda s: flat_indices(s, shape, global_shape))(jnp.asarray(starts, jnp.int32))
    actual = np.asarray(high).astype(object) * 2**32 + np.asarray(low).astype(object)
    for index in np.ndindex(shape):
        i, j, k = (start + offset for start, offset in zip(starts, index, strict=True))
        assert actual[index] == (i * 3 + j) * (2**28 + 1) + k


def test_pieces_of_a_microbatch() -> None:
    """Cut in time, traced, and cut again in space: dropout's bits are still those of the whole draw."""

    def draw(key: Any) -> Any:
        return jax.random.bits(key, (8, 4))

    key = jax.random.key(5)
    whole = np.asarray(draw(key))
    (equation,) = equations_of(draw, key)
    rule = rule_of(equation)

    def microbatch(key: Any, start: Any) -> Any:
        return rule.emit(Piece(rule, {0: 2}, {0: start}), equation, [key])[0]

    windows = [eqn for eqn in equations_of(microbatch, key, jnp.int32(4)) if eqn.primitive is random_bits_window_p]
    (inner,) = (apply(eqn, (key, jnp.asarray([4, 0], jnp.int32))) for eqn in windows)
    np.testing.assert_array_equal(np.asarray(inner.results[0]), whole[4:])
    assert check_pieces(inner, exact=True) == 3


def test_pieces_on_devices() -> None:
    """Under a manual shard_map, where `start` comes from the device's place on the mesh."""

    def draw(key: Any) -> Any:
        return jax.random.bits(key, (8, 6))

    key = jax.random.key(5)
    (equation,) = equations_of(draw, key)
    rule = rule_of(equation)

    def local(key: Any) -> Any:
        starts = {0: lax.axis_index("x") * 2, 1: lax.axis_index("y") * 3}
        return rule.emit(Piece(rule, {0: 4, 1: 2}, starts), equation, [key])[0]

    mesh = jax.make_mesh((4, 2), ("x", "y"))
    run = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("x", "y"), check_vma=False)
    np.testing.assert_array_equal(np.asarray(jax.jit(run)(key)), np.asarray(draw(key)))


def test_primitives_of_derivatives() -> None:
    """Those that no function of `jax.lax` applies by itself: the gradients of pooling."""

    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")

    x = floats(4, 6)
    first = equations_of(jax.grad(lambda x: pool(x).sum()), x)
    (scatter,) = (eqn for eqn in first if eqn.primitive.name == "select_and_scatter_add")
    second = equations_of(lambda x: jax.jvp(pool, (x,), (x,))[1], x)
    (gather,) = (eqn for eqn in second if eqn.primitive.name == "select_and_gather_add")
    for equation, shapes in ((scatter, ((4, 3), (4, 6))), (gather, ((4, 6), (4, 6)))):
        assert tuple(operand.shape for operand in equation.inputs) == shapes
        application = apply(equation, [floats(*shape, seed=i) for i, shape in enumerate(shapes)])
        assert check_pieces(application, exact=True) >= 1
        assert check_linear(application) == 1


def test_empty_dimensions_stay_whole() -> None:
    empty = jnp.ones((0, 4))
    for fun in (jnp.sin, jnp.sum, jnp.ravel, jnp.transpose, lambda x: x @ x.T, lambda x: jnp.concatenate([x, x])):
        for equation in equations_of(fun, empty):
            rule = rule_of(equation)
            assert find_fault(equation, rule) is None
            assert {f for f, size in enumerate(rule.factors) if size == 0} <= rule.whole - set(rule.reduced)


def test_other_generators_draw_whole() -> None:
    def draw(key: Any) -> Any:
        return jax.random.bits(key, (4, 6))

    (rule,) = map(rule_of, equations_of(draw, jax.random.key(0, impl="rbg")))
    assert rule.whole == {0, 1}
    jax.config.update("jax_threefry_partitionable", False)
    try:
        (rule,) = map(rule_of, equations_of(draw, jax.random.key(0)))
    finally:
        jax.config.update("jax_threefry_partitionable", True)
    assert rule.whole == {0, 1}


def linear(fun: Callable[..., Any], *args: Any) -> list[set[int]]:
    return [set(members) for members in rule_of(equations_of(fun, *args)[-1]).linear]


def test_linear_sets() -> None:
    x, n = floats(4), integers(4)
    assert linear(lax.add, x, x) == [{0, 1}]
    assert linear(lambda x: lax.add_p.bind(x, 0.0), x) == [{0}]
    assert linear(lambda x: lax.add_p.bind(0.0, x), x) == [{1}]
    assert linear(lambda x: lax.add_p.bind(x, 1.0), x) == []
    assert linear(lax.mul, x, x) == [{0}, {1}]
    assert linear(lambda x: lax.mul_p.bind(x, 2.0), x) == [{0}]
    assert linear(lax.div, x, x) == [{0}]
    assert linear(lax.div, n, n) == []
    assert linear(lax.max, x, x) == []
    assert linear(lax.select_n, x > 0, x, x) == [{1, 2}]
    half = x.astype(jnp.bfloat16)
    assert linear(lambda x: lax.convert_element_type(x, jnp.float32), half) == [{0}]
    assert linear(lax.neg, half) == [{0}]
    # Partial sums of 16 bits are held in 32; float8 holds none.
    assert linear(lambda x: lax.convert_element_type(x, jnp.bfloat16), x) == [{0}]
    assert linear(lambda x: lax.convert_element_type(x, jnp.float16), half) == [{0}]
    assert linear(lambda x: lax.convert_element_type(x, jnp.float8_e5m2), half) == []
    assert linear(lambda x: lax.reduce_precision(x, 8, 7), x) == []
    assert linear(lambda x: lax.rev(x, (0,)), x.astype(jnp.float8_e5m2)) == []
    assert linear(lambda x: lax.convert_element_type(x, jnp.int32), x) == []
    assert linear(lambda x: lax.convert_element_type(x, jnp.float32), n) == []
    assert linear(lambda x: lax.pad(x, 0.0, ((0, 1, 0),)), x) == [{0}]
    assert linear(lambda x, v: lax.pad(x, v, ((0, 1, 0),)), x, x[0]) == [{0, 1}]
    assert linear(lambda x, y: lax.concatenate([x, y], 0), x, x) == [{0, 1}]
    assert linear(lambda x, y: lax.optimization_barrier((x, y)), x, x) == [{0, 1}]
    assert linear(lambda x, y: lax.optimization_barrier((x, y)), x, x > 0) == []
    assert linear(lambda x, i, u: lax.scatter_add(x, i, u, ROWS), floats(8, 4), OUTSIDE, floats(2, 3, 4)) == [{0, 2}]
    # Integers filled in past the end would be added up.
    assert linear(functools.partial(rows, mode="fill"), integers(8, 4), OUTSIDE) == []


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)


@settings(max_examples=6)
@given(shapes, st.data())
def test_elementwise_of_any_shapes(shape: list[int], data: st.DataObject) -> None:
    def narrowed() -> tuple[int, ...]:
        if data.draw(st.booleans()):
            return ()
        return tuple(1 if data.draw(st.booleans()) else n for n in shape)

    operands = [floats(*shape), floats(*narrowed(), seed=1)]
    application = last_application(lambda x, y: lax.sub_p.bind(x, y), *data.draw(st.permutations(operands)))
    assert check_pieces(application, exact=True) == len(list(splits(rule_of(application.equation))))


@settings(max_examples=6)
@given(st.permutations(["b", "c", "i"]), st.permutations(["b", "c", "j"]), st.data())
def test_products_of_any_shapes(left: list[str], right: list[str], data: st.DataObject) -> None:
    sizes = {name: data.draw(st.sampled_from([1, 2, 3, 4])) for name in "bcij"}
    numbers = (((left.index("c"),), (right.index("c"),)), ((left.index("b"),), (right.index("b"),)))
    operands = [floats(*(sizes[name] for name in names)) for names in (left, right)]
    application = last_application(lambda x, y: lax.dot_general(x, y, numbers), *operands)
    check_pieces(application)
    rule = rule_of(application.equation)
    assert math.prod(rule.factors) == math.prod(sizes.values())
    assert rule.flops * rule.points() == 2 * math.prod(sizes.values())


@settings(max_examples=10)
@given(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), max_size=5), st.data())
def test_reshapes_of_any_shapes(primes: list[int], data: st.DataObject) -> None:
    def grouped(order: list[int]) -> tuple[int, ...]:
        shape = [1]
        for n in order:
            if data.draw(st.booleans()):
                shape.append(1)
            shape[-1] *= n
        return tuple(shape)

    old, new = grouped(primes), grouped(data.draw(st.permutations(primes)))
    application = last_application(
        lambda x: lax.reshape_p.bind(x, new_sizes=new, dimensions=None, sharding=None), floats(*old)
    )
    check_pieces(application, exact=True)


@settings(max_examples=3)
@given(
    st.sampled_from([2, 4, 6]),
    shapes,
    st.sampled_from(["clip", "fill", "promise_in_bounds"]),
    st.booleans(),
)
def test_look_ups_and_their_gradients(vocabulary: int, batch: list[int], mode: str, unsigned: bool) -> None:
    table = floats(vocabulary, 2)
    index = integers(*batch, 1, high=vocabulary + 4) - (0 if unsigned else 2)
    if unsigned:
        index = index.astype(jnp.uint32)
    check_pieces(last_application(functools.partial(rows, mode=mode), table, index), exact=True)
    numbers = lax.ScatterDimensionNumbers((len(batch),), (0,), (0,))
    update = floats(*batch, 2, seed=1)
    check_pieces(last_application(lambda x, i, u: lax.scatter_add(x, i, u, numbers, mode=mode), table, index, update))


def test_what_fences_many_arrays_does_no_work() -> None:
    """The points of such an equation, the product of all sizes, are more than a float can say."""
    [fence] = equations_of(lambda *xs: lax.optimization_barrier(xs), *[floats(50, 60)] * 100)
    assert rule_of(fence).work({}) == 0.0
