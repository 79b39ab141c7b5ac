"""Quantities and arrays as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def count_text(number: int, noun: str, plural: str = "s") -> str:
    """ "1 host", "2 hosts"; `plural` is what is added to the noun."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def bytes_text(count: float) -> str:
    """Bytes in powers of 1024: "512 B", "1.5 GiB"."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1023.95:  # prints as less than 1024.0
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def metric_text(number: float, unit: str) -> str:
    """A rate in powers of 1000: "312 TFLOP/s", "500 MB/s"."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}"


def seconds_text(seconds: float) -> str:
    """ "1.25 s", "3.2 ms", "40 us"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def array_text(dtype: Any, shape: Iterable[int]) -> str:
    """ "float32[2048,4096]"."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def ranges_text(numbers: Iterable[int], dash: str = "-") -> str:
    """Whole numbers in rising order, runs of neighbours as ranges: "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}{dash}{last}" for first, last in runs)
