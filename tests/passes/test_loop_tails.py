"""What loops over layers return without going on with it: computed after them, so that examples are not coupled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MicrobatchError
from autopar.ir.graph import Graph
from autopar.passes.loop_tails import without_tails
from autopar.passes.rules.nested import make_body
from autopar.passes.rules.table import rule_of
from autopar.tracing.trace import trace

LAYERS, BATCH, TIME, WIDTH, EXPERTS, HISTORY = 4, 16, 6, 24, 4, 5

Layer = Callable[[Any, Any], tuple[Any, Any]]


def _mixed(x: Any, p: Any) -> Any:
    return x + jnp.tanh(x @ p["w"]) @ p["v"]


def _largest(x: Any, p: Any) -> Any:
    y = _mixed(x, p)
    return y, jnp.max(jnp.abs(y))


def _smallest_of_each_unit_and_largest(x: Any, p: Any) -> Any:
    y = _mixed(x, p)
    return y, {"least": jnp.min(y, (0, 1)), "scale": 1 / jnp.maximum(jnp.max(y), 1e-3) + jnp.float32(2)}


def _norm(x: Any, p: Any) -> Any:
    y = _mixed(x, p)
    return y, jnp.linalg.norm(y)


def _finite(x: Any, p: Any) -> Any:
    y = _mixed(x, p)
    return y, {"all": jnp.isfinite(y).all(), "any": (y > 1).any()}


def _mean_and_norm(x: Any, p: Any) -> Any:
    """A mean is linear in a sum, and stays in the loop."""
    y = _mixed(x, p)
    return y, (y.mean(), jnp.sqrt((y**2).sum()))


def _largest_load(x: Any, p: Any) -> Any:
    expert = jnp.argmax(x @ p["gate"], -1)
    loads = jax.nn.one_hot(expert, EXPERTS).sum((0, 1))
    return _mixed(x, p), (loads.max() / loads.mean(), loads.max())


def _two_sums(x: Any, p: Any) -> Any:
    """One of them through something else, which the other's tail reads."""
    y = _mixed(x, p)
    return y, ((y > 0).sum() / jnp.sqrt((y**2).sum()), jnp.max(y) / jnp.exp((y**2).mean() * p["w"].mean()))


def _penalty(x: Any, p: Any) -> Any:
    return _mixed(x, p), jnp.sqrt((p["w"] ** 2).sum())


def _running_scale(x: Any, p: Any) -> Any:
    """As products in 8 bits have it: the scale is that of the steps before, what follows is for the next."""
    scale = jnp.max(p["history"])
    y = x + jnp.tanh((x / scale) @ p["w"]) * scale @ p["v"]
    return y, jnp.roll(p["history"], -1).at[0].set(jnp.max(jnp.abs(x)))


def _of_stacks(x: Any, p: Any) -> Any:
    """What is returned, too, and what is made of it, of weights and of examples."""
    y = _mixed(x, p)
    weights = p["w"] * 2
    total, size = (y**2).sum(), (p["v"] ** 2).sum()
    return y, (total, jnp.sqrt(total) * size, weights, jnp.max(weights) + jnp.max(y), size, size)


METRICS: dict[str, Layer] = {
    f.__name__.strip("_"): f
    for f in (
        _largest, _smallest_of_each_unit_and_largest, _norm, _finite, _mean_and_norm, _largest_load, _penalty,
        _running_scale, _of_stacks, _two_sums,
    )
}  # fmt: skip


def _params() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "gate": (WIDTH, EXPERTS)}
    made = {k: random.normal(size=(LAYERS, *shape)).astype(np.float32) * 0.3 for k, shape in shapes.items()}
    return {**made, "history": random.uniform(1, 2, size=(LAYERS, HISTORY)).astype(np.float32)}


def _examples() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(BATCH, TIME, WIDTH)).astype(np.float32)


def _step(layer: Layer, *, reverse: bool = False) -> Callable[[Any, Any], Any]:
    def step(params: Any, x: Any) -> Any:
        fixed = {"history": params["history"]}

        def loss(trained: Any) -> Any:
            y, metrics = jax.lax.scan(layer, x, {**trained, **fixed}, reverse=reverse)
            return jnp.mean(y**2), metrics

        trained = {k: v for k, v in params.items() if k != "history"}
        (value, metrics), g = jax.value_and_grad(loss, has_aux=True)(trained)
        return {**jax.tree.map(lambda p, g: p - 0.1 * g, trained, g), **fixed}, value, metrics

    return step


