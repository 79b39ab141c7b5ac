"""Where a thread of this program is, in words that its user knows."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from collections.abc import Iterator

# What of autopar runs, by where its innermost function is.
_ROOMS = {
    "autopar.tracing": "tracing", "autopar.planning": "planning", "autopar.passes": "planning",
    "autopar.compiling": "compiling", "autopar.runtime.preparing": "compiling",
    "autopar.checkpointing": "saving or restoring",
}  # fmt: skip
# Functions that wait for what devices or other processes do.
_WAITS = {
    ("jax._src.array", "_value"), ("jax._src.array", "block_until_ready"), ("jax._src.array", "__array__"),
    ("jax._src.api", "block_until_ready"), ("autopar.runtime.processes", "_wait_for"),
}  # fmt: skip
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


def is_waiting(thread: int) -> bool:
    """Whether it waits for devices or other processes."""
    return any((frame.f_globals.get("__name__"), frame.f_code.co_name) in _WAITS for frame in _frames(thread))
