"""How long values are needed, in steps that stand for kernels and for what is fused into later ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class LivenessStep(Generic[Key]):
    """What one step reads and makes; None stands for what needs no memory."""

    reads: Sequence[Key | None]
    makes: Sequence[Key]
    here: bool  # whether it runs in its place; else where what it makes is read
    in_pairs: bool = False  # each result is made of the operand in its position alone


def last_reads(steps: Sequence[LivenessStep[Key]], leaving: Iterable[Key]) -> dict[Key, int]:
    """The position in which each value is read for the last time; what leaves is read after all steps.

    What is fused is read where its kernels are, a view's operand where the view is.
    """
    last_read: dict[Key, int] = dict.fromkeys(leaving, len(steps))
    for position in reversed(range(len(steps))):
        step = steps[position]
        ends = [last_read.get(key, position) for key in step.makes]
        latest = position if step.here else max(ends, default=position)
        for k, key in enumerate(step.reads):
            if key is not None:
                last_read[key] = max(last_read.get(key, position), ends[k] if step.in_pairs else latest)
    return last_read
