"""Links with a body, or with a derivative of their own, and random bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.random_programs.drawer import Drawer, Env


def loop(drawer: Drawer) -> None:
    """A scan along a dimension, with weights in its body, or a loop of a few rounds."""
    i = drawer.floats()
    info = drawer.infos[i]
    d = drawer.dim(i)
    if len(info.shape) < 2 or d == info.batch:
        return
    last = [n for e, n in enumerate(info.shape) if e != d][-1]
    w = drawer.weight(last, last)
    product = drawer.flag()
    reverse = drawer.flag()
    rounds = drawer.one_of([2, 3])
    choice = drawer.one_of(["scan", "fori", "while", "remat"])

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
    drawer.add(choice, lambda env, ws: run(env[i], ws), info.batch)


def branch(drawer: Drawer) -> None:
    i = drawer.floats()
    w = drawer.weight(1)

    def link(env: Env, ws: dict[str, Any]) -> Any:
        return lax.cond(ws[w][0] > 0, lambda x: jnp.sin(x) * ws[w][0], lambda x: x + 1, env[i])

    drawer.add("branch", link, drawer.infos[i].batch)


def dropout(drawer: Drawer) -> None:
    i = drawer.floats()
    info = drawer.infos[i]
    seed = drawer.one_of(range(4))

    def link(env: Env, ws: dict[str, Any]) -> Any:
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(seed), 3), 0.7, info.shape)
        return jnp.where(kept, env[i], 0.0)

    drawer.add("dropout", link, info.batch)


def own_derivative(drawer: Drawer) -> None:
    i = drawer.floats()

    @jax.custom_jvp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    @jax.custom_vjp
    def g(x: Any) -> Any:
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(*primals), jnp.cos(primals[0]) * tangents[0] / 2))
    g.defvjp(lambda x: (g(x), x), lambda x, cotangent: (cotangent * jnp.cos(x) / 2,))
    function = f if drawer.flag() else g
    drawer.add("own_derivative", lambda env, ws: function(env[i]), drawer.infos[i].batch)


def rematerialise(drawer: Drawer) -> None:
    i = drawer.floats()
    info = drawer.infos[i]
    w = drawer.weight(info.shape[-1])
    if info.batch == len(info.shape) - 1:
        return
    drawer.add(
        "rematerialise",
        lambda env, ws: jax.checkpoint(lambda x, v: jnp.sin(jnp.tanh(x) * v))(env[i], ws[w]),
        info.batch,
    )
