"""What each neighbour of the search proposes, where the outcomes of its proposals are given to it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.errors import InfeasiblePlanError
from autopar.ir.graph import Block
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.passes.batch import BatchAnalysis
from autopar.passes.inter_op import Pipeline, StageChoice
from autopar.passes.stage_oracle import StageCost
from autopar.passes.submeshes import ShapesFn, mesh_at
from autopar.planning import neighbours
from autopar.planning.candidate import Candidate, Finished, Incumbent, Outcome, Proposal, Proposals, groups_of
from autopar.planning.evaluator import Evaluator
from autopar.planning.neighbours import Neighbour
from autopar.planning.planner import Planner, better_plans
from autopar.planning.search_space import SearchSpace
from autopar.planning.state import State
from tests import models
from tests.planned import analyse, cluster_of

_HOSTS = cluster_of(2, 2, flops=1e10, memory_bandwidth=1e11, link=1e9, network=1e8, latency=1e-6, launch=1e-6)
_ONE_HOST = cluster_of(1, 4, flops=1e10, memory_bandwidth=1e11, link=1e9, latency=1e-6, launch=1e-6)


@functools.cache
def _analysis() -> BatchAnalysis:
    params = {"layers": [{"w": jnp.zeros((256, 256)), "b": jnp.zeros(256)}] * 8}
    batch = dict.fromkeys("xy", jnp.zeros((64, 256)))
    return analyse(models.sgd(models.mlp_loss), models.sgd_state(params), batch)


@functools.cache
def _two_stages() -> Finished:
    """Of one host each, in 16 microbatches."""
    return Planner(_analysis(), _HOSTS, recipes.pipeline([(4, (2,)), (4, (2,))], 16, "1f1b")).plan()


def state_of(plan: Plan | None, method: Method = AUTO, fixed: int | None = None) -> State:
    state = State(Evaluator(_analysis(), _HOSTS, method), fixed)
    state.plan = plan
    return state


def answered(proposals: Proposals, answer: Callable[[Candidate], Outcome], most: int = 20) -> list[Candidate]:
    """What is proposed, one after the other."""
    found: list[Candidate] = []
    try:
        proposal = next(proposals)
        while len(found) < most:
            found.append(proposal.candidate)
            proposal = proposals.send(answer(proposal.candidate))
    except StopIteration:
        return found
    raise AssertionError("it never ends")


def with_times(times: Mapping[int, float], **changes: Any) -> Callable[[Candidate], Outcome]:
    """Two stages that take so many seconds in so many microbatches; what takes longer than 1 second is no better."""

    def answer(candidate: Candidate) -> Outcome:
        m = candidate.num_microbatches
        if m not in times:
            return Outcome(None)
        plan, lowered = _two_stages()
        plan = dataclasses.replace(plan, num_microbatches=m, step_time=times[m], **changes)
        return Outcome((plan, lowered), times[m] < 1.0)

    return answer


def keeping_the_best(state: State, answer: Callable[[Candidate], Outcome]) -> Callable[[Candidate], Outcome]:
    """These answers; what is better becomes the best plan of the state, as in a search."""

    def kept(candidate: Candidate) -> Outcome:
        outcome = answer(candidate)
        state.plan = outcome.better[0] if outcome.better else state.plan
        return outcome

    return kept


def recomputing(plan: Plan) -> Plan:
    """As if its first stage computed something again; which blocks these are does not matter."""
    first, *rest = plan.stages
    return dataclasses.replace(plan, stages=(dataclasses.replace(first, recomputed=(Block(0, 1),)), *rest))


def nothing(_: Candidate) -> Outcome:
    return Outcome(None)


def test_one_stage_with_nothing_fixed() -> None:
    state = state_of(None)
    [whole] = answered(neighbours.one_stage(state), with_times({1: 0.5}))
    assert (whole.num_microbatches, whole.num_stages) == (1, 1)
    assert answered(neighbours.one_stage(state_of(None, fixed=4)), nothing) == []
    assert answered(neighbours.one_stage(state_of(None, recipes.auto(num_stages=2))), nothing) == []


def test_one_stage_that_does_not_fit_has_more_microbatches() -> None:
    """The stage search thought that it would."""
    found = answered(neighbours.one_stage(state_of(None)), with_times({8: 0.5}))
    assert [each.num_microbatches for each in found] == [1, 2, 4, 8]
    assert {each.num_stages for each in found} == {1}


def test_one_stage_on_one_host_has_the_fewest_microbatches_that_fit() -> None:
    """Or more, where memory is dear with those. Of several hosts, a stage for each is the better bound."""
    params = {"layers": [{"w": jnp.zeros((256, 256)), "b": jnp.zeros(256)}] * 4}
    batch = dict.fromkeys("xy", jnp.zeros((4096, 256)))
    analysis = analyse(models.sgd(models.mlp_loss), models.sgd_state(params), batch)
    roomy = Planner(analysis, _ONE_HOST, recipes.data_parallel()).plan()[0].peak_memory
    firsts = []
    for share in (0.9, 0.7, 0.4):
        method = dataclasses.replace(recipes.auto(remat=False), memory_limit=int(share * roomy))
        evaluator = Evaluator(analysis, _ONE_HOST, method)
        first = next(neighbours.one_stage(State(evaluator, None))).candidate
        assert evaluator.estimate(first) is not None
        for m in (m for m in (1, *evaluator.space.many) if m < first.num_microbatches):
            fewer = evaluator.estimate(Candidate(m, 1))
            assert fewer is None or evaluator.is_memory_dear(m, fewer.stages[0].mesh)
        firsts.append(first.num_microbatches)
        hosts = State(Evaluator(analysis, _HOSTS, method), None)
        assert next(neighbours.one_stage(hosts)).candidate.num_microbatches == 1
    assert firsts[0] < firsts[1] < firsts[2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("share", "fixed"), [pytest.param(0.6, None, marks=pytest.mark.slow), (0.45, None), (0.45, (2, 2))]
)
def test_meshes_of_more_shapes_are_not_forgotten_where_memory_is_short(share: float, fixed: Any) -> None:
    """Dimensions that some shapes do not divide: where one stage fits is not the same on all."""
    widths = (256, 256, 254, 254, 256)
    params = [{"w": jnp.zeros(shape), "b": jnp.zeros(shape[1])} for shape in itertools.pairwise(widths)]
    batch = dict.fromkeys("xy", jnp.zeros((2048, 256)))
    analysis = analyse(models.sgd(models.mlp_loss), models.sgd_state({"layers": params}), batch)
    method = recipes.auto(remat=False, num_stages=1, mesh_shape=fixed, baselines=False)
    roomy = Planner(analysis, _ONE_HOST, dataclasses.replace(method, num_microbatches=1)).plan()[0].peak_memory
    method = dataclasses.replace(method, memory_limit=int(share * roomy))
    seconds = {}
    for m in (1, 2, 4, 8, 16, 2048):
        with contextlib.suppress(InfeasiblePlanError):
            seconds[m] = (
                Planner(analysis, _ONE_HOST, dataclasses.replace(method, num_microbatches=m)).plan()[0].step_time
            )
    found = Planner(analysis, _ONE_HOST, method).plan()[0]
    assert found.step_time <= 1.01 * min(seconds.values()), (found.num_microbatches, seconds)


def test_one_stage_has_more_microbatches_where_memory_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the stage search finds that quicker."""
    seconds = {2: 3.0, 4: 2.5, 8: 2.6, 16: 1.0}

    def in_one_stage(self: Evaluator, m: int, below: float) -> Pipeline | None:
        stage = StageChoice((0, 1), mesh_at(0, (4,)), StageCost(0.0, 0.0, 0.0))
        return Pipeline((stage,), seconds[m]) if seconds.get(m, math.inf) < below else None

    monkeypatch.setattr(Evaluator, "in_one_stage", in_one_stage)
    for dear, expected in [({2, 4, 8}, 4), ({2}, 4), (set[int](), 2)]:
        monkeypatch.setattr(Evaluator, "is_memory_dear", lambda self, m, mesh, dear=dear: m in dear)
        proposal = next(neighbours.one_stage(State(Evaluator(_analysis(), _ONE_HOST), None)))
        assert (proposal.candidate.num_microbatches, proposal.seconds) == (expected, seconds[expected])


