"""The benchmark of the worker: its parts as they run, and its bars."""

from __future__ import annotations

import time

import pytest

from benchmarks import dispatch


def test_a_stopwatch_counts_the_calls_and_what_they_take() -> None:
    def slow(*xs: int) -> tuple[int, ...]:
        time.sleep(0.01)
        return xs

    watch = dispatch.Stopwatch(slow)
    assert watch(1, 2) == (1, 2) and watch(3) == (3,)
    assert watch.calls == 2 and watch.seconds >= 0.02


@pytest.mark.parametrize("arguments", [10, 40])
def test_an_instruction_has_so_many_arguments(arguments: int) -> None:
    row = dispatch.microseconds_per_instruction(arguments, 2, microbatches=2)
    assert row["wanted"] == arguments and abs(row["arguments"] - arguments) <= 2
    assert row["microseconds"] > 0


@pytest.mark.parametrize("devices", [1, 4])
def test_many_leaves(devices: int) -> None:
    row = dispatch.many_leaves(20, devices, 2)
    assert row["ratio"] > 0 and row["devices"] == devices


def test_the_middle_of_several_processes() -> None:
    times = [(1.0, 1.0), (2.0, 1.0), (9.0, 3.0)]
    rows = [{"leaves": 7, "seconds": a, "seconds_by_hand": b, "ratio": a / b, "rounds": 4} for a, b in times]
    middle = dispatch._over_processes(rows)
    assert (middle["seconds"], middle["seconds_by_hand"], middle["ratio"]) == (2.0, 1.0, 2.0)
    assert middle["leaves"] == 7 and middle["rounds"] == 12 and middle["ratios"] == [1.0, 2.0, 3.0]


def test_the_pipeline_is_the_one_by_hand() -> None:
    row = dispatch.pipeline(3, 4, 2)  # it compares their results
    assert row["rounds"] == 2 and row["seconds_by_hand"] > 0


def test_bars() -> None:
    rows = [
        {"part": "instruction", "wanted": 10, "microseconds": 24.0, "rounds": 5},
        {"part": "leaves", "devices": 1, "ratio": 1.06, "rounds": 5},
        {"part": "pipeline", "ratio": 1.1, "rounds": 2},
    ]
    bars = dispatch.bars_of(rows)
    assert {name: bar.holds for name, bar in bars.items()} == {
        "microseconds_with_10_arguments": True, "leaves_on_1": False, "pipeline": True,
    }  # fmt: skip
