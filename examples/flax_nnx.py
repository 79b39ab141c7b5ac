"""Flax NNX, functional (`nnx.split` and `nnx.merge`) and with the model itself as argument and result.

NNX modules are pytrees, so that a step may take and return them, as here. A step may also change them in place and
return nothing of them, as under `nnx.jit`: the caller's objects are renewed then.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

import autopar
from examples.common import CLASSES, FEATURES, Example, labelled_points, run


class Classifier(nnx.Module):
    """A multilayer perceptron over points [batch, features]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(FEATURES, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])
        self.outer = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [batch, classes]."""
        x = self.dropout(nnx.relu(self.norm(self.inner(x))))
        for block in self.blocks:
            x = x + nnx.gelu(block(x))
        return self.outer(x)


def loss_fn(model: Classifier, x: Any, y: Any) -> Any:
    """The mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def _make(optimizer: Any) -> tuple[Classifier, Any]:
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optimizer or optax.adamw(1e-3), wrt=nnx.Param)


def build(optimizer: Any = None) -> Example:
    """The functional style."""
    graphdef, state = nnx.split(_make(optimizer))

    @autopar.parallelize
    def train_step(state: Any, x: Any, y: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return Example(train_step, (state,), labelled_points(5))


def build_with_modules(optimizer: Any = None) -> Example:
    """The style of `nnx.jit`, with the changed objects returned."""

    @autopar.parallelize
    def train_step(model: Classifier, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        return model, optimizer, loss

    return Example(train_step, _make(optimizer), labelled_points(5))


if __name__ == "__main__":
    run(build)
    run(build_with_modules)
