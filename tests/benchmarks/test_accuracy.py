"""Published measurements: every row is read, and what is scored is what was asked for."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from benchmarks import accuracy, common, published
from benchmarks.accuracy import Prediction
from benchmarks.published import Measurement, Way

ALPA, MEGATRON = accuracy.DEFAULT
H100 = accuracy.DATA / "h100_published.csv"


def test_every_row_is_read() -> None:
    rows = published.read(ALPA)
    assert len(rows) == 105
    assert sum(not row.fits for row in rows) == 5
    doubts = [row.doubt for row in rows]
    assert sum("not known exactly" in doubt for doubt in doubts) == 23
    assert all(row.ways or row.doubt for row in rows)
    assert {row.family for row in rows if not row.doubt} == {"gpt", "moe", "wresnet"}
    assert {row.cluster.num_devices for row in rows} == {1, 2, 4, 8, 16}


def test_megatron_table() -> None:
    first, *_, last = published.read(MEGATRON)
    assert (first.cluster.num_devices, first.ways) == (
        32,
        (Way(recipes.megatron(32, 1, 1, 1, sequence_parallel=False), 1),),
    )
    assert first.seconds == pytest.approx(15.46e15 / (137e12 * 32), rel=0.001)  # by the formula of the table
    assert not last.doubt
    [way] = last.ways
    assert way.method.schedule == "interleaved"
    assert way.method.num_stages == 105  # 35 devices in a row, three stages of one layer each


def test_h100_rows() -> None:
    """Times follow from model FLOP/s or tokens; sizes of microbatches that are not stated are all tried."""
    rows = {row.case: row for row in published.read(H100)}
    small = rows["Megatron-Core GPT 1.7B bf16 48"]
    tokens, width = 192 * 4096, 2048
    flops = 72 * tokens * 24 * width**2 * (1 + 4096 / (6 * width) + 131072 / (12 * 24 * width))
    assert small.seconds == pytest.approx(flops / (408.8e12 * 48))
    assert [way.num_microbatches for way in small.ways] == [4, 2, 1]
    assert {way.method.zero for way in small.ways} == {1}
    llama = rows["torchtitan Llama 3.1 8B bf16 8"]
    assert llama.seconds == pytest.approx(16 * 8192 / (6667 * 8))
    assert llama.cluster.hosts[0].kind.memory == 96 * 10**9
    interleaved = {way.method.num_stages for way in rows["Megatron-Core GPT 70B bf16 768"].ways}
    assert interleaved == {2, 4, 6, 12, 14}  # two stages, each of 42 layers in so many parts
    assert "8 bits" in rows["torchtitan Llama 3.1 8B float8 8"].doubt
    assert "batch" in rows["MaxText Llama2-7B bf16 8"].doubt
    assert "FLOP/s" in rows["Meta Llama 3.1 405B bf16 8192"].doubt


def test_rows_that_are_not_scored_are_not_planned() -> None:
    doubtful = [row for row in published.read(H100) if row.doubt]
    assert any(row.ways for row in doubtful)
    assert all(found is None for _, found in accuracy.predicted(doubtful, 1))


def test_the_program_of_a_llama() -> None:
    llama = next(row for row in published.read(H100) if row.case == "torchtitan Llama 3.1 8B bf16 8")
    _, state, batch = llama.step(llama.ways[0])
    assert sum(leaf.size for leaf in jax.tree.leaves(state["params"])) == pytest.approx(8.03e9, rel=1e-3)
    assert batch["inputs"].shape == (16, 8192)


def test_what_alpas_solver_chose_minimizes_what_it_minimized() -> None:
    """The communication of one microbatch; what was forced on it, and other systems' plans, are as they were told."""
    objectives: dict[tuple[str, str], set[str]] = {}
    for row in published.read(ALPA):
        objectives.setdefault((row.method, row.family), set()).update(way.method.objective for way in row.ways)
    for method in ("alpa.intra_only", "alpa.auto_sharding"):
        assert objectives[method, "gpt"] == {"step"}
        assert objectives[method, "moe"] == objectives[method, "wresnet"] == {"microbatch"}
    assert objectives["megatron", "gpt"] == objectives["alpa.zero_3", "moe"] == {"step"}
    cluster = autopar.load_preset(published.ALPAS)
    seen = published.seen_by_alpa(cluster)
    assert seen.hosts[0].kind.memory_bandwidth > 1e6 * cluster.hosts[0].kind.memory_bandwidth
    assert (seen.hosts[0].link, seen.network) == (cluster.hosts[0].link, cluster.network)


def test_times_of_gpt_follow_from_its_operations() -> None:
    """47.53 TFLOP/s for 128 sequences on one device; Alpa's row of 1024 at 46.2 TFLOP/s took 71 s."""
    row = next(row for row in published.read(ALPA) if row.method == "megatron")
    assert row.seconds == pytest.approx(71.1 / 8 * 46.2 / 47.53, rel=0.01)


