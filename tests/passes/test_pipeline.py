"""Placement: stages of equations, homes of the state, and an acyclic graph of programs."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.ir.graph import Phase, Value
from autopar.ir.program import PlacedStep
from autopar.ir.schedule import make_schedule
from autopar.passes.batch import analyse_batch
from autopar.passes.batch_axes import resolve_batch_axes
from autopar.passes.microbatch import split_batch
from autopar.passes.pipeline import place
from autopar.passes.rules.table import rule_of
from autopar.tracing.trace import trace

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
LAYERS = 4


def _loss(params: Any, batch: Any) -> jax.Array:
    """Tied first and last weights, and a skip over all layers."""
    first = x = batch["x"] @ params["tied"]
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean(((x + first) @ params["tied"].T - batch["y"]) ** 2)


def _step(state: Any, batch: Any) -> Any:
    params, moments = state
    loss, grads = jax.value_and_grad(_loss)(params, batch)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": loss}


def _placed(num_stages: int, num_microbatches: int) -> PlacedStep:
    params = {"tied": jnp.zeros((6, 6)), "layers": [jnp.zeros((6, 6))] * LAYERS}
    batch = {"x": jnp.zeros((8, 6)), "y": jnp.zeros((8, 6))}
    graph = trace(_step, ((params, OPTIMIZER.init(params)), batch), {}, name="step")
    step = split_batch(analyse_batch(graph, resolve_batch_axes(graph, "auto"), rule_of), num_microbatches)
    forward = [e for e in step.equations if e.phase is Phase.FORWARD and e.id not in step.replicable]
    stages, products = {}, 0
    for eqn in forward:  # the first product is the tied one, with the first layer
        products += eqn.primitive.name == "dot_general"
        stages[eqn.id] = min((max(products, 2) - 2) * num_stages // LAYERS, num_stages - 1)
    return place(step, stages, num_stages, {})


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 4])
class TestPlacement:
    """What holds for every cut of a step with tied weights, a skip and a global norm."""

    def test_programs_are_in_topological_order(self, num_stages: int, num_microbatches: int) -> None:
        placed = _placed(num_stages, num_microbatches)
        given = {*placed.home, *placed.step.feeds, placed.step.microbatch}
        for program in placed.programs:
            made = set[Value]()
            for eqn in program.equations:
                for v in eqn.values:
                    at = placed.producer.get(v, -1)
                    assert v in made or v in given or at < program.index, (program.name, eqn)
                made.update(eqn.outputs)

    def test_every_output_is_made_once(self, num_stages: int, num_microbatches: int) -> None:
        placed = _placed(num_stages, num_microbatches)
        for out in placed.step.outputs:
            assert isinstance(out, Value)
            assert out in placed.producer
        copied = placed.step.replicable
        made = [v for p in placed.programs for e in p.equations if e.id not in copied for v in e.outputs]
        assert len(made) == len(set(made))

    def test_forward_stages_rise_and_backward_stages_fall(self, num_stages: int, num_microbatches: int) -> None:
        placed = _placed(num_stages, num_microbatches)
        step = placed.step
        at = {e.id: p.stage for p in placed.programs for e in p.equations if e.id not in step.replicable}
        made = {v: e for e in step.equations for v in e.outputs}
        for eqn in step.equations:
            for v in eqn.values:
                source = made.get(v)
                if source is None or {eqn.id, source.id} & step.replicable or source.phase is not eqn.phase:
                    continue
                if eqn.phase is Phase.FORWARD:
                    assert at[source.id] <= at[eqn.id]
                elif eqn.phase is Phase.BACKWARD:
                    assert at[source.id] >= at[eqn.id]

    def test_state_lives_where_it_is_renewed(self, num_stages: int, num_microbatches: int) -> None:
        placed = _placed(num_stages, num_microbatches)
        graph = placed.step.graph
        homes = {}
        for k, i in graph.carried.items():
            out = placed.step.outputs[k]
            assert isinstance(out, Value)
            assert placed.stage_of(out) == placed.home[graph.inputs[i]], graph.input_paths[i]
            homes[graph.input_paths[i]] = placed.home[graph.inputs[i]]
        for layer, moment in itertools.product(range(LAYERS), ("mu", "nu")):
            weight = homes[f"state[0]['layers'][{layer}]"]
            assert weight == layer * num_stages // LAYERS
            assert [s for p, s in homes.items() if moment in p and f"['layers'][{layer}]" in p] == [weight]


def test_the_tied_gradient_is_summed_once_a_step() -> None:
    """Each stage accumulates its own partial sum; their sum is an update equation, not one of each microbatch."""
    placed = _placed(2, 4)
    totals = set(placed.step.accumulate.values())
    assert all(v.shape != (6, 6) or placed.stage_of(v) in (0, 1) for v in totals)
    sums = [
        e for p in placed.programs if p.phase is Phase.UPDATE for e in p.equations
        if e.primitive.name == "add_any" and all(v in totals for v in e.values)
    ]  # fmt: skip
    assert len(sums) == 1
    assert {placed.stage_of(v) for v in sums[0].values} == {0, 1}


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_zeros_to_add_to_are_made_where_they_are_read(rate: float) -> None:
    """A look-up's gradient is added to zeros as large as the table: nothing of its size goes from stage to stage.

    Nor where a later stage depends on the number of the microbatch, as these zeros do, by what it draws for dropout.
    """

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = params["table"][batch["tokens"]]
            for i, w in enumerate(params["layers"]):
                x = jnp.tanh(x @ w)
                if rate:
                    x = jnp.where(jax.random.bernoulli(jax.random.fold_in(batch["key"], i), rate, x.shape), x, 0)
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {"table": jnp.zeros((50, 6), jnp.bfloat16), "layers": [jnp.zeros((6, 6), jnp.bfloat16)] * LAYERS}
    batch = {"tokens": jnp.zeros((8, 3), jnp.int32), "key": jax.random.key(0)}
    graph = trace(step, (params, batch), {}, name="step")
    split = split_batch(analyse_batch(graph, resolve_batch_axes(graph, "auto"), rule_of), 4)
    forward = [e for e in split.equations if e.phase is Phase.FORWARD and e.id not in split.replicable]
    placed = place(split, {e.id: int(i >= len(forward) // 2) for i, e in enumerate(forward)}, 2, {})
    loop = [p for p in placed.programs if p.in_loop]
    assert {p.stage for p in loop} == {0, 1}
    made = {v: p.stage for p in loop for v in p.outputs}
    sent = [v for p in loop for v in p.inputs if v in made and made[v] != p.stage]
    assert sent
    assert all(v.shape != (50, 6) for v in sent)


def test_one_stage_with_one_microbatch_is_one_program() -> None:
    assert [p.name for p in _placed(1, 1).programs] == ["step"]


@pytest.mark.parametrize(
    ("name", "in_flight"), [("gpipe", [4, 4, 4]), ("1f1b", [3, 2, 1]), ("zero-bubble", [3, 3, 3])]
)  # microbatches whose activations a stage of three holds
def test_schedules(name: Any, in_flight: list[int]) -> None:
    schedule = make_schedule(name, 3, 4)
    assert [schedule.in_flight(stage) for stage in range(3)] == in_flight
    for row in schedule.tasks:
        for phase in (Phase.FORWARD, Phase.BACKWARD, *([Phase.WEIGHTS] * schedule.weights_apart)):
            assert [t.microbatch for t in row if t.phase is phase] == [0, 1, 2, 3]
