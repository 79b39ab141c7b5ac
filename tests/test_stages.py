"""Trace, plan and compile, one after the other, and ahead of the arrays."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.errors import PlanMismatchError
from autopar.ir.graph import Graph
from autopar.planning.planner import Planner
from tests.small_steps import (
    DATA_PARALLEL,
    ONE,
    PIPELINE,
    ZERO,
    assert_close,
    batch_of,
    init,
    parallelized,
    placements,
    reference,
    rows,
    sgd,
    shapes_of,
    train_step,
    weights,
)


def test_stages_need_no_arrays_and_no_devices() -> None:
    """Shapes only, for a cluster that is not there."""
    args = shapes_of((weights(), rows(64)))
    step = autopar.parallelize(sgd, cluster=autopar.load_preset("dgx-a100", devices_per_host=16))
    assert isinstance(step.trace(*args).graph, Graph)
    assert step.plan(*args).cluster.num_devices == 16
    assert step.plan(*args, method=recipes.zero(2)).method == "zero_2"
    assert step.plan(*args, cluster=autopar.load_preset("dgx-h100")).num_devices <= 8


def test_a_plan_that_was_looked_at_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = autopar.parallelize(sgd, **ONE)
    args = shapes_of((weights(), rows()))
    plan = step.plan(*args)
    monkeypatch.setattr(Planner, "plan", None)
    assert step.compile(*args).plan == plan


def test_an_edited_plan_runs_as_edited() -> None:
    """Whether it is compiled, or read from its file."""
    shapes = jax.eval_shape(init, jax.random.key(0)), shapes_of(batch_of())
    plan = parallelized(PIPELINE).plan(*shapes)
    edited = dataclasses.replace(plan, num_microbatches=4)
    executable = edited.compile()
    assert executable.plan == parallelized(PIPELINE).plan(*shapes, method=edited)
    assert executable.plan.num_microbatches == 4 and executable.plan.step_time != plan.step_time
    assert executable.instruction_count > plan.compile().instruction_count
    assert_close(executable(reference()[0], batch_of())[0], reference()[1])


def test_plan_of_a_step_that_runs() -> None:
    """The very plan; another cluster or method asked for is planned beside it."""
    step = autopar.parallelize(sgd, **ONE)
    state, _ = step(weights(), rows())
    executable = step.compile(state, rows())
    assert step.plan(state, rows()) is executable.plan
    assert step.plan(state, rows(), method=recipes.intra_op_only()).method == "intra_op_only"
    assert step.plan(state, rows(), cluster=autopar.load_preset("dgx-a100")).cluster.name == "dgx-a100"
    assert executable.instruction_count >= 1


def test_plan_made_before() -> None:
    """Planned for shapes in one place, run in another; other shapes follow it."""
    plan = parallelized(ZERO).plan(jax.eval_shape(init, jax.random.key(0)), shapes_of(batch_of()))
    step = autopar.parallelize(train_step, method=plan)
    state, _ = step(reference()[0], batch_of())
    assert_close(state, reference()[1])
    home = placements(state)
    state, _ = step(state, batch_of(4))
    assert_close(state, reference()[2])
    assert placements(state) == home


def test_a_plan_for_more_devices_than_the_state_has() -> None:
    state, batch = shapes_of(reference()[0]), batch_of()
    step = parallelized(DATA_PARALLEL)
    step.compile(state, shapes_of(batch))
    traced = step.trace(state, shapes_of(batch_of(16)))
    plan = traced.plan(cluster=autopar.load_preset("dgx-a100"), method=DATA_PARALLEL)
    with pytest.raises(PlanMismatchError, match="the plan is for 8 devices, there are 4"):
        traced.compile(plan)


def test_executable() -> None:
    executable = autopar.parallelize(sgd, **ONE, donate_argnums=()).compile(*shapes_of((weights(), rows())))
    assert_close(executable(weights(), rows()), sgd(weights(), rows()))
    assert "all-reduce" in "".join(executable.as_text().values())
    assert executable.dispatch_seconds > 0


def test_who_trains_alone_is_told_once_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way a step comes to be compiled: at the user's line."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    args = weights(), rows()
    ways: list[Callable[[autopar.Parallelized], Any]] = [
        lambda step: step(*args),
        lambda step: step.compile(*args),
        lambda step: step.trace(*args).compile(),
        lambda step: step.plan(*args).compile(),
    ]
    for way in ways:
        with pytest.warns(UserWarning, match="this process is 0 of 2 by its launcher's variables") as found:
            way(autopar.parallelize(sgd, **ONE))
        assert [warning.filename for warning in found] == [__file__]


def test_a_planner_does_not_outlive_its_plan() -> None:
    @autopar.parallelize
    def step(state: Any, batch: Any) -> Any:
        return state - jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ w)))(state)

    made: list[weakref.ref[Planner]] = []
    make = Planner.__init__

    def noted(planner: Planner, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(planner))
        make(planner, *args, **options)

    gc.freeze()  # a search through what all tests before have left takes many seconds
    try:
        with mock.patch.object(Planner, "__init__", noted):
            step.plan(jnp.zeros((8, 8)), jnp.zeros((16, 8)))
        gc.collect()
    finally:
        gc.unfreeze()
    assert made
    assert not any(planner() for planner in made)
