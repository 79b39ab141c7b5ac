"""`auto` is never slower than a recipe with its microbatches free, and fits wherever one does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar import recipes
from autopar.errors import UserError
from benchmarks.models import gpt, moe, wide_resnet
from tests.planned import cluster_of

_MB = 1 << 20


def _gpt(**changes: Any) -> tuple[Any, Any]:
    return gpt, gpt.GPTConfig(256, 64, 4, 64, 4, **{"dropout": 0.0, "dtype": jnp.float32, **changes})


def _moe() -> tuple[Any, Any]:
    return moe, moe.MoEConfig(256, 64, 2, 64, 4, num_experts=4, group_size=64, dropout=0.0, dtype=jnp.float32)


def _resnet() -> tuple[Any, Any]:
    return wide_resnet, wide_resnet.WideResNetConfig((1, 1), 16, 1, norm_groups=4)


# The model, the examples of a batch, and the cluster: hosts and devices of each, bytes of memory.
CASES: dict[str, tuple[Callable[[], tuple[Any, Any]], int, dict[str, Any]]] = {
    "gpt, much memory": (_gpt, 32, {"hosts": 1, "devices": 8}),
    "gpt, little memory": (_gpt, 32, {"hosts": 1, "devices": 8, "memory": 3 * _MB}),
    "gpt, hardly any memory": (_gpt, 32, {"hosts": 1, "devices": 8, "memory": 2 * _MB}),
    "gpt, a slow link": (_gpt, 32, {"hosts": 1, "devices": 4, "memory": 4 * _MB, "link": 1e7}),
    "gpt, a slow network": (_gpt, 32, {"hosts": 2, "devices": 4, "memory": 4 * _MB, "link": 1e9, "network": 1e6}),
    "gpt, four hosts": (_gpt, 64, {"hosts": 4, "devices": 2, "memory": 3 * _MB, "link": 1e9, "network": 1e7}),
    "gpt, launches cost": (_gpt, 32, {"hosts": 1, "devices": 4, "memory": 4 * _MB, "launch": 1e-4}),
    "gpt scanned": (lambda: _gpt(scan=True), 32, {"hosts": 1, "devices": 8, "memory": 3 * _MB}),
    "gpt with checkpoints": (lambda: _gpt(remat=True), 32, {"hosts": 2, "devices": 2, "memory": 4 * _MB, "link": 1e8}),
    "moe": (_moe, 32, {"hosts": 1, "devices": 4, "memory": 8 * _MB, "link": 1e8}),
    "moe, little memory": (_moe, 32, {"hosts": 1, "devices": 4, "memory": 3 * _MB, "link": 1e8}),
    "wide resnet": (_resnet, 32, {"hosts": 1, "devices": 4, "memory": 64 * _MB, "link": 1e8}),
}


def _recipes(cluster: autopar.Cluster) -> list[autopar.Method]:
    devices, width = cluster.num_devices, cluster.hosts[0].num_devices
    found = [recipes.data_parallel(None), *(recipes.zero(stage, None) for stage in (1, 2, 3)), recipes.intra_op_only()]
    for stages in (2, 4):
        found += [recipes.gpipe(stages), recipes.inter_op_only(stages)] if devices % stages == 0 else []
        for tensor in (1, 2, 4):
            if width % tensor == 0 and devices % (tensor * stages) == 0:
                found.append(recipes.megatron(devices // (tensor * stages), tensor, stages))
    found += [recipes.megatron(devices // tensor, tensor, 1) for tensor in (2, 4) if width % tensor == 0]
    return found


@pytest.mark.parametrize("name", CASES)
def test_auto_is_never_slower_than_a_recipe(name: str) -> None:
    make, batch_size, sizes = CASES[name]
    model, config = make()
    sizes = {"flops": 1e11, "memory_bandwidth": 1e10, "link": 1e10, "latency": 1e-6, "launch": 1e-7, **sizes}
    cluster = cluster_of(sizes.pop("hosts"), sizes.pop("devices"), **sizes)
    optimizer = optax.adam(1e-3)
    step = autopar.parallelize(model.make_train_step(config, optimizer), cluster=cluster)
    state = jax.eval_shape(model.make_init(config, optimizer), jax.random.key(0))
    batch = model.abstract_batch(config, batch_size)

    def seconds(method: autopar.Method) -> float:
        try:
            return float(step.plan(state, batch, method=method).step_time)
        except UserError:
            return math.inf

    with warnings.catch_warnings(action="ignore"):
        ours = seconds(recipes.auto())
        others = {method: seconds(method) for method in _recipes(cluster)}
    assert min(others.values()) < math.inf, "no recipe fits: this case says nothing"
    quicker = {str(method.name): time / ours for method, time in others.items() if time < ours}
    assert not quicker
