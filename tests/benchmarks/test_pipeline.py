"""The benchmark of pipelines: what it counts, and its bars."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from benchmarks import pipeline
from benchmarks.pipeline_processes import most_in_flight, train_step


@pytest.mark.parametrize(("schedule", "expected"), [("gpipe", [6, 6, 1]), ("1f1b", [3, 2, 1])])
def test_microbatches_in_flight(schedule: Any, expected: list[int]) -> None:
    method = autopar.recipes.pipeline([(2, (1,))] * 3, 6, schedule)
    cluster = autopar.cluster_from_devices(jax.devices()[:3])
    step = autopar.parallelize(train_step, cluster=cluster, method=method, batch_axes=(None, 0))
    params = {str(k): np.zeros((16, 16), np.float32) for k in range(6)}
    worker = step.compile(params, {name: np.zeros((24, 16), np.float32) for name in "xy"})._worker
    assert [most_in_flight(worker, stage, 4 * 16) for stage in range(3)] == expected


def test_bars() -> None:
    row = {
        "schedule": "1f1b", "microbatches": 16, "efficiencies": [0.7, 0.9], "cpu": 0.5, "in_flight": [2, 2],
        "predicted": 1.9, "step": [1.5, 2.0, 4.0],
    }  # fmt: skip
    bars = pipeline.bars_of([row])
    assert {name: bar.holds for name, bar in bars.items()} == {
        "one_f_one_b_16_possible_over_best": True,
        "one_f_one_b_16_possible_over_cpu": False,
        "one_f_one_b_16_predicted_error": True,
        "one_f_one_b_16_in_flight_beyond_formula": False,
    }
    assert pipeline.in_flight("gpipe", 16, 1) == 16 and pipeline.in_flight("1f1b", 1, 0) == 1
