"""Steps whose float32 and bfloat16 results differ most from those of one device: in float64 they are equal.

So what differs is rounding in another order. It is also no larger than the rounding that one device has itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from tests.equivalence.compare import norm

EXACT = 1e-10  # relative, by norm
LIMIT = 2.0  # times the error of one device
Arguments = tuple[Any, Any]


# Proximal policy optimization: advantages by a scan over time, epochs of minibatches in loops.

ENVIRONMENTS, TIME, FEATURES, ACTIONS = 32, 8, 6, 4
EPOCHS, MINIBATCHES = 2, 4


def ppo(dtype: Any, _: Any) -> tuple[Any, Arguments]:
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3, eps=1e-5))

    def network(params: Any, x: Any) -> tuple[Any, Any]:
        for layer in params["hidden"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x @ params["actor"], (x @ params["critic"])[..., 0]

    def advantages(batch: Any) -> Any:
        def back(carry: Any, now: Any) -> Any:
            last, following = carry
            reward, value, done = now
            delta = reward + 0.99 * following * (1 - done) - value
            last = delta + 0.99 * 0.95 * (1 - done) * last
            return (last, value), last

        in_time = [jnp.moveaxis(batch[name], 1, 0) for name in ("rewards", "values", "dones")]
        start = jnp.zeros_like(batch["last_value"]), batch["last_value"]
        _, found = jax.lax.scan(back, start, tuple(in_time), reverse=True)
        return jnp.moveaxis(found, 0, 1)

    def loss(params: Any, batch: Any) -> Any:
        logits, values = network(params, batch["observations"])
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, batch["actions"][..., None], -1)[..., 0]
        ratio = jnp.exp(log_prob - batch["log_probs"])
        gain = batch["advantages"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        clipped = batch["values"] + jnp.clip(values - batch["values"], -0.2, 0.2)
        value = jnp.maximum((values - batch["targets"]) ** 2, (clipped - batch["targets"]) ** 2).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return policy + 0.5 * value - 0.01 * entropy

    def train_step(state: Any, batch: Any) -> Any:
        found = advantages(batch)
        batch = {**batch, "advantages": found, "targets": found + batch["values"]}
        del batch["rewards"], batch["dones"], batch["last_value"]

        def minibatch(state: Any, part: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(state["params"], part)
            updates, opt = optimizer.update(gradient, state["opt"], state["params"])
            return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}, value

        def epoch(state: Any, _: Any) -> Any:
            key, now = jax.random.split(state["key"])
            order = jax.random.permutation(now, ENVIRONMENTS)
            parts = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), batch)
            return jax.lax.scan(minibatch, {**state, "key": key}, parts)

        state, losses = jax.lax.scan(epoch, state, None, length=EPOCHS)
        return state, losses.mean()

    random = np.random.default_rng(0)

    def draw(*shape: int, scale: float = 1.0) -> Any:
        return jnp.asarray(scale * random.normal(size=shape), dtype)

    sizes = [FEATURES, 32, 32]
    hidden = [{"w": draw(a, b, scale=a**-0.5), "b": draw(b, scale=0.1)} for a, b in itertools.pairwise(sizes)]
    params = {"hidden": hidden, "actor": draw(32, ACTIONS, scale=0.1), "critic": draw(32, 1, scale=0.2)}
    here = (ENVIRONMENTS, TIME)
    batch = {
        "observations": draw(*here, FEATURES),
        "actions": jnp.asarray(random.integers(0, ACTIONS, here), jnp.int32),
        "log_probs": jnp.log(1 / ACTIONS) + draw(*here, scale=0.1),
        "values": draw(*here),
        "rewards": draw(*here),
        "dones": jnp.asarray(random.random(here) < 0.1, dtype),
        "last_value": draw(ENVIRONMENTS),
    }
    return train_step, ({"params": params, "opt": optimizer.init(params), "key": jax.random.key(0)}, batch)


# A decoder in MaxText's manner: rotary positions, grouped queries, RMS norms and gated MLPs in a scan with checkpoints,
# products in fewer bits than parameters, and a loss on the logarithm of the softmax's denominator.

LAYERS, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, VOCABULARY, LENGTH, EXAMPLES = 4, 32, 4, 2, 8, 64, 64, 16, 8


def decoder(dtype: Any, product_dtype: Any) -> tuple[Any, Arguments]:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95, eps_root=1e-16))

    def rms_norm(x: Any, scale: Any) -> Any:
        wide = x.astype(dtype)
        normed = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
        return normed.astype(product_dtype) * scale.astype(product_dtype)

    def rotated(x: Any) -> Any:
        angles = jnp.arange(LENGTH, dtype=dtype)[:, None] * 10_000.0 ** (-jnp.arange(0, HEAD, 2, dtype=dtype) / HEAD)
        sin, cos = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        p = jax.tree.map(lambda w: w.astype(product_dtype), p)
        h = rms_norm(x, p["norm"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, p[name]) for name in "qkv")
        q = rotated(q).reshape(*q.shape[:2], GROUPS, HEADS // GROUPS, HEAD)
        scores = jnp.einsum("btgnh,bsgh->bgnts", q, rotated(k)).astype(dtype) / HEAD**0.5
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(product_dtype)
        mixed = jnp.einsum("bgnts,bsgh->btgnh", weights, v).reshape(*x.shape[:2], HEADS, HEAD)
        x = x + jnp.einsum("btnh,nhd->btd", mixed, p["o"])
        h = rms_norm(x, p["mlp_norm"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(params: Any, batch: Any) -> Any:
        x = params["embedding"].astype(product_dtype)[batch["tokens"]]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        logits = (rms_norm(x, params["norm"]) @ params["logits"].astype(product_dtype)).astype(dtype)
        denominator = jax.nn.logsumexp(logits, -1)
        wanted = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return (denominator - wanted + 1e-4 * denominator**2).mean()

    def train_step(state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(gradient, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    random = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape) / WIDTH**0.5, dtype)

    heads = {
        "q": (WIDTH, HEADS, HEAD),
        "k": (WIDTH, GROUPS, HEAD),
        "v": (WIDTH, GROUPS, HEAD),
        "o": (HEADS, HEAD, WIDTH),
    }
    mlp = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    layers = {name: draw(LAYERS, *shape) for name, shape in {**heads, **mlp}.items()}
    layers |= {name: jnp.ones((LAYERS, WIDTH), dtype) for name in ("norm", "mlp_norm")}
    params = {
        "embedding": draw(VOCABULARY, WIDTH), "layers": layers, "norm": jnp.ones(WIDTH, dtype),
        "logits": draw(WIDTH, VOCABULARY),
    }  # fmt: skip
    batch = {
        name: jnp.asarray(random.integers(0, VOCABULARY, (EXAMPLES, LENGTH)), jnp.int32)
        for name in ("tokens", "targets")
    }
    return train_step, ({"params": params, "opt": optimizer.init(params)}, batch)


MODELS: dict[str, tuple[Callable[[Any, Any], tuple[Any, Arguments]], Any]] = {  # with the type of products, in few bits
    "ppo": (ppo, jnp.float32),
    "decoder": (decoder, jnp.bfloat16),
}
METHODS: dict[str, Any] = {
    "auto": "auto",
    "data_parallel": recipes.data_parallel(),
    "zero_3": recipes.zero(3),
    "megatron-2x2x2": recipes.megatron(2, 2, 2, 2),
}
ALWAYS = [("ppo", "data_parallel")]
CASES = [
    pytest.param(model, method, marks=[] if (model, method) in ALWAYS else [pytest.mark.slow])
    for model in MODELS
    for method in METHODS
    if (model, method) != ("ppo", "megatron-2x2x2")  # its gradients are in a loop
]


def change(model: str, dtype: Any, product_dtype: Any, parallelize: Callable[[Any], Any]) -> tuple[Any, float]:
    """Of the parameters in one step, in float64, and the loss."""
    step, (state, batch) = MODELS[model][0](dtype, product_dtype)
    before = jax.tree.map(np.asarray, state["params"])
    state, loss = autopar.gather(parallelize(step)(state, batch))
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, state["params"], before), float(loss)


def in_parallel(method: str) -> Callable[[Any], Any]:
    return lambda step: autopar.parallelize(step, method=METHODS[method], batch_axes=(None, 0))


@functools.cache
def exact(model: str) -> tuple[Any, float]:
    with jax.enable_x64(True):
        return change(model, jnp.float64, jnp.float64, jax.jit)


def error(found: Any, wanted: Any) -> float:
    return norm(jax.tree.map(lambda a, b: a - b, found, wanted)) / norm(wanted)


@pytest.mark.parametrize(("model", "method"), CASES)
def test_in_float64_nothing_differs(model: str, method: str) -> None:
    with jax.enable_x64(True):
        found, loss = change(model, jnp.float64, jnp.float64, in_parallel(method))
    wanted, wanted_loss = exact(model)
    assert error(found, wanted) <= EXACT
    assert loss == pytest.approx(wanted_loss, rel=EXACT)


@pytest.mark.parametrize(("model", "method"), CASES)
def test_in_fewer_bits_errors_are_those_of_one_device(model: str, method: str) -> None:
    _, few = MODELS[model]
    wanted, _ = exact(model)
    alone, _ = change(model, jnp.float32, few, jax.jit)
    found, _ = change(model, jnp.float32, few, in_parallel(method))
    assert error(alone, wanted) > EXACT
    assert error(found, wanted) <= LIMIT * error(alone, wanted)
