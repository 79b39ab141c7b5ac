"""State sharded over devices whose number is no power of two: along an axis for its odd part and one for the rest."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.cost_model.hardware import load_preset
from autopar.errors import PlanError, UnsplitWarning
from autopar.ir.graph import Phase
from autopar.ir.local import Reshard
from autopar.ir.method import Method
from autopar.planning.planner import Planner
from benchmarks.models import gpt
from tests import models
from tests.planned import analyse, cluster_of

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
    width = 2048  # 2 divides a side, 3 none
    params = {"up": jnp.zeros((7, width)), "down": jnp.zeros((width, 7))}
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


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_are_summed_over_three_axes_once_for_all_microbatches(num_stages: int) -> None:
    """Of more layouts than are tried, that in which they are made is one. The report knows the plan's, too."""
    config = gpt.GPTConfig(
        vocab_size=1024, sequence_length=256, num_layers=4, width=768, num_heads=12, dropout=0.0, scan=True,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(gpt.make_init(config, optimizer), jax.random.key(0))
    cluster, method = load_preset("dgx-h100", num_hosts=3 * num_stages), recipes.megatron(12, 2, num_stages, 8, zero=1)
    args = gpt.make_train_step(config, optimizer), state, gpt.abstract_batch(config, 12 * 8)
    _, lowered = Planner(analyse(*args), cluster, method).plan(8)
    in_loop = [op for local in lowered.programs if local.program.phase is Phase.BACKWARD for op in local.ops]
    assert {sharding.mesh.shape for sharding in lowered.shardings} == {(3, 4, 2)}
    sums = [op for op in in_loop if isinstance(op, Reshard) and set("xy").intersection(op.source.partial)]
    assert not sums
    if num_stages == 2:
        step, state, batch = args
        details = autopar.parallelize(step, cluster=cluster, method=method).plan(state, batch).report(explain=2).details
        assert details is not None and any(row.whys for row in details.operators)
