"""The neighbours of a search: each proposes candidates, given what the best plan is and what its last proposal came to.

A neighbour is a generator of proposals. The search plans a proposal's candidate and answers with the outcome, on which
the next proposal may depend. None of them plans anything itself, and any of them can be left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from autopar.errors import MicrobatchError, PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.passes.inter_op import Pipeline
from autopar.passes.submeshes import ShapesFn, mesh_at
from autopar.planning.candidate import (
    Candidate,
    Outcome,
    Proposal,
    Proposals,
    groups_of,
    has_equal_groups,
    shapes_on,
)
from autopar.planning.evaluator import DEAR, LEAST_GAIN
from autopar.planning.layering import MAX_LAYERS, Layered
from autopar.planning.search_space import has_room
from autopar.planning.state import State

_USUAL = 8  # microbatches for each stage
_IN_VAIN = 2  # numbers of equal stages, or of microbatches, that take longer, after which no others are tried
_MORE_HIDDEN = 1.5  # times the share that the best plan's kernels hide: on a mesh of another shape they may hide this
_SAVED = 0.1  # share of the step time that larger microbatches are assumed to save at most: the bubble may grow so
_UNEVEN = 1.1  # times the mean of all stages, that the slowest takes: finer layers may help


Neighbour = Callable[[State], Proposals]
Phases = tuple[tuple[Neighbour, ...], ...]


# The first plans.


def one_stage(state: State) -> Proposals:
    """All devices as one stage: on one host with the fewest microbatches that fit, on several with one.

    What it takes bounds the search for pipelines, which costs far more. On several hosts, a stage for each does.
    """
    space, evaluator = state.space, state.evaluator
    if state.fixed is not None or not space.may_be_one_stage:
        return
    if len(space.cluster.hosts) > 1 or space.method.stages is not None:
        first = evaluator.estimate(Candidate(1, 1), space.first_shapes, state.estimate)
        best = None if first is None else (1, first)
    else:
        best = None
        for m in _worth_one_stage(state, 1):
            pipeline = evaluator.in_one_stage(m, state.estimate if best is None else best[1].step_time)
            if pipeline is not None:
                best = m, pipeline
            if best is not None and (pipeline is None or not evaluator.is_memory_dear(m, pipeline.stages[0].mesh)):
                break
    m = 1 if best is None else best[0]
    state.in_one_stage.add(m)
    outcome = yield Proposal(Candidate(m, 1), None if best is None else best[1].step_time)
    if outcome.better is None and best is not None:  # as where it takes more memory than the stage search counts
        yield from with_fewest_microbatches(state, m + 1)


def stage_per_host(state: State) -> Proposals:
    """Each host as a stage, in as many microbatches as the stage search alone finds best."""
    space, hosts = state.space, len(state.space.cluster.hosts)
    numbers = space.likely if state.fixed is None else [state.fixed]
    if not numbers or space.method.num_stages is not None or not 1 < hosts <= MAX_LAYERS:
        return
    m, seconds = numbers[0], min(state.estimate, state.least_expected)
    if state.fixed is None:
        m, seconds = _best_number(state, m, hosts, space.shapes_of_hosts, seconds)
    yield Proposal(Candidate(m, hosts), seconds)


def equal_stages(state: State) -> Proposals:
    """Equal stages that the search cannot make of the layers that it tells apart.

    Interleaved, if they may be. What the stage search thinks best is finished first: others are then rarely worth it.
    """
    found: list[tuple[float, Candidate]] = []  # with their estimates
    best, in_vain = state.estimate, 0
    for stages, shape, m in state.space.uniform(state.fixed):
        if in_vain == _IN_VAIN:
            break
        mine = _larger_microbatches(state, Candidate(m, stages, mesh_shape=shape))
        if mine:
            in_vain = 0 if mine[-1][0] < best else in_vain + 1
            best = min(best, mine[-1][0])
        found += mine
    for seconds, candidate in sorted(found, key=lambda each: each[0]):
        outcome = yield Proposal(candidate, seconds)
        if outcome.finished is not None:
            state.equal_stages.append((candidate, outcome.finished[0]))
        is_as_expected = outcome.better is not None and outcome.better[0].step_time <= (1 + DEAR) * seconds
        if candidate.rounds > 1 and not is_as_expected:  # what is sent in rounds may cost more than the bubble
            yield Proposal(dataclasses.replace(candidate, rounds=1), seconds)


def more_rounds(state: State) -> Proposals:
    """Equal stages in more rounds, also those that are not the best in few.

    The next number of rounds is expected to save its part of the bubble, and to cost nothing.
    """
    pending: list[tuple[float, int, Candidate]] = []  # what is expected, the number of devices' groups

    def add(candidate: Candidate, plan: Plan) -> None:
        stages, m = candidate.num_stages, candidate.num_microbatches
        assert stages is not None
        rounds = next((n for n in state.space.rounds(stages, m) if n > candidate.rounds), None)
        if rounds is not None and has_room(plan, rounds):
            more = dataclasses.replace(candidate, rounds=rounds)
            share = more.bubble_factor / candidate.bubble_factor
            heapq.heappush(pending, (share * plan.step_time, stages, more))

    for each in state.equal_stages:
        add(*each)
    while pending and state.plan is not None:
        seconds, _, candidate = heapq.heappop(pending)
        if seconds > (1 - LEAST_GAIN) * state.plan.step_time:
            return
        outcome = yield Proposal(candidate, seconds)
        if outcome.better is not None:
            add(candidate, outcome.better[0])
        else:  # what is sent more often costs more than the bubble
            assert candidate.num_stages is not None
            state.no_better.add((candidate.num_stages, candidate.num_microbatches, candidate.rounds))


def likely_microbatches(state: State) -> Proposals:
    """Any stages, in numbers of microbatches of which a pipeline has one, probably."""
    space, stages = state.space, state.space.method.num_stages
    numbers = space.likely if state.fixed is None else [state.fixed]
    of_hosts = state.found_by.get(stage_per_host.__name__)
    if of_hosts is not None and of_hosts.num_microbatches < numbers[0]:
        numbers = [of_hosts.num_microbatches]  # others would need far more stages
    if state.fixed is None and not space.may_be_a_pipeline:
        return
    if state.equal_stages and len(space.cluster.hosts) > MAX_LAYERS:
        return  # to make others of so many hosts takes as long as all else, and was never seen to find a better plan
    if state.fixed is None and stages is not None:
        numbers = [*numbers, 1]
    for m in numbers:
        yield Proposal(Candidate(m, stages))


# Other numbers of microbatches.


def with_fewest_microbatches(state: State, fewest: int = 2) -> Proposals:
    """All devices as one stage, with so many microbatches or more.

    The fewest that fit are best, or that fit with nothing recomputed.
    """
    is_any_better = False
    in_vain = 0
    for m in _worth_one_stage(state, fewest):
        state.in_one_stage.add(m)
        outcome = yield Proposal(Candidate(m, 1))
        in_vain = 0 if outcome.is_better else in_vain + 1
        if is_any_better and in_vain == _IN_VAIN:
            return
        is_any_better |= outcome.is_better
        if outcome.finished is not None and not any(stage.recomputed for stage in outcome.finished[0].stages):
            return


def one_stage_from(fewest: int) -> Neighbour:
    """All devices as one stage, with so many microbatches or more, as the one neighbour of a search."""

    def fewest_microbatches(state: State) -> Proposals:
        return with_fewest_microbatches(state, fewest)

    return fewest_microbatches


def one_stage_again(state: State) -> Proposals:
    """One stage instead of a pipeline, with fewer microbatches only."""
    if state.fixed is None and state.plan is not None and len(state.plan.stages) > 1 and state.space.may_be_one_stage:
        yield from with_fewest_microbatches(state)


def more_microbatches(state: State) -> Proposals:
    """More of them, where memory is dear: smaller ones may need nothing computed again, or less communication.

    Where nothing fits, too.
    """
    space, stages = state.space, state.space.method.num_stages
    if state.fixed is not None:
        return
    if (plan := state.plan) is not None:
        numbers: Iterable[int] = ()
        if any(stage.recomputed for stage in plan.stages):
            numbers = [n for n in space.many[::-1] if n > plan.num_microbatches]
        elif len(plan.stages) == 1 and space.method.stages is None:
            numbers, stages = _while_memory_is_dear(state, plan), 1
        in_vain = 0
        for m in numbers:
            outcome = yield Proposal(Candidate(m, stages))
            in_vain = 0 if outcome.is_better else in_vain + 1
            if in_vain == _IN_VAIN:
                return
        return
    if space.may_be_a_pipeline:
        for m in space.more:
            outcome = yield Proposal(Candidate(m, stages))
            if outcome.better is None and state.plan is not None:
                return
        may_be_one = space.may_be_one_stage
    else:
        may_be_one = True
    if state.plan is None and may_be_one:
        yield from with_fewest_microbatches(state)


def fewer_microbatches(state: State) -> Proposals:
    """Fewer of them, as long as that is a gain and memory is left.

    A pipeline's bubble grows as they become fewer; without one, the fewest that are likely to fit are the best. The
    groups of devices stay until it is known how many microbatches there are.
    """
    space, method = state.space, state.space.method
    if state.fixed is not None or state.plan is None or not space.may_be_a_pipeline:
        return
    if state.plan.schedule != state.evaluator.schedule:
        return  # see `interleaved`
    if len(state.plan.stages) == 1 and state.plan is state.found_by.get(more_microbatches.__name__):
        return  # it has the fewest that fit
    are_free = method.stages is None and method.mesh_shape is None
    plan: Plan | None = state.plan
    last = None  # the number of the best plan on given groups
    while plan is not None and (fewer := space.fewer(plan)) is not None:
        groups = groups_of(plan) if are_free else None
        if groups is not None and len(groups) == 1 and fewer in state.in_one_stage:
            break  # it was no better
        fewest = fewer
        if groups is not None:
            fewest, _ = _best_number(state, fewer, method.num_stages, shapes_on(groups), state.estimate)
        plan = _plan((yield Proposal(Candidate(fewest, method.num_stages, groups))))
        if plan is None and fewest < fewer:
            plan, fewest = _plan((yield Proposal(Candidate(fewer, method.num_stages, groups)))), fewer
        if plan is not None:
            last = fewest
    if are_free and last is not None:
        yield Proposal(Candidate(last, method.num_stages))


# Other meshes, stages and schedules.


def other_shapes(state: State) -> Proposals:
    """All devices in other shapes as one stage, where kernels hide much of what the best plan sends.

    The stage search counts collectives outside of loops in full. What is left of them differs from shape to shape, and
    is known of plans alone.
    """
    plan, space, evaluator = state.plan, state.space, state.evaluator
    if plan is None or len(plan.stages) > 1 or space.method.stages is not None:
        return
    exposed = 1 - _MORE_HIDDEN * (1 - plan.step_time / state.estimate)

    def is_vain(seconds: float) -> bool:
        return exposed * seconds > (1 - LEAST_GAIN) * evaluator.best.step_time

    if is_vain(state.estimate):
        return  # others are estimated to take no less, or hardly
    m, cluster, here = plan.num_microbatches, space.cluster, plan.stages[0].mesh.shape
    shapes = space.shapes(cluster, 0, cluster.num_devices)
    meshes = [mesh_at(0, shape) for shape in shapes if shape != here]
    expected: list[tuple[float, Mesh]] = []
    for mesh in meshes:
        evaluator.check_time()
        expected.append((evaluator.seconds_on(m, mesh), mesh))
    in_vain = 0
    for seconds, mesh in sorted(expected, key=lambda each: each[0]):
        if in_vain == _IN_VAIN or seconds == math.inf or is_vain(seconds):
            return
        outcome = yield Proposal(Candidate(m, 1, mesh=mesh), seconds)
        in_vain = 0 if outcome.is_better else in_vain + 1


def finer_layers(state: State) -> Proposals:
    """Twice as many layers, where one stage takes much longer than others.

    On the same groups of devices, or hosts of their own.
    """
    plan, space = state.plan, state.space
    if plan is None or space.method.stages is not None or plan.schedule == "interleaved":
        return
    seconds = [stage.per_microbatch for stage in plan.stages]
    mean = sum(seconds) / len(seconds)
    if max(seconds) <= _UNEVEN * mean:
        return
    m = plan.num_microbatches
    layers = state.evaluator.num_layers(Candidate(m))
    candidate = Candidate(m, space.method.num_stages, num_layers=2 * layers)
    finer = state.evaluator.num_layers(candidate)
    if finer == layers or finer < len(plan.stages):
        return  # each has one heavy operation, or stages that the search does not tell apart
    bounds = space.cluster.host_bounds
    hosts = [(start, stop - start) for start, stop in itertools.pairwise(bounds)]
    groups = {host: (host[1],) for host in hosts if (host[1],) in space.shapes(space.cluster, *host)}
    yield Proposal(dataclasses.replace(candidate, groups={**groups, **groups_of(plan)}))


def interleaved(state: State) -> Proposals:
    """Equal stages divided, and dealt out in turn: a pipeline that is filled more quickly.

    Those of the best plan, or if it has others, the latest equal ones: others were quicker without, and these,
    interleaved, may be quicker than those. Then there may be fewer microbatches.
    """
    space = state.space
    if (plan := state.plan) is None or not space.may_choose_the_schedule or space.method.num_stages is not None:
        return
    if not has_equal_groups(plan) and state.evaluator.best.of_equal_groups is not None:
        m = plan.num_microbatches
        plan = dataclasses.replace(state.evaluator.best.of_equal_groups, num_microbatches=m)
    if not has_equal_groups(plan):
        return
    groups, m = groups_of(plan), plan.num_microbatches
    stages, best = len(groups), len(plan.stages) // len(groups)
    own_layers = stages > state.evaluator.num_layers(Candidate(m))
    busy = [stage.per_microbatch for stage in plan.stages]
    unevenness = 1 - sum(busy) / (len(busy) * max(busy)) if max(busy) > 0 else 0.0
    for rounds in space.rounds(stages, m, unevenness):
        if (stages, m, rounds) in state.no_better:
            break
        if rounds > best and has_room(plan, rounds):
            if best > 1:
                candidate = Candidate(m, stages, groups, own_layers=own_layers, rounds=rounds)
            else:  # the estimate of the stage search knows nothing of parts that are more even than whole stages
                candidate = Candidate(m, rounds=rounds, like=plan)
            better = _plan((yield Proposal(candidate)))
            if better is None:
                break  # what is sent more often costs more than the bubble
            best, plan = rounds, better
    if best == 1 or state.fixed is not None:
        return
    # Shardings that need less memory may cost less than the bubble of so many stages.
    numbers = [n for n in space.many if n < m and n % stages == 0]
    if not numbers:
        return
    candidate = Candidate(m, stages, groups, own_layers=own_layers, rounds=best)
    estimate = state.evaluator.estimate(candidate, shapes_on(groups))
    for n in numbers:
        fewer = dataclasses.replace(candidate, num_microbatches=n)
        below = math.inf if estimate is None else estimate.step_time
        estimate = state.evaluator.estimate(fewer, shapes_on(groups), below)
        if estimate is None or _plan((yield Proposal(fewer, estimate.step_time))) is None:
            return


def zero_bubble(state: State) -> Proposals:
    """The stages of a 1F1B plan, with the gradients of their parameters computed where they would wait.

    Then there may be fewer microbatches.
    """
    plan = state.plan
    if plan is None or not state.space.may_choose_the_schedule or plan.schedule != "1f1b" or len(plan.stages) == 1:
        return
    if (seconds := state.evaluator.seconds_without_bubble(plan)) > (1 - LEAST_GAIN) * plan.step_time:
        return
    m = plan.num_microbatches
    for n in (m,) if state.fixed is not None else (m, *(n for n in state.space.many if n < m)):
        outcome = yield Proposal(Candidate(n, like=plan), seconds if n == m else 0.0)
        if outcome.better is None:
            return


def _larger_microbatches(state: State, first: Candidate) -> list[tuple[float, Candidate]]:
    """Equal stages, interleaved if they may be, in so many microbatches, and in fewer as long as that is a gain.

    With the estimates of the stage search, falling, where these are below that of the best plan.
    """
    assert first.num_stages is not None
    found: list[tuple[float, Candidate]] = []
    before = None
    for m in state.space.dividing(first.num_microbatches) if state.fixed is None else (state.fixed,):
        rounds = next(iter(state.space.rounds(first.num_stages, m)), 1)
        candidate = dataclasses.replace(first, num_microbatches=m, rounds=rounds)
        if before is not None and candidate.bubble_factor * (1 - _SAVED) > before.bubble_factor:
            break
        estimate = None
        with contextlib.suppress(PlanError):  # the step has too few layers
            estimate = state.evaluator.estimate(candidate, below=found[-1][0] if found else state.estimate)
        if estimate is not None:
            found.append((estimate.step_time, candidate))
        elif before is not None:
            break
        before = candidate
    return found


def _plan(outcome: Outcome) -> Plan | None:
    return None if outcome.better is None else outcome.better[0]


def _worth_one_stage(state: State, fewest: int) -> Iterator[int]:
    """Numbers of microbatches, rising, with which one stage may fit, and may be quicker than the best if it does."""
    evaluator, space = state.evaluator, state.space
    meshes = space.first_meshes
    in_vain, least = 0, 0.0
    for m in (1, *space.many[::-1]):
        if 1 < m < least:
            continue
        with contextlib.suppress(MicrobatchError):
            layered = evaluator.layering.layered(m, False)
            if not meshes or _takes_too_long_to_compute(state, layered, meshes[0]):
                return  # computing alone takes longer, and with more microbatches no less
            seconds = min(evaluator.stages.in_any_memory(layered, mesh) for mesh in meshes)
            if state.estimate <= seconds < math.inf:
                # What is sent is no less with more, unless these are whole parts of the batch again.
                in_vain += 1
                if m == 1 or in_vain == _IN_VAIN:
                    return
            least = max(least, evaluator.stages.fewest_in_one_stage(layered, meshes))
            if seconds < state.estimate and m >= max(fewest, least) and m not in state.in_one_stage:
                yield m
                least = max(least, evaluator.stages.fewest_in_one_stage(layered, meshes))


def _takes_too_long_to_compute(state: State, layered: Layered, mesh: Mesh) -> bool:
    """Whether all layers as one stage take as long as the best plan, were there no communication."""
    return state.estimate < math.inf and state.evaluator.stages.least_of_one(layered, mesh) >= state.estimate


def _while_memory_is_dear(state: State, plan: Plan) -> Iterator[int]:
    """More microbatches than a plan of one stage has, as long as the best plan would be quicker with more memory."""
    numbers = _worth_one_stage(state, plan.num_microbatches + 1)
    while state.evaluator.is_memory_dear(plan.num_microbatches, plan.stages[0].mesh):
        if (m := next(numbers, None)) is None:
            return
        yield m
        plan = state.plan or plan


def _best_number(state: State, most: int, stages: int | None, shapes: ShapesFn, below: float) -> tuple[int, float]:
    """The number of microbatches, at most so many, of which fewer are no gain by the stage search alone.

    With its seconds as that estimates them, `below` if it finds nothing quicker. From the usual number for so many
    stages it goes down as long as that is a gain, or else up.
    """
    numbers = [n for n in state.space.many if n <= most]  # falling
    usual = most if stages is None else _USUAL * stages
    at = next((i for i, n in enumerate(numbers) if n <= usual), len(numbers) - 1)

    def look(at: int, below: float) -> Pipeline | None:
        return state.evaluator.estimate(Candidate(numbers[at], stages), shapes, below)

    def is_gain(fewer: Pipeline, more: Pipeline) -> bool:
        # Where memory gets short the search does not know all that it costs: the gain must be larger.
        least = 1 - DEAR if state.evaluator.is_tight(fewer) else 1.0
        return fewer.step_time < least * more.step_time

    pipeline, first = look(at, below), at
    while pipeline is not None and at + 1 < len(numbers):
        fewer = look(at + 1, pipeline.step_time)
        if fewer is None or not is_gain(fewer, pipeline):
            break
        pipeline, at = fewer, at + 1
    while at <= first and at > 0:
        more = look(at - 1, below if pipeline is None else pipeline.step_time / (1 - DEAR))
        if pipeline is not None and (more is None or is_gain(pipeline, more)):
            break
        pipeline, at = more, at - 1
    return (numbers[at], pipeline.step_time) if pipeline is not None else (most, below)


# In this order. Those of one line, of which none needs the other's plan, take turns: who expects the least number of
# seconds is heard next. (Interleaving expects 0, and so comes before a schedule without a bubble.)
PHASES: Phases = (
    (one_stage, stage_per_host),
    (equal_stages,),
    (more_rounds,),
    (likely_microbatches,),
    (one_stage_again,),
    (more_microbatches,),
    (fewer_microbatches,),
    (finer_layers,),
    (other_shapes,),
    (interleaved, zero_bubble),
)
