"""What XLA for CPUs reads against its order in memory, or copies before: by the rules, and in the compiled programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.fusion import memory_traffic
from autopar.ir.graph import Value
from autopar.ir.local import Traffic
from autopar.ir.mesh import XlaBackend
from autopar.passes.rules.table import rule_of
from autopar.tracing.trace import trace


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def traffic_of(function: Callable[..., Any], *args: Any) -> list[Traffic]:
    graph = trace(function, args, {}, name="function")
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    return [*memory_traffic(graph.equations, rules, graph.inputs, outputs, xla=XlaBackend(single_output=True)).values()]


def compiled(function: Callable[..., Any], *args: Any) -> str:
    return jax.jit(function).lower(*args).compile().as_text() or ""


ROWS, HEADS = shape(4, 8, 16), shape(4, 8, 2, 16)
# Of one product: how often the left and the right operand are copied, and how often against their order.
PRODUCTS: dict[str, tuple[str, tuple[Any, Any], tuple[int, int], tuple[int, int]]] = {
    "rows by a matrix": ("bsd,df->bsf", (ROWS, shape(16, 32)), (0, 0), (0, 0)),
    "rows by a transposed matrix": ("bsd,fd->bsf", (ROWS, shape(32, 16)), (0, 0), (0, 0)),
    "the gradient of a matrix": ("bsd,bsf->df", (ROWS, shape(4, 8, 32)), (1, 0), (1, 0)),
    "of two dimensions": ("sd,sf->df", (shape(8, 16), shape(8, 32)), (0, 0), (0, 0)),
    "heads in the midst": ("bshd,bthd->bhst", (HEADS, HEADS), (1, 1), (0, 0)),
    "experts": ("esd,esf->edf", (ROWS, shape(4, 8, 32)), (0, 0), (0, 0)),
    "experts, of groups": ("egsd,egsf->edf", (shape(2, 4, 8, 16), shape(2, 4, 8, 32)), (1, 0), (1, 0)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_of_products(name: str) -> None:
    subscripts, args, copied, strided = PRODUCTS[name]

    def product(x: Any, y: Any) -> Any:
        return jnp.einsum(subscripts, x, y)

    (traffic,) = [each for each in traffic_of(product, *args) if each.launches]
    assert traffic.copied == copied
    assert traffic.strided == strided
    assert len(re.findall(r" copy\(", compiled(product, *args))) == sum(copied)


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
    "a transposed product": (lambda x, y: (x @ x).T + y, (SQUARE, SQUARE), 0),
    "a transposed product that two kernels read": (lambda x, y: ((t := (x @ x).T) + y, y - t), (SQUARE, SQUARE), 0),
    "a product in both orders": (lambda x, y: ((p := x @ x).T + y, p * y), (SQUARE, SQUARE), 1),
    "a product that leaves, too": (lambda x, y: ((p := x @ x).T + y, p), (SQUARE, SQUARE), 1),
    "a function of a product": (lambda x, y: jnp.tanh(x @ x).T + y, (SQUARE, SQUARE), 1),
    "many transposed products": (lambda x, y: jnp.swapaxes(x @ x, 1, 2) + y, (shape(4, 8, 8), shape(4, 8, 8)), 0),
    "neighbours of what is batched": (lambda x, y: jnp.swapaxes(x @ x, 0, 1) + y, (shape(8, 8, 8),) * 2, 0),
    "the gradient of a layer": (
        lambda w, x: w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w),
        (shape(64, 32), shape(16, 64)),
        0,
    ),
    "in both orders": (lambda x, y: jnp.exp(x).T + jnp.exp(x) + y, (SQUARE, SQUARE), 1),
    "behind a fence": (lambda x, y: jax.lax.optimization_barrier(x.T) + y, (SQUARE, SQUARE), 1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_operands_of_elementwise_kernels(name: str) -> None:
    function, args, strided = ELEMENTWISE[name]
    found = traffic_of(function, *args)
    assert sum(sum(each.strided) for each in found) == strided
    assert not any(sum(each.copied) for each in found)


@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if "product" in name or "gradient" in name])
def test_transposed_products(name: str) -> None:
    function, args, strided = ELEMENTWISE[name]
    text = compiled(function, *args)
    assert text.count(" dot(") == (2 if "gradient" in name else 1)
    turned = re.findall(r".* (?:copy|transpose)\(.*", text)
    assert bool(turned) == bool(strided), turned


COLUMN, WIDE = shape(64, 1), shape(64, 10)
REDUCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, int]] = {
    "in order": (lambda x: x.sum(0), (SQUARE,), 0, 0),
    "a transposed array": (lambda x: x.T.sum(0), (SQUARE,), 1, 1),
    "neighbours stay neighbours": (lambda x: x.swapaxes(0, 1).sum(0), (shape(4, 8, 64),), 1, 0),
    "a product": (lambda x, y: (x * y).sum(0), (SQUARE, SQUARE), 0, 0),
    "a product with a row": (lambda x, y: jax.lax.mul(x, y).sum(0), (SQUARE, shape(1, 64)), 0, 0),
    "a product with a column": (lambda x, y: jax.lax.mul(x, y).sum(0), (SQUARE, COLUMN), 0, 0),
    "a product with a number": (lambda x, y: jax.lax.mul(x, y).sum(0), (SQUARE, shape()), 0, 0),
    "another shape": (lambda x: x.reshape(32, 20).sum(0), (WIDE,), 0, 0),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_operands_of_reductions(name: str) -> None:
    function, args, copied, strided = REDUCTIONS[name]
    found = traffic_of(function, *args)
    assert sum(sum(each.copied) for each in found) == copied
    assert sum(sum(each.strided) for each in found) == strided


def test_each_of_several_results_lies_in_its_own_dimensions() -> None:
    def two(x: Any, y: Any) -> Any:
        a, b = jax.lax.optimization_barrier((x.T, y))
        return a + 1.0, b * 2.0

    found = traffic_of(two, SQUARE, shape(64))
    assert sum(sum(each.strided) for each in found) == 1


def test_gpus_read_in_any_order() -> None:
    graph = trace(lambda x, y: x.T + y, (SQUARE, SQUARE), {}, name="function")
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    for each in memory_traffic(graph.equations, rules, graph.inputs, outputs).values():
        assert each.strided == each.copied == (0,) * len(each.reads)
