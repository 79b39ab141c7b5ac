"""Devices that differ from their like: hosts that have become slower, and kinds that work together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.cost_model.compute import peak_flops
from autopar.ir.mesh import Busy, Cluster, DeviceKind, Host, Link


class Slowness(NamedTuple):
    """How many times as long as described something takes on the devices of a host, and between them."""

    products: float = 1.0
    memory: float = 1.0
    link: float = 1.0


def changed(cluster: Cluster, kind: Callable[[DeviceKind], DeviceKind], link: Callable[[Link], Link]) -> Cluster:
    """All of a cluster but its network, whatever of it is busy."""
    return dataclasses.replace(cluster, hosts=tuple(_changed_host(host, kind, link) for host in cluster.hosts))


def _changed_host(of: Host, kind: Callable[[DeviceKind], DeviceKind], link: Callable[[Link], Link]) -> Host:
    busy = (Busy(each.num_devices, kind(each.kind), link(each.link)) for each in of.busy)
    return Host(kind(of.kind), of.num_devices, link(of.link), tuple(busy))


@dataclasses.dataclass(frozen=True)
class Factors:
    """How many times as long each kind of kernel takes."""

    products: float = 1.0  # of matrices
    convolutions: float = 1.0
    attention: float = 1.0
    memory: float = 1.0  # what waits for it
    overheads: float = 1.0  # of launches


def slower_kind(kind: DeviceKind, by: Factors) -> DeviceKind:
    """Devices on which kernels take so many times as long."""
    measured, products, memory, overheads = kind.measured, by.products, by.memory, by.overheads
    return dataclasses.replace(
        kind,
        launch_overhead=kind.launch_overhead * overheads,
        dispatch_overhead=kind.dispatch_overhead * overheads,
        matmul_efficiency=min(1.0, kind.matmul_efficiency / products),
        convolution_share=min(1.0, kind.convolution_share * products / by.convolutions),
        attention_share=min(1.0, kind.attention_share / by.attention),
        memory_efficiency=min(1.0, kind.memory_efficiency / memory),
    ).with_measured(
        products=tuple(
            dataclasses.replace(each, flops=each.flops / (by.convolutions if each.sizes.patches else products))
            for each in measured.products
        ),
        bandwidths=tuple((nbytes, speed / memory) for nbytes, speed in measured.bandwidths),
        strided_reads=tuple((nbytes, speed / memory) for nbytes, speed in measured.strided_reads),
        pooling={of: speed / memory for of, speed in measured.pooling.items()},
        allocations=tuple((nbytes, speed / memory) for nbytes, speed in measured.allocations),
    )


def slower_link(link: Link, latency: float, bandwidth: float) -> Link:
    """A link with so many times the latency, on which a byte takes so many times as long."""
    pair, lone = (None if speed is None else speed / bandwidth for speed in (link.pair_bandwidth, link.lone_bandwidth))
    return dataclasses.replace(
        link, latency=link.latency * latency, bandwidth=link.bandwidth / bandwidth, pair_bandwidth=pair,
        lone_bandwidth=lone,
    )  # fmt: skip


def slowed_hosts(cluster: Cluster, hosts: Sequence[Slowness], network: float = 1.0) -> Cluster:
    """The cluster whose hosts are so slow, each as a whole, and on whose network a byte takes so many times as long."""
    slower = tuple(_slowed_host(host, slow) for host, slow in zip(cluster.hosts, hosts, strict=True))
    return dataclasses.replace(cluster, hosts=slower, network=slower_link(cluster.network, 1.0, network))


def _slowed_host(host: Host, slow: Slowness) -> Host:
    if slow == Slowness():
        return host
    # Kinds are known by their names.
    slower = [f"{name} {factor:g}" for name, factor in slow._asdict().items() if factor != 1]
    suffix = f", {' and '.join(slower)} times as slow"

    def kind(of: DeviceKind) -> DeviceKind:
        by = Factors(slow.products, slow.products, slow.products, slow.memory)
        return dataclasses.replace(slower_kind(of, by), name=of.name + suffix)

    return _changed_host(host, kind, lambda link: slower_link(link, 1.0, slow.link))


def worst_of(kinds: Sequence[DeviceKind]) -> DeviceKind:
    """What devices of several kinds can do together, each of which has an equal share of the work.

    The arithmetic of the kind that is slowest at that, the memory traffic of the slowest at that, the least memory.
    """
    if len(kinds) == 1:
        return kinds[0]
    arithmetic, traffic = min(kinds, key=_product_flops), min(kinds, key=_bandwidth)
    smallest = min(kinds, key=lambda kind: kind.memory - kind.memory_reserve)
    return dataclasses.replace(
        arithmetic,
        memory=smallest.memory,
        memory_reserve=smallest.memory_reserve,
        memory_bandwidth=traffic.memory_bandwidth,
        memory_efficiency=traffic.memory_efficiency,
        launch_overhead=max(kind.launch_overhead for kind in kinds),
        dispatch_overhead=max(kind.dispatch_overhead for kind in kinds),
        measured=dataclasses.replace(traffic.measured, products=arithmetic.measured.products),
    )


def _product_flops(kind: DeviceKind) -> float:
    """FLOP per second of large products."""
    measured = max((each.flops for each in kind.measured.products), default=0.0)
    return measured or peak_flops(kind, "bfloat16", matmul=True) * kind.matmul_efficiency


def _bandwidth(kind: DeviceKind) -> float:
    """Bytes per second of large kernels that wait for memory."""
    measured = kind.measured.bandwidths
    return measured[-1][1] if measured else kind.memory_bandwidth * kind.memory_efficiency
