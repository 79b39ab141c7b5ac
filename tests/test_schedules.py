"""Schedules of one's own: what they must do, and that they are priced, held in memory and run as they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import InfeasiblePlanError, PlanError, UserError
from autopar.ir import schedule as schedules
from autopar.ir.schedule import Order, make_schedule
from autopar.passes.stage_oracle import in_flight
from tests.models import mlp_batch, mlp_loss, mlp_params, sgd
from tests.planned import cluster_of
from tests.small_steps import assert_close

WIDTHS = [32] * 5
Tasks = Iterable[tuple[str, int]]


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_REGISTERED", {})


def alternating(warmup: int, microbatches: int) -> list[tuple[str, int]]:
    """So many forward passes first, then backward and forward passes in turn."""
    backward = [("backward", i) for i in range(microbatches)]
    forward = [("forward", i) for i in range(microbatches)]
    tasks = forward[:warmup]
    for i, task in enumerate(backward):
        tasks += [task, *forward[warmup + i : warmup + i + 1]]
    return tasks


def eager(stage: int, stages: int, microbatches: int) -> Tasks:
    """1F1B with twice as many microbatches under way, which hides what is sent."""
    return alternating(min(microbatches, 2 * (stages - stage) - 1), microbatches)


def test_it_is_run_priced_and_held_in_memory_as_it_says() -> None:
    @autopar.register_schedule("eager")
    def order(stage: int, stages: int, microbatches: int) -> Tasks:
        return eager(stage, stages, microbatches)

    state, batch = mlp_params(WIDTHS), mlp_batch(32, WIDTHS)
    step = sgd(mlp_loss)
    plans = {}
    for name in ("1f1b", "eager"):
        method = recipes.pipeline([(1, (2,))] * 4, num_microbatches=8, schedule=name)
        parallel = autopar.parallelize(step, method=method)
        plans[name] = parallel.plan(state, batch)
        assert plans[name].schedule == name
        assert_close(parallel(state, batch), jax.jit(step)(state, batch))
    held = {name: [stage.memory.activations for stage in plan.stages] for name, plan in plans.items()}
    assert all(more > few for more, few in zip(held["eager"][:-1], held["1f1b"][:-1], strict=True))
    # A file has its name, and is read where it is registered.
    again = autopar.Plan.from_json(plans["eager"].to_json())
    assert again == plans["eager"]
    schedules._REGISTERED.clear()
    with pytest.raises(PlanError, match=r'schedule.*"eager".*one of "1f1b", "gpipe"'):
        autopar.Plan.from_json(plans["eager"].to_json())


def test_auto_searches_with_it() -> None:
    autopar.register_schedule("eager")(eager)
    state, batch = jax.eval_shape(lambda: (mlp_params(WIDTHS), mlp_batch(32, WIDTHS)))
    method = recipes.auto(schedule="eager", num_stages=2, num_microbatches=4)
    plan = autopar.parallelize(sgd(mlp_loss)).plan(state, batch, cluster=cluster_of(1, 8), method=method)
    assert (plan.schedule, len(plan.stages)) == ("eager", 2)
    with pytest.raises(PlanError, match="schedule must be one of 1f1b, gpipe, zero-bubble, eager"):
        recipes.auto(schedule="lazy")
    with pytest.raises(PlanError, match="schedule must be one of 1f1b, gpipe, interleaved, zero-bubble, eager"):
        recipes.pipeline([(1, (2,))], schedule="lazy")


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (4, 1), (3, 5), (4, 16)])
def test_those_of_the_literature_are_allowed(stages: int, microbatches: int) -> None:
    """As they are built in."""
    autopar.register_schedule("my gpipe")(lambda stage, n, m: alternating(m, m))
    autopar.register_schedule("my 1f1b")(lambda stage, n, m: alternating(min(m, n - stage), m))
    for name in ("gpipe", "1f1b"):
        assert (
            make_schedule(f"my {name}", stages, microbatches).tasks == make_schedule(name, stages, microbatches).tasks
        )


def _generated(tasks: Tasks) -> Iterator[Any]:
    yield from tasks


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda s, n, m: alternating(m, m)[:-1], r"stage 0 does \('backward', 3\) 0 times; everything must be done"),
        (lambda s, n, m: [*alternating(m, m), ("forward", 2)], r"stage 0 does \('forward', 2\) 2 times"),
        (lambda s, n, m: [("forwards", 0)], r"stage 0 does \('forwards', 0\); it must do \('forward', i\) and"),
        (lambda s, n, m: _generated(alternating(m + 1, m + 1)), r"stage 0 does \('forward', 4\).*i from 0 to 3"),
        (lambda s, n, m: [("forward", 0.5)], r"stage 0 must do .*; task 0 cannot be read: 'float' object"),
        (lambda s, n, m: [("forward", 0), "backward"], r"stage 0 must do .*; task 1 cannot be read: too many values"),
        (lambda s, n, m: None, r"stage 0 must do .*; task 0 cannot be read: 'NoneType' object is not iterable"),
    ],
)  # fmt: skip
def test_what_is_not_everything_is_refused(order: Order, message: str) -> None:
    autopar.register_schedule("mine")(order)
    with pytest.raises(UserError, match=rf"schedule 'mine' of 2 stages and 4 microbatches: {message}"):
        make_schedule("mine", 2, 4)


def _reversed(stage: int, stages: int, microbatches: int) -> Any:
    """One microbatch at a time; the last stage takes them the other way round."""
    order = range(microbatches) if stage < stages - 1 else reversed(range(microbatches))
    return [(phase, i) for i in order for phase in ("forward", "backward")]


def test_stages_that_wait_for_one_another_are_refused() -> None:
    autopar.register_schedule("mine")(_reversed)
    state, batch = jax.eval_shape(lambda: (mlp_params(WIDTHS), mlp_batch(32, WIDTHS)))
    step = autopar.parallelize(sgd(mlp_loss), method=recipes.pipeline([(2, (4,))] * 2, 4, "mine"))
    message = (
        r"'mine' deadlocks: backward\(stage 0, microbatch 0\) waits for forward\(stage 1, microbatch 0\); "
        r"forward\(stage 1, microbatch 3\) waits for forward\(stage 0, microbatch 3\)"
    )
    with pytest.raises(UserError, match=message):
        step.plan(state, batch)


def _one_by_one(stage: int, stages: int, microbatches: int) -> Any:
    """Each stage has one microbatch under way."""
    return [(phase, i) for i in np.arange(microbatches) for phase in ("forward", "backward")]


def test_the_search_counts_the_microbatches_that_it_holds() -> None:
    """By 1F1B the first stages would not fit."""
    autopar.register_schedule("mine")(eager)
    assert [in_flight("mine", 8, stages) for stages in (1, 2, 4)] == [1, 3, 7]
    autopar.register_schedule("mine")(_one_by_one)
    assert [in_flight("mine", 8, stages) for stages in (1, 2, 4)] == [1, 1, 1]
    widths = [64] * 9
    state, batch = jax.eval_shape(lambda: (mlp_params(widths), mlp_batch(8192, widths)))
    step = autopar.parallelize(sgd(mlp_loss), cluster=cluster_of(1, 8))
    given = step.plan(state, batch, method=recipes.pipeline([(1, (1,))] * 8, 8, "mine"))
    limit = int(1.02 * given.peak_memory)
    options: dict[str, Any] = {"num_stages": 8, "num_microbatches": 8, "remat": False, "memory_limit": limit}
    assert step.plan(state, batch, method=recipes.auto(**options, schedule="mine")).peak_memory <= limit
    with pytest.raises(InfeasiblePlanError):
        step.plan(state, batch, method=recipes.auto(**options, schedule="1f1b"))


def test_stages_do_not_share_devices() -> None:
    autopar.register_schedule("mine")(eager)
    with pytest.raises(UserError, match="each stage needs devices of its own"):
        make_schedule("mine", 4, 4, 2)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "", 3])
def test_names_that_are_refused(name: Any) -> None:
    with pytest.raises(UserError, match="register_schedule takes a name that is not 1f1b"):
        autopar.register_schedule(name)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(UserError, match="schedule 'mine' must be a function"):
        autopar.register_schedule("mine")([("forward", 0)])  # type: ignore[arg-type]
