"""The models that are compared with one device, in tiny configurations, and what the harness must know of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax
import optax

from benchmarks.models import decoder, encoder_decoder, gpt, lstm, moe, unet, vit, wide_resnet
from benchmarks.models.shared import Batch, Metrics, State


class Model(Protocol):
    """A module of `benchmarks.models`."""

    def make_init(self, config: Any, optimizer: optax.GradientTransformation, /) -> Callable[[jax.Array], State]: ...

    def make_train_step(
        self, config: Any, optimizer: optax.GradientTransformation, /
    ) -> Callable[[State, Batch], tuple[State, Metrics]]: ...

    def abstract_batch(self, config: Any, batch_size: int, /) -> Batch: ...

    def random_batch(self, config: Any, batch_size: int, key: jax.Array, /) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class Subject:
    model: Model
    config: Callable[[int], Any]  # number of layers -> a tiny configuration; dropout is on
    max_microbatches: int = 8  # 1 where the examples are coupled (batch norm)
    unit: int = 1  # examples that stay together in a microbatch and on a data shard (a group of MoE)


def _gpt(num_layers: int, scan: bool = False) -> gpt.GPTConfig:
    """Its heads can be cut over eight devices."""
    return gpt.GPTConfig(64, 16, num_layers, width=32, num_heads=8, dropout=0.1, scan=scan)


def _moe(num_layers: int) -> moe.MoEConfig:
    """A group spans two examples."""
    return moe.MoEConfig(64, 16, num_layers, width=32, num_heads=8, num_experts=8, group_size=32, mlp_factor=2)


def _decoder(num_layers: int) -> decoder.DecoderConfig:
    return decoder.DecoderConfig(64, 16, num_layers, width=64, num_heads=16, num_key_value_heads=8, hidden=96)


def _encoder_decoder(num_layers: int) -> encoder_decoder.EncoderDecoderConfig:
    return encoder_decoder.EncoderDecoderConfig(
        64, 12, 8, num_layers // 2, width=32, num_heads=8, head_dim=4, hidden=64, num_buckets=8, max_distance=16
    )


def _wide_resnet(num_layers: int) -> wide_resnet.WideResNetConfig:
    return wide_resnet.WideResNetConfig((num_layers // 2,) * 2, 8, 2, num_classes=8, image_size=32)


def _vit(num_layers: int) -> vit.ViTConfig:
    return vit.ViTConfig(num_layers, 32, 8, patch_size=4, image_size=16, num_classes=8)


def _unet(num_layers: int) -> unet.UNetConfig:
    """Half of `num_layers` down, half up, and what lies between them."""
    return unet.UNetConfig(8, 8, (1, 2), blocks_per_level=max(1, num_layers // 4), attention_sizes=(4,), num_groups=4)


def _lstm(num_layers: int) -> lstm.LSTMConfig:
    return lstm.LSTMConfig(64, 12, num_layers, width=32, dropout=0.1)


SUBJECTS: Mapping[str, Subject] = {
    "gpt": Subject(cast(Model, gpt), _gpt),
    "gpt_scan": Subject(cast(Model, gpt), lambda num_layers: _gpt(num_layers, scan=True)),
    "moe": Subject(cast(Model, moe), _moe, unit=2),
    "decoder": Subject(cast(Model, decoder), _decoder),
    "encoder_decoder": Subject(cast(Model, encoder_decoder), _encoder_decoder),
    "wide_resnet": Subject(cast(Model, wide_resnet), _wide_resnet, max_microbatches=1),
    "vit": Subject(cast(Model, vit), _vit),
    "unet": Subject(cast(Model, unet), _unet),
    "lstm": Subject(cast(Model, lstm), _lstm),
}
