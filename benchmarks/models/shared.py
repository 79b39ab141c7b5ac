"""What the models share: layers, the optimizer, and the train step around a model's loss.

Shapes in comments: B examples, T tokens each, W width, V vocabulary.

A model is a module of functions: a frozen `...Config`; `SPECIFICATIONS`, its published sizes;
`make_init(config, optimizer)`, `make_train_step(config, optimizer)` and `make_eval_step(config)`;
`abstract_batch(config, batch_size)` for planning without data and `random_batch(config, batch_size, key)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autopar.ops.attention import dot_product_attention

Params = dict[str, Any]
# "params"; "statistics", which the forward pass renews (batch norm's running means; {} for most models);
# "opt_state"; "step" (int32); "key" (typed PRNG key).
State = dict[str, Any]
Batch = dict[str, Any]
Metrics = dict[str, Any]

InitFn = Callable[[jax.Array], tuple[Params, Any]]  # typed key -> parameters, statistics
# (parameters, statistics, batch, typed key; None in evaluation) -> loss, (new statistics, further metrics).
LossFn = Callable[[Params, Any, Batch, jax.Array | None], tuple[jax.Array, tuple[Any, Metrics]]]


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


def make_init(init: InitFn, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""

    def init_state(key: jax.Array) -> State:
        params_key, step_key = jax.random.split(key)
        params, statistics = init(params_key)
        return {
            "params": params,
            "statistics": statistics,
            "opt_state": optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
            "key": step_key,
        }

    return init_state


def make_train_step(
    loss: LossFn, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and metrics: "loss", "grad_norm" (before clipping), the loss's own.

    The key is folded with the number of the step, so that every step draws anew.
    """

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(state["key"], state["step"])
        (value, (statistics, metrics)), gradient = jax.value_and_grad(loss, has_aux=True)(
            state["params"], state["statistics"], batch, key
        )
        updates, opt_state = optimizer.update(gradient, state["opt_state"], state["params"])
        new_state = {
            "params": optax.apply_updates(state["params"], updates),
            "statistics": statistics,
            "opt_state": opt_state,
            "step": state["step"] + 1,
            "key": state["key"],
        }
        return new_state, {"loss": value, "grad_norm": global_norm(gradient), **metrics}

    return train_step


def with_loss_scale(init_state: Callable[[jax.Array], State]) -> Callable[[jax.Array], State]:
    """The state that `make_scaled_train_step` needs: "loss_scale" besides, from 2^15 on."""

    def init_scaled(key: jax.Array) -> State:
        return {**init_state(key), "loss_scale": {"factor": jnp.float32(2**15), "good_steps": jnp.int32(0)}}

    return init_scaled


def make_scaled_train_step(
    loss: LossFn, optimizer: optax.GradientTransformation, growth_interval: int = 2000
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """As `make_train_step`, with a dynamic loss scale (Micikevicius et al. 2018) for losses computed in float16.

    A step whose gradient overflows changes nothing and halves the scale; so many good steps double it.
    """

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(state["key"], state["step"])
        factor, good_steps = state["loss_scale"]["factor"], state["loss_scale"]["good_steps"]

        def scaled_loss(*args: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            value, extra = loss(*args)
            return factor * value, (value, extra)

        (_, (value, (statistics, metrics))), gradient = jax.value_and_grad(scaled_loss, has_aux=True)(
            state["params"], state["statistics"], batch, key
        )
        gradient = jax.tree.map(lambda g: g / factor, gradient)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradient)]))
        updates, opt_state = optimizer.update(gradient, state["opt_state"], state["params"])
        changed = {
            "params": optax.apply_updates(state["params"], updates),
            "statistics": statistics,
            "opt_state": opt_state,
        }
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, {n: state[n] for n in changed})
        grown = good_steps + 1 >= growth_interval
        new_state = {
            **kept,
            "step": state["step"] + 1,
            "key": state["key"],
            "loss_scale": {
                "factor": jnp.where(finite, jnp.where(grown, 2 * factor, factor), factor / 2),
                "good_steps": jnp.where(finite & ~grown, good_steps + 1, 0),
            },
        }
        return new_state, {"loss": value, "grad_norm": global_norm(gradient), **metrics}

    return train_step


def make_eval_step(loss: LossFn) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the loss without dropout, and the loss's further metrics."""

    def eval_step(state: State, batch: Batch) -> Metrics:
        value, (_, metrics) = loss(state["params"], state["statistics"], batch, None)
        return {"loss": value, **metrics}

    return eval_step


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def num_parameters(params: Params) -> int:
    """Also of abstract parameters (`jax.eval_shape`)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def abstract_tokens(batch_size: int, length: int) -> Batch:
    """The shapes of "inputs" and "targets": int32 (B, T)."""
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    return {"inputs": tokens, "targets": tokens}


def random_tokens(batch_size: int, length: int, vocab_size: int, key: jax.Array) -> Batch:
    """Random "inputs", int32 (B, T); the "targets" follow from them, so that there is something to learn."""
    inputs = jax.random.randint(key, (batch_size, length), 0, vocab_size)
    return {"inputs": inputs, "targets": (inputs * 5 + 1) % vocab_size}


def normal(key: jax.Array, *shape: int, scale: float = 1.0) -> jax.Array:
    """Initial weights as in GPT-2: normal with standard deviation 0.02, times `scale`."""
    return 0.02 * scale * jax.random.normal(key, shape, jnp.float32)


def cast(params: Params, dtype: Any) -> Params:
    """One layer's parameters in the dtype of its activations."""
    return {name: leaf.astype(dtype) for name, leaf in params.items()}


