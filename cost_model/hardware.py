"""Clusters as data: presets, and the cluster that the devices at hand make up.

A preset is a cluster file (`autopar.ir.cluster_json`) of one host, which `load_preset` repeats.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import operator
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.errors import ClusterError, warn
from autopar.ir.cluster_json import MOST_OF_A_KIND, parse_cluster
from autopar.ir.json_file import nearest
from autopar.ir.mesh import Busy, Cluster, DeviceKind, Host, Link

if TYPE_CHECKING:
    import jax

# The preset whose devices are virtual: they share one host's cores, so that more of them are slower ones.
_VIRTUAL = "cpu"

# Chip, the device kinds (as JAX names them) that a preset describes, the preset. A kind that only names the chip
# (a PCIe card, another memory size) gets that preset with a warning.
_DEVICE_KINDS = (
    ("GB200", r"NVIDIA GB200", "gb200-nvl72"),
    ("B200", r"NVIDIA B200", "dgx-b200"),
    ("H200", r"NVIDIA H200", "hgx-h200"),
    ("H100", r"NVIDIA H100 80GB HBM3", "dgx-h100"),
    ("A100", r"(NVIDIA )?A100-SXM4-80GB", "dgx-a100"),
    ("A100", r"(NVIDIA )?A100-SXM4-40GB", "dgx-a100-40gb"),
    ("V100", r"Tesla V100-SXM2-16GB", "p3.16xlarge"),
    ("cpu", r"cpu", "cpu"),
)
_FALLBACK = "dgx-a100"
# What JAX calls, of a GPU, the domain of the fast interconnect that it is in; the second is of older versions.
_FAST_DOMAIN = ("partition_index", "slice_index")


def preset_names() -> tuple[str, ...]:
    """The names that `load_preset` knows, sorted."""
    files = importlib.resources.files("autopar.cost_model").joinpath("data").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_preset(name: str, *, num_hosts: int = 1, devices_per_host: int | None = None) -> Cluster:
    """A homogeneous cluster of `num_hosts` hosts of the named preset.

    `devices_per_host` takes fewer (or, for a host that does not exist, more) devices than the preset's host has;
    each keeps its links and its share of the network. The devices of a "cpu" host are virtual: the host's cores,
    memory and network are divided among however many there are.

    Raises:
      ClusterError: there is no such preset, or a count is not a whole number from 1 to a million.
    """
    names = preset_names()
    if name not in names:
        raise ClusterError(f"there is no preset {name!r}; {nearest(name, names)}known presets: {', '.join(names)}")
    file = importlib.resources.files("autopar.cost_model").joinpath("data").joinpath(f"{name}.json")
    cluster = parse_cluster(file.read_text(encoding="utf-8"), f"preset {name!r}")
    host = cluster.hosts[0]
    if devices_per_host is None:
        devices_per_host = host.num_devices
    _check_counts(num_hosts=num_hosts, devices_per_host=devices_per_host)
    if name == _VIRTUAL:
        kind, link, network = _share(host.kind, host.link, cluster.network, host.num_devices / devices_per_host)
        return Cluster(name, (_virtual_host(kind, devices_per_host, link),) * num_hosts, network)
    return make_cluster(name, num_hosts, devices_per_host, host.kind, host.link, cluster.network)


def make_cluster(
    name: str, num_hosts: int, devices_per_host: int, kind: DeviceKind, link: Link, network: Link
) -> Cluster:
    """`num_hosts` equal hosts; `link` connects the devices of a host, `network` those of different hosts.

    Raises:
      ClusterError: a count is not a whole number from 1 to a million.
    """
    _check_counts(num_hosts=num_hosts, devices_per_host=devices_per_host)
    return Cluster(name, (Host(kind, devices_per_host, link),) * num_hosts, network)


# --------------------------------------------------------------------------------------------------------------------
# The devices at hand


def devices_by_host() -> list[jax.Device]:
    """`jax.devices()`, those of a host next to one another, whichever of its processes they are of."""
    import jax

    devices = jax.devices()
    return sorted(devices, key=operator.attrgetter(_attribute_of_hosts(devices)))


def cluster_from_devices(devices: Sequence[jax.Device] | None = None) -> Cluster:
    """The cluster that these devices (default: `devices_by_host()`) make up; device number i is `devices[i]`.

    GPUs that JAX says to share a fast interconnect count as those of one host, of however many processes (Slurm starts
    one for each) or, where it spans them, machines; other devices of one process do. Each device kind is described by
    the preset that names it; the memory is what the backend says that it may use, where it says so. Virtual CPU devices
    get their share of the cores and the memory of this machine (a second process on the same machine is not seen).

    Raises:
      ClusterError: no devices, the devices of a host not in one run, or of several kinds.
    """
    import jax

    devices = devices_by_host() if devices is None else devices
    if not devices:
        raise ClusterError("devices is empty; pass at least one device, or None for all of jax.devices()")
    what = _attribute_of_hosts(devices)
    runs = [(key, tuple(run)) for key, run in itertools.groupby(devices, key=operator.attrgetter(what))]
    order = [key for key, _ in runs]
    if len(set(order)) < len(order):
        raise ClusterError(
            f"devices come in the order {order} of {what}: those of a host must be neighbours; leave devices out, or "
            f"sort them by {what}"
        )
    limits = _memory_limits(devices, jax.process_index())
    presets: dict[str, str] = {}
    for device in devices:
        if device.device_kind not in presets:
            presets[device.device_kind] = _preset_for(device.device_kind)
    hosts, networks = [], []
    for key, run in runs:
        device_kinds = sorted({device.device_kind for device in run})
        if len(device_kinds) > 1:
            raise ClusterError(
                f"the host of {what} {key} has devices of the kinds {', '.join(device_kinds)}; pass devices of one "
                "kind for each host"
            )
        host, network = _local_host(presets[device_kinds[0]], len(run), limits.get(device_kinds[0]))
        hosts.append(host)
        networks.append(network)
    names = " + ".join(dict.fromkeys(host.kind.name for host in hosts))
    slowest = networks[0]
    if len(set(networks)) > 1:
        latency = max(network.latency for network in networks)
        slowest = Link("slowest of the hosts' networks", latency, min(network.bandwidth for network in networks))
    return Cluster(f"{len(devices)} x {names}", tuple(hosts), slowest)


def _attribute_of_hosts(devices: Sequence[jax.Device]) -> str:
    """The attribute that devices of a host have in common.

    Of GPUs the domain of the fast interconnect, where JAX says it: XLA gives a number to those of a machine, by its
    boot's id, or of a domain of NVLink that spans machines (https://github.com/openxla/xla/pull/24473).
    """
    names = _FAST_DOMAIN if all(device.platform == "gpu" for device in devices) else ()
    attributes = (name for name in names if all(getattr(device, name, None) is not None for device in devices))
    return next(attributes, "process_index")


def _local_host(preset: str, num_devices: int, limit: int | None) -> tuple[Host, Link]:
    """A host of this preset with that many devices, and its network; `limit`: bytes that the backend may use."""
    cluster = load_preset(preset)
    kind, link, network = cluster.hosts[0].kind, cluster.hosts[0].link, cluster.network
    if preset == _VIRTUAL:
        kind, link, network = _share(kind, link, network, (os.cpu_count() or 1) / num_devices)
        memory = _physical_memory() // num_devices or kind.memory
        # A tenth for the operating system and the program itself.
        kind = dataclasses.replace(kind, memory=memory, memory_reserve=memory // 10)
        return _virtual_host(kind, num_devices, link), network
    if limit:
        # What the backend leaves to others (context, communication buffers) is a part of the reserve.
        left = max(0, kind.memory - limit)
        kind = dataclasses.replace(kind, memory=limit, memory_reserve=max(0, kind.memory_reserve - left))
    return Host(kind, num_devices, link), network


def _share(kind: DeviceKind, link: Link, network: Link, share: float) -> tuple[DeviceKind, Link, Link]:
    """What a virtual device gets that has `share` preset devices' worth of the host."""
    kind = dataclasses.replace(
        kind,
        memory=int(kind.memory * share),
        memory_bandwidth=kind.memory_bandwidth * share,
        peak_flops={dtype: peak * share for dtype, peak in kind.peak_flops.items()},
        memory_reserve=int(kind.memory_reserve * share),
    )
    link = dataclasses.replace(link, bandwidth=link.bandwidth * share)
    return kind, link, dataclasses.replace(network, bandwidth=network.bandwidth * share)


