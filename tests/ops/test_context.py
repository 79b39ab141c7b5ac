"""Attention whose positions are cut: equal to one device in every way of sending, and priced as it is compiled."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.compiling import compiler
from autopar.ir.context import ContextParallel, halves_to
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.ops import blockwise, cudnn
from autopar.ops.attention import attention_backward_p, attention_p
from autopar.ops.blockwise import START, Form
from autopar.passes.rules.table import rule_of
from tests.h100 import h100_devices, needs_cuda_compiler
from tests.models import sgd, sgd_state
from tests.ops.test_attention import close, floats
from tests.passes.rules.harness import Application, compute_on_devices, last_application
from tests.planned import Planned, cluster_of, plan_step
from tests.test_collectives_end_to_end import DEAR_LINKS, agree

BATCH, LENGTH, WIDTH = 2, 16, 4
CAUSAL, WINDOW, FULL = Form(0.3, None, 0), Form(0.3, 2, 0), Form(0.3)


def others(heads: int, names: tuple[str, ...], *, varying: bool) -> tuple[Any, ...]:
    """Optional operands; whether the bias and the mask differ from query to query and from head to head."""
    rng = np.random.default_rng(3)
    shape = (1, heads, LENGTH, LENGTH) if varying else (BATCH, 1, 1, LENGTH)
    made = {
        "bias": floats(*shape),
        "mask": jnp.asarray(rng.random(shape) > 0.3),
        "query_lengths": jnp.asarray([LENGTH, 5], jnp.int32),
        "key_lengths": jnp.asarray([9, LENGTH], jnp.int32),
    }
    return tuple(made[name] for name in names)


def both_passes(
    heads: int, shared: int, form: Form, names: tuple[str, ...] = (), *, varying: bool = False
) -> tuple[Application, Application]:
    rest = others(heads, names, varying=varying)
    operands = (
        floats(BATCH, LENGTH, heads, WIDTH),
        *(floats(BATCH, LENGTH, shared, WIDTH, seed=seed) for seed in (1, 2)),
        *rest,
    )
    forward = last_application(functools.partial(attention_p.bind, optional=names, form=form), *operands)
    dtypes = (jnp.float32,) * (4 if "bias" in names else 3)
    gradient = functools.partial(attention_backward_p.bind, optional=names, form=form, dtypes=dtypes)
    given = floats(BATCH, LENGTH, heads, WIDTH, seed=5)
    return forward, last_application(gradient, *operands, *forward.results, given)


def context_of(application: Application) -> ContextParallel:
    (context,) = rule_of(application.equation).contexts
    return context


EVERY = ("bias", "mask", "query_lengths", "key_lengths")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pieces", [2, 4, 8])
@pytest.mark.parametrize(
    ("heads", "shared", "form", "names", "varying", "exchanges"),
    [
        (8, 8, CAUSAL, (), False, True),
        (8, 8, FULL, EVERY, False, True),
        (3, 1, CAUSAL, (), False, False),
        (3, 1, WINDOW, (), False, False),
        (3, 1, FULL, ("key_lengths",), False, False),
        (8, 8, CAUSAL, EVERY, True, False),
        (3, 1, CAUSAL, EVERY, False, False),
        (2, 1, FULL, ("bias", "mask"), True, False),
    ],
)
def test_pieces_of_positions_are_the_whole(
    heads: int, shared: int, form: Form, names: tuple[str, ...], varying: bool, exchanges: bool, pieces: int
) -> None:
    for application in both_passes(heads, shared, form, names, varying=varying):
        rule, context = rule_of(application.equation), context_of(application)
        # Between two pieces, keys and values are gathered for as few bytes as heads are exchanged for.
        assert pieces == 2 or context.exchanges_heads({context.factor: pieces}) == exchanges
        close(compute_on_devices(application, rule, {context.factor: pieces}), application.results)


def test_positions_and_heads_are_cut_together() -> None:
    """Over two devices, eight shared heads leave enough to exchange between four pieces of positions, four do not."""
    for shared, exchanges in ((8, True), (4, False)):
        for application in both_passes(8, shared, CAUSAL):
            rule, context = rule_of(application.equation), context_of(application)
            (of_heads,) = context.shared.held
            split = {of_heads: 2, context.factor: 4}
            assert context.exchanges_heads(split) == exchanges
            close(compute_on_devices(application, rule, split), application.results)


def test_odd_numbers_of_positions() -> None:
    """Halves of three positions are two and one; one position has no halves."""
    operands = floats(2, 12, 3, 4), floats(2, 12, 1, 4), floats(2, 12, 1, 4, seed=1)
    application = last_application(functools.partial(attention_p.bind, optional=(), form=CAUSAL), *operands)
    context = context_of(application)
    for pieces, halves in ((4, (2, 1)), (6, (1, 1)), (12, (1, 0))):
        assert context.halves({context.factor: pieces}) == halves
    close(compute_on_devices(application, rule_of(application.equation), {context.factor: 4}), application.results)


def test_other_numbers_of_keys() -> None:
    """Nothing is sent where the keys are others than the queries: they are whole, and their gradients partial sums."""
    operands = floats(2, 8, 4, 4), floats(2, 6, 2, 4), floats(2, 6, 2, 4, seed=1)
    forward = last_application(functools.partial(attention_p.bind, optional=(), form=CAUSAL), *operands)
    gradient = functools.partial(attention_backward_p.bind, optional=(), form=CAUSAL, dtypes=(jnp.float32,) * 3)
    backward = last_application(gradient, *operands, *forward.results, floats(2, 8, 4, 4, seed=2))
    for application in (forward, backward):
        rule = rule_of(application.equation)
        (length,) = rule.inputs[0][1]
        assert not rule.communicates(length)
        close(compute_on_devices(application, rule, {length: 4}), application.results)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_each_piece_has_an_early_and_a_late_part(count: int) -> None:
    parts: dict[int, list[int]] = {i: [] for i in range(count)}
    for half, pairs in enumerate(halves_to(count)):
        assert sorted(j for _, j in pairs) == [*range(count)]  # a permutation
        for i, j in pairs:
            parts[j].append(2 * i + half)
    assert all(sorted(found) == sorted((i, 2 * count - 1 - i)) for i, found in parts.items())
    assert all([part % 2 for part in found] == [0, 1] for found in parts.values())


@pytest.mark.parametrize("start", [0, 4, 8])
def test_what_cudnn_computes_of_a_piece(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two calls, each computed block by block here; the first sees nothing if nothing is before the queries."""
    for name in ("attend", "attend_backward"):
        ours, plain = getattr(cudnn, name), getattr(blockwise, name)

        def call(*operands: Any, ours: Any = ours, plain: Any = plain) -> Any:
            return (ours if START in operands[3] else plain)(*operands)

        monkeypatch.setattr(cudnn, name, call)
    query, given = floats(2, 4, 4, 8), floats(2, 4, 4, 8, seed=1)
    key, value = (floats(2, 12, 2, 8, seed=seed) for seed in (2, 3))
    named = {START: jnp.int32(start)}
    expected = blockwise.attend(query, key, value, named, CAUSAL)
    close(cudnn.attend(query, key, value, named, CAUSAL), expected)
    rest = *expected, given, CAUSAL, (jnp.float32,) * 3
    close(
        cudnn.attend_backward(query, key, value, named, *rest),
        list(blockwise.attend_backward(query, key, value, named, *rest)),
    )


