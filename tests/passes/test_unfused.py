"""Notes on attention that has all its scores in memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.errors import InfeasiblePlanError
from autopar.passes.rules.plain_attention import plain_attention
from autopar.passes.rules.table import rule_of

HEADS, WIDTH, LENGTH, LAYERS = 8, 64, 2048, 3


def by_hand(query: Any, key: Any, value: Any) -> Any:
    """Causal attention as people write it."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / WIDTH**0.5
    mask = jnp.tril(jnp.ones((query.shape[1], query.shape[1]), bool))
    scores = jnp.where(mask, scores, -1e9)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)


of_jax = functools.partial(jax.nn.dot_product_attention, is_causal=True)
fused = functools.partial(autopar.dot_product_attention, is_causal=True)


def make_step(attention: Callable[..., Any], *, scan: bool = False, remat: bool = False) -> Callable[..., Any]:
    def layer(x: Any, params: Any) -> Any:
        heads = (*x.shape[:2], HEADS, WIDTH)
        query, key, value = ((x @ params[name]).reshape(heads) for name in "qkv")
        return x + attention(query, key, value).reshape(x.shape) @ params["o"], None

    if remat:
        layer = jax.checkpoint(layer)

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            if scan:
                h, _ = jax.lax.scan(layer, x, params)
            else:
                h = x
                for i in range(LAYERS):
                    h, _ = layer(h, jax.tree.map(lambda p: p[i], params))  # noqa: B023
            return jnp.mean(jnp.square(h.astype(jnp.float32)))

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


def arrays(length: int = LENGTH) -> tuple[Any, Any]:
    size = HEADS * WIDTH
    params = {name: jax.ShapeDtypeStruct((LAYERS, size, size), jnp.bfloat16) for name in "qkvo"}
    return params, jax.ShapeDtypeStruct((16, length, size), jnp.bfloat16)


def notes(step: Callable[..., Any], preset: str = "dgx-h100", m: int = 1) -> list[str]:
    cluster = autopar.load_preset(preset, num_hosts=1, devices_per_host=4)
    plan = autopar.parallelize(step, method=recipes.data_parallel(m)).plan(*arrays(), cluster=cluster)
    return [note for note in plan.notes if "attention" in note]


def share_of(note: str) -> int:
    """Per cent of the step."""
    return int(re.findall(r"(\d+)% of the step", note)[0])


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"scan": True}, {"scan": True, "remat": True}], ids=str)
@pytest.mark.parametrize(("attention", "line"), [(by_hand, "(by_hand)"), (of_jax, "test_unfused.py")])
def test_attention_with_scores_in_memory_is_told(attention: Any, line: str, options: Any) -> None:
    (note,) = notes(make_step(attention, **options))
    assert line in note
    assert "autopar.dot_product_attention would take about" in note
    forward_only = options == {"scan": True}  # the loop of the backward pass has the weights from elsewhere
    assert ("takes in its forward pass" in note) == forward_only
    assert share_of(note) > (20 if forward_only else 50)


def test_scores_with_a_cap_are_not_told() -> None:
    """The operator has none. A bias that is made by a function of such a kind is no cap."""

    def capped(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / WIDTH**0.5
        weights = jax.nn.softmax(50.0 * jnp.tanh(scores / 50.0), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    def biased(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / WIDTH**0.5
        weights = jax.nn.softmax(scores + jnp.tanh(jnp.ones_like(scores)), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    assert notes(make_step(capped)) == []
    assert len(notes(make_step(biased))) == 1


def test_what_the_operator_would_take_is_told_for_the_types_of_the_products() -> None:
    """V100s have no bfloat16; in float16 the operator is the quicker one there, too."""
    step = make_step(by_hand)
    params, x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float16), arrays())
    cluster = autopar.load_preset("p3.16xlarge", num_hosts=1, devices_per_host=4)
    plan = autopar.parallelize(step, method=recipes.data_parallel()).plan(params, x, cluster=cluster)
    (note,) = [note for note in plan.notes if "attention" in note]
    seconds, fused = (float(t) for t in re.findall(r"([\d.]+) ms", note))
    assert fused < 0.5 * seconds


def test_it_is_told_alike_in_microbatches() -> None:
    (once,), (often,) = (notes(make_step(by_hand), m=m) for m in (1, 4))
    assert share_of(once) - 15 < share_of(often) < share_of(once)  # gradients are added up besides


def test_nothing_is_told_of_fused_attention() -> None:
    assert notes(make_step(fused)) == []


@pytest.mark.parametrize("scan", [False, True])
def test_where_nothing_fits_it_is_told(scan: bool) -> None:
    cluster = autopar.load_preset("p3.16xlarge", num_hosts=1, devices_per_host=1)
    params, _ = arrays()
    batch = jax.ShapeDtypeStruct((16, 16 * LENGTH, HEADS * WIDTH), jnp.bfloat16)
    with pytest.raises(InfeasiblePlanError, match=r"Attention at .*by_hand.* autopar.dot_product_attention does"):
        autopar.parallelize(make_step(by_hand, scan=scan)).plan(params, batch, cluster=cluster)
    plan = autopar.parallelize(make_step(fused, scan=scan)).plan(params, batch, cluster=cluster)
    assert plan.peak_memory < 16e9


def test_nothing_is_told_on_cpus() -> None:
    plan = autopar.parallelize(make_step(by_hand), method=recipes.data_parallel(1)).plan(*arrays())
    assert not [note for note in plan.notes if "attention" in note]


@pytest.mark.parametrize("length", [WIDTH, HEADS * WIDTH // HEADS, 96])
def test_what_is_of_the_size_of_scores_by_chance_is_none(length: int) -> None:
    """Queries, keys and values of as many positions as a head is wide have the shape of scores."""
    step = make_step(by_hand)
    graph = autopar.parallelize(step).trace(*arrays(length)).graph
    found = plain_attention(graph.equations, {eqn.id: rule_of(eqn) for eqn in graph.equations})
    products = [eqn for eqn in graph.equations if eqn.id in found and eqn.primitive.name == "dot_general"]
    assert len(products) == LAYERS * 6  # two forward, four backward
    assert len({eqn.id for eqn in found.values()}) == LAYERS


def test_the_softmax_of_a_loss_is_no_attention() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], 1))

        return jax.value_and_grad(loss_fn)(w)

    shapes = ((256, 512), jnp.float32), ((64, 256), jnp.float32), ((64,), jnp.int32)
    graph = (
        autopar.parallelize(step, batch_axes=(None, 0, 0))
        .trace(*(jax.ShapeDtypeStruct(*each) for each in shapes))
        .graph
    )
    assert not plain_attention(graph.equations, {eqn.id: rule_of(eqn) for eqn in graph.equations})


def test_why_says_what_products_would_take() -> None:
    """About what the plan by products takes for them."""
    cluster = autopar.load_preset("dgx-h100", num_hosts=1, devices_per_host=4)
    method = recipes.data_parallel(2)
    plan = autopar.parallelize(make_step(fused), method=method).plan(*arrays(), cluster=cluster)
    forward, backward = (plan.why("attention", most=2 * LAYERS)[i] for i in (0, -1))
    for why in (forward, backward):
        assert "As two products around a softmax it would take" in str(why)
        assert "with scores of 256.0 MiB an array" in str(why)
    assert plan.why("dot_general", most=1)[0].besides == ""