def busy_counts(num_devices: int) -> tuple[int, ...]:
    """Numbers of a host's virtual devices, fewer than all, for which it is said what they can do."""
    return tuple(2**i for i in range(num_devices.bit_length()) if 2**i < num_devices)


def _virtual_host(kind: DeviceKind, num_devices: int, link: Link) -> Host:
    """Devices that share the cores: what some do not use, others have."""
    busy = []
    for count in busy_counts(num_devices):
        faster, quicker, _ = _share(kind, link, link, num_devices / count)
        faster = dataclasses.replace(faster, memory=kind.memory, memory_reserve=kind.memory_reserve)
        busy.append(Busy(count, faster, quicker))
    return Host(kind, num_devices, link, tuple(busy))


def _physical_memory() -> int:
    """Bytes of memory of this machine, 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _memory_limits(devices: Sequence[jax.Device], process: int) -> dict[str, int]:
    """Least `bytes_limit` by device kind, as far as this process's devices tell; those of others cannot be asked."""
    limits: dict[str, int] = {}
    for device in devices:
        if device.process_index == process:
            limit = (device.memory_stats() or {}).get("bytes_limit", 0)
            if limit:
                limits[device.device_kind] = min(limit, limits.get(device.device_kind, limit))
    return limits


def _preset_for(device_kind: str) -> str:
    """The preset that describes a device kind, or with a warning the one that comes near."""
    for _, pattern, preset in _DEVICE_KINDS:
        if re.fullmatch(pattern, device_kind, re.IGNORECASE):
            return preset
    near = [preset for chip, _, preset in _DEVICE_KINDS if chip.lower() in device_kind.lower()]
    preset = near[0] if near else _FALLBACK
    warn(
        f"no preset describes the device kind {device_kind!r}: costs fall back on the preset {preset!r}, whose speeds "
        "and links may differ; pass a cluster of your own (autopar.Cluster) for better plans",
    )
    return preset


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MOST_OF_A_KIND:
            raise ClusterError(f"{name} is {count!r}; it must be a whole number from 1 to {MOST_OF_A_KIND}")
