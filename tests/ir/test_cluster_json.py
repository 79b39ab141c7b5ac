"""Cluster files: what is read, written and refused; and how a cluster prints."""

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.cost_model.hardware import load_preset
from autopar.errors import ClusterError
from autopar.ir.cluster_json import cluster_from_json, cluster_to_json
from autopar.ir.mesh import Busy, Cluster, DeviceKind, Host, Link, Patches, ProductSizes, ProductSpeed, XlaBackend
from tests.clusters import LINK, NETWORK, toy_kind


def make_cluster(
    name: str, num_hosts: int, devices_per_host: int, kind: DeviceKind, link: Link, network: Link
) -> Cluster:
    return Cluster(name, (Host(kind, devices_per_host, link),) * num_hosts, network)


def test_round_trip_of_a_mixed_cluster_with_awkward_numbers(tmp_path: Path) -> None:
    odd = toy_kind("odd", memory_bandwidth=0.1 + 0.2, launch_overhead=5e-324, memory=2**60 + 1, memory_reserve=7)
    hosts = (Host(toy_kind(), 4, LINK), Host(odd, 3, LINK), Host(odd, 3, LINK), Host(toy_kind(), 4, LINK))
    cluster = Cluster("mixed \u00e9", hosts, Link("net", 0.0, 1 / 3))
    text = cluster_to_json(cluster)
    assert cluster_from_json(text) == cluster
    assert cluster_to_json(cluster_from_json(text)) == text
    path = tmp_path / "cluster.json"
    path.write_text(text, encoding="utf-8")
    assert cluster_from_json(path) == cluster_from_json(str(path)) == cluster


def _measured() -> Cluster:
    """Of virtual devices, as a calibration leaves it."""
    products = (
        ProductSpeed("float32", ProductSizes(1, 64, 128.5, 256), 1e9),
        ProductSpeed("bfloat16", ProductSizes(4, 9, 8, 7, Patches(49, 0.25, 4)), 3e10),
    )
    kind = dataclasses.replace(
        toy_kind(),
        xla=XlaBackend(
            collective_combine_threshold=7,
            combines_contiguously=True,
            hides_latency=False,
            overlap_slowdown=0.25,
            single_output=True,
            split_k=False,
        ),
    ).with_measured(
        products=products,
        bandwidths=((1e3, 8e9), (2.5e6, 1e9)),
        strided_reads=((1e5, 4e9), (1e6, 4e8)),
        pooling={"result": 4e8, "gradient": 3e7},
        allocations=((1e6, 5e9),),
        temporaries={"convolutions": 2.5, "others": 0.5},
    )
    faster = dataclasses.replace(kind, launch_overhead=1e-9)
    busy = (Busy(1, faster, LINK), Busy(2, kind, dataclasses.replace(LINK, latency=1.0)))
    return Cluster("measured", (Host(kind, 4, LINK, busy),) * 2, NETWORK)


