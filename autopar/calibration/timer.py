"""How long the steps of a compiled step take, on arguments that are made up."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.executable import Executable
from autopar.ir.timing import Timing
from autopar.tracing.static_leaf import unflatten_arrays


def time_steps(executable: Executable, num_steps: int) -> Timing:
    """Run a step once to warm up, then `num_steps` times, each on the state that the last one returned.

    Floating point numbers among the arguments are ones, all others zeros, and so is the data of random keys. No step
    begins before the last one has ended.
    """
    args, kwargs = made_up_arguments(executable)
    seconds = []
    for _ in range(num_steps + 1):
        started = time.perf_counter()
        result = jax.block_until_ready(executable(*args, **kwargs))
        seconds.append(time.perf_counter() - started)
        args, kwargs = executable.next_arguments(args, kwargs, result)
    plan = executable.plan
    kind = next(iter(jax.tree.leaves(result)[0].devices())).device_kind
    return Timing(
        plan.function, plan.method, plan.cluster.name, kind, plan.cluster.num_devices, plan.step_time,
        tuple(seconds[1:]),
    )  # fmt: skip


def made_up_arguments(executable: Executable) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named ones of the shapes that it was compiled for: ones, zeros and keys of zero bits."""
    graph = executable.graph
    made: tuple[tuple[Any, ...], dict[str, Any]] = unflatten_arrays(
        graph.in_tree, [_filled(value.shape, value.dtype) for value in graph.inputs]
    )
    return made


def _filled(shape: tuple[int, ...], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, dtype)
    return np.broadcast_to(np.full((), jnp.issubdtype(dtype, jnp.inexact), dtype), shape)
