"""A decoder like Llama (Touvron et al. 2023): rotary embeddings, grouped-query attention, SwiGLU, RMSNorm, no biases.

Shapes in comments: B examples, T tokens each, W width, V vocabulary; K groups of heads, each of which shares keys and
values among Q query heads; D the size of a head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autopar.ops.attention import dot_product_attention
from benchmarks.models import shared
from benchmarks.models.shared import Batch, Metrics, Params, State


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a model."""

    vocab_size: int
    sequence_length: int  # tokens
    num_layers: int
    width: int
    num_heads: int  # of queries
    num_key_value_heads: int
    hidden: int  # units of the MLP
    rotary_base: float = 10_000.0
    dtype: Any = jnp.float32  # of activations and matrix products; parameters are always float32
    remat: bool = False  # recompute each block in the backward pass
    fused_attention: bool = False  # as one operator
    scan: bool = False  # one `lax.scan` over the blocks, whose parameters have a leading axis of layers

    def __post_init__(self) -> None:
        if self.width % self.num_heads or self.head_dim % 2:
            raise ValueError(f"width {self.width} over num_heads {self.num_heads} must be an even number")
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not divisible by num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


def _llama_2(num_layers: int, width: int, heads: int, key_value_heads: int, hidden: int) -> DecoderConfig:
    return DecoderConfig(32000, 4096, num_layers, width, heads, key_value_heads, hidden, dtype=jnp.bfloat16, remat=True)


def _llama_3(num_layers: int, width: int, heads: int, hidden: int) -> DecoderConfig:
    return DecoderConfig(128256, 8192, num_layers, width, heads, 8, hidden, 500_000.0, jnp.bfloat16, remat=True)


# Llama 2 (Touvron et al. 2023) and Llama 3 (Grattafiori et al. 2024, table 3).
SPECIFICATIONS: dict[str, DecoderConfig] = {
    "2-7B": _llama_2(32, 4096, 32, 32, 11008),
    "2-13B": _llama_2(40, 5120, 40, 40, 13824),
    "2-70B": _llama_2(80, 8192, 64, 8, 28672),
    "3-8B": _llama_3(32, 4096, 32, 14336),
    "3-70B": _llama_3(80, 8192, 64, 28672),
    "3-405B": _llama_3(126, 16384, 128, 53248),
}


def init(config: DecoderConfig, key: jax.Array) -> Params:
    """normal(0.02); projections back into the residual stream scaled by 1/sqrt(2 layers)."""
    width, size = config.width, config.head_dim
    residual_scale = 1 / math.sqrt(2 * config.num_layers)

    def block_params(key: jax.Array) -> Params:
        q, k, v, out, gate, up, down = jax.random.split(key, 7)
        return {
            "attention_norm": shared.rms_norm_params(width),
            "attention": {
                "query": shared.normal(q, width, config.num_heads * size),
                "key": shared.normal(k, width, config.num_key_value_heads * size),
                "value": shared.normal(v, width, config.num_key_value_heads * size),
                "out": shared.normal(out, config.num_heads * size, width, scale=residual_scale),
            },
            "mlp_norm": shared.rms_norm_params(width),
            "mlp": {
                "gate": shared.normal(gate, width, config.hidden),
                "up": shared.normal(up, width, config.hidden),
                "down": shared.normal(down, config.hidden, width, scale=residual_scale),
            },
        }

    tokens, head, *blocks = jax.random.split(key, 2 + config.num_layers)
    block_trees = [block_params(key) for key in blocks]
    return {
        "tokens": shared.normal(tokens, config.vocab_size, width),
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *block_trees) if config.scan else block_trees,
        "final_norm": shared.rms_norm_params(width),
        "head": shared.normal(head, width, config.vocab_size),
    }


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021) of (.., T, heads, D), the halves of D being the pairs' parts."""
    length, size = x.shape[-3], x.shape[-1]
    frequencies = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequencies  # (T, 1, D / 2)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    real, imaginary = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([real * cos - imaginary * sin, imaginary * cos + real * sin], axis=-1)
    return rotated.astype(x.dtype)


