"""Plans that XLA finds to fit, on clusters with so little memory that what it sets aside decides."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

import autopar
from autopar import recipes
from autopar.errors import InfeasiblePlanError, TargetError
from autopar.ir.method import Method
from autopar.planned import Planned
from tests import models
from tests.planned import cluster_of

LAYERS, WIDTH = 8, 64


def loop_step(method: Method, cluster: autopar.Cluster) -> tuple[autopar.Parallelized, Any]:
    step = autopar.parallelize(models.sgd(models.loop_loss), cluster=cluster, method=method)
    return step, (models.sgd_state(models.loop_params(LAYERS, WIDTH, 8)), models.block_batch(64, 32, WIDTH))


def with_memory(cluster: autopar.Cluster, nbytes: int) -> autopar.Cluster:
    kind = dataclasses.replace(cluster.hosts[0].kind, memory=nbytes)
    return dataclasses.replace(cluster, hosts=tuple(dataclasses.replace(h, kind=kind) for h in cluster.hosts))


def too_small_for(method: Method, devices: int) -> tuple[autopar.Cluster, Planned]:
    """A cluster on which the method's plan is predicted to fit, and by XLA's verdict does not."""
    cluster = cluster_of(1, devices)
    for _ in range(4):  # with less memory another plan may be the best
        step, args = loop_step(method, cluster)
        planned = step.plan(*args)
        (stage,) = planned.verify_with_xla("cpu").stages
        if stage.found > stage.capacity:
            return cluster, planned
        assert stage.predicted < stage.found
        cluster = with_memory(cluster, (stage.predicted + stage.found) // 2)
    raise AssertionError("every plan fits")


def test_a_stage_that_xla_finds_too_large_is_planned_again() -> None:
    cluster, first = too_small_for(recipes.auto(), 4)
    assert not first.verify_with_xla("cpu").fits
    step, args = loop_step(recipes.auto(), cluster)
    plan = step.plan(*args, verify="cpu")
    assert plan.verify_with_xla("cpu").fits
    assert plan.cluster == cluster
    assert plan.step_time >= first.step_time
    assert re.search(r"every stage fits\. \d searches were needed: XLA sets aside", plan.notes[-1])


def test_what_fits_is_planned_once_and_then_runs() -> None:
    step, args = loop_step(recipes.auto(), cluster_of(1, 4))
    plan = step.plan(*args, verify="cpu")
    assert plan.notes[-1].endswith("finds that every stage fits.")
    assert step.compile(*args).plan == plan
    assert step.plan(*args, verify="cpu").notes[-1] == plan.notes[-1]


def test_a_method_that_leaves_no_choice_does_not_fit() -> None:
    cluster, first = too_small_for(recipes.data_parallel(1), 4)
    step, args = loop_step(recipes.data_parallel(1), cluster)
    with pytest.raises(InfeasiblePlanError, match=r"more than predicted, of .*With that withheld, nothing fits"):
        step.plan(*args, verify="cpu")
    with pytest.raises(InfeasiblePlanError, match=r"Where everything lies was given"):
        step.plan(*args, method=first, verify="cpu")


def test_a_limit_of_the_users_own_counts() -> None:
    cluster = cluster_of(1, 4)
    step, args = loop_step(recipes.data_parallel(1), cluster)
    (stage,) = step.plan(*args).verify_with_xla("cpu").stages
    limited = dataclasses.replace(recipes.data_parallel(1), memory_limit=(stage.predicted + stage.found) // 2)
    with pytest.raises(InfeasiblePlanError, match="With that withheld, nothing fits"):
        step.plan(*args, method=limited, verify="cpu")


def test_a_target_that_is_not_known() -> None:
    step, args = loop_step(recipes.data_parallel(1), cluster_of(1, 4))
    with pytest.raises(TargetError, match="h1000"):
        step.plan(*args, verify="h1000")
