"""State sharded over devices whose number is no power of two: along an axis for its odd part and one for the rest."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import PlanError, UnsplitWarning
from autopar.ir.method import Method
from tests import models
from tests.planned import cluster_of

ROWS, WIDTH = 9, 16  # 6 divides neither of them, 3 the one and 2 the other


def _loss(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def _args() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"up": jax.random.normal(keys[0], (ROWS, WIDTH)), "down": jax.random.normal(keys[1], (WIDTH, ROWS))}
    batch = {"x": jax.random.normal(keys[2], (12, ROWS)), "y": jax.random.normal(keys[3], (12, ROWS))}
    return models.adam_state(params), batch


@pytest.mark.parametrize(
    "method",
    [
        *map(recipes.zero, (1, 2, 3)),
        recipes.megatron(6, 1, 1, 1, zero=1),
        recipes.megatron(6, 1, 1, 2, zero=2),
        recipes.megatron(3, 2, 1, 2, zero=3),
    ],
    ids=lambda method: method.name,
)
def test_the_step_is_that_of_one_device(method: Method) -> None:
    step = models.adam(_loss)
    state, batch = _args()
    expected = jax.jit(step)(state, batch)
    result = autopar.parallelize(step, method=method, devices=jax.devices()[:6])(state, batch)
    for got, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("method", [recipes.zero(1), recipes.megatron(6, 1, 1, 1, zero=1)], ids=lambda m: m.name)
def test_moments_are_in_as_many_pieces_as_there_are_devices(method: Method) -> None:
    step = autopar.parallelize(models.adam(_loss), cluster=cluster_of(3, 2), method=method)
    plan = step.plan(*_args())
    assert plan.stages[0].mesh.shape[:2] == (3, 2)
    moments = [leaf for leaf in plan.leaves if leaf.path.startswith(("state[1]", "state[2]"))]
    assert len(moments) == 4
    for leaf in moments:
        assert math.prod(leaf.sharding.tiles(plan.stages[0].mesh)) == 6


def test_what_cannot_be_cut_so_far_is_cut_as_far_as_it_can_be() -> None:
    params = {"up": jnp.zeros((7, WIDTH)), "down": jnp.zeros((WIDTH, 7))}  # 2 divides a side, 3 none
    batch = {"x": jnp.zeros((12, 7)), "y": jnp.zeros((12, 7))}
    step = autopar.parallelize(models.adam(_loss), cluster=cluster_of(3, 2), method=recipes.zero(1))
    with pytest.warns(UnsplitWarning, match="cannot be split over the 3 devices of axis x"):
        plan = step.plan(models.adam_state(params), batch)
    moments = [leaf for leaf in plan.leaves if leaf.path.startswith("state[1]")]
    assert len(moments) == 2
    assert all(leaf.sharding.axes == {"y"} for leaf in moments)


def test_one_axis_stays_one_axis_beside_the_search() -> None:
    fixed = recipes.auto(mesh_shape=(-1,), zero=1)
    assert fixed.allows(recipes.zero(1))
    assert recipes.zero(1).within(fixed).data_axes == ("x",)
    assert recipes.zero(1).within(recipes.auto()).data_axes == ("x", "y")


def test_zero_is_one_of_four() -> None:
    with pytest.raises(PlanError, match=r"megatron\(zero=4\): zero must be 0, 1, 2 or 3"):
        recipes.megatron(2, 2, 1, zero=4)