def test_the_fewest_microbatches_of_one_stage_that_compute_nothing_again() -> None:
    plan = recomputing(_two_stages()[0])

    def answer(candidate: Candidate) -> Outcome:
        m = candidate.num_microbatches
        known = plan if m < 8 else _two_stages()[0]
        return Outcome((dataclasses.replace(known, num_microbatches=m), _two_stages()[1]), True)

    found = answered(neighbours.with_fewest_microbatches(state_of(None)), answer)
    assert [each.num_microbatches for each in found] == [2, 4, 8]

    def never_better(candidate: Candidate) -> Outcome:
        found = dataclasses.replace(plan, num_microbatches=candidate.num_microbatches)
        return Outcome((found, _two_stages()[1]), candidate.num_microbatches == 2)

    found = answered(neighbours.with_fewest_microbatches(state_of(None)), never_better)
    assert [each.num_microbatches for each in found] == [2, 4, 8]  # two in vain: 16 is not tried


def test_a_stage_for_each_host() -> None:
    [candidate] = answered(neighbours.stage_per_host(state_of(None)), nothing)
    assert candidate.num_stages == 2
    [candidate] = answered(neighbours.stage_per_host(state_of(None, fixed=4)), nothing)
    assert (candidate.num_stages, candidate.num_microbatches) == (2, 4)
    assert answered(neighbours.stage_per_host(state_of(None, recipes.auto(num_stages=4))), nothing) == []


