"""Haiku: `transform_with_state`, a training state that is a NamedTuple, raw PRNG keys, exponential averages."""

from __future__ import annotations

from typing import Any, NamedTuple

import haiku as hk
import jax
import optax

import autopar
from examples.common import CLASSES, Example, labelled_points, run


class TrainingState(NamedTuple):
    """All that changes from step to step."""

    params: Any
    average: Any  # of the parameters
    net_state: Any
    opt_state: Any
    key: Any  # raw: uint32[2]


def build(optimizer: Any = None, *, batch_norm: bool = True) -> Example:
    """A batch-norm needs the whole batch, so that it excludes microbatches; without it there is a layer-norm."""
    opt = optimizer or optax.adamw(1e-3)

    def forward(x: Any, is_training: bool) -> Any:
        x = hk.Linear(32, with_bias=not batch_norm)(x)  # a norm over the batch takes a bias away again
        if batch_norm:
            x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
        else:
            x = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
        x = jax.nn.relu(x)
        if is_training:
            x = hk.dropout(hk.next_rng_key(), 0.1, x)
        return hk.nets.MLP([32, CLASSES])(x)

    network = hk.transform_with_state(forward)

    def loss_fn(params: Any, net_state: Any, key: Any, x: Any, y: Any) -> Any:
        logits, net_state = network.apply(params, net_state, key, x, is_training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), net_state

    @autopar.parallelize
    def update(state: TrainingState, x: Any, y: Any) -> Any:
        key, dropout_key = jax.random.split(state.key)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, net_state), grads = grad_fn(state.params, state.net_state, dropout_key, x, y)
        updates, opt_state = opt.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = optax.incremental_update(params, state.average, step_size=0.1)
        return TrainingState(params, average, net_state, opt_state, key), {"loss": loss}

    batches = labelled_points(5)
    params, net_state = network.init(jax.random.PRNGKey(0), batches[0][0], is_training=True)
    state = TrainingState(params, params, net_state, opt.init(params), jax.random.PRNGKey(1))
    return Example(update, (state,), batches)


if __name__ == "__main__":
    run(build)
