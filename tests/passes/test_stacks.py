"""Loops over layers cut into parts compute what the whole loop computes, and what is stacked for them is cut alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from autopar.errors import PlanError, StateError, UnsplitWarning
from autopar.ir.graph import Graph, Literal, Operand
from autopar.ir.program import PlacedStep
from autopar.ir.rule import bind
from autopar.passes.batch import BatchAnalysis, analyse_batch
from autopar.passes.batch_axes import resolve_batch_axes
from autopar.passes.rules.loops import chain_of
from autopar.passes.rules.table import rule_of
from autopar.passes.stacks import Stacks, cut_leaves, find_stacks, finest
from autopar.planning.finisher import Finisher, TooSlow
from autopar.planning.layering import Layered
from autopar.tracing.trace import trace

LAYERS, BATCH, WIDTH = 6, 8, 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

Loss = Callable[[Any, Any], Any]


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) * 0.3


def plain(params: Any, x: jax.Array) -> Any:
    """Weights alone, one after the other."""
    y, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["stack"])
    return ((y @ params["out"]) ** 2).mean()


def shared(params: Any, x: jax.Array) -> Any:
    """A matrix that every layer uses, so that its gradient is added up along the backward loop; outputs kept."""

    def layer(h: jax.Array, w: jax.Array) -> Any:
        h = h + jnp.tanh(h @ params["out"] @ w)
        return h, (h**2).mean()

    y, norms = lax.scan(layer, x, params["stack"])
    return jnp.mean(y**2) + norms.mean() + (norms * jnp.arange(LAYERS)).sum()


def regularised(params: Any, x: jax.Array) -> Any:
    """The stack read beside the loop; half precision in it; dropout keys split for it."""
    keys = jax.random.split(jax.random.key(3), LAYERS)

    def layer(h: jax.Array, given: Any) -> Any:
        w, key = given
        mask = jax.random.bernoulli(key, 0.8, h.shape)
        return jnp.where(mask, jnp.tanh(h @ w), h).astype(h.dtype), None

    half = params["stack"].astype(jnp.bfloat16)
    y, _ = lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), (half, keys))
    decay = (params["stack"] ** 2).sum()
    return jnp.mean((y.astype(jnp.float32) @ params["out"]) ** 2) + 1e-3 * decay


def backwards(params: Any, x: jax.Array) -> Any:
    """From the last layer to the first, and a second loop over the same weights."""
    y, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["stack"], reverse=True)
    z, kept = lax.scan(lambda h, w: (h + jnp.sin(h @ w.T), h @ w), y @ params["out"], params["stack"])
    return jnp.mean(z**2) + jnp.mean(kept[2] ** 2)


def unfollowed(params: Any, x: jax.Array) -> Any:
    """A product of the weights with themselves, which no cut can follow."""
    y, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["stack"])
    flat = params["stack"].reshape(LAYERS, -1)
    return jnp.mean((y @ params["out"]) ** 2) + ((flat @ flat.T - jnp.eye(LAYERS)) ** 2).sum() * 1e-3


def first_differs(params: Any, x: jax.Array) -> Any:
    """A carry that ends the same in every round."""

    def layer(carry: Any, w: jax.Array) -> Any:
        h, first = carry
        return (jnp.where(first, h, 2 * h) + jnp.tanh(h @ w), False), None

    (y, _), _ = lax.scan(layer, (x, True), params["stack"])
    return jnp.mean((y @ params["out"]) ** 2)


def middle(params: Any, x: jax.Array) -> Any:
    """Stacked along the second axis."""
    y, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.moveaxis(params["stack"], 1, 0))
    return jnp.mean((y @ params["out"]) ** 2)


LOSSES: dict[str, Loss] = {
    f.__name__: f for f in (plain, shared, regularised, backwards, unfollowed, first_differs, middle)
}


def state_of(name: str) -> Any:
    stack = draw(1, LAYERS, WIDTH, WIDTH)
    params = {"stack": jnp.moveaxis(stack, 0, 1) if name == "middle" else stack, "out": draw(2, WIDTH, WIDTH)}
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(0)}


def step_of(name: str) -> Callable[[Any, Any], Any]:
    def step(state: Any, x: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(LOSSES[name])(state["params"], x)
        updates, opt = OPTIMIZER.update(gradient, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, {"loss": loss}

    return step


def analysed(name: str) -> tuple[BatchAnalysis, Stacks]:
    graph = trace(step_of(name), (state_of(name), draw(4, BATCH, WIDTH)), {}, name=name)
    analysis = analyse_batch(graph, resolve_batch_axes(graph, (None, 0), frozenset()), rule_of)
    return analysis, find_stacks(analysis)


def run(graph: Graph, leaves: Sequence[Any]) -> list[Any]:
    """The results of a graph, cut leaves put together."""
    given: list[Any] = []
    for i, x in enumerate(leaves):
        cut = graph.input_cuts.get(i)
        given += [x] if cut is None else [lax.slice_in_dim(x, *window, axis=cut.axis) for window in cut.windows]
    env = {**graph.constants, **dict(zip(graph.inputs, given, strict=True))}

    def read(v: Operand) -> Any:
        return v.value if isinstance(v, Literal) else env[v]

    for eqn in graph.equations:
        env.update(zip(eqn.outputs, bind(eqn, [read(v) for v in eqn.inputs]), strict=True))
    found = []
    for o, at in enumerate(graph.outputs_of):
        parts = [read(graph.outputs[k]) for k in at]
        found.append(jnp.concatenate(parts, graph.output_cuts[o].axis) if o in graph.output_cuts else parts[0])
    return found


@functools.cache
def whole_results(name: str) -> list[Any]:
    analysis, _ = analysed(name)
    found: list[Any] = jax.jit(functools.partial(run, analysis.graph))(
        jax.tree.leaves((state_of(name), draw(4, BATCH, WIDTH)))
    )
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bounds", [(0, 3, 6), (0, 1, 5, 6), (0, 1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_parts_compute_what_the_loop_computes(name: str, bounds: tuple[int, ...]) -> None:
    analysis, stacks = analysed(name)
    cut = cut_leaves(analysis, stacks.leaf_cuts(dict.fromkeys(stacks.loops, bounds)))
    lengths = [chain.length for e in cut.equations if (chain := chain_of(e)) is not None]
    loops = sum(chain_of(e) is not None for e in analysis.graph.equations)
    assert len(lengths) == loops * (len(bounds) - 1)
    # The weights and both moments are cut; no part of them is put together again.
    assert len(cut.input_cuts) == len(cut.output_cuts) == 3
    assert {c.axis for c in cut.input_cuts.values()} == {1 if name == "middle" else 0}
    size = LAYERS * WIDTH * WIDTH
    joined = [e for e in cut.equations if e.primitive.name == "concatenate" and np.prod(e.outputs[0].shape) >= size]
    assert bool(joined) == (name == "unfollowed")
    leaves = jax.tree.leaves((state_of(name), draw(4, BATCH, WIDTH)))
    found = jax.jit(functools.partial(run, cut))(leaves)
    for path, x, y in zip(cut.output_paths, found, whole_results(name), strict=False):
        # Half precision rounds alike but where sums are in another order.
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5, err_msg=path)


def test_a_sum_along_the_loop_is_not_sent_along() -> None:
    """The shared matrix' gradient: each part of the backward loop starts it at zero."""
    analysis, stacks = analysed("shared")
    cut = cut_leaves(analysis, stacks.leaf_cuts(dict.fromkeys(stacks.loops, (0, 3, 6))))
    loops = [(e, chain) for e in cut.equations if (chain := chain_of(e)) is not None]
    first, second = [(e, chain) for e, chain in loops if chain.reverse]
    (adding,) = first[1].adding
    assert first[0].outputs[adding].shape == (WIDTH, WIDTH)
    assert first[0].outputs[adding] not in second[0].inputs