def test_no_likely_number_where_a_stage_for_each_host_is_better_with_fewer() -> None:
    state = state_of(None)
    numbers = [each.num_microbatches for each in answered(neighbours.likely_microbatches(state), nothing)]
    assert numbers == state.space.likely
    fewer = dataclasses.replace(_two_stages()[0], num_microbatches=2)
    state.found_by["stage_per_host"] = fewer
    assert [each.num_microbatches for each in answered(neighbours.likely_microbatches(state), nothing)] == [2]


def test_more_microbatches_where_something_is_computed_again() -> None:
    plan = dataclasses.replace(_two_stages()[0], num_microbatches=2)
    assert answered(neighbours.more_microbatches(state_of(plan)), nothing) == []
    again = state_of(recomputing(plan))
    found = answered(neighbours.more_microbatches(again), keeping_the_best(again, with_times({8: 0.9})))
    assert [each.num_microbatches for each in found] == [4, 8, 16, 32]  # 4 in vain, 8 better, two in vain


def test_more_microbatches_where_one_stage_needs_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stage, until its memory is enough."""
    plan = _two_stages()[0]
    state = state_of(dataclasses.replace(plan, stages=plan.stages[:1], num_microbatches=2))
    monkeypatch.setattr(Evaluator, "is_memory_dear", lambda self, m, mesh: m < 8)
    times = with_times({4: 0.9, 8: 0.8, 16: 0.7})
    found = answered(neighbours.more_microbatches(state), keeping_the_best(state, times))
    assert [(each.num_microbatches, each.num_stages) for each in found] == [(4, 1), (8, 1)]


def test_fewer_microbatches_on_the_same_groups_of_devices() -> None:
    plan = _two_stages()[0]
    state = state_of(plan)
    state.evaluator.best.estimate = state.evaluator.best.step_time = 0.0  # the stage search finds nothing: one by one
    found = answered(neighbours.fewer_microbatches(state), with_times({8: 0.9, 4: 0.8}))
    assert [each.num_microbatches for each in found] == [8, 4, 2, 4]
    assert [each.groups for each in found] == [groups_of(plan)] * 3 + [None]  # and once with any
    # Where more were tried until something fitted in one stage: it has the fewest.
    one = dataclasses.replace(plan, stages=plan.stages[:1])
    state = state_of(one)
    state.found_by["more_microbatches"] = one
    assert answered(neighbours.fewer_microbatches(state), nothing) == []
    # Nor where one stage with fewer was proposed before.
    state = state_of(one)
    state.evaluator.best.estimate = state.evaluator.best.step_time = 0.0
    [fewer] = answered(neighbours.fewer_microbatches(state), nothing)
    state.in_one_stage.add(fewer.num_microbatches)
    assert answered(neighbours.fewer_microbatches(state), nothing) == []
    # Not where the number is fixed, nor by a schedule that has its own.
    assert answered(neighbours.fewer_microbatches(state_of(plan, fixed=16)), nothing) == []
    other = dataclasses.replace(plan, schedule="zero-bubble")
    assert answered(neighbours.fewer_microbatches(state_of(other)), nothing) == []


def test_what_the_stage_search_likes_may_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the next smaller number of microbatches is tried."""
    liked = {8: 1.0, 4: 0.9, 2: 1.1}
    monkeypatch.setattr(Evaluator, "estimate", lambda self, asked, *_: Pipeline((), liked[asked.num_microbatches]))
    state = state_of(_two_stages()[0])
    found = answered(neighbours.fewer_microbatches(state), with_times({8: 0.9}))
    assert [each.num_microbatches for each in found] == [4, 8, 4, 8]


