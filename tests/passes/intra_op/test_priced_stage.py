"""Stage problems in which alike equations are tied, and their costs for every number of microbatches in flight."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.mesh import Mesh
from autopar.passes.intra_op.priced_stage import PricedStage
from autopar.passes.intra_op.shard import StageProblem
from autopar.passes.solver.problem import Infeasible, Solution, evaluate
from autopar.passes.solver.solve import solve
from autopar.planning import finisher
from autopar.planning.planner import Planner
from benchmarks.models import gpt
from tests import models
from tests.planned import analyse, analysis_of, cluster_of

CONFIG = gpt.GPTConfig(vocab_size=64, sequence_length=16, num_layers=4, width=32, num_heads=4, dropout=0.0)


def planner_of_gpt(config: gpt.GPTConfig, memory: int = 2**34) -> Planner:
    return Planner(analysis_of(gpt, config, 16), cluster_of(1, 4, memory=memory, link=1e9, launch=1e-7))


def planner_of_mlp(layers: int) -> Planner:
    """Square matrices in a row, whose products are worth splitting by columns and by rows in turn."""
    params = {"layers": [{"w": jnp.zeros((256, 256)), "b": jnp.zeros(256)} for _ in range(layers)]}
    examples = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    state = jax.eval_shape(lambda: models.sgd_state(params))
    analysis = analyse(models.sgd(models.mlp_loss), state, {"x": examples, "y": examples})
    return Planner(analysis, cluster_of(1, 4, link=1e9, latency=1e-6))


def stage_problems(planner: Planner, m: int, shape: tuple[int, ...] = (4,)) -> tuple[StageProblem, StageProblem]:
    """All layers as one stage: tied, and not."""
    layered = planner.evaluator.layering.layered(m, False)
    placed = layered.placed([])
    mesh = Mesh(tuple(range(4)), shape, ("x", "y")[: len(shape)])
    tied, free = (planner.evaluator.stages.problem(layered, placed, 0, mesh, tied=tied) for tied in (True, False))
    return tied, free


@pytest.mark.parametrize(("scan", "m", "shape"), [(False, 4, (4,)), (True, 1, (2, 2))])
def test_a_tied_choice_costs_and_holds_what_it_does_equation_by_equation(
    scan: bool, m: int, shape: tuple[int, ...]
) -> None:
    tied, free = stage_problems(planner_of_gpt(dataclasses.replace(CONFIG, scan=scan)), m, shape)
    random = np.random.default_rng(0)
    for key, (_, options) in free.parts.items():
        assert options.assignments == tied.parts[key][1].assignments
    for slot, (_, shardings) in free.layouts.items():
        assert shardings.each == tied.layouts[slot][1].each
    # Random choices seldom have a finite cost; the solved one does.
    choices = [tuple(int(random.integers(cost.size)) for cost in tied.numbers.costs) for _ in range(2)]
    choices.append(solve(tied.numbers.problem(2), seconds=2.0).choice)
    assert math.isfinite(evaluate(tied.numbers.problem(2), choices[-1])[0])
    for choice in choices:
        chosen = free.untied(tied, choice)
        cost, peak = evaluate(tied.numbers.problem(2), choice)
        other_cost, other_peak = evaluate(free.numbers.problem(2), chosen)
        if math.isfinite(other_cost):
            assert cost == pytest.approx(other_cost)
            assert tied.numbers.loop_seconds(Solution(choice, cost, cost, peak)) == pytest.approx(
                free.numbers.loop_seconds(Solution(tuple(chosen), cost, cost, peak))
            )
        else:
            assert math.isinf(cost)
        assert peak == pytest.approx(other_peak)


def test_tied_problems_do_not_grow_with_the_layers() -> None:
    few, many = (stage_problems(planner_of_gpt(dataclasses.replace(CONFIG, num_layers=n)), 2) for n in (4, 8))
    assert len(many[1].numbers.costs) > 1.6 * len(few[1].numbers.costs)
    assert len(many[0].numbers.costs) < 1.1 * len(few[0].numbers.costs)


@pytest.mark.parametrize("model", ["gpt", "square mlp"])
def test_ties_lose_little(model: str) -> None:
    tied, free = stage_problems(planner_of_gpt(CONFIG) if model == "gpt" else planner_of_mlp(4), 2)
    best = solve(free.numbers.problem(1), seconds=10)
    assert best.gap < 0.01
    assert best.cost * 0.99 <= solve(tied.numbers.problem(1), seconds=10).cost <= best.cost * 1.02


def test_costs_rise_with_the_microbatches_in_flight_and_every_choice_fits() -> None:
    planner = planner_of_gpt(CONFIG)
    layered = planner.evaluator.layering.layered(4, True)
    placed = layered.placed([layered.num_layers // 2])
    roomy = planner.evaluator.stages.problem(layered, placed, 0, Mesh((0, 1), (2,), ("x",)), tied=True)
    hungry = solve(dataclasses.replace(roomy.numbers.problem(1), limit=None), seconds=5.0)
    limit = (roomy.numbers.least_bytes(4) + roomy.numbers.peak_bytes(hungry.choice, 4)) / 2
    tied = StageProblem(dataclasses.replace(roomy.setting, memory_limit=limit))
    priced = PricedStage(tied.numbers, 4, 5.0)
    costs: list[float] = []
    for in_flight in (1, 2, 3, 4):
        try:
            solution = priced.solution(in_flight)
        except Infeasible:
            costs.append(math.inf)
            continue
        cost, peak = evaluate(tied.numbers.problem(in_flight), solution.choice)
        assert cost == pytest.approx(solution.cost)
        assert peak == pytest.approx(solution.peak)
        assert peak <= limit
        costs.append(cost)
        assert cost <= solve(tied.numbers.problem(in_flight), seconds=5.0).cost * 1.011
    assert costs == sorted(costs)
    assert math.isfinite(costs[0])
    assert costs[-1] > costs[0], "the memory should matter"


@pytest.mark.parametrize(("m", "gradients"), [(1, 0), (2, 1)], ids=["renewed as gradients come", "after the loop"])
def test_renewed_leaves_take_the_place_of_the_last(m: int, gradients: int) -> None:
    params = {"layers": [{"w": jnp.zeros((256, 256)), "b": jnp.zeros(256)} for _ in range(4)]}
    examples = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    state = jax.eval_shape(lambda: models.adam_state(params))
    analysis = analyse(models.adam(models.mlp_loss), state, {"x": examples, "y": examples})
    planner = Planner(analysis, cluster_of(1, 1))
    layered = planner.evaluator.layering.layered(m, False)
    problem = planner.evaluator.stages.problem(layered, layered.placed([]), 0, Mesh((0,), (1,), ("x",)), tied=False)
    one = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    held = problem.numbers.least_bytes(1) / one
    assert 0 < held - (3 + gradients) < 0.6, "parameters, two moments; a layer or two on the way"


def test_what_cannot_fit_is_refused_with_the_least_that_is_needed() -> None:
    tied, _ = stage_problems(planner_of_gpt(CONFIG, memory=1000), 4)
    with pytest.raises(Infeasible) as caught:
        PricedStage(tied.numbers, 4, 1.0).solution(1)
    assert caught.value.smallest_peak > 1000


def test_what_is_far_from_being_good_or_from_fitting() -> None:
    """One stage that takes, or needs, a little more than there is may be good on a mesh of another shape."""
    mesh = Mesh((0, 1, 2, 3), (4,), ("x",))
    tied = stage_problems(planner_of_gpt(CONFIG), 1)[0].numbers
    cost, least = PricedStage(tied, 1, 1.0).cheapest.cost, tied.least_bytes(1)

    def is_far(seconds: float, memory: float = 2**34, asked: bool = True, remat: bool | None = False) -> bool:
        planner = planner_of_gpt(CONFIG, memory=int(memory))
        planner.evaluator.stages.method = dataclasses.replace(planner.evaluator.stages.method, remat=remat)
        layered = planner.evaluator.layering.layered(1, False)
        if asked:
            planner.evaluator.stages.bound(layered, "1f1b", (0, layered.num_layers), mesh, 1)
        return planner.evaluator.stages.are_far(layered, [mesh], seconds)

    assert [is_far(share * cost) for share in (0.5, 0.9, 2.0)] == [True, False, False]
    assert [is_far(2 * cost, share * least) for share in (0.5, 0.9)] == [True, False]
    assert is_far(0.5 * cost, 0.9 * least)
    assert not is_far(2 * cost, 0.5 * least, remat=None)  # it fits if the backward pass computes more
    assert is_far(0.5 * cost, remat=None)
    assert not is_far(0.5 * cost, asked=False)
    impossible = mock.PropertyMock(side_effect=Infeasible(math.inf, None, proved=True))
    with mock.patch.object(PricedStage, "known_cost", impossible):
        assert not is_far(0.5 * cost)


def test_finishing_does_not_begin_with_a_solution_far_from_its_bound() -> None:
    """The search ends its solutions early: such a one may be far from the best."""
    planner = planner_of_gpt(CONFIG)
    layered = planner.evaluator.layering.layered(4, False)
    placed, mesh = layered.placed([]), Mesh((0, 1, 2, 3), (4,), ("x",))
    tied = stage_problems(planner, 4)[0].numbers.problem(1)
    far = solve(dataclasses.replace(tied, limit=None), seconds=0.0)
    for bound, is_solved_again in ((far.cost, False), (0.5 * far.cost, True)):
        found = dataclasses.replace(far, lower_bound=bound)
        with (
            mock.patch.object(planner.evaluator.stages, "solution", return_value=found),
            mock.patch.object(finisher, "solve", wraps=solve) as solved,
        ):
            assert planner.evaluator.finisher.finish(layered, placed, [mesh], "1f1b") is not None
        sizes = {len(call.args[0].costs) for call in solved.call_args_list}
        assert (len(tied.costs) in sizes) == is_solved_again


@pytest.mark.parametrize("first", [0, 1])
def test_spans_on_both_sides_of_a_cut_are_priced_apart(first: int) -> None:
    """They are stages of one placed step: three layers take nine products, one without its input's gradient two."""
    planner = planner_of_mlp(4)
    layered = planner.evaluator.layering.layered(2, True)
    assert layered.num_layers == 4
    spans = [(0, 1), (1, 4)]
    found = {
        span: planner.evaluator.stages.cost(layered, "1f1b", span, Mesh((0,), (1,), ("x",)), 1)
        for span in (spans[first], spans[1 - first])
    }
    one, three = (found[span] for span in spans)
    assert one is not None and three is not None
    assert three.per_microbatch == pytest.approx(4.5 * one.per_microbatch, rel=0.2)
