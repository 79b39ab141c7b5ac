"""Host time that a program spends on other things than its steps."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping

_SECONDS: dict[str, float] = collections.defaultdict(float)


@contextlib.contextmanager
def spent_on(what: str) -> Iterator[None]:
    """What is done in here takes time from the steps: "input" or "checkpoints". Also a decorator."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _SECONDS[what] += time.perf_counter() - began


def seconds_spent() -> Mapping[str, float]:
    """Since the program began, by what they were spent on."""
    return dict(_SECONDS)
