"""What `autopar.meter` tells, and where it goes."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import ArgumentError, PlanError
from autopar.metrics import StepMetrics
from autopar.runtime import spent
from tests.clock import Clock


@autopar.parallelize
def train_step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        return (params["table"][batch["tokens"]] @ params["w"]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@autopar.parallelize(method=recipes.gpipe(2, 4), devices=jax.devices()[:4])
def pipelined(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        return (jnp.tanh(params["table"][batch["tokens"]] @ params["w"]) @ params["w"]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


PARAMS = {"table": np.ones((50, 16), np.float32), "w": np.ones((16, 16), np.float32)}
BATCH = {"tokens": np.zeros((8, 12), np.int32)}
PRODUCTS = 3 * 2 * 8 * 12 * 16 * 16  # FLOPs of the step's matrix products: forward, and for both operands


def _deleted(x: Any) -> Any:
    x.delete()
    return x


def _run(step: Any, clock: Clock, seconds: list[float]) -> Any:
    """Steps, and as many seconds before each."""
    params: Any = PARAMS
    for pause in seconds:
        clock.now += pause
        params, loss = step(params, BATCH)
    return params, loss


def test_numbers_are_of_the_steps_since_the_ones_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    told: list[StepMetrics] = []
    metered = autopar.meter(train_step, told.append, every=2)
    monkeypatch.setattr(spent._SPENT, "seconds", {"input": 7.0})
    _run(metered, clock, [50.0, 1.0])
    assert not told
    spent._SPENT.seconds["input"] += 0.5
    spent._SPENT.seconds["checkpoints"] = 1.0
    _run(metered, clock, [3.0])
    _run(metered, clock, [0.25, 0.25, 99.0])
    first, second = told
    assert (first.function, first.step, second.step) == ("train_step", 3, 5)
    assert (first.step_seconds, second.step_seconds) == (2.0, 0.25)
    assert (first.input_seconds, first.checkpoint_seconds) == (0.25, 0.5)
    assert (second.input_seconds, second.checkpoint_seconds) == (0.0, 0.0)
    assert (first.examples_per_second, first.tokens_per_second) == (4.0, 48.0)
    executable = train_step.executable_for("test")
    assert first.predicted_seconds == executable.cost and first.predicted_bubble == executable.plan.bubble
    peak = sum(host.num_devices * host.kind.peak_flops["float32"] for host in executable.plan.cluster.hosts)
    assert first.mfu == pytest.approx(PRODUCTS / peak / 2.0)
    assert first.peak_bytes is None and first.bubble is None  # of CPUs, and of one stage


def test_what_it_tells_is_of_the_step_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), list[StepMetrics]()
    metered = autopar.meter(train_step, told.append, every=1)
    _run(metered, clock, [1.0, 1.0])
    twice = {"tokens": np.zeros((16, 12), np.int32)}
    for _ in range(2):  # the first plans and compiles
        clock.now += 2.0
        metered(PARAMS, twice)
    assert [each.examples_per_second for each in told] == [8.0, 8.0]
    assert [each.step_seconds for each in told] == [1.0, 2.0]

    @autopar.parallelize(follow=train_step)
    def evaluate(params: Any, batch: Any) -> Any:
        return (params["table"][batch["tokens"]] @ params["w"]).mean()

    params, _ = train_step(PARAMS, BATCH)
    following = autopar.meter(evaluate, told.append, every=1)
    for _ in range(2):
        clock.now += 4.0
        following(params, twice)
    assert (told[-1].function, told[-1].examples_per_second) == ("evaluate", 4.0)


def test_what_is_told_takes_no_time_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), list[StepMetrics]()

    def slow(metrics: StepMetrics) -> None:
        told.append(metrics)
        clock.now += 100.0

    _run(autopar.meter(train_step, slow, every=1), clock, [1.0, 1.0, 1.0])
    assert [each.step_seconds for each in told] == [1.0, 1.0]


def test_the_bubble_of_a_pipeline_is_measured() -> None:
    told: list[StepMetrics] = []
    metered = autopar.meter(pipelined, told.append, every=3)
    params: Any = PARAMS
    for _ in range(7):
        params, _ = metered(params, BATCH)
    assert [each.step for each in told] == [4, 7]
    assert all(each.bubble is not None and 0 <= each.bubble < 1 for each in told)


def test_the_first_step_of_a_pipeline_that_is_recorded_is_not_told_of() -> None:
    """It compiles what waits for the programs."""
    told: list[StepMetrics] = []
    metered = autopar.meter(pipelined, told.append, every=1)
    params: Any = PARAMS
    for _ in range(3):
        params, _ = metered(params, BATCH)
    assert [each.bubble is None for each in told] == [True, False]
    with jax.debug_nans(True):  # another worker runs it
        params, _ = metered(params, BATCH)
    assert len(told) == 3 and told[-1].bubble is None
    with pytest.raises(autopar.errors.StateError):
        metered(jax.tree.map(_deleted, params), BATCH)
    assert pipelined.executable_for("test")._worker.recorder is None


def test_a_plain_function_that_stands_in_for_the_step_is_not_told_of() -> None:
    told: list[StepMetrics] = []
    fresh = autopar.parallelize(train_step._function.fun)
    metered = autopar.meter(fresh, told.append, every=1)
    with jax.disable_jit():
        for _ in range(3):
            metered(PARAMS, BATCH)
    assert not told


def test_it_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    metered = autopar.meter(train_step, lambda metrics: None)
    assert metered.__name__ == "train_step"
    params, loss = metered(PARAMS, BATCH)
    expected, expected_loss = jax.jit(train_step._function.fun)(PARAMS, BATCH)
    assert jnp.allclose(loss, expected_loss)
    jax.tree.map(np.testing.assert_allclose, autopar.gather(params), expected)
    assert metered.plan(PARAMS, BATCH) == train_step.plan(PARAMS, BATCH)
    (batch,) = list(metered.batches([BATCH]))
    metered(params, batch)
    debugged = autopar.meter(autopar.debug(train_step), lambda metrics: None, every=1)
    with pytest.raises(autopar.errors.NotFiniteError):
        debugged({**PARAMS, "w": np.full((16, 16), np.nan, np.float32)}, BATCH)


def test_input_and_checkpoints_take_time(tmp_path: pathlib.Path) -> None:
    train_step.compile(PARAMS, BATCH)

    def examples() -> Any:
        for _ in range(2):
            time.sleep(0.05)
            yield BATCH

    before = spent.seconds_spent()
    list(train_step.batches(examples()))
    autopar.save(tmp_path, PARAMS, step=1)
    autopar.wait_until_saved()
    autopar.restore(tmp_path, like=PARAMS)
    after = spent.seconds_spent()
    assert after["input"] - before.get("input", 0.0) >= 0.05
    assert after["checkpoints"] > before.get("checkpoints", 0.0)


def _metrics(step: int, **others: Any) -> StepMetrics:
    made = StepMetrics("train_step", step, 0.5, 0.4, 0.1, 0.0, 16.0, 192.0, 0.25, 0.125, None, 3 * 2**30)
    return dataclasses.replace(made, **others)


def test_a_line() -> None:
    assert str(_metrics(20)) == (
        "train_step 20: 500 ms a step (predicted 400), 192 tokens/s, MFU 25.0%, 3.00 GiB, input 20%"
    )
    assert str(_metrics(20, bubble=0.25, peak_bytes=None, input_seconds=0.0)) == (
        "train_step 20: 500 ms a step (predicted 400), 192 tokens/s, MFU 25.0%, bubble 25.0% (predicted 12.5%)"
    )
    assert str(_metrics(7, tokens_per_second=None, peak_bytes=None, input_seconds=0.0, checkpoint_seconds=0.25)) == (
        "train_step 7: 500 ms a step (predicted 400), 16 examples/s, MFU 25.0%, checkpoints 50%"
    )


def test_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    autopar.metrics.terminal()(_metrics(20))
    assert capsys.readouterr().err == f"autopar: {_metrics(20)}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(autopar.metrics.atexit, "register", lambda stop: stop)  # type: ignore[attr-defined]
    monkeypatch.setenv("FORCE_COLOR", "1")
    show = autopar.metrics.terminal()
    show(_metrics(20))
    show(_metrics(30))
    assert "train_step 30" in capsys.readouterr().err
    print("of the program")  # whose stdout is no terminal
    assert capsys.readouterr().out == "of the program\n"


def test_a_csv_file_goes_on(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run" / "metrics.csv"
    autopar.metrics.csv(path)(_metrics(10))
    autopar.metrics.csv(path)(_metrics(20, tokens_per_second=None))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["10", "20"]
    assert float(rows[0]["tokens_per_second"]) == 192.0 and rows[1]["tokens_per_second"] == ""
    assert list(rows[0]) == [field.name for field in dataclasses.fields(StepMetrics)]


def test_a_csv_file_of_an_earlier_version_keeps_its_columns(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("function,step,step_seconds,peak_bytes\r\ntrain_step,10,0.5,\r\n")
    autopar.metrics.csv(path)(_metrics(20, step_seconds=0.75))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["step_seconds"], row["peak_bytes"]) for row in rows] == [
        ("10", "0.5", ""), ("20", "0.75", str(3 * 2**30)),
    ]  # fmt: skip


def test_tensorboard(tmp_path: pathlib.Path) -> None:
    sink = autopar.metrics.tensorboard(tmp_path)
    sink(_metrics(10))
    sink(_metrics(20, step_seconds=0.125))
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert b"autopar/step_seconds" in content and b"autopar/mfu" in content and b"autopar/step_number" not in content


def test_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import metrics as telemetry
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(telemetry, "get_meter", provider.get_meter)
    sink = autopar.metrics.opentelemetry()
    sink(_metrics(10, peak_bytes=None))
    sink(_metrics(20, peak_bytes=None))
    found = reader.get_metrics_data()
    assert found is not None
    values = {
        metric.name: (metric.unit, getattr(point, "value", None), dict(point.attributes or {}))
        for resource in found.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    labels = {"autopar.function": "train_step"}
    assert values["autopar.step_seconds"] == ("s", 0.5, labels)
    assert values["autopar.step"] == ("1", 20, labels)
    assert "autopar.peak_bytes" not in values
    provider.shutdown()


@pytest.mark.parametrize("options", [{"every": 0}, {"every": True}, {"tokens": -1}, {"tokens": 2.0}])
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ArgumentError, match=rf"meter\({name}="):
        autopar.meter(train_step, **options)


def test_a_plain_function_has_no_plan() -> None:
    with pytest.raises(PlanError, match=r"meter\(.*make it a step by autopar.parallelize first"):
        autopar.meter(lambda x: x)  # type: ignore[arg-type]
