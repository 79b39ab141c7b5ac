"""Flax Linen: a `TrainState` with the statistics of a batch-norm, dropout, and metrics in a dict."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import autopar
from examples.common import CLASSES, Example, labelled_points, run


class Classifier(nn.Module):
    """A multilayer perceptron over points [batch, features]."""

    batch_norm: bool

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        """Logits [batch, classes]."""
        x = nn.Dense(32, use_bias=not self.batch_norm)(x)  # a norm over the batch takes a bias away again
        x = nn.BatchNorm(use_running_average=not train)(x) if self.batch_norm else nn.LayerNorm()(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))
        return nn.Dense(CLASSES)(x)


class TrainState(train_state.TrainState):
    """Flax's own, and what it has no field for."""

    batch_stats: Any
    dropout_key: Any


def build(optimizer: Any = None, *, batch_norm: bool = True) -> Example:
    """A batch-norm needs the whole batch, so that it excludes microbatches; without it there is a layer-norm."""
    batches = labelled_points(5)
    model = Classifier(batch_norm)
    variables = model.init(jax.random.key(0), batches[0][0], train=False)
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optimizer or optax.adamw(1e-3),
        batch_stats=variables.get("batch_stats", {}),
        dropout_key=jax.random.key(1),
    )

    @autopar.parallelize
    def train_step(state: TrainState, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                train=True,
                rngs={"dropout": jax.random.fold_in(state.dropout_key, state.step)},
                mutable=["batch_stats"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return loss, (logits, updates)

        (loss, (logits, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=updates.get("batch_stats", {}))
        return state, {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == y)}

    return Example(train_step, (state,), batches)


if __name__ == "__main__":
    run(build)
