"""What the search may try, by arithmetic alone."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.ir.plan_record import StageMemory
from autopar.planning.layering import Layering
from autopar.planning.planner import Planner
from autopar.planning.search_space import SearchSpace, has_room
from tests import models
from tests.planned import analyse, cluster_of

_BATCH = dict.fromkeys("xy", jnp.zeros((64, 256)))
_ANALYSIS = analyse(models.sgd(models.chain_loss), [jnp.zeros((256, 256))] * 4, _BATCH)


_HOSTS = cluster_of(2, 4)


def space_of(cluster: Cluster = _HOSTS, method: Method = AUTO) -> SearchSpace:
    return SearchSpace(Layering(_ANALYSIS, cluster, method, None))


def with_memory(plan: Plan, m: int, **memory: int) -> Plan:
    """The plan in so many microbatches, as if each stage needed so many bytes of 100."""
    needs = StageMemory(**{"state": 0, "gradients": 0, "activations": 0, "temporaries": 0, "capacity": 100, **memory})
    stages = tuple(dataclasses.replace(stage, memory=needs) for stage in plan.stages)
    return dataclasses.replace(plan, num_microbatches=m, stages=stages)


def test_numbers_of_microbatches() -> None:
    space = space_of()
    assert space.divisors == space.many[::-1] == [2, 4, 8, 16, 32, 64]
    assert space.likely == [32, 64]  # at most 8 for each device
    assert space.more == []
    few = space_of(cluster_of(1, 2))
    assert (few.likely, few.more) == ([8, 16], [32, 64])
    # A recipe cuts each microbatch over the data shards.
    assert space_of(method=recipes.zero(3, None)).divisors == [2, 4, 8]


def test_the_fewest_microbatches_that_one_stage_has_memory_for() -> None:
    plan, _ = Planner(_ANALYSIS, _HOSTS, recipes.data_parallel(8)).plan()
    space = space_of()
    # 20 bytes, of which 10 grow: 8 times as much for 2 microbatches instead of 16, 90 in all.
    assert space.fewer(with_memory(plan, 16, state=10, activations=6, temporaries=4)) == 2
    assert space.fewer(with_memory(plan, 16, state=30, activations=6, temporaries=4)) == 4  # 110 and 70
    assert space.fewer(with_memory(plan, 16, state=90, activations=6, temporaries=4)) == 8  # none: the next
    assert space.fewer(with_memory(plan, 2, state=10)) is None
    pipeline, _ = Planner(_ANALYSIS, _HOSTS, recipes.pipeline([(2, (4,)), (2, (4,))], 8)).plan()
    assert space.fewer(with_memory(pipeline, 16, state=10)) == 8  # whatever there is memory for


def test_more_rounds_have_more_microbatches_in_flight() -> None:
    plan, _ = Planner(_ANALYSIS, _HOSTS, recipes.pipeline([(2, (4,)), (2, (4,))], 8)).plan()
    assert has_room(with_memory(plan, 8, activations=40), 2)
    assert not has_room(with_memory(plan, 8, activations=90), 2)


@pytest.mark.parametrize(
    ("method", "shapes", "first"),
    [
        (AUTO, [(8,), (2, 4), (4, 2)], [(8,), (2, 4)]),
        (recipes.auto(mesh_shape=(4, 2)), [(4, 2)], [(4, 2)]),
        (recipes.data_parallel(), [(8,)], [(8,)]),  # all devices, however many
        (recipes.zero(3), [(8,)], [(8,)]),
        (recipes.megatron(2, 4, 1), [(2, 4)], [(2, 4)]),
        (recipes.auto(tensor=True), [(2, 4), (4, 2), (1, 8)], [(2, 4), (1, 8)]),  # along axis y
    ],
    ids=["free", "given", "data parallel", "ZeRO", "megatron", "tensor parallel"],
)
def test_shapes_of_two_hosts(method: Method, shapes: list[tuple[int, ...]], first: list[tuple[int, ...]]) -> None:
    space = space_of(method=method)
    assert list(space.shapes(space.cluster, 0, 8)) == shapes
    assert list(space.first_shapes(space.cluster, 0, 8)) == first


def test_state_is_sharded_along_an_axis_for_the_odd_part_of_a_number() -> None:
    six = cluster_of(3, 2)
    for method, shape in (
        (recipes.zero(1), (3, 2)), (recipes.data_parallel(), (6,)), (recipes.megatron(6, 1, 1, zero=1), (3, 2, 1)),
        (recipes.megatron(3, 2, 1, zero=1), (3, 2)), (recipes.megatron(6, 1, 1), (6, 1)),
    ):  # fmt: skip
        assert list(space_of(six, method).shapes(six, 0, 6)) == [shape]


def test_shapes_of_whole_hosts() -> None:
    space = space_of()
    assert list(space.shapes_of_hosts(space.cluster, 4, 4)) == [(4,)]
    assert list(space.shapes_of_hosts(space.cluster, 0, 8)) == []
    assert list(space.shapes_of_hosts(space.cluster, 0, 2)) == []


def test_freedom_of_methods() -> None:
    free = space_of()
    assert free.may_be_one_stage and free.may_be_a_pipeline and free.may_choose_the_schedule
    assert not space_of(method=recipes.auto(num_stages=2)).may_be_one_stage
    assert not space_of(method=recipes.auto(pipeline=True)).may_be_one_stage
    assert not space_of(method=recipes.data_parallel()).may_be_a_pipeline
    assert not space_of(cluster_of(1, 1)).may_be_a_pipeline
    assert not space_of(method=recipes.auto(schedule="gpipe")).may_choose_the_schedule
