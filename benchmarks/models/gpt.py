"""GPT in plain JAX: pre-LN blocks, learned positions, causal attention, GELU MLP, tied embeddings, dropout.

Shapes in comments: B examples, T tokens each, W width, H heads, D = W / H, V vocabulary.
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

Params = dict[str, Any]
State = dict[str, Any]  # "params", "opt_state", "step" (int32), "key" (typed PRNG key)
Batch = dict[str, Any]  # "inputs", "targets": int32 (B, T)
Metrics = dict[str, Any]


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
    scan: bool = False  # one `lax.scan` over the blocks, whose parameters have a leading axis of layers

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not divisible by num_heads {self.num_heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


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
    width, heads, head_dim = config.width, config.num_heads, config.head_dim
    residual_scale = 1 / math.sqrt(2 * config.num_layers)

    def normal(key: jax.Array, *shape: int, scale: float = 1.0) -> jax.Array:
        return 0.02 * scale * jax.random.normal(key, shape, jnp.float32)

    def layer_norm_params() -> Params:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block_params(key: jax.Array) -> Params:
        q, k, v, out, up, down = jax.random.split(key, 6)
        return {
            "attention_norm": layer_norm_params(),
            "attention": {
                "query": normal(q, width, heads, head_dim),
                "query_bias": jnp.zeros((heads, head_dim)),
                # No bias for the keys: softmax does not see it, so its gradient would be rounding noise, which
                # Adam would blow up to full-sized steps.
                "key": normal(k, width, heads, head_dim),
                "value": normal(v, width, heads, head_dim),
                "value_bias": jnp.zeros((heads, head_dim)),
                "out": normal(out, heads, head_dim, width, scale=residual_scale),
                "out_bias": jnp.zeros(width),
            },
            "mlp_norm": layer_norm_params(),
            "mlp": {
                "up": normal(up, width, 4 * width),
                "up_bias": jnp.zeros(4 * width),
                "down": normal(down, 4 * width, width, scale=residual_scale),
                "down_bias": jnp.zeros(width),
            },
        }

    tokens, positions, *blocks = jax.random.split(key, 2 + config.num_layers)
    block_trees = [block_params(key) for key in blocks]
    return {
        "tokens": normal(tokens, config.vocab_size, width),
        "positions": normal(positions, config.sequence_length, width),
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *block_trees) if config.scan else block_trees,
        "final_norm": layer_norm_params(),
    }


def num_parameters(params: Params) -> int:
    """Also of abstract parameters (`jax.eval_shape`)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def _layer_norm(params: Params, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + 1e-5)
    result: jax.Array = normal * params["scale"] + params["bias"]
    return result.astype(x.dtype)


def _attention(config: GPTConfig, params: Params, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """x: (B, T, W) -> (B, T, W)."""
    weight = {name: leaf.astype(x.dtype) for name, leaf in params.items()}
    query = jnp.einsum("btw,whd->bhtd", x, weight["query"]) + weight["query_bias"][:, None]
    keys = jnp.einsum("btw,whd->bhtd", x, weight["key"])
    value = jnp.einsum("btw,whd->bhtd", x, weight["value"]) + weight["value_bias"][:, None]
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys).astype(jnp.float32) / math.sqrt(config.head_dim)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    scores = jnp.where(causal, scores, -1e30)
    weights = _dropout(jax.nn.softmax(scores, axis=-1).astype(x.dtype), config.dropout, key)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, value)
    result: jax.Array = jnp.einsum("bhtd,hdw->btw", mixed, weight["out"]) + weight["out_bias"]
    return result


def _mlp(params: Params, x: jax.Array) -> jax.Array:
    """x: (B, T, W) -> (B, T, W)."""
    weight = {name: leaf.astype(x.dtype) for name, leaf in params.items()}
    hidden = jax.nn.gelu(x @ weight["up"] + weight["up_bias"])
    result: jax.Array = hidden @ weight["down"] + weight["down_bias"]
    return result


def _block(config: GPTConfig, params: Params, x: jax.Array, key: jax.Array | None) -> jax.Array:
    keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
    attended = _attention(config, params["attention"], _layer_norm(params["attention_norm"], x), keys[0])
    x = x + _dropout(attended, config.dropout, keys[1])
    return x + _dropout(_mlp(params["mlp"], _layer_norm(params["mlp_norm"], x)), config.dropout, keys[2])


def logits(config: GPTConfig, params: Params, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Scores of the next token, float32 (B, T, V); `inputs`: int32 (B, T). Without a key there is no dropout."""
    split = None if key is None else jax.random.split(key, 1 + config.num_layers)
    keys = [None] * (1 + config.num_layers) if split is None else list(split)
    embedded = params["tokens"][inputs] + params["positions"][: inputs.shape[1]]
    x = _dropout(embedded.astype(config.dtype), config.dropout, keys[0])
    block: Callable[..., jax.Array] = functools.partial(_block, config)
    if config.remat:
        block = jax.checkpoint(block)
    if config.scan:
        block_keys = None if split is None else split[1:]
        x, _ = jax.lax.scan(lambda x, layer: (block(layer[0], x, layer[1]), None), x, (params["blocks"], block_keys))
    else:
        for block_params, block_key in zip(params["blocks"], keys[1:], strict=True):
            x = block(block_params, x, block_key)
    x = _layer_norm(params["final_norm"], x)
    return jnp.einsum("btw,vw->btv", x, params["tokens"].astype(x.dtype)).astype(jnp.float32)


def loss(config: GPTConfig, params: Params, batch: Batch, key: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy in nats per token."""
    scores = logits(config, params, batch["inputs"], key)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch["targets"]))


def make_optimizer(learning_rate: float, warmup_steps: int, decay_steps: int) -> optax.GradientTransformation:
    """AdamW (no decay for biases and scales), global-norm clipping at 1, linear warm-up and cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, decay_steps, learning_rate / 10)

    def decayed(params: Any) -> Any:
        def is_weight(path: Any, leaf: Any) -> bool:
            name = str(path[-1].key)
            return "bias" not in name and name != "scale"

        return jax.tree_util.tree_map_with_path(is_weight, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed),
    )


def make_init(config: GPTConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""

    def init_state(key: jax.Array) -> State:
        params_key, dropout_key = jax.random.split(key)
        params = init(config, params_key)
        return {
            "params": params,
            "opt_state": optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
            "key": dropout_key,
        }

    return init_state


def _global_norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def make_train_step(
    config: GPTConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and the metrics "loss" and "grad_norm" (before clipping)."""

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(state["key"], state["step"])
        value, gradient = jax.value_and_grad(functools.partial(loss, config))(state["params"], batch, key)
        updates, opt_state = optimizer.update(gradient, state["opt_state"], state["params"])
        new_state = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
            "key": state["key"],
        }
        return new_state, {"loss": value, "grad_norm": _global_norm(gradient)}

    return train_step


def make_eval_step(config: GPTConfig) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the loss without dropout."""

    def eval_step(state: State, batch: Batch) -> Metrics:
        return {"loss": loss(config, state["params"], batch)}

    return eval_step


def abstract_batch(config: GPTConfig, batch_size: int) -> Batch:
    """The shapes of a batch, for planning without data."""
    tokens = jax.ShapeDtypeStruct((batch_size, config.sequence_length), jnp.int32)
    return {"inputs": tokens, "targets": tokens}