def test_finer_layers_where_one_stage_takes_much_longer() -> None:
    even = _two_stages()[0]
    first, second = even.stages
    assert answered(neighbours.finer_layers(state_of(even)), nothing) == []
    slow = dataclasses.replace(second, forward=3 * second.forward, backward=3 * second.backward)
    uneven = dataclasses.replace(even, stages=(first, slow))
    few = State(Evaluator(_analysis(), _HOSTS, AUTO, 4), None)
    few.plan = uneven
    [candidate] = answered(neighbours.finer_layers(few), nothing)
    assert (candidate.num_microbatches, candidate.num_layers) == (16, 8)
    assert candidate.groups is not None and groups_of(uneven).items() <= candidate.groups.items()
    assert answered(neighbours.finer_layers(state_of(uneven)), nothing) == []  # each layer has one product


def test_other_shapes_where_much_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their estimates, as long as they are a gain if they hide half as much again as the best plan does."""
    plan, lowered = Planner(_analysis(), _ONE_HOST, recipes.data_parallel(1)).plan()
    assert [stage.mesh.shape for stage in plan.stages] == [(4,)]
    expected: dict[tuple[int, ...], float] = {(1, 4): 1.5, (2, 2): 1.05}
    monkeypatch.setattr(SearchSpace, "shapes", lambda *_: ((4,), *expected))
    monkeypatch.setattr(Evaluator, "seconds_on", lambda _, m, mesh: expected[mesh.shape] if m == 1 else math.inf)

    def found(seconds: float, better: bool = False) -> list[Any]:
        state = State(Evaluator(_analysis(), _ONE_HOST, AUTO), None)
        state.evaluator.best = Incumbent(seconds, estimate=1.0)
        state.plan = dataclasses.replace(plan, step_time=seconds)
        answer = Outcome((plan, lowered), is_better=better)
        return [each.mesh and each.mesh.shape for each in answered(neighbours.other_shapes(state), lambda _: answer)]

    assert found(0.8) == [(2, 2)]  # 0.7 * 1.05 is less than 0.8, 0.7 * 1.5 is not
    assert found(0.97) == []  # too little is hidden
    expected[1, 4] = 1.1
    assert found(0.8) == found(0.8, better=True) == [(2, 2), (1, 4)]
    expected |= {(4, 1): 1.105, (1, 1, 4): 1.11}
    assert found(0.8) == [(2, 2), (1, 4)]  # two in vain
    assert found(0.8, better=True) == [(2, 2), (1, 4), (4, 1), (1, 1, 4)]
    assert answered(neighbours.other_shapes(state_of(_two_stages()[0])), nothing) == []  # a pipeline


def test_interleaved_rounds_rise_as_long_as_that_is_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then microbatches become fewer where the stage search finds that quicker."""
    liked = {4: 1.0, 2: 0.9}

    def estimate(self: Evaluator, asked: Candidate, shapes: ShapesFn, below: float = math.inf) -> Pipeline | None:
        seconds = liked[asked.num_microbatches]
        return Pipeline((), seconds) if seconds < below else None

    monkeypatch.setattr(Evaluator, "estimate", estimate)
    plan = dataclasses.replace(_two_stages()[0], num_microbatches=4)

    def answer(candidate: Candidate) -> Outcome:
        parts = dataclasses.replace(plan, stages=plan.stages * candidate.rounds, schedule="interleaved")
        return Outcome((parts, _two_stages()[1]), candidate.num_microbatches == 4 and candidate.rounds < 3)

    found = answered(neighbours.interleaved(state_of(plan)), answer)
    assert [(each.num_microbatches, each.rounds) for each in found] == [(4, 2), (4, 3), (2, 2)]  # 4 rounds are not
    assert [each.like is None for each in found] == [False, True, True]
    liked[2] = 1.1
    found = answered(neighbours.interleaved(state_of(plan)), answer)
    assert [(each.num_microbatches, each.rounds) for each in found] == [(4, 2), (4, 3)]
    found = answered(neighbours.interleaved(state_of(plan, fixed=4)), answer)
    assert [(each.num_microbatches, each.rounds) for each in found] == [(4, 2), (4, 3)]
    for fixed in (recipes.auto(schedule="1f1b"), recipes.auto(num_stages=2)):
        assert answered(neighbours.interleaved(state_of(plan, fixed)), answer) == []


