"""Presets, cluster files and the cluster of the devices at hand."""

import copy
import dataclasses
import importlib.resources
import json
import math
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import pytest

from autopar.cost_model.hardware import (
    cluster_from_devices,
    cluster_from_json,
    cluster_to_json,
    load_preset,
    make_cluster,
    preset_names,
)
from autopar.errors import ClusterError
from autopar.ir.mesh import Cluster, DeviceKind, Host, Link


def _kind(name: str = "toy", **changes: Any) -> DeviceKind:
    kind = DeviceKind(
        name=name,
        memory=1 << 30,
        memory_bandwidth=1e10,
        peak_flops={"float32": 1e12},
        matmul_efficiency=0.5,
        memory_efficiency=0.5,
        launch_overhead=1e-6,
        dispatch_overhead=1e-5,
        memory_reserve=0,
    )
    return dataclasses.replace(kind, **changes)


LINK = Link("wire", 1e-6, 1e10)
NETWORK = Link("net", 1e-5, 1e9)


# Presets


def test_the_presets_are_those_promised() -> None:
    assert preset_names() == ("cpu", "dgx-a100", "dgx-a100-40gb", "dgx-h100", "hgx-h200", "p3.16xlarge")


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_round_trip_and_name_their_sources(name: str) -> None:
    cluster = load_preset(name, num_hosts=3)
    assert cluster.name == name
    assert len(cluster.hosts) == 3
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
    # Inside a host everything is faster than between hosts, and the memory is more than what is kept free.
    assert cluster.hosts[0].link.bandwidth > cluster.network.bandwidth
    assert cluster.hosts[0].link.latency < cluster.network.latency

    text = (importlib.resources.files("autopar.cost_model") / "data" / f"{name}.json").read_text()
    data = json.loads(text)
    (group,) = data["hosts"]
    for section in (group, group["device"], group["link"], data["network"]):
        assert len(section["source"]) > 20
    assert data["name"] == name


def test_preset_numbers_against_the_datasheets() -> None:
    p3 = load_preset("p3.16xlarge", num_hosts=8)
    assert p3.num_devices == 64
    assert p3.hosts[0].kind.peak_flops == {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12}
    # 25 Gbit/s = 3.125e9 bytes/s a host; 0.8 of it for 8 devices = 0.3125e9 each.
    assert p3.network.bandwidth == 0.3125e9
    a100 = load_preset("dgx-a100")
    # NVLink 3: 600e9 both ways = 300e9 each way, 0.8 of it; 200 Gbit/s = 25e9 bytes/s a device, 0.8 of it.
    assert a100.hosts[0].link.bandwidth == 240e9
    assert a100.network.bandwidth == 20e9
    assert a100.hosts[0].kind.memory == 80 * 2**30
    assert load_preset("dgx-a100-40gb").hosts[0].kind.memory == 40 * 2**30
    h100, h200 = load_preset("dgx-h100").hosts[0].kind, load_preset("hgx-h200").hosts[0].kind
    assert h100.peak_flops == h200.peak_flops  # the same chip with other memory
    assert h200.memory > h100.memory
    assert h200.memory_bandwidth > h100.memory_bandwidth


def test_fewer_devices_per_host() -> None:
    whole, part = load_preset("dgx-h100"), load_preset("dgx-h100", num_hosts=2, devices_per_host=4)
    assert part.num_devices == 8
    assert part.host_of(4) == 1
    assert part.hosts[0].kind == whole.hosts[0].kind
    assert part.network == whole.network


def test_virtual_devices_share_their_host() -> None:
    # The preset's host has two cores; eight devices get a quarter of a core each, and sum to the same host.
    two, eight = load_preset("cpu").hosts[0], load_preset("cpu", devices_per_host=8).hosts[0]
    assert (two.num_devices, eight.num_devices) == (2, 8)
    for field in ("memory", "memory_bandwidth"):
        assert 8 * getattr(eight.kind, field) == 2 * getattr(two.kind, field)
    assert 8 * eight.kind.peak_flops["float32"] == 2 * two.kind.peak_flops["float32"]
    assert 8 * eight.link.bandwidth == 2 * two.link.bandwidth
    assert eight.link.latency == two.link.latency


def test_unknown_preset_names_the_nearest_and_all() -> None:
    with pytest.raises(ClusterError) as error:
        load_preset("dgx-h10")
    message = str(error.value)
    assert "'dgx-h10'" in message
    assert "did you mean 'dgx-h100'" in message
    assert all(name in message for name in preset_names())


