"""The problem of a stage in the solver's numbers against what its programs cost, lowered."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import optax
import pytest

from autopar import recipes
from autopar.cost_model.compute import partial_sum_bytes, strided_read_seconds
from autopar.cost_model.program_cost import op_costs, program_cost
from autopar.ir.local import Compute, LocalKernel, Traffic, local_bytes
from autopar.ir.mesh import XlaBackend
from autopar.ir.method import Method
from autopar.passes import lower
from autopar.passes.intra_op.numbers import StageNumbers
from autopar.passes.intra_op.stage import most_pieces
from autopar.passes.intra_op.traffic import KnownTraffic
from autopar.planning.planner import Planner
from autopar.planning.pricing import Prices
from benchmarks.models import gpt, moe
from tests.clusters import IN_TURN
from tests.planned import analysis_of, cluster_of

GPT = gpt.GPTConfig(vocab_size=512, sequence_length=64, num_layers=4, width=128, num_heads=4, dropout=0.0)
MOE = moe.MoEConfig(
    vocab_size=512, sequence_length=64, num_layers=2, width=128, num_heads=4, dropout=0.0, num_experts=4, group_size=128
)


_MODELS = {"gpt": (gpt, GPT), "scan": (gpt, dataclasses.replace(GPT, scan=True)), "moe": (moe, MOE)}
_ADAFACTOR = optax.adafactor(1e-3)


@pytest.fixture
def whole_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have the kernels of whole arrays, which the solver counts, instead of those of a device's pieces."""

    class Whole(KnownTraffic):
        def of(self, program: Any, rules: Any, xla: XlaBackend, shapes: Any = None) -> dict[int, Traffic]:
            return super().of(program, rules, xla)

    monkeypatch.setattr(lower, "KnownTraffic", Whole)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("whole_arrays")
@pytest.mark.parametrize(
    ("m", "multiprocessors", "objective"), [(1, 0, "step"), (8, 0, "step"), (8, 0, "microbatch"), (1, 132, "step")]
)
@pytest.mark.parametrize("model", ["gpt", "scan", "moe"])
def test_a_choice_costs_what_its_programs_do(
    model: str, m: int, multiprocessors: int, objective: Literal["step", "microbatch"]
) -> None:
    """Sums over microbatches take time, too: 1/m of a choice's seconds each time, or it looks too cheap.

    So do partial sums, where products are so small that multiprocessors would be idle. What is done for each microbatch
    counts once where one microbatch is the objective.
    """
    analysis = analysis_of(*_MODELS[model], 32)
    # Memory is as slow as arithmetic: what goes through it counts.
    cluster = cluster_of(1, 4, flops=1e12, memory_bandwidth=1e10, link=1e10, latency=1e-6, launch=1e-7)
    kind = dataclasses.replace(cluster.hosts[0].kind, multiprocessors=multiprocessors)
    cluster = dataclasses.replace(cluster, hosts=(dataclasses.replace(cluster.hosts[0], kind=kind),))
    plan, lowered = Planner(analysis, cluster, Method("one stage", num_stages=1, objective=objective)).plan(m)
    prices = Prices(cluster)
    parts = [
        partial_sum_bytes(kind, kernel.product, kernel.dtype)
        for local in lowered.programs
        for op in local.ops
        if isinstance(op, Compute) and (op.kernels or op.product)
        for kernel in op.kernels or [LocalKernel(0.0, 0.0, op.product, op.equation.kernel_dtype(True), 1.0)]
    ]
    assert any(parts) == (multiprocessors > 0)
    seconds = copying = 0.0
    for local in lowered.programs:
        price = prices.resharder(local.mesh)[1]
        often = m if local.program.in_loop and objective == "step" else 1
        seconds += often * program_cost(local, kind, price).seconds
        copies = [local_bytes(*held, local.mesh) for cost in op_costs(local, kind, price) for held in cost.copies]
        copying += often * sum(strided_read_seconds(kind, nbytes, strided=0, copied=1) for nbytes in copies)
    # What collectives copy here are results of products, which the solver does not count.
    assert sum(s.objective for s in lowered.shardings) == pytest.approx(seconds - copying, abs=0.02 * seconds)
    assert plan.method == "one stage"


