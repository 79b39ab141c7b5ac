"""The benchmark of one filled device, on a CPU and with a model that is small."""

from __future__ import annotations

import jax
import optax
import pytest

from autopar.cost_model.hardware import cluster_from_devices
from autopar.errors import InfeasiblePlanError
from autopar.ir.mesh import Cluster
from benchmarks.models import gpt
from benchmarks.one_device import bars, cases, filled
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
    found = bars([told, {"error": 0.05, "memory_error": None}, {"error": 0.06, "memory_error": None}])
    assert found["median_error"].value == pytest.approx(0.06)
    assert found["memory_median_error"].value == pytest.approx(0.04)
    assert "memory_median_error" not in bars([{"error": 0.05, "memory_error": None}])
    assert bars([told, {"failed": "no"}])["cases_failed"].value == 1
    assert not bars([{"failed": "no"}])["median_error"].holds


def test_batch_norm_runs_in_one_microbatch() -> None:
    assert {case.num_microbatches for case in cases() if case.model == "wresnet"} == {1}
    assert len({*cases()}) == len(cases()) == 14
