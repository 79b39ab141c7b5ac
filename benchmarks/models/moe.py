"""A mixture-of-experts GPT: in every second block GShard's top-2 gated experts (Lepikhin et al. 2020) are the MLP.

Shapes in comments: B examples, T tokens each, W width, V vocabulary; tokens are routed in G groups of S each, to
E experts with room for C tokens of a group.
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
class MoEConfig:
    """The sizes of a model."""

    vocab_size: int
    sequence_length: int  # tokens; the number of learned positions
    num_layers: int
    width: int
    num_heads: int
    num_experts: int
    group_size: int  # tokens that are routed together; a group may span several examples
    capacity_factor: float = 1.0  # room in the experts, relative to evenly routed tokens
    mlp_factor: int = 8  # hidden units of an MLP, dense or of an expert, relative to the width
    auxiliary_weight: float = 0.01  # of the load balancing loss
    dropout: float = 0.1  # probability, on embeddings, attention weights and residual branches
    dtype: Any = jnp.float32  # of activations and matrix products; parameters and the gates are always float32
    remat: bool = False  # recompute each block in the backward pass
    one_hot: bool = False  # look tokens up by a product with one-hot rows

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not divisible by num_heads {self.num_heads}")

    @property
    def capacity(self) -> int:
        """Tokens of one group that an expert has room for; each token goes to two experts."""
        return max(1, int(2 * self.group_size * self.capacity_factor / self.num_experts))

    def has_experts(self, layer: int) -> bool:
        """Every second block, as in GShard."""
        return layer % 2 == 1


def _published(num_layers: int, width: int, num_experts: int) -> MoEConfig:
    return MoEConfig(32000, 1024, num_layers, width, 16, num_experts, 2048, dtype=jnp.bfloat16, remat=True)


# The MoE sizes of the Alpa paper (Zheng et al., OSDI 2022, table 6, and its public benchmark settings).
SPECIFICATIONS: dict[str, MoEConfig] = {
    "380M": _published(8, 768, 8),
    "690M": _published(8, 768, 16),
    "1.3B": _published(16, 768, 16),
    "2.4B": _published(16, 1024, 16),
    "7.1B": _published(16, 1280, 32),
    "10B": _published(16, 1536, 32),
    "27B": _published(16, 2048, 48),
    "70B": _published(32, 2048, 64),
    "140B": _published(32, 2048, 128),
}


def init(config: MoEConfig, key: jax.Array) -> Params:
    """Parameters as in GPT-2: normal(0.02), projections back into the residual stream scaled by 1/sqrt(2 layers)."""
    width, hidden, experts = config.width, config.mlp_factor * config.width, config.num_experts
    residual_scale = 1 / math.sqrt(2 * config.num_layers)

    def experts_params(key: jax.Array) -> Params:
        gate, up, down = jax.random.split(key, 3)
        return {
            "gate": shared.normal(gate, width, experts),
            "up": shared.normal(up, experts, width, hidden),
            "down": shared.normal(down, experts, hidden, width, scale=residual_scale),
        }

    def block_params(layer: int, key: jax.Array) -> Params:
        attention, mlp = jax.random.split(key)
        params = {
            "attention_norm": shared.layer_norm_params(width),
            "attention": shared.attention_params(attention, width, config.num_heads, residual_scale),
            "mlp_norm": shared.layer_norm_params(width),
        }
        if config.has_experts(layer):
            return {**params, "experts": experts_params(mlp)}
        return {**params, "mlp": shared.mlp_params(mlp, width, hidden, residual_scale)}

    tokens, positions, *blocks = jax.random.split(key, 2 + config.num_layers)
    return {
        "tokens": shared.normal(tokens, config.vocab_size, width),
        "positions": shared.normal(positions, config.sequence_length, width),
        "blocks": [block_params(layer, key) for layer, key in enumerate(blocks)],
        "final_norm": shared.layer_norm_params(width),
    }


def top2_gating(gate_logits: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """GShard's algorithm 1, without its random second choice.

    gate_logits: float32 (G, S, E). Returns the combine weights (G, S, E, C): with which weight a token takes which
    place of which expert, zero for what finds no room; and the auxiliary loss of each group (G,), 1 where the tokens
    are spread evenly.
    """
    num_experts = gate_logits.shape[-1]
    gates = jax.nn.softmax(gate_logits, axis=-1)

    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), num_experts)
    second = jax.nn.one_hot(jnp.argmax(jnp.where(first > 0, -1.0, gates), axis=-1), num_experts)
    auxiliary_loss = num_experts * jnp.sum(jnp.mean(first, axis=1) * jnp.mean(gates, axis=1), axis=-1)

    # A token's place in its expert's buffer: how many of its group come before it, first choices first.
    first_place = jnp.cumsum(first, axis=1) - first
    first = first * (first_place < capacity)
    second_place = jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)
    second = second * (second_place < capacity)

    first_gate = jnp.sum(gates * first, axis=-1)
    second_gate = jnp.sum(gates * second, axis=-1)
    total = first_gate + second_gate
    total = jnp.where(total > 0, total, 1.0)

    def weights(chosen: jax.Array, place: jax.Array, gate: jax.Array) -> jax.Array:
        row = jnp.sum(place * chosen, axis=-1).astype(jnp.int32)
        return (gate / total)[..., None, None] * chosen[..., None] * jax.nn.one_hot(row, capacity)[..., None, :]

    combine = weights(first, first_place, first_gate) + weights(second, second_place, second_gate)
    return combine, auxiliary_loss


def mixture(config: MoEConfig, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x: (B, T, W) -> (B, T, W), and the auxiliary loss, the mean over groups."""
    grouped = x.reshape(-1, config.group_size, config.width)
    gate_logits = jnp.einsum("gsw,we->gse", grouped.astype(jnp.float32), params["gate"])
    combine, auxiliary_loss = top2_gating(gate_logits, config.capacity)
    dispatch = (combine > 0).astype(x.dtype)
    up, down = params["up"].astype(x.dtype), params["down"].astype(x.dtype)
    routed = jnp.einsum("gsec,gsw->egcw", dispatch, grouped)
    hidden = jax.nn.gelu(jnp.einsum("egcw,ewh->egch", routed, up))
    routed = jnp.einsum("egch,ehw->egcw", hidden, down)
    mixed = jnp.einsum("gsec,egcw->gsw", combine.astype(x.dtype), routed)
    return mixed.reshape(x.shape), jnp.mean(auxiliary_loss)


