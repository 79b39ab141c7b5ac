"""Clusters and models for which a person knows the best plan: plans of shapes, for clusters that are not there."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar import recipes
from autopar.errors import InfeasiblePlanError
from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO
from autopar.ir.plan import LeafPlan, Plan
from autopar.planning.candidate import Candidate
from autopar.planning.finisher import Finisher
from autopar.planning.planner import Planner
from benchmarks import scan_layers
from benchmarks.models import gpt, moe
from tests import models
from tests.planned import Planned, analyse, cluster_of, plan_step

MIB = 2**20


def plan_mlp(cluster: Cluster, *, layers: int, width: int, batch: int, adam: bool) -> Plan:
    def params() -> Any:
        return {"layers": [{"w": jnp.zeros((width, width)), "b": jnp.zeros(width)} for _ in range(layers)]}

    make_step, make_state = (models.adam, models.adam_state) if adam else (models.sgd, models.sgd_state)
    examples = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    step = autopar.parallelize(make_step(models.mlp_loss), cluster=cluster, batch_axes=(None, 0))
    return step.plan(jax.eval_shape(lambda: make_state(params())), {"x": examples, "y": examples})


def weights(plan: Plan) -> list[LeafPlan]:
    """The matrices of the state: parameters and optimizer moments."""
    found = [leaf for leaf in plan.leaves if leaf.state and len(leaf.shape) == 2]
    assert found
    return found


def pieces(plan: Plan, leaf: LeafPlan) -> int:
    return math.prod(leaf.sharding.tiles(plan.stages[leaf.stage].mesh))


def test_fast_links_and_little_memory_shard_the_weights_of_a_big_mlp() -> None:
    # Two layers of 2048 x 2048 float32: 16 MiB each, with two Adam moments 48 MiB, and 16 MiB of gradient.
    # A device has 32 MiB: not even one layer's state fits on one device, all of it over 8 is 2 * 48 / 8 = 12 MiB.
    # Links: a whole matrix crosses in 17 us, while its product with 512 examples takes 4 ms.
    cluster = cluster_of(1, 8, memory=32 * MIB, flops=1e12, memory_bandwidth=1e12, link=1e12, latency=1e-6, launch=1e-6)
    plan = plan_mlp(cluster, layers=2, width=2048, batch=512, adam=True)
    assert plan.peak_memory <= 32 * MIB
    for leaf in weights(plan):
        assert pieces(plan, leaf) >= 2, f"{leaf.path} is {leaf.sharding}"
    assert len(weights(plan)) == 6
    # All 8 devices work: 6 * 512 * 2048 * 2048 * 2 = 25.8 GFLOP take 25.8 ms on one device, 3.2 ms on 8.
    assert plan.step_time < 0.008


def test_ample_memory_and_a_small_model_are_data_parallel() -> None:
    # Two layers of 256 x 256 float32: 256 KiB each. To all-reduce both takes 2 * 7 / 8 * 512 KiB / 10 GB/s = 92 us
    # per step. Any other way sends activations: 16384 examples * 256 * 4 bytes = 16 MiB for each product.
    # Compute: 6 * 16384 * 256 * 256 * 2 = 12.9 GFLOP, 12.9 ms on one device and 1.6 ms on 8: splitting pays.
    # To keep parameters sharded saves updating 7/8 of 512 KiB (3 passes at 1 TB/s, 1.4 us) and needs a second
    # collective for each matrix (20 us of launch and 7 * 10 us of latency): replicated is right.
    cluster = cluster_of(
        1, 8, memory=16 * 1024 * MIB, flops=1e12, memory_bandwidth=1e12, link=1e10, latency=1e-5, launch=2e-5
    )
    plan = plan_mlp(cluster, layers=2, width=256, batch=16384, adam=False)
    (stage,) = plan.stages
    for leaf in weights(plan):
        assert pieces(plan, leaf) == 1, f"{leaf.path} is {leaf.sharding}"
    batch = [leaf for leaf in plan.leaves if leaf.batch_axis is not None]
    assert len(batch) == 2
    for leaf in batch:
        assert leaf.sharding.tiles(stage.mesh) == (8, 1), f"{leaf.path} is {leaf.sharding}"


def test_a_plan_dearer_than_estimated_does_not_bar_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lowered may cost more than the stage search thought: here all plans of one stage do, a hundred times."""
    price = Finisher._price

    def dear(self: Finisher, *args: Any) -> Plan:
        plan = price(self, *args)
        return dataclasses.replace(plan, step_time=plan.step_time * (100 if len(plan.stages) == 1 else 1))

    cluster = cluster_of(1, 4, link=1e10, latency=1e-5, flops=1e12, memory_bandwidth=1e12)
    assert len(plan_mlp(cluster, layers=4, width=256, batch=4096, adam=False).stages) == 1
    monkeypatch.setattr(Finisher, "_price", dear)
    assert len(plan_mlp(cluster, layers=4, width=256, batch=4096, adam=False).stages) > 1


