"""The search for a plan: from the batch analysis of a traced step to stages, meshes and shardings.

    split_batch -> cluster_layers -> plan_stages(oracle) -> place -> solve -> assemble -> price = Plan

The stage search asks what a span of layers would cost on a submesh; the answer is the intra-op problem of the
programs of that span, solved, and remembered for all spans that look alike.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Hashable, Iterator, Sequence

from autopar.cost_model.timeline import StageTimes, simulate
from autopar.errors import MicrobatchError, PlanError, UnsplitWarning, UserError, warn
from autopar.ir.graph import Phase
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import AUTO, Method, StageMethod
from autopar.ir.plan import Plan
from autopar.ir.program import PlacedStep
from autopar.ir.schedule import ScheduleName, make_schedule
from autopar.passes.batch import BatchAnalysis
from autopar.passes.inter_op import Pipeline, plan_stages
from autopar.passes.lower import LoweredStep
from autopar.passes.stage_oracle import Span, StageCost, StageOracle, StageSpace, Turns, in_flight
from autopar.passes.submeshes import ShapesFn, mesh_at
from autopar.passes.unsplit import find_unsplit
from autopar.planning.candidates import Candidates, Groups, groups_of, has_room, shapes_on
from autopar.planning.finisher import Finisher, with_layers
from autopar.planning.layering import MAX_LAYERS, Layered

_LEAST_GAIN = 0.02  # of the step time: less is not worth searching on
_DEAR = 0.05  # above the estimate of the stage search, and with this share of the memory in use: memory may be why
# Relative: what the stage search estimates to be slower than the best plan by more than this is not made, both of one
# stage: its errors are much alike for plans of one step.
_EQUALLY_OFF = 0.02
_USUAL = 8  # microbatches for each stage
_TIGHT = 0.8
_IN_VAIN = 2  # numbers of equal stages, or of microbatches, that take longer, after which no others are tried
_FULL = 0.9  # of the memory, in the stage search
_UNEVEN = 1.1  # times the mean of all stages, that the slowest takes: finer layers may help

_Found = tuple[Plan, LoweredStep]


class OutOfTime(Exception):
    """The method's time limit is over."""


@dataclasses.dataclass
class _Best:
    """What another plan must beat."""

    step_time: float = math.inf  # seconds
    estimate: float = math.inf  # as the stage search estimated it
    first_estimate: float = math.inf  # and with few shapes of meshes, if it began with those
    num_stages: int = 0


