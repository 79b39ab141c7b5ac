"""The benchmark of weak scaling: its table and its page, of points that jobs have left, and a point as it is run."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

from benchmarks import weak_scaling


def _point(devices: int, seconds: list[float], predicted: float) -> dict[str, Any]:
    return {
        "family": "gpt", "processes": devices // 2 or 1, "devices": devices, "device": "cpu",
        "parameters": 1_000_000 * devices, "plan": "auto", "predicted": predicted, "seconds": seconds,
        "flops": 1e9 * devices, "loss": 1.0,
    }  # fmt: skip


def test_efficiency_is_throughput_a_device_over_that_of_the_fewest() -> None:
    one, two, four = weak_scaling.rows_of(
        [_point(4, [0.8, 9.0, 0.7], 0.25), _point(1, [0.2, 0.2, 0.3], 0.2), _point(2, [0.25], 0.2)]
    )
    assert [row["devices"] for row in (one, two, four)] == [1, 2, 4]
    assert [row["efficiency"] for row in (one, two, four)] == pytest.approx([1.0, 0.8, 0.25])
    assert [row["predicted_efficiency"] for row in (one, two, four)] == pytest.approx([1.0, 1.0, 0.8])
    assert four["throughput"] == pytest.approx(4e9 / 0.8)


@pytest.mark.parametrize("family", ["gpt", "moe", "wresnet"])
def test_alpas_curve_begins_at_one(family: str) -> None:
    curve = weak_scaling.published(family)
    assert curve[1] == 1.0 and max(curve) >= 16
    assert all(0.3 < share < 1.5 for share in curve.values())


def test_points_of_jobs_become_a_table_and_a_page(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bokeh")
    files = []
    for devices, seconds in ((1, 0.2), (4, 0.4)):
        files.append(tmp_path / f"{devices}.json")
        files[-1].write_text(json.dumps(_point(devices, [seconds], 0.3)))
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    monkeypatch.setattr(sys, "argv", [
        "weak_scaling", "--family", "gpt", "--points", *map(str, files), "--plot", str(page), "--json", str(numbers),
    ])  # fmt: skip
    weak_scaling.main()
    text = capsys.readouterr().out
    assert "weak scaling, gpt" in text and "0.400 (n = 1)" in text and "0.50" in text
    found = json.loads(numbers.read_text())
    assert found["bars"]["gpt_efficiency_on_4"]["value"] == pytest.approx(0.5)
    assert all(word in page.read_text() for word in ("measured", "predicted", "Alpa on V100s", "efficiency"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "moe", "wresnet"])
def test_a_point_is_run_by_two_processes(family: str) -> None:
    point = weak_scaling.measure(family, processes=2, devices=1, steps=1)
    assert (point["processes"], point["devices"], len(point["seconds"])) == (2, 2, 1)
    [row] = weak_scaling.rows_of([point])
    assert row["throughput"] > 0 and row["predicted_throughput"] > 0
