"""An encoder-decoder like T5 (Raffel et al. 2020): relative position buckets, cross attention, RMSNorm, no biases.

Shapes in comments: B examples, S tokens of the input and T of the target, W width, H heads, D the size of a head,
V vocabulary.
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

PADDING = 0  # the token that fills inputs and targets up, and that the decoder starts from


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
    """The sizes of a model."""

    vocab_size: int
    input_length: int  # tokens
    target_length: int  # tokens
    num_layers: int  # of the encoder, and as many of the decoder
    width: int
    num_heads: int
    head_dim: int
    hidden: int  # units of the MLP
    num_buckets: int = 32  # of relative positions
    max_distance: int = 128  # beyond which all positions share a bucket
    dropout: float = 0.1  # probability, on embeddings, attention weights, hidden units and residual branches
    dtype: Any = jnp.float32  # of activations and matrix products; parameters are always float32
    remat: bool = False  # recompute each block in the backward pass


def _published(num_layers: int, width: int, num_heads: int, head_dim: int, hidden: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(
        32128, 512, 114, num_layers, width, num_heads, head_dim, hidden, dtype=jnp.bfloat16, remat=True
    )


# T5 (Raffel et al. 2020, section 3.7); 114 tokens of target for 512 of input, as in its span corruption.
SPECIFICATIONS: dict[str, EncoderDecoderConfig] = {
    "small": _published(6, 512, 8, 64, 2048),
    "base": _published(12, 768, 12, 64, 3072),
    "large": _published(24, 1024, 16, 64, 4096),
    "3B": _published(24, 1024, 32, 128, 16384),
    "11B": _published(24, 1024, 128, 128, 65536),
}


def init(config: EncoderDecoderConfig, key: jax.Array) -> Params:
    """Parameters of variance 1 / fan-in, as in T5, whose attention has no other scale."""
    width, heads, size = config.width, config.num_heads, config.head_dim

    def normal(key: jax.Array, fan_in: int, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) / math.sqrt(fan_in)

    def attention_params(key: jax.Array) -> Params:
        q, k, v, out = jax.random.split(key, 4)
        return {
            "query": normal(q, width * size, width, heads, size),
            "key": normal(k, width, width, heads, size),
            "value": normal(v, width, width, heads, size),
            "out": normal(out, heads * size, heads, size, width),
        }

    def block_params(key: jax.Array, layers: tuple[str, ...]) -> Params:
        up, down, *keys = jax.random.split(key, 2 + len(layers))
        params: Params = {name: attention_params(key) for name, key in zip(layers, keys, strict=True)}
        params["mlp"] = {
            "up": normal(up, width, width, config.hidden),
            "down": normal(down, config.hidden, config.hidden, width),
        }
        return {**params, **{f"{name}_norm": shared.rms_norm_params(width) for name in params}}

    def stack_params(key: jax.Array, layers: tuple[str, ...]) -> Params:
        buckets, *blocks = jax.random.split(key, 1 + config.num_layers)
        return {
            "buckets": normal(buckets, width, config.num_buckets, heads),
            "blocks": [block_params(key, layers) for key in blocks],
            "final_norm": shared.rms_norm_params(width),
        }

    tokens, encoder, decoder = jax.random.split(key, 3)
    return {
        "tokens": normal(tokens, 1, config.vocab_size, width),
        "encoder": stack_params(encoder, ("attention",)),
        "decoder": stack_params(decoder, ("attention", "cross_attention")),
    }


def position_buckets(config: EncoderDecoderConfig, length: int, causal: bool) -> jax.Array:
    """int32 (length, length): the bucket of each key's (column's) position relative to the query's (row's).

    Half of the buckets are exact, the others grow with the logarithm of the distance; keys before and after the query
    have buckets of their own unless `causal`.
    """
    position = jnp.arange(length)
    relative = position[None, :] - position[:, None]
    count = config.num_buckets if causal else config.num_buckets // 2
    base = jnp.zeros_like(relative) if causal else jnp.where(relative > 0, count, 0)
    distance = jnp.maximum(-relative, 0) if causal else jnp.abs(relative)
    exact = count // 2
    logarithm = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(config.max_distance / exact)
    far = jnp.minimum(exact + (logarithm * (count - exact)).astype(jnp.int32), count - 1)
    return base + jnp.where(distance < exact, distance, far)


def _attention(
    config: EncoderDecoderConfig, params: Params, x: jax.Array, context: jax.Array,
    bias: jax.Array | None, mask: jax.Array, key: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """x: (B, T, W), context: (B, S, W), bias: (H, T, S), mask: bool, broadcast against (B, H, T, S) -> (B, T, W)."""
    weight = shared.cast(params, x.dtype)
    query = jnp.einsum("btw,whd->bthd", x, weight["query"])
    keys = jnp.einsum("bsw,whd->bshd", context, weight["key"])
    value = jnp.einsum("bsw,whd->bshd", context, weight["value"])
    scores = jnp.einsum("bthd,bshd->bhts", query, keys).astype(jnp.float32)
    if bias is not None:
        scores = scores + bias
    weights = shared.dropout(shared.attention_weights(scores, mask).astype(x.dtype), config.dropout, key)
    mixed = jnp.einsum("bhts,bshd->bthd", weights, value)
    result: jax.Array = jnp.einsum("bthd,hdw->btw", mixed, weight["out"])
    return result


def _block(
    config: EncoderDecoderConfig, params: Params, x: jax.Array, bias: jax.Array, mask: jax.Array,
    encoded: jax.Array | None, encoded_mask: jax.Array | None, key: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """One block of either stack; with `encoded` (B, S, W) there is cross attention to it."""
    keys = [None] * 6 if key is None else list(jax.random.split(key, 6))
    normalised = shared.rms_norm(params["attention_norm"], x)
    attended = _attention(config, params["attention"], normalised, normalised, bias, mask, keys[0])
    x = x + shared.dropout(attended, config.dropout, keys[1])
    if encoded is not None and encoded_mask is not None:
        normalised = shared.rms_norm(params["cross_attention_norm"], x)
        attended = _attention(config, params["cross_attention"], normalised, encoded, None, encoded_mask, keys[2])
        x = x + shared.dropout(attended, config.dropout, keys[3])
    weight = shared.cast(params["mlp"], x.dtype)
    hidden = jax.nn.relu(shared.rms_norm(params["mlp_norm"], x) @ weight["up"])
    return x + shared.dropout(shared.dropout(hidden, config.dropout, keys[4]) @ weight["down"], config.dropout, keys[5])


def _stack(
    config: EncoderDecoderConfig, params: Params, x: jax.Array, mask: jax.Array, key: jax.Array | None, *,
    encoded: jax.Array | None = None, encoded_mask: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """x: (B, T, W) -> (B, T, W), normalised."""
    keys = [None] * (2 + config.num_layers) if key is None else list(jax.random.split(key, 2 + config.num_layers))
    buckets = position_buckets(config, x.shape[1], causal=encoded is not None)
    bias = jnp.moveaxis(params["buckets"][buckets], -1, 0)  # (H, T, T)
    x = shared.dropout(x, config.dropout, keys[0])
    block: Callable[..., jax.Array] = functools.partial(_block, config)
    if config.remat:
        block = jax.checkpoint(block)
    for block_params, block_key in zip(params["blocks"], keys[2:], strict=True):
        x = block(block_params, x, bias, mask, encoded, encoded_mask, block_key)
    return shared.dropout(shared.rms_norm(params["final_norm"], x), config.dropout, keys[1])


def logits(
    config: EncoderDecoderConfig, params: Params, inputs: jax.Array, targets: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Scores of the targets, float32 (B, T, V); `inputs`: int32 (B, S), `targets`: int32 (B, T)."""
    keys = [None] * 2 if key is None else list(jax.random.split(key))
    tokens = params["tokens"].astype(config.dtype)
    visible = (inputs != PADDING)[:, None, None, :]
    encoded = _stack(config, params["encoder"], tokens[inputs], visible, keys[0])
    shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=PADDING)
    causal = shared.causal_mask(targets.shape[1])
    decoded = _stack(config, params["decoder"], tokens[shifted], causal, keys[1], encoded=encoded, encoded_mask=visible)
    return jnp.einsum("btw,vw->btv", decoded / math.sqrt(config.width), tokens).astype(jnp.float32)


