"""Loops over layers on H100s that are not there: what XLA hides, moves and holds in them is what is predicted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar import recipes
from autopar.cost_model.hardware import load_preset
from autopar.ir.local import Compute, LocalProgram
from autopar.ir.method import Method
from autopar.passes.intra_op.strategies import inner_collectives, local_round
from autopar.passes.rules.table import rule_of
from autopar.planning.planner import Planner
from benchmarks.models import decoder
from tests.h100 import needs_cuda_compiler
from tests.planned import analyse


def _step(num_layers: int, batch_size: int, *, scan: bool, remat: bool = False) -> tuple[Any, Any, Any]:
    """Layers with rotary angles, which the loop reads whole in each round, and grouped queries."""
    config = decoder.DecoderConfig(
        vocab_size=1024, sequence_length=4096, num_layers=num_layers, width=4096, num_heads=32, num_key_value_heads=8,
        hidden=14336, dtype=jnp.bfloat16, remat=remat, scan=scan, fused_attention=True,
    )  # fmt: skip
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(decoder.make_init(config, optimizer), jax.random.key(0))
    return decoder.make_train_step(config, optimizer), state, decoder.abstract_batch(config, batch_size)


def _loops(method: Method, step: tuple[Any, Any, Any]) -> tuple[LocalProgram, list[Compute]]:
    _, lowered = Planner(analyse(*step), load_preset("dgx-h100"), method).plan()
    [local] = lowered.programs
    return local, [op for op in local.ops if isinstance(op, Compute) and op.equation.primitive.name == "scan"]


@pytest.mark.parametrize(("method", "batch_size"), [(recipes.zero(3, 1), 8), (recipes.megatron(2, 4, 1, 1), 4)])
def test_a_round_sends_what_the_loop_sends(method: Method, batch_size: int) -> None:
    """Everything but what attention sends, as often as the loop goes round, each after what makes it."""
    layers = 4
    local, loops = _loops(method, _step(layers, batch_size, scan=True))
    assert len(loops) == 2
    for op in loops:
        rule = rule_of(op.equation)
        inner = [c for c, times in inner_collectives(rule, op.strategy[0], local.mesh) for _ in range(times)]
        assert op.round is not None
        assert op.round == local_round(rule, op.strategy[0], local.mesh)
        sent = [c for step in op.round.steps for c in step.collectives]
        assert op.round.times == layers
        assert sorted(map(repr, sent * layers)) == sorted(map(repr, inner))
        for number, step in enumerate(op.round.steps):
            assert all(before < number for before in step.before)
        kernels = [k for step in op.round.steps for k in step.kernels]
        assert len(kernels) == len(set(kernels))
        assert all(k in kernels for k, kernel in enumerate(op.kernels) if kernel.product is not None)


def test_parameters_of_a_loop_with_constants_are_gathered_round_by_round() -> None:
    """The angles could be cut by positions with the rest; it is the examples, though, that are cut by data axes."""
    local, (forward, backward) = _loops(recipes.zero(3, 1), _step(16, 8, scan=True))
    slices = 2 * 4096 * 14336
    gathers = [c for c in forward.combined if c.kind == "all_gather" and c.payload == slices]
    assert len(gathers) == 3 * 16
    scatters = [c for c in backward.combined if c.kind == "reduce_scatter" and c.payload == 2 * slices]
    assert len(scatters) == 3 * 16
    whole = [c for op in local.ops if isinstance(op, Compute) for c in op.combined if c.payload >= 16 * slices]
    assert not whole


@needs_cuda_compiler
def _slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("method", "batch_size", "num_layers", "scan", "remat"),
    [
        (recipes.zero(3, 1), 8, 4, True, False),
        _slow(recipes.zero(3, 1), 8, 12, True, True),
        (recipes.zero(1, 1), 8, 4, True, True),  # copies of stacked gradients run beside those that are sent
        _slow(recipes.megatron(1, 8, 1, 1), 2, 4, True, False),
        (recipes.megatron(1, 8, 1, 1), 2, 12, True, False),
        (recipes.megatron(2, 4, 1, 1), 4, 8, True, False),
        _slow(recipes.megatron(1, 8, 1, 1), 2, 4, False, False),
        (recipes.zero(3, 1), 8, 4, False, False),
    ],
)  # fmt: skip
def test_as_xla_compiles_it(method: Method, batch_size: int, num_layers: int, scan: bool, remat: bool) -> None:
    """What is hidden, what goes through memory, and what is held."""
    step, state, batch = _step(num_layers, batch_size, scan=scan, remat=remat)
    planned = autopar.parallelize(step, cluster=load_preset("dgx-h100"), method=method).plan(state, batch)
    [program] = planned.verify_with_xla().programs
    assert program.overlap.found is not None and program.found_kernels is not None
    assert program.overlap.found > 0.1 * program.overlap.communication
    assert program.overlap.hidden == pytest.approx(program.overlap.found, rel=0.35)
    assert program.kernels.nbytes == pytest.approx(program.found_kernels.nbytes, rel=0.2)
    assert program.predicted.total == pytest.approx(program.found.total, rel=0.15)
