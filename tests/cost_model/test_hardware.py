"""Presets, and the cluster of the devices at hand."""

import dataclasses
import importlib.resources
import json
import os
import types
from typing import Any, cast

import jax
import pytest

from autopar.cost_model.hardware import (
    cluster_from_devices,
    devices_by_host,
    load_preset,
    make_cluster,
    preset_names,
)
from autopar.errors import ClusterError
from autopar.ir.cluster_json import cluster_from_json, cluster_to_json
from autopar.ir.mesh import Cluster, Host, XlaBackend
from tests.clusters import LINK, NETWORK, toy_kind

# Presets


def test_the_presets_are_those_promised() -> None:
    assert preset_names() == (
        "a3-megagpu-8g", "cpu", "dgx-a100", "dgx-a100-2021", "dgx-a100-40gb", "dgx-b200", "dgx-h100", "gb200-nvl72",
        "hgx-h200", "p3.16xlarge", "p3.16xlarge-2022", "p5.48xlarge",
    )  # fmt: skip


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
    with pytest.raises(ClusterError, match=f"{name} is {value!r}; it must be a whole number from 1 to 1000000"):
        load_preset("dgx-h100", **counts)
    with pytest.raises(ClusterError, match=f"{name} is {value!r}"):
        make_cluster(
            "c", kind=toy_kind(), link=LINK, network=NETWORK, **{"num_hosts": 1, "devices_per_host": 1, **counts}
        )


def test_make_cluster() -> None:
    cluster = make_cluster("pretend", 2, 4, toy_kind(), LINK, NETWORK)
    assert cluster == Cluster("pretend", (Host(toy_kind(), 4, LINK), Host(toy_kind(), 4, LINK)), NETWORK)


# The devices at hand


def _device(
    device_kind: str, process_index: int = 0, limit: int | None = None, fast_domain: int | None = None,
    attribute: str = "partition_index",
) -> jax.Device:  # fmt: skip
    stats = None if limit is None else {"bytes_limit": limit}
    domain = {} if fast_domain is None else {attribute: fast_domain}
    return cast(
        jax.Device,
        types.SimpleNamespace(
            platform="gpu", device_kind=device_kind, process_index=process_index, memory_stats=lambda: stats, **domain
        ),
    )


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
        ("NVIDIA B200", "dgx-b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
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


def test_processes_of_one_host_are_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm starts them: one for each GPU."""
    devices = [_device("NVIDIA H100 80GB HBM3", i, fast_domain=i // 8) for i in range(16)]
    expected = load_preset("dgx-h100", num_hosts=2)
    assert cluster_from_devices(devices).hosts == expected.hosts
    older = [_device("NVIDIA H100 80GB HBM3", i, fast_domain=i // 8, attribute="slice_index") for i in range(16)]
    assert cluster_from_devices(older).hosts == expected.hosts
    # Ranks that go round the hosts: the devices are put in order where nobody has chosen one.
    dealt = [_device("NVIDIA H100 80GB HBM3", i, fast_domain=i % 2) for i in range(16)]
    monkeypatch.setattr(jax, "devices", lambda: dealt)
    assert [device.process_index for device in devices_by_host()] == [*range(0, 16, 2), *range(1, 16, 2)]
    assert cluster_from_devices().hosts == expected.hosts


def test_mixed_hosts_take_the_slowest_network() -> None:
    cluster = cluster_from_devices([_device("NVIDIA H200", 0), _device("Tesla V100-SXM2-16GB", 1)])
    assert [host.kind.name for host in cluster.hosts] == ["H200-SXM5-141GB", "V100-SXM2-16GB"]
    slow = load_preset("p3.16xlarge").network
    assert (cluster.network.latency, cluster.network.bandwidth) == (slow.latency, slow.bandwidth)


def test_devices_that_make_no_cluster() -> None:
    with pytest.raises(ClusterError, match="devices is empty"):
        cluster_from_devices([])
    with pytest.raises(ClusterError, match=r"order \[0, 1, 0\] of process_index: .*sort them by process_index"):
        cluster_from_devices([_device("NVIDIA H200", i) for i in (0, 1, 0)])
    with pytest.raises(ClusterError, match=r"order \[0, 1, 0\] of partition_index: .*sort them by partition_index"):
        cluster_from_devices([_device("NVIDIA H200", i, fast_domain=i % 2) for i in range(3)])
    kinds = "the host of process_index 0 has devices of the kinds NVIDIA H200, Tesla V100-SXM2-16GB"
    with pytest.raises(ClusterError, match=kinds):
        cluster_from_devices([_device("NVIDIA H200"), _device("Tesla V100-SXM2-16GB")])


def test_a_machine_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", no_answer)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    (host,) = cluster_from_devices(jax.devices("cpu")[:1]).hosts
    assert host.kind.memory == load_preset("cpu").hosts[0].kind.memory  # one core, as the preset has it


@pytest.mark.parametrize(("today", "then"), [("p3.16xlarge", "p3.16xlarge-2022"), ("dgx-a100", "dgx-a100-2021")])
def test_presets_of_published_measurements_differ_by_the_compiler_alone(today: str, then: str) -> None:
    old, new = load_preset(then), load_preset(today)
    assert not old.xla.hides_latency
    assert new.xla == XlaBackend()
    host = dataclasses.replace(old.hosts[0], kind=dataclasses.replace(old.hosts[0].kind, xla=new.xla))
    assert dataclasses.replace(old, name=today, hosts=(host,)) == new


def test_a_cluster_file_without_a_compiler_has_that_of_gpus_today() -> None:
    data = json.loads(cluster_to_json(load_preset("dgx-h100")))
    assert data.pop("xla") == {
        "collective_combine_threshold": 30 << 20, "combines_contiguously": False, "hides_latency": True,
        "overlap_slowdown": 0.18, "single_output": False, "split_k": True,
    }  # fmt: skip
    assert cluster_from_json(json.dumps(data)) == load_preset("dgx-h100")
