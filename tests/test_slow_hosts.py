"""Hosts that were found to be slow: what a job that is started again plans for."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from typing import Any

import pytest

import autopar
from autopar.cost_model.slowed import Slowness
from autopar.errors import ArgumentError
from autopar.planning import slow_hosts
from autopar.runtime.pulse import Part


@dataclasses.dataclass(frozen=True)
class Device:
    """What of JAX's is asked."""

    process_index: int


CLUSTER = autopar.load_preset("dgx-h100", num_hosts=2, devices_per_host=2)
DEVICES: Any = [Device(0), Device(0), Device(1), Device(1)]
NAMES = "node3", "node7"


@pytest.fixture(autouse=True)
def _folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_PLAN_CACHE", os.fspath(tmp_path))
    monkeypatch.setenv("AUTOPAR_REPLAN_WHEN_SLOWER", "1.2")
    monkeypatch.setattr(slow_hosts, "_planned_for", [slow_hosts._Known({}, 1.0)])


def _remembered(names: tuple[str, ...] = NAMES) -> autopar.Cluster:
    return slow_hosts.as_remembered(CLUSTER, DEVICES, names)


def test_what_is_slow_is_of_its_host_or_of_the_network() -> None:
    slow = {
        Part("products", 1): 1.504, Part("products", 0): 1.3, Part("memory", 3): 2.0, Part("link", 0): 1.4,
        Part("link", 1): 3.0,
    }  # fmt: skip
    hosts, network = slow_hosts.of_hosts(CLUSTER, DEVICES, NAMES, slow)
    assert hosts == {"node3": Slowness(1.5, 1.0, 1.4), "node7": Slowness(1.0, 2.0, 1.0)} and network == 3.0


def test_the_next_start_plans_for_it_on_the_same_hosts() -> None:
    assert _remembered() == CLUSTER
    slow_hosts.remember({"node7": Slowness(2.0, 1.5, 4.0)}, 1.25)
    found = _remembered()
    assert found == slow_hosts.with_slow(CLUSTER, DEVICES, NAMES, {"node7": Slowness(2.0, 1.5, 4.0)}, 1.25)
    first, second = found.hosts
    own = CLUSTER.hosts[0]
    assert first == own
    assert second.kind.matmul_efficiency == own.kind.matmul_efficiency / 2
    assert second.kind.memory_efficiency == own.kind.memory_efficiency / 1.5
    assert second.link.bandwidth == own.link.bandwidth / 4
    assert found.network.bandwidth == CLUSTER.network.bandwidth / 1.25
    assert second.kind.name != first.kind.name
    others = _remembered(("node1", "node2"))
    assert others.hosts == CLUSTER.hosts
    slow_hosts.remember({"node7": Slowness(1.5), "node3": Slowness(memory=3.0)}, 1.0)  # slower than was planned for
    found = _remembered()
    assert found.hosts[1].kind.matmul_efficiency == pytest.approx(own.kind.matmul_efficiency / 3)
    assert found.hosts[0].kind.memory_efficiency == own.kind.memory_efficiency / 3


def test_what_another_job_has_found_does_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # each has planned for what was healthy
        monkeypatch.setattr(slow_hosts, "_planned_for", [slow_hosts._Known({}, 1.0)])
        slow_hosts.remember({"node7": Slowness(2.0)}, 2.0)
    found = _remembered()
    assert found == slow_hosts.with_slow(CLUSTER, DEVICES, NAMES, {"node7": Slowness(2.0)}, 2.0)


def test_a_host_of_several_machines_is_as_slow_as_the_slowest() -> None:
    one = autopar.load_preset("dgx-h100", devices_per_host=4)
    hosts = {"node3": Slowness(1.0, 1.0, 1.5), "node7": Slowness(2.0)}
    (found,) = slow_hosts.with_slow(one, DEVICES, NAMES, hosts, 1.0).hosts
    assert found == slow_hosts.with_slow(one, DEVICES, ("node7",) * 2, {"node7": Slowness(2.0, 1.0, 1.5)}, 1.0).hosts[0]


def test_more_devices_than_the_cluster_has() -> None:
    slow_hosts.remember({"node7": Slowness(2.0)}, 1.0)
    assert slow_hosts.as_remembered(CLUSTER, [*DEVICES, Device(1)], NAMES) == _remembered() != CLUSTER
    assert slow_hosts.as_remembered(CLUSTER, DEVICES[:3], NAMES) == CLUSTER


def test_what_is_old_or_cannot_be_read_is_not_known(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "slow-hosts.json"
    slow_hosts.remember({"node7": Slowness(2.0)}, 2.0)
    assert _remembered() != CLUSTER
    told = json.loads(file.read_text())
    for each in (told["hosts"]["node7"], told["network"]):
        each["at"] = time.time() - 2 * 24 * 3600
    file.write_text(json.dumps(told))
    assert _remembered().hosts == CLUSTER.hosts and _remembered().network == CLUSTER.network
    for text in ("{", "[]", '{"hosts": {"node7": {"slow": {"unknown": 1}, "at": 1e12}}, "network": {}}'):
        file.write_text(text)
        assert _remembered().hosts == CLUSTER.hosts


def test_only_jobs_that_are_planned_anew_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_hosts.remember({"node7": Slowness(2.0)}, 2.0)
    monkeypatch.delenv("AUTOPAR_REPLAN_WHEN_SLOWER")
    assert _remembered() == CLUSTER and slow_hosts.when_slower() is None


@pytest.mark.parametrize("text", ["1", "0.5", "much", "nan"])
def test_a_number_that_makes_no_sense(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_REPLAN_WHEN_SLOWER", text)
    with pytest.raises(ArgumentError, match=r"AUTOPAR_REPLAN_WHEN_SLOWER='.*' is no number above 1"):
        slow_hosts.when_slower()
