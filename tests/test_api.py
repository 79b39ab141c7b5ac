"""The public interface: calls, pytrees, static and donated arguments, new shapes, `init`, `follow`, `gather`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar import recipes
from autopar.errors import BatchAxisError
from autopar.ir.instructions import Run
from tests.small_steps import (
    BATCH,
    DATA_PARALLEL,
    ONE,
    PIPELINE,
    ZERO,
    assert_close,
    batch_of,
    init,
    loss_of,
    mean_square,
    parallelized,
    placements,
    reference,
    rows,
    sgd,
    shapes_of,
    train_step,
    weights,
)

METHODS = pytest.mark.parametrize("method", [DATA_PARALLEL, ZERO, PIPELINE], ids=lambda m: m.name)


# Where the state lies.


@pytest.mark.sampled(2)
@METHODS
def test_state_is_born_and_stays_where_the_plan_says(method: autopar.Method) -> None:
    """From shapes alone to a state; then other shapes, an evaluation, and back, without moving a leaf."""
    step = parallelized(method)
    plan = step.compile(jax.eval_shape(init, jax.random.key(0)), shapes_of(batch_of())).plan
    assert len(plan.stages) == (2 if method is PIPELINE else 1)
    state = step.init(init, jax.random.key(0))
    assert_close(state, reference()[0])
    home = placements(state)
    devices = set().union(*(s.device_set for s in home))
    assert devices == set(jax.devices()[:4])
    if method is not PIPELINE:
        replicated = [s.is_fully_replicated for s in home]
        assert all(replicated) == (method is DATA_PARALLEL)

    evaluate = autopar.parallelize(lambda state, batch: loss_of(state.params, batch), follow=step)
    for batch, wanted in zip((batch_of(), batch_of(4), batch_of(time=2), batch_of()), reference()[1:], strict=True):
        state, _ = step(state, batch)
        assert placements(state) == home
        assert_close(state, wanted)
    assert float(evaluate(state, batch_of())) == pytest.approx(float(loss_of(wanted.params, batch_of())), rel=1e-5)
    # The moments, too, which it does not read.
    lies = {leaf.path: (leaf.stage, leaf.sharding) for leaf in plan.leaves}
    evaluation = evaluate.plan(state, batch_of())
    follows = {leaf.path: (leaf.stage, leaf.sharding) for leaf in evaluation.leaves}
    assert {path: lies[path] for path in follows if path.startswith("state")} == {
        path: found for path, found in follows.items() if path.startswith("state")
    }
    assert len(follows) >= len(jax.tree.leaves(state))
    # Its plan stays that one, whatever is asked of it.
    assert evaluation.report().plan.leaves == evaluation.leaves
    found = evaluation.compile()(state, batch_of())
    assert float(found) == pytest.approx(float(loss_of(wanted.params, batch_of())), rel=1e-5)
    parameters_only = autopar.parallelize(loss_of, follow=step)
    assert float(parameters_only(state.params, batch_of(2))) == pytest.approx(
        float(loss_of(wanted.params, batch_of(2))), rel=1e-5
    )
    assert placements(state) == home


@METHODS
def test_gather_gives_what_jit_accepts(method: autopar.Method) -> None:
    step = parallelized(method)
    state, _ = step(reference()[0], batch_of())
    whole = autopar.gather({"state": state, "count": 3})
    assert whole["count"] == 3
    assert {s.device_set == {jax.devices()[0]} for s in placements(whole["state"])} == {True}
    assert_close(jax.jit(train_step)(whole["state"], batch_of())[0], jax.jit(train_step)(reference()[1], batch_of())[0])


@pytest.mark.parametrize("kind", ["numpy", "one device", "another device"])
def test_where_the_first_state_may_come_from(kind: str) -> None:
    """Arrays in host memory and on single devices; the caller's copies stay whole."""
    places: dict[str, Callable[[Any], Any]] = {
        "numpy": lambda x: np.array(x),
        "one device": jnp.asarray,
        "another device": lambda x: jax.device_put(x, jax.devices()[5]),
    }
    given = jax.tree.map(places[kind], reference()[0])
    step = parallelized(DATA_PARALLEL)
    state, _ = step(given, batch_of())
    assert_close(state, reference()[1])
    assert_close(given, reference()[0])
    # Again, now that there is a plan, with shapes that have none: the same placement.
    other, _ = step(given, batch_of(4))
    assert placements(other) == placements(state)


