"""Axis choices, and the numbers that a plan holds for them."""

import copy
import dataclasses
import pickle

import pytest

from autopar.ir.strategy import (
    REPLICATED,
    AxisChoice,
    Gathered,
    Partial,
    Replicated,
    Split,
    strategy_numbers,
    strategy_of,
)

CHOICES: tuple[AxisChoice, ...] = (Split(0), Split(1), Gathered(0), Gathered(1), REPLICATED, Partial(0), Partial(1))


def test_equal_choices_are_one_object_wherever_they_come_from() -> None:
    assert len(set(CHOICES)) == len(CHOICES)  # no split equals the gathering of the same number
    for choice in CHOICES:
        fields = dataclasses.asdict(choice)
        others = type(choice)(*fields.values()), type(choice)(**fields), dataclasses.replace(choice)
        assert all(other is choice for other in (*others, copy.deepcopy(choice), pickle.loads(pickle.dumps(choice))))
    assert Replicated() is REPLICATED
    assert dataclasses.replace(Split(1), factor=2) is Split(2)
    assert Split(1).factor == 1


@pytest.mark.parametrize(
    ("num_factors", "numbers"),
    [
        (2, (0, 1, 2, 3, -1, -2, -3)),
        (5, (0, 1, 5, 6, -1, -2, -3)),  # what is gathered is numbered after the last factor
    ],
)
def test_numbers_mean_what_the_number_of_factors_says(num_factors: int, numbers: tuple[int, ...]) -> None:
    strategy = (CHOICES, (REPLICATED,))
    assert strategy_numbers(strategy, num_factors) == (numbers, (-1,))
    assert strategy_of((numbers, (-1,)), num_factors) == strategy
    assert strategy_numbers((), num_factors) == ()
    assert strategy_of((), num_factors) == ()
