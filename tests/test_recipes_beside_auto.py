"""`auto` is never slower than a recipe with its microbatches free, and fits wherever one does."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar import recipes
from autopar.errors import UserError
from autopar.planning import baselines
from autopar.planning.candidate import Incumbent
from autopar.planning.evaluator import Evaluator
from autopar.planning.planner import Planner
from benchmarks.models import gpt, moe
from tests.clusters import IN_TURN
from tests.models import adam, adam_state, mlp_batch, mlp_loss, mlp_params, sgd
from tests.planned import analyse, cluster_of, compiled_by

_MB = 1 << 20
Made = tuple[Callable[..., Any], Any, Any]  # a train step, and the shapes of its state and batch


def _gpt(**changes: Any) -> Made:
    config = gpt.GPTConfig(256, 64, 1, 64, 4, **{"dropout": 0.0, "dtype": jnp.float32, **changes})
    return of_model(gpt, config, 8)


def of_model(model: Any, config: Any, batch_size: int) -> Made:
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(model.make_init(config, optimizer), jax.random.key(0))
    return model.make_train_step(config, optimizer), state, model.abstract_batch(config, batch_size)


def _scanned() -> Made:
    """ZeRO-1 copies whole stacks of gradients before it scatters them."""
    return of_model(gpt, gpt.GPTConfig(256, 64, 8, 128, 4, dropout=0.0, dtype=jnp.float32, scan=True), 16)


def _moe() -> Made:
    config = moe.MoEConfig(256, 64, 1, 64, 4, num_experts=4, group_size=64, dropout=0.0, dtype=jnp.float32)
    return of_model(moe, config, 8)


def _mlp(*widths: int) -> Made:
    params = jax.eval_shape(lambda: mlp_params(widths))
    return adam(mlp_loss), jax.eval_shape(adam_state, params), mlp_batch(16, widths)


def _embedded() -> Made:
    """Activations a thousand times as large as the batch."""

    def step(weights: list[jax.Array], tokens: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss_fn(weights: list[jax.Array]) -> jax.Array:
            x = weights[0][tokens]
            for kernel in weights[1:]:
                x = jnp.tanh(x @ kernel)
            return (x**2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    square = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    return step, [square] * 3, jax.ShapeDtypeStruct((16384,), jnp.int32)


# The model, and the cluster: hosts and devices of each, bytes of memory and so on.
CASES: dict[str, tuple[Callable[[], Made], dict[str, Any]]] = {
    "mlp, much memory": (lambda: _mlp(64, 256, 64), {"devices": 4}),
    "mlp, little memory": (lambda: _mlp(64, 256, 64), {"devices": 4, "memory": _MB // 4}),
    "mlp, wide layers": (lambda: _mlp(256, 1024, 256), {"devices": 4, "memory": 6 * _MB}),
    "mlp, narrow layers": (lambda: _mlp(*[32] * 5), {"hosts": 2, "devices": 2, "network": 1e7}),
    "mlp, a slow link": (lambda: _mlp(*[128] * 4), {"devices": 2, "memory": _MB, "link": 1e7}),
    "mlp, a slow network": (lambda: _mlp(*[256] * 4), {"hosts": 2, "devices": 2, "memory": 2 * _MB, "network": 1e6}),
    "mlp, launches cost": (lambda: _mlp(*[128] * 4), {"devices": 4, "memory": _MB, "launch": 1e-4}),
    "mlp, latency costs": (lambda: _mlp(*[128] * 4), {"devices": 4, "memory": _MB, "latency": 1e-3}),
    "mlp, state in pieces": (lambda: _mlp(*[256] * 3), {"devices": 4, "memory": 3 * _MB // 4, "link": 1e9}),
    "gpt, little memory": (_gpt, {"devices": 2, "memory": 2 * _MB}),
    "mlp, four hosts": (lambda: _mlp(*[256] * 3), {"hosts": 4, "devices": 1, "memory": 3 * _MB // 2, "network": 1e8}),
    "one microbatch is far too large": (_embedded, {"devices": 2, "memory": 6 * _MB}),
    "moe": (_moe, {"devices": 2, "memory": 8 * _MB, "link": 1e8}),
}


def _case(name: str) -> tuple[Made, autopar.Cluster]:
    make, changed = CASES[name]
    sizes = {"hosts": 1, "flops": 1e11, "memory_bandwidth": 1e10, "link": 1e10, "launch": 1e-7, **changed}
    return make(), cluster_of(sizes.pop("hosts"), sizes.pop("devices"), **sizes)


def _recipes(cluster: autopar.Cluster) -> list[autopar.Method]:
    devices, width = cluster.num_devices, cluster.hosts[0].num_devices
    found = [recipes.data_parallel(None), *(recipes.zero(stage, None) for stage in (1, 2, 3)), recipes.intra_op_only()]
    degrees = [(2, 1), (1, 2), (2, 2), (1, 4)]  # of tensor parallelism, and of the pipeline
    found += [recipes.megatron(devices // (t * p), t, p) for t, p in degrees if devices % (t * p) == 0 and t <= width]
    found += [recipes.gpipe(2), recipes.inter_op_only()]
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("moe", "gpt, little memory"))) for n in CASES]
)
def test_auto_is_never_slower_than_a_recipe(name: str) -> None:
    (function, state, batch), cluster = _case(name)
    step = autopar.parallelize(function, cluster=cluster)

    def seconds(method: autopar.Method) -> float:
        try:
            return float(step.plan(state, batch, method=method).step_time)
        except UserError:
            return math.inf

    with warnings.catch_warnings(action="ignore"):
        ours = seconds(recipes.auto())
        others = {method: seconds(method) for method in _recipes(cluster)}
    assert min(others.values()) < math.inf, "no recipe fits: this case says nothing"
    quicker = {str(method.name): time / ours for method, time in others.items() if time < ours}
    assert not quicker


@pytest.mark.parametrize("preset", ["dgx-a100", "dgx-h100"])
def test_no_mesh_shape_is_quicker_where_kernels_hide_what_is_sent(preset: str) -> None:
    """The stage search, which counts collectives outside of loops in full, expects another shape to be the best."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            h = x
            for gate, up, down in params:
                h = h + (jax.nn.silu(h @ gate) * (h @ up)) @ down
            return (h.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    shapes = (2048, 8192), (2048, 8192), (8192, 2048)
    params = [tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)] * 4
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    planned = autopar.parallelize(step, cluster=autopar.load_preset(preset), batch_axes=(None, 0), num_microbatches=1)

    def seconds(method: autopar.Method) -> float:
        return float(planned.plan(params, x, method=method).step_time)

    ours = seconds(recipes.auto())
    assert ours < seconds(dataclasses.replace(recipes.auto(), without=frozenset({"other_shapes"})))
    for shape in ((8,), (4, 2), (2, 4)):
        assert ours <= (1 + 1e-9) * seconds(recipes.auto(pipeline=False, mesh_shape=shape, baselines=False)), shape


