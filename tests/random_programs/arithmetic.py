"""Links that compute: elementwise, products, reductions, orders, windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import autopar
from tests.random_programs.drawer import BATCH, SIZES, Drawer, Env


def unary(drawer: Drawer) -> None:
    i = drawer.floats()
    functions: Sequence[Callable[[Any], Any]] = (
        jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.gelu, jax.nn.sigmoid, lax.erf, lambda x: x**3 / 4,
        lambda x: lax.rsqrt(1 + x * x), lambda x: jnp.log1p(x * x), lambda x: jnp.exp(-x * x),
        lambda x: jnp.clip(x, -0.6, 0.7), lambda x: lax.optimization_barrier(x), jnp.negative,
        lambda x: x - lax.stop_gradient(jnp.tanh(x)), lambda x: jnp.real(jnp.exp(1j * x)), lambda x: x,
    )  # fmt: skip
    function = drawer.one_of(functions)
    drawer.add("unary", lambda env, ws: function(env[i]), drawer.infos[i].batch)


def binary(drawer: Drawer) -> None:
    i = drawer.floats()
    info = drawer.infos[i]
    j = drawer.one_of([k for k, other in enumerate(drawer.infos) if other.shape == info.shape and not other.integer])
    function = drawer.one_of(
        [jnp.add, jnp.subtract, jnp.multiply, lambda a, b: a / (2 + b * b), lambda a, b: jnp.where(b > 0, a, -a)]
    )
    drawer.add("binary", lambda env, ws: function(env[i], env[j]), info.batch)


def with_weight(drawer: Drawer) -> None:
    i = drawer.floats()
    info = drawer.infos[i]
    shape = tuple(1 if d == info.batch or drawer.flag() else n for d, n in enumerate(info.shape))
    w = drawer.weight(*shape)
    function = drawer.one_of([jnp.add, jnp.multiply])
    drawer.add("with_weight", lambda env, ws: function(env[i], ws[w]), info.batch)


def product(drawer: Drawer) -> None:
    """With a weight: any dimensions contracted, the others of the weight new."""
    i = drawer.floats()
    info = drawer.infos[i]
    d, new = drawer.dim(i), drawer.one_of(SIZES)
    if d == info.batch:
        return
    flipped, in_front = drawer.flag(), drawer.flag()
    w = drawer.weight(new, info.shape[d]) if flipped else drawer.weight(info.shape[d], new)
    at = 1 if flipped else 0

    def link(env: Env, ws: dict[str, Any]) -> Any:
        if in_front:
            return lax.dot_general(ws[w], env[i], (((at,), (d,)), ((), ())))
        return lax.dot_general(env[i], ws[w], (((d,), (at,)), ((), ())), preferred_element_type=jnp.float32)

    batch = None if info.batch is None else info.batch - (info.batch > d) + in_front
    drawer.add("product", link, batch)


def product_of_two(drawer: Drawer) -> None:
    """Batched over the examples and contracted over a dimension of equal size."""
    i = drawer.floats()
    info = drawer.infos[i]
    if info.batch is None or len(info.shape) < 2:
        return
    d = drawer.dim(i)
    options = [
        (j, e)
        for j, other in enumerate(drawer.infos)
        if not other.integer and other.batch is not None
        for e, size in enumerate(other.shape)
        if e != other.batch and size == info.shape[d]
    ]
    if d == info.batch or not options:
        return
    j, e = drawer.one_of(options)
    numbers = (((d,), (e,)), ((info.batch,), (drawer.infos[j].batch,)))
    drawer.add("product_of_two", lambda env, ws: lax.dot_general(env[i], env[j], numbers) / 2, 0)


def attention(drawer: Drawer) -> None:
    """As one operator, over the dimension between that of the examples and the last."""
    i = drawer.floats()
    info = drawer.infos[i]
    if len(info.shape) != 3 or info.batch not in (0, None):
        return
    shared, each, width = drawer.one_of([1, 2, 4]), drawer.one_of([1, 2]), 2
    sizes = (shared * each * width, shared * width, shared * width)
    weights = [drawer.weight(info.shape[2], size) for size in sizes]
    is_causal, window = drawer.flag(), drawer.one_of([None, None, (1, 0)])

    def link(env: Env, ws: dict[str, Any]) -> Any:
        x = env[i]
        query, key, value = ((x @ ws[w]).reshape(*x.shape[:2], -1, width) for w in weights)
        found = autopar.dot_product_attention(query, key, value, is_causal=is_causal, local_window_size=window)
        return found.reshape(*x.shape[:2], -1)

    drawer.add("attention", link, info.batch)


def reduction(drawer: Drawer) -> None:
    i = drawer.floats()
    info = drawer.infos[i]
    d = drawer.dim(i)
    if len(info.shape) < 2:
        return
    keep = drawer.flag()
    functions: Sequence[Callable[..., Any]] = (
        jnp.sum, jnp.mean, jax.nn.logsumexp,
        lambda x, axis, keepdims: lax.stop_gradient(jnp.max(x, axis, keepdims=keepdims)),
        lambda x, axis, keepdims: lax.stop_gradient(jnp.min(x, axis, keepdims=keepdims)),
        lambda x, axis, keepdims: jnp.prod(1 + x / 4, axis, keepdims=keepdims),
        lambda x, axis, keepdims: jnp.var(x, axis, keepdims=keepdims),
    )  # fmt: skip
    function = drawer.one_of(functions)
    batch = None if info.batch in (None, d) else info.batch - (info.batch > d and not keep)
    drawer.add("reduction", lambda env, ws: function(env[i], axis=d, keepdims=keep), batch)


def normalise(drawer: Drawer) -> None:
    i = drawer.floats()
    d = drawer.dim(i)
    function = drawer.one_of(
        [
            lambda x: 2 * jax.nn.softmax(x, d),
            lambda x: (x - x.mean(d, keepdims=True)) * lax.rsqrt(x.var(d, keepdims=True) + 0.1),
        ]
    )
    drawer.add("normalise", lambda env, ws: function(env[i]), drawer.infos[i].batch)


def along(drawer: Drawer) -> None:
    i = drawer.floats()
    d = drawer.dim(i)
    function = drawer.one_of(
        [
            lambda x: lax.cumsum(x, d) / 2,
            lambda x: lax.cumsum(x, d, reverse=True) / 2,
            lambda x: lax.cumprod(1 + x / 4, d),
            lambda x: lax.cumlogsumexp(x, d),
            lambda x: lax.stop_gradient(lax.cummax(x, d)),
            lambda x: jnp.flip(x, d),
            lambda x: jnp.roll(x, 1, d),
            lambda x: jnp.abs(jnp.fft.rfft(x + 1, axis=d)) / 4 if x.ndim < 3 else x,
        ]
    )
    drawer.add("along", lambda env, ws: function(env[i]), drawer.infos[i].batch)


def order(drawer: Drawer) -> None:
    i = drawer.floats()
    d = drawer.dim(i)
    size = drawer.infos[i].shape[d]

    def apart(x: Any) -> Any:
        return x + 0.37 * lax.broadcasted_iota(jnp.float32, x.shape, d)

    def ranked(x: Any) -> Any:
        rows = jnp.moveaxis(apart(x), d, -1)
        _, index = lax.top_k(rows, max(1, size // 2))
        return jnp.moveaxis(jnp.take_along_axis(jnp.moveaxis(x, d, -1), index, -1), -1, d)

    function = drawer.one_of(
        [
            lambda x: lax.stop_gradient(lax.sort(apart(x), dimension=d)),
            lambda x: jnp.take_along_axis(x, jnp.argsort(apart(x), d), d),
            ranked,
        ]
    )
    drawer.add("order", lambda env, ws: function(env[i]), drawer.infos[i].batch)


def convolution(drawer: Drawer) -> None:
    i = drawer.floats()
    info = drawer.infos[i]
    if len(info.shape) != 3 or info.batch != 0:
        return
    channels, out = info.shape[1], drawer.one_of(SIZES)
    stride, padding = drawer.one_of([1, 2]), drawer.one_of(["SAME", "VALID"])
    groups = 2 if drawer.flag() and channels % 2 == 0 else 1
    w = drawer.weight(out, channels // groups, 2)

    def link(env: Env, ws: dict[str, Any]) -> Any:
        return lax.conv_general_dilated(env[i], ws[w], (stride,), padding, feature_group_count=groups)

    drawer.add("convolution", link, 0)


def pool(drawer: Drawer) -> None:
    i = drawer.floats()
    d = drawer.dim(i)
    ones = [2 if e == d else 1 for e in range(len(drawer.infos[i].shape))]
    strides = ones if drawer.flag() else [1] * len(ones)
    function = drawer.one_of(
        [
            lambda x: lax.reduce_window(x, 0.0, lax.add, ones, strides, "SAME"),
            lambda x: lax.stop_gradient(lax.reduce_window(x, -jnp.inf, lax.max, ones, strides, "VALID")),
        ]
    )
    drawer.add("pool", lambda env, ws: function(env[i]), drawer.infos[i].batch)


def system(drawer: Drawer) -> None:
    """Triangular systems, one for all examples or one for each."""
    i = drawer.floats()
    info = drawer.infos[i]
    if len(info.shape) not in (2, 3) or info.batch != 0:
        return
    size = info.shape[-1]
    w = drawer.weight(size, size)

    def link(env: Env, ws: dict[str, Any]) -> Any:
        matrix = jnp.eye(size) * 2 + jnp.tril(ws[w], -1) / 4
        x = env[i]
        if x.ndim == 3:
            matrix = jnp.broadcast_to(matrix, (x.shape[0], size, size))
        return lax.linalg.triangular_solve(matrix, x, lower=True)

    drawer.add("system", link, 0)


def groups(drawer: Drawer) -> None:
    """Rows of all examples, in groups with a matrix each."""
    i = drawer.floats()
    info = drawer.infos[i]
    if len(info.shape) != 2 or info.batch != 0:
        return
    width = drawer.one_of(SIZES)
    w = drawer.weight(2, info.shape[1], width)
    first = drawer.one_of(range(BATCH))

    def link(env: Env, ws: dict[str, Any]) -> Any:
        return lax.ragged_dot(env[i], ws[w], jnp.asarray([first, BATCH - first], jnp.int32))

    drawer.add("groups", link, 0)
