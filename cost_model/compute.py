"""Seconds that one kernel takes on one device: the roofline model (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import functools
import math

from autopar.ir.local import ProductSizes
from autopar.ir.mesh import DeviceKind

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
# Everything else runs on the vector units: at the float32 peak, for whatever is not listed (integers, booleans and
# the small floats among them, whose kernels wait for memory anyhow); in 64 bits at half of it.
_VECTOR_FACTORS = {"float64": 0.5, "complex64": 0.25, "complex128": 0.125}
# Pieces of a product's result that a thread block computes: rows, columns, and the share of what the largest reaches,
# which is assumed: small tiles read their operands more often.
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
_LEAST_DEPTH = 256  # a sum of products shorter than two of these is not shared out among thread blocks
_MOST_WAVES = 4  # nor is it where so many waves are busy anyhow


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


def product_share(kind: DeviceKind, sizes: ProductSizes | None) -> float:
    """Share of the speed of large products (`kind.matmul_efficiency`) that one of these sizes reaches; None: large."""
    if sizes is None:
        return 1.0
    share = kind.convolution_share if sizes.convolution else kind.batched_share if sizes.batch > 1 else 1.0
    return share * _share_of(kind.multiprocessors, sizes) if kind.multiprocessors else share


@functools.lru_cache(maxsize=1 << 16)
def _share_of(multiprocessors: int, sizes: ProductSizes) -> float:
    """Tile and wave quantisation (NVIDIA, Matrix Multiplication Background User's Guide, section 3).

    The result is computed in tiles, those at the edges as if they were whole, as many at a time as there are
    multiprocessors, the last wave as if it were full. A long sum of products may be shared out (split-K).
    The best of a few tile sizes is taken, as the libraries choose.
    """
    batch, rows, columns, depth, _ = sizes
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


def accumulate_seconds(kind: DeviceKind, nbytes: float) -> float:
    """Seconds that adding to a sum of so many bytes takes: both are read, one is written."""
    return 3 * nbytes / (kind.memory_bandwidth * kind.memory_efficiency)


def compute_time(
    kind: DeviceKind, *, flops: float, bytes_moved: float, dtype: str, matmul: bool, share: float = 1.0
) -> float:
    """Seconds of one kernel that does `flops` on `dtype` and reads and writes `bytes_moved` bytes of memory.

    `share`: of the speed of large products, for a smaller one (`product_share`).

    The longer of the two, arithmetic and memory traffic, which overlap. The launch (`kind.launch_overhead`) is not in
    it: an elementwise operation fused into another kernel has none, and only the caller knows.
    """
    efficiency = kind.matmul_efficiency * share if matmul else 1.0
    arithmetic = flops / (peak_flops(kind, dtype, matmul=matmul) * efficiency)
    traffic = bytes_moved / (kind.memory_bandwidth * kind.memory_efficiency)
    return max(arithmetic, traffic)
