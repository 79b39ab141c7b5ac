"""What stays whole for want of a divisor is said, with its place and the size that would do."""

from __future__ import annotations

import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import UnsplitWarning
from autopar.ir.local import Compute
from autopar.ir.method import Method
from autopar.ir.strategy import Gathered
from tests import models
from tests.planned import cluster_of, plan_step

EIGHT = cluster_of(1, 8)


def notes(step: Any, *args: Any, method: Method) -> list[str]:
    """Of the plan; what is dear is warned of, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned = plan_step(step, args, EIGHT, method, 1)
    warned = [str(w.message) for w in caught if w.category is UnsplitWarning]
    assert warned == [f"step, method {method.name!r}: {note}" for note in planned.plan.notes if _is_dear(note)]
    for note in planned.plan.notes:
        assert f"Note: {note}" in planned.plan.to_text()
    return list(planned.plan.notes)


def _is_dear(note: str) -> bool:
    share = re.search(r"(\d+)% of the step's time", note)
    return share is not None and int(share[1]) >= 25


def look_up(params: Any, batch: Any) -> Any:
    hidden = params["tokens"][batch["x"]] @ params["dense"]
    scores = jax.nn.log_softmax(hidden @ params["tokens"].T)
    return -jnp.mean(jnp.take_along_axis(scores, batch["x"][..., None], -1))


@pytest.mark.parametrize("size", [57, 64])
def test_a_vocabulary_is_padded(size: int) -> None:
    params = {"tokens": jnp.ones((size, 16)), "dense": jnp.ones((16, 16))}
    batch = {"x": np.zeros((8, 4), np.int32)}
    found = notes(models.sgd(look_up), params, batch, method=recipes.megatron(1, 8, 1, 1))
    if size == 64:
        assert found == []
        return
    (note,) = found
    assert note.startswith("stage 0: a dimension of size 57 cannot be split over the 8 devices of axis y in ")
    assert "test_unsplit.py:" in note
    assert note.endswith(" Pad it from 57 to 64")


def test_the_warning_names_the_users_line() -> None:
    """Which calls a method of autopar's, however deep the warning is raised below it."""
    step = autopar.parallelize(models.sgd(models.mlp_loss), cluster=EIGHT, method=recipes.megatron(1, 8, 1, 1))
    sizes = [9, 9, 9]  # which would become larger by more than a third
    with pytest.warns(UnsplitWarning) as caught:
        step.plan(models.mlp_params(sizes), models.mlp_batch(64, sizes))
    assert {w.filename for w in caught} == {__file__}


class Mlp(nn.Module):
    """Flax's MLP of 4h in layers, unrolled or scanned."""

    scanned: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def layer(module: nn.Module, x: Any, _: Any) -> Any:
            width = x.shape[-1]
            return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(x))), None

        if self.scanned:
            return nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)(self, x, None)[0]
        for _ in range(2):
            x, _ = layer(self, x, None)
        return x


@pytest.mark.parametrize(("width", "tokens"), [(16, 2), (2048, 1024)])
@pytest.mark.parametrize("scanned", [False, True])
def test_megatron_says_that_it_leaves_whole_what_is_quicker_whole(scanned: bool, width: int, tokens: int) -> None:
    """Two sums a layer cost a few launches and latencies: more than tiny products take, less than large ones."""
    model = Mlp(scanned)
    batch = {"x": jax.ShapeDtypeStruct((8, tokens, width), jnp.float32)}
    params = jax.eval_shape(model.init, jax.random.key(0), batch["x"])

    def loss(params: Any, batch: Any) -> Any:
        found: Any = model.apply(params, batch["x"])
        return (found**2).mean()

    step = models.sgd(loss)
    cluster = autopar.load_preset("dgx-a100")
    plan = autopar.parallelize(step, cluster=cluster, method=recipes.megatron(4, 2, 1, 1)).plan(params, batch)
    kernels = [leaf for leaf in plan.leaves if "kernel" in leaf.path]
    whole = [leaf.path for leaf in kernels if "y" not in leaf.sharding.axes]
    said = [
        note for note in plan.notes if "could be split over the 2 devices of axis y and lie whole by choice" in note
    ]
    if width > 16:
        assert not whole and not plan.notes
        return
    assert bool(whole) == bool(said)
    for note in said:
        assert any(path in note for path in whole)
        assert note.startswith("stage 0: ") and note.endswith("hints split them in any case")


