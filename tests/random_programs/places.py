"""Links that move, cut and look up elements, and those of whole numbers, by which they are looked up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

from tests.random_programs.drawer import SIZES, Drawer, Env


def transpose(drawer: Drawer) -> None:
    i = drawer.floats()
    info = drawer.infos[i]
    order = drawer.draw_from(st.permutations(range(len(info.shape))))
    batch = None if info.batch is None else order.index(info.batch)
    drawer.add("transpose", lambda env, ws: env[i].transpose(order), batch)


def fold(drawer: Drawer) -> None:
    """Splits a dimension in two, merges two, or adds one."""
    i = drawer.floats()
    info = drawer.infos[i]
    d = drawer.dim(i)
    size, batch = info.shape[d], info.batch
    choice = drawer.one_of(["split", "merge", "expand", "repeat"])
    shape = list(info.shape)
    if choice == "split" and size >= 4:
        shape[d : d + 1] = [2, size // 2]
        new = None if batch is None else batch + (batch > d)
        drawer.add("split", lambda env, ws: env[i].reshape(shape), new)
    elif choice == "merge" and d + 1 < len(shape):
        shape[d : d + 2] = [size * shape[d + 1]]
        new = None if batch is None else batch - (batch > d)
        drawer.add("merge", lambda env, ws: env[i].reshape(shape), new)
    elif choice == "expand":
        new = None if batch is None else batch + (batch >= d)
        drawer.add("expand", lambda env, ws: jnp.expand_dims(env[i], d), new)
    elif choice == "repeat":
        new = None if batch is None else batch + (batch >= d)
        drawer.add("repeat", lambda env, ws: jnp.repeat(jnp.expand_dims(env[i], d), 2, d), new)


def cut(drawer: Drawer) -> None:
    i = drawer.floats()
    d = drawer.dim(i)
    size = drawer.infos[i].shape[d]
    start = drawer.one_of(range(size))
    stop = drawer.one_of(range(start + 1, size + 1))
    stride = drawer.one_of([1, 1, 2])
    low, high, between = drawer.one_of([0, 1, size]), drawer.one_of([0, 2]), drawer.one_of([0, 0, 1])
    padding = [(low, high, between) if e == d else (0, 0, 0) for e in range(len(drawer.infos[i].shape))]
    function = drawer.one_of(
        [
            lambda x: lax.slice_in_dim(x, start, stop, stride, d),
            lambda x: lax.pad(x, jnp.float32(0.5), padding),
            lambda x: jnp.concatenate([x, jnp.sin(x)], d),
            lambda x: jnp.concatenate([lax.slice_in_dim(x, 0, start, axis=d), x], d),
            lambda x: jnp.stack([x, -x], d).sum(d + 1),
            lambda x: sum(jnp.split(x, 2, d)) if size % 2 == 0 else x,
        ]
    )
    drawer.add("cut", lambda env, ws: function(env[i]), drawer.infos[i].batch)


def dynamic(drawer: Drawer) -> None:
    i, j = drawer.floats(), drawer.integers()
    d = drawer.dim(i)
    if d == drawer.infos[i].batch:
        return
    size = drawer.infos[i].shape[d]
    taken = max(1, size // 2)
    by_tokens = drawer.draw_from(st.integers(0, 3)) == 0

    def at(env: Env) -> Any:
        return jnp.max(env[j]) % size if by_tokens else jnp.int32(1)

    # Not made from the operand: XLA on CPUs updates in place while it still reads from there, so that `jax.jit` is
    # wrong (jaxlib 0.10.2).
    shape = drawer.infos[i].shape
    w = drawer.weight(*(taken if e == d else 1 if e == drawer.infos[i].batch else n for e, n in enumerate(shape)))

    def update(x: Any, k: Any, ws: dict[str, Any]) -> Any:
        new = jnp.broadcast_to(ws[w], [taken if e == d else n for e, n in enumerate(x.shape)])
        return lax.dynamic_update_slice_in_dim(x, new, k, d)

    function = drawer.one_of([lambda x, k, ws: lax.dynamic_slice_in_dim(x, k, taken, d), update])
    drawer.add("dynamic", lambda env, ws: function(env[i], at(env), ws), drawer.infos[i].batch)


def look_up(drawer: Drawer) -> None:
    j = drawer.integers()
    info = drawer.infos[j]
    rows, width = drawer.one_of(SIZES), drawer.one_of(SIZES)
    w = drawer.weight(rows, width)
    mode = drawer.one_of(["clip", "fill", "wrap"])
    fill = 0.0 if mode == "fill" else None
    drawer.add("look_up", lambda env, ws: jnp.take(ws[w], env[j], 0, mode=mode, fill_value=fill), info.batch)


def pick(drawer: Drawer) -> None:
    """Along an axis, by indices of every example."""
    i, j = drawer.floats(), drawer.integers()
    info, index = drawer.infos[i], drawer.infos[j]
    if len(info.shape) != 2 or len(index.shape) != 2 or info.batch != 0 or index.batch != 0:
        return
    size = info.shape[1]
    mode = drawer.one_of(["clip", "fill"])

    def link(env: Env, ws: dict[str, Any]) -> Any:
        found = jnp.take_along_axis(env[i], env[j] % (size + (mode == "clip")), 1, mode=mode)
        return found

    drawer.add("pick", link, 0)


def scatter(drawer: Drawer) -> None:
    i, j = drawer.floats(), drawer.integers()
    info, index = drawer.infos[i], drawer.infos[j]
    if info.batch != 0 or index.batch != 0 or len(index.shape) != 2:
        return
    rows = drawer.one_of(SIZES)
    mode = drawer.one_of(["drop", "clip"])
    shared = drawer.flag()

    def by_example(x: Any, at: Any) -> Any:  # [B, ..], [B, L] -> [B, rows, ..]
        values = jnp.broadcast_to(x[:, None], (x.shape[0], at.shape[1], *x.shape[1:]))
        zeros = jnp.zeros((rows, *x.shape[1:]))
        return jax.vmap(lambda v, k: zeros.at[k].add(v, mode=mode))(values, at)

    def together(x: Any, at: Any) -> Any:  # a histogram of all examples: [rows, ..]
        return jnp.zeros((rows, *x.shape[1:])).at[at[:, 0]].add(x, mode=mode)

    if shared:
        drawer.add("histogram", lambda env, ws: together(env[i], env[j]) / 4, None)
    else:
        drawer.add("scatter", lambda env, ws: by_example(env[i], env[j]), 0)


def count(drawer: Drawer) -> None:
    """Integers from integers."""
    j = drawer.integers()
    info = drawer.infos[j]
    d = drawer.dim(j)
    function = drawer.one_of(
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
    drawer.add("count", lambda env, ws: function(env[j]), info.batch, integer=True)


def to_floats(drawer: Drawer) -> None:
    j = drawer.integers()
    drawer.add("to_floats", lambda env, ws: jnp.sin(env[j].astype(jnp.float32)), drawer.infos[j].batch)


def one_hot(drawer: Drawer) -> None:
    j = drawer.integers()
    rows = drawer.one_of(SIZES)
    drawer.add("one_hot", lambda env, ws: jax.nn.one_hot(env[j] % 4, rows), drawer.infos[j].batch)
