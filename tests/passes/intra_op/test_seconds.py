"""What rounds of loops hide counts for the solver as it does when a plan is priced."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax
import pytest

from autopar import recipes
from autopar.cost_model.hardware import load_preset
from autopar.cost_model.program_cost import program_cost
from autopar.ir.mesh import XLA_FOR_GPUS, Cluster
from autopar.ir.method import Method
from autopar.planning.parts import Part
from autopar.planning.planner import Planner
from autopar.planning.pricing import Prices
from benchmarks.models import gpt
from tests.planned import analysis_of, cluster_of, compiled_by

GPT = gpt.GPTConfig(vocab_size=512, sequence_length=64, num_layers=8, width=128, num_heads=4, dropout=0.0)


def _hiding(link: float) -> Cluster:
    cluster = cluster_of(1, 4, flops=1e12, memory_bandwidth=1e11, link=link, latency=1e-6, launch=1e-7)
    return compiled_by(cluster, XLA_FOR_GPUS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("link", [3e9, 3e10])
def test_a_loop_hides_for_the_solver_what_it_hides_when_it_is_priced(link: float, remat: bool) -> None:
    cluster = _hiding(link)
    analysis = analysis_of(gpt, dataclasses.replace(GPT, scan=True, remat=remat), 32)

    def off_by(method: Method) -> tuple[float, float]:
        _, lowered = Planner(analysis, cluster, method).plan(1)
        prices = Prices(cluster)
        costs = [program_cost(p, prices.kind(p.mesh), prices.resharder(p.mesh)[1]) for p in lowered.programs]
        seconds = sum(cost.seconds for cost in costs)
        assert sum(cost.hidden for cost in costs) > 0.02 * seconds  # it matters
        return sum(s.objective for s in lowered.shardings) / seconds - 1, sum(cost.hidden for cost in costs) / seconds

    method = recipes.zero(3, 1)
    error, hidden = off_by(method)
    in_full, _ = off_by(dataclasses.replace(method, without=frozenset({Part.HIDDEN_COLLECTIVES})))
    assert abs(error) < 0.03
    assert in_full > 0.7 * hidden


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fused_attention", [False, True])
def test_the_search_counts_on_what_is_hidden(fused_attention: bool) -> None:
    """Parameters that are gathered round by round cost next to nothing: counted in full, the search avoided that."""
    config = gpt.GPTConfig(
        50304, 1024, 12, 768, 12, 0.0, jnp.bfloat16, True, fused_attention=fused_attention, scan=True
    )
    analysis = analysis_of(gpt, config, 64, optax.adamw(1e-3))
    cluster = load_preset("dgx-h100", num_hosts=1)

    def seconds(method: Method) -> float:
        return Planner(analysis, cluster, method).plan(1)[0].step_time

    free = recipes.auto(baselines=False)
    ours, recipe = seconds(free), seconds(recipes.zero(3, 1))
    in_full = seconds(dataclasses.replace(free, without=frozenset({Part.HIDDEN_COLLECTIVES})))
    assert ours < min(recipe, 0.995 * in_full)
