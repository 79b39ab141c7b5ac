"""Reports: their numbers against those of the plan, why, and what they compare."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.errors import ReportError
from autopar.ir.plan import Plan
from autopar.ir.why import Alternative
from autopar.planning.finisher import Finisher, Restored
from autopar.reporting.diff import PlanDiff
from autopar.reporting.report import Report
from tests import models
from tests.planned import cluster_of
from tests.reports import LAYERS, METHODS, NAMES, details_of, from_file, plan_of, step_and_args

# The numbers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_the_step_add_up(name: str) -> None:
    plan = plan_of(name)
    report = plan.report(explain=0)
    details = details_of(report)
    for split in details.splits:
        assert math.fsum(split.parts.values()) == pytest.approx(plan.step_time, rel=1e-9)
        assert all(part >= 0 for part in split.parts.values())
        stages = [plan.stages[stage] for stage in split.stages]
        assert split.compute == pytest.approx(sum(stage.compute for stage in stages))
        communication = split.collectives + split.resharding + split.hidden
        assert communication == pytest.approx(sum(stage.communication for stage in stages))
    assert report.split is not None
    assert report.split.waiting + report.split.bubble == pytest.approx(plan.bubble * plan.step_time, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_timeline_is_that_of_the_plan(name: str) -> None:
    plan = plan_of(name)
    details = details_of(plan.report(explain=0))
    assert max(span.end for span in details.spans) == pytest.approx(plan.step_time)
    busy: dict[int, float] = defaultdict(float)
    for group, spans in itertools.groupby(sorted(details.spans, key=lambda s: (s.group, s.start)), lambda s: s.group):
        for before, after in itertools.pairwise(mine := list(spans)):
            assert after.start >= before.end - 1e-12
        busy[group] = sum(span.end - span.start for span in mine)
    for group, split in enumerate(details.splits):
        parts = split.compute + split.collectives + split.resharding + split.launches
        assert busy[group] == pytest.approx(parts)
    met = {(span.stage, span.microbatch) for span in details.spans if span.phase == "forward"}
    whole_step = plan.num_microbatches == 1
    assert met == {
        (stage, -1 if whole_step else k) for stage in range(len(plan.stages)) for k in range(plan.num_microbatches)
    }


@pytest.mark.parametrize("name", NAMES)
def test_phases_are_told_apart_though_one_program_does_several(name: str) -> None:
    """The last stage's two passes are one program; of one stage and one microbatch the whole step is."""
    plan = plan_of(name)
    report = plan.report(explain=0)
    for split in details_of(report).splits:
        stages = [plan.stages[stage] for stage in split.stages]
        for stage in stages:
            assert stage.forward > 0 and stage.backward > 0
            assert bool(stage.weights) == (name == "zero-bubble")
            assert stage.once > 0  # the update
        phases = sum(plan.num_microbatches * stage.per_microbatch + stage.once for stage in stages)
        assert phases == pytest.approx(split.compute + split.collectives + split.resharding + split.launches)
    first = plan.stages[0]
    (row,) = (line for line in str(plan).splitlines() if line.startswith("0 "))
    for seconds in (first.forward, first.backward, first.once):
        assert f" {seconds * 1e3:.3f} " in row
    assert row in str(report)
    (stage, *_) = json.loads(report.to_json())["stages"]
    assert (stage["forward"], stage["backward"], stage["once"]) == (first.forward, first.backward, first.once)


@pytest.mark.parametrize("name", NAMES)
def test_memory_over_time_peaks_at_what_the_plan_counts(name: str) -> None:
    plan = plan_of(name)
    report = plan.report(explain=0)
    for group, curve in zip(report.groups, details_of(report).memory, strict=True):
        memories = [plan.stages[stage].memory for stage in group.stages]
        assert sum(curve.state.values()) == sum(memory.state for memory in memories)
        assert all(nbytes >= 0 for nbytes in curve.state.values())
        assert curve.gradients == sum(memory.gradients for memory in memories)
        assert max(curve.temporaries) == group.temporaries
        most = sum(memory.activations for memory in memories)
        # Interleaved stages, and what waits for the gradients of parameters, need not be at their most together.
        if name in ("interleaved", "zero-bubble"):
            assert max(curve.activations) <= most
        else:
            assert max(curve.activations) == most
        assert curve.peak <= group.total
        assert curve.activations[-1] <= curve.activations[0] or plan.num_microbatches == 1
    assert max(group.total for group in report.groups) == plan.peak_memory


