"""Functions with loops and branches to cut, and the equations with a body that they and their gradients have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.ir.graph import Equation, Value
from autopar.ir.rule import bind
from autopar.tracing.trace import trace

WIDTH, HEADS, DEPTH, HIDDEN, LAYERS, BATCH, TIME = 8, 4, 2, 16, 3, 4, 6


def normal(seed: int, *shape: int) -> Any:
    """Made by NumPy and put on a device as it is, which compiles nothing when the tests are collected."""
    return jax.device_put((np.random.default_rng((seed, *shape)).standard_normal(shape) * 0.3).astype(np.float32))


def recurrent(w: Any, u: Any, b: Any, xs: Any) -> Any:
    """An LSTM-like cell over time."""

    def cell(state: Any, x: Any) -> Any:
        h, c = state
        gates = x @ w + h @ u + b
        i, f, o = jnp.split(gates, 3, axis=-1)
        c = jax.nn.sigmoid(f) * c + jnp.tanh(i)
        h = jax.nn.sigmoid(o) * c
        return (h, c), h

    zero = jnp.zeros((xs.shape[1], u.shape[0]))
    (h, _), hs = lax.scan(cell, (zero, zero), xs)
    return (hs**2).mean() + h.sum()


def decay(a: Any, xs: Any) -> Any:
    """A diagonal state space, run backwards, that keeps no outputs."""
    return lax.scan(lambda h, x: (h * jax.nn.sigmoid(a) + x, None), jnp.zeros_like(xs[0]), xs, reverse=True)[0].sum()


def layers(ws: Any, x: Any) -> Any:
    """Transformer layers: attention, and a perceptron with normalisation, heads and hidden units to cut."""

    def norm(x: Any, scale: Any, offset: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * scale + offset

    def layer(x: Any, w: Any) -> Any:
        h = norm(x, w["scale"], w["offset"])
        q, k, v = (jnp.einsum("btd,dhk->bhtk", h, w[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", q, k))
        x = x + jnp.einsum("bhtk,hkd->btd", weights @ v, w["o"])
        hidden = norm(x, w["scale2"], w["offset2"]) @ w["up"] + w["bias"]
        return x + jax.nn.gelu(hidden) @ w["down"], (x * x).mean()

    y, norms = lax.scan(layer, x, ws)
    return (y**2).mean() + norms.sum()


LAYER_WEIGHTS = {
    **{name: normal(i, LAYERS, WIDTH, HEADS, DEPTH) for i, name in enumerate("qkv")},
    "o": normal(4, LAYERS, HEADS, DEPTH, WIDTH),
    "up": normal(5, LAYERS, WIDTH, HIDDEN),
    "bias": normal(6, LAYERS, HIDDEN),
    "down": normal(7, LAYERS, HIDDEN, WIDTH),
    **{name: normal(i, LAYERS, WIDTH) for i, name in enumerate(("scale", "offset", "scale2", "offset2"), 8)},
}


def beside_a_fence(ws: Any, x: Any) -> Any:
    """Attention and a perceptron side by side, the latter checkpointed: what both read is kept for one of them."""

    def layer(x: Any, w: Any) -> Any:
        h = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3)
        q, k, v = (jnp.einsum("btd,dhk->bhtk", h, w[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", q, k))
        perceptron = jax.checkpoint(lambda h, w: jax.nn.gelu(h @ w["up"]) @ w["down"])
        return x + jnp.einsum("bhtk,hkd->btd", weights @ v, w["o"]) + perceptron(h, w), None

    return (lax.scan(layer, x, ws)[0] ** 2).mean()


def handed_on(ws: Any, kept: Any, x: Any) -> Any:
    """What a gradient of a weight reads of a stack is handed on to the next round."""

    def layer(carry: Any, w: Any) -> Any:
        (x, before), (w, h) = carry, w
        hidden = jax.nn.gelu(x @ w["up"])
        gradient = jnp.einsum("btf,btd->fd", hidden, h)
        return (x + hidden @ w["down"], h), (gradient, before.sum())

    return lax.scan(layer, (x, jnp.zeros_like(x)), (ws, kept))


def read_in_two_ways(ws: Any, x: Any) -> Any:
    """A sum over examples that one product passes on and another one needs."""

    def layer(x: Any, w: Any) -> Any:
        hidden = jax.nn.gelu(jnp.cumsum(jnp.tanh(x), -1) @ w["up"])
        y = jnp.cumsum(hidden @ w["down"], -1)
        total = (y * jnp.cos(x)).sum(0)
        passed = jnp.einsum("td,df->tf", total, w["up"])
        return x + y * jnp.cos(x), (passed, jnp.einsum("td,btf->bdf", total, hidden))

    return lax.scan(layer, x, ws)


def accumulated(w: Any, xs: Any) -> Any:
    """A user's own accumulation of gradients over slices of the batch."""

    def add(total: Any, x: Any) -> Any:
        loss, g = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return (total[0] + loss, total[1] + g), loss

    (loss, g), losses = lax.scan(add, (0.0, jnp.zeros_like(w)), xs)
    return loss + (g**2).sum() + losses.max()


