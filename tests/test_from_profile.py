"""Clusters with the speeds of a profiled step."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import pytest

import autopar
from autopar.calibration.from_profile import cluster_from_profile
from autopar.errors import ClusterError
from autopar.ir.cluster_json import cluster_data
from autopar.planned import planned_for
from tests.test_profile import BATCH, PARAMS, train_step

CLUSTERS = {
    "two hosts": autopar.load_preset("dgx-h100", num_hosts=2, devices_per_host=2),
    "a host": autopar.load_preset("dgx-a100", devices_per_host=4),
    "virtual": autopar.load_preset("cpu", devices_per_host=4),
}
FACTORS = {"products": 1.5, "memory": 3.0, "collectives": 4.0}


def _profile(planned: autopar.Planned, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Of a step that took these times as long as predicted."""
    work = planned.work()
    rows = [
        {"kind": kind, "kernels": 1.0, "measured": FACTORS[kind] * done.seconds, "predicted": done.seconds,
         "flops": done.flops, "nbytes": done.nbytes}
        for kind, done in work.items()
    ]  # fmt: skip
    content = {
        "format": "autopar-profile", "version": 1, "kernels": rows, "rows": [],
        "described": cluster_data(planned.cluster), **changes,
    }  # fmt: skip
    path = folder / "profile.json"
    path.write_text(json.dumps(content))
    return path


def _planned(cluster: autopar.Cluster) -> autopar.Planned:
    large = jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(256 * n for n in x.shape), x.dtype), (PARAMS, BATCH))
    step = autopar.parallelize(train_step, cluster=cluster, method=autopar.recipes.zero(3, 1))
    return step.plan(*large)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_plan_takes_as_long_as_was_measured(name: str, tmp_path: pathlib.Path) -> None:
    planned = _planned(CLUSTERS[name])
    found = cluster_from_profile(_profile(planned, tmp_path))
    assert found.factors == pytest.approx({kind: FACTORS[kind] for kind in planned.work()})
    plan = autopar.Plan(**{**planned.fields(), "cluster": found.cluster})
    again = planned_for(planned.step, found.cluster, plan).work()
    for kind, before in planned.work().items():
        # Launches, and the latency of kernels, are no part of the speeds.
        assert again[kind].seconds == pytest.approx(FACTORS[kind] * before.seconds, rel=0.1), kind
    assert autopar.cluster_from_json(autopar.cluster_to_json(found.cluster)) == found.cluster
    assert "1.50" in str(found) and json.loads(found.to_json())["factors"]["products"] == pytest.approx(1.5)


def test_convolutions_and_transfers(tmp_path: pathlib.Path) -> None:
    planned = _planned(CLUSTERS["two hosts"])
    # fmt: off
    rows = [{"kind": "convolutions", "kernels": 1.0, "measured": 3.0, "predicted": 1.0, "flops": 1.0, "nbytes": 1.0},
            {"kind": "products", "kernels": 1.0, "measured": 2.0, "predicted": 1.0, "flops": 1.0, "nbytes": 1.0},
            {"kind": "attention", "kernels": 1.0, "measured": 1.0, "predicted": 0.0, "flops": 1.0, "nbytes": 1.0},
            {"kind": "memory", "kernels": 1.0, "measured": 1e-3, "predicted": 1.0, "flops": 0.0, "nbytes": 1.0}]
    copies = [{"to": 1, "measured": 3.0, "predicted": 2.0}, {"to": 0, "measured": 2.0, "predicted": None},
              {"to": None, "measured": 9.0, "predicted": 1.0}]
    # fmt: on
    found = cluster_from_profile(_profile(planned, tmp_path, kernels=rows, rows=copies))
    assert found.factors == {"convolutions": 3.0, "products": 2.0, "transfers": 1.5}
    before, after = planned.cluster, found.cluster
    assert after.hosts[0].kind.matmul_efficiency == before.hosts[0].kind.matmul_efficiency / 2
    assert after.hosts[0].kind.convolution_share == pytest.approx(2 / 3)
    assert after.hosts[0].kind.attention_share == 1.0  # nothing was predicted for it
    assert after.hosts[0].kind.memory_efficiency == before.hosts[0].kind.memory_efficiency
    for new, old in ((after.network, before.network), (after.hosts[0].link, before.hosts[0].link)):
        assert (new.bandwidth, new.latency) == (old.bandwidth / 1.5, old.latency * 1.5)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "autopar-plan"}'])
def test_what_is_no_profile_with_kernels(text: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ClusterError, match=r"it holds no kernels .* `autopar profile TARGET --kernels --json`"):
        cluster_from_profile(path)


def test_a_profile_without_kernels(tmp_path: pathlib.Path) -> None:
    path = _profile(_planned(CLUSTERS["a host"]), tmp_path, kernels=[])
    with pytest.raises(ClusterError, match="it holds no kernels"):
        cluster_from_profile(path)


def test_of_a_step_that_ran(tmp_path: pathlib.Path) -> None:
    step = autopar.parallelize(train_step, method=autopar.recipes.gpipe(2, 4), devices=jax.devices()[:4])
    profile = step.compile(PARAMS, BATCH).profile(PARAMS, BATCH, steps=1, kernels=True)
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    found = cluster_from_profile(path)
    assert found.cluster.num_devices == 4 and found.cluster != profile.plan.cluster
    ratios = {row.kind: row.ratio for row in profile.kernels}
    assert all(found.factors[kind] == pytest.approx(ratios[kind]) for kind in found.factors if kind != "transfers")  # type: ignore[index]
    assert dataclasses.replace(found.cluster, name="").num_devices == 4
