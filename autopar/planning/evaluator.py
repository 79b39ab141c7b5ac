"""What candidates come to: bounds, estimates by the stage search, and whole plans.

    split_batch -> cluster_layers -> plan_stages(oracle) -> place -> solve -> assemble -> price = Plan

The stage search asks what a span of layers would cost on a submesh; the answer is the intra-op problem of the
programs of that span, solved, and remembered for all spans that look alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Hashable, Sequence

from autopar.cost_model.timeline import StageTimes, simulate
from autopar.errors import MicrobatchError, PlanError
from autopar.ir.graph import Phase
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import AUTO, Method, StageMethod
from autopar.ir.plan import Plan
from autopar.ir.program import PlacedStep
from autopar.ir.schedule import ScheduleName, make_schedule
from autopar.passes.batch import BatchAnalysis
from autopar.passes.inter_op import Pipeline, StageChoice, plan_stages
from autopar.passes.stage_oracle import Span, StageCost, StageOracle, StageSpace, Turns, in_flight
from autopar.passes.submeshes import ShapesFn
from autopar.planning.candidate import Candidate, Finished, Incumbent, Outcome, has_equal_groups, shapes_on
from autopar.planning.finisher import Finisher, TooSlow, with_layers
from autopar.planning.layering import Layered
from autopar.planning.parts import Part
from autopar.planning.search_space import SearchSpace

LEAST_GAIN = 0.02  # of the step time: less is not worth searching on
DEAR = 0.05  # above the estimate of the stage search, and with this share of the memory in use: memory may be why
_TIGHT = 0.8
_ENOUGH = 0.015  # above the time with more memory, in the stage search: about as close as its solutions are
_FULL = 0.9  # of the memory, in the stage search


class OutOfTime(Exception):
    """The method's time limit is over."""


