"""The stage search: which layers form a stage, and which devices, as which logical mesh, carry it.

The time of a step is Alpa's pipeline latency (OSDI'22, eq. 2) plus what happens once a step:

    sum_i t_i + (m - 1) * max_i t_i + max_i s_i

with m microbatches, t_i the seconds of one microbatch at stage i (forward and backward, incoming transfers included)
and s_i its seconds once a step. The last term takes the stages' prologues and updates as running side by side. Divided
into r parts each, dealt out in turn, the stages fill the pipeline r times as quickly (Narayanan et al. 2021, 2.2):

    (sum_i t_i - max_i t_i) / r + m * max_i t_i + max_i s_i
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.units import count_text
from autopar.passes.stage_oracle import Span, StageCost, StageOracle, StageSpace, Turns, in_flight
from autopar.passes.stage_table import KnownCosts, Places
from autopar.passes.suffixes import BestPipeline, best_of_suffixes, bound_prefixes, bound_suffixes, unrolled


@dataclasses.dataclass(frozen=True)
class StageChoice:
    """A stage as chosen."""

    span: Span
    mesh: Mesh
    cost: StageCost


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A pipeline that holds all layers and uses all devices."""

    stages: tuple[StageChoice, ...]  # first stage first
    step_time: float  # seconds


def plan_stages(
    space: StageSpace, oracle: StageOracle, turns: Turns, *, below: float = math.inf, gain: float = 0.0
) -> Pipeline | None:
    """The plan of least step time over all cuts of the layers into spans and of all devices into consecutive groups.

    Exact, for any oracle that keeps its promises, and if a span costs at least what its layers do by their overheads;
    None if nothing fits. `below`: seconds of a plan that there is already; None if nothing is quicker. What could be
    quicker than a known plan by less than the share `gain` is not looked for.

    Costs are asked for lazily: of plans alone that could be the best if every cost not yet asked for were the least
    possible (lazy evaluation of edges, as in LazySP; Dellin and Srinivasa 2016), and before a cost its bound.

    The time has three criteria: (sum of t, largest t, largest s). A *state* is (first layer, first device) of what is
    still to be placed, a *suffix* a way to place it with r stages.

    1. Backwards, r = 1, 2, …: from the states that r - 1 stages can finish, ask for the cost of every stage that ends
       there (r also says how many microbatches it holds). Per state keep the least value of each criterion by itself:
       together they are a lower bound of every suffix. Keep one real suffix too, the quickest by itself: at the first
       state it is a plan, and the best such plan drops all stages whose bound is not below it.
    2. Forwards: the same bounds for what stands before each state, and again drop the stages through which, by the
       bounds on both sides, no better plan can go.
    3. Backwards over the stages that are left, keeping every suffix that no other dominates: exact.

    Raises PlanError if the number of stages is below 1, or more than there are layers or devices.
    """
    num_layers, cluster, num_stages = space.num_layers, space.cluster, space.num_stages
    most = min(num_layers, cluster.num_devices)
    if num_stages is not None and not 1 <= num_stages <= most:
        verb = "is" if num_layers == 1 else "are"
        raise PlanError(
            f"num_stages={num_stages}, but there {verb} {count_text(num_layers, 'layer')} and "
            f"{count_text(cluster.num_devices, 'device')}, and each stage needs one of both: choose "
            f"{'1 stage' if most == 1 else f'1 to {most} stages'}"
        )
    places = Places.of(space, oracle)
    costs = KnownCosts(places, oracle, num_stages == 1)
    most = num_stages or most
    plan: Pipeline | None = None  # of stages whose costs are known
    while True:
        least = below if plan is None else plan.step_time
        best = BestPipeline(turns, least * (1 - gain))
        steps = bound_suffixes(places, costs, best, most, num_stages is not None)
        best_of_suffixes(places, bound_prefixes(places, steps, best), best)
        if best.stages is None:
            return plan
        rows = unrolled(best.stages)
        numbers = [in_flight(turns.schedule, turns.num_microbatches, len(rows) - at) for at in range(len(rows))]
        unknown = costs.unknown(rows, numbers)
        certain = not unknown
        if costs.bound(unknown) and not costs.time(rows, numbers, turns) < least < np.inf:
            continue  # these bounds may be enough to look elsewhere
        costs.ask(unknown)
        time = costs.time(rows, numbers, turns)
        if certain or time < least:
            stages = zip(rows, costs.of(rows, numbers), strict=True)
            choices = tuple(StageChoice((i, j), places.mesh(mesh), cost) for (mesh, i, j, *_), cost in stages)
            plan = Pipeline(choices, time)
        if certain:
            return plan
