"""`jax.debug.print` and `jax.debug.callback` inside a step: called after it, with the whole values of one device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from autopar.ir.graph import Equation, Literal


class Callbacks:
    """Calls back once a step, in the order of the user's program: in one program XLA would choose the order."""

    def __init__(self, equations: Sequence[Equation], device: jax.Device) -> None:
        self.device = device
        self._programs = [(jax.jit(functools.partial(_call, eqn)), len(eqn.values)) for eqn in equations]

    def __call__(self, values: Sequence[Any]) -> None:
        """`values`: the operands of all callbacks in order, literals left out."""
        supply = iter(values)
        for program, count in self._programs:
            program(*[jax.device_put(_whole(x), self.device) for x in itertools.islice(supply, count)])
        if self.device.platform == "cpu":
            # The next step must not meet these programs on a virtual device (see the worker).
            jax.effects_barrier()


def _call(eqn: Equation, *values: Any) -> None:
    supply = iter(values)
    eqn.primitive.bind(*[v.value if isinstance(v, Literal) else next(supply) for v in eqn.inputs], **eqn.params)


def _whole(x: Any) -> Any:
    """An array that lies whole on one device; by way of the host if it is cut."""
    if not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
        return x
    return x.addressable_data(0) if x.is_fully_replicated else jax.device_get(x)
