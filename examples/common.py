"""What the examples share: random data, and a loop that trains on eight virtual CPU devices."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import autopar

EXAMPLES, FEATURES, CLASSES = 16, 8, 4
VOCABULARY, TIME = 64, 8


@dataclasses.dataclass(frozen=True)
class Example:
    """`train_step(*state, *batch)` returns the new state and then, last, the loss or a dict with it."""

    train_step: autopar.Parallelized
    state: tuple[Any, ...]
    batches: Sequence[tuple[np.ndarray, ...]]

    @property
    def plain_step(self) -> Any:
        """The undecorated step."""
        return self.train_step.__wrapped__  # type: ignore[attr-defined]


def labelled_points(steps: int) -> list[tuple[np.ndarray, ...]]:
    """Per step points [16, 8] and their classes [16], which a linear map decides."""
    random = np.random.default_rng(0)
    x = random.normal(size=(steps, EXAMPLES, FEATURES)).astype(np.float32)
    y = np.argmax(x @ random.normal(size=(FEATURES, CLASSES)), -1).astype(np.int32)
    return list(zip(x, y, strict=True))


def masked_tokens(steps: int) -> list[tuple[np.ndarray, ...]]:
    """Per step tokens [16, 8], and labels that are -100 where nothing is to be predicted."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCABULARY, (steps, EXAMPLES, TIME)).astype(np.int32)
    chosen = random.random(tokens.shape) < 0.3
    return list(zip(np.where(chosen, 0, tokens), np.where(chosen, tokens, -100).astype(np.int32), strict=True))


def run(build: Any) -> None:
    """Train on eight virtual devices and print the plan and the losses."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    example: Example = build()
    state = example.state
    for step, batch in enumerate(example.batches):
        *state, result = example.train_step(*state, *batch)
        loss = result["loss"] if isinstance(result, dict) else result
        print(f"step {step}: loss {float(loss):.4f}")
    print(example.train_step.plan(*state, *batch), file=sys.stderr)
