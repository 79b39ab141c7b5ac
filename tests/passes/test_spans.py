"""Spans of layers that count as alike become the same programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.method import AUTO
from autopar.passes.spans import StageSignature, stage_signatures
from autopar.passes.stage_oracle import Span
from autopar.planning.layering import Layered, Layering
from tests.equivalence.compare import either
from tests.equivalence.subjects import SUBJECTS
from tests.planned import analyse, cluster_of

LAYERS = 6


def layered(step: Any, *args: Any, m: int = 2) -> Layered:
    analysis = analyse(step, *args)
    return Layering(analysis, cluster_of(1, 8), AUTO, None).layered(m, True)


def signature(found: Layered, span: Span) -> StageSignature:
    """Of the programs that a span becomes."""
    placed = found.placed(sorted({*span} - {0, found.num_layers}))
    return stage_signatures(placed)[1 if span[0] else 0]


def spans(found: Layered) -> list[Span]:
    return [(i, j) for i in range(found.num_layers) for j in range(i + 1, found.num_layers + 1)]


# So many layers that some spans are alike, for the ends and what is next to them differ from all others.
DEPTHS = {**dict.fromkeys(SUBJECTS, 6), "moe": 12, "encoder_decoder": 16, "wide_resnet": 8, "unet": 4}


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=() if m in ("gpt_scan", "unet") else pytest.mark.slow) for m in SUBJECTS]
)
def test_alike_spans_become_the_same_programs(model: str) -> None:
    subject = SUBJECTS[model]
    config = subject.config(DEPTHS[model])
    state = jax.eval_shape(subject.model.make_init(config, either()), jax.random.key(0))
    batch = subject.model.abstract_batch(config, 8 * subject.unit)
    m = 2 if subject.max_microbatches > 1 else 1
    found = layered(subject.model.make_train_step(config, either()), state, batch, m=m)
    others = [span for span in spans(found) if found.spans.first_alike(span) != span]
    assert others
    for span in others:
        assert signature(found, span) == signature(found, found.spans.first_alike(span)), span


def chain(loss_of: Any, trained: Any = lambda name: True) -> Layered:
    """Products in a row, of which some are trained."""

    def step(params: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return loss_of({**params, **weights}, x)

        free = {name: w for name, w in params.items() if trained(name)}
        return {**params, **jax.tree.map(lambda w, g: w - 0.1 * g, free, jax.grad(loss)(free))}

    weights = {f"w{i}": jax.ShapeDtypeStruct((16, 16), jnp.float32) for i in range(LAYERS)}
    return layered(step, weights, jax.ShapeDtypeStruct((8, 16), jnp.float32))


def through(params: Any, x: Any, keep: int | None = None, again: int | None = None) -> Any:
    kept = None
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{0 if i == again else i}"])
        kept = x if i == keep else kept
    return jnp.mean(x**2 if kept is None else (x + kept) ** 2)


def alike(found: Layered, one: Span, other: Span) -> bool:
    assert found.num_layers == LAYERS
    return found.spans.first_alike(one) == found.spans.first_alike(other)


def test_layers_in_a_row_are_alike_but_for_the_ends() -> None:
    found = chain(through)
    assert alike(found, (1, 2), (4, 5))
    assert alike(found, (1, 3), (3, 5))
    assert not alike(found, (0, 1), (1, 2))
    assert not alike(found, (4, 5), (5, 6))
    assert len({found.spans.first_alike(span) for span in spans(found)}) == 3 * (LAYERS - 1)


def test_what_reaches_further_is_not_alike() -> None:
    skip = chain(lambda params, x: through(params, x, keep=2))
    assert alike(skip, (1, 2), (2, 3))
    assert not alike(skip, (2, 3), (3, 4))  # read by the last, too
    assert not alike(skip, (2, 4), (3, 5))  # which sends it and which keeps it
    tied = chain(lambda params, x: through(params, x, again=3))
    assert not alike(tied, (2, 3), (3, 4))  # its weights are those of the first
    assert not alike(tied, (1, 3), (2, 4))


def test_frozen_layers_are_not_alike_to_trained_ones() -> None:
    found = chain(through, lambda name: name > "w2")
    assert not alike(found, (1, 2), (4, 5))
    assert not alike(found, (2, 3), (3, 4))
    assert not alike(found, (2, 3), (4, 5))


def test_layers_that_read_their_slices_of_an_array_are_alike() -> None:
    """As those of a loop read their random keys; a slice that is no equal part of the array is another matter."""

    def of_slices(starts: Sequence[int]) -> Layered:
        def loss(params: Any, x: Any) -> Any:
            for i, start in enumerate(starts):
                x = jnp.tanh(x @ params[f"w{i}"]) + params["shared"][start : start + 2].sum()
            return jnp.mean(x**2)

        def step(params: Any, x: Any) -> Any:
            weights = {name: w for name, w in params.items() if name != "shared"}
            grads = jax.grad(lambda w: loss({**params, **w}, x))(weights)
            return {**params, **jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)}

        weights = {f"w{i}": jax.ShapeDtypeStruct((16, 16), jnp.float32) for i in range(LAYERS)}
        shared = jax.ShapeDtypeStruct((2 * LAYERS,), jnp.float32)
        return layered(step, {**weights, "shared": shared}, jax.ShapeDtypeStruct((8, 16), jnp.float32))

    found = of_slices(range(0, 2 * LAYERS, 2))
    assert alike(found, (2, 3), (4, 5))
    found = of_slices([0, 2, 4, 5, 6, 8])  # a layer adds what the one before it has read
    assert alike(found, (2, 3), (3, 4))
    assert not alike(found, (3, 4), (4, 5))
