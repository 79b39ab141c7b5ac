"""Random programs over the whole rule table, under plans drawn by lot, give what `jax.jit` gives."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from autopar.errors import MicrobatchError
from autopar.ir.graph import Graph, Value
from autopar.ir.rule import bind
from autopar.passes.batch import Kind, When
from tests.planned import analyse
from tests.random_plans import MESHES, plan_by_lot
from tests.random_programs.drawer import BATCH
from tests.random_programs.programs import RandomProgram, programs

CASES_A_TEST = 5
BY_DEFAULT, ALL = 10, 200  # tests
COMPILED_BY_DEFAULTS = 3  # of them as users compile, too
SEEDS = [
    *(pytest.param(seed, marks=pytest.mark.xla_defaults) for seed in range(COMPILED_BY_DEFAULTS)),
    *range(COMPILED_BY_DEFAULTS, BY_DEFAULT),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(BY_DEFAULT, ALL)),
]


def close(actual: Any, expected: Any) -> bool:
    """Equal integers; floats up to rounding in float32, by norm; the same infinities and the same NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if expected.dtype.kind != "f":
        return bool(np.array_equal(actual, expected))
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return False
    actual, expected = actual[finite], expected[finite]
    return bool(np.linalg.norm(actual - expected) <= 3e-4 * np.linalg.norm(expected) + 1e-5 * math.sqrt(expected.size))


def check_program(program: RandomProgram, shape: tuple[int, ...], stages: int, microbatches: int, lots: int) -> None:
    """One program under one plan; as many microbatches as its examples allow."""
    analysis = analyse(program.function, program.weights, program.batch, batch_axes=(None, 0))
    m = math.gcd(microbatches, analysis.max_microbatches)
    try:
        analysis.check(m)
    except MicrobatchError:
        m = 1
    planned = plan_by_lot(analysis, shape, stages if math.prod(shape) <= 4 else 1, m, np.random.default_rng(lots))
    executable = planned.build(jax.devices())
    outputs = executable(jax.tree.leaves((program.weights, program.batch)))
    expected = jax.jit(program.function)(program.weights, program.batch)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    for path, output, reference in zip(paths, outputs, jax.tree.leaves(expected), strict=True):
        assert close(output, reference), f"{path} of {program.kinds} on {shape}, {m} microbatches"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_program_computes_the_same(seed: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=CASES_A_TEST,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],  # shrinking compiles for many minutes: add it for a failure at hand
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        programs(),
        st.sampled_from(MESHES),
        st.integers(1, 2),
        st.sampled_from([1, 2, 4]),
        st.integers(0, 2**16),
    )
    def check(program: RandomProgram, shape: tuple[int, ...], stages: int, microbatches: int, lots: int) -> None:
        check_program(program, shape, stages, microbatches, lots)

    check()


def found(function: Any, weights: dict[str, Any], batch: dict[str, Any]) -> RandomProgram:
    """A program that was found to be wrong, shrunk."""
    return RandomProgram(function, weights, batch, ())


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.xla_defaults
@pytest.mark.parametrize("lots", [14, 23])
def test_a_slice_of_a_slice_that_is_clamped(lots: int) -> None:
    """7 is clamped to 4. XLA merges the device's slice with it and clamps the sum of both starts to 6."""

    def function(weights: dict[str, Any], batch: dict[str, Any]) -> Any:
        return jnp.sin(lax.dynamic_slice_in_dim(batch["x"] @ weights["a"], weights["k"], 4, 1))

    program = found(function, {"a": numbers(8, 8), "k": np.int32(7)}, {"x": numbers(8, 8)})
    check_program(program, (2,), 1, 1, lots)


@pytest.mark.xla_defaults
def test_a_transform_beside_a_gather_of_columns() -> None:
    """XLA:CPU gave the transform the layout of the gather, and then refused to run it."""

    def function(weights: dict[str, Any], batch: dict[str, Any]) -> Any:
        return jnp.abs(jnp.fft.fft(batch["x"] * weights["a"]))[:, :4] * weights["a"][:4]

    check_program(found(function, {"a": numbers(8)}, {"x": numbers(8, 8)}), (2, 4), 1, 1, lots=17)


def values_of(graph: Graph) -> Any:
    """The function of the inputs that gives every array that the graph makes."""

    def run(inputs: list[Any]) -> list[Any]:
        env: dict[Any, Any] = {**dict(zip(graph.inputs, inputs, strict=True)), **graph.constants}
        for eqn in graph.equations:
            operands = [env[v] if isinstance(v, Value) else v.value for v in eqn.inputs]
            env.update(zip(eqn.outputs, bind(eqn, operands), strict=True))
        return [env[v] for eqn in graph.equations for v in eqn.outputs if not v.is_key]

    return jax.jit(run)


def check_states(program: RandomProgram, example: int) -> None:
    """Another example in one place changes only what the batch analysis says it may."""
    analysis = analyse(program.function, program.weights, program.batch, batch_axes=(None, 0))
    graph = analysis.graph
    run = values_of(graph)
    changed = {name: np.copy(x) for name, x in program.batch.items()}
    for x in changed.values():
        x[example] = x[example] + 1
    before, after = (run(jax.tree.leaves((program.weights, batch))) for batch in (program.batch, changed))
    of_whole_batch: set[Value] = (
        set()
    )  # what is taken from the prologue, and what follows from it, may change everywhere
    made = []
    for eqn in graph.equations:
        whole = analysis.when[eqn.id] is When.BEFORE or analysis.before[eqn.id]
        if whole or any(v in of_whole_batch for v in eqn.values):
            of_whole_batch.update(eqn.outputs)
        made += [(eqn, v) for v in eqn.outputs if not v.is_key]
    for (eqn, v), old, new in zip(made, before, after, strict=True):
        state = analysis.states[v]
        if v in of_whole_batch or state.kind not in (Kind.FREE, Kind.ALIKE, Kind.BATCHED):
            continue
        old, new = np.asarray(old), np.asarray(new)
        if state.batch is not None:
            batch = state.batch
            shape = (*old.shape[: batch.dim], batch.outer, batch.units, batch.inner, *old.shape[batch.dim + 1 :])
            unit = example * batch.units // BATCH
            old, new = (np.delete(x.reshape(shape), unit, batch.dim + 1) for x in (old, new))
        np.testing.assert_array_equal(old, new, err_msg=f"{eqn!r} is {state} in {program.kinds}")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_an_example_changes_only_what_it_may(seed: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=CASES_A_TEST,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(), st.integers(0, BATCH - 1))
    def check(program: RandomProgram, example: int) -> None:
        check_states(program, example)

    check()


@pytest.mark.xla_defaults
def test_examples_that_only_the_prologue_reads_lie_where_it_is() -> None:
    """At the second stage; at first they were looked for at the first one."""

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden = jnp.tanh(batch["x"] @ weights["w0"]) @ weights["w1"]
            start = jnp.max(batch["tokens"]) % 4
            return (lax.dynamic_slice_in_dim(hidden, start, 2, 1) ** 2).sum()

        gradient = jax.grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradient)

    weights = {"w0": numbers(4, 4), "w1": numbers(4, 4)}
    batch = {"x": numbers(8, 4), "tokens": np.arange(8, dtype=np.int32)}
    check_program(found(step, weights, batch), (2,), stages=2, microbatches=2, lots=0)
