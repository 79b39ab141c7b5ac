"""The same numbers as one device: every model under every recipe and under planned plans, dropout on, float32.

GPT's covering set and a few cases of the other models always; the whole product with `-m slow`, which leaves out what
has passed for the same sources before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.equivalence import cases, compare, results
from tests.equivalence.cases import Case

# As users compile, too; each takes most of a minute of CPU time.
COMPILED_BY_DEFAULTS = (
    Case("megatron", "dp1", 2, 2),
    Case("zero", "stage3", 1, 1, "gpt_scan"),
)


def _marked(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(c, marks=[pytest.mark.xla_defaults] * (c in COMPILED_BY_DEFAULTS)) for c in cases]


def _check(case: Case, found: compare.Deviation) -> None:
    assert found.loss <= compare.LOSS_LIMIT, found
    assert found.tree <= compare.TREE_LIMIT, found
    assert found.leaf <= 1.0, found
    if case.must_reduce:
        assert found.reductions > 0, f"{case} computes everything everywhere: nothing was shared out"
    if case.stages_known:
        assert found.stages == case.stages


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", _marked(cases.covering(cases.few_microbatches(cases.full_product()))), ids=str)
def test_covering_set(case: Case) -> None:
    """Where each starts from one device's state; the other models' is made where the plan has it."""
    _check(case, compare.run_case(case, made_in_place=False))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", _marked(cases.BY_DEFAULT), ids=str)
def test_other_models(case: Case) -> None:
    _check(case, compare.run_case(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.everything(), ids=str)
def test_full_product(case: Case) -> None:
    before = results.latest().get(str(case))
    if before is not None and before["passed"]:
        pytest.skip("passed before for the same sources and versions")
    found = None
    try:
        found = compare.run_case(case)
        _check(case, found)
    except Exception as error:
        results.append(case, found, f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    results.append(case, found)
