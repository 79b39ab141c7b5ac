"""Narrow and wide numbers: sums over devices and microbatches are made in float32, whatever is summed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.compiling.program_sources import device_mesh
from autopar.ir.local import Accumulate
from autopar.ir.mesh import Mesh
from autopar.ir.method import Method
from autopar.ir.sharding import ReshardStep, Sharding
from autopar.passes.collectives import apply_steps
from autopar.runtime.worker import Worker
from tests import models
from tests.planned import Planned, analyse, cluster_of, lowered_collectives, plan_step
from tests.random_plans import plan_by_lot

BATCH, WIDTH, VOCABULARY = 8, 8, 16


def model(dtype: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A step of a small language model with a tied embedding, its weights and a batch; all in one dtype."""
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape) / shape[0] ** 0.5, dtype)

    weights = {
        "embedding": numbers(VOCABULARY, WIDTH),
        "up": numbers(WIDTH, 4 * WIDTH),
        "down": numbers(4 * WIDTH, WIDTH),
        "bias": numbers(WIDTH),
    }
    batch = {"tokens": random.integers(0, VOCABULARY, (BATCH, 4)).astype(np.int32)}

    def loss(weights: dict[str, Any], batch: dict[str, Any]) -> Any:
        h = weights["embedding"][batch["tokens"]]
        h = h + jnp.tanh(h @ weights["up"]) @ weights["down"] + weights["bias"]
        scores = jax.nn.log_softmax((h @ weights["embedding"].T).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(scores, batch["tokens"][..., None], -1))

    def step(weights: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        value, grads = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), weights, grads), value, grads

    return step, weights, batch


def planned(
    dtype: Any, shape: tuple[int, ...], stages: int, microbatches: int, lots: int
) -> tuple[Planned, Worker, Any, Any]:
    """A plan drawn by lot, compiled, the gradients that it gives and those of `jax.jit`."""
    step, weights, batch = model(dtype)
    analysis = analyse(step, weights, batch, batch_axes=(None, 0))
    plan = plan_by_lot(analysis, shape, stages, microbatches, np.random.default_rng(lots))
    executable = plan.build(jax.devices())
    outputs = executable(jax.tree.leaves((weights, batch)))
    expected = jax.jit(step)(weights, batch)
    return plan, executable, jax.tree.unflatten(jax.tree.structure(expected), outputs)[2], expected[2]


def error(actual: Any, reference: Any) -> float:
    """Of all leaves, relative, by norm."""
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(reference), strict=True))
    squares = [np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2 for a, b in pairs]
    return math.sqrt(sum(squares) / sum(np.linalg.norm(np.asarray(b, np.float64)) ** 2 for _, b in pairs))


