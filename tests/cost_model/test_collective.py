"""Collectives by hand: n devices, payload P, latency a, bandwidth B."""

import dataclasses
import itertools
import random
from collections import Counter

import pytest

from autopar.cost_model.collective import (
    collective_time,
    make_collective_pricer,
    transfer_time,
)
from autopar.cost_model.hardware import load_preset, make_cluster
from autopar.errors import InternalError
from autopar.ir.mesh import Cluster, Host, Link, Mesh
from autopar.ir.sharding import StepKind

KIND = load_preset("dgx-a100").hosts[0].kind
INSIDE = Link("inside", 1e-6, 1e11)
NETWORK = Link("network", 1e-5, 1e9)
TWO = make_cluster("two hosts of four", 2, 4, KIND, INSIDE, NETWORK)
HOST = (0, 1, 2, 3)
ALL = tuple(range(8))
BIG = 4_000_000_000
KINDS: tuple[StepKind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "slice", "mask")


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # 4 devices, 4e9 bytes, 1e11 bytes/s, 1 us: a share of 1 takes 0.04 s.
        ("all_reduce", 2 * 3 / 4 * 0.04 + 6e-6),  # ring: 2(n-1) hops
        ("reduce_scatter", 3 / 4 * 0.04 + 3e-6),
        ("all_gather", 3 / 4 * 0.04 + 3e-6),
        ("all_to_all", 3 / 4 * 0.04 + 3e-6),
        ("permute", 0.04 + 1e-6),
        ("slice", 0.0),
        ("mask", 0.0),
    ],
)
def test_inside_a_host(kind: StepKind, seconds: float) -> None:
    assert collective_time(TWO, HOST, kind, BIG) == pytest.approx(seconds, rel=1e-12)


def test_small_payloads_go_along_a_tree() -> None:
    wide = make_cluster("one host of 64", 1, 64, KIND, INSIDE, NETWORK)
    # Tree: 2 * log2(64) = 12 hops of 1 us, the payload twice: 2 * 1000 / 1e11 s. The ring has 126 hops.
    assert collective_time(wide, range(64), "all_reduce", 1000) == pytest.approx(12e-6 + 2e-8)
    # 5 devices: the tree is 3 deep: 6 hops against the ring's 8.
    assert collective_time(wide, range(5), "all_reduce", 1000) == pytest.approx(6e-6 + 2e-8)
    # One way: half of it.
    assert collective_time(wide, range(64), "all_gather", 1000) == pytest.approx(6e-6 + 1e-8)
    assert collective_time(wide, range(64), "reduce_scatter", 1000) == pytest.approx(6e-6 + 1e-8)
    # Big: the ring, 2 * 63/64 of the payload.
    assert collective_time(wide, range(64), "all_reduce", BIG) == pytest.approx(2 * 63 / 64 * 0.04 + 126e-6)


def test_without_a_switch_few_devices_have_few_links() -> None:
    """1e11 bytes/s to all others together, 3e10 to each: a pair has 3e10, three have 6e10, five have all."""
    meshed = make_cluster("no switch", 1, 8, KIND, Link("inside", 1e-6, 1e11, pair_bandwidth=3e10), NETWORK)
    for count, bandwidth in ((2, 3e10), (3, 6e10), (4, 9e10), (5, 1e11), (8, 1e11)):
        expected = 2 * (count - 1) / count * BIG / bandwidth + 2 * (count - 1) * 1e-6
        assert collective_time(meshed, range(count), "all_reduce", BIG) == pytest.approx(expected)
    assert transfer_time(meshed, [(0, 5)], BIG) == pytest.approx(BIG / 3e10 + 1e-6)


def test_one_device_of_each_host() -> None:
    # All hops take the network: 2 devices, 1e9 bytes/s, 10 us; ring all-reduce: 2 hops, 2 * 1/2 of the payload.
    assert collective_time(TWO, (0, 4), "all_reduce", 10**9) == pytest.approx(1.0 + 20e-6)
    assert collective_time(TWO, (0, 4), "all_gather", 10**9) == pytest.approx(0.5 + 10e-6)
    assert collective_time(TWO, (0, 4), "all_to_all", 10**9) == pytest.approx(0.5 + 10e-6)
    assert collective_time(TWO, (0, 4), "permute", 10**9) == pytest.approx(1.0 + 10e-6)


def test_two_levels_are_cheaper_than_one_ring_over_the_network() -> None:
    # Inside: reduce-scatter and gather over 4: 2 * 3/4 * 0.04 s, 6 hops of 1 us. Between: each device all-reduces a
    # quarter, 1e9 bytes, with its peer: 1 s, 2 hops of 10 us. One ring: 2 * 7/8 * 4 s.
    expected = 0.06 + 6e-6 + 1.0 + 20e-6
    assert collective_time(TWO, ALL, "all_reduce", BIG) == pytest.approx(expected, rel=1e-12)
    # Half of it each.
    assert collective_time(TWO, ALL, "all_gather", BIG) == pytest.approx(expected / 2, rel=1e-12)
    assert collective_time(TWO, ALL, "reduce_scatter", BIG) == pytest.approx(expected / 2, rel=1e-12)
    # 3 of one host, 1 of the other: no two levels; one ring of 4 at the network's pace.
    assert collective_time(TWO, (0, 1, 2, 4), "all_reduce", 10**9) == pytest.approx(1.5 + 60e-6)


