"""When a call of `autopar.save` ends the program, since another plan is quicker on what there is now."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.checkpointing import checkpoints, replanning
from autopar.checkpointing.replanning import Replanning
from autopar.runtime import pulse
from autopar.runtime.preemption import Preemption
from autopar.runtime.pulse import Part
from tests.clock import Clock


def train_step(w: Any, batch: Any) -> Any:
    """A product."""
    return w - 0.1 * (batch @ w).mean(), batch.mean()


@dataclasses.dataclass
class Run:
    """Steps that are saved each time, of which the devices are slow from a step on."""

    clock: Clock
    slow_from: int
    step: Any = dataclasses.field(default_factory=lambda: autopar.parallelize(train_step))
    w: Any = dataclasses.field(default_factory=lambda: np.ones((16, 16), np.float32))
    number: int = 0

    def to(self, number: int, *folders: pathlib.Path) -> None:
        while self.number < number:
            self.number += 1
            self.clock.now += 3.0 if self.number > self.slow_from else 1.0
            self.w, _ = self.step(self.w, np.ones((16, 16), np.float32))
            for folder in folders:
                autopar.save(folder, self.w, step=self.number)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """One whose other plan pays."""
    preemption, again = Preemption(), Replanning(1.5)
    monkeypatch.setattr(checkpoints, "_preemption", lambda: preemption)
    monkeypatch.setattr(checkpoints, "_replanning", lambda: again)
    monkeypatch.setattr(replanning, "_compared", lambda *_: (True, "the job is to be started again"))
    found = Run(Clock(monkeypatch), slow_from=4)

    def readings(devices: Any, _: Any) -> Any:
        factor = 2.0 if found.number > found.slow_from else 1.0
        return {Part("products", device): 1e-3 * factor for device in range(len(devices))}

    monkeypatch.setattr(pulse, "readings", readings)
    return found


def test_the_second_slow_checkpoint_ends_the_program(
    run: Run, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.to(5, tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        run.to(9, tmp_path / "run")
    assert ended.value.code == 75 and run.number == 6 == autopar.latest_step(tmp_path / "run")
    said = capsys.readouterr().err
    assert "a step takes 3.00 times as long as it did (3000 ms instead of 1000)" in said
    assert "products on devices 0, 1, 2, 3, 4, 5, 6, 7 (process 0 on " in said
    assert not autopar.save(tmp_path / "run", run.w, step=7)  # as at the end of a script


def test_an_executable_that_is_called_is_seen(run: Run, tmp_path: pathlib.Path) -> None:
    run.step = run.step.compile(run.w, np.ones((16, 16), np.float32))
    with pytest.raises(SystemExit):
        run.to(9, tmp_path / "run")
    assert run.number == 6


def test_checkpoints_elsewhere_end_nothing(run: Run, tmp_path: pathlib.Path) -> None:
    autopar.save(tmp_path / "first", run.w, step=0)
    run.to(9, tmp_path / "second")
    assert autopar.latest_step(tmp_path / "second") == 9


def test_checkpoints_of_another_thread_end_nothing(run: Run, tmp_path: pathlib.Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for number in range(1, 10):
            run.to(number)
            assert pool.submit(autopar.save, tmp_path / "run", run.w, step=number).result()
    assert autopar.latest_step(tmp_path / "run") == 9


@pytest.mark.parametrize("error", [OSError("the disk is full"), autopar.InternalError("of the planner")])
def test_what_cannot_be_planned_or_written_ends_nothing(
    run: Run, error: Exception, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def compared(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(replanning, "_compared", compared)
    run.to(9, tmp_path / "run")
    assert f"the job goes on under its plan: {error}" in capsys.readouterr().err
    assert autopar.latest_step(tmp_path / "run") == 9


def test_a_plan_that_was_given_is_kept(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    clock = Clock(monkeypatch)
    plan = run.step.plan(run.w, np.ones((16, 16), np.float32))
    assert plan.planner is not None
    executable = autopar.parallelize(train_step, method=autopar.Plan(**plan.fields())).compile(
        run.w, np.ones((16, 16), np.float32)
    )
    assert executable.plan.planner is None
    devices = executable._devices
    slowdown = autopar.Slowdown("train", 6, 3.0, 1.0, {Part("products", 5): 2.0}, False, devices, ("here",))
    assert not replanning._is_quicker(slowdown, executable) and clock
    assert "the job goes on: its plan, or the cluster that it is for, was given to it" in capsys.readouterr().err


def test_the_method_that_was_used_is_planned_with(run: Run) -> None:
    traced = run.step.trace(run.w, np.ones((16, 16), np.float32))
    executable = traced.plan(method=autopar.recipes.zero(3, 2)).compile()
    again = executable.plan.planner(autopar.load_preset("dgx-h100"))
    assert again.method == executable.plan.method and again.num_microbatches == 2
    assert traced.plan(cluster=autopar.load_preset("dgx-h100")).planner is None
