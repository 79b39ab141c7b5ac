"""What a method allows of recipes."""

from __future__ import annotations

import pytest

from autopar import recipes
from autopar.ir.method import Method

_DP, _ZERO_3, _MEGATRON = recipes.data_parallel(), recipes.zero(3), recipes.megatron(2, 4, 2)


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        (recipes.auto(), [_DP, _ZERO_3, _MEGATRON]),
        (recipes.auto(num_stages=1), [_DP, _ZERO_3]),
        (recipes.auto(num_stages=2), [_MEGATRON]),
        (recipes.auto(pipeline=True), [_MEGATRON]),
        (recipes.auto(mesh_shape=(2, 4)), [_MEGATRON]),
        (recipes.auto(tensor=True), [_MEGATRON]),
        (recipes.pipeline([(1, (8,))]), []),
    ],
    ids=["free", "one stage", "two stages", "a pipeline", "a mesh of two axes", "tensor parallel", "given stages"],
)
def test_recipes_that_do_what_a_method_fixes(method: Method, allowed: list[Method]) -> None:
    assert [recipe for recipe in (_DP, _ZERO_3, _MEGATRON) if method.allows(recipe)] == allowed


def test_what_a_recipe_leaves_open_is_as_the_method_has_it() -> None:
    method = recipes.auto(memory_limit=1024, schedule="gpipe")
    found = _ZERO_3.within(method)
    assert (found.memory_limit, found.schedule, found.zero) == (1024, "gpipe", 3)


def test_parts_of_the_search_by_name() -> None:
    assert Method("all").has("few_shapes_first")
    assert not Method("some", without=frozenset({"few_shapes_first"})).has("few_shapes_first")


def test_options_that_exclude_plans() -> None:
    assert recipes.auto(num_stages=2, time_limit=5.0).excluding_options == {"num_stages": 2}
