"""Time for tests."""

from __future__ import annotations

import pytest

from autopar.runtime import spent


class Clock:
    """Time of steps that goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(spent.time, "perf_counter", lambda: self.now)  # type: ignore[attr-defined]
