"""Seconds that one kernel takes on one device: the roofline model (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from typing import Any

import numpy as np

from autopar.cost_model.attention import attention_share
from autopar.ir.mesh import DeviceKind, Patches, Pooling, ProductSizes, ProductSpeed

# Which peak a matrix product runs at: the first name that the device kind has, times the factor. float32 products
# run in TF32 where the hardware has it: that is what jax.lax.Precision.DEFAULT means on GPUs. A 16-bit or 8-bit type
# that the hardware lacks is computed in the next wider one; a complex product is four real ones.
_MATMUL_PEAKS: dict[str, tuple[tuple[str, float], ...]] = {
    "float64": (("float64", 1.0), ("float32", 0.5)),
    "float32": (("tensorfloat32", 1.0), ("float32", 1.0)),
    "bfloat16": (("bfloat16", 1.0), ("float32", 1.0)),
    "float16": (("float16", 1.0), ("float32", 1.0)),
    "float8": (("float8", 1.0), ("bfloat16", 1.0), ("float16", 1.0), ("float32", 1.0)),
    "complex64": (("tensorfloat32", 0.25), ("float32", 0.25)),
    "complex128": (("float64", 0.25), ("float32", 0.125)),
}
# Bytes of one coordinate of an element's position, as XLA for GPUs keeps it for the gradient of a maximum over windows.
INDEX_BYTES = 4
# Everything else runs on the vector units: at the float32 peak, for whatever is not listed (integers, booleans and
# the small floats among them, whose kernels wait for memory anyhow); in 64 bits at half of it.
_VECTOR_FACTORS = {"float64": 0.5, "complex64": 0.25, "complex128": 0.125}
# Pieces of a product's result that a thread block computes: rows, columns, and the share of what the largest reaches,
# which is assumed: small tiles read their operands more often.
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
_LEAST_DEPTH = 256  # a sum of products shorter than two of these is not shared out among thread blocks
_MOST_WAVES = 4  # nor is it where so many waves are busy anyhow
# XLA's own choice of the parts, before a library makes its: as compiling products of 220 sizes for an H100 shows it,
# 83 % of them are made in as many as this says.
_PARTS = (1, 2, 4, 8, 16, 32, 64, 128)
_PART_TILE = (128, 256)  # rows and columns of a tile
_PART_STEP = 2700.0  # partial sums that cost as much as one step along the depth does for a wave of tiles
_PART_START = 512  # steps that a wave takes before the first


def peak_flops(kind: DeviceKind, dtype: str, *, matmul: bool) -> float:
    """FLOP per second that `dtype` peaks at, on the matrix units if there are any, or on the vector units."""
    if matmul:
        family = "float8" if dtype.startswith("float8") else dtype
        for name, factor in _MATMUL_PEAKS.get(family, ()):
            if name in kind.peak_flops:
                return kind.peak_flops[name] * factor
    factor = _VECTOR_FACTORS.get(dtype, 1.0)
    if dtype == "float64" and "float64" in kind.peak_flops:
        return min(kind.peak_flops["float64"], kind.peak_flops["float32"] * factor)
    return kind.peak_flops["float32"] * factor


def product_share(kind: DeviceKind, sizes: ProductSizes | None, dtype: str) -> float:
    """Share of the speed of large products (`kind.matmul_efficiency`) that one of these sizes reaches; None: large."""
    if sizes is None:
        return 1.0
    if sizes.attention is not None and kind.multiprocessors:
        return kind.attention_share * attention_share(sizes.attention) / kind.matmul_efficiency
    if kind.measured.products:
        measured = _product_speeds(kind)
        if flops := measured.flops(sizes, dtype):
            return flops / (peak_flops(kind, dtype, matmul=True) * kind.matmul_efficiency)
    share = kind.convolution_share if sizes.patches else kind.batched_share if sizes.batch > 1 else 1.0
    return share * _share_of(kind.multiprocessors, sizes) if kind.multiprocessors else share


@functools.lru_cache(maxsize=1 << 16)
def _share_of(multiprocessors: int, sizes: ProductSizes) -> float:
    """Tile and wave quantisation (NVIDIA, Matrix Multiplication Background User's Guide, section 3).

    The result is computed in tiles, those at the edges as if they were whole, as many at a time as there are
    multiprocessors, the last wave as if it were full. A long sum of products may be shared out (split-K).
    The best of a few tile sizes is taken, as the libraries choose.
    """
    batch, rows, columns, depth = sizes[:4]
    if not batch * rows * columns:
        return 1.0
    best = 0.0
    for high, wide, share in _TILES:
        for tile in {(high, wide), (wide, high)}:
            tiles = batch * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
            used = share * batch * rows * columns / (tile[0] * tile[1])
            parts = 1
            while True:
                best = max(best, used * parts / (math.ceil(tiles * parts / multiprocessors) * multiprocessors))
                parts *= 2
                if depth < parts * _LEAST_DEPTH or tiles * parts > _MOST_WAVES * multiprocessors:
                    break
    return best


def partial_sum_bytes(kind: DeviceKind, sizes: ProductSizes | None, dtype: str) -> float:
    """Bytes by which the parts of a product's sums are more than its result.

    A long sum of which there are few is made in parts, in at least 32 bits each, so that more thread blocks are busy
    (XLA's split-K rewriter): the product writes them, and what reads its result reads them and adds them up.
    """
    if sizes is None or sizes.patches or sizes.attention or not kind.multiprocessors or not kind.xla.split_k:
        return 0.0
    if not dtype.startswith(("float", "bfloat", "complex")):
        return 0.0
    if kind.measured.products and _product_speeds(kind).flops(sizes, dtype):
        return 0.0  # in what was measured
    itemsize = _itemsize(dtype)
    parts = _parts(kind.multiprocessors, sizes)
    return sizes.batch * sizes.rows * sizes.columns * (parts * max(4, itemsize) - itemsize) if parts > 1 else 0.0


@functools.lru_cache(maxsize=1 << 16)
def _parts(multiprocessors: int, sizes: ProductSizes) -> int:
    """Those of which waves of tiles and partial sums cost least."""
    batch, rows, columns, depth = sizes[:4]
    tiles = batch * math.ceil(rows / _PART_TILE[0]) * math.ceil(columns / _PART_TILE[1])

    def cost(parts: int) -> float:
        waves = math.ceil(parts * tiles / multiprocessors)
        added = (parts + 1) * batch * rows * columns if parts > 1 else 0.0
        return waves * _PART_STEP * (math.ceil(depth / parts) + _PART_START) + added

    return min(_PARTS, key=cost)


class _ProductSpeeds:
    """Speeds of products between those that were measured.

    A product takes the seconds of its arithmetic at the best speed that was measured, and those of its operands' and
    result's way through memory, times a factor between those of the sizes that were measured: the mean of the nearest
    ones' logarithms, weighted by the inverse square of the distance (Shepard 1968, "A two-dimensional interpolation
    function for irregularly-spaced data"). Rows and columns may change places, but for those of a convolution, whose
    windows' places, reuse and gaps count as sides, too.
    """

    def __init__(self, kind: DeviceKind) -> None:
        self._bandwidth = kind.memory_bandwidth * kind.memory_efficiency
        groups: dict[tuple[str, bool], list[ProductSpeed]] = defaultdict(list)
        for each in kind.measured.products:
            groups[product_family(each.sizes, each.dtype)].append(each)
        self._best = {key: max(each.flops for each in some) for key, some in groups.items()}
        self._points = {}
        for key, some in groups.items():
            plain = np.array([self._plain(key, s.sizes) for s in some])
            factors = np.log2([s.flops for s in some]) - np.log2(plain)
            self._points[key] = np.array([_place(s.sizes) for s in some]), factors
        self._seconds: dict[tuple[ProductSizes, str], float] = {}

    def _plain(self, key: tuple[str, bool], sizes: ProductSizes) -> float:
        """FLOP per second without the factor."""
        batch, rows, columns, depth = (max(side, 1.0) for side in sizes[:4])
        flops = 2.0 * batch * rows * columns * depth
        moved = _itemsize(key[0]) * batch * (rows * depth + depth * columns + rows * columns)
        return flops / (flops / self._best[key] + moved / self._bandwidth)

    def flops(self, sizes: ProductSizes, dtype: str) -> float:
        """FLOP per second; 0 where nothing like it was measured."""
        key = sizes, dtype
        if key not in self._seconds:
            self._seconds[key] = self._between(*key)
        return self._seconds[key]

    def _between(self, sizes: ProductSizes, dtype: str) -> float:
        key = product_family(sizes, dtype)
        if key not in self._points or not all(sizes[:4]):
            return 0.0
        where, factors = self._points[key]
        ways = [sizes]
        if sizes.patches is None:
            ways.append(sizes._replace(rows=sizes.columns, columns=sizes.rows))
        distance = np.min([((where - _place(way)) ** 2).sum(axis=1) for way in ways], axis=0)
        nearest = np.argsort(distance, kind="stable")[:_NEIGHBOURS]
        weights = 1.0 / (distance[nearest] + _SAME)
        return float(self._plain(key, sizes) * 2.0 ** (weights @ factors[nearest] / weights.sum()))


def product_family(sizes: ProductSizes, dtype: str) -> tuple[str, bool]:
    """Of products between which there are others."""
    return dtype, sizes.patches is not None


def _place(sizes: ProductSizes) -> Any:
    """Logarithms of what the speed depends on."""
    patches = sizes.patches or Patches(1, 1.0)
    return np.log2([*(max(side, 1.0) for side in sizes[:4]), patches.taps, patches.reuse, patches.gaps])


def _itemsize(dtype: str) -> int:
    """Bytes, by the number in the name of a type."""
    return int(re.findall(r"\d+", dtype)[0]) // 8


_NEIGHBOURS = 4
_SAME = 0.01  # squares of distances, below which sizes are the same: 7 % of one side


@functools.lru_cache(maxsize=64)
def _product_speeds(kind: DeviceKind) -> _ProductSpeeds:
    return _ProductSpeeds(kind)


def memory_seconds(kind: DeviceKind, nbytes: Any) -> Any:
    """Seconds in which kernels go through so many bytes of memory each; a number or an array of them."""
    if not kind.measured.bandwidths:
        return nbytes / (kind.memory_bandwidth * kind.memory_efficiency)
    return nbytes / _between(kind.measured.bandwidths, nbytes)


def strided_read_seconds(kind: DeviceKind, nbytes: Any, *, strided: float, copied: float) -> Any:
    """Seconds for an array of so many bytes, or many of them, in another order than it is wanted in.

    `strided`: how often it is read against its order, which takes longer; `copied`: how often it is copied.
    """
    longer = nbytes / _between(kind.measured.strided_reads, nbytes) if kind.measured.strided_reads else 0.0
    return strided * longer + copied * (memory_seconds(kind, 2 * nbytes) + kind.launch_overhead)


def allocation_seconds(kind: DeviceKind, nbytes: float) -> float:
    """Seconds in which a program sets aside a buffer of so many bytes; 0 where buffers are handed on."""
    return float(nbytes / _between(kind.measured.allocations, nbytes)) if kind.measured.allocations and nbytes else 0.0


def _between(curve: tuple[tuple[float, float], ...], at: Any) -> Any:
    """Linear between the logarithms of a curve's points."""
    places, values = _logarithms(curve)
    return np.exp2(np.interp(np.log2(np.maximum(at, 1.0)), places, values))


@functools.lru_cache(maxsize=64)
def _logarithms(curve: tuple[tuple[float, float], ...]) -> tuple[Any, Any]:
    places, values = zip(*curve, strict=True)
    return np.log2(places), np.log2(values)


def accumulate_seconds(kind: DeviceKind, nbytes: Any) -> Any:
    """Seconds that adding to a sum of so many bytes takes: both are read, one is written."""
    return memory_seconds(kind, 3 * nbytes)


def compute_time(
    kind: DeviceKind, *, flops: float, bytes_moved: float, dtype: str, matmul: bool, share: float = 1.0,
    pooling: Pooling | None = None,
) -> float:  # fmt: skip
    """Seconds of one kernel that does `flops` on `dtype` and reads and writes `bytes_moved` bytes of memory.

    `share`: of the speed of large products, for a smaller one (`product_share`). `pooling`: a reduction over windows.

    The longer of the two, arithmetic and memory traffic, which overlap. The launch (`kind.launch_overhead`) is not in
    it: an elementwise operation fused into another kernel has none, and only the caller knows.
    """
    efficiency = kind.matmul_efficiency * share if matmul else 1.0
    peak = kind.measured.pooling.get(pooling) if pooling else None
    arithmetic = flops / (peak or peak_flops(kind, dtype, matmul=matmul) * efficiency)
    return max(arithmetic, float(memory_seconds(kind, bytes_moved)))
