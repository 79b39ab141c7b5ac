"""Calls with the state that the last one left: the same as any other call, whatever comes between them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import StateError, UserError
from tests.planned import cluster_of

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def step(state: Any, x: Any) -> Any:
    def loss_of(w: Any) -> Any:
        return (jnp.tanh(x @ w["a"] + state["frozen"]) @ w["b"]).var(axis=0).sum() + (x @ w["a"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["w"])
    new = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], gradients)
    return {"w": new, "frozen": state["frozen"], "count": state["count"] + 1}, {"loss": loss, "x": (x * x).sum()}


def start() -> Any:
    w = {"a": np.eye(4, dtype=np.float32), "b": np.full((4, 4), 0.5, np.float32)}
    return {"w": w, "frozen": np.full(4, 0.1, np.float32), "count": jnp.int32(0)}


METHODS = [recipes.data_parallel(), recipes.zero(3), recipes.gpipe(2, 1)]


@pytest.fixture(params=METHODS, ids=lambda method: method.name)
def parallel(request: pytest.FixtureRequest) -> autopar.Parallelized:
    return autopar.parallelize(step, cluster=cluster_of(1, 4), method=request.param, batch_axes=(None, 0))


def same(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    found, expected = autopar.gather(found), expected
    ours, theirs = (jax.tree_util.tree_leaves_with_path(tree) for tree in (found, expected))
    for (at, a), (there, b) in zip(ours, theirs, strict=True):
        assert at == there
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10)


def steady(parallel: autopar.Parallelized, calls: int = 3) -> tuple[Any, Any]:
    """States after some calls, by us and under `jax.jit`."""
    ours, theirs = start(), start()
    for _ in range(calls):
        ours, _ = parallel(ours, X)
        theirs, _ = jax.jit(step)(theirs, X)
    assert parallel._steady is not None  # otherwise the tests below prove nothing
    return ours, theirs


def test_a_loop(parallel: autopar.Parallelized) -> None:
    ours, theirs = steady(parallel)
    for k in range(3):
        ours, found = parallel(ours, X * k)
        theirs, expected = jax.jit(step)(theirs, X * k)
        same((ours, found), (theirs, expected))


def test_another_state_and_other_shapes_between(parallel: autopar.Parallelized) -> None:
    ours, theirs = steady(parallel)
    same(parallel(start(), X), jax.jit(step)(start(), X))
    same(parallel(ours, X[:4]), jax.jit(step)(theirs, X[:4]))


def test_a_leaf_that_was_replaced(parallel: autopar.Parallelized) -> None:
    ours, theirs = steady(parallel)
    new = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    ours = {**ours, "w": {**ours["w"], "b": new}}
    theirs = {**theirs, "w": {**theirs["w"], "b": new}}
    same(parallel(ours, X), jax.jit(step)(theirs, X))


def test_a_batch_of_another_type(parallel: autopar.Parallelized) -> None:
    ours, theirs = steady(parallel)
    same(parallel(ours, X.astype(np.float16)), jax.jit(step)(theirs, X.astype(np.float16)), 1e-2)


@pytest.mark.parametrize("other", [{"x": X}, [X], None], ids=["dict", "list", "None"])
def test_a_batch_of_another_structure(parallel: autopar.Parallelized, other: Any) -> None:
    ours, theirs = steady(parallel)
    with pytest.raises((TypeError, UserError)):  # as the step itself says it
        parallel(ours, other)
    same(parallel(ours, X), jax.jit(step)(theirs, X))


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_batch_that_is_filled_anew_at_once(parallel: autopar.Parallelized, order: Any) -> None:
    ours, theirs = steady(parallel)
    batch = np.array(np.tile(X, (512, 1)), order=order)
    for k in range(20):
        batch[...] = np.tile(X + k, (512, 1))
        theirs, _ = jax.jit(step)(theirs, batch.copy())
        ours, _ = parallel(ours, batch)
        batch.fill(np.nan)
    same(ours, theirs, 1e-3)


def test_a_state_that_is_gone(parallel: autopar.Parallelized) -> None:
    ours, _ = steady(parallel)
    parallel(ours, X)
    with pytest.raises(StateError, match="was donated to an earlier step and is gone"):
        parallel(ours, X)


@pytest.mark.parametrize("number", range(4))
def test_a_leaf_that_is_gone(parallel: autopar.Parallelized, number: int) -> None:
    """Whichever program would have taken it, the others are still there."""
    ours, theirs = steady(parallel)
    leaves, expected = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    leaves.pop(number).delete()
    expected.pop(number)
    with pytest.raises(StateError, match="was donated to an earlier step and is gone"):
        parallel(ours, X)
    same(leaves, expected)


def test_a_first_program_that_fails_says_why(parallel: autopar.Parallelized) -> None:
    """Also where the state is another than the last call left, and still on the host."""
    ours, theirs = steady(parallel)
    calls = parallel.compile(ours, X)._worker._calls
    before = dict(calls)

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    calls.update(dict.fromkeys(calls, fail))
    for state in (start(), ours):
        with pytest.raises(RuntimeError, match="out of memory"):
            parallel(state, X)
    calls.update(before)
    same(parallel(ours, X), jax.jit(step)(theirs, X))


def test_what_is_looked_for_is_found(parallel: autopar.Parallelized) -> None:
    ours, _ = steady(parallel)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="invalid value"):
        parallel(ours, X * np.nan)


def test_an_argument_that_is_a_part_of_the_state(parallel: autopar.Parallelized) -> None:
    """It is read after it would have been given away."""

    def other(state: Any, x: Any) -> Any:
        return {"a": state["a"] * 2, "b": state["b"] + x.sum()}, x.mean()

    found = autopar.parallelize(other, cluster=cluster_of(1, 4), method=recipes.data_parallel(), batch_axes=(None, 0))
    ours, theirs = ({"a": np.ones((8, 4), np.float32), "b": np.zeros(3, np.float32)} for _ in range(2))
    for _ in range(3):
        ours, _ = found(ours, X)
        theirs, _ = jax.jit(other)(theirs, X)
    assert found._steady is not None
    same(found(ours, ours["a"]), jax.jit(other)(theirs, theirs["a"]))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_number_of_the_host_beside_the_state(method: Any) -> None:
    """As learning rates are passed: another one each time, and once an array."""

    def other(state: Any, x: Any, rate: Any) -> Any:
        new, metrics = step(state, x)
        return {**new, "w": jax.tree.map(lambda w, v: w + rate * (v - w), state["w"], new["w"])}, metrics

    found = autopar.parallelize(other, cluster=cluster_of(1, 4), method=method, batch_axes=(None, 0, None))
    ours, theirs = start(), start()
    is_steady = []
    for rate in (0.5, 0.4, 0.3, 0.2, jnp.float32(0.1), 0.3, 0.2):
        ours, _ = found(ours, X, rate)
        theirs, _ = jax.jit(other)(theirs, X, rate)
        is_steady.append(found._steady is not None)
        same(ours, theirs)
    assert is_steady[3:] == [True, False, False, True]


@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method.name)
def test_what_comes_back_beside_what_takes_its_place(method: Any) -> None:
    def both(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w), w, x

    parallel = autopar.parallelize(both, cluster=cluster_of(1, 4), method=method, batch_axes=(None, 0))
    ours = theirs = np.eye(4, dtype=np.float32)
    for _ in range(5):
        ours, before, x = parallel(ours, X)
        expected = jax.jit(both)(theirs, X)
        theirs = expected[0]
        same((ours, before, x), expected)
    assert parallel._steady is not None


@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method.name)
def test_state_that_is_brought_anew_and_comes_back(method: Any) -> None:
    def scaled(state: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - state["rate"] * gradient, "rate": state["rate"]}, loss

    parallel = autopar.parallelize(scaled, cluster=cluster_of(1, 4), method=method, batch_axes=(None, 0))
    ours = theirs = {"w": np.eye(4, dtype=np.float32), "rate": np.full((4, 4), 0.1, np.float32)}
    for k in range(1, 8):
        rate = np.full((4, 4), 0.1 / k, np.float32)
        theirs, expected = jax.jit(scaled)({**theirs, "rate": rate.copy()}, X)
        ours, loss = parallel({**ours, "rate": rate}, X)
        rate.fill(np.nan)
        assert isinstance(ours["rate"], jax.Array)
        same((ours, loss), (theirs, expected))
    assert parallel._steady is not None


def test_under_a_transfer_guard(parallel: autopar.Parallelized) -> None:
    ours, theirs = steady(parallel)
    with jax.transfer_guard("disallow"):  # of what happens without being asked for
        ours, _ = parallel(ours, X)
    same(ours, jax.jit(step)(theirs, X)[0])


def test_kept_states() -> None:
    """Without donation an earlier state can be gone back to."""
    keeping = autopar.parallelize(
        step, cluster=cluster_of(1, 4), method=recipes.zero(3), batch_axes=(None, 0), donate_argnums=()
    )
    ours, theirs = steady(keeping)
    for _ in range(3):
        same(keeping(ours, X), jax.jit(step)(theirs, X))


def test_pieces_of_leaves() -> None:
    def scanned(stack: Any, x: Any) -> Any:
        def loss_of(stack: Any) -> Any:
            return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0].mean()

        loss, gradient = jax.value_and_grad(loss_of)(stack)
        return stack - 0.1 * gradient, loss

    found = autopar.parallelize(scanned, cluster=cluster_of(1, 4), method=recipes.gpipe(4, 2))
    ours = theirs = np.stack([np.eye(4, dtype=np.float32)] * 4)
    for _ in range(5):
        ours, loss = found(ours, X)
        theirs, expected = jax.jit(scanned)(theirs, X)
        same((ours, loss), (theirs, expected))
    assert isinstance(ours, autopar.Pieces) and found._steady is not None


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method.name)
def test_large_leaves_are_freed_when_the_caller_lets_them_go(method: autopar.Method) -> None:
    """And are known again, as small ones are, while they are there."""

    def layers(state: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            return (jnp.tanh(x @ w["large"] + w["small"]) @ w["last"]).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss_of)(state))

    numbers = np.random.default_rng(0)
    shapes = {"large": (4, 4096), "small": (4096,), "last": (4096, 4)}
    first = {name: numbers.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    parallel = autopar.parallelize(layers, cluster=cluster_of(1, 4), method=method, batch_axes=(None, 0))
    ours, theirs = first, first
    for _ in range(4):
        ours, theirs = parallel(ours, X), jax.jit(layers)(theirs, X)
    same(ours, theirs, 1e-4)
    assert parallel._steady is not None
    left = {name: weakref.ref(x) for name, x in ours.items()}
    del ours
    gc.collect()
    assert left["large"]() is None and left["last"]() is None
