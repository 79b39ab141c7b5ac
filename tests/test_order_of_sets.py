"""Plans do not depend on where objects lie in memory, which orders sets of them: another process makes the same."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost_model import fusion
from autopar.ir.graph import Equation, Literal, Value
from autopar.ir.method import AUTO
from autopar.ir.plan import Plan
from autopar.passes.rules import table
from autopar.planning.traced import TracedStep
from tests.test_plans_ahead import STEPS

FACTORS = (1, 2**32 - 1, 40_503)  # of the numbers by which they are ordered; the second turns the order round


def _recurrent() -> TracedStep:
    """Whose loop carries two values backward, of unlike sizes."""

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            rows = jnp.swapaxes(x, 0, 1)
            return jnp.mean(jax.lax.scan(lambda h, t: (jnp.tanh(h @ w + t), h), jnp.zeros((8, 16)), rows)[1] ** 2)

        return w - 0.1 * jax.grad(loss_of)(w)

    arrays = np.zeros((16, 16), np.float32), np.zeros((8, 5, 16), np.float32)
    return autopar.parallelize(step).trace(*arrays).step


def _plan(name: str, factor: int, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """As in a process in which objects lie elsewhere."""
    for kind in (Value, Equation, Literal, fusion._Fusion):
        numbers: dict[int, tuple[int, Any]] = {}  # by id; the objects are kept, since another one would have theirs
        counter = itertools.count()

        def number(
            self: Any, numbers: dict[int, tuple[int, Any]] = numbers, counter: itertools.count[int] = counter
        ) -> int:
            if id(self) not in numbers:
                numbers[id(self)] = next(counter), self
            return hash(numbers[id(self)][0] * factor & 0xFFFFFFFF)

        monkeypatch.setattr(kind, "__hash__", number)
    table._rule_of.cache_clear()
    table._LOOPS.forget()
    step = _recurrent() if name == "recurrent" else STEPS[name]()
    plan = step.search(autopar.load_preset("dgx-h100", devices_per_host=2), AUTO)[0]
    table._rule_of.cache_clear()
    table._LOOPS.forget()
    return plan


@pytest.mark.parametrize("name", ["recurrent", "scanned", "small"])
def test_plans_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = (_plan(name, factor, monkeypatch) for factor in FACTORS)
    for other in others:
        assert other == first
