"""Bad input: one clear error each, with its type, the argument, the values met and the remedy."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.errors import (
    BatchAxisError,
    InfeasiblePlanError,
    MicrobatchError,
    PlanError,
    PlanMismatchError,
    TraceError,
)
from tests.two_layers import WIDTH, assert_close, examples, mean_square, params, train_step

# The batch.


@pytest.mark.parametrize(
    ("method", "count"),
    [
        (recipes.data_parallel(), "1 microbatches × 8 data shards = 8"),
        (recipes.zero(3, 2), "2 microbatches × 8 data shards = 16"),
        (recipes.megatron(4, 1, 2, num_microbatches=1), "1 microbatches × 4 data shards = 4"),
        (recipes.gpipe(2, 3), "3 microbatches × 4 data shards = 12"),
    ],
    ids=lambda x: x.name if isinstance(x, autopar.Method) else "",
)
def test_batch_that_data_shards_do_not_divide(method: autopar.Method, count: str) -> None:
    step = autopar.parallelize(train_step, method=method)
    message = f"method {method.name!r}: the batch of 6 is not divisible by {count} (axis 0 of batch['x']). "
    with pytest.raises(BatchAxisError, match=re.escape(message)):
        step.plan(params(), examples(6))


def test_batch_that_microbatches_do_not_divide() -> None:
    step = autopar.parallelize(train_step, num_microbatches=3, devices=jax.devices()[:1])
    with pytest.raises(
        BatchAxisError,
        match=r"^num_microbatches=3 does not divide the batch of 8 \(axis 0 of .*\)\. Use a divisor ",
    ):
        step.plan(params(), examples())


def test_no_batch_argument() -> None:
    with pytest.raises(BatchAxisError) as caught:
        autopar.parallelize(lambda p: jax.tree.map(jnp.tanh, p)).plan(params())
    text = "<lambda> has no batch argument: every array argument comes out again as state or is a PRNG key (2 leaves). "
    assert str(caught.value).startswith(text)
    assert "or batch_axes=None if no argument holds examples" in str(caught.value)


def loop_over_examples(p: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        h = batch["x"] @ p["w"]
        h = jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x - x.mean(0)), h)
        return jnp.mean((h @ p["v"]) ** 2)

    value, g = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value


def test_loop_that_couples_examples() -> None:
    """A scan forwards and one backwards: eight devices work, two microbatches are refused with the line."""
    step = autopar.parallelize(loop_over_examples, method=recipes.data_parallel())
    assert_close(step(params(), examples()), jax.jit(loop_over_examples)(params(), examples()))
    with pytest.raises(MicrobatchError, match=r"at .*test_errors\.py:\d+:\d+ \(loop_over_examples.*\) \(scan: "):
        step.plan(params(), examples(16), method=recipes.data_parallel(2))


def test_call_under_a_transformation() -> None:
    step = autopar.parallelize(train_step)
    with pytest.raises(TraceError, match=r"^train_step was called under a transformation .* __wrapped__, inside"):
        jax.jit(step)(params(), examples())


# Fixed stages.


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], r"pipeline\(stages=\(\)\): there must be at least one stage"),
        ([(1, ())], r"stage 0 is \(1, \(\)\); it must be a number of layers and the shape of a mesh"),
        ([(1, (2,)), (0, (2, 2))], r"stage 1 is \(0, \(2, 2\)\); it must be"),
        ([(1, (2,)), (1, (1, 1, 1, 6))], r"stage 1 is \(1, \(1, 1, 1, 6\)\); it must be .* of one to three dimensions"),
        ([(1, (True, 4)), (1, (4,))], r"stage 0 is \(1, \(True, 4\)\); it must be"),
        ([4, (2, 4)], r"stage 0 is 4; it must be a number of layers and the shape of a mesh"),
        ([(1, (4,)), (1, (2, 2, 2))], r"stage 1 of mesh shape \(2, 2, 2\) would have the devices 4 to 11 of cluster"),
        (
            [(1, (4,)), (1, (1, 2))],
            r"its stages have 6 devices, cluster .* has 8; choose mesh shapes that have them all",
        ),
        ([(2, (4,)), (1, (4,))], r"its stages have 3 layers, and each needs a heavy operation, of which .* has only 2"),
    ],
)
def test_fixed_stages_that_cannot_be(stages: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        autopar.parallelize(train_step, method=recipes.pipeline(stages, 1)).plan(params(), examples(16))


# What fits nowhere.


def small_cluster(mebibytes: float, devices: int = 8) -> autopar.Cluster:
    """Devices of an A100's speed with little memory."""
    cluster = autopar.load_preset("dgx-a100", devices_per_host=devices)
    kind = dataclasses.replace(cluster.hosts[0].kind, memory=int(mebibytes * 2**20), memory_reserve=0)
    return dataclasses.replace(cluster, name="small", hosts=(dataclasses.replace(cluster.hosts[0], kind=kind),))


