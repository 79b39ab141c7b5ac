"""Steps with dimensions padded give what they gave, and lay open nothing of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax import lax

import autopar
from autopar import recipes
from autopar.errors import PlanMismatchError, UnsplitWarning
from autopar.ir.graph import Graph, Phase, Value
from autopar.ir.rule import bind
from autopar.passes.batch import BatchAnalysis
from autopar.passes.padding import padded
from autopar.passes.rules.table import rule_of
from autopar.planning.baselines import plan_beside_recipes
from autopar.planning.traced import TracedStep
from tests.planned import analyse, cluster_of, plan_analysis
from tests.random_programs.programs import RandomProgram, programs
from tests.test_collectives_end_to_end import agree
from tests.test_random_programs import close

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 50, 48, 6, 8, 16
FLOATS = np.dtype(np.float32)
rng = np.random.default_rng(0)


def _normal(*shape: int) -> Any:
    return (0.3 * rng.standard_normal(shape)).astype(np.float32)


def evaluated(graph: Graph, leaves: list[Any]) -> list[Any]:
    """The results of a graph, on one device."""

    def run(leaves: list[Any]) -> list[Any]:
        env: dict[Any, Any] = {**graph.constants, **dict(zip(graph.inputs, leaves, strict=True))}
        for eqn in graph.equations:
            operands = [env[v] if isinstance(v, Value) else v.value for v in eqn.inputs]
            env.update(zip(eqn.outputs, bind(eqn, operands), strict=True))
        return [env[v] if isinstance(v, Value) else v.value for v in graph.outputs]

    return list(jax.jit(run)(leaves))


def check(function: Callable[..., Any], *args: Any, sizes: Mapping[int, int]) -> BatchAnalysis:
    """A step that can be padded, with its results as they were."""
    analysis = analyse(function, *args, batch_axes=(None, 0))
    found = padded(analysis, tuple(sizes.items()), rule_of)
    assert found is not None
    graph = found.graph
    outputs = evaluated(graph, jax.tree.leaves(args))
    expected = jax.tree.leaves(jax.jit(function)(*args))
    for output, reference in zip(outputs, expected, strict=True):
        assert output.shape == reference.shape and output.dtype == reference.dtype
        assert close(output, reference)
    assert found.most_microbatches == analysis.most_microbatches
    return found


def products(graph: Graph) -> list[tuple[int, ...]]:
    """The shapes of the products' results."""
    return [eqn.outputs[0].shape for eqn in graph.equations if eqn.primitive.name == "dot_general"]


def _model(params: Any, tokens: Any) -> Any:
    """A layer of attention and the next token's logits, of tied embeddings."""
    h = params["table"][tokens]
    q, k, v = (jnp.einsum("bld,dhk->blhk", h, params[name]) for name in ("q", "k", "v"))
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), jnp.einsum("blhk,bmhk->bhlm", q, k), -jnp.inf)
    mixed = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores), v)
    h = h + mixed.reshape(*tokens.shape, -1) @ params["o"]
    return h @ params["table"].T


