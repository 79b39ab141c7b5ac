"""Recipes beside the planner, in the same cost model: a user's plan is none the worse for an inexact search."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

from autopar import recipes
from autopar.errors import InfeasiblePlanError, TimeLimitWarning, UserError, warn
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.ir.units import count_text, seconds_text
from autopar.passes.batch import BatchAnalysis
from autopar.passes.lower import LoweredStep
from autopar.passes.padding import Padding, padding_text
from autopar.passes.submeshes import mesh_at
from autopar.passes.unsplit import undivided
from autopar.planning.candidate import Finished
from autopar.planning.evaluator import Evaluator, OutOfTime
from autopar.planning.planner import Planner

_CLOSE = 0.002  # relative: a recipe that is quicker by less is not looked for
_ROOMY = 0.9  # of the memory: where a recipe takes less, more microbatches are no gain


def plan_beside_recipes(
    analysis: BatchAnalysis, cluster: Cluster, method: Method, num_microbatches: int | None,
    padding: Callable[[Padding], BatchAnalysis | None] = lambda _: None,
) -> tuple[Plan, LoweredStep]:  # fmt: skip
    """The planner's plan, with a note of what recipes within one stage take; one of these where it is quicker.

    Each recipe has as many microbatches as is best for it, unless their number is fixed. Where the planner finds
    nothing, the best of these and of Megatron-LM's degrees of parallelism. Without time for any plan, it is the best of
    a few recipes, with a warning. Where devices do not divide dimensions of products, the plan has these padded if that
    is quicker.

    `padding`: gives the step with such dimensions padded, None where they cannot be.

    Raises:
      InfeasiblePlanError: nothing fits, or no recipe does and there was too little time for anything else.
    """
    started = time.monotonic()
    planner = Planner(analysis, cluster, method)
    try:
        chosen = _best_of(planner, num_microbatches)
    except OutOfTime:
        chosen = _best_recipe(planner, num_microbatches)
    if method.time_limit is not None:
        method = dataclasses.replace(method, time_limit=method.time_limit - (time.monotonic() - started))
    chosen = _padded(chosen, cluster, method, padding) or chosen
    plan, lowered = chosen.by.noted(chosen.plan)
    return dataclasses.replace(plan, notes=(*plan.notes, *chosen.notes)), lowered


def _padded(
    chosen: _Chosen, cluster: Cluster, method: Method, padding: Callable[[Padding], BatchAnalysis | None]
) -> _Chosen | None:  # fmt: skip
    """The plan of the padded step with the stages and meshes of the one chosen, where that is quicker."""
    plan, lowered = chosen.plan
    shapes = {stage.mesh.shape for stage in plan.stages}
    if len(shapes) > 1 or (method.time_limit is not None and method.time_limit <= 0):
        return None
    sizes = tuple(undivided(lowered).items())
    analysis = padding(sizes) if sizes else None
    if analysis is None:
        return None
    if method.mesh_shape is None and method.stages is None:
        (shape,) = shapes
        method = dataclasses.replace(
            method, num_stages=len(plan.stages), mesh_shape=shape, schedule=plan.schedule, baselines=False
        )
    rival = Planner(analysis, cluster, method)
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(OutOfTime, UserError):
        found = rival.plan(plan.num_microbatches)
        if found[0].step_time < plan.step_time:
            note = f"padded within the step, so that it can be split: {padding_text(sizes)}."
            return _Chosen(found, rival, (*chosen.notes, note))
    return None


class _Chosen(NamedTuple):
    """A plan, the planner that found it, and what to say of the recipes."""

    plan: Finished
    by: Planner
    notes: tuple[str, ...] = ()


def _best_of(planner: Planner, num_microbatches: int | None) -> _Chosen:
    """The planner's plan, or that of a recipe within one stage if it is quicker.

    Raises InfeasiblePlanError, OutOfTime.
    """
    cluster, method = planner.cluster, planner.method
    fixed = num_microbatches or method.num_microbatches
    try:
        best, by = planner.plan(num_microbatches), planner
    except InfeasiblePlanError:
        rivals = (*_within_one_stage(fixed), *_degrees(planner.evaluator, fixed)) if method.baselines else ()
        found = [chosen for rival in rivals if (chosen := _better(planner, rival)) is not None]
        if not found:
            raise
        name = found[-1].plan[0].method
        return found[-1]._replace(notes=(f"The search found no plan that fits; {name} is the best recipe that does.",))
    if not method.baselines or cluster.num_devices == 1:
        return _Chosen(best, planner)
    mesh = mesh_at(0, (cluster.num_devices,))
    least = _least_within_one_stage(planner.evaluator, mesh, fixed)
    if 0 < least < (1 - _CLOSE) * planner.best_estimate:
        of_all_devices = dataclasses.replace(method, num_stages=1, mesh_shape=(-1,), min_stages=1)
        if method.allows(of_all_devices) and [stage.mesh for stage in best[0].stages] != [mesh]:
            # The recipes are special cases of this one, and more is known of it by now.
            best = planner.better_on(mesh, fixed or 1) or best
    is_bound = not cluster.xla.hides_latency  # else less may be left of collectives outside of loops than it counts
    if is_bound and least >= (1 - _CLOSE) * min(planner.best_estimate, best[0].step_time):
        text = f"no recipe within one stage would take less than about {seconds_text(least)}."
        return _Chosen(best, planner, (text,))
    heeding = [recipe for recipe in _within_one_stage(None) if method.allows(recipe)]
    if not heeding:
        return _Chosen(best, planner)
    beside = {recipe.name: planner.beside(recipe.within(method)) for recipe in heeding}
    estimates = {name: _quickest(rival.evaluator, fixed, planner.most_estimate) for name, rival in beside.items()}
    made: dict[str, _Estimate] = {}  # what was planned
    alike: dict[_Estimate, _Estimate] = {}  # .. of recipes that come to the same, once
    for estimate, name in sorted((estimate, name) for name, estimate in estimates.items() if estimate is not None):
        if estimate in alike:
            made[name] = alike[estimate]
        elif estimate.fits and estimate.seconds < planner.most_estimate:
            better = planner.better_by(beside[name], fixed, None if fixed else estimate.num_microbatches)
            if better is not None:
                best, by = better, beside[name]
                made[name] = _Estimate(best[0].step_time, best[0].num_microbatches, best[0].peak_memory)
            elif planner.evaluator.has_time:
                made[name] = estimate._replace(seconds=best[0].step_time, fits=False)
            if name in made and made[name].num_microbatches == estimate.num_microbatches:
                alike[estimate] = made[name]  # with more microbatches they may differ
    notes = [
        f"{name} in {made[name].told(is_bound=True) if name in made else estimate.told(is_bound=is_bound)}"
        for name, estimate in estimates.items()
        if estimate is not None
    ]
    if notes:
        text = f"recipes would take about: {', '.join(notes)}"
    elif method.excluding_options:
        text = "no recipe that does what the method fixes fits in one stage"
    else:
        text = "no recipe within one stage fits"
    return _Chosen(best, by, (f"{text}.",))


def _better(planner: Planner, recipe: Method) -> _Chosen | None:
    """The plan by a recipe that does what the planner's method fixes, if it is quicker than the best so far."""
    if not planner.method.allows(recipe):
        return None
    rival = planner.beside(recipe.within(planner.method))
    better = planner.better_by(rival)
    return None if better is None else _Chosen(better, rival)


