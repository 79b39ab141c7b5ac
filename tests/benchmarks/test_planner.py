"""The cases of the papers, and what is asked of a plan for them."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import pytest

import autopar
from autopar import recipes
from autopar.ir.method import Method
from benchmarks import growth, planner
from benchmarks.planner import Outcome
from benchmarks.sources import Sources


def test_cases_of_the_weak_scaling() -> None:
    cases = {case.name: case for case in planner.alpa_cases()}
    assert len(cases) == 21
    assert sorted({case.cluster.num_devices for case in cases.values()}) == [1, 2, 4, 8, 16, 32, 64]
    largest = cases["gpt 39B on 64"]
    assert (largest.spec["hidden_size"], largest.num_microbatches) == (8192, 1024)
    alpa = largest.rivals["alpa"]
    assert alpa.stages is not None
    assert [(stage.num_layers, stage.mesh_shape) for stage in alpa.stages] == [(1, (1, 4))] * 16
    assert cases["gpt 15B on 32"].rivals["megatron"] == recipes.megatron(1, 4, 8, 256, sequence_parallel=False)
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
        (None, [None], math.inf),
        (None, [1.0], math.inf),
    ],
)
def test_margin(ours: float | None, others: list[float | None], expected: float) -> None:
    found = {"ours": outcome(ours), "with recipes": outcome(0.1), **{str(i): outcome(x) for i, x in enumerate(others)}}
    assert planner.margin(found) == expected


def test_what_was_finished_is_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same sources."""
    case, found = planner.alpa_cases()[0], [{"a": outcome(1.0)}, {"a": outcome(None)}, {"a": outcome(2.0)}]
    monkeypatch.setattr(Sources, "fingerprint", lambda *_: "one hash")
    before = planner.folder_of(tmp_path)
    assert before == planner.folder_of(tmp_path)
    monkeypatch.setattr(Sources, "fingerprint", lambda *_: "another")
    after = planner.folder_of(tmp_path)

    def work(_: planner.Case) -> dict[str, Outcome]:
        return found.pop(0)

    assert planner.kept(case, work, before) == planner.kept(case, work, before) == {"a": outcome(1.0)}
    assert planner.kept(case, work, None) == {"a": outcome(None)}
    assert planner.kept(case, work, after) == {"a": outcome(2.0)}
    assert found == []


def test_a_published_plan_that_was_measured_stands_beside_its_measurement() -> None:
    alpa = {case.name: case for case in planner.alpa_cases()}
    assert alpa["gpt 1.3B on 4"].measured == pytest.approx({"alpa": 49.98, "megatron": 52.05}, rel=1e-3)
    assert alpa["wresnet 1B on 4"].measured == {}  # no time was published for this plan
    megatron = {case.name: case for case in planner.megatron_cases()}
    case = megatron["megatron 39.1B on 512"]
    found = {"ours": outcome(4.0), **{name: outcome(6.0 + i) for i, name in enumerate(case.rivals)}}
    seconds = case.measured["megatron"]
    expected = {"megatron predicted / measured": 6 / seconds, "ours / megatron measured": 4 / seconds}
    assert planner.beside_measured(case, found) == pytest.approx(expected)


def test_recipes_of_a_case() -> None:
    cluster = autopar.load_preset("p3.16xlarge", num_hosts=2)
    found = planner.megatron_degrees(cluster, 3 * cluster.hosts[0].kind.memory)
    methods = (*planner.within_one_stage().values(), *found.values())
    assert all(method.num_microbatches is None for method in methods)
    degrees = [name.removeprefix("megatron ") for name in found]
    assert degrees == [
        "4x1x4",
        "2x1x8",
        "1x1x16",
        "4x2x2",
        "2x2x4",
        "1x2x8",
        "4x4x1",
        "2x4x2",
        "1x4x4",
        "2x8x1",
        "1x8x2",
    ]


def four_layers(batch_size: int) -> tuple[planner.Case, dict[str, Method]]:
    """A GPT on 4 GPUs, and Megatron's degrees for it."""
    gpt = next(case for case in planner.alpa_cases() if case.name == "gpt 760M on 2")
    cluster = autopar.load_preset("p3.16xlarge-2022", num_hosts=1, devices_per_host=4)
    spec = {**gpt.spec, "num_layers": 4}
    degrees = planner.megatron_degrees(cluster, 1 << 20)
    assert len(degrees) == 5
    return dataclasses.replace(gpt, spec=spec, batch_size=batch_size, cluster=cluster, num_microbatches=4), degrees


@pytest.mark.slow
def test_degrees_that_are_far_from_the_best_are_given_up() -> None:
    case, degrees = four_layers(16)
    quick = {"quick": outcome(0.1)}  # a step of data parallelism takes 0.13 s
    found = planner.by_degrees(case, degrees, {"quick": recipes.data_parallel()}, quick)
    assert {*found} == {*degrees}  # no pipeline to interleave
    limits = {name: "0.1333" if degrees[name].num_stages != 1 else "0.1" for name in degrees}
    told = {name: f"nothing fits in less than {limit} s a step" for name, limit in limits.items()}
    assert {name: outcome.plan for name, outcome in found.items()} == told


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [64, 256])
def test_the_best_of_the_degrees_is_not_given_up(batch_size: int) -> None:
    """What is found is what each comes to alone, and the best of all is among it."""
    case, degrees = four_layers(batch_size)
    alone = {name: planner.planned(case, method).seconds for name, method in degrees.items()}
    times = {name: seconds for name, seconds in alone.items() if seconds is not None}
    best = min(times, key=times.__getitem__)
    pipeline = min((name for name in times if degrees[name].num_stages != 1), key=times.__getitem__)
    found = planner.by_degrees(case, degrees, {}, {})
    assert all(outcome.seconds in (None, times[name]) for name, outcome in found.items() if name in times)
    assert found[best].seconds == times[best]
    assert times[pipeline] < (1 + planner.WORSE) * times[best]  # or there would be no need to find it
    assert found[pipeline].seconds == times[pipeline]
    assert {f"{pipeline}, GPipe", f"{pipeline}, interleaved"} <= {*found}


