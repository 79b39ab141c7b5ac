"""Clusters as data: presets, JSON files, and the cluster that the devices at hand make up.

A preset is a cluster file of one host, which `load_preset` repeats. The format:

    {"format": "autopar-cluster", "version": 1, "name": "...",
     "hosts": [{"num_hosts": 2, "devices_per_host": 8, "device": {...}, "link": {...}}, ...],
     "network": {...}}

`device` has the fields of `DeviceKind`, `link` and `network` those of `Link`. Any object may carry a text
under "source" that says where its numbers come from; it is not read.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import itertools
import json
import math
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.errors import ClusterError
from autopar.ir.mesh import Cluster, DeviceKind, Host, Link

if TYPE_CHECKING:
    import jax

FORMAT = "autopar-cluster"
VERSION = 1

# The preset whose devices are virtual: they share one host's cores, so that more of them are slower ones.
_VIRTUAL = "cpu"

# Chip, the device kinds (as JAX names them) that a preset describes, the preset. A kind that only names the chip
# (a PCIe card, another memory size) gets that preset with a warning.
_DEVICE_KINDS = (
    ("H200", r"NVIDIA H200", "hgx-h200"),
    ("H100", r"NVIDIA H100 80GB HBM3", "dgx-h100"),
    ("A100", r"(NVIDIA )?A100-SXM4-80GB", "dgx-a100"),
    ("A100", r"(NVIDIA )?A100-SXM4-40GB", "dgx-a100-40gb"),
    ("V100", r"Tesla V100-SXM2-16GB", "p3.16xlarge"),
    ("cpu", r"cpu", "cpu"),
)
_FALLBACK = "dgx-a100"


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
      ClusterError: there is no such preset, or a count is not a whole number above 0.
    """
    names = preset_names()
    if name not in names:
        raise ClusterError(f"there is no preset {name!r}; {_nearest(name, names)}known presets: {', '.join(names)}")
    file = importlib.resources.files("autopar.cost_model").joinpath("data").joinpath(f"{name}.json")
    cluster = _parse(file.read_text(encoding="utf-8"), f"preset {name!r}")
    host = cluster.hosts[0]
    if devices_per_host is None:
        devices_per_host = host.num_devices
    _check_counts(num_hosts=num_hosts, devices_per_host=devices_per_host)
    kind, link, network = host.kind, host.link, cluster.network
    if name == _VIRTUAL:
        kind, link, network = _share(kind, link, network, host.num_devices / devices_per_host)
    return make_cluster(name, num_hosts, devices_per_host, kind, link, network)


def make_cluster(
    name: str, num_hosts: int, devices_per_host: int, kind: DeviceKind, link: Link, network: Link
) -> Cluster:
    """`num_hosts` equal hosts; `link` connects the devices of a host, `network` those of different hosts.

    Raises:
      ClusterError: a count is not a whole number above 0.
    """
    _check_counts(num_hosts=num_hosts, devices_per_host=devices_per_host)
    return Cluster(name, (Host(kind, devices_per_host, link),) * num_hosts, network)


# --------------------------------------------------------------------------------------------------------------------
# The devices at hand


def cluster_from_devices(devices: Sequence[jax.Device] | None = None) -> Cluster:
    """The cluster that these devices (default: `jax.devices()`) make up; device number i is `devices[i]`.

    Devices of one process count as one host. Each device kind is described by the preset that names it; the
    memory is what the backend says that it may use, where it says so. Virtual CPU devices get their share of the
    cores and the memory of this machine (a second process on the same machine is not seen).

    Raises:
      ClusterError: no devices, the devices of a process not in one run, or of several kinds.
    """
    import jax

    devices = jax.devices() if devices is None else devices
    if not devices:
        raise ClusterError("devices is empty; pass at least one device, or None for all of jax.devices()")
    runs = [tuple(run) for _, run in itertools.groupby(devices, key=lambda device: device.process_index)]
    processes = [run[0].process_index for run in runs]
    if len(set(processes)) < len(processes):
        raise ClusterError(
            f"devices come in the process order {processes}: the devices of a process must be neighbours; "
            "sort them by process_index"
        )
    limits = _memory_limits(devices, jax.process_index())
    presets: dict[str, str] = {}
    for device in devices:
        if device.device_kind not in presets:
            presets[device.device_kind] = _preset_for(device.device_kind)
    hosts, networks = [], []
    for run in runs:
        device_kinds = sorted({device.device_kind for device in run})
        if len(device_kinds) > 1:
            raise ClusterError(
                f"process {run[0].process_index} has devices of the kinds {', '.join(device_kinds)}; "
                "pass devices of one kind for each process"
            )
        host, network = _local_host(presets[device_kinds[0]], len(run), limits.get(device_kinds[0]))
        hosts.append(host)
        networks.append(network)
    names = " + ".join(dict.fromkeys(host.kind.name for host in hosts))
    slowest = Link(
        networks[0].name if len(set(networks)) == 1 else "slowest of the hosts' networks",
        max(network.latency for network in networks),
        min(network.bandwidth for network in networks),
    )
    return Cluster(f"{len(devices)} x {names}", tuple(hosts), slowest)


