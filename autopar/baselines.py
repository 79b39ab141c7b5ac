"""Recipes beside the planner, in the same cost model: a user's plan is none the worse for an inexact search."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator

from autopar import recipes
from autopar.errors import InfeasiblePlanError, TimeLimitWarning, UserError
from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.passes.batch import BatchAnalysis
from autopar.passes.lower import LoweredStep
from autopar.passes.submeshes import mesh_at
from autopar.planner import OutOfTime, Planner


def plan_beside_recipes(
    analysis: BatchAnalysis, cluster: Cluster, method: Method, num_microbatches: int | None
) -> tuple[Plan, LoweredStep]:
    """The planner's plan, or that of a usual recipe where it is quicker or the planner finds none.

    Each recipe has as many microbatches as is best for it, unless their number is fixed; a note says which were tried.
    Without time for any plan, it is the best of a few recipes, with a warning.

    Raises:
      InfeasiblePlanError: nothing fits, or no recipe does and there was too little time for anything else.
    """
    planner = Planner(analysis, cluster, method)
    best, nothing_fits = None, None
    try:
        best = planner.plan(num_microbatches)
    except OutOfTime:
        return _best_recipe(planner, num_microbatches)
    except InfeasiblePlanError as error:
        nothing_fits = error
    tried = []
    fixed = num_microbatches or method.num_microbatches
    for recipe in _rivals(planner, fixed) if method.baselines and cluster.num_devices > 1 else ():
        if _heeds(recipe, method):
            tried.append(recipe.name)
            if (found := planner.better_by(_adapted(recipe, method))) is not None:
                best = found
    if best is None:
        assert nothing_fits is not None
        raise nothing_fits
    if not tried:
        return best
    verdict = "none is quicker" if best[0].method == method.name else f"{best[0].method} is the quickest"
    note = f"Recipes tried beside the search: {', '.join(tried)}; {verdict}."
    return dataclasses.replace(best[0], notes=(*best[0].notes, note)), best[1]


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


def _within_one_stage(num_microbatches: int | None) -> tuple[Method, ...]:
    return recipes.data_parallel(num_microbatches), *(recipes.zero(stage, num_microbatches) for stage in (1, 2, 3))


def _rivals(planner: Planner, num_microbatches: int | None) -> Iterator[Method]:
    """What an expert would try: data parallelism, ZeRO, and Megatron-LM's degrees of parallelism.

    For each degree of tensor parallelism within a host the two shallowest pipelines that divide the state enough
    (takeaways 1 and 2 of Narayanan et al. 2021).
    """
    yield from _within_one_stage(num_microbatches)
    hosts, devices = planner.cluster.hosts, planner.cluster.num_devices
    if len(set(hosts)) > 1:
        return
    graph = planner.graph
    state = sum(graph.inputs[i].nbytes for i in {*graph.carried.values()})
    memory = planner.prices.memory(mesh_at(0, (hosts[0].num_devices,)))
    for tensor in (n for n in range(1, hosts[0].num_devices + 1) if hosts[0].num_devices % n == 0):
        deep = (n for n in range(1, devices // tensor + 1) if devices % (tensor * n) == 0)
        enough = (n for n in deep if state < tensor * n * memory and tensor * n > 1)
        for pipeline in itertools.islice(enough, 2):
            yield recipes.megatron(devices // (tensor * pipeline), tensor, pipeline, num_microbatches)


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