def test_shapes_compiled_ahead_share_the_placement() -> None:
    """A shorter batch compiled from shapes before any state exists."""
    step = parallelized(ZERO)
    shapes = jax.eval_shape(init, jax.random.key(0))
    whole = step.compile(shapes, shapes_of(batch_of())).plan
    short = step.compile(shapes, shapes_of(batch_of(4))).plan
    assert [(x.stage, x.sharding) for x in short.leaves if x.state] == [
        (x.stage, x.sharding) for x in whole.leaves if x.state
    ]
    state, _ = step(step.init(init, jax.random.key(0)), batch_of())
    assert_close(step(state, batch_of(4))[0], reference()[2])
    assert step.compile(shapes, shapes_of(batch_of(4))).plan is short


# Calls.


def test_decorator_without_arguments() -> None:
    @autopar.parallelize
    def step(p: Any, x: Any) -> Any:
        """Says what it does."""
        return sgd(p, x)

    assert isinstance(step, autopar.Parallelized)
    assert (step.__name__, step.__doc__) == ("step", "Says what it does.")
    assert_close(step(weights(), rows()), sgd(weights(), rows()))


def test_decorator_with_arguments() -> None:
    @autopar.parallelize(method=DATA_PARALLEL, devices=jax.devices()[:2])
    def step(p: Any, x: Any) -> Any:
        return sgd(p, x)

    assert isinstance(step, autopar.Parallelized)
    assert step.plan(weights(), rows()).method == "data_parallel"
    assert_close(step(weights(), rows()), sgd(weights(), rows()))


def test_keyword_arguments() -> None:
    step = autopar.parallelize(sgd, **ONE, static_argnames=("rate", "name"))
    wanted = sgd(weights(), rows())
    assert_close(step(weights(), x=rows()), wanted)
    assert_close(step(p=weights(), x=rows()), wanted)
    assert_close(step(x=rows(), p=weights(), rate=0.5), sgd(weights(), rows(), 0.5))


@pytest.mark.parametrize("options", [{"static_argnums": (2, -1)}, {"static_argnames": ("rate", "name")}], ids=str)
def test_static_arguments(options: dict[str, Any]) -> None:
    """By position and by name, whichever option names them; one trace for each value."""
    traces = []

    def step(p: Any, x: Any, rate: float, name: str = "a") -> Any:
        traces.append((rate, name))
        return sgd(p, x, rate, name)

    parallel = autopar.parallelize(step, **ONE, **options)
    for rate in (0.1, 0.5, 0.1):
        assert_close(parallel(weights(), rows(), rate), sgd(weights(), rows(), rate))
        assert_close(parallel(weights(), rows(), rate=rate), sgd(weights(), rows(), rate))
        assert_close(parallel(weights(), rows(), rate, name="b"), sgd(weights(), rows(), rate))
    assert len(traces) == len(set(map(str, traces))) + 2  # positional and by name are two calls, for each rate


def test_static_argument_in_front() -> None:
    """Paths and axes are those of the other arguments."""

    def step(rate: float, p: Any, x: Any) -> Any:
        return sgd(p, x, rate)

    parallel = autopar.parallelize(step, **ONE, static_argnums=0, batch_axes=(None, 0), donate_argnums=1)
    assert parallel.trace(0.5, weights(), rows()).graph.input_paths == ("p['w']", "x")
    state, loss = parallel(0.5, weights(), rows())
    assert_close((state, loss), sgd(weights(), rows(), 0.5))
    parallel(0.5, state, rows())
    assert state["w"].is_deleted()


