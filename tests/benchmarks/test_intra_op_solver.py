"""The benchmark of the intra-op solver: the contest's format and rule."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import sys

import pytest

from autopar.passes.solver.problem import evaluate
from benchmarks import common, intra_op_solver
from benchmarks.intra_op_solver import Instance

EXAMPLE = pathlib.Path(__file__).parents[1] / "data" / "iopddl_example.json"


@pytest.mark.parametrize(
    ("choice", "cost"),
    [
        ((0, 0, 2, 1, 0), 445),  # nodes 15+55+35+75+95 = 275, edges 30+40+10+30+60 = 170
        ((0, 1, 2, 0, 0), 495),  # nodes 295, edges 40+40+20+30+70 = 200
        ((0, 0, 1, 1, 0), None),  # 415, but at time 50 the usages 10 + 25 + 20 = 55 are over the limit of 50
    ],
)
def test_known_costs_of_the_example(choice: tuple[int, ...], cost: int | None) -> None:
    instance = Instance.read(EXAMPLE)
    assert instance.evaluate(choice) == cost
    seconds, peak = evaluate(instance.problem(), choice)
    assert (seconds, peak <= 50) == (cost or 415, cost is not None)


def test_evaluator_edge_cases() -> None:
    big = 10**18
    instance = Instance(
        "edges", [(0, 1), (1, 2), (5, 5)], [[1, big], [2], [4, 4]], [[10, 0], [10], [99, 99]],
        [(0, 1), (1, 0), (0, 2)], [[3, 0], [5, big], [7, big, 0, 0]], 10,
    )  # fmt: skip
    # parallel edges add up, [0, 1) and [1, 2) do not overlap, [5, 5) is never live: 1 + 2 + 4 + 3 + 5 + 7
    assert instance.evaluate((0, 0, 0)) == 22
    assert instance.evaluate((0, 0, 1)) is None  # an infinite edge
    assert instance.evaluate((1, 0, 0)) is None  # an infinite node, and a sum over int64
    over = dataclasses.replace(instance, intervals=[(0, 2), (1, 2), (5, 5)])
    assert over.evaluate((0, 0, 0)) is None
    with pytest.raises(ValueError, match="2 strategies for 3 nodes"):
        instance.evaluate((0, 0))


def test_names_and_limits() -> None:
    assert intra_op_solver.letter(pathlib.Path("a/asplos-2025-iopddl-U.json.gz")) == "U"
    assert intra_op_solver.letter(pathlib.Path("a/example.json")) == "example"
    assert [intra_op_solver.contest_seconds(name) for name in ("A", "G", "M", "S", "P", "U", "example")] == [
        60, 120, 180, 240, 240, 300, 60,
    ]  # fmt: skip


def test_command(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zipped = tmp_path / "contest-X.json.gz"
    zipped.write_bytes(gzip.compress(EXAMPLE.read_bytes()))
    (tmp_path / "best_costs.json").write_text(json.dumps({"instances": {"X": {"best_known": 445}}}))
    out = tmp_path / "out"
    monkeypatch.setattr(
        sys, "argv", ["", str(zipped), str(EXAMPLE), "--out", str(out), "--json", str(out / "all.json")]
    )
    intra_op_solver.main()
    numbers = json.loads((out / "all.json").read_text())
    assert [row["cost"] for row in numbers["rows"]] == [445, 445]
    assert [row["ratio"] for row in numbers["rows"]] == [1.0, None]
    assert all(bar["holds"] for bar in numbers["bars"].values())
    assert Instance.read(EXAMPLE).evaluate(json.loads((out / "X.json").read_text())["choice"]) == 445


def test_bars_count_what_was_not_solved() -> None:
    row = {"cost": None, "lower_bound": None, "best_known": 4, "ratio": None, "seconds": 1.0, "limit_seconds": 2.0}
    held = intra_op_solver.bars([row])
    assert held["infeasible"] == common.Bar(1.0, 0.0) and not held["largest_loss"].holds
