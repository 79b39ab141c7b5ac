"""Small models and their train steps in plain JAX, for tests that need a whole step and nothing more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import decoder, moe

Params = dict[str, Any]
Loss = Callable[[Any, dict[str, Any]], Any]
Step = Callable[[Any, dict[str, Any]], tuple[Any, Any]]

RATE = 0.1


def sgd(loss: Loss) -> Step:
    """`state` is the parameters."""

    def train_step(state: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - RATE * g, state, grads), value

    return train_step


def adam(loss: Loss) -> Step:
    """Adam (Kingma and Ba 2015); `state` is (parameters, first moments, second moments, step count)."""

    def train_step(state: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        params, first, second, count = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
        rate = RATE * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
        params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, first, second)
        return (params, first, second, count), value

    return train_step


def sgd_state(params: Params) -> Any:
    return params


def adam_state(params: Params) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return (params, zeros, zeros, jnp.float32(0))


def chain_loss(params: Sequence[Any], batch: dict[str, Any]) -> Any:
    """Mean squared error of products with these matrices, tanh after each."""
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def residual_loss(params: Sequence[Params], batch: dict[str, Any]) -> Any:
    """Mean squared error of blocks of two dense layers, each added to what it reads."""
    x = batch["x"]
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def dense_chain_loss(params: Sequence[Params], batch: dict[str, Any]) -> Any:
    """Mean squared error of a chain of dense layers with tanh after each."""
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def mlp_loss(params: Params, batch: dict[str, Any]) -> Any:
    """Mean squared error of a chain of dense layers with tanh between them."""
    x = batch["x"]
    *hidden, last = params["layers"]
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ last["w"] + last["b"] - batch["y"]) ** 2)


def mlp_params(widths: Sequence[int]) -> Params:
    """`widths`: of the input, between the layers, and of the output."""
    keys = jax.random.split(jax.random.key(0), len(widths))
    shapes = zip(keys, widths, widths[1:], strict=False)
    layers = [{"w": jax.random.normal(k, (n, m)) / n**0.5, "b": jnp.zeros(m)} for k, n, m in shapes]
    return {"layers": layers}


def mlp_batch(size: int, widths: Sequence[int]) -> dict[str, Any]:
    x, y = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(x, (size, widths[0])), "y": jax.random.normal(y, (size, widths[-1]))}


def _normalise(x: Any, scale: Any) -> Any:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * scale


def block_loss(params: Params, batch: dict[str, Any]) -> Any:
    """Mean squared error of one transformer block."""
    return jnp.mean((_block(batch["x"], params) - batch["y"]) ** 2)


def loop_loss(params: Params, batch: dict[str, Any]) -> Any:
    """Mean squared error of several blocks in a `scan`, whose parameters have a leading axis."""
    x, _ = jax.lax.scan(lambda x, block: (_block(x, block), None), batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def loop_params(layers: int, width: int, heads: int) -> Params:
    stacked: Params = jax.tree.map(lambda leaf: jnp.stack([leaf] * layers), block_params(width, heads))
    return stacked


def _block(x: Any, params: Params) -> Any:
    """Layer norm, causal attention, layer norm, two dense layers."""
    x = _attend(x, params)
    h = _normalise(x, params["norm2"])
    return x + jax.nn.gelu(h @ params["up"] + params["up_bias"]) @ params["down"]


def _attend(x: Any, params: Params) -> Any:
    """Layer norm and causal attention."""
    h = _normalise(x, params["norm1"])
    q, k, v = (jnp.einsum("btd,dhe->bthe", h, params[name]) for name in ("q", "k", "v"))
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1)
    return x + jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, params["o"])


def block_params(width: int, heads: int) -> Params:
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def weight(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / width**0.5

    size = width // heads
    return {
        "norm1": jnp.ones(width), "norm2": jnp.ones(width),
        "q": weight(width, heads, size), "k": weight(width, heads, size), "v": weight(width, heads, size),
        "o": weight(heads, size, width),
        "up": weight(width, 4 * width), "up_bias": jnp.zeros(4 * width), "down": weight(4 * width, width),
    }  # fmt: skip


def block_batch(size: int, length: int, width: int) -> dict[str, Any]:
    x, y = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(x, (size, length, width)), "y": jax.random.normal(y, (size, length, width))}


def conv_loss(params: Params, batch: dict[str, Any]) -> Any:
    """Mean squared error of a strided convolution, batch norm, max-pooling, a residual bottleneck, and a dense head."""

    def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x = convolve(batch["x"], params["stem"], 2)
    x = x - jnp.mean(x, (0, 1, 2))
    x = jax.nn.relu(x * jax.lax.rsqrt(jnp.mean(x**2, (0, 1, 2)) + 1e-5) * params["scale"])
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    hidden = jax.nn.relu(convolve(x, params["down"]))
    x = x + convolve(jax.nn.relu(convolve(hidden, params["middle"])), params["up"])
    return jnp.mean((jnp.mean(x, (1, 2)) @ params["head"] - batch["y"]) ** 2)


def conv_params(width: int) -> Params:
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def weight(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / math.prod(shape[:-1]) ** 0.5

    return {
        "stem": weight(3, 3, 8, width), "scale": jnp.ones(width),
        "down": weight(1, 1, width, 8), "middle": weight(3, 3, 8, 8), "up": weight(1, 1, 8, width),
        "head": weight(width, 8),
    }  # fmt: skip


def conv_batch(size: int, extent: int) -> dict[str, Any]:
    x, y = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(x, (size, extent, extent, 8)), "y": jax.random.normal(y, (size, 8))}


def expert_loss(config: moe.MoEConfig) -> Loss:
    """Mean squared error of one transformer block whose MLP is a mixture of experts, and the auxiliary loss."""

    def loss(params: Params, batch: dict[str, Any]) -> Any:
        x = _attend(batch["x"], params)
        mixed, auxiliary_loss = moe.mixture(config, params["experts"], _normalise(x, params["norm2"]))
        return jnp.mean((x + mixed - batch["y"]) ** 2) + 0.01 * auxiliary_loss

    return loss


def expert_params(config: moe.MoEConfig) -> Params:
    params = block_params(config.width, config.num_heads)
    kept = {name: leaf for name, leaf in params.items() if name not in ("up", "up_bias", "down")}
    width, hidden, experts = config.width, config.mlp_factor * config.width, config.num_experts
    shapes = {"gate": (width, experts), "up": (experts, width, hidden), "down": (experts, hidden, width)}
    keys = jax.random.split(jax.random.key(2), 3)
    weights = {n: jax.random.normal(k, s) / width**0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    return {**kept, "experts": weights}


def grouped_query_loss(config: decoder.DecoderConfig) -> Loss:
    """Mean squared error of one block with rotary embeddings, grouped-query attention and SwiGLU."""

    def loss(params: Params, batch: dict[str, Any]) -> Any:
        x = batch["x"] + decoder.attention(config, params["attention"], batch["x"])
        return jnp.mean((x + decoder.swiglu(params["mlp"], x) - batch["y"]) ** 2)

    return loss


def grouped_query_params(config: decoder.DecoderConfig) -> Params:
    (block,) = decoder.init(config, jax.random.key(0))["blocks"]
    return {name: block[name] for name in ("attention", "mlp")}
