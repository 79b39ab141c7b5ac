"""Conditions over all parameters: taken apart, planned in pieces, run as one, and the same as on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir.graph import Graph
from autopar.tracing.trace import trace

Tree = Any


def conditions(graph: Graph) -> list[Any]:
    return [eqn for eqn in graph.equations if eqn.primitive.name == "cond"]


def parameters(blocks: int, width: int = 64) -> Tree:
    keys = jax.random.split(jax.random.key(0), blocks)
    return [{"w": jax.random.normal(k, (width, width)) / width, "b": jnp.ones(width)} for k in keys]


def loss(params: Tree, x: Any) -> Any:
    for p in params:
        x = x + jnp.tanh(x @ p["w"] + p["b"])
    return jnp.mean(x**2)


def accumulating(optimizer: Any, every: int = 2, norm: bool = False) -> Any:
    """A step that accumulates gradients by hand, as people write it."""

    def step(state: Tree, x: Any) -> tuple[Tree, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        sums = jax.tree.map(jnp.add, state["sums"], grads)
        count = state["count"] + 1

        def update(params: Tree, moments: Tree, sums: Tree) -> tuple[Tree, Tree, Tree]:
            mean = jax.tree.map(lambda g: g / every, sums)
            if norm:
                scale = jnp.minimum(1.0, 0.01 / jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(mean))))
                mean = jax.tree.map(lambda g: g * scale, mean)
            updates, moments = optimizer.update(mean, moments, params)
            return optax.apply_updates(params, updates), moments, jax.tree.map(jnp.zeros_like, sums)

        params, moments, sums = jax.lax.cond(
            count % every == 0, update, lambda *same: same, state["params"], state["moments"], sums
        )
        return {"params": params, "moments": moments, "sums": sums, "count": count}, value

    return step


def state_of(optimizer: Any, params: Tree) -> Tree:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "moments": optimizer.init(params), "sums": zeros, "count": jnp.int32(0)}


@pytest.mark.parametrize("blocks", [2, 8])
def test_a_condition_over_all_parameters_is_one_for_each(blocks: int) -> None:
    """A parameter with its two moments, its running sum, and the count of the optimizer: no operator grows."""
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(lambda: state_of(optimizer, parameters(blocks)))
    graph = trace(accumulating(optimizer), (state, jax.ShapeDtypeStruct((8, 64), jnp.float32)), {}, name="step")
    found = conditions(graph)
    leaves = 2 * blocks
    assert len(found) == 2 * leaves + 1
    # An index, a parameter, two moments, a sum and a count.
    assert max(len(eqn.inputs) for eqn in found) == 6
    assert len({eqn.id for eqn in graph.equations}) == len(graph.equations)


def test_what_is_coupled_by_a_norm_stays_one() -> None:
    """All parameters need the norm of all gradients, which is not to be computed for each of them."""
    optimizer = optax.sgd(1e-3)
    state = jax.eval_shape(lambda: state_of(optimizer, parameters(3)))
    graph = trace(
        accumulating(optimizer, norm=True), (state, jax.ShapeDtypeStruct((8, 64), jnp.float32)), {}, name="step"
    )
    assert max(len(eqn.outputs) for eqn in conditions(graph)) == 6


def evaluated(graph: Graph, leaves: list[Any]) -> list[Any]:
    """What the graph's equations give, one after the other on one device."""
    env: dict[Any, Any] = {**graph.constants, **dict(zip(graph.inputs, leaves, strict=True))}

    def read(v: Any) -> Any:
        return env[v] if v in env else jnp.asarray(v.value, v.dtype)

    for eqn in graph.equations:
        found = eqn.primitive.bind(*map(read, eqn.inputs), **eqn.params)
        env.update(zip(eqn.outputs, found if eqn.primitive.multiple_results else [found], strict=True))
    return [read(v) for v in graph.outputs]


