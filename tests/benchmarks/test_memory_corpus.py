"""What is learned of a corpus of compiled programs."""

from __future__ import annotations

import pytest

from benchmarks import common
from benchmarks.memory_corpus import Row, bars, compiled, errors, fitted, held_out
from tests.h100 import needs_cuda_compiler


def rows(family: str, kind: str, ratio: float, count: int) -> list[Row]:
    return [Row("case", family, "step", kind, 0, 1000, int(1000 * ratio)) for _ in range(count)]


def test_a_kind_has_the_factor_of_its_programs() -> None:
    """Four programs outvote the three of factor 1 that each kind begins with; one does not."""
    many = fitted([*rows("gpt", "collectives", 1.25, 8), *rows("gpt", "plain", 2.0, 1)])
    assert many["collectives"] == 1.25
    assert many["plain"] == 1.0


def test_the_error_is_of_all_bytes() -> None:
    (row,) = rows("gpt", "plain", 0.5, 1)
    assert errors([row], {}) == [1.0]
    assert errors([row], {"plain": 0.5}) == [0.0]


def test_a_family_is_held_out_whole() -> None:
    """What only one family has is not learned for it."""
    found = held_out([*rows("gpt", "plain", 1.25, 8), *rows("moe", "plain", 1.0, 8)])
    assert sorted(found)[:8] == pytest.approx([0.2] * 8)
    assert sorted(found)[8:] == pytest.approx([0.25] * 8)


def test_bars_are_of_families_held_out() -> None:
    found = bars([*rows("gpt", "plain", 1.25, 8), *rows("moe", "plain", 1.25, 8)])
    assert next(iter(found)) == "held_out_by_family_median"
    assert {bar.n for bar in found.values()} == {16}
    assert {bar.sample for bar in found.values() if bar.limit is not None} == {"held out"}
    assert found["held_out_by_family_median"].value == pytest.approx(0.0)
    assert found["uncorrected_median"].value == pytest.approx(0.2)


@pytest.mark.slow
@needs_cuda_compiler
@pytest.mark.parametrize(
    "case", [("wresnet", "ZeRO-3", False), ("unet", "data parallel", False), ("unet", "ZeRO-3", False),
             ("encoder and decoder", "ZeRO-3", True)],
)  # fmt: skip
def test_what_xla_combines_and_merges_is_held_as_long(case: tuple[str, str, bool]) -> None:
    """Reduce-scatters of all dimensions become one; casts of filters wait for the updates that they are made with."""
    ((found,), _) = next(iter(common.each_in_a_process(compiled, [case])))
    assert abs(found.error({})) < 0.15