def _least_within_one_stage(evaluator: Evaluator, mesh: Mesh, fixed: int | None) -> float:
    """Seconds per step that no recipe within one stage beats, as far as the stage search knows; 0 if it knows nothing.

    They use the mesh of all devices. More microbatches take no less there: what is done once for each is done more
    often.
    """
    with contextlib.suppress(UserError):
        return evaluator.stages.known_bound(evaluator.layering.layered(fixed or 1, False), mesh, _CLOSE / 2)
    return 0.0


class _Estimate(NamedTuple):
    """What a recipe within one stage takes, as the stage search estimates it."""

    seconds: float  # per step
    num_microbatches: int
    memory: float  # bytes per device at the peak
    fits: bool = True  # False: it takes at least these seconds, and may not fit

    def told(self, *, is_bound: bool) -> str:
        """`is_bound`: whether what does not fit is known to take at least these seconds."""
        at_least = "at least " if is_bound and not self.fits else ""
        return f"{count_text(self.num_microbatches, 'microbatch', 'es')} {at_least}{seconds_text(self.seconds)}"


def _quickest(evaluator: Evaluator, fixed: int | None, below: float) -> _Estimate | None:
    """A recipe within one stage with the microbatches that are best for it; None if it does not fit.

    The fewest that fit are, or where they leave little memory the next.

    Args:
      evaluator: by the recipe.
      fixed: the number of microbatches, if it is.
      below: seconds per step; what takes longer in any memory need not be known better.
    """
    mesh = mesh_at(0, (evaluator.cluster.num_devices,))
    best: _Estimate | None = None
    too_long: _Estimate | None = None
    for m in [fixed] if fixed else [1, *evaluator.space.many[::-1]]:
        with contextlib.suppress(UserError):  # the batch cannot be cut so
            layered = evaluator.layering.layered(m, False)
            computing = evaluator.stages.least_of_one(layered, mesh)
            least = computing if computing >= below else evaluator.stages.in_any_memory(layered, mesh)
            if too_long is None and below <= least < math.inf:
                too_long = _Estimate(least, m, math.inf, fits=False)
            if computing >= below or (m == 1 and below <= least < math.inf):
                break  # what is computed and sent is no less with more microbatches
            if least >= below:
                continue
            cost = evaluator.stages.cost(layered, "1f1b", (0, layered.num_layers), mesh, 1)
            if cost is None:
                continue
            seconds = m * cost.per_microbatch + cost.per_step
            if best is not None and seconds >= best.seconds:
                break
            best = _Estimate(seconds, m, cost.memory)
            if cost.memory < _ROOMY * evaluator.prices.memory(mesh):
                break
    return best or too_long