PARAMS = {
    "table": _normal(VOCABULARY, WIDTH), "o": _normal(WIDTH, WIDTH),
    **{name: _normal(WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"},
}  # fmt: skip
TOKENS = {
    "tokens": rng.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32),
    "targets": rng.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def _loss(params: Any, batch: Any) -> Any:
    logits = _model(params, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def train_step(state: Any, batch: Any) -> Any:
    params, moments = state
    loss, gradients = jax.value_and_grad(_loss)(params, batch)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


STATE = (PARAMS, OPTIMIZER.init(PARAMS))


def test_a_language_model() -> None:
    found = check(train_step, STATE, TOKENS, sizes={VOCABULARY: 56, HEADS: 8})
    graph = found.graph
    shapes = products(graph)
    assert (BATCH, LENGTH, 56) in shapes and not any(VOCABULARY in shape or HEADS in shape for shape in shapes)
    # Once a step parameters are padded and gradients cut, what is as large as the logits never.
    moved = [eqn for eqn in graph.equations if eqn.primitive.name in ("pad", "slice") and eqn.inputs[0].dtype == FLOATS]
    assert moved and all(BATCH not in v.shape for eqn in moved for v in eqn.outputs)
    assert all(eqn.phase is not Phase.BACKWARD for eqn in moved)
    state = {tuple(leaf.shape) for leaf in jax.tree.leaves(STATE)}
    assert {v.shape for v in graph.inputs} >= state and {v.shape for v in graph.outputs} >= state


@pytest.mark.parametrize("name", ["exact", "ignored", "smoothed", "first_and_largest", "dropout"])
def test_what_reads_logits(name: str) -> None:
    labels = rng.integers(0, VOCABULARY, BATCH).astype(np.int32)
    labels[:4] = [-1, VOCABULARY, VOCABULARY + 3, 10**6]  # beyond the whole, in the padding and beyond that

    def loss(params: Any, batch: Any) -> Any:
        logits = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
        if name == "dropout":
            logits = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, logits.shape), logits, 0.0)
        if name == "smoothed":
            soft = optax.smooth_labels(jax.nn.one_hot(batch["labels"], VOCABULARY), 0.1)
            return optax.softmax_cross_entropy(logits, soft).mean()
        log = jax.nn.log_softmax(logits)
        if name == "ignored":
            picked = log.at[jnp.arange(BATCH), batch["labels"]].get(mode="fill", fill_value=0.0)
            return -picked.mean() + log.at[jnp.arange(BATCH), batch["labels"]].get(mode="clip").mean()
        return -(log * jax.nn.one_hot(batch["labels"], VOCABULARY)).sum() / BATCH

    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        logits = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
        extra: Any = ()
        if name == "first_and_largest":
            extra = (
                logits.argmax(-1), logits.max(), logits.min(), jnp.cumsum(logits, -1, dtype=np.float32).mean(),
                lax.cumsum(logits, 1, reverse=True).sum(0), jnp.sort(logits, -1)[:, :3], (logits > 0).all(-1),
                (logits > 3).any(-1), lax.top_k(logits, 2), logits.prod(-1), logits[:, ::-1].sum(0), logits,
            )  # fmt: skip
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, extra

    params = {"a": _normal(WIDTH, WIDTH), "b": _normal(WIDTH, VOCABULARY)}
    check(step, params, {"x": _normal(BATCH, WIDTH), "labels": labels}, sizes={VOCABULARY: 56})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_what_it_is(bad: float) -> None:
    def step(params: Any, batch: Any) -> Any:
        h = batch["x"] @ params["a"]
        z = h * 2.0
        return z.max(-1), z.min(-1), z.sum(-1), (z @ params["b"]), h.argmax(-1)

    params = {"a": _normal(WIDTH, VOCABULARY), "b": _normal(VOCABULARY, WIDTH)}
    x = _normal(BATCH, WIDTH)
    x[3, 5] = bad
    check(step, params, {"x": x}, sizes={VOCABULARY: 56})
    params["a"][2, 7] = bad
    check(step, params, {"x": _normal(BATCH, WIDTH)}, sizes={VOCABULARY: 56})


def test_numbers_of_other_types() -> None:
    def step(params: Any, batch: Any) -> Any:
        h = batch["x"] @ params["a"]
        return h.max(-1), h.min(-1), h.sum(-1), lax.reduce_and(h, (1,)), lax.reduce_or(h, (1,)), h @ params["b"]

    params = {"a": rng.integers(-9, 9, (WIDTH, VOCABULARY)), "b": rng.integers(-9, 9, (VOCABULARY, WIDTH))}
    for dtype in (np.int32, np.uint32, np.int16):
        typed = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), params)
        check(step, typed, {"x": rng.integers(0, 9, (BATCH, WIDTH)).astype(dtype)}, sizes={VOCABULARY: 53})


def test_channels_of_convolutions() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            h = lax.conv(batch["x"], params["a"], (1, 1), "SAME")
            h = jax.nn.relu((h - h.mean((2, 3), keepdims=True)) * params["scale"][:, None, None])
            return (lax.conv(h, params["b"], (1, 1), "SAME") ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {"a": _normal(22, 3, 3, 3), "b": _normal(8, 22, 3, 3), "scale": _normal(22)}
    check(step, params, {"x": _normal(BATCH, 3, 6, 6)}, sizes={22: 24})


def test_what_is_not_padded() -> None:
    """Examples, positions that attention pairs, bodies of loops."""

    def none(function: Any, params: Any, batch: Any, size: int) -> None:
        analysis = analyse(function, params, batch, batch_axes=(None, 0))
        assert padded(analysis, ((size, size + 1),), rule_of) is None

    none(lambda p, b: b["x"] @ p, _normal(16, 16), {"x": _normal(20, 16)}, 20)
    none(lambda p, b: jnp.einsum("bld,bmd->blm", b["x"] @ p, b["x"]), _normal(16, 16), {"x": _normal(8, 9, 16)}, 9)
    stacked = _normal(3, 22, 22)
    none(lambda p, b: lax.scan(lambda h, w: (h @ w, None), b["x"], p)[0], stacked, {"x": _normal(8, 22)}, 22)
    none(lambda p, b: b["x"] @ p, _normal(16, 10), {"x": _normal(8, 16)}, 11)


METHODS = [recipes.megatron(1, 8, 1, 1), recipes.megatron(2, 4, 1, 2), recipes.gpipe(2, 4), recipes.zero(3, 1)]


@pytest.mark.parametrize("method", METHODS)
def test_plans_of_the_padded_step_train_the_same(method: Any, tmp_path: Any) -> None:
    step = autopar.parallelize(train_step)
    padding = ((HEADS, 8), (VOCABULARY, 56))
    plan = step.trace(STATE, TOKENS).step.padded(padding).search(autopar.cluster_from_devices(), method)[0]
    assert plan.padding == padding
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    planned = step.plan(STATE, TOKENS, method=loaded)
    assert planned == plan
    executable = planned.compile()
    state: Any = STATE
    expected: Any = STATE
    for _ in range(3):
        state, loss = executable(state, TOKENS)
        expected, expected_loss = jax.jit(train_step)(expected, TOKENS)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), autopar.gather(state), expected)