def loss(config: EncoderDecoderConfig, params: Params, batch: Batch, key: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy in nats per target that is no padding."""
    scores = logits(config, params, batch["inputs"], batch["targets"], key)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["targets"])
    counted = (batch["targets"] != PADDING).astype(jnp.float32)
    return jnp.sum(losses * counted) / jnp.sum(counted)


def make_loss(config: EncoderDecoderConfig) -> shared.LossFn:
    """`loss` as the train step takes it."""
    return lambda params, statistics, batch, key: (loss(config, params, batch, key), (statistics, {}))


def make_init(config: EncoderDecoderConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""
    return shared.make_init(lambda key: (init(config, key), {}), optimizer)


def make_train_step(
    config: EncoderDecoderConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and the metrics "loss" and "grad_norm" (before clipping)."""
    return shared.make_train_step(make_loss(config), optimizer)


def make_eval_step(config: EncoderDecoderConfig) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the loss without dropout."""
    return shared.make_eval_step(make_loss(config))


def abstract_batch(config: EncoderDecoderConfig, batch_size: int) -> Batch:
    """The shapes of a batch, for planning without data: "inputs" int32 (B, S), "targets" int32 (B, T)."""
    return {
        "inputs": jax.ShapeDtypeStruct((batch_size, config.input_length), jnp.int32),
        "targets": jax.ShapeDtypeStruct((batch_size, config.target_length), jnp.int32),
    }


def random_batch(config: EncoderDecoderConfig, batch_size: int, key: jax.Array) -> Batch:
    """Random tokens; examples differ in length, and the targets are the inputs, renamed."""
    tokens_key, lengths_key = jax.random.split(key)
    length = max(config.input_length, config.target_length)
    tokens = jax.random.randint(tokens_key, (batch_size, length), 1, config.vocab_size)
    lengths = jax.random.randint(lengths_key, (batch_size, 1), length // 4, length + 1)
    tokens = jnp.where(jnp.arange(length) < lengths, tokens, PADDING)
    targets = jnp.where(tokens == PADDING, PADDING, 1 + (tokens * 5) % (config.vocab_size - 1))
    return {"inputs": tokens[:, : config.input_length], "targets": targets[:, : config.target_length]}
