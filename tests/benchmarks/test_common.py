"""Bars, and the form of the JSON files."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from autopar.ir.plan import LeafPlan
from autopar.ir.sharding import Sharding
from benchmarks import common, overhead, train
from benchmarks.models import gpt, shared
from benchmarks.sources import Sources


def test_a_bar_holds_up_to_its_limit_and_never_for_nan() -> None:
    assert common.Bar(1.05, 1.05).holds
    assert not common.Bar(1.0501, 1.05).holds
    assert not common.Bar(math.nan, 1.05).holds
    assert common.Bar(math.nan, None).holds
    assert str(common.Bar(0.5, None, n=3)) == "0.5000 (n = 3)"


def test_the_report(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "result.json"
    bars = {"a": common.Bar(math.nan, 2.0), "b": common.Bar(np.float64(1.0), 2.0, 4, "held out", "%")}
    rows = [{"name": "a", "times": (1.0, math.inf)}]
    common.report(bars, rows, None)
    assert not file.exists()
    common.report(bars, rows, file)
    assert capsys.readouterr().out == 2 * "a: nan <= 2.0: BROKEN\nb: 1.0000 <= 2.0: holds (n = 4)\n"
    found = json.loads(file.read_text())
    assert found["bars"]["a"] == {"value": None, "limit": 2.0, "holds": False}
    told = {"n": 4, "sample": "held out", "unit": "%"}
    assert found["bars"]["b"] == {"value": 1.0, "limit": 2.0, "holds": True, **told}
    assert found["rows"] == [{"name": "a", "times": [1.0, None]}]
    assert found["machine"]["jax"] == jax.__version__
    assert found["machine"]["cores"] >= 1


def test_where_a_result_comes_from(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "benchmarks" / "solver.py"
    file.parent.mkdir()
    file.write_text("LIMIT = 3\n")
    found = common.provenance("benchmarks.solver", ["--seed", "1"], tmp_path)
    assert found["sources"] is None  # written while this process ran
    assert str(file) in capsys.readouterr().out
    os.utime(file, (0, 0))
    found = common.provenance("benchmarks.solver", ["--seed", "1"], tmp_path)
    assert found["sources"] == Sources(tmp_path).fingerprint("benchmarks.solver")
    assert (found["arguments"], found["commit"]) == (["--seed", "1"], "unknown")  # no repository
    assert found["seconds"] > 0


def test_a_commit_says_whether_sources_have_changed_since(tmp_path: pathlib.Path) -> None:
    def git(*arguments: str) -> None:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit() -> Any:
        return common.provenance("benchmarks.solver", [], tmp_path)["commit"]

    file = tmp_path / "passes" / "cut.py"
    for path, text in {
        file: "LIMIT = 3\n",
        tmp_path / "benchmarks" / "solver.py": "import autopar.passes.cut\n",
    }.items():
        path.parent.mkdir()
        path.write_text(text)
    (tmp_path / "autopar").mkdir()
    (tmp_path / "autopar" / "passes").symlink_to(pathlib.Path("..") / "passes")
    git("init")
    git("add", ".")
    git("commit", "-m", "All")
    (tmp_path / "benchmarks" / "other.py").write_text("")
    clean = commit()
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    file.write_text("LIMIT = 4\n")
    assert commit() == f"{clean}+"


def test_where_a_result_goes_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--only", "a", "--json", "x.json", "--keep", "d", "--json=y.json", "FILE"])
    assert common._running()[1] == ["--only", "a", "FILE"]


@pytest.mark.parametrize("statistic", [overhead.median_of_ratios, overhead.ratio_of_medians])
def test_ratios_find_a_known_overhead(statistic: Any) -> None:
    random = np.random.default_rng(0)
    reference = random.normal(0.2, 0.002, 200)
    times = 1.1 * random.normal(0.2, 0.002, 200)
    found = statistic(times, reference, 0)
    assert 1.09 < found.low < 1.1 < found.high < 1.11
    assert found.low < found.value < found.high


def test_a_bar_takes_the_larger_upper_end_and_breaks_for_short_steps() -> None:
    row = {
        "median_of_ratios": {"high": 1.01},
        "ratio_of_medians": {"high": 1.04},
        "long_enough": True,
        "rounds": 7,
    }
    assert overhead.bar(row, 1.05) == common.Bar(1.04, 1.05, 7)
    assert not overhead.bar({**row, "long_enough": False}, 1.05).holds


def test_every_program_runs_once_a_round() -> None:
    runs: list[int] = []

    def program(index: int) -> overhead.Program:
        def step(state: shared.State, batch: shared.Batch) -> tuple[shared.State, shared.Metrics]:
            runs.append(index)
            return {"count": state["count"] + 1}, {}

        return overhead.Program(step, {"count": 0})

    programs = [program(index) for index in range(3)]
    times = overhead.interleaved(programs, {}, 20, seed=0)
    assert times.shape == (20, 3)
    assert [p.state["count"] for p in programs] == [20, 20, 20]
    rounds = [tuple(runs[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    assert len(set(rounds)) > 1  # in random order


def test_megatron_by_hand_cuts_weights_and_their_moments_alike() -> None:
    config = gpt.GPTConfig(64, 16, num_layers=1, width=32, num_heads=8)
    state = jax.eval_shape(gpt.make_init(config, shared.make_optimizer(1e-3, 1, 10)), jax.random.key(0))
    mesh = Mesh(np.array(jax.devices()[:8]), ("model",))
    shardings = overhead.megatron(mesh, state)
    block = shardings["params"]["blocks"][0]
    assert block["mlp"]["up"].spec == P(None, "model")
    assert block["mlp"]["down"].spec == P("model", None)
    assert block["attention"]["key"].spec == P(None, "model", None)
    assert shardings["key"].spec == shardings["step"].spec == P()
    # Per block: query, its bias, key, value, its bias, out, up, its bias, down; and the embedding.
    cut = [s for s in jax.tree.leaves(shardings) if s.spec != P()]
    assert len(cut) == 3 * (9 + 1)  # parameters and two moments


def test_the_loss_curves_are_compared_step_by_step() -> None:
    def run(*losses: float) -> train.Run:
        return train.Run("", losses, 8.0, 4.0, 1.0, 1.0)

    assert train.largest_difference(run(2.0, 1.1, 4.0), run(2.0, 1.0, 4.0)) == pytest.approx(0.1)


def test_tensor_sharding_is_told_from_zero() -> None:
    def leaf(path: str, stage: int, *dims: str, batch_axis: int | None = None) -> LeafPlan:
        sharding = Sharding(tuple((axis,) if axis else () for axis in dims))
        return LeafPlan(path, (8,) * len(dims), "float32", stage, sharding, batch_axis is None, batch_axis)

    leaves = [
        leaf("batch['inputs']", 0, "x", "", batch_axis=0),
        leaf("state['params']['zero']", 0, "x", ""),
        leaf("state['params']['tensor']", 0, "", "y"),
        leaf("state['params']['both']", 0, "x", "y"),
        leaf("state['params']['bias']", 0, "y"),
        leaf("state['opt_state']['tensor']", 0, "", "y"),
        leaf("state['params']['no batch here']", 1, "", "y"),
    ]
    assert train.tensor_sharded(leaves) == ["state['params']['tensor']", "state['params']['both']"]
