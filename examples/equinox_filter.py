"""Equinox: `filter_value_and_grad` on a module with functions and flags, and `partition` and `combine`.

`static_leaves` says what `eqx.filter_jit` takes for granted: leaves that are no arrays are constants of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax

import autopar
from examples.common import CLASSES, FEATURES, Example, labelled_points, run


class Classifier(eqx.Module):
    """A multilayer perceptron over one point [features]."""

    inner: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    outer: eqx.nn.MLP
    activation: Callable[..., Any]
    name: str = eqx.field(static=True, default="classifier")

    def __init__(self, key: Any) -> None:
        inner, outer = jax.random.split(key)
        self.inner = eqx.nn.Linear(FEATURES, 32, key=inner)
        self.norm = eqx.nn.LayerNorm(32)
        self.dropout = eqx.nn.Dropout(0.1)
        self.outer = eqx.nn.MLP(32, CLASSES, width_size=32, depth=2, key=outer)
        self.activation = jax.nn.gelu

    def __call__(self, x: Any, key: Any) -> Any:
        """Logits [classes]."""
        return self.outer(self.dropout(self.norm(self.activation(self.inner(x))), key=key))


def loss_fn(model: Classifier, x: Any, y: Any, key: Any) -> Any:
    """The mean cross entropy."""
    logits = jax.vmap(model)(x, jax.random.split(key, x.shape[0]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def build(optimizer: Any = None) -> Example:
    """The whole module as an argument, as under `eqx.filter_jit`."""
    optim = optimizer or optax.adamw(1e-3)
    model = Classifier(jax.random.key(0))

    @autopar.parallelize(static_leaves=lambda leaf: not eqx.is_array(leaf))
    def make_step(model: Classifier, opt_state: Any, key: Any, x: Any, y: Any) -> Any:
        key, dropout_key = jax.random.split(key)
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y, dropout_key)
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, key, loss

    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    return Example(make_step, (model, opt_state, jax.random.key(1)), labelled_points(5))


def build_with_partition(optimizer: Any = None) -> Example:
    """Only the arrays as an argument."""
    optim = optimizer or optax.adamw(1e-3)
    params, static = eqx.partition(Classifier(jax.random.key(0)), eqx.is_inexact_array)

    @autopar.parallelize
    def make_step(params: Any, opt_state: Any, key: Any, x: Any, y: Any) -> Any:
        key, dropout_key = jax.random.split(key)

        def loss_of(params: Any) -> Any:
            return loss_fn(eqx.combine(params, static), x, y, dropout_key)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optim.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, key, loss

    return Example(make_step, (params, optim.init(params), jax.random.key(1)), labelled_points(5))


if __name__ == "__main__":
    run(build)
    run(build_with_partition)
