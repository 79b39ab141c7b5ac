from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from autopar.passes.solver.problem import (
    Infeasible,
    MalformedProblem,
    Solution,
    evaluate,
    peak_memory,
)
from tests.passes.solver.brute_force import brute_force
from tests.passes.solver.generate import problem_of, use

INF = math.inf


def test_cost_adds_nodes_and_parallel_edges() -> None:
    p = problem_of([[1, 2], [10, 20]], [(0, 1, [[100, 200], [300, 400]]), (1, 0, [[1000, 2000], [3000, 4000]])])
    # 2 + 10 + edge 0->1 [1][0] = 300 + edge 1->0 [0][1] = 2000
    assert evaluate(p, (1, 0)) == (2312, 0)


def test_an_infinite_entry_makes_the_cost_infinite() -> None:
    assert evaluate(problem_of([[1, INF]]), (1,)) == (INF, 0)
    assert evaluate(problem_of([[1], [2]], [(0, 1, [[INF]])]), (0, 0)) == (INF, 0)


def test_peak_counts_half_open_lifetimes() -> None:
    p = problem_of(
        [[0, 0], [0], [0]],
        usages=[[use(0, 2, [3, 5])], [use(2, 4, [4]), use(3, 5, [1])], [use(7, 7, [100])]],
    )
    # time 0, 1: 3 or 5; time 2: 4; time 3: 4 + 1; time 4: 1; [7, 7) is never live
    assert peak_memory(p, (0, 0, 0)) == 5
    assert peak_memory(problem_of([[0]], usages=[[use(0, 2, [3]), use(1, 3, [4])]]), (0,)) == 7
    assert peak_memory(problem_of([]), ()) == 0


def test_fractions_of_bytes_are_rounded_up() -> None:
    assert use(0, 1, [0.2, 3.0]).bytes.tolist() == [1, 3]


def test_arrays_are_copied_and_read_only() -> None:
    cost = np.array([1.0, 2.0])
    p = problem_of([cost])
    cost[0] = 5
    assert p.costs[0][0] == 1
    with pytest.raises(ValueError, match="read-only"):
        p.costs[0][0] = 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: problem_of([[]]), r"node 0 needs a vector of at least one cost, got shape \(0,\)"),
        (lambda: problem_of([[1], [[1, 2]]]), r"node 1 needs a vector of at least one cost, got shape \(1, 2\)"),
        (lambda: problem_of([[math.nan]]), "node 0 has a cost that is NaN or -inf"),
        (lambda: problem_of([[-INF]]), "node 0 has a cost that is NaN or -inf"),
        (lambda: problem_of([[1]], [(0, 0, [[1]])]), "edge 0 joins 0 and 0: two different nodes of 1 needed"),
        (lambda: problem_of([[1]], [(0, 1, [[1]])]), "edge 0 joins 0 and 1: two different nodes of 1 needed"),
        (
            lambda: problem_of([[1], [1, 2]], [(0, 1, [[1], [2]])]),
            r"edge 0 from 0 to 1 has shape \(2, 1\), its nodes have 1 and 2 strategies",
        ),
        (lambda: problem_of([[1], [1]], [(0, 1, [[math.nan]])]), "edge 0 from 0 to 1 has a cost that is NaN or -inf"),
        (lambda: problem_of([[1], [1]], usages=[()]), "1 nodes have usages, 2 have costs"),
        (
            lambda: problem_of([[1, 2]], usages=[[use(0, 1, [1])]]),
            "node 0 has 2 strategies, one of its usages 1",
        ),
        (lambda: problem_of([[1]], limit=-1), "the memory limit must be None or a number of bytes, got -1"),
        (lambda: problem_of([[1]], limit=math.nan), "the memory limit must be None or a number of bytes, got nan"),
        (lambda: use(3, 2, [1]), "a usage ends at 2, before it starts at 3"),
        (lambda: use(0, 1, [-1]), "a usage needs finite, non-negative bytes per strategy"),
        (lambda: use(0, 1, [INF]), "a usage needs finite, non-negative bytes per strategy"),
    ],
)
def test_malformed_problems_name_what_is_wrong(make: Callable[[], object], message: str) -> None:
    with pytest.raises(MalformedProblem, match=message):
        make()


def test_malformed_choices_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="a choice of 1 strategies for 2 nodes"):
        evaluate(problem_of([[1], [1]]), (0,))
    with pytest.raises(ValueError, match="node 1 has 1 strategies, strategy -1 was chosen"):
        evaluate(problem_of([[1], [1]]), (0, -1))


def test_gap_and_optimality() -> None:
    assert Solution((), 200.0, 150.0, 0.0).gap == 0.25
    assert not Solution((), 200.0, 150.0, 0.0).optimal
    assert Solution((), 200.0, 200.0 - 1e-8, 0.0).optimal
    assert Solution((), 0.0, 0.0, 0.0).optimal
    assert Solution((), 0.0, -1.0, 0.0).gap == INF


def test_brute_force_on_a_problem_by_hand() -> None:
    p = problem_of([[0, 3], [0, 4]], [(0, 1, [[9, 1], [1, INF]])], [[use(0, 1, [6, 2])], [use(0, 1, [2, 1])]], 7)
    # (0, 0): 9, 8 bytes; (0, 1): 0 + 4 + 1 = 5, 7 bytes; (1, 0): 3 + 0 + 1 = 4, 4 bytes; (1, 1): infinite
    assert brute_force(p) == Solution((1, 0), 4, 4, 4)
    assert brute_force(problem_of([[1]], usages=[[use(0, 1, [2])]], limit=1)) is None
    assert brute_force(problem_of([[INF]])) is None
    assert brute_force(problem_of([])) == Solution((), 0, 0, 0)


def test_messages_of_infeasible() -> None:
    assert str(Infeasible(9, 7, True)) == "no choice fits: the smallest peak found is 9 bytes, the limit is 7 bytes"
    assert str(Infeasible(9, 7, False)).startswith("no choice that fits was found within the work limit")
    assert str(Infeasible(INF, None, True)).startswith("every choice has an infinite cost")
