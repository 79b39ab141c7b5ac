"""Models of images in Flax Linen, in the manner of its example `imagenet` and of the Vision Transformer; an MLP."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.public.linen_models import Block, step_of
from benchmarks.public.program import Sizes, Step, Variant, cross_entropy, images


class VisionTransformer(nn.Module):
    """A class token, learned positions, pre-norm blocks with GELU and dropout."""

    sizes: Sizes
    variant: Variant

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        """Logits [examples, classes] of images [examples, height, width, 3]."""
        sizes = self.sizes
        patch = (16, 16)
        x = nn.Conv(sizes.width, patch, strides=patch, padding="VALID", dtype=sizes.dtype)(x)
        x = x.reshape(x.shape[0], -1, sizes.width)
        token = self.param("class", nn.initializers.zeros, (1, 1, sizes.width))
        x = jnp.concatenate([jnp.tile(token, [x.shape[0], 1, 1]), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = nn.Dropout(0.1)(x, deterministic=not train).astype(sizes.dtype)
        block = nn.remat(Block) if self.variant.checkpoint else Block
        for n in range(self.variant.layers):
            x = block(sizes, activation=nn.gelu, deterministic=not train, name=f"block_{n}")(x)
        x = nn.LayerNorm(dtype=sizes.dtype)(x)[:, 0]
        return nn.Dense(sizes.vocabulary, kernel_init=nn.initializers.zeros)(x)


def vision_transformer(sizes: Sizes, variant: Variant) -> Step:
    """Clipped AdamW."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return step_of(VisionTransformer(sizes, variant), sizes, variant, images(sizes), cross_entropy, optimizer)


class ResNet(nn.Module):
    """Residual blocks of two convolutions with batch norm, in four groups (of fewer blocks where layers are few)."""

    sizes: Sizes
    variant: Variant

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        """Logits [examples, classes] of images [examples, height, width, 3]."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.sizes.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.sizes.dtype
        )
        x = conv(self.sizes.width, (7, 7), (2, 2), padding=[(3, 3), (3, 3)])(x)
        x = nn.max_pool(nn.relu(norm()(x)), (3, 3), strides=(2, 2), padding="SAME")
        groups = min(4, self.variant.layers)
        for n in range(self.variant.layers):
            group = n * groups // self.variant.layers
            first = group > 0 and group != (n - 1) * groups // self.variant.layers
            filters, strides = self.sizes.width * 2**group, (2, 2) if first else (1, 1)
            y = nn.relu(norm()(conv(filters, (3, 3), strides)(x)))
            y = norm(scale_init=nn.initializers.zeros)(conv(filters, (3, 3))(y))
            if x.shape != y.shape:
                x = norm()(conv(filters, (1, 1), strides)(x))
            x = nn.relu(x + y)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.sizes.vocabulary, dtype=self.sizes.dtype)(x)


def resnet(sizes: Sizes, variant: Variant) -> Step:
    """Momentum, weights decayed."""
    optimizer = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9, nesterov=True))
    return step_of(ResNet(sizes, variant), sizes, variant, images(sizes), cross_entropy, optimizer)


class ResidualMlp(nn.Module):
    """Pre-norm blocks of two dense layers over points; float32."""

    sizes: Sizes
    variant: Variant

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        """Logits [examples, classes] of points [examples, width]."""

        def block(x: Any) -> Any:
            y = nn.gelu(nn.Dense(self.sizes.hidden)(nn.LayerNorm()(x)))
            return x + nn.Dense(x.shape[-1])(y)

        for _ in range(self.variant.layers):
            x = block(x)
        return nn.Dense(self.sizes.vocabulary)(x)


def residual_mlp(sizes: Sizes, variant: Variant, optimizer: optax.GradientTransformation | None = None) -> Step:
    """AdamW, unless another optimizer is given."""
    batch = (
        jax.ShapeDtypeStruct((sizes.batch_size, sizes.width), jnp.float32),
        jax.ShapeDtypeStruct((sizes.batch_size,), jnp.int32),
    )
    model = ResidualMlp(sizes, variant)
    return step_of(model, sizes, variant, batch, cross_entropy, optimizer or optax.adamw(1e-3))
