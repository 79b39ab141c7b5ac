"""`jax.debug.print` and `jax.debug.callback` inside a step: called after it, with the whole values of one device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.ir.graph import Callback, Equation, Literal, Rounds

CompiledCallback = Callable[[Sequence[Any]], None]  # of the values of its operands, literals left out


class Callbacks:
    """Calls back once a step, in the order of the user's program: in one program XLA would choose the order."""

    def __init__(self, callbacks: Sequence[Callback], device: jax.Device) -> None:
        self.device = device
        self._calls = [_compiled(callback) for callback in callbacks]

    def __call__(self, values: Sequence[Any]) -> None:
        """`values`: the operands of all callbacks in order, literals left out."""
        supply = iter(values)
        for call, count in self._calls:
            call([jax.device_put(_whole(x), self.device) for x in itertools.islice(supply, count)])
        if self.device.platform == "cpu":
            # The next step must not meet these programs on a virtual device (see the worker).
            jax.effects_barrier()


def _compiled(callback: Callback) -> tuple[CompiledCallback, int]:
    """A callback as a program, and how many values it takes."""
    if isinstance(callback, Equation):
        program = jax.jit(functools.partial(_call, callback))
        return lambda values: program(*values), len(callback.values)
    calls = [_compiled(inner) for inner in callback.callbacks]
    return functools.partial(_call_in_rounds, callback, calls), len(callback.values)


def _call_in_rounds(rounds: Rounds, calls: Sequence[tuple[CompiledCallback, int]], values: Sequence[Any]) -> None:
    for number in reversed(range(rounds.length)) if rounds.reverse else range(rounds.length):
        supply = iter(values)
        for call, count in calls:
            call([x[number] for x in itertools.islice(supply, count)])


def _call(eqn: Equation, *values: Any) -> None:
    supply = iter(values)
    eqn.primitive.bind(*[v.value if isinstance(v, Literal) else next(supply) for v in eqn.inputs], **eqn.params)


def _whole(x: Any) -> Any:
    """An array that lies whole on one device; by way of the host if it is cut."""
    if not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
        return x
    return x.addressable_data(0) if x.is_fully_replicated else jax.device_get(x)