def nested(w: Any, xs: Any) -> Any:
    """A scan in a scan, with a counter and random bits."""

    def outer(state: Any, x: Any) -> Any:
        step, key, h = state
        key, sub = jax.random.split(key)
        mask = jax.random.bernoulli(sub, 0.5, h.shape)
        h, ys = lax.scan(lambda h, w: (jnp.tanh(h @ w + x) * mask, h.mean()), h, w)
        return (step + 1, key, h), (ys, step)

    (_, _, h), (ys, steps) = lax.scan(outer, (0, jax.random.key(0), xs[0]), xs)
    return (h**2).sum() + ys.sum() + steps.sum()


def powers(a: Any, x: Any, rounds: Any) -> Any:
    """Power iteration, as often as the caller says, that adds up what it saw."""

    def once(_: Any, state: Any) -> Any:
        x, seen, total = state
        y = jnp.tanh(x @ a)
        return y, seen + x.T @ y, total + (y**2).sum()

    return lax.fori_loop(0, rounds, once, (x, jnp.zeros((x.shape[1], x.shape[1])), 0.0))


def chosen(which: Any, w: Any, x: Any) -> Any:
    """Branches that compute, pass on, and sum over examples."""

    def matrix(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w), (x @ w).sum(0), x[:, :2] * 2

    def same(w: Any, x: Any) -> Any:
        return x, jnp.zeros(w.shape[1]), x[:, 2:4]

    def means(w: Any, x: Any) -> Any:
        return jax.nn.softmax(x) * w[0], (x * x).sum(0) * 3, x[:, 1:3]

    return lax.switch(which, [matrix, same, means], w, x)


def stepwise(w: Any, xs: Any) -> Any:
    """A loop with a branch in it."""

    def once(h: Any, x: Any) -> Any:
        h = lax.cond(x.mean() > 0, lambda h: jnp.tanh(h @ w), lambda h: h * 0.5, h)
        return h, h.sum()

    return lax.scan(once, jnp.ones((BATCH, w.shape[0])), xs)


def rematerialised(ws: Any, x: Any) -> Any:
    """Layers with `jax.checkpoint`: the backward loop has a fence."""

    def layer(h: Any, w: Any) -> Any:
        return jax.checkpoint(lambda h, w: h + jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]))(h, w), None

    return lax.scan(layer, x, ws)[0].sum()


def flattened(w: Any, x: Any) -> Any:
    """Examples in the minor part of a dimension, where random bits and indices have no place of their own."""

    def step(key: Any, x: Any) -> Any:
        key, sub = jax.random.split(key)
        y = x.reshape(-1, x.shape[-1]) @ w
        y = y * jax.random.bernoulli(sub, 0.5, y.shape) + lax.iota(jnp.float32, y.shape[0])[:, None]
        return key, y.reshape(*x.shape[:-1], -1)

    return lax.scan(step, jax.random.key(3), x)[1]


def regrouped(h: Any, b: Any) -> Any:
    """Two ways to cut one dimension that a reshape takes apart."""
    return lax.scan(lambda h, _: (jnp.tanh(h + b.reshape(4, 8)) * jnp.sort(b).sum(), None), h, None, length=2)[0]


def many(xs: Any, h: Any) -> Any:
    """More inputs that must be cut together than rounds of propagation."""

    def product(h: Any, xs: Any) -> Any:
        for x in xs:
            h = h * x
        return h, None

    return lax.scan(product, h, xs)[0]


def stepping(p: Any, x: Any) -> Any:
    """Examples reduced to what decides whether to go on, and read again in the loop."""

    def once(state: Any) -> Any:
        x, error, n = state
        y = x / (1 + jnp.sqrt(error))
        return y, (y**2).sum(), n + 1

    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 4), once, (x * p, jnp.float32(1), 0))


def each_its_own(w: Any, x: Any) -> Any:
    """Examples that take different numbers of rounds, under `vmap`: whether to go on is an array."""

    def one(x: Any) -> Any:
        return lax.while_loop(lambda s: (s[0] ** 2).sum() > 1e-2, lambda s: (s[0] @ w, s[1] + 1), (x, 0))

    return jax.vmap(one)(x)


def unread(w: Any, x: Any, t: Any) -> Any:
    """A loop in a loop, with examples at hand that nothing comes of (the time of an equation that knows none)."""

    def step(x: Any, _: Any) -> Any:
        jnp.cos(t)
        return jnp.tanh(x @ w), None

    return lax.while_loop(lambda s: s[1] < 3, lambda s: (lax.scan(step, s[0], None, 2)[0], s[1] + 1), (x, 0))


def until_all(w: Any, x: Any) -> Any:
    """As sequences are generated: until every example has met its end."""

    def once(state: Any) -> Any:
        x, done, n = state
        return jnp.where(done[:, None], x, x @ w), done | ((x**2).sum(1) < 1e-2), n + 1

    return lax.while_loop(lambda s: ~s[1].all() & (s[2] < 9), once, (x, jnp.zeros(len(x), bool), 0))


