"""What users may fix of a plan: pinned shardings, kinds of parallelism, memory, time; and what they are told."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import ClusterError, InfeasiblePlanError, PlanError, PlanMismatchError, TimeLimitWarning
from autopar.ir.hint import FREE, Hint, hint_p
from autopar.ir.mesh import Mesh
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.ir.sharding import Sharding
from autopar.planning.neighbours import PHASES, Neighbour, stage_per_host
from tests.models import chain_loss, sgd
from tests.small_steps import assert_close

LAYERS, WIDTH, BATCH = 4, 64, 32
CLUSTER = autopar.load_preset("dgx-a100")
TWO_HOSTS = autopar.load_preset("dgx-a100", num_hosts=2)


def make_step(spec: Any = None, scan: bool = False) -> Callable[..., Any]:
    """A train step whose hidden activations are pinned to `spec`."""

    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        h = jnp.tanh(h @ w)
        return h if spec is None else autopar.hint(h, spec)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        if scan:
            h, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), h, params["w"])
        else:
            for i in range(LAYERS):
                h = layer(h, params["w"][i])
        return jnp.mean((h - batch["y"]) ** 2)

    return sgd(loss_of)


def arguments(width: int = WIDTH, batch: int = BATCH) -> tuple[Any, Any]:
    key = jax.random.split(jax.random.key(0), 3)
    state = {"w": jax.random.normal(key[0], (LAYERS, width, width)) / width**0.5}
    return state, {"x": jax.random.normal(key[1], (batch, width)), "y": jax.random.normal(key[2], (batch, width))}


def shapes(width: int = 4096, batch: int = 256) -> tuple[Any, Any]:
    state, examples = jax.eval_shape(lambda: arguments(width, batch))
    return state, examples


def plan_of(cluster: autopar.Cluster = TWO_HOSTS, step: Any = None, **options: Any) -> Plan:
    return autopar.parallelize(step or make_step()).plan(*shapes(), cluster=cluster, method=recipes.auto(**options))


# Hints


@pytest.mark.parametrize("scan", [False, True], ids=["layers", "scan"])
@pytest.mark.parametrize("spec", [(None, 8), (8,), (2, 4), (-1, None), (FREE, -1), ("x", None), (None, None)], ids=str)
def test_what_a_step_computes_is_cut_as_hinted(scan: bool, spec: Any) -> None:
    state, batch = arguments()
    wanted, wanted_loss = jax.jit(make_step(scan=scan))(state, batch)
    step = autopar.parallelize(make_step(spec, scan), donate_argnums=(), method=recipes.auto(num_stages=1))
    met = []
    bind: Callable[..., Any] = hint_p.bind

    def record(x: Any, **params: Any) -> Any:
        met.append((params["hint"], tuple(jnp.shape(x))))
        return bind(x, **params)

    plan = step.plan(state, batch)
    with mock.patch.object(hint_p, "bind", record):
        executable = step.compile(state, batch)  # every device's piece is traced anew
    pieces = [shape for _, shape in met]
    [shape] = {stage.mesh.shape for stage in plan.stages}
    devices = plan.stages[0].mesh.size

    def cut(entry: Any, size: int) -> set[int]:
        if entry is FREE:
            return {size // n for n in range(1, size + 1) if size % n == 0}
        pieces: dict[Any, int] = {None: 1, -1: devices, "x": shape[0]}
        return {size // pieces.get(entry, entry)}

    assert pieces
    for piece in pieces:
        assert all(n in cut(e, size) for n, e, size in zip(piece, (*spec, None)[:2], (BATCH, WIDTH), strict=True))
    got, loss = autopar.gather(executable(state, batch))
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(got["w"], wanted["w"], rtol=1e-4, atol=1e-6)


def test_a_hint_does_nothing_elsewhere() -> None:
    state, batch = arguments()
    hinted = make_step((2, 4))
    runs: tuple[Callable[..., Any], ...] = (hinted, jax.jit(hinted), jax.checkpoint(hinted))
    for run in runs:
        got = run(state, batch)[1]
        np.testing.assert_allclose(got, make_step()(state, batch)[1], rtol=1e-6)
    rows = jax.vmap(lambda row: autopar.hint(2 * row, (2,)))(batch["x"])
    np.testing.assert_array_equal(rows, 2 * batch["x"])
    _, tangent = jax.jvp(lambda x: autopar.hint(x, (2, 4)) ** 2, (batch["x"],), (batch["y"],))
    np.testing.assert_allclose(tangent, 2 * batch["x"] * batch["y"])
    jaxpr = jax.make_jaxpr(jax.vmap(lambda row: autopar.hint(row, (2,)), in_axes=1, out_axes=1))(batch["x"])
    assert [eqn.params["hint"] for eqn in jaxpr.eqns if eqn.primitive is hint_p] == [Hint((2, FREE))]


def test_arguments_lie_as_hinted_and_stay_there() -> None:
    state, batch = arguments()
    step = autopar.parallelize(make_step(), hints={"state['w']": (None, 4, 2)}, donate_argnums=())
    plan = step.plan(state, batch)
    [leaf] = [leaf for leaf in plan.leaves if leaf.path == "state['w']"]
    assert leaf.sharding.tiles(plan.stages[0].mesh) == (1, 4, 2)
    wanted, wanted_loss = jax.jit(make_step())(state, batch)
    got, loss = autopar.gather(step(state, batch))
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(got["w"], wanted["w"], rtol=1e-4, atol=1e-6)


def test_batches_and_patterns_can_be_pinned() -> None:
    step = autopar.parallelize(make_step(), hints={"batch['?']": (None, None), "state*": (None, None, -1)})
    plan = step.plan(*shapes(), cluster=CLUSTER)
    tiles = {leaf.path: leaf.sharding.tiles(plan.stages[leaf.stage].mesh) for leaf in plan.leaves}
    assert tiles == {"state['w']": (1, 1, 8), "batch['x']": (1, 1), "batch['y']": (1, 1)}


def test_alike_layers_with_other_hints_are_not_taken_for_alike() -> None:
    step = sgd(chain_loss)
    _, batch = shapes()
    layers = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 4
    for stages in (1, 2):
        hints = {"state[1]": (-1, None), "state[3]": (None, -1), "state[0]": ()}
        made = autopar.parallelize(step, hints=hints).plan(
            layers, batch, cluster=CLUSTER, method=recipes.auto(num_stages=stages)
        )
        tiles = [leaf.sharding.tiles(made.stages[leaf.stage].mesh) for leaf in made.leaves[:4]]
        each = 8 // stages
        assert (tiles[0], tiles[1], tiles[3]) == ((1, 1), (each, 1), (1, each))


BAD_SPECS = {
    "a text": "xy",
    "no sequence": 3,
    "a negative number": (-2,),
    "a bool": (True,),
    "an axis twice": ("x", "x"),
    "too many entries": (None, None, None),
    "no divisor": (3,),
}


@pytest.mark.parametrize("spec", BAD_SPECS.values(), ids=BAD_SPECS)
def test_bad_specs_are_refused_where_they_are_given(spec: Any) -> None:
    with pytest.raises(PlanError, match="hint: "):
        autopar.hint(jnp.ones((4, 4)), spec)


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"sate['w']": ()}, r"hints\[\"sate\['w'\]\"\] matches no argument .* did you mean \"state\['w'\]\""),
        ({"*": (), "state*": (2,)}, r"both match state\['w'\]"),
        ({"state*": (3,)}, "cannot be cut into 3 equal pieces"),
        ({"batch*": (None, None, None)}, "3 entries for an array of shape"),
    ],
)
def test_hints_that_fit_no_argument_are_refused(hints: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        autopar.parallelize(make_step(), hints=hints).plan(*arguments(), cluster=CLUSTER)


def test_a_plan_takes_no_hints() -> None:
    plan = autopar.parallelize(make_step()).plan(*shapes(), cluster=CLUSTER)
    with pytest.raises(PlanError, match="Leave out hints"):
        autopar.parallelize(make_step(), hints={"*": ()}, method=plan).plan(*shapes())
    with pytest.raises(PlanError, match="make a plan for this function"):  # other hints are another step
        autopar.parallelize(make_step((8,)), method=plan).plan(*shapes())


def test_the_shardings_that_a_hint_allows() -> None:
    mesh = Mesh(tuple(range(8)), (2, 4), ("x", "y"))
    assert set(Hint((8,)).shardings((16, 3), mesh)) == {Sharding((("x", "y"), ()))}
    assert set(Hint((FREE,)).shardings((4,), mesh)) == {Sharding(d) for d in [((),), (("x",),), (("y",),)]}
    assert Hint(("y", "x")).shardings((4, 4), mesh) == [Sharding((("y",), ("x",)))]
    assert Hint(("z",)).shardings((4,), mesh) == [Sharding(((),))]  # one device along it
    assert Hint((3,)).shardings((6,), mesh) == []


# Kinds of parallelism


def split_axes(plan: Plan) -> tuple[bool, bool]:
    """Whether some stage splits examples, and whether one splits parameters of the products it computes."""
    batch = [leaf for leaf in plan.leaves if leaf.batch_axis is not None]
    data = any(leaf.sharding.dims[leaf.batch_axis or 0] for leaf in batch)
    return data, any(leaf.state and leaf.sharding.axes for leaf in plan.leaves)


def test_forced_and_forbidden_kinds() -> None:
    assert len(plan_of(pipeline=True).stages) > 1
    assert len(plan_of(pipeline=False).stages) == 1
    assert len(plan_of(num_stages=4).stages) == 4
    assert split_axes(plan_of(data=True))[0]
    assert not split_axes(plan_of(data=False))[0]
    assert split_axes(plan_of(tensor=True))[1]
    assert split_axes(plan_of(tensor=False, zero=0)) == (True, False)
    assert split_axes(plan_of(tensor=False, zero=3)) == (True, True)
    both = plan_of(data=True, tensor=True)
    assert split_axes(both) == (True, True)
    assert all(n > 1 for stage in both.stages for n in stage.mesh.shape)
    fixed = plan_of(num_stages=2, schedule="gpipe", num_microbatches=8, mesh_shape=(2, 4))
    assert (fixed.schedule, fixed.num_microbatches) == ("gpipe", 8)
    assert [stage.mesh.shape for stage in fixed.stages] == [(2, 4)] * 2


def test_no_restriction_is_quicker_than_freedom() -> None:
    free = plan_of(CLUSTER).step_time
    for options in ({"data": True}, {"tensor": False}, {"pipeline": True}, {"zero": 3}, {"mesh_shape": (2, 4)}):
        assert plan_of(CLUSTER, **options).step_time >= 0.99 * free


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, r"zero=4\): zero must be 0, 1, 2 or 3"),
        ({"data": 1}, "True, False or None"),
        ({"spatial": 0}, "True, False or None"),
        ({"num_stages": 0}, "whole number above 0"),
        ({"mesh_shape": (0,)}, "one to three whole numbers"),
        ({"schedule": "zb"}, "one of 1f1b, gpipe"),
        ({"memory_limit": 0.5}, "whole number above 0"),
        ({"time_limit": 0}, "seconds above 0"),
        ({"data": False, "zero": 1}, "contradict"),
        ({"pipeline": True, "num_stages": 1}, "contradict"),
        ({"pipeline": False, "num_stages": 2}, "contradict"),
        ({"tensor": True, "mesh_shape": (4,)}, "contradict"),
        ({"data": True, "mesh_shape": (1, 4)}, "contradict"),
        ({"data": False, "tensor": False, "mesh_shape": (2,)}, "contradict"),
        ({"data": False, "tensor": False, "pipeline": False}, "contradict"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        recipes.auto(**options)


# Memory, time, and what cannot be


def test_memory_limit() -> None:
    free = plan_of(CLUSTER)
    limit = max(stage.memory.total for stage in free.stages) - 1
    limited = plan_of(CLUSTER, memory_limit=limit)
    assert all(stage.memory.total <= stage.memory.capacity == limit for stage in limited.stages)
    assert limited.step_time >= free.step_time


def test_too_little_memory_names_what_would_do() -> None:
    with pytest.raises(InfeasiblePlanError, match="What works: memory_limit=") as info:
        plan_of(CLUSTER, memory_limit=10 << 20)
    enough = int(str(info.value).split("What works: memory_limit=")[1].split()[0])
    assert plan_of(CLUSTER, memory_limit=enough)


def test_contradictions_name_the_hint_and_what_works() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"the hint \(None, 8\) at .*test_control.py") as info:
        plan_of(CLUSTER, make_step((None, 8)), mesh_shape=(4,))
    assert "without mesh_shape=(4,)" in str(info.value)
    assert "without the hints inside the step" in str(info.value)
    assert "hint.py" not in str(info.value)
    with pytest.raises(InfeasiblePlanError, match=r"without the hint \(None, 32\)"):
        autopar.parallelize(make_step(), hints={"state*": (None, 32)}).plan(*shapes(), cluster=CLUSTER)
    with pytest.raises(InfeasiblePlanError, match=r"mesh shape \(2, 3\).*without mesh_shape=\(2, 3\)"):
        plan_of(CLUSTER, mesh_shape=(2, 3))


def test_without_time_there_is_a_recipe_and_a_warning() -> None:
    with pytest.warns(TimeLimitWarning, match=r"time_limit=1e-06: .* best recipe that fits"):
        plan = plan_of(time_limit=1e-6)
    best = min(
        autopar.parallelize(make_step()).plan(*shapes(), cluster=TWO_HOSTS, method=recipe).step_time
        for recipe in (recipes.data_parallel(), recipes.zero(2), recipes.zero(3))
    )
    assert plan.step_time == pytest.approx(best)
    with pytest.warns(TimeLimitWarning):
        assert len(plan_of(time_limit=1e-6, pipeline=True).stages) == 2
    with pytest.raises(InfeasiblePlanError, match="too short to find a plan"):
        plan_of(time_limit=1e-6, num_stages=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TimeLimitWarning)
        assert plan_of(time_limit=1e6) == dataclasses.replace(plan_of(), method="auto(time_limit=1000000.0)")


def test_a_cluster_with_impossible_numbers_is_refused() -> None:
    cluster = dataclasses.replace(CLUSTER, network=dataclasses.replace(CLUSTER.network, bandwidth=-1.0))
    with pytest.raises(ClusterError, match=r"network.bandwidth is -1.0; it must be bytes per second above 0"):
        plan_of(cluster)


# Plans that were edited


def test_an_edited_plan_is_priced_again_and_runs() -> None:
    state, batch = arguments()
    method = recipes.auto(num_stages=2, num_microbatches=4, schedule="1f1b")
    step = autopar.parallelize(make_step(), donate_argnums=(), method=method)
    plan = step.plan(state, batch)
    with pytest.raises(PlanMismatchError, match=r"not to or from zero-bubble"):
        step.plan(state, batch, method=dataclasses.replace(plan, schedule="zero-bubble"))
    edited = step.plan(state, batch, method=dataclasses.replace(plan, schedule="gpipe"))
    assert edited.schedule == "gpipe"
    assert edited.stages[0].memory.activations > plan.stages[0].memory.activations  # all microbatches in flight
    fewer = step.plan(state, batch, method=dataclasses.replace(plan, num_microbatches=2))
    assert (fewer.num_microbatches, len(fewer.stages)) == (2, 2)
    got, loss = autopar.gather(autopar.parallelize(make_step(), donate_argnums=(), method=edited)(state, batch))
    wanted, wanted_loss = jax.jit(make_step())(state, batch)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_allclose(got["w"], wanted["w"], rtol=1e-4, atol=1e-6)


# Fixed stages


@pytest.mark.parametrize(
    ("stages", "are_alike"),
    [([(2, (2, 2)), (1, (4, 1))], True), ([(1, (2,)), (1, (4,)), (1, (2,))], False)],
    ids=["alike", "unlike"],
)
def test_fixed_stages(stages: list[tuple[int, tuple[int, ...]]], are_alike: bool) -> None:
    """Uneven stages on meshes of their own, which cut what they hand on alike or not."""

    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), value

    keys = jax.random.split(jax.random.key(0), 4)
    w = {name: jax.random.normal(key, (64, 64)) / 8 for name, key in zip("abc", keys, strict=False)}
    x = jax.random.normal(keys[3], (1024, 64))
    wanted = jax.jit(step)(w, x)
    parallel = autopar.parallelize(step, method=recipes.pipeline(stages, 2))
    executable = parallel.compile(w, x)
    plan = executable.plan
    assert [(stage.layers[1] - stage.layers[0], stage.mesh.shape) for stage in plan.stages] == stages
    transfers = executable._worker.wiring.transfers
    assert any(t.is_cut or t.is_joined for t in transfers) != are_alike
    assert plan.num_microbatches == 2
    assert_close(parallel(w, x), wanted)


# What the plan says of itself


def test_recipes_stand_beside_the_plan() -> None:
    cluster = autopar.load_preset("dgx-a100-2021")  # whose compiler hides nothing: the plan is not at its bound
    notes = {}
    for baselines in (True, False):
        plan = plan_of(cluster, baselines=baselines)
        [notes[baselines]] = [[note for note in plan.notes if note.startswith("recipes would take")]]
    assert notes[False] == []
    [note] = notes[True]
    for recipe in (recipes.data_parallel(), *map(recipes.zero, (1, 2, 3))):
        step_time = autopar.parallelize(make_step()).plan(*shapes(), cluster=cluster, method=recipe).step_time
        *least, number, unit = note.split(f"{recipe.name} in 1 microbatch ")[1].split(",")[0].strip(".").split()
        assert least in ([], ["at", "least"])
        seconds = float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
        assert seconds == pytest.approx(step_time, rel=0.1) or (least and plan.step_time < seconds < step_time)


def without_all_but(*kept: Neighbour, **options: Any) -> Method:
    names = {neighbour.__name__ for phase in PHASES for neighbour in phase} - {one.__name__ for one in kept}
    return dataclasses.replace(recipes.auto(**options), without=frozenset(names))


def test_a_recipe_wins_where_the_search_is_worse() -> None:
    """A search that tries a stage per host and nothing else: in one microbatch, one waits for the other."""
    plans = []
    for baselines in (False, True):
        method = without_all_but(stage_per_host, num_microbatches=1, baselines=baselines)
        plans.append(autopar.parallelize(make_step()).plan(*shapes(), cluster=TWO_HOSTS, method=method))
    alone, beside = plans
    assert len(alone.stages) == 2
    assert beside.method in ("data_parallel", "zero_1", "zero_2", "zero_3")
    assert beside.step_time < alone.step_time


def test_a_recipe_is_the_plan_where_the_search_finds_none() -> None:
    step = autopar.parallelize(make_step(), cluster=CLUSTER)
    plan = step.plan(*shapes(), method=without_all_but())
    assert plan.notes[-1] == f"The search found no plan that fits; {plan.method} is the best recipe that does."
    with pytest.raises(InfeasiblePlanError):
        step.plan(*shapes(), method=without_all_but(baselines=False))


def test_why_tells_each_operators_alternatives() -> None:
    step = autopar.parallelize(make_step(scan=True))
    plan = step.plan(*shapes(), cluster=CLUSTER, method=recipes.auto(num_stages=1, num_microbatches=1))
    both = step.why(*shapes(), plan=plan, where="scan", most=2)
    assert [why.operator for why in both] == ["scan", "scan"]
    for why in both:
        assert "test_control.py" in why.source
        assert why.chosen.stage_seconds == 0
        gains = [other.stage_seconds for other in why.others]
        assert gains == sorted(gains)
        # The plan is within 1 % of the best: nothing else is much better.
        assert gains[0] >= -0.02 * plan.step_time
        text = str(why)
        assert "chosen" in text and text.count("->") >= len(why.others) + 1


def test_why_of_a_plan_from_a_file() -> None:
    """Also of a step with hints, which say where things lie, as the plan does."""
    step = autopar.parallelize(make_step(), hints={"state*": (None, None, -1)})
    plan = step.plan(*shapes(), cluster=CLUSTER)
    again = autopar.Plan.from_json(plan.to_json())
    assert step.why(*shapes(), plan=again, most=1) == plan.why(most=1)


def test_why_agrees_with_plans_that_are_pinned_so() -> None:
    """The seconds that a strategy would cost are those of the plan that a hint forces to have it."""
    step = autopar.parallelize(make_step((FREE, FREE)))
    free: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1, "mesh_shape": (8,)}
    plan = step.plan(*shapes(), cluster=CLUSTER, method=recipes.auto(**free))
    [why] = step.why(*shapes(), plan=plan, where="autopar_hint", most=1)
    spec_of: dict[Any, Any] = {((), ()): (None, None), (("x",), ()): (8,), ((), ("x",)): (None, 8)}
    compared = 0
    for other in (why.chosen, *why.others):
        [result] = other.results
        if not result.partial:
            pinned = make_one_pinned(spec_of[result.dims])
            forced = autopar.parallelize(pinned).plan(*shapes(), cluster=CLUSTER, method=recipes.auto(**free))
            assert forced.lower_bound - plan.lower_bound == pytest.approx(
                other.stage_seconds, abs=0.03 * plan.step_time
            )
            compared += 1
    assert compared == 3


def make_one_pinned(spec: Any) -> Callable[..., Any]:
    """The step of `make_step((FREE, FREE))` with the first layer's activations pinned."""
    specs = iter([spec, *[(FREE, FREE)] * (LAYERS - 1)])

    def loss_of(params: Any, batch: Any) -> jax.Array:
        h = batch["x"]
        for i in range(LAYERS):
            h = autopar.hint(jnp.tanh(h @ params["w"][i]), next(specs))
        return jnp.mean((h - batch["y"]) ** 2)

    return sgd(loss_of)


