"""The file form of `Cluster`:

    {"format": "autopar-cluster", "version": 2, "name": "...",
     "hosts": [{"num_hosts": 2, "devices_per_host": 8, "device": {...}, "link": {...}}, ...],
     "xla": {...}, "network": {...}}

`xla` has the fields of `XlaBackend`: whose compiler makes the programs. Without it, it is today's XLA for GPUs.
`device` has the fields of `DeviceKind`, and in "measured" those of `Measured`; `link` and `network` those of `Link`.
Hosts of virtual devices have besides "busy": [{"num_devices": 1, "device": {...}, "link": {...}}, ...], `Busy`. Any
object may carry a text under "source" that says where its numbers come from; it is not read. Efficiencies and overheads
of a device may be left out: those of a common kind are taken, with a warning.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

from autopar.errors import ClusterError, warn
from autopar.ir.json_file import (
    Reader,
    bad,
    number,
    optional,
    read_boolean,
    read_path,
    read_string,
    read_text,
    record,
    sequence,
    versioned,
    whole,
)
from autopar.ir.mesh import (
    Busy,
    Cluster,
    DeviceKind,
    Host,
    Link,
    Measured,
    Patches,
    ProductSizes,
    ProductSpeed,
    XlaBackend,
)

FORMAT = "autopar-cluster"
VERSION = 2
_REMEDY = "write one with cluster_to_json"


def cluster_from_json(path_or_text: str | os.PathLike[str]) -> Cluster:
    """Read a cluster from a file, or from JSON text (a `str` that begins with a brace).

    Raises:
      ClusterError: no such file, not JSON, another format or version, or a field that is missing, unknown or out
        of range: the message says where, what was met and what is expected.
    """
    if isinstance(path_or_text, str) and path_or_text.lstrip().startswith("{"):
        return parse_cluster(path_or_text, "cluster text")
    text = read_path(path_or_text, "cluster file", ClusterError)
    return parse_cluster(text, f"cluster file {os.fspath(path_or_text)!r}")


def cluster_to_json(cluster: Cluster) -> str:
    """The text of a cluster file; `cluster_from_json` gives an equal cluster back.

    Raises:
      ClusterError: the cluster holds a number that no file may hold, such as a bandwidth of 0.
    """
    check_cluster(cluster)
    return json.dumps(cluster_data(cluster), indent=2) + "\n"


def check_cluster(cluster: Cluster) -> None:
    """Raise ClusterError where a cluster holds a number that no file may hold, such as a bandwidth of 0.

    Or where the programs of its hosts are made by several compilers.
    """
    for at, host in enumerate(cluster.hosts):
        if any(kind.xla != cluster.xla for kind in (host.kind, *(each.kind for each in host.busy))):
            raise ClusterError(
                f"cluster {cluster.name!r}: host {at} has {host.kind.xla} and host 0 {cluster.xla}: one compiler makes "
                "the programs of all hosts; give every DeviceKind the same xla"
            )
    parse_cluster(json.dumps(cluster_data(cluster)), f"cluster {cluster.name!r}")


def parse_cluster(text: str, where: str) -> Cluster:
    """The cluster of a file's text; `where` names the text in messages. Raises ClusterError."""
    cluster: Cluster = read_text(text, where, _read_cluster_file, ClusterError, _REMEDY)
    return cluster


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    """What the file of a cluster holds, unchecked; other files may embed it."""
    hosts = []
    for host, equal in itertools.groupby(cluster.hosts):
        group = {"num_hosts": len(tuple(equal)), "devices_per_host": host.num_devices, **_speeds(host)}
        if host.busy:
            group["busy"] = [{"num_devices": each.num_devices, **_speeds(each)} for each in host.busy]
        hosts.append(group)
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": cluster.name,
        "hosts": hosts,
        "xla": dataclasses.asdict(cluster.xla),
        "network": dataclasses.asdict(cluster.network),
    }


def _speeds(of: Host | Busy) -> dict[str, Any]:
    device = {
        field.name: getattr(of.kind, field.name)
        for field in dataclasses.fields(DeviceKind)
        if field.name not in ("xla", "measured")
    }
    device["peak_flops"] = dict(of.kind.peak_flops)
    if of.kind.measured != Measured():
        device["measured"] = _measured_data(of.kind.measured)
    return {"device": device, "link": dataclasses.asdict(of.link)}


def _measured_data(measured: Measured) -> dict[str, Any]:
    data = {
        "products": [_product_data(each) for each in measured.products],
        **{name: [*map(list, getattr(measured, name))] for name in ("bandwidths", "strided_reads", "allocations")},
        "pooling": dict(measured.pooling),
        "temporaries": dict(measured.temporaries),
    }
    return {name: value for name, value in data.items() if value}


