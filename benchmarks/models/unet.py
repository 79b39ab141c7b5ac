"""The U-Net of denoising diffusion (Ho, Jain and Abbeel 2020): residual blocks with group norm, skip connections.

Shapes in comments: B examples, H x W pixels, C channels, E width of the embedding of the noise level.
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

NOISE_LEVELS = 1000


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """The sizes of a model."""

    image_size: int  # pixels a side
    channels: int  # of the first level
    multipliers: tuple[int, ...]  # channels of each level, in those of the first; each has half the pixels a side
    blocks_per_level: int = 2
    attention_sizes: tuple[int, ...] = (16,)  # levels of so many pixels a side have attention
    num_groups: int = 32
    dropout: float = 0.1  # probability, in residual blocks
    dtype: Any = jnp.float32  # of activations and convolutions; parameters are always float32


# CIFAR-10 (35.7 million parameters), and LSUN and CelebA-HQ of 256 x 256 (114 million): appendix B of the paper.
SPECIFICATIONS: dict[str, UNetConfig] = {
    "36M": UNetConfig(32, 128, (1, 2, 2, 2)),
    "114M": UNetConfig(256, 128, (1, 1, 2, 2, 4, 4), dropout=0.0),
}


class _Keys:
    """New keys, one after another."""

    def __init__(self, key: jax.Array) -> None:
        self._key = key
        self._count = 0

    def __call__(self) -> jax.Array:
        self._count += 1
        return jax.random.fold_in(self._key, self._count)


def _block_params(new: _Keys, entering: int, leaving: int, embedding: int) -> Params:
    params = {
        "first_norm": images.norm_params(entering),
        "first": images.kernel(new(), 3, 3, entering, leaving),
        "first_bias": jnp.zeros(leaving),
        "level": images.kernel(new(), embedding, leaving),
        "second_norm": images.norm_params(leaving),
        "second": 0.1 * images.kernel(new(), 3, 3, leaving, leaving),
        "second_bias": jnp.zeros(leaving),
    }
    if entering != leaving:
        params["shortcut"] = images.kernel(new(), 1, 1, entering, leaving)
        params["shortcut_bias"] = jnp.zeros(leaving)
    return params


def _attention_params(new: _Keys, channels: int) -> Params:
    return {"norm": images.norm_params(channels), "mix": shared.attention_params(new(), channels, 1, 1.0)}


def _convolution_params(new: _Keys, size: int, entering: int, leaving: int) -> Params:
    return {"kernel": images.kernel(new(), size, size, entering, leaving), "bias": jnp.zeros(leaving)}


def init(config: UNetConfig, key: jax.Array) -> Params:
    """Parameters: a list of layers down, the middle, and a list of layers up."""
    new = _Keys(key)
    width, embedding = config.channels, 4 * config.channels
    last = len(config.multipliers) - 1
    down: list[Params] = []
    up: list[Params] = []
    channels, skips = width, [width]
    for level, multiplier in enumerate(config.multipliers):
        attends = config.image_size >> level in config.attention_sizes
        for _ in range(config.blocks_per_level):
            layer = {"block": _block_params(new, channels, multiplier * width, embedding)}
            channels = multiplier * width
            if attends:
                layer["attention"] = _attention_params(new, channels)
            down.append(layer)
            skips.append(channels)
        if level < last:
            down.append({"halve": _convolution_params(new, 3, channels, channels)})
            skips.append(channels)
    middle = {
        "first": _block_params(new, channels, channels, embedding),
        "attention": _attention_params(new, channels),
        "second": _block_params(new, channels, channels, embedding),
    }
    for level, multiplier in reversed(list(enumerate(config.multipliers))):
        attends = config.image_size >> level in config.attention_sizes
        for _ in range(config.blocks_per_level + 1):
            layer = {"block": _block_params(new, channels + skips.pop(), multiplier * width, embedding)}
            channels = multiplier * width
            if attends:
                layer["attention"] = _attention_params(new, channels)
            up.append(layer)
        if level > 0:
            up[-1]["double"] = _convolution_params(new, 3, channels, channels)
    return {
        "level_in": images.kernel(new(), width, embedding),
        "level_in_bias": jnp.zeros(embedding),
        "level_out": images.kernel(new(), embedding, embedding),
        "level_out_bias": jnp.zeros(embedding),
        "stem": _convolution_params(new, 3, 3, width),
        "down": down,
        "middle": middle,
        "up": up,
        "final_norm": images.norm_params(channels),
        "head": _convolution_params(new, 3, channels, 3),
    }


def _convolve(params: Params, x: jax.Array, stride: int = 1) -> jax.Array:
    result: jax.Array = images.convolve(x, params["kernel"], stride) + params["bias"].astype(x.dtype)
    return result


def _block(config: UNetConfig, params: Params, x: jax.Array, level: jax.Array, key: jax.Array | None) -> jax.Array:
    """x: (B, H, W, C), level: (B, E) -> (B, H, W, C')."""
    hidden = jax.nn.silu(images.group_norm(params["first_norm"], x, config.num_groups))
    hidden = images.convolve(hidden, params["first"]) + params["first_bias"].astype(x.dtype)
    hidden = hidden + (level @ params["level"].astype(x.dtype))[:, None, None]
    hidden = jax.nn.silu(images.group_norm(params["second_norm"], hidden, config.num_groups))
    hidden = shared.dropout(hidden, config.dropout, key)
    hidden = images.convolve(hidden, params["second"]) + params["second_bias"].astype(x.dtype)
    if "shortcut" in params:
        x = images.convolve(x, params["shortcut"]) + params["shortcut_bias"].astype(x.dtype)
    result: jax.Array = x + hidden
    return result


def _attend(config: UNetConfig, params: Params, x: jax.Array) -> jax.Array:
    """Every pixel to every other: (B, H, W, C) -> (B, H, W, C)."""
    flat = images.group_norm(params["norm"], x, config.num_groups).reshape(len(x), -1, x.shape[-1])
    return x + shared.attention(params["mix"], flat, None, 0.0, None).reshape(x.shape)


def _embed(config: UNetConfig, params: Params, levels: jax.Array) -> jax.Array:
    """Noise levels, int32 (B,), as sines and cosines of many wavelengths through two dense layers: (B, E)."""
    half = config.channels // 2
    frequencies = jnp.exp(-math.log(10000) * jnp.arange(half) / (half - 1))
    angles = levels[:, None].astype(jnp.float32) * frequencies
    x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    x = jax.nn.silu(x @ params["level_in"] + params["level_in_bias"])
    return jax.nn.silu(x @ params["level_out"] + params["level_out_bias"]).astype(config.dtype)


def predict_noise(
    config: UNetConfig, params: Params, noisy: jax.Array, levels: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """The noise in images, float32 (B, H, W, 3); `levels`: int32 (B,). Without a key there is no dropout."""
    new = None if key is None else _Keys(key)

    def drop() -> jax.Array | None:
        return None if new is None else new()

    level = _embed(config, params, levels)
    x = _convolve(params["stem"], noisy.astype(config.dtype))
    skips = [x]
    for layer in params["down"]:
        if "halve" in layer:
            x = _convolve(layer["halve"], x, 2)
        else:
            x = _block(config, layer["block"], x, level, drop())
        if "attention" in layer:
            x = _attend(config, layer["attention"], x)
        skips.append(x)
    x = _block(config, params["middle"]["first"], x, level, drop())
    x = _attend(config, params["middle"]["attention"], x)
    x = _block(config, params["middle"]["second"], x, level, drop())
    for layer in params["up"]:
        x = _block(config, layer["block"], jnp.concatenate([x, skips.pop()], -1), level, drop())
        if "attention" in layer:
            x = _attend(config, layer["attention"], x)
        if "double" in layer:
            x = _convolve(layer["double"], jnp.repeat(jnp.repeat(x, 2, 1), 2, 2))
    x = jax.nn.silu(images.group_norm(params["final_norm"], x, config.num_groups))
    return _convolve(params["head"], x).astype(jnp.float32)


def _loss(config: UNetConfig) -> shared.LossFn:
    def loss(params: Params, statistics: Any, batch: Batch, key: jax.Array | None) -> Any:
        kept = jnp.cos(0.5 * jnp.pi * batch["levels"] / NOISE_LEVELS)[:, None, None, None]
        noisy = kept * batch["images"] + jnp.sqrt(1 - kept**2) * batch["noise"]
        error = predict_noise(config, params, noisy, batch["levels"], key) - batch["noise"]
        return jnp.mean(jnp.square(error)), (statistics, {})

    return loss


def make_init(config: UNetConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""
    return shared.make_init(lambda key: (init(config, key), {}), optimizer)


def make_train_step(
    config: UNetConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and the metrics "loss" and "grad_norm" (before clipping)."""
    return shared.make_train_step(_loss(config), optimizer)


def make_eval_step(config: UNetConfig) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the loss without dropout."""
    return shared.make_eval_step(_loss(config))


def abstract_batch(config: UNetConfig, batch_size: int) -> Batch:
    """The shapes of a batch, for planning without data."""
    pixels = jax.ShapeDtypeStruct((batch_size, config.image_size, config.image_size, 3), jnp.float32)
    return {"images": pixels, "noise": pixels, "levels": jax.ShapeDtypeStruct((batch_size,), jnp.int32)}


def random_batch(config: UNetConfig, batch_size: int, key: jax.Array) -> Batch:
    """Images, the noise that is added to them, and how much of it."""
    image_key, noise_key, level_key = jax.random.split(key, 3)
    found = images.random_images(batch_size, config.image_size, 3, 8, jnp.float32, image_key)
    return {
        "images": found["images"],
        "noise": jax.random.normal(noise_key, found["images"].shape),
        "levels": jax.random.randint(level_key, (batch_size,), 0, NOISE_LEVELS),
    }
