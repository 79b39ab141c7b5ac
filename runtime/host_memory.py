"""What the host's allocator does with memory that is freed."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable

import jax

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_memory(devices: Iterable[jax.Device]) -> None:
    """Where programs run on CPUs, let this process keep what they free.

    glibc's malloc hands it back to the system once it is much, and the next step, which needs as much, waits for every
    page of it to be made again. Settings of malloc in the environment hold instead; other C libraries are left alone.
    """
    if any(device.platform == "cpu" for device in devices):
        _keep_memory()


@functools.cache
def _keep_memory() -> None:
    if any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, -1)  # never
        mallopt(_MMAP_MAX, 0)  # else what is large has pages of its own, which go back when it is freed