def test_small_all_reduce_in_two_levels() -> None:
    # Trees: inside 2 * log2(4) * 1 us, between 2 * log2(2) * 10 us; the payload twice on each.
    assert collective_time(TWO, ALL, "all_reduce", 8) == pytest.approx(4e-6 + 20e-6 + 16 / 1e11 + 16 / 1e9)


def test_all_to_all_over_two_hosts() -> None:
    # Of 8 pieces of 5e8 bytes 4 leave the host, 3 stay on it: 4 * (0.5 s + 10 us) + 3 * (5 ms + 1 us).
    assert collective_time(TWO, ALL, "all_to_all", BIG) == pytest.approx(4 * (0.5 + 1e-5) + 3 * (0.005 + 1e-6))
    # 3 and 1: the lonely device sends all 3 pieces away.
    assert collective_time(TWO, (0, 1, 2, 4), "all_to_all", BIG) == pytest.approx(3 * (1.0 + 1e-5))


def test_more_rings_than_devices_share_the_network() -> None:
    # Bandwidths are per device: up to 4 rings through a host of 4 do not disturb each other, 8 have half each.
    one = collective_time(TWO, (0, 4), "permute", 10**9)
    assert collective_time(TWO, (0, 4), "permute", 10**9, rings=4) == one
    assert collective_time(TWO, (0, 4), "permute", 10**9, rings=8) == pytest.approx(2.0 + 10e-6)
    assert collective_time(TWO, HOST, "permute", 10**9, rings=8) == collective_time(TWO, HOST, "permute", 10**9)


