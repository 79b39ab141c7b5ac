"""The encoder-decoder of the benchmarks: its sizes, its position buckets, and what each token may see."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from benchmarks.models import encoder_decoder as t5
from benchmarks.models import shared

TINY = t5.EncoderDecoderConfig(
    17, 10, 6, 2, width=16, num_heads=4, head_dim=4, hidden=24, num_buckets=8, max_distance=16, dropout=0.0
)


LOGITS = jax.jit(t5.logits, static_argnums=0)
LOSS = jax.jit(t5.loss, static_argnums=0)


@pytest.fixture(scope="module")
def params() -> shared.Params:
    found: shared.Params = jax.jit(t5.init, static_argnums=0)(TINY, jax.random.key(0))
    return found


@pytest.fixture(scope="module")
def batch() -> shared.Batch:
    random = jax.jit(t5.random_batch, static_argnums=(0, 1))(TINY, 4, jax.random.key(1))
    return {name: np.array(tokens) for name, tokens in random.items()}


# Of the published checkpoints.
@pytest.mark.parametrize(("name", "published"), [("small", 60_506_624), ("base", 222_903_552), ("large", 737_668_096)])
def test_published_sizes(name: str, published: int) -> None:
    shapes = jax.eval_shape(lambda key: t5.init(t5.SPECIFICATIONS[name], key), jax.random.key(0))
    assert shared.num_parameters(shapes) == published


@pytest.mark.parametrize("causal", [False, True])
def test_near_positions_have_buckets_of_their_own_and_far_ones_share(causal: bool) -> None:
    found = np.asarray(t5.position_buckets(TINY, 40, causal))
    count = 8 if causal else 4  # buckets on one side, half of them exact
    for query in range(40):
        for key in range(40):
            distance = query - key
            side = 4 if key > query and not causal else 0
            distance = max(distance, 0) if causal else abs(distance)
            exact = count // 2
            if distance >= exact:
                share = math.log(distance / exact) / math.log(16 / exact)
                distance = min(count - 1, exact + int(share * (count - exact) + 1e-6))
            assert found[query, key] == side + distance, (query, key)


def test_targets_see_what_is_before_them_and_the_input(params: shared.Params, batch: shared.Batch) -> None:
    inputs, targets = batch["inputs"].copy(), batch["targets"]
    inputs[:, -2:] = t5.PADDING
    inputs[:, :8] = np.maximum(inputs[:, :8], 1)
    before = np.asarray(LOGITS(TINY, params, inputs, targets))
    later = targets.copy()
    later[:, 3] = targets[:, 3] % 16 + 1
    found = np.asarray(LOGITS(TINY, params, inputs, later))
    np.testing.assert_array_equal(found[:, :4], before[:, :4])  # a target is not seen by itself
    assert np.all(np.any(found[:, 4:] != before[:, 4:], axis=-1))
    other = inputs.copy()
    other[:, 7] = inputs[:, 7] % 16 + 1
    found = np.asarray(LOGITS(TINY, params, other, targets))
    assert np.all(np.any(found != before, axis=-1))  # the encoder looks both ways


def test_padding_is_not_counted(params: shared.Params, batch: shared.Batch) -> None:
    targets = batch["targets"]
    scores = np.asarray(LOGITS(TINY, params, batch["inputs"], targets), np.float64)
    scores = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    assert 0 < np.sum(targets == t5.PADDING) < targets.size
    losses = [-scores[b, t, targets[b, t]] for b, t in zip(*np.nonzero(targets), strict=True)]
    assert float(LOSS(TINY, params, batch)) == pytest.approx(float(np.mean(losses)), rel=1e-5)


@pytest.mark.slow
def test_it_learns() -> None:
    optimizer = shared.make_optimizer(1e-2, 2, 60)
    step = jax.jit(t5.make_train_step(TINY, optimizer), donate_argnums=0)
    state = jax.jit(t5.make_init(TINY, optimizer))(jax.random.key(0))
    batch = t5.random_batch(TINY, 4, jax.random.key(1))
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]
