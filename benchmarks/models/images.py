"""What the models of images share: convolutions, normalisations, and batches of images.

Shapes in comments: B examples, H x W pixels, C channels, N classes. Images are (B, H, W, C), kernels (h, w, in, out).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.shared import Batch, Params

LAYOUT = ("NHWC", "HWIO", "NHWC")
MOMENTUM = 0.9  # of batch norm's running statistics


def kernel(key: jax.Array, *shape: int) -> jax.Array:
    """Initial weights (.., in, out): normal of variance 2 / fan-in (He et al. 2015)."""
    found: jax.Array = math.sqrt(2 / math.prod(shape[:-1])) * jax.random.normal(key, shape, jnp.float32)
    return found


def convolve(x: jax.Array, weight: jax.Array, stride: int = 1) -> jax.Array:
    """As wide and high as `x`, divided by the stride; padded alike on either side, as in PyTorch's models."""
    padding = [((size - 1) // 2, (size - 1) // 2) for size in weight.shape[:2]]
    return jax.lax.conv_general_dilated(x, weight.astype(x.dtype), (stride, stride), padding, dimension_numbers=LAYOUT)


def max_pool(x: jax.Array, window: int, stride: int) -> jax.Array:
    """Padded alike on either side."""
    half = (window - 1) // 2
    padding = ((0, 0), (half, half), (half, half), (0, 0))
    found: jax.Array = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, window, window, 1), (1, stride, stride, 1), padding
    )
    return found


def norm_params(channels: int) -> Params:
    """Scale and bias."""
    return {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}


def batch_norm_statistics(channels: int) -> Params:
    """The running mean and variance, before anything was seen."""
    return {"mean": jnp.zeros(channels), "variance": jnp.ones(channels)}


def batch_norm(
    params: Params, statistics: Params, x: jax.Array, training: bool, num_groups: int = 1
) -> tuple[jax.Array, Params]:
    """Over all axes but the last, in float32: by the batch's own statistics in training, else by the running ones.

    Returns the result and the new running statistics. In training it couples the examples of a batch, or those of each
    of several equal groups (Hoffer et al. 2017), which may be microbatches then.
    """
    wide = x.astype(jnp.float32)
    if training:
        wide = wide.reshape(num_groups, -1, *x.shape[1:])
        axes = tuple(range(1, x.ndim))
        mean = jnp.mean(wide, axes, keepdims=True)
        variance = jnp.mean(jnp.square(wide - mean), axes, keepdims=True)
        met = {name: jnp.mean(each, range(x.ndim)) for name, each in (("mean", mean), ("variance", variance))}
        statistics = jax.tree.map(lambda old, new: MOMENTUM * old + (1 - MOMENTUM) * new, statistics, met)
    else:
        mean, variance = statistics["mean"], statistics["variance"]
    result = (wide - mean) * (jax.lax.rsqrt(variance + 1e-5) * params["scale"]) + params["bias"]
    return result.reshape(x.shape).astype(x.dtype), jax.lax.stop_gradient(statistics)


def group_norm(params: Params, x: jax.Array, num_groups: int) -> jax.Array:
    """Over the pixels of each example and the channels of each group, in float32 (Wu and He 2018)."""
    batch, height, width, channels = x.shape
    grouped = x.astype(jnp.float32).reshape(batch, height, width, num_groups, channels // num_groups)
    centred = grouped - jnp.mean(grouped, (1, 2, 4), keepdims=True)
    variance = jnp.mean(jnp.square(centred), (1, 2, 4), keepdims=True)
    normalised = (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    result: jax.Array = normalised * params["scale"] + params["bias"]
    return result.astype(x.dtype)


def abstract_images(batch_size: int, image_size: int, channels: int, dtype: Any) -> Batch:
    """The shapes of "images", (B, H, W, C), and "labels", int32 (B,)."""
    return {
        "images": jax.ShapeDtypeStruct((batch_size, image_size, image_size, channels), dtype),
        "labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
    }


def random_images(
    batch_size: int, image_size: int, channels: int, num_classes: int, dtype: Any, key: jax.Array
) -> Batch:
    """Noise over a wave whose length and direction tell the class, so that there is something to learn."""
    label_key, noise_key = jax.random.split(key)
    labels = jax.random.randint(label_key, (batch_size,), 0, num_classes)
    noise = jax.random.normal(noise_key, (batch_size, image_size, image_size, channels))
    angle = 2 * jnp.pi * labels / num_classes
    at = jnp.arange(image_size) * (2 * jnp.pi * 3 / image_size)
    phase = jnp.cos(angle)[:, None, None] * at[:, None] + jnp.sin(angle)[:, None, None] * at
    return {"images": (noise + 2 * jnp.sin(phase)[..., None]).astype(dtype), "labels": labels}