def test_bars() -> None:
    first, *_, last = [case for case in planner.alpa_cases() if case.spec["family"] == "gpt"]
    rows = [
        (first, {"ours": outcome(1.0, 5.0), "with recipes": outcome(0.8), "alpa": outcome(2.0)}),
        (last, {"ours": outcome(3.0, 61.0), "with recipes": outcome(3.0), "alpa": outcome(None)}),
    ]
    found = planner.bars(rows)
    assert found["time_over_the_best_other"].value == 0.5
    assert found["time_over_the_best_other_with_recipes"].value == 0.4
    assert found["published_plans_that_do_not_fit"].value == 1
    assert found["planning_seconds"].value == 66.0
    assert not found["planning_seconds_gpt_39B"].holds
    assert found["peak_rss_gpt_39B"].holds


def test_configurations_of_megatron() -> None:
    cases = {case.name: case for case in planner.megatron_cases()}
    assert len(cases) == 10
    largest = cases["megatron 1008.0B on 3072"]
    plain = {
        f"megatron in {m}": recipes.megatron(6, 8, 64, m, sequence_parallel=False) for m in (512, 256, 128)
    }  # 3072 / 6 examples each
    interleaved = {f"{name}, 2 stages a device": recipes.megatron(6, 8, 64, m, 2, sequence_parallel=False)
                   for name, m in zip(plain, (512, 256, 128), strict=True)}  # fmt: skip
    assert largest.rivals == {**plain, **interleaved}
    names = ["megatron in 12", "megatron in 12, 2 stages a device"]
    assert list(cases["megatron 39.1B on 512"].rivals) == names  # the published 4 examples each
    assert list(cases["megatron 1.7B on 32"].rivals) == ["megatron in 1"]
    parameters = 128 * 12 * 25600**2 + 51200 * 25600
    assert parameters == pytest.approx(1008e9, rel=0.01)
    assert largest.spec["hidden_size"] == 25600


def test_bars_without_the_weak_scaling_of_alpa() -> None:
    *_, last = planner.megatron_cases()
    others = {name: outcome(0.5 + i) for i, name in enumerate(last.rivals)}
    found = planner.bars([(last, {"ours": outcome(1.0, 299.0), "with recipes": outcome(0.5), **others})])
    assert found["published_plans_that_do_not_fit"].value == 0
    assert "planning_seconds" not in found
    assert found["planning_seconds_megatron_1008B"].holds
    assert not found["time_over_the_best_other"].holds


def test_growth() -> None:
    points = growth.points()
    assert {point.number for point in points if point.series == "hosts"} == {1, 4, 16, 64, 256, 1024}
    assert [point.number for point in points if point.series == "layers, scanned"] == [24, 48, 96, 192, 384, 768]
    assert [point.number for point in points if point.series == "layers, unrolled"] == [24, 48, 96, 192]

    def measured(series: str, number: int, equations: int, seconds: float) -> growth.Measured:
        return growth.Measured(series, number, equations, seconds / 4, 3 * seconds / 4, 1.0, "")

    rows = [measured("layers, scanned", n, 100, 7.0) for n in (1, 2, 4)]
    rows += [measured("layers, unrolled", n, 10 * n, 2.0 * n**2) for n in (1, 2, 4)]
    rows += [measured("hosts", n, 100, 0.5 * n**1.5) for n in (1, 8, 64)]
    found = growth.bars(rows)
    assert found["exponent_layers_scanned"].value == pytest.approx(0.0, abs=1e-9)
    assert found["exponent_layers_unrolled"].value == pytest.approx(2.0)
    assert not found["exponent_layers_unrolled"].holds
    assert found["exponent_operators"].value == pytest.approx(2.0)
    assert found["exponent_hosts"].value == pytest.approx(1.5)
    assert found["exponent_hosts"].holds


def test_cases_of_every_preset() -> None:
    cases = planner.preset_cases()
    assert len(cases) == 9 * 3 * 3
    case = next(case for case in cases if case.name == "gpt 6.7B on 64 of dgx-h100")
    assert (len(case.cluster.hosts), case.cluster.num_devices) == (8, 64)
    assert case.cluster.xla.hides_latency
    assert not case.rivals


def test_cases_of_h100s() -> None:
    """Published degrees, with what is not published free; those that no method says have recipes beside them alone."""
    cases = {case.name: case for case in planner.h100_cases()}
    large = cases["Llama 3.1 405B, 8192 tokens, on 16384"]
    assert large.cluster.num_devices == 16384
    degrees = {method.mesh_shape for method in large.rivals.values()}
    assert degrees == {(128, 8)}
    assert {method.num_stages for method in large.rivals.values()} == {16}
    assert not large.measured
    assert not cases["Llama 3.1 405B, 131072 tokens, on 16384"].rivals
    small = cases["GPT 1.7B, 4096 tokens, on 48"]
    assert {method.mesh_shape for method in small.rivals.values()} == {(3, 16, 1)}
    assert small.measured == {"Megatron-Core": pytest.approx(0.452, rel=1e-2)}
    found = dict.fromkeys((*planner.OURS, *small.rivals), planner.Outcome(1.0, 1.0, 1.0, 150.0, 2.0**31, ""))
    bars = planner.bars([(small, found)])
    assert bars["planning_seconds_over_the_limit_of_each"].value == pytest.approx(1.25)
    assert bars["peak_rss_of_each"].value == pytest.approx(2.0)
