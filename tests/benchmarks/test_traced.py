"""Steps traced for a search alone have the plans that users get, and need nothing of the runtime."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest

import autopar
from autopar import recipes
from autopar.ir.method import AUTO, Method
from benchmarks import verifiable
from benchmarks.models import gpt
from benchmarks.sources import Sources
from benchmarks.traced import trace


@pytest.mark.parametrize(("method", "reduce_dtype"), [(AUTO, None), (recipes.zero(3, 2), "float32")])
def test_the_plan_is_the_one_that_users_get(method: Method, reduce_dtype: Any) -> None:
    config = gpt.GPTConfig(64, sequence_length=16, num_layers=2, width=32, num_heads=2, dropout=0.0)
    optimizer = optax.adamw(1e-3)
    function = gpt.make_train_step(config, optimizer)
    state = jax.eval_shape(gpt.make_init(config, optimizer), jax.random.key(0))
    batch = gpt.abstract_batch(config, 8)
    cluster = autopar.load_preset("dgx-h100", num_hosts=1, devices_per_host=4)
    plan, _ = trace(function, state, batch, reduces_own_dtype=reduce_dtype is None).search(cluster, method)
    theirs = autopar.parallelize(function, cluster=cluster, method=method, reduce_dtype=reduce_dtype).plan(state, batch)
    assert plan == theirs
    if reduce_dtype is not None:
        found = verifiable.plan(function, state, batch, cluster=cluster, method=method)
        assert found == plan
        mine, verdict = (p.verify_with_xla("cpu") for p in (found, theirs))
        assert [p.found for p in mine.programs] == [p.found for p in verdict.programs]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


@pytest.mark.parametrize("suite", ["benchmarks.planner", "benchmarks.accuracy"])
def test_results_of_plans_that_are_not_run_depend_on_no_module_of_the_runtime(suite: str, sources: Sources) -> None:
    modules = sources.modules(suite)
    assert "autopar.planning.planner" in modules
    assert not [name for name in modules if name in ("autopar", "autopar.api") or ".runtime" in name]


@pytest.mark.parametrize("suite", ["benchmarks.verify", "benchmarks.memory_corpus", "benchmarks.public.planned"])
def test_verdicts_depend_on_nothing_that_runs_steps(suite: str, sources: Sources) -> None:
    modules = sources.modules(suite)
    assert "autopar.compiling.verifier" in modules
    running = {"autopar", "autopar.api", "autopar.executable", "autopar.runtime.worker", "autopar.runtime.transfer"}
    assert running.isdisjoint(modules)
