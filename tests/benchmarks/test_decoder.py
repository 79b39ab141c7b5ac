"""The decoder of the benchmarks: its sizes, and its attention against the formula, head by head."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks.models import decoder, shared

TINY = decoder.DecoderConfig(17, 8, 2, width=16, num_heads=4, num_key_value_heads=2, hidden=24)
ROTATE = jax.jit(decoder.rotate)


@pytest.mark.parametrize(
    ("name", "published"),
    [("2-7B", 6.74), ("2-13B", 13.02), ("2-70B", 68.98), ("3-8B", 8.03), ("3-70B", 70.55), ("3-405B", 405.85)],
)
def test_published_sizes(name: str, published: float) -> None:
    shapes = jax.eval_shape(lambda key: decoder.init(decoder.SPECIFICATIONS[name], key), jax.random.key(0))
    assert shared.num_parameters(shapes) == pytest.approx(published * 1e9, rel=1e-3)


def test_rotation_turns_each_pair_by_the_position_times_its_frequency() -> None:
    x = np.random.default_rng(0).normal(size=(5, 1, 4)).astype(np.float32)
    expected = np.empty_like(x)
    for t in range(5):
        for pair, frequency in enumerate([1.0, 100.0**-0.5]):
            z = complex(x[t, 0, pair], x[t, 0, pair + 2]) * np.exp(1j * t * frequency)
            expected[t, 0, pair], expected[t, 0, pair + 2] = z.real, z.imag
    np.testing.assert_allclose(ROTATE(x, 100.0), expected, rtol=1e-5, atol=1e-6)


def test_attention_shares_keys_and_values_within_a_group() -> None:
    random = np.random.default_rng(1)
    shapes = {"query": (16, 16), "key": (16, 8), "value": (16, 8), "out": (16, 16)}
    params = {name: random.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    x = random.normal(size=(1, 8, 16)).astype(np.float32)
    query, keys, value = ((x[0] @ params[name]).reshape(8, -1, 4) for name in ("query", "key", "value"))
    query, keys = (np.asarray(ROTATE(y, 10_000.0), np.float64) for y in (query, keys))
    mixed = np.zeros((8, 4, 4))
    for head in range(4):
        for t in range(8):
            weights = np.exp(keys[: t + 1, head // 2] @ query[t, head] / 2)  # sqrt of a head dimension of 4
            mixed[t, head] = weights / weights.sum() @ value[: t + 1, head // 2]
    found = jax.jit(decoder.attention, static_argnums=0)(TINY, params, x)[0]
    np.testing.assert_allclose(found, mixed.reshape(8, 16) @ params["out"], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_it_learns() -> None:
    optimizer = shared.make_optimizer(1e-2, 2, 60)
    step = jax.jit(decoder.make_train_step(TINY, optimizer), donate_argnums=0)
    state = jax.jit(decoder.make_init(TINY, optimizer))(jax.random.key(0))
    batch = decoder.random_batch(TINY, 4, jax.random.key(1))
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]


def test_heads_must_share_evenly() -> None:
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by num_key_value_heads 3"):
        decoder.DecoderConfig(17, 8, 2, width=16, num_heads=4, num_key_value_heads=3, hidden=24)