def _same(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5),
        autopar.gather(found), expected,
    )  # fmt: skip


METHODS = [recipes.zero(3, 2), recipes.megatron(2, 2, 2, 2)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_layers_run_in_microbatches(name: str, method: Any) -> None:
    step = _step(METRICS[name])
    parallel = autopar.parallelize(step, method=method, batch_axes=(None, 0), donate_argnums=())
    params, x = _params(), _examples()
    _same(parallel(params, x), jax.jit(step)(params, x))
    assert parallel.plan(params, x).num_microbatches == 2


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_scale_may_be_a_gradient(checkpointed: bool, reverse: bool) -> None:
    """As Flax has it, so that nothing but gradients has to be handed on: the backward pass returns the new history."""

    @jax.custom_vjp
    def scaled(x: Any, history: Any) -> Any:
        return x / jnp.max(history)

    def forward(x: Any, history: Any) -> Any:
        return scaled(x, history), (jnp.max(history), jnp.roll(history, -1).at[0].set(jnp.max(jnp.abs(x))))

    def backward(kept: Any, g: Any) -> Any:
        return g / kept[0], kept[1] + 0 * jnp.max(jnp.abs(g))

    scaled.defvjp(forward, backward)

    def layer(x: Any, p: Any) -> Any:
        return x + jnp.tanh(scaled(x, p["history"]) @ p["w"]) @ p["v"], None

    def step(params: Any, x: Any) -> Any:
        body = jax.checkpoint(layer) if checkpointed else layer
        value, g = jax.value_and_grad(
            lambda p: jnp.mean(jax.lax.scan(body, x, p, reverse=reverse)[0] ** 2)
        )(params)  # fmt: skip
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, g)
        return {**new, "history": g["history"]}, value

    params, x = _params(), _examples()
    expected = jax.jit(step)(params, x)
    for method in METHODS:
        parallel = autopar.parallelize(step, method=method, batch_axes=(None, 0), donate_argnums=())
        _same(parallel(params, x), expected)
        assert parallel.plan(params, x).num_microbatches == 2


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("checkpointed", "of_examples", "leading"), [(False, True, True), (True, False, True), (False, False, False)]
)
def test_penalties_of_weights_are_added_up_beside_examples(
    checkpointed: bool, of_examples: bool, leading: bool, method: Any
) -> None:
    """What is whole on every device is added to a partial sum, and its gradient to the gradient's."""

    def layer(carry: Any, p: Any) -> Any:
        x, penalty = carry
        y = _mixed(x, p)
        penalty = penalty + (p["w"] ** 2).sum()
        return (y, penalty + (y**2).mean() if of_examples else penalty), None

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            body = jax.checkpoint(layer) if checkpointed else layer
            start = x if leading else jnp.swapaxes(x, 0, 1).reshape(TIME * BATCH, WIDTH)
            (y, penalty), _ = jax.lax.scan(body, (start, jnp.float32(0)), params)
            return jnp.mean(y**2) + 0.1 * penalty

        value, g = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, g), value

    params, x = _params(), _examples()
    parallel = autopar.parallelize(step, method=method, batch_axes=(None, 0), donate_argnums=())
    _same(parallel(params, x), jax.jit(step)(params, x))
    assert parallel.plan(params, x).num_microbatches == 2


def test_examples_that_are_not_consecutive_have_no_position() -> None:
    """A microbatch of examples within times is no run of rows: bits that are drawn for such a run are not its own."""

    def layer(x: Any, p: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), p["seed"]), 0.7, x.shape)
        return _mixed(jnp.where(kept, x, 0), p), None

    def step(params: Any, x: Any) -> Any:
        def loss(trained: Any) -> Any:
            start = jnp.swapaxes(x, 0, 1).reshape(TIME * BATCH, WIDTH)
            return jnp.mean(jax.lax.scan(layer, start, {**trained, "seed": jnp.arange(LAYERS)})[0] ** 2)

        value, g = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, g), value

    params, x = _params(), _examples()
    options: Any = {"batch_axes": (None, 0), "donate_argnums": ()}
    found = autopar.parallelize(step, method=recipes.data_parallel(1), **options)(params, x)
    _same(found, jax.jit(step)(params, x))
    with pytest.raises(MicrobatchError, match="position"):
        autopar.parallelize(step, method=recipes.zero(3, 2), **options)(params, x)


