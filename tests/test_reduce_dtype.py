"""Sums of 16-bit numbers in 16 bits: half the bytes, planned as they run, and nearly one device's numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import PlanError, PlanMismatchError
from autopar.ir.plan import Plan
from tests.models import sgd
from tests.planned import cluster_of, lowered_collectives, plan_step

BATCH, WIDTH = 32, 64


def loss(params: Any, batch: Any) -> Any:
    """Two layers, and a loop over two more, in bfloat16."""
    h = jnp.tanh(batch["x"] @ params["w"])
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["stack"])
    return jnp.mean((h @ params["v"] - batch["y"]).astype(jnp.float32) ** 2)


step = sgd(loss)


def arguments() -> tuple[Any, Any]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape) / 8, jnp.bfloat16)

    params = {"w": normal(WIDTH, WIDTH), "stack": normal(2, WIDTH, WIDTH), "v": normal(WIDTH, 8)}
    return params, {"x": 8 * normal(BATCH, WIDTH), "y": 8 * normal(BATCH, 8)}


def parallelized(method: Any, reduce_dtype: Any) -> autopar.Parallelized:
    return autopar.parallelize(step, method=method, donate_argnums=(), reduce_dtype=reduce_dtype)


METHODS = {
    "data parallel": recipes.data_parallel(2),
    "ZeRO-3": recipes.zero(3, 2),
    "tensor parallel": recipes.megatron(1, 8, 1, 1),
    "pipeline": recipes.megatron(2, 2, 2, 4),
}


@pytest.mark.parametrize("name", METHODS)
def test_it_gives_nearly_the_numbers_of_one_device(name: str) -> None:
    params, batch = arguments()
    expected, value = jax.jit(step)(params, batch)
    found, found_value = autopar.gather(parallelized(METHODS[name], None)(params, batch))
    assert float(found_value) == pytest.approx(float(value), rel=2e-2)
    for new, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(new, np.float32) == pytest.approx(np.asarray(reference, np.float32), abs=1e-2)


def test_gradients_take_half_the_memory() -> None:
    wide, narrow = (
        parallelized(METHODS["data parallel"], dtype).plan(*arguments()).stages[0].memory
        for dtype in (jnp.float32, None)
    )
    loss = 4  # bytes, in float32
    assert narrow.gradients - loss == (wide.gradients - loss) / 2
    assert narrow.state == wide.state


def test_a_plan_that_reduces_in_float32_is_not_one_that_reduces_in_bfloat16() -> None:
    plan = parallelized(METHODS["data parallel"], jnp.float32).plan(*arguments())
    with pytest.raises(PlanMismatchError, match="make a plan for this function"):
        parallelized(plan, None).plan(*arguments())
    again = parallelized(METHODS["data parallel"], None).plan(*arguments())
    assert parallelized(Plan.from_json(again.to_json()), None).plan(*arguments()).step_time == again.step_time


@pytest.mark.parametrize("name", METHODS)
def test_what_is_priced_is_what_runs(name: str) -> None:
    """Collective by collective, with its bytes; sums of 16-bit numbers in 32 bits are none of them."""
    planned = plan_step(step, arguments(), cluster_of(1, 8), METHODS[name], None, reduces_own_dtype=True)
    wide = plan_step(step, arguments(), cluster_of(1, 8), METHODS[name], None)
    sent = {True: 0, False: 0}
    for narrow, each in ((True, planned), (False, wide)):
        for source, local in zip(each.build(jax.devices()).sources, each.lowered.programs, strict=True):
            priced = each.priced(local)
            assert lowered_collectives(source, local) == priced, local.program.name
            sent[narrow] += sum(c.payload * n for c, n in priced.items())
    assert 0 < sent[True] < 0.8 * sent[False]


@pytest.mark.parametrize("wrong", [jnp.bfloat16, "float16", 7, "everything"])
def test_other_types_are_refused(wrong: Any) -> None:
    with pytest.raises(PlanError, match=r"reduce_dtype=.*: pass float32, or None for the numbers' own dtype"):
        autopar.parallelize(step, reduce_dtype=wrong)
