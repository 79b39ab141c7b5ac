"""Plans of given stages: how a stage that needs more memory than the solver counted comes to fit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import Method
from autopar.passes.batch import BatchAnalysis
from autopar.passes.intra_op.shard import StageProblem
from autopar.passes.submeshes import mesh_at
from autopar.planning.finisher import Finisher, TooSlow, _Withheld
from autopar.planning.pricing import Prices
from autopar.planning.stage_costs import StageCosts
from tests import models
from tests.planned import analyse, cluster_of

_CLUSTER = cluster_of(1, 4, flops=1e10, memory_bandwidth=1e11, link=1e9, latency=1e-6, launch=1e-6)
_HALVES = [mesh_at(0, (2,)), mesh_at(2, (2,))]
_METHOD = recipes.auto(remat=False)


@functools.cache
def _analysis(is_chain: bool = False) -> BatchAnalysis:
    """Of eight layers, with a tanh after the last one, too, if it is a chain."""
    layer = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32), "b": jax.ShapeDtypeStruct((256,), jnp.float32)}
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((512, 256), jnp.float32))
    if is_chain:
        return analyse(models.sgd(models.dense_chain_loss), [layer] * 8, batch)
    return analyse(models.sgd(models.mlp_loss), {"layers": [layer] * 8}, batch)


class _Recorded(StageCosts):
    """Records for which stage how many bytes of memory were withheld from the solver."""

    def __init__(self, prices: Prices, method: Method) -> None:
        super().__init__(prices, method)
        self.withheld: list[tuple[int, float]] = []

    def problem(
        self, layered: Any, placed: Any, stage: int, mesh: Mesh, tied: bool = False, withheld: float = 0.0, *args: Any,
        **kwargs: Any,
    ) -> StageProblem:  # fmt: skip
        if not tied:
            self.withheld.append((stage, withheld))
        return super().problem(layered, placed, stage, mesh, tied, withheld, *args, **kwargs)


def _finisher(
    method: Method = _METHOD, cluster: Cluster = _CLUSTER, is_chain: bool = False
) -> tuple[Finisher, _Recorded]:
    finisher = Finisher(_analysis(is_chain), cluster, method)
    stages = _Recorded(finisher.stages.prices, method)
    finisher.stages = stages
    return finisher, stages


def _finish(
    finisher: Finisher, meshes: list[Mesh], m: int, schedule: Any = "1f1b", below: float = math.inf
) -> Any:  # fmt: skip
    layered = finisher.layering.layered(m, len(meshes) > 1)
    cuts = [i * layered.num_layers // len(meshes) for i in range(1, len(meshes))]
    return finisher.finish(*finisher.layering.placed(layered, cuts, schedule), meshes, schedule, below=below)


def _lowered_as(given: Iterator[tuple[float, float]]) -> Callable[..., Any]:
    """`Finisher._lowered` of one stage that needs these shares of the memory, and takes these seconds, in turn."""
    lowered = Finisher._lowered

    def as_given(self: Finisher, *args: Any) -> Any:
        programs, plan = lowered(self, *args)
        share, seconds = next(given)
        [stage] = plan.stages
        other = int(share * stage.memory.capacity) - stage.memory.total
        memory = dataclasses.replace(stage.memory, temporaries=stage.memory.temporaries + other)
        return programs, dataclasses.replace(
            plan, step_time=seconds, stages=(dataclasses.replace(stage, memory=memory),)
        )

    return as_given


def test_stages_as_they_were_given() -> None:
    finisher, stages = _finisher()
    plan, lowered = _finish(finisher, _HALVES, 8)
    assert [stage.mesh for stage in plan.stages] == _HALVES
    assert [sharding.mesh for sharding in lowered.shardings] == _HALVES
    assert plan.num_microbatches == 8
    assert 0 <= plan.gap <= 0.05
    # Each is solved once, the last first, with all of the memory.
    assert stages.withheld == [(1, 0.0), (0, 0.0)]


def test_interleaved_stages_begin_with_a_part_of_the_memory_each() -> None:
    finisher, stages = _finisher()
    plan, _ = _finish(finisher, _HALVES * 2, 8, "interleaved")
    assert [stage.mesh for stage in plan.stages] == _HALVES * 2
    memory = finisher.stages.prices.memory(_HALVES[0])
    assert {withheld for _, withheld in stages.withheld} == {memory / 2}
    assert plan.peak_memory <= memory


def test_one_interleaved_stage_may_need_most_of_the_memory() -> None:
    """All but three layers are in the first of four stages, two of which each device has."""

    def finished(limit: int | None) -> tuple[Any, list[float]]:
        finisher, stages = _finisher(dataclasses.replace(_METHOD, memory_limit=limit))
        layered, meshes = finisher.layering.layered(8, True), _HALVES * 2
        cuts = [layered.num_layers - i for i in (3, 2, 1)]
        assert layered.num_layers > 6
        found = finisher.finish(*finisher.layering.placed(layered, cuts, "interleaved"), meshes, "interleaved")
        return found, [withheld for stage, withheld in stages.withheld if stage == 0]

    (roomy, _), _ = finished(None)
    limit = int(1.02 * roomy.peak_memory)
    (plan, _), given = finished(limit)
    assert plan.peak_memory <= limit
    assert given[0] == limit / 2
    assert given[1] < limit / 2


@pytest.mark.parametrize(("others", "left"), [(20.0, 20.0), (40.0, 29.65), (100.0, 29.65)])
def test_a_stage_is_granted_what_it_needs_once(others: float, left: float) -> None:
    """Of 100 bytes it needs 70 in any case, and a little more."""
    withheld = _Withheld([50.0])
    assert withheld.grant(0, 100.0, others, 70.0)
    assert withheld.nbytes == pytest.approx([left])
    assert not withheld.grant(0, 100.0, 0.0, 70.0)


def test_what_needs_all_memory_is_granted_none() -> None:
    withheld = _Withheld([0.0])
    assert not withheld.grant(0, 100.0, 0.0, 120.0)


def test_a_stage_is_solved_again_with_less_memory() -> None:
    """Only the one that needs more than there is; and what it is given falls by what was not counted."""
    mesh = [mesh_at(0, (4,))]
    roomy, _ = _finish(_finisher()[0], mesh, 1)
    for share in (0.95, 0.9, 0.85):
        limit = int(share * roomy.peak_memory)
        finisher, stages = _finisher(dataclasses.replace(_METHOD, memory_limit=limit))
        plan, _ = _finish(finisher, mesh, 1)
        assert plan.peak_memory <= limit
        assert plan.step_time >= roomy.step_time
        given = [limit - withheld for _, withheld in stages.withheld]
        assert given == sorted(given, reverse=True)
        if len(given) > 1:
            break
    else:
        pytest.fail("no stage was solved again")


def test_what_fits_into_less_memory_fits_into_more() -> None:
    """What a choice needs beside what was counted does not keep another one from fitting."""
    mesh = [mesh_at(0, (4,))]
    roomy, _ = _finish(_finisher(is_chain=True)[0], mesh, 1)
    slower = math.inf
    for share in (0.62, 0.7, 0.8, 0.9):
        limit = int(share * roomy.peak_memory)
        method = dataclasses.replace(_METHOD, memory_limit=limit)
        plan, _ = _finish(_finisher(method, is_chain=True)[0], mesh, 1)
        assert plan.peak_memory <= limit
        assert plan.step_time <= 1.01 * slower
        slower = plan.step_time


def test_a_stage_that_was_given_too_little_memory_gets_some_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of what is lowered needs far less than there is."""
    quick = cluster_of(1, 4, flops=1e13, memory_bandwidth=1e13, link=1e9, latency=1e-6, launch=1e-6)
    mesh = [mesh_at(0, (4,))]
    roomy, _ = _finish(_finisher(cluster=quick)[0], mesh, 1)
    method = dataclasses.replace(_METHOD, memory_limit=roomy.peak_memory)
    fewer, more = [(1.45, 1.0), (0.6, 2.0), (0.999, 1.5)], [(1.45, 1.0), (0.6, 2.0), (1.1, 1.2), (0.999, 1.7)]
    monkeypatch.setattr("autopar.planning.finisher.keeps_gathered", lambda *_: False)
    for needs in (fewer, more):
        given = iter(needs)
        finisher, stages = _finisher(method, quick)
        with monkeypatch.context() as patched:
            patched.setattr(Finisher, "_lowered", _lowered_as(given))
            plan, _ = _finish(finisher, mesh, 1)
        assert plan.step_time == min(seconds for share, seconds in needs if share <= 1)
        first, second, third, *fourth = [nbytes for _, nbytes in stages.withheld]
        assert first == 0 < third < second
        assert all(third < nbytes < second for nbytes in fourth)
        assert next(given, None) is None