PLANS = [((2, 2), 1, 1), ((2,), 2, 2)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_sums_are_made_in_float32(dtype: Any) -> None:
    """Accumulators and what goes over the wire; the error against float32 is at most 1.2 times that of `jax.jit`."""
    step, weights, batch = model(dtype)
    exact = jax.jit(step)(jax.tree.map(lambda x: x.astype(jnp.float32), weights), batch)[2]
    ours, theirs = [], []
    for lots, (shape, stages, microbatches) in enumerate(PLANS):
        plan, executable, actual, expected = planned(dtype, shape, stages, microbatches, lots)
        assert {x.dtype for x in jax.tree.leaves(actual)} == {jnp.dtype(dtype)}
        totals = [op.total for local in plan.lowered.programs for op in local.ops if isinstance(op, Accumulate)]
        assert {total.dtype for total in totals} <= {np.dtype(np.float32)}
        assert bool(totals) == (microbatches > 1)
        for local, source in zip(plan.lowered.programs, executable.sources, strict=True):
            assert lowered_collectives(source, local) == plan.priced(local)
            assert set(summed_dtypes(source)) <= {np.dtype(np.float32)}
        ours.append(error(actual, exact))
        theirs.append(error(expected, exact))
    assert np.mean(ours) <= 1.2 * np.mean(theirs), (ours, theirs)


def summed_dtypes(source: Any) -> Iterator[Any]:
    """The dtypes that a program's collectives add up."""
    closed = jax.make_jaxpr(source.jitted())(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in source.inputs])

    def walk(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("psum", "reduce_scatter"):
                yield eqn.invars[0].aval.dtype
            for body in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from walk(body)

    yield from walk(closed.jaxpr)


def test_small_integers_wrap_as_they_do() -> None:
    mesh, (x,) = Mesh(tuple(range(8)), (8,), ("x",)), (np.arange(8, dtype=np.int8) * 30,)
    summed = ReshardStep("all_reduce", ("x",))
    total = jax.shard_map(
        lambda x: apply_steps(x.astype(np.int32), [summed], Sharding(((),), ("x",)), mesh, x.dtype),
        mesh=device_mesh(mesh, jax.devices()), in_specs=jax.sharding.PartitionSpec("x"),
        out_specs=jax.sharding.PartitionSpec(), check_vma=False,
    )(x)  # fmt: skip
    np.testing.assert_array_equal(np.asarray(total), np.full(1, x.sum(dtype=np.int8)))
    assert total.dtype == np.int8


def test_in_double_precision() -> None:
    with jax.enable_x64(True):
        _, _, actual, expected = planned(jnp.float64, (2, 2), 1, 2, 0)
        assert {x.dtype for x in jax.tree.leaves(actual)} == {np.dtype(np.float64)}
        assert error(actual, expected) < 1e-7  # the loss itself is in float32


def product(w: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    """Contracts the 64 numbers of an example; bent at zero."""
    return w, jax.nn.relu(batch["x"] @ w)


def gradient(w: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    """Contracts 64 examples, twice."""

    def loss(w: Any) -> Any:
        return jnp.sum((batch["x"] @ w) * batch["y"] + (batch["z"] @ w) * batch["y"])

    return w, jax.grad(loss)(w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("step", "method", "microbatches"),
    [(product, recipes.megatron(1, 8, 1, 1), 1), (gradient, recipes.data_parallel(), 1),
     (gradient, recipes.data_parallel(None), 4)],
    ids=["product", "gradient", "gradient in 4 microbatches"],
)  # fmt: skip
def test_partial_sums_are_rounded_after_the_sum(step: Any, method: Method, microbatches: int, dtype: Any) -> None:
    """The halves of each sum nearly cancel: had they been rounded, little would be right of what is left."""
    random = np.random.default_rng(0)
    signs = np.repeat([100.0, -100.0], 32)

    def numbers(*shape: int) -> Any:
        return jnp.asarray(1 + 0.1 * random.standard_normal(shape), dtype)

    if step is product:
        w, batch = numbers(64, 3), {"x": numbers(64, 64) * jnp.asarray(signs, dtype)}
    else:
        x, z = (numbers(64, 5) * jnp.asarray(signs, dtype)[:, None] for _ in range(2))
        w, batch = numbers(5, 3), {"x": x, "z": z, "y": numbers(64, 3)}
    exact = jax.jit(step)(*jax.tree.map(lambda x: x.astype(jnp.float32), (w, batch)))[1]
    expected = jax.jit(step)(w, batch)[1]
    planned = plan_step(step, (w, batch), cluster_of(1, 8), method, microbatches)
    executable = planned.build(jax.devices())
    for local, source in zip(planned.lowered.programs, executable.sources, strict=True):
        assert lowered_collectives(source, local) == planned.priced(local)
    actual = executable(jax.tree.leaves((w, batch)))[1]
    assert actual.dtype == dtype
    assert error(actual, exact) <= 1.2 * error(expected, exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "microbatches"),
    [(recipes.zero(3, None), 2), (recipes.megatron(2, 4, 1, 2), 2), (Method("free", 1, None, (2, 4)), 1)],
    ids=["zero_3", "megatron", "free"],
)
def test_loops_over_layers_keep_partial_sums_in_float32(method: Method, microbatches: int) -> None:
    """Gradients scattered round by round, sums in the loop, partial sums in its carry: as priced, no less exact."""

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        return params, jax.grad(models.loop_loss)(params, batch)

    def cast(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    given = cast((models.loop_params(3, 32, 8), models.block_batch(16, 8, 32)), jnp.bfloat16)
    exact, expected = jax.jit(step)(*cast(given, jnp.float32))[1], jax.jit(step)(*given)[1]
    planned = plan_step(step, given, cluster_of(1, 8, flops=1e6, link=1e6), method, microbatches)
    executable = planned.build(jax.devices())
    for local, source in zip(planned.lowered.programs, executable.sources, strict=True):
        assert lowered_collectives(source, local) == planned.priced(local)
    outputs = executable(jax.tree.leaves(given))[-len(jax.tree.leaves(expected)) :]
    assert error(jax.tree.unflatten(jax.tree.structure(expected), outputs), exact) <= 1.2 * error(expected, exact)


@pytest.mark.parametrize(
    ("method", "microbatches"), [(recipes.data_parallel(None), 4), (recipes.gpipe(2, 2), 2)], ids=["one stage", "two"]
)
def test_a_loop_that_narrows_its_gradients_runs_in_microbatches(method: Method, microbatches: int) -> None:
    """Parameters of 16 bits, normalised in 32: a layer's gradient is a sum in float32 that is cast in the loop."""

    def loss(params: Any, x: Any) -> Any:
        def layer(h: Any, of_layer: Any) -> tuple[Any, None]:
            wide = h.astype(jnp.float32)
            normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5) * of_layer["scale"]
            return h + jnp.tanh(normed.astype(h.dtype) @ of_layer["w"]), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)

    def step(params: Any, x: Any) -> tuple[Any, Any]:
        return params, jax.grad(loss)(params, x)

    random = np.random.default_rng(0)
    params = {
        "scale": jnp.asarray(1 + random.random((4, 16)), jnp.bfloat16),
        "w": jnp.asarray(random.standard_normal((4, 16, 16)) / 4, jnp.bfloat16),
    }
    x = jnp.asarray(random.standard_normal((32, 16)), jnp.bfloat16)
    exact = jax.jit(step)(*jax.tree.map(lambda x: x.astype(jnp.float32), (params, x)))[1]
    expected = jax.jit(step)(params, x)[1]
    found = autopar.parallelize(step, method=method, num_microbatches=microbatches, donate_argnums=())(params, x)
    found = autopar.gather(found)[1]
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found))
    assert error(found, exact) <= 1.2 * error(expected, exact)


