"""A user's `shard_map` inside a step: the same numbers on any mesh, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from autopar.errors import TraceError
from autopar.tracing.trace import trace
from tests.planned import analyse
from tests.random_plans import plan_by_lot
from tests.test_random_programs import close, numbers

P = PartitionSpec


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def megatron(x: Any, w: Any) -> Any:
    return lax.psum(jnp.tanh(x @ w) @ w.T, "y")


def ring(x: Any, w: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        total, piece = carry
        return (total + piece @ piece.T @ piece, lax.ppermute(piece, "x", [(i, (i + 1) % 4) for i in range(4)])), None

    (total, _), _ = lax.scan(jax.checkpoint(body), (jnp.zeros_like(x), x), None, length=4)
    return total * lax.pmean(w.sum(), "y")


def exchange(x: Any, w: Any) -> Any:
    parts = x.reshape(2, 1, 8)[:, 0]  # two rows a device of `x`
    moved = lax.all_to_all(jnp.concatenate([parts, parts * 2]), "x", 0, 0, tiled=True)
    gathered = lax.all_gather(moved, "y", axis=1, tiled=True)
    scattered = lax.psum_scatter(gathered, "y", scatter_dimension=1, tiled=True)
    mixed = scattered[:2] + moved[2:] + lax.axis_index("x") + w.sum() * lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, x)
    return lax.pmean(mixed, "y")


BODIES: dict[str, tuple[Callable[..., Any], tuple[Any, Any], Any]] = {
    "megatron": (megatron, (P("x"), P(None, "y")), P("x")),
    "ring": (ring, (P("x"), P(None, "y")), P("x", None)),
    "exchange": (exchange, (P("x", None), P("y")), P(("x",), None)),
}


@pytest.mark.parametrize(("name", "checked"), [("megatron", True), ("ring", True), ("exchange", False)])
def test_a_shard_map_means_the_same(name: str, checked: bool) -> None:
    body, in_specs, out_specs = BODIES[name]
    mapped = jax.shard_map(body, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=checked)

    def step(w: Any, x: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(mapped(x, w))))(w)
        return w - gradient, value

    w, x = numbers(8, 8), numbers(8, 8) / 2
    analysis = analyse(step, w, x, batch_axes=(None, 0))
    assert all("test_shard_map.py" in e.source for e in analysis.graph.equations)
    expected = jax.jit(step)(w, x)
    outputs = plan_by_lot(analysis, (2, 2), 1, 1, np.random.default_rng(0)).build(jax.devices())([w, x])
    assert all(close(a, b) for a, b in zip(outputs, expected, strict=True))


def test_one_that_cannot_be_taken_apart_names_its_line() -> None:
    def body(x: Any) -> Any:
        return lax.psum(x, "x", axis_index_groups=[[0, 1], [2, 3]])

    mapped = jax.shard_map(body, mesh=mesh(), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with pytest.raises(TraceError, match=r"the shard_map at .*test_shard_map\.py:\d+.* cannot be taken apart"):
        trace(lambda x: mapped(x), (numbers(8, 8),), {}, name="step")