@pytest.mark.parametrize("name", ["mlp, much memory", "mlp, narrow layers", "mlp, launches cost", "mlp, latency costs"])
def test_what_is_proved_of_the_mesh_of_all_devices_holds_for_recipes(name: str) -> None:
    """What the solver counts for a recipe is never less than the bound of all shardings on that mesh."""
    (function, state, batch), cluster = _case(name)
    step = autopar.parallelize(function, cluster=cluster, num_microbatches=1)
    free = step.plan(state, batch, method=recipes.auto(pipeline=False, mesh_shape=(-1,), baselines=False))
    assert free.lower_bound > 0
    for recipe in (recipes.data_parallel(1), *(recipes.zero(stage, 1) for stage in (1, 2, 3))):
        plan = step.plan(state, batch, method=recipe)
        assert plan.lower_bound / (1 - plan.gap) >= free.lower_bound * (1 - 1e-9)


@pytest.mark.parametrize("memory", [2.72, 5.7])
def test_a_recipe_finds_its_best_number_of_microbatches(memory: float) -> None:
    """Where few fit, and where more than one of an example for each data shard do not divide the batch."""

    def step(layers: Any, x: jax.Array) -> Any:
        def loss(layers: Any) -> Any:
            block = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
            return jnp.mean(jax.lax.scan(block, x, layers)[0] ** 2)

        return layers - 0.1 * jax.grad(loss)(layers)

    layers, x = jax.ShapeDtypeStruct((6, 256, 256), jnp.float32), jax.ShapeDtypeStruct((64, 64, 256), jnp.float32)
    cluster = cluster_of(1, 8, memory=int(memory * _MB))
    planned = autopar.parallelize(step, batch_axes=(None, 0), cluster=cluster)

    def seconds(method: autopar.Method) -> float:
        try:
            return float(planned.plan(layers, x, method=method).step_time)
        except UserError:
            return math.inf

    kinds: list[Callable[[int | None], autopar.Method]] = [
        lambda m: recipes.zero(3, m), lambda m: recipes.zero(1, m), lambda m: recipes.megatron(4, 2, 1, m),
        lambda m: recipes.gpipe(2, m),
    ]  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        best = [min(seconds(kind(m)) for m in (1, 2, 4, 8, 16, 32, 64)) for kind in kinds]
        assert min(best) < math.inf
        assert [seconds(kind(None)) for kind in kinds] == pytest.approx(best)
        assert seconds(recipes.auto()) <= min(best)


