"""Steps that are watched: what they compute, when it is looked at them, what is said."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar import watching
from autopar.errors import ArgumentError, PlanError
from autopar.runtime import pulse, spent
from autopar.runtime.pulse import Part
from tests.clock import Clock


def train_step(w: Any, batch: Any) -> Any:
    """A product."""
    return w - 0.1 * (batch @ w).mean(), batch.mean()


W: Any = np.ones((16, 16), np.float32)
BATCH = np.ones((16, 16), np.float32)


def watched(monkeypatch: pytest.MonkeyPatch, factors: list[float]) -> tuple[Any, list[autopar.Slowdown]]:
    """A step that it is looked at each 10 seconds, and what it says.

    `factors`: of the products of device 5, by the number of the measurement; all else is as it was.
    """
    left = iter(factors)
    monkeypatch.setattr(pulse, "readings", lambda devices, _: {
        **{Part("products", i): 1e-3 for i in range(len(devices))}, Part("products", 5): 1e-3 * next(left)
    })  # fmt: skip
    said: list[autopar.Slowdown] = []
    return autopar.watch(autopar.parallelize(train_step), slower=1.5, every=10.0, to=said.append, start=1000), said


def run(step: Any, w: Any, clock: Clock, *seconds: float) -> Any:
    """Steps that take so long each."""
    for each in seconds:
        clock.now += each
        w, _ = step(w, BATCH)
    return w


def test_a_step_that_becomes_slower_is_told_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    step, said = watched(monkeypatch, [1.0, 2.5])
    # The first plans and compiles; after five it is known how many there are between two looks, ten.
    w = run(step, W, clock, 99.0, *[1.0] * 5, *[1.0] * 10, *[2.0] * 10)
    assert not said
    w = run(step, w, clock, *[2.0] * 5)  # 20 seconds for ten steps: the next look is after five
    (slowdown,) = said
    assert (slowdown.step, slowdown.step_seconds, slowdown.usual_seconds) == (1031, 2.0, 1.0)
    assert slowdown.parts == {Part("products", 5): pytest.approx(2.5)}
    assert "Slower than before: products on device 5 (process 0 on " in str(slowdown)
    expected = W
    for _ in range(31):
        expected, _ = jax.jit(train_step)(expected, BATCH)
    np.testing.assert_allclose(w, expected, rtol=1e-5)


def test_time_in_input_and_checkpoints_is_not_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    step, said = watched(monkeypatch, [1.0])
    monkeypatch.setattr(spent._SPENT, "seconds", {"input": 0.0, "checkpoints": 0.0})
    w = run(step, W, clock, 99.0, *[1.0] * 15)
    for _ in range(30):
        spent._SPENT.seconds["input"] += 3.0
        spent._SPENT.seconds["checkpoints"] += 4.0
        w = run(step, w, clock, 8.0)
    assert not said


def test_other_shapes_are_another_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    step, said = watched(monkeypatch, [1.0, 1.0])
    w = run(step, W, clock, 99.0, *[1.0] * 15)
    for each in (99.0, *[20.0] * 9):
        clock.now += each
        w, _ = step(w, BATCH[:8])
    assert not said


def test_it_is_said_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    watching.say(autopar.Slowdown("train", 7, 2.0, 1.0, {}, False, (), ()))
    assert "autopar: train 7: a step takes 2.00 times as long" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"slower": 1}, {"slower": "2"}, {"every": 0}, {"slower": float("nan")}])
def test_numbers_that_make_no_sense(options: Any) -> None:
    with pytest.raises(ArgumentError, match=r"watch\((slower|every)="):
        autopar.watch(autopar.parallelize(train_step), **options)


def test_a_plain_function() -> None:
    plain: Any = train_step
    with pytest.raises(PlanError, match="make it a step by autopar"):
        autopar.watch(plain)
