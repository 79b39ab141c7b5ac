"""Hosts that are slower than others, and stages on devices of several kinds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost_model.compute import compute_time, product_share
from autopar.cost_model.slowed import Factors, Slowness, slowed_hosts, slower_kind, worst_of
from autopar.ir.mesh import Attention, DeviceKind, Patches, ProductSizes, ProductSpeed


def _seconds(kind: DeviceKind) -> tuple[float, float]:
    """Of a large product, and of a kernel that waits for memory."""
    of = {"dtype": "bfloat16", "matmul": True}
    return (
        compute_time(kind, flops=1e13, bytes_moved=1e6, **of),  # type: ignore[arg-type]
        compute_time(kind, flops=1e6, bytes_moved=1e10, **of),  # type: ignore[arg-type]
    )


def _kind(name: str) -> DeviceKind:
    return autopar.load_preset(name).hosts[0].kind


@pytest.mark.parametrize("name", autopar.preset_names())
def test_a_slow_host_takes_as_much_longer(name: str) -> None:
    cluster = autopar.load_preset(name, num_hosts=2)
    slow = slowed_hosts(cluster, [Slowness(), Slowness(products=2.0, memory=3.0, link=4.0)], 5.0)
    products, memory = _seconds(cluster.hosts[1].kind)
    assert _seconds(slow.hosts[1].kind) == pytest.approx((2 * products, 3 * memory))
    assert slow.hosts[0] == cluster.hosts[0]
    assert slow.hosts[1].link.bandwidth == cluster.hosts[1].link.bandwidth / 4
    assert slow.network.bandwidth == cluster.network.bandwidth / 5
    for before, after in zip(cluster.hosts[1].busy, slow.hosts[1].busy, strict=True):
        assert _seconds(after.kind)[0] == pytest.approx(2 * _seconds(before.kind)[0])


ATTENTION = ProductSizes(8, 4096, 128, 4096, attention=Attention(4096, True, 128, False))
CONVOLUTION = ProductSizes(1, 4096, 128, 4096, patches=Patches(9, 9.0))


@pytest.mark.parametrize("is_measured", [False, True])
def test_kinds_of_kernels_have_factors_of_their_own(is_measured: bool) -> None:
    kind = _kind("dgx-h100")
    if is_measured:  # as by a calibration
        plain = ProductSizes(1, 4096, 4096, 4096)
        kind = kind.with_measured(
            products=tuple(ProductSpeed("bfloat16", sizes, 4e14) for sizes in (plain, CONVOLUTION))
        )
    slower = slower_kind(kind, Factors(products=2.0, convolutions=6.0, attention=3.0))

    def seconds(of: DeviceKind, sizes: ProductSizes | None) -> float:
        share = product_share(of, sizes, "bfloat16")
        return compute_time(of, flops=1e13, bytes_moved=1e3, dtype="bfloat16", matmul=True, share=share)

    for sizes, factor in ((ProductSizes(1, 4096, 4096, 4096), 2.0), (CONVOLUTION, 6.0), (ATTENTION, 3.0)):
        assert seconds(slower, sizes) == pytest.approx(factor * seconds(kind, sizes), rel=1e-6)
    host = slowed_hosts(autopar.load_preset("dgx-h100"), [Slowness(products=4.0)]).hosts[0].kind
    assert seconds(host, ATTENTION) == pytest.approx(4 * seconds(_kind("dgx-h100"), ATTENTION))


def test_several_kinds_together_are_as_slow_as_the_slowest_at_each() -> None:
    fast = _kind("dgx-h100")
    starved = dataclasses.replace(fast, name="starved", memory_bandwidth=fast.memory_bandwidth / 2)
    hot = dataclasses.replace(fast, name="hot", matmul_efficiency=fast.matmul_efficiency / 3, launch_overhead=1e-5)
    small = dataclasses.replace(fast, name="small", memory=fast.memory // 2, memory_reserve=0)
    for kinds in ((starved, hot, small), (small, hot, starved)):
        together = worst_of(kinds)
        assert _seconds(together) == (_seconds(hot)[0], _seconds(starved)[1])
        assert (together.memory, together.memory_reserve, together.launch_overhead) == (small.memory, 0, 1e-5)
    assert worst_of([fast]) is fast


def test_a_stage_on_unlike_hosts_waits_for_the_slow_one_and_the_planner_gives_it_less() -> None:
    def train_step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return (x * x).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 12
    step, batch = autopar.parallelize(train_step), jax.ShapeDtypeStruct((32768, 4096), jnp.float32)
    cluster = autopar.load_preset("dgx-h100", num_hosts=2, devices_per_host=1)
    slow = slowed_hosts(cluster, [Slowness(), Slowness(4.0, 4.0)])
    everywhere = autopar.recipes.zero(3, 1)
    before, after = (step.plan(params, batch, cluster=c, method=everywhere).step_time for c in (cluster, slow))
    assert after > 1.5 * before
    assert step.plan(params, batch, cluster=slow).step_time < 0.9 * after
