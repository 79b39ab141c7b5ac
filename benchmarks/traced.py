"""Steps traced for a search alone, as `Parallelized.plan` traces them.

Benchmarks of plans that are not run go this way and not through `autopar.parallelize`, which needs the runtime: their
results stay true when only that changes. `tests/benchmarks/test_traced.py` holds both ways against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.planning.traced import TracedStep, TraceOptions, trace_step
from autopar.tracing.calls import StepFunction


def trace(
    function: Callable[..., Any], *args: Any, num_microbatches: int | None = None, reduces_own_dtype: bool = False
) -> TracedStep:
    """For arguments of these shapes; the options are those of `parallelize`."""
    step = StepFunction(function)
    options = TraceOptions(num_microbatches=num_microbatches, reduces_own_dtype=reduces_own_dtype)
    return trace_step(step, step.call(args, {}), options)
