"""What a step computes twice, its programs compute once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autopar import recipes
from autopar.ir.local import Compute
from autopar.ir.method import Method
from tests.planned import cluster_of, plan_step


def primitives(step: Callable[..., Any], method: Method) -> Counter[str]:
    """How often each primitive is computed in the step's one program."""
    w, x = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)
    (program,) = plan_step(step, (w, x), cluster_of(1, 8), method, 1).lowered.programs
    return Counter(op.equation.primitive.name for op in program.ops if isinstance(op, Compute))


def table(x: Any) -> Any:
    """Batch-free, the same at every call."""
    return jnp.cos(jnp.arange(16, dtype=jnp.float32) / 7)


def test_a_table_that_every_layer_makes_is_made_once() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = jnp.tanh(x * table(x) @ w)
            return jnp.mean((y * table(y) @ w) ** 2)

        return w - jax.grad(loss)(w)

    assert primitives(step, recipes.data_parallel())["cos"] == 1


def test_what_differs_in_a_parameter_or_an_operand_stays_apart() -> None:
    def step(w: Any, x: Any) -> Any:
        y = x @ w
        sums = jax.lax.cumsum(y, axis=1) * jax.lax.cumsum(y, axis=1, reverse=True) * jax.lax.cumsum(y, axis=1)
        return w * 2, jnp.mean(jnp.sin(y) + jnp.sin(x @ w.T) + sums)

    found = primitives(step, recipes.data_parallel())
    assert found["sin"] == 2
    assert found["cumsum"] == 2


def test_rematerialised_values_are_made_again() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jax.checkpoint(lambda x: jnp.exp2(jnp.tanh(x @ w)))(x) ** 2)

        return w - jax.grad(loss)(w)

    assert primitives(step, recipes.data_parallel())["tanh"] == 2


def test_what_the_step_returns_twice_is_two_results() -> None:
    def step(w: Any, x: Any) -> Any:
        mean = jnp.mean(x) * jnp.mean(w)
        return w - mean, jnp.sqrt(mean), jnp.sqrt(mean)

    assert primitives(step, recipes.data_parallel())["sqrt"] == 2
