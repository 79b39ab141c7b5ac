"""State that is gone, lies elsewhere, is lost or is not there yet: one clear error each."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

import autopar
from autopar import recipes
from autopar.errors import PlanError, PlanMismatchError, StateError, StateLostError
from autopar.ir.instructions import Run
from tests.two_layers import assert_close, examples, mean_square, params, train_step


def test_donated_state_used_again() -> None:
    step = autopar.parallelize(train_step, method=recipes.data_parallel(), devices=jax.devices()[:2])
    state, _ = step(params(), examples())
    newer, _ = step(state, examples())
    message = "p['v'] was donated to an earlier step and is gone. Use the state that that step returned, or pass donate"
    with pytest.raises(StateError, match=re.escape(message)):
        step(state, examples())
    step(newer, examples())


def test_state_that_lies_elsewhere() -> None:
    one = autopar.parallelize(train_step, method=recipes.data_parallel(), devices=jax.devices()[:2])
    two = autopar.parallelize(train_step, method=recipes.zero(3), devices=jax.devices()[:4])
    state, _ = one(params(), examples())
    two.compile(params(), examples())
    with pytest.raises(StateError, match=r"^p\['v'\] lies on 2 devices as .* but the plan keeps it as .* never moved"):
        two(state, examples())
    _, loss = two(autopar.gather(state), examples())
    assert float(loss) == pytest.approx(float(jax.jit(train_step)(autopar.gather(state), examples())[1]), rel=1e-5)


class Broken(Exception):
    """Stands for what a device may raise."""


def broken(*args: Any) -> Any:
    raise Broken


@pytest.fixture
def pipeline() -> Any:
    """A compiled two-stage pipeline with its state on the devices: (step, executable of the runtime, state)."""
    step = autopar.parallelize(train_step, method=recipes.gpipe(2, 2), devices=jax.devices()[:2])
    state, _ = step(params(), examples())
    return step, step.compile(params(), examples())._worker, state


def test_failure_in_the_backward_pass_leaves_the_state(pipeline: Any) -> None:
    step, runtime, state = pipeline
    wanted = jax.jit(train_step)(autopar.gather(state), examples())
    # The last stage's forward and backward pass are one program, run once for each of two microbatches.
    first, second = [
        i.program
        for i in runtime.wiring.instructions.instructions
        if isinstance(i, Run) and i.stage == 1 and i.phase.in_loop
    ]
    assert first == second
    runs = iter([runtime._calls[first], broken])
    call, runtime._calls[first] = runtime._calls[first], lambda *args: next(runs)(*args)
    with pytest.raises(Broken):
        step(state, examples())
    assert next(runs, None) is None
    runtime._calls[first] = call
    assert_close(step(state, examples()), wanted)


def test_failure_in_the_update_loses_the_state(pipeline: Any) -> None:
    """Both stages update; the one that comes last finds the other's leaf given away."""
    step, runtime, state = pipeline
    updates = [i for i in runtime.wiring.instructions.instructions if isinstance(i, Run) and not i.phase.in_loop]
    assert {i.stage for i in updates} == {0, 1}
    runtime._calls[updates[-1].program] = broken
    with pytest.raises(StateLostError) as caught:
        step(state, examples())
    text = "the step failed after 1 leaves of the state, among them p['w'], had been given to update programs, so that"
    assert str(caught.value).startswith(text)
    assert "restore it from a checkpoint. With donate_argnums=() a step keeps the old state" in str(caught.value)
    assert isinstance(caught.value.__cause__, Broken)


def test_init_and_follow_need_a_plan() -> None:
    step = autopar.parallelize(train_step)
    with pytest.raises(PlanError, match=r"^init: train_step has no plan yet\. Call train_step\.compile\(state, "):
        step.init(params)
    follower = autopar.parallelize(mean_square, follow=step)
    with pytest.raises(PlanError, match=r"^follow: train_step has no plan yet, so that mean_square cannot know where"):
        follower(params(), examples())


def test_init_of_something_else() -> None:
    step = autopar.parallelize(train_step, method=recipes.data_parallel(), devices=jax.devices()[:1])
    step.compile(params(), examples())
    with pytest.raises(PlanError, match=r"^init: what init_fn returns, .* with 2 leaves, has the structure and"):
        step.init(lambda: params(width=4))


def test_executable_called_with_something_else() -> None:
    executable = autopar.parallelize(train_step, devices=jax.devices()[:1]).compile(params(), examples())
    with pytest.raises(PlanMismatchError, match=re.escape("compiled for batch['x'] of float32[8, 16], called with")):
        executable(params(), examples(4))
    with pytest.raises(PlanMismatchError, match=r"^train_step was compiled for arguments of structure .*, called with"):
        executable(params(), examples()["x"])
