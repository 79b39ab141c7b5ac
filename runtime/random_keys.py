"""Arrays of random keys, of which only the numbers can be sent and stored."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    """Whether an array is one of random keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def plain(array: jax.Array) -> jax.Array:
    """Of random keys their numbers: only these can be sent."""
    return jax.random.key_data(array) if is_key(array) else array


def plain_struct(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """As `plain`, of what arrays look like."""
    if not is_key(x):
        return x
    numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=x.sharding)


def as_wanted(struct: jax.ShapeDtypeStruct, numbers: jax.Array) -> jax.Array:
    """Random keys of their numbers, where keys are wanted."""
    if not is_key(struct):
        return numbers
    keys: jax.Array = jax.random.wrap_key_data(numbers, impl=_implementation(struct.dtype))
    return keys


@functools.cache
def _implementation(dtype: Any) -> Any:
    """Of random keys of this type: only arrays tell, or what stands for them in a trace."""
    implementations: list[Any] = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return implementations[0]
