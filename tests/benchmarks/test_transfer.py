"""The benchmark of transfers: what is counted, and a few pairs as they run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from autopar.ir.sharding import Sharding
from benchmarks import transfer
from benchmarks.transfer_processes import WAYS, pairs


def seen(found: int, ours: float, others: float = 1.0) -> dict[str, Any]:
    """Of a pair, as one of the processes sees it: bytes, and a round that begins at 10 s."""
    times = {"naive": others, "gather then scatter": others, "ours": ours}
    ways = {way: {"bytes": found, "times": [[10.0, 10.0 + times[way]]]} for way in WAYS}
    return {"pair": "a pair", "nbytes": 100, "fewest": 10, **ways}


def row(found: int, ours: float, others: float = 1.0) -> dict[str, Any]:
    return transfer.row_of(seen(found, ours, others), seen(found, ours, others))


def test_a_round_lasts_from_when_both_are_there_until_both_have_what_they_should() -> None:
    assert transfer.seconds([[1.0, 4.0], [8.0, 9.0]], [[2.0, 3.0], [7.0, 11.0]]) == pytest.approx(2.5)


def test_bytes_and_times_are_held_against_what_is_allowed() -> None:
    assert transfer.over_fewest(row(15, 1.0)) == 1.5
    assert transfer.over_fewest({"ours": {"bytes": 0}, "fewest": 0}) == 1
    assert transfer.over_fewest({"ours": {"bytes": 1}, "fewest": 0}) == math.inf
    assert transfer.over_allowed(row(10, 1.25)) == pytest.approx(1.0)
    assert transfer.over_allowed(row(10, 250e-6, 100e-6)) == pytest.approx(1.0)  # 150 us more than the best


def test_the_bars_are_of_all_pairs() -> None:
    alone = [{"read": False, "read_by_device_put": True}]
    others: list[dict[str, Any]] = [
        {"alternative": "device_put", "nbytes": 1, "seconds": 3.0, "ours": 2.0},
        {"alternative": "collective permute", "failed": "it hangs"},
    ]
    good, more, slow = row(10, 1.0), row(11, 1.0), row(10, 2.0)
    bars = transfer.bars_of([good] * 8 + [more, slow], alone, others)
    assert {name for name, bar in bars.items() if not bar.holds} == {"pairs_missing", "most_seconds_over_allowed"}
    assert bars["pairs_over_fewest_bytes"].value == pytest.approx(0.1)
    assert bars["most_bytes_over_fewest"].value == pytest.approx(1.1)
    assert bars["most_seconds_over_allowed"].value == pytest.approx(1.6)
    assert bars["device_put_over_ours"].value == 1.5
    assert "collective_permute_over_ours" not in bars


def test_pairs_are_of_all_kinds() -> None:
    found = pairs()
    assert len(set(found)) == len(found) >= transfer.PAIRS
    assert {len(pair.shape) for pair in found} == {1, 2, 3}
    assert max(pair.dtype.itemsize * math.prod(pair.shape) for pair in found) <= 16 << 20
    assert any(pair.source.size % pair.target.size and pair.target.size % pair.source.size for pair in found)
    assert {pair.sent == Sharding.replicated(len(pair.shape)) for pair in found} == {True, False}


@pytest.mark.slow
def test_a_few_pairs() -> None:
    with transfer.finished_job("transfer_processes.py", 2, 1, 43, limit=300) as folder:
        rows = [transfer.row_of(a, b) for a, b in transfer.both(folder)]
    assert len(rows) == 3
    assert all(row["ours"]["bytes"] == row["fewest"] > 0 for row in rows)
    assert all(row[way]["bytes"] >= row["fewest"] and row[way]["seconds"] > 0 for row in rows for way in WAYS)
    with transfer.finished_job("transfer_processes.py", 1, 1, 43, limit=300) as folder:
        alone: list[Mapping[str, Any]] = json.loads((folder / "alone.json").read_text())
    assert not any(row["read"] for row in alone)
    assert any(row["read_by_device_put"] for row in alone)