def test_round_trip_of_what_was_measured() -> None:
    cluster = _measured()
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
    assert cluster.while_busy(1).hosts[0].kind.launch_overhead == 1e-9
    assert cluster.while_busy(2).hosts[1].link.latency == 1.0
    assert cluster.while_busy(3) == cluster


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("device", "measured", "products", 0, "flops"),
            0,
            r"device.measured.products\[0\].flops is 0; it must be FLOP per sec",
        ),
        (
            ("device", "measured", "products", 1, "sizes", "patches", "taps"),
            0,
            r"patches.taps is 0; it must be a whole number",
        ),
        (
            ("device", "measured", "products", 1, "sizes", "patches", "reuse"),
            0,
            r"patches.reuse is 0; it must be a number above 0",
        ),
        (
            ("device", "measured", "products", 1, "sizes", "rows"),
            0,
            r"products\[1\].sizes.rows is 0; it must be a size above 0",
        ),
        (
            ("device", "measured", "bandwidths"),
            [[2e3, 1e9], [1e3, 1e9]],
            "bandwidths is .* a list of pairs: bytes, ascending",
        ),
        (("device", "measured", "bandwidths", 0), [1e3], r"bandwidths\[0\] is .* a list of pairs"),
        (("device", "measured", "temporaries", "others"), 0, r"temporaries.others is 0; it must be a factor above 0"),
        (("device", "measured", "pooling", "result"), 0, r"pooling.result is 0; it must be a number a second, above 0"),
        (("device", "measured", "pooling", "sum"), 1, r"pooling.sum is no field of this file"),
        (("device", "measured", "strided_reads", 0, 1), 0, r"strided_reads\[0\]\[1\] is 0"),
        (("device", "measured", "allocations", 0, 1), 0, r"allocations\[0\]\[1\] is 0"),
        (("busy", 0, "num_devices"), 3, r"hosts\[0\].busy is .* ascending numbers of devices, fewer than the host has"),
        (("busy", 1, "num_devices"), 4, r"hosts\[0\].busy is .* fewer than the host has"),
        (("busy", 1, "device", "memory"), 0, r"hosts\[0\].busy\[1\].device.memory is 0"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = json.loads(cluster_to_json(_measured()))
    place = data["hosts"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ClusterError, match=message):
        cluster_from_json(json.dumps(data))


def test_memory_reserve_and_num_hosts_may_be_left_out() -> None:
    data = json.loads(cluster_to_json(make_cluster("c", 1, 2, toy_kind(), LINK, NETWORK)))
    del data["hosts"][0]["num_hosts"], data["hosts"][0]["device"]["memory_reserve"]
    assert cluster_from_json(json.dumps(data)) == make_cluster("c", 1, 2, toy_kind(), LINK, NETWORK)


def test_a_device_kind_without_efficiencies_falls_back_with_a_warning() -> None:
    data = json.loads(cluster_to_json(make_cluster("c", 1, 2, toy_kind(), LINK, NETWORK)))
    names = ("matmul_efficiency", "memory_efficiency", "launch_overhead", "dispatch_overhead")
    for name in names:
        del data["hosts"][0]["device"][name]
    common = load_preset("dgx-a100").hosts[0].kind
    with pytest.warns(UserWarning, match=rf"hosts\[0\].device: .* {', '.join(names)}: .* of {common.name} \(") as met:
        kind = cluster_from_json(json.dumps(data)).hosts[0].kind
    assert len(met) == 1
    assert kind == dataclasses.replace(toy_kind(), **{name: getattr(common, name) for name in names})


_MISSING = object()
_DEVICE = ("hosts", 0, "device")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ((*_DEVICE, "memory"), -3, "hosts[0].device.memory is -3; it must be a whole number of bytes above 0"),
        ((*_DEVICE, "memory"), 1.5, "hosts[0].device.memory is 1.5; it must be a whole number of bytes"),
        ((*_DEVICE, "memory"), "80 GB", 'hosts[0].device.memory is "80 GB"; it must be a whole number'),
        ((*_DEVICE, "memory"), _MISSING, "hosts[0].device.memory is missing; add it"),
        ((*_DEVICE, "memory_reserve"), 1 << 30, "memory_reserve is 1073741824; it must be less than"),
        ((*_DEVICE, "memory_bandwidth"), math.nan, "hosts[0].device.memory_bandwidth is nan; it must be bytes"),
        ((*_DEVICE, "memory_bandwidth"), True, "hosts[0].device.memory_bandwidth is true; it must be bytes"),
        ((*_DEVICE, "memory_bandwidth"), 10**400, "memory_bandwidth is 1000"),
        ((*_DEVICE, "matmul_efficiency"), 1.01, "matmul_efficiency is 1.01; it must be a share above 0"),
        ((*_DEVICE, "launch_overhead"), -1e-9, "launch_overhead is -1e-09; it must be seconds, 0 or more"),
        ((*_DEVICE, "peak_flops"), {"bfloat16": 1e12}, 'peak_flops is {"bfloat16": 1000000000000.0}; it must be'),
        ((*_DEVICE, "peak_flops", "float32"), 0, "hosts[0].device.peak_flops.float32 is 0; it must be FLOP"),
        ((*_DEVICE, "memmory"), 5, "memmory is no field of this file (value 5); did you mean 'memory'"),
        (_DEVICE, [], "hosts[0].device is []; it must be an object with the fields name, memory"),
        ((*_DEVICE, "name"), None, "hosts[0].device.name is null; it must be a text"),
        (("hosts", 0, "link", "bandwidth"), math.inf, "hosts[0].link.bandwidth is inf; it must be bytes per second"),
        (("hosts", 0, "link", "latency"), _MISSING, "hosts[0].link.latency is missing"),
        (("hosts", 0, "devices_per_host"), 0, "hosts[0].devices_per_host is 0; it must be a whole number from 1"),
        (("hosts", 0, "num_hosts"), 10**12, "hosts[0].num_hosts is 1000000000000; it must be a whole number from 1 to"),
        (("hosts",), [], "hosts is []; it must be a list of at least one group"),
        (("network",), _MISSING, "network is missing"),
        (("network", "speed"), 1, "network.speed is no field of this file"),
        (("version",), 1, "version is 1; it must be 2"),
        (("version",), True, "version is true; it must be 2"),
        (("format",), _MISSING, 'format is null; it must be "autopar-cluster"'),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_with_its_value_and_the_remedy(
    path: tuple[str | int, ...], value: Any, expected: str
) -> None:
    data = json.loads(cluster_to_json(make_cluster("c", 1, 2, toy_kind(), LINK, NETWORK)))
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is _MISSING:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    with pytest.raises(ClusterError) as error:
        cluster_from_json(json.dumps(data))
    assert str(error.value).startswith("cluster text: ")
    assert expected in str(error.value)


def test_hosts_have_one_compiler() -> None:
    both = tuple(Host(toy_kind(xla=XlaBackend(single_output=single)), 2, LINK) for single in (False, True))
    with pytest.raises(ClusterError, match=r"cluster 'two': host 1 has .*single_output=True.* one compiler"):
        cluster_to_json(Cluster("two", both, NETWORK))


def test_every_number_of_a_file_is_checked() -> None:
    """Each number of the file in turn becomes a text, -1 or infinite: always an error that names the field."""
    data = json.loads(cluster_to_json(make_cluster("c", 1, 2, toy_kind(memory_reserve=1), LINK, NETWORK)))

    def numbers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        if isinstance(value, int | float):
            yield path
        for key, item in items:
            yield from numbers(item, (*path, key))

    paths = list(numbers(data))
    assert len(paths) == 25  # version, 2 counts, 12 of the device, 6 of the compiler, 2 of each link
    for path in paths:
        for bad in (-1, "1", math.inf):
            broken = copy.deepcopy(data)
            at = broken
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = bad
            with pytest.raises(ClusterError, match=rf"{path[-1]} is (-1|\"1\"|inf); it must be"):
                cluster_from_json(json.dumps(broken))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "cluster text is not JSON: Expecting property name"),
        ('{"a": ' * 100_000, "cluster text is not JSON: "),
        ('{"format": 1, "format": 1}', "an object gives the field format twice"),
        ("{}", "format is null"),
    ],
)
def test_text_that_is_no_cluster_file(text: str, expected: str) -> None:
    with pytest.raises(ClusterError) as error:
        cluster_from_json(text)
    assert expected in str(error.value)


