"""Equinox, in the manner of its documentation: modules of one example under `vmap`, parameters partitioned off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.public.program import Sizes, Step, Variant, cross_entropy, images, tokens


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _step_of(
    make: Callable[[jax.Array], Any], sizes: Sizes, variant: Variant, batch: tuple[jax.ShapeDtypeStruct, ...]
) -> Step:
    """`make(key)`: a module, called with one example, a key for dropout (None in evaluation)."""
    optimizer = optax.adamw(3e-4)
    static = eqx.partition(eqx.filter_eval_shape(make, jax.random.key(0)), _is_array)[1]

    def parameters(key: jax.Array) -> Any:
        return eqx.partition(make(key), _is_array)[0]

    def init(key: jax.Array) -> Any:
        params_key, dropout_key = jax.random.split(key)
        params = parameters(params_key)
        return params, optimizer.init(params), dropout_key

    def train_step(state: Any, x: Any, y: Any) -> Any:
        params, opt_state, key = state
        key, dropout_key = jax.random.split(key)

        def loss_fn(params: Any) -> Any:
            logits = jax.vmap(eqx.combine(params, static))(x, jax.random.split(dropout_key, x.shape[0]))
            return cross_entropy(logits, y)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (eqx.apply_updates(params, updates), opt_state, key), loss

    def eval_step(params: Any, x: Any, y: Any) -> Any:
        model = eqx.nn.inference_mode(eqx.combine(params, static))
        logits = jax.vmap(lambda x: model(x, None))(x)
        return cross_entropy(logits, y), jnp.mean(jnp.argmax(logits, -1) == y)

    if variant.evaluation:
        return Step(eval_step, parameters, batch, sizes.vocabulary, training=False)
    return Step(train_step, init, batch, sizes.vocabulary)


def _patches(x: Any, patch: int) -> Any:
    """[patches, pixels] of an image [height, width, channels]."""
    height, width, channels = x.shape
    x = x.reshape(height // patch, patch, width // patch, patch, channels)
    return x.transpose(0, 2, 1, 3, 4).reshape(-1, patch * patch * channels)


class MixerBlock(eqx.Module):
    """An MLP over patches, another over the width."""

    over_patches: eqx.nn.MLP
    over_width: eqx.nn.MLP
    norm_1: eqx.nn.LayerNorm
    norm_2: eqx.nn.LayerNorm

    def __init__(self, width: int, patches: int, hidden: int, key: jax.Array) -> None:
        one, two = jax.random.split(key)
        self.over_patches = eqx.nn.MLP(patches, patches, hidden, depth=1, activation=jax.nn.gelu, key=one)
        self.over_width = eqx.nn.MLP(width, width, hidden, depth=1, activation=jax.nn.gelu, key=two)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm((width, patches)), eqx.nn.LayerNorm((patches, width))

    def __call__(self, y: Any) -> Any:
        """[width, patches]."""
        y = y + jax.vmap(self.over_patches)(self.norm_1(y))
        turned = y.T
        turned = turned + jax.vmap(self.over_width)(self.norm_2(turned))
        return turned.T


class Mixer(eqx.Module):
    """MLP-Mixer; float32."""

    embed: eqx.nn.Linear
    blocks: list[MixerBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    checkpoint: bool = eqx.field(static=True)

    def __init__(self, sizes: Sizes, variant: Variant, key: jax.Array) -> None:
        first, last, *keys = jax.random.split(key, variant.layers + 2)
        patches = (sizes.image // 16) ** 2
        self.embed = eqx.nn.Linear(16 * 16 * 3, sizes.width, key=first)
        self.blocks = [MixerBlock(sizes.width, patches, sizes.hidden, k) for k in keys]
        self.norm = eqx.nn.LayerNorm((sizes.width, patches))
        self.head = eqx.nn.Linear(sizes.width, sizes.vocabulary, key=last)
        self.checkpoint = variant.checkpoint

    def __call__(self, x: Any, key: Any) -> Any:
        """Logits [classes] of an image."""
        y = jax.vmap(self.embed)(_patches(x, 16)).T
        for block in self.blocks:
            y = (eqx.filter_checkpoint(block) if self.checkpoint else block)(y)
        return self.head(jnp.mean(self.norm(y), axis=1))


def mixer(sizes: Sizes, variant: Variant) -> Step:
    """A classifier of images."""
    return _step_of(lambda key: Mixer(sizes, variant, key), sizes, variant, images(sizes))


class Block(eqx.Module):
    """Pre-norm, with dropout."""

    attention: eqx.nn.MultiheadAttention
    norm_1: eqx.nn.LayerNorm
    norm_2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, sizes: Sizes, key: jax.Array) -> None:
        one, two, three = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(sizes.heads, sizes.width, key=one)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm(sizes.width), eqx.nn.LayerNorm(sizes.width)
        self.up = eqx.nn.Linear(sizes.width, sizes.hidden, key=two)
        self.down = eqx.nn.Linear(sizes.hidden, sizes.width, key=three)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: Any, mask: Any, key: Any) -> Any:
        """[tokens, width]."""
        one, two = (None, None) if key is None else jax.random.split(key)
        y = jax.vmap(self.norm_1)(x)
        x = x + self.dropout(self.attention(y, y, y, mask=mask), key=one)
        y = jax.vmap(self.norm_2)(x)
        y = jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))
        return x + self.dropout(y, key=two)


class Transformer(eqx.Module):
    """A decoder of tokens, or an encoder of an image's patches; float32. Blocks are a list, or stacked for a loop."""

    embed: eqx.nn.Embedding | eqx.nn.Linear
    positions: jax.Array
    blocks: Any
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    variant: Variant = eqx.field(static=True)

    def __init__(self, sizes: Sizes, variant: Variant, vision: bool, key: jax.Array) -> None:
        first, second, third, last = jax.random.split(key, 4)
        length = (sizes.image // 16) ** 2 if vision else sizes.length
        self.embed = (
            eqx.nn.Linear(16 * 16 * 3, sizes.width, key=first)
            if vision
            else eqx.nn.Embedding(sizes.vocabulary, sizes.width, key=first)
        )
        self.positions = 0.02 * jax.random.normal(second, (length, sizes.width))
        keys = jax.random.split(third, variant.layers)
        self.blocks = (
            eqx.filter_vmap(lambda k: Block(sizes, k))(keys) if variant.scan else [Block(sizes, k) for k in keys]
        )
        self.norm = eqx.nn.LayerNorm(sizes.width)
        self.head = eqx.nn.Linear(sizes.width, sizes.vocabulary, key=last)
        self.variant = variant

    def __call__(self, x: Any, key: Any) -> Any:
        """Logits [classes] of an image, or [tokens, vocabulary]."""
        vision = isinstance(self.embed, eqx.nn.Linear)
        x = jax.vmap(self.embed)(_patches(x, 16) if vision else x) + self.positions
        mask = None if vision else jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        keys = [None] * self.variant.layers if key is None else jax.random.split(key, self.variant.layers)
        if self.variant.scan:
            x = self._looped(x, mask, keys)
        else:
            for block, k in zip(self.blocks, keys, strict=True):
                x = (eqx.filter_checkpoint(block) if self.variant.checkpoint else block)(x, mask, k)
        x = jax.vmap(self.norm)(x)
        return self.head(jnp.mean(x, axis=0)) if vision else jax.vmap(self.head)(x)

    def _looped(self, x: Any, mask: Any, keys: Any) -> Any:
        stacked, static = eqx.partition(self.blocks, eqx.is_array)

        def run(x: Any, each: Any) -> Any:
            block, k = each
            return eqx.combine(block, static)(x, mask, k), None

        run = jax.checkpoint(run) if self.variant.checkpoint else run
        return jax.lax.scan(run, x, (stacked, None if self.variant.evaluation else keys))[0]


def vision_transformer(sizes: Sizes, variant: Variant) -> Step:
    """A classifier of images."""
    return _step_of(lambda key: Transformer(sizes, variant, True, key), sizes, variant, images(sizes))


def language_model(sizes: Sizes, variant: Variant) -> Step:
    """The next token."""
    batch = (tokens(sizes), tokens(sizes))
    return _step_of(lambda key: Transformer(sizes, variant, False, key), sizes, variant, batch)
