"""The solver against brute force, and against itself where one of its ways is closed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from autopar.passes.solver import eliminate
from autopar.passes.solver import solve as solver
from autopar.passes.solver.dual import CuttingPlane
from autopar.passes.solver.flat import flatten
from autopar.passes.solver.messages import Messages
from autopar.passes.solver.network import Network, NoChoiceLeft
from autopar.passes.solver.problem import FoundBy, Infeasible, Problem, Solution, Usage, evaluate, fits
from autopar.passes.solver.programs import highest, solve_program
from autopar.passes.solver.relax import Relaxation
from autopar.passes.solver.search import Search
from autopar.passes.solver.solve import Forced, solve
from tests.passes.solver.brute_force import brute_force
from tests.passes.solver.generate import problem_of, tiny_problem, train_step_problem, use, wide_problem

INF = math.inf
ROOT = pathlib.Path(__file__).parents[3]

# The example of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (google/iopddl, Apache-2.0).
EXAMPLE = problem_of(
    costs=([15], [55, 65], [25, 45, 35], [85, 75], [95]),
    edges=(
        (0, 1, [[30, 40]]),
        (0, 2, [[50, 10, 40]]),
        (1, 3, [[90, 10], [20, 80]]),
        (2, 4, [[60], [20], [30]]),
        (3, 4, [[70], [60]]),
    ),
    usages=(
        (use(30, 70, [10]),),
        (use(40, 70, [25, 25]),),
        (use(50, 120, [15, 20, 15]),),
        (use(110, 140, [10, 10]),),
        (use(110, 150, [15]),),
    ),
    limit=50,
)


def check_against_brute_force(problem: Problem) -> None:
    expected = brute_force(problem)
    if expected is None:
        with pytest.raises(Infeasible) as caught:
            solve(problem)
        assert caught.value.proved
        if math.isfinite(caught.value.smallest_peak):
            assert problem.limit is not None and caught.value.smallest_peak > problem.limit
        return
    found = solve(problem)
    assert found.cost == pytest.approx(expected.cost, rel=1e-12, abs=1e-12)
    assert found.lower_bound <= expected.cost * (1 + 1e-12)
    assert found.optimal
    assert (found.cost, found.peak) == evaluate(problem, found.choice)
    assert fits(problem, found.peak)


@pytest.mark.parametrize("limit", [1e9, None])
def test_a_limit_that_cannot_bind_changes_nothing(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eliminate, "MAX_TABLE", 100)
    random = np.random.default_rng(0)
    nodes = range(7)
    problem = problem_of(
        costs=[random.random(4) for _ in nodes],
        edges=[(u, v, random.random((4, 4))) for u, v in itertools.combinations(nodes, 2)],
        usages=[(use(0, 10, random.integers(1, 9, 4).tolist()),) for _ in nodes],
        limit=limit,
    )
    expected = brute_force(problem)
    assert expected is not None
    for start in (None, [0] * 7):
        assert solve(problem, start=start).cost == pytest.approx(expected.cost)


def test_a_start_is_no_better_than_what_fits() -> None:
    """The cheapest choice does not fit, and the start is not the best that does."""
    problem = problem_of(costs=([1, 2, 3],), edges=(), usages=((use(0, 10, [100, 10, 1]),),), limit=50)
    for start in (None, [1], [2]):
        found = solve(problem, start=start)
        assert found.cost == 2
        assert found.lower_bound == pytest.approx(2)


def tiny(seed: int) -> Problem:
    return tiny_problem(seed, memory=seed % 2 == 0, forbidden=seed % 3 == 0)


@pytest.mark.parametrize("seed", range(150))
def test_equals_brute_force(seed: int) -> None:
    check_against_brute_force(tiny(seed))


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("most_table", [2, eliminate.MAX_TABLE])
def test_gap_that_is_good_enough(seed: int, most_table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eliminate, "MAX_TABLE", most_table)
    problem = tiny(seed)
    expected = brute_force(problem)
    if expected is not None:
        found = solve(problem, gap=0.3)
        assert found.cost - 0.3 * abs(found.cost) <= expected.cost + 1e-9
        assert found.lower_bound <= expected.cost + 1e-9
        assert (found.cost, found.peak) == evaluate(problem, found.choice)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150, 1150))
def test_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(tiny(seed))


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force_where_elimination_is_too_wide(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # with tables of at most 2 entries nearly all goes to messages, CP-SAT and neighbourhoods
    monkeypatch.setattr(eliminate, "MAX_TABLE", 2)
    check_against_brute_force(tiny(seed))


def test_contest_example() -> None:
    # (0, 0, 0, 0, 0) costs 15+55+25+85+95 + 30+50+90+60+70 = 575; at time 50 it uses 10 + 25 + 15 = 50
    assert evaluate(EXAMPLE, (0, 0, 0, 0, 0)) == (575, 50)
    # nodes 15+55+35+75+95 = 275, edges 30+40+10+30+60 = 170
    assert evaluate(EXAMPLE, (0, 0, 2, 1, 0)) == (445, 50)
    assert evaluate(EXAMPLE, (0, 0, 1, 1, 0)) == (415, 55)  # nodes 285, edges 30+10+10+20+60 = 130
    assert evaluate(EXAMPLE, (0, 1, 2, 0, 0)) == (495, 50)  # nodes 295, edges 40+40+20+30+70 = 200
    found = solve(EXAMPLE)
    assert (found.choice, found.cost, found.peak, found.optimal) == ((0, 0, 2, 1, 0), 445, 50, True)
    assert solve(dataclasses.replace(EXAMPLE, limit=None)).cost == 415


def test_who_found_a_choice_is_told(caplog: pytest.LogCaptureFixture) -> None:
    free = dataclasses.replace(EXAMPLE, limit=None)
    with caplog.at_level(logging.DEBUG, solver.__name__):
        assert solve(free).found_by == FoundBy.ELIMINATION
        assert solve(free, start=(0, 0, 1, 1, 0)).found_by == FoundBy.START  # nothing is better
    told = [record.getMessage().split(": ")[1] for record in caplog.records]
    assert told == ["found by elimination", "found by start"]
    assert solve(wide_problem(60, 0), seconds=0.5).found_by in (
        FoundBy.MESSAGES, FoundBy.ANNEALING, FoundBy.REPAIR, FoundBy.INTEGER_PROGRAM, FoundBy.LIGHTEST
    )  # fmt: skip


def test_empty_problem_and_single_strategies() -> None:
    assert solve(problem_of((), (), (), 0.0)) == Solution((), 0.0, 0.0, 0.0)
    alone = problem_of(([2.0], [3.0]), ((0, 1, [[5.0]]),), ((use(0, 1, [4]),), ()), 4.0)
    assert solve(alone) == Solution((0, 0), 10.0, 10.0, 4.0)


def test_infeasible_says_how_small_a_peak_can_be() -> None:
    usages = tuple((use(0, 2, [4, 3]),) for _ in range(3))
    with pytest.raises(Infeasible) as caught:
        solve(problem_of(([0, 1],) * 3, (), usages, 8.0))
    assert (caught.value.smallest_peak, caught.value.limit, caught.value.proved) == (9.0, 8.0, True)


def test_infeasible_only_because_whole_strategies_do_not_mix() -> None:
    # each strategy overloads one of two times by 1, half of each would fit: prices alone prove nothing
    usages = ((use(0, 1, [4, 2]), use(1, 2, [2, 4])),)
    with pytest.raises(Infeasible) as caught:
        solve(problem_of(([0, 0],), (), usages, 3.0))
    assert (caught.value.smallest_peak, caught.value.proved) == (4.0, True)


def test_infinite_costs_alone_exclude_every_choice() -> None:
    # an odd cycle that cannot be coloured with two colours: every pair is fine for itself
    unequal = [[INF, 0], [0, INF]]
    cycle = problem_of(([0, 0],) * 3, ((0, 1, unequal), (1, 2, unequal), (2, 0, unequal)), ((),) * 3, None)
    with pytest.raises(Infeasible, match="every choice has an infinite cost"):
        solve(cycle)


def test_large_and_small_costs_keep_their_precision() -> None:
    # the optimum differs from the next choice by one part in 1e8, and all costs by a constant of 1e6
    rng = np.random.default_rng(0)
    costs = tuple(1e6 + 1e-2 * rng.random(4) for _ in range(5))
    usages = tuple((use(0, 1, rng.integers(1, 10, 4)),) for _ in range(5))
    check_against_brute_force(problem_of(costs, (), usages, 14.0))
    tiny_costs = tuple(1e-12 * rng.random(4) for _ in range(5))
    found = solve(problem_of(tiny_costs, (), usages, 14.0))
    expected = brute_force(problem_of(tiny_costs, (), usages, 14.0))
    assert expected is not None
    assert found.cost == pytest.approx(expected.cost, rel=1e-9)


def test_train_step_is_solved_to_optimality_and_equals_cp_sat(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = train_step_problem(1, 0, largest=12)
    exact = solve(problem)
    assert exact.optimal
    monkeypatch.setattr(eliminate, "MAX_TABLE", 2)
    found = solve(problem, seconds=60.0)
    assert found.optimal
    assert found.cost == pytest.approx(exact.cost, rel=1e-9)


@pytest.mark.parametrize("tightness", [0.5, 0.3, 0.15])
def test_memory_that_binds_is_solved_to_optimality(tightness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = train_step_problem(1, 3, largest=10, tightness=tightness)
    found = solve(problem, seconds=60.0)
    free = solve(dataclasses.replace(problem, limit=None))
    assert found.optimal
    assert free.cost <= found.cost and fits(problem, found.peak)
    monkeypatch.setattr(eliminate, "MAX_TABLE", 2)
    by_cp_sat = solve(problem, seconds=3.0)
    assert by_cp_sat.lower_bound <= found.cost * (1 + 1e-9)
    assert by_cp_sat.cost >= found.lower_bound * (1 - 1e-9)


def test_the_time_limit_leaves_a_choice_and_an_honest_bound() -> None:
    problem = train_step_problem(2, 0, largest=16, tightness=0.3)
    hasty, thorough = solve(problem, seconds=0.0), solve(problem, seconds=60.0)
    assert fits(problem, hasty.peak)
    assert hasty.lower_bound <= thorough.cost * (1 + 1e-9) and thorough.lower_bound <= hasty.cost * (1 + 1e-9)
    assert thorough.optimal


@pytest.mark.parametrize("tightness", [None, 0.3])
def test_equal_input_gives_equal_output(tightness: float | None) -> None:
    problem = train_step_problem(1, 1, largest=12, tightness=tightness)
    assert solve(problem, seconds=60.0, seed=3) == solve(problem, seconds=60.0, seed=3)


@pytest.mark.parametrize("seed", range(0, 60, 2))
def test_reductions_keep_the_optimum(seed: int) -> None:
    """Brute force on what the reductions leave, lifted, equals brute force on the problem."""
    problem = tiny_problem(seed, memory=True, forbidden=False)
    expected = brute_force(problem)
    network = Network.of(problem)
    try:
        network.reduce(dominated=True)
    except NoChoiceLeft:
        assert expected is None
        return
    nodes = list(network.unary)
    best = INF
    for flat in np.ndindex(*(network.unary[node].size for node in nodes)):
        positions = dict(zip(nodes, flat, strict=True))
        if (network.load(positions) <= network.slack).all():
            cost, peak = evaluate(problem, network.lift(positions, problem.num_nodes))
            assert fits(problem, peak)
            best = min(best, cost)
    assert best == (INF if expected is None else expected.cost)


@pytest.mark.parametrize("seed", range(20))
def test_marginals_are_the_least_costs_with_each_strategy(seed: int) -> None:
    problem = tiny_problem(seed, memory=False, forbidden=False)
    network = Network.of(problem)
    sizes = {node: cost.size for node, cost in network.unary.items()}
    plan = eliminate.plan_elimination(sizes, network.adjacent)
    assert plan is not None
    value, _, marginals = plan.marginals(network.unary, network.adjacent)
    least = {node: np.full(size, INF) for node, size in sizes.items()}
    for choice in np.ndindex(*sizes.values()):
        cost, _ = evaluate(problem, choice)
        for node, strategy in enumerate(choice):
            least[node][strategy] = min(least[node][strategy], cost)
    for node in sizes:
        np.testing.assert_allclose(marginals[node], least[node], rtol=1e-12, atol=1e-12)
    assert value == pytest.approx(min(least[0]))


def test_prices_at_which_the_least_cut_is_greatest() -> None:
    # cuts 0 + 2 p and 3 - 1 p: equal at p = 1, value 2; with p <= 0.5: 1
    zero = np.zeros(1)
    cuts = [CuttingPlane(zero, 0.0, np.array([2.0]), {}), CuttingPlane(zero, 3.0, np.array([-1.0]), {})]
    value, prices = highest(cuts, zero, np.array([10.0]))
    assert [value, *prices] == pytest.approx([2.0, 1.0])
    value, prices = highest(cuts, zero, np.array([0.5]))
    assert [value, *prices] == pytest.approx([1.0, 0.5])


# What a process that starts anew chooses, as text
_ELSEWHERE = """
from autopar.passes.solver.solve import Forced, solve
from tests.passes.solver.generate import wide_problem
found = solve(wide_problem(40, 2), seconds=60.0, seed=3)
print(found.choice, found.cost, found.lower_bound)
"""


def test_equal_input_gives_equal_output_in_all_processes() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _ELSEWHERE], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT,
            capture_output=True, text=True, check=True, timeout=200,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("(")


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.2])
def test_any_time_limit_gives_a_choice_and_is_kept(seconds: float) -> None:
    problem = wide_problem(120, 0)
    started = time.monotonic()
    found = solve(problem, seconds=seconds)
    assert fits(problem, found.peak) and math.isfinite(found.cost)
    assert found.lower_bound <= found.cost
    assert time.monotonic() - started < seconds + 30  # compilation, on a busy machine


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_wide_problem_without_a_limit_is_solved_in_no_time(seconds: float) -> None:
    """Pairs are forbidden so that what messages choose at first has an infinite cost; all zeros are allowed."""
    random = np.random.default_rng(0)
    edges = []
    for u, v in itertools.combinations(range(40), 2):
        if random.random() < 0.3:
            cost = np.where(random.random((12, 12)) < 0.5, np.inf, random.random((12, 12)))
            cost[0, 0] = 0.5
            edges.append((u, v, cost))
    found = solve(problem_of([random.random(12) for _ in range(40)], edges), seconds=seconds)
    assert found.lower_bound <= found.cost < math.inf


def test_nothing_worse_than_the_start_is_returned() -> None:
    problem = wide_problem(120, 0)
    good = solve(problem, seconds=3.0)
    found = solve(problem, seconds=0.0, start=good.choice)
    assert found.cost <= good.cost
    assert found.lower_bound <= found.cost
    hungry = dataclasses.replace(problem, limit=found.peak * 0.99)
    assert fits(hungry, solve(hungry, seconds=0.0, start=good.choice).peak)


def test_what_messages_find_may_be_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then neither annealing nor CP-SAT is asked; the bound is one all the same."""
    problem = wide_problem(120, 0)
    good = solve(problem, seconds=3.0)

    def asked(*_: object) -> None:
        raise AssertionError

    for name in ("_anneal", "_by_program", "_neighbourhoods"):
        monkeypatch.setattr(Search, name, asked)
    found = solve(problem, seconds=3.0, start=good.choice, polish=False)
    assert found.cost <= good.cost
    assert 0.8 * good.lower_bound < found.lower_bound <= good.cost
    with pytest.raises(AssertionError):
        solve(problem, seconds=3.0, start=good.choice)


