"""What was priced is what runs: collectives as priced = in the lowered jaxpr = in what XLA compiled, by program."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar import recipes
from autopar.compiling import compiler
from autopar.compiling.program_text import programs_as_text
from autopar.cost_model.reshard import LOCAL_KINDS
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.ir.sharding import Collective
from autopar.ir.units import bytes_text
from autopar.passes.batch import BatchAnalysis
from benchmarks.models import decoder, moe
from tests import models
from tests.h100 import h100_devices, needs_cuda_compiler
from tests.planned import (
    Planned,
    analyse,
    as_xla_for_cpus_merges,
    cluster_of,
    compiled_collectives,
    lowered_collectives,
    plan_analysis,
    plan_step,
)

WIDTHS = (32, 64, 64, 16)
EIGHT = cluster_of(1, 8)
# Splitting the work still pays, but sending a byte takes 1000 times as long as adding it to a sum in memory.
DEAR_LINKS = cluster_of(1, 8, flops=1e6, link=1e6)


def method(shape: tuple[int, ...], data: str, model: str, zero: int) -> Method:
    """`data` and `model`: the axes, a letter each."""
    return Method("by hand", 1, None, shape, data_axes=tuple(data), model_axes=tuple(model), zero=zero)


METHODS = {
    "data_parallel-8": recipes.data_parallel(),
    "data_parallel-2x4": method((2, 4), "xy", "", 0),
    "tensor_parallel-1x8": recipes.megatron(1, 8, 1, 1),
    "tensor_parallel-2x4": method((2, 4), "", "xy", 0),
    "data_and_tensor_parallel-2x4": recipes.megatron(2, 4, 1, 1),
    "zero_2-8": recipes.zero(2),
    "zero_3-8": recipes.zero(3),
    "zero_2-2x4": method((2, 4), "xy", "", 2),
    "zero_3-2x4": method((2, 4), "xy", "", 3),
    "zero_2_and_tensor_parallel-2x4": method((2, 4), "x", "y", 2),
    "zero_3_and_tensor_parallel-2x4": method((2, 4), "x", "y", 3),
    "free-2x4": Method("free", 1, None, (2, 4)),
}


def mlp(optimizer: str) -> tuple[models.Step, Any, Any]:
    return _step(optimizer, models.mlp_loss, models.mlp_params(WIDTHS), models.mlp_batch(32, WIDTHS))


def block(optimizer: str) -> tuple[models.Step, Any, Any]:
    return _step(optimizer, models.block_loss, models.block_params(32, 8), models.block_batch(16, 8, 32))


def loop(optimizer: str) -> tuple[models.Step, Any, Any]:
    return _step(optimizer, models.loop_loss, models.loop_params(3, 32, 8), models.block_batch(16, 8, 32))


def conv(optimizer: str) -> tuple[models.Step, Any, Any]:
    return _step(optimizer, models.conv_loss, models.conv_params(16), models.conv_batch(16, 64))


# Groups of two examples, an expert a device.
EXPERTS = moe.MoEConfig(17, 16, 1, width=16, num_heads=8, num_experts=8, group_size=32, mlp_factor=4)
GROUPED = decoder.DecoderConfig(17, 8, 1, width=64, num_heads=16, num_key_value_heads=8, hidden=96)


def experts(optimizer: str) -> tuple[models.Step, Any, Any]:
    return _step(optimizer, models.expert_loss(EXPERTS), models.expert_params(EXPERTS), models.block_batch(64, 16, 16))


def grouped_query(optimizer: str) -> tuple[models.Step, Any, Any]:
    params = models.grouped_query_params(GROUPED)
    return _step(optimizer, models.grouped_query_loss(GROUPED), params, models.block_batch(16, 8, 64))


def _step(optimizer: str, loss: models.Loss, params: Any, batch: Any) -> tuple[models.Step, Any, Any]:
    if optimizer == "sgd":
        return models.sgd(loss), models.sgd_state(params), batch
    return models.adam(loss), models.adam_state(params), batch


MODELS: dict[str, Callable[[str], tuple[models.Step, Any, Any]]] = {
    "mlp": mlp,
    "block": block,
    "loop": loop,
    "conv": conv,
    "experts": experts,
    "grouped_query": grouped_query,
}


def plan(model: str, optimizer: str, how: Method, m: int, cluster: Cluster = EIGHT) -> Planned:
    return plan_analysis(_analysis(model, optimizer), cluster, how, m)


@functools.cache
def _analysis(model: str, optimizer: str) -> BatchAnalysis:
    """Traced once in a process."""
    return analyse(*MODELS[model](optimizer))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", [recipes.gpipe(2), recipes.zero(3), recipes.auto()], ids=lambda how: how.name)
def test_the_text_of_programs_has_every_collective(model: str, how: Method) -> None:
    """As they are priced, and every value that crosses to another stage."""
    planned = plan(model, "adam", how, 1 if model == "conv" else 2)  # it normalizes over the batch
    texts = programs_as_text(planned.lowered)
    for local in planned.lowered.programs:
        lines = texts[local.program.name].splitlines()
        sent = Counter(line.strip() for line in lines if re.match(r" {8}\w+ over ", line))
        sent -= Counter({line: n for line, n in sent.items() if line.partition(" ")[0] in LOCAL_KINDS})
        priced = planned.priced(local).elements()
        assert sent == Counter(f"{c.kind} over {'·'.join(c.axes)}, {bytes_text(c.payload)}" for c in priced)
        assert len([line for line in lines if " = " in line or " += " in line]) == len(local.ops)
    for crossing in planned.lowered.crossings:
        received = rf"  in  %{crossing.value.id}:.*\n(        from .*\n)*        from stage {crossing.source}, "
        arrives = [p.program.name for p in planned.lowered.programs if p.program.stage == crossing.target]
        assert any(re.search(received, texts[name]) for name in arrives)
        if crossing.value in planned.lowered.placed.producer:
            assert f"        to stage {crossing.target} as {crossing.plan.received}, " in "\n".join(texts.values())


def agree(planned: Planned, sources: Any, programs: Any, *, cpu: bool = True) -> None:
    some = 0
    for local, source, program in zip(planned.lowered.programs, sources, programs, strict=True):
        priced = planned.priced(local)
        assert lowered_collectives(source, local) == priced, local.program.name
        expected = planned.priced(as_xla_for_cpus_merges(local)) if cpu else priced
        assert compiled_collectives(program, local) == expected, local.program.name
        some += len(priced)
    assert some > 0, "the plan communicates nothing, so that nothing was compared"


# Batch norm couples the examples, so that there is one microbatch.
CONV_BY_DEFAULT = ("tensor_parallel-2x4", "zero_3_and_tensor_parallel-2x4", "free-2x4")
# Of the larger models only the methods that differ most in what they send.
FEW = {"experts", "grouped_query"}
DIFFERENT = ("data_and_tensor_parallel-2x4", "free-2x4")


def by_default(model: str, optimizer: str, m: int, i: int, j: int) -> bool:
    """Every model, and every method twice, with either optimizer and either number of microbatches."""
    name = list(METHODS)[j]
    if model == "conv":
        return (optimizer, m) == ("sgd", 1) and name in CONV_BY_DEFAULT
    if model in FEW:
        return (optimizer, m) == (("sgd", 1), ("adam", 2))[(i + j) % 2] and name in DIFFERENT
    return (optimizer, m) == (("sgd", 1), ("adam", 2))[j % 2] and i != j % 3


CASES = [
    pytest.param(model, optimizer, name, m, marks=[] if by_default(model, optimizer, m, i, j) else [pytest.mark.slow])
    for i, model in enumerate(MODELS)
    for j, name in enumerate(METHODS)
    for optimizer in ("sgd", "adam")
    for m in (1, 2)
    if m == 1 or model != "conv"
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "optimizer", "name", "m"), CASES)
def test_priced_is_lowered_is_compiled(model: str, optimizer: str, name: str, m: int) -> None:
    # XLA folds the gather of a constant that the loop's transposition leaves outside; no one to whom links are dear
    # gathers one.
    planned = plan(model, optimizer, METHODS[name], m, DEAR_LINKS if model == "loop" else EIGHT)
    executable = planned.build(jax.devices())
    agree(planned, executable.sources, executable.programs)


# Every model with two methods or three, and every method with one model; `mlp` with all.
FOR_H100 = [
    pytest.param(model, name, marks=[] if model == "mlp" or i - 1 == j % 5 else [pytest.mark.slow])
    for i, model in enumerate(MODELS)
    for j, name in enumerate(METHODS)
]


@pytest.mark.sampled(2)
@needs_cuda_compiler
@pytest.mark.parametrize(("model", "name"), FOR_H100)
def test_priced_is_compiled_for_h100(model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "Worker", lambda sources, *_: sources)
    # XLA for GPUs makes reduce_scatter(a) + reduce_scatter(b) one reduce_scatter(a + b). A planner to whom links
    # cost next to nothing adds the smaller pieces instead, one that knows what they cost does as XLA does.
    planned = plan(model, "adam", METHODS[name], 1 if model == "conv" else 2, DEAR_LINKS)
    sources: Any = planned.build(h100_devices(8))
    agree(planned, sources, [source.lower().compile() for source in sources], cpu=False)


# By hand, in bytes of float32: what is sent, not only that three counts agree.
LEAVES = [4 * a * b for a, b in itertools.pairwise(WIDTHS)] + [4 * b for b in WIDTHS[1:]]
LOSS = 4


def test_zero_3_gathers_each_parameter_for_each_pass_and_scatters_each_gradient_once() -> None:
    planned = plan("mlp", "sgd", recipes.zero(3), 1)
    (program,) = planned.lowered.programs
    expected = Counter(Collective("all_gather", ("x",), nbytes) for nbytes in LEAVES)
    # The first layer has nothing to pass its gradient on to, and sums need no bias.
    expected += Counter(Collective("all_gather", ("x",), nbytes) for nbytes in LEAVES[1 : len(WIDTHS) - 1])
    expected += Counter(Collective("reduce_scatter", ("x",), nbytes) for nbytes in LEAVES)
    expected += Counter([Collective("all_reduce", ("x",), LOSS)])
    assert planned.priced(program) == expected


def test_zero_3_gathers_and_scatters_layers_round_by_round() -> None:
    planned = plan("loop", "sgd", recipes.zero(3), 1, DEAR_LINKS)
    (program,) = planned.lowered.programs
    priced = planned.priced(program)
    # Three rounds; gradients of q, k, v and o, of up and down, and of up's bias. The norms' scales are small, and so
    # are theirs: they are gathered and scattered as stacks, in pieces of 4 of 32.
    scattered = {c.payload: n for c, n in priced.items() if c.kind == "reduce_scatter"}
    assert scattered == {4 * 32 * 32: 3 * 4, 4 * 32 * 128: 3 * 2, 4 * 128: 3, 4 * 3 * 32: 2}
    gathered = {c.payload: n for c, n in priced.items() if c.kind == "all_gather"}
    assert max(gathered) == 4 * 32 * 128  # never a stack of weights
    assert gathered[4 * 32 * 128] >= 2 * 3 * 2  # in both loops


def test_sums_of_16_bits_in_a_loop_are_scattered_in_32_and_gathered_in_16() -> None:
    def loss(params: Any, batch: dict[str, Any]) -> Any:
        return models.loop_loss(params, {**batch, "x": batch["x"].astype(jnp.bfloat16)})

    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), models.loop_params(3, 32, 8))
    step, state, batch = _step("sgd", loss, params, models.block_batch(16, 8, 32))
    planned = plan_step(step, (state, batch), DEAR_LINKS, recipes.megatron(1, 8, 1, 1), 1)
    (program,) = planned.lowered.programs
    priced = planned.priced(program)
    size = 16 * 8 * 32  # of what goes from layer to layer: summed twice in each layer, forwards and backwards
    assert priced[Collective("reduce_scatter", ("y",), 4 * size)] == 3 * 4
    assert priced[Collective("all_gather", ("y",), 2 * size)] >= 3 * 4
    executable = planned.build(jax.devices())
    agree(planned, executable.sources, executable.programs)


def _scaled_by_the_largest() -> Planned:
    def layer(x: Any, w: Any) -> Any:
        scale = jnp.max(jnp.abs(x))
        return x + jnp.tanh((x / scale) @ w) * scale, None

    def loss(params: Any, batch: dict[str, Any]) -> Any:
        x, _ = jax.lax.scan(layer, batch["x"], params["w"])
        return jnp.mean((x - batch["y"]) ** 2)

    step, state, batch = _step("sgd", loss, {"w": jnp.ones((3, 32, 32))}, models.block_batch(16, 8, 32))
    return plan_step(step, (state, batch), EIGHT, recipes.data_parallel(), 1)


def test_the_largest_in_a_loop_is_compared_in_each_round() -> None:
    planned = _scaled_by_the_largest()
    (program,) = planned.lowered.programs
    # Four bytes in each of three rounds, forward; backward the sums of the scale's gradient, and how many are largest.
    assert planned.priced(program)[Collective("all_reduce", ("x",), 4)] >= 3
    executable = planned.build(jax.devices())
    agree(planned, executable.sources, executable.programs)


@needs_cuda_compiler
def test_the_largest_in_a_loop_is_compared_on_h100s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "Worker", lambda sources, *_: sources)
    planned = _scaled_by_the_largest()
    sources: Any = planned.build(h100_devices(8))
    agree(planned, sources, [source.lower().compile() for source in sources], cpu=False)


@pytest.mark.parametrize("m", [1, 2])
def test_expert_parallelism_is_four_all_to_alls(m: int) -> None:
    # 64 examples of 16 tokens are 32 groups of 32 tokens, each with room for 2 * 32 / 8 = 8 tokens of width 16 in each
    # of 8 experts. What is routed is cut by group before and by expert afterwards: to the experts and back, and the
    # gradients likewise. Each device sends its 8th of the microbatch's 32 * 8 * 8 * 16 float32 each time.
    planned = plan("experts", "sgd", Method("free", 1, None, (8,)), m)
    sent = sum((planned.priced(p) for p in planned.lowered.programs if m == 1 or p.program.in_loop), Counter())
    exchanged = {c.payload: count for c, count in sent.items() if c.kind == "all_to_all"}
    assert exchanged == {32 * 8 * 8 * 16 * 4 // 8 // m: 4}
    for leaf in planned.plan.leaves:
        if leaf.path in ("state['experts']['up']", "state['experts']['down']"):
            assert leaf.sharding.dims[0] == ("x",), leaf  # an expert a device: nothing of it is sent
    largest = max(c.payload for c in sent if c.kind != "all_to_all")
    assert largest <= 4 * 16 * 16  # gradients of the attention's matrices
    executable = planned.build(jax.devices())
    agree(planned, executable.sources, executable.programs)


# --- Gradient synchronisation and microbatches ------------------------------------------------------------------


def gradient_bytes(how: Method, m: int) -> int:
    """Payload of the reductions over the data axis, per step and device; the loss, a scalar, is left out."""
    planned = plan("mlp", "sgd", how, m, DEAR_LINKS)
    sent = 0
    for local in planned.lowered.programs:
        often = m if local.program.in_loop else 1
        for collective, count in planned.priced(local).items():
            reduces = collective.kind in ("all_reduce", "reduce_scatter")
            if reduces and "x" in collective.axes and collective.payload > LOSS:
                sent += collective.payload * count * often
    return sent


# Four-way tensor parallelism leaves each device a quarter of every gradient: 32, 64 and 16 columns divide by 4.
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize(
    ("how", "tensor_parallel"), [(recipes.data_parallel(), 1), (recipes.megatron(2, 4, 1, 1), 4)], ids=["8", "2x4"]
)
def test_gradients_are_synchronised_once_a_step_where_partial_sums_are_accumulated(
    how: Method, tensor_parallel: int, m: int
) -> None:
    assert gradient_bytes(how, m) == sum(LEAVES) // tensor_parallel


def test_zero_2_pays_for_its_sharded_sums_with_every_microbatch() -> None:
    """The other strategy, to show that the counts above can tell the two apart."""
    for m in (2, 4):
        assert gradient_bytes(recipes.zero(2), m) == m * sum(LEAVES)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_gathers_nothing_but_the_new_parameters(stage: int, m: int) -> None:
    """An optimizer's state is renewed in its pieces, also where that is cheap enough to be done everywhere."""
    planned = plan("mlp", "adam", recipes.zero(stage), m)
    gathered = sum(
        collective.payload * count
        for local in planned.lowered.programs
        for collective, count in planned.priced(local).items()
        if collective.kind == "all_gather"
    )
    assert gathered == sum(LEAVES)
