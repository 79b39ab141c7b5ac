"""What XLA for CPUs reads against its order in memory, or copies before: by the rules, and in the compiled programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.graph import Value
from autopar.ir.local import Traffic
from autopar.passes.rules.fusion import memory_traffic
from autopar.passes.rules.table import rule_of
from autopar.trace import trace


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def traffic_of(function: Callable[..., Any], *args: Any) -> list[Traffic]:
    graph = trace(function, args, {}, name="function")
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    return [*memory_traffic(graph.equations, rules, graph.inputs, outputs, single_output=True).values()]


def compiled(function: Callable[..., Any], *args: Any) -> str:
    return jax.jit(function).lower(*args).compile().as_text() or ""


ROWS, HEADS = shape(4, 8, 16), shape(4, 8, 2, 16)
# Of one product: whether the left and the right operand are copied, and whether against their order.
PRODUCTS: dict[str, tuple[str, tuple[Any, Any], tuple[bool, bool], tuple[int, int]]] = {
    "rows by a matrix": ("bsd,df->bsf", (ROWS, shape(16, 32)), (False, False), (0, 0)),
    "rows by a transposed matrix": ("bsd,fd->bsf", (ROWS, shape(32, 16)), (False, False), (0, 0)),
    "the gradient of a matrix": ("bsd,bsf->df", (ROWS, shape(4, 8, 32)), (True, False), (1, 0)),
    "of two dimensions": ("sd,sf->df", (shape(8, 16), shape(8, 32)), (False, False), (0, 0)),
    "heads in the midst": ("bshd,bthd->bhst", (HEADS, HEADS), (True, True), (0, 0)),
    "experts": ("esd,esf->edf", (ROWS, shape(4, 8, 32)), (False, False), (0, 0)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_of_products(name: str) -> None:
    subscripts, (left, right), copied, against = PRODUCTS[name]
    (product,) = [each for each in traffic_of(lambda x, y: jnp.einsum(subscripts, x, y), left, right) if each.launches]
    assert [product.reordered(i) for i in range(2)] == [*zip(against, copied, strict=True)]
    moves = re.findall(r"\b(?:transpose|copy)\(", compiled(lambda x, y: jnp.einsum(subscripts, x, y), left, right))
    assert bool(moves) == any(copied)


SQUARE = shape(64, 64)
ELEMENTWISE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "in order": (lambda x, y: x + y, (SQUARE, SQUARE), 0),
    "a transposed array": (lambda x, y: x.T + y, (SQUARE, SQUARE), 1),
    "through what is fused": (lambda x, y: jnp.tanh(jnp.exp(x).T) + y, (SQUARE, SQUARE), 1),
    "transposed twice": (lambda x, y: jnp.exp(x.T).T + y, (SQUARE, SQUARE), 0),
    "neighbours stay neighbours": (lambda x, y: x.swapaxes(0, 1) + y, (shape(4, 8, 64), shape(8, 4, 64)), 0),
    "a column, over rows": (lambda x, y: x + y[:, None], (SQUARE, shape(64)), 0),
    "another shape": (lambda x, y: x.reshape(32, 128) + y, (SQUARE, shape(32, 128)), 0),
    "another shape of a transposed array": (lambda x, y: x.T.reshape(32, 128) + y, (SQUARE, shape(32, 128)), 1),
    "a transposed result": (lambda x, y: (x @ x).T + y, (SQUARE, SQUARE), 1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_operands_of_elementwise_kernels(name: str) -> None:
    function, args, against = ELEMENTWISE[name]
    found = traffic_of(function, *args)
    assert sum(sum(each.against) for each in found) == against
    assert not any(any(each.copied) for each in found)


def test_gpus_read_in_any_order() -> None:
    graph = trace(lambda x, y: x.T + y, (SQUARE, SQUARE), {}, name="function")
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    for each in memory_traffic(graph.equations, rules, graph.inputs, outputs).values():
        assert each.against == each.copied == ()
