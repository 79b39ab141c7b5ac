"""Recipes beside the planner, in the same cost model: its plan is none the worse for the search being inexact."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings

from autopar import recipes
from autopar.errors import InfeasiblePlanError, TimeLimitWarning, UserError
from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.ir.units import seconds_text
from autopar.passes.batch import BatchAnalysis
from autopar.passes.lower import LoweredStep
from autopar.passes.submeshes import mesh_at
from autopar.planner import OutOfTime, Planner
from autopar.stage_costs import StageCosts

_SURE = 0.95  # an estimate that is not below this share of a plan's time cannot be of a better one


def plan_beside_recipes(
    analysis: BatchAnalysis, cluster: Cluster, method: Method, num_microbatches: int | None
) -> tuple[Plan, LoweredStep]:
    """The planner's plan, with a note of what recipes within one stage take; one of these where it is better.

    Without time for any plan, it is the best of a few recipes, with a warning.

    Raises:
      InfeasiblePlanError: nothing fits, or no recipe does and there was too little time for anything else.
    """
    planner = Planner(analysis, cluster, method)
    try:
        best = planner.plan(num_microbatches)
    except OutOfTime:
        return _best_recipe(planner, num_microbatches)
    if not method.baselines or cluster.num_devices == 1:
        return best
    notes = []
    fixed = num_microbatches or method.num_microbatches
    for m in dict.fromkeys([fixed] if fixed else [1, best[0].num_microbatches]):
        for recipe in _within_one_stage(m):
            seconds = _estimate(planner, recipe, m) if _heeds(recipe, method) else None
            if seconds is None:
                continue
            notes.append(f"{recipe.name} in {m} microbatch{'es' if m > 1 else ''} {seconds_text(seconds)}")
            if seconds < _SURE * best[0].step_time:
                with contextlib.suppress(UserError):
                    found = Planner(analysis, cluster, _adapted(recipe, method)).plan()
                    best = min(best, found, key=lambda one: one[0].step_time)
        if notes:
            break
    text = f"recipes would take about: {', '.join(notes)}" if notes else "no recipe within one stage fits"
    return dataclasses.replace(best[0], notes=(*best[0].notes, f"{text}.")), best[1]


def usual_methods(cluster: Cluster) -> tuple[Method, ...]:
    """What people would try on a cluster, with as many microbatches as is best."""
    devices = min(host.num_devices for host in cluster.hosts)
    hosts = cluster.num_devices // devices
    found = [recipes.data_parallel(), *map(recipes.zero, (1, 2, 3)), recipes.intra_op_only()]
    if cluster.num_devices > 1:
        found.append(recipes.megatron(hosts, devices, 1, 1))
        if hosts > 1:
            found.append(recipes.megatron(1, devices, hosts, 1))
        elif devices % 2 == 0:
            found.append(recipes.megatron(1, devices // 2, 2, 1))
        found.append(recipes.inter_op_only())
    return AUTO, *(dataclasses.replace(method, num_microbatches=None) for method in found)


def _within_one_stage(num_microbatches: int) -> tuple[Method, ...]:
    return recipes.data_parallel(num_microbatches), *(recipes.zero(stage, num_microbatches) for stage in (2, 3))


def _estimate(planner: Planner, recipe: Method, num_microbatches: int) -> float | None:
    """Seconds per step of a recipe within one stage, as the stage search estimates them; None if it does not fit."""
    layered = planner.layering.layered(num_microbatches, False)
    stages = StageCosts(planner.prices, recipe)
    mesh = mesh_at(0, (planner.cluster.num_devices,))
    cost = stages.cost(layered, "1f1b", (0, layered.num_layers), mesh, 1)
    return None if cost is None else num_microbatches * cost.per_microbatch + cost.per_step


def _best_recipe(planner: Planner, num_microbatches: int | None) -> tuple[Plan, LoweredStep]:
    """For want of time, and of any plan.

    Raises:
      InfeasiblePlanError: none fits, or the method has fixed too much for one.
    """
    analysis, cluster, method = planner.analysis, planner.cluster, planner.method
    fixed = num_microbatches or method.num_microbatches
    candidates = [*_within_one_stage(fixed or 1)]
    hosts = cluster.hosts
    if len(hosts) > 1 and len(set(hosts)) == 1:
        most = analysis.most_microbatches
        number = max(m for m in range(1, min(most, 8 * cluster.num_devices) + 1) if most % m == 0)
        candidates.append(recipes.megatron(1, hosts[0].num_devices, len(hosts), fixed or number))
    found = []
    for recipe in candidates:
        if _heeds(recipe, method):
            with contextlib.suppress(UserError):
                found.append(Planner(analysis, cluster, _adapted(recipe, method)).plan())
    limit = f"time_limit={method.time_limit}: that is too short"
    if not found:
        raise InfeasiblePlanError(
            f"{limit} to find a plan of {analysis.graph.name} under method {method.name!r}, and none of "
            f"{', '.join(recipe.name for recipe in candidates)} is one. Give it more time."
        )
    best = min(found, key=lambda one: one[0].step_time)
    warnings.warn(
        f"{limit} to search for a plan of {analysis.graph.name}. It runs by {best[0].method}, the best recipe that "
        "fits. Give it more time.",
        TimeLimitWarning,
        stacklevel=4,
    )
    return best


def _adapted(recipe: Method, method: Method) -> Method:
    """The recipe with what it leaves open as the method has it."""
    schedule = method.schedule or recipe.schedule
    return dataclasses.replace(recipe, memory_limit=method.memory_limit, schedule=schedule, spatial=method.spatial)


def _heeds(recipe: Method, method: Method) -> bool:
    """Whether a recipe does what the method fixes."""
    axes = set("x" if recipe.mesh_shape == (-1,) else "xy")
    return (
        method.stages is None
        and method.num_stages in (None, recipe.num_stages)
        and method.min_stages <= (recipe.num_stages or 1)
        and method.mesh_shape in (None, recipe.mesh_shape)
        and method.zero in (None, recipe.zero)
        and axes.issuperset(method.axes)
        and axes.intersection(method.data_axes) <= set(recipe.data_axes)
        and axes.intersection(method.model_axes) <= set(recipe.model_axes)
    )