@pytest.mark.parametrize(
    ("estimates", "tried", "proposed"),
    [
        ({32: 5.0, 16: 4.0, 8: 4.5}, [32, 16, 8], [16, 32]),  # until it is no gain
        ({16: 4.0}, [32, 16, 8], [16]),  # what is not below the best plan at first may be with larger ones
        ({32: 5.0, 16: 4.0, 8: 3.0, 4: 2.0, 2: 1.0}, [32, 16, 8, 4], [4, 8, 16, 32]),  # of 2 the bubble is too long
        ({}, [32, 16], []),
    ],
)
def test_equal_stages_in_larger_microbatches(
    estimates: Mapping[int, float], tried: list[int], proposed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(None)
    asked: list[int] = []

    def estimate(candidate: Candidate, shapes: ShapesFn | None = None, below: float = math.inf) -> Pipeline | None:
        asked.append(candidate.num_microbatches)
        seconds = estimates.get(candidate.num_microbatches, math.inf)
        return Pipeline((), seconds) if seconds < below else None

    monkeypatch.setattr(state.evaluator, "estimate", estimate)
    monkeypatch.setattr(SearchSpace, "uniform", lambda *_: iter([(2, (2,), 32)]))
    monkeypatch.setattr(SearchSpace, "rounds", lambda *_: ())
    assert [each.num_microbatches for each in answered(neighbours.equal_stages(state), nothing)] == proposed
    assert asked == tried


def test_equal_stages_that_are_not_the_best_may_be_in_more_rounds() -> None:
    """The one that gains most comes first; it goes on as long as that is a gain, and while one may be the best."""
    plan = dataclasses.replace(_two_stages()[0], num_microbatches=2)
    bubble = {rounds: 1 + 1 / (2 * rounds) for rounds in (1, 2, 3, 4)}  # of two stages in two microbatches
    state = state_of(dataclasses.replace(plan, step_time=1.0))
    few, many = Candidate(2, 2, mesh_shape=(2,), rounds=2), Candidate(64, 2, mesh_shape=(2,), rounds=2)
    state.equal_stages += [
        (many, dataclasses.replace(plan, step_time=1.0)),
        (few, dataclasses.replace(plan, step_time=1.04)),
    ]
    asked: list[Proposal] = []

    def answer(candidate: Candidate) -> Outcome:
        better = dataclasses.replace(plan, step_time=0.99)
        return Outcome((better, _two_stages()[1]), candidate.rounds == 3)

    proposals = neighbours.more_rounds(state)
    with contextlib.suppress(StopIteration):
        asked.append(next(proposals))
        while True:
            outcome = answer(asked[-1].candidate)
            state.plan = outcome.better[0] if outcome.better else state.plan
            asked.append(proposals.send(outcome))
    assert [(each.candidate.num_microbatches, each.candidate.rounds) for each in asked] == [(2, 3), (2, 4)]
    assert asked[0].seconds == pytest.approx(1.04 * bubble[3] / bubble[2])
    assert asked[1].seconds == pytest.approx(0.99 * bubble[4] / bubble[3])
    assert state.no_better == {(2, 2, 4)}


def test_equal_stages_are_interleaved_where_others_were_quicker_without() -> None:
    plan = dataclasses.replace(_two_stages()[0], num_microbatches=4)
    first, second = plan.stages
    wide = dataclasses.replace(second, mesh=dataclasses.replace(second.mesh, devices=(2, 3, 4), shape=(3,)))
    state = state_of(dataclasses.replace(plan, stages=(first, wide)))
    assert answered(neighbours.interleaved(state), nothing) == []
    state.evaluator.best.of_equal_groups = dataclasses.replace(plan, num_microbatches=16)
    [candidate] = answered(neighbours.interleaved(state), nothing)
    assert candidate.like is not None and candidate.like.stages == plan.stages
    assert candidate.num_microbatches == candidate.like.num_microbatches == 4


def test_without_a_bubble_there_may_be_fewer_microbatches() -> None:
    # One of 9 turns of 2 stages in 8 microbatches is a bubble; of 16, one of 17.
    plan = _two_stages()[0]
    plan = dataclasses.replace(plan, num_microbatches=8, step_time=9 / 17 * plan.step_time)
    found = answered(neighbours.zero_bubble(state_of(plan)), with_times({8: 3.0, 4: 0.5}))
    assert [each.num_microbatches for each in found] == [8]  # no better than the plan
    found = answered(neighbours.zero_bubble(state_of(plan)), with_times({8: 0.9, 4: 1.5, 2: 0.5}))
    assert [each.num_microbatches for each in found] == [8, 4]  # 4 is no better than 8
    assert all(each.like is plan for each in found)
    assert answered(neighbours.zero_bubble(state_of(plan, recipes.auto(schedule="1f1b"))), nothing) == []
    other = dataclasses.replace(plan, schedule="interleaved")
    assert answered(neighbours.zero_bubble(state_of(other)), nothing) == []


# How they are heard.


def heard(monkeypatch: pytest.MonkeyPatch, state: State, *some: Neighbour) -> tuple[list[int], list[int]]:
    """Numbers of microbatches of what is planned, and of what is better."""
    planned: list[int] = []
    _two_stages()  # planned before planning is patched, whichever test comes first

    def outcome(self: Evaluator, candidate: Candidate) -> Outcome:
        planned.append(candidate.num_microbatches)
        return with_times({2: 0.9, 4: 0.8, 8: 2.0})(candidate)

    monkeypatch.setattr(Evaluator, "outcome", outcome)
    return planned, [plan.num_microbatches for plan, _ in better_plans(state, some)]


def many(state: State) -> Proposals:
    yield Proposal(Candidate(8), 0.5)
    yield Proposal(Candidate(16), None)


def few(state: State) -> Proposals:
    outcome = yield Proposal(Candidate(2), 0.4)
    assert outcome.better is not None and state.plan is outcome.better[0]
    yield Proposal(Candidate(4), 0.6)


def test_who_expects_least_is_heard_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of which the stage search found nothing last."""
    state = state_of(None)
    assert heard(monkeypatch, state, many, few) == ([2, 8, 4, 16], [2, 4])
    assert state.proposals == {"many": 2, "few": 2}
    assert {name: plan.num_microbatches for name, plan in state.found_by.items()} == {"few": 4}


def test_what_a_method_does_without_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(None, dataclasses.replace(AUTO, without=frozenset({"few"})))
    assert heard(monkeypatch, state, many, few) == ([8, 16], [])
