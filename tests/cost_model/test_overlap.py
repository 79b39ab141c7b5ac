"""Seconds that collectives run beside kernels."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar import recipes
from autopar.cost_model.hardware import load_preset
from autopar.cost_model.order import Combining, ProgramKernel, ProgramKernels, live
from autopar.cost_model.overlap import hidden_seconds
from autopar.cost_model.program_cost import _Scheduled, op_costs, program_cost
from autopar.ir.mesh import XlaBackend
from autopar.ir.method import Method
from autopar.planning.finisher import Finisher
from autopar.planning.planner import Planner
from autopar.planning.pricing import Prices
from tests import models
from tests.planned import analyse

_SUM = Combining("sum", True)


def _kernel(cost: float) -> ProgramKernel:
    return ProgramKernel((), (), cost=cost)


def _start(cost: float) -> ProgramKernel:
    return ProgramKernel((), (), collective=_SUM, cost=cost, ends=False)


def _end(cost: float) -> ProgramKernel:
    return ProgramKernel((), (), collective=_SUM, cost=cost, starts=False)


@pytest.mark.parametrize(
    ("order", "hidden"),
    [
        ([_kernel(3), ProgramKernel((), (), collective=_SUM, cost=2), _kernel(4)], 0),
        ([_kernel(3), _start(2), _end(2), _kernel(4)], 0),
        ([_start(2), _kernel(3), _end(2)], 2),
        ([_start(5), _kernel(3), _end(5)], 3),
        ([_start(5), _kernel(1), _kernel(1), _end(5), _kernel(9)], 2),
        # The second begins when the first is done.
        ([_start(4), _start(4), _kernel(6), _end(4), _end(4)], 6),
        ([_start(4), _kernel(6)], 4),
    ],
)
def test_what_runs_between_start_and_end(order: Sequence[ProgramKernel], hidden: float) -> None:
    assert hidden_seconds(order, 0.0) == pytest.approx(hidden)


def test_kernels_are_slower_beside_a_collective() -> None:
    # In 4 s 3 s of work are done, and 2 s are left.
    assert hidden_seconds([_start(4), _kernel(5), _end(4)], 0.25) == pytest.approx(4 + 5 - 6)
    # 3 s of work take 4 s, and the collective 1 s more.
    assert hidden_seconds([_start(5), _kernel(3), _end(5)], 0.25) == pytest.approx(5 + 3 - 5)


def _in_ticks(order: Sequence[ProgramKernel], slowdown: float, tick: float) -> float:
    """The same, tick by tick."""
    now, left, queue, begun = 0.0, 0.0, list[float](), 0
    issued = done = 0
    for kernel in order:
        if kernel.collective is not None and kernel.starts:
            queue.append(kernel.cost)
            issued += 1
        waits = kernel.collective is not None and kernel.ends
        left = kernel.cost if kernel.collective is None else 0.0
        begun += waits
        while left > 1e-9 or (waits and done < begun):
            left -= tick * (1 - slowdown if queue else 1)
            if queue:
                queue[0] -= tick
                if queue[0] <= 1e-9:
                    queue.pop(0)
                    done += 1
            now += tick
    return now + sum(queue)


def test_as_played_in_ticks() -> None:
    draw = random.Random(0)
    for _ in range(50):
        order: list[ProgramKernel] = []
        under_way: list[float] = []
        for _ in range(draw.randrange(2, 20)):
            cost = float(draw.randrange(1, 30))
            what = draw.random()
            if what < 0.3:
                order.append(_start(cost))
                under_way.append(cost)
            elif what < 0.5 and under_way:
                order.append(_end(under_way.pop(0)))
            else:
                order.append(_kernel(cost))
        slowdown = draw.choice((0.0, 0.2, 0.5))
        one_by_one = sum(kernel.cost for kernel in order if kernel.starts)
        hidden = hidden_seconds(order, slowdown)
        assert one_by_one - hidden == pytest.approx(_in_ticks(order, slowdown, 0.01), abs=0.02 * len(order))


def test_a_sum_beside_the_kernel_that_follows() -> None:
    """Of what reads its result, and what does not."""
    told = ProgramKernels()
    told.run([], [("partial sum", 8)], seconds=1.0, cost=1.0)
    told.run(["partial sum"], [("sum", 8)], collective=_SUM, seconds=2.0, cost=2.0)
    told.run([], [("x", 4)], seconds=2.0, cost=3.0)
    told.run(["sum", "x"], [("y", 4)], seconds=1.0, cost=1.0)
    told.leave("y")
    assert hidden_seconds(live(told, hides_latency=True).order, 0.0) == pytest.approx(2.0)
    assert hidden_seconds(live(told, hides_latency=False).order, 0.0) == 0.0


@pytest.mark.parametrize("method", [recipes.zero(1, 1), recipes.zero(3, 2), recipes.megatron(2, 2, 2, 2)], ids=str)
def test_all_that_operations_cost_is_in_the_order(method: Method) -> None:
    """With what is fused into kernels, and with copies for collectives; these, too, run beside what is sent."""
    layers = {
        "w": jax.ShapeDtypeStruct((6, 2048, 2048), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((6, 2048), jnp.bfloat16),
    }

    def loss(params: Any, batch: Any) -> Any:
        y, _ = jax.lax.scan(lambda x, layer: (x + jax.nn.gelu(x @ layer["w"] + layer["b"]), None), batch["x"], params)
        return jnp.mean((y - batch["y"]) ** 2)

    optimizer = optax.adamw(1e-3)

    def step(state: Any, batch: Any) -> Any:
        updates, inner = optimizer.update(jax.grad(loss)(state[0], batch), state[1], state[0])
        return optax.apply_updates(state[0], updates), inner

    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16))
    analysis = analyse(step, (layers, jax.eval_shape(optimizer.init, layers)), batch)
    cluster = load_preset("dgx-h100")
    _, lowered = Planner(analysis, cluster, method).plan()
    prices = Prices(cluster)
    played = spent = 0.0
    copies = 0
    for local in lowered.programs:
        kind, price = prices.kind(local.mesh), prices.resharder(local.mesh)[1]
        costs = op_costs(local, kind, price)
        order = _Scheduled(local, kind, price, costs, [0.0] * len(local.ops)).live.order
        played += sum(kernel.cost for kernel in order if kernel.starts)
        spent += sum(cost.seconds for cost in costs)
        copies += sum(len(cost.copies) for cost in costs)
    assert played == pytest.approx(spent, rel=0.02)
    assert played <= spent * (1 + 1e-9)
    assert copies > 0


@pytest.mark.parametrize("num_layers", [2, 8])
def test_programs_are_shorter_by_what_is_hidden(num_layers: int) -> None:
    """By no more than communication and compute are together, and not where the compiler hides nothing."""
    layer = {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32), "b": jax.ShapeDtypeStruct((2048,), jnp.float32)}
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((8192, 2048), jnp.float32))
    analysis = analyse(models.sgd(models.mlp_loss), {"layers": [layer] * num_layers}, batch)
    cluster = load_preset("dgx-h100")
    [host] = cluster.hosts
    in_turn = dataclasses.replace(host, kind=dataclasses.replace(host.kind, xla=XlaBackend(hides_latency=False)))
    hides = {recipes.data_parallel(1): 0.01, recipes.zero(3, 2): 0.01, recipes.megatron(2, 4, 1, 1): 0.0}
    for method, share in hides.items():
        plan, lowered = Planner(analysis, cluster, method).plan()
        prices = Finisher(analysis, cluster, method).stages.prices
        hidden = 0.0
        for local in lowered.programs:
            price = prices.resharder(local.mesh)[1]
            cost = program_cost(local, prices.kind(local.mesh), price)
            assert 0 <= cost.hidden <= min(cost.compute, cost.communication)
            assert cost.seconds == cost.compute + cost.communication - cost.hidden
            assert sum(cost.by_phase.values()) == pytest.approx(cost.seconds + cost.start)
            other = program_cost(local, in_turn.kind, price)
            assert other.hidden == 0
            assert (other.compute, other.communication) == (cost.compute, cost.communication)
            hidden += cost.hidden * (plan.num_microbatches if local.program.in_loop else 1)
        assert hidden >= share * plan.step_time
        again = Finisher(analysis, dataclasses.replace(cluster, hosts=(in_turn,)), method)
        assert again.restore(plan).plan.step_time == pytest.approx(plan.step_time + hidden)
