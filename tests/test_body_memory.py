"""What a loop, or a branch, holds at once is predicted: against what XLA's compiled program takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar import recipes
from autopar.ir.method import Method
from tests.planned import cluster_of, plan_step, temporaries_of

BATCH, WIDTH, HIDDEN, LAYERS = 1024, 16, 512, 4
LARGE = 4 * BATCH * HIDDEN // 2  # bytes of one device's piece of a hidden array


def _block(x: Any, w: Any) -> Any:
    hidden = jnp.tanh(x @ w["up"])
    return x + jnp.tanh(hidden @ w["mix"]) @ w["down"]


def scanned(params: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (jax.checkpoint(_block)(x, w), None), x, params)[0]


def repeated(params: Any, x: Any) -> Any:
    layer = jax.tree.map(lambda w: w[0], params)
    return lax.while_loop(lambda s: s[1] < 3, lambda s: (_block(s[0], layer), s[1] + 1), (x, 0))[0]


def chosen(params: Any, x: Any) -> Any:
    layer = jax.tree.map(lambda w: w[0], params)
    return lax.cond(x[0, 0] > 0, lambda x: _block(x, layer), lambda x: x, x)


# How many hidden arrays a body holds at once: before and after tanh (which XLA may compute in place), or the same and
# their cotangents. The branch of a gradient recomputes nothing: what it keeps for it is a result.
@pytest.mark.parametrize(("loss", "held"), [(scanned, 2), (repeated, 1), (chosen, 2)])
def test_what_a_body_holds_is_what_xla_takes(loss: Callable[..., Any], held: int) -> None:
    params = {
        "up": jnp.ones((LAYERS, WIDTH, HIDDEN)) / WIDTH,
        "mix": jnp.ones((LAYERS, HIDDEN, WIDTH)),
        "down": jnp.ones((LAYERS, WIDTH, WIDTH)),
    }

    def step(params: Any, x: Any) -> Any:
        if loss is repeated:  # has no gradient
            return params, (loss(params, x) ** 2).mean()
        value, g = jax.value_and_grad(lambda p: (loss(p, x) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, g), value

    batch = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    planned = plan_step(step, (params, batch), cluster_of(1, 2), recipes.data_parallel(), 1)
    (local,) = planned.lowered.programs
    (program,) = planned.build(jax.devices()[:2]).programs
    predicted = temporaries_of(local, planned.plan.cluster)
    taken = program.memory_analysis().temp_size_in_bytes
    assert min(predicted, taken) > held * LARGE
    assert 0.8 < predicted / taken < 2.0


@pytest.mark.parametrize("memory", [2**34, 2 * 2**22])
def test_parameters_are_gathered_round_by_round_where_memory_is_short(memory: int) -> None:
    """The stacks of parameters take 4 MiB, as do their gradients; whole stacks on every device are too much."""
    layers, width = 8, 256

    def step(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w["a"]) @ w["b"])(x, w), None

        g = jax.grad(lambda p: (lax.scan(layer, x, p)[0] ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, g)

    params = dict.fromkeys("ab", jax.ShapeDtypeStruct((layers, width, width), jnp.float32))
    x = jax.ShapeDtypeStruct((2048, width), jnp.float32)
    cluster = cluster_of(1, 8, memory=memory, flops=1e10, link=1e10, memory_bandwidth=1e11)
    planned = plan_step(step, (params, x), cluster, Method("free", 1, None, (8,)), 1)
    (local,) = planned.lowered.programs
    gathered = [c for c in planned.priced(local).elements() if c.kind == "all_gather"]
    if memory == 2**34:
        assert len(gathered) <= 2
    else:
        one = 4 * width * width
        assert [c.payload for c in gathered] == [one] * (2 * 2 * layers)
        assert planned.plan.peak_memory < memory
