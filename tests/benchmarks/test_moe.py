"""The mixture of experts of the benchmarks: its sizes, and its gates against GShard's algorithm told token by token."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.models import moe, shared

TINY = moe.MoEConfig(17, 8, 2, width=16, num_heads=4, num_experts=4, group_size=16, mlp_factor=2, dropout=0.0)


# The published number of parameters in billions (Alpa's table 6).
@pytest.mark.parametrize(
    ("name", "published"),
    [("380M", 0.38), ("690M", 0.69), ("1.3B", 1.3), ("2.4B", 2.4), ("7.1B", 7.1), ("10B", 10), ("27B", 27)],
)
def test_published_sizes(name: str, published: float) -> None:
    shapes = jax.eval_shape(lambda key: moe.init(moe.SPECIFICATIONS[name], key), jax.random.key(0))
    assert shared.num_parameters(shapes) == pytest.approx(published * 1e9, rel=0.04)


def route(gate_logits: np.ndarray, capacity: int) -> tuple[np.ndarray, float]:
    """Top-2 routing of one group, a token at a time: (S, E) -> combine weights (S, E, C), auxiliary loss."""
    tokens, experts = gate_logits.shape
    gates = np.exp(gate_logits) / np.exp(gate_logits).sum(-1, keepdims=True)
    ranking = np.argsort(-gates, axis=-1)
    combine = np.zeros((tokens, experts, capacity))
    used = np.zeros(experts, int)  # places taken
    for choice in range(2):
        asked = used.copy()  # places asked for, whether there is room or not
        for t in range(tokens):
            e = ranking[t, choice]
            if asked[e] < capacity:
                combine[t, e, asked[e]] = gates[t, e]
                used[e] = asked[e] + 1
            asked[e] += 1
    totals = combine.sum((1, 2), keepdims=True)
    first = np.bincount(ranking[:, 0], minlength=experts) / tokens
    return np.divide(combine, totals, out=np.zeros_like(combine), where=totals > 0), experts * (
        first * gates.mean(0)
    ).sum()


@pytest.mark.parametrize("capacity", [1, 3, 8, 32])
def test_gating_is_the_published_algorithm(capacity: int) -> None:
    logits = np.random.default_rng(capacity).normal(size=(3, 16, 4)).astype(np.float32)
    combine, auxiliary_loss = jax.jit(moe.top2_gating, static_argnums=1)(logits, capacity)
    for group in range(3):
        expected, loss = route(logits[group].astype(np.float64), capacity)
        np.testing.assert_allclose(combine[group], expected, atol=1e-5)
        assert float(auxiliary_loss[group]) == pytest.approx(loss, rel=1e-5)


def test_the_mixture_is_a_weighted_sum_of_two_experts_where_there_is_room() -> None:
    config = moe.MoEConfig(17, 8, 2, 16, 4, num_experts=4, group_size=16, capacity_factor=2.0, mlp_factor=2)
    random = np.random.default_rng(0)
    shapes = {"gate": (16, 4), "up": (4, 16, 32), "down": (4, 32, 16)}
    params = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x = random.normal(size=(4, 8, 16)).astype(np.float32)  # two groups of two examples
    found, _ = jax.jit(moe.mixture, static_argnums=0)(config, params, x)
    tokens = x.reshape(32, 16)
    gates = np.exp(tokens @ params["gate"])
    gates /= gates.sum(-1, keepdims=True)
    expected = np.zeros((32, 16))
    hidden = np.asarray(jax.nn.gelu(np.einsum("tw,ewh->teh", tokens, params["up"])))
    for t in range(32):
        chosen = np.argsort(-gates[t])[:2]
        for e in chosen:
            expected[t] += gates[t, e] / gates[t, chosen].sum() * (hidden[t, e] @ params["down"][e])
    np.testing.assert_allclose(np.asarray(found).reshape(32, 16), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_it_learns_and_says_how_evenly_tokens_are_spread() -> None:
    optimizer = shared.make_optimizer(1e-2, 2, 60)
    step = jax.jit(moe.make_train_step(TINY, optimizer), donate_argnums=0)
    state: Any = jax.jit(moe.make_init(TINY, optimizer))(jax.random.key(0))
    batch = moe.random_batch(TINY, 4, jax.random.key(1))
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        assert 0.5 < float(metrics["auxiliary_loss"]) < 4  # 1: evenly, 4: all to one expert
    assert losses[-1] < 0.6 * losses[0]