@pytest.mark.parametrize("name", NAMES)
def test_operators_take_what_the_programs_take(name: str) -> None:
    plan = plan_of(name)
    details = details_of(plan.report(explain=0))
    if len(plan.stages) == 1:
        listed = math.fsum(each.seconds for each in details.operators) + details.other_seconds
        assert listed == pytest.approx(plan.stages[0].compute + plan.stages[0].communication)
    times = [each.seconds for each in details.operators]
    assert times == sorted(times, reverse=True)
    for each in details.operators:
        assert all(0 <= layer < len(details.layers) for layer in each.layers)
    products = [each for each in details.operators if each.name == "dot_general"]
    assert {each.phase for each in products} - {"weights"} == {"forward", "backward"}
    assert any("deep_loss" in each.source for each in products)


@pytest.mark.parametrize("name", NAMES)
def test_links_take_what_collectives_take(name: str) -> None:
    plan = plan_of(name)
    details = details_of(plan.report(explain=0))
    seconds: dict[int, float] = defaultdict(float)
    for use in details.links:
        assert use.count > 0
        assert use.nbytes > 0
        if use.kind != "transfer":
            seconds[use.stage] += use.seconds
            assert use.link == "link"
    for index, stage in enumerate(plan.stages):
        # Cutting a piece out of an array is no collective.
        assert seconds[index] <= stage.communication * (1 + 1e-9)
    transfers = [use for use in details.links if use.kind == "transfer"]
    assert bool(transfers) == (len(plan.stages) > 1)
    if name == "pipeline":
        assert {use.link for use in transfers} == {"network"}


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_those_of_the_model(name: str) -> None:
    plan = plan_of(name)
    details = details_of(plan.report(explain=0))
    assert all("deep_loss" in layer.name for layer in details.layers)
    assert [layer.stage for layer in details.layers] == sorted(layer.stage for layer in details.layers)
    assert {layer.stage for layer in details.layers} == set(range(len(plan.stages)))
    # Two products of (16·8 × 32) and (32 × 128) a block, and the scores, 64 wide.
    forward = 2 * 16 * 8 * 32 * (LAYERS * 2 * 128 + 64)
    assert sum(layer.flops * layer.count for layer in details.layers) == forward
    assert any(shared for layer in details.layers for _, _, shared in layer.reads)  # the embedding
    # The blocks' parameters, the embedding: 4 bytes each.
    stored = sum(layer.parameters * layer.count for layer in details.layers)
    assert stored == 4 * (LAYERS * 2 * 32 * 128 + 64 * 32)
    # Backward: twice that, but no gradient of the looked-up tokens.
    assert details.model_flops == 3 * forward


def test_what_the_step_itself_computes_again_is_none_of_the_models_flops() -> None:
    def loss(params: Any, batch: dict[str, Any]) -> Any:
        block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch["x"], params["stack"])
        return block(x, params["last"]).mean()

    params = {"stack": jax.ShapeDtypeStruct((3, 16, 16), "float32"), "last": jax.ShapeDtypeStruct((16, 16), "float32")}
    batch = {"x": jax.ShapeDtypeStruct((8, 16), "float32")}
    step = autopar.parallelize(models.sgd(loss), cluster=cluster_of(1, 1), batch_axes=(None, 0))
    plan = step.plan(models.sgd_state(params), batch)
    report = plan.report(explain=0)
    product = 2 * 8 * 16 * 16
    # Four forward; the first block's operand needs no gradient, but a scan computes it all the same.
    assert details_of(report).model_flops == 3 * 4 * product
    assert plan.flops > (3 * 4 + 3) * product
    peak = 1e8
    assert report.utilisation == pytest.approx(3 * 4 * product / peak / plan.step_time)