def test_what_no_loop_over_layers_is_stays_whole() -> None:
    """Over time: the weights are the same in every round. And accumulation over slices of the batch."""

    def recurrent(params: Any, x: jax.Array) -> Any:
        y, _ = lax.scan(lambda h, x: (jnp.tanh(h @ params["out"] + x), None), x, jnp.stack([x] * LAYERS))
        return jnp.mean(y**2) + (params["stack"] ** 2).sum()

    LOSSES["recurrent"] = recurrent
    try:
        assert not analysed("recurrent")[1].leaves
    finally:
        del LOSSES["recurrent"]


def test_finest_cuts() -> None:
    assert finest(6) == (0, 1, 2, 3, 4, 5, 6)
    assert finest(96) == tuple(range(0, 97, 8))
    assert finest(13) == (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13)  # a prime: as even as can be
    assert finest(48, 2) == tuple(range(0, 49, 4))
    assert finest(48, 8) == tuple(range(0, 49, 3))  # two for each host
    assert finest(26, 8) == finest(26)
    assert finest(20, 4) == finest(20)  # four would be too few
    assert finest(96, 384) == tuple(range(0, 97, 6))  # many hosts


def test_cuts_suit_the_number_of_layers_that_is_wanted() -> None:
    assert finest(48, 4, 16) == tuple(range(0, 49, 3))
    assert finest(48, 1, 8) == tuple(range(0, 49, 3))  # two parts a layer
    assert finest(105, 315, 35) == tuple(range(0, 106, 3))
    assert finest(13, 1, 4) == finest(13)  # four layers cannot be alike
    assert finest(13, 1, 20) == tuple(range(14))
    assert finest(48, 2, 1) == finest(48, 2)


