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
import itertools
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from autopar.errors import MicrobatchError, PlanError, UnsplitWarning
from autopar.finisher import Finisher, with_layers
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import AUTO, Method, StageMethod
from autopar.ir.plan import Plan
from autopar.ir.schedule import ScheduleName, make_schedule
from autopar.ir.units import count_text
from autopar.layering import MAX_LAYERS, Layered
from autopar.passes.batch import BatchAnalysis
from autopar.passes.inter_op import (
    ShapesFn,
    StageCost,
    StageCostFn,
    StagePlan,
    candidate_shapes,
    mesh_at,
    plan_stages,
)
from autopar.passes.lower import LoweredStep
from autopar.passes.unsplit import find_unsplit

_LEAST_GAIN = 0.02  # of the step time: less is not worth searching on
_DEAR = 0.05  # above the estimate of the stage search, and with this share of the memory in use: memory may be why
_TIGHT = 0.8
_FULL = 0.9  # of the memory, in the stage search
_MOST_STAGES = 64  # that are tried
_UNEVEN = 1.1  # times the mean of all stages, that the slowest takes: finer layers may help
_ROUNDS = (2, 3, 4)  # of interleaved stages
_WORTH_INTERLEAVING = 0.04  # of the step time that a smaller bubble saves: more transfers take a part of it
_MOST_PARTS = 128  # stages of all rounds

_Found = tuple[Plan, LoweredStep]
_Candidates = list[tuple[int, int | None]]  # numbers of microbatches, each with a fixed number of stages or None
_Groups = Mapping[tuple[int, int], tuple[int, ...]]  # first device, number of devices -> the shape of their mesh


class OutOfTime(Exception):
    """The method's time limit is over."""


@dataclasses.dataclass
class _Best:
    """What another plan must beat."""

    step_time: float = math.inf  # seconds
    estimate: float = math.inf  # as the stage search estimated it
    first_estimate: float = math.inf  # and with few shapes of meshes, if it began with those


