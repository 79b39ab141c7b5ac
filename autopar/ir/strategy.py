"""How one equation is split over a mesh.

An *axis choice* says what the equation does over one mesh axis: it is `Split`, `Gathered`, `Replicated` or `Partial`.
Which of its factors, gatherings and linear sets there are is in the equation's `Rule`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

_made: dict[tuple[Any, ...], Any] = {}


class _Interned:
    """Values of at most one field, of which equal ones are one object, in every thread and copied or unpickled, too.

    Planning compares and hashes them millions of times: by identity, which is as quick as for numbers.
    """

    def __new__(cls, *fields: int, **named: int) -> Self:
        made: Self = _made.setdefault((cls, *fields, *named.values()), super().__new__(cls))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(vars(self).values())


@dataclasses.dataclass(frozen=True, eq=False)
class Split(_Interned):
    """The axis cuts a factor, with all operands and results that have it."""

    factor: int


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered(_Interned):
    """The axis cuts the factor of one of the rule's `gatherings`, and what this names is kept in pieces."""

    index: int  # in `Rule.gatherings`


@dataclasses.dataclass(frozen=True, eq=False)
class Replicated(_Interned):
    """All devices along the axis do the same."""


@dataclasses.dataclass(frozen=True, eq=False)
class Partial(_Interned):
    """Operands of one of the rule's linear sets are partial sums over the axis, and so are the results."""

    linear_set: int  # in `Rule.linear`


REPLICATED = Replicated()

AxisChoice = Split | Gathered | Replicated | Partial
AxisAssignment = tuple[AxisChoice, ...]  # by mesh axis
# A strategy has one assignment; an equation whose rule is separable has one assignment per operand.
Strategy = tuple[AxisAssignment, ...]

# A strategy as a plan holds it, which knows no rules. Splits have the numbers of their factors, and gatherings those
# after the last factor; -1 is replicated, and what is partial counts down from -2.
StrategyNumbers = tuple[tuple[int, ...], ...]


def strategy_numbers(strategy: Strategy, num_factors: int) -> StrategyNumbers:
    """A strategy in numbers; the rule has so many factors."""

    def number(choice: AxisChoice) -> int:
        match choice:
            case Split(factor):
                return factor
            case Gathered(index):
                return num_factors + index
            case Replicated():
                return -1
            case Partial(linear_set):
                return -2 - linear_set

    return tuple(tuple(map(number, assignment)) for assignment in strategy)


def strategy_of(numbers: StrategyNumbers, num_factors: int) -> Strategy:
    """The strategy that the numbers are; the rule has so many factors."""

    def choice(number: int) -> AxisChoice:
        if number >= num_factors:
            return Gathered(number - num_factors)
        if number >= 0:
            return Split(number)
        return REPLICATED if number == -1 else Partial(-2 - number)

    return tuple(tuple(map(choice, assignment)) for assignment in numbers)
