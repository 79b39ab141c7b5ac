"""Which jaxprs and equations count as the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.same import Signature, parameters_signature, program_signature
from autopar.tracing.trace import trace

X = jax.ShapeDtypeStruct((4,), jnp.float32)
TABLE = np.arange(4.0, dtype=np.float32)


def program(fun: Callable[..., Any], *args: Any) -> Signature[Any]:
    return program_signature(jax.make_jaxpr(fun)(*args))


def layered(scale: float, length: int = 3) -> Callable[..., Any]:
    return lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) * scale, None), x, length=length)[0]


def test_what_was_traced_twice_is_the_same() -> None:
    assert program(layered(2.0), X) == program(layered(2.0), X)
    assert hash(program(layered(2.0), X)) == hash(program(layered(2.0), X))
    assert program(lambda x: jnp.where(x > 0, x, 0) @ x, X) == program(lambda y: jnp.where(y > 0, y, 0) @ y, X)


@pytest.mark.parametrize(
    "other",
    [
        program(layered(2.0000005), X),
        program(layered(2.0, length=4), X),
        program(layered(2.0), jax.ShapeDtypeStruct((5,), jnp.float32)),
        program(layered(2.0), jax.ShapeDtypeStruct((4,), jnp.bfloat16)),
        program(lambda x: layered(2.0)(x) + x, X),
    ],
)
def test_what_computes_something_else_is_not(other: Signature[Any]) -> None:
    assert program(layered(2.0), X) != other


def test_what_is_the_same_is_one_object_while_it_is_used() -> None:
    first = program(layered(2.0), X)
    assert program(layered(2.0), X) is first
    gone = weakref.ref(program(layered(2.5), X))
    assert gone() is None


def test_operands_in_another_order_are_another_program() -> None:
    assert program(lambda x, y: x - y, X, X) != program(lambda x, y: y - x, X, X)
    assert program(lambda x, y: x - y, X, X) == program(lambda y, x: y - x, X, X)


def test_constants_are_the_same_if_they_are_one_array() -> None:
    one, other = jnp.asarray(TABLE), jnp.asarray(TABLE + 1)
    assert program(lambda x: x + one, X) == program(lambda x: x + one, X)
    assert program(lambda x: x + one, X) != program(lambda x: x + other, X)


def equation(fun: Callable[..., Any], *args: Any) -> Signature[Any]:
    (found,) = trace(fun, args, {}, name="f").equations
    return found.signature


def test_equations_are_the_same_for_alike_arrays_and_equal_parameters() -> None:
    assert equation(lambda x: jnp.sin(x), X) == equation(lambda x: jnp.sin(x), X)
    assert equation(lambda x: jnp.sin(x), X) != equation(lambda x: jnp.cos(x), X)
    assert equation(lambda x: jnp.sin(x), X) != equation(lambda x: jnp.sin(x), jax.ShapeDtypeStruct((5,), X.dtype))
    assert equation(lambda x: jax.lax.slice(x, (0,), (2,)), X) != equation(lambda x: jax.lax.slice(x, (2,), (4,)), X)


class Unhashable:
    """A parameter whose type can be hashed, and which cannot."""

    def __hash__(self) -> int:
        raise TypeError


def test_what_cannot_be_hashed_is_itself_only() -> None:
    one, other = Unhashable(), Unhashable()
    assert parameters_signature({"a": one}) == parameters_signature({"a": one}) != parameters_signature({"a": other})
    zeros = [parameters_signature({"a": number}) for number in (np.float32(0.0), np.float32(-0.0), 0.0, -0.0)]
    assert len(set(zeros)) == 4


def test_equations_with_other_numbers_are_others() -> None:
    """Down to the sign of zero, which division tells."""
    assert equation(lambda x: x / 2.0, X) == equation(lambda x: x / 2.0, X)
    assert equation(lambda x: x / 2.0, X) != equation(lambda x: x / 3.0, X)
    assert equation(lambda x: x * 0.0, X) != equation(lambda x: x * -0.0, X)
    pads = [equation(lambda x, z=z: jax.lax.pad(x, z, [(1, 1, 0)]), X) for z in (0.0, -0.0, 0.0)]
    assert pads[0] == pads[2] != pads[1]
