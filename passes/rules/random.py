"""Random numbers: a piece of a draw is bitwise that part of the whole draw.

JAX's partitionable threefry computes element i of a draw from the key and the counter i alone, the flat index in
the whole array. A piece hashes the counters of its own window, at the cost of its own size. Other generators
give no such promise: their draws stay whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

from autopar.ir.graph import Equation
from autopar.ir.rule import DimMap, Local, Rule, bind
from autopar.passes.rules.building import Factors, RuleBuilder, local_shape, replicated
from autopar.passes.rules.elementwise import THREEFRY_FLOPS

# A window of `random_bits`: operands (scalar key, starts int32[rank]); parameters bit_width, shape (of the window)
# and global_shape (of the draw). A primitive, so that a piece of a piece can be cut again by its own rule.
random_bits_window_p = Primitive("random_bits_window")


def _product(position: Any, stride: int) -> tuple[Any, Any]:
    """position (uint32) times a constant below 2**64, as the high and low halves of a 64-bit integer.

    Halves of 16 bits keep every partial product within 32 bits.
    """
    low_mask = np.uint32(0xFFFF)
    stride_high, stride_low = np.uint32(stride >> 32), np.uint32(stride & 0xFFFFFFFF)
    p0, p1 = position & low_mask, position >> 16
    s0, s1 = stride_low & low_mask, stride_low >> np.uint32(16)
    middle = p1 * s0 + ((p0 * s0) >> 16)  # below 2**32: (2**16-1)**2 + 2**16 - 1
    middle_low = p0 * s1 + (middle & low_mask)
    high = p1 * s1 + (middle >> 16) + (middle_low >> 16)
    return high + position * stride_high, position * stride_low


def flat_indices(starts: Any, shape: Sequence[int], global_shape: Sequence[int]) -> tuple[Any, Any]:
    """The row-major index in `global_shape` of each element of a window: high and low uint32, of `shape`."""
    high = low = jnp.zeros(shape, jnp.uint32)
    for d, size in enumerate(shape):
        stride = math.prod(global_shape[d + 1 :])
        position = lax.iota(jnp.uint32, size) + starts[d].astype(jnp.uint32)
        more_high, more_low = (lax.broadcast_in_dim(x, tuple(shape), (d,)) for x in _product(position, stride))
        low = low + more_low
        high = high + more_high + (low < more_low).astype(jnp.uint32)  # the carry
    return high, low


def _random_bits_window(
    key: Any, starts: Any, *, bit_width: int, shape: tuple[int, ...], global_shape: tuple[int, ...]
) -> Any:
    words = jax.random.key_data(key)
    high, low = flat_indices(starts, shape, global_shape)
    bits1, bits2 = threefry2x32_p.bind(words[0], words[1], high, low)
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return lax.convert_element_type(bits1, dtype) << 32 | lax.convert_element_type(bits2, dtype)
    return lax.convert_element_type(bits1 ^ bits2, dtype)


@functools.partial(jax.jit, static_argnames=("bit_width", "shape", "global_shape"))
def _random_bits_window_compiled(
    key: Any, starts: Any, *, bit_width: int, shape: tuple[int, ...], global_shape: tuple[int, ...]
) -> Any:
    return random_bits_window_p.bind(key, starts, bit_width=bit_width, shape=shape, global_shape=global_shape)


def _abstract_window(key: Any, starts: Any, *, bit_width: int, shape: tuple[int, ...], global_shape: Any) -> Any:
    return jax.core.ShapedArray(shape, jnp.dtype(f"uint{bit_width}"))


random_bits_window_p.def_abstract_eval(_abstract_window)
random_bits_window_p.def_impl(_random_bits_window_compiled)
mlir.register_lowering(random_bits_window_p, mlir.lower_fun(_random_bits_window, multiple_results=False))


@functools.cache
def _threefry_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def is_partitionable() -> bool:
    """Whether JAX is configured so that threefry counts the elements of a draw; rules depend on nothing else of it."""
    return bool(getattr(jax.config, "jax_threefry_partitionable", True))


def _has_windows(eqn: Equation) -> bool:
    """Whether element i of this draw, or of these new keys, depends on nothing but the key and i."""
    (key,) = eqn.inputs
    return key.shape == () and bool(key.dtype == _threefry_dtype()) and is_partitionable()


def _starts(local: Local, dims: DimMap) -> Any:
    """Where the piece begins along each dimension: int32[rank]."""
    starts = [jnp.int32(local.start(dim[0]) if dim else 0) for dim in dims]
    return lax.concatenate([lax.expand_dims(start, (0,)) for start in starts], 0)


def _random_bits(eqn: Equation) -> Rule:
    """Keys are drawn from one by one, whatever the generator; the draw of one key splits where windows exist."""
    (keys,) = eqn.inputs
    shape = eqn.params["shape"]
    factors = Factors()
    key_dims = factors.dims(keys.shape)
    draw_dims = factors.dims(shape, () if _has_windows(eqn) else range(len(shape)))

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if not any(local.is_split(f) for dim in draw_dims for f in dim):
            return bind(eqn, operands)
        window = random_bits_window_p.bind(
            operands[0],
            _starts(local, draw_dims),
            bit_width=eqn.params["bit_width"],
            shape=local_shape(local, draw_dims),
            global_shape=tuple(shape),
        )
        return [window]

    return factors.rule([key_dims], [key_dims + draw_dims], emit=emit, flops=THREEFRY_FLOPS)


def _random_bits_window_rule(eqn: Equation) -> Rule:
    """A window of a window: its starts add up."""
    shape = eqn.params["shape"]
    factors = Factors()
    dims = factors.dims(shape)
    rank = factors.new_whole(len(shape))

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        key, starts = operands
        return bind(eqn, (key, lax.add(starts, _starts(local, dims))), shape=local_shape(local, dims))

    points = math.prod(shape)
    flops = THREEFRY_FLOPS * points / max(1, math.prod(factors.sizes))
    return factors.rule([(), (rank,)], [dims], emit=emit, flops=flops)


def _random_split(eqn: Equation) -> Rule:
    """Each key of a batch is split on its own; new key i of one key is the hash of the counter i."""
    shape = eqn.params["shape"]
    factors = Factors()
    dims = factors.dims(eqn.inputs[0].shape)
    new = factors.dims(shape, () if _has_windows(eqn) else range(len(shape)))

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if not any(local.is_split(f) for dim in new for f in dim):
            return bind(eqn, operands)
        words = jax.random.key_data(operands[0])
        high, low = flat_indices(_starts(local, new), local_shape(local, new), shape)
        hashed = threefry2x32_p.bind(words[0], words[1], high, low)
        rank = len(shape)
        data = lax.concatenate([lax.expand_dims(half, (rank,)) for half in hashed], rank)
        return [jax.random.wrap_key_data(data, impl="threefry2x32")]

    return factors.rule([dims], [dims + new], emit=emit, flops=THREEFRY_FLOPS)


def _random_gamma(eqn: Equation) -> Rule:
    """Each key draws for the parameters that stand beside it, whose number says how it is split."""
    keys, alphas = eqn.inputs
    factors = Factors()
    key_dims = factors.dims(keys.shape)
    rest = alphas.shape[len(keys.shape) :]
    dims = key_dims + factors.dims(rest, range(len(rest)))
    return factors.rule([key_dims, dims], [dims], flops=10 * THREEFRY_FLOPS)  # rejection: a few draws for each


def _random_wrap(eqn: Equation) -> Rule:
    """From words to keys: the last dimension holds the words of one key."""
    factors = Factors()
    keys = factors.dims(eqn.outputs[0].shape)
    words = eqn.inputs[0].shape[len(keys) :]
    dims = keys + factors.dims(words, range(len(words)))
    return factors.rule([dims], [keys], flops=0.0, unit="none")


def _random_unwrap(eqn: Equation) -> Rule:
    factors = Factors()
    keys = factors.dims(eqn.inputs[0].shape)
    words = eqn.outputs[0].shape[len(keys) :]
    return factors.rule([keys], [keys + factors.dims(words, range(len(words)))], flops=0.0, unit="none")


RULES: dict[str, RuleBuilder] = {
    "random_bits": _random_bits,
    "random_bits_window": _random_bits_window_rule,
    "random_gamma": _random_gamma,
    "random_split": _random_split,
    # Draws of XLA's own generators, which promise nothing about their parts.
    "rng_bit_generator": replicated,
    "rng_uniform": replicated,
    "random_unwrap": _random_unwrap,
    "random_wrap": _random_wrap,
}