def test_a_time_that_nobody_published_is_none() -> None:
    row = next(row for row in published.read(ALPA) if (row.case, row.method) == ("e2e gpt 2", "megatron"))
    assert row.seconds is None
    assert "no time was published" in row.doubt


def measurement(case: str, method: str, seconds: float | None, doubt: str = "", ranked: bool = True) -> Measurement:
    return Measurement(
        case, "gpt", method, False, {}, 8, autopar.load_preset("cpu"), (), seconds, 1e9, seconds is not None, doubt,
        ranked,
    )  # fmt: skip


def test_bars() -> None:
    rows = [
        (measurement("a", "x", 1.0), Prediction(1.2, 1.1e9, 0.0)),
        (measurement("a", "y", 2.0), Prediction(2.0, 1e9, 0.0)),
        (measurement("a", "z", None), Prediction(1.1, 1e9, 0.0)),  # it ran out of memory
        (measurement("a", "v", 9.0, "its plan is not known exactly"), Prediction(0.1, 1e9, 0.0)),
        (measurement("a", "w", 9.0, "it was projected", ranked=False), Prediction(0.1, 1e9, 0.0)),
        (measurement("b", "x", 1.0, "no time was published"), Prediction(1.0, 1e9, 0.0)),
    ]
    count, wrong = accuracy.pairs(rows)
    assert count == 6  # of x, y, z, v
    assert len(wrong) == 4  # z before y; v before x and y, and not before z
    found = accuracy.bars(rows)
    assert found["time_gpt"].value == pytest.approx(0.1)
    assert found["memory"].value == pytest.approx((0.1 + 0 + 0) / 3)
    assert found["wrong_about_fitting"].value == 1
    assert found["pairs_in_the_wrong_order"].value == pytest.approx(4 / 6)


def test_fitted_rows_are_scored_apart() -> None:
    fitted = dataclasses.replace(measurement("a", "v", 1.0), fitted="batched_share")
    rows = [
        (fitted, Prediction(1.01, 1.01e9, 0.0)),
        (measurement("a", "x", 1.0), Prediction(1.2, 1.1e9, 0.0)),
        (measurement("a", "y", 2.0), Prediction(1.1, 1e9, 0.0)),
        (dataclasses.replace(fitted, method="w", seconds=None, fits=False), Prediction(1.0, 1e9, 0.0)),
    ]
    found = {name: dataclasses.replace(bar, value=round(bar.value, 9)) for name, bar in accuracy.bars(rows).items()}
    # 20 % too long, and 45 % too short.
    assert found["time_gpt"] == common.Bar(0.325, 0.1, 2, "held out", "%")
    assert found["memory"] == common.Bar(0.05, 0.1, 2, "held out", "%")
    assert found["wrong_about_fitting"] == common.Bar(0, 0, 2, "held out")
    assert found["pairs_in_the_wrong_order"] == common.Bar(1.0, 0.1, 1, "held out", "%")  # y before x
    assert found["fitted_time_gpt"] == common.Bar(0.01, None, 1, "fitted", "%")
    assert found["fitted_wrong_about_fitting"] == common.Bar(1, None, 2, "fitted")
    # v before y; w before all three.
    assert found["fitted_pairs_in_the_wrong_order"] == common.Bar(0.75, None, 4, "fitted", "%")
    assert list(found)[-1].startswith("fitted")


def test_rows_of_fitted_constants_are_marked() -> None:
    """Convolutions and batched products of the V100's presets were fitted to what one device did."""
    rows = published.read(ALPA)
    marked = {(row.family, row.cluster.num_devices, row.fitted) for row in rows if row.fitted}
    assert marked == {("moe", 1, "batched_share"), ("wresnet", 1, "convolution_share")}
    assert not any(row.fitted for row in published.read(MEGATRON))
    # A preset that says of itself that something was fitted has a row above.
    folder = pathlib.Path(autopar.__file__).parent / "cost_model" / "data"
    assert {path.name.split("xlarge")[0] for path in folder.glob("*.json") if "fitted" in path.read_text()} == {"p3.16"}


@pytest.mark.slow
def test_what_ran_twice_is_predicted_once() -> None:
    row = next(row for row in published.read(ALPA) if row.case == "intra-op-ablation wresnet 1")
    (_, found), (_, again) = accuracy.predicted([row, row], 1)
    assert found is not None and found.seconds is not None
    assert 0.5 < found.seconds / 0.93 < 1.5
    assert again is found


def test_a_master_copy_is_what_the_parameters_round() -> None:
    optimizer = published.with_master_copy(optax.sgd(1e-4))
    params = {"w": jnp.ones(4, jnp.float16)}
    state = optimizer.init(params)
    for _ in range(10):  # each change is below what float16 resolves next to 1
        updates, state = optimizer.update({"w": jnp.ones(4, jnp.float16)}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state["master"]["w"], 1 - 1e-3, rtol=1e-5)
    assert params["w"].dtype == jnp.float16
    assert math.isclose(float(params["w"][0]), 1 - 1e-3, rel_tol=1e-3)