@pytest.mark.parametrize(
    "counts", [{"num_hosts": 0}, {"num_hosts": 1.5}, {"devices_per_host": -1}, {"num_hosts": True}]
)
def test_counts_are_whole_and_positive(counts: dict[str, Any]) -> None:
    ((name, value),) = counts.items()
    with pytest.raises(ClusterError, match=f"{name} is {value!r}; it must be a whole number above 0"):
        load_preset("dgx-h100", **counts)
    with pytest.raises(ClusterError, match=f"{name} is {value!r}"):
        make_cluster("c", kind=_kind(), link=LINK, network=NETWORK, **{"num_hosts": 1, "devices_per_host": 1, **counts})


def test_make_cluster() -> None:
    cluster = make_cluster("pretend", 2, 4, _kind(), LINK, NETWORK)
    assert cluster == Cluster("pretend", (Host(_kind(), 4, LINK), Host(_kind(), 4, LINK)), NETWORK)


# Files


def test_round_trip_of_a_mixed_cluster_with_awkward_numbers(tmp_path: Path) -> None:
    odd = _kind("odd", memory_bandwidth=0.1 + 0.2, launch_overhead=5e-324, memory=2**60 + 1, memory_reserve=7)
    hosts = (Host(_kind(), 4, LINK), Host(odd, 3, LINK), Host(odd, 3, LINK), Host(_kind(), 4, LINK))
    cluster = Cluster("mixed \u00e9", hosts, Link("net", 0.0, 1 / 3))
    text = cluster_to_json(cluster)
    assert cluster_from_json(text) == cluster
    assert cluster_to_json(cluster_from_json(text)) == text
    path = tmp_path / "cluster.json"
    path.write_text(text, encoding="utf-8")
    assert cluster_from_json(path) == cluster_from_json(str(path)) == cluster


def test_memory_reserve_and_num_hosts_may_be_left_out() -> None:
    data = json.loads(cluster_to_json(make_cluster("c", 1, 2, _kind(), LINK, NETWORK)))
    del data["hosts"][0]["num_hosts"], data["hosts"][0]["device"]["memory_reserve"]
    assert cluster_from_json(json.dumps(data)) == make_cluster("c", 1, 2, _kind(), LINK, NETWORK)


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
        ((*_DEVICE, "memmory"), 5, "memmory is no field of a cluster file (value 5); did you mean 'memory'"),
        (_DEVICE, [], "hosts[0].device is []; it must be an object with the fields name, memory"),
        ((*_DEVICE, "name"), None, "hosts[0].device.name is null; it must be a text"),
        (("hosts", 0, "link", "bandwidth"), math.inf, "hosts[0].link.bandwidth is inf; it must be bytes per second"),
        (("hosts", 0, "link", "latency"), _MISSING, "hosts[0].link.latency is missing"),
        (("hosts", 0, "devices_per_host"), 0, "hosts[0].devices_per_host is 0; it must be a whole number from 1"),
        (("hosts", 0, "num_hosts"), 10**12, "hosts[0].num_hosts is 1000000000000; it must be a whole number from 1 to"),
        (("hosts",), [], "hosts is []; it must be a list of at least one group"),
        (("network",), _MISSING, "network is missing"),
        (("network", "speed"), 1, "network.speed is no field of a cluster file"),
        (("version",), 2, "version is 2; it must be 1"),
        (("version",), True, "version is true; it must be 1"),
        (("format",), _MISSING, 'format is null; it must be "autopar-cluster"'),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_with_its_value_and_the_remedy(
    path: tuple[str | int, ...], value: Any, expected: str
) -> None:
    data = json.loads(cluster_to_json(make_cluster("c", 1, 2, _kind(), LINK, NETWORK)))
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


def test_every_number_of_a_file_is_checked() -> None:
    """Each number of the file in turn becomes a text, -1 or infinite: always an error that names the field."""
    data = json.loads(cluster_to_json(make_cluster("c", 1, 2, _kind(memory_reserve=1), LINK, NETWORK)))

    def numbers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        if isinstance(value, int | float):
            yield path
        for key, item in items:
            yield from numbers(item, (*path, key))

    paths = list(numbers(data))
    assert len(paths) == 15  # version, 2 counts, 8 of the device, 2 of each link
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
    cluster = make_cluster("broken", 1, 2, _kind(), LINK, dataclasses.replace(NETWORK, bandwidth=math.nan))
    with pytest.raises(ClusterError, match=r"cluster 'broken': network\.bandwidth is nan"):
        cluster_to_json(cluster)


# The devices at hand


def _device(device_kind: str, process_index: int = 0, limit: int | None = None) -> jax.Device:
    stats = None if limit is None else {"bytes_limit": limit}
    device = types.SimpleNamespace(device_kind=device_kind, process_index=process_index, memory_stats=lambda: stats)
    return cast(jax.Device, device)