def _traced(layer: Layer) -> tuple[Graph, Graph]:
    graph = trace(_step(layer), (_params(), _examples()), {}, name="step")
    return graph, without_tails(graph, BATCH, rule_of)


def test_the_loop_returns_what_each_example_gives() -> None:
    before, after = _traced(_largest)
    forward = next(eqn for eqn in after.equations if eqn.primitive.name == "scan")
    assert (LAYERS,) in [v.shape for eqn in before.equations for v in eqn.outputs if eqn.primitive.name == "scan"]
    assert (LAYERS, BATCH) in [v.shape for v in forward.outputs]
    assert (LAYERS,) not in [v.shape for v in forward.outputs]
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("layer", [lambda x, p: (_mixed(x, p), None), lambda x, p: (_mixed(x, p), x.mean())])
def test_what_needs_no_other_loop_stays(layer: Layer) -> None:
    before, after = _traced(layer)
    assert after is before


def test_lines_and_what_is_computed_again_are_those_of_before() -> None:
    @jax.checkpoint
    def layer(x: Any, p: Any) -> Any:
        y = _mixed(x, p)
        return y, jnp.max(jnp.abs(y))

    before, after = _traced(layer)
    of_graphs = []
    for graph in (before, after):
        products = []
        for eqn in graph.equations:
            if eqn.primitive.name == "scan":
                closed = eqn.params["jaxpr"]
                body = make_body(closed.in_avals, [(closed, range(len(closed.in_avals)))], rule_of)
                products.append(
                    [(e.source, e.rematerialized) for e in body.equations if e.primitive.name == "dot_general"]
                )
        of_graphs.append(products)
    assert of_graphs[0] == of_graphs[1]
    assert any(rematerialized for products in of_graphs[0] for _, rematerialized in products)


def _if_known(x: Any, p: Any) -> Any:
    y = _mixed(x, p)
    return y, jax.lax.cond(True, lambda y: jnp.max(jnp.abs(y)), lambda y: jnp.float32(0), y)


def _called_back(x: Any, p: Any) -> Any:
    y = _mixed(x, p)
    return y, jax.pure_callback(
        lambda a: np.float32(2) * a, jax.ShapeDtypeStruct((), jnp.float32), jnp.max(p["history"])
    )


def _drawn(x: Any, p: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(0, impl="rbg"), p["history"][0].astype(jnp.int32))
    return _mixed(x, p), jnp.max(jnp.abs(p["w"] + jax.random.normal(key, p["w"].shape)))


@pytest.mark.parametrize("layer", [_if_known, _called_back, _drawn])
def test_what_is_not_the_same_for_all_rounds_at_once_stays(layer: Layer) -> None:
    step, params, x = _step(layer), _params(), _examples()
    parallel = autopar.parallelize(step, method=recipes.zero(3), batch_axes=(None, 0), donate_argnums=())
    _same(parallel(params, x), jax.jit(step)(params, x))


def test_a_loop_may_be_nothing_else() -> None:
    def step(params: Any, x: Any) -> Any:
        norms = jax.lax.map(lambda w: jnp.sqrt((w**2).sum()), params["w"])
        new, value, largest = _step(_largest)(params, x)
        return new, value, largest, norms

    params, x = _params(), _examples()
    parallel = autopar.parallelize(step, method=recipes.zero(3, 2), batch_axes=(None, 0), donate_argnums=())
    _same(parallel(params, x), jax.jit(step)(params, x))


def _by_todays_scale(x: Any, p: Any) -> Any:
    scale = jnp.max(jnp.abs(x))
    return x + jnp.tanh((x / scale) @ p["w"]) * scale @ p["v"], None


def test_what_a_round_goes_on_with_is_coupled() -> None:
    step = autopar.parallelize(_step(_by_todays_scale), method=recipes.zero(3, 2), batch_axes=(None, 0))
    with pytest.raises(MicrobatchError, match=r"couples the examples of its batch at .*test_loop_tails.py"):
        step.plan(_params(), _examples())


def test_large_values_are_not_kept_for_it() -> None:
    """The largest over examples alone of a value as large as the layer's result."""
    before, after = _traced(lambda x, p: (_mixed(x, p), jnp.exp(jnp.max(_mixed(x, p), 0))))
    assert after is before
