"""Which groups of devices look alike to the planner."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable

import pytest

from autopar.ir.mesh import Cluster, DeviceKind, Host, Link, Mesh
from autopar.passes.submeshes import candidate_shapes, mesh_at
from autopar.pricing import Prices

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


@pytest.mark.parametrize("hosts", [(F4,) * 4, (F4, S4, S4, F4), (F4, F2, F4, F2), (S4, F4, F4, F2)], ids=str)
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
