"""Seconds that one kernel takes on one device: the roofline model (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

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


def compute_time(kind: DeviceKind, *, flops: float, bytes_moved: float, dtype: str, matmul: bool) -> float:
    """Seconds of one kernel that does `flops` on `dtype` and reads and writes `bytes_moved` bytes of memory.

    The longer of the two, arithmetic and memory traffic, which overlap. The launch (`kind.launch_overhead`) is not in
    it: an elementwise operation fused into another kernel has none, and only the caller knows. A lower efficiency
    of small products, flops / (flops + half), would be the same as a constant time more for each, which is what the
    launch overhead is; so there is no such curve here.
    """
    efficiency = kind.matmul_efficiency if matmul else 1.0
    arithmetic = flops / (peak_flops(kind, dtype, matmul=matmul) * efficiency)
    traffic = bytes_moved / (kind.memory_bandwidth * kind.memory_efficiency)
    return max(arithmetic, traffic)