def _product_data(measured: ProductSpeed) -> dict[str, Any]:
    patches = measured.sizes.patches
    sizes = measured.sizes._asdict() | {"patches": None if patches is None else patches._asdict()}
    del sizes["attention"]  # none was measured
    return {"dtype": measured.dtype, "sizes": sizes, "flops": measured.flops}


def read_cluster(value: Any, path: str) -> Cluster:
    """The inverse of `cluster_data`; raises FieldError."""
    return _cluster(_read_whole(value, path))


def _read_cluster_file(value: Any, path: str) -> Cluster:
    """Where efficiencies may be left out."""
    return _cluster(_read_file(value, path))


def _cluster(fields: Mapping[str, Any]) -> Cluster:
    xla = XlaBackend(**fields["xla"])

    def made_by_it(kind: DeviceKind) -> DeviceKind:
        return dataclasses.replace(kind, xla=xla)

    hosts = [
        dataclasses.replace(
            host, kind=made_by_it(host.kind),
            busy=tuple(dataclasses.replace(each, kind=made_by_it(each.kind)) for each in host.busy),
        )
        for host in fields["hosts"]
    ]  # fmt: skip
    return Cluster(fields["name"], tuple(hosts), Link(**fields["network"]))


def _peak_flops(value: Any, path: str) -> dict[str, float]:
    if not isinstance(value, Mapping) or "float32" not in value:
        raise bad(path, value, 'an object from dtype names to FLOP per second that has at least "float32"')
    read = number("FLOP per second above 0", above=0)
    return {dtype: read(peak, f"{path}.{dtype}") for dtype, peak in value.items()}


_read_rate = number("bytes per second above 0", above=0)
_read_factor = number("a factor above 0", above=0)
_read_speed = number("a number a second, above 0", above=0)
_read_side = number("a size above 0", above=0)


def _read_curve(value: Any, path: str) -> tuple[tuple[float, float], ...]:
    expected = "a list of pairs: bytes, ascending, and bytes per second above 0"
    pair = sequence(number(expected, above=0), expected, length=2)
    curve: tuple[tuple[float, float], ...] = sequence(pair, expected)(value, path)
    if any(low >= high for (low, _), (high, _) in itertools.pairwise(curve)):
        raise bad(path, value, expected)
    return curve


def _read_products(value: Any, path: str) -> tuple[ProductSpeed, ...]:
    items = sequence(_read_product, "a list of measured products")(value, path)
    return tuple(ProductSpeed(item["dtype"], ProductSizes(**item["sizes"]), item["flops"]) for item in items)


def _read_patches(value: Any, path: str) -> Patches:
    return Patches(**_read_patch_sizes(value, path))


_read_patch_sizes = record(
    {
        "taps": whole("a whole number above 0", least=1), "reuse": number("a number above 0", above=0),
        "gaps": whole("a whole number above 0", least=1),
    }
)  # fmt: skip
_read_sizes = record(
    {
        "batch": _read_side, "rows": _read_side, "columns": _read_side, "depth": _read_side,
        "patches": optional(_read_patches),
    }
)  # fmt: skip
_read_product = record(
    {"dtype": read_string, "sizes": _read_sizes, "flops": number("FLOP per second above 0", above=0)}
)
_read_measured_record = record(
    {
        "products": _read_products, "bandwidths": _read_curve, "strided_reads": _read_curve, "allocations": _read_curve,
        "pooling": record({"result": _read_speed, "gradient": _read_speed}),
        "temporaries": record({"convolutions": _read_factor, "others": _read_factor}),
    },
    dataclasses.asdict(Measured()),
)  # fmt: skip


def _read_measured(value: Any, path: str) -> Measured:
    return Measured(**_read_measured_record(value, path))


