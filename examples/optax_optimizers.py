"""Optax: one train step under its optimizers and wrappers, and a Shampoo of one's own with matrix roots."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import autopar
from examples.common import CLASSES, FEATURES, Example, labelled_points, run

Params = dict[str, Any]
HIDDEN = 32


def init_params(key: Any) -> Params:
    """Weights and biases of a network with two hidden layers."""
    sizes = (FEATURES, HIDDEN, HIDDEN, CLASSES)
    keys = jax.random.split(key, len(sizes) - 1)
    return {
        f"layer{i}": {"w": jax.random.normal(k, (m, n)) / m**0.5, "b": jnp.zeros(n)}
        for i, (k, m, n) in enumerate(zip(keys, sizes[:-1], sizes[1:], strict=True))
    }


def loss_fn(params: Params, x: Any, y: Any) -> Any:
    """The mean cross entropy."""
    *hidden, last = params.values()
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ last["w"] + last["b"], y).mean()


class ShampooState(NamedTuple):
    """Per matrix the sums of G Gᵀ and Gᵀ G; None for vectors."""

    factors: Any


def scale_by_shampoo(epsilon: float = 1e-4) -> optax.GradientTransformation:
    """Shampoo (Gupta et al. 2018): L^(-1/4) G R^(-1/4), by eigendecomposition; vectors pass through."""

    def init(params: Any) -> ShampooState:
        def start(p: Any) -> Any:
            return None if p.ndim != 2 else tuple(epsilon * jnp.eye(n, dtype=p.dtype) for n in p.shape)

        return ShampooState(jax.tree.map(start, params))

    def root(matrix: Any) -> Any:
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * jnp.maximum(values, epsilon) ** -0.25) @ vectors.T

    def update(grads: Any, state: ShampooState, params: Any = None) -> Any:
        def accumulate(g: Any, f: Any) -> Any:
            return None if f is None else (f[0] + g @ g.T, f[1] + g.T @ g)

        def precondition(g: Any, f: Any) -> Any:
            return g if f is None else root(f[0]) @ g @ root(f[1])

        factors = jax.tree.map(accumulate, grads, state.factors)
        return jax.tree.map(precondition, grads, factors), ShampooState(factors)

    return optax.GradientTransformation(init, update)


def _kinds(params: Params) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


def _matrices(params: Params) -> Any:
    return jax.tree.map(lambda p: p.ndim == 2, params)


def _warmup() -> Any:
    return optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(_warmup(), mask=_matrices)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
    "shampoo": lambda: optax.chain(scale_by_shampoo(), optax.scale(-1e-2)),
    "muon": lambda: optax.contrib.muon(1e-2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=_warmup(), weight_decay=1e-2),
    "masked": lambda: optax.chain(optax.masked(optax.add_decayed_weights(1e-2), _matrices), optax.sgd(0.1, 0.9)),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, _kinds),
    "frozen": lambda: optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.set_to_zero()}, _kinds),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "prodigy": lambda: optax.contrib.prodigy(),
}


def build(optimizer: Any = None) -> Example:
    """Any optimizer whose update takes gradients, state and parameters."""
    tx = optimizer or OPTIMIZERS["adamw"]()

    @autopar.parallelize
    def train_step(params: Params, opt_state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init_params(jax.random.key(0))
    return Example(train_step, (params, tx.init(params)), labelled_points(5))


def build_lookahead() -> Example:
    """Lookahead: fast and slow parameters."""
    tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)

    @autopar.parallelize
    def train_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params.fast, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = optax.LookaheadParams.init_synced(init_params(jax.random.key(0)))
    return Example(train_step, (params, tx.init(params)), labelled_points(5))


def build_sam() -> Example:
    """Sharpness-aware minimisation: a second gradient, where the first one points, inside one step."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    tx = optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2, opaque_mode=True)

    @autopar.parallelize
    def train_step(params: Params, opt_state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        grad_fn = jax.grad(lambda params, _: loss_fn(params, x, y))
        updates, opt_state = tx.update(grads, opt_state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init_params(jax.random.key(0))
    return Example(train_step, (params, tx.init(params)), labelled_points(5))


if __name__ == "__main__":
    names = sys.argv[1:] or list(OPTIMIZERS)
    for name in names:
        print(name)
        run(lambda name=name: build(OPTIMIZERS[name]()))
