"""Plans held against XLA: on virtual CPU devices, and for GPUs that are not there."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.cost_model.hardware import load_preset, preset_names
from autopar.cost_model.targets import load_target, target_names, target_of
from autopar.errors import TargetError
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.ir.verification import Verification
from autopar.planned import Planned
from autopar.runtime.ahead import absent_gpus
from tests import models
from tests.h100 import needs_cuda_compiler
from tests.planned import cluster_of

WIDTHS = (32, 64, 64, 16)
LAYERS = 8
# The largest stage has more devices than the tests have.
SIXTEEN = cluster_of(2, 8)


def mlp_plan(method: Method, cluster: autopar.Cluster | None = None) -> Planned:
    step = autopar.parallelize(models.sgd(models.mlp_loss), cluster=cluster or cluster_of(1, 8), method=method)
    state, batch = models.sgd_state(models.mlp_params(WIDTHS)), models.mlp_batch(32, WIDTHS)
    return step.plan(state, batch)


def loop_step(method: Method, cluster: autopar.Cluster) -> tuple[autopar.Parallelized, Any]:
    step = autopar.parallelize(models.sgd(models.loop_loss), cluster=cluster, method=method)
    return step, (models.sgd_state(models.loop_params(LAYERS, 32, 8)), models.block_batch(16, 8, 32))


def test_the_verdict_is_of_the_programs_that_run() -> None:
    step, args = loop_step(recipes.megatron(2, 2, 2, 4), cluster_of(1, 8))
    found = step.plan(*args).verify_with_xla("cpu")
    memory = step.compile(*args).memory
    for program in found.programs:
        for name in program.names:
            assert program.found.total == memory[name]
            assert program.predicted.arguments == program.found.arguments
            assert program.predicted.outputs == pytest.approx(program.found.outputs, abs=8 * 64)
    assert {name for program in found.programs for name in program.names} == set(memory)
    for program in found.programs:
        for traffic in program.traffic:
            assert traffic.predicted == traffic.found
            assert traffic.link == "link"
    assert found.target == "cpu"


def test_programs_that_stages_share_are_compiled_once() -> None:
    step, args = loop_step(recipes.megatron(1, 2, 4, 4), cluster_of(1, 8))
    found = step.plan(*args).verify_with_xla("cpu")
    shared = {program.names for program in found.programs if len(program.names) > 1}
    assert ("forward_1", "forward_2") in shared
    assert ("backward_1", "backward_2") in {tuple(sorted(names)) for names in shared}


def test_a_stage_holds_what_is_kept_and_what_xla_needs_besides() -> None:
    plan = mlp_plan(recipes.zero(2, 2))
    (stage,) = plan.verify_with_xla("cpu").stages
    assert stage.predicted == plan.stages[0].memory.total
    assert stage.found >= plan.stages[0].memory.kept
    assert stage.capacity == plan.stages[0].memory.capacity
    assert stage.fits


def test_too_little_memory_does_not_fit() -> None:
    plan = mlp_plan(recipes.data_parallel())
    verdict = plan.verify_with_xla("cpu")
    (stage,) = verdict.stages
    small = dataclasses.replace(stage, capacity=stage.found - 1)
    assert verdict.fits
    assert not dataclasses.replace(verdict, stages=(small,)).fits
    assert "DOES NOT FIT" in str(dataclasses.replace(verdict, stages=(small,)))


def test_what_differs_is_said_with_operators_and_lines() -> None:
    verdict = mlp_plan(recipes.data_parallel()).verify_with_xla("cpu")
    for program in verdict.programs:
        assert bool(program.remarks) == (abs(program.memory_error) > 0.05)
    assert verdict.agrees != any(program.remarks for program in verdict.programs)
    remarks = [remark for program in verdict.programs for remark in program.remarks]
    assert all("models.py" in remark for remark in remarks if "At its peak" in remark)


def test_an_edited_plan_is_verified_as_edited() -> None:
    step, args = loop_step(recipes.megatron(2, 2, 2, 4), cluster_of(1, 8))
    plan = step.plan(*args)
    edited = dataclasses.replace(plan, schedule="gpipe")
    found = edited.verify_with_xla("cpu")
    assert found.stages[0].predicted > plan.verify_with_xla("cpu").stages[0].predicted


def test_a_plan_from_a_file_needs_its_step(tmp_path: pathlib.Path) -> None:
    step, args = loop_step(recipes.data_parallel(), cluster_of(1, 4))
    plan = step.plan(*args)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    with pytest.raises(AttributeError, match=r"no step at hand, .*Use step\.plan\(state, batch, method=plan\)"):
        loaded.verify_with_xla("cpu")  # type: ignore[attr-defined]
    again = step.plan(*args, method=loaded).verify_with_xla("cpu")
    assert without_seconds(again) == without_seconds(plan.verify_with_xla("cpu"))


def without_seconds(found: Verification) -> Any:
    return [dataclasses.replace(program, seconds=0.0) for program in found.programs], found.stages


def test_json(tmp_path: pathlib.Path) -> None:
    found = mlp_plan(recipes.zero(3)).verify_with_xla("cpu")
    found.save(tmp_path / "verdict.json")
    content = json.loads((tmp_path / "verdict.json").read_text())
    assert content["format"] == "autopar-verification"
    assert content["fits"] is True
    assert content["stages"][0]["found"] == found.stages[0].found
    assert content["programs"][0]["found"]["temporaries"] == found.programs[0].found.temporaries
    with pytest.raises(TargetError, match="nowhere"):
        found.save(tmp_path / "nowhere" / "verdict.json")


# Bad input


def test_unknown_targets_name_the_nearest() -> None:
    with pytest.raises(TargetError, match=r"target='h10': there is no such target.*did you mean 'h100'"):
        mlp_plan(recipes.data_parallel()).verify_with_xla("h10")
    with pytest.raises(TargetError, match=r"device kind 'device' is of no chip that is known: give target="):
        mlp_plan(recipes.data_parallel()).verify_with_xla()


def test_a_missing_compiler_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"not installed: pip install 'autopar\[verify\]'"):
        mlp_plan(recipes.data_parallel()).verify_with_xla("h100")


def test_too_few_cpu_devices() -> None:
    with pytest.raises(TargetError, match=r"16 devices, there are 8 .*jax_num_cpu_devices', 16"):
        mlp_plan(recipes.data_parallel(), SIXTEEN).verify_with_xla("cpu")


def test_too_much_to_compile_says_how_much() -> None:
    with pytest.raises(TargetError, match=r"1 programs of \d+ operations.*more than most_operations=10"):
        mlp_plan(recipes.data_parallel()).verify_with_xla("cpu", most_operations=10)


# Targets


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_target(name: str) -> None:
    target = target_of(load_preset(name).hosts[0].kind)
    assert target == "cpu" or target in target_names()


def test_a_target_has_the_limits_of_its_own_device() -> None:
    for preset in preset_names():
        kind = load_preset(preset).hosts[0].kind
        if (target := target_of(kind)) == "cpu":
            continue
        text = load_target(target)
        lines = (line.split() for line in text.splitlines())
        fields = {words[0]: words[1] for words in lines if len(words) == 2}
        assert int(fields["core_count:"]) == kind.multiprocessors or not kind.multiprocessors
        # The GB200's target is the B200's, which has 0.96 of its memory's speed.
        close = 0.05 if preset == "gb200-nvl72" else 0.02
        assert float(fields["memory_bandwidth:"]) == pytest.approx(kind.memory_bandwidth, rel=close)
        # Data sheets mean either unit by a gigabyte.
        assert float(fields["device_memory_size:"]) == pytest.approx(kind.memory, rel=0.08)


@needs_cuda_compiler
@pytest.mark.parametrize("name", target_names())
def test_xla_compiles_for_every_target(name: str) -> None:
    devices = absent_gpus(load_target(name), 2, 4)
    assert len(devices) == 8
    assert devices[5].process_index == 1
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=sharding)
    assert jax.jit(lambda x: x @ x).lower(x).compile().memory_analysis() is not None


@needs_cuda_compiler
@pytest.mark.parametrize(("platforms", "is_told"), [("", True), ("cuda,cpu", True), ("cpu", False)])
def test_where_jax_did_not_take_the_compiler_the_error_says_what_to_do(
    platforms: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: object) -> object:  # as jax 0.10.2 does without CUDA's libraries, unless it is to use CPUs alone
        raise NotImplementedError("topology not implemented")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refused)
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", platforms)
    try:
        with pytest.raises(TargetError, match="topology not implemented") as caught:
            absent_gpus(load_target("h100"), 1, 1)
    finally:
        jax.config.update("jax_platforms", before)
    assert ("say jax.config.update('jax_platforms', 'cpu')" in str(caught.value)) is is_told


@needs_cuda_compiler
def test_without_a_word_about_platforms_the_compiler_is_there_or_it_is_said_what_to_do() -> None:
    """As a user's script has it: whether JAX takes the plugin depends on the CUDA libraries of this machine."""
    script = (
        "from autopar.cost_model.targets import load_target\nfrom autopar.runtime.ahead import absent_gpus\n"
        "assert len(absent_gpus(load_target('h100'), 1, 1)) == 1"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 or "say jax.config.update('jax_platforms', 'cpu')" in done.stderr, done.stderr


@needs_cuda_compiler
def test_a_bad_target_file_is_one_clear_error(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "chip.txtpb"
    file.write_text("this is no chip")
    with pytest.raises(TargetError, match="GpuTargetConfigProto"):
        mlp_plan(recipes.data_parallel()).verify_with_xla(str(file))


@pytest.mark.sampled(3)
@needs_cuda_compiler
@pytest.mark.parametrize("method", [recipes.data_parallel(), recipes.zero(3), recipes.megatron(2, 4, 1, 2)])
def test_collectives_for_gpus_are_those_that_were_priced(method: Method) -> None:
    step, args = loop_step(method, cluster_of(1, 8))
    for program in step.plan(*args).verify_with_xla("h100").programs:
        for traffic in program.traffic:
            assert traffic.predicted == traffic.found


@needs_cuda_compiler
def test_stages_on_several_hosts_cross_the_network() -> None:
    step, args = loop_step(recipes.megatron(4, 2, 2, 2), cluster_of(2, 8))
    found = step.plan(*args).verify_with_xla("h100")
    assert {t.link for program in found.programs for t in program.traffic} == {"link"}
    wide = mlp_plan(recipes.data_parallel(), SIXTEEN).verify_with_xla("h100")
    assert {t.link for program in wide.programs for t in program.traffic} == {"network"}


def _pooled(params: Any, x: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    h = jax.nn.relu(jax.lax.conv_general_dilated(x, params["filters"], (1, 1), "SAME", dimension_numbers=dims))
    h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return h.reshape(len(h), -1) @ params["out"]


def _with_exact_gelu(params: Any, x: Any) -> Any:
    for up, down in params:
        x = jax.nn.gelu(x @ up, approximate=False) @ down
    return x


def _of(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# XLA first finds out where in its window each maximum is; it computes erfc, of 64 operations, once.
HELD: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "pooled": (
        _pooled, {"filters": _of((3, 3, 8, 64), jnp.float32), "out": _of((2**16, 8), jnp.float32)}, (32, 64, 64, 8),
    ),
    "exact gelu": (_with_exact_gelu, [(_of((512, 2048)), _of((2048, 512)))] * 2, (4096, 512)),
}  # fmt: skip


@needs_cuda_compiler
@pytest.mark.parametrize("name", HELD)
def test_memory_for_gpus_is_what_xla_sets_aside(name: str) -> None:
    function, params, shape = HELD[name]

    def train_step(params: Any, x: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.mean(function(params, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    step = autopar.parallelize(
        train_step,
        cluster=load_preset("dgx-h100", devices_per_host=1),
        method=recipes.data_parallel(1),
        batch_axes=(None, 0),
    )
    x = _of(shape, jax.tree.leaves(params)[0].dtype)
    (program,) = step.plan(params, x).verify_with_xla("h100").programs
    assert abs(program.memory_error) < 0.1
