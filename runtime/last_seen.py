"""Where a thread of this program is, in words that its user knows."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
import types
from collections.abc import Iterator

# What of autopar runs, by where its innermost function is.
_ROOMS = {
    "autopar.tracing": "tracing", "autopar.planning": "planning", "autopar.passes": "planning",
    "autopar.compiling": "compiling", "autopar.runtime.preparing": "compiling",
    "autopar.checkpointing": "saving or restoring",
}  # fmt: skip
_WAITS = ("autopar.runtime.processes", "_wait_for")  # which looks for other processes' texts again and again
_IDLE = 1e-3  # seconds of CPU time below which a thread has done nothing between two looks, a second apart
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def _frames(thread: int) -> Iterator[types.FrameType]:
    """From the innermost outwards."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_of(thread: int) -> str:
    """The user's innermost line, "FILE:LINE (FUNCTION)"; "" where the thread has ended."""
    for frame in _frames(thread):
        file = frame.f_code.co_filename
        if not file.startswith(("<", _PACKAGE, *_LIBRARIES)):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
    return ""


def activity_of(thread: int) -> str:
    """What of autopar it runs; "" for nothing that takes long."""
    for frame in _frames(thread):
        name = frame.f_globals.get("__name__", "")
        for room, activity in _ROOMS.items():
            if name == room or name.startswith(f"{room}."):
                return activity
    return ""


def waits_for_others(thread: int) -> bool:
    """Whether it waits for a text of another process."""
    return any((frame.f_globals.get("__name__"), frame.f_code.co_name) == _WAITS for frame in _frames(thread))


class Busyness:
    """Whether a thread does anything between two looks."""

    def __init__(self, thread: int) -> None:
        self._clock = time.pthread_getcpuclockid(thread)
        self._last = 0.0

    def is_idle(self) -> bool:
        """Whether it has used no time of a CPU since the last call, as while it waits for devices."""
        try:
            now = time.clock_gettime(self._clock)
        except OSError:  # it has ended
            return True
        used, self._last = now - self._last, now
        return used < _IDLE
