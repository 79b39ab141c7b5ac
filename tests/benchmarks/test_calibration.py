"""The bars of the benchmark that measures what a calibration predicts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.calibration import bars, pairs


def rows(*times: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"predicted": p, "measured": m, "error": p / m - 1, "profiled": 1.25 * m, "unaccounted": 0.01 * m}
        for p, m in times
    ]


def test_the_bars_say_how_far_predictions_are_off_and_in_which_order() -> None:
    found = bars(rows((1.1, 1.0), (2.0, 2.0), (2.4, 3.0), (4.0, 4.0)))
    assert found["median_error"].value == pytest.approx(0.05)
    assert found["rank_distance"].value == pytest.approx(0.0)
    assert found["pairs_missing"].value == 8
    assert found["profile_overhead"].value == pytest.approx(0.25) and not found["profile_overhead"].holds
    assert found["profile_unaccounted"].value == pytest.approx(0.04) and found["profile_unaccounted"].holds
    swapped = bars(rows((2.0, 1.0), (1.0, 2.0), (3.0, 3.0), (4.0, 4.0)))
    assert swapped["rank_distance"].value == pytest.approx(1 - (1 - 6 * 2 / (4 * 15)))
    assert not swapped["rank_distance"].holds


def test_every_model_runs_under_every_method() -> None:
    assert len(pairs()) == len({*pairs()}) == 12