def test_slow_links_between_hosts_make_a_pipeline_across_them() -> None:
    # Eight layers of 512 x 512 float32, 1 MiB each; 128 examples; 2 hosts of 4 devices, 20 MB/s between them.
    # Compute: 6 * 128 * 512 * 512 * 8 = 1.6 GFLOP at 10 GFLOP/s: 20 ms on 8 devices, 40 ms if both hosts do it all.
    # Split the batch over both hosts: each of a host's 4 devices exchanges a quarter of 8 MiB of gradients: 105 ms.
    # Split the weights over both: each device exchanges a quarter of the activations (128 * 512 * 4 bytes = 256 KiB)
    # at every second layer, forwards and backwards: 8 * 64 KiB in 26 ms, and what is saved of the 40 ms is 20.
    # Two stages: each of 4 links carries such a quarter forwards and one backwards, 2 * 64 KiB in 6.6 ms, most of it
    # while others compute, and 1/m of 20 ms is idle time: less than 30 ms in all.
    cluster = cluster_of(2, 4, flops=1e10, memory_bandwidth=1e12, link=1e11, network=2e7, latency=1e-6, launch=1e-6)
    plan = plan_mlp(cluster, layers=8, width=512, batch=128, adam=False)
    assert len(plan.stages) >= 2
    for stage in plan.stages:
        assert len({cluster.host_of(device) for device in stage.mesh.devices}) == 1, stage.mesh
    assert {cluster.host_of(stage.mesh.devices[0]) for stage in plan.stages} == {0, 1}
    assert plan.step_time < 0.030