@pytest.mark.parametrize(
    ("donate", "given_away"), [("auto", True), (0, True), ((0, 1), True), (-2, True), ((), False), (1, False)]
)
def test_donation(donate: Any, given_away: bool) -> None:
    """Only state can be donated, and is unless it is left out."""
    step = autopar.parallelize(sgd, **ONE, donate_argnums=donate)
    state, _ = step(weights(), rows())
    x = jnp.asarray(rows())
    step(state, x)
    assert state["w"].is_deleted() == given_away
    assert not x.is_deleted()


@METHODS
def test_each_leaf_is_overwritten_by_its_own_next_value(method: autopar.Method) -> None:
    """Moments and parameters have the same shapes; where buffers changed places, XLA would copy them."""

    def addresses(tree: Any) -> list[Any]:
        return [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in jax.tree.leaves(tree)]

    step = parallelized(method)
    step.compile(jax.eval_shape(init, jax.random.key(0)), batch_of())
    state = step.init(init, jax.random.key(0))
    before = addresses((state.params, state.opt[0].mu, state.opt[0].nu))
    state, _ = step(state, batch_of())
    assert addresses((state.params, state.opt[0].mu, state.opt[0].nu)) == before


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: Any
    bias: Any = None


def test_any_pytree() -> None:
    """Dataclass, named tuple, None, empty containers; a step count that starts as a Python number."""

    class Result(NamedTuple):
        loss: Any
        extra: Any

    def step(model: Model, count: int, batch: Any) -> Any:
        x, empty = batch
        loss, g = jax.value_and_grad(lambda m: mean_square({"w": m.w}, x))(model)
        return jax.tree.map(lambda a, b: a - b, model, g), count + 1, Result(loss, ({}, None, empty))

    parallel = autopar.parallelize(step, **ONE)
    first = (Model(weights()["w"]), 0)
    model, count, result = parallel(*first, (rows(), ()))
    assert isinstance(model, Model) and model.bias is None and isinstance(result, Result)
    assert_close((model, count, result), jax.jit(step)(*first, (rows(), ())))
    assert result.extra == ({}, None, ())
    again = parallel(model, count, (rows(), ()))
    assert int(again[1]) == 2
    assert len(parallel._executables) == 1  # int 0 and an int32 array are the same to the plan


def test_state_that_is_one_array() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: mean_square({"w": w}, x))(w)

    parallel = autopar.parallelize(step, **ONE)
    w = parallel(weights()["w"], rows())
    assert_close(parallel(w, rows()), step(step(weights()["w"], rows()), rows()))


def test_batch_axis_that_is_not_the_first() -> None:
    def step(p: Any, x: Any) -> Any:
        return sgd(p, x.T)

    parallel = autopar.parallelize(step, **ONE, batch_axes=(None, 1), num_microbatches=2)
    assert_close(parallel(weights(), rows().T), sgd(weights(), rows()))


def test_options_are_those_of_jit() -> None:
    """What `jax.jit` calls by a name has that name here."""
    ours = set(inspect.signature(autopar.parallelize).parameters)
    assert {"static_argnums", "static_argnames", "donate_argnums"} <= ours & set(inspect.signature(jax.jit).parameters)


# Steps and arguments that are unlike most.


