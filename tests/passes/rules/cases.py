"""Primitives with operands: what `test_localize` cuts into pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.random import threefry2x32_p
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ops.attention import attention_backward_p, attention_p
from autopar.ops.blockwise import Form
from autopar.passes.rules.random import random_bits_window_p
from tests.passes.rules.primitives import primitives_of_jax


def _primitive(name: str) -> Any:
    """A primitive of JAX that no public function applies alone; None where this version does not have it."""
    return primitives_of_jax().get(name)


# Made by NumPy and put on a device as they are, which compiles nothing when the tests are collected.
def _random(*shape: int, seed: int = 0) -> np.random.Generator:
    return np.random.default_rng((seed, *shape))


def floats(*shape: int, seed: int = 0) -> Any:
    return jax.device_put(_random(*shape, seed=seed).standard_normal(shape).astype(np.float32))


def positive(*shape: int) -> Any:
    return jax.device_put((np.abs(_random(*shape).standard_normal(shape)) * 0.5 + 0.25).astype(np.float32))


def integers(*shape: int, high: int = 9, seed: int = 0) -> Any:
    return jax.device_put(_random(*shape, seed=seed).integers(0, high, shape).astype(np.int32))


def bools(*shape: int) -> Any:
    return jax.device_put(_random(*shape).integers(0, 2, shape) > 0)


def words(*shape: int) -> Any:
    return jax.device_put(np.random.default_rng(0).integers(0, 2**32, shape).astype(np.uint32))


def keys(n: int) -> Any:
    return jax.random.split(jax.random.key(3), n)


def window(key: Any, starts: Any) -> Any:
    return random_bits_window_p.bind(key, starts, bit_width=32, shape=(4, 6), global_shape=(8, 9))


def rows(table: Any, index: Any, mode: Any = None) -> Any:
    """The rows of an embedding table, as `jnp.take` gathers them."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(index.ndim - 1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(table, index, numbers, (1, table.shape[1]), mode=mode)


def points(array: Any, index: Any, mode: Any = None) -> Any:
    """Single elements by two coordinates each."""
    numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    return lax.gather(array, index, numbers, (1, 1), mode=mode)


def along_axis(array: Any, index: Any, mode: Any = None) -> Any:
    """`take_along_axis` on the last of three dimensions."""
    numbers = lax.GatherDimensionNumbers((), (2,), (2,), (0, 1), (0, 1))
    return lax.gather(array, index, numbers, (1, 1, 1), mode=mode)


ROWS = lax.ScatterDimensionNumbers((2,), (0,), (0,))
ALONG_AXIS = lax.ScatterDimensionNumbers((), (2,), (2,), (0, 1), (0, 1))
PARTS = lax.ScatterDimensionNumbers((1, 2), (), (0,))

RAGGED_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
RAGGED_BATCH = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), (1,), (1,))
RAGGED_MATRICES = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())


def matrices(*shape: int) -> Any:
    """Symmetric, with positive eigenvalues."""
    x = floats(*shape)
    return x @ jnp.swapaxes(x, -1, -2) + jnp.eye(shape[-1])


Case = tuple[Callable[..., Any], tuple[Any, ...]]

OUTSIDE = jnp.asarray([[[0], [7], [3]], [[-1], [8], [5]]], jnp.int32)  # two of the rows do not exist

