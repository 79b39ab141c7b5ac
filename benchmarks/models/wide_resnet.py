"""Wide residual networks (Zagoruyko and Komodakis 2016) of bottleneck blocks, with batch norm.

As the Alpa paper measures them: the middle convolution of a block is `width_factor` times as wide as its first.
Shapes in comments: B examples, H x W pixels, C channels, N classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import images, shared
from benchmarks.models.shared import Batch, Metrics, Params, State


@dataclasses.dataclass(frozen=True)
class WideResNetConfig:
    """The sizes of a model."""

    stage_sizes: tuple[int, ...]  # blocks in each stage; a stage has half the pixels a side and twice the channels
    channels: int  # after the first convolution; a block has 4 times as many at its ends
    width_factor: int
    num_classes: int = 1000
    image_size: int = 224  # pixels a side
    dtype: Any = jnp.float32  # of activations and convolutions; parameters and statistics are always float32
    remat: bool = False  # recompute each block in the backward pass
    norm_groups: int = 1  # of examples, by whose own statistics batch norm normalises them

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Channels that enter, of the first convolution, and that leave, and the stride, of each block."""
        entering = self.channels
        for stage, size in enumerate(self.stage_sizes):
            inner = self.channels * 2**stage
            for block in range(size):
                yield entering, inner, 4 * inner, 2 if stage > 0 and block == 0 else 1
                entering = 4 * inner


_LAYERS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}

# The Wide-ResNet sizes of the Alpa paper (Zheng et al., OSDI 2022, table 7, and its public benchmark settings).
SPECIFICATIONS: dict[str, WideResNetConfig] = {
    "250M": WideResNetConfig(_LAYERS[50], 160, 2, remat=True),
    "500M": WideResNetConfig(_LAYERS[50], 224, 2, remat=True),
    "1B": WideResNetConfig(_LAYERS[50], 320, 2, remat=True),
    "2B": WideResNetConfig(_LAYERS[50], 448, 2, remat=True),
    "4B": WideResNetConfig(_LAYERS[50], 640, 2, remat=True),
    "6.8B": WideResNetConfig(_LAYERS[50], 320, 16, remat=True),
    "13B": WideResNetConfig(_LAYERS[101], 320, 16, remat=True),
}


def init(config: WideResNetConfig, key: jax.Array) -> tuple[Params, Any]:
    """Parameters, and the running statistics of the batch norms."""
    stem, head, *keys = jax.random.split(key, 2 + sum(config.stage_sizes))
    blocks, statistics = [], []
    leaving = config.channels
    for (entering, inner, leaving, stride), block_key in zip(config.blocks(), keys, strict=True):
        first, middle, last, shortcut = jax.random.split(block_key, 4)
        wide = inner * config.width_factor
        block = {
            "first": images.kernel(first, 1, 1, entering, inner),
            "first_norm": images.norm_params(inner),
            "middle": images.kernel(middle, 3, 3, inner, wide),
            "middle_norm": images.norm_params(wide),
            "last": images.kernel(last, 1, 1, wide, leaving),
            "last_norm": images.norm_params(leaving),
        }
        if entering != leaving or stride > 1:
            block["shortcut"] = images.kernel(shortcut, 1, 1, entering, leaving)
            block["shortcut_norm"] = images.norm_params(leaving)
        blocks.append(block)
        statistics.append(_statistics(block))
    params = {
        "stem": images.kernel(stem, 7, 7, 3, config.channels),
        "stem_norm": images.norm_params(config.channels),
        "blocks": blocks,
        "head": shared.normal(head, leaving, config.num_classes),
        "head_bias": jnp.zeros(config.num_classes),
    }
    return params, {"blocks": statistics, **_statistics(params)}


def _statistics(params: Params) -> Params:
    return {
        name: images.batch_norm_statistics(leaf["scale"].shape[0])
        for name, leaf in params.items()
        if name.endswith("_norm")
    }


def _convolve_and_normalise(
    params: Params, statistics: Params, new: Params, name: str, x: jax.Array, stride: int, groups: int
) -> jax.Array:
    """One convolution and its batch norm, whose new statistics go to `new`; 0 groups: by the running statistics."""
    norm = f"{name}_norm"
    x = images.convolve(x, params[name], stride)
    x, new[norm] = images.batch_norm(params[norm], statistics[norm], x, groups > 0, groups)
    return x


def _block(params: Params, statistics: Params, x: jax.Array, stride: int, groups: int) -> tuple[jax.Array, Params]:
    """(B, H, W, C) -> (B, H / stride, W / stride, C'), and the new statistics."""
    new: Params = {}
    hidden = jax.nn.relu(_convolve_and_normalise(params, statistics, new, "first", x, 1, groups))
    hidden = jax.nn.relu(_convolve_and_normalise(params, statistics, new, "middle", hidden, stride, groups))
    hidden = _convolve_and_normalise(params, statistics, new, "last", hidden, 1, groups)
    if "shortcut" in params:
        x = _convolve_and_normalise(params, statistics, new, "shortcut", x, stride, groups)
    return jax.nn.relu(x + hidden), new


def logits(
    config: WideResNetConfig, params: Params, statistics: Any, inputs: jax.Array, training: bool
) -> tuple[jax.Array, Any]:
    """Scores of the classes, float32 (B, N), and the new statistics; `inputs`: (B, H, W, 3)."""
    new: Params = {"blocks": []}
    groups = config.norm_groups if training else 0
    x = _convolve_and_normalise(params, statistics, new, "stem", inputs.astype(config.dtype), 2, groups)
    x = images.max_pool(jax.nn.relu(x), 3, 2)
    block = jax.checkpoint(_block, static_argnums=(3, 4)) if config.remat else _block
    for (*_, stride), each, seen in zip(config.blocks(), params["blocks"], statistics["blocks"], strict=True):
        x, found = block(each, seen, x, stride, groups)
        new["blocks"].append(found)
    x = jnp.mean(x.astype(jnp.float32), (1, 2))
    return x @ params["head"] + params["head_bias"], new


def _loss(config: WideResNetConfig) -> shared.LossFn:
    def loss(params: Params, statistics: Any, batch: Batch, key: jax.Array | None) -> Any:
        scores, statistics = logits(config, params, statistics, batch["images"], key is not None)
        return shared.cross_entropy(scores, batch["labels"]), (statistics, {})

    return loss


def make_init(config: WideResNetConfig, optimizer: optax.GradientTransformation) -> Callable[[jax.Array], State]:
    """`init_state(key)`: the whole training state from one typed key."""
    return shared.make_init(lambda key: init(config, key), optimizer)


def make_train_step(
    config: WideResNetConfig, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """`train_step(state, batch)`: the new state and the metrics "loss" and "grad_norm" (before clipping)."""
    return shared.make_train_step(_loss(config), optimizer)


def make_eval_step(config: WideResNetConfig) -> Callable[[State, Batch], Metrics]:
    """`eval_step(state, batch)`: the loss by the running statistics."""
    return shared.make_eval_step(_loss(config))


def abstract_batch(config: WideResNetConfig, batch_size: int) -> Batch:
    """The shapes of a batch, for planning without data."""
    return images.abstract_images(batch_size, config.image_size, 3, config.dtype)


def random_batch(config: WideResNetConfig, batch_size: int, key: jax.Array) -> Batch:
    """Images whose classes can be learnt."""
    return images.random_images(batch_size, config.image_size, 3, config.num_classes, config.dtype, key)
