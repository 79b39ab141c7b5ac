"""A language model of stacked LSTMs (Zaremba, Sutskever and Vinyals 2014): one loop over time a layer.

Shapes in comments: B examples, T tokens each, W width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import shared
from benchmarks.models.shared import Batch, Metrics, Params, State


@dataclasses.dataclass(frozen=True)
class LSTMConfig:
    """The sizes of a model."""

    vocab_size: int
    sequence_length: int  # tokens
    num_layers: int
    width: int
    dropout: float = 0.5  # probability, between layers
    dtype: Any = jnp.float32  # of activations and products; parameters are always float32


# Section 4.1 of the paper.
SPECIFICATIONS: dict[str, LSTMConfig] = {
    "small": LSTMConfig(10000, 20, 2, 200, dropout=0.0),
    "medium": LSTMConfig(10000, 35, 2, 650),
    "large": LSTMConfig(10000, 35, 2, 1500, dropout=0.65),
}


def init(config: LSTMConfig, key: jax.Array) -> Params:
    """Uniform between -1 and 1, over the square root of the width."""
    width = config.width

    def uniform(key: jax.Array, *shape: int) -> jax.Array:
        found: jax.Array = jax.random.uniform(key, shape, jnp.float32, -1, 1) / width**0.5
        return found

    def layer_params(key: jax.Array) -> Params:
        inputs, state = jax.random.split(key)
        # The gates one after another: input, forget, output, candidate.
        return {
            "inputs": uniform(inputs, width, 4, width),
            "state": uniform(state, width, 4, width),
            "bias": jnp.zeros((4, width)),
        }

    tokens, head, *layers = jax.random.split(key, 2 + config.num_layers)
    return {
        "tokens": uniform(tokens, config.vocab_size, width),
        "layers": [layer_params(key) for key in layers],
        "head": uniform(head, width, config.vocab_size),
        "head_bias": jnp.zeros(config.vocab_size),
    }


def _layer(params: Params, x: jax.Array) -> jax.Array:
    """x: (B, T, W) -> (B, T, W), in order of time."""
    weight = shared.cast(params, x.dtype)
    gates = jnp.einsum("btw,wgh->tbgh", x, weight["inputs"]) + weight["bias"]

    def one_step(carry: tuple[jax.Array, jax.Array], gate: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, cell = carry
        gate = gate + jnp.einsum("bw,wgh->bgh", hidden, weight["state"])
        keep = jax.nn.sigmoid(gate[:, :3])
        cell = keep[:, 1] * cell + keep[:, 0] * jnp.tanh(gate[:, 3])
        hidden = keep[:, 2] * jnp.tanh(cell)
        return (hidden, cell), hidden

    start = jnp.zeros((x.shape[0], x.shape[2]), x.dtype)
    _, hidden = jax.lax.scan(one_step, (start, start), gates)
    return hidden.transpose(1, 0, 2)


def logits(config: LSTMConfig, params: Params, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Scores of the next token, float32 (B, T, V); `inputs`: int32 (B, T). Without a key there is no dropout."""
    split = None if key is None else jax.random.split(key, 1 + config.num_layers)
    keys = [None] * (1 + config.num_layers) if split is None else list(split)
    x = shared.dropout(params["tokens"][inputs].astype(config.dtype), config.dropout, keys[0])
    for layer, layer_key in zip(params["layers"], keys[1:], strict=True):
        x = shared.dropout(_layer(layer, x), config.dropout, layer_key)
    result: jax.Array = (x @ params["head"].astype(x.dtype)).astype(jnp.float32) + params["head_bias"]
    return result


def _loss(config: LSTMConfig) -> shared.LossFn:
    def loss(params: Params, statistics: Any, batch: Batch, key: jax.Array | None) -> Any:
        scores = logits(config, params, batch["inputs"], key)
        return shared.cross_entropy(scores, batch["targets"]), (statistics, {})

    return loss


def make_init(config: LSTMConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""
    return shared.make_init(lambda key: (init(config, key), {}), optimizer)


def make_train_step(
    config: LSTMConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and the metrics "loss" and "grad_norm" (before clipping)."""
    return shared.make_train_step(_loss(config), optimizer)


def make_eval_step(config: LSTMConfig) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the loss without dropout."""
    return shared.make_eval_step(_loss(config))


def abstract_batch(config: LSTMConfig, batch_size: int) -> Batch:
    """The shapes of a batch, for planning without data."""
    return shared.abstract_tokens(batch_size, config.sequence_length)


def random_batch(config: LSTMConfig, batch_size: int, key: jax.Array) -> Batch:
    """Random tokens with targets that can be learnt."""
    return shared.random_tokens(batch_size, config.sequence_length, config.vocab_size, key)