@pytest.mark.usefixtures("whole_arrays")
@pytest.mark.parametrize("model", ["gpt", "scan"])
def test_a_sum_over_microbatches_is_reduced_once_for_all_that_read_it(model: str) -> None:
    """Adam reads each gradient several times."""
    analysis = analysis_of(*_MODELS[model], 32)
    cluster = cluster_of(1, 4, flops=1e12, memory_bandwidth=1e11, link=1e9, latency=1e-6, launch=1e-7)
    plan, lowered = Planner(analysis, cluster, recipes.data_parallel(4)).plan(4)
    prices = Prices(cluster)
    costs = [
        (program_cost(local, prices.kind(local.mesh), prices.resharder(local.mesh)[1]), local.program.in_loop)
        for local in lowered.programs
    ]
    assert sum(cost.communication for cost, in_loop in costs if not in_loop) > 0.1 * plan.step_time
    seconds = sum(cost.seconds * (4 if in_loop else 1) for cost, in_loop in costs)
    assert sum(s.objective for s in lowered.shardings) == pytest.approx(seconds, rel=0.02)
    free, _ = Planner(analysis, cluster, recipes.auto(num_stages=1, baselines=False)).plan(4)
    assert free.step_time <= plan.step_time


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("whole_arrays")
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_a_choice_costs_what_its_programs_do_where_kernels_have_a_single_output(model: str, devices: int) -> None:
    """With data parallelism, that is: what other collectives leave in another order the solver does not count."""
    analysis = analysis_of(*_MODELS[model], 8, _ADAFACTOR)
    plain = cluster_of(1, devices, flops=1e12, memory_bandwidth=1e10, launch=1e-7)
    xla = dataclasses.replace(IN_TURN, single_output=True)
    kind = dataclasses.replace(plain.hosts[0].kind, xla=xla).with_measured(strided_reads=((1e4, 1e10), (1e7, 1e9)))
    cluster = dataclasses.replace(plain, hosts=(dataclasses.replace(plain.hosts[0], kind=kind),))
    seconds = {}
    for each in (plain, cluster):
        _, lowered = Planner(analysis, each, recipes.data_parallel(1)).plan(1)
        prices = Prices(each)
        seconds[each] = sum(
            program_cost(local, prices.kind(local.mesh), prices.resharder(local.mesh)[1]).seconds
            for local in lowered.programs
        )
        assert sum(s.objective for s in lowered.shardings) == pytest.approx(
            seconds[each], rel=1e-3 if devices == 1 else 5e-3
        )
    assert seconds[cluster] > 1.2 * seconds[plain]


@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_kernels_of_pieces_are_few_percent_from_those_of_whole_arrays(model: str) -> None:
    """What the solver does not see of the price: which kernels there are depends on their sizes."""
    analysis = analysis_of(*_MODELS[model], 32)
    cluster = cluster_of(1, 4, flops=1e12, memory_bandwidth=1e10, launch=1e-7)
    _, lowered = Planner(analysis, cluster, recipes.data_parallel(1)).plan(1)
    prices = Prices(cluster)
    seconds = sum(
        program_cost(local, prices.kind(local.mesh), prices.resharder(local.mesh)[1]).seconds
        for local in lowered.programs
    )
    objective = sum(s.objective for s in lowered.shardings)
    assert objective != pytest.approx(seconds, rel=5e-3)
    assert objective == pytest.approx(seconds, rel=0.05)


def test_most_pieces() -> None:
    assert most_pieces((3, 8192), (24,)) == 1  # neither 3 nor 8192 can be cut into 24
    assert most_pieces((3, 8192), (3, 8)) == 24
    assert most_pieces((4,), (2, 2)) == 4  # both axes cut one dimension
    assert most_pieces((6,), (4, 2)) == 2
    assert most_pieces((), (2,)) == 1


def numbers(limit: float | None, cost: float = 1.0) -> StageNumbers:
    found = StageNumbers(limit)
    found.costs = [np.array([cost, 2.0]), np.array([0.0, 3.0])]
    found.edges = [(0, 1, np.eye(2))]
    found.held = [{}, {}]
    return found


def test_like_problems_have_no_more_memory() -> None:
    assert numbers(5.0).is_like(numbers(5.0))
    assert numbers(4.0).is_like(numbers(5.0))
    assert numbers(4.0).is_like(numbers(None))
    assert not numbers(6.0).is_like(numbers(5.0))
    assert not numbers(None).is_like(numbers(5.0))
    assert not numbers(5.0).is_like(numbers(5.0, cost=1.5))