def test_leaves_that_are_no_arrays() -> None:
    """Functions always, flags when asked: part of the structure, and back again in the results."""

    def step(model: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(model["activation"](batch["x"] @ w) ** 2)

        value, g = jax.value_and_grad(loss)(model["w"])
        return {**model, "w": model["w"] - 0.1 * g if model["train"] else model["w"]}, value

    batch = {"x": np.ones((BATCH, 4), np.float32)}
    model = {"w": np.ones((4, 4), np.float32), "activation": jnp.tanh, "train": True}
    parallel = autopar.parallelize(
        step, method=recipes.data_parallel(), static_leaves=lambda leaf: not isinstance(leaf, jax.Array)
    )
    executable = parallel.compile(model, batch)

    def make() -> Any:
        return {**model, "w": jnp.ones((4, 4))}

    born = parallel.init(make)
    assert born["activation"] is jnp.tanh and born["w"].sharding.num_devices == 8
    expected = jax.jit(lambda w: step({**model, "w": w}, batch)[1])(model["w"])
    trained, loss = executable(born, batch)
    assert trained["activation"] is jnp.tanh and trained["train"] is True
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    still, _ = parallel({**trained, "train": False}, batch)  # another structure, and so another step
    np.testing.assert_array_equal(autopar.gather(still["w"]), autopar.gather(trained["w"]))


def test_as_a_method() -> None:
    class Trainer:
        rate = 0.1

        @functools.partial(autopar.parallelize, static_argnums=0, method=DATA_PARALLEL)
        def step(self, w: Any, batch: Any) -> Any:
            loss, g = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
            return w - self.rate * g, loss

    batch, w = {"x": np.ones((BATCH, 4), np.float32)}, np.ones((4, 4), np.float32)
    _, loss = Trainer().step(w, batch)
    np.testing.assert_allclose(loss, 16, rtol=1e-6)


def test_a_step_that_makes_its_own_examples() -> None:
    def step(w: Any, key: Any) -> Any:
        key, noise = jax.random.split(key)
        x = jax.random.normal(noise, (BATCH, 8))
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * g, key, loss

    w, key = np.ones((8, 4), np.float32), jax.random.key(0)
    expected, _, expected_loss = jax.jit(step)(w, key)
    found, _, loss = autopar.gather(autopar.parallelize(step, batch_axes=None, method=recipes.intra_op_only())(w, key))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    with pytest.raises(BatchAxisError, match="'data_parallel' shares out the examples of a batch, of which step has"):
        autopar.parallelize(step, batch_axes=None, method=DATA_PARALLEL).plan(w, key)


@METHODS
def test_init_makes_other_functions_each_time(method: Any) -> None:
    """As where Flax's `TrainState` is made together with its optimizer."""

    def create() -> Any:
        return {"model": {"w": jnp.ones((8, 8)), "v": jnp.ones((8, 4)), "apply": lambda w, x: jnp.tanh(x @ w)}}

    def step(state: Any, batch: Any) -> Any:
        model = state["model"]

        def loss(w: Any, v: Any) -> Any:
            return jnp.mean((model["apply"](w, batch["x"]) @ v) ** 2)

        value, (g, h) = jax.value_and_grad(loss, (0, 1))(model["w"], model["v"])
        return {"model": {**model, "w": model["w"] - g, "v": model["v"] - h}}, value

    parallel = autopar.parallelize(step, method=method)
    batch = {"x": np.ones((BATCH, 8), np.float32)}
    abstract = create()
    executable = parallel.compile(abstract, batch)
    born = parallel.init(create)
    assert born["model"]["apply"] is abstract["model"]["apply"]
    executable(born, batch)


def test_gradients_that_look_like_the_next_state() -> None:
    """They are sums over the microbatches, and the program that adds them up reads the parameters each time."""

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"]) ** 2)

    p = {"w": jnp.ones((4, 8)), "v": jnp.ones((8, 2))}
    batch = {"x": np.linspace(-0.3, 0.3, BATCH * 4, dtype=np.float32).reshape(BATCH, 4)}
    step = jax.grad(loss)
    parallel = autopar.parallelize(
        lambda p, batch: (step(p, batch), loss(p, batch)), num_microbatches=2, devices=jax.devices()[:1]
    )
    executable = parallel.compile(p, batch)
    runs = [i for i in executable._worker.wiring.instructions.instructions if isinstance(i, Run)]
    leaves = set(executable._worker.wiring.instructions.leaves.values())
    assert not any(run.inputs[k] in leaves for run in runs for k in run.donated)
    found, _ = executable(p, batch)
    expected = step(p, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), autopar.gather(found), expected)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_batch_on_a_mesh_with_explicit_axes(num_microbatches: int) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    w, x = jnp.ones((16, 16)), jnp.linspace(0.0, 1.0, 64 * 16).reshape(64, 16)
    expected = jax.jit(step)(w, x)
    there = jax.device_put((w, x), tuple(NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("d"))))
    method = recipes.data_parallel(num_microbatches)
    found = autopar.parallelize(step, method=method, batch_axes=(None, 0), donate_argnums=())(*there)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)
    np.testing.assert_array_equal(there[1], x)
