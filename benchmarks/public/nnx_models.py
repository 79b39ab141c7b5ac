"""Flax NNX, in the manner of its example `gemma`: RMSNorm before and after, rotations, gated MLPs, shared keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.public.program import Sizes, Step, Variant, cross_entropy, tokens


def _rotated(x: Any) -> Any:
    """[examples, tokens, heads, size], each pair turned by its position."""
    size, length = x.shape[-1], x.shape[1]
    timescale = 10_000.0 ** (2 * jnp.arange(size // 2) / size)
    angles = (jnp.arange(length)[:, None] / timescale)[None, :, None, :]
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


class Attention(nnx.Module):
    """Two groups of query heads share keys and values."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.heads, self.size, self.groups = sizes.heads, sizes.width // sizes.heads, 2
        shared = self.groups * self.size
        self.query = nnx.Linear(sizes.width, sizes.width, use_bias=False, dtype=sizes.dtype, rngs=rngs)
        self.key = nnx.Linear(sizes.width, shared, use_bias=False, dtype=sizes.dtype, rngs=rngs)
        self.value = nnx.Linear(sizes.width, shared, use_bias=False, dtype=sizes.dtype, rngs=rngs)
        self.out = nnx.Linear(sizes.width, sizes.width, use_bias=False, dtype=sizes.dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """[examples, tokens, width]."""
        b, t, width = x.shape
        query = _rotated(self.query(x).reshape(b, t, self.heads, self.size)) * self.size**-0.5
        key = _rotated(self.key(x).reshape(b, t, self.groups, self.size))
        value = self.value(x).reshape(b, t, self.groups, self.size)
        query = query.reshape(b, t, self.groups, -1, self.size)
        scores = jnp.einsum("btkgh,bskh->btkgs", query, key)
        allowed = jnp.tril(jnp.ones((t, t), jnp.bool_))[None, :, None, None, :]
        weights = jax.nn.softmax(jnp.where(allowed, scores, -2.3e38), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("btkgs,bskh->btkgh", weights, value)
        return self.out(mixed.reshape(b, t, width))


class FeedForward(nnx.Module):
    """Gated by GELU."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(sizes.width, sizes.hidden, use_bias=False, dtype=sizes.dtype, rngs=rngs)
        self.up = nnx.Linear(sizes.width, sizes.hidden, use_bias=False, dtype=sizes.dtype, rngs=rngs)
        self.down = nnx.Linear(sizes.hidden, sizes.width, use_bias=False, dtype=sizes.dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """[examples, tokens, width]."""
        return self.down(nnx.gelu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Norms before and after each half."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        norms = [nnx.RMSNorm(sizes.width, dtype=sizes.dtype, rngs=rngs) for _ in range(4)]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        self.attention, self.mlp = Attention(sizes, rngs), FeedForward(sizes, rngs)

    def __call__(self, x: Any) -> Any:
        """[examples, tokens, width]."""
        x = x + self.after_attention(self.attention(self.before_attention(x)))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class Gemma(nnx.Module):
    """A decoder with tied embeddings and capped logits."""

    def __init__(self, sizes: Sizes, variant: Variant, rngs: nnx.Rngs) -> None:
        self.checkpoint = variant.checkpoint
        self.embed = nnx.Embed(sizes.vocabulary, sizes.width, dtype=sizes.dtype, rngs=rngs)
        self.layers = nnx.List([Block(sizes, rngs) for _ in range(variant.layers)])
        self.norm = nnx.RMSNorm(sizes.width, dtype=sizes.dtype, rngs=rngs)

    def __call__(self, inputs: Any) -> Any:
        """Logits [examples, tokens, vocabulary]."""
        x = self.embed(inputs)
        x = x * jnp.sqrt(x.shape[-1]).astype(x.dtype)
        run = nnx.remat(Block.__call__) if self.checkpoint else Block.__call__
        for layer in self.layers:
            x = run(layer, x)
        logits = self.embed.attend(self.norm(x)).astype(jnp.float32)
        return 30.0 * jnp.tanh(logits / 30.0)


def gemma(sizes: Sizes, variant: Variant) -> Step:
    """The model split into its definition and its arrays; the next token."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    graphdef = nnx.split(nnx.eval_shape(lambda: Gemma(sizes, variant, nnx.Rngs(0))))[0]

    def parameters(key: jax.Array) -> Any:
        return nnx.split(Gemma(sizes, variant, nnx.Rngs(key)))[1]

    def init(key: jax.Array) -> Any:
        params = parameters(key)
        return {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    def loss_fn(params: Any, inputs: Any, targets: Any) -> Any:
        return cross_entropy(nnx.merge(graphdef, params)(inputs), targets)

    def train_step(state: Any, inputs: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], inputs, targets)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new_state = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return new_state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    def eval_step(params: Any, inputs: Any, targets: Any) -> Any:
        return {"loss": loss_fn(params, inputs, targets)}

    batch = (tokens(sizes), tokens(sizes))
    if variant.evaluation:
        return Step(eval_step, parameters, batch, sizes.vocabulary, training=False)
    return Step(train_step, init, batch, sizes.vocabulary)
