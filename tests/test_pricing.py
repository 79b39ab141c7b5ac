"""Which groups of devices look alike to the planner, and what starting a program costs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.cost_model.fusion import memory_traffic
from autopar.cost_model.program_cost import op_costs
from autopar.ir.graph import Graph, Phase, Value
from autopar.ir.local import Compute, LocalOp, LocalProgram, Port, Reshard, local_bytes
from autopar.ir.mesh import Cluster, DeviceKind, Host, Link, Mesh, XlaBackend
from autopar.ir.program import Program
from autopar.ir.rule import product_sizes
from autopar.ir.sharding import ReshardStep, Sharding
from autopar.passes.rules.table import rule_of
from autopar.passes.submeshes import candidate_shapes, mesh_at
from autopar.planning.pricing import Prices
from autopar.tracing.trace import trace
from tests import models
from tests.clusters import IN_TURN
from tests.planned import cluster_of

FAST = DeviceKind("fast", 1, 1.0, {}, 1.0, 1.0, 0.0, 0.0)
SLOW = dataclasses.replace(FAST, name="slow")
LINK, NETWORK = Link("link", 0.0, 4.0), Link("network", 0.0, 1.0)
F4, S4, F2 = Host(FAST, 4, LINK), Host(SLOW, 4, LINK), Host(FAST, 2, LINK)


def look(cluster: Cluster, mesh: Mesh) -> Hashable:
    """Device by device: which share a host, their kinds and links, and the slowest link to a neighbour outside."""
    hosts = [cluster.host_of(d) for d in mesh.devices]
    within = tuple(h - hosts[0] for h in hosts)
    inside = tuple(
        (cluster.hosts[cluster.host_of(d)].kind.name, cluster.hosts[cluster.host_of(d)].link) for d in mesh.devices
    )
    borders = [(mesh.devices[0], mesh.devices[0] - 1), (mesh.devices[-1], mesh.devices[-1] + 1)]
    outward = any(
        0 <= there < cluster.num_devices and cluster.host_of(here) != cluster.host_of(there) for here, there in borders
    )
    return within, inside, outward


def named(hosts: tuple[Host, ...]) -> str:
    return ", ".join(f"{host.num_devices} {host.kind.name}" for host in hosts)


@pytest.mark.parametrize("hosts", [(F4,) * 4, (F4, S4, S4, F4), (F4, F2, F4, F2), (S4, F4, F4, F2)], ids=named)
def test_alike_groups_cannot_be_told_apart(hosts: tuple[Host, ...]) -> None:
    cluster = Cluster("test", hosts, NETWORK)
    prices = Prices(cluster)
    number = cluster.num_devices
    groups = [(a, n) for a in range(number) for n in range(1, number - a + 1) if candidate_shapes(cluster, a, n)]
    for a, b in itertools.combinations(groups, 2):
        same = look(cluster, mesh_at(a[0], (a[1],))) == look(cluster, mesh_at(b[0], (b[1],)))
        assert (prices.group(*a) == prices.group(*b)) == same, (a, b)


def test_meshes_out_of_order_are_like_no_others() -> None:
    prices = Prices(Cluster("test", (F4, F4), NETWORK))
    assert prices.surroundings(mesh_at(0, (4,))) == prices.surroundings(mesh_at(4, (4,)))
    assert prices.surroundings(Mesh((0, 2, 1, 3), (4,), ("x",))) != prices.surroundings(mesh_at(0, (4,)))


def kind_of(cluster: Cluster, kind: DeviceKind) -> Cluster:
    return dataclasses.replace(cluster, hosts=(dataclasses.replace(cluster.hosts[0], kind=kind),))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("hosts", [(F4,) * 6, (F4, F4, S4, S4, F4, F4), (F2, F4, F4, F2, F4)], ids=named)
def test_transfers_between_alike_meshes_are_planned_once(hosts: tuple[Host, ...]) -> None:
    """Against prices that know no other pair of meshes."""
    cluster = Cluster("test", hosts, NETWORK)
    value = Value(0, (16, 32), np.dtype("float32"))
    held, wanted = Sharding(((), ("x",))), Sharding((("x",), ()))
    meshes = [
        Mesh(tuple(range(start, start + size)), (size,), ("x",))
        for size in (1, 2, 4, 8)
        for start in range(0, cluster.num_devices - size + 1, size)
    ]
    prices, kinds = Prices(cluster), set[Hashable]()
    for source, target in itertools.permutations(meshes, 2):
        alone = Prices(cluster).transfer_plan(value, held, source, wanted, target)
        assert prices.transfer_plan(value, held, source, wanted, target) == alone
        kinds.add(prices._between(source, target))
    assert len(kinds) < len(meshes) * (len(meshes) - 1)


def test_a_program_sets_aside_its_temporaries_and_results_but_not_the_state_that_it_replaces() -> None:
    cluster = cluster_of(1, 2)
    kind = cluster.hosts[0].kind.with_measured(allocations=((1.0, 1e6),))
    slow = kind_of(cluster, kind)
    step = autopar.parallelize(models.sgd(models.mlp_loss), cluster=cluster, method=recipes.data_parallel(1))
    args = models.sgd_state(models.mlp_params((32, 64, 16))), models.mlp_batch(32, (32, 64, 16))
    plan = step.plan(*args)
    slower = step.plan(*args, method=dataclasses.replace(plan, cluster=slow))
    expected = plan.stages[0].memory.temporaries / 1e6  # the loss, a new result, is one of them in a plan
    assert slower.step_time - plan.step_time == pytest.approx(expected)
    more = kind_of(slow, kind.with_measured(temporaries={"convolutions": 9.0, "others": 3.0}))
    slowest = step.plan(*args, method=dataclasses.replace(plan, cluster=more))
    assert slowest.stages[0].memory.temporaries == pytest.approx(3 * plan.stages[0].memory.temporaries, abs=12)
    assert slowest.step_time - plan.step_time == pytest.approx(3 * expected, abs=1.2e-5)
    split = slower.report(explain=0).split
    assert split is not None
    assert split.launches == pytest.approx(kind.dispatch_overhead + expected)
    assert sum(split.parts.values()) == pytest.approx(slower.step_time)


def _gathering(
    graph: Graph, value: Value, cut: Sharding, dim: int, mesh: Mesh, inputs: tuple[Port, ...] = ()
) -> LocalProgram:
    """A program that gathers a value along a dimension, and computes the graph with the whole of it."""
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = tuple(v for v in graph.outputs if isinstance(v, Value))
    program = Program(0, "program", Phase.FORWARD, 0, graph.equations, (value,), outputs, frozenset())
    traffic = memory_traffic(graph.equations, rules, (value,), outputs, xla=XlaBackend(single_output=True))
    whole = Sharding.replicated(len(value.shape))
    ops: list[LocalOp] = [Reshard(value, cut, whole, (ReshardStep("all_gather", mesh.axes, dim),))]
    for eqn in graph.equations:
        held = tuple(Sharding.replicated(len(v.shape)) for v in eqn.inputs)
        results = tuple(Sharding.replicated(len(v.shape)) for v in eqn.outputs)
        product = product_sizes(rules[eqn.id].sides, {})
        ops.append(
            Compute(eqn, (), held, results, 0.0, product, traffic[eqn.id], fence=False, kernels=(),
                    temporaries=0, combined=())
        )  # fmt: skip
    return LocalProgram(program, mesh, tuple(ops), inputs, ())


def test_collectives_along_inner_dimensions_leave_arrays_in_another_order() -> None:
    """What they join is copied before; then a kernel reads it against its order, and a product a copy of it."""
    copying, strided = 1e9, 2e8  # bytes per second
    kind = dataclasses.replace(
        cluster_of(1, 4).hosts[0].kind,
        memory_bandwidth=copying,
        xla=dataclasses.replace(IN_TURN, single_output=True),
    ).with_measured(strided_reads=((1.0, strided),))
    mesh = mesh_at(0, (4,))

    def seconds(shape: tuple[int, ...], dim: int, function: Callable[[Any], Any], kind: DeviceKind) -> list[float]:
        """Of gathering an array along a dimension, and of two equations that read it."""
        graph = trace(function, (jax.ShapeDtypeStruct(shape, jnp.float32),), {}, name="function")
        (value,) = graph.inputs
        cut = Sharding(tuple(mesh.axes if d == dim else () for d in range(len(shape))))
        local = _gathering(graph, value, cut, dim, mesh)
        return [cost.compute for cost in op_costs(local, kind, lambda *_: 0.0)]

    def twice(x: Any) -> Any:
        return jnp.tanh(x), jnp.exp(x)

    size = 4.0 * 8 * 64
    in_order = seconds((8, 64), 0, twice, kind)
    assert in_order == pytest.approx([0.0, 2 * size / copying, 2 * size / copying], rel=1e-3, abs=2e-9)
    assert seconds((1, 512), 1, twice, kind) == pytest.approx(in_order, abs=2e-9)
    assert seconds((8, 64), 1, twice, dataclasses.replace(kind, xla=IN_TURN)) == in_order
    turned = seconds((8, 64), 1, twice, kind)
    copied = size / 4 / strided + size / 2 / copying
    assert turned == pytest.approx([copied, in_order[1] + size / strided, in_order[2] + size / strided], rel=1e-3)

    def products(x: Any) -> Any:
        return x @ jnp.ones((64, 8)), x @ jnp.ones((64, 16))

    plain, copied_once = (seconds((8, 64), dim, products, kind) for dim in (0, 1))
    more = [b - a for a, b in zip(plain, copied_once, strict=True)]
    assert sum(more) == pytest.approx(copied + size / strided + 2 * size / copying, rel=1e-3)
    assert sum(n > 1e-9 for n in more) == 2  # the gather and one of the products


def test_a_gpu_copies_what_a_product_cannot_read() -> None:
    """Elementwise kernels read any order, and a product what is one to it in any order: rows, or what is added up."""
    kind = cluster_of(1, 4).hosts[0].kind
    mesh = mesh_at(0, (4,))

    def copied(shape: tuple[int, ...], dim: int, function: Callable[[Any], Any]) -> list[int]:
        """Bytes that are copied when it is gathered along a dimension, and for what reads it."""
        graph = trace(function, (jax.ShapeDtypeStruct(shape, jnp.float32),), {}, name="function")
        (value,) = graph.inputs
        cut = Sharding(tuple(mesh.axes if d == dim else () for d in range(len(shape))))
        local = _gathering(graph, value, cut, dim, mesh, inputs=(Port(value, cut),))
        costs = op_costs(local, kind, lambda *_: 0.0)
        gathering, *reading = [sum(local_bytes(*held, mesh) for held in cost.copies) for cost in costs]
        return [gathering, sum(reading)]

    whole = 4 * 2 * 8 * 16
    # An argument lies in rows: its piece is copied.
    assert copied((2, 8, 16), 1, jnp.tanh) == [whole // 4, 0]
    assert copied((2, 8, 16), 0, jnp.tanh) == [0, 0]
    assert copied((1, 8, 16), 1, jnp.tanh) == [0, 0]
    assert copied((2, 8, 16), 1, lambda x: jnp.einsum("abc,cd->abd", x, jnp.ones((16, 4)))) == [whole // 4, whole]
    assert copied((2, 8, 16), 2, lambda x: jnp.einsum("abc,cd->abd", x, jnp.ones((16, 4)))) == [whole // 4, 0]
    assert copied((8, 16), 1, lambda w: jnp.ones((4, 8)) @ w) == [4 * 8 * 16 // 4, 0]
    assert copied((8, 16), 1, lambda w: jnp.ones((4, 16)) @ w.T) == [4 * 8 * 16 // 4, 0]
