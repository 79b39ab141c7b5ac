"""Every framework's train step, unmodified, gives the numbers of one device, to the bar of `tests/equivalence`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar import recipes
from autopar.errors import MicrobatchError
from examples import equinox_filter, flax_linen, flax_nnx, haiku_transform, optax_optimizers
from examples.common import Example
from tests.equivalence import compare

Build = Callable[..., Example]


def _hugging_face(optimizer: Any = None) -> Example:
    pytest.importorskip("transformers", reason="Hugging Face's Flax models need the extra hugging-face")
    from examples import hugging_face_flax

    return hugging_face_flax.build(optimizer)


FRAMEWORKS: dict[str, Build] = {
    "linen": functools.partial(flax_linen.build, batch_norm=False),
    "nnx": flax_nnx.build,
    "equinox": equinox_filter.build,
    "haiku_batch_norm": haiku_transform.build,
    "equinox_partition": equinox_filter.build_with_partition,
    # With `-m slow` only: what they add is little, or takes long.
    "linen_batch_norm": flax_linen.build,
    "nnx_modules": flax_nnx.build_with_modules,
    "haiku": functools.partial(haiku_transform.build, batch_norm=False),
    "hugging_face": _hugging_face,
}
OPTIMIZERS: dict[str, Build] = {
    **{name: lambda make=make: optax_optimizers.build(make()) for name, make in optax_optimizers.OPTIMIZERS.items()},
    "lookahead": optax_optimizers.build_lookahead,
    "sam": optax_optimizers.build_sam,
}
# Factored and matrix-valued state, state that no gradient enters, conditions, several gradients a step.
UNLIKE_OTHERS = (
    "multi_steps", "shampoo", "adafactor", "sam", "schedule_free", "inject_hyperparams", "multi_transform", "lookahead",
)  # fmt: skip
METHODS: dict[str, Any] = {
    "pipeline": recipes.gpipe(2, 2),
    "zero": recipes.zero(3),
    "megatron": recipes.megatron(2, 4, 1, 1),
    "data_parallel": recipes.data_parallel(),
    "planned": "auto",
}
# A batch-norm, and SAM's second gradient at a point that the first one's norm decides, need the whole batch.
WHOLE_BATCH = ("linen_batch_norm", "haiku_batch_norm", "sam")


def _floats(tree: Any) -> list[np.ndarray]:
    """The leaves that a step changes by real numbers, copied: the originals may be donated."""
    return [np.array(x) for x in jax.tree.leaves(tree) if eqx.is_inexact_array_like(x) and hasattr(x, "shape")]


def _run(example: Example, step: Any, count: int) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """The state before and after some steps, and the last loss."""
    state = example.state
    before = _floats(state)
    for batch in example.batches[:count]:
        *state, result = step(*state, *batch)
    loss = result["loss"] if isinstance(result, dict) else result
    return before, _floats(autopar.gather(state)), float(loss)


def _on_one_device(example: Example) -> Any:
    functions = any(map(callable, jax.tree.leaves(example.state)))
    return eqx.filter_jit(example.plain_step) if functions else jax.jit(example.plain_step)


def _parallel(example: Example, method: Any) -> Any:
    return autopar.parallelize(
        example.plain_step, method=method, static_leaves=lambda leaf: not isinstance(leaf, jax.Array)
    )


def _measure(build: Build, step_of: Callable[[Example], Any]) -> compare.Reference:
    example = build(optax.adamw(1e-3))
    _, adamw, loss = _run(example, step_of(example), compare.ADAMW_STEPS)
    example = build(compare.sgd())
    before, after, _ = _run(example, step_of(example), 1)
    return compare.Reference(adamw, loss, [b - a for a, b in zip(before, after, strict=True)])


@functools.cache
def _expected(name: str) -> compare.Reference:
    return _measure(FRAMEWORKS[name], _on_one_device)


def _check_framework(name: str, method: str) -> None:
    build = FRAMEWORKS[name]
    found = _measure(build, lambda example: _parallel(example, METHODS[method]))
    deviation = compare.deviation(found, _expected(name), 1, 0)
    assert deviation.within, deviation


def _check_optimizer(name: str, method: str) -> None:
    example = OPTIMIZERS[name]()
    _, expected, expected_loss = _run(example, _on_one_device(example), compare.ADAMW_STEPS)
    example = OPTIMIZERS[name]()
    _, found, loss = _run(example, _parallel(example, METHODS[method]), compare.ADAMW_STEPS)
    assert abs(loss - expected_loss) <= compare.LOSS_LIMIT * abs(expected_loss)
    difference = [a - b for a, b in zip(found, expected, strict=True)]
    assert compare.norm(difference) <= compare.TREE_LIMIT * compare.norm(expected)


def _product(examples: dict[str, Build]) -> list[tuple[str, str]]:
    return [(e, m) for e in examples for m in METHODS if not (e in WHOLE_BATCH and m == "pipeline")]


def _covering(examples: Iterable[str]) -> list[tuple[str, str]]:
    """Each example once; the methods in turn."""
    methods = list(METHODS)
    turns = [(e, methods[i % len(methods)]) for i, e in enumerate(examples)]
    return [(e, "data_parallel" if e in WHOLE_BATCH and m == "pipeline" else m) for e, m in turns]


@pytest.mark.parametrize(("name", "method"), _covering(list(FRAMEWORKS)[:5]))
def test_frameworks(name: str, method: str) -> None:
    _check_framework(name, method)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "method"), _covering(UNLIKE_OTHERS))
def test_optimizers(name: str, method: str) -> None:
    _check_optimizer(name, method)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), _product(FRAMEWORKS))
def test_all_frameworks(name: str, method: str) -> None:
    _check_framework(name, method)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), _product(OPTIMIZERS))
def test_all_optimizers(name: str, method: str) -> None:
    _check_optimizer(name, method)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("linen_batch_norm", r"examples/flax_linen\.py:\d+:\d+ \(Classifier\.__call__\), in .*flax/linen"),
        ("haiku_batch_norm", r"examples/haiku_transform\.py:\d+:\d+ \(.*forward\), in .*haiku/"),
    ],
)
def test_a_batch_norm_in_microbatches_is_refused_with_the_users_line(name: str, line: str) -> None:
    example = FRAMEWORKS[name]()
    with pytest.raises(MicrobatchError, match=rf"couples the examples of its batch at .*{line}"):
        _parallel(example, METHODS["pipeline"]).plan(*example.state, *example.batches[0])


def test_equinox_modules_are_born_where_the_plan_keeps_them() -> None:
    example = equinox_filter.build()
    step = example.train_step
    shapes = eqx.filter_eval_shape(lambda state: state, example.state)
    step.compile(*shapes, *example.batches[0])
    model = step.init(equinox_filter.Classifier, jax.random.key(0))
    structures: list[Any] = [jax.tree.structure(tree) for tree in (model, example.state[0])]
    assert structures[0] == structures[1]
    assert model.activation is jax.nn.gelu and model.dropout.inference is False
    assert model.inner.weight.sharding.num_devices == jax.device_count()
    assert jnp.array_equal(autopar.gather(model.inner.weight), example.state[0].inner.weight)


@pytest.mark.slow
def test_nnx_modules_change_in_place() -> None:
    def train_step(model: Any, optimizer: Any, metrics: Any, x: Any, y: Any) -> None:
        def loss_fn(model: Any) -> Any:
            logits = model(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=y)
        optimizer.update(model, grads)

    def run(step: Any) -> tuple[list[np.ndarray], Any]:
        example = flax_nnx.build_with_modules()
        make: Any = nnx.MultiMetric
        metrics = make(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        for batch in example.batches:
            step(*example.state, metrics, *batch)
        return _floats(autopar.gather(example.state)), metrics.compute()

    expected, metrics = run(nnx.jit(train_step))
    found, measured = run(autopar.parallelize(train_step, method=METHODS["zero"]))
    assert compare.norm([a - b for a, b in zip(found, expected, strict=True)]) <= 1e-5 * compare.norm(expected)
    assert jnp.allclose(measured["loss"], metrics["loss"], rtol=1e-5) and measured["accuracy"] == metrics["accuracy"]