def attention(config: DecoderConfig, params: Params, x: jax.Array) -> jax.Array:
    """x: (B, T, W) -> (B, T, W)."""
    weight = shared.cast(params, x.dtype)
    groups, size = config.num_key_value_heads, config.head_dim
    batch, length, _ = x.shape
    query = rotate((x @ weight["query"]).reshape(batch, length, config.num_heads, size), config.rotary_base)
    keys = rotate((x @ weight["key"]).reshape(batch, length, groups, size), config.rotary_base)
    value = (x @ weight["value"]).reshape(batch, length, groups, size)
    if config.fused_attention:
        mixed = dot_product_attention(query, keys, value, is_causal=True)
    else:
        grouped = query.reshape(batch, length, groups, -1, size)
        scores = jnp.einsum("btkqd,bskd->bkqts", grouped, keys) / math.sqrt(size)
        weights = shared.attention_weights(scores, shared.causal_mask(length)).astype(x.dtype)
        mixed = jnp.einsum("bkqts,bskd->btkqd", weights, value)
    result: jax.Array = mixed.reshape(batch, length, -1) @ weight["out"]
    return result


def swiglu(params: Params, x: jax.Array) -> jax.Array:
    """(Shazeer 2020): (B, T, W) -> (B, T, W)."""
    weight = shared.cast(params, x.dtype)
    hidden = jax.nn.silu(x @ weight["gate"]) * (x @ weight["up"])
    result: jax.Array = hidden @ weight["down"]
    return result


def _block(config: DecoderConfig, params: Params, x: jax.Array) -> jax.Array:
    x = x + attention(config, params["attention"], shared.rms_norm(params["attention_norm"], x))
    return x + swiglu(params["mlp"], shared.rms_norm(params["mlp_norm"], x))


def logits(config: DecoderConfig, params: Params, inputs: jax.Array) -> jax.Array:
    """Scores of the next token, float32 (B, T, V); `inputs`: int32 (B, T)."""
    x = params["tokens"].astype(config.dtype)[inputs]
    block: Callable[..., jax.Array] = functools.partial(_block, config)
    if config.remat:
        block = jax.checkpoint(block)
    if config.scan:
        x, _ = jax.lax.scan(lambda x, block_params: (block(block_params, x), None), x, params["blocks"])
    else:
        for block_params in params["blocks"]:
            x = block(block_params, x)
    x = shared.rms_norm(params["final_norm"], x)
    result: jax.Array = x @ params["head"].astype(x.dtype)
    return result.astype(jnp.float32)


def loss(config: DecoderConfig, params: Params, batch: Batch) -> jax.Array:
    """Mean cross entropy in nats per token."""
    return shared.cross_entropy(logits(config, params, batch["inputs"]), batch["targets"])


def make_loss(config: DecoderConfig) -> shared.LossFn:
    """`loss` as the train step takes it."""
    return lambda params, statistics, batch, key: (loss(config, params, batch), (statistics, {}))


def make_init(config: DecoderConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""
    return shared.make_init(lambda key: (init(config, key), {}), optimizer)


def make_train_step(
    config: DecoderConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and the metrics "loss" and "grad_norm" (before clipping)."""
    return shared.make_train_step(make_loss(config), optimizer)


def make_eval_step(config: DecoderConfig) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the loss."""
    return shared.make_eval_step(make_loss(config))


def abstract_batch(config: DecoderConfig, batch_size: int) -> Batch:
    """The shapes of a batch, for planning without data."""
    return shared.abstract_tokens(batch_size, config.sequence_length)


def random_batch(config: DecoderConfig, batch_size: int, key: jax.Array) -> Batch:
    """Random tokens with targets that can be learnt."""
    return shared.random_tokens(batch_size, config.sequence_length, config.vocab_size, key)
