"""Haiku, in the manner of its examples `transformer` and `imagenet`; float32."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.public.program import Sizes, Step, Variant, cross_entropy, images, masked_cross_entropy, tokens


def _norm(x: Any) -> Any:
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)


def language_model(sizes: Sizes, variant: Variant) -> Step:
    """Post-norm by the sum of both halves' inputs; a padded decoder; clipped Adam."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4, b1=0.9, b2=0.99))
    initializer = hk.initializers.VarianceScaling(2 / variant.layers)

    def block(x: Any, mask: Any) -> Any:
        rate = 0.0 if variant.evaluation else 0.1
        attention = hk.MultiHeadAttention(
            sizes.heads, sizes.width // sizes.heads, model_size=sizes.width, w_init=initializer
        )
        y = attention(x, x, x, mask=mask)
        x = _norm(x + hk.dropout(hk.next_rng_key(), rate, y) if rate else x + y)
        y = hk.Linear(sizes.width, w_init=initializer)(jax.nn.gelu(hk.Linear(sizes.hidden, w_init=initializer)(x)))
        return _norm(x + hk.dropout(hk.next_rng_key(), rate, y) if rate else x + y)

    def forward(inputs: Any) -> Any:
        length = inputs.shape[1]
        embed_init = hk.initializers.TruncatedNormal(stddev=0.02)
        x = hk.Embed(sizes.vocabulary, sizes.width, w_init=embed_init)(inputs)
        x = x + hk.get_parameter("positions", [length, sizes.width], init=embed_init)
        mask = (inputs > 0)[:, None, None, :] * np.tril(np.ones((1, 1, length, length)))
        run = hk.remat(block) if variant.checkpoint else block
        for _ in range(variant.layers):
            x = run(x, mask)
        return hk.Linear(sizes.vocabulary)(x)

    network = hk.transform(forward)

    def init(key: jax.Array) -> Any:
        params_key, dropout_key = jax.random.split(key)
        params = network.init(params_key, jnp.zeros((1, sizes.length), jnp.int32))
        return {"params": params, "opt_state": optimizer.init(params), "key": dropout_key}

    def loss_fn(params: Any, key: Any, inputs: Any, targets: Any) -> Any:
        total, count = masked_cross_entropy(network.apply(params, key, inputs), targets)
        return total / count

    def update(state: Any, inputs: Any, targets: Any) -> Any:
        key, dropout_key = jax.random.split(state["key"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], dropout_key, inputs, targets)
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": loss}

    def evaluate(params: Any, inputs: Any, targets: Any) -> Any:
        return {"loss": loss_fn(params, None, inputs, targets)}

    batch = (tokens(sizes), tokens(sizes))
    if variant.evaluation:
        return Step(evaluate, lambda key: init(key)["params"], batch, sizes.vocabulary, training=False)
    return Step(update, init, batch, sizes.vocabulary)


def resnet(sizes: Sizes, variant: Variant) -> Step:
    """`hk.nets.ResNet` of bottlenecks in four groups, each of a quarter of the layers; an average of the parameters."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    blocks = [max(1, variant.layers // 4)] * 4
    channels = [sizes.width * 4 * 2**n for n in range(4)]

    def forward(x: Any, is_training: bool) -> Any:
        net = hk.nets.ResNet(
            blocks, sizes.vocabulary, {"decay_rate": 0.9}, resnet_v2=True, bottleneck=True, channels_per_group=channels
        )
        return net(x, is_training=is_training)

    network = hk.transform_with_state(forward)

    def init(key: jax.Array) -> Any:
        params, net_state = network.init(key, jnp.zeros((1, sizes.image, sizes.image, 3)), is_training=True)
        return {"params": params, "net_state": net_state, "opt_state": optimizer.init(params), "average": params}

    def loss_fn(params: Any, net_state: Any, x: Any, y: Any, is_training: bool) -> Any:
        logits, net_state = network.apply(params, net_state, None, x, is_training=is_training)
        squares = [jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params) if p.ndim > 1]
        return cross_entropy(logits, y) + 1e-4 * 0.5 * sum(squares), net_state

    def update(state: Any, x: Any, y: Any) -> Any:
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, net_state), grads = grad_fn(state["params"], state["net_state"], x, y, True)
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], step_size=1e-3)
        return {"params": params, "net_state": net_state, "opt_state": opt_state, "average": average}, {"loss": loss}

    def evaluate(state: Any, x: Any, y: Any) -> Any:
        params, net_state = state
        return {"loss": loss_fn(params, net_state, x, y, False)[0]}

    def given(key: jax.Array) -> Any:
        state = init(key)
        return state["params"], state["net_state"]

    if variant.evaluation:
        return Step(evaluate, given, images(sizes), sizes.vocabulary, training=False)
    return Step(update, init, images(sizes), sizes.vocabulary)