def look_up(table: jax.Array, tokens: jax.Array, one_hot: bool) -> jax.Array:
    """The rows (B, T, W) of a table (V, W); by a product of matrices, as some systems for want of sharded look-ups."""
    found: jax.Array = jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype) @ table if one_hot else table[tokens]
    return found


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes a share `rate` of the elements and scales the others; nothing without a key.

    By 16 random bits for each, half the memory traffic of 32: the share is right to 1 in 65536.
    """
    if key is None or rate == 0:
        return x
    kept = jax.random.bits(key, x.shape, jnp.uint16) >= round(rate * 2**16)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def layer_norm_params(width: int) -> Params:
    """Scale and bias."""
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def layer_norm(params: Params, x: jax.Array) -> jax.Array:
    """Over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(variance + 1e-5)
    result: jax.Array = normalised * params["scale"] + params["bias"]
    return result.astype(x.dtype)


def rms_norm_params(width: int) -> Params:
    """Scale alone."""
    return {"scale": jnp.ones(width)}


def rms_norm(params: Params, x: jax.Array) -> jax.Array:
    """By the root of the mean square over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    result: jax.Array = (
        wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5) * params["scale"]
    )
    return result.astype(x.dtype)


def causal_mask(length: int) -> jax.Array:
    """bool (T, T): which positions (columns) a position (row) may see."""
    return jnp.tril(jnp.ones((length, length), bool))


def attention_weights(scores: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Softmax of scores (.., T, S) in float32, over what the mask (broadcast against them) allows."""
    scores = scores.astype(jnp.float32)
    return jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, -1e30), axis=-1)


def attention_params(key: jax.Array, width: int, num_heads: int, out_scale: float) -> Params:
    """Of `attention`; `out_scale`: of the initial projection back into the residual stream."""
    q, k, v, out = jax.random.split(key, 4)
    head_dim = width // num_heads
    return {
        "query": normal(q, width, num_heads, head_dim),
        "query_bias": jnp.zeros((num_heads, head_dim)),
        # No bias for the keys: softmax does not see it, so its gradient would be rounding noise, which
        # Adam would blow up to full-sized steps.
        "key": normal(k, width, num_heads, head_dim),
        "value": normal(v, width, num_heads, head_dim),
        "value_bias": jnp.zeros((num_heads, head_dim)),
        "out": normal(out, num_heads, head_dim, width, scale=out_scale),
        "out_bias": jnp.zeros(width),
    }


def causal_attention(params: Params, x: jax.Array) -> jax.Array:
    """`attention` under a causal mask, as one operator, so that the scores are never in memory."""
    weight = cast(params, x.dtype)
    query = jnp.einsum("btw,whd->bthd", x, weight["query"]) + weight["query_bias"]
    keys = jnp.einsum("btw,whd->bthd", x, weight["key"])
    value = jnp.einsum("btw,whd->bthd", x, weight["value"]) + weight["value_bias"]
    mixed = dot_product_attention(query, keys, value, is_causal=True)
    result: jax.Array = jnp.einsum("bthd,hdw->btw", mixed, weight["out"]) + weight["out_bias"]
    return result


def attention(
    params: Params, x: jax.Array, mask: jax.Array | None, dropout_rate: float, key: jax.Array | None
) -> jax.Array:
    """Multi-head attention of (B, T, W) to itself: (B, T, W)."""
    weight = cast(params, x.dtype)
    query = jnp.einsum("btw,whd->bhtd", x, weight["query"]) + weight["query_bias"][:, None]
    keys = jnp.einsum("btw,whd->bhtd", x, weight["key"])
    value = jnp.einsum("btw,whd->bhtd", x, weight["value"]) + weight["value_bias"][:, None]
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys).astype(jnp.float32) / math.sqrt(query.shape[-1])
    weights = dropout(attention_weights(scores, mask).astype(x.dtype), dropout_rate, key)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, value)
    result: jax.Array = jnp.einsum("bhtd,hdw->btw", mixed, weight["out"]) + weight["out_bias"]
    return result


def mlp_params(key: jax.Array, width: int, hidden: int, out_scale: float) -> Params:
    """Of `mlp`."""
    up, down = jax.random.split(key)
    return {
        "up": normal(up, width, hidden),
        "up_bias": jnp.zeros(hidden),
        "down": normal(down, hidden, width, scale=out_scale),
        "down_bias": jnp.zeros(width),
    }


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """Two dense layers with GELU between them: (B, T, W) -> (B, T, W)."""
    weight = cast(params, x.dtype)
    hidden = jax.nn.gelu(x @ weight["up"] + weight["up_bias"])
    result: jax.Array = hidden @ weight["down"] + weight["down_bias"]
    return result


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean in nats: logits (.., V), targets int (..)."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))
