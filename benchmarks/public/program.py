"""What the programs have in common: sizes, a variant of a model, a step with its arguments, losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a model and its batch; each model takes what it has."""

    width: int
    heads: int
    hidden: int  # units of an MLP
    vocabulary: int  # or classes
    length: int  # tokens, or patches
    batch_size: int  # examples
    image: int  # pixels along an edge
    dtype: Any = jnp.bfloat16  # of activations, for models that let one choose


@dataclasses.dataclass(frozen=True)
class Variant:
    """How deep a model is and how it is run."""

    layers: int
    checkpoint: bool = False  # each layer is computed again in the backward pass
    scan: bool = False  # layers are rounds of a loop over stacked parameters
    evaluation: bool = False  # forward only


@dataclasses.dataclass(frozen=True)
class Step:
    """`function(state, *batch)`: the new state and metrics in training, metrics alone in evaluation."""

    function: Callable[..., Any]
    init: Callable[[jax.Array], Any]  # typed key -> state; can be traced
    batch: tuple[jax.ShapeDtypeStruct, ...]
    classes: int  # integers of a batch are below this
    training: bool = True

    def abstract(self) -> tuple[Any, ...]:
        """Shapes of the arguments."""
        return jax.eval_shape(self.init, jax.random.key(0)), *self.batch

    def random(self, key: jax.Array) -> tuple[Any, ...]:
        """Arguments with numbers in them."""
        init_key, *keys = jax.random.split(key, 1 + len(self.batch))
        return jax.jit(self.init)(init_key), *map(self._random, self.batch, keys)

    def _random(self, array: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jnp.integer):
            return jax.random.randint(key, array.shape, 1, self.classes, array.dtype)
        return jax.random.normal(key, array.shape, array.dtype)


Build = Callable[[Sizes, Variant], Step]


@dataclasses.dataclass(frozen=True)
class Program:
    """A model of a framework in one variant; `family` names what differs in nothing but depth."""

    framework: str
    model: str
    variant: Variant
    sizes: Sizes
    build: Build

    @property
    def family(self) -> str:
        v = self.variant
        words = ["scanned"] * v.scan + ["checkpoint"] * v.checkpoint + ["evaluation"] * v.evaluation
        return ", ".join([f"{self.framework} {self.model}", *words])

    @property
    def name(self) -> str:
        return f"{self.family}, {self.variant.layers} layers"

    def make(self) -> Step:
        """The step and its arguments."""
        return self.build(self.sizes, self.variant)


def tokens(sizes: Sizes, length: int | None = None) -> jax.ShapeDtypeStruct:
    """int32 [examples, tokens]."""
    return jax.ShapeDtypeStruct((sizes.batch_size, length or sizes.length), jnp.int32)


def images(sizes: Sizes) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """float32 [examples, height, width, 3], and their classes, int32 [examples]."""
    edge = (sizes.image, sizes.image)
    return (
        jax.ShapeDtypeStruct((sizes.batch_size, *edge, 3), jnp.float32),
        jax.ShapeDtypeStruct((sizes.batch_size,), jnp.int32),
    )


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean in nats, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def masked_cross_entropy(logits: Any, labels: Any, smoothing: float = 0.0) -> tuple[Any, Any]:
    """Sum in nats over labels that are not 0, with labels smoothed, and the number of these."""
    weights = jnp.where(labels > 0, 1.0, 0.0)
    classes = logits.shape[-1]
    soft = jax.nn.one_hot(labels, classes) * (1.0 - smoothing) + smoothing / classes
    losses = -jnp.sum(soft * jax.nn.log_softmax(logits.astype(jnp.float32)), axis=-1)
    return jnp.sum(losses * weights), jnp.sum(weights)