class Evaluator:
    """Bounds, estimates and plans of candidates for one traced step on one cluster, and the best of them so far."""

    def __init__(
        self, analysis: BatchAnalysis, cluster: Cluster, method: Method = AUTO, num_layers: int | None = None,
        like: Evaluator | None = None,
    ) -> None:  # fmt: skip
        """`like`: another one for the same step and cluster, with which it shares what both need and the best plan."""
        self.analysis, self.cluster, self.method = analysis, cluster, method
        self.finisher: Finisher = Finisher(
            analysis, cluster, method, num_layers, None if like is None else like.finisher
        )
        self.layering, self.stages = self.finisher.layering, self.finisher.stages
        self.prices = self.stages.prices
        self.space = SearchSpace(self.layering)
        self.best: Incumbent = Incumbent() if like is None else like.best
        self.schedule: ScheduleName = method.schedule or "1f1b"
        # By number of microbatches: seconds per step that no pipeline beats.
        self._least: dict[int, float] = {} if like is None else like._least
        self._in_one_stage: set[int] = set()  # numbers of microbatches with a plan of one stage that needs no more
        self._latest_apart: tuple[Plan, tuple[Layered, PlacedStep]] | None = None
        self._narrower: dict[Hashable, Evaluator] = {}  # by what candidates fix; kept, with what they know
        self._deadline: float = time.monotonic() + (method.time_limit or math.inf) if like is None else like._deadline

    @property
    def has_time(self) -> bool:
        """Whether the method's time limit is not over."""
        return time.monotonic() <= self._deadline

    def check_time(self) -> None:
        """Raises OutOfTime if the method's time limit is over."""
        if not self.has_time:
            raise OutOfTime

    # What it would come to.

    def is_vain(self, m: int, stages: int | None, below: float) -> bool:
        """Whether it is known that pipelines with so many microbatches take longer: with fewer they compute too long.

        What is done once for each microbatch is done more often with more of them.
        """
        if not self.method.has(Part.BOUND_OF_PIPELINES):
            return False
        return stages != 1 and any(n <= m and least >= below for n, least in self._least.items())

    def in_one_stage(self, m: int, below: float) -> Pipeline | None:
        """What the stage search finds for all devices as one stage; on meshes of more shapes if those are near."""
        pipeline = self.estimate(Candidate(m, 1), self.space.first_shapes, below)
        if pipeline is None and not self._are_far(self.layering.layered(m, False)):
            return self.estimate(Candidate(m, 1), None, below)
        return pipeline

    def _are_far(self, layered: Layered) -> bool:
        """Whether one stage on meshes of few shapes is so far from fitting, or from the best, that more are in vain."""
        return self.stages.are_far(layered, self.space.first_meshes, self.best.step_time)

    def estimate(
        self, candidate: Candidate, shapes: ShapesFn | None = None, below: float = math.inf
    ) -> Pipeline | None:
        """What the stage search finds that takes less than `below` seconds, on meshes of some shapes or of all."""
        at = self._within(candidate)
        m, stages = candidate.num_microbatches, candidate.num_stages
        if at.is_vain(m, stages, below):
            return None
        with contextlib.suppress(MicrobatchError):
            layered = at.layering.layered(m, stages != 1)
            return at._stages(layered, stages, shapes or at.space.shapes, below, candidate.rounds)
        return None

    def num_layers(self, candidate: Candidate) -> int:
        """Of which its stages are made. Raises MicrobatchError, PlanError where the step cannot be cut so."""
        return self._within(candidate).layering.layered(candidate.num_microbatches, True).num_layers

    def is_tight(self, pipeline: Pipeline) -> bool:
        """Whether stages need about all the memory that there is."""
        return any(stage.cost.memory > _FULL * self.prices.memory(stage.mesh) for stage in pipeline.stages)

    def is_memory_dear(self, m: int, mesh: Mesh) -> bool:
        """Whether one stage on a mesh takes longer than it would with more memory, by the stage search."""
        layered = self.layering.layered(m, False)
        return self.seconds_on(m, mesh) > (1 + _ENOUGH) * self.stages.in_any_memory(layered, mesh)

    def seconds_on(self, m: int, mesh: Mesh) -> float:
        """Per step of all layers as one stage on a mesh, by what is known now; infinite where they do not fit.

        The stage search compares shapes of meshes by solutions that may be a little dearer than the best; of some,
        better ones become known later.
        """
        pipeline = self._on_mesh(self.layering.layered(m, False), mesh)
        return math.inf if pipeline is None else pipeline.step_time

    def _on_mesh(self, layered: Layered, mesh: Mesh) -> Pipeline | None:
        """All layers as one stage on a mesh, as the stage search would have it; None where they do not fit."""
        m, span = layered.step.num_microbatches, (0, layered.num_layers)
        cost = self.stages.cost(layered, self.schedule, span, mesh, 1)
        if cost is None:
            return None
        return Pipeline((StageChoice(span, mesh, cost),), m * cost.per_microbatch + cost.per_step)

    def seconds_without_bubble(self, plan: Plan) -> float:
        """Seconds of a step, about, if gradients of parameters take their share of it by matrix products."""
        layered, placed = self._apart(plan)
        late, whole = ([0.0] * placed.num_stages for _ in range(2))
        for program in placed.programs:
            if program.in_loop:
                products = sum(layered.rules[eqn.id].products for eqn in program.equations)
                whole[program.stage] += products
                late[program.stage] += products * (program.phase is Phase.WEIGHTS)
        stages, m = len(plan.stages), min(plan.num_microbatches, 4 * len(plan.stages))  # the bubble is that of more
        shares = [a / max(b, 1.0) for a, b in zip(late, whole, strict=True)]
        before = [StageTimes(stage.forward, stage.backward) for stage in plan.stages]
        after = []
        for stage, share in zip(plan.stages, shares, strict=True):
            weights = share * stage.per_microbatch
            backward = max(0.0, stage.backward - weights)
            after.append(StageTimes(stage.per_microbatch - weights - backward, backward, weights=weights))
        crossings: dict[tuple[int, int, Phase], float] = {(i, i + 1, Phase.FORWARD): 0.0 for i in range(stages - 1)}
        crossings |= {(i + 1, i, Phase.BACKWARD): 0.0 for i in range(stages - 1)}
        plain = simulate(make_schedule("1f1b", stages, m), before, crossings)
        filled = simulate(make_schedule("zero-bubble", stages, m), after, crossings)
        return plan.step_time - plain.makespan + filled.makespan

    def _apart(self, plan: Plan) -> tuple[Layered, PlacedStep]:
        """The stages of a plan with gradients of parameters apart; of the latest plan they are known."""
        if self._latest_apart is None or self._latest_apart[0] is not plan:
            way = self.layering.placed(self.finisher.layered(plan), range(1, len(plan.stages)), "zero-bubble")
            self._latest_apart = plan, way
        return self._latest_apart[1]

    # What it comes to.

    def outcome(self, candidate: Candidate) -> Outcome:
        """The plan of a candidate, and whether it is better than any before; then it is what others must beat."""
        finished = self._planned(candidate)
        return Outcome(finished, finished is not None and self._is_better(finished))

    def _is_better(self, finished: Finished) -> bool:
        plan = finished[0]
        if plan.step_time >= self.best.step_time:
            return False
        if len(plan.stages) > 1 and has_equal_groups(plan):
            self.best.of_equal_groups = plan
        self.best.step_time, self.best.num_stages = plan.step_time, len(plan.stages)
        m, [first, *others] = plan.num_microbatches, plan.stages
        if not others and not first.recomputed and (m == 1 or not self.is_memory_dear(m, first.mesh)):
            self._in_one_stage.add(m)
        return True

    def _may_be_one_stage(self, m: int) -> bool:
        """Whether a plan of one stage in so many microbatches may be better than those before.

        Not if it was planned with this number, with one, or with a smaller one: it gains nothing from more of them.
        Unless this number gives devices whole parts of the batch, and the smaller one does not.
        """
        whole = self.space.whole
        return self.space.may_be_one_stage and not any(
            n in (1, m) or (n < m and (n in whole or m not in whole)) for n in self._in_one_stage
        )

    def _within(self, candidate: Candidate) -> Evaluator:
        """That of the layers and meshes that a candidate fixes."""
        own_layers = candidate.own_layers or candidate.mesh_shape is not None
        key = (candidate.num_stages if own_layers else None, candidate.mesh_shape, candidate.num_layers)
        if key == (None, None, None):
            return self
        if key not in self._narrower:
            method = self.method
            if own_layers:
                shape = candidate.mesh_shape or method.mesh_shape
                method = dataclasses.replace(method, num_stages=candidate.num_stages, mesh_shape=shape)
            self._narrower[key] = Evaluator(self.analysis, self.cluster, method, candidate.num_layers, self)
        self._narrower[key].best = self.best
        return self._narrower[key]

    def _planned(self, candidate: Candidate) -> Finished | None:
        """A plan that may be better than any before, if there is one."""
        self.check_time()
        if candidate.like is not None:
            with contextlib.suppress(MicrobatchError):
                return self._of_known_stages(candidate.like, candidate)
            return None
        at = self._within(candidate)
        if at is self:
            return self._searched(candidate)
        with contextlib.suppress(PlanError):  # the step has too few layers
            return at._searched(candidate)
        return None

    def _of_known_stages(self, plan: Plan, candidate: Candidate) -> Finished | None:
        """The stages of a plan, interleaved or without a bubble."""
        meshes, m = [stage.mesh for stage in plan.stages], candidate.num_microbatches
        if candidate.rounds > 1:
            return self._dealt_out(m, meshes, candidate.rounds)
        way = self._apart(plan if m == plan.num_microbatches else dataclasses.replace(plan, num_microbatches=m))
        finished = None
        with contextlib.suppress(TooSlow):
            finished = self.finisher.finish(*way, meshes, "zero-bubble", below=self.best.step_time)
        return finished and (with_layers(finished[0], [stage.layers for stage in plan.stages]), finished[1])

    def _searched(self, candidate: Candidate) -> Finished | None:
        """The stages that the stage search finds, or that the method fixes, as a plan."""
        m, stages = candidate.num_microbatches, candidate.num_stages
        if candidate.mesh is not None:
            return self._on_given_mesh(m, candidate.mesh)
        may_be_one = stages is None and self._may_be_one_stage(m)
        if not may_be_one and self.is_vain(m, stages, self.best.estimate):
            return None
        try:
            layered = self.layering.layered(m, stages != 1)
        except MicrobatchError:
            return None
        first = pipeline = None
        if self.method.stages is None:
            first, pipeline = self._search(layered, candidate)
            if pipeline is None:
                return None
            chosen = [(choice.span, choice.mesh) for choice in pipeline.stages]
        else:
            chosen = self.space.fixed_stages()
        if candidate.rounds > 1:
            finished = self._dealt_out(m, [mesh for _, mesh in chosen], candidate.rounds)
        else:
            # With how many microbatches one stage fits is asked even where it is no gain.
            below = math.inf if stages == 1 else self.best.step_time
            finished = self._finished(layered, chosen, pipeline, below)
        if finished is not None and finished[0].step_time < self.best.step_time:
            self._note_estimates(finished[0], first, pipeline, candidate.groups is not None)
        return finished

    def _on_given_mesh(self, m: int, mesh: Mesh) -> Finished | None:
        """All layers as one stage, whatever the stage search estimates."""
        layered = self.layering.layered(m, False)
        pipeline = self._on_mesh(layered, mesh)
        if pipeline is None:
            return None
        finished = self._finished(layered, [((0, layered.num_layers), mesh)], pipeline, self.best.step_time)
        if finished is not None and finished[0].step_time < self.best.step_time:
            self.best.estimate = _error(finished[0], pipeline.step_time) * pipeline.step_time
        return finished

    def _note_estimates(self, plan: Plan, first: Pipeline | None, pipeline: Pipeline | None, on_groups: bool) -> None:
        """What the stage search thought of what will be the best plan; `first`: with few shapes of meshes."""
        estimate = math.inf if pipeline is None else pipeline.step_time
        error = _error(plan, estimate)
        if not on_groups:
            self.best.first_estimate = math.inf if first is None else error * first.step_time
        elif math.isfinite(self.best.first_estimate):
            self.best.first_estimate *= error * estimate / self.best.estimate
        self.best.estimate = error * estimate

    def _dealt_out(self, m: int, meshes: Sequence[Mesh], rounds: int) -> Finished | None:
        """The stages on these meshes divided into so many rounds."""
        stages = tuple(StageMethod(1, mesh.shape) for mesh in meshes) * rounds
        method = dataclasses.replace(self.method, stages=stages, schedule="interleaved", mesh_shape=None)
        at = Evaluator(self.analysis, self.cluster, method, None, self)
        with contextlib.suppress(PlanError):  # the step has too few layers
            return at._finished(at.layering.layered(m, True), at.space.fixed_stages(), None, self.best.step_time)
        return None

    def _finished(
        self, layered: Layered, stages: Sequence[tuple[Span, Mesh]], pipeline: Pipeline | None, below: float
    ) -> Finished | None:
        """The plan of these layers on these meshes, which the stage search found if it did.

        None if it does not fit, or needs more memory than the solver counted and takes `below` seconds or more.
        """
        spans, meshes = zip(*stages, strict=True)
        levels = self._levels(layered, len(spans), pipeline)
        try:
            finished = self._finished_at(layered, spans, meshes, levels, pipeline, below)
            # What the solver did not count may be more than there is: then less is kept for the backward pass.
            while finished is None and self.method.remat is None and self.method.has(Part.MORE_RECOMPUTED):
                leaner = [min(level + 1, len(self.stages.levels(layered)) - 1) for level in levels]
                if leaner == levels:
                    break
                levels = leaner
                finished = self._finished_at(layered, spans, meshes, levels, pipeline, below)
        except TooSlow:
            return None
        return None if finished is None else (with_layers(finished[0], spans), finished[1])

    def _levels(self, layered: Layered, num_stages: int, pipeline: Pipeline | None) -> list[int]:
        """How much each stage computes again in the backward pass: which of `StageCosts.levels`."""
        if pipeline is None:
            return [len(self.stages.levels(layered)) - 1 if self.method.remat else 0] * num_stages
        return [
            self.stages.level(
                layered, self.schedule, stage.span, stage.mesh,
                in_flight(self.schedule, layered.step.num_microbatches, num_stages - i),
            )
            for i, stage in enumerate(pipeline.stages)
        ]  # fmt: skip

    def _finished_at(
        self, layered: Layered, spans: Sequence[Span], meshes: Sequence[Mesh], levels: Sequence[int],
        pipeline: Pipeline | None, below: float,
    ) -> Finished | None:  # fmt: skip
        """The plan where each stage computes so much again in the backward pass."""
        cuts = [start for start, _ in spans[1:]]
        if any(levels):
            blocks = self.stages.levels(layered)
            way = layered.recomputing_at(spans, [blocks[level] for level in levels])
            return self.finisher.finish(*self.layering.placed(way, cuts, self.schedule), meshes, self.schedule)
        ways = [self.layering.placed(layered, cuts, self.schedule)]
        if layered.analysis is not self.analysis and self.method.has(Part.JOINED_LOOPS):
            # The gradients of a loop are stacked until its end: in parts they take less memory.
            joined = self.layering.joined(layered, cuts)
            ways.append(self.layering.placed(joined, range(1, len(spans)), self.schedule))
            if pipeline is None or not self.is_tight(pipeline):
                ways.reverse()
        estimate = math.inf if pipeline is None else pipeline.step_time
        finished = None
        for way, placed in ways:
            if finished is None:
                finished = self.finisher.finish(way, placed, meshes, self.schedule, below=below)
            elif _is_dear(finished[0], estimate):
                with contextlib.suppress(TooSlow):
                    below = min(below, finished[0].step_time)
                    other = self.finisher.finish(way, placed, meshes, self.schedule, below=below)
                    if other is not None and other[0].step_time < finished[0].step_time:
                        finished = other
        return finished

    def _search(self, layered: Layered, candidate: Candidate) -> tuple[Pipeline | None, Pipeline | None]:
        """The best stages with few shapes of meshes, if it begins with those, and with any; None if they are no gain.

        Groups of devices are chosen with few shapes, then all logical shapes of those are tried: shapes change a
        stage's cost far less than the number of its devices does. On given groups of devices, if there are any, alone.
        """
        num_stages, groups, rounds = candidate.num_stages, candidate.groups, candidate.rounds
        estimate = self.best.estimate
        if groups is not None:
            return None, self._stages(layered, num_stages, shapes_on(groups), estimate, rounds)
        if self.method.mesh_shape is not None or not self.method.has(Part.FEW_SHAPES_FIRST):
            if self.method.mesh_shape is not None:
                estimate = max(estimate, self.best.step_time)  # there is nothing else to look through
            pipeline = self._stages(layered, num_stages, self.space.shapes, estimate, rounds)
            return pipeline, pipeline
        first = self._stages(layered, num_stages, self.space.first_shapes, self.best.first_estimate, rounds)
        if first is None:
            is_vain = num_stages != 1 or self._are_far(layered)
            if is_vain and not self.stages.are_hints_in_the_way:
                return None, None
            return None, self._stages(layered, num_stages, self.space.shapes, estimate, rounds)
        chosen = {(c.mesh.devices[0], c.mesh.size) for c in first.stages}

        def shapes(cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
            return self.space.shapes(cluster, start, size) if (start, size) in chosen else ()

        pipeline = self._stages(layered, len(first.stages), shapes, min(first.step_time, estimate), rounds)
        return first, pipeline or (first if first.step_time < estimate else None)

    def _stages(
        self, layered: Layered, num_stages: int | None, shapes: ShapesFn, below: float, rounds: int
    ) -> Pipeline | None:
        """The best stages on groups of devices of these shapes; None if they take `below` seconds or more."""
        if self.method.num_stages is None and num_stages is not None and num_stages > layered.num_layers:
            return None
        m = layered.step.num_microbatches
        pipeline = plan_stages(
            StageSpace(layered.num_layers, self.cluster, num_stages, shapes), _Oracle(self, layered),
            Turns(m, self.schedule, rounds), below=below, gain=LEAST_GAIN,
        )  # fmt: skip
        if pipeline is None and num_stages != 1 and m > 1:
            self._least[m] = self.stages.least_of_pipelines(layered)
        return pipeline

    def _least_cost(self, layered: Layered, span: tuple[int, int], mesh: Mesh) -> StageCost | None:
        """What a span of layers costs at least on a mesh, if it may be part of a better plan."""
        m = layered.step.num_microbatches
        if span == (0, layered.num_layers) and not self._may_be_one_stage(m):
            return None
        least = self.stages.least(layered, span, mesh)
        if least is None or m * least.per_microbatch >= self.best.step_time:
            return None  # the slowest stage alone would take longer than the best plan
        return least


class _Oracle(StageOracle):
    """Stage costs of a step in layers, while there is time."""

    def __init__(self, evaluator: Evaluator, layered: Layered) -> None:
        self.evaluator, self.layered, self.stages = evaluator, layered, evaluator.stages

    def cost(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        self.evaluator.check_time()
        return self.stages.cost(self.layered, self.evaluator.schedule, span, mesh, in_flight)

    def least(self, span: Span, mesh: Mesh) -> StageCost | None:
        return self.evaluator._least_cost(self.layered, span, mesh)

    def bound(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        if not self.evaluator.method.has(Part.BOUND_IN_ANY_MEMORY):
            return super().bound(span, mesh, in_flight)
        self.evaluator.check_time()
        return self.stages.bound(self.layered, self.evaluator.schedule, span, mesh, in_flight)

    def overhead(self, layer: int, mesh: Mesh) -> tuple[float, float]:
        if not self.evaluator.method.has(Part.OVERHEADS):
            return super().overhead(layer, mesh)
        return self.stages.overhead(self.layered, layer, mesh)

    def alike(self, start: int, size: int) -> Hashable:
        return self.evaluator.prices.group(start, size)


def _error(plan: Plan, estimate: float) -> float:
    """Of an estimate, if the plan turned out to be dear: then it must not bar others that are not."""
    error = plan.step_time / estimate
    return error if error > 1 + DEAR else 1.0


def _is_dear(plan: Plan, estimate: float) -> bool:
    """Whether a plan takes longer than the stage search estimated, and memory may be why."""
    tight = any(stage.memory.total > _TIGHT * stage.memory.capacity for stage in plan.stages)
    return tight and plan.step_time > (1 + DEAR) * estimate
