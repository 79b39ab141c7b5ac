"""What is learned of a corpus of compiled programs."""

from __future__ import annotations

import pytest

from benchmarks import common
from benchmarks.memory_corpus import Row, bars, compiled
from tests.h100 import needs_cuda_compiler


def test_bars_are_of_all_bytes_whichever_way_the_error_goes() -> None:
    rows = [Row("case", "gpt", "step", 1000, 1000 + error, 1000) for error in (-200, -20, 0, 20, 200)]
    found = bars(rows)
    assert found["median"].value == pytest.approx(0.01)
    assert found["95th_percentile"].value == pytest.approx(0.1)
    assert {(bar.n, bar.sample) for bar in found.values()} == {(5, "held out")}


@pytest.mark.slow
@needs_cuda_compiler
@pytest.mark.parametrize(
    "case", [("wresnet", "ZeRO-3", False), ("unet", "data parallel", False), ("unet", "ZeRO-3", False),
             ("encoder and decoder", "ZeRO-3", True)],
)  # fmt: skip
def test_what_xla_combines_and_merges_is_held_as_long(case: tuple[str, str, bool]) -> None:
    """Reduce-scatters of all dimensions become one; casts of filters wait for the updates that they are made with."""
    ((found,), _) = next(iter(common.each_in_a_process(compiled, [case])))
    assert abs(found.error) < 0.15
