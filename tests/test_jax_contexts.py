"""Steps inside of JAX's own contexts, and results of JAX's own types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import autopar
from autopar import recipes
from autopar.errors import TraceError

METHODS = [recipes.data_parallel(1), recipes.data_parallel(2), recipes.gpipe(2, 2)]
EDGES = np.linspace(0.0, 1.0, 5)


def step(params: Any, x: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        h = jnp.tanh(x @ params["in"]).reshape(x.shape[0], 2, -1) + jnp.eye(2, 8)
        return jnp.mean((h.reshape(x.shape[0], -1) @ params["out"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments() -> tuple[Any, Any]:
    return {"in": jnp.full((8, 16), 0.1), "out": jnp.full((16, 4), 0.1)}, jnp.ones((16, 8))


def check(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), autopar.gather(found), expected)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name} in {method.num_microbatches}")
def test_a_mesh_that_is_set_means_nothing_to_a_plan(method: Any, types: AxisType) -> None:
    args = arguments()
    expected = jax.jit(step)(*args)
    before = autopar.parallelize(step, method=method, donate_argnums=())
    check(before(*args), expected)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(types,))):
        check(autopar.parallelize(step, method=method, donate_argnums=())(*args), expected)
        check(before(*args), expected)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name} in {method.num_microbatches}")
def test_nothing_is_transferred_that_a_guard_forbids(method: Any) -> None:
    args = arguments()
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    with jax.transfer_guard("disallow"):
        found = parallel(*args)
    check(found, jax.jit(step)(*args))


def test_constants_among_the_results_are_arrays() -> None:
    def counting(params: Any, x: Any) -> Any:
        counts, edges = jnp.histogram(x, bins=EDGES)
        return step(params, x), counts, edges

    found = autopar.parallelize(counting, donate_argnums=())(*arguments())
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(found))
    np.testing.assert_array_equal(found[2], EDGES.astype("f"))


def test_what_is_gathered_is_as_weakly_typed_as_before() -> None:
    """Or the next step in one program would have other types than this one."""

    def decaying(state: Any, x: Any) -> Any:
        w, rate = state
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return (w - rate * gradient, rate * 0.5), jnp.sum(x)

    args = (jnp.ones((8, 4), jnp.bfloat16), 0.1), jnp.ones((16, 8), jnp.bfloat16)
    state, _ = autopar.parallelize(decaying, method=recipes.data_parallel(), donate_argnums=())(*args)
    gathered, expected = autopar.gather(state), jax.jit(decaying)(*args)[0]
    assert [x.weak_type for x in gathered] == [x.weak_type for x in expected] == [False, True]
    assert jax.jit(decaying)(gathered, args[1])[0][0].dtype == jnp.bfloat16


def test_no_class_of_a_users_is_made_of_what_is_no_array() -> None:
    @jax.tree_util.register_pytree_node_class
    class Scale:
        """Of a loss, which is a floating-point number."""

        def __init__(self, value: Any) -> None:
            if hasattr(value, "dtype") or isinstance(value, int | float):
                assert jnp.issubdtype(jnp.result_type(value), jnp.floating), f"a scale is no {value!r}"
            self.value = value

        def tree_flatten(self) -> tuple[Any, None]:
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> Any:
            return cls(*children)

    def scaled(state: Any, x: Any) -> Any:
        params, scale = state
        params, loss = step(params, x)
        return (params, Scale(scale.value * 2.0)), loss

    params, x = arguments()
    state, _ = autopar.parallelize(scaled, donate_argnums=())((params, Scale(jnp.float32(8.0))), x)
    assert float(state[1].value) == 16.0


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint2, jnp.float4_e2m1fn])
def test_elements_of_less_than_a_byte_are_refused_as_arguments(dtype: Any) -> None:
    def quantised(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda p: p, state), jnp.mean(x @ state["base"].astype(x.dtype))

    state = {"base": jnp.ones((8, 4), dtype)}
    with pytest.raises(TraceError, match=r"argument state\['base'\] of quantised has the type .*Keep it in 8 bits"):
        autopar.parallelize(quantised)(state, jnp.ones((16, 8)))