EXACT: dict[str, Case] = {
    "add integers": (lax.add, (integers(4, 6), integers(4, 6, seed=1))),
    "add broadcast": (lambda x, y: lax.add_p.bind(x, y), (integers(4, 6), integers(4, 1))),
    "select": (lax.select_n, (bools(4, 6), floats(4, 6), floats(4, 6, seed=1))),
    "select by one": (lax.select_n, (jnp.bool_(True), floats(4, 6), floats(4, 6, seed=1))),
    "select of three": (lax.select_n, (integers(4, high=3), floats(4), floats(4, seed=1), floats(4, seed=2))),
    "clamp": (lax.clamp, (jnp.float32(-0.5), floats(4, 6), jnp.float32(0.5))),
    "clamp by arrays": (lax.clamp, (-positive(4, 6), floats(4, 6), positive(4, 6))),
    "compare": (lax.lt, (floats(4, 6), floats(4, 6, seed=1))),
    "round": (lambda x: lax.round(x), (floats(4, 6),)),
    "shift": (lax.shift_right_logical, (words(4, 6), words(4, 6) % 32)),
    "population count": (lax.population_count, (words(4, 6),)),
    "cast": (lambda x: lax.convert_element_type(x, jnp.bfloat16), (floats(4, 6),)),
    "cast integers": (lambda x: lax.convert_element_type(x, jnp.float32), (integers(4, 6),)),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (floats(4, 6),)),
    "bitcast narrower": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), (floats(4, 6),)),
    "bitcast wider": (
        lambda x: lax.bitcast_convert_type(x, jnp.uint32),
        (jnp.arange(24, dtype=jnp.uint8).reshape(6, 4),),
    ),
    "reduce precision": (lambda x: lax.reduce_precision(x, 8, 7), (floats(4, 6),)),
    "stop gradient": (lax.stop_gradient, (floats(4, 6),)),
    "copy": (jnp.copy, (floats(4, 6),)),
    "complex": (lax.complex, (floats(4, 6), floats(4, 6, seed=1))),
    "real": (lax.real, (lax.complex(floats(4, 6), floats(4, 6)),)),
    "conj": (lax.conj, (lax.complex(floats(4, 6), floats(4, 6)),)),
    "constraint": (
        lambda x: lax.with_sharding_constraint(x, NamedSharding(Mesh(jax.devices()[:2], ("x",)), PartitionSpec("x"))),
        (floats(4, 6),),
    ),
    "put": (jax.device_put, (floats(4, 6),)),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), (floats(4, 6), floats(8))),
    "reshape merge": (lambda x: lax.reshape(x, (24, 2, 4)), (floats(4, 6, 8),)),
    "reshape in another order": (lambda x: lax.reshape(x, (8, 24), (2, 0, 1)), (floats(4, 6, 8),)),
    "reshape split": (lambda x: lax.reshape(x, (4, 6, 2, 4)), (floats(24, 8),)),
    "reshape shift": (lambda x: lax.reshape(x, (8, 6)), (floats(4, 12),)),
    "reshape coprime": (lambda x: lax.reshape(x, (4, 2, 6, 2)), (floats(4, 6, 4),)),
    "reshape units": (lambda x: lax.reshape(x, (1, 4, 1, 6, 1)), (floats(4, 1, 6),)),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (2, 4, 6, 8), (1, 3)), (floats(4, 1),)),
    "broadcast scalar": (lambda x: lax.broadcast_in_dim(x, (4, 6), ()), (jnp.float32(2),)),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), (floats(4, 6, 2),)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (floats(4, 1, 6),)),
    "reverse": (lambda x: lax.rev(x, (1,)), (floats(4, 6),)),
    "tile": (lambda x: lax.tile(x, (2, 1, 4)), (floats(4, 6, 2),)),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (4, 8), 1), ()),
    "iota in bfloat16": (lambda: lax.iota(jnp.bfloat16, 1024), ()),
    "iota in uint8": (lambda: lax.iota(jnp.uint8, 200), ()),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 6)), (floats(4, 6),)),
    "slice a half": (lambda x: lax.slice(x, (4, 0), (8, 6)), (floats(8, 6),)),
    "slice every other": (lambda x: lax.slice(x, (1, 0), (8, 6), (2, 1)), (floats(8, 6),)),
    "slice with a stride": (lambda x: lax.slice(x, (1, 0), (6, 6), (2, 1)), (floats(8, 6),)),
    "slice of keys": (lambda x: lax.slice(x, (2,), (4,)), (keys(4),)),
    "pad": (lambda x: lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 0))), (floats(4, 6),)),
    "pad by a value": (lambda x, v: lax.pad(x, v, ((0, 4, 0), (6, 6, 0))), (floats(4, 6), jnp.float32(3))),
    "pad between": (lambda x: lax.pad(x, 0.0, ((1, 1, 2), (0, 0, 0))), (floats(4, 6),)),
    "pad away": (lambda x: lax.pad(x, 0.0, ((-1, 0, 0), (0, 0, 0))), (floats(4, 6),)),
    "dynamic slice": (
        lambda x, i, j: lax.dynamic_slice_p.bind(x, i, j, slice_sizes=(2, 6)),
        (floats(4, 6), jnp.int32(1), jnp.int32(3)),
    ),
    "dynamic update": (
        lambda x, y, i, j: lax.dynamic_update_slice_p.bind(x, y, i, j),
        (floats(4, 6), floats(2, 6), jnp.int32(1), jnp.int32(3)),
    ),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), (floats(4, 6), floats(2, 6))),
    "concatenate halves": (lambda x, y: lax.concatenate([x, y], 1), (floats(4, 6), floats(4, 6, seed=1))),
    "split": (lambda x: lax.split(x, (2, 4), 1), (floats(4, 6),)),
    "split evenly": (lambda x: lax.split(x, (4, 4, 4), 1), (floats(2, 12),)),
    # Older versions of JAX unstack by slices, so that there is no such primitive.
    **({"unstack": (lambda x: jnp.unstack(x, axis=1), (floats(4, 3, 6),))} if hasattr(lax, "unstack_p") else {}),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (floats(4, 6), floats(4, 6, seed=1))),
    "reduce_max": (lambda x: lax.reduce_max(x, (0, 2)), (floats(4, 6, 2),)),
    "reduce_min": (lambda x: lax.reduce_min(x, (1,)), (floats(4, 6),)),
    "reduce_and": (lambda x: lax.reduce_and(x, (1,)), (bools(4, 2),)),
    "reduce_or": (lambda x: lax.reduce_or(x, (1,)), (bools(4, 2),)),
    "reduce_xor": (lambda x: lax.reduce_xor(x, (1,)), (words(4, 2),)),
    "sum of integers": (lambda x: lax.reduce_sum(x, (0,)), (integers(4, 6),)),
    "product of integers": (lambda x: lax.reduce_prod(x, (0,)), (integers(4, 6),)),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), (floats(4, 6),)),
    "argmin": (lambda x: lax.argmin(x, 0, jnp.int32), (floats(4, 6),)),
    "cummax": (lambda x: lax.cummax(x, 1), (floats(4, 6),)),
    "sort": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (floats(4, 6), integers(4, 6))),
    "top_k": (lambda x: lax.top_k(x, 2), (floats(4, 6),)),
    "max window": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), (floats(4, 6),)),
    "gather": (rows, (floats(8, 4), integers(4, 6, 1, high=8))),
    "gather past the end, clipped": (functools.partial(rows, mode="clip"), (floats(8, 4), 2 * OUTSIDE)),
    "gather past the end, filled": (functools.partial(rows, mode="fill"), (floats(8, 4), 2 * OUTSIDE)),
    "gather past the end, promised": (
        functools.partial(rows, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS),
        (floats(8, 4), 2 * OUTSIDE),
    ),
    "gather integers past the end": (functools.partial(rows, mode="fill"), (integers(8, 4), OUTSIDE)),
    "gather by bytes": (rows, (floats(200, 2), words(4, 6, 1).astype(jnp.uint8) % 200)),
    "gather by words, filled": (functools.partial(rows, mode="fill"), (floats(8, 2), words(4, 1) >> 28)),
    "gather bools": (rows, (bools(8, 4), integers(4, 6, 1, high=8))),
    "gather points": (points, (floats(4, 6), integers(8, 2, high=4))),
    "gather points, filled": (functools.partial(points, mode="fill"), (floats(4, 6), integers(16, 2, high=8))),
    "gather one": (rows, (floats(8, 4), jnp.asarray([5], jnp.int32))),
    "gather along an axis": (along_axis, (floats(4, 2, 8), integers(4, 2, 6, 1, high=8))),
    "gather along an axis, filled": (
        functools.partial(along_axis, mode="fill"),
        (floats(4, 2, 8), integers(4, 2, 6, 1, high=12) - 2),
    ),
    "gather a window": (
        lambda x, i: lax.gather(x, i, lax.GatherDimensionNumbers((1, 2), (), (0,)), (3, 4)),
        (floats(8, 4), integers(6, 1, high=5)),
    ),
    "gather keys": (
        lambda x, i: lax.gather(x, i, lax.GatherDimensionNumbers((), (0,), (0,)), (1,)),
        (keys(8), integers(4, 1, high=8)),
    ),
    "scatter": (lambda x, i, u: lax.scatter(x, i, u, ROWS), (floats(8, 4), OUTSIDE, floats(2, 3, 4))),
    "scatter along an axis": (
        lambda x, i, u: lax.scatter(x, i, u, ALONG_AXIS),
        (floats(4, 2, 8), jnp.stack([integers(4, 2, 1, high=4), 7 - integers(4, 2, 1, high=4)], 2), floats(4, 2, 2)),
    ),
    "scatter the maximum": (lambda x, i, u: lax.scatter_max(x, i, u, ROWS), (floats(8, 4), OUTSIDE, floats(2, 3, 4))),
    "scatter the minimum": (
        lambda x, i, u: lax.scatter_min(x, i, u, ROWS, mode="clip"),
        (floats(8, 4), OUTSIDE, floats(2, 3, 4)),
    ),
    "add integers at": (
        lambda x, i, u: lax.scatter_add(x, i, u, ROWS),
        (integers(8, 4), integers(4, 6, 1, high=8), integers(4, 6, 4)),
    ),
    "approximate top k": (lambda x: lax.approx_max_k(x, 2), (floats(4, 6),)),
    "cummin": (lambda x: lax.cummin(x, 0, reverse=True), (floats(4, 6),)),
    "min window": (lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID"), (floats(4, 6),)),
    "product of groups of rows": (
        lambda x, w, n: lax.ragged_dot(x, w, n),
        (integers(12, 4), integers(4, 4, 6), jnp.asarray([2, 0, 7, 3], jnp.int32)),
    ),
    "product of groups that leave rows": (
        lambda x, w, n: lax.ragged_dot(x, w, n),
        (integers(12, 2), integers(4, 2, 2), jnp.asarray([2, 0, 5, 3], jnp.int32)),
    ),
    "gradient of groups of rows": (
        lambda x, y, n: lax.ragged_dot_general(x, y, n, RAGGED_ROWS),
        (integers(12, 4), integers(12, 6), jnp.asarray([2, 0, 7, 3], jnp.int32)),
    ),
    "batch of groups of rows": (
        lambda x, w, n: lax.ragged_dot_general(x, w, n, RAGGED_BATCH),
        (integers(2, 12, 4), integers(2, 2, 4, 2), jnp.asarray([[5, 7], [9, 3]], jnp.int32)),
    ),
    "groups of matrices": (
        lambda x, w, n: lax.ragged_dot_general(x, w, n, RAGGED_MATRICES),
        (integers(4, 2, 4), integers(4, 4, 2), jnp.asarray([1, 3], jnp.int32)),
    ),
    "new keys of one": (lambda k: jax.random.split(k, (4, 3)), (jax.random.key(0),)),
    "gamma": (lambda k, a: _primitive("random_gamma").bind(k, a, log_space=False), (keys(2), positive(2, 3))),
    **(
        {"philox": (_primitive("philox2x32").bind, (words(4), words(4), words(4)))}
        if _primitive("philox2x32") is not None
        else {}
    ),
    "bits": (lambda k: jax.random.bits(k, (4, 6), jnp.uint32), (jax.random.key(0),)),
    "bits of 8": (lambda k: jax.random.bits(k, (4, 6), jnp.uint8), (jax.random.key(0),)),
    "bits of 16": (lambda k: jax.random.bits(k, (8,), jnp.uint16), (jax.random.key(0),)),
    "bits of many keys": (lambda k: jax.vmap(lambda one: jax.random.bits(one, (6,)))(k), (keys(4),)),
    "bits of a window": (window, (jax.random.key(0), jnp.asarray([2, 3], jnp.int32))),
    "split keys": (lambda k: jax.vmap(lambda one: jax.random.split(one, 3))(k), (keys(4),)),
    "fold in": (lambda k, n: jax.vmap(jax.random.fold_in)(k, n), (keys(4), words(4))),
    "seed": (lambda n: jax.vmap(jax.random.key)(n), (integers(4),)),
    "wrap": (jax.random.wrap_key_data, (words(4, 2),)),
    "unwrap": (jax.random.key_data, (keys(4),)),
    "threefry": (
        lambda *xs: threefry2x32_p.bind(*xs),
        (words(4, 1), words(4, 1), words(4, 6), words(1, 6)),
    ),
}