@pytest.mark.parametrize(
    "method", [recipes.zero(3), recipes.gpipe(2, 2), recipes.megatron(2, 2, 2, 2)], ids=lambda m: m.name
)
def test_the_same_plan_gives_the_same_bits(method: Method) -> None:
    """Compiled anew, from a file, and with random numbers in the step."""

    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state["key"])

        def loss(weights: Any) -> Any:
            h = batch["tokens"] @ weights["up"]
            h = jnp.where(jax.random.bernoulli(now, 0.9, h.shape), jnp.tanh(h), 0.0) @ weights["down"]
            return jnp.mean(jnp.square(h))

        value, grads = jax.value_and_grad(loss)(state["weights"])
        return {"weights": jax.tree.map(lambda w, g: w - 0.1 * g, state["weights"], grads), "key": key}, value

    _, weights, _ = model(jnp.float32)
    state = {"weights": {name: weights[name] for name in ("up", "down")}, "key": jax.random.key(1)}
    batch = {"tokens": np.random.default_rng(1).standard_normal((BATCH, WIDTH)).astype(np.float32)}
    text = autopar.parallelize(step, method=method, donate_argnums=()).plan(state, batch).to_json()

    def run() -> list[np.ndarray[Any, Any]]:
        parallel = autopar.parallelize(step, method=autopar.Plan.from_json(text), donate_argnums=())
        now, values = state, []
        for _ in range(3):
            now, value = parallel(now, batch)
            values.append(value)
        return [np.asarray(x) for x in jax.tree.leaves(autopar.gather((now["weights"], values)))]

    for first, second in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(first, second)
