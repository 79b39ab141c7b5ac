"""The cases of the papers, and what is asked of a plan for them."""

from __future__ import annotations

import math

import pytest

from autopar import recipes
from benchmarks import planner
from benchmarks.planner import Outcome


def test_cases_of_the_weak_scaling() -> None:
    cases = {case.name: case for case in planner.alpa_cases()}
    assert len(cases) == 21
    assert sorted({case.cluster.num_devices for case in cases.values()}) == [1, 2, 4, 8, 16, 32, 64]
    largest = cases["gpt 39B on 64"]
    assert (largest.spec["hidden_size"], largest.num_microbatches) == (8192, 1024)
    alpa = largest.rivals["alpa"]
    assert alpa.stages is not None
    assert [(stage.num_layers, stage.mesh_shape) for stage in alpa.stages] == [(1, (1, 4))] * 16
    assert cases["gpt 15B on 32"].rivals["megatron"] == recipes.megatron(1, 4, 8, 256)
    assert "megatron" not in cases["gpt 350M on 1"].rivals  # measured with another batch
    assert "deepspeed" not in cases["moe 10B on 16"].rivals  # measured with another model
    assert cases["moe 1.3B on 4"].rivals["deepspeed"].mesh_shape == (4,)


def outcome(seconds: float | None, planning: float = 1.0) -> Outcome:
    return Outcome(seconds, 1e9, 1.0, planning, 2e9, "")


@pytest.mark.parametrize(
    ("ours", "others", "expected"),
    [
        (2.0, [4.0, 2.5], 0.8),
        (2.0, [None, 1.0], 2.0),
        (2.0, [None], 0.0),
        (None, [None], 0.0),
        (None, [1.0], math.inf),
    ],
)
def test_margin(ours: float | None, others: list[float | None], expected: float) -> None:
    found = {"ours": outcome(ours), **{str(i): outcome(other) for i, other in enumerate(others)}}
    assert planner.margin(found) == expected


def test_bars() -> None:
    first, *_, last = [case for case in planner.alpa_cases() if case.spec["family"] == "gpt"]
    rows = [(first, {"ours": outcome(1.0, 5.0), "alpa": outcome(2.0)}), (last, {"ours": outcome(3.0, 61.0)})]
    found = planner.bars(rows)
    assert found["time_over_the_best_other"].value == 0.5
    assert found["planning_seconds"].value == 66.0
    assert not found["planning_seconds_gpt_39B"].holds
    assert found["peak_rss_gpt_39B"].holds
