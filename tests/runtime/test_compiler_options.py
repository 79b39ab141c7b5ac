"""What XLA is told: to hide latency, and where the processes of a job compile different programs."""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import autopar
from autopar import recipes
from autopar.cost_model.targets import load_target
from autopar.ir.mesh import LATENCY_HIDING_FLAG
from autopar.ir.verification import Overlap
from autopar.runtime import source as sources
from autopar.runtime.ahead import absent_gpus
from autopar.runtime.placement import Array
from autopar.runtime.source import Source, compile_options
from tests.h100 import needs_cuda_compiler

pytestmark = needs_cuda_compiler


def _square(gpus: Sequence[jax.Device], hides_latency: bool = True) -> Source:
    sharding = NamedSharding(jax.sharding.Mesh(np.array(gpus), ("x",)), PartitionSpec())
    array = Array((64, 64), jnp.dtype("float32"), sharding)
    return Source("square", lambda x: (x @ x,), (array,), (array,), (), hides_latency)


def test_latency_is_hidden_where_prices_count_on_it_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = absent_gpus(load_target("a100"), 1, 2)
    source = _square(gpus, hides_latency=False)
    assert compile_options(source, source.trace()) == {}
    source = _square(gpus)
    assert compile_options(source, source.trace()) == {LATENCY_HIDING_FLAG: True}
    monkeypatch.setenv("XLA_FLAGS", f"--{LATENCY_HIDING_FLAG}=false")
    assert compile_options(source, source.trace()) == {}
    source = _square(jax.devices()[:2])
    assert compile_options(source, source.trace()) == {}


def test_what_prices_count_on_is_hidden_on_a100s(monkeypatch: pytest.MonkeyPatch) -> None:
    """There XLA would hide next to nothing by itself."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return (h.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 6
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)
    planned = autopar.parallelize(step, cluster=autopar.load_preset("dgx-a100"), batch_axes=(None, 0))
    plan = planned.plan(params, x, method=recipes.zero(3, 1))
    report = plan.report()
    assert LATENCY_HIDING_FLAG in report.to_text()
    assert json.loads(report.to_json())["xla_flags"] == [LATENCY_HIDING_FLAG]
    assert f"<code>{LATENCY_HIDING_FLAG}</code>" in report.to_html()

    def overlap() -> Overlap:
        [program] = plan.verify_with_xla().programs
        return program.overlap

    with_it = overlap()
    assert with_it.hidden > 0.2 * with_it.communication
    assert with_it.found == pytest.approx(with_it.hidden, rel=0.25)
    monkeypatch.setenv("XLA_FLAGS", f"--{LATENCY_HIDING_FLAG}=false")
    without = overlap()
    assert without.found is not None and without.found < 0.5 * with_it.hidden


def test_kernels_are_not_chosen_together_with_processes_that_compile_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = absent_gpus(load_target("h100"), 2, 2)  # of two processes
    assert sources.compiler_options(gpus[:2]) == {}  # alone
    monkeypatch.setattr(sources, "this_job", lambda: types.SimpleNamespace(count=2))
    options = sources.compiler_options(gpus[:2])
    assert options == {"xla_gpu_shard_autotuning": False}
    assert sources.compiler_options(gpus) == {}  # all have a part in the program
    assert sources.compiler_options(jax.devices()[:1]) == {}  # XLA for CPUs chooses nothing by trying
    source = _square(gpus[:2])
    assert compile_options(source, source.trace()) == {LATENCY_HIDING_FLAG: True, **options}
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=SingleDeviceSharding(gpus[0]))
    assert jax.jit(lambda x: x @ x).lower(x).compile(options) is not None  # XLA knows the name
