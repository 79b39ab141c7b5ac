"""Submeshes: the groups of devices that a stage may have, and the logical meshes that they may form."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable

from autopar.ir.mesh import Cluster, Mesh

# (cluster, first device, number of devices) -> the shapes of the logical meshes that these devices may form
ShapesFn = Callable[[Cluster, int, int], tuple[tuple[int, ...], ...]]

_MANY_UNITS = 128  # hosts, or units of several, from which on there are enough of them
_DIGITS = 4  # binary ones of the number of units in a group, then zeros


def candidate_shapes(cluster: Cluster, start: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of the logical meshes of `size` consecutive devices from device `start`; () if no stage may have them.

    A group is whole hosts, or lies inside one host and its size is a power of two or divides the host's number of
    devices. Its shapes are (n,) and all (a, b) with a, b > 1; the devices along b are neighbours.
    """
    bounds = cluster.host_bounds
    stop = start + size
    if size < 1 or not 0 <= start < stop <= bounds[-1]:
        return ()
    host = cluster.host_of(start)
    whole_hosts = start == bounds[host] and stop == bounds[bisect.bisect_left(bounds, stop)]
    in_one_host = stop <= bounds[host + 1] and (size & (size - 1) == 0 or cluster.hosts[host].num_devices % size == 0)
    if not (whole_hosts or in_one_host):
        return ()
    return _shapes(size)


@functools.cache
def _shapes(size: int) -> tuple[tuple[int, ...], ...]:
    return ((size,), *((a, size // a) for a in range(2, size // 2 + 1) if size % a == 0))


def mesh_at(start: int, shape: tuple[int, ...]) -> Mesh:
    """The logical mesh of this shape of consecutive devices, the axes x, y, z; those along the last are neighbours."""
    return Mesh(tuple(range(start, start + math.prod(shape))), shape, ("x", "y", "z")[: len(shape)])


def device_groups(cluster: Cluster) -> list[tuple[int, int]]:
    """Consecutive devices [start, stop) that a stage may have: inside a host, or units of whole hosts."""
    bounds = cluster.host_bounds
    hosts = len(cluster.hosts)
    runs = [len(tuple(equal)) for _, equal in itertools.groupby(cluster.hosts)]
    unit = 1  # a power of two, as most arrays' dimensions have many of
    while 2 * unit * _MANY_UNITS <= hosts and math.gcd(*runs) % (2 * unit) == 0:
        unit *= 2
    groups: set[tuple[int, int]] = set()
    if hosts <= _MANY_UNITS:
        for low, high in itertools.pairwise(bounds):
            groups.update((start, stop) for start in range(low, high) for stop in range(start + 1, high + 1))
    units = hosts // unit
    for size in range(1, units + 1):
        if size % (1 << max(0, size.bit_length() - _DIGITS)) == 0 or units % size == 0:
            groups.update((bounds[at * unit], bounds[(at + size) * unit]) for at in range(units - size + 1))
    return sorted(groups)
