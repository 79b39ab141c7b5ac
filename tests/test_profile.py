"""What a step's instructions took, beside the prediction."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import ArgumentError, ReportError
from autopar.ir.graph import Phase
from autopar.ir.instructions import Run
from autopar.reporting.profile import Timeline, _seconds
from autopar.reporting.record import Copying, TimelineSpan
from autopar.runtime import recorder as recording
from autopar.runtime import worker
from autopar.runtime.recorder import Recorder, Span

WIDTH = 32


def train_step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        h = batch["x"]
        for w in params["layers"]:
            h = jnp.tanh(h @ w)
        return ((h - batch["y"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    count = params["count"] + 1
    return {**jax.tree.map(lambda p, g: p - 0.1 * g, params, {**gradients, "count": 0.0}), "count": count}, value


PARAMS = {"layers": [np.eye(WIDTH, dtype=np.float32) for _ in range(4)], "count": np.float32(0)}
BATCH = {name: np.ones((8, WIDTH), np.float32) for name in "xy"}
METHODS = [
    recipes.zero(3),
    recipes.data_parallel(),
    recipes.gpipe(2, 4),
    recipes.megatron(1, 2, 2, 4, 2),
    recipes.gpipe(1),
]


def _compiled(method: Any, devices: int = 4) -> autopar.Executable:
    step = autopar.parallelize(train_step, method=method, devices=jax.devices()[:devices])
    return step.compile(PARAMS, BATCH)


@pytest.mark.parametrize(("method", "waits"), [*((method, True) for method in METHODS), (recipes.gpipe(2, 4), False)])
def test_all_that_runs_is_in_it(method: Any, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the worker does not wait for programs, as on GPUs."""
    if not waits:
        monkeypatch.setattr(worker, "needs_waits", lambda mesh: False)
    executable = _compiled(method, 4 if waits else 2)
    profile = executable.profile(PARAMS, BATCH, steps=3)
    assert len(profile.seconds) == 3 and profile.measured.seconds == pytest.approx(np.mean(profile.seconds))
    instructions = executable._worker.wiring.instructions.instructions
    runs = [(i.stage, i.phase.value) for i in instructions if isinstance(i, Run)]
    assert sorted((span.stage, span.phase) for span in profile.measured.programs) == sorted(runs)
    assert sum(row.count for row in profile.rows if row.to is None) == len(runs)
    # In time: programs of the same devices one after the other, within the step, and where all are waited for no two.
    by_group: dict[int, list[TimelineSpan]] = {}
    for span in profile.measured.programs:
        assert 0 <= span.start <= span.end <= profile.measured.seconds
        by_group.setdefault(span.group, []).append(span)
    for spans in by_group.values():
        for before, after in itertools.pairwise(spans):
            assert before.end <= after.start + 1e-9
    assert 0 <= profile.measured.bubble < 1
    assert profile.predicted.seconds == executable.cost
    assert profile.predicted.bubble == pytest.approx(executable.plan.bubble, abs=1e-6)


def test_state_goes_on_from_it() -> None:
    executable = _compiled(recipes.gpipe(2, 4))
    profile = executable.profile(PARAMS, BATCH, steps=3)
    state, _ = profile.result
    expected: Any = PARAMS
    for _ in range(5):  # two warm up
        expected, _ = jax.jit(train_step)(expected, BATCH)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), autopar.gather(state), expected)
    executable(state, BATCH)
    assert executable._worker.recorder is None


def test_a_span_is_from_when_its_devices_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(recording.time, "perf_counter", lambda: now[0])  # type: ignore[attr-defined]
    recorder = Recorder()
    recorder.begin()

    def played(instruction: Any, at: float, until: float) -> None:
        now[0] = at
        recorder.instruction = instruction
        now[0] = until
        if isinstance(instruction, Run):
            recorder.ran([], True)
        else:
            recorder.brought(0, 1, [jnp.ones(3)])
            recorder._launched[-1][2].result()  # type: ignore[union-attr]

    forward, first = (Run(stage, stage, Phase.FORWARD, (), (), ()) for stage in (1, 0))
    played(first, 11.0, 12.0)
    played("a copy", 12.0, 15.0)
    played(first, 12.5, 13.0)
    played(forward, 13.5, 17.0)  # launched before what it needs is there
    assert recorder.ended() == [
        Span(0, None, "forward", 0, 1.0, 2.0), Span(0, 1, "", 0, 2.0, 5.0), Span(0, None, "forward", 1, 2.5, 3.0),
        Span(1, None, "forward", 0, 5.0, 7.0),
    ]  # fmt: skip
    recorder.close()


def test_copies_that_go_side_by_side_count_once() -> None:
    assert _seconds([(0.0, 1.0), (0.5, 2.0), (3.0, 4.0)], 1) == 3.0
    assert _seconds([(0.0, 1.0), (0.5, 2.0), (3.0, 4.0)], None) == 3.5


def test_the_share_that_is_idle() -> None:
    programs = (TimelineSpan(0, 0, "forward", 0, 0.0, 1.0), TimelineSpan(1, 1, "forward", 0, 1.0, 3.0))
    line = Timeline(4.0, 2, programs, (Copying(0, 1, "", 0, 0.9, 1.0),))
    assert line.busy(0) == 1.0 and line.busy(1) == 2.0
    assert line.bubble == 1 - 3 / 8


def test_text_json_and_trace(tmp_path: pathlib.Path) -> None:
    profile = _compiled(recipes.gpipe(2, 4)).profile(PARAMS, BATCH, steps=2)
    text = str(profile)
    assert text.startswith("Profile of train_step by method gpipe on 4 x cpu (4 devices): 2 steps\nmeasured ")
    for title in ("Programs", "Transfers", "Devices"):
        assert title in text
    assert "B/s" in text and "times the measured" in text
    content = json.loads(profile.to_json())
    assert content["format"] == "autopar-profile" and len(content["rows"]) == len(profile.rows)
    assert content["measured"]["seconds"] == profile.measured.seconds
    assert len(content["measured"]["programs"]) == len(profile.measured.programs)
    profile.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [
        f"{which}: stage {k} on devices {devices}"
        for which in ("measured", "predicted")
        for k, devices in ((0, "0-1"), (1, "2-3"))
    ]
    drawn = [event for event in events if event["ph"] == "X"]
    lines = (profile.measured, profile.predicted)
    assert len(drawn) == sum(len(line.programs) + len(line.copies) for line in lines)
    assert "<pre" in profile._repr_html_()
    with pytest.raises(ReportError):
        profile.save_trace(tmp_path / "nowhere" / "trace.json")


@pytest.mark.parametrize("steps", [0, -1, True, 2.0])
def test_what_makes_no_sense_is_refused(steps: Any) -> None:
    with pytest.raises(ArgumentError, match=r"profile\(steps="):
        _compiled(recipes.zero(3)).profile(PARAMS, BATCH, steps=steps)


def test_results_that_are_given_away_have_been_seen() -> None:
    """The next program may take over what one has made before anybody has waited for it."""
    recorder = Recorder()
    add: Callable[..., Any] = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.ones((256, 256))
    recorder.begin()
    for _ in range(20):
        recorder.instruction = Run(0, 0, Phase.FORWARD, (), (), ())
        x = add(x)
        recorder.ran([x], False)
    spans = recorder.ended()
    recorder.close()
    assert [span.run for span in spans] == list(range(20))
    assert all(0 <= span.start <= span.end for span in spans)