def usual_methods(cluster: Cluster) -> tuple[Method, ...]:
    """What people would try on a cluster, with as many microbatches as is best."""
    devices = min(host.num_devices for host in cluster.hosts)
    hosts = cluster.num_devices // devices
    methods = [recipes.data_parallel(), *map(recipes.zero, (1, 2, 3)), recipes.intra_op_only()]
    if cluster.num_devices > 1:
        methods.append(recipes.megatron(hosts, devices, 1, 1))
        if hosts > 1:
            methods.append(recipes.megatron(1, devices, hosts, 1))
        elif devices % 2 == 0:
            methods.append(recipes.megatron(1, devices // 2, 2, 1))
        methods.append(recipes.inter_op_only())
    return AUTO, *(dataclasses.replace(method, num_microbatches=None) for method in methods)


def _within_one_stage(num_microbatches: int | None) -> tuple[Method, ...]:
    return recipes.data_parallel(num_microbatches), *(recipes.zero(stage, num_microbatches) for stage in (1, 2, 3))


def _degrees(evaluator: Evaluator, num_microbatches: int | None) -> Iterator[Method]:
    """Megatron-LM's degrees of parallelism that an expert would try.

    For each degree of tensor parallelism within a host the two shallowest pipelines that divide the state enough
    (takeaways 1 and 2 of Narayanan et al. 2021).
    """
    hosts, devices = evaluator.cluster.hosts, evaluator.cluster.num_devices
    if len(set(hosts)) > 1:
        return
    graph = evaluator.analysis.graph
    state = sum(graph.inputs[i].nbytes for i in {*graph.carried.values()})
    memory = evaluator.prices.memory(mesh_at(0, (hosts[0].num_devices,)))
    for tensor in (n for n in range(1, hosts[0].num_devices + 1) if hosts[0].num_devices % n == 0):
        deep = (n for n in range(1, devices // tensor + 1) if devices % (tensor * n) == 0)
        enough = (n for n in deep if state < tensor * n * memory and tensor * n > 1)
        for pipeline in itertools.islice(enough, 2):
            yield recipes.megatron(devices // (tensor * pipeline), tensor, pipeline, num_microbatches)


def _best_recipe(planner: Planner, num_microbatches: int | None) -> _Chosen:
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
    plans = []
    for recipe in candidates:
        if method.allows(recipe):
            rival = Planner(analysis, cluster, recipe.within(method))
            with contextlib.suppress(UserError):
                plans.append(_Chosen(rival.plan(), rival))
    limit = f"time_limit={method.time_limit}: that is too short"
    if not plans:
        raise InfeasiblePlanError(
            f"{limit} to find a plan of {analysis.graph.name} under method {method.name!r}, and none of "
            f"{', '.join(recipe.name for recipe in candidates)} is one. Give it more time."
        )
    chosen = min(plans, key=lambda each: each.plan[0].step_time)
    warn(
        f"{limit} to search for a plan of {analysis.graph.name}. It runs by {chosen.plan[0].method}, the best recipe "
        "that fits. Give it more time.",
        TimeLimitWarning,
    )
    return chosen