def test_parameters_are_what_the_forward_pass_reads() -> None:
    plan = plan_of("one stage")
    details = details_of(plan.report(explain=0))
    read = {leaf.path for leaf, is_parameter in zip(plan.leaves, details.parameters, strict=True) if is_parameter}
    assert read == {leaf.path for leaf in plan.leaves if leaf.path.startswith("state[0]")}


def test_virtual_devices_wait_for_their_turn() -> None:
    widths = (64, 64, 64, 16)
    cluster = autopar.load_preset("cpu", devices_per_host=4)
    step = autopar.parallelize(models.sgd(models.mlp_loss), cluster=cluster, method=recipes.megatron(2, 1, 2, 2))
    plan = step.plan(models.sgd_state(models.mlp_params(widths)), models.mlp_batch(64, widths))
    report = plan.report(explain=0)
    for split in details_of(report).splits:
        assert math.fsum(split.parts.values()) == pytest.approx(plan.step_time)
        assert split.bubble < 0.05 * plan.step_time
        assert split.waiting > 0.2 * plan.step_time


def test_throughput() -> None:
    report = plan_of("one stage").report(explain=0)
    assert report.examples_per_second == pytest.approx(16 / report.plan.step_time)
    assert report.tokens_per_second == pytest.approx(16 * 8 / report.plan.step_time)
    widths = (32, 64, 16)
    step = autopar.parallelize(models.sgd(models.mlp_loss), cluster=cluster_of(1, 2))
    images = step.plan(models.sgd_state(models.mlp_params(widths)), models.mlp_batch(32, widths)).report(explain=0)
    assert images.tokens_per_second is None
    assert "tokens" not in str(images).partition("\n\n")[0]


def test_a_report_and_its_comparison_keep_the_limit_of_memory() -> None:
    step, args = step_and_args("one stage")
    limit = 3 * plan_of("one stage").peak_memory // 2
    plan = step.plan(*args, method=dataclasses.replace(METHODS["one stage"][0], memory_limit=limit))
    report = plan.report(explain=0, compare=True)
    assert {stage.memory.capacity for stage in report.plan.stages} == {limit}
    assert {curve.capacity for curve in details_of(report).memory} == {limit}
    assert report.comparison is not None
    for each in report.comparison.candidates:
        assert each.plan is None or {stage.memory.capacity for stage in each.plan.stages} == {limit}


# Why


@pytest.mark.parametrize("name", ["one stage", "pipeline"])
def test_operators_say_why_and_what_others_would_break(name: str) -> None:
    plan = plan_of(name)
    details = details_of(plan.report(explain=4))
    explained = [each for each in details.operators if each.whys]
    assert len(explained) == 4
    assert all(each.name == "dot_general" for each in explained)
    for each in explained:
        for why in each.whys:
            assert each.operands == tuple(
                f"{array.rpartition(' ')[0]} {sharding}"
                for array, sharding in zip(each.operands, why.chosen.operands, strict=True)
            )
            more = [other.stage_seconds for other in why.others]
            assert more == sorted(more)
            for other in why.others:
                if other.fits:
                    assert other.stage_seconds == pytest.approx(other.operators_seconds + other.resharding_seconds)


def test_what_an_alternative_would_do_to_its_stage() -> None:
    slower = Alternative((), (), 0.1, 0.002)
    assert (slower.verdict, slower.fits) == ("+2 ms", True)
    assert dataclasses.replace(slower, stage_seconds=-0.002).verdict == "-2 ms"
    refused = dataclasses.replace(slower, stage_seconds=math.inf, needed=3 * 2**30, limit=2**30)
    assert (refused.verdict, refused.fits) == ("does not fit: needs 3.0 GiB of 1.0 GiB", False)
    assert dataclasses.replace(refused, needed=None).verdict == "does not fit"


