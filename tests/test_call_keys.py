"""What `jax.jit` tells apart is told apart: weak types, types of static values, JAX's configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes

ON_TWO: dict[str, Any] = {"method": recipes.data_parallel(), "devices": jax.devices()[:2]}
BATCH, WIDTH = 8, 4


def step(p: Any, x: Any, scale: Any) -> Any:
    """Results of weak types, computed and passed on; a count that may have begun as a Python number."""
    g = jax.grad(lambda w: jnp.mean((x @ w).astype(jnp.float32) ** 2))(p["w"])
    half = (p["w"] * scale).astype(p["w"].dtype) - g
    return {"w": half, "count": p["count"] + 1}, p["w"] * scale, scale * 2, scale, 3.0, x.mean() > 0


def arguments(count: Any = 0) -> tuple[Any, Any]:
    return {"w": jnp.ones((WIDTH, WIDTH), jnp.bfloat16), "count": count}, jnp.ones((BATCH, WIDTH), jnp.bfloat16)


def types(tree: Any) -> list[Any]:
    return [(x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]


def test_weak_types() -> None:
    """A Python number takes the type of what it meets, an array of one element does not; results alike."""
    parallel = autopar.parallelize(step, batch_axes=(None, 0, None), **ON_TWO)
    for count in (0, jnp.int32(0)):
        for scale in (0.5, jnp.float32(0.5), np.float32(0.5), jnp.asarray(0.5)):
            found, expected = parallel(*arguments(count), scale), jax.jit(step)(*arguments(count), scale)
            assert types(found) == types(expected)
            jax.tree.map(np.testing.assert_allclose, autopar.gather(found), expected)
    assert len(parallel._executables) == 4
    first, *_ = parallel(*arguments(), 0.5)
    second, *_ = parallel(first, arguments()[1], 0.5)
    assert int(second["count"]) == 2 and len(parallel._executables) == 4


def test_shapes_keep_their_weak_types() -> None:
    parallel = autopar.parallelize(step, batch_axes=(None, 0, None), **ON_TWO)
    shapes = jax.eval_shape(lambda *xs: xs, *arguments(), 0.5)
    executable = parallel.compile(*shapes)
    assert types(executable(*arguments(), 0.5)) == types(jax.jit(step)(*arguments(), 0.5))
    parallel(*arguments(), 0.5)
    assert len(parallel._executables) == 1


@pytest.mark.parametrize("values", [(1, True, 1.0), (0, False, 0.0), ((1, 2), (True, 2), (1.0, 2))], ids=str)
@pytest.mark.parametrize("by_name", [True, False])
def test_static_values_of_different_types(values: tuple[Any, ...], by_name: bool) -> None:
    def scaled(p: Any, x: Any, rate: Any) -> Any:
        kinds = ("int", "bool", "float")
        return p * 0.9, {kinds.index(type(jax.tree.leaves(rate)[0]).__name__): jnp.sum(x)}

    parallel = autopar.parallelize(scaled, batch_axes=(None, 0), static_argnames="rate", **ON_TWO)
    p, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((BATCH, WIDTH))
    for k, value in [*enumerate(values), *enumerate(values)]:
        _, found = parallel(p, x, rate=value) if by_name else parallel(p, x, value)
        assert list(found) == [k]
    assert len(parallel._executables) == 3


def test_static_leaves_of_different_types() -> None:
    def flagged(p: Any, x: Any) -> Any:
        return {**p, "w": p["w"] * 0.9}, jnp.sum(x) * p["scale"], type(p["scale"]).__name__

    parallel = autopar.parallelize(
        flagged, batch_axes=(None, 0), static_leaves=lambda x: isinstance(x, int | float | str), **ON_TWO
    )
    for scale in (1, True, 1.0):
        p, x = {"w": jnp.ones((WIDTH, WIDTH)), "scale": scale}, jnp.ones((BATCH, WIDTH))
        state, _, name = parallel(p, x)
        assert name == type(scale).__name__ == type(state["scale"]).__name__


def dropped(p: Any, x: Any, key: Any) -> Any:
    """Draws, multiplies, and makes arrays of default types."""
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return p - 0.1 * ((x * kept.astype(x.dtype)).T @ x), jnp.arange(3) * 2, jnp.sum(jnp.zeros(3))


@pytest.mark.parametrize(
    "configured",
    [
        lambda: jax.threefry_partitionable(False),
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.numpy_dtype_promotion("strict"),
    ],
    ids=["threefry_partitionable", "enable_x64", "default_matmul_precision", "numpy_dtype_promotion"],
)
def test_configuration(configured: Callable[[], Any]) -> None:
    """Another configuration is another program, and the first one's is there again afterwards."""
    parallel = autopar.parallelize(dropped, batch_axes=(None, 0, None), donate_argnums=(), **ON_TWO)
    p, x, key = jnp.ones((4, 4)), jax.random.normal(jax.random.key(0), (BATCH, 4)), jax.random.PRNGKey(0)

    def check() -> Any:
        found, expected = parallel(p, x, key), jax.jit(dropped)(p, x, key)
        assert types(found) == types(expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), autopar.gather(found), expected)

    check()
    graph = parallel.trace(p, x, key).graph
    with configured():
        check()
        assert len(parallel._executables) == 2
        assert parallel.trace(p, x, key).graph is not graph
    check()
    assert len(parallel._executables) == 2
