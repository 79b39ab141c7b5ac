"""What stages cost: bounds that hold, memory, what is computed again, and what is known without being solved."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.passes.batch import BatchAnalysis
from autopar.passes.intra_op.shard import StageProblem
from autopar.passes.stage_oracle import StageCost
from autopar.passes.submeshes import mesh_at
from autopar.planning.layering import Layered, Layering
from autopar.planning.pricing import Prices
from autopar.planning.stage_costs import StageCosts
from tests import models
from tests.planned import analyse, cluster_of

_LAYERS = 6
_CLUSTER = cluster_of(1, 4, flops=1e10, memory_bandwidth=1e11, link=1e9, latency=1e-6, launch=1e-6)
_SLOW = cluster_of(1, 4, flops=1e10, memory_bandwidth=1e11, link=1e8, latency=1e-6, launch=1e-6)
_MESHES = [mesh_at(0, shape) for shape in ((1,), (4,), (2, 2))]
_ONE = mesh_at(0, (1,))
_GAP = 1.02  # times the best: what the solver leaves at most, and more


@functools.cache
def _analysis() -> BatchAnalysis:
    layer = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32), "down": jax.ShapeDtypeStruct((256, 64), jnp.float32)}
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((1024, 64), jnp.float32))
    return analyse(models.sgd(models.residual_loss), [layer] * _LAYERS, batch)


@functools.cache
def _layered(m: int) -> Layered:
    found = Layering(_analysis(), _CLUSTER, AUTO, _LAYERS).layered(m, True)
    assert found.num_layers == _LAYERS
    return found


class _Counted(StageCosts):
    """Counts the problems that are made, by what they are of."""

    def __init__(self, prices: Prices, method: Method) -> None:
        super().__init__(prices, method)
        self.made: Counter[Any] = Counter()

    def problem(self, layered: Layered, placed: Any, stage: int, mesh: Any, *args: Any, **kwargs: Any) -> StageProblem:
        self.made[mesh.shape] += 1
        return super().problem(layered, placed, stage, mesh, *args, **kwargs)


def _costs(method: Method = AUTO, memory_limit: int | None = None, cluster: Cluster = _CLUSTER) -> _Counted:
    return _Counted(Prices(cluster, memory_limit), method)


def _seconds(cost: StageCost | None, m: int) -> float:
    assert cost is not None
    return m * cost.per_microbatch + cost.per_step


@pytest.mark.parametrize("m", [1, 8])
def test_least_below_bound_below_cost(m: int) -> None:
    costs, layered = _costs(), _layered(m)
    for mesh in _MESHES:
        for span in [(0, 1), (1, 3), (3, _LAYERS), (0, _LAYERS)]:
            least = _seconds(costs.least(layered, span, mesh), m)
            bound = _seconds(costs.bound(layered, "1f1b", span, mesh, 1), m)
            cost = _seconds(costs.cost(layered, "1f1b", span, mesh, 1), m)
            assert 0 < least <= bound * _GAP, (span, mesh.shape)
            assert bound <= cost * _GAP, (span, mesh.shape)
        assert costs.least_of_one(layered, mesh) <= _seconds(costs.least(layered, (0, _LAYERS), mesh), m) * _GAP
        whole = _seconds(costs.cost(layered, "1f1b", (0, _LAYERS), mesh, 1), m)
        assert 0 < costs.known_bound(layered, mesh, 0.01) <= whole
        assert costs.in_any_memory(layered, mesh) == pytest.approx(whole, rel=_GAP - 1)


def test_layers_cost_what_they_compute() -> None:
    """Twice the layers take twice the time on one device, which sends nothing."""
    costs, layered = _costs(), _layered(8)
    one = _seconds(costs.cost(layered, "1f1b", (1, 2), _ONE, 1), 8)
    two = _seconds(costs.cost(layered, "1f1b", (1, 3), _ONE, 1), 8)
    assert two == pytest.approx(2 * one, rel=0.05)


def test_alike_spans_are_solved_once() -> None:
    costs, layered = _costs(), _layered(8)
    first = costs.cost(layered, "1f1b", (2, 3), _ONE, 1)
    assert costs.cost(layered, "1f1b", (3, 4), _ONE, 1) == first
    assert costs.cost(layered, "1f1b", (3, 4), mesh_at(3, (1,)), 1) == first
    assert costs.made == {(1,): 1}
    assert costs.cost(layered, "1f1b", (5, 6), _ONE, 1) != first  # it has the loss
    assert costs.made == {(1,): 2}
    costs.least(layered, (0, 3), mesh_at(0, (2,)))
    assert costs.made == {(1,): 2}  # the bound by computing alone needs none


def test_memory_grows_with_microbatches_in_flight() -> None:
    costs, layered = _costs(), _layered(8)
    found = [costs.cost(layered, "1f1b", (0, 3), _ONE, number) for number in (1, 2, 4)]
    memory = [cost.memory for cost in found if cost is not None]
    assert len(memory) == 3 and memory[0] < memory[1] < memory[2]
    assert memory[2] - memory[1] == pytest.approx(2 * (memory[1] - memory[0]))


def test_what_does_not_fit_is_computed_again_or_named() -> None:
    layered, span = _layered(8), (0, 3)
    roomy = _costs().cost(layered, "1f1b", span, _ONE, 4)
    assert roomy is not None
    assert _costs().level(layered, "1f1b", span, _ONE, 4) == 0
    limit = int(0.8 * roomy.memory)

    tight = _costs(memory_limit=limit)
    cost = tight.cost(layered, "1f1b", span, _ONE, 4)
    assert cost is not None and cost.memory <= limit
    assert cost.per_microbatch > roomy.per_microbatch
    assert tight.level(layered, "1f1b", span, _ONE, 4) > 0

    keeping = _costs(recipes.auto(remat=False), memory_limit=limit)
    assert keeping.cost(layered, "1f1b", span, _ONE, 4) is None
    assert len(keeping.levels(layered)) == 1
    error = str(keeping.infeasible("step"))
    assert "a stage of layers 0 to 2 of 6 on 1 devices needs at least" in error
    assert f"{limit / 2**20:.1f} MiB are there" in error
    always = _costs(recipes.auto(remat=True))
    assert always.level(layered, "1f1b", span, _ONE, 1) == len(always.levels(layered)) - 1 > 0


def test_a_state_that_does_not_fit_is_known_without_a_problem() -> None:
    state = sum(v.nbytes for v in _analysis().graph.inputs[: 2 * _LAYERS])
    costs = _costs(memory_limit=state - 1)
    assert costs.least(_layered(8), (0, _LAYERS), _ONE) is None
    assert costs.least(_layered(8), (0, _LAYERS), mesh_at(0, (2,))) is not None
    assert not costs.made


def test_numbers_of_microbatches_that_cannot_fit_in_one_stage() -> None:
    """What is known of one number is a bound on more of them."""
    span, meshes = (0, _LAYERS), [mesh_at(0, (4,))]
    roomy = _costs(recipes.auto(remat=False)).cost(_layered(1), "1f1b", span, meshes[0], 1)
    assert roomy is not None
    refused: list[int] = []
    for share in (0.9, 0.7, 0.5, 0.3):
        costs = _costs(recipes.auto(remat=False), memory_limit=int(share * roomy.memory))
        assert costs.fewest_in_one_stage(_layered(1), meshes) == 0.0  # it was not asked for
        fits = {m: costs.cost(_layered(m), "1f1b", span, meshes[0], 1) is not None for m in (1, 2, 4, 8, 16)}
        for m in fits:
            fewest = costs.fewest_in_one_stage(_layered(m), meshes)
            assert not any(fits[n] for n in fits if m <= n < fewest)
            refused += [n for n in fits if m < n < fewest]
    assert refused
    assert _costs(memory_limit=1).fewest_in_one_stage(_layered(1), meshes) == 0.0
    method = dataclasses.replace(recipes.auto(remat=False), without=frozenset({"bound_of_memory"}))
    careless = _costs(method, memory_limit=int(roomy.memory) // 2)
    assert careless.cost(_layered(1), "1f1b", span, meshes[0], 1) is None
    assert careless.fewest_in_one_stage(_layered(1), meshes) == 0.0


def test_overheads_are_learned_from_spans_that_were_priced() -> None:
    """And held for more microbatches: what is sent for each is sent more often."""
    costs, mesh = _costs(), mesh_at(0, (4,))
    assert costs.overhead(_layered(4), 2, mesh) == (1.0, 1.0)
    cost = costs.cost(_layered(4), "1f1b", (2, 4), mesh, 1)
    seconds, times = costs.overhead(_layered(4), 2, mesh)
    assert times > 1  # links are slow
    assert seconds * times <= _seconds(cost, 4) / 2
    _, fewer = costs.overhead(_layered(2), 2, mesh)
    _, more = costs.overhead(_layered(8), 2, mesh)
    assert 1 <= fewer < times == more
    # Of a layer that is like none which was priced nothing is known, and of other meshes no more.
    assert costs.overhead(_layered(4), 5, mesh)[1] == 1.0
    assert costs.overhead(_layered(4), 2, mesh_at(0, (2,))) == (1.0, 1.0)


def test_overheads_are_those_of_smaller_meshes_until_more_is_known() -> None:
    costs, small, large = _costs(cluster=_SLOW), mesh_at(0, (2,)), mesh_at(0, (4,))
    costs.cost(_layered(4), "1f1b", (2, 4), small, 1)
    _, times = costs.overhead(_layered(4), 2, small)
    seconds, likely = costs.overhead(_layered(4), 2, large)
    assert likely == times > 1
    cost = costs.cost(_layered(4), "1f1b", (2, 4), large, 1)
    assert seconds * likely <= _seconds(cost, 4) / 2
    assert costs.overhead(_layered(4), 2, large)[1] > likely  # its own
    assert costs.overhead(_layered(4), 2, mesh_at(0, (2, 2))) == (1.0, 1.0)  # other axes
    assert costs.overhead(_layered(4), 2, _ONE) == (1.0, 1.0)  # nothing is known of fewer devices


def test_far_from_fitting_or_from_being_quick() -> None:
    layered, mesh = _layered(8), mesh_at(0, (4,))
    costs = _costs()
    assert not costs.are_far(layered, [mesh], 1.0)  # not asked for
    taken = _seconds(costs.cost(layered, "1f1b", (0, _LAYERS), mesh, 1), 8)
    assert not costs.are_far(layered, [mesh], taken)
    assert costs.are_far(layered, [mesh], taken / 2)
    assert not costs.are_far(layered, [mesh, _ONE], taken / 2)  # one was not asked for


def test_a_method_limits_what_stages_may_choose() -> None:
    layered, mesh = _layered(8), mesh_at(0, (4,))
    free = _costs().cost(layered, "1f1b", (0, _LAYERS), mesh, 1)
    zero = _costs(recipes.zero(3, 8)).cost(layered, "1f1b", (0, _LAYERS), mesh, 1)
    assert free is not None and zero is not None
    assert zero.memory < free.memory
    assert _seconds(zero, 8) >= _seconds(free, 8) / _GAP