def test_more_stages_than_the_search_tells_apart() -> None:
    # Eighteen layers of 251 x 251 float32, which nothing cuts: 0.24 MiB, as much of gradient. A device has room for one
    # such layer, not for two: each of 18 hosts has a stage.
    cluster = cluster_of(18, 2, memory=int(0.95 * MIB), flops=1e10, memory_bandwidth=1e11, link=1e10, network=1e9)
    plan = plan_mlp(cluster, layers=18, width=251, batch=72, adam=False)
    assert [stage.layers for stage in plan.stages] == [(k, k + 1) for k in range(18)]
    assert plan.num_microbatches == 36  # an example for each device
    assert all(stage.mesh.size == 2 for stage in plan.stages)
    # From these on, the search goes by the layers that it tells apart.
    params = {"layers": [{"w": jnp.zeros((251, 251)), "b": jnp.zeros(251)}] * 18}
    batch = dict.fromkeys("xy", jnp.zeros((72, 251)))
    planner = Planner(analyse(models.sgd(models.mlp_loss), models.sgd_state(params), batch), plan.cluster)
    groups = {(stage.mesh.devices[0], 2): stage.mesh.shape for stage in plan.stages}
    candidate = Candidate(plan.num_microbatches // 2, groups=groups)
    assert planner.evaluator.outcome(candidate) == (None, False)  # two layers do not fit
    # One would have tried 16 stages at most, and found that nothing fits.
    uneven = cluster_of(19, 2, memory=int(0.95 * MIB), flops=1e10, memory_bandwidth=1e11, link=1e10, network=1e9)
    with pytest.raises(InfeasiblePlanError):
        plan_mlp(uneven, layers=18, width=251, batch=72, adam=False)


def test_the_fewest_microbatches_that_fit_where_the_likely_numbers_do_not() -> None:
    params = {"layers": [{"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}] * 6}
    batch = dict.fromkeys("xy", jnp.zeros((1024, 64)))
    analysis = analyse(models.sgd(models.mlp_loss), models.sgd_state(params), batch)
    cluster = cluster_of(1, 2, memory=420 * 1024, flops=1e9, link=1e9, latency=1e-6, launch=1e-6)
    planner = Planner(analysis, cluster)
    assert planner.evaluator.space.likely == [8, 16]
    assert planner.evaluator.space.more == [32, 64, 128, 256, 512, 1024]
    plan, _ = planner.plan()
    more, _ = Planner(analysis, cluster).plan(64)
    assert plan.num_microbatches == 32
    assert plan.step_time < more.step_time
    for likely in (8, 16):
        with pytest.raises(InfeasiblePlanError):
            Planner(analysis, cluster).plan(likely)


def test_finer_layers_even_stages_out() -> None:
    # Sixteen equal matrices in three stages; of four layers, a stage of two would have eight.
    params = {"layers": [{"w": jnp.zeros((256, 256)), "b": jnp.zeros(256)}] * 16}
    batch = dict.fromkeys("xy", jnp.zeros((96, 256)))
    analysis = analyse(models.sgd(models.mlp_loss), models.sgd_state(params), batch)
    cluster = cluster_of(3, 1, memory=6 * MIB, flops=1e9, memory_bandwidth=1e11, network=3e7)
    plan, _ = Planner(analysis, cluster, autopar.recipes.auto(num_stages=3), num_layers=4).plan(12)
    stages = [leaf.stage for leaf in weights(plan)]
    assert sorted(stages.count(k) for k in range(3)) == [4, 6, 6]


def alexnet_loss(params: Any, batch: Any) -> Any:
    """Krizhevsky, Sutskever and Hinton 2012: five convolutions and three dense layers; squared error."""

    def convolve(x: Any, kernel: Any, stride: int, padding: str) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=layout)
        return jax.nn.relu(x)

    def pool(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")

    x = pool(convolve(batch["x"], params["conv1"], 4, "VALID"))
    x = pool(convolve(x, params["conv2"], 1, "SAME"))
    for name in ("conv3", "conv4", "conv5"):
        x = convolve(x, params[name], 1, "SAME")
    x = pool(x).reshape(len(x), -1)
    x = jax.nn.relu(jax.nn.relu(x @ params["dense6"]) @ params["dense7"])
    return jnp.mean((x @ params["dense8"] - batch["y"]) ** 2)


ALEXNET = {
    "conv1": (11, 11, 3, 96), "conv2": (5, 5, 96, 256), "conv3": (3, 3, 256, 384), "conv4": (3, 3, 384, 384),
    "conv5": (3, 3, 384, 256), "dense6": (9216, 4096), "dense7": (4096, 4096), "dense8": (4096, 1000),
}  # fmt: skip


def test_one_weird_trick() -> None:
    """Krizhevsky 2014: in a convolutional network split the examples, in its dense head the weights."""
    # 128 images on 8 devices. The kernels are 3.7 M numbers, the dense weights 58.6 M. To all-reduce their gradients
    # takes 2 * 7 / 8 * 4 bytes / 10 GB/s a number: 2.6 ms and 41 ms. To split the dense weights instead, the 128 * 9216
    # numbers between the two halves change hands (each device sends 7 / 8 of its share in an all-to-all, forwards and
    # backwards: 0.1 ms) and so do at most 4096 * 128 numbers a layer: all-reduced both ways in 0.4 ms or less each.
    # To split a kernel moves at least 128 * 13 * 13 * 384 numbers, gathered in 2.9 ms, in each of nine products.
    # Compute: 128 images * 3 passes * 2 * 1.14 G products = 0.87 TFLOP, 109 ms on each of 8 devices at 1 TFLOP/s.
    cluster = cluster_of(
        1, 8, memory=16 * 1024 * MIB, flops=1e12, memory_bandwidth=1e12, link=1e10, latency=1e-5, launch=2e-5
    )
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in ALEXNET.items()}
    examples = {
        "x": jax.ShapeDtypeStruct((128, 227, 227, 3), jnp.float32),
        "y": jax.ShapeDtypeStruct((128, 1000), jnp.float32),
    }
    step = autopar.parallelize(models.sgd(alexnet_loss), cluster=cluster, batch_axes=(None, 0), num_microbatches=1)
    plan = step.plan(params, examples)
    (stage,) = plan.stages
    for leaf in plan.leaves:
        if "conv" in leaf.path:
            assert pieces(plan, leaf) == 1, f"{leaf.path} is {leaf.sharding}"
        if "dense" in leaf.path:
            assert pieces(plan, leaf) == 8, f"{leaf.path} is {leaf.sharding}"
        if leaf.path.endswith("['x']"):
            assert leaf.sharding.tiles(stage.mesh) == (8, 1, 1, 1)
    assert plan.step_time < 0.120


def plan_experts(config: moe.MoEConfig, batch: int, memory: int) -> Planned:
    """A block of attention and experts with SGD, on 8 devices of 1 TFLOP/s with links of 10 GB/s."""
    state = jax.eval_shape(lambda: models.sgd_state(models.expert_params(config)))
    examples = jax.eval_shape(lambda: models.block_batch(batch, config.sequence_length, config.width))
    cluster = cluster_of(1, 8, memory=memory, flops=1e12, memory_bandwidth=1e12, link=1e10, latency=1e-6, launch=1e-6)
    return plan_step(models.sgd(models.expert_loss(config)), (state, examples), cluster, AUTO, None)


def experts(plan: Plan) -> list[LeafPlan]:
    return [leaf for leaf in plan.leaves if leaf.path in ("state['experts']['up']", "state['experts']['down']")]


def test_experts_that_exceed_the_memory_of_a_device_are_spread_over_the_devices() -> None:
    # 16 experts of two matrices of 128 x 512 float32 are 8 MiB, as much again are their gradients; a device has 6 MiB.
    # To gather them when they are used, as ZeRO does, sends 16 MiB forwards and backwards and 8 MiB of gradients.
    # The 64 examples of 16 tokens are 1024 tokens; two copies of each, in float32 of width 128, are 1 MiB: what a
    # device sends to the experts and gets back is an 8th of that, four times with the gradients.
    config = moe.MoEConfig(17, 16, 1, width=128, num_heads=8, num_experts=16, group_size=128, mlp_factor=4)
    planned = plan_experts(config, batch=64, memory=6 * MIB)
    plan = planned.plan
    assert plan.peak_memory <= 6 * MIB
    for leaf in experts(plan):
        by_expert, *inside = leaf.sharding.dims
        assert by_expert and not any(inside) and pieces(plan, leaf) == 8, f"{leaf.path} is {leaf.sharding}"
    sent = [c for local in planned.lowered.programs for c in planned.priced(local).elements()]
    assert [c.payload for c in sent if c.kind == "all_to_all"].count(MIB // 8) == 4
    assert max(c.payload for c in sent) == MIB // 8
    # Products: 2048 rows through 2 * 128 * 512, 1024 through 4 * 128 * 128 and twice through 16 * 16 * 128 (dispatch
    # and combine), times 6 for the gradients: 1.6 GFLOP, 1.6 ms on one device and 0.2 ms on 8.
    assert plan.step_time < 0.0008


def test_few_small_experts_are_data_parallel() -> None:
    # 8 experts of two matrices of 16 x 64 float32 are 64 KiB, whose gradients are summed once a step; the 16384 tokens,
    # two copies of each in float32 of width 16, are 2 MiB, an 8th of which would cross four times.
    config = moe.MoEConfig(17, 16, 1, width=16, num_heads=8, num_experts=8, group_size=256, mlp_factor=4)
    planned = plan_experts(config, batch=1024, memory=1024 * MIB)
    for leaf in experts(planned.plan):
        assert pieces(planned.plan, leaf) == 1, f"{leaf.path} is {leaf.sharding}"
    sent = [c for local in planned.lowered.programs for c in planned.priced(local).elements()]
    assert {c.kind for c in sent} == {"all_reduce"}
    (examples,) = {leaf.sharding for leaf in planned.plan.leaves if leaf.batch_axis is not None}
    assert examples.tiles(planned.plan.stages[0].mesh) == (8, 1, 1)


def test_a_large_image_is_cut_in_strips() -> None:
    # One image of 1024 x 1024 pixels, four convolutions of 3 x 3 with 16 channels in and out.
    # Compute: 4 * 3 passes, one less for the image's own gradient, each 2 * 9 * 16 * 16 * 2**20 = 4.83 GFLOP: 53 ms on
    # one device at 1 TFLOP/s, 6.6 ms on 8. Cut in strips a device sends a row of 1024 * 16 numbers, 64 KiB, each way
    # before each of 7 convolutions (the kernel's gradient borrows what the forward pass borrowed): 14 * (6.6 + 10) us,
    # 0.23 ms. Whatever is cut in channels must be gathered or reduced: 64 MiB of activations take 5.9 ms each time.
    cluster = cluster_of(
        1, 8, memory=16 * 1024 * MIB, flops=1e12, memory_bandwidth=1e12, link=1e10, latency=1e-5, launch=2e-5
    )

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for kernel in params["kernels"]:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jnp.tanh(x)
        return jnp.mean((x - batch["y"]) ** 2)

    image = jax.ShapeDtypeStruct((1, 1024, 1024, 16), jnp.float32)
    kernels = [jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.float32)] * 4
    step = autopar.parallelize(models.sgd(loss), cluster=cluster, batch_axes=(None, 0))
    plan = step.plan({"kernels": kernels}, {"x": image, "y": image})
    (stage,) = plan.stages
    for leaf in plan.leaves:
        if leaf.batch_axis is not None:
            assert sorted(leaf.sharding.tiles(stage.mesh)) == [1, 1, 1, 8]
            assert 8 in leaf.sharding.tiles(stage.mesh)[1:3], f"{leaf.path} is {leaf.sharding}"
    assert plan.step_time < 0.010
    whole = step.plan({"kernels": kernels}, {"x": image, "y": image}, method=recipes.auto(spatial=False))
    assert whole.step_time > 2 * plan.step_time  # all devices compute the same, or channels are gathered or reduced


def test_a_scan_over_layers_costs_what_the_unrolled_layers_cost() -> None:
    """`benchmarks/scan_layers.py` measures it on more layers, and the time that planning takes."""
    times = []
    for scan in (False, True):
        config = dataclasses.replace(scan_layers.CONFIG, num_layers=4, scan=scan)
        optimizer = optax.sgd(1e-3)
        state = jax.eval_shape(gpt.make_init(config, optimizer), jax.random.key(0))
        cluster = autopar.load_preset(scan_layers.CLUSTER)
        method = autopar.recipes.data_parallel()
        step = autopar.parallelize(gpt.make_train_step(config, optimizer), cluster=cluster, method=method)
        times.append(step.plan(state, gpt.abstract_batch(config, scan_layers.BATCH_SIZE)).step_time)
    assert times[1] == pytest.approx(times[0], rel=0.02)
