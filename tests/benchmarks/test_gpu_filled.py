"""The benchmark of one filled GPU, on a CPU and with a model that is small."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest

from autopar.cost_model.hardware import cluster_from_devices
from autopar.errors import InfeasiblePlanError
from autopar.ir.mesh import Cluster
from benchmarks import common
from benchmarks import gpu as benchmark
from benchmarks.gpu import FILLING, bars, cases, filled, under_jit
from benchmarks.models import gpt
from tests.planned import cluster_of

SMALL = gpt.GPTConfig(64, 16, 1, 32, 2, dropout=0.0)


def one_device() -> Cluster:
    return cluster_from_devices(jax.devices()[:1])


def test_a_step_is_run_with_as_many_examples_as_may_be() -> None:
    row = filled(gpt, SMALL, optax.sgd(1e-3), one_device(), 2, 9)
    assert row["examples"] == 8
    assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    assert len(row["seconds"]) == 10


def test_examples_are_doubled_until_they_do_not_fit() -> None:
    tight = cluster_of(1, 1, memory=3_000_000)
    row = filled(gpt, SMALL, optax.sgd(1e-3), tight, 1, 1 << 16)
    assert 2 < row["examples"] < 1 << 16
    assert row["predicted_bytes"] <= 3_000_000
    with pytest.raises(InfeasiblePlanError):
        filled(gpt, SMALL, optax.sgd(1e-3), cluster_of(1, 1, memory=10_000), 1, 8)


def test_memory_counts_where_the_device_tells_it() -> None:
    told = {"error": -0.2, "memory_error": 0.04}
    found = bars([told, {"error": 0.05, "memory_error": None}, {"error": 0.06, "memory_error": None}], 3)
    assert found["median_error"].value == pytest.approx(0.06)
    assert found["largest_error"].value == pytest.approx(0.2)
    assert found["cases_left_out"].value == 3
    assert found["memory_median_error"].value == pytest.approx(0.04)
    assert "memory_median_error" not in bars([{"error": 0.05, "memory_error": None}])
    assert bars([told, {"failed": "no"}])["cases_failed"].value == 1
    assert not bars([{"failed": "no"}])["median_error"].holds


def test_the_same_step_runs_under_jit() -> None:
    row = under_jit(gpt, SMALL, optax.sgd(1e-3), 4)
    assert len(row["jit_seconds"]) == 10 and row["jit_measured"] > 0
    assert row["jit_bytes"] is None  # a CPU does not tell


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., Any]:
    """The command with a small model, in this process: arguments -> what it writes."""
    monkeypatch.setattr(benchmark, "FILLING", {"gpt": (gpt, SMALL, lambda: optax.sgd(1e-3))})
    monkeypatch.setattr(common, "each_in_a_process", lambda function, items: map(function, items))

    def run(*arguments: str) -> Any:
        file = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", ["gpu", "--preset", "cpu", "--json", str(file), *arguments])
        benchmark.main()
        return json.loads(file.read_text())

    return run


def test_one_command_runs_what_there_is_time_for(command: Callable[..., Any]) -> None:
    found = command("--most-examples", "4")
    assert [row["num_microbatches"] for row in found["rows"]] == [1, 1, 4, 4]
    assert ["jit_measured" in row for row in found["rows"]] == [True, False, False, False]
    assert found["bars"]["cases_failed"]["value"] == 0 and found["bars"]["time_over_jit"]["n"] == 1
    assert command("--limit", "0")["bars"]["cases_left_out"]["value"] == 4


def test_what_the_device_cannot_hold_fails_alone(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nallocator says more")

    monkeypatch.setattr(benchmark, "time_steps", full)
    found = command("--most-examples", "2")
    assert found["bars"]["cases_failed"]["value"] == len(found["rows"]) == 4
    assert found["rows"][0]["failed"] == "JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory"


def test_the_worst_of_those_that_jit_runs_too_counts() -> None:
    alone = {"error": 0.0, "memory_error": None, "measured": 9.0, "measured_bytes": None}
    near = {**alone, "measured": 1.0, "jit_measured": 1.0, "measured_bytes": 102, "jit_bytes": 100}
    far = {**alone, "measured": 1.5, "jit_measured": 1.25, "jit_bytes": None}
    found = bars([alone, near, far, {**alone, "jit_failed": "it is full"}])
    assert found["cases_that_jit_could_not_run"].value == 1
    assert found["time_over_jit"].value == pytest.approx(1.2) and found["time_over_jit"].n == 2
    assert found["memory_over_jit"].value == pytest.approx(1.02) and found["memory_over_jit"].n == 1
    assert not {"time_over_jit", "memory_over_jit"} & bars([alone]).keys()


def test_batch_norm_runs_in_one_microbatch() -> None:
    assert {case.num_microbatches for case in cases() if case.model == "wresnet"} == {1}
    assert len({*cases()}) == len(cases()) == 18


def test_those_that_jit_runs_too_come_first() -> None:
    compared = [case.is_compared for case in cases()]
    assert compared == sorted(compared, reverse=True)
    assert [case.model for case in cases() if case.is_compared] == [*FILLING]
    assert FILLING["gpt, fused attention"][1].fused_attention