def test_model_that_fits_under_no_plan() -> None:
    """Two 1024 × 1024 weights are 8 MiB; their gradients another 8: not into two times 3 MiB."""
    shapes = {name: jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for name in ("v", "w")}
    batch = {"x": jax.ShapeDtypeStruct((8, 1024), jnp.float32)}
    step = autopar.parallelize(train_step, cluster=small_cluster(3, devices=2))
    with pytest.raises(InfeasiblePlanError) as caught:
        step.plan(shapes, batch)
    found = re.fullmatch(
        r"train_step fits on cluster 'small' under no plan of method 'auto': a stage of layers \d+ to \d+ of \d+ on "
        r"[12] devices needs at least ([\d.]+) MiB per device, 3\.0 MiB are there\. Use more devices, .*",
        str(caught.value),
    )
    assert found is not None, caught.value
    assert 4.0 <= float(found[1]) <= 16.0  # half of the weights at the least


@pytest.mark.parametrize(("method", "devices"), [("auto", 1), ("auto", 2), (recipes.intra_op_only(), 2)])
def test_as_many_microbatches_as_memory_asks_for(method: Any, devices: int) -> None:
    """Of 4096 examples each hidden array has 1 MiB; weights and gradients together a quarter of one."""
    shapes = {f"w{i}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(8)}

    def deep(p: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            x = batch["x"]
            for w in p.values():
                x = jnp.sin(x @ w)
            return jnp.mean(x**2)

        return jax.tree.map(lambda a, b: a - 0.1 * b, p, jax.grad(loss)(p))

    step = autopar.parallelize(deep, cluster=small_cluster(2.5, devices), method=method)
    plan = step.plan(shapes, {"x": jax.ShapeDtypeStruct((4096, 64), jnp.float32)})
    assert 4 // devices <= plan.num_microbatches <= 64
    assert plan.peak_memory <= 2.5 * 2**20
    roomy = autopar.parallelize(deep, cluster=small_cluster(100, devices), method=method)
    assert roomy.plan(shapes, {"x": jax.ShapeDtypeStruct((4096, 64), jnp.float32)}).num_microbatches == 1


def test_recipe_that_does_not_fit_says_so() -> None:
    """Data parallel keeps both weights, 8 MiB, on every device."""
    shapes = {name: jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for name in ("v", "w")}
    batch = {"x": jax.ShapeDtypeStruct((8, 1024), jnp.float32)}
    step = autopar.parallelize(train_step, cluster=small_cluster(7), method=recipes.data_parallel())
    with pytest.raises(InfeasiblePlanError, match=r"under no plan of method 'data_parallel'.* 7.0 MiB are there"):
        step.plan(shapes, batch)


def test_more_stages_than_layers() -> None:
    step = autopar.parallelize(train_step, method=recipes.gpipe(4, 2), cluster=autopar.load_preset("dgx-a100"))
    with pytest.raises(PlanError) as caught:
        step.plan(params(), examples())
    message = str(caught.value)
    assert message.startswith(
        "num_stages=4: each stage needs a heavy operation (a product of matrices, a convolution, "
    )
    assert "of which the forward pass of train_step has only 2 (dot_general at " in message
    assert "two_layers.py:" in message
    assert message.endswith(" Use at most 2 stages, or method='auto'.")


def gradients_in_a_loop(p: Any, batch: Any) -> Any:
    def minibatch(p: Any, x: Any) -> Any:
        loss, p = train_step(p, {"x": x})[::-1]
        return p, loss

    def epoch(p: Any, _: Any) -> Any:
        return jax.lax.scan(minibatch, p, batch["x"].reshape(2, -1, WIDTH))

    return jax.lax.scan(epoch, p, None, length=3)


def two_gradients(p: Any, batch: Any) -> Any:
    p, first = train_step(p, batch)
    p, second = train_step(p, batch)
    return p, (first, second)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (gradients_in_a_loop, r"only 0\. gradients_in_a_loop has several gradient computations, a round each: at "
         r"\S*two_layers\.py:\d+\S* \(.*\) in the scan at \S*test_errors\.py:\d+"),
        (two_gradients, r"only 2( \(.*\))?\. two_gradients has several gradient computations: what those after the "
         r"first compute forward, at \S*two_layers\.py:\d+"),
    ],
)  # fmt: skip
def test_more_stages_than_layers_of_the_first_gradient(function: Any, reason: str) -> None:
    cluster = autopar.load_preset("dgx-a100")
    for method in (recipes.gpipe(4, 1), recipes.pipeline([(4, (4,)), (1, (4,))], 1)):
        step = autopar.parallelize(function, method=method, cluster=cluster, batch_axes=(None, 0))
        with pytest.raises(PlanError, match=reason):
            step.plan(params(), examples())


