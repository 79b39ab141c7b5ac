"""From decisions to a plan: where stages and meshes are chosen, their shardings are solved, lowered and priced."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from autopar.errors import InternalError, PlanMismatchError
from autopar.ir.graph import Block, LeafCut, Phase, Value
from autopar.ir.local import StageSharding
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan, StageMemory, StagePlan
from autopar.ir.program import PlacedStep
from autopar.ir.schedule import Schedule, ScheduleName, schedule_for
from autopar.ir.sharding import Sharding
from autopar.ir.strategy import strategy_of
from autopar.passes.batch import BatchAnalysis
from autopar.passes.intra_op.numbers import StageNumbers
from autopar.passes.intra_op.priced_stage import PATIENCE
from autopar.passes.intra_op.shard import Contradiction, StageProblem
from autopar.passes.lower import LoweredStep, assemble, keeps_gathered
from autopar.passes.pipeline import place
from autopar.passes.solver.problem import Infeasible, Problem, Solution
from autopar.passes.solver.solve import solve
from autopar.planning.layering import Layered, Layering
from autopar.planning.parts import Part
from autopar.planning.pricing import Prices
from autopar.planning.stage_costs import StageCosts

_SECONDS = 1.0  # the work limit of a solution
_MORE_SECONDS = 4.0  # .. of one that may be far from the best
_WIDE_GAP = 0.5  # relative to the bound: so far
_GOOD_GAP = 0.002  # relative: what is better by less is not looked for
_CLOSE = 0.05  # relative: a solution of the search this close to its bound is good enough to begin with
_FEWER = 0.7  # so many nodes, as a share, tell a problem with ties from one without
_MARGIN = 0.005  # of the memory: another choice has another excess
_NARROW = 0.1  # of the memory: between too few bytes and too many so close, what fits is not looked for
_MOST_ROUNDS = 5  # in which a stage is solved with less memory, and with more again
_WORTH = 0.1  # relative: a stage is solved again with more memory where so much of the time could be saved by that


@dataclasses.dataclass(frozen=True)
class LeafHome:
    """Where an argument leaf lies: the stage and the sharding of each of its pieces."""

    at: tuple[tuple[int, Sharding], ...]
    cut: LeafCut | None  # None: it is whole


_Known = tuple[StageNumbers, int, Solution]  # a problem, the microbatches in flight


class _Withheld:
    """How many bytes of each stage's memory are withheld from the solver, which counts memory at a few times only.

    What is not counted differs between solutions: it is looked for between too few bytes and enough.
    """

    def __init__(self, nbytes: Sequence[float]) -> None:
        self.nbytes = list(nbytes)
        self._too_few: dict[int, tuple[float, float]] = {}  # bytes, and the seconds of what then needed too much
        self._enough: dict[int, float] = {}  # or too many for anything to fit
        self._granted: set[int] = set()

    def grant(self, stage: int, memory: float, others: float, least: float) -> bool:
        """Withhold no more of a stage's memory than what others on its devices need, once; whether it is less then.

        As where it needs more than the equal part of these devices' memory that it begins with. Its price says whether
        there is as much.

        Args:
          stage: its number.
          memory: bytes of its devices, each.
          others: bytes that the solver counts of the others.
          least: bytes that the stage needs in any case.
        """
        withheld = max(0.0, min(others, memory - (1 + _MARGIN) * least))
        if stage in self._granted or withheld >= self.nbytes[stage]:
            return False
        self._granted.add(stage)
        self.nbytes[stage] = withheld
        return True

    def take(self, stage: int, needed: StageMemory, solution: Solution) -> None:
        """Withhold more of a stage's memory: with this solution it needs more than there is."""
        # As long as it may have as much as is counted of this solution, that is the solution again.
        self._too_few[stage] = max(self.nbytes[stage], needed.capacity - solution.peak), solution.cost
        uncounted, excess = needed.total - solution.peak, needed.total - needed.capacity
        more = max(uncounted, self.nbytes[stage] + excess) + _MARGIN * needed.capacity
        if stage in self._enough:
            more = min(more, (self._too_few[stage][0] + self._enough[stage]) / 2)
        self.nbytes[stage] = more

    def release(self, stage: int, capacity: float) -> bool:
        """Withhold less of a stage's memory, as nothing fits into the rest; whether there is anything to be tried."""
        if stage not in self._too_few:
            return False
        self._enough[stage] = self.nbytes[stage]
        too_few, _ = self._too_few[stage]
        self.nbytes[stage] = (too_few + self._enough[stage]) / 2
        return self._enough[stage] - too_few > _NARROW * capacity

    def give_back(self, needs: Mapping[int, tuple[StageMemory, Solution]]) -> dict[int, float]:
        """Withhold less of stages that need less than there is, and how many seconds could be saved by that at most."""
        saved: dict[int, float] = {}
        for stage, (needed, solution) in needs.items():
            if stage not in self._too_few:
                continue
            too_few, least = self._too_few[stage]
            enough = self._enough[stage] = self.nbytes[stage]
            fewer = needed.total - solution.peak + _MARGIN * needed.capacity
            if fewer <= too_few:
                fewer = (too_few + enough) / 2
            if fewer < enough - _MARGIN * needed.capacity:
                self.nbytes[stage] = fewer
                saved[stage] = solution.cost - least
        return saved


