"""Seconds that collectives and point-to-point transfers take, by the latency-bandwidth model.

Every algorithm costs `seconds + seconds_per_byte * payload`, its *line*; a library picks the fastest, so a collective
costs the least of its lines. Ring and pairwise algorithms: Thakur, Rabenseifner, Gropp 2005, "Optimization of
collective communication operations in MPICH"; the bandwidth factors are those of the NCCL tests' performance notes.
Small payloads go along a tree, in logarithmically many hops (Sanders, Speck, Träff 2009, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan"). A group that spans hosts may also work in two levels: scattered inside each
host, exchanged between the hosts by all devices at once, gathered inside. An all-reduce is a reduce-scatter and an
all-gather in each of these, so it costs their sum, and never pays for one of them alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from autopar.errors import InternalError
from autopar.ir.mesh import Cluster, Link, Mesh
from autopar.ir.sharding import StepKind

# (seconds, seconds per payload byte) of one algorithm
Line = tuple[float, float]
Pricer = Callable[[StepKind, tuple[str, ...], int], float]


@dataclasses.dataclass(frozen=True)
class GroupLinks:
    """What the devices of one group have between them."""

    size: int  # devices
    num_hosts: int  # hosts among which they are spread
    per_host: int  # devices on the host that has fewest of them
    uniform: bool  # every host has equally many
    inside: Link | None  # the slowest link inside a host; None if no host has two of them
    across: Link | None  # one device's share of the network; None if they are all on one host

    @property
    def slowest(self) -> Link:
        """The link that a ring through all devices waits for."""
        links = [link for link in (self.inside, self.across) if link is not None]
        return _slowest(links)


def group_links(cluster: Cluster, group: Sequence[int], rings: int = 1) -> GroupLinks:
    """The links that a group of cluster devices uses while `rings` such groups send through the same host's network.

    `cluster.network.bandwidth` is what each of a host's devices gets when all of them send at once, so a group has
    less only where there are more rings than devices on a host.
    """
    if len(set(group)) != len(group) or not group:
        raise InternalError(f"a collective needs distinct devices, not {tuple(group)}")
    counts = Counter(cluster.host_of(device) for device in group)
    inside = [cluster.hosts[host].link.among(count) for host, count in counts.items() if count > 1]
    share = min(1.0, *(cluster.hosts[host].num_devices / rings for host in counts))
    across = dataclasses.replace(cluster.network, bandwidth=cluster.network.bandwidth * share)
    return GroupLinks(
        size=len(group),
        num_hosts=len(counts),
        per_host=min(counts.values()),
        uniform=len(set(counts.values())) == 1,
        inside=_slowest(inside) if inside else None,
        across=across if len(counts) > 1 else None,
    )


def collective_time(cluster: Cluster, group: Sequence[int], kind: StepKind, payload: int, rings: int = 1) -> float:
    """Seconds of one collective over a group of cluster devices; 0 for local steps, one device or no bytes.

    `payload`: bytes as in `ir.sharding.Collective`: of the local result, for a reduce-scatter of the local operand.
    `rings`: groups that send through the same host's network at the same time.
    """
    return _cheapest(collective_lines(kind, group_links(cluster, group, rings)), payload)


def make_collective_pricer(cluster: Cluster, mesh: Mesh) -> Pricer:
    """`collective_time` over mesh axes, for the planner's inner loop: (kind, axes, payload) -> seconds.

    All groups of the axes work at once; the slowest one counts. The links of each set of axes are looked up once.
    """
    lines: dict[tuple[StepKind, tuple[str, ...]], tuple[tuple[Line, ...], ...]] = {}
    links_of = functools.cache(functools.partial(_mesh_links, cluster, mesh))

    def price(kind: StepKind, axes: tuple[str, ...], payload: int) -> float:
        lines_by_link = lines.get((kind, axes))
        if lines_by_link is None:
            lines_by_link = lines[kind, axes] = tuple({collective_lines(kind, each): None for each in links_of(axes)})
        return max(_cheapest(each, payload) for each in lines_by_link)

    return price


def transfer_time(cluster: Cluster, copies: npt.ArrayLike, nbytes: int) -> float:
    """Seconds in which all these copies of so many bytes are made; a copy from a device to itself takes none.

    A device's copies follow one another, those of different devices overlap; those of one host share its network.

    Args:
      cluster: with the devices.
      copies: a row for each: the numbers of the sending device and of the receiving one.
      nbytes: of each.
    """
    pairs = np.asarray(copies, dtype=np.int64).reshape(-1, 2)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    if not len(pairs):
        return 0.0
    bounds = np.array(cluster.host_bounds)
    hosts = np.searchsorted(bounds, pairs, side="right") - 1
    leaves = hosts[:, 0] != hosts[:, 1]
    # Of each copy: how many devices of its host send to others, and how many of the other receive from others.
    counts = []
    for devices, host in zip(pairs.T, hosts.T, strict=True):
        theirs = np.searchsorted(bounds, np.unique(devices[leaves]), side="right") - 1
        counts.append(np.bincount(theirs, minlength=len(bounds))[host])
    busy = np.column_stack(counts)
    # Copies between as many devices of such hosts take the same.
    alike = np.column_stack([_kinds_of_hosts(cluster)[hosts], leaves, busy * leaves[:, None]])
    _, first, number = np.unique(alike, axis=0, return_index=True, return_inverse=True)
    each = []
    for at in first:
        links = group_links(cluster, sorted(pairs[at].tolist()))
        if leaves[at]:
            ends = zip(busy[at].tolist(), hosts[at], strict=True)
            bandwidth = min(cluster.network.beside(n, cluster.hosts[host].num_devices) for n, host in ends)
            links = dataclasses.replace(links, across=dataclasses.replace(cluster.network, bandwidth=bandwidth))
        each.append(_cheapest(collective_lines("permute", links), nbytes))
    seconds = np.array(each)[number.reshape(-1)]
    return float(max(np.bincount(devices, seconds).max() for devices in pairs.T))


def _kinds_of_hosts(cluster: Cluster) -> npt.NDArray[np.int64]:
    """A number for each host; those next to one another that are equal have the same."""
    runs = [len(list(equal)) for _, equal in itertools.groupby(cluster.hosts)]
    return np.repeat(np.arange(len(runs)), runs)


def _mesh_links(cluster: Cluster, mesh: Mesh, axes: tuple[str, ...]) -> tuple[GroupLinks, ...]:
    """The distinct links of the groups of `axes`."""
    groups = np.array(mesh.devices).reshape(mesh.shape)
    along = [mesh.axes.index(axis) for axis in axes]
    groups = np.moveaxis(groups, along, range(-len(along), 0)).reshape(-1, math.prod(mesh.shape[at] for at in along))
    bounds = np.array(cluster.host_bounds)
    hosts = np.sort(np.searchsorted(bounds, groups, side="right") - 1)  # [group, device]
    is_first = np.diff(hosts, prepend=-1) > 0  # of those on its host
    leaves = is_first & (is_first.sum(1, keepdims=True) > 1)
    senders = np.bincount(hosts[leaves], minlength=len(cluster.hosts))  # groups that leave a host
    rings = np.maximum(senders[hosts].max(1), 1)
    kinds = _kinds_of_hosts(cluster)[hosts]
    # Groups that have as many devices on as many hosts of each kind, beside as many others, have the same links.
    _, those = np.unique(np.column_stack([kinds, is_first, rings]), axis=0, return_index=True)
    return tuple(dict.fromkeys(group_links(cluster, groups[at].tolist(), int(rings[at])) for at in those))


def collective_lines(kind: StepKind, links: GroupLinks) -> tuple[Line, ...]:
    """The algorithms for one collective; n devices, H hosts with k of them each.

    1. slice and mask are local; a permutation is one hop, and some hop of it takes the slowest link.
    2. all-to-all: n-1 pairwise exchanges of 1/n of the payload, n-k of them at least with another host.
    3. all-gather and reduce-scatter: a ring, n-1 hops of 1/n, or a tree; all-reduce: two rounds of it.
    4. two levels: the whole payload inside the hosts, 1/k of it for each device between them; or a tree of trees.
    """
    n, hosts, k = links.size, links.num_hosts, links.per_host
    if n == 1 or kind in ("slice", "mask"):
        return ((0.0, 0.0),)
    slowest = links.slowest
    if kind == "permute":
        return (_scaled(slowest, hops=1, share=1.0),)
    if kind == "all_to_all":
        if links.across is None or links.inside is None:
            return (_scaled(slowest, hops=n - 1, share=(n - 1) / n),)
        leaving = _scaled(links.across, hops=n - k, share=(n - k) / n)
        return (_add(leaving, _scaled(links.inside, hops=k - 1, share=(k - 1) / n)),)
    rounds = 2 if kind == "all_reduce" else 1
    lines = [_ring(slowest, n, rounds), _tree(slowest, n, rounds)]
    if links.across is not None and links.inside is not None and links.uniform:
        inside = _ring(links.inside, k, rounds)
        for seconds, per_byte in (_ring(links.across, hosts, rounds), _tree(links.across, hosts, rounds)):
            lines.append(_add(inside, (seconds, per_byte / k)))
        lines.append(_add(_tree(links.inside, k, rounds), _tree(links.across, hosts, rounds)))
    return tuple(lines)


def _ring(link: Link, size: int, rounds: int) -> Line:
    return _scaled(link, hops=rounds * (size - 1), share=rounds * (size - 1) / size)


def _tree(link: Link, size: int, rounds: int) -> Line:
    """To the root or from it (an all-reduce: both), in pieces that follow one another."""
    return _scaled(link, hops=rounds * (size - 1).bit_length(), share=float(rounds))


def _scaled(link: Link, *, hops: int, share: float) -> Line:
    return hops * link.latency, share / link.bandwidth


def _add(first: Line, second: Line) -> Line:
    return first[0] + second[0], first[1] + second[1]


def _cheapest(lines: Sequence[Line], payload: int) -> float:
    if payload <= 0:
        return 0.0
    return min(seconds + per_byte * payload for seconds, per_byte in lines)


def _slowest(links: Sequence[Link]) -> Link:
    """The worst latency and the worst bandwidth of several links."""
    return Link(
        " + ".join(dict.fromkeys(link.name for link in links)),
        max(link.latency for link in links),
        min(link.bandwidth for link in links),
    )
