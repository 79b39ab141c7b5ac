"""Loops over layers hand on to their backward pass as few bytes as give all that is read there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.graph import Equation, Graph
from autopar.passes.loop_residuals import thin_loops
from autopar.passes.rules.nested import make_body
from autopar.passes.rules.table import rule_of
from autopar.tracing.axis_collectives import scan_counts
from autopar.tracing.trace import trace

LAYERS, ROWS, WIDTH = 3, 8, 16


def _norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _plain(x: Any, p: Any) -> Any:
    return x + jax.nn.gelu(_norm(x, p["scale"]) @ p["up"]) @ p["down"], None


def _dropout(x: Any, p: Any) -> Any:
    hidden = jax.nn.gelu(_norm(x, p["scale"]) @ p["up"])
    kept = jax.random.bernoulli(jax.random.key(p["seed"]), 0.5, hidden.shape)
    return x + jnp.where(kept, hidden, 0).astype(x.dtype) @ p["down"], None


def _returning(x: Any, p: Any) -> Any:
    hidden = jax.nn.gelu(_norm(x, p["scale"]) @ p["up"])
    return x + hidden @ p["down"], hidden.astype(jnp.float32)


def _nested(x: Any, p: Any) -> Any:
    def inner(h: Any, _: Any) -> Any:
        return jax.nn.gelu(_norm(h, p["scale"]) @ p["up"]) @ p["down"], None

    return x + jax.lax.scan(inner, x, None, length=2)[0], None


def _branching(x: Any, p: Any) -> Any:
    hidden = _norm(x, p["scale"]) @ p["up"]
    hidden = jax.lax.cond(p["seed"] > 1, jax.nn.gelu, jnp.tanh, hidden)
    return x + hidden @ p["down"], None


def _layers(dtype: Any, seed: int = 0) -> Any:
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "scale": jax.random.normal(keys[0], (LAYERS, WIDTH)) + 1,
        "up": (jax.random.normal(keys[1], (LAYERS, WIDTH, 4 * WIDTH)) * 0.3).astype(dtype),
        "down": (jax.random.normal(keys[2], (LAYERS, 4 * WIDTH, WIDTH)) * 0.3).astype(dtype),
        "seed": jnp.arange(LAYERS),
    }


def _step(block: Callable[[Any, Any], Any], *, reverse: bool = False) -> Callable[[Any, Any], Any]:
    def step(params: Any, x: Any) -> Any:
        trained = {k: v for k, v in params.items() if k != "seed"}

        def loss(trained: Any) -> Any:
            last, extra = jax.lax.scan(block, x, {**trained, "seed": params["seed"]}, reverse=reverse)
            return jnp.mean(last.astype(jnp.float32) ** 2), extra

        grads, extra = jax.grad(loss, has_aux=True)(trained)
        new = jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), trained, grads)
        return {**new, "seed": params["seed"]}, extra

    return step


def _loops(graph: Graph) -> list[Equation]:
    return [eqn for eqn in graph.equations if eqn.primitive.name == "scan"]


def _handed_on(graph: Graph) -> int:
    """Bytes of the stacks of all loops that no result is."""
    stacks = {v for eqn in _loops(graph) for v in eqn.outputs[scan_counts(eqn.params)[1] :]}
    read = {v for eqn in _loops(graph) for v in eqn.values}
    return sum(v.nbytes for v in stacks & read)


def _traced(step: Callable[[Any, Any], Any], dtype: Any) -> tuple[Graph, Graph]:
    graph = trace(step, (_layers(dtype), jnp.zeros((ROWS, WIDTH), dtype)), {}, name="step")
    return graph, thin_loops(graph, rule_of)


def test_of_norms_and_functions_only_what_they_are_made_of_is_stacked() -> None:
    before, after = _traced(_step(_plain), jnp.bfloat16)
    wide, narrow = ROWS * WIDTH * 4, ROWS * WIDTH * 2
    # The norm's operand and result, that of the function, whose result the product reads; the norm's two statistics.
    assert _handed_on(after) == LAYERS * (2 * narrow + 2 * 4 * narrow + 2 * ROWS * 4)
    assert _handed_on(before) > _handed_on(after) + LAYERS * 3 * wide


@pytest.mark.parametrize("block", [_plain, _dropout, _returning, _nested, _branching])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_results_are_those_of_one_device(block: Callable[[Any, Any], Any], reverse: bool, dtype: Any) -> None:
    step = _step(block, reverse=reverse)
    before, after = _traced(step, dtype)
    assert _handed_on(after) < _handed_on(before) or block is _nested
    x = jax.random.normal(jax.random.key(9), (ROWS, WIDTH), dtype)
    expected = jax.jit(step)(_layers(dtype), x)
    result = autopar.parallelize(step)(_layers(dtype), x)
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    for got, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        assert got.weak_type == wanted.weak_type
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=tolerance, atol=tolerance
        )


def test_what_the_step_returns_stays_a_stack() -> None:
    _, after = _traced(_step(_returning), jnp.bfloat16)
    outputs = {v for eqn in _loops(after) for v in eqn.outputs}
    assert any(v in outputs and v.shape == (LAYERS, ROWS, 4 * WIDTH) for v in after.outputs)


def test_what_is_checkpointed_is_left_alone() -> None:
    before, after = _traced(_step(jax.checkpoint(_plain)), jnp.bfloat16)
    assert after is before


def test_equations_of_a_body_keep_their_lines() -> None:
    _, after = _traced(_step(_plain), jnp.bfloat16)
    for eqn in _loops(after):
        closed = eqn.params["jaxpr"]
        body = make_body(closed.in_avals, [(closed, range(len(closed.in_avals)))], rule_of)
        assert any("test_loop_residuals.py" in inner.source and "(_norm)" in inner.source for inner in body.equations)
        assert not any("/loop_residuals.py" in inner.source for inner in body.equations)


def test_a_step_needs_less_memory_than_under_jit() -> None:
    step, x = _step(_plain), jnp.zeros((64 * ROWS, WIDTH), jnp.bfloat16)
    params = _layers(jnp.bfloat16)
    compiled = jax.jit(step).lower(params, x).compile().memory_analysis()
    plan = autopar.parallelize(step, cluster=autopar.load_preset("cpu", devices_per_host=1)).plan(params, x)
    assert compiled is not None
    assert plan.stages[0].memory.temporaries < compiled.temp_size_in_bytes