def test_megatron_names_what_has_no_divisor_where_nothing_is_split() -> None:
    params, batch = models.mlp_params([63, 255, 63]), models.mlp_batch(64, [63, 255, 63])
    found = notes(models.sgd(models.mlp_loss), params, batch, method=recipes.megatron(4, 2, 1, 1))
    assert any("dimension of size 255 cannot be split over the 2 devices of axis y" in note for note in found)
    even = notes(
        models.sgd(models.mlp_loss), models.mlp_params([64, 256, 64]), models.mlp_batch(64, [64, 256, 64]),
        method=recipes.megatron(4, 2, 1, 1),
    )  # fmt: skip
    assert not any("cannot be split" in note for note in even)


def test_leaves_of_one_size_are_one_note() -> None:
    """Of 42 x 49, 49, 49 x 32 and 32 numbers, ZeRO splits the last two: 49 keeps the others from it."""
    widths = (42, 49, 32)
    (note,) = notes(
        models.sgd(models.mlp_loss), models.mlp_params(widths), models.mlp_batch(16, widths), method=recipes.zero(3)
    )
    assert "a dimension of size 49 cannot be split over the 8 devices of axis x in " in note
    # 42 * 49 + 49 = 2107 whole, (49 * 32 + 32) / 8 = 200 split.
    assert " in state['layers'][0]['w'] float32[42,49], state['layers'][0]['b'] float32[49], 91% of the state" in note


def test_what_is_small_is_no_note() -> None:
    widths = (64, 64, 9)
    batch = models.mlp_batch(16, widths)
    assert notes(models.sgd(models.mlp_loss), models.mlp_params(widths), batch, method=recipes.zero(3)) == []


def test_groups_of_examples() -> None:
    """Eight updates with four examples each: an axis of eight devices splits none of them."""

    def step(params: Any, batch: Any) -> Any:
        def update(params: Any, group: Any) -> tuple[Any, None]:
            return models.sgd(models.mlp_loss)(params, group)[0], None

        groups = jax.tree.map(lambda x: x.reshape(8, 4, *x.shape[1:]), batch)
        return jax.lax.scan(update, params, groups)[0]

    args = models.mlp_params((16, 32, 8)), models.mlp_batch(32, (16, 32, 8))
    (note,) = notes(step, *args, method=recipes.data_parallel())
    assert "a dimension of examples of size 4 cannot be split over the 8 devices of axis x in scan at " in note
    assert note.endswith("Make it a multiple of 8, or use fewer microbatches or data shards")


def test_examples_that_nothing_splits() -> None:
    """Sorted along the batch: a recipe that shares out examples computes it whole."""

    def step(params: Any, batch: Any) -> Any:
        return jnp.sort(batch["x"], axis=0) * params, params

    (note,) = notes(step, jnp.ones(()), {"x": jnp.ones((64, 64))}, method=recipes.data_parallel())
    assert "nothing that tells examples apart can be split over the 8 devices of axis x in sort at " in note
    assert note.endswith("every device computes it whole. Compute it per example, or use method='auto'")


def test_a_loop_that_gathers_its_parameters_splits_examples() -> None:
    """Its backward pass sums the gradient of what cannot be gathered; that is no reason to split another dimension."""

    def loss(params: Any, batch: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            heads = jax.nn.softmax((x @ w["up"]).reshape(-1, 6, 12), -1)  # 72 has 8 parts, neither 6 nor 12 has
            return x * w["scale"] + heads.reshape(-1, 72) @ w["down"], None

        return jnp.mean((jax.lax.scan(layer, batch["x"], params)[0] - batch["y"]) ** 2)

    shapes = {"up": (4, 60, 72), "down": (4, 72, 60), "scale": (4, 60)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((56, 60), jnp.float32))
    little = cluster_of(1, 8, memory=240_000, flops=1e11, memory_bandwidth=1e11, link=1e7)
    method = recipes.auto(num_stages=1, mesh_shape=(8,), baselines=False)
    planned = plan_step(models.sgd(loss), (params, batch), little, method, 1)
    loops = [
        op for local in planned.lowered.programs for op in local.ops
        if isinstance(op, Compute) and op.equation.primitive.name == "scan"
    ]  # fmt: skip
    assert len(loops) == 2
    for op in loops:
        assert [[type(choice) for choice in assignment] for assignment in op.strategy] == [[Gathered]]
    assert any("x" in result.partial for result in loops[1].results)
    (note,) = planned.plan.notes
    assert "state['scale'] float32[4,60]" in note
    assert "scan" not in note