def test_mixed_hosts_wait_for_the_slower_link() -> None:
    slow = Link("slow", 1e-4, 1e10)
    mixed = Cluster("mixed", (Host(KIND, 2, INSIDE), Host(KIND, 2, slow)), Link("fast network", 1e-6, 1e12))
    # Gather over 4: one ring at 1e10 bytes/s and 100 us: 3/4 * 0.1 s; in two levels: 1/2 * 0.1 + 1/2 * 1/2 * 1e-3.
    assert collective_time(mixed, range(4), "all_gather", 10**9) == pytest.approx(0.05 + 1e-4 + 0.25e-3 + 1e-6)
    assert collective_time(mixed, (0, 1), "all_gather", 10**9) == pytest.approx(0.005 + 1e-6)
    assert collective_time(mixed, (2, 3), "all_gather", 10**9) == pytest.approx(0.05 + 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_or_no_bytes_cost_nothing(kind: StepKind) -> None:
    assert collective_time(TWO, (3,), kind, BIG) == 0.0
    assert collective_time(TWO, ALL, kind, 0) == 0.0


@pytest.mark.parametrize("preset", ["p3.16xlarge", "dgx-a100", "dgx-h100"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("payload", [1, 10**4, 10**6, 10**9])
def test_order_among_collectives(preset: str, size: int, payload: int) -> None:
    cluster = load_preset(preset, num_hosts=size)
    inside = tuple(range(size))
    spread = tuple(8 * i for i in range(size))
    for group in (inside, spread, tuple(range(4, 4 + 2 * size))):
        reduce = collective_time(cluster, group, "all_reduce", payload)
        scatter = collective_time(cluster, group, "reduce_scatter", payload)
        gather = collective_time(cluster, group, "all_gather", payload)
        assert scatter == gather
        assert reduce == pytest.approx(scatter + gather, rel=1e-12)
    for kind in KINDS[:5]:
        times = [collective_time(cluster, group, kind, payload) for group in (inside, spread)]
        assert times[0] < times[1]
        assert collective_time(cluster, inside, kind, 2 * payload) > times[0]


# Meshes


def mesh_groups(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """All groups of devices that a collective over axes works in."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, device in zip(itertools.product(*map(range, mesh.shape)), mesh.devices, strict=True):
        groups.setdefault(tuple(i for i, axis in zip(at, mesh.axes, strict=True) if axis not in axes), []).append(
            device
        )
    return [tuple(group) for group in groups.values()]


def test_the_worst_group_counts() -> None:
    cluster = make_cluster("three hosts of four", 3, 4, KIND, INSIDE, NETWORK)
    # Devices 2..5: the groups of y are (2, 3) and (4, 5), inside; those of x (2, 4) and (3, 5), across.
    mesh = Mesh((2, 3, 4, 5), (2, 2), ("x", "y"))
    assert make_collective_pricer(cluster, mesh)("all_gather", ("y",), BIG) == pytest.approx(0.02 + 1e-6)
    assert make_collective_pricer(cluster, mesh)("all_gather", ("x",), BIG) == pytest.approx(2.0 + 10e-6)
    # Devices 1..4: (1, 2) lies inside a host, (3, 4) across two.
    shifted = Mesh((1, 2, 3, 4), (2, 2), ("x", "y"))
    assert shifted.group(("y",)) == (1, 2)
    assert make_collective_pricer(cluster, shifted)("all_gather", ("y",), BIG) == pytest.approx(2.0 + 10e-6)


def test_the_pricer_agrees_with_single_groups() -> None:
    cluster = make_cluster("c", 4, 4, KIND, INSIDE, NETWORK)
    for shape, axes in (((16,), ("x",)), ((4, 4), ("x", "y")), ((2, 4, 2), ("x", "y", "z")), ((1, 16), ("x", "y"))):
        mesh = Mesh(tuple(range(16)), shape, axes)
        price = make_collective_pricer(cluster, mesh)
        for count in range(1, len(axes) + 1):
            for over in itertools.combinations(axes, count):
                for kind, payload in itertools.product(KINDS, (0, 1, 10**5, 10**9)):
                    worst = max(collective_time(cluster, group, kind, payload) for group in mesh_groups(mesh, over))
                    for _ in range(2):  # the second answer comes from what the first has stored
                        assert price(kind, over, payload) == worst


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_unlike_hosts_share_their_networks(seed: int) -> None:
    """Any mesh of any hosts: the worst of all groups, each beside those that leave one of its hosts, too."""
    draw = random.Random(seed)
    links = [INSIDE, Link("slow", 2e-6, 2e10)]
    sizes = draw.choice([(4, 4, 4), (2, 4, 6), (6, 2, 4), (8, 4), (1, 3, 8), (12,)])
    cluster = Cluster("c", tuple(Host(KIND, n, draw.choice(links)) for n in sizes), NETWORK)
    shape = draw.choice([(12,), (3, 4), (4, 3), (6, 2), (2, 3, 2), (3, 2, 2)])
    devices = [*range(12)]
    if draw.random() < 0.5:
        draw.shuffle(devices)
    mesh = Mesh(tuple(devices), shape, ("x", "y", "z")[: len(shape)])
    price = make_collective_pricer(cluster, mesh)
    for count in range(1, len(shape) + 1):
        for over in itertools.permutations(mesh.axes, count):
            groups = mesh_groups(mesh, over)
            spread = [{cluster.host_of(device) for device in group} for group in groups]
            leaving = Counter(host for hosts in spread if len(hosts) > 1 for host in hosts)
            rings = [max(1, *(leaving[host] for host in hosts)) for hosts in spread]
            for kind in KINDS:
                each = zip(groups, rings, strict=True)
                worst = max(collective_time(cluster, group, kind, 10**6, beside) for group, beside in each)
                assert price(kind, over, 10**6) == pytest.approx(worst, rel=1e-12)


def test_an_axis_of_one_device_is_free() -> None:
    mesh = Mesh(ALL, (8, 1), ("x", "y"))
    assert make_collective_pricer(TWO, mesh)("all_reduce", ("y",), BIG) == 0.0


# Point to point


def test_transfers() -> None:
    def one(source: int, target: int, nbytes: int) -> float:
        return transfer_time(TWO, [(source, target)], nbytes)

    assert one(1, 3, 10**9) == one(3, 1, 10**9) == pytest.approx(0.01 + 1e-6)
    assert one(3, 4, 10**9) == pytest.approx(1.0 + 1e-5)
    assert one(2, 2, 10**9) == 0.0
    assert one(3, 4, 0) == 0.0
    assert transfer_time(TWO, [], 10**9) == 0.0
    # A device's copies follow one another, those of others overlap.
    assert transfer_time(TWO, [(0, 4), (0, 5)], 10**9) == pytest.approx(2 * (1.0 + 1e-5))
    assert transfer_time(TWO, [(0, 4), (1, 5), (2, 3)], 10**9) == pytest.approx(1.0 + 1e-5)


@pytest.mark.parametrize(("senders", "seconds"), [(1, 0.4), (2, 0.5), (4, 1.0)])
def test_a_network_that_the_devices_of_a_host_share(senders: int, seconds: float) -> None:
    """Each has 1e9 bytes per second beside the three others, all of 4e9 are there for few; one gets 2.5e9 at most."""
    network = dataclasses.replace(TWO.network, latency=0.0, lone_bandwidth=2.5e9)
    cluster = dataclasses.replace(TWO, network=network)
    assert network.bandwidth == 1e9
    copies = [(device, 4 + device) for device in range(senders)]
    assert transfer_time(cluster, copies, 10**9) == pytest.approx(seconds)
    together = [(device, 4) for device in range(senders)]  # the one receiver's link is theirs in turn
    assert transfer_time(cluster, together, 10**9) == pytest.approx(senders * max(seconds, 0.4))


def test_groups_that_are_none() -> None:
    with pytest.raises(InternalError, match=r"distinct devices, not \(1, 1\)"):
        collective_time(TWO, (1, 1), "all_gather", 1)
    with pytest.raises(InternalError, match=r"distinct devices, not \(\)"):
        collective_time(TWO, (), "all_gather", 1)