def _wide_step(params: Any, batch: Any) -> Any:
    """Products so large that what every device has whole takes long."""

    def loss(params: Any) -> Any:
        return ((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["x"]) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def _wide(size: int) -> Any:
    params = {"a": jax.ShapeDtypeStruct((1024, size), FLOATS), "b": jax.ShapeDtypeStruct((size, 1024), FLOATS)}
    return params, {"x": jax.ShapeDtypeStruct((4096, 1024), FLOATS)}


def test_the_search_pads_where_that_is_quicker(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    cluster, method = autopar.load_preset("dgx-a100"), recipes.megatron(1, 8, 1, 1)
    step = autopar.parallelize(_wide_step, cluster=cluster, method=method)
    found = step.plan(*_wide(4095))
    assert found.padding == ((4095, 4096),)
    assert any("padded within the step" in note and "4,095 to 4,096" in note for note in found.notes)
    analysis = analyse(_wide_step, *_wide(4095), batch_axes=(None, 0))
    with pytest.warns(UnsplitWarning, match="Pad it from 4095 to 4096"):
        whole, _ = plan_beside_recipes(analysis, cluster, method, None)
    divided = step.plan(*_wide(4096))
    assert not whole.padding
    assert divided.step_time <= found.step_time < whole.step_time
    # All that is asked of a plan is of the padded step, and other methods are of the step as it is.
    assert found.why("dot_general", most=1) and "4096,512" in "".join(found.as_text().values())
    assert found.report(explain=1).to_json()
    assert dataclasses.replace(found, notes=()) == dataclasses.replace(step.plan(*_wide(4095), method=found), notes=())
    monkeypatch.setenv("AUTOPAR_PLAN_CACHE", str(tmp_path))
    planned = step.plan(*_wide(4095))
    monkeypatch.setattr(TracedStep, "search", None)
    assert step.plan(*_wide(4095)) == planned == found


@pytest.mark.parametrize("padding", [(), ((4095, 4097),), ((4094, 4096),), ((4095, 1),)])
def test_a_plan_whose_padding_was_edited_is_refused(padding: Any) -> None:
    step = autopar.parallelize(_wide_step, cluster=autopar.load_preset("dgx-a100"), method=recipes.megatron(1, 8, 1, 1))
    found = step.plan(*_wide(4095))
    edited = autopar.Plan(**{**found.fields(), "padding": padding})
    with pytest.raises(PlanMismatchError, match="fingerprint"):
        step.plan(*_wide(4095), method=edited)


def test_what_devices_divide_is_not_padded() -> None:
    method = recipes.megatron(1, 8, 1, 1)
    step = autopar.parallelize(_wide_step, cluster=autopar.load_preset("dgx-a100"), method=method)
    assert not step.plan(*_wide(4096)).padding


# In one microbatch: in several, the zeros that a scatter-add starts from count in the first alone, and XLA finds that
# these are zeros in any case, with what gathers them.
@pytest.mark.parametrize("method", [recipes.megatron(2, 4, 1, 1), recipes.zero(3, 1)])
def test_priced_is_lowered_is_compiled(method: Any) -> None:
    analysis = analyse(train_step, STATE, TOKENS, batch_axes=(None, 0))
    larger = padded(analysis, ((HEADS, 8), (VOCABULARY, 56)), rule_of)
    assert larger is not None
    planned = plan_analysis(larger, cluster_of(1, 8), method, method.num_microbatches)
    executable = planned.build(jax.devices())
    agree(planned, executable.sources, executable.programs)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60))])
def test_any_program_gives_the_same(seed: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=8, deadline=None, database=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(programs(), st.integers(1, 3))
    def run(program: RandomProgram, more: int) -> None:
        analysis = analyse(program.function, program.weights, program.batch, batch_axes=(None, 0))
        found = padded(analysis, tuple((size, size + more) for size in (2, 4, 8)), rule_of)
        if found is None:
            return
        leaves = jax.tree.leaves((program.weights, program.batch))
        expected = jax.tree.leaves(jax.jit(program.function)(program.weights, program.batch))
        for output, reference in zip(evaluated(found.graph, leaves), expected, strict=True):
            assert close(output, reference), program.kinds

    run()