def scaled(ws: Any, x: Any) -> Any:
    """Layers whose products are in the scale of the largest of all activations, as those in 8 bits may be."""

    def layer(x: Any, w: Any) -> Any:
        scale, least = jnp.max(jnp.abs(x)), jnp.min(x, 0)
        return x + jnp.tanh((x / scale) @ w) * scale + least, jnp.max(x, 1)

    y, largest = lax.scan(layer, x, ws)
    return (y**2).mean() + largest.sum()


def by_vocabulary(w: Any, xs: Any, labels: Any) -> Any:
    """The loss of one chunk of examples after the other: a softmax over classes that may be cut."""

    def chunk(total: Any, x: Any) -> Any:
        logits = x[0] @ w
        picked = (jax.nn.one_hot(x[1], w.shape[1]) * logits).sum(-1)
        return total + (jax.nn.logsumexp(logits, -1) - picked).sum(), None

    return lax.scan(chunk, jnp.float32(0), (xs, labels))[0]


def converging(w: Any, x: Any) -> Any:
    """Until no element changes much."""

    def once(state: Any) -> Any:
        x, _, n = state
        y = jnp.tanh(x @ w)
        return y, jnp.max(jnp.abs(y - x)), n + 1

    return lax.while_loop(lambda s: (s[1] > 1e-2) & (s[2] < 9), once, (x, jnp.float32(1), 0))


PERCEPTRON = {name: LAYER_WEIGHTS[name] for name in ("up", "down")}
FORWARD: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "powers": (powers, (normal(1, 8, 8), normal(2, BATCH, 8), np.int32(3))),
    "chosen 0": (chosen, (np.int32(0), normal(1, 8, 8), normal(2, BATCH, 8))),
    "chosen 2": (chosen, (np.int32(2), normal(1, 8, 8), normal(2, BATCH, 8))),
    "stepwise": (stepwise, (normal(1, 8, 8), normal(2, 3, BATCH))),
    "flattened": (flattened, (normal(1, 4, 8), normal(2, 2, TIME, BATCH, 4))),
    "regrouped": (regrouped, (normal(1, 4, 8), normal(2, 32))),
    "many": (many, ([normal(i, 2, 8) + 1 for i in range(105)], normal(0, 8))),
    "stepping": (stepping, (normal(1, 8), normal(2, BATCH, 8))),
    "until all": (until_all, (normal(1, 8, 8) / 6, normal(2, BATCH, 8) * 9.0 ** np.arange(BATCH)[:, None])),
    "converging": (converging, (normal(1, 8, 8) / 2, normal(2, BATCH, 8))),
    "by vocabulary": (by_vocabulary, (normal(1, 8, 12), normal(2, 3, BATCH, 8), np.arange(12).reshape(3, BATCH))),
    "handed on": (handed_on, (PERCEPTRON, normal(1, LAYERS, BATCH, TIME, WIDTH), normal(2, BATCH, TIME, WIDTH))),
    "read in two ways": (read_in_two_ways, (PERCEPTRON, normal(2, BATCH, TIME, WIDTH))),
    "unread": (unread, (normal(1, 8, 8), normal(2, BATCH, 8), normal(3, BATCH))),
    "each its own": (each_its_own, (normal(1, 8, 8) / 6, normal(2, BATCH, 8) * 9.0 ** np.arange(BATCH)[:, None])),
}
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "recurrent": (recurrent, (normal(1, 5, 24), normal(2, 8, 24), normal(3, 24), normal(4, TIME, BATCH, 5))),
    "decay": (decay, (normal(1, 8), normal(2, TIME, BATCH, 8))),
    "layers": (layers, (LAYER_WEIGHTS, normal(9, BATCH, TIME, WIDTH))),
    "beside a fence": (beside_a_fence, (LAYER_WEIGHTS, normal(9, BATCH, TIME, WIDTH))),
    "accumulated": (accumulated, (normal(1, 6, 4), normal(2, 3, BATCH, 6))),
    "rematerialised": (rematerialised, (normal(1, LAYERS, 2, WIDTH, WIDTH), normal(2, BATCH, WIDTH))),
    "scaled": (scaled, (normal(1, LAYERS, WIDTH, WIDTH), normal(2, BATCH, WIDTH))),
    "nested": (nested, (normal(1, 2, 8, 8), normal(2, 3, BATCH, 8))),
}


def loops(name: str) -> list[tuple[Equation, list[Any], list[Any]]]:
    """The equations with a body, of a function and of its gradient, with the numbers that they meet and make."""
    fun, args = {**CASES, **FORWARD}[name]
    graph = trace(fun if name in FORWARD else jax.value_and_grad(fun, tuple(range(len(args)))), args, {}, name=name)
    values: dict[Any, Any] = {**graph.constants, **dict(zip(graph.inputs, jax.tree.leaves(args), strict=True))}
    found = []
    for eqn in graph.equations:
        operands = [values[v] if isinstance(v, Value) else jnp.asarray(v.value, v.dtype) for v in eqn.inputs]
        results = list(bind(eqn, operands))
        values.update(zip(eqn.outputs, results, strict=True))
        if eqn.primitive.name in ("scan", "while", "cond"):
            found.append((eqn, operands, results))
    return found