def _block(
    config: MoEConfig, params: Params, x: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array | float]:
    """x: (B, T, W) -> (B, T, W), and the auxiliary loss, if any."""
    keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
    mask = shared.causal_mask(x.shape[1])
    normalised = shared.layer_norm(params["attention_norm"], x)
    attended = shared.attention(params["attention"], normalised, mask, config.dropout, keys[0])
    x = x + shared.dropout(attended, config.dropout, keys[1])
    normalised = shared.layer_norm(params["mlp_norm"], x)
    auxiliary_loss: jax.Array | float = 0.0
    if "experts" in params:
        hidden, auxiliary_loss = mixture(config, params["experts"], normalised)
    else:
        hidden = shared.mlp(params["mlp"], normalised)
    return x + shared.dropout(hidden, config.dropout, keys[2]), auxiliary_loss


def logits(
    config: MoEConfig, params: Params, inputs: jax.Array, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | float]:
    """Scores of the next token, float32 (B, T, V), and the sum of the auxiliary losses; `inputs`: int32 (B, T)."""
    keys = [None] * (1 + config.num_layers) if key is None else list(jax.random.split(key, 1 + config.num_layers))
    embedded = shared.look_up(params["tokens"], inputs, config.one_hot) + params["positions"][: inputs.shape[1]]
    x = shared.dropout(embedded.astype(config.dtype), config.dropout, keys[0])
    block: Callable[..., tuple[jax.Array, jax.Array | float]] = functools.partial(_block, config)
    if config.remat:
        block = jax.checkpoint(block)
    total: jax.Array | float = 0.0
    for block_params, block_key in zip(params["blocks"], keys[1:], strict=True):
        x, auxiliary_loss = block(block_params, x, block_key)
        total = total + auxiliary_loss
    x = shared.layer_norm(params["final_norm"], x)
    return jnp.einsum("btw,vw->btv", x, params["tokens"].astype(x.dtype)).astype(jnp.float32), total


def make_loss(config: MoEConfig) -> shared.LossFn:
    """Mean cross entropy in nats per token, and the weighted auxiliary loss."""

    def loss(
        params: Params, statistics: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[Any, Metrics]]:
        scores, auxiliary_loss = logits(config, params, batch["inputs"], key)
        cross_entropy = shared.cross_entropy(scores, batch["targets"])
        value = cross_entropy + config.auxiliary_weight * auxiliary_loss
        return value, (statistics, {"auxiliary_loss": auxiliary_loss})

    return loss


def make_init(config: MoEConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""
    return shared.make_init(lambda key: (init(config, key), {}), optimizer)


def make_train_step(
    config: MoEConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and the metrics "loss", "grad_norm" and "auxiliary_loss"."""
    return shared.make_train_step(make_loss(config), optimizer)


def make_eval_step(config: MoEConfig) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the losses without dropout."""
    return shared.make_eval_step(make_loss(config))


def abstract_batch(config: MoEConfig, batch_size: int) -> Batch:
    """The shapes of a batch, for planning without data."""
    return shared.abstract_tokens(batch_size, config.sequence_length)


def random_batch(config: MoEConfig, batch_size: int, key: jax.Array) -> Batch:
    """Random tokens with targets that can be learnt."""
    return shared.random_tokens(batch_size, config.sequence_length, config.vocab_size, key)
