"""Options that name arguments, and sizes that cannot be meant: one clear error each, before anything is planned."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import BatchAxisError, ClusterError, TraceError

ON_TWO: dict[str, Any] = {"method": recipes.data_parallel(), "devices": jax.devices()[:2]}


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.sum(x)


@pytest.mark.parametrize("option", ["static_argnums", "donate_argnums"])
@pytest.mark.parametrize("numbers", [-9, (5,), (0, 2), -3])
def test_numbers_out_of_range(option: str, numbers: Any) -> None:
    wrong = numbers if isinstance(numbers, int) else numbers[-1]
    message = f"{option} of step has {wrong}, but it takes 2 positional arguments: choose from -2 to 1."
    with pytest.raises(TraceError, match=f"^{re.escape(message)}$"):
        autopar.parallelize(step, **{option: numbers})
    with pytest.raises(ValueError, match=option):  # as under jit
        jax.jit(step, **{option: numbers})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"donate_argnums": "state"}, "donate_argnums of step has 's'; it must be numbers of positional arguments."),
        ({"static_argnums": (1.0,)}, "static_argnums of step has 1.0; it must be numbers of positional arguments."),
        ({"static_argnames": "rate"}, "static_argnames of step has 'rate', but its parameters are w, x."),
    ],
)
def test_what_names_no_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=f"^{re.escape(message)}$"):
        autopar.parallelize(step, **options)


@pytest.mark.parametrize("two", [2, np.int64(2), np.array(2), (2,), [np.int32(2)], np.array([2]), {2}], ids=repr)
def test_numbers_as_jit_takes_them(two: Any) -> None:
    args = jnp.ones((2, 2)), jnp.ones((4, 2)), 0.5
    mine = autopar.parallelize(with_default, static_argnums=two, donate_argnums=None)
    expected = jax.jit(with_default, static_argnums=two, donate_argnums=None)(*args)
    for _ in range(2):  # nothing is donated
        np.testing.assert_allclose(mine(*args)[0], expected[0], rtol=1e-6)
    assert mine(*args)[1] == 1.0


def by_keyword(w: Any, x: Any, *, rate: float = 0.1) -> Any:
    return w - rate * jnp.mean(x), rate * 2


def with_default(w: Any, x: Any, rate: float = 0.1) -> Any:
    return w - rate * jnp.mean(x), rate * 2


def with_more(w: Any, *rest: Any) -> Any:
    return w - rest[-1] * jnp.mean(rest[0]), rest[-1] * 2


@pytest.mark.parametrize(
    ("fun", "options", "rate"),
    [
        (with_default, {"static_argnums": -1}, (0.5,)),
        (with_default, {"static_argnums": 2, "donate_argnums": -3}, (0.5,)),
        (with_default, {"static_argnums": 2, "donate_argnums": (0,)}, ()),
        (with_more, {"static_argnums": -1}, (0.5,)),
        (with_more, {"static_argnums": 2}, (0.5,)),
        (by_keyword, {"static_argnames": "rate"}, ()),
    ],
    ids=lambda x: str(getattr(x, "__name__", x)),
)
def test_numbers_that_jit_takes(fun: Callable[..., Any], options: dict[str, Any], rate: tuple[float, ...]) -> None:
    """From the end as well; of arguments that a call may leave out."""
    w, x = jnp.ones((4, 4)), jnp.ones((8, 4))
    expected = jax.jit(fun, **{k: v for k, v in options.items() if k != "donate_argnums"})(w, x, *rate)
    found = autopar.parallelize(fun, batch_axes=(None, 0), **options, **ON_TWO)(w, x, *rate)
    jax.tree.map(lambda a, b: pytest.approx(b) == a, autopar.gather(found), expected)


@pytest.mark.parametrize("batch_axes", ["auto", (None, 0)])
def test_an_empty_batch(batch_axes: Any) -> None:
    parallel = autopar.parallelize(step, batch_axes=batch_axes, **ON_TWO)
    with pytest.raises(BatchAxisError, match=r"^the batch of step is empty: x has no examples along axis 0\. "):
        parallel(jnp.ones((4, 4)), jnp.ones((0, 4)))


@pytest.mark.parametrize("name", ["dgx-h100", "cpu"])
@pytest.mark.parametrize("count", ["num_hosts", "devices_per_host"])
def test_a_cluster_of_a_billion(name: str, count: str) -> None:
    message = f"{count} is 1000000000; it must be a whole number from 1 to 1000000"
    with pytest.raises(ClusterError, match=message):
        autopar.load_preset(name, **{count: 10**9})
