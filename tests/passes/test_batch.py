"""The batch analysis on traced train steps of every shape, against `jax.jit` and against perturbed examples."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import BatchAxisError, MicrobatchError
from autopar.ir.graph import Equation, Phase, Value
from autopar.ir.rule import bind
from autopar.passes.batch import BatchAnalysis, Kind, State, When, analyse_batch
from autopar.passes.batch_axes import resolve_batch_axes
from autopar.passes.microbatch import split_batch
from autopar.passes.pipeline import place
from autopar.passes.rules.table import rule_of
from autopar.tracing.trace import trace
from tests.passes import key_steps, steps
from tests.passes.step_case import BATCH, CLASSES, WIDTH, Case, Cases

DEVICES = 2
CASES: Cases = {**steps.CASES, **key_steps.CASES}

# The numbers.


@functools.cache
def made(name: str) -> Case:
    return CASES[name]()


@functools.cache
def expected(name: str) -> Any:
    c = made(name)
    return jax.jit(c.step)(c.state, c.batch)


def parallelized(c: Case, num_microbatches: int) -> Any:
    return autopar.parallelize(
        c.step, method=autopar.recipes.data_parallel(num_microbatches), batch_axes=c.batch_axes,
        devices=jax.devices()[:DEVICES], donate_argnums=(),
    )  # fmt: skip


def assert_same(found: Any, wanted: Any) -> None:
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(wanted)]
    assert structures[0] == structures[1]
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, jax.tree_util.keystr(path)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        exact = not np.issubdtype(a.dtype, np.floating)
        np.testing.assert_allclose(
            a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6, err_msg=jax.tree_util.keystr(path)
        )


SPLITTABLE = [name for name in CASES if not made(name).coupled]
COUPLED = [name for name in CASES if made(name).coupled]
MANY = [name for name in SPLITTABLE if made(name).max_microbatches == BATCH]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SPLITTABLE)
def test_two_microbatches_give_the_numbers_of_one_device(name: str) -> None:
    c = made(name)
    assert_same(autopar.gather(parallelized(c, 2)(c.state, c.batch)), expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITTABLE)
def test_one_microbatch_gives_the_numbers_of_one_device(name: str) -> None:
    c = made(name)
    assert_same(autopar.gather(parallelized(c, 1)(c.state, c.batch)), expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_four_microbatches_give_the_numbers_of_one_device(name: str) -> None:
    c = made(name)
    assert_same(autopar.gather(parallelized(c, 4)(c.state, c.batch)), expected(name))


# Whole batches read before or after the loop at other stages than its slices, sums over stages, recomputed dropout.
PIPELINED = ["ignored_labels", "auxiliary_outputs", "loss_after_the_update", "rematerialized_dropout",
             "rematerialized_dropout_of_split_keys"]  # fmt: skip
ONE_PRODUCT = ["class_token", "transposed", "custom_jvp"]  # no two stages


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in PIPELINED else pytest.mark.slow)
        for name in CASES
        if name not in ONE_PRODUCT
    ],
)
def test_pipelines_give_the_numbers_of_one_device(name: str) -> None:
    c = made(name)
    method = autopar.recipes.gpipe(2, 1 if c.coupled else 2)
    step = autopar.parallelize(
        c.step, method=method, batch_axes=c.batch_axes, devices=jax.devices()[:2], donate_argnums=()
    )
    assert_same(autopar.gather(step(c.state, c.batch)), expected(name))


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_examples(name: str) -> None:
    """One microbatch works, sharded over devices; more of them name the user's line and the way out."""
    c = made(name)
    with pytest.raises(MicrobatchError) as caught:
        parallelized(c, 2).plan(c.state, c.batch)
    text = str(caught.value)
    assert "num_microbatches=2: step couples the examples of its batch at " in text
    assert "steps.py:" in text and f"({c.coupled}: " in text
    assert "Use num_microbatches=1 (sharding over devices is still free)" in text
    assert_same(autopar.gather(parallelized(c, 1)(c.state, c.batch)), expected(name))


