"""`jax.debug.print` and `jax.debug.callback` inside a step: called after it, with the whole values of one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.ir.graph import Equation, Literal


class Callbacks:
    """Calls back once a step, in the order of the user's program, as `jax.jit` on one device would."""

    def __init__(self, equations: Sequence[Equation], device: jax.Device) -> None:
        self.equations, self.device = tuple(equations), device
        self._program = jax.jit(self._call)

    def __call__(self, values: Sequence[Any]) -> None:
        """`values`: the operands of all callbacks in order, literals left out."""
        self._program(*[jax.device_put(_whole(x), self.device) for x in values])
        if self.device.platform == "cpu":
            # The next step must not meet this program on a virtual device (see the worker).
            jax.effects_barrier()

    def _call(self, *values: Any) -> None:
        supply = iter(values)
        for eqn in self.equations:
            operands = [v.value if isinstance(v, Literal) else next(supply) for v in eqn.inputs]
            eqn.primitive.bind(*operands, **eqn.params)


def _whole(x: Any) -> Any:
    """An array that lies whole on one device; by way of the host if it is cut."""
    if not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
        return x
    return x.addressable_data(0) if x.is_fully_replicated else jax.device_get(x)