SIZE = 16


def make_step(
    heads: int, shared: int, form: str, *, scan: bool, dtype: Any = jnp.float32, positions: int = 64,
    width: int = SIZE,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Two layers of one long example: norm, attention, MLP; only positions and heads can be cut."""
    layer = {
        "q": floats(width, heads * 8, dtype=dtype) / 4,
        "k": floats(width, shared * 8, seed=1, dtype=dtype) / 4,
        "v": floats(width, shared * 8, seed=2, dtype=dtype) / 4,
        "o": floats(heads * 8, width, seed=3, dtype=dtype) / 4,
        "up": floats(width, 4 * width, seed=4, dtype=dtype) / 4,
        "down": floats(4 * width, width, seed=5, dtype=dtype) / 8,
    }
    layers = [layer, jax.tree.map(lambda x: x[::-1], layer)]
    params: Any = jax.tree.map(lambda *xs: jnp.stack(xs), *layers) if scan else layers

    def apply(x: Any, p: Any) -> Any:
        wide = x.astype(jnp.float32)
        h = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)
        query, key, value = ((h @ p[name]).reshape(*h.shape[:2], -1, 8) for name in "qkv")
        result = autopar.dot_product_attention(
            query, key, value, is_causal=form != "full", local_window_size=(5, 0) if form == "window" else None
        )
        x = x + result.reshape(*h.shape[:2], -1) @ p["o"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (apply(x, p), None), x, params)
        else:
            for p in params:
                x = apply(x, p)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return sgd(loss_fn), sgd_state(params), {"x": floats(1, positions, width, seed=9, dtype=dtype)}


def planned(made: tuple[Any, Any, Any], cluster: Cluster) -> Planned:
    step, state, batch = made
    return plan_step(step, (state, batch), cluster, Method("free", 1, None, (8,)), 1)


def kinds_of(found: Planned) -> set[str]:
    """Of the collectives that belong to attention, or to a loop with one."""
    return {c.kind for local in found.lowered.programs for op in local.ops for c in getattr(op, "combined", ())}


CASES = [
    (*heads, form, shape, scan)
    for heads, form, shape, scan in itertools.product(
        [(3, 1), (8, 8), (4, 2)], ["causal", "full", "window"], [(8,), (2, 4)], [False, True]
    )
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("heads", "shared", "form", "shape", "scan"),
    [pytest.param(*case, marks=[] if i % 5 == 0 else [pytest.mark.slow]) for i, case in enumerate(CASES)],
)
def test_long_sequences_are_those_of_one_device(
    heads: int, shared: int, form: str, shape: tuple[int, ...], scan: bool
) -> None:
    step, state, batch = make_step(heads, shared, form, scan=scan)
    method = Method("free", 1, None, shape)
    actual = jax.tree.map(autopar.gather, autopar.parallelize(step, method=method)(state, batch))
    close(actual, jax.jit(step)(state, batch), 5e-5)


@pytest.mark.parametrize(("heads", "shared"), [(3, 1), (8, 8)])
def test_priced_is_lowered_is_compiled(heads: int, shared: int) -> None:
    """In loops: outside of them XLA for CPUs sends once what both passes send, since it drops the fence between.

    The sequence is so long, and the layers so wide, that heads and hidden units are not cut instead.
    """
    found = planned(make_step(heads, shared, "causal", scan=True, positions=2048, width=128), cluster_of(1, 8))
    assert kinds_of(found) >= ({"all_to_all"} if shared == 8 else {"permute", "all_gather", "reduce_scatter"})
    worker = found.build(jax.devices())
    agree(found, worker.sources, worker.programs)


@pytest.mark.sampled(3)
@needs_cuda_compiler
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(("heads", "shared"), [(3, 1), (8, 8)])
def test_priced_is_compiled_for_h100(heads: int, shared: int, scan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "Worker", lambda sources, *_: sources)
    found = planned(make_step(heads, shared, "causal", scan=scan, dtype=jnp.bfloat16), DEAR_LINKS)
    sources: Any = found.build(h100_devices(8))
    texts = [source.lower() for source in sources]
    agree(found, sources, [text.compile() for text in texts], cpu=False)
    assert sum(text.as_text().count("__cudnn$fmha") for text in texts) >= 2