UNARY = """abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
    expm1 floor is_finite lgamma log log1p log2 logistic neg rsqrt sign sin sinh sqrt square tan tanh"""
BINARY = "add atan2 div max min mul nextafter pow rem sub"

CLOSE: dict[str, Case] = {
    **{name: (getattr(lax, name), (positive(4),)) for name in UNARY.split() if hasattr(lax, name)},
    "acosh": (lax.acosh, (positive(4) + 1,)),
    **{name: (getattr(lax, name), (positive(4), positive(4) + 0.125)) for name in BINARY.split()},
    "integer_pow": (lambda x: lax.integer_pow(x, 3), (floats(4, 6),)),
    # Older versions of JAX have no such primitive.
    **{
        name: (getattr(lax, f"{name}_p").bind, (floats(4, 6), *floats(3)))
        for name in ("polynomial",)
        if hasattr(lax, f"{name}_p")
    },
    "integer_pow of one": (lambda x: lax.integer_pow(x, 1), (floats(4, 6),)),
    "add zero": (lambda x: lax.add_p.bind(x, 0.0), (floats(4, 6),)),
    "add one": (lambda x: lax.add_p.bind(x, 1.0), (floats(4, 6),)),
    "broadcast within": (lambda x, y: lax.sub_p.bind(x, y), (floats(4, 6, 2), floats(4, 1, 2))),
    "by a scalar": (lambda x, y: lax.mul_p.bind(x, y), (floats(4, 6), jnp.float32(2))),
    "matmul": (lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))), (floats(4, 6), floats(6, 8))),
    "attention": (
        lambda x, y: lax.dot_general(x, y, (((3,), (3,)), ((0, 1), (0, 1)))),
        (floats(2, 4, 6, 8), floats(2, 4, 2, 8)),
    ),
    "attention, fused": (
        functools.partial(attention_p.bind, optional=("bias", "key_lengths"), form=Form(0.3, 2, 1)),
        (floats(4, 3, 6, 2), floats(4, 5, 2, 2), floats(4, 5, 2, 2), floats(1, 6, 3, 5), integers(4, high=5) + 1),
    ),
    "gradient of attention, fused": (
        functools.partial(
            attention_backward_p.bind, optional=("bias", "mask"), form=Form(0.3, None, 0), dtypes=(jnp.float32,) * 4
        ),
        (
            floats(4, 3, 4, 2),
            floats(4, 5, 2, 2),
            floats(4, 5, 2, 2),
            floats(1, 1, 3, 5),
            bools(4, 1, 1, 5),
            floats(4, 3, 4, 2),
            positive(4, 4, 3),
            floats(4, 3, 4, 2, seed=1),
        ),
    ),
    "gradient of attention, fused, with one head of keys": (
        functools.partial(attention_backward_p.bind, optional=(), form=Form(0.3), dtypes=(jnp.float32,) * 3),
        (
            floats(2, 3, 4, 2),
            floats(2, 5, 1, 2),
            floats(2, 5, 1, 2),
            floats(2, 3, 4, 2),
            positive(2, 4, 3),
            floats(2, 3, 4, 2, seed=1),
        ),
    ),
    "weight gradient": (
        lambda x, y: lax.dot_general(x, y, (((0, 1), (1, 0)), ((), ()))),
        (floats(4, 6, 8), floats(6, 4, 2)),
    ),
    "batch at the end": (
        lambda x, y: lax.dot_general(x, y, (((0,), (1,)), ((2,), (0,)))),
        (floats(4, 6, 2), floats(2, 4, 8)),
    ),
    "outer": (lambda x, y: lax.dot_general(x, y, (((), ()), ((), ()))), (floats(4), floats(6))),
    "matmul of integers": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        (integers(4, 6), integers(6, 8)),
    ),
    "convolution": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (floats(2, 4, 6, 6), floats(2, 4, 3, 3))),
    "grouped convolution": (
        lambda x, w: lax.conv_general_dilated(x, w, (2,), "SAME", feature_group_count=4),
        (floats(2, 8, 6), floats(8, 2, 3)),
    ),
    "depthwise convolution": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", feature_group_count=4, dimension_numbers=("NWC", "WIO", "NWC")
        ),
        (floats(2, 6, 4), floats(3, 1, 4)),
    ),
    "convolution by groups of the batch": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", batch_group_count=2),
        (floats(4, 2, 6), floats(4, 2, 3)),
    ),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (0, 2)), (floats(4, 6, 2),)),
    "reduce_prod": (lambda x: lax.reduce_prod(x, (1,)), (floats(4, 6),)),
    "reduce by a function": (lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * b, (0,)), (floats(4, 6),)),
    "cumsum": (lambda x: lax.cumsum(x, 1), (floats(4, 6),)),
    "cumprod": (lambda x: lax.cumprod(x, 1, reverse=True), (floats(4, 6),)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), (floats(4, 6),)),
    "window sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"), (floats(4, 6),)),
    "scatter-add": (
        lambda x, i, u: lax.scatter_add(x, i, u, ROWS),
        (floats(8, 4), integers(4, 6, 1, high=8), floats(4, 6, 4)),
    ),
    "scatter-add past the end": (
        lambda x, i, u: lax.scatter_add(x, i, u, ROWS),
        (floats(8, 4), OUTSIDE, floats(2, 3, 4)),
    ),
    "scatter-add past the end, clipped": (
        lambda x, i, u: lax.scatter_add(x, i, u, ROWS, mode="clip"),
        (floats(8, 4), 2 * OUTSIDE, floats(2, 3, 4)),
    ),
    "scatter-add along an axis": (
        lambda x, i, u: lax.scatter_add(x, i, u, ALONG_AXIS),
        (floats(4, 2, 8), integers(4, 2, 6, 1, high=8), floats(4, 2, 6)),
    ),
    "scatter-add of windows": (
        lambda x, i, u: lax.scatter_add(x, i, u, PARTS),
        (floats(8, 4), integers(6, 1, high=6), floats(6, 3, 4)),
    ),
    "scatter-mul": (
        lambda x, i, u: lax.scatter_mul(x, i, u, ROWS),
        (floats(8, 4), integers(2, 4, 1, high=8), positive(2, 4, 4)),
    ),
    "scatter-sub": (
        lambda x, i, u: lax.scatter_sub(x, i, u, ROWS),
        (floats(8, 4), integers(2, 4, 1, high=8), floats(2, 4, 4)),
    ),
    "cholesky": (
        lambda x: lax.linalg.cholesky_p.bind(x),
        (jnp.eye(3) * 4 + jnp.ones((4, 3, 3)),),
    ),
    **{
        name: (_primitive(name).bind, tuple(operands))
        for name, *operands in (
            ("add_any", floats(4), floats(4, seed=1)),
            ("and", words(4), words(4) >> 3),
            ("clz", words(4)),
            ("eq", integers(4), integers(4, seed=1)),
            ("ge", integers(4), integers(4, seed=1)),
            ("gt", integers(4), integers(4, seed=1)),
            ("igamma", positive(4), positive(4) + 0.5),
            ("igamma_grad_a", positive(4), positive(4) + 0.5),
            ("igammac", positive(4), positive(4) + 0.5),
            ("imag", lax.complex(floats(4), floats(4, seed=1))),
            ("le", integers(4), integers(4, seed=1)),
            ("mulhi", words(4), words(4) >> 3),
            ("ne", integers(4), integers(4, seed=1)),
            ("not", words(4)),
            ("or", words(4), words(4) >> 3),
            ("polygamma", jnp.ones(4), positive(4)),
            ("regularized_incomplete_beta", positive(4), positive(4) + 1, positive(4) / 4),
            ("shift_left", words(4), words(4) % 32),
            ("shift_right_arithmetic", integers(4), words(4).astype(jnp.int32) % 32),
            ("xor", words(4), words(4) >> 3),
            ("zeta", positive(4) + 2, positive(4)),
        )
        if _primitive(name) is not None
    },
    "eq_to": (lambda x, y: _primitive("eq_to").bind(x, y), (floats(4), floats(4, seed=1))),
    "le_to": (lambda x, y: _primitive("le_to").bind(x, y), (floats(4), floats(4, seed=1))),
    "lt_to": (lambda x, y: _primitive("lt_to").bind(x, y), (floats(4), floats(4, seed=1))),
    "name": (lambda x: checkpoint_name(x, "kept"), (floats(4),)),
    "clone keys": (jax.random.clone, (keys(4),)),
    "layout": (
        lambda x: with_layout_constraint(x, Layout((0, 1))),
        (floats(4, 6),),
    ),
    "eigenvalues": (lambda x: lax.linalg.eigh(x, symmetrize_input=False), (matrices(2, 3, 3),)),
    "eigenvalues of any matrix": (lambda x: lax.linalg.eig(x, compute_left_eigenvectors=False), (floats(2, 3, 3),)),
    "hessenberg": (lax.linalg.hessenberg, (floats(2, 3, 3),)),
    "householder": (lax.linalg.householder_product, (floats(2, 4, 3), floats(2, 3))),
    "lu": (lambda x: _primitive("lu").bind(x), (floats(2, 3, 3),)),
    "permutation": (
        lambda x: lax.linalg.lu_pivots_to_permutation(x, 3),
        (jnp.asarray([[1, 2, 2], [0, 2, 2]], jnp.int32),),
    ),
    "geqrf": (lambda x: _primitive("geqrf").bind(x), (floats(2, 4, 3),)),
    "qr": (lambda x: lax.linalg.qr(x, full_matrices=False), (floats(2, 4, 3),)),
    "schur": (lambda x: lax.linalg.schur(x, compute_schur_vectors=False), (floats(2, 3, 3),)),
    "svd": (lambda x: lax.linalg.svd(x, full_matrices=False, compute_uv=False), (floats(2, 4, 3),)),
    "symmetric product": (
        lambda a, c: lax.linalg.symmetric_product(a, c, symmetrize_output=False),
        (floats(2, 3, 4), matrices(2, 3, 3)),
    ),
    "triangular": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (matrices(2, 3, 3), floats(2, 3, 4)),
    ),
    "triangular from the right": (
        lambda a, b: lax.linalg.triangular_solve(a, b, lower=True),
        (matrices(3, 3), floats(4, 3)),
    ),
    "tridiagonal": (lax.linalg.tridiagonal, (matrices(2, 3, 3),)),
    "tridiagonal system": (
        lax.linalg.tridiagonal_solve,
        (floats(2, 4), 5 + positive(2, 4), floats(2, 4, seed=1), floats(2, 4, 3)),
    ),
    "scaled product": (
        lambda *xs: _primitive("scaled_dot").bind(
            *xs, dimension_numbers=(((2,), (1,)), ((0,), (0,))), preferred_element_type=np.dtype(np.float32)
        ),
        (*(integers(*shape).astype(jnp.float32) for shape in ((2, 4, 16), (2, 16, 6), (2, 4, 4), (2, 2, 6))),),
    ),
    "product in float8": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32),
        (floats(4, 6).astype(jnp.float8_e4m3fn), floats(6, 8).astype(jnp.float8_e5m2)),
    ),
    "fft": (lambda x: lax.fft(x, "RFFT", (6,)), (floats(4, 6),)),
}