_LINK: Mapping[str, Reader] = {
    "name": read_string,
    "latency": number("seconds, 0 or more", least=0),
    "bandwidth": _read_rate,
    "pair_bandwidth": optional(number("bytes per second above 0, or null", above=0)),
    "lone_bandwidth": optional(number("bytes per second above 0, or null", above=0)),
}
_DEVICE: Mapping[str, Reader] = {
    "name": read_string,
    "memory": whole("a whole number of bytes above 0", least=1),
    "memory_bandwidth": _read_rate,
    "peak_flops": _peak_flops,
    "matmul_efficiency": number("a share above 0 and at most 1", above=0, most=1),
    "memory_efficiency": number("a share above 0 and at most 1", above=0, most=1),
    "launch_overhead": number("seconds, 0 or more", least=0),
    "dispatch_overhead": number("seconds, 0 or more", least=0),
    "memory_reserve": whole("a whole number of bytes, 0 or more", least=0),
    "convolution_share": number("a share above 0 and at most 1", above=0, most=1),
    "attention_share": number("a share above 0 and at most 1", above=0, most=1),
    "batched_share": number("a share above 0 and at most 1", above=0, most=1),
    "multiprocessors": whole("a whole number, 0 or more", least=0),
    "measured": _read_measured,
}
MOST_OF_A_KIND = 1_000_000  # hosts or devices that a file may ask for: beyond it there is a typing error
_COUNT = whole(f"a whole number from 1 to {MOST_OF_A_KIND}", least=1, most=MOST_OF_A_KIND)
_read_xla = record(
    {
        "collective_combine_threshold": whole("a whole number of bytes, 0 or more", least=0),
        "combines_contiguously": read_boolean,
        "hides_latency": read_boolean, "overlap_slowdown": number("a share from 0 to 0.99", least=0, most=0.99),
        "single_output": read_boolean, "split_k": read_boolean,
    },
    dataclasses.asdict(XlaBackend()),
)  # fmt: skip
_read_link = record(_LINK, {"pair_bandwidth": None, "lone_bandwidth": None})
# What a kind that was never measured is taken to reach: what the preset of this kind has.
_REFERENCE_KIND = "A100-SXM4-80GB"
_EFFICIENCIES = {
    "matmul_efficiency": 0.8, "memory_efficiency": 0.85, "launch_overhead": 3e-6, "dispatch_overhead": 5e-5,
}  # fmt: skip
_UNSAID = {
    "memory_reserve": 0, "convolution_share": 1.0, "batched_share": 1.0, "attention_share": 1.0, "multiprocessors": 0,
    "measured": Measured(),
}  # fmt: skip
_read_device_record = record(_DEVICE, {**_UNSAID, **dict.fromkeys(_EFFICIENCIES)})


def _read_device(value: Any, path: str) -> dict[str, Any]:
    """With a warning where efficiencies are left out."""
    fields: dict[str, Any] = _read_device_record(value, path)
    missing = [name for name in _EFFICIENCIES if fields[name] is None]
    if missing:
        taken = ", ".join(f"{name}={_EFFICIENCIES[name]}" for name in missing)
        warn(
            f"{path}: device kind {fields['name']!r} has no {', '.join(missing)}: costs fall back on those of "
            f"{_REFERENCE_KIND} ({taken}). Measure them for better plans.",
        )
        fields.update({name: _EFFICIENCIES[name] for name in missing})
    return fields


def _hosts_reader(device: Reader) -> Reader:
    speeds: dict[str, Reader] = {"device": device, "link": _read_link}
    busy = sequence(record({"num_devices": _COUNT, **speeds}), "a list of what fewer devices can do")
    group_reader = record(
        {"num_hosts": _COUNT, "devices_per_host": _COUNT, **speeds, "busy": busy}, {"num_hosts": 1, "busy": ()}
    )

    def kind_of(fields: Mapping[str, Any], path: str) -> DeviceKind:
        kind = DeviceKind(**fields)
        if kind.memory_reserve >= kind.memory:
            expected = f"less than the memory, {kind.memory} bytes"
            raise bad(f"{path}.memory_reserve", kind.memory_reserve, expected)
        return kind

    def read(value: Any, path: str) -> tuple[Host, ...]:
        if not isinstance(value, list) or not value:
            raise bad(path, value, "a list of at least one group of equal hosts")
        hosts: list[Host] = []
        for index, item in enumerate(value):
            group = group_reader(item, f"{path}[{index}]")
            here = f"{path}[{index}]"
            fewer = tuple(
                Busy(each["num_devices"], kind_of(each["device"], f"{here}.busy[{i}].device"), Link(**each["link"]))
                for i, each in enumerate(group["busy"])
            )
            counts = [each.num_devices for each in fewer]
            if counts != sorted({*counts}) or any(count >= group["devices_per_host"] for count in counts):
                raise bad(f"{here}.busy", group["busy"], "for ascending numbers of devices, fewer than the host has")
            kind = kind_of(group["device"], f"{here}.device")
            hosts += [Host(kind, group["devices_per_host"], Link(**group["link"]), fewer)] * group["num_hosts"]
        return tuple(hosts)

    return read


def _reader(device: Reader) -> Reader:
    fields = {"name": read_string, "hosts": _hosts_reader(device), "xla": _read_xla, "network": _read_link}
    return versioned(FORMAT, VERSION, fields, _REMEDY, {"xla": dataclasses.asdict(XlaBackend())})


_read_whole = _reader(record(_DEVICE, _UNSAID))
_read_file = _reader(_read_device)
