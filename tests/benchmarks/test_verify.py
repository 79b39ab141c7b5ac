"""Plans held against XLA's compiler: what is counted, on verdicts written by hand, and one case as it runs."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir.verification import (
    CollectiveTraffic,
    KernelTraffic,
    Overlap,
    ProgramBytes,
    ProgramCheck,
    StageCheck,
    Verification,
)
from benchmarks import verify
from tests.h100 import needs_cuda_compiler

MB = 1 << 20


def program(name: str, predicted: int, found: int, sent: int = 0, really_sent: int = 0) -> ProgramCheck:
    traffic = CollectiveTraffic("all_gather", ("x",), "link", (1, sent), (1, really_sent))
    return ProgramCheck(
        (name,), (0,), "forward", ProgramBytes(0, 0, 0, predicted), ProgramBytes(0, 0, 0, found), (traffic,),
        KernelTraffic(1, 1), None, Overlap(0.0, 0.0, None), (), 1.0,
    )  # fmt: skip


def verdict(*programs: ProgramCheck, found: int = 1, capacity: int = 1) -> Verification:
    return Verification("step", "h100", "jaxlib", (StageCheck(0, 1, found, capacity, 0),), programs)


def values(*verdicts: Verification) -> dict[str, Any]:
    rows = [row for each in verdicts for row in verify.rows_of("case", each)]
    return {name: bar.value for name, bar in verify.bars(verdicts, rows).items()}


def test_errors_are_of_programs_that_compute() -> None:
    programs = program("a", 110, 100), program("b", 80, 100), program("c", 95, 100), program("bridge", 1, 9)
    found = values(verdict(*programs))
    assert found["memory_median"] == pytest.approx(0.1)
    assert found["memory_95th_percentile"] == pytest.approx(0.19)
    assert found["programs_missing"] == 60 - 3


def test_a_plan_over_capacity_counts_from_5_percent() -> None:
    within, over = (verdict(program("a", 1, 1), found=found, capacity=100) for found in (105, 106))
    assert values(within)["accepted_over_capacity"] == 0
    assert values(within, over)["accepted_over_capacity"] == 1


def test_collectives_of_losses_and_norms_do_not_count() -> None:
    assert values(verdict(program("a", 1, 1, MB, MB), program("b", 1, 1, 4, 8)))["collective_bytes"] == 0
    assert values(verdict(program("a", 1, 1, 3 * MB, 4 * MB)))["collective_bytes"] == pytest.approx(0.25)
    assert values(verdict(program("a", 1, 1, 4 * MB, 0)))["collective_bytes"] > 1


def test_cases_are_all_that_was_asked_for() -> None:
    cases = verify.cases()
    assert {case.remat for case in cases} == {True, False}
    assert {verify.METHODS[case.method][0] for case in cases} == {1, 8, 16, 64}
    for model in ("gpt", "moe", "wresnet"):
        mine = {case.method for case in cases if case.model == model}
        assert {"data parallel", "tensor parallel", "ZeRO-3"} <= mine


@needs_cuda_compiler
def test_a_case_is_compiled_for_absent_h100s() -> None:
    found, _ = verify._seconds(verify.Case("gpt scanned", "one device", True))
    (row,) = verify.rows_of("case", found)
    assert found.fits
    assert abs(row["memory_error"]) < 0.15


@needs_cuda_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("model", "method"), [("gpt", "tensor parallel"), ("wresnet", "tensor parallel")])
def test_what_is_held_beside_hidden_collectives_is_that_of_xlas_schedule(model: str, method: str) -> None:
    """Which gradients of parameters wait for which collective makes more than half of it."""
    found, _ = verify._seconds(verify.Case(model, method, True))
    (row,) = verify.rows_of("case", found)
    assert abs(row["memory_error"]) < 0.15
