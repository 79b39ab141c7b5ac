"""The GPT of the benchmarks: its sizes, that it learns, and what dropout, remat and bfloat16 may change."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.models import gpt, shared

TINY = gpt.GPTConfig(vocab_size=17, sequence_length=8, num_layers=2, width=16, num_heads=4, dropout=0.0)


def _batch(batch_size: int = 4) -> shared.Batch:
    tokens = np.random.default_rng(0).integers(0, 17, (batch_size, 9)).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def _params(config: gpt.GPTConfig = TINY) -> shared.Params:
    params: shared.Params = _state(config)["params"]
    return params


def _state(config: gpt.GPTConfig = TINY, optimizer: Any = None) -> shared.State:
    init_state = gpt.make_init(config, optimizer or shared.make_optimizer(1e-2, 1, 10))
    state: shared.State = jax.jit(init_state)(jax.random.key(0))
    return state


@pytest.mark.parametrize(
    ("name", "published"),
    # 15B is published as 15; its own settings give 15.37.
    [("125M", 0.125), ("350M", 0.355), ("760M", 0.76), ("1.3B", 1.3), ("2.6B", 2.65), ("6.7B", 6.65), ("39B", 39.0)],
)
def test_published_sizes(name: str, published: float) -> None:
    shapes = jax.eval_shape(lambda key: gpt.init(gpt.SPECIFICATIONS[name], key), jax.random.key(0))
    assert shared.num_parameters(shapes) == pytest.approx(published * 1e9, rel=0.02)


def test_parameters_by_hand() -> None:
    # Embeddings 17·16 + 8·16 = 400. A block: two norms 4·16 = 64; attention 4·16² + 3·16 = 1072 (no bias for the
    # keys); MLP 2·16·64 + 64 + 16 = 2128. Final norm 32.
    assert shared.num_parameters(_params()) == 400 + 2 * (64 + 1072 + 2128) + 32


def test_the_train_step_of_the_largest_specification_traces_without_its_memory() -> None:
    config = gpt.SPECIFICATIONS["39B"]
    optimizer = shared.make_optimizer(1e-4, 10, 100)
    state = jax.eval_shape(gpt.make_init(config, optimizer), jax.random.key(0))
    new_state, metrics = jax.eval_shape(gpt.make_train_step(config, optimizer), state, gpt.abstract_batch(config, 8))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_state) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["loss"].shape == metrics["grad_norm"].shape == ()


def test_loss_of_the_untrained_model_is_that_of_guessing() -> None:
    assert float(gpt.loss(TINY, _params(), _batch())) == pytest.approx(np.log(17), rel=0.02)


def test_a_token_sees_only_what_is_before_it() -> None:
    inputs = _batch()["inputs"]
    changed = inputs.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 17
    before, after = (np.asarray(gpt.logits(TINY, _params(), x)) for x in (inputs, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.any(before[:, 5:] != after[:, 5:], axis=-1))


def test_attention_is_the_textbook_formula() -> None:
    params = _params()["blocks"][0]["attention"]
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # biases that count
    x = np.random.default_rng(1).normal(size=(1, 8, 16)).astype(np.float32)
    expected = np.zeros((8, 16))
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    for head in range(4):
        q = x[0] @ p["query"][:, head] + p["query_bias"][head]
        k = x[0] @ p["key"][:, head]
        v = x[0] @ p["value"][:, head] + p["value_bias"][head]
        for t in range(8):
            scores = np.exp(k[: t + 1] @ q[t] / 2)  # sqrt of a head dimension of 4
            expected[t] += scores / scores.sum() @ v[: t + 1] @ p["out"][head]
    found = np.asarray(shared.attention(params, jnp.asarray(x), shared.causal_mask(8), 0.0, None)[0])
    np.testing.assert_allclose(found, expected + p["out_bias"], rtol=1e-4)


def _gradient(config: gpt.GPTConfig, key: Any = None) -> Any:
    return jax.jit(jax.grad(lambda params: gpt.loss(config, params, _batch(), key)))(_params())


def test_remat_changes_nothing_but_the_memory() -> None:
    config = dataclasses.replace(TINY, dropout=0.3)
    key = jax.random.key(1)
    plain, remat = (_gradient(dataclasses.replace(config, remat=remat), key) for remat in (False, True))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    text = str(jax.make_jaxpr(lambda p: gpt.loss(dataclasses.replace(config, remat=True), p, _batch(), key))(_params()))
    assert text.count("prevent_cse") == config.num_layers


def test_dropout_zeroes_its_share_and_scales_the_rest() -> None:
    found = np.asarray(shared.dropout(jnp.ones(100_000), 0.25, jax.random.key(0)))
    assert set(np.unique(found)) == {np.float32(0), np.float32(4 / 3)}
    assert np.mean(found == 0) == pytest.approx(0.25, abs=0.01)


def test_dropout_is_drawn_anew_every_step_and_evaluation_has_none() -> None:
    config = dataclasses.replace(TINY, dropout=0.5)
    optimizer = shared.make_optimizer(0.0, 1, 10)
    step = jax.jit(gpt.make_train_step(config, optimizer))
    state = _state(config, optimizer)
    next_state, first = step(state, _batch())
    _, second = step(next_state, _batch())
    _, again = step(state, _batch())
    assert float(first["loss"]) == float(again["loss"]) != float(second["loss"])
    evaluated = jax.jit(gpt.make_eval_step(config))(state, _batch())["loss"]
    assert float(evaluated) == pytest.approx(float(gpt.loss(TINY, state["params"], _batch())), rel=1e-6)


def test_biases_and_scales_do_not_decay() -> None:
    optimizer = shared.make_optimizer(1e-2, 0, 10)
    params = jax.tree.map(jnp.ones_like, _params())
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = path[-1].key
        expected = 0.0 if "bias" in name or name == "scale" else -1e-2 * 0.1  # rate × decay × 1
        np.testing.assert_allclose(update, expected, rtol=1e-5)


def test_grad_norm_is_that_before_clipping() -> None:
    optimizer = shared.make_optimizer(1e-2, 1, 10)
    state = _state(TINY, optimizer)
    _, metrics = jax.jit(gpt.make_train_step(TINY, optimizer))(state, _batch())
    squares = [np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(_gradient(TINY))]
    assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(sum(squares)), rel=1e-4)


def test_it_learns_in_bfloat16_too() -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        config = dataclasses.replace(TINY, dtype=dtype, dropout=0.1)
        optimizer = shared.make_optimizer(1e-2, 2, 60)
        step = jax.jit(gpt.make_train_step(config, optimizer), donate_argnums=0)
        state = _state(config, optimizer)
        losses = []
        for _ in range(60):
            state, metrics = step(state, _batch())
            losses.append(float(metrics["loss"]))
        assert losses[-1] < 0.6 * losses[0]
        assert int(state["step"]) == 60
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state["params"]))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width 10 is not divisible by num_heads 4"):
        gpt.GPTConfig(17, 8, 1, width=10, num_heads=4)
