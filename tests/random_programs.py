"""Random programs over the rule table, as train steps and as functions without a gradient.

A program is a list of links. A link takes arrays made so far and adds one; each kind of link draws what it needs so
that it is always legal. What is not continuous (orders, maxima, roundings) gets values without ties and no gradient:
where XLA rounds an element in two ways, `jax.jit` alone would differ from itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

BATCH = 8
SIZES = (2, 4, 8)
MAX_SIZE = 1024  # elements of one array
MAX_RANK = 4

Env = list[Any]  # the arrays made so far
Link = Callable[[Env, dict[str, Any]], Any]  # (arrays, weights) -> array
Body = Callable[[Env, dict[str, Any]], Any]


@dataclasses.dataclass(frozen=True)
class Info:
    """What is known of an array while links are drawn."""

    shape: tuple[int, ...]
    batch: int | None  # the dimension where the examples lie, as far as the drawer knows
    integer: bool = False


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """A function of weights and a batch, and numbers to call it with."""

    function: Callable[[dict[str, Any], dict[str, Any]], Any]
    weights: dict[str, Any]
    batch: dict[str, Any]  # examples along axis 0
    kinds: tuple[str, ...]  # of its links, in order


class _Drawer:
    """The links so far and the arrays that they make."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw_from = draw
        self.random = np.random.default_rng(draw(st.integers(0, 2**16)))  # numbers only
        features = self.one_of(SIZES)
        length = self.one_of(SIZES)
        self.batch = {
            "x": self.numbers(BATCH, features),
            "tokens": self.random.integers(0, 8, (BATCH, length)).astype(np.int32),
        }
        self.infos = [Info((BATCH, features), 0), Info((BATCH, length), 0, integer=True)]
        self.links: list[Link] = []
        self.kinds: list[str] = []
        self.weights: dict[str, Any] = {}

    # Drawing.

    def one_of(self, options: Sequence[Any]) -> Any:
        return self.draw_from(st.sampled_from(list(options)))

    def flag(self) -> bool:
        return bool(self.draw_from(st.booleans()))

    def numbers(self, *shape: int) -> Any:
        return (self.random.standard_normal(shape) / 2).astype(np.float32)

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = self.numbers(*shape)
        return name

    def floats(self) -> int:
        """A random float array, the latest most often."""
        found = [i for i, info in enumerate(self.infos) if not info.integer]
        return found[-1] if len(found) == 1 or self.flag() else int(self.one_of(found))

    def integers(self) -> int:
        return int(self.one_of([i for i, info in enumerate(self.infos) if info.integer]))

    def dim(self, i: int) -> int:
        """A dimension, that of the examples seldom."""
        info = self.infos[i]
        others = [d for d in range(len(info.shape)) if d != info.batch]
        if not others or (info.batch is not None and self.draw_from(st.integers(0, 9)) == 9):
            return info.batch or 0
        return int(self.one_of(others))

    def add(self, kind: str, link: Link, batch: int | None, integer: bool = False) -> None:
        """A link, unless what it makes is too large."""
        specs = [jax.ShapeDtypeStruct(i.shape, jnp.int32 if i.integer else jnp.float32) for i in self.infos]
        made = jax.eval_shape(link, specs, self.weights)
        if math.prod(made.shape) > MAX_SIZE or len(made.shape) > MAX_RANK or 0 in made.shape:
            return
        if batch is not None and made.shape[batch] != BATCH:
            batch = None  # cut, or put together with something
        self.links.append(link)
        self.kinds.append(kind)
        self.infos.append(Info(tuple(made.shape), batch, integer))

    # The links.

    def unary(self) -> None:
        i = self.floats()
        functions: Sequence[Callable[[Any], Any]] = (
            jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.gelu, jax.nn.sigmoid, lax.erf, lambda x: x**3 / 4,
            lambda x: lax.rsqrt(1 + x * x), lambda x: jnp.log1p(x * x), lambda x: jnp.exp(-x * x),
            lambda x: jnp.clip(x, -0.6, 0.7), lambda x: lax.optimization_barrier(x), jnp.negative,
            lambda x: x - lax.stop_gradient(jnp.tanh(x)), lambda x: jnp.real(jnp.exp(1j * x)), lambda x: x,
        )  # fmt: skip
        function = self.one_of(functions)
        self.add("unary", lambda env, ws: function(env[i]), self.infos[i].batch)

    def binary(self) -> None:
        i = self.floats()
        info = self.infos[i]
        j = self.one_of([k for k, other in enumerate(self.infos) if other.shape == info.shape and not other.integer])
        function = self.one_of(
            [jnp.add, jnp.subtract, jnp.multiply, lambda a, b: a / (2 + b * b), lambda a, b: jnp.where(b > 0, a, -a)]
        )
        self.add("binary", lambda env, ws: function(env[i], env[j]), info.batch)

    def with_weight(self) -> None:
        i = self.floats()
        info = self.infos[i]
        shape = tuple(1 if d == info.batch or self.flag() else n for d, n in enumerate(info.shape))
        w = self.weight(*shape)
        function = self.one_of([jnp.add, jnp.multiply])
        self.add("with_weight", lambda env, ws: function(env[i], ws[w]), info.batch)

    def product(self) -> None:
        """With a weight: any dimensions contracted, the others of the weight new."""
        i = self.floats()
        info = self.infos[i]
        d, new = self.dim(i), self.one_of(SIZES)
        if d == info.batch:
            return
        flipped, in_front = self.flag(), self.flag()
        w = self.weight(new, info.shape[d]) if flipped else self.weight(info.shape[d], new)
        at = 1 if flipped else 0

        def link(env: Env, ws: dict[str, Any]) -> Any:
            if in_front:
                return lax.dot_general(ws[w], env[i], (((at,), (d,)), ((), ())))
            return lax.dot_general(env[i], ws[w], (((d,), (at,)), ((), ())), preferred_element_type=jnp.float32)

        batch = None if info.batch is None else info.batch - (info.batch > d) + in_front
        self.add("product", link, batch)

    def product_of_two(self) -> None:
        """Batched over the examples and contracted over a dimension of equal size."""
        i = self.floats()
        info = self.infos[i]
        if info.batch is None or len(info.shape) < 2:
            return
        d = self.dim(i)
        options = [
            (j, e)
            for j, other in enumerate(self.infos)
            if not other.integer and other.batch is not None
            for e, size in enumerate(other.shape)
            if e != other.batch and size == info.shape[d]
        ]
        if d == info.batch or not options:
            return
        j, e = self.one_of(options)
        numbers = (((d,), (e,)), ((info.batch,), (self.infos[j].batch,)))
        self.add("product_of_two", lambda env, ws: lax.dot_general(env[i], env[j], numbers) / 2, 0)

    def reduction(self) -> None:
        i = self.floats()
        info = self.infos[i]
        d = self.dim(i)
        if len(info.shape) < 2:
            return
        keep = self.flag()
        functions: Sequence[Callable[..., Any]] = (
            jnp.sum, jnp.mean, jax.nn.logsumexp,
            lambda x, axis, keepdims: lax.stop_gradient(jnp.max(x, axis, keepdims=keepdims)),
            lambda x, axis, keepdims: lax.stop_gradient(jnp.min(x, axis, keepdims=keepdims)),
            lambda x, axis, keepdims: jnp.prod(1 + x / 4, axis, keepdims=keepdims),
            lambda x, axis, keepdims: jnp.var(x, axis, keepdims=keepdims),
        )  # fmt: skip
        function = self.one_of(functions)
        batch = None if info.batch in (None, d) else info.batch - (info.batch > d and not keep)
        self.add("reduction", lambda env, ws: function(env[i], axis=d, keepdims=keep), batch)

    def normalise(self) -> None:
        i = self.floats()
        d = self.dim(i)
        function = self.one_of(
            [
                lambda x: 2 * jax.nn.softmax(x, d),
                lambda x: (x - x.mean(d, keepdims=True)) * lax.rsqrt(x.var(d, keepdims=True) + 0.1),
            ]
        )
        self.add("normalise", lambda env, ws: function(env[i]), self.infos[i].batch)

    def along(self) -> None:
        i = self.floats()
        d = self.dim(i)
        function = self.one_of(
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
        self.add("along", lambda env, ws: function(env[i]), self.infos[i].batch)

    def order(self) -> None:
        i = self.floats()
        d = self.dim(i)
        size = self.infos[i].shape[d]

        def apart(x: Any) -> Any:
            return x + 0.37 * lax.broadcasted_iota(jnp.float32, x.shape, d)

        def ranked(x: Any) -> Any:
            rows = jnp.moveaxis(apart(x), d, -1)
            _, index = lax.top_k(rows, max(1, size // 2))
            return jnp.moveaxis(jnp.take_along_axis(jnp.moveaxis(x, d, -1), index, -1), -1, d)

        function = self.one_of(
            [
                lambda x: lax.stop_gradient(lax.sort(apart(x), dimension=d)),
                lambda x: jnp.take_along_axis(x, jnp.argsort(apart(x), d), d),
                ranked,
            ]
        )
        self.add("order", lambda env, ws: function(env[i]), self.infos[i].batch)

    def transpose(self) -> None:
        i = self.floats()
        info = self.infos[i]
        order = self.draw_from(st.permutations(range(len(info.shape))))
        batch = None if info.batch is None else order.index(info.batch)
        self.add("transpose", lambda env, ws: env[i].transpose(order), batch)

    def fold(self) -> None:
        """Splits a dimension in two, merges two, or adds one."""
        i = self.floats()
        info = self.infos[i]
        d = self.dim(i)
        size, batch = info.shape[d], info.batch
        choice = self.one_of(["split", "merge", "expand", "repeat"])
        shape = list(info.shape)
        if choice == "split" and size >= 4:
            shape[d : d + 1] = [2, size // 2]
            new = None if batch is None else batch + (batch > d)
            self.add("split", lambda env, ws: env[i].reshape(shape), new)
        elif choice == "merge" and d + 1 < len(shape):
            shape[d : d + 2] = [size * shape[d + 1]]
            new = None if batch is None else batch - (batch > d)
            self.add("merge", lambda env, ws: env[i].reshape(shape), new)
        elif choice == "expand":
            new = None if batch is None else batch + (batch >= d)
            self.add("expand", lambda env, ws: jnp.expand_dims(env[i], d), new)
        elif choice == "repeat":
            new = None if batch is None else batch + (batch >= d)
            self.add("repeat", lambda env, ws: jnp.repeat(jnp.expand_dims(env[i], d), 2, d), new)

    def cut(self) -> None:
        i = self.floats()
        d = self.dim(i)
        size = self.infos[i].shape[d]
        start = self.one_of(range(size))
        stop = self.one_of(range(start + 1, size + 1))
        stride = self.one_of([1, 1, 2])
        low, high, between = self.one_of([0, 1, size]), self.one_of([0, 2]), self.one_of([0, 0, 1])
        padding = [(low, high, between) if e == d else (0, 0, 0) for e in range(len(self.infos[i].shape))]
        function = self.one_of(
            [
                lambda x: lax.slice_in_dim(x, start, stop, stride, d),
                lambda x: lax.pad(x, jnp.float32(0.5), padding),
                lambda x: jnp.concatenate([x, jnp.sin(x)], d),
                lambda x: jnp.concatenate([lax.slice_in_dim(x, 0, start, axis=d), x], d),
                lambda x: jnp.stack([x, -x], d).sum(d + 1),
                lambda x: sum(jnp.split(x, 2, d)) if size % 2 == 0 else x,
            ]
        )
        self.add("cut", lambda env, ws: function(env[i]), self.infos[i].batch)

    def dynamic(self) -> None:
        i, j = self.floats(), self.integers()
        d = self.dim(i)
        if d == self.infos[i].batch:
            return
        size = self.infos[i].shape[d]
        taken = max(1, size // 2)
        by_tokens = self.draw_from(st.integers(0, 3)) == 0

        def at(env: Env) -> Any:
            return jnp.max(env[j]) % size if by_tokens else jnp.int32(1)

        # Not made from the operand: XLA on CPUs updates in place while it still reads from there, so that `jax.jit` is
        # wrong (jaxlib 0.10.2).
        shape = self.infos[i].shape
        w = self.weight(*(taken if e == d else 1 if e == self.infos[i].batch else n for e, n in enumerate(shape)))

        def update(x: Any, k: Any, ws: dict[str, Any]) -> Any:
            new = jnp.broadcast_to(ws[w], [taken if e == d else n for e, n in enumerate(x.shape)])
            return lax.dynamic_update_slice_in_dim(x, new, k, d)

        function = self.one_of([lambda x, k, ws: lax.dynamic_slice_in_dim(x, k, taken, d), update])
        self.add("dynamic", lambda env, ws: function(env[i], at(env), ws), self.infos[i].batch)

    def look_up(self) -> None:
        j = self.integers()
        info = self.infos[j]
        rows, width = self.one_of(SIZES), self.one_of(SIZES)
        w = self.weight(rows, width)
        mode = self.one_of(["clip", "fill", "wrap"])
        fill = 0.0 if mode == "fill" else None
        self.add("look_up", lambda env, ws: jnp.take(ws[w], env[j], 0, mode=mode, fill_value=fill), info.batch)

    def pick(self) -> None:
        """Along an axis, by indices of every example."""
        i, j = self.floats(), self.integers()
        info, index = self.infos[i], self.infos[j]
        if len(info.shape) != 2 or len(index.shape) != 2 or info.batch != 0 or index.batch != 0:
            return
        size = info.shape[1]
        mode = self.one_of(["clip", "fill"])

        def link(env: Env, ws: dict[str, Any]) -> Any:
            found = jnp.take_along_axis(env[i], env[j] % (size + (mode == "clip")), 1, mode=mode)
            return found

        self.add("pick", link, 0)

    def scatter(self) -> None:
        i, j = self.floats(), self.integers()
        info, index = self.infos[i], self.infos[j]
        if info.batch != 0 or index.batch != 0 or len(index.shape) != 2:
            return
        rows = self.one_of(SIZES)
        mode = self.one_of(["drop", "clip"])
        shared = self.flag()

        def by_example(x: Any, at: Any) -> Any:  # [B, ..], [B, L] -> [B, rows, ..]
            values = jnp.broadcast_to(x[:, None], (x.shape[0], at.shape[1], *x.shape[1:]))
            zeros = jnp.zeros((rows, *x.shape[1:]))
            return jax.vmap(lambda v, k: zeros.at[k].add(v, mode=mode))(values, at)

        def together(x: Any, at: Any) -> Any:  # a histogram of all examples: [rows, ..]
            return jnp.zeros((rows, *x.shape[1:])).at[at[:, 0]].add(x, mode=mode)

        if shared:
            self.add("histogram", lambda env, ws: together(env[i], env[j]) / 4, None)
        else:
            self.add("scatter", lambda env, ws: by_example(env[i], env[j]), 0)

    def count(self) -> None:
        """Integers from integers."""
        j = self.integers()
        info = self.infos[j]
        d = self.dim(j)
        function = self.one_of(
            [
                lambda n: n * 3 + 1,
                lambda n: n ^ 5,
                lambda n: jnp.cumsum(n, d),
                lambda n: lax.sort(n, dimension=d),
                lambda n: (n >> 1) % 5,
                lambda n: jnp.where(n > 2, n, -n),
                lambda n: jnp.flip(n, d) + lax.broadcasted_iota(jnp.int32, n.shape, d),
            ]
        )
        self.add("count", lambda env, ws: function(env[j]), info.batch, integer=True)

    def to_floats(self) -> None:
        j = self.integers()
        self.add("to_floats", lambda env, ws: jnp.sin(env[j].astype(jnp.float32)), self.infos[j].batch)

    def one_hot(self) -> None:
        j = self.integers()
        rows = self.one_of(SIZES)
        self.add("one_hot", lambda env, ws: jax.nn.one_hot(env[j] % 4, rows), self.infos[j].batch)

    def convolution(self) -> None:
        i = self.floats()
        info = self.infos[i]
        if len(info.shape) != 3 or info.batch != 0:
            return
        channels, out = info.shape[1], self.one_of(SIZES)
        stride, padding = self.one_of([1, 2]), self.one_of(["SAME", "VALID"])
        groups = 2 if self.flag() and channels % 2 == 0 else 1
        w = self.weight(out, channels // groups, 2)

        def link(env: Env, ws: dict[str, Any]) -> Any:
            return lax.conv_general_dilated(env[i], ws[w], (stride,), padding, feature_group_count=groups)

        self.add("convolution", link, 0)

    def pool(self) -> None:
        i = self.floats()
        d = self.dim(i)
        ones = [2 if e == d else 1 for e in range(len(self.infos[i].shape))]
        strides = ones if self.flag() else [1] * len(ones)
        function = self.one_of(
            [
                lambda x: lax.reduce_window(x, 0.0, lax.add, ones, strides, "SAME"),
                lambda x: lax.stop_gradient(lax.reduce_window(x, -jnp.inf, lax.max, ones, strides, "VALID")),
            ]
        )
        self.add("pool", lambda env, ws: function(env[i]), self.infos[i].batch)

    def loop(self) -> None:
        """A scan along a dimension, with weights in its body, or a loop of a few rounds."""
        i = self.floats()
        info = self.infos[i]
        d = self.dim(i)
        if len(info.shape) < 2 or d == info.batch:
            return
        last = [n for e, n in enumerate(info.shape) if e != d][-1]
        w = self.weight(last, last)
        product = self.flag()
        reverse = self.flag()
        rounds = self.one_of([2, 3])
        choice = self.one_of(["scan", "fori", "while", "remat"])

        def mix(x: Any, ws: dict[str, Any]) -> Any:
            if not product:
                return jnp.tanh(x + ws[w][0])
            return jnp.tanh(jnp.tensordot(x, ws[w], 1))

        def scan(x: Any, ws: dict[str, Any]) -> Any:
            xs = jnp.moveaxis(x, d, 0)

            def body(carry: Any, row: Any) -> tuple[Any, Any]:
                carry = mix(carry, ws) / 2 + row
                return carry, jnp.sin(carry)

            step = jax.checkpoint(body) if choice == "remat" else body
            _, ys = lax.scan(step, jnp.zeros_like(xs[0]), xs, reverse=reverse)
            return jnp.moveaxis(ys, 0, d)

        def repeat(x: Any, ws: dict[str, Any]) -> Any:
            if choice == "while":  # has no gradient in reverse
                x = lax.stop_gradient(x)
                weights = lax.stop_gradient(ws)
                return lax.while_loop(
                    lambda s: s[0] < rounds, lambda s: (s[0] + 1, jnp.tanh(s[1] + weights[w][0, 0])), (0, x)
                )[1]
            return lax.fori_loop(0, rounds, lambda k, y: jnp.sin(y) + ws[w][0, 0] * x, x)

        run = repeat if choice in ("fori", "while") else scan
        self.add(choice, lambda env, ws: run(env[i], ws), info.batch)

    def branch(self) -> None:
        i = self.floats()
        w = self.weight(1)

        def link(env: Env, ws: dict[str, Any]) -> Any:
            return lax.cond(ws[w][0] > 0, lambda x: jnp.sin(x) * ws[w][0], lambda x: x + 1, env[i])

        self.add("branch", link, self.infos[i].batch)

    def dropout(self) -> None:
        i = self.floats()
        info = self.infos[i]
        seed = self.one_of(range(4))

        def link(env: Env, ws: dict[str, Any]) -> Any:
            kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(seed), 3), 0.7, info.shape)
            return jnp.where(kept, env[i], 0.0)

        self.add("dropout", link, info.batch)

    def own_derivative(self) -> None:
        i = self.floats()

        @jax.custom_jvp
        def f(x: Any) -> Any:
            return jnp.sin(x)

        @jax.custom_vjp
        def g(x: Any) -> Any:
            return jnp.sin(x)

        f.defjvp(lambda primals, tangents: (f(*primals), jnp.cos(primals[0]) * tangents[0] / 2))
        g.defvjp(lambda x: (g(x), x), lambda x, cotangent: (cotangent * jnp.cos(x) / 2,))
        function = f if self.flag() else g
        self.add("own_derivative", lambda env, ws: function(env[i]), self.infos[i].batch)

    def rematerialise(self) -> None:
        i = self.floats()
        info = self.infos[i]
        w = self.weight(info.shape[-1])
        if info.batch == len(info.shape) - 1:
            return
        self.add(
            "rematerialise",
            lambda env, ws: jax.checkpoint(lambda x, v: jnp.sin(jnp.tanh(x) * v))(env[i], ws[w]),
            info.batch,
        )

    def system(self) -> None:
        """Triangular systems, one for all examples or one for each."""
        i = self.floats()
        info = self.infos[i]
        if len(info.shape) not in (2, 3) or info.batch != 0:
            return
        size = info.shape[-1]
        w = self.weight(size, size)

        def link(env: Env, ws: dict[str, Any]) -> Any:
            matrix = jnp.eye(size) * 2 + jnp.tril(ws[w], -1) / 4
            x = env[i]
            if x.ndim == 3:
                matrix = jnp.broadcast_to(matrix, (x.shape[0], size, size))
            return lax.linalg.triangular_solve(matrix, x, lower=True)

        self.add("system", link, 0)

    def groups(self) -> None:
        """Rows of all examples, in groups with a matrix each."""
        i = self.floats()
        info = self.infos[i]
        if len(info.shape) != 2 or info.batch != 0:
            return
        width = self.one_of(SIZES)
        w = self.weight(2, info.shape[1], width)
        first = self.one_of(range(BATCH))

        def link(env: Env, ws: dict[str, Any]) -> Any:
            return lax.ragged_dot(env[i], ws[w], jnp.asarray([first, BATCH - first], jnp.int32))

        self.add("groups", link, 0)


_KINDS: tuple[Callable[[_Drawer], None], ...] = (
    _Drawer.unary, _Drawer.binary, _Drawer.with_weight, _Drawer.product, _Drawer.product, _Drawer.product_of_two,
    _Drawer.reduction, _Drawer.normalise, _Drawer.along, _Drawer.order, _Drawer.transpose, _Drawer.fold, _Drawer.fold,
    _Drawer.cut, _Drawer.dynamic, _Drawer.look_up, _Drawer.pick, _Drawer.scatter, _Drawer.count, _Drawer.to_floats,
    _Drawer.one_hot, _Drawer.convolution, _Drawer.pool, _Drawer.loop, _Drawer.branch, _Drawer.dropout,
    _Drawer.own_derivative, _Drawer.rematerialise, _Drawer.system, _Drawer.groups,
)  # fmt: skip


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> RandomProgram:
    """Random programs: three in four are train steps."""
    drawer = _Drawer(draw)
    drawer.product()
    for kind in draw(st.lists(st.sampled_from(_KINDS), min_size=1, max_size=6)):
        kind(drawer)
    links, infos = tuple(drawer.links), tuple(drawer.infos)
    trains = draw(st.integers(0, 3)) > 0
    mean = draw(st.booleans())
    last = len(infos) - 1

    def arrays(weights: dict[str, Any], batch: dict[str, Any]) -> Env:
        env = [batch["x"], batch["tokens"]]
        for link in links:
            env.append(link(env, weights))
        return env

    def loss(weights: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        env = arrays(weights, batch)
        total = jnp.float32(0)
        for info, x in zip(infos[2:], env[2:], strict=True):
            if not info.integer:
                total += (jnp.mean if mean else jnp.sum)(jnp.sin(x)) / (1 if mean else 64)
        return total, results(env)

    def results(env: Env) -> dict[str, Any]:
        found = {"last": env[last]}
        numbers = [x for info, x in zip(infos, env, strict=True) if info.integer]
        return {**found, "integers": numbers[-1]}

    def step(weights: dict[str, Any], batch: dict[str, Any]) -> Any:
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(weights, batch)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value, aux

    def forward(weights: dict[str, Any], batch: dict[str, Any]) -> Any:
        return results(arrays(weights, batch))

    return RandomProgram(step if trains else forward, drawer.weights, drawer.batch, tuple(drawer.kinds))