# What the analysis says.


@functools.cache
def analysed(name: str) -> BatchAnalysis:
    c = made(name)
    graph = trace(c.step, (c.state, c.batch), {}, name="step")
    return analyse_batch(graph, resolve_batch_axes(graph, c.batch_axes), rule_of)


@pytest.mark.parametrize("name", CASES)
def test_legal_numbers_of_microbatches(name: str) -> None:
    c, analysis = made(name), analysed(name)
    assert [x.equation.primitive.name for x in analysis.couplings[:1]] == ([c.coupled] if c.coupled else [])
    assert analysis.batch_size == BATCH
    assert analysis.max_microbatches == c.max_microbatches


def of_example(state: State, shape: tuple[int, ...], example: int) -> np.ndarray:
    """Mask of the elements that the unit of an example may touch."""
    batch = state.batch
    assert batch is not None
    units = np.zeros((batch.outer, batch.units, batch.inner), bool)
    units[:, example * batch.units // BATCH] = True
    along = units.reshape([-1 if d == batch.dim else 1 for d in range(len(shape))])
    return np.broadcast_to(along, shape)


def values_of(analysis: BatchAnalysis, leaves: list[Any], frozen: dict[Value, Any]) -> dict[Value, Any]:
    """Every value of the graph; what the analysis takes from the prologue is read from `frozen`."""
    graph = analysis.graph
    env: dict[Value, Any] = {**dict(zip(graph.inputs, leaves, strict=True)), **graph.constants}
    for eqn in graph.equations:
        early = analysis.before[eqn.id]
        operands = [
            x.value if not isinstance(x, Value) else frozen.get(x, env[x]) if x in early else env[x] for x in eqn.inputs
        ]
        results = bind(eqn, operands)
        for value, result in zip(eqn.outputs, results, strict=True):
            env[value] = frozen.get(value, result) if analysis.when[eqn.id] is When.BEFORE else result
    return env


def changed(a: Any, b: Any) -> np.ndarray:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    both_nan = np.isnan(a) & np.isnan(b)
    found: np.ndarray = (np.asarray(a) != np.asarray(b)) & ~both_nan
    return found


# Steps that show every kind of value; all of them take long to compile.
PERTURBED = [
    "masked_mean_loss", "weights_that_sum_to_one", "auxiliary_outputs", "clipped_by_global_norm", "time_major",
    "batch_and_time_merged", "time_and_batch_merged", "groups_of_examples", "index_of_the_example", "gathered_rows",
    "dropout", "rematerialized", "custom_vjp", "hand_written_backward_pass", "batch_normalization", "contrastive",
    "running_scale", "largest_of_merged_examples",
]  # fmt: skip


@pytest.mark.parametrize("name", PERTURBED)
def test_an_example_changes_only_what_the_analysis_says(name: str) -> None:
    """FREE values stay, BATCHED ones change in that example's unit; the prologue is held fixed."""
    c, analysis, example = made(name), analysed(name), 5
    graph = analysis.graph
    leaves = [jnp.asarray(x) for x in jax.tree.leaves((c.state, c.batch))]
    other = []
    for value, leaf in zip(graph.inputs, leaves, strict=True):
        if analysis.states[value].kind is Kind.BATCHED:
            mask = of_example(analysis.states[value], value.shape, example)
            leaf = jnp.where(mask, (leaf + 1) % CLASSES if leaf.dtype == jnp.int32 else leaf + 0.5, leaf)
        other.append(leaf)
    early = {v for e in graph.equations for v in analysis.before[e.id]}
    early.update(v for e in graph.equations if analysis.when[e.id] is When.BEFORE for v in e.outputs)
    frozen: dict[Value, Any] = {}
    if early:
        everything = jax.jit(lambda xs: [values_of(analysis, xs, {})[v] for v in early])(leaves)
        frozen = dict(zip(early, everything, strict=True))
    order = [*graph.inputs, *(v for e in graph.equations for v in e.outputs)]

    @jax.jit
    def evaluate(xs: list[Any]) -> list[Any]:
        found = values_of(analysis, xs, frozen)
        return [found[v] for v in order]

    moved = {Kind.FREE: 0, Kind.BATCHED: 0}
    for value, a, b in zip(order, evaluate(leaves), evaluate(other), strict=True):
        state, differs = analysis.states[value], changed(a, b)
        if state.kind is Kind.FREE:
            assert not differs.any(), value
            moved[Kind.FREE] += 1
        elif state.kind is Kind.BATCHED:
            assert not (differs & ~of_example(state, value.shape, example)).any(), value
            moved[Kind.BATCHED] += bool(differs.any())
    assert moved[Kind.FREE] >= 2  # the parameters at the least
    assert moved[Kind.BATCHED] >= 4  # examples, activations and cotangents did change


def steps_of(name: str, m: int = 2) -> dict[Phase, list[Equation]]:
    """The equations of the split step by phase."""
    found: dict[Phase, list[Equation]] = {phase: [] for phase in Phase}
    for eqn in split_batch(analysed(name), m).equations:
        found[eqn.phase].append(eqn)
    return found


def names(equations: list[Equation]) -> list[str]:
    return [e.primitive.name for e in equations]


def test_phases_of_a_mean_loss() -> None:
    """Two products forwards; backwards two for the weights and one for the hidden layer; none before or after."""
    phases = steps_of("mean_loss")
    assert names(phases[Phase.FORWARD]).count("dot_general") == 2
    assert names(phases[Phase.BACKWARD]).count("dot_general") == 3
    assert "dot_general" not in names(phases[Phase.PROLOGUE]) + names(phases[Phase.UPDATE])
    assert names(phases[Phase.UPDATE]).count("sub") == 2  # SGD on two weights
    assert all(e.outputs[0].shape[0] == BATCH // 2 for e in phases[Phase.FORWARD] if e.primitive.name == "dot_general")


def test_the_mask_is_counted_in_the_prologue() -> None:
    phases = steps_of("masked_mean_loss")
    assert names(phases[Phase.PROLOGUE]).count("reduce_sum") == 1
    (count,) = [e for e in phases[Phase.PROLOGUE] if e.primitive.name == "reduce_sum"]
    assert count.values[0].shape == (BATCH,)  # the whole batch, not a microbatch


def test_the_norm_is_taken_of_whole_gradients() -> None:
    phases = steps_of("clipped_by_global_norm")
    assert "sqrt" in names(phases[Phase.UPDATE])
    assert "sqrt" not in names(phases[Phase.FORWARD] + phases[Phase.BACKWARD])


def test_batch_free_terms_are_added_once() -> None:
    """The weights' squares are computed outside of the loop, and added to the gradients after it."""
    phases = steps_of("regularized_loss")
    loop = phases[Phase.FORWARD] + phases[Phase.BACKWARD]
    squares = [e for e in loop if e.primitive.name in ("mul", "integer_pow") and e.outputs[0].shape == (WIDTH, WIDTH)]
    assert squares == []


def test_what_the_loop_hands_on() -> None:
    """Of the auxiliary outputs: per-example ones are kept, counts and gradients summed, the examples passed through."""
    c, step = made("auxiliary_outputs"), split_batch(analysed("auxiliary_outputs"), 2)
    assert sorted(v.shape for v in step.keep) == [(BATCH // 2,), (BATCH // 2, CLASSES)]
    assert all(len(pieces) == 2 for pieces in step.keep.values())
    assert sorted(v.shape for v in step.accumulate) == [(), (), (WIDTH, CLASSES), (WIDTH, WIDTH)]
    out = jax.tree.unflatten(step.graph.out_tree, step.outputs)
    examples_in = step.graph.inputs[step.graph.input_paths.index("batch['x']")]
    assert out[1][1]["examples"] is examples_in
    assert set(c.batch) == {"x", "y", "mask"}


def test_groups_say_their_size() -> None:
    message = re.escape("num_microbatches=4 does not divide the batch of 8 in groups of 4 examples (axis 0 of ")
    with pytest.raises(BatchAxisError, match=message):
        split_batch(analysed("groups_of_examples"), 4)


def test_dropout_draws_the_bits_of_one_device() -> None:
    c = made("dropout")
    _, (_, mask) = parallelized(c, 2)(c.state, c.batch)
    _, (_, reference) = expected("dropout")
    assert np.array_equal(np.asarray(mask), np.asarray(reference))
    assert 0 < np.asarray(mask).sum() < mask.size
    bits = [e for e in steps_of("dropout")[Phase.FORWARD] if e.primitive.name.startswith("random_bits")]
    assert [e.outputs[0].shape for e in bits] == [(BATCH // 2, WIDTH)]  # at a microbatch's cost


def test_recomputed_dropout_is_drawn_again() -> None:
    """By keys of its own, behind the fence of `jax.checkpoint`: else XLA would keep every bit of the forward pass."""
    steps = steps_of("rematerialized_dropout_of_split_keys")
    first, again = (
        [set(e.values) for e in steps[phase] if e.primitive.name.startswith("random_bits")]
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    assert len(first) == len(again) == 4
    assert set.union(*first).isdisjoint({v for values in again for v in values if v.is_key})


def test_long_chains_of_keys_are_no_recursion() -> None:
    def step(w: Any, key: Any, x: Any) -> Any:
        for _ in range(400):
            key, sub = jax.random.split(key)

        @jax.checkpoint
        def block(w: Any, x: Any, key: Any) -> Any:
            for _ in range(400):
                key, sub = jax.random.split(key)
            return jnp.where(jax.random.bernoulli(sub, 0.5, x.shape), x, 0) @ w

        return jax.grad(lambda w: jnp.sum(jnp.tanh(block(w, x, sub))))(w)

    arguments = jnp.ones((4, 4)), jax.random.key(0), jnp.ones((8, 4))
    graph = trace(step, arguments, {}, name="step")
    split = split_batch(analyse_batch(graph, resolve_batch_axes(graph, (None, None, 0)), rule_of), 2)
    forward = {e.id: 0 for e in split.equations if e.phase is Phase.FORWARD and e.id not in split.replicable}
    assert place(split, forward, 1, {}).num_stages == 1


def test_running_sums_have_32_bits() -> None:
    """A parameter in bfloat16 has a gradient in bfloat16; of 32 partial sums its sum would lose what it shows here."""
    random = np.random.default_rng(0)
    w = jnp.asarray(random.normal(size=(16, 8)) / 4, jnp.bfloat16)
    x = jnp.asarray(random.normal(size=(256, 16)), jnp.bfloat16)

    def step(w: Any, x: Any) -> Any:
        g = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - 1) ** 2))(w)
        return w - g, g

    graph = trace(step, (w, x), {}, name="step")
    split = split_batch(analyse_batch(graph, resolve_batch_axes(graph, "auto"), rule_of), 32)
    assert {str(total.dtype) for total in split.accumulate.values()} == {"float32"}
    assert [str(v.dtype) for v in split.outputs] == ["bfloat16", "bfloat16"]

    exact = np.asarray(jax.jit(step)(w.astype(jnp.float32), x.astype(jnp.float32))[1])

    def error(step: Any) -> Any:
        return np.linalg.norm(np.asarray(step(w, x)[1], np.float32) - exact)

    found = error(autopar.parallelize(step, method=autopar.recipes.data_parallel(32), devices=jax.devices()[:2],
                                      donate_argnums=()))  # fmt: skip
    assert found <= 1.2 * error(jax.jit(step))
