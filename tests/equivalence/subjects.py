"""The models that are compared with one device, in tiny configurations, and what the harness must know of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax
import optax

from benchmarks.models import gpt
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
    max_stages: int = 8  # 1 where the layers are one operator
    max_microbatches: int = 8  # 1 where the examples are coupled (batch norm)
    unit: int = 1  # examples that stay together in a microbatch and on a data shard (a group of MoE)


def _gpt(num_layers: int, scan: bool = False) -> gpt.GPTConfig:
    """Its heads can be cut over eight devices."""
    return gpt.GPTConfig(64, 16, num_layers, width=32, num_heads=8, dropout=0.1, scan=scan)


SUBJECTS: Mapping[str, Subject] = {
    "gpt": Subject(cast(Model, gpt), _gpt),
    # A loop over the layers is one operator yet, so that it stays in one stage.
    "gpt_scan": Subject(cast(Model, gpt), lambda num_layers: _gpt(num_layers, scan=True), max_stages=1),
}