# Plans from files, comparisons, differences, verdicts


def test_a_plan_from_a_file_reports_what_the_file_holds() -> None:
    plan = plan_of("pipeline")
    loaded = from_file(plan)
    report = Report(loaded)
    assert report.details is None
    assert report.utilisation is None
    assert report.groups == plan.report(explain=0).groups
    assert "report on step.plan(state, batch, method=plan)" in str(report)
    assert json.loads(report.to_json())["details"] is None
    with pytest.raises(ReportError, match=r"has no step to draw the timeline of: report on step\.plan"):
        report.to_trace()
    with pytest.raises(AttributeError, match=r"report: the plan for .* has no step at hand, .*Use step\.plan\("):
        loaded.report()  # type: ignore[attr-defined]
    step, args = step_and_args("pipeline")
    again = step.plan(*args, method=loaded).report(explain=0)
    assert details_of(again).planning_seconds is None
    assert details_of(again).spans == details_of(plan.report(explain=0)).spans


def test_a_plan_that_was_given_is_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return w - gradient, loss

    shapes = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    cluster = autopar.load_preset("dgx-a100", num_hosts=1, devices_per_host=2)
    made = autopar.parallelize(step, cluster=cluster).plan(*shapes)
    restored: list[Plan] = []
    restore = Finisher.restore

    def counted(self: Finisher, plan: Plan) -> Restored:
        restored.append(plan)
        return restore(self, plan)

    monkeypatch.setattr(Finisher, "restore", counted)
    given = autopar.parallelize(step, cluster=cluster, method=made).plan(*shapes)
    given.report().to_text()
    assert len(restored) == 1


def test_the_comparison_has_every_usual_recipe() -> None:
    report = plan_of("one stage").report(compare=True, explain=0)
    assert report.comparison is not None
    names = {each.name for each in report.comparison.candidates}
    assert {"this plan: zero_2", "auto", "data_parallel", "zero_1", "zero_3", "intra_op_only"} <= names
    assert "No plan by" not in str(report) or any(each.plan is None for each in report.comparison.candidates)
    content = json.loads(report.to_json())
    assert len(content["comparison"]["methods"]) == len(report.comparison.candidates)


def test_what_differs_between_two_plans() -> None:
    plan, other = plan_of("one stage"), plan_of("one program")
    diff = plan.report(against=other, explain=0).diff
    assert diff is not None
    by_name = {change.what: change for change in diff.plan}
    assert by_name["step time"].mine == plan.step_time
    assert by_name["step time"].other == other.step_time
    assert by_name["step time"].ratio == pytest.approx(plan.step_time / other.step_time)
    assert by_name["microbatches"].mine_text == "2"
    assert {change.what for change in diff.stages} >= {"stage 0: mesh"}
    lie = [{leaf.path: str(leaf.sharding) for leaf in each.leaves} for each in (plan, other)]
    assert {change.what for change in diff.leaves} == {path for path in lie[0] if lie[0][path] != lie[1][path]}
    assert diff.same_leaves == len(plan.leaves) - len(diff.leaves)
    same = PlanDiff.of(plan, plan)
    assert (same.plan, same.stages, same.leaves) == ((), (), ())
    pipelined = PlanDiff.of(plan_of("pipeline"), plan)
    assert {change.other for change in pipelined.stages if change.what.startswith("stage 3")} == {None}


def test_a_verdict_is_shown() -> None:
    plan = plan_of("one program")
    verdict = plan.verify_with_xla("cpu")
    report = plan.report(verification=verdict, explain=0)
    assert "compiled by jaxlib" in str(report)
    assert "Nothing here was verified" not in str(report)
    assert "Nothing here was verified" in str(plan.report(explain=0))
    assert json.loads(report.to_json())["verification"]["fits"] is True


def test_explain_is_a_number() -> None:
    for wrong in (-1, True, 1.5):
        with pytest.raises(ReportError, match="explain must be a whole number of 0 or more"):
            plan_of("one stage").report(explain=wrong)  # type: ignore[arg-type]
