"""Which arguments hold the examples: found, given, or asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import BatchAxisError
from autopar.ir.graph import Graph
from autopar.passes.batch import analyse_batch
from autopar.passes.batch_axes import resolve_batch_axes
from autopar.passes.rules.table import rule_of
from autopar.tracing.trace import trace


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def graph_of(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    return trace(fun, args, kwargs, name="step")


def found(graph: Graph, batch_axes: Any = "auto", state: tuple[str, ...] = ()) -> dict[str, int]:
    """By path."""
    known = frozenset(v for v, p in zip(graph.inputs, graph.input_paths, strict=True) if p in state)
    axes = resolve_batch_axes(graph, batch_axes, known)
    return {p: axes[v] for v, p in zip(graph.inputs, graph.input_paths, strict=True) if v in axes}


def step(state: Any, batch: Any) -> Any:
    return jax.tree.map(lambda w: w * batch["x"].mean(), state), batch["y"].sum()


STATE = {"w": f32(3, 2), "n": f32()}


def test_what_is_no_state_holds_the_examples() -> None:
    """All leaves that do not come out again, along their first axis."""
    graph = graph_of(step, STATE, {"x": f32(8, 2), "y": f32(8)})
    assert found(graph) == {"batch['x']": 0, "batch['y']": 0}


def test_scalars_and_keys_hold_none() -> None:
    def noisy(state: Any, batch: Any, rate: Any, typed: Any, raw: Any) -> Any:
        noise = jax.random.normal(typed) + jax.random.normal(raw)
        return jax.tree.map(lambda w: w * batch["x"].mean() * rate + noise, state), batch["y"].sum()

    batch = {"x": f32(8, 2), "y": f32(8)}
    graph = graph_of(noisy, STATE, batch, f32(), jax.random.key(0), jax.random.PRNGKey(0))
    assert found(graph) == {"batch['x']": 0, "batch['y']": 0}


def test_keyword_arguments() -> None:
    assert found(graph_of(step, STATE, batch={"x": f32(8, 2), "y": f32(8)})) == {"batch['x']": 0, "batch['y']": 0}


@pytest.mark.parametrize(
    ("batch_axes", "expected"),
    [
        ((None, 0), {"batch['x']": 0, "batch['y']": 0}),
        ([None, 0], {"batch['x']": 0, "batch['y']": 0}),
        ((None, {"x": 1, "y": None}), {"batch['x']": 1}),
        ((None, {"x": -1, "y": 0}), {"batch['x']": 1, "batch['y']": 0}),
        (({"w": 0, "n": None}, None), {"state['w']": 0}),
    ],
)
def test_given_axes(batch_axes: Any, expected: dict[str, int]) -> None:
    assert found(graph_of(step, STATE, {"x": f32(8, 2), "y": f32(8)}), batch_axes) == expected


def test_state_that_is_known() -> None:
    """A function that returns no state: what lies as another function's state is none of the examples."""
    graph = graph_of(lambda p, x: (x @ p).mean(), f32(8, 2), f32(8, 8))
    assert found(graph, state=("p",)) == {"x": 0}


def test_parameters_that_do_not_come_out() -> None:
    """A frozen teacher's, or those of a model that only predicts."""

    def distil(state: Any, teacher: Any, x: Any, y: Any) -> Any:
        loss = ((x @ teacher["w"] @ teacher["v"] - y) ** 2).mean()
        return jax.tree.map(lambda w: w * loss, state), loss

    teacher = {"w": f32(2, 3), "v": f32(3, 4)}
    assert found(graph_of(distil, STATE, teacher, f32(8, 2), f32(8, 4))) == {"x": 0, "y": 0}
    predict = graph_of(lambda teacher, x, y: distil({}, teacher, x, y)[1], teacher, f32(8, 2), f32(8, 4))
    assert found(predict) == {"x": 0, "y": 0}
    with pytest.raises(BatchAxisError, match=r"candidates teacher\['v'\] \[3, 4\], .* have different leading sizes"):
        found(graph_of(distil, STATE, teacher, f32(3, 2), f32(3, 4)))


def test_different_leading_sizes_are_ambiguous() -> None:
    graph = graph_of(step, STATE, {"x": f32(4, 8), "y": f32(8)})
    with pytest.raises(BatchAxisError) as caught:
        found(graph)
    assert str(caught.value) == (
        "batch_axes='auto' is ambiguous for step: the candidates batch['x'] [4, 8], batch['y'] [8] have different "
        "leading sizes; they share the size 8, though not on their first axes. Pass batch_axes, a pytree prefix of the "
        "arguments with an int or None per leaf, e.g. batch_axes=(None, 0); or None, if there is no axis of examples."
    )


def test_parameters_that_look_like_examples_are_ambiguous() -> None:
    """Eight rows of a weight, eight examples, and neither comes out again."""
    graph = graph_of(lambda p, x: (x @ p).mean(), f32(8, 2), f32(8, 8))
    with pytest.raises(BatchAxisError) as caught:
        found(graph)
    assert str(caught.value) == (
        "batch_axes='auto' is ambiguous for step: no argument comes out again as state, so that parameters and "
        "examples look alike among p [8, 2], x [8, 8]. Pass batch_axes, a pytree prefix of the arguments with an int "
        "or None per leaf, e.g. batch_axes=(None, 0); or None, if there is no axis of examples."
    )


def test_state_that_comes_out_in_another_type_is_named() -> None:
    half = jax.ShapeDtypeStruct((8, 2), jnp.bfloat16)
    graph = graph_of(lambda p, x: p - (x @ p).sum() * jnp.float32(1), half, f32(8, 8))
    with pytest.raises(BatchAxisError, match=r"\(p goes in as bfloat16 and comes out as float32, so it is none\)"):
        found(graph)


@pytest.mark.parametrize(
    ("batch_axes", "message"),
    [
        ((None, 2), "batch_axes: 2 for batch['x'], which has shape (8, 2): no such axis."),
        ((None, "rows"), "batch_axes: 'rows' for batch['x'], which has shape (8, 2): no such axis."),
        ((None, {"z": 0}), "batch_axes=(None, {'z': 0}) is no pytree prefix of the positional arguments of step: "),
        ((None, 0, 0), "batch_axes=(None, 0, 0) is no pytree prefix of the positional arguments of step: "),
        ((None, None), "step has no batch argument: batch_axes gives no leaf an axis. Pass "),
    ],
)
def test_malformed_axes(batch_axes: Any, message: str) -> None:
    graph = graph_of(step, STATE, {"x": f32(8, 2), "y": f32(8)})
    with pytest.raises(BatchAxisError, match="^" + re.escape(message)):
        found(graph, batch_axes)


def test_batches_of_different_sizes() -> None:
    graph = graph_of(step, STATE, {"x": f32(8, 2), "y": f32(8)})
    axes = resolve_batch_axes(graph, (None, {"x": 1, "y": 0}))
    message = "have different sizes along their batch axes (batch['x']: 2, batch['y']: 8)."
    with pytest.raises(BatchAxisError, match=re.escape(message)):
        analyse_batch(graph, axes, rule_of)
