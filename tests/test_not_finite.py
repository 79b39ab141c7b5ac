"""NaN, infinities and zeros with a sign go through whatever is cut as they go through it on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.passes.collectives import extreme
from tests.planned import analyse
from tests.random_plans import plan_by_lot
from tests.test_random_programs import close

BATCH, WIDTH = 8, 8

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "max": lambda x: (jnp.max(x), jnp.max(x, 0), jnp.max(x, 1)),
    "min": lambda x: (jnp.min(x), jnp.min(x, 0), jnp.min(x, 1)),
    "max and min of 16 bits": lambda x: (jnp.max(x.astype(jnp.bfloat16), 1), jnp.min(x.astype(jnp.float16), 0)),
    "prod and sum": lambda x: (jnp.prod(x, 1), jnp.sum(x, 0), jnp.mean(x)),
    "argmax": lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 1), jnp.argmax(x, 0)),
    "any and all": lambda x: (jnp.any(jnp.isnan(x), 1), jnp.all(x < 3, 1), jnp.any(jnp.isinf(x))),
    "cumulative": lambda x: (lax.cummax(x, 1), lax.cummin(x, 0), lax.cumlogsumexp(x, 1)),
    "sort": lambda x: (jnp.sort(x, 1), lax.top_k(x, 2)[0], jnp.sort(x, 0)),
    "softmax": lambda x: (jax.nn.softmax(x), jax.nn.logsumexp(x, 1), jax.nn.logsumexp(x)),
    "windows": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "scatter": lambda x: (
        jnp.zeros((4, WIDTH)).at[jnp.arange(BATCH) % 4].max(x), jnp.ones((4, WIDTH)).at[jnp.arange(BATCH) % 4].min(x),
        jax.ops.segment_max(x, jnp.arange(BATCH) % 4, 4),
    ),
    "gather": lambda x: (x[jnp.arange(BATCH)[::-1]], x[:, jnp.array([3, 1, 0])]),
    "loop": lambda x: lax.scan(lambda m, row: (jnp.maximum(m, row), jnp.max(row)), jnp.full(WIDTH, -jnp.inf), x),
    "loop over columns": lambda x: lax.scan(lambda m, c: (m + jnp.max(c), jnp.min(c)), 0.0, x.T),
    "precision": lambda x: (lax.reduce_precision(x, 8, 7), jnp.clip(x, -1, 1), jnp.maximum(x, x[::-1])),
}  # fmt: skip

GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "max": lambda x: jnp.sum(jnp.max(x, 1)) + jnp.sum(jnp.min(x, 0)),
    "softmax": lambda x: jnp.sum(jax.nn.log_softmax(x)[:, 0]),
    "cumulative": lambda x: jnp.sum(lax.cummax(x, 1) * jnp.arange(WIDTH)),
    "windows": lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")),
    "sort": lambda x: jnp.sum(jnp.sort(x, 1) * jnp.arange(WIDTH)),
}


def rows(value: float) -> np.ndarray:
    """Numbers of which a few are `value`: a whole row, alone, in the last place of all."""
    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)
    x[5] = x[2, 3] = x[-1, -1] = value
    return x


def check(function: Callable[..., Any], x: np.ndarray, shape: tuple[int, ...], microbatches: int, lots: int) -> None:
    weights, batch = {"w": np.ones(WIDTH, np.float32)}, {"x": x}
    analysis = analyse(function, weights, batch, batch_axes=(None, 0))
    m = microbatches if analysis.most_microbatches % microbatches == 0 else 1
    planned = plan_by_lot(analysis, shape, 1, m, np.random.default_rng(lots))
    found = planned.build(jax.devices())(jax.tree.leaves((weights, batch)))
    expected = jax.jit(function)(weights, batch)
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert close(a.astype(np.float32), b.astype(np.float32)), f"{a} instead of {b}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("value", [np.nan, -np.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.inf, 0.0))])
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward(name: str, value: float) -> None:
    def function(weights: Any, batch: Any) -> Any:
        return OPERATIONS[name](batch["x"] * weights["w"])

    for lots in range(2):
        check(function, rows(value), (2, 4) if lots else (4,), 1 + lots, lots)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_backward(name: str, value: float) -> None:
    def function(weights: Any, batch: Any) -> Any:
        return jax.grad(lambda w: GRADIENTS[name](batch["x"] * w))(weights["w"])

    for lots in range(2):
        check(function, rows(value), (2, 4) if lots else (4,), 1 + lots, lots)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.int32], ids=str)
@pytest.mark.parametrize("largest", [True, False])
def test_the_largest_over_devices(dtype: Any, largest: bool) -> None:
    """NaN of either sign in any place, infinities, the largest and the smallest numbers, both zeros: bit by bit."""
    with jax.enable_x64(dtype == jnp.float64):
        integer = dtype == jnp.int32
        limits: Any = np.iinfo(np.int32) if integer else jnp.finfo(dtype)  # type: ignore[no-untyped-call]
        special = [] if integer else [np.nan, -np.nan, np.inf, -np.inf, -0.0]
        values = jnp.asarray([limits.max, limits.min, 0, 1, -1, *special], dtype)
        draws = values[np.random.default_rng(0).integers(0, len(values), (8, 200))]
        draws = draws.at[:, 0].set(jnp.asarray([0, 0 if integer else -0.0] * 4, dtype))
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("x")
        found = jax.jit(
            jax.shard_map(
                lambda x: extreme(x, ("x",), largest), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        )(draws)
        expected = (jnp.max if largest else jnp.min)(draws, 0)
        wanted, met = np.asarray(expected, np.float64), np.asarray(found, np.float64)
        for piece in met:
            np.testing.assert_array_equal(piece, wanted)
            real = ~np.isnan(wanted)
            np.testing.assert_array_equal(np.signbit(piece)[real], np.signbit(wanted)[real])
