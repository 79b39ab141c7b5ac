"""Gradients of parameters apart from what the backward pass hands on."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

from autopar.ir.graph import Equation, Phase, Value
from autopar.passes.rules.table import rule_of
from autopar.passes.split_backward import put_off, split_loops
from autopar.tracing.axis_collectives import scan_counts
from tests.passes.test_stacks import run
from tests.planned import analyse

WIDTH, ROUNDS, BATCH = 8, 5, 4


def _state(checkpoint: bool) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(int(checkpoint)), 6)
    state = {
        "stack": jax.random.normal(keys[0], (ROUNDS, WIDTH, WIDTH)) / 3,
        "bias": jax.random.normal(keys[1], (ROUNDS, WIDTH)),
        "shared": jax.random.normal(keys[2], (WIDTH, WIDTH)) / 3,
        "gain": jax.random.normal(keys[3], (WIDTH,)),
    }
    return state, {"x": jax.random.normal(keys[4], (BATCH, WIDTH)), "y": jax.random.normal(keys[5], (BATCH, WIDTH))}


def _step(checkpoint: bool) -> Any:
    """Layers with weights of their own and one that all share: its gradient is carried from round to round."""

    def loss(state: Any, batch: Any) -> Any:
        def layer(h: Any, own: Any) -> Any:
            weights, bias = own
            h = jnp.tanh(h @ weights + bias) @ state["shared"] * state["gain"]
            return h, h.sum(1)

        body = jax.checkpoint(layer) if checkpoint else layer
        h, sums = jax.lax.scan(body, batch["x"], (state["stack"], state["bias"]))
        return ((h - batch["y"]) ** 2).mean() + (sums**2).mean()

    return lambda state, batch: jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state, batch))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_several_loops_do_what_one_does(checkpoint: bool) -> None:
    state, batch = _state(checkpoint)
    graph = analyse(_step(checkpoint), state, batch).graph
    split = split_loops(graph, rule_of)
    assert split.fingerprint == graph.fingerprint
    leaves = jax.tree.leaves((state, batch))
    for wanted, got in zip(run(graph, leaves), run(split, leaves), strict=True):
        np.testing.assert_array_equal(wanted, got)
    (one,) = [e for e in graph.equations if e.primitive.name == "scan" and e.phase is Phase.BACKWARD]
    early, *late = [e for e in split.equations if e.primitive.name == "scan" and e.phase is Phase.BACKWARD]
    assert {(e.params["reverse"], e.source, e.origin) for e in (one, early, *late)} == {(True, one.source, one.origin)}
    # The shared weight's gradient is carried by a loop of its own; the light ones stay where their operands are.
    # Computed again, what the gain is multiplied by is a product that only the gain's gradient needs.
    gain = [(WIDTH,)] * checkpoint
    assert [[v.shape for v in e.outputs] for e in late] == [[(WIDTH, WIDTH), *gain], [(ROUNDS, WIDTH, WIDTH)]]
    assert [scan_counts(e.params)[1] for e in late] == [1 + checkpoint, 0]
    products = [rule_of(e).products for e in (early, *late)]
    assert sum(products) == rule_of(one).products
    assert sum(products[1:]) == 2 * (2 + checkpoint) * ROUNDS * BATCH * WIDTH * WIDTH


def test_a_sum_that_is_fenced_with_what_is_handed_on_stays_with_it() -> None:
    state, batch = _state(False)

    @jax.custom_vjp
    def product(h: Any, w: Any) -> Any:
        return jnp.tanh(h) @ w

    def backward(kept: Any, cotangent: Any) -> Any:
        h, w = kept

        def layer(carry: Any, _: Any) -> Any:
            ct, total = jax.lax.optimization_barrier(carry)
            return (ct @ w.T, total + h.T @ ct), None

        (ct, total), _ = jax.lax.scan(layer, (cotangent, jnp.zeros_like(w)), None, length=ROUNDS)
        return ct, total

    product.defvjp(lambda h, w: (product(h, w), (h, w)), backward)

    def step(state: Any, batch: Any) -> Any:
        gradients = jax.grad(lambda s: (product(batch["x"] @ s["shared"], s["shared"]) ** 2).mean())(state)
        return jax.tree.map(lambda w, g: w - g, state, gradients)

    graph = analyse(step, state, batch).graph
    assert any(e.primitive.name == "scan" for e in graph.equations)
    assert split_loops(graph, rule_of) is graph


def test_a_loop_of_which_nothing_is_handed_on_leaves_no_empty_loop() -> None:
    state, batch = _state(False)

    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            each = jax.lax.map(lambda w: jnp.tanh(batch["x"] @ state["shared"] @ w), state["stack"])
            return (each.sum(0) ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, state, jax.grad(loss)(state))

    graph = analyse(step, state, batch).graph
    split = split_loops(graph, rule_of)
    leaves = jax.tree.leaves((state, batch))
    for wanted, got in zip(run(graph, leaves), run(split, leaves), strict=True):
        np.testing.assert_allclose(wanted, got, rtol=1e-6)
    assert all(e.outputs for e in split.equations)


def test_loops_without_gradients_of_parameters_stay_as_they_are() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, gain: (jnp.tanh(h * gain), None), batch["x"], state["bias"])
            return (h**2).mean()

        return jax.tree.map(lambda w, g: w - g, state, jax.grad(loss)(state))

    graph = analyse(step, *_state(False)).graph
    assert split_loops(graph, rule_of) is graph


@pytest.mark.parametrize("seed", range(50))
def test_what_is_put_off_by_reachability(seed: int) -> None:
    draw = random.Random(seed)
    values = [Value(i, (), np.dtype(np.float32)) for i in range(60)]
    fresh = iter(values)
    made = [next(fresh) for _ in range(3)]
    equations = []
    for i in range(20):
        inputs = tuple(draw.sample(made, draw.randint(1, 3)))
        outputs = tuple(next(fresh) for _ in range(draw.randint(1, 2)))
        equations.append(Equation(i, None, {}, inputs, outputs, Phase.BACKWARD))
        made += outputs
    heavy = {i for i in range(20) if draw.random() < 0.3}
    waited_for = set(draw.sample(made, 2))
    late = set(draw.sample(made, seed % 3))
    found = put_off(equations, waited_for, lambda eqn: eqn.id in heavy, late)
    depends = nx.DiGraph([(a.id, b.id) for a in equations for b in equations if set(a.outputs) & set(b.inputs)])
    depends.add_nodes_from(range(20))
    waiting = {e.id for e in equations if waited_for & set(e.outputs)}
    waiting |= {a for e in waiting for a in nx.ancestors(depends, e)}
    seeds = heavy - waiting
    wanted = seeds | {a for e in seeds for a in nx.ancestors(depends, e)} - waiting
    wanted |= {e.id for e in equations if late & set(e.values)}
    wanted |= {b for e in wanted for b in nx.descendants(depends, e)}
    assert found == (set() if wanted & waiting else wanted)