def _local_host(preset: str, num_devices: int, limit: int | None) -> tuple[Host, Link]:
    """A host of this preset with that many devices, and its network; `limit`: bytes that the backend may use."""
    cluster = load_preset(preset)
    kind, link, network = cluster.hosts[0].kind, cluster.hosts[0].link, cluster.network
    if preset == _VIRTUAL:
        kind, link, network = _share(kind, link, network, (os.cpu_count() or 1) / num_devices)
        memory = _physical_memory() // num_devices or kind.memory
        # A tenth for the operating system and the program itself.
        kind = dataclasses.replace(kind, memory=memory, memory_reserve=memory // 10)
    elif limit:
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
    warnings.warn(
        f"no preset describes the device kind {device_kind!r}: costs fall back on the preset {preset!r}, whose speeds "
        "and links may differ; pass a cluster of your own (autopar.Cluster) for better plans",
        stacklevel=3,
    )
    return preset


# --------------------------------------------------------------------------------------------------------------------
# Files


def cluster_from_json(path_or_text: str | os.PathLike[str]) -> Cluster:
    """Read a cluster from a file, or from JSON text (a `str` that begins with a brace).

    Raises:
      ClusterError: no such file, not JSON, another format or version, or a field that is missing, unknown or out
        of range: the message says where, what was met and what is expected.
    """
    if isinstance(path_or_text, str) and path_or_text.lstrip().startswith("{"):
        return _parse(path_or_text, "cluster text")
    try:
        text = pathlib.Path(path_or_text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ClusterError(f"cannot read the cluster file {os.fspath(path_or_text)!r}: {error}") from error
    return _parse(text, f"cluster file {os.fspath(path_or_text)!r}")


def cluster_to_json(cluster: Cluster) -> str:
    """The text of a cluster file; `cluster_from_json` gives an equal cluster back.

    Raises:
      ClusterError: the cluster holds a number that no file may hold, such as a bandwidth of 0.
    """
    hosts = []
    for host, equal in itertools.groupby(cluster.hosts):
        device = {field.name: getattr(host.kind, field.name) for field in dataclasses.fields(DeviceKind)}
        device["peak_flops"] = dict(host.kind.peak_flops)
        hosts.append(
            {
                "num_hosts": len(tuple(equal)),
                "devices_per_host": host.num_devices,
                "device": device,
                "link": dataclasses.asdict(host.link),
            }
        )
    data = {
        "format": FORMAT,
        "version": VERSION,
        "name": cluster.name,
        "hosts": hosts,
        "network": dataclasses.asdict(cluster.network),
    }
    text = json.dumps(data, indent=2) + "\n"
    _parse(text, f"cluster {cluster.name!r}")
    return text


_Reader = Callable[[Any, str], Any]  # (value met, its path in the file) -> what it means


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _bad(path, value, "a text")
    return value


def _number(
    expected: str, *, above: float | None = None, least: float | None = None, most: float = math.inf
) -> _Reader:
    def read(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _bad(path, value, expected)
        try:
            number = float(value)
        except OverflowError:
            raise _bad(path, value, expected) from None
        fits = (above is None or number > above) and (least is None or number >= least) and number <= most
        if not fits or not math.isfinite(number):
            raise _bad(path, value, expected)
        return number

    return read


def _whole(expected: str, *, least: int, most: float = math.inf) -> _Reader:
    number = _number(expected, least=least, most=most)

    def read(value: Any, path: str) -> int:
        number(value, path)
        if isinstance(value, float) and not value.is_integer():
            raise _bad(path, value, expected)
        return int(value)

    return read


def _peak_flops(value: Any, path: str) -> dict[str, float]:
    if not isinstance(value, Mapping) or "float32" not in value:
        raise _bad(path, value, 'an object from dtype names to FLOP per second that has at least "float32"')
    read = _number("FLOP per second above 0", above=0)
    return {dtype: read(peak, f"{path}.{dtype}") for dtype, peak in value.items()}


def _record(fields: Mapping[str, _Reader], optional: Mapping[str, Any] | None = None) -> _Reader:
    """A reader of objects with exactly these fields; those in `optional` have a default."""
    defaults = dict(optional or {})

    def read(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _bad(path, value, f"an object with the fields {', '.join(fields)}")
        for key in value:
            if key not in fields and key != "source":
                raise ClusterError(
                    f"{_join(path, key)} is no field of a cluster file (value {_show(value[key])}); "
                    f"{_nearest(key, fields)}the fields here are {', '.join(fields)}"
                )
        result = dict(defaults)
        for key, reader in fields.items():
            if key in value:
                result[key] = reader(value[key], _join(path, key))
            elif key not in defaults:
                raise ClusterError(f"{_join(path, key)} is missing; add it: the fields here are {', '.join(fields)}")
        return result

    return read


_LINK: Mapping[str, _Reader] = {
    "name": _text,
    "latency": _number("seconds, 0 or more", least=0),
    "bandwidth": _number("bytes per second above 0", above=0),
}
_DEVICE: Mapping[str, _Reader] = {
    "name": _text,
    "memory": _whole("a whole number of bytes above 0", least=1),
    "memory_bandwidth": _number("bytes per second above 0", above=0),
    "peak_flops": _peak_flops,
    "matmul_efficiency": _number("a share above 0 and at most 1", above=0, most=1),
    "memory_efficiency": _number("a share above 0 and at most 1", above=0, most=1),
    "launch_overhead": _number("seconds, 0 or more", least=0),
    "dispatch_overhead": _number("seconds, 0 or more", least=0),
    "memory_reserve": _whole("a whole number of bytes, 0 or more", least=0),
}
_MANY = 1_000_000  # hosts or devices that a file may ask for: beyond it there is a typing error
_COUNT = _whole(f"a whole number from 1 to {_MANY}", least=1, most=_MANY)
_read_link = _record(_LINK)
_read_device = _record(_DEVICE, {"memory_reserve": 0})
_read_group = _record(
    {"num_hosts": _COUNT, "devices_per_host": _COUNT, "device": _read_device, "link": _read_link}, {"num_hosts": 1}
)


def _read_hosts(value: Any, path: str) -> tuple[Host, ...]:
    if not isinstance(value, list) or not value:
        raise _bad(path, value, "a list of at least one group of equal hosts")
    hosts: list[Host] = []
    for index, item in enumerate(value):
        group = _read_group(item, f"{path}[{index}]")
        kind = DeviceKind(**group["device"])
        if kind.memory_reserve >= kind.memory:
            expected = f"less than the memory, {kind.memory} bytes"
            raise _bad(f"{path}[{index}].device.memory_reserve", kind.memory_reserve, expected)
        hosts += [Host(kind, group["devices_per_host"], Link(**group["link"]))] * group["num_hosts"]
    return tuple(hosts)


def _kept(value: Any, path: str) -> Any:
    return value


_read_top = _record({"format": _kept, "version": _kept, "name": _text, "hosts": _read_hosts, "network": _read_link})


def _read_cluster(value: Mapping[str, Any]) -> Cluster:
    """Format and version first: a file of another version is not blamed for its fields."""
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        met = value.get(key)
        if met != expected or isinstance(met, bool):
            raise _bad(key, met, f"{json.dumps(expected)}, the only one that this version of autopar reads")
    record = _read_top(value, "")
    return Cluster(record["name"], record["hosts"], Link(**record["network"]))


def _parse(text: str, where: str) -> Cluster:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = sorted(key for key in result if sum(key == other for other, _ in pairs) > 1)
            raise ClusterError(f"{where}: an object gives the field {', '.join(twice)} twice; keep one of them")
        return result

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{where} is not JSON: {error}; write one with cluster_to_json") from error
    if not isinstance(data, dict):
        raise ClusterError(f"{where} holds {_show(data)}; it must be an object; write one with cluster_to_json")
    try:
        return _read_cluster(data)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


def _bad(path: str, value: Any, expected: str) -> ClusterError:
    return ClusterError(f"{path} is {_show(value)}; it must be {expected}")


def _show(value: Any) -> str:
    """A value as the file would write it, cut where it is long."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ClusterError(f"{name} is {count!r}; it must be a whole number above 0")
