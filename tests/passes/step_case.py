"""A train step with what the batch analysis must find in it, and what many of them are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH, TIME, WIDTH, CLASSES = 8, 4, 6, 5

Step = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step, and what its analysis must come to."""

    step: Step
    state: Any
    batch: Any
    batch_axes: Any = "auto"
    max_microbatches: int = BATCH
    coupled: str = ""  # the primitive named in the error for more than one microbatch


Cases = dict[str, Callable[[], Case]]


def listed_in(cases: Cases) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """A decorator that lists a case under its name."""

    def case(make: Callable[[], Case]) -> Callable[[], Case]:
        cases[make.__name__] = make
        return make

    return case


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def params() -> dict[str, np.ndarray]:
    return {"w": draw(WIDTH, WIDTH, seed=1), "v": draw(WIDTH, CLASSES, seed=2)}


def examples() -> dict[str, np.ndarray]:
    labels = np.random.default_rng(3).integers(0, CLASSES, BATCH).astype(np.int32)
    mask = np.array([1, 0, 1, 1, 0, 1, 1, 0], np.float32)
    return {"x": draw(BATCH, WIDTH), "y": labels, "mask": mask}


def logits(p: Any, x: jax.Array) -> jax.Array:
    result: jax.Array = jnp.tanh(x @ p["w"]) @ p["v"]
    return result


def losses(p: Any, batch: Any) -> jax.Array:
    """One per example."""
    found: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits(p, batch["x"]), batch["y"])
    return found


def sgd(p: Any, g: Any) -> Any:
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g)


def trained_on(loss: Callable[..., Any], *, has_aux: bool = False) -> Step:
    """The step of plain SGD on a loss of (parameters, batch)."""

    def step(p: Any, batch: Any) -> Any:
        value, g = jax.value_and_grad(loss, has_aux=has_aux)(p, batch)
        return sgd(p, g), value

    return step


def on_examples(loss: Callable[..., Any], **options: Any) -> Case:
    return Case(trained_on(loss), params(), examples(), **options)