def test_wide_problem_with_binding_memory_keeps_an_honest_bound() -> None:
    problem = wide_problem(40, 2)
    found = solve(problem, seconds=4.0)
    assert (found.cost, found.peak) == evaluate(problem, found.choice)
    assert fits(problem, found.peak)
    assert found.cost * 0.9 < found.lower_bound <= found.cost
    assert found.peak > 0.9 * (problem.limit or 0.0)


@pytest.mark.parametrize("seed", range(6))
def test_a_choice_of_which_strategies_are_gone_keeps_the_others(seed: int) -> None:
    problem = wide_problem(40, seed)
    before = solve(problem, seconds=0.5)
    problem = dataclasses.replace(problem, limit=1.2 * before.peak)
    network = Network.of(problem)
    gone = np.random.default_rng(seed).choice(problem.num_nodes, 4, replace=False).tolist()
    for node in gone:
        network.keep(node, network.labels[node] != before.choice[node])
    relaxation = Relaxation(network, np.zeros(network.slack.size), seed)
    search = Search(problem, 10.0, seed, highest, solve_program)
    at = search._flat_choice(relaxation, before)
    assert at is not None
    after = network.lift(dict(zip(relaxation.flat.nodes.tolist(), at.tolist(), strict=True)), problem.num_nodes)
    changed = {node for node in range(problem.num_nodes) if after[node] != before.choice[node]}
    cost, peak = evaluate(problem, after)
    assert math.isfinite(cost) and fits(problem, peak)
    assert changed == set(gone)
    ways = itertools.product(*(network.labels[node].tolist() for node in gone))
    choices = [[dict(zip(gone, way, strict=True)).get(n, k) for n, k in enumerate(before.choice)] for way in ways]
    least = min(c for c, p in (evaluate(problem, choice) for choice in choices) if fits(problem, p))
    assert least <= cost <= 1.05 * least


