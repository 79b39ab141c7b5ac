"""GPT in plain JAX: pre-LN blocks, learned positions, causal attention, GELU MLP, tied embeddings, dropout.

Shapes in comments: B examples, T tokens each, W width, V vocabulary.
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

from benchmarks.models import shared
from benchmarks.models.shared import Batch, Metrics, Params, State


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model."""

    vocab_size: int
    sequence_length: int  # tokens; the number of learned positions
    num_layers: int
    width: int
    num_heads: int
    dropout: float = 0.1  # probability, on embeddings, attention weights and residual branches
    dtype: Any = jnp.float32  # of activations and matrix products; parameters are always float32
    remat: bool = False  # recompute each block in the backward pass
    one_hot: bool = False  # look tokens up by a product with one-hot rows
    fused_attention: bool = False  # as one operator, whose weights are never dropped out
    scan: bool = False  # one `lax.scan` over the blocks, whose parameters have a leading axis of layers

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not divisible by num_heads {self.num_heads}")


def _published(num_layers: int, width: int, num_heads: int) -> GPTConfig:
    return GPTConfig(51200, 1024, num_layers, width, num_heads, dtype=jnp.bfloat16, remat=True)


# The GPT sizes of the Alpa paper (Zheng et al., OSDI 2022, table 5, and its public benchmark settings).
SPECIFICATIONS: dict[str, GPTConfig] = {
    "125M": _published(12, 768, 12),
    "350M": _published(24, 1024, 16),
    "760M": _published(24, 1536, 16),
    "1.3B": _published(24, 2048, 32),
    "2.6B": _published(32, 2560, 32),
    "6.7B": _published(32, 4096, 32),
    "15B": _published(48, 5120, 40),
    "39B": _published(48, 8192, 64),
}


def init(config: GPTConfig, key: jax.Array) -> Params:
    """Parameters as in GPT-2: normal(0.02), projections back into the residual stream scaled by 1/sqrt(2 layers)."""
    width = config.width
    residual_scale = 1 / math.sqrt(2 * config.num_layers)

    def block_params(key: jax.Array) -> Params:
        attention, mlp = jax.random.split(key)
        return {
            "attention_norm": shared.layer_norm_params(width),
            "attention": shared.attention_params(attention, width, config.num_heads, residual_scale),
            "mlp_norm": shared.layer_norm_params(width),
            "mlp": shared.mlp_params(mlp, width, 4 * width, residual_scale),
        }

    tokens, positions, *blocks = jax.random.split(key, 2 + config.num_layers)
    block_trees = [block_params(key) for key in blocks]
    return {
        "tokens": shared.normal(tokens, config.vocab_size, width),
        "positions": shared.normal(positions, config.sequence_length, width),
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *block_trees) if config.scan else block_trees,
        "final_norm": shared.layer_norm_params(width),
    }


def _block(config: GPTConfig, params: Params, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """x: (B, T, W) -> (B, T, W)."""
    keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
    normalised = shared.layer_norm(params["attention_norm"], x)
    if config.fused_attention:
        attended = shared.causal_attention(params["attention"], normalised)
    else:
        mask = shared.causal_mask(x.shape[1])
        attended = shared.attention(params["attention"], normalised, mask, config.dropout, keys[0])
    x = x + shared.dropout(attended, config.dropout, keys[1])
    hidden = shared.mlp(params["mlp"], shared.layer_norm(params["mlp_norm"], x))
    return x + shared.dropout(hidden, config.dropout, keys[2])


def logits(config: GPTConfig, params: Params, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Scores of the next token, float32 (B, T, V); `inputs`: int32 (B, T). Without a key there is no dropout."""
    split = None if key is None else jax.random.split(key, 1 + config.num_layers)
    keys = [None] * (1 + config.num_layers) if split is None else list(split)
    embedded = shared.look_up(params["tokens"], inputs, config.one_hot) + params["positions"][: inputs.shape[1]]
    x = shared.dropout(embedded.astype(config.dtype), config.dropout, keys[0])
    block: Callable[..., jax.Array] = functools.partial(_block, config)
    if config.remat:
        block = jax.checkpoint(block)
    if config.scan:
        block_keys = None if split is None else split[1:]
        x, _ = jax.lax.scan(lambda x, layer: (block(layer[0], x, layer[1]), None), x, (params["blocks"], block_keys))
    else:
        for block_params, block_key in zip(params["blocks"], keys[1:], strict=True):
            x = block(block_params, x, block_key)
    x = shared.layer_norm(params["final_norm"], x)
    return jnp.einsum("btw,vw->btv", x, params["tokens"].astype(x.dtype)).astype(jnp.float32)


def loss(config: GPTConfig, params: Params, batch: Batch, key: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy in nats per token."""
    return shared.cross_entropy(logits(config, params, batch["inputs"], key), batch["targets"])


def make_loss(config: GPTConfig) -> shared.LossFn:
    """`loss` as the train step takes it."""
    return lambda params, statistics, batch, key: (loss(config, params, batch, key), (statistics, {}))


def make_init(config: GPTConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""
    return shared.make_init(lambda key: (init(config, key), {}), optimizer)


def make_train_step(
    config: GPTConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and the metrics "loss" and "grad_norm" (before clipping)."""
    return shared.make_train_step(make_loss(config), optimizer)


def make_eval_step(config: GPTConfig) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the loss without dropout."""
    return shared.make_eval_step(make_loss(config))


def abstract_batch(config: GPTConfig, batch_size: int) -> Batch:
    """The shapes of a batch, for planning without data."""
    return shared.abstract_tokens(batch_size, config.sequence_length)


def random_batch(config: GPTConfig, batch_size: int, key: jax.Array) -> Batch:
    """Random tokens with targets that can be learnt."""
    return shared.random_tokens(batch_size, config.sequence_length, config.vocab_size, key)