def test_mesh_that_does_not_match_the_cluster() -> None:
    step = autopar.parallelize(train_step, method=recipes.megatron(1, 3, 1, 1))
    with pytest.raises(InfeasiblePlanError, match=re.escape("(mesh shape (1, 3) and number of stages 1)")):
        step.plan(params(), examples())


# A plan for something else.


@pytest.fixture(scope="module")
def two_device_plan() -> autopar.Plan:
    cluster = autopar.cluster_from_devices(jax.devices()[:2])
    return autopar.parallelize(train_step, method=recipes.data_parallel(), cluster=cluster).plan(params(), examples())


def other_step(p: Any, batch: Any) -> Any:
    loss, g = jax.value_and_grad(lambda p: 2 * mean_square(p, batch))(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), loss


def test_plan_for_another_function(two_device_plan: autopar.Plan) -> None:
    with pytest.raises(PlanMismatchError, match=r"the plan is for 'train_step' .* but 'other_step' .*: make a plan"):
        autopar.parallelize(other_step, method=two_device_plan)(params(), examples())


def test_plan_for_other_shapes(two_device_plan: autopar.Plan) -> None:
    with pytest.raises(PlanMismatchError, match=r"'train_step' with these shapes has .*: make a plan"):
        autopar.parallelize(train_step, method=two_device_plan)(params(), examples(16))


def test_plan_for_other_devices(two_device_plan: autopar.Plan) -> None:
    step = autopar.parallelize(train_step, method=two_device_plan, devices=jax.devices()[:1])
    with pytest.raises(PlanMismatchError, match=r"^the plan is for 2 devices, there are 1: plan for those there are"):
        step(params(), examples())


def test_plan_for_another_cluster(two_device_plan: autopar.Plan) -> None:
    step = autopar.parallelize(train_step)
    with pytest.raises(PlanMismatchError, match="of 2 devices, train_step was given cluster 'dgx-a100' of 8: make a"):
        step.plan(params(), examples(), method=two_device_plan, cluster=autopar.load_preset("dgx-a100"))


def test_cluster_larger_than_this_machine() -> None:
    step = autopar.parallelize(train_step, cluster=autopar.load_preset("dgx-a100", num_hosts=2))
    with pytest.raises(PlanMismatchError, match=r"^the plan is for 16 devices, there are 8"):
        step(params(), examples())


@pytest.mark.parametrize("method", ["fast", None, 3])
def test_method_that_is_none(method: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"method={method!r}: pass 'auto', a recipe of autopar")):
        autopar.parallelize(train_step, method=method)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "two"])
def test_number_of_microbatches_that_is_none(number: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"num_microbatches={number!r}: pass 'auto' or an integer of 1 or")):
        autopar.parallelize(train_step, num_microbatches=number)


# Steps that cannot be traced.


def calling_back(p: Any, batch: Any) -> Any:
    jax.experimental.io_callback(lambda x: None, None, mean_square(p, batch))
    return train_step(p, batch)


def printing_in_a_branch(p: Any, batch: Any) -> Any:
    p, loss = train_step(p, batch)
    jax.lax.cond(loss > 0, lambda: jax.debug.print("high"), lambda: None)
    return p, loss


