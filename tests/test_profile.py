"""What a step's instructions took, beside the prediction."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import itertools
import json
import pathlib
import types
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
from autopar.ir.instructions import Copy, Run
from autopar.ir.units import seconds_text
from autopar.profiling import profile_of
from autopar.reporting.profile import Timeline, _seconds
from autopar.reporting.record import Copying, TimelineSpan
from autopar.runtime import recorder as recording
from autopar.runtime import worker
from autopar.runtime.recorder import Event, Recorder, spans_of
from tests.reports import Page

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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("method", "waits"),
    [*((method, True) for method in METHODS), (recipes.gpipe(2, 4), False), (recipes.megatron(1, 1, 2, 4, 2), False)],
)
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", [recipes.gpipe(2, 4), recipes.zero(3)])
def test_a_page_of_it(method: Any, tmp_path: pathlib.Path) -> None:
    profile = _compiled(method).profile(PARAMS, BATCH, steps=2, kernels=True)
    profile.save(tmp_path / "profile.html")
    text = (tmp_path / "profile.html").read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert {"figure-measured", "figure-predicted", "program-table", "kernel-table", "device-table"} <= set(page.ids)
    assert ("transfer-table" in page.ids) == (len(profile.plan.stages) > 1)
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert "default-src 'none'" in text
    for row in profile.rows:
        assert seconds_text(row.measured) in page.text
    downloads = [address.partition(",")[2] for address in page.addresses if address.startswith("data:application")]
    trace, content = (json.loads(gzip.decompress(base64.b64decode(each))) for each in downloads)
    assert trace == json.loads(profile.to_trace()) and content == json.loads(profile.to_json())
    with pytest.raises(ReportError, match="nowhere"):
        profile.save(tmp_path / "nowhere" / "profile.html")


def test_what_draws_the_page_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = _compiled(recipes.gpipe(1)).profile(PARAMS, BATCH, steps=1)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else found(name))
    with pytest.raises(ReportError, match=r"needs jinja2, not installed: pip install 'autopar\[report\]'"):
        profile.to_html()
    assert str(profile)


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


def _event(position: int, stage: int, launched: float, ended: float, reads: Any, writes: Any, to: Any = None) -> Event:
    return Event(position, stage, to, "" if to is not None else "forward", launched, ended, False, reads, writes)


def test_a_span_is_from_when_its_devices_are_free_and_what_it_reads_is_there() -> None:
    events = [
        _event(0, 0, 0.0, 2.0, [], [1]),
        _event(1, 0, 0.1, 3.0, [1], [2], to=1),  # launched long before its source is there
        _event(2, 0, 0.2, 4.0, [], [3]),  # .. and so is the next program of that stage
        _event(3, 0, 0.3, 9.0, [3], [4], to=1),
        _event(4, 1, 0.4, 5.0, [2], [5]),  # needs the first copy, not the second
        _event(5, 2, 0.5, 6.0, [], [6]),  # on the devices of stage 0
        _event(6, 1, 0.6, 10.0, [4], [5]),
    ]
    spans = spans_of(reversed(events), {0: 0, 1: 1, 2: 0})
    found = [(span.start, span.end) for span in spans]
    assert found == [(0.0, 2.0), (2.0, 3.0), (2.0, 4.0), (4.0, 9.0), (3.0, 5.0), (4.0, 6.0), (9.0, 10.0)]


def test_instructions_are_told_to_whoever_asks_what_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(recording.time, "perf_counter", lambda: now[0])  # type: ignore[attr-defined]
    run, channel = Run(0, 0, Phase.FORWARD, (7,), (8,), ()), types.SimpleNamespace(instruction=None)
    recorder = Recorder([Copy(1, 0, 3, 0, 5, 7), run], {0: 0, 1: 1}, channel)
    recorder.begin()
    now[0] = 11.0
    recorder.instruction = run
    assert channel.instruction is run
    now[0] = 13.0
    recorder.ran([], True)
    recorder.brought(1, 0, [(5, 7)], [jnp.ones(3)])
    first, second = recorder.ended()
    recorder.close()
    assert first == Event(1, 0, None, "forward", 1.0, 3.0, True, (7,), (8,))
    assert (second.position, second.stage, second.to, second.reads, second.writes) == (0, 1, 0, (5,), (7,))


class Model:
    """Changed in place, as Flax NNX modules are."""

    def __init__(self, w: Any) -> None:
        self.w = w


jax.tree_util.register_pytree_with_keys(
    Model, lambda model: (((jax.tree_util.GetAttrKey("w"), model.w),), None), lambda _, leaves: Model(*leaves)
)


def test_objects_that_a_step_changes_are_the_callers_own() -> None:
    def step(model: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(model.w)
        model.w = model.w - 0.1 * gradient
        return loss

    model, x = Model(jnp.eye(WIDTH)), BATCH["x"]
    compiled = autopar.parallelize(step, method=recipes.zero(3), devices=jax.devices()[:4]).compile(model, x)
    profile = compiled.profile(model, x, steps=1)
    expected = jnp.eye(WIDTH)
    for _ in range(3):
        expected = expected - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(expected)
    np.testing.assert_allclose(autopar.gather(model.w), expected, rtol=1e-5)
    assert float(compiled(model, x)) < float(profile.result)


def test_a_key_static_arguments_and_a_name_of_its_own() -> None:
    def step(state: Any, rate: float, x: Any, *, steps: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(state["w"])
        key, noise = jax.random.split(state["key"])
        new = state["w"] - rate * gradient + 0.01 * jax.random.normal(noise, gradient.shape)
        return {"w": new, "key": key}, loss * steps

    state = {"w": jnp.eye(WIDTH), "key": jax.random.key(0)}
    parallel = autopar.parallelize(step, method=recipes.gpipe(1), static_argnums=1, devices=jax.devices()[:1])
    compiled = parallel.compile(state, 0.1, BATCH["x"], steps=np.float32(2))
    profile = profile_of(compiled, (state, BATCH["x"]), {"steps": np.float32(2)}, 2)
    assert [row.count for row in profile.rows] == [1]


def test_a_step_that_runs_otherwise_is_not_profiled() -> None:
    compiled = _compiled(recipes.zero(3))
    for switch in (jax.debug_nans, jax.debug_infs, jax.disable_jit):
        with switch(True), pytest.raises(ArgumentError, match="is on, so that the step runs otherwise"):
            compiled.profile(PARAMS, BATCH)


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
    runs = [Run(0, 0, Phase.FORWARD, (0,), (0,), ()) for _ in range(20)]
    recorder = Recorder(runs, {0: 0})
    add: Callable[..., Any] = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.ones((256, 256))
    recorder.begin()
    for run in runs:
        recorder.instruction = run
        x = add(x)
        recorder.ran([x], False)
    events = recorder.ended()
    recorder.close()
    assert [event.position for event in events] == list(range(20))
    assert all(0 <= event.launched <= event.ended for event in events)


def test_what_is_unaccounted_for_is_under_way_nowhere() -> None:
    programs = (TimelineSpan(0, 0, "forward", 0, 0.0, 2.0), TimelineSpan(1, 1, "forward", 0, 5.0, 7.0))
    copies = (Copying(0, 1, "", 0, 1.0, 3.0), Copying(0, 1, "", 1, 6.0, 6.5))
    assert Timeline(10.0, 2, programs, copies).unaccounted == pytest.approx(0.5)
    assert Timeline(7.0, 2, programs, (Copying(0, 1, "", 0, 2.0, 5.0),)).unaccounted == pytest.approx(0.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", [recipes.gpipe(2, 4), recipes.megatron(1, 2, 2, 4, 2)])
def test_kernels_by_kind_of_operator(method: Any) -> None:
    executable = _compiled(method)
    profile = executable.profile(PARAMS, BATCH, steps=2, kernels=True)
    kinds = {row.kind: row for row in profile.kernels}
    assert kinds.keys() == {"products", "memory", "collectives"}
    products = 3 * 4 - 1  # forward, and for both operands, but not for those of the first, of 4 layers
    assert 4 * kinds["products"].flops == 2 * products * 8 * WIDTH * WIDTH
    assert all(row.kernels > 0 and row.measured > 0 and row.predicted > 0 for row in profile.kernels)
    assert [row.measured for row in profile.kernels] == sorted((r.measured for r in profile.kernels), reverse=True)
    assert "Kernels of a device" in str(profile) and "FLOP/s" in str(profile)
    assert [row["kind"] for row in json.loads(profile.to_json())["kernels"]] == [row.kind for row in profile.kernels]
    state, loss = profile.result
    assert state["count"] == 2 + 2 + 2  # which warm up, are timed, and are traced
    assert np.isfinite(loss)


def test_kernels_are_not_looked_at_unless_asked() -> None:
    profile = _compiled(recipes.gpipe(2, 4)).profile(PARAMS, BATCH, steps=1)
    assert profile.kernels == () and "Kernels" not in str(profile) and profile.result[0]["count"] == 3
