"""The corrections of capacity: what fits with them all does not fit without one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.errors import InfeasiblePlanError
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.passes.batch import BatchAnalysis
from autopar.planning.parts import Part
from autopar.planning.planner import Planner
from tests import models
from tests.planned import analyse, cluster_of

_CLUSTER = cluster_of(1, 4, flops=1e10, memory_bandwidth=1e11, link=1e9, latency=1e-6, launch=1e-6)


_SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "chain": {"w": (256, 256), "b": (256,)},
    "residual": {"up": (256, 1024), "down": (1024, 256)},
}


@functools.cache
def _case(name: str) -> tuple[BatchAnalysis, Plan]:
    """Eight layers, and their plan in one stage and one microbatch where memory is plenty."""
    shapes = _SHAPES[name]
    loss = {"chain": models.dense_chain_loss, "residual": models.residual_loss}[name]
    layer = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((512, 256), jnp.float32))
    analysis = analyse(models.sgd(loss), [layer] * 8, batch)
    plan, _ = Planner(analysis, _CLUSTER, _method()).plan()
    return analysis, plan


def _method(**options: Any) -> Method:
    return recipes.auto(baselines=False, num_stages=1, num_microbatches=1, **options)


@pytest.mark.parametrize(
    ("case", "share", "part"),
    [
        ("chain", 0.8, Part.LESS_MEMORY),
        ("chain", 0.8, Part.RESHARD_AFTER_FORWARD),
        ("residual", 0.9, Part.MORE_RECOMPUTED),
    ],
)
def test_what_does_not_fit_without_a_correction(case: str, share: float, part: Part) -> None:
    analysis, roomy = _case(case)
    method = _method(memory_limit=int(share * roomy.peak_memory))
    plan, _ = Planner(analysis, _CLUSTER, method).plan()
    assert plan.peak_memory <= share * roomy.peak_memory
    assert plan.step_time >= roomy.step_time
    with pytest.raises(InfeasiblePlanError):
        Planner(analysis, _CLUSTER, dataclasses.replace(method, without=frozenset({part}))).plan()
