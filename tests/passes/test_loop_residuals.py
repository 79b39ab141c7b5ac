"""Loops over layers hand on to their backward pass as few bytes as give all that is read there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.ir.graph import Equation, Graph
from autopar.passes.loop_residuals import thin_loops
from autopar.passes.rules.nested import make_body
from autopar.passes.rules.table import rule_of
from autopar.tracing.axis_collectives import scan_counts
from autopar.tracing.trace import trace
from tests.h100 import h100_devices, needs_cuda_compiler

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", [_plain, _dropout, _returning, _nested, _branching])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_results_are_those_of_one_device(block: Callable[[Any, Any], Any], reverse: bool, dtype: Any) -> None:
    step = _step(block, reverse=reverse)
    before, after = _traced(step, dtype)
    assert (_handed_on(after) < _handed_on(before)) == (block is not _nested)
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


def test_plans_made_before_are_for_another_program() -> None:
    before, after = _traced(_step(_plain), jnp.float32)
    assert before.fingerprint != after.fingerprint


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


@needs_cuda_compiler
def test_a_step_needs_less_memory_on_a_gpu_than_under_jit() -> None:
    """Both by XLA's compiler for a GPU that is not there."""
    width, rows = 256, 8192
    step = _step(_plain)
    shapes: Any = jax.eval_shape(lambda: _layers(jnp.bfloat16))
    params = {
        k: jax.ShapeDtypeStruct(tuple(n * width // WIDTH if n in (WIDTH, 4 * WIDTH) else n for n in x.shape), x.dtype)
        for k, x in shapes.items()
    }
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    device = jax.sharding.SingleDeviceSharding(h100_devices(1)[0])
    under_jit = jax.jit(step, in_shardings=device, out_shardings=device).lower(params, x).compile().memory_analysis()
    assert under_jit is not None
    cluster = autopar.load_preset("dgx-h100", devices_per_host=1)
    found = autopar.parallelize(step, cluster=cluster, method=recipes.data_parallel()).plan(params, x)
    (program,) = found.verify_with_xla("h100").programs
    assert program.found.temporaries < 0.75 * under_jit.temp_size_in_bytes


def _differentiated(block: Callable[[Any, Any], Any], start: Any, xs: Any) -> tuple[Graph, Graph]:
    """Two loops, of which the second reads stacks of the first."""

    def step(w: Any, x: Any) -> Any:
        last, (one, two, *rest) = jax.lax.scan(block, x, w)
        return jax.lax.scan(lambda g, y: (g + y[0] * y[1], None), last, (one, two))[0], rest

    graph = trace(step, (xs, start), {}, name="step")
    return graph, thin_loops(graph, rule_of)


def test_a_constant_that_each_round_returns_is_no_stack_for_later_rounds() -> None:
    constant = jnp.arange(ROWS * WIDTH, dtype=jnp.float32).reshape(ROWS, WIDTH) / 100

    def step(w: Any, x: Any, c: Any) -> Any:
        last, (one, two, same) = jax.lax.scan(lambda h, w: (h @ w, (jnp.sin(c) * 2, jnp.sin(c) * 3, c)), x, w)
        return jax.lax.scan(lambda g, y: (g + y[0] * y[1], None), last, (one, two))[0], same

    args = jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH, jnp.ones((ROWS, WIDTH)), constant
    before = trace(step, args, {}, name="step")
    assert _handed_on(thin_loops(before, rule_of)) < _handed_on(before)
    result = autopar.parallelize(step, batch_axes=(None, 0, 0))(*args)
    for got, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_what_a_round_hands_on_is_kept_only_if_it_is_the_least() -> None:
    def block(h: Any, w: Any) -> Any:
        new = h @ w
        narrow = new.astype(jnp.bfloat16).astype(jnp.float32)
        return new, (jnp.sin(narrow), jnp.cos(narrow))

    _, after = _differentiated(block, jnp.ones((ROWS, WIDTH)), jnp.ones((LAYERS, WIDTH, WIDTH)))
    (stack,) = {v for v in _loops(after)[1].values if v.shape == (LAYERS, ROWS, WIDTH)}
    assert stack.dtype == jnp.bfloat16


def test_weak_types_stay() -> None:
    def counting(params: Any, x: Any) -> Any:
        def block(carry: Any, p: Any) -> Any:
            h, number, scale = carry
            return (_plain(h, p)[0], number + 1, scale * 1.5 + 0.25), None

        def loss(trained: Any) -> Any:
            (last, number, scale), _ = jax.lax.scan(block, (x, 0, 1.0), {**trained, "seed": params["seed"]})
            return jnp.mean(last**2), (number, scale)

        trained = {k: v for k, v in params.items() if k != "seed"}
        grads, numbers = jax.grad(loss, has_aux=True)(trained)
        return {**jax.tree.map(lambda p, g: p - g, trained, grads), "seed": params["seed"]}, numbers

    args = _layers(jnp.float32), jnp.ones((ROWS, WIDTH))
    result, expected = autopar.parallelize(counting)(*args), jax.jit(counting)(*args)
    for got, wanted in zip(result[1], expected[1], strict=True):
        assert (got.weak_type, got.dtype, float(got)) == (wanted.weak_type, wanted.dtype, float(wanted))