def test_a_plan_that_is_too_slow_is_not_made_to_fit() -> None:
    """What fits as it was solved is a plan, however slow."""
    mesh = [mesh_at(0, (4,))]
    roomy, _ = _finish(_finisher()[0], mesh, 1)
    assert _finish(_finisher()[0], mesh, 1, below=0.0)[0] == roomy
    for share in (0.95, 0.9, 0.85):
        method = dataclasses.replace(_METHOD, memory_limit=int(share * roomy.peak_memory))
        finisher, stages = _finisher(method)
        plan, _ = _finish(finisher, mesh, 1)
        if len(stages.withheld) > 1:
            break
    else:
        pytest.fail("no stage was solved again")
    again, stages = _finisher(method)
    with pytest.raises(TooSlow):
        _finish(again, mesh, 1, below=0.0)
    assert len(stages.withheld) == 1
    assert _finish(_finisher(method)[0], mesh, 1, below=2 * plan.step_time)[0] == plan
    careless, _ = _finisher(dataclasses.replace(method, without=frozenset({"bound_of_price"})))
    assert _finish(careless, mesh, 1, below=0.0)[0] == plan


def test_what_fits_since_it_gathers_again_is_kept_where_less_memory_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of what is lowered gathers again."""
    mesh = [mesh_at(0, (4,))]
    roomy, _ = _finish(_finisher()[0], mesh, 1)
    finisher, _ = _finisher(dataclasses.replace(_METHOD, memory_limit=roomy.peak_memory))
    given = iter([(1.1, 1.0), (0.9, 1.5), (1.1, 2.0)])
    monkeypatch.setattr(Finisher, "_lowered", _lowered_as(given))
    monkeypatch.setattr("autopar.planning.finisher.keeps_gathered", lambda *_: True)
    plan, _ = _finish(finisher, mesh, 1, below=1.8)
    assert plan.step_time == 1.5
    assert next(given, None) is None


def test_what_fits_in_no_way_is_named() -> None:
    mesh = [mesh_at(0, (4,))]
    roomy, _ = _finish(_finisher()[0], mesh, 1)
    finisher, _ = _finisher(dataclasses.replace(_METHOD, memory_limit=roomy.peak_memory // 20))
    assert _finish(finisher, mesh, 1) is None
    error = str(finisher.stages.infeasible("step"))
    assert "stage 0 of 1 needs at least" in error
    assert f"{roomy.peak_memory // 20 / 2**20:.1f} MiB are there" in error
