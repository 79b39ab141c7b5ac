"""The benchmark of what hosts are told: a small case as it runs, and its bars."""

from __future__ import annotations

import pytest

from autopar.ir.schedule import ScheduleName
from benchmarks import common, distribution
from benchmarks.distribution import Case
from tests.h100 import needs_cuda_compiler


@pytest.mark.slow
@needs_cuda_compiler  # whose devices stand for those of the hosts
@pytest.mark.parametrize(
    "schedule",
    [*distribution.SCHEDULES[:1], *(pytest.param(s, marks=pytest.mark.slow) for s in distribution.SCHEDULES[1:])],
)
def test_a_case(schedule: ScheduleName) -> None:
    case = Case(2, schedule, scan=True, layers=8, stages=4, microbatches=4)
    [row] = common.each_in_a_process(distribution.measure, [case])
    assert row["devices"] == 16 and row["instructions"] > 4 * 4 * 2 and row["tiles"] >= row["sent"] > 0
    parts = ("lists", "parts", "copies", "routes", "proof", "simulating")
    assert row["seconds"] == pytest.approx(sum(row[part] for part in parts))
    assert 0.1 < row["gib"] < 4


def test_bars_are_of_the_most_hosts() -> None:
    rows = [
        {"hosts": 8, "seconds": 20.0, "gib": 2.0},
        {"hosts": 64, "seconds": 9.0, "gib": 1.5},
        {"hosts": 64, "seconds": 8.0, "gib": 0.5},
    ]
    bars = distribution.bars_of(rows)
    assert {name: bar.holds for name, bar in bars.items()} == {
        "hosts_missing": True, "seconds": True, "memory": False,
    }  # fmt: skip
    assert not distribution.bars_of(rows[:1])["hosts_missing"].holds