def test_the_virtual_devices_of_this_machine_share_its_cores() -> None:
    devices = jax.devices("cpu")
    cluster = cluster_from_devices(devices)
    assert cluster == cluster_from_devices()
    (host,) = cluster.hosts
    assert host.num_devices == len(devices)
    core = load_preset("cpu").hosts[0].kind
    total = len(devices) * host.kind.peak_flops["float32"]
    assert total == pytest.approx((os.cpu_count() or 1) * core.peak_flops["float32"])
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0.99 * physical < len(devices) * host.kind.memory <= physical
    # Fewer devices of the same machine are faster ones.
    half = cluster_from_devices(devices[: len(devices) // 2]).hosts[0].kind
    assert half.peak_flops["float32"] == pytest.approx(2 * host.kind.peak_flops["float32"])
    assert cluster_from_json(cluster_to_json(cluster)) == cluster


@pytest.mark.parametrize(
    ("device_kind", "preset"),
    [
        ("NVIDIA H200", "hgx-h200"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA A100-SXM4-40GB", "dgx-a100-40gb"),
        ("Tesla V100-SXM2-16GB", "p3.16xlarge"),
    ],
)
def test_device_kinds_that_presets_describe(device_kind: str, preset: str) -> None:
    # 4 devices in each of two processes; warnings are errors here.
    cluster = cluster_from_devices([_device(device_kind, i // 4) for i in range(8)])
    expected = load_preset(preset, num_hosts=2, devices_per_host=4)
    assert cluster.hosts == expected.hosts
    assert cluster.network == expected.network
    assert cluster.name == f"8 x {expected.hosts[0].kind.name}"


@pytest.mark.parametrize(
    ("device_kind", "preset"),
    [("NVIDIA H100 PCIe", "dgx-h100"), ("Tesla V100-SXM2-32GB", "p3.16xlarge"), ("Fancy 9000", "dgx-a100")],
)
def test_other_device_kinds_fall_back_with_one_warning(device_kind: str, preset: str) -> None:
    with pytest.warns(UserWarning, match=f"{device_kind!r}.* fall back on the preset {preset!r}") as caught:
        cluster = cluster_from_devices([_device(device_kind), _device(device_kind)])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert cluster.hosts[0].kind == load_preset(preset).hosts[0].kind


def test_the_memory_is_what_the_backend_says() -> None:
    gib = 1 << 30
    # The preset: 80 GiB with 4 GiB in reserve. The backend leaves 80 - 78 = 2 GiB to others: 2 remain in reserve.
    devices = [_device("NVIDIA H100 80GB HBM3", 0, 78 * gib), _device("NVIDIA H100 80GB HBM3", 1)]
    for host in cluster_from_devices(devices).hosts:  # the other process cannot be asked: as here
        assert (host.kind.memory, host.kind.memory_reserve) == (78 * gib, 2 * gib)
    # A pool of 60 GiB leaves 20 GiB to others: more than the reserve.
    (host,) = cluster_from_devices([_device("NVIDIA H100 80GB HBM3", 0, 60 * gib)]).hosts
    assert (host.kind.memory, host.kind.memory_reserve) == (60 * gib, 0)


def test_mixed_hosts_take_the_slowest_network() -> None:
    cluster = cluster_from_devices([_device("NVIDIA H200", 0), _device("Tesla V100-SXM2-16GB", 1)])
    assert [host.kind.name for host in cluster.hosts] == ["H200-SXM5-141GB", "V100-SXM2-16GB"]
    slow = load_preset("p3.16xlarge").network
    assert (cluster.network.latency, cluster.network.bandwidth) == (slow.latency, slow.bandwidth)


def test_devices_that_make_no_cluster() -> None:
    with pytest.raises(ClusterError, match="devices is empty"):
        cluster_from_devices([])
    with pytest.raises(ClusterError, match=r"process order \[0, 1, 0\].*sort them by process_index"):
        cluster_from_devices([_device("NVIDIA H200", i) for i in (0, 1, 0)])
    with pytest.raises(ClusterError, match="process 0 has devices of the kinds NVIDIA H200, Tesla V100-SXM2-16GB"):
        cluster_from_devices([_device("NVIDIA H200"), _device("Tesla V100-SXM2-16GB")])


def test_a_machine_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", no_answer)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    (host,) = cluster_from_devices(jax.devices("cpu")[:1]).hosts
    assert host.kind.memory == load_preset("cpu").hosts[0].kind.memory  # one core, as the preset has it
