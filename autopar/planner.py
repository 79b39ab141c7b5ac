"""The search for a plan: from the batch analysis of a traced step to stages, meshes and shardings.

    split_batch -> cluster_layers -> plan_stages(stage_cost) -> place -> solve -> assemble -> price = Plan

The stage search asks what a span of layers would cost on a submesh; the answer is the intra-op problem of the
programs of that span, solved, and remembered for all spans that look alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from autopar.errors import (
    InfeasiblePlanError,
    InternalError,
    MicrobatchError,
    PlanError,
    PlanMismatchError,
    UnsplitWarning,
)
from autopar.ir.graph import LeafCut, Phase, Value
from autopar.ir.local import StageSharding
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.ir.program import PlacedStep
from autopar.ir.schedule import ScheduleName, make_schedule
from autopar.ir.sharding import Sharding
from autopar.ir.units import count_text
from autopar.layering import MAX_LAYERS, Layered, Layering
from autopar.passes.batch import BatchAnalysis
from autopar.passes.inter_op import StageCost, StagePlan, candidate_shapes, mesh_at, plan_stages
from autopar.passes.intra_op.limits import Limits, method_limits
from autopar.passes.intra_op.numbers import StageNumbers
from autopar.passes.intra_op.priced_stage import PATIENCE, PricedStage
from autopar.passes.intra_op.problem import Infeasible, Solution
from autopar.passes.intra_op.shard import Remembered, StageProblem, StageSetting
from autopar.passes.intra_op.solve import solve
from autopar.passes.intra_op.stage import Stage
from autopar.passes.intra_op.strategies import OptionsCache
from autopar.passes.lower import LoweredStep, assemble
from autopar.passes.pipeline import place
from autopar.passes.unsplit import find_unsplit
from autopar.pricing import Prices

# Work limits of the solver per stage problem. Its choices rarely improve after the first; its lower bounds do.
_SEARCH_SECONDS = 0.3
_FINAL_SECONDS = 1.0
_GOOD_GAP = 0.01  # relative: what is better by less is not looked for
_FEWER = 0.7  # so many nodes, as a share, tell a problem with ties from one without
_LEAST_GAIN = 0.02  # of the step time: less is not worth searching on
_DEAR = 0.05  # above the estimate of the stage search, and with this share of the memory in use: memory may be why
_TIGHT = 0.8
_FULL = 0.9  # of the memory, in the stage search
_SLACK = 0.95  # of what spans of layers that were priced take, for those that were not
_FUSED = 0.98  # of the time of kernels that end where a layer does
_MARGIN = 0.005  # of the memory: another choice has another excess
_MOST_STAGES = 64  # that are tried
_MOST_ROUNDS = 4  # in which a stage is solved with less and less memory


@dataclasses.dataclass(frozen=True)
class LeafHome:
    """Where an argument leaf lies: the stage and the sharding of each of its pieces."""

    at: tuple[tuple[int, Sharding], ...]
    cut: LeafCut | None  # None: it is whole


_Known = tuple[StageNumbers, int, Solution]  # a problem, the microbatches in flight
_solve = functools.partial(solve, seconds=_FINAL_SECONDS, patience=PATIENCE, gap=_GOOD_GAP)


class Planner:
    """Finds a plan for one traced step on one cluster."""

    def __init__(
        self,
        analysis: BatchAnalysis,
        cluster: Cluster,
        method: Method = AUTO,
        num_layers: int | None = None,
    ) -> None:
        self.analysis, self.cluster, self.method = analysis, cluster, method
        self.graph = analysis.graph
        self.pinned: dict[Value, tuple[int, Sharding]] = {}  # inputs that lie somewhere already
        self.layering = Layering(analysis, cluster, method, num_layers)
        self.nearest: Infeasible | None = None  # the attempt that came closest to fitting, with where it was
        self.nearest_where = ""
        self.prices = Prices(cluster)
        self._best_time = math.inf  # seconds per step of the best plan so far
        self._estimate = math.inf  # as the stage search estimated it
        self._first_estimate = math.inf  # and with few shapes of meshes, if it began with those
        self._one_stage_fits = False  # with one microbatch
        self._limits: dict[Any, Limits] = {}
        self._options: dict[Any, OptionsCache] = {}
        self._remembered: dict[Any, Remembered] = {}
        self._stages: dict[Any, Stage] = {}
        self._priced: dict[Any, PricedStage] = {}
        self._overheads: dict[Any, dict[int, float]] = {}  # by microbatches; see `_overhead`
        self._placed: dict[Any, PlacedStep] = {}

    # The search.

    def plan(self, num_microbatches: int | None = None) -> tuple[Plan, LoweredStep]:
        """The best plan found and its programs.

        Raises:
          InfeasiblePlanError: nothing fits; says what is missing where.
        """
        with _uncollected():
            return self._plan(num_microbatches)

    def _plan(self, num_microbatches: int | None) -> tuple[Plan, LoweredStep]:
        fixed = num_microbatches if num_microbatches is not None else self.method.num_microbatches
        best: tuple[Plan, LoweredStep] | None = None
        candidates = self._candidates(fixed)
        for m, stages in [c for c in candidates if c[1] == 1]:
            best = self._better(m, stages, fixed) or best
        if self.method.num_stages is None and self.method.mesh_shape is None:
            best = self._uniform(fixed) or best
        for m, stages in [c for c in candidates if c[1] != 1]:
            best = self._better(m, stages, fixed) or best
        if fixed is None:
            best = self._other_numbers(best)
        if best is None:
            raise self._infeasible()
        plan, lowered = best
        return dataclasses.replace(plan, notes=self._notes(lowered, plan.step_time)), lowered

    def _other_numbers(self, best: tuple[Plan, LoweredStep] | None) -> tuple[Plan, LoweredStep] | None:
        """The best plan with fewer microbatches, as long as that is a gain and memory is left; with more, if none fits.

        A pipeline's bubble grows as they become fewer; without one, the fewest that are likely to fit are the best.
        """
        stages = 1 if self.cluster.num_devices == 1 else self.method.num_stages
        for m in self._many() if best is None else ():
            found = self._better(m, stages, None)
            if found is None and best is not None:
                break
            best = found or best
        while best is not None and (fewer := self._fewer(best[0])) is not None:
            found = self._better(fewer, stages, None)
            if found is None:
                break
            best = found
        return best

    def _uniform(self, fixed: int | None) -> tuple[Plan, LoweredStep] | None:
        """A plan of more stages than the search tells apart, each of as many hosts as the others, if one is better."""
        hosts = self.cluster.hosts
        if len(hosts) <= MAX_LAYERS or len(set(hosts)) > 1 or not self._divisors():
            return None
        best = None
        for stages in (n for n in range(MAX_LAYERS + 1, _MOST_STAGES + 1) if len(hosts) % n == 0):
            each = len(hosts) // stages  # and of a microbatch's examples, so that each host has one
            m = fixed or max((n for n in self._divisors() if n * each <= self.analysis.batch_size), default=1)
            shape = (each, hosts[0].num_devices) if each > 1 else (hosts[0].num_devices,)
            method = dataclasses.replace(self.method, num_stages=stages, mesh_shape=shape)
            planner = Planner(self.analysis, self.cluster, method)
            planner._best_time = planner._estimate = self._best_time
            with contextlib.suppress(PlanError):  # the step has too few layers
                found = planner._better(m, stages, None)
                if found is not None:
                    best, self._best_time = found, found[0].step_time
                    self._estimate = self._first_estimate = planner._estimate
        return best

    def _fewer(self, plan: Plan) -> int | None:
        """A number of microbatches below the plan's for which there is memory, if its stages stay as they are."""
        m = plan.num_microbatches
        numbers = [n for n in self._many() if n < m]
        for n in sorted(numbers) if len(plan.stages) == 1 else numbers[:1]:
            each = (s.memory for s in plan.stages)
            if all(s.total + (m / n - 1) * (s.activations + s.temporaries) <= s.capacity for s in each):
                return n
        return None

    def _better(self, m: int, stages: int | None, fixed: int | None) -> tuple[Plan, LoweredStep] | None:
        """A plan with so many microbatches and stages that is better than any before."""
        try:
            self.layering.layered(m, stages != 1)
        except MicrobatchError:
            if fixed is not None:
                raise
            return None
        found = self._plan_for(m, stages)
        if found is None or found[0].step_time >= self._best_time:
            return None
        self._best_time = found[0].step_time
        self._one_stage_fits |= (m, len(found[0].stages)) == (1, 1)
        return found

    def _notes(self, lowered: LoweredStep, step_time: float) -> tuple[str, ...]:
        """What is left whole for want of a divisor; what costs most is a warning, too."""
        found = find_unsplit(
            lowered, self.method, self.prices.kind, lambda mesh: self.prices.resharder(mesh)[1], step_time
        )
        for cause in found:
            if cause.is_dear:
                warnings.warn(f"{self.graph.name}, method {self.method.name!r}: {cause}", UnsplitWarning, stacklevel=2)
        return tuple(map(str, found))

    def _candidates(self, fixed: int | None) -> list[tuple[int, int | None]]:
        """Numbers of microbatches, each with a fixed number of stages or None, to search over.

        What is likely to be good comes first: a stage that cannot be part of a better plan is not solved any more.
        """
        stages = self.method.num_stages
        if fixed is not None:
            self.analysis.check(fixed)
            hosts = len(self.cluster.hosts)
            return [(fixed, hosts), (fixed, None)] if stages is None and 1 < hosts <= MAX_LAYERS else [(fixed, stages)]
        devices, hosts = self.cluster.num_devices, len(self.cluster.hosts)
        found: list[tuple[int, int | None]] = []
        if stages in (None, 1):
            found.append((1, 1))
        if devices > 1 and stages != 1:
            # With as many stages as there may be, a microbatch has an example for each host of a stage.
            most = min(8 * devices, MAX_LAYERS * self.analysis.batch_size // hosts)
            numbers = [m for m in self._many() if m <= most] or self._many()[-1:]
            likely = numbers[:2][::-1]
            if stages is None and 1 < hosts <= MAX_LAYERS:
                found += [(m, hosts) for m in likely[:1]]
            found += [(m, stages) for m in likely]
            if stages is not None:
                found.append((1, stages))
        return found

    def _divisors(self) -> list[int]:
        """Numbers of microbatches above 1 that the batch can be cut into."""
        limit = 1 if self.analysis.couplings else self.analysis.max_microbatches
        return [m for m in range(2, limit + 1) if limit % m == 0]

    def _many(self) -> list[int]:
        """Numbers of microbatches where few do not fit, each about half of that before: the least memory first."""
        divisors = self._divisors()
        powers = [1 << k for k in range(1, max(divisors, default=0).bit_length())]
        return sorted({min(m for m in divisors if m >= power) for power in powers}, reverse=True)

    def _infeasible(self) -> InfeasiblePlanError:
        if self.nearest is None:
            return InfeasiblePlanError(
                f"method {self.method.name!r} has no plan for {self.graph.name} on cluster {self.cluster.name!r} "
                f"({self.cluster.num_devices} devices): its mesh shape {self.method.mesh_shape} or number of stages "
                f"{self.method.num_stages} does not match the cluster."
            )
        limit = self.nearest.limit or 0.0
        return InfeasiblePlanError(
            f"{self.graph.name} fits on cluster {self.cluster.name!r} under no plan of method {self.method.name!r}: "
            f"{self.nearest_where} needs at least {self.nearest.smallest_peak / 2**20:.1f} MiB per device, "
            f"{limit / 2**20:.1f} MiB are there. Use more devices, devices with more memory, a smaller batch, more "
            "microbatches, or jax.checkpoint in the model."
        )

    def _plan_for(self, m: int, num_stages: int | None) -> tuple[Plan, LoweredStep] | None:
        layered = self.layering.layered(m, num_stages != 1)
        if self.method.num_stages is None and num_stages is not None and num_stages > layered.num_layers:
            return None
        schedule: ScheduleName = self.method.schedule or "1f1b"
        first = found = None
        if self.method.stages is None:
            first, found = self._search(layered, m, num_stages, schedule)
            if found is None:
                return None
            chosen = [(choice.span, choice.mesh) for choice in found.stages]
        else:
            chosen = self._fixed_stages()
        spans, meshes = zip(*chosen, strict=True)
        cuts = [start for start, _ in spans[1:]]
        joined = self.layering.joined(layered, cuts)
        ways = [(joined, joined.placed(range(1, len(spans))))]
        if joined.analysis is not layered.analysis:
            # The gradients of a loop are stacked until its end: in parts they take less memory.
            ways.append((layered, layered.placed(cuts)))
            if found is not None and self._is_tight(found):
                ways.reverse()
        estimate = math.inf if found is None else found.step_time
        finished = None
        for way, placed in ways:
            if finished is None or _is_dear(finished[0], estimate):
                other = self.finish(way, placed, meshes, schedule)
                if other is not None and (finished is None or other[0].step_time < finished[0].step_time):
                    finished = other
        if finished is None:
            return None
        if finished[0].step_time < self._best_time:
            # One that turned out to be dear must not bar others that are not.
            error = finished[0].step_time / estimate
            error = error if error > 1 + _DEAR else 1.0
            self._estimate = error * estimate
            self._first_estimate = math.inf if first is None else error * first.step_time
        return _with_layers(finished[0], spans), finished[1]

    def _is_tight(self, found: StagePlan) -> bool:
        return any(stage.cost.memory > _FULL * self.prices.memory(stage.mesh) for stage in found.stages)

    def _search(
        self, layered: Layered, m: int, num_stages: int | None, schedule: ScheduleName
    ) -> tuple[StagePlan | None, StagePlan | None]:
        """The best stages with few shapes of meshes, if it begins with those, and with any; None if they are no gain.

        Groups of devices are chosen with few shapes, then all logical shapes of those are tried: shapes change a
        stage's cost far less than the number of its devices does.
        """
        search = functools.partial(
            plan_stages, layered.num_layers, self.cluster, functools.partial(self._stage_cost, layered, schedule), m,
            schedule, least_cost=functools.partial(self._least_cost, layered), alike=self.prices.group,
            overhead=functools.partial(self._overhead, layered), gain=_LEAST_GAIN,
        )  # fmt: skip
        first = None
        if self.method.mesh_shape is None:
            first = search(num_stages=num_stages, shapes=self._first_shapes, below=self._first_estimate)
            if first is None and num_stages != 1:
                return None, None
        if first is None:
            return None, search(num_stages=num_stages, shapes=self._shapes, below=self._estimate)
        groups = {(c.mesh.devices[0], c.mesh.size) for c in first.stages}
        found = search(
            num_stages=len(first.stages),
            shapes=lambda cluster, start, size: self._shapes(cluster, start, size) if (start, size) in groups else (),
            below=min(first.step_time, self._estimate),
        )
        return first, found or (first if first.step_time < self._estimate else None)

    def _fixed_stages(self) -> list[tuple[tuple[int, int], Mesh]]:
        """As the method has them. Raises PlanError where the cluster's devices cannot be dealt out so."""
        found: list[tuple[tuple[int, int], Mesh]] = []
        layer = device = 0
        for at, stage in enumerate(self.method.stages or ()):
            size = math.prod(stage.mesh_shape)
            if not candidate_shapes(self.cluster, device, size):
                raise PlanError(
                    f"method {self.method.name!r}: stage {at} of mesh shape {stage.mesh_shape} would have the devices "
                    f"{device} to {device + size - 1} of cluster {self.cluster.name!r}; a stage must have whole hosts, "
                    "or lie in one host and have a power of two or a divisor of its devices."
                )
            found.append(((layer, layer + stage.num_layers), mesh_at(device, stage.mesh_shape)))
            layer, device = layer + stage.num_layers, device + size
        if device != self.cluster.num_devices:
            raise PlanError(
                f"method {self.method.name!r}: its stages have {count_text(device, 'device')}, cluster "
                f"{self.cluster.name!r} has {self.cluster.num_devices}; choose mesh shapes that have them all."
            )
        return found

    def _first_shapes(self, cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        """One-dimensional ones; where stages must have many hosts, those that have hosts along one axis, too."""
        width = cluster.hosts[cluster.host_of(start)].num_devices
        many = len(cluster.hosts) > MAX_LAYERS
        shapes = self._shapes(cluster, start, size)
        return tuple(shape for shape in shapes if len(shape) == 1 or (many and shape[1] == width))

    def _shapes(self, cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        shape = self.method.mesh_shape
        shapes = candidate_shapes(cluster, start, size)
        if shape is None:
            return shapes
        if shape == (-1,):
            shape = (size,)
        return (shape,) if shapes and math.prod(shape) == size else ()

    # Stages.

    def _stage_cost(
        self, layered: Layered, schedule: ScheduleName, span: tuple[int, int], mesh: Mesh, in_flight: int
    ) -> StageCost | None:
        """What a span of layers costs on a mesh, whatever the other stages are; alike spans are solved once."""
        placed, stage = self._span_placed(layered, span)
        m = layered.step.num_microbatches
        key = (placed, self._kind_of_mesh(mesh))
        priced = self._priced.get(key)
        if priced is None:
            most = m if schedule == "gpipe" else min(m, layered.num_layers, self.cluster.num_devices)
            problem = self.stage_problem(layered, placed, stage, mesh, tied=True)
            priced = PricedStage(problem.numbers, most, _SEARCH_SECONDS)
            self._priced[key] = priced
        try:
            solution = priced.solution(in_flight)
        except Infeasible as error:
            self._note_infeasible(error, _where(layered, span, mesh))
            return None
        self._note_overhead(layered, span, mesh, priced.cheapest.cost)
        loop = priced.numbers.loop_seconds(solution)
        return StageCost(loop / m, max(0.0, solution.cost - loop), solution.peak)

    def _least_cost(self, layered: Layered, span: tuple[int, int], mesh: Mesh) -> StageCost | None:
        """What no sharding of a span of layers can beat."""
        m = layered.step.num_microbatches
        if m > 1 and span == (0, layered.num_layers) and self._one_stage_fits:
            return None  # one stage that fits with one microbatch gains nothing from several
        state = sum(stage.state_bytes(mesh.shape) for stage in self._layers(layered, span))
        memory = self.prices.memory(mesh)
        if state > memory:
            self._note_infeasible(Infeasible(state, memory, proved=True), _where(layered, span, mesh))
            return None
        loop, once = self._least_seconds(layered, span, mesh)
        if m * loop >= self._best_time:
            return None  # the slowest stage alone would take longer than the best plan
        return StageCost(loop, once, state)

    def _least_seconds(self, layered: Layered, span: tuple[int, int], mesh: Mesh) -> tuple[float, float]:
        """Of a span of layers per microbatch and once a step, without any communication.

        It is that of the layers by themselves: what kernels across their borders save is far less than `_FUSED`.
        """
        kinds = self.cluster.kinds_of(mesh.devices)
        loop = once = 0.0
        for stage in self._layers(layered, span):
            least = [stage.least_seconds(kind, mesh.size) for kind in kinds]
            loop += min(seconds for seconds, _ in least)
            once += min(seconds for _, seconds in least)
        return _FUSED * loop, _FUSED * once

    def _layers(self, layered: Layered, span: tuple[int, int]) -> list[Stage]:
        """The layers of a span, each as a stage of its own."""
        first = [layered.spans.first_alike((layer, layer + 1))[0] for layer in range(*span)]
        return [self._stage(layered, layered.finest, layer) for layer in first]

    def _note_overhead(self, layered: Layered, span: tuple[int, int], mesh: Mesh, seconds: float) -> None:
        m = layered.step.num_microbatches
        loop, once = self._least_seconds(layered, span, mesh)
        for layer in range(*span):
            first, _ = layered.spans.first_alike((layer, layer + 1))
            known = self._overheads.setdefault((self._kind_of_mesh(mesh), layered.num_layers, first), {})
            known[m] = min(known.get(m, math.inf), seconds / (m * loop + once))

    def _overhead(self, layered: Layered, layer: int, mesh: Mesh) -> float:
        """How many times the least seconds spans of layers like this take on such a mesh, by those that were priced.

        What is done once for each microbatch is done more often with more of them, and what is done for each example
        not less often with fewer.
        """
        m = layered.step.num_microbatches
        first, _ = layered.spans.first_alike((layer, layer + 1))
        known = self._overheads.get((self._kind_of_mesh(mesh), layered.num_layers, first), {})
        if m in known:
            return max(1.0, _SLACK * known[m])
        others = [1 + (ratio - 1) * min(1.0, m / number) for number, ratio in known.items()]
        return max(1.0, _SLACK * max(others, default=1.0))

    def _kind_of_mesh(self, mesh: Mesh) -> Hashable:
        """Equal for meshes on which the same stage costs the same."""
        return mesh.shape, self.prices.surroundings(mesh)

    def _stage(self, layered: Layered, placed: PlacedStep, index: int) -> Stage:
        key = (placed, index)
        if key not in self._stages:
            pinned = {v: s for v, (at, s) in self.pinned.items() if at == index}
            self._stages[key] = Stage(placed, index, layered.rules, pinned)
        return self._stages[key]

    def _note_infeasible(self, error: Infeasible, where: str) -> None:
        if self.nearest is None or error.smallest_peak < self.nearest.smallest_peak:
            self.nearest, self.nearest_where = error, where

    def _span_placed(self, layered: Layered, span: tuple[int, int]) -> tuple[PlacedStep, int]:
        """The pipeline of what comes before a span, the span, and what comes after it; and the span's stage.

        Of spans that are alike it is the first.
        """
        span = layered.spans.first_alike(span)
        key = (layered, span)
        if key not in self._placed:
            self._placed[key] = layered.placed(sorted({*span} - {0, layered.num_layers}))
        return self._placed[key], 1 if span[0] > 0 else 0

    def stage_problem(
        self, layered: Layered, placed: PlacedStep, stage: int, mesh: Mesh, tied: bool = False, withheld: float = 0.0
    ) -> StageProblem:
        """The sharding problem of one stage on a mesh, without so many bytes of each device's memory."""
        resharder, price = self.prices.resharder(mesh)
        options = self._options.get((mesh.shape, mesh.axes))
        if options is None:
            options = self._options[mesh.shape, mesh.axes] = OptionsCache(mesh)
        key = (layered, mesh.shape)
        if key not in self._limits:
            self._limits[key] = method_limits(self.method, layered.step, layered.rules, mesh)
        remembered = self._remembered.setdefault((key, self.prices.surroundings(mesh)), Remembered(options))
        setting = StageSetting(
            self._stage(layered, placed, stage), mesh, self.prices.kind(mesh), resharder, price,
            self.prices.link_bandwidth(mesh), self._limits[key], self.prices.memory(mesh) - withheld, remembered, tied,
        )  # fmt: skip
        return StageProblem(setting)

    # From decisions to a plan.

    def finish(
        self, layered: Layered, placed: PlacedStep, meshes: Sequence[Mesh], schedule: ScheduleName
    ) -> tuple[Plan, LoweredStep] | None:
        """Solve the chosen stages as they really are, lower them and price what will run; None if it does not fit.

        The solver counts memory at a few times only: a stage that needs more than there is, is solved again with less.
        """
        rows = make_schedule(schedule, placed.num_stages, layered.step.num_microbatches)
        withheld = [0.0] * len(meshes)
        solved: dict[int, tuple[StageSharding, Solution]] = {}
        known: list[_Known] = []
        for _ in range(_MOST_ROUNDS):
            for stage, mesh in reversed([*enumerate(meshes)]):  # the fewest microbatches in flight first
                if stage not in solved:
                    try:
                        problem, solution = self._solved(
                            layered, placed, stage, mesh, rows.in_flight(stage), withheld[stage], known
                        )
                    except Infeasible as error:
                        self._note_infeasible(error, f"stage {stage} of {placed.num_stages}")
                        return None
                    solved[stage] = problem.read(solution), solution
            lowered = self.lower(layered, placed, [solved[stage][0] for stage in range(len(meshes))])
            objective = sum(solution.cost for _, solution in solved.values())
            bound = sum(max(0.0, solution.lower_bound) for _, solution in solved.values())  # no cost is negative
            gap = max(0.0, (objective - bound) / objective) if objective > 0 else 0.0
            plan = self._price(layered, lowered, schedule, bound, gap)
            above = {
                i: stage.memory for i, stage in enumerate(plan.stages) if stage.memory.total > stage.memory.capacity
            }
            if not above:
                return plan, lowered
            for stage, needed in above.items():
                uncounted = needed.total - solved.pop(stage)[1].peak
                excess = needed.total - needed.capacity
                withheld[stage] = max(uncounted, withheld[stage] + excess) + _MARGIN * needed.capacity
        stage, needed = max(above.items(), key=lambda item: item[1].total)
        short = Infeasible(needed.total, needed.capacity, proved=False)
        self._note_infeasible(short, f"stage {stage} of {placed.num_stages}")
        return None

    def _solved(
        self, layered: Layered, placed: PlacedStep, stage: int, mesh: Mesh, in_flight: int, withheld: float,
        known: list[_Known],
    ) -> tuple[StageProblem, Solution]:  # fmt: skip
        """A stage's problem without so many bytes of each device's memory, and a choice; raises Infeasible.

        Where layers are alike, it is searched from where they choose alike. Of `known` problems, to which this one is
        added, one with the same numbers and more memory may have a solution that fits: it is as good here.
        """
        memory = self.prices.memory(mesh)
        if withheld >= memory:
            raise Infeasible(withheld, memory, proved=False)
        problem = self.stage_problem(layered, placed, stage, mesh, withheld=withheld)
        numbers = problem.numbers
        for other, fewer, solution in known:
            if fewer <= in_flight and numbers.is_like(other):
                peak = numbers.peak_bytes(solution.choice, in_flight)
                if numbers.memory_limit is None or peak <= numbers.memory_limit:
                    return problem, dataclasses.replace(solution, peak=peak)
        tied = self.stage_problem(layered, placed, stage, mesh, tied=True, withheld=withheld)
        start = None
        if len(tied.numbers.costs) < _FEWER * len(numbers.costs):
            with contextlib.suppress(Infeasible):
                start = problem.untied(tied, _solve(tied.numbers.problem(in_flight)).choice)
        found = _solve(numbers.problem(in_flight), start=start)
        known.append((numbers, in_flight, found))
        return problem, found

    def follow(
        self, meshes: Sequence[Mesh], num_microbatches: int, lies: Mapping[int, LeafHome]
    ) -> tuple[Plan, LoweredStep]:
        """Plan where some argument leaves lie: no stage search, an equation goes where its parameters are."""
        cuts = {i: home.cut for i, home in lies.items() if home.cut is not None}
        analysis = self.layering.cut(cuts, frozenset(lies) - cuts.keys())
        analysis.check(num_microbatches)
        graph = analysis.graph
        self.pinned = {
            graph.inputs[k]: at for i, home in lies.items() for k, at in zip(graph.inputs_of[i], home.at, strict=True)
        }
        step, rules, _ = self.layering.in_microbatches(analysis, num_microbatches)
        homes = {v: stage for v, (stage, _) in self.pinned.items()}
        at: dict[Value, int] = dict(homes)
        stages: dict[int, int] = {}
        for eqn in step.equations:
            stage = max((at[v] for v in eqn.values if v in at), default=0)
            if eqn.phase is Phase.FORWARD or eqn.id in step.replicable:
                at.update(dict.fromkeys(eqn.outputs, stage))
            if eqn.phase is Phase.FORWARD and eqn.id not in step.replicable:
                stages[eqn.id] = stage
        placed = place(step, stages, len(meshes), homes)
        forward = tuple(e for e in step.equations if e.id in stages)
        layered = Layered(analysis, step, rules, forward, tuple(stages[e.id] for e in forward), len(meshes))
        found = self.finish(layered, placed, meshes, self.method.schedule or "1f1b")
        if found is None:
            raise self._infeasible()
        return found

    def restore(self, plan: Plan) -> tuple[Plan, LoweredStep, Layered]:
        """The programs of a plan that was made before, priced anew.

        Raises:
          PlanMismatchError: the plan is for another function, other shapes or another version of the rules.
        """
        if plan.fingerprint != self.graph.fingerprint:
            raise PlanMismatchError(
                f"the plan is for {plan.function!r} with fingerprint {plan.fingerprint}, but {self.graph.name!r} with "
                f"these shapes has {self.graph.fingerprint}: make a plan for this function and these shapes."
            )
        for i, cut in plan.leaf_cuts.items():
            shape = self.graph.inputs[i].shape if i < len(self.graph.inputs) else ()
            if cut.axis >= len(shape) or cut.bounds[-1] != shape[cut.axis]:
                raise PlanMismatchError(
                    f"the plan for {plan.function!r} cuts leaf {i}, of shape {shape}, along axis {cut.axis} at "
                    f"{cut.bounds}: it was edited inconsistently. Make it again."
                )
        analysis = self.layering.cut(plan.leaf_cuts)
        step, rules, forward = self.layering.in_microbatches(analysis, plan.num_microbatches)
        layers = tuple(
            next((k for k, stage in enumerate(plan.stages) if stage.equations[0] <= i < stage.equations[1]), 0)
            for i in range(len(forward))
        )
        layered = Layered(analysis, step, rules, forward, layers, len(plan.stages))
        placed = layered.placed(range(1, len(plan.stages)))
        values = {v.id: v for v in _all_values(placed)}
        try:
            shardings = [
                StageSharding(
                    stage.mesh, stage.strategies, {(p, values[v]): s for (p, v), s in stage.layouts.items()},
                    stage.forward, plan.lower_bound,
                )
                for stage in plan.stages
            ]  # fmt: skip
            lowered = self.lower(layered, placed, shardings)
        except (KeyError, InternalError, IndexError) as error:
            raise PlanMismatchError(
                f"the plan for {plan.function!r} does not cover the programs of this step ({error!r}): it was edited "
                "inconsistently, or made by another version of autopar or JAX. Make it again."
            ) from error
        fresh = self._price(layered, lowered, plan.schedule, plan.lower_bound, plan.gap)
        fresh = _with_layers(fresh, [stage.layers for stage in plan.stages])
        return dataclasses.replace(fresh, method=plan.method, notes=plan.notes), lowered, layered

    def lower(self, layered: Layered, placed: PlacedStep, shardings: Sequence[StageSharding]) -> LoweredStep:
        """Local programs of all stages, with the transfers between them."""
        resharders = [self.prices.resharder(s.mesh)[0] for s in shardings]
        return assemble(placed, shardings, layered.rules, resharders, self.prices.transfer)

    def _price(self, layered: Layered, lowered: LoweredStep, schedule: ScheduleName, bound: float, gap: float) -> Plan:
        layer_of = {e.id: layer for e, layer in zip(layered.forward, layered.layers, strict=True)}
        return self.prices.price(layered.analysis, self.method.name, lowered, layer_of, schedule, bound, gap)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Planning makes millions of objects and hardly a cycle: looking for cycles took a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_dear(plan: Plan, estimate: float) -> bool:
    """Whether a plan takes longer than the stage search estimated, and memory may be why."""
    tight = any(stage.memory.total > _TIGHT * stage.memory.capacity for stage in plan.stages)
    return tight and plan.step_time > (1 + _DEAR) * estimate


def _where(layered: Layered, span: tuple[int, int], mesh: Mesh) -> str:
    return f"a stage of layers {span[0]} to {span[1] - 1} of {layered.num_layers} on {mesh.size} devices"


def _with_layers(plan: Plan, spans: Sequence[tuple[int, int]]) -> Plan:
    stages = tuple(dataclasses.replace(s, layers=span) for s, span in zip(plan.stages, spans, strict=True))
    return dataclasses.replace(plan, stages=stages)


def _all_values(placed: PlacedStep) -> list[Value]:
    step = placed.step
    found = [*step.graph.inputs, *step.constants, step.microbatch, *step.accumulate.values()]
    found += [v for pieces in step.keep.values() for v in pieces]
    for program in placed.programs:
        found += program.inputs
        found += [v for e in program.equations for v in e.outputs]
    return found