def test_files_that_are_no_cluster_files(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read the cluster file '.*none\.json'"):
        cluster_from_json(tmp_path / "none.json")
    path = tmp_path / "list.json"
    path.write_text("[1, 2]")
    with pytest.raises(ClusterError, match=r"cluster file '.*list.json' holds \[1, 2\]; it must be an object"):
        cluster_from_json(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="cannot read the cluster file"):
        cluster_from_json(path)


def test_a_cluster_that_no_file_may_hold_is_not_written() -> None:
    cluster = make_cluster("broken", 1, 2, toy_kind(), LINK, dataclasses.replace(NETWORK, bandwidth=math.nan))
    with pytest.raises(ClusterError, match=r"cluster 'broken': network\.bandwidth is nan"):
        cluster_to_json(cluster)


def test_a_cluster_prints_its_hosts_and_links() -> None:
    kind = toy_kind(memory=3 << 29, memory_reserve=1 << 20, peak_flops={"float32": 1e12, "bfloat16": 3.5e14})
    cluster = Cluster("lab", (Host(kind, 4, LINK), Host(kind, 4, LINK), Host(toy_kind("old"), 2, LINK)), NETWORK)
    assert (
        str(cluster)
        == """\
Cluster lab (10 devices)
2 hosts × 4 devices: toy
  memory   1.5 GiB, of which 1.0 MiB are kept free, 10 GB/s
  peak     float32 1 TFLOP/s, bfloat16 350 TFLOP/s
  link     wire, 10 GB/s, 1 us
1 host × 2 devices: old
  memory   1.0 GiB, of which 0 B are kept free, 10 GB/s
  peak     float32 1 TFLOP/s
  link     wire, 10 GB/s, 1 us
network    net, 1 GB/s, 10 us"""
    )
