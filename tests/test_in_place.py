"""Steps that change their arguments instead of returning them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import GetAttrKey

import autopar
from autopar import recipes
from autopar.errors import TraceError


@jax.tree_util.register_pytree_with_keys_class
class Linear:
    """An object with attributes, as modules are."""

    def __init__(self, weight: Any, seen: Any) -> None:
        self.weight, self.seen = weight, seen

    def tree_flatten_with_keys(self) -> Any:
        return [(GetAttrKey("weight"), self.weight), (GetAttrKey("seen"), self.seen)], None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Linear:
        return cls(*children)


def models() -> tuple[dict[str, Linear], np.ndarray]:
    inner = Linear(jnp.ones((4, 4)), (jnp.zeros(()),))
    return {"outer": Linear(inner, (jnp.zeros(4),))}, np.arange(32, dtype=np.float32).reshape(8, 4) / 32


def step(model: dict[str, Linear], batch: Any) -> Any:
    batch["x"] = 2 * batch["x"]  # as in jax.jit, a dict is the step's own
    outer = model["outer"]
    loss, g = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(outer.weight.weight)
    outer.weight.weight -= g
    outer.seen = (outer.seen[0] + batch["x"].sum(0),)
    return loss


def test_objects_are_renewed() -> None:
    model, x = models()
    outer, inner = model["outer"], model["outer"].weight
    parallel = autopar.parallelize(step, method=recipes.zero(3, 2), num_microbatches=2, devices=jax.devices()[:2])
    expected, _ = models()
    for _ in range(2):
        batch = {"x": x}
        loss = parallel(model, batch)
        assert jnp.allclose(loss, step(expected, {"x": x}))
        assert batch["x"] is x
    assert model["outer"] is outer and outer.weight is inner
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), model, expected)
    assert inner.weight.sharding.num_devices == 2


def test_what_is_returned_is_not_renewed() -> None:
    def returning(model: Any, batch: Any) -> Any:
        loss = step(model, batch)
        return model, loss

    model, x = models()
    old = model["outer"].weight.weight
    parallel = autopar.parallelize(returning, method=recipes.data_parallel(), devices=jax.devices()[:2])
    new, _ = parallel(model, {"x": x})
    assert model["outer"].weight.weight is old and new["outer"].weight.weight is not old


def test_another_structure_is_refused() -> None:
    def growing(model: Any, batch: Any) -> Any:
        model["outer"].seen = (*model["outer"].seen, batch["x"].sum())
        return batch["x"].sum()

    model, x = models()
    message = r"growing changes in place what leaves its argument 0 has: \['outer'\].seen\[1\] among them. Return the"
    with pytest.raises(TraceError, match=message):
        autopar.parallelize(growing)(model, {"x": x})