class Planner:
    """Finds a plan for one traced step on one cluster."""

    def __init__(
        self,
        analysis: BatchAnalysis,
        cluster: Cluster,
        method: Method = AUTO,
        num_layers: int | None = None,
        rounds: int = 1,
    ) -> None:
        """`rounds`: of stages that are equal, each divided into as many parts and interleaved."""
        self.analysis, self.cluster, self.method, self.rounds = analysis, cluster, method, rounds
        self.graph = analysis.graph
        self.finisher = Finisher(analysis, cluster, method, num_layers)
        self.layering, self.stages = self.finisher.layering, self.finisher.stages
        self.prices = self.stages.prices
        self._best = _Best()
        self._schedule: ScheduleName = method.schedule or "1f1b"
        self._one_stage_fits = False  # with one microbatch
        self._deadline = time.monotonic() + (method.time_limit or math.inf)

    def plan(self, num_microbatches: int | None = None) -> _Found:
        """The best plan found and its programs.

        Raises:
          InfeasiblePlanError: nothing fits; says what is missing where.
          OutOfTime: before any plan was found.
        """
        with _uncollected():
            best: _Found | None = None
            try:
                for found in self._improving(num_microbatches):
                    best = found
            except OutOfTime:
                if best is None:
                    raise
            if best is None:
                raise self.stages.infeasible(self.graph.name)
            plan, lowered = best
            return dataclasses.replace(plan, notes=self._notes(lowered, plan.step_time)), lowered

    def any_plan(self, num_microbatches: int | None = None) -> Plan | None:
        """The first plan that fits, if one is found."""
        with _uncollected(), contextlib.suppress(OutOfTime, PlanError):
            for plan, _ in self._improving(num_microbatches):
                return plan
        return None

    def _improving(self, num_microbatches: int | None) -> Iterator[_Found]:
        """Plans, each better than all before."""
        fixed = num_microbatches if num_microbatches is not None else self.method.num_microbatches
        early, late, spare = self._candidates(fixed)
        best: _Found | None = None
        for found in itertools.chain(
            (self._better(m, stages, fixed) for m, stages in early),
            self._uniform(fixed),
            (self._better(m, stages, fixed) for m, stages in late),
        ):
            if found is not None:
                best = found
                yield found
        if best is not None and best[0].num_microbatches == 1:  # others may be in want of memory
            for found in (self._better(m, stages, fixed) for m, stages in spare):
                if found is not None:
                    best = found
                    yield found
        if fixed is None:
            for found in self._other_numbers(best):
                best = found
                yield found
        if best is not None and (finer := self._finer(best[0])) is not None:
            best = finer
            yield finer
        if best is not None:
            yield from self._interleaved(best[0], fixed)

    def _other_numbers(self, best: _Found | None) -> Iterator[_Found]:
        """Better plans with fewer microbatches, as long as that is a gain and memory is left; with more, if none fits.

        A pipeline's bubble grows as they become fewer; without one, the fewest that are likely to fit are the best.
        The groups of devices stay until it is known how many microbatches there are.
        """
        if self.cluster.num_devices == 1:
            yield from self._fewest_that_fit() if best is None else ()
            return
        stages = self.method.num_stages
        for m in self._many() if best is None else ():
            found = self._better(m, stages, None)
            if found is None and best is not None:
                break
            if found is not None:
                best = found
                yield found
        are_free = self.method.stages is None and self.method.mesh_shape is None
        last = None  # the number of the best plan on given groups
        while best is not None and (fewer := self._fewer(best[0])) is not None:
            if best[0].schedule != self._schedule:
                return  # see `_interleaved`
            groups = _groups(best[0]) if are_free else None
            fewest = fewer if groups is None else self._fewest(fewer, stages, _shapes_on(groups))
            best = self._better(fewest, stages, None, groups)
            if best is None and fewest < fewer:
                best, fewest = self._better(fewer, stages, None, groups), fewer
            if best is not None:
                last = fewest
                yield best
        if are_free and last is not None:
            found = self._better(last, stages, None)
            if found is not None:
                yield found

    def _fewest_that_fit(self) -> Iterator[_Found]:
        """Better plans with fewer and fewer microbatches on one device, where the fewest that fit are the best."""
        numbers = self._many()[::-1]
        low, high = 0, len(numbers)
        while low < high:
            middle = (low + high) // 2
            found = self._better(numbers[middle], 1, None)
            if found is None:
                low = middle + 1
            else:
                high = middle
                yield found

    def _interleaved(self, plan: Plan, fixed: int | None) -> Iterator[_Found]:
        """The stages of a plan of equal ones divided, and dealt out in turn: a pipeline that is filled more quickly.

        Then there may be fewer microbatches.
        """
        groups, m = _groups(plan), plan.num_microbatches
        stages, best = len(groups), len(plan.stages) // len(groups)
        if self.method.schedule is not None or self.method.num_stages is not None or len({n for _, n in groups}) > 1:
            return
        planner = self._with(dataclasses.replace(self.method, num_stages=stages))
        with contextlib.suppress(PlanError):  # the step has too few layers
            for rounds in self._rounds(stages, m):
                if rounds > best and _has_room(plan, rounds):
                    planner.rounds = rounds
                    found = planner._better(m, stages, None, groups)
                    if found is None:
                        break  # what is sent more often costs more than the bubble
                    best, plan = rounds, found[0]
                    yield found
            planner.rounds = best
            # Shardings that need less memory cost less than the bubble of so many stages.
            fewer = [n for n in self._many() if n < m and n % stages == 0]
            for n in fewer if best > 1 and fixed is None else ():
                found = planner._better(n, stages, None, groups)
                if found is None:
                    break
                yield found

    def _rounds(self, stages: int, m: int) -> Sequence[int]:
        """Numbers of rounds that may be worth it for so many stages, rising.

        Those of which each stage has as many layers of the loops over layers, if any.
        """
        if self.method.schedule is not None or m % stages:
            return ()
        lengths = self.layering.stacks.lengths
        even = [n for n in range(2, _MOST_PARTS // stages + 1) if all(length % (n * stages) == 0 for length in lengths)]
        numbers = even[: len(_ROUNDS)] if lengths and even else _ROUNDS
        bubble = (stages - 1) / (m + stages - 1)
        return [n for n in numbers if n * stages <= _MOST_PARTS and (1 - 1 / n) * bubble >= _WORTH_INTERLEAVING]

    def _dealt_out(self, m: int, meshes: Sequence[Mesh]) -> _Found | None:
        """The stages on these meshes divided into all rounds."""
        stages = tuple(StageMethod(1, mesh.shape) for mesh in meshes) * self.rounds
        method = dataclasses.replace(self.method, stages=stages, schedule="interleaved", mesh_shape=None)
        planner = self._with(method)
        with contextlib.suppress(PlanError):  # the step has too few layers
            return planner._finished(planner.layering.layered(m, True), planner._fixed_stages(), None)
        return None

    def _finer(self, plan: Plan) -> _Found | None:
        """A better plan of twice as many layers, where one stage takes much longer than others.

        On the same groups of devices, or hosts of their own.
        """
        seconds = [stage.forward + stage.backward for stage in plan.stages]
        if max(seconds) * len(seconds) <= _UNEVEN * sum(seconds) or self.method.stages is not None:
            return None
        if plan.schedule == "interleaved":
            return None
        m = plan.num_microbatches
        layers = self.layering.layered(m, True).num_layers
        planner = self._with(self.method, 2 * layers)
        finer = planner.layering.layered(m, True).num_layers
        if finer == layers or finer < len(plan.stages):
            return None  # each has one heavy operation, or stages that the search does not tell apart
        hosts = [(start, stop - start) for start, stop in itertools.pairwise(self.cluster.host_bounds)]
        groups = {host: (host[1],) for host in hosts if (host[1],) in self._shapes(self.cluster, *host)}
        return planner._better(m, self.method.num_stages, None, {**groups, **_groups(plan)})

    def _with(self, method: Method, num_layers: int | None = None, rounds: int = 1) -> Planner:
        """A planner by another method, or of so many layers, that looks for what is better than what this has found."""
        planner = Planner(self.analysis, self.cluster, method, num_layers, rounds)
        planner._best, planner._deadline = self._best, self._deadline
        planner.layering.whole_steps = self.layering.whole_steps
        return planner

    def _uniform(self, fixed: int | None) -> Iterator[_Found | None]:
        """Better plans of equal stages that the search cannot make of the layers that it tells apart."""
        hosts, method = self.cluster.hosts, self.method
        if len(hosts) == 1 or len(set(hosts)) > 1 or not self._divisors():
            return
        if method.num_stages is not None or method.mesh_shape is not None or method.axes:
            return
        for stages, shape, m in self._of_hosts(fixed) if len(hosts) > MAX_LAYERS else self._of_parts_of_hosts(fixed):
            equal = dataclasses.replace(method, num_stages=stages, mesh_shape=shape)
            for rounds in (*self._rounds(stages, m)[:1], 1):
                found = None
                with contextlib.suppress(PlanError):  # the step has too few layers
                    found = self._with(equal, rounds=rounds)._better(m, stages, None)
                if found is not None:
                    yield found
                    break

    def _of_hosts(self, fixed: int | None) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Numbers of stages of as many hosts each, their meshes' shape, numbers of microbatches."""
        count, width = len(self.cluster.hosts), self.cluster.hosts[0].num_devices
        lengths = self.layering.stacks.lengths
        even = [n for n in range(2, MAX_LAYERS + 1) if count % n == 0 and all(length % n == 0 for length in lengths)]
        for stages in (*even[-1:], *(n for n in range(MAX_LAYERS + 1, _MOST_STAGES + 1) if count % n == 0)):
            each = count // stages  # and of a microbatch's examples, so that each host has one
            m = fixed or max((n for n in self._divisors() if n * each <= self.analysis.batch_size), default=1)
            if stages > MAX_LAYERS or (fixed is None and m not in self._likely):  # others are searched anyway
                yield stages, (each, width) if each > 1 else (width,), m

    def _of_parts_of_hosts(self, fixed: int | None) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """The same of stages of an equal part of a host each."""
        count, width = len(self.cluster.hosts), self.cluster.hosts[0].num_devices
        m = fixed or self._likely[-1]
        layers = self.layering.layered(m, True).num_layers
        for parts in (n for n in range(2, width + 1) if width % n == 0 and n * count < layers):
            if layers % (parts * count):
                yield parts * count, (width // parts,), m

    def _fewer(self, plan: Plan) -> int | None:
        """A number of microbatches below the plan's for which there is memory, if its stages stay as they are."""
        m = plan.num_microbatches
        held: dict[tuple[int, ...], float] = defaultdict(float)  # activations of all stages on the same devices
        for stage in plan.stages:
            held[stage.mesh.devices] += stage.memory.activations
        numbers = [n for n in self._many() if n < m]
        for n in sorted(numbers) if len(plan.stages) == 1 else numbers[:1]:
            if all(
                s.memory.total + (m / n - 1) * (held[s.mesh.devices] + s.memory.temporaries) <= s.memory.capacity
                for s in plan.stages
            ):
                return n
        return None

    def _fewest(self, m: int, stages: int | None, shapes: ShapesFn) -> int:
        """The number of microbatches, from `m` down, until which fewer are a gain by the stage search alone.

        Where memory gets short the search does not know all that it costs: the gain must be larger.
        """
        best, below = m, self._best.estimate
        for n in (n for n in self._many() if n <= m):
            with contextlib.suppress(MicrobatchError):
                found = self._stages(self.layering.layered(n, stages != 1), stages, shapes, below)
                if found is not None and (found.step_time < (1 - _DEAR) * below or not self._is_tight(found)):
                    best, below = n, found.step_time
                    continue
            break
        return best

    def _better(self, m: int, stages: int | None, fixed: int | None, groups: _Groups | None = None) -> _Found | None:
        """A plan with so many microbatches and stages that is better than any before; on these groups of devices."""
        self._check_time()
        try:
            self.layering.layered(m, stages != 1)
        except MicrobatchError:
            if fixed is not None:
                raise
            return None
        found = self._plan_for(m, stages, groups)
        if found is None or found[0].step_time >= self._best.step_time:
            return None
        self._best.step_time = found[0].step_time
        self._one_stage_fits |= (m, len(found[0].stages)) == (1, 1)
        return found

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
                warnings.warn(f"{self.graph.name}, method {self.method.name!r}: {cause}", UnsplitWarning, stacklevel=2)
        return tuple(map(str, found))

    def _candidates(self, fixed: int | None) -> tuple[_Candidates, _Candidates, _Candidates]:
        """What to search over: before others, last, and where only one microbatch has been found to fit.

        What is likely to be good comes first: a stage that cannot be part of a better plan is not solved any more.
        """
        stages, hosts = self.method.num_stages, len(self.cluster.hosts)
        early: _Candidates = []
        numbers = self._likely if fixed is None else [fixed]
        spare: list[int] = []
        if numbers and stages is None and 1 < hosts <= MAX_LAYERS:
            if fixed is None and (fewest := self._fewest(numbers[0], hosts, self._shapes_of_hosts)) < numbers[0]:
                numbers, spare = [fewest], numbers  # which would need far more stages
            early.append((numbers[0], hosts))
        if fixed is not None:
            self.analysis.check(fixed)
            return early, [(fixed, stages)], []
        if stages in (None, 1) and self.method.min_stages == 1:
            early.append((1, 1))
        late: _Candidates = []
        if self.cluster.num_devices > 1 and stages != 1:
            late += [(m, stages) for m in numbers]
            if stages is not None:
                late.append((1, stages))
        return early, late, [(m, stages) for m in spare]

    @property
    def _likely(self) -> list[int]:
        """Numbers of microbatches of which a pipeline has one, probably, rising."""
        # With as many stages as there may be, a microbatch has an example for each host of a stage.
        most = min(8 * self.cluster.num_devices, MAX_LAYERS * self.analysis.batch_size // len(self.cluster.hosts))
        numbers = [m for m in self._many() if m <= most] or self._many()[-1:]
        return numbers[:2][::-1]

    def _divisors(self) -> list[int]:
        """Numbers of microbatches above 1 that the batch can be cut into."""
        most = self.analysis.most_microbatches
        return [m for m in range(2, most + 1) if most % m == 0]

    def _many(self) -> list[int]:
        """Numbers of microbatches where few do not fit, each about half of that before: the least memory first."""
        divisors = self._divisors()
        powers = [1 << k for k in range(1, max(divisors, default=0).bit_length())]
        return sorted({min(m for m in divisors if m >= power) for power in powers}, reverse=True)

    def _plan_for(self, m: int, num_stages: int | None, groups: _Groups | None) -> _Found | None:
        layered = self.layering.layered(m, num_stages != 1)
        first = found = None
        if self.method.stages is None:
            first, found = self._search(layered, num_stages, groups)
            if found is None:
                return None
            chosen = [(choice.span, choice.mesh) for choice in found.stages]
        else:
            chosen = self._fixed_stages()
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

    def _finished(
        self, layered: Layered, stages: Sequence[tuple[tuple[int, int], Mesh]], found: StagePlan | None
    ) -> _Found | None:
        """The plan of these layers on these meshes, which the stage search found if it did."""
        spans, meshes = zip(*stages, strict=True)
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
                other = self.finisher.finish(way, placed, meshes, self._schedule)
                if other is not None and (finished is None or other[0].step_time < finished[0].step_time):
                    finished = other
        if finished is None:
            return None
        return with_layers(finished[0], spans), finished[1]

    def _is_tight(self, found: StagePlan) -> bool:
        return any(stage.cost.memory > _FULL * self.prices.memory(stage.mesh) for stage in found.stages)

    def _search(
        self, layered: Layered, num_stages: int | None, groups: _Groups | None
    ) -> tuple[StagePlan | None, StagePlan | None]:
        """The best stages with few shapes of meshes, if it begins with those, and with any; None if they are no gain.

        Groups of devices are chosen with few shapes, then all logical shapes of those are tried: shapes change a
        stage's cost far less than the number of its devices does. On given groups of devices, if there are any, alone.
        """
        estimate = self._best.estimate
        if groups is not None:
            return None, self._stages(layered, num_stages, _shapes_on(groups), estimate)
        if self.method.mesh_shape is not None:
            found = self._stages(layered, num_stages, self._shapes, estimate)
            return found, found
        first = self._stages(layered, num_stages, self._first_shapes, self._best.first_estimate)
        if first is None:
            if num_stages != 1 and not self.stages.are_hints_in_the_way:
                return None, None
            return None, self._stages(layered, num_stages, self._shapes, estimate)
        chosen = {(c.mesh.devices[0], c.mesh.size) for c in first.stages}
        found = self._stages(
            layered, len(first.stages),
            lambda cluster, start, size: self._shapes(cluster, start, size) if (start, size) in chosen else (),
            min(first.step_time, estimate),
        )  # fmt: skip
        return first, found or (first if first.step_time < estimate else None)

    def _stages(self, layered: Layered, num_stages: int | None, shapes: ShapesFn, below: float) -> StagePlan | None:
        """The best stages on groups of devices of these shapes; None if they take `below` seconds or more."""
        if self.method.num_stages is None and num_stages is not None and num_stages > layered.num_layers:
            return None

        def in_time(ask: Callable[..., StageCost | None]) -> StageCostFn:
            def asked(span: tuple[int, int], mesh: Mesh, in_flight: int) -> StageCost | None:
                self._check_time()
                return ask(layered, self._schedule, span, mesh, in_flight)

            return asked

        return plan_stages(
            layered.num_layers, self.cluster, in_time(self.stages.cost), layered.step.num_microbatches,
            self._schedule, num_stages=num_stages, shapes=shapes,
            least_cost=functools.partial(self._least_cost, layered), bound_cost=in_time(self.stages.bound),
            alike=self.prices.group, rounds=self.rounds,
            overhead=functools.partial(self.stages.overhead, layered), below=below, gain=_LEAST_GAIN,
        )  # fmt: skip

    def _fixed_stages(self) -> list[tuple[tuple[int, int], Mesh]]:
        """As the method has them. Raises PlanError where the cluster's devices cannot be dealt out so."""
        found: list[tuple[tuple[int, int], Mesh]] = []
        layer = device = 0
        interleaved = self.method.schedule == "interleaved"
        for at, stage in enumerate(self.method.stages or ()):
            if interleaved and device == self.cluster.num_devices:
                device = 0  # the next round
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
        groups = len({mesh.devices for _, mesh in found})
        if len(found) % groups or any(mesh != found[at % groups][1] for at, (_, mesh) in enumerate(found)):
            raise PlanError(
                f"method {self.method.name!r}: each round of interleaved stages must have the mesh shapes of the first."
            )
        return found

    def _first_shapes(self, cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        """Those of one axis of several devices; where stages must have many hosts, those of hosts x width, too.

        All of them, where the method has none such.
        """
        width = cluster.hosts[cluster.host_of(start)].num_devices
        many = len(cluster.hosts) > MAX_LAYERS
        shapes = self._shapes(cluster, start, size)
        return tuple(s for s in shapes if 1 in s or len(s) == 1 or (many and s[1] == width)) or shapes

    def _shapes_of_hosts(self, cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        """The same of whole hosts, each by itself."""
        is_host = (start, start + size) in itertools.pairwise(cluster.host_bounds)
        return self._first_shapes(cluster, start, size) if is_host else ()

    def _shapes(self, cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
        shape = self.method.mesh_shape
        shapes = candidate_shapes(cluster, start, size)
        if shape is None:
            if shapes and "y" in self.method.model_axes and "x" not in self.method.model_axes:
                shapes = (*shapes, (1, size))  # all of them along y
            forced = self.method.axes
            return tuple(s for s in shapes if {a for a, n in zip("xyz", s, strict=False) if n > 1}.issuperset(forced))
        if shape == (-1,):
            shape = (size,)
        return (shape,) if shapes and math.prod(shape) == size else ()

    def _least_cost(self, layered: Layered, span: tuple[int, int], mesh: Mesh) -> StageCost | None:
        """What a span of layers costs at least on a mesh, if it may be part of a better plan."""
        m = layered.step.num_microbatches
        if span == (0, layered.num_layers) and (self.method.min_stages > 1 or (m > 1 and self._one_stage_fits)):
            return None  # one stage that fits with one microbatch gains nothing from several
        least = self.stages.least(layered, span, mesh)
        if least is None or m * least.per_microbatch >= self._best.step_time:
            return None  # the slowest stage alone would take longer than the best plan
        return least


def _has_room(plan: Plan, rounds: int) -> bool:
    """Whether there is memory for the microbatches in flight of so many rounds, if shardings stay as they are."""
    groups = len(_groups(plan))
    before = make_schedule(plan.schedule, len(plan.stages), plan.num_microbatches, groups)
    after = make_schedule("interleaved", rounds * groups, plan.num_microbatches, groups)
    for group in range(groups):
        parts = plan.stages[group::groups]
        now = sum(before.in_flight(group + i * groups) for i in range(len(parts))) / len(parts)
        then = sum(after.in_flight(group + i * groups) for i in range(rounds)) / rounds
        activations = sum(part.memory.activations for part in parts)
        if parts[0].memory.total + (then / now - 1) * activations > parts[0].memory.capacity:
            return False
    return True


def _shapes_on(groups: _Groups) -> ShapesFn:
    return lambda _, start, size: (groups[start, size],) if (start, size) in groups else ()


def _groups(plan: Plan) -> _Groups:
    return {(stage.mesh.devices[0], stage.mesh.size): stage.mesh.shape for stage in plan.stages}


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
