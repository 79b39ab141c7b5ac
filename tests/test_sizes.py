"""Sizes that do not divide, that are one or zero, and meshes of other numbers of devices than powers of two."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import BatchAxisError
from autopar.ir.method import Method
from tests import models
from tests.models import Loss, Params


def check(loss: Loss, params: Params, batch: Any, method: Any, devices: int = 8, num_microbatches: Any = "auto") -> Any:
    """One SGD step gives what `jax.jit` gives; returns its plan."""
    step = autopar.parallelize(
        models.sgd(loss),
        cluster=autopar.cluster_from_devices(jax.devices()[:devices]),
        method=method,
        num_microbatches=num_microbatches,
    )
    plan = step.plan(params, batch)
    expected = jax.jit(models.sgd(loss))(params, batch)
    found = autopar.gather(step(jax.tree.map(jnp.copy, params), batch))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    return plan


def mesh(*shape: int) -> Method:
    """All axes free."""
    return Method("free", 1, None, shape)


def mlp(examples: int, *widths: int) -> tuple[Loss, Params, Any]:
    return models.mlp_loss, models.mlp_params(widths), models.mlp_batch(examples, widths)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("devices", "examples", "method"),
    [
        slow(1, 8, recipes.data_parallel()),
        slow(1, 8, recipes.zero(3)),
        slow(3, 6, recipes.data_parallel()),
        (3, 6, recipes.zero(3)),
        slow(3, 8, "auto"),
        slow(5, 10, recipes.zero(2)),
        (6, 6, recipes.megatron(2, 3, 1, 1)),
        slow(6, 6, recipes.megatron(3, 2, 1, 1)),
        slow(6, 6, mesh(2, 3)),
        slow(6, 12, recipes.gpipe(2, 2)),
        slow(6, 8, "auto"),
        slow(7, 7, recipes.data_parallel()),
    ],
)
def test_any_number_of_devices(devices: int, examples: int, method: Any) -> None:
    plan = check(*mlp(examples, 12, 24, 6), method, devices)
    assert sum(len(stage.mesh.devices) for stage in plan.stages) == devices


def look_up(params: Params, batch: Any) -> Any:
    """A language model of one layer with tied embeddings."""
    hidden = jnp.tanh(params["tokens"][batch["x"]] @ params["dense"])
    scores = jax.nn.log_softmax(hidden @ params["tokens"].T)
    return -jnp.mean(jnp.take_along_axis(scores, batch["y"][..., None], -1))


def attend(params: Params, batch: Any) -> Any:
    """25 heads."""
    q = jnp.einsum("btw,whd->bthd", batch["x"], params["q"])
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, q))
    return jnp.mean((jnp.einsum("bhts,bshd,hdw->btw", weights, q, params["out"]) - batch["y"]) ** 2)


RECIPES = [recipes.data_parallel(), recipes.zero(3), recipes.megatron(2, 4, 1, 1), "auto"]


@pytest.mark.filterwarnings("ignore::autopar.errors.UnsplitWarning")  # what it costs is test_unsplit.py's matter
@pytest.mark.parametrize("method", [slow(RECIPES[0]), slow(RECIPES[1]), RECIPES[2], slow(RECIPES[3])])
def test_what_does_not_divide_stays_whole(method: Any) -> None:
    tokens = np.arange(32).reshape(8, 4)
    params = {"tokens": models.mlp_params((257, 16))["layers"][0]["w"], "dense": jnp.eye(16)}
    check(look_up, params, {"x": tokens * 3 % 257, "y": tokens * 5 % 257}, method)
    key = jax.random.key(0)
    params = {"q": jax.random.normal(key, (16, 25, 4)) / 4, "out": jax.random.normal(key, (25, 4, 16)) / 10}
    check(attend, params, models.block_batch(8, 4, 16), method)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (recipes.data_parallel(), "batch of 6 is not divisible by 1 microbatches × 8 data shards"),
        (recipes.gpipe(2, 1), "batch of 6 is not divisible by 1 microbatches × 4 data shards"),
        (recipes.gpipe(2, 4), "batch of 6 is not divisible by 4 microbatches × 4 data shards"),
    ],
)
def test_batches_that_do_not_divide_are_refused(method: Any, text: str) -> None:
    with pytest.raises(BatchAxisError, match=text):
        check(*mlp(6, 8, 16, 8), method)


@pytest.mark.parametrize("examples", [slow(1), 3])
def test_the_planner_takes_batches_that_do_not_divide(examples: int) -> None:
    check(*mlp(examples, 8, 16, 8), "auto")


def scale(params: Params, batch: Any) -> Any:
    """Scalars and arrays smaller than the mesh."""
    return batch["weight"] * jnp.mean((batch["x"] * params["scale"] + params["bias"] - batch["y"]) ** 2)


@pytest.mark.parametrize("method", [slow(RECIPES[0]), RECIPES[1], slow(RECIPES[3])])
def test_arrays_smaller_than_the_mesh(method: Any) -> None:
    params = {"scale": jnp.float32(2), "bias": jnp.ones(1)}
    check(scale, params, {"x": jnp.ones((8, 1)), "y": jnp.zeros((8, 1)), "weight": jnp.float32(3)}, method)


def with_nothing(params: Params, batch: Any) -> Any:
    """Parameters without elements, of three shapes, and what is computed with them."""
    rows, columns, neither = params["rows"], params["columns"], params["neither"]
    nothing = jnp.sum(batch["x"] @ columns) + jnp.sum((columns @ rows) ** 2) + jnp.sum(rows[:, :0] @ jnp.zeros((0, 4)))
    nothing += jnp.sum(jnp.concatenate([neither, neither], 0)) + jnp.sum(jnp.sort(batch["x"][:, :0], -1))
    return jnp.mean((batch["x"] @ params["weight"] - batch["y"]) ** 2) + nothing


def some_with_nothing() -> tuple[Params, Any]:
    params = {
        "weight": jnp.eye(16), "rows": jnp.zeros((0, 16)), "columns": jnp.zeros((16, 0)), "neither": jnp.zeros((0, 0)),
    }  # fmt: skip
    return params, models.mlp_batch(16, (16, 16))


WITH_NOTHING = [
    slow(recipes.data_parallel(), 1), (recipes.zero(2), 2), (recipes.zero(3), 1), slow(recipes.megatron(2, 4, 1, 1), 1),
    slow(Method("by hand", 1, None, (2, 4), data_axes=("x", "y"), zero=3), 1), slow(mesh(2, 4), 1), slow("auto", 2),
]  # fmt: skip


@pytest.mark.parametrize(("method", "m"), WITH_NOTHING)
def test_arrays_without_elements(method: Any, m: int) -> None:
    check(with_nothing, *some_with_nothing(), method, num_microbatches=m)


def test_arrays_without_elements_where_products_are_priced_by_their_sizes() -> None:
    """On a preset that knows its multiprocessors."""
    step = autopar.parallelize(models.sgd(with_nothing), cluster=autopar.load_preset("dgx-a100"))
    assert step.plan(*some_with_nothing()).step_time > 0


def test_results_without_elements_of_several_microbatches() -> None:
    def forward(params: Any, x: Any) -> Any:
        return params, (x @ params)[:, :0], x[:, :0] * 2

    params, x = jnp.eye(4), jnp.ones((16, 4))
    step = autopar.parallelize(forward, num_microbatches=2, batch_axes=(None, 0))
    _, first, second = step(params, x)
    assert first.shape == second.shape == (16, 0)


FAR_MORE_DEVICES = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 64)
from autopar import recipes
from tests.test_sizes import check, mesh, mlp
for method in (recipes.data_parallel(), recipes.zero(3), recipes.megatron(4, 8, 2, 2), mesh(4, 16), "auto"):
    plan = check(*mlp(128, 64, 128, 64), method, 64)
    assert sum(len(stage.mesh.devices) for stage in plan.stages) == 64
    print("passed", method)
"""


@pytest.mark.slow
def test_64_devices() -> None:
    root = pathlib.Path(__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", FAR_MORE_DEVICES], cwd=root, capture_output=True, text=True, timeout=900, check=False
    )
    assert found.stdout.count("passed") == 5, found.stderr[-2000:]
