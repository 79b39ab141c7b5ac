"""How long the steps of a compiled step take, on arguments that are made up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api import Parallelized
from autopar.ir.static_leaf import unflatten_arrays
from autopar.ir.timing import Timing


def time_steps(step: Parallelized, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_steps: int) -> Timing:
    """Compile a step, run it once to warm up, then `num_steps` times, each on the state that the last one returned.

    Of `args` and `kwargs` only shapes count: floating point numbers are ones, all others zeros, and so is the data of
    random keys. No step begins before the last one has ended.

    Raises:
      UserError: the step cannot be planned for these shapes, or not run on these devices.
    """
    executable = step.compile(*args, **kwargs)
    graph = step.trace(*args, **kwargs)
    args, kwargs = unflatten_arrays(graph.in_tree, [_filled(value.shape, value.dtype) for value in graph.inputs])
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


def _filled(shape: tuple[int, ...], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, dtype)
    return np.broadcast_to(np.full((), jnp.issubdtype(dtype, jnp.inexact), dtype), shape)