class TooSlow(Exception):
    """A plan would take longer than what is to be beaten."""


class Restored(NamedTuple):
    """A plan whose stages were known, with its programs and the stages as its layers."""

    plan: Plan
    lowered: LoweredStep
    layered: Layered


class Finisher:
    """Makes plans of one traced step on one cluster whose stages are known."""

    def __init__(
        self, analysis: BatchAnalysis, cluster: Cluster, method: Method = AUTO, num_layers: int | None = None,
        like: Finisher | None = None,
    ) -> None:  # fmt: skip
        """`like`: another one for the same step and cluster, with which it shares what both need."""
        self.graph, self.method = analysis.graph, method
        self.layering: Layering = Layering(
            analysis, cluster, method, num_layers, None if like is None else like.layering
        )
        if like is not None and like.method.memory_limit == method.memory_limit:
            prices = like.stages.prices
            costs = like.stages if like.method.objective == method.objective else None
        else:
            prices = Prices(cluster, method.memory_limit, least_sum_bytes=self.graph.least_sum_bytes)
            costs = None
        self.stages: StageCosts = StageCosts(prices, method, costs)

    def finish(
        self, layered: Layered, placed: PlacedStep, meshes: Sequence[Mesh], schedule: ScheduleName,
        reshard_after_forward: Collection[int] = (), below: float = math.inf,
    ) -> tuple[Plan, LoweredStep] | None:  # fmt: skip
        """Solve the chosen stages as they really are, lower them and price what will run; None if it does not fit.

        The solver counts memory at a few times only: a stage that needs more than there is, is solved again with less,
        or gathers parameters again, whichever is quicker. One that is much slower for that, and then needs far less
        than there is, is solved again with some of the memory back. Stages that have to are `reshard_after_forward`.

        Raises:
          TooSlow: nothing that fits was found, and what does not takes `below` seconds per step or more as it is.
        """
        rows = schedule_for(schedule, meshes, layered.step.num_microbatches)
        # Interleaved stages begin with an equal part of their devices' memory each.
        rounds = placed.num_stages // rows.num_groups
        always = set(range(len(meshes)) if self.method.zero == 3 else reshard_after_forward)
        best: tuple[Plan, LoweredStep] | None = None  # of those that fit
        unfit = math.inf  # seconds per step of what needs more memory than there is
        withheld = _Withheld([(1 - 1 / rounds) * self.stages.prices.memory(mesh) for mesh in meshes])
        solved: dict[int, tuple[StageSharding, Solution]] = {}
        known: list[_Known] = []
        for _ in range(_MOST_ROUNDS if self.method.has(Part.LESS_MEMORY) else 1):
            try:
                self._solve_stages(layered, placed, meshes, rows, withheld, solved, known)
            except Infeasible as error:
                stage = max({*range(len(meshes))} - solved.keys())
                is_far = best is None or best[0].step_time > (1 + _WORTH) * unfit
                if is_far and withheld.release(stage, self.stages.prices.memory(meshes[stage])):
                    continue
                self.stages.note_infeasible(error, f"stage {stage} of {placed.num_stages}")
                return best
            except Contradiction as error:
                self.stages.note_contradiction(error)
                return best
            objective = sum(solution.cost for _, solution in solved.values())
            bound = sum(max(0.0, solution.lower_bound) for _, solution in solved.values())  # no cost is negative
            gap = max(0.0, (objective - bound) / objective) if objective > 0 else 0.0
            chosen = [solved[stage][0] for stage in range(len(meshes))]
            lowered, plan = self._lowered(layered, placed, chosen, always, schedule, bound, gap)
            above = _above(plan)
            if not above:
                if best is None or plan.step_time <= best[0].step_time:
                    best = plan, lowered
                saved = withheld.give_back({stage: (plan.stages[stage].memory, s) for stage, (_, s) in solved.items()})
                saving = sum(saved.values())
                if saving <= _WORTH * objective or best[0].step_time - saving >= below:
                    return best
                for stage in saved:
                    del solved[stage]
                continue
            unfit = plan.step_time
            if unfit >= below and self.method.has(Part.BOUND_OF_PRICE):
                if best is None:
                    raise TooSlow
                return best
            leaner_stages = {stage for stage in above if stage not in always and keeps_gathered(lowered, stage)}
            if leaner_stages and best is None and self.method.has(Part.RESHARD_AFTER_FORWARD):
                leaner, leaner_plan = self._lowered(
                    layered, placed, chosen, always | leaner_stages, schedule, bound, gap
                )
                if not _above(leaner_plan):
                    best = leaner_plan, leaner
                    if leaner_plan.step_time <= (1 + _GOOD_GAP) * unfit:
                        return best
            for stage, needed in above.items():
                withheld.take(stage, needed, solved.pop(stage)[1])
        if best is not None:
            return best
        stage, needed = max(above.items(), key=lambda item: item[1].total)
        short = Infeasible(needed.total, needed.capacity, proved=False)
        self.stages.note_infeasible(short, f"stage {stage} of {placed.num_stages}")
        return None

    def _solve_stages(
        self, layered: Layered, placed: PlacedStep, meshes: Sequence[Mesh], rows: Schedule, withheld: _Withheld,
        solved: dict[int, tuple[StageSharding, Solution]], known: list[_Known],
    ) -> None:  # fmt: skip
        """Solve the stages that are not `solved`, those with the fewest microbatches in flight, the last, first.

        Raises Infeasible, Contradiction: of the last stage that is not solved.
        """
        for stage, mesh in reversed([*enumerate(meshes)]):
            if stage in solved:
                continue
            memory = self.stages.prices.memory(mesh)
            try:
                found = self._solved(layered, placed, stage, mesh, rows, withheld.nbytes[stage], known)
            except Infeasible as error:
                others = [i for i, other in enumerate(meshes) if i != stage and other.devices == mesh.devices]
                counted = sum(solved[i][1].peak for i in others if i in solved) or memory  # as little as there can be
                if not others or not withheld.grant(stage, memory, counted, error.smallest_peak):
                    raise
                found = self._solved(layered, placed, stage, mesh, rows, withheld.nbytes[stage], known)
            problem, solution = found
            solved[stage] = problem.read(solution), solution

    def _lowered(
        self, layered: Layered, placed: PlacedStep, shardings: Sequence[StageSharding],
        reshard_after_forward: Collection[int], schedule: ScheduleName, bound: float, gap: float,
    ) -> tuple[LoweredStep, Plan]:  # fmt: skip
        chosen = [
            dataclasses.replace(sharding, reshard_after_forward=i in reshard_after_forward)
            for i, sharding in enumerate(shardings)
        ]
        lowered = self.lower(layered, placed, chosen)
        return lowered, self._price(layered, lowered, schedule, bound, gap)

    def _solved(
        self, layered: Layered, placed: PlacedStep, stage: int, mesh: Mesh, rows: Schedule, withheld: float,
        known: list[_Known],
    ) -> tuple[StageProblem, Solution]:  # fmt: skip
        """A stage's problem without so many bytes of each device's memory, and a choice; raises Infeasible.

        Where layers are alike, it is searched from where they choose alike. Of `known` problems, to which this one is
        added, one with the same numbers and more memory may have a solution that fits: it is as good here.
        """
        memory, in_flight = self.stages.prices.memory(mesh), rows.in_flight(stage)
        if withheld >= memory:
            raise Infeasible(withheld, memory, proved=False)
        problem = self.stages.problem(layered, placed, stage, mesh, withheld=withheld, rows=rows)
        numbers = problem.numbers
        for other, fewer, solution in known if self.method.has(Part.KNOWN_SOLUTIONS) else ():
            if fewer <= in_flight and numbers.is_like(other):
                peak = numbers.peak_bytes(solution.choice, in_flight)
                if numbers.memory_limit is None or peak <= numbers.memory_limit:
                    return problem, dataclasses.replace(solution, peak=peak)
        tied = self.stages.tied_problem(layered, placed, stage, mesh, withheld, rows)
        start = None
        if self.method.has(Part.TIED_START) and len(tied.numbers.costs) < _FEWER * len(numbers.costs):
            with contextlib.suppress(Infeasible):
                alike = self.stages.solution(tied.numbers, in_flight)
                if alike is None or alike.gap > _CLOSE:
                    alike = _solve(tied.numbers.problem(in_flight), start=None if alike is None else alike.choice)
                start = problem.untied(tied, alike.choice)
        # From a tied choice, annealing and CP-SAT were never seen to find what messages and eliminations had not.
        solution = _solve(numbers.problem(in_flight), start=start, polish=start is None)
        known.append((numbers, in_flight, solution))
        return problem, solution

    def follow(self, like: Sequence[StagePlan], num_microbatches: int, lies: Mapping[int, LeafHome]) -> Restored:
        """Plan on the meshes of stages where some argument leaves lie: no search, equations go where parameters are."""
        meshes = [stage.mesh for stage in like]
        cuts = {i: home.cut for i, home in lies.items() if home.cut is not None}
        analysis = self.layering.cut(cuts, frozenset(lies) - cuts.keys())
        analysis.check(num_microbatches)
        graph = analysis.graph
        self.stages.pinned = {
            graph.inputs[k]: at for i, home in lies.items() for k, at in zip(graph.inputs_of[i], home.at, strict=True)
        }
        step, rules = self.layering.in_microbatches(analysis, num_microbatches)
        homes = {v: stage for v, (stage, _) in self.stages.pinned.items()}
        at: dict[Value, int] = dict(homes)
        stages: dict[int, int] = {}
        for eqn in step.equations:
            stage = max((at[v] for v in eqn.values if v in at), default=0)
            if eqn.phase is Phase.FORWARD or eqn.id in step.replicable:
                at.update(dict.fromkeys(eqn.outputs, stage))
            if eqn.phase is Phase.FORWARD and eqn.id not in step.replicable:
                stages[eqn.id] = stage
        layered = Layered(analysis, step, rules, tuple(stages[e.id] for e in step.forward), len(meshes))
        spans = [(i, i + 1) for i in range(len(meshes))]
        layered = layered.recomputing_at(spans, self._recomputed(layered, like))
        placed = place(layered.step, stages, len(meshes), homes, again=layered.repeated)
        interleaved = len({mesh.devices for mesh in meshes}) < len(meshes)
        reshard_after_forward = [i for i, stage in enumerate(like) if stage.reshard_after_forward]
        finished = self.finish(layered, placed, meshes, "interleaved" if interleaved else "1f1b", reshard_after_forward)
        if finished is None:
            raise self.stages.infeasible(self.graph.name)
        return Restored(*finished, layered)

    def _recomputed(self, layered: Layered, like: Sequence[StagePlan]) -> list[Sequence[Block]]:
        """What each stage computes again where one of these does: nothing, some, or as much as can be."""
        if not any(stage.recomputed for stage in like):
            return [()] * len(like)
        levels = self.stages.levels(layered)
        saves = [any(block.saved for block in stage.recomputed) for stage in like]
        return [
            () if not stage.recomputed else levels[-2] if some and len(levels) > 2 else levels[-1]
            for stage, some in zip(like, saves, strict=True)
        ]

    def layered(self, plan: Plan) -> Layered:
        """The step with the stages of a plan as its layers, and with what they compute again."""
        analysis = self.layering.cut(plan.leaf_cuts)
        step, rules = self.layering.in_microbatches(analysis, plan.num_microbatches)
        layers = tuple(
            next((k for k, stage in enumerate(plan.stages) if stage.equations[0] <= i < stage.equations[1]), 0)
            for i in range(len(step.forward))
        )
        layered = Layered(analysis, step, rules, layers, len(plan.stages))
        return layered.recomputing([block for stage in plan.stages for block in stage.recomputed])

    def restore(self, plan: Plan) -> Restored:
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
        try:
            layered, placed = self.layering.placed(self.layered(plan), range(1, len(plan.stages)), plan.schedule)
            values = {v.id: v for v in _all_values(placed)}
            shardings = [
                StageSharding(
                    stage.mesh,
                    {(p, e): strategy_of(s, len(layered.rules[e].factors)) for (p, e), s in stage.strategies.items()},
                    {(p, values[v]): s for (p, v), s in stage.layouts.items()}, stage.forward, plan.lower_bound,
                    stage.reshard_after_forward,
                )
                for stage in plan.stages
            ]  # fmt: skip
            lowered = self.lower(layered, placed, shardings)
        except (KeyError, InternalError, IndexError) as error:
            raise PlanMismatchError(
                f"the plan for {plan.function!r} does not cover the programs of this step ({error!r}): it was edited "
                "inconsistently (its schedule can be, but not to or from zero-bubble, which has other programs), or "
                "made by another version of autopar or JAX. Make it again."
            ) from error
        fresh = self._price(layered, lowered, plan.schedule, plan.lower_bound, plan.gap)
        fresh = with_layers(fresh, [stage.layers for stage in plan.stages])
        return Restored(dataclasses.replace(fresh, method=plan.method, notes=plan.notes), lowered, layered)

    def lower(self, layered: Layered, placed: PlacedStep, shardings: Sequence[StageSharding]) -> LoweredStep:
        """Local programs of all stages, with the transfers between them."""
        prices = self.stages.prices
        resharders = [prices.resharder(s.mesh)[0] for s in shardings]
        return assemble(placed, shardings, layered.rules, resharders, prices.transfer_plan, xla=prices.cluster.xla)

    def _price(self, layered: Layered, lowered: LoweredStep, schedule: ScheduleName, bound: float, gap: float) -> Plan:
        layer_of = {e.id: layer for e, layer in zip(layered.forward, layered.layers, strict=True)}
        return self.stages.prices.price(layered.analysis, self.method.name, lowered, layer_of, schedule, bound, gap)


