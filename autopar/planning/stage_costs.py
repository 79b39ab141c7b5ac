"""What stages cost: the sharding problems of spans of layers on meshes, solved once for all that look alike."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from autopar.errors import InfeasiblePlanError
from autopar.ir.graph import Block, Value
from autopar.ir.mesh import Mesh
from autopar.ir.method import Method
from autopar.ir.program import PlacedStep
from autopar.ir.schedule import Schedule, ScheduleName
from autopar.ir.sharding import Sharding
from autopar.ir.units import count_text
from autopar.passes.batch import BatchAnalysis
from autopar.passes.intra_op.limits import Limits, method_limits
from autopar.passes.intra_op.numbers import StageNumbers
from autopar.passes.intra_op.priced_stage import PricedStage
from autopar.passes.intra_op.shard import Contradiction, Remembered, StageProblem, StageSetting
from autopar.passes.intra_op.stage import Stage
from autopar.passes.intra_op.strategies import OptionsCache
from autopar.passes.solver.problem import Infeasible, Solution
from autopar.passes.stage_oracle import StageCost, in_flight
from autopar.passes.submeshes import mesh_at
from autopar.planning.layering import Layered
from autopar.planning.parts import Part
from autopar.planning.pricing import Prices

_SECONDS = 0.3  # the work limit of a solution: choices rarely improve after the first; its lower bounds do
_SLACK = 0.95  # of what spans of layers that were priced take, for those that were not
_FAR = 1.3  # times what there is
_FREE = 0.02  # relative: a solution that costs no more than this over what it does with any memory
_FUSED = 0.98  # of the time of kernels that end where a layer does


class StageCosts:
    """Costs of the stages of one step on one cluster, under one method."""

    def __init__(self, prices: Prices, method: Method, like: StageCosts | None = None) -> None:
        """`like`: those by another method with the same prices and objective, with which it shares what both need."""
        self.prices, self.method = prices, method
        self.pinned: Mapping[Value, tuple[int, Sharding]] = {}  # inputs that lie somewhere already: stage, sharding
        self._nearest: Infeasible | None = None  # the attempt that came closest to fitting, with where it was
        self._nearest_where = ""
        self._contradictions: dict[str, set[tuple[int, ...]]] = {}  # hint, the shapes of meshes that cannot have it
        self._limits: dict[Any, Limits] = {}
        self._options: dict[Any, OptionsCache] = {} if like is None else like._options
        self._remembered: dict[Any, Remembered] = {}
        # The first of each of these, by whatever method.
        self._first: WeakKeyDictionary[Layered, dict[Any, Remembered]] = (
            WeakKeyDictionary() if like is None else like._first
        )
        self._stages: dict[Any, Stage] = {}
        self._priced: dict[Any, PricedStage | None] = {}
        self._restricted: set[Any] = set()  # of these, those whose problems leave out shardings that might fit
        self._whole: dict[Any, StageProblem] = {}  # tied problems of all layers as one stage
        self._by_size: dict[tuple[int, int], list[PricedStage]] = {}  # numbers of nodes and edges
        self._overheads: dict[Any, dict[int, dict[int, float]]] = {}  # by layer and microbatches; see `overhead`
        self._meshes: dict[Any, Mesh] = {}  # a mesh of each of their keys
        # What these do not know yet: spans that were priced, and their seconds.
        self._unread: dict[Any, list[tuple[Layered, tuple[int, int], Mesh, float]]] = {}
        self._placed: dict[Any, tuple[Layered, PlacedStep]] = {}
        self._levels: dict[Layered, Sequence[Sequence[Block]]] = {}
        self._num_levels: dict[BatchAnalysis, int] = {}

    def cost(
        self, layered: Layered, schedule: ScheduleName, span: tuple[int, int], mesh: Mesh, in_flight: int
    ) -> StageCost | None:
        """What a span of layers costs on a mesh, whatever the other stages are; alike spans are solved once.

        With as much of the forward pass computed again in the backward pass as is quickest.
        """
        return self._quickest(layered, schedule, span, mesh, in_flight)[0]

    def level(self, layered: Layered, schedule: ScheduleName, span: tuple[int, int], mesh: Mesh, in_flight: int) -> int:
        """How much is computed again at that cost: which of the `levels`."""
        return self._quickest(layered, schedule, span, mesh, in_flight)[1]

    def levels(self, layered: Layered) -> Sequence[Sequence[Block]]:
        """What may be computed again in the backward pass: nothing first, then more and more of the forward pass."""
        if layered not in self._levels:
            is_vain = self.method.remat is False or self._num_levels.get(layered.analysis) == 1
            leaner = [] if is_vain else layered.leaner(self.prices.cluster.kinds_of([0])[0])
            self._levels[layered] = ((), *leaner)
            self._num_levels[layered.analysis] = 1 + len(leaner)  # the same for other numbers of microbatches
        return self._levels[layered]

    def _allowed(self, layered: Layered) -> Iterator[int]:
        """The levels that the method allows, found as they are asked for."""
        if self.method.remat is not True:
            yield 0
        levels = range(len(self.levels(layered)))
        yield from levels[-1:] if self.method.remat is True else levels[1:]

    def _quickest(
        self, layered: Layered, schedule: ScheduleName, span: tuple[int, int], mesh: Mesh, in_flight: int
    ) -> tuple[StageCost | None, int]:
        m = layered.step.num_microbatches
        best, best_level, seconds = None, 0, math.inf
        free = least = 0.0  # seconds at the level before, whatever memory it takes; and at least
        for level in self._allowed(layered):
            if best is not None and seconds * least <= free * self._least_of(layered, level, span, mesh):
                break  # to compute so much again takes longer
            cost = self._solved(layered, level, schedule, span, mesh, lambda priced: priced.solution(in_flight))
            if cost is None:
                continue
            if m * cost.per_microbatch + cost.per_step < seconds:
                best, best_level, seconds = cost, level, m * cost.per_microbatch + cost.per_step
            priced = self._priced_stage(layered, level, schedule, span, mesh)
            assert priced is not None
            free = priced.cheapest.cost
            if seconds <= (1 + _FREE) * free:
                break  # memory costs nothing
            least = self._least_of(layered, level, span, mesh)
        return best, best_level

    def _least_of(self, layered: Layered, level: int, span: tuple[int, int], mesh: Mesh) -> float:
        """Seconds per step of a span of layers that no sharding can beat."""
        loop, once = self._least_of_stage(layered, level, span, mesh)
        return layered.step.num_microbatches * loop + once

    def _least_of_stage(self, layered: Layered, level: int, span: tuple[int, int], mesh: Mesh) -> tuple[float, float]:
        """Of a span of layers as one stage per microbatch and once a step, without any communication."""
        way, placed, index = self._span_placed(layered, level, span)
        stage = self._stage(way, placed, index)
        return min(stage.least_seconds(kind, mesh.size) for kind in self.prices.cluster.kinds_of(mesh.devices))

    def bound(
        self, layered: Layered, schedule: ScheduleName, span: tuple[int, int], mesh: Mesh, in_flight: int
    ) -> StageCost | None:
        """What it costs whatever memory that takes; None if it cannot fit with so many microbatches in flight."""
        costs = (
            self._solved(layered, level, schedule, span, mesh, lambda priced: priced.bound(in_flight))
            for level in self._allowed(layered)
        )
        return next((cost for cost in costs if cost is not None), None)

    def _solved(
        self, layered: Layered, level: int, schedule: ScheduleName, span: tuple[int, int], mesh: Mesh,
        solve: Callable[[PricedStage], Solution],
    ) -> StageCost | None:  # fmt: skip
        priced = self._priced_stage(layered, level, schedule, span, mesh)
        if priced is None:
            return None
        try:
            solution = solve(priced)
        except Infeasible as error:
            self.note_infeasible(error, _where(layered, span, mesh))
            return None
        if level == 0:
            self._note_overhead(layered, span, mesh, priced.cheapest.cost)
        loop = priced.numbers.loop_seconds(solution)
        return StageCost(loop / layered.step.num_microbatches, max(0.0, solution.cost - loop), solution.peak)

    def _priced_stage(
        self, layered: Layered, level: int, schedule: ScheduleName, span: tuple[int, int], mesh: Mesh
    ) -> PricedStage | None:
        """None where hints contradict one another."""
        way, placed, stage = self._span_placed(layered, level, span)
        key = (placed, stage, self._kind_of_mesh(mesh))
        if key not in self._priced:
            m = layered.step.num_microbatches
            most = in_flight(schedule, m, min(layered.num_layers, self.prices.cluster.num_devices))
            try:
                problem = self.problem(way, placed, stage, mesh, tied=True)
            except Contradiction as error:
                self.note_contradiction(error)
                self._priced[key] = None
            else:
                self._priced[key] = priced = PricedStage(problem.numbers, most, _SECONDS)
                if problem.is_restricted:
                    self._restricted.add(key)
                if placed.num_stages == 1:
                    self._whole[key] = problem
                self._by_size.setdefault(_size(problem.numbers), []).append(priced)
        return self._priced[key]

    def are_far(self, layered: Layered, meshes: Sequence[Mesh], seconds: float) -> bool:
        """Whether all layers as one stage need far more than so many seconds a step, or than the memory, on all meshes.

        Then other shapes of these meshes are in vain, too. False if one was not asked for.
        """
        for at, level in enumerate(self._allowed(layered)):
            _, placed, stage = self._span_placed(layered, level, (0, layered.num_layers))
            for mesh in meshes:
                priced = self._priced.get((placed, stage, self._kind_of_mesh(mesh)))
                if priced is None and at > 0:
                    continue  # the level before needs no more memory than there is
                if priced is None:
                    return False
                try:
                    least = priced.numbers.least_bytes(1)
                    if least <= _FAR * self.prices.memory(mesh) and priced.known_cost <= _FAR * seconds:
                        return False
                except Infeasible:  # whatever the memory
                    return False
        return True

    def fewest_in_one_stage(self, layered: Layered, meshes: Sequence[Mesh]) -> float:
        """A bound on the microbatches with which all layers as one stage fit, for no fewer than `layered` has.

        It is for these meshes, and for others that need no less than 1 / `_FAR` of the memory which these do. 0 where
        nothing is known; infinite where the state alone does not fit. A number of microbatches that was asked for needs
        at least some memory beside the state, and with more of them that memory at most shrinks in proportion.
        """
        if not self.method.has(Part.BOUND_OF_MEMORY):
            return 0.0
        span, m = (0, layered.num_layers), layered.step.num_microbatches
        fewest = math.inf
        for mesh in meshes:
            least = math.inf
            for level in self._allowed(layered):
                _, placed, stage = self._span_placed(layered, level, span)
                key = placed, stage, self._kind_of_mesh(mesh)
                if key not in self._priced:
                    return 0.0
                if (priced := self._priced[key]) is not None:
                    least = min(least, priced.numbers.least_bytes(1))
            state = self._state_bytes(layered, span, mesh)
            room = _FAR * self.prices.memory(mesh) - state
            if room > 0:
                fewest = min(fewest, m * (least - state) / room)
        return fewest

    def known_bound(self, layered: Layered, mesh: Mesh, gap: float) -> float:
        """Seconds per step that all layers as one stage on a mesh take at least, however they are sharded.

        Within this share of the best, if the solver gets so far; 0 if that stage was not asked for, or not with all
        shardings, or fits in no way, as with more microbatches it may.
        """
        _, placed, stage = self._span_placed(layered, 0, (0, layered.num_layers))
        key = (placed, stage, self._kind_of_mesh(mesh))
        priced = self._priced.get(key)
        if priced is not None and key not in self._restricted:
            with contextlib.suppress(Infeasible):
                return priced.lower_bound(gap)
        return 0.0

    def least_of_one(self, layered: Layered, mesh: Mesh) -> float:
        """Seconds per step that all layers as one stage on a mesh take at least, were there no communication."""
        return self._least_of(layered, next(self._allowed(layered)), (0, layered.num_layers), mesh)

    def in_any_memory(self, layered: Layered, mesh: Mesh) -> float:
        """Seconds per step of all layers as one stage on a mesh, about, whatever memory that takes.

        Infinite where hints contradict one another, or what the method fixes does.
        """
        level = next(self._allowed(layered))
        priced = self._priced_stage(layered, level, "1f1b", (0, layered.num_layers), mesh)
        with contextlib.suppress(Infeasible):
            return math.inf if priced is None else priced.cheapest.cost
        return math.inf

    def solution(self, numbers: StageNumbers, in_flight: int) -> Solution | None:
        """That of a problem with the same numbers which was priced, if it is within this one's memory."""
        for priced in self._by_size.get(_size(numbers), ()):
            if numbers.is_like(priced.numbers):
                with contextlib.suppress(Infeasible):
                    solution = priced.solution(in_flight)
                    if numbers.memory_limit is None or solution.peak <= numbers.memory_limit:
                        return solution
        return None

    def least(self, layered: Layered, span: tuple[int, int], mesh: Mesh) -> StageCost | None:
        """What no sharding of a span of layers can beat; None if it fits under none."""
        state, memory = self._state_bytes(layered, span, mesh), self.prices.memory(mesh)
        if state > memory:
            self.note_infeasible(Infeasible(state, memory, proved=True), _where(layered, span, mesh))
            return None
        # Kernels across the borders of all layers may save much; of fewer layers it would take as many stages to know.
        is_whole = span == (0, layered.num_layers)
        seconds = self._least_of_stage(layered, 0, span, mesh) if is_whole else self._least_seconds(layered, span, mesh)
        return StageCost(*seconds, state)

    def _state_bytes(self, layered: Layered, span: tuple[int, int], mesh: Mesh) -> float:
        """Bytes of the state of a span of layers on each device of a mesh, at least."""
        if span == (0, layered.num_layers):
            stages = [self._stage(*self._span_placed(layered, 0, span))]
        else:
            stages = self._layers(layered, span)
        return sum(stage.state_bytes(mesh.shape) for stage in stages)

    def _least_seconds(self, layered: Layered, span: tuple[int, int], mesh: Mesh) -> tuple[float, float]:
        """Of a span of layers per microbatch and once a step, without any communication.

        It is that of the layers by themselves: what kernels across their borders save is far less than `_FUSED`.
        """
        kinds = self.prices.cluster.kinds_of(mesh.devices)
        loop = once = 0.0
        for stage in self._layers(layered, span):
            least = [stage.least_seconds(kind, mesh.size) for kind in kinds]
            loop += min(seconds for seconds, _ in least)
            once += min(seconds for _, seconds in least)
        return _FUSED * loop, _FUSED * once

    def least_of_pipelines(self, layered: Layered) -> float:
        """Seconds per step that no pipeline of all devices beats, were there no bubble and no communication."""
        loop, once = self._least_seconds(
            layered, (0, layered.num_layers), mesh_at(0, (self.prices.cluster.num_devices,))
        )
        return layered.step.num_microbatches * loop + once

    def _layers(self, layered: Layered, span: tuple[int, int]) -> list[Stage]:
        """The layers of a span, each as a stage of its own."""
        first = [layered.spans.first_alike((layer, layer + 1))[0] for layer in range(*span)]
        return [self._stage(layered, layered.finest, layer) for layer in first]

    def _note_overhead(self, layered: Layered, span: tuple[int, int], mesh: Mesh, seconds: float) -> None:
        key = self._kind_of_mesh(mesh), layered.num_layers
        self._unread.setdefault(key, []).append((layered, span, mesh, seconds))
        self._meshes.setdefault(key, mesh)

    def _read_overheads(self, key: Hashable) -> bool:
        """Whether anything is known of such meshes, and so many layers."""
        for layered, span, mesh, seconds in self._unread.pop(key, ()):
            m = layered.step.num_microbatches
            loop, once = self._least_seconds(layered, span, mesh)
            of_layers = self._overheads.setdefault(key, {})
            for layer in range(*span):
                first, _ = layered.spans.first_alike((layer, layer + 1))
                known = of_layers.setdefault(first, {})
                known[m] = min(known.get(m, math.inf), seconds / (m * loop + once))
        return key in self._overheads

    def overhead(self, layered: Layered, layer: int, mesh: Mesh) -> tuple[float, float]:
        """The least seconds of a layer, and how many times those such take on such a mesh, by spans that were priced.

        Before any was on such a mesh, it is as on the largest smaller one like it, and before any was on one of these,
        each layer weighs the same: what is sent takes no smaller share of the time of more devices, mostly.
        What is done once for each microbatch is done more often with more of them, and what is done for each example
        not less often with fewer.
        """
        key = self._kind_of_mesh(mesh), layered.num_layers
        if not self._read_overheads(key):
            smaller = self._largest_smaller(mesh, layered.num_layers)
            if smaller is None:
                return 1.0, 1.0
            key = smaller
            self._read_overheads(key)
        m = layered.step.num_microbatches
        first, _ = layered.spans.first_alike((layer, layer + 1))
        known = self._overheads[key].get(first, {})
        times = [known[m]] if m in known else [1 + (ratio - 1) * min(1.0, m / n) for n, ratio in known.items()]
        loop, once = self._least_seconds(layered, (layer, layer + 1), mesh)
        return m * loop + once, max(1.0, _SLACK * max(times, default=1.0))

    def _largest_smaller(self, mesh: Mesh, num_layers: int) -> Any:
        """The key of what is known of spans on fewer devices of such hosts, with equal axes but for the first."""
        hosts = self.prices.kinds_of_hosts(mesh)
        smaller = {
            key: other.size
            for key, other in self._meshes.items()
            if key[1] == num_layers
            and other.size < mesh.size
            and (len(other.shape), other.shape[1:]) == (len(mesh.shape), mesh.shape[1:])
            and self.prices.kinds_of_hosts(other) == hosts
        }
        return max(smaller, key=lambda key: smaller[key], default=None)

    def _kind_of_mesh(self, mesh: Mesh) -> Hashable:
        """Equal for meshes on which the same stage costs the same."""
        return mesh.shape, self.prices.surroundings(mesh)

    def _stage(self, layered: Layered, placed: PlacedStep, index: int) -> Stage:
        xla = self.prices.cluster.xla
        pinned = {v: s for v, (at, s) in self.pinned.items() if at == index}
        if not pinned:
            return layered.stage(placed, index, xla)
        key = (placed, index)
        if key not in self._stages:
            self._stages[key] = Stage(placed, index, layered.rules, pinned, xla, layered.traffic)
        return self._stages[key]

    def note_infeasible(self, error: Infeasible, where: str) -> None:
        if self._nearest is None or error.smallest_peak < self._nearest.smallest_peak:
            self._nearest, self._nearest_where = error, where

    @property
    def are_hints_in_the_way(self) -> bool:
        """Whether some mesh was given up because of a hint."""
        return bool(self._contradictions)

    def note_contradiction(self, error: Contradiction) -> None:
        self._contradictions.setdefault(error.what, set()).add(error.shape)

    def _span_placed(self, layered: Layered, level: int, span: tuple[int, int]) -> tuple[Layered, PlacedStep, int]:
        """The pipeline of what comes before a span, the span, and what comes after it; and the span's stage.

        With what the span computes again at this level. Of spans that are alike it is the first.
        """
        is_whole = span == (0, layered.num_layers)  # then no layer need be told from another
        first = span if is_whole else layered.spans.first_alike(span)
        key: Any = (layered, first)
        if level:
            start, stop = np.searchsorted(layered.layers, span).tolist()
            parts = [block.within(start, stop) for block in self.levels(layered)[level]]
            key = (*key, tuple(block.moved(-start) for block in parts if block.start < block.stop))
        if key not in self._placed:
            first = span if level else first  # one whose blocks lie alike
            way = layered.recomputing_at([first], [self.levels(layered)[level]]) if level else layered
            self._placed[key] = way, way.placed(sorted({*first} - {0, layered.num_layers}))
        return *self._placed[key], 1 if span[0] > 0 else 0

    def problem(
        self, layered: Layered, placed: PlacedStep, stage: int, mesh: Mesh, tied: bool = False, withheld: float = 0.0,
        rows: Schedule | None = None,
    ) -> StageProblem:  # fmt: skip
        """The sharding problem of one stage on a mesh, without so many bytes of each device's memory.

        `rows`: the schedule, where it is known and holds values for different times.
        """
        resharder, price = self.prices.resharder(mesh)
        options = self._options.get((mesh.shape, mesh.axes))
        if options is None:
            options = self._options[mesh.shape, mesh.axes] = OptionsCache(mesh)
        limits = self._limits.get((layered, mesh.shape))
        if limits is None:
            limits = method_limits(self.method, layered.step, mesh, lambda: layered.examples, lambda: layered.sequences)
            self._limits[layered, mesh.shape] = limits
        key = (layered, mesh.shape, self.prices.surroundings(mesh))
        if key not in self._remembered:
            first = self._first.setdefault(layered, {})
            self._remembered[key] = Remembered(options, first.get(key[1:]))
            first.setdefault(key[1:], self._remembered[key])
        setting = StageSetting(
            self._stage(layered, placed, stage), mesh, self.prices.kind(mesh), resharder, price,
            self.prices.link_bandwidth(mesh), limits, self.prices.memory(mesh) - withheld, self._remembered[key], tied,
            rows.shares(stage) if rows is not None and rows.weights_apart else {}, self.method.objective,
            self.method.has(Part.HIDDEN_COLLECTIVES),
        )  # fmt: skip
        return StageProblem(setting)

    def tied_problem(
        self, layered: Layered, placed: PlacedStep, stage: int, mesh: Mesh, withheld: float, rows: Schedule
    ) -> StageProblem:
        """The `problem` where layers that are alike choose alike."""
        known = self._whole.get((placed, stage, self._kind_of_mesh(mesh)))
        if known is not None and not withheld:
            return known
        return self.problem(layered, placed, stage, mesh, tied=True, withheld=withheld, rows=rows)

    def infeasible(self, function: str) -> InfeasiblePlanError:
        """What to raise where no plan was found: the attempt that came closest, with where it was."""
        cluster, method = self.prices.cluster, self.method
        conflicts = ""
        if self._contradictions:
            what, shapes = next(iter(self._contradictions.items()))
            tried = ", ".join(map(str, sorted(shapes)[:4])) + (", .." if len(shapes) > 4 else "")
            conflicts = f"{what}, cannot be had under method {method.name!r} on meshes of the shapes tried ({tried})"
        if self._nearest is None and conflicts:
            return InfeasiblePlanError(
                f"{function} has no plan on cluster {cluster.name!r} ({cluster.num_devices} devices): {conflicts}. "
                "Change the hint, fix a mesh shape that has its axes and divides the array, or leave the method free."
            )
        if self._nearest is None:
            fixed = {"mesh shape": method.mesh_shape, "number of stages": method.num_stages}
            wanted = " and ".join(f"{name} {value}" for name, value in fixed.items() if value is not None)
            return InfeasiblePlanError(
                f"method {method.name!r} has no plan for {function} on cluster {cluster.name!r} "
                f"({count_text(cluster.num_devices, 'device')}): the devices cannot be dealt out as it wants"
                + (f" ({wanted})." if wanted else ".")
            )
        if self._nearest.proved and math.isinf(self._nearest.smallest_peak):
            hint = (
                " Leave sequence_parallel open: with False, what a product leaves in pieces is never gathered, as the "
                "parts of one projection to queries, keys and values would have to be."
            )
            return InfeasiblePlanError(
                f"{function} has no plan of method {method.name!r} on cluster {cluster.name!r}, whatever the memory: "
                f"what the method fixes excludes every sharding of {self._nearest_where}."
                + (hint if method.sequence_parallel is False else "")
            )
        limit = self._nearest.limit or 0.0
        return InfeasiblePlanError(
            f"{function} fits on cluster {cluster.name!r} under no plan of method {method.name!r}: "
            f"{self._nearest_where} needs at least {self._nearest.smallest_peak / 2**20:.1f} MiB per device, "
            f"{limit / 2**20:.1f} MiB are there. Use more devices, devices with more memory, a smaller batch, more "
            "microbatches, or jax.checkpoint in the model." + (f" Besides, {conflicts}." if conflicts else "")
        )


def _size(numbers: StageNumbers) -> tuple[int, int]:
    return len(numbers.costs), len(numbers.edges)


def _where(layered: Layered, span: tuple[int, int], mesh: Mesh) -> str:
    return f"a stage of layers {span[0]} to {span[1] - 1} of {layered.num_layers} on {mesh.size} devices"