def test_why_refuses_what_is_not_there() -> None:
    step = autopar.parallelize(make_step())
    plan = step.plan(*shapes(), cluster=CLUSTER)
    with pytest.raises(PlanError, match=r"where='conv'.*its operators are .*dot_general"):
        step.why(*shapes(), plan=plan, where="conv")
    with pytest.raises(PlanError, match="most must be a whole number"):
        step.why(*shapes(), plan=plan, most=0)


def test_fewest_devices_for_a_step_time() -> None:
    step = autopar.parallelize(make_step())
    sizes = (1, 2, 4, 8)
    clusters = [autopar.load_preset("dgx-a100", devices_per_host=n) for n in sizes]
    times = [step.plan(*shapes(), cluster=cluster).step_time for cluster in clusters]
    assert times == sorted(times, reverse=True)
    for n, target in zip(sizes, times, strict=True):
        plan = step.fewest_devices(*shapes(), step_time=target, clusters=clusters[::-1])
        assert plan.cluster.num_devices == n
    with pytest.raises(InfeasiblePlanError, match=r"more than step_time=1e-09 s on each of 4 clusters; at best"):
        step.fewest_devices(*shapes(), step_time=1e-9, clusters=clusters)
    with pytest.raises(InfeasiblePlanError, match="fits on none of 4 clusters"):
        step.fewest_devices(*shapes(), step_time=1, clusters=clusters, method=recipes.auto(memory_limit=1 << 20))
    with pytest.raises(PlanError, match="at least one cluster"):
        step.fewest_devices(*shapes(), step_time=1, clusters=[])