def nested(n: Any, a: Any, b: Any) -> Any:
    """A condition in a branch, a result that is an operand, and one that is a number."""

    def inner(a: Any, b: Any) -> tuple[Any, Any, Any, Any]:
        c, d = jax.lax.cond(n > 2, lambda: (a * 2, jnp.sin(b)), lambda: (jnp.cos(a), b))
        return c, d, a, jnp.zeros_like(b)

    return jax.lax.switch(n, [lambda a, b: (a, b, a, b), inner, lambda a, b: (a + 1, b, a * a, b * b), inner], a, b)


def differentiated(n: Any, a: Any, b: Any) -> Any:
    """Reverse mode through a condition, and within a branch of one."""

    def value(a: Any, b: Any) -> Any:
        c, d = jax.lax.cond(n > 0, lambda a, b: (jnp.sin(a) * a, b**3), lambda a, b: (a, jnp.exp(b)), a, b)
        return jnp.sum(c) + jnp.sum(d * d)

    def inside(a: Any, b: Any) -> Any:
        return jax.grad(lambda a, b: jnp.sum(jnp.tanh(a)) * jnp.sum(b), argnums=(0, 1))(a, b)

    return jax.grad(value, argnums=(0, 1))(a, b), jax.lax.cond(n > 1, inside, lambda a, b: (a, b), a, b)


def over_rounds(n: Any, a: Any, b: Any) -> Any:
    """A loop and light work in a branch that all results share."""

    def turning(a: Any, b: Any) -> tuple[Any, Any, Any]:
        factor = 1 / (1 + jnp.float32(n)) ** 2
        end, each = jax.lax.scan(lambda c, x: (c + x * factor, c * x), jnp.float32(0), a)
        return each, b * factor, end

    return jax.lax.cond(n % 2 == 0, turning, lambda a, b: (a, b * b, jnp.float32(1)), a, b)


@pytest.mark.parametrize("fun", [nested, differentiated, over_rounds])
def test_what_is_taken_apart_computes_the_same_in_every_branch(fun: Any) -> None:
    a, b = jnp.linspace(0.1, 2.0, 24), jnp.linspace(-1.0, 1.0, 40)
    graph = trace(fun, (jnp.int32(0), a, b), {}, name="fun")
    assert len(conditions(graph)) >= 2
    for n in range(4):
        for mine, expected in zip(
            evaluated(graph, [jnp.int32(n), a, b]), jax.tree.leaves(fun(jnp.int32(n), a, b)), strict=True
        ):
            np.testing.assert_allclose(mine, expected, rtol=1e-6)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("method", ["auto", "zero_3"])
def test_both_branches_are_those_of_one_device(norm: bool, method: str) -> None:
    """Four steps, of which every second one takes the update."""
    optimizer = optax.adamw(1e-2)
    step = accumulating(optimizer, norm=norm)
    cluster = autopar.cluster_from_devices(jax.devices()[:4])
    chosen = "auto" if method == "auto" else autopar.recipes.zero(3)
    parallel = autopar.parallelize(step, cluster=cluster, devices=jax.devices()[:4], method=chosen)
    mine, other = (state_of(optimizer, parameters(3)) for _ in range(2))
    for turn in range(4):
        x = jax.random.normal(jax.random.key(turn), (8, 64))
        mine, value = parallel(mine, x)
        other, expected = jax.jit(step)(other, x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_conditions_with_one_index_are_emitted_as_one() -> None:
    """In the compiled program there is one branch, as the user wrote it."""
    optimizer = optax.adamw(1e-2)
    devices = jax.devices()[:2]
    cluster = autopar.cluster_from_devices(devices)
    parallel = autopar.parallelize(
        accumulating(optimizer), cluster=cluster, devices=devices, method=autopar.recipes.data_parallel()
    )
    state = state_of(optimizer, parameters(3))
    executable = parallel.compile(state, jnp.ones((8, 64)))
    assert "".join(executable.as_text().values()).count(" conditional(") == 1