@pytest.fixture(scope="module")
def pipeline() -> tuple[Any, Any, Any, list[float]]:
    """Two stages that share the loop: the function, its state after two steps, that of one device, the losses."""
    step = jax.jit(step_of("shared"))
    expected, x, losses = state_of("shared"), draw(4, BATCH, WIDTH), []
    for _ in range(2):
        expected, metrics = step(expected, x)
        losses.append(float(metrics["loss"]))
    method = autopar.recipes.inter_op_only(2)
    piped = autopar.parallelize(
        step_of("shared"), method=method, num_microbatches=2, batch_axes=(None, 0), devices=jax.devices()[:2]
    )
    piped.compile(state_of("shared"), x)
    state = piped.init(lambda: state_of("shared"))
    for loss in losses:
        state, metrics = piped(state, x)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    return piped, state, expected, losses


def test_stages_share_a_loop(pipeline: Any) -> None:
    piped, state, expected, _ = pipeline
    stack = state["params"]["stack"]
    assert isinstance(stack, autopar.Pieces)
    first, middle, last = stack.cut.bounds
    assert (stack.cut.axis, first, last) == (0, 0, LAYERS)
    assert (stack.shape, stack.dtype, stack.ndim) == ((LAYERS, WIDTH, WIDTH), np.float32, 3)
    assert [x.sharding.mesh.devices.item().id for x in stack.pieces] == [0, 1]
    for x, y in zip(jax.tree.leaves(autopar.gather(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(stack), expected["params"]["stack"], rtol=1e-4, atol=1e-5)
    plan = piped.plan(state, draw(4, BATCH, WIDTH))
    assert list(plan.leaf_cuts.values()) == [stack.cut] * 3
    assert f"state['params']['stack'][{middle}:6]" in plan.to_text(None)


def test_a_stage_may_hold_a_loop_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the stages do not fit with the parts joined."""
    finish = Finisher.finish

    def refused(self: Finisher, layered: Layered, placed: PlacedStep, *args: Any, **kw: Any) -> Any:
        return None if layered.num_layers == placed.num_stages else finish(self, layered, placed, *args, **kw)

    monkeypatch.setattr(Finisher, "finish", refused)
    x, losses, expected = draw(4, BATCH, WIDTH), [], state_of("shared")
    options: dict[str, Any] = {"batch_axes": (None, 0), "devices": jax.devices()[:2]}
    piped = autopar.parallelize(
        step_of("shared"), method=autopar.recipes.inter_op_only(2), num_microbatches=2, **options
    )
    piped.compile(state_of("shared"), x)
    monkeypatch.undo()
    state = piped.init(lambda: state_of("shared"))
    for _ in range(2):
        expected, reference = jax.jit(step_of("shared"))(expected, x)
        losses.append(float(reference["loss"]))
        state, metrics = piped(state, x)
        assert float(metrics["loss"]) == pytest.approx(losses[-1], rel=1e-5)
    assert state["params"]["stack"].cut.bounds == tuple(range(LAYERS + 1))
    for actual, wanted in zip(jax.tree.leaves(autopar.gather(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
    plan = autopar.Plan.from_json(piped.plan(state, x).to_json())
    again = autopar.parallelize(step_of("shared"), method=plan, **options)
    assert again.plan(state, x) == plan

    def evaluate(state: Any, x: jax.Array) -> Any:
        return shared(state["params"], x)

    following = autopar.parallelize(evaluate, follow=piped, batch_axes=(None, 0))
    loss = following(state, x)
    _, metrics = again(state, x)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)


def test_a_plan_that_fits_is_kept_where_the_same_in_parts_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Finisher.finish
    made: list[Any] = []

    def too_slow_after_the_first(self: Finisher, *args: Any, **kw: Any) -> Any:
        if made and "below" in kw:
            raise TooSlow
        made.append(finish(self, *args, **kw))
        return made[-1]

    monkeypatch.setattr(Finisher, "finish", too_slow_after_the_first)
    monkeypatch.setattr("autopar.planning.evaluator._is_dear", lambda *_: True)
    piped = autopar.parallelize(
        step_of("shared"), method=autopar.recipes.inter_op_only(2), num_microbatches=2, batch_axes=(None, 0),
        devices=jax.devices()[:2],
    )  # fmt: skip
    plan = piped.plan(state_of("shared"), draw(4, BATCH, WIDTH))
    assert plan.step_time <= made[0][0].step_time


def test_what_follows_a_cut_state(pipeline: Any) -> None:
    piped, state, expected, _ = pipeline
    x = draw(4, BATCH, WIDTH)

    def evaluate(state: Any, x: jax.Array) -> Any:
        return {"loss": shared(state["params"], x), "largest": jnp.abs(state["params"]["stack"]).max()}

    found = autopar.parallelize(evaluate, follow=piped, batch_axes=(None, 0))(state, x)
    for name, value in jax.jit(evaluate)(expected, x).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


def test_a_saved_plan_cuts_again(pipeline: Any) -> None:
    piped, state, _, _ = pipeline
    x = draw(4, BATCH, WIDTH)
    text = piped.plan(state, x).to_json()
    plan = autopar.Plan.from_json(text)
    again = autopar.parallelize(
        step_of("shared"), method=plan, batch_axes=(None, 0), devices=jax.devices()[:2], donate_argnums=()
    )
    assert again.plan(state, x) == plan
    gathered = autopar.gather(state)
    _, metrics = again(gathered, x)  # a whole state is cut as the plan says
    _, same = again(state, x)
    assert float(metrics["loss"]) == float(same["loss"])
    _, middle, last = state["params"]["stack"].cut.bounds
    with pytest.raises(PlanError, match="the pieces of a leaf one after the other"):
        autopar.Plan.from_json(text.replace(f'"window":[0,{middle},{last}]', f'"window":[0,{middle - 1},{last - 1}]'))


def test_a_function_that_keeps_the_leaf_whole_says_so(pipeline: Any) -> None:
    _, state, _, _ = pipeline
    x = draw(4, BATCH, WIDTH)
    other = autopar.parallelize(step_of("shared"), method=autopar.recipes.data_parallel(), batch_axes=(None, 0))
    with pytest.raises(StateError, match=r"^state\[.*'stack'\] lies in pieces \(0, ., 6\) of .* whole.*gather"):
        other(state, x)


@pytest.mark.parametrize("scan", [False, True])
def test_inference_is_a_pipeline_of_forward_passes(scan: bool) -> None:
    def predict(params: Any, x: jax.Array) -> Any:
        if scan:
            x, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["stack"])
        else:
            for w in params["stack"]:
                x = x + jnp.tanh(x @ w)
        return {"scores": jax.nn.softmax(x @ params["out"]), "largest": jnp.abs(x).max()}

    params, x = state_of("plain")["params"], draw(4, BATCH, WIDTH)
    piped = autopar.parallelize(
        predict, method=autopar.recipes.inter_op_only(2), num_microbatches=2, batch_axes=(None, 0),
        devices=jax.devices()[:2],
    )  # fmt: skip
    plan = piped.plan(params, x)
    assert (len(plan.stages), plan.num_microbatches, len(plan.leaf_cuts)) == (2, 2, int(scan))
    for y, expected in zip(jax.tree.leaves(piped(params, x)), jax.tree.leaves(predict(params, x)), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def two_devices(step: Any, microbatches: int, stages: int = 2) -> Any:
    return autopar.parallelize(
        step, method=autopar.recipes.inter_op_only(stages), num_microbatches=microbatches, batch_axes=(None, 0),
        devices=jax.devices()[:stages],
    )  # fmt: skip


def descended(loss: Loss) -> Callable[[Any, Any], Any]:
    def step(params: Any, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return step


def penalised(params: Any, x: jax.Array) -> Any:
    """Partial sums in a carry: whole, the loop keeps them; its parts would hand them on."""

    def layer(carry: Any, w: jax.Array) -> Any:
        h, penalty = carry
        h = h + jnp.tanh(h @ w)
        return (h, 0.9 * penalty + (h**2).mean()), None

    (y, penalty), _ = lax.scan(layer, (x, jnp.float32(0)), params["stack"])
    return jnp.mean(y**2) + penalty


def counted(params: Any, x: jax.Array) -> Any:
    """A result of the loop that is alike in all microbatches, in the gradient."""

    def layer(carry: Any, w: jax.Array) -> Any:
        h, n = carry
        return (h + jnp.tanh(h @ w), n + 1), None

    (y, n), _ = lax.scan(layer, (x, jnp.int32(0)), params["stack"])
    return jnp.mean(y**2) * n


def test_what_its_parts_would_couple_stays_one_loop() -> None:
    message = r"the loop over layers at .*test_stacks.py:.* is not cut between stages .* sum over the batch with single"
    with pytest.warns(UnsplitWarning, match=message) as caught:
        check_two_microbatches(penalised, autopar.parallelize, method="auto", num_microbatches=2, batch_axes=(None, 0))
    assert len(caught) == 1


def balanced(params: Any, x: jax.Array) -> Any:
    """An auxiliary loss, added to in two steps by layers that are computed anew in the backward pass."""

    @jax.checkpoint
    def layer(carry: Any, w: jax.Array) -> Any:
        h, auxiliary = carry
        h = h + jnp.tanh(h @ w)
        auxiliary += 0.1 * (h**2).mean()
        return (h, auxiliary + jnp.abs(h).mean()), None

    (y, auxiliary), _ = lax.scan(layer, (x, 0.0), params["stack"])
    return jnp.mean(y**2) + auxiliary


def test_an_auxiliary_loss_starts_at_zero_in_every_part() -> None:
    check_two_microbatches(balanced, lambda step: two_devices(step, 2))
    step, x = descended(balanced), draw(4, BATCH, WIDTH)
    assert len(two_devices(step, 2).plan({"stack": draw(1, LAYERS, WIDTH, WIDTH)}, x).leaf_cuts) == 1


def test_what_rounds_only_add_to() -> None:
    def rounds(fun: Callable[[Any, Any], Any]) -> frozenset[int]:
        graph = trace(lambda a, xs: lax.scan(lambda a, x: (fun(a, x), None), a, xs), (1.0, draw(1, 3)), {}, name="sum")
        (chain,) = map(chain_of, graph.equations)
        assert chain is not None
        return chain.adding

    assert rounds(lambda a, x: a + x) == rounds(lambda a, x: x + a) == rounds(lambda a, x: a - x) == {0}
    assert rounds(jax.jit(lambda a, x: (a + x) + x**2)) == {0}
    assert rounds(lambda a, x: x - a) == rounds(lambda a, x: a + a) == rounds(lambda a, x: a + x * a) == set()
    assert rounds(lambda a, x: 0.9 * a + x) == set()


def test_counts_of_a_loop_reach_the_gradient() -> None:
    check_two_microbatches(counted, lambda step: two_devices(step, 2))


def check_two_microbatches(loss: Loss, parallelize: Callable[..., Any], **options: Any) -> None:
    params, x = {"stack": draw(1, LAYERS, WIDTH, WIDTH)}, draw(4, BATCH, WIDTH)
    expected, value = jax.jit(descended(loss))(params, x)
    found, got = parallelize(descended(loss), **options)(params, x)
    assert float(autopar.gather(got)) == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(np.asarray(autopar.gather(found)["stack"]), expected["stack"], rtol=1e-4, atol=1e-5)


def test_what_follows_may_meet_leaves_that_lie_whole() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(lambda w: plain({"stack": w, "out": state["out"]}, x))(state["w"])
        return {**state, "w": state["w"] - 0.1 * g}, value

    def average(state: Any, x: jax.Array) -> Any:
        return {**state, "average": 0.9 * state["average"] + 0.1 * state["w"]}, x.sum()

    stack = draw(1, LAYERS, WIDTH, WIDTH)
    state = {"w": stack, "average": jnp.array(stack), "out": draw(2, WIDTH, WIDTH)}
    x = draw(4, BATCH, WIDTH)
    expected, _ = jax.jit(average)(jax.jit(step)(state, x)[0], x)
    piped = two_devices(step, 1)
    state, _ = piped(state, x)
    state, _ = autopar.parallelize(average, follow=piped, batch_axes=(None, 0))(state, x)
    for y, wanted in zip(jax.tree.leaves(autopar.gather(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


def test_two_loops_over_the_same_weights_fill_all_stages() -> None:
    def twice(params: Any, x: jax.Array) -> Any:
        for _ in range(2):
            x, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["stack"])
        return jnp.mean(x**2)

    params, x = {"stack": draw(1, LAYERS, WIDTH, WIDTH)}, draw(4, BATCH, WIDTH)
    plan = two_devices(descended(twice), 2, stages=4).plan(params, x)
    assert all(stage.equations[1] > stage.equations[0] for stage in plan.stages)
