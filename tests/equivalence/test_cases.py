"""The covering set covers, and the comparison can fail. Neither needs autopar to run anything."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.models.shared import Batch
from tests.equivalence import cases, compare, results
from tests.equivalence.cases import Case
from tests.equivalence.subjects import SUBJECTS
from tests.equivalence.summary import summary

GPT = SUBJECTS["gpt"]
CONFIG = GPT.config(2)


def test_the_covering_set_has_every_pair_of_the_product_and_is_as_small_as_can_be() -> None:
    product = cases.full_product()
    chosen = cases.covering(product)
    # Seven methods times four numbers of microbatches are 28 pairs, of which a case has one.
    assert len(chosen) == len(set(chosen)) == 28
    for case in product:
        for pair in cases.pairs(case):
            assert any(pair in cases.pairs(other) for other in chosen), pair


def test_what_makes_no_sense_is_left_out_for_a_reason() -> None:
    assert cases.senseless(Case("zero", "stage1", 2, 1)) == "zero has no pipeline"
    assert cases.senseless(Case("megatron", "dp2", 8, 1)) == "8 devices are not divisible by 2 × 8"
    assert cases.senseless(Case("megatron", "dp2", 4, 8)) is None  # 8 = dp 2 × tp 1 × pp 4


def test_results_are_remembered_for_the_version_that_made_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, case = tmp_path / "results.jsonl", cases.full_product()[0]
    found = compare.Deviation(1e-8, 2e-8, 0.5, "w", stages=1, reductions=3)
    results.append(case, found, file=file)
    assert results.latest(file)[str(case)]["passed"]
    assert "1 of 80 cases pass, 0 fail, 79 not run" in summary(results.latest(file), cases.full_product())
    results.append(case, found, "AssertionError: later", file=file)
    assert not results.latest(file)[str(case)]["passed"]
    monkeypatch.setattr(results, "version", lambda: {"sources": "other"})
    assert not results.latest(file)


def test_the_batch_is_divisible_in_every_case() -> None:
    for case in cases.everything():
        assert case.batch_size // case.subject.unit % (case.microbatches * case.data_parallel) == 0, case


def test_what_always_runs_is_in_the_product() -> None:
    assert set(cases.BY_DEFAULT) <= set(cases.everything())
    assert {case.model for case in cases.BY_DEFAULT} == set(SUBJECTS) - {"gpt", "unet"}


def test_the_product_has_every_combination() -> None:
    # By method: 4 + 3·4 + 2·3·4 + 3·4 + 4 + 3·4 + 3·4.
    assert len(cases.full_product()) == 4 + 12 + 24 + 12 + 4 + 12 + 12


@pytest.fixture(scope="module")
def expected() -> compare.Reference:
    return compare.reference("gpt", 2, 8)


def test_a_run_equals_itself(expected: compare.Reference) -> None:
    found = compare.deviation(expected, expected, 1, 0)
    assert (found.loss, found.tree, found.leaf) == (0, 0, 0)
    assert found.within


def _scaled(tree: Any, name: str, factor: float) -> Any:
    def scale(path: Any, leaf: Any) -> Any:
        return leaf * factor if name in jax.tree_util.keystr(path) else leaf

    return jax.tree_util.tree_map_with_path(scale, tree)


def test_a_wrong_gradient_of_one_leaf_is_named(expected: compare.Reference) -> None:
    wrong = dataclasses.replace(expected, sgd_change=_scaled(expected.sgd_change, "final_norm']['bias", 1.01))
    found = compare.deviation(wrong, expected, 1, 0)
    # 1 % off where 0.01 % is allowed.
    assert 50 < found.leaf < 101
    assert "final_norm" in found.worst_leaf
    assert not found.within


def test_not_a_number_fails(expected: compare.Reference) -> None:
    wrong = dataclasses.replace(expected, sgd_change=_scaled(expected.sgd_change, "positions", np.nan))
    found = compare.deviation(wrong, expected, 1, 0)
    assert "positions" in found.worst_leaf
    assert not found.within


@pytest.mark.parametrize("field", ["adamw_state", "adamw_loss"])
def test_another_result_of_adamw_fails(expected: compare.Reference, field: str) -> None:
    value = jax.tree.map(lambda leaf: leaf * 1.0002, getattr(expected, field))
    assert not compare.deviation(dataclasses.replace(expected, **{field: value}), expected, 1, 0).within


def test_the_limits_leave_room_for_another_order_of_summation(expected: compare.Reference) -> None:
    """Data parallelism by jax.jit itself: what only reorders sums is within the limits."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    everywhere, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    step = jax.jit(GPT.model.make_train_step(CONFIG, compare.either()), in_shardings=(everywhere, cut))

    start = jax.jit(GPT.model.make_init(CONFIG, compare.either()))(jax.random.key(0))

    def run(by_sgd: bool, data: list[Batch]) -> tuple[Any, Any, float]:
        state = compare.beginning(start, by_sgd)
        before = compare.compared(state)
        for batch in data:
            state, metrics = step(state, batch)
        return before, compare.compared(state), float(metrics["loss"])

    found = compare.deviation(compare.measure(run, GPT, CONFIG, 8), expected, 1, 0)
    assert found.within, found
    assert found.tree > 0  # it is another computation


def test_the_reference_learns(expected: compare.Reference) -> None:
    data = compare.batches(GPT, CONFIG, 1, 8)
    before, _, first = compare.on_one_device(GPT, CONFIG)(False, data)
    assert compare.norm(before) > 0
    assert expected.adamw_loss < first


def test_reductions_are_counted_in_compiled_programs() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("data")))
    everywhere = NamedSharding(mesh, P())
    summed = jax.jit(lambda a: a.sum(0), out_shardings=everywhere).lower(x).compile().as_text()
    gathered = jax.jit(lambda a: a * 2, out_shardings=everywhere).lower(x).compile().as_text()
    assert compare.count_reductions([summed or ""]) == 1
    assert compare.count_reductions([gathered or ""]) == 0