@pytest.mark.parametrize("seed", range(20))
def test_bound_of_messages_is_what_reduced_costs_leave(seed: int) -> None:
    """Costs of every choice: the bound plus the reduced costs of its nodes and edges, none below zero."""
    problem = tiny_problem(seed, memory=False, forbidden=False)
    network = Network.of(problem)
    messages = Messages(flatten(network))
    for _ in range(3):
        bound = messages.sweep(messages.flat.unary)
    base, nodes, edges = messages.reduced(messages.flat.unary)
    assert base == pytest.approx(bound)
    assert all((part >= -1e-9).all() for part in (*nodes.values(), *edges.values()))
    for choice in np.ndindex(*(cost.size for cost in problem.costs)):
        extra = sum(nodes[node][k] for node, k in enumerate(choice))
        extra += sum(pair[choice[u], choice[v]] for (u, v), pair in edges.items())
        assert base + extra == pytest.approx(evaluate(problem, choice)[0])


@pytest.mark.parametrize("seed", range(200))
def test_points_in_time_that_are_dropped_are_implied(seed: int) -> None:
    """Small loads and few times, so that many points tie: what keeps to the points that are left keeps to all."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, 4)
    usages = []
    for size in sizes:
        spans = np.sort(rng.integers(0, 7, (3, 2)), axis=1)
        usages.append(tuple(Usage(int(start), int(end), rng.integers(0, 3, size)) for start, end in spans))
    problem = Problem(tuple(np.zeros(size) for size in sizes), (), tuple(usages), float(rng.integers(2, 10)))
    network = Network.of(problem)
    with contextlib.suppress(NoChoiceLeft):
        network._drop_times()
        for choice in np.ndindex(*sizes):
            kept = bool((network.load(dict(enumerate(choice))) <= network.slack).all())
            assert kept == fits(problem, evaluate(problem, choice)[1])


@pytest.mark.parametrize("seed", range(40))
def test_a_forced_strategy_costs_what_the_problem_without_the_others_does(seed: int) -> None:
    """The reduction that all strategies of a node share takes none of them, however dear."""
    problem = tiny_problem(seed, memory=seed % 2 == 0, forbidden=seed % 3 == 0)
    for node, costs in enumerate(problem.costs):
        asked = Forced(problem, node)
        for strategy in range(costs.size):
            forced = np.where(np.arange(costs.size) == strategy, costs, INF)
            part = dataclasses.replace(
                problem, costs=tuple(forced if n == node else cost for n, cost in enumerate(problem.costs))
            )
            expected = brute_force(part)
            try:
                found = asked.solve(strategy, seconds=1.0, patience=10.0, gap=0.0)
            except Infeasible:
                assert expected is None
            else:
                assert expected is not None
                assert found.choice[node] == strategy
                assert found.cost == pytest.approx(expected.cost, rel=1e-9, abs=1e-12)