@pytest.mark.parametrize(("memory", "alone"), [(48, False), (96, True)], ids=["beside recipes", "alone"])
def test_whole_copies_of_stacks(memory: int, alone: bool) -> None:
    """ZeRO-1 is best. Where there may be no room, the solver is not offered it, and must not claim to know better."""
    function, state, batch = _scanned()
    cluster = cluster_of(1, 8, memory=memory * _MB, link=1e8)
    step = autopar.parallelize(function, cluster=cluster, num_microbatches=1)
    ours, other = recipes.auto(pipeline=False, baselines=not alone), recipes.zero(1)
    best = step.plan(state, batch, method=other).step_time
    assert step.plan(state, batch, method=ours).step_time <= best


def test_no_recipe_would_take_less_than_the_plan() -> None:
    """Where one was estimated to, it was planned: then it takes as long as the plan, or longer."""
    widths = [32] * 9
    state, batch = jax.eval_shape(lambda: (mlp_params(widths), mlp_batch(64, widths)))
    step = autopar.parallelize(sgd(mlp_loss), cluster=autopar.load_preset("dgx-a100"), num_microbatches=4)
    plan = step.plan(state, batch)
    [note] = [note for note in plan.notes if note.startswith("recipes would take")]
    assert "data_parallel in 4 microbatches at least " in note
    for part in note.removesuffix(".").split(", "):
        number, unit = part.split()[-2:]
        assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit] >= plan.step_time * (1 - 1e-3), part


@pytest.mark.parametrize(("number", "times"), [(1, 1), (2, 4)])
def test_recipes_that_are_alike_are_planned_once_if_they_have_the_microbatches_that_were_meant(
    number: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-1 and ZeRO-2 are the same in one microbatch, and not in more, of which they may turn out to need some."""
    heard: list[str] = []
    found: list[Any] = []
    searched = Planner.plan

    def remembered(self: Planner, num_microbatches: int | None = None) -> Any:
        found.append(searched(self, num_microbatches))
        return found[-1]

    def heard_of(_: Planner, rival: Planner, *__: Any) -> Any:
        heard.append(rival.method.name)
        return dataclasses.replace(found[0][0], num_microbatches=number), found[0][1]

    monkeypatch.setattr(Planner, "plan", remembered)
    monkeypatch.setattr(Planner, "better_by", heard_of)
    monkeypatch.setattr(baselines, "_least_within_one_stage", lambda *_: 0.0)
    monkeypatch.setattr(baselines, "_quickest", lambda *_: baselines._Estimate(1e-9, 1, 1.0))
    (function, state, batch), cluster = _case("mlp, much memory")
    autopar.parallelize(function, cluster=cluster).plan(state, batch)
    assert len(heard) == times


@pytest.mark.parametrize("case", ["mlp, wide layers", "mlp, much memory"])
def test_what_recipes_share_changes_none_of_their_plans(case: str) -> None:
    """Costs that were found for one method are used by another."""
    (function, state, batch), cluster = _case(case)
    analysis = analyse(function, state, batch)
    planner = Planner(analysis, cluster)
    planner.plan()
    for recipe in _recipes(cluster)[1:4]:  # ZeRO
        alone, lowered = Planner(analysis, cluster, recipe).plan()
        rival = planner.beside(recipe)
        rival.evaluator.best = Incumbent()
        beside, its = rival.plan()
        assert beside.step_time == alone.step_time
        assert [s.strategies for s in its.shardings] == [s.strategies for s in lowered.shardings]


@pytest.mark.parametrize("hides", [False, True])
def test_a_bound_that_counts_hidden_collectives_is_none_of_the_price(
    hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (function, state, batch), cluster = _case("mlp, wide layers")
    asked: list[float] = []

    def least(evaluator: Evaluator, *_: Any) -> float:
        best = evaluator.best
        best.estimate = 1.5 * best.step_time  # as where a third of it is hidden
        asked.append(1.25 * best.step_time)
        return asked[0]

    monkeypatch.setattr(baselines, "_least_within_one_stage", least)
    xla = dataclasses.replace(IN_TURN, hides_latency=hides)
    step = autopar.parallelize(function, cluster=compiled_by(cluster, xla))
    plan = step.plan(state, batch)
    assert asked
    assert any("recipes would take" in note for note in plan.notes) == hides
