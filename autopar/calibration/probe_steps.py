"""Small train steps that a calibration runs as a whole: what kernels take longer among others than alone.

Each is a plain step `(state, batch) -> (state, loss)` of a few blocks, with the arguments' shapes for a number of
examples: a perceptron, attention over a vocabulary, and convolutions with batch normalisation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Step = Callable[[Any, Any], tuple[Any, Any]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class ProbeStep:
    """A step and the shapes that it takes."""

    name: str
    step: Step
    state: Any  # of `jax.ShapeDtypeStruct`
    batch: Any
    couples: bool = False  # whether the examples of a batch depend on one another


def probe_steps(size: int, examples: int) -> tuple[ProbeStep, ...]:
    """`size`: 1 for layers of 128 units, 2 for 256, and so on."""
    return _perceptron(128 * size, examples), _attention(64 * size, examples), _convolutions(16 * size, examples)


_DEPTH = 3
_LENGTH = 64  # tokens of an example
_HEAD = 32
_IMAGE = 28


def _perceptron(width: int, examples: int) -> ProbeStep:
    def loss(parameters: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer in range(_DEPTH):
            hidden = jax.nn.gelu(_norm(x) @ parameters[f"up{layer}"] + parameters[f"bias{layer}"])
            x = x + hidden @ parameters[f"down{layer}"]
        return ((x - batch["y"]) ** 2).mean()

    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(_DEPTH):
        shapes |= {f"up{layer}": (width, 4 * width), f"bias{layer}": (4 * width,), f"down{layer}": (4 * width, width)}
    rows = jax.ShapeDtypeStruct((16 * examples, width), jnp.float32)
    return _adam("perceptron", loss, shapes, {"x": rows, "y": rows})


def _attention(width: int, examples: int) -> ProbeStep:
    heads, vocabulary = width // _HEAD, 16 * width

    def loss(parameters: Any, batch: Any) -> Any:
        x = parameters["table"][batch["tokens"]]
        for layer in range(_DEPTH):
            projected = jnp.einsum("btw,wphd->pbhtd", _norm(x), parameters[f"in{layer}"])
            queries, keys, values = projected
            weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", queries, keys) / _HEAD**0.5)
            x = x + jnp.einsum("bhqk,bhkd,hdw->bqw", weights, values, parameters[f"out{layer}"])
        logits = _norm(x) @ parameters["table"].T
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["tokens"][..., None], axis=-1)
        return -chosen.mean()

    shapes: dict[str, tuple[int, ...]] = {"table": (vocabulary, width)}
    for layer in range(_DEPTH):
        shapes |= {f"in{layer}": (width, 3, heads, _HEAD), f"out{layer}": (heads, _HEAD, width)}
    return _adam("attention", loss, shapes, {"tokens": jax.ShapeDtypeStruct((examples, _LENGTH), jnp.int32)})


def _convolutions(channels: int, examples: int) -> ProbeStep:
    def loss(parameters: Any, batch: Any) -> Any:
        x = batch["images"]
        for layer in range(_DEPTH):
            stride = 1 if layer == 0 else 2
            x = jax.lax.conv_general_dilated(
                x, parameters[f"kernel{layer}"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            mean, square = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
            x = jax.nn.relu((x - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5) * parameters[f"scale{layer}"])
        return ((x.mean((1, 2)) @ parameters["head"] - batch["y"]) ** 2).mean()

    shapes: dict[str, tuple[int, ...]] = {}
    widths = (channels, *(channels * 2**layer for layer in range(_DEPTH)))
    for layer in range(_DEPTH):
        shapes |= {f"kernel{layer}": (3, 3, *widths[layer : layer + 2]), f"scale{layer}": (widths[layer + 1],)}
    shapes["head"] = (widths[-1], 8)
    images = jax.ShapeDtypeStruct((examples, _IMAGE, _IMAGE, channels), jnp.float32)
    batch = {"images": images, "y": jax.ShapeDtypeStruct((examples, 8), jnp.float32)}
    return dataclasses.replace(_adam("convolutions", loss, shapes, batch), couples=True)


def _norm(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def _adam(name: str, loss: Callable[[Any, Any], Any], shapes: Shapes, batch: Any) -> ProbeStep:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(state["parameters"], batch)
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["means"], gradients)
        squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state["squares"], gradients)
        parameters = jax.tree.map(
            lambda p, m, s: p - 1e-4 * m / (jnp.sqrt(s) + 1e-6), state["parameters"], means, squares
        )
        return {"parameters": parameters, "means": means, "squares": squares}, value

    leaves = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
    return ProbeStep(name, step, dict.fromkeys(("parameters", "means", "squares"), leaves), batch)
