"""How one equation is split over a mesh."""

from __future__ import annotations

# Per mesh axis, what it splits: a factor of the equation's rule (>= 0; numbers after the last factor are the rule's
# `gatherings`, ways to split one of them), nothing (WHOLE), or, written `linear_set(k)`, nothing but the partial sums
# that the operands of the rule's k-th linear set are.
AxisChoice = int
WHOLE: AxisChoice = -1

# A strategy has one assignment; an equation whose rule is separable has one assignment per operand.
AxisAssignment = tuple[AxisChoice, ...]  # by mesh axis
Strategy = tuple[AxisAssignment, ...]


def linear_set(index: int) -> AxisChoice:
    """The axis choice "operands of linear set `index` are partial over this axis"; its own inverse."""
    return -2 - index
