"""The models of images and the LSTM: their published sizes, and what each is known to do."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import BatchAxisError, MicrobatchError
from benchmarks.models import images, lstm, shared, unet, vit, wide_resnet

TINY = wide_resnet.WideResNetConfig((1, 1), 4, 2, num_classes=4, image_size=16)


@pytest.mark.parametrize(
    ("model", "name", "published"),
    [
        (wide_resnet, "250M", 250), (wide_resnet, "1B", 1000), (wide_resnet, "4B", 4000), (wide_resnet, "6.8B", 6800),
        (vit, "B/16", 86), (vit, "L/16", 307), (vit, "H/14", 632), (unet, "36M", 35.7), (unet, "114M", 114),
        (lstm, "large", 66),
    ],
)  # fmt: skip
def test_published_sizes(model: ModuleType, name: str, published: float) -> None:
    optimizer = shared.make_optimizer(1e-3, 1, 10)
    state = jax.eval_shape(model.make_init(model.SPECIFICATIONS[name], optimizer), jax.random.key(0))
    assert shared.num_parameters(state["params"]) == pytest.approx(published * 1e6, rel=0.02)


def test_batch_norm_is_the_textbook_formula() -> None:
    x = np.random.default_rng(0).normal(3, 2, (4, 5, 5, 2)).astype(np.float32)
    params = {"scale": jnp.asarray([1.0, 2.0]), "bias": jnp.asarray([0.0, 1.0])}
    result, new = images.batch_norm(params, images.batch_norm_statistics(2), jnp.asarray(x), True)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    np.testing.assert_allclose(result, (x - mean) / np.sqrt(variance + 1e-5) * [1, 2] + [0, 1], atol=1e-5)
    np.testing.assert_allclose(new["mean"], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(new["variance"], 0.9 + 0.1 * variance, rtol=1e-5)
    evaluated, same = images.batch_norm(params, new, jnp.asarray(x), False)
    np.testing.assert_allclose(
        evaluated[..., 0], (x[..., 0] - 0.1 * mean[0]) / np.sqrt(new["variance"][0] + 1e-5), 1e-4
    )
    assert same is new or jax.tree.all(jax.tree.map(np.array_equal, same, new))


def test_batch_norm_by_groups_is_batch_norm_of_each() -> None:
    x = jax.random.normal(jax.random.key(0), (6, 4, 4, 2))
    params, statistics = images.norm_params(2), images.batch_norm_statistics(2)
    result, new = images.batch_norm(params, statistics, x, True, 3)
    apart = [images.batch_norm(params, statistics, x[i : i + 2], True) for i in (0, 2, 4)]
    np.testing.assert_allclose(result, jnp.concatenate([each for each, _ in apart]), atol=1e-6)
    means = [each["mean"] for _, each in apart]
    np.testing.assert_allclose(new["mean"], sum(means) / 3, rtol=1e-5)


def test_groups_of_batch_norm_may_be_microbatches() -> None:
    config = wide_resnet.WideResNetConfig((1, 1), 4, 2, num_classes=4, image_size=16, norm_groups=2)
    optimizer = optax.sgd(0.1)
    state = wide_resnet.make_init(config, optimizer)(jax.random.key(0))
    batch = wide_resnet.random_batch(config, 8, jax.random.key(1))
    step = wide_resnet.make_train_step(config, optimizer)
    wanted, _ = jax.jit(step)(state, batch)
    found, _ = autopar.parallelize(step, num_microbatches=2, devices=jax.devices()[:2])(state, batch)
    found = autopar.gather(found)
    for a, b in zip(jax.tree.leaves(found["params"]), jax.tree.leaves(wanted["params"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(BatchAxisError, match="in groups of 4 examples"):
        autopar.parallelize(step, num_microbatches=4).plan(state, batch)


def test_group_norm_knows_one_example_only() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 4, 4, 6))
    result = images.group_norm(images.norm_params(6), x, 3)
    np.testing.assert_allclose(result[1:2], images.group_norm(images.norm_params(6), x[1:2], 3), atol=1e-6)
    np.testing.assert_allclose(result.reshape(3, 16, 3, 2).var((1, 3)), 1, rtol=1e-3)


def test_an_lstm_layer_is_the_textbook_formula() -> None:
    config = lstm.LSTMConfig(5, 3, 1, 4)
    params = lstm.init(config, jax.random.key(0))["layers"][0]
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    found = lstm._layer(params, jnp.asarray(x))
    weights, state = (np.asarray(params[name], np.float64).reshape(4, 16) for name in ("inputs", "state"))
    hidden = cell = np.zeros((2, 4))
    for time in range(3):
        i, f, o, g = np.split(x[:, time] @ weights + hidden @ state, 4, 1)
        i, f, o = (1 / (1 + np.exp(-z)) for z in (i, f, o))
        cell = f * cell + i * np.tanh(g)
        hidden = o * np.tanh(cell)
        np.testing.assert_allclose(found[:, time], hidden, atol=1e-5)


def test_microbatches_of_a_batch_norm_are_refused_with_its_line() -> None:
    optimizer = shared.make_optimizer(1e-3, 1, 10)
    step = autopar.parallelize(
        wide_resnet.make_train_step(TINY, optimizer), method=autopar.recipes.gpipe(num_stages=2, num_microbatches=2)
    )
    state = jax.eval_shape(wide_resnet.make_init(TINY, optimizer), jax.random.key(0))
    with pytest.raises(MicrobatchError, match=r"images\.py:\d+.*\(batch_norm\)[\s\S]*num_microbatches=1"):
        step.plan(state, wide_resnet.abstract_batch(TINY, 8))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", [vit, unet])
def test_eval_steps_need_no_key(model: Any) -> None:
    config = {
        vit: vit.ViTConfig(1, 8, 2, patch_size=4, image_size=8, num_classes=3),
        unet: unet.UNetConfig(8, 8, (1, 2), blocks_per_level=1, attention_sizes=(4,), num_groups=4),
    }[model]
    state = jax.jit(model.make_init(config, shared.make_optimizer(1e-3, 1, 10)))(jax.random.key(0))
    batch = model.random_batch(config, 2, jax.random.key(1))
    assert jax.tree.map(jnp.shape, batch) == jax.tree.map(jnp.shape, model.abstract_batch(config, 2))
    assert np.isfinite(jax.jit(model.make_eval_step(config))(state, batch)["loss"])