def _solve(problem: Problem, start: Sequence[int] | None = None, polish: bool = True) -> Solution:
    solution = solve(problem, seconds=_SECONDS, patience=PATIENCE, gap=_GOOD_GAP, start=start, polish=polish)
    if solution.cost > (1 + _WIDE_GAP) * solution.lower_bound > 0:
        solution = solve(problem, seconds=_MORE_SECONDS, patience=PATIENCE, gap=_GOOD_GAP, start=solution.choice)
    return solution


def with_layers(plan: Plan, spans: Sequence[tuple[int, int]]) -> Plan:
    """The plan, its stages numbered by the layers of the search."""
    stages = tuple(dataclasses.replace(s, layers=span) for s, span in zip(plan.stages, spans, strict=True))
    return dataclasses.replace(plan, stages=stages)


def _above(plan: Plan) -> dict[int, StageMemory]:
    """The stages that need more memory than there is, with what they need."""
    return {i: stage.memory for i, stage in enumerate(plan.stages) if stage.memory.total > stage.memory.capacity}


def _all_values(placed: PlacedStep) -> list[Value]:
    step = placed.step
    values = [*step.graph.inputs, *step.constants, step.microbatch, *step.accumulate.values()]
    values += [v for pieces in step.keep.values() for v in pieces]
    for program in placed.programs:
        values += program.inputs
        values += [v for e in program.equations for v in e.outputs]
    return values