class Planner:
    """Finds a plan for one traced step on one cluster."""

    def __init__(
        self,
        analysis: BatchAnalysis,
        cluster: Cluster,
        method: Method = AUTO,
        num_layers: int | None = None,
        like: Planner | None = None,
    ) -> None:
        """`like`: another one for the same step and cluster, with which it shares what both need."""
        self.analysis, self.cluster, self.method = analysis, cluster, method
        self.rounds = 1  # of equal stages: each is divided into as many parts, which are interleaved
        self.graph = analysis.graph
        known = None if like is None else like.finisher
        self.finisher: Finisher = Finisher(analysis, cluster, method, num_layers, known)
        self.layering, self.stages = self.finisher.layering, self.finisher.stages
        self.prices = self.stages.prices
        self.candidates = Candidates(self.layering)
        self._best = _Best()
        # By number of microbatches: seconds per step that no pipeline beats.
        self._least: dict[int, float] = {} if like is None else like._least
        self._schedule: ScheduleName = method.schedule or "1f1b"
        self._in_one_stage: set[int] = set()  # numbers of microbatches that were tried in one stage
        self._one_stage_fits = False  # with one microbatch, and nothing computed again
        self._of_equal_groups: Plan | None = None  # the latest plan of several stages on as many devices each
        self._deadline = time.monotonic() + (method.time_limit or math.inf)

    def plan(self, num_microbatches: int | None = None) -> _Found:
        """The best plan found and its programs.

        Raises:
          InfeasiblePlanError: nothing fits; says what is missing where.
          OutOfTime: before any plan was found.
        """
        best: _Found | None = None
        try:
            for found in self._improving(num_microbatches):
                best = found
        except OutOfTime:
            if best is None:
                raise
        if best is None:
            raise self.stages.infeasible(self.graph.name)
        return self._noted(best)

    @property
    def best_estimate(self) -> float:
        """Seconds of the best plan found, as the stage search estimates plans of one stage."""
        return self._best.estimate if self._best.num_stages == 1 else self._best.step_time

    @property
    def most_estimate(self) -> float:
        """Seconds that the stage search may estimate for a plan of one stage which is quicker than the best."""
        return (1 + (_EQUALLY_OFF if self._best.num_stages == 1 else _DEAR)) * self._best.estimate

    def better_by(
        self, planner: Planner, num_microbatches: int | None = None, fewest: int | None = None
    ) -> _Found | None:
        """The best plan that a rival finds, if it is quicker than the best so far.

        `fewest`: it has one stage, for which no fewer microbatches than these are enough.
        """
        best: _Found | None = None
        planner._best = _Best(self._best.step_time, self.most_estimate, self.most_estimate)
        # What is to be warned of was when the search began.
        quietly = warnings.catch_warnings(action="ignore")
        with quietly, contextlib.suppress(OutOfTime, UserError):
            plans = planner._improving(num_microbatches) if fewest is None else planner._fewest_that_fit(fewest)
            for found in plans:
                best = found
        if best is None:
            return None
        self._best = planner._best
        return planner._noted(best)

    @property
    def _may_be_one(self) -> bool:
        """Whether the method allows plans of one stage."""
        return self.method.num_stages in (None, 1) and self.method.min_stages == 1

    def _noted(self, found: _Found) -> _Found:
        plan, lowered = found
        return dataclasses.replace(plan, notes=self._notes(lowered, plan.step_time)), lowered

    def any_plan(self, num_microbatches: int | None = None) -> Plan | None:
        """The first plan that fits, if one is found."""
        with contextlib.suppress(OutOfTime, PlanError):
            for plan, _ in self._improving(num_microbatches):
                return plan
        return None

    def _improving(self, num_microbatches: int | None) -> Iterator[_Found]:
        """Plans, each better than all before."""
        fixed = num_microbatches if num_microbatches is not None else self.method.num_microbatches
        best: _Found | None = None
        for found in self._likely(fixed):
            best = found
            yield found
        if fixed is None:
            # One stage may be better than a pipeline, with fewer microbatches only.
            if best is not None and len(best[0].stages) > 1 and self._may_be_one:
                for found in self._fewest_that_fit():
                    best = found
                    yield found
            for found in self._other_numbers(best):
                best = found
                yield found
        if best is not None and (finer := self._finer(best[0])) is not None:
            best = finer
            yield finer
        if best is not None:
            plan = equal = best[0]
            if self._of_equal_groups is not None and not _has_equal_groups(plan):
                # Others were quicker without: its stages, interleaved, may be quicker than those.
                equal = dataclasses.replace(self._of_equal_groups, num_microbatches=plan.num_microbatches)
            yield from self._interleaved(equal, fixed)
            yield from self._without_bubble(plan, fixed)

    def _likely(self, fixed: int | None) -> Iterator[_Found]:
        """Better plans, what is likely to be good first: a stage of no better plan is not solved any more."""
        stages, hosts = self.method.num_stages, len(self.cluster.hosts)
        if fixed is not None:
            self.layering.layered(fixed, stages != 1)  # raises what is wrong with it
        numbers = self.candidates.likely if fixed is None else [fixed]
        may_be_one = fixed is None and self._may_be_one
        one = self._look(1, 1, self.candidates.first_shapes, self._best.estimate) if may_be_one else None
        first = [(one.step_time, 1, 1)] if one is not None else []  # estimate, microbatches, stages
        if numbers and stages is None and 1 < hosts <= MAX_LAYERS:
            below = self._best.estimate if one is None else one.step_time
            m, over_hosts = numbers[0], below
            if fixed is None:
                m, over_hosts = self._fewest(m, hosts, self.candidates.shapes_of_hosts, below)
            first.append((over_hosts, m, hosts))
        if may_be_one and one is None:
            first.append((math.inf, 1, 1))
        for _, m, number in sorted(first, key=lambda each: each[0]):
            if (found := self._better(m, number)) is not None:
                yield found
                if number > 1 and m < numbers[0]:
                    numbers = [m]  # others would need far more stages
            elif number == 1 and one is not None:
                yield from self._fewest_that_fit()  # it takes more memory than the stage search counts
        for found in self._uniform(fixed):
            yield found
            if hosts > MAX_LAYERS:
                numbers = numbers[-1:]  # the search goes on to fewer from the best
        if fixed is None and (self.cluster.num_devices == 1 or stages == 1):
            return
        if fixed is None and stages is not None:
            numbers = [*numbers, 1]
        for m in numbers:
            if (found := self._better(m, stages)) is not None:
                yield found

    def _other_numbers(self, best: _Found | None) -> Iterator[_Found]:
        """Better plans with fewer microbatches, as long as that is a gain and memory is left; with more, if none fits.

        With more, too, if the best computes something again, until two numbers in turn are no gain.

        A pipeline's bubble grows as they become fewer; without one, the fewest that are likely to fit are the best.
        The groups of devices stay until it is known how many microbatches there are.
        """
        stages = self.method.num_stages
        if best is not None and any(stage.recomputed for stage in best[0].stages):
            in_vain = 0
            for m in [n for n in self.candidates.many[::-1] if n > best[0].num_microbatches]:
                found = self._better(m, stages)  # smaller ones may need nothing computed again
                in_vain = 0 if found is not None else in_vain + 1
                if in_vain == _IN_VAIN:
                    break
                if found is not None:
                    best = found
                    yield found
        if self.cluster.num_devices == 1 or stages == 1:
            yield from self._fewest_that_fit() if best is None else ()
            return
        for m in self.candidates.more if best is None else ():
            found = self._better(m, stages)
            if found is None and best is not None:
                break
            if found is not None:
                best = found
                yield found
        if best is None and self._may_be_one:
            yield from self._fewest_that_fit()
            return
        if best is not None and best[0].schedule != self._schedule:
            return  # see `_interleaved`
        are_free = self.method.stages is None and self.method.mesh_shape is None
        last = None  # the number of the best plan on given groups
        while best is not None and (fewer := self.candidates.fewer(best[0])) is not None:
            groups = groups_of(best[0]) if are_free else None
            fewest = fewer
            if groups is not None:
                fewest, _ = self._fewest(fewer, stages, shapes_on(groups), self._best.estimate)
            best = self._better(fewest, stages, groups)
            if best is None and fewest < fewer:
                best, fewest = self._better(fewer, stages, groups), fewer
            if best is not None:
                last = fewest
                yield best
        if are_free and last is not None:
            found = self._better(last, stages)
            if found is not None:
                yield found

    def _fewest_that_fit(self, fewest: int = 2) -> Iterator[_Found]:
        """Better plans of one stage with so many microbatches or more.

        The fewest that fit are best, or that fit with nothing recomputed.
        """
        found: _Found | None = None
        in_vain = 0
        for m in self._worth_one_stage(fewest):
            self._in_one_stage.add(m)
            other = self._found_for(m, 1)
            is_better = other is not None and self._is_better(other)
            in_vain = 0 if is_better else in_vain + 1
            if found is not None and in_vain == _IN_VAIN:
                return
            if other is None:
                continue
            if is_better:
                found = other
                yield found
            if not any(stage.recomputed for stage in other[0].stages):
                return

    def _worth_one_stage(self, fewest: int) -> Iterator[int]:
        """Numbers of microbatches, rising, with which one stage, had it the memory, may be quicker than the best."""
        number = self.cluster.num_devices
        meshes = [mesh_at(0, shape) for shape in self.candidates.first_shapes(self.cluster, 0, number)]
        in_vain = 0
        for m in (1, *self.candidates.many[::-1]):
            with contextlib.suppress(MicrobatchError):
                layered = self.layering.layered(m, False)
                if not meshes or self.stages.least_of_one(layered, meshes[0]) >= self._best.estimate:
                    return  # computing alone takes longer, and with more microbatches no less
                seconds = min(self.stages.in_any_memory(layered, mesh) for mesh in meshes)
                if self._best.estimate <= seconds < math.inf:
                    # What is sent is no less with more, unless these are whole parts of the batch again.
                    in_vain += 1
                    if m == 1 or in_vain == _IN_VAIN:
                        return
                if seconds < self._best.estimate and m >= fewest and m not in self._in_one_stage:
                    yield m

    def _without_bubble(self, plan: Plan, fixed: int | None) -> Iterator[_Found]:
        """The stages of a plan, with the gradients of their parameters computed where they would wait.

        Then there may be fewer microbatches.
        """
        stages, m = len(plan.stages), plan.num_microbatches
        if self.method.schedule is not None or plan.schedule != "1f1b" or stages == 1:
            return
        if self._least_without_bubble(plan) > (1 - _LEAST_GAIN) * plan.step_time:
            return
        last = math.inf
        for n in (m,) if fixed is not None else (m, *(n for n in self.candidates.many if n < m)):
            self._check_time()
            with contextlib.suppress(MicrobatchError):
                found = self.finisher.finish(
                    *self._apart(dataclasses.replace(plan, num_microbatches=n)),
                    [stage.mesh for stage in plan.stages], "zero-bubble",
                )  # fmt: skip
                if found is None or found[0].step_time >= last:
                    return
                last = found[0].step_time
                if last < self._best.step_time:
                    self._best.step_time = last
                    yield with_layers(found[0], [stage.layers for stage in plan.stages]), found[1]

    def _apart(self, plan: Plan) -> tuple[Layered, PlacedStep]:
        """The stages of a plan with gradients of parameters apart."""
        return self.layering.placed(self.finisher.layered(plan), range(1, len(plan.stages)), "zero-bubble")

    def _least_without_bubble(self, plan: Plan) -> float:
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

    def _interleaved(self, plan: Plan, fixed: int | None) -> Iterator[_Found]:
        """The stages of a plan of equal ones divided, and dealt out in turn: a pipeline that is filled more quickly.

        Then there may be fewer microbatches.
        """
        groups, m = groups_of(plan), plan.num_microbatches
        stages, best = len(groups), len(plan.stages) // len(groups)
        if self.method.schedule is not None or self.method.num_stages is not None or not _has_equal_groups(plan):
            return
        if stages <= self.layering.layered(m, True).num_layers:
            planner = copy.copy(self)  # with all that it knows
        else:
            planner = self.beside(dataclasses.replace(self.method, num_stages=stages))
        with contextlib.suppress(PlanError):  # the step has too few layers
            busy = [stage.per_microbatch for stage in plan.stages]
            unevenness = 1 - sum(busy) / (len(busy) * max(busy)) if max(busy) > 0 else 0.0
            for rounds in self.candidates.rounds(stages, m, unevenness):
                if rounds > best and has_room(plan, rounds):
                    planner.rounds = rounds
                    # Its estimate knows nothing of parts that are more even than whole stages.
                    found = planner._better(m, stages, groups) if best > 1 else planner._better_dealt_out(m, plan)
                    if found is None:
                        break  # what is sent more often costs more than the bubble
                    best, plan = rounds, found[0]
                    yield found
            if best == 1 or fixed is not None:
                return
            planner.rounds = best
            # Shardings that need less memory may cost less than the bubble of so many stages.
            for n in (n for n in self.candidates.many if n < m and n % stages == 0):
                found = planner._better(n, stages, groups)
                if found is None:
                    return
                yield found

    def _better_dealt_out(self, m: int, plan: Plan) -> _Found | None:
        """The stages of a plan divided into all rounds, if that is better than any plan before."""
        self._check_time()
        found = self._dealt_out(m, [stage.mesh for stage in plan.stages])
        return found if found is not None and self._is_better(found) else None

    def _dealt_out(self, m: int, meshes: Sequence[Mesh]) -> _Found | None:
        """The stages on these meshes divided into all rounds."""
        stages = tuple(StageMethod(1, mesh.shape) for mesh in meshes) * self.rounds
        method = dataclasses.replace(self.method, stages=stages, schedule="interleaved", mesh_shape=None)
        planner = self.beside(method)
        with contextlib.suppress(PlanError):  # the step has too few layers
            return planner._finished(planner.layering.layered(m, True), planner.candidates.fixed_stages(), None)
        return None

    def _finer(self, plan: Plan) -> _Found | None:
        """A better plan of twice as many layers, where one stage takes much longer than others.

        On the same groups of devices, or hosts of their own.
        """
        seconds = [stage.per_microbatch for stage in plan.stages]
        is_even = max(seconds) * len(seconds) <= _UNEVEN * sum(seconds)
        if is_even or self.method.stages is not None or plan.schedule == "interleaved":
            return None
        m = plan.num_microbatches
        layers = self.layering.layered(m, True).num_layers
        planner = self.beside(self.method, 2 * layers)
        finer = planner.layering.layered(m, True).num_layers
        if finer == layers or finer < len(plan.stages):
            return None  # each has one heavy operation, or stages that the search does not tell apart
        hosts = [(start, stop - start) for start, stop in itertools.pairwise(self.cluster.host_bounds)]
        groups = {host: (host[1],) for host in hosts if (host[1],) in self.candidates.shapes(self.cluster, *host)}
        return planner._better(m, self.method.num_stages, {**groups, **groups_of(plan)})

    def beside(self, method: Method, num_layers: int | None = None) -> Planner:
        """A planner by another method, or of so many layers, that looks for what is better than what this has found."""
        planner = Planner(self.analysis, self.cluster, method, num_layers, self)
        planner._best, planner._deadline = self._best, self._deadline
        return planner

    def _uniform(self, fixed: int | None) -> Iterator[_Found]:
        """Better plans of equal stages that the search cannot make of the layers that it tells apart.

        What the stage search thinks best is finished first: others are then rarely worth it.
        """
        found: list[tuple[float, int, Planner, int]] = []  # estimate, number of stages, number of microbatches
        best, in_vain = self._best.estimate, 0
        for stages, shape, m in self.candidates.uniform(fixed):
            if in_vain == _IN_VAIN:
                break
            planner = self.beside(dataclasses.replace(self.method, num_stages=stages, mesh_shape=shape))
            planner.rounds = next(iter(self.candidates.rounds(stages, m)), 1)
            with contextlib.suppress(PlanError):  # the step has too few layers
                plan = planner._look(m, stages, planner.candidates.shapes, self._best.estimate)
                if plan is not None:
                    found.append((plan.step_time, stages, planner, m))
                    in_vain = 0 if plan.step_time < best else in_vain + 1
                    best = min(best, plan.step_time)
        for _, stages, planner, m in sorted(found, key=lambda each: each[:2]):
            for rounds in dict.fromkeys((planner.rounds, 1)):
                planner.rounds = rounds
                if (better := planner._better(m, stages)) is not None:
                    yield better
                    break

    def _fewest(self, most: int, stages: int | None, shapes: ShapesFn, below: float) -> tuple[int, float]:
        """The number of microbatches, at most so many, of which fewer are no gain by the stage search alone.

        With its seconds as that estimates them, `below` if it finds nothing quicker. From the usual number for so many
        stages it goes down as long as that is a gain, or else up.
        """
        numbers = [n for n in self.candidates.many if n <= most]  # falling
        usual = most if stages is None else _USUAL * stages
        at = next((i for i, n in enumerate(numbers) if n <= usual), len(numbers) - 1)

        def look(at: int, below: float) -> Pipeline | None:
            return self._look(numbers[at], stages, shapes, below)

        def is_gain(fewer: Pipeline, more: Pipeline) -> bool:
            # Where memory gets short the search does not know all that it costs: the gain must be larger.
            least = 1 - _DEAR if self._is_tight(fewer) else 1.0
            return fewer.step_time < least * more.step_time

        found, first = look(at, below), at
        while found is not None and at + 1 < len(numbers):
            fewer = look(at + 1, found.step_time)
            if fewer is None or not is_gain(fewer, found):
                break
            found, at = fewer, at + 1
        while at <= first and at > 0:
            more = look(at - 1, below if found is None else found.step_time / (1 - _DEAR))
            if found is not None and (more is None or is_gain(found, more)):
                break
            found, at = more, at - 1
        return (numbers[at], found.step_time) if found is not None else (most, below)

    def _look(self, m: int, stages: int | None, shapes: ShapesFn, below: float) -> Pipeline | None:
        """What the stage search finds that takes less than `below` seconds, if the step can be cut so."""
        if self._is_vain(m, stages, below):
            return None
        with contextlib.suppress(MicrobatchError):
            return self._stages(self.layering.layered(m, stages != 1), stages, shapes, below)
        return None

    def _is_vain(self, m: int, stages: int | None, below: float) -> bool:
        """Whether it is known that pipelines with so many microbatches take longer: with fewer they compute too long.

        What is done once for each microbatch is done more often with more of them.
        """
        return stages != 1 and any(n <= m and least >= below for n, least in self._least.items())

    def _better(self, m: int, stages: int | None, groups: Groups | None = None) -> _Found | None:
        """A plan with so many microbatches and stages that is better than any before; on these groups of devices."""
        found = self._found_for(m, stages, groups)
        return found if found is not None and self._is_better(found) else None

    def _found_for(self, m: int, stages: int | None, groups: Groups | None = None) -> _Found | None:
        """A plan that may be better than any before, if there is one."""
        self._check_time()
        may_be_one = stages is None and self._may_be_one and not (m > 1 and self._one_stage_fits)
        if not may_be_one and self._is_vain(m, stages, self._best.estimate):
            return None
        try:
            self.layering.layered(m, stages != 1)
        except MicrobatchError:
            return None
        return self._plan_for(m, stages, groups)

    def _is_better(self, found: _Found) -> bool:
        """Whether a plan is better than any before; then it is what others must beat."""
        plan = found[0]
        if plan.step_time >= self._best.step_time:
            return False
        if len(plan.stages) > 1 and _has_equal_groups(plan):
            self._of_equal_groups = plan
        self._best.step_time, self._best.num_stages = plan.step_time, len(plan.stages)
        is_one = plan.num_microbatches == 1 and len(plan.stages) == 1
        self._one_stage_fits |= is_one and not plan.stages[0].recomputed
        return True

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise OutOfTime

    def _notes(self, lowered: LoweredStep, step_time: float) -> tuple[str, ...]:
        """What is left whole for want of a divisor; what costs most is a warning, too."""
        found = find_unsplit(
            lowered, self.method, self.prices.kind, lambda mesh: self.prices.resharder(mesh)[1], step_time
        )
        for cause in found:
            if cause.is_dear:
                warn(f"{self.graph.name}, method {self.method.name!r}: {cause}", UnsplitWarning)
        return tuple(map(str, found))

    def _plan_for(self, m: int, num_stages: int | None, groups: Groups | None) -> _Found | None:
        layered = self.layering.layered(m, num_stages != 1)
        first = found = None
        if self.method.stages is None:
            first, found = self._search(layered, num_stages, groups)
            if found is None:
                return None
            chosen = [(choice.span, choice.mesh) for choice in found.stages]
        else:
            chosen = self.candidates.fixed_stages()
        if self.rounds > 1:
            finished = self._dealt_out(m, [mesh for _, mesh in chosen])
        else:
            finished = self._finished(layered, chosen, found)
        if finished is None:
            return None
        estimate = math.inf if found is None else found.step_time
        if finished[0].step_time < self._best.step_time:
            # One that turned out to be dear must not bar others that are not.
            error = finished[0].step_time / estimate
            error = error if error > 1 + _DEAR else 1.0
            if groups is None:
                self._best.first_estimate = math.inf if first is None else error * first.step_time
            elif math.isfinite(self._best.first_estimate):
                self._best.first_estimate *= error * estimate / self._best.estimate
            self._best.estimate = error * estimate
        return finished

    def _finished(self, layered: Layered, stages: Sequence[tuple[Span, Mesh]], found: Pipeline | None) -> _Found | None:
        """The plan of these layers on these meshes, which the stage search found if it did."""
        spans, meshes = zip(*stages, strict=True)
        levels = self._levels(layered, len(spans), found)
        finished = self._finished_at(layered, spans, meshes, levels, found)
        # What the solver did not count may be more than there is: then less is kept for the backward pass.
        while finished is None and self.method.remat is None:
            leaner = [min(level + 1, len(self.stages.levels(layered)) - 1) for level in levels]
            if leaner == levels:
                break
            levels = leaner
            finished = self._finished_at(layered, spans, meshes, levels, found)
        return None if finished is None else (with_layers(finished[0], spans), finished[1])

    def _levels(self, layered: Layered, num_stages: int, found: Pipeline | None) -> list[int]:
        """How much each stage computes again in the backward pass: which of `StageCosts.levels`."""
        if found is None:
            return [len(self.stages.levels(layered)) - 1 if self.method.remat else 0] * num_stages
        return [
            self.stages.level(
                layered, self._schedule, stage.span, stage.mesh,
                in_flight(self._schedule, layered.step.num_microbatches, num_stages - i),
            )
            for i, stage in enumerate(found.stages)
        ]  # fmt: skip

    def _finished_at(
        self, layered: Layered, spans: Sequence[Span], meshes: Sequence[Mesh], levels: Sequence[int],
        found: Pipeline | None,
    ) -> _Found | None:  # fmt: skip
        """The plan where each stage computes so much again in the backward pass."""
        cuts = [start for start, _ in spans[1:]]
        if any(levels):
            blocks = self.stages.levels(layered)
            way = layered.recomputing_at(spans, [blocks[level] for level in levels])
            return self.finisher.finish(*self.layering.placed(way, cuts, self._schedule), meshes, self._schedule)
        ways = [self.layering.placed(layered, cuts, self._schedule)]
        if layered.analysis is not self.analysis:
            # The gradients of a loop are stacked until its end: in parts they take less memory.
            joined = self.layering.joined(layered, cuts)
            ways.append(self.layering.placed(joined, range(1, len(spans)), self._schedule))
            if found is None or not self._is_tight(found):
                ways.reverse()
        estimate = math.inf if found is None else found.step_time
        finished = None
        for way, placed in ways:
            if finished is None or _is_dear(finished[0], estimate):
                other = self.finisher.finish(way, placed, meshes, self._schedule)
                if other is not None and (finished is None or other[0].step_time < finished[0].step_time):
                    finished = other
        return finished

    def _is_tight(self, found: Pipeline) -> bool:
        return any(stage.cost.memory > _FULL * self.prices.memory(stage.mesh) for stage in found.stages)

    def _search(
        self, layered: Layered, num_stages: int | None, groups: Groups | None
    ) -> tuple[Pipeline | None, Pipeline | None]:
        """The best stages with few shapes of meshes, if it begins with those, and with any; None if they are no gain.

        Groups of devices are chosen with few shapes, then all logical shapes of those are tried: shapes change a
        stage's cost far less than the number of its devices does. On given groups of devices, if there are any, alone.
        """
        estimate = self._best.estimate
        if groups is not None:
            return None, self._stages(layered, num_stages, shapes_on(groups), estimate)
        if self.method.mesh_shape is not None:
            found = self._stages(layered, num_stages, self.candidates.shapes, estimate)
            return found, found
        first = self._stages(layered, num_stages, self.candidates.first_shapes, self._best.first_estimate)
        if first is None:
            number = self.cluster.num_devices
            whole = [mesh_at(0, shape) for shape in self.candidates.first_shapes(self.cluster, 0, number)]
            is_vain = num_stages != 1 or self.stages.are_far(layered, whole, self._best.step_time)
            if is_vain and not self.stages.are_hints_in_the_way:
                return None, None
            return None, self._stages(layered, num_stages, self.candidates.shapes, estimate)
        chosen = {(c.mesh.devices[0], c.mesh.size) for c in first.stages}

        def shapes(cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
            return self.candidates.shapes(cluster, start, size) if (start, size) in chosen else ()

        found = self._stages(layered, len(first.stages), shapes, min(first.step_time, estimate))
        return first, found or (first if first.step_time < estimate else None)

    def _stages(self, layered: Layered, num_stages: int | None, shapes: ShapesFn, below: float) -> Pipeline | None:
        """The best stages on groups of devices of these shapes; None if they take `below` seconds or more."""
        if self.method.num_stages is None and num_stages is not None and num_stages > layered.num_layers:
            return None

        m = layered.step.num_microbatches
        found = plan_stages(
            StageSpace(layered.num_layers, self.cluster, num_stages, shapes), _Oracle(self, layered),
            Turns(m, self._schedule, self.rounds), below=below, gain=_LEAST_GAIN,
        )  # fmt: skip
        if found is None and num_stages != 1 and m > 1:
            self._least[m] = self.stages.least_of_pipelines(layered)
        return found

    def _least_cost(self, layered: Layered, span: tuple[int, int], mesh: Mesh) -> StageCost | None:
        """What a span of layers costs at least on a mesh, if it may be part of a better plan."""
        m = layered.step.num_microbatches
        if span == (0, layered.num_layers) and (self.method.min_stages > 1 or (m > 1 and self._one_stage_fits)):
            return None  # one stage that fits with one microbatch gains nothing from several
        least = self.stages.least(layered, span, mesh)
        if least is None or m * least.per_microbatch >= self._best.step_time:
            return None  # the slowest stage alone would take longer than the best plan
        return least


class _Oracle(StageOracle):
    """Stage costs of a step in layers, while there is time."""

    def __init__(self, planner: Planner, layered: Layered) -> None:
        self.planner, self.layered, self.stages = planner, layered, planner.stages

    def cost(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        self.planner._check_time()
        return self.stages.cost(self.layered, self.planner._schedule, span, mesh, in_flight)

    def least(self, span: Span, mesh: Mesh) -> StageCost | None:
        return self.planner._least_cost(self.layered, span, mesh)

    def bound(self, span: Span, mesh: Mesh, in_flight: int) -> StageCost | None:
        self.planner._check_time()
        return self.stages.bound(self.layered, self.planner._schedule, span, mesh, in_flight)

    def overhead(self, layer: int, mesh: Mesh) -> tuple[float, float]:
        return self.stages.overhead(self.layered, layer, mesh)

    def alike(self, start: int, size: int) -> Hashable:
        return self.planner.prices.group(start, size)


def _has_equal_groups(plan: Plan) -> bool:
    return len({size for _, size in groups_of(plan)}) == 1


def _is_dear(plan: Plan, estimate: float) -> bool:
    """Whether a plan takes longer than the stage search estimated, and memory may be why."""
    tight = any(stage.memory.total > _TIGHT * stage.memory.capacity for stage in plan.stages)
    return tight and plan.step_time > (1 + _DEAR) * estimate