@pytest.mark.parametrize(
    ("step", "where", "remedy"),
    [
        (calling_back, "io_callback", "return the values instead of calling back or mutating"),
        (printing_in_a_branch, r"debug_\w+ inside cond", "move the call out of the cond"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_side_effects(step: Any, where: str, remedy: str) -> None:
    with pytest.raises(TraceError) as caught:
        autopar.parallelize(step).trace(params(), examples())
    text = str(caught.value)
    assert text.startswith(f"{step.__name__} has side effects (")
    assert re.search(rf"at .*test_errors\.py:\d+:\d+ \({step.__name__}.*\) \({where}\)", text), text
    assert remedy in text


def test_axis_names_of_pmap() -> None:
    def step(p: Any, batch: Any) -> Any:
        p, loss = train_step(p, batch)
        return p, jax.lax.pmean(loss, axis_name="batch")

    with pytest.raises(TraceError) as caught:
        autopar.parallelize(step)(params(), examples())
    text = str(caught.value)
    assert re.match(r"step uses an axis name at .*test_errors\.py:\d+ \(step\) that no vmap or shard_map", text), text
    assert "unbound axis name: batch" in text and "leave out the pmean or psum" in text


def test_outputs_that_are_no_arrays() -> None:
    def step(p: Any, batch: Any) -> Any:
        return *train_step(p, batch), {"note": "done"}

    with pytest.raises(TraceError, match=re.escape("output[2]['note'] of step is 'done' of type str, which is not an")):
        autopar.parallelize(step).trace(params(), examples())


def test_arguments_that_are_no_arrays() -> None:
    message = "argument batch['x'] of train_step is 'text', which is not an array. Pass arrays or jax.ShapeDtypeStruct"
    with pytest.raises(TraceError, match=re.escape(message)):
        autopar.parallelize(train_step)(params(), {"x": "text"})


def test_static_argument_that_is_not_hashable() -> None:
    step = autopar.parallelize(lambda p, batch, sizes: train_step(p, batch), static_argnums=2)
    with pytest.raises(TraceError, match=re.escape("static argument sizes of <lambda> is [1] of type list, which")):
        step.plan(params(), examples(), [1])


def test_static_leaf_that_is_not_hashable() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

    step = autopar.parallelize(lambda p, batch, odd: train_step(p, batch), static_leaves=lambda leaf: True)
    with pytest.raises(TraceError, match=r"static_leaves takes <.*Odd object.*> of type Odd, which is not hashable"):
        step.plan(params(), examples(), {"odd": Odd()})


def test_decisions_that_need_a_value() -> None:
    def step(p: Any, batch: Any, options: Any) -> Any:
        return train_step(p, batch) if options["train"] else (p, 0.0)

    parallel = autopar.parallelize(step, method=recipes.data_parallel())
    with pytest.raises(TraceError) as caught:
        parallel.plan(params(), examples(), {"train": True})
    text = str(caught.value)
    assert re.match(r"step needs a value at .*test_errors\.py:\d+ \(step\) that only a running step has", text), text
    assert "the value of the argument options['train']" in text
    assert "Pass what is a constant of the step by static_argnums, static_argnames or static_leaves, or" in text


class Heads(eqx.Module):
    """With what shapes are made of among its leaves, as Equinox's own layers have it in static fields."""

    weight: jax.Array
    count: int
    rate: float = 0.5

    def __call__(self, x: Any) -> Any:
        return self.rate * (x @ self.weight).reshape(x.shape[0], self.count, -1).sum(1)


def heads_step(model: Any, batch: Any) -> Any:
    def loss_of(model: Any) -> Any:
        return (model(batch["x"]) ** 2).mean()

    value_and_grad: Any = eqx.filter_value_and_grad(loss_of)
    loss, gradient = value_and_grad(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient)), loss


def test_a_number_among_the_leaves_that_a_shape_is_made_of() -> None:
    model = Heads(jnp.ones((8, 8)), 4)
    step = autopar.parallelize(heads_step)
    with pytest.raises(TraceError) as caught:
        step(model, {"x": jnp.ones((8, 8))})
    text = str(caught.value)
    assert re.match(
        r"heads_step needs the value of model\.count = 4 at .*test_errors\.py:\d+ \(__call__\), but", text
    ), text
    assert "static_leaves=lambda leaf: not isinstance(leaf, jax.Array)" in text
    static = autopar.parallelize(heads_step, static_leaves=lambda leaf: not isinstance(leaf, jax.Array))
    assert static.trace(model, {"x": jnp.ones((8, 8))}).graph.name == "heads_step"


def test_what_a_step_itself_raises_is_raised() -> None:
    def step(model: Any, batch: Any) -> Any:
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        autopar.parallelize(step).trace(Heads(jnp.ones((8, 8)), 4), {"x": jnp.ones((8, 8))})
