"""Vision transformer (Dosovitskiy et al. 2021): patches, a class token, learned positions, pre-LN blocks.

Shapes in comments: B examples, H x W pixels, P patches, D width, N classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import images, shared
from benchmarks.models.shared import Batch, Metrics, Params, State


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """The sizes of a model."""

    num_layers: int
    width: int
    num_heads: int
    patch_size: int  # pixels a side
    image_size: int = 224
    num_classes: int = 1000
    dropout: float = 0.1  # probability, on embeddings and residual branches
    dtype: Any = jnp.float32  # of activations and products; parameters are always float32
    remat: bool = False  # recompute each block in the backward pass

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


# Table 1 of the paper, with the patch sizes that it names most.
SPECIFICATIONS: dict[str, ViTConfig] = {
    "B/16": ViTConfig(12, 768, 12, 16, dtype=jnp.bfloat16, remat=True),
    "L/16": ViTConfig(24, 1024, 16, 16, dtype=jnp.bfloat16, remat=True),
    "H/14": ViTConfig(32, 1280, 16, 14, dtype=jnp.bfloat16, remat=True),
}


def init(config: ViTConfig, key: jax.Array) -> Params:
    """Projections back into the residual stream are scaled by 1 / sqrt(2 layers)."""
    width = config.width
    scale = 1 / math.sqrt(2 * config.num_layers)

    def block_params(key: jax.Array) -> Params:
        attention, mlp = jax.random.split(key)
        return {
            "attention_norm": shared.layer_norm_params(width),
            "attention": shared.attention_params(attention, width, config.num_heads, scale),
            "mlp_norm": shared.layer_norm_params(width),
            "mlp": shared.mlp_params(mlp, width, 4 * width, scale),
        }

    patches, token, positions, head, *blocks = jax.random.split(key, 4 + config.num_layers)
    return {
        "patches": images.kernel(patches, config.patch_size, config.patch_size, 3, width),
        "patches_bias": jnp.zeros(width),
        "token": shared.normal(token, width),
        "positions": shared.normal(positions, 1 + config.num_patches, width),
        "blocks": [block_params(key) for key in blocks],
        "final_norm": shared.layer_norm_params(width),
        "head": shared.normal(head, width, config.num_classes),
        "head_bias": jnp.zeros(config.num_classes),
    }


def _block(config: ViTConfig, params: Params, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """x: (B, 1 + P, D) -> (B, 1 + P, D)."""
    keys = [None] * 2 if key is None else list(jax.random.split(key))
    attended = shared.attention(params["attention"], shared.layer_norm(params["attention_norm"], x), None, 0.0, None)
    x = x + shared.dropout(attended, config.dropout, keys[0])
    hidden = shared.mlp(params["mlp"], shared.layer_norm(params["mlp_norm"], x))
    return x + shared.dropout(hidden, config.dropout, keys[1])


def logits(config: ViTConfig, params: Params, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Scores of the classes, float32 (B, N); `inputs`: (B, H, W, 3). Without a key there is no dropout."""
    split = None if key is None else jax.random.split(key, 1 + config.num_layers)
    keys = [None] * (1 + config.num_layers) if split is None else list(split)
    size = (config.patch_size, config.patch_size)
    weight = params["patches"].astype(config.dtype)
    patches = jax.lax.conv_general_dilated(
        inputs.astype(config.dtype), weight, size, "VALID", dimension_numbers=images.LAYOUT
    )
    patches = patches.reshape(len(inputs), -1, config.width) + params["patches_bias"].astype(config.dtype)
    token = jnp.broadcast_to(params["token"].astype(config.dtype), (len(inputs), 1, config.width))
    x = jnp.concatenate([token, patches], 1) + params["positions"].astype(config.dtype)
    x = shared.dropout(x, config.dropout, keys[0])
    block = jax.checkpoint(_block, static_argnums=0) if config.remat else _block
    for block_params, block_key in zip(params["blocks"], keys[1:], strict=True):
        x = block(config, block_params, x, block_key)
    x = shared.layer_norm(params["final_norm"], x[:, 0])
    result: jax.Array = x.astype(jnp.float32) @ params["head"] + params["head_bias"]
    return result


def _loss(config: ViTConfig) -> shared.LossFn:
    def loss(params: Params, statistics: Any, batch: Batch, key: jax.Array | None) -> Any:
        scores = logits(config, params, batch["images"], key)
        return shared.cross_entropy(scores, batch["labels"]), (statistics, {})

    return loss


def make_init(config: ViTConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""
    return shared.make_init(lambda key: (init(config, key), {}), optimizer)


def make_train_step(
    config: ViTConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and the metrics "loss" and "grad_norm" (before clipping)."""
    return shared.make_train_step(_loss(config), optimizer)


def make_eval_step(config: ViTConfig) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the loss without dropout."""
    return shared.make_eval_step(_loss(config))


def abstract_batch(config: ViTConfig, batch_size: int) -> Batch:
    """The shapes of a batch, for planning without data."""
    return images.abstract_images(batch_size, config.image_size, 3, config.dtype)


def random_batch(config: ViTConfig, batch_size: int, key: jax.Array) -> Batch:
    """Images whose classes can be learnt."""
    return images.random_images(batch_size, config.image_size, 3, config.num_classes, config.dtype, key)
