"""How fast fused attention is on GPUs: what cuDNN was measured to reach on an H100, as a share of the peak.

Three factors: the speed by how many keys a query sees, for all keys or for a causal mask; that of the backward pass;
and that of the width of a head, because exponentials take as long whatever the width is. Each was published for some of
the others only (`data/attention`), and is taken to be independent of them. On other GPUs than the H100 the shares are
assumed to be the same.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import math
from collections.abc import Sequence

import numpy as np

from autopar.ir.mesh import Attention

_PEAK = 989.4  # TFLOP/s of the H100 in 16 bits
_PLAIN = 128  # the width for which most was published


def attention_share(attention: Attention) -> float:
    """Share of the peak of products in 16 bits that cuDNN's attention reaches."""
    series = _published()
    keys = attention.keys
    plain: float = _at(series[_PLAIN, attention.masked, False], keys)
    if attention.backward:
        plain *= _at(series[_PLAIN, False, True], keys) / _at(series[_PLAIN, False, False], keys)
    widths = {
        64: _at(series[64, False, False], keys) / _at(series[_PLAIN, False, False], keys),
        _PLAIN: 1.0,
        256: _at(series[256, True, False], keys) / _at(series[_PLAIN, True, False], keys),
    }
    places = [math.log2(width) for width in widths]
    width = math.log2(max(attention.width, 1.0))
    return float(plain * np.interp(width, places, [*widths.values()]))


def _at(series: Sequence[tuple[float, float]], keys: float) -> float:
    """Linear in the logarithm of how many keys there are; with few, in proportion to them."""
    places, shares = zip(*series, strict=True)
    at_least = max(keys, 1.0)
    return float(np.interp(math.log2(at_least), np.log2(places), shares)) * min(1.0, at_least / float(places[0]))


@functools.cache
def _published() -> dict[tuple[int, bool, bool], list[tuple[float, float]]]:
    """By width, mask and pass: keys, ascending, and the share of the peak."""
    file = importlib.resources.files("autopar.cost_model") / "data" / "attention" / "h100_cudnn.csv"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    found: dict[tuple[int, bool, bool], list[tuple[float, float]]] = {}
    for row in csv.DictReader(lines):
        key = int(row["width"]), row["causal"] == "1", row["backward"] == "1"
        found.setdefault(key, []).append((float(row["positions"]), float(row["tflops"]) / _PEAK))
    return found
