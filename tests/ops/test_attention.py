"""Fused attention: equal to `jax.nn.dot_product_attention`, on one device and cut, and cuDNN's on GPUs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import recipes
from autopar.cost_model.attention import attention_share
from autopar.errors import UserError
from autopar.ir.mesh import Attention
from autopar.ops import blockwise
from autopar.ops.blockwise import Form
from autopar.passes.rules.attention import seen_pairs
from tests.h100 import h100_devices, needs_cuda_compiler


def floats(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Arrays one by one, relative to the largest number of each, or to one."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        wide = np.asarray(y, np.float64)
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        limit = tolerance * max(1.0, np.abs(wide).max())
        np.testing.assert_allclose(np.asarray(x, np.float64), wide, rtol=0, atol=limit)


Options = dict[str, Any]


@st.composite
def calls(draw: Any) -> tuple[tuple[Any, ...], Options]:
    """Operands, the bias last if there is one, and keyword arguments."""
    batch, length, keys = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 9))
    shared, each = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 3)]))
    heads, width = shared * each, 4
    seed = draw(st.integers(0, 9))
    operands: tuple[Any, ...] = (
        floats(batch, length, heads, width, seed=seed),
        floats(batch, keys, shared, width, seed=seed + 1),
        floats(batch, keys, shared, width, seed=seed + 2),
    )
    rng = np.random.default_rng(seed)

    def of_scores() -> tuple[int, ...]:
        return tuple(draw(st.sampled_from([1, n])) for n in (batch, heads, length, keys))

    options: Options = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["local_window_size"] = draw(st.sampled_from([1, (2, 0), (0, 3)]))
    if draw(st.booleans()):
        operands += (floats(*of_scores(), seed=seed + 3),)
    if draw(st.booleans()):
        options["mask"] = jnp.asarray(rng.random(of_scores()) > 0.3)
    if draw(st.booleans()):
        options["query_seq_lengths"] = jnp.asarray(rng.integers(0, length + 1, batch), jnp.int32)
    if draw(st.booleans()):
        options["key_value_seq_lengths"] = jnp.asarray(rng.integers(0, keys + 1, batch), jnp.int32)
    return operands, options


def value_and_gradients(function: Callable[..., Any], operands: tuple[Any, ...], options: Options) -> Any:
    def loss_fn(*operands: Any) -> Any:
        result = function(*operands, **options)
        weights = 1.0 + jnp.arange(result.size, dtype=jnp.float32).reshape(result.shape) / result.size
        return jnp.sum(jnp.sin(result.astype(jnp.float32)) * weights), result

    # As one program: most of the time goes into compiling.
    return jax.jit(jax.value_and_grad(loss_fn, argnums=tuple(range(len(operands))), has_aux=True))(*operands)


@settings(max_examples=25)
@given(calls(), st.sampled_from([2, 3, 512]))
def test_it_is_the_attention_of_jax(call: Any, block: int) -> None:
    operands, options = call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_BLOCK", block)
        actual = value_and_gradients(autopar.dot_product_attention, operands, options)
    close(actual, value_and_gradients(jax.nn.dot_product_attention, operands, options))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype: Any) -> None:
    operands = tuple(floats(2, 9, 4, 8, seed=i, dtype=dtype) for i in range(3))
    actual = value_and_gradients(autopar.dot_product_attention, operands, {"is_causal": True})
    exact = tuple(x.astype(jnp.float32) for x in operands)
    expected = value_and_gradients(jax.nn.dot_product_attention, exact, {"is_causal": True})
    assert all(x.dtype == dtype for x in (actual[0][1], *actual[1]))
    close(jax.tree.map(lambda x: x.astype(jnp.float32), actual), expected, 1e-2)


def test_what_is_left_over_besides_the_result() -> None:
    operands = floats(2, 5, 4, 3), floats(2, 6, 2, 3), floats(2, 6, 2, 3, seed=1)
    for operand in (operands, tuple(x[0] for x in operands)):
        actual = autopar.dot_product_attention(*operand, return_residual=True)
        close(actual, jax.nn.dot_product_attention(*operand, return_residual=True))


@pytest.mark.parametrize("shape", [(6,), (5, 6), (4, 1, 6), (4, 5, 6)])
def test_biases_and_masks_of_fewer_dimensions(shape: tuple[int, ...]) -> None:
    operands = floats(2, 5, 4, 3), floats(2, 6, 2, 3), floats(2, 6, 2, 3, seed=1)
    given = {"bias": floats(*shape), "mask": floats(*shape, seed=2) > -1}
    close(autopar.dot_product_attention(*operands, **given), jax.nn.dot_product_attention(*operands, **given))
    one = tuple(x[0] for x in operands)
    close(autopar.dot_product_attention(*one, **given), jax.nn.dot_product_attention(*one, **given))


def test_the_implementation_may_be_named() -> None:
    operands = floats(2, 5, 4, 3), floats(2, 6, 2, 3), floats(2, 6, 2, 3, seed=1)
    expected = jax.nn.dot_product_attention(*operands, is_causal=True)
    for implementation in (None, "xla", "cudnn"):
        close(autopar.dot_product_attention(*operands, is_causal=True, implementation=implementation), expected)

    def primitives(implementation: str | None) -> set[str]:
        def attention(*operands: Any) -> Any:
            return autopar.dot_product_attention(*operands, implementation=implementation)

        return {eqn.primitive.name for eqn in jax.make_jaxpr(attention)(*operands).eqns}

    assert "attention" not in primitives("xla")
    assert primitives("cudnn") == primitives(None)
    with pytest.raises(UserError, match="must be None"):
        autopar.dot_product_attention(*operands, implementation="flash")


def test_examples_mapped_over() -> None:
    """One bias for all that is mapped over, and for all examples; its gradient is a sum over both."""
    operands = floats(3, 2, 5, 4, 3), floats(3, 2, 6, 2, 3), floats(3, 2, 6, 2, 3, seed=1)
    bias = floats(1, 4, 5, 6)

    def gradients(function: Callable[..., Any]) -> Any:
        def loss_fn(query: Any, bias: Any) -> Any:
            mapped: Any = jax.vmap(lambda q, k, v: function(q, k, v, bias, is_causal=True))
            return jnp.sum(jnp.sin(mapped(query, *operands[1:])))

        return jax.jit(jax.grad(loss_fn, argnums=(0, 1)))(operands[0], bias)

    close(gradients(autopar.dot_product_attention), gradients(jax.nn.dot_product_attention))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query": floats(2, 5)}, "3 or 4 dimensions"),
        ({"key": floats(3, 6, 2, 3)}, r"query \[B, T, N, H\]"),
        ({"value": floats(2, 7, 2, 3)}, r"value \[B, S, K, V\]"),
        ({"query": floats(2, 5, 3, 3)}, "must divide those of query"),
        ({"query": floats(2, 5, 4, 3, dtype=jnp.bfloat16)}, "one floating type"),
        ({"bias": floats(2, 3, 5, 6)}, r"broadcastable to \[2, 4, 5, 6\]"),
        ({"mask": floats(1, 1, 5, 6)}, "mask must be bool"),
        ({"key_value_seq_lengths": jnp.ones(3, jnp.int32)}, r"int32\[2\]"),
    ],
)
def test_operands_that_do_not_fit(changed: Options, words: str) -> None:
    operands = {"query": floats(2, 5, 4, 3), "key": floats(2, 6, 2, 3), "value": floats(2, 6, 2, 3)}
    with pytest.raises(UserError, match=words):
        autopar.dot_product_attention(**{**operands, **changed})


HEADS, WIDTH, LENGTH = 8, 8, 12


def make_params(shared: int, dtype: Any = jnp.float32) -> Any:
    layer = {
        "q": floats(16, HEADS * WIDTH, dtype=dtype) / 4,
        "k": floats(16, shared * WIDTH, seed=1, dtype=dtype) / 4,
        "v": floats(16, shared * WIDTH, seed=2, dtype=dtype) / 4,
        "o": floats(HEADS * WIDTH, 16, seed=3, dtype=dtype) / 4,
        "bias": floats(1, HEADS, LENGTH, LENGTH, seed=4, dtype=dtype),
    }
    return [layer, jax.tree.map(lambda x: x[::-1], layer)]


def make_step(attention: Callable[..., Any], shared: int, **options: Any) -> Callable[..., Any]:
    """Two layers, trained by gradient descent."""

    def layer(x: Any, params: Any, lengths: Any) -> Any:
        batch = x.shape[0]
        query = (x @ params["q"]).reshape(batch, LENGTH, HEADS, WIDTH)
        key, value = ((x @ params[name]).reshape(batch, LENGTH, shared, WIDTH) for name in "kv")
        others = dict(options)
        if others.pop("biased", False):
            others["bias"] = params["bias"]
        if others.pop("by_length", False):
            others["key_value_seq_lengths"] = lengths
        result = attention(query, key, value, is_causal=True, **others)
        return x + result.reshape(batch, LENGTH, HEADS * WIDTH) @ params["o"]

    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            x, lengths = batch
            for each in params:
                x = layer(x, each, lengths)
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, gradients), loss

    return step


def make_batch(dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(5)
    return floats(16, LENGTH, 16, dtype=dtype), jnp.asarray(rng.integers(1, LENGTH + 1, 16), jnp.int32)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shared", [8, 2, 1])
@pytest.mark.parametrize(
    "method",
    [recipes.auto(), recipes.zero(3, 2), recipes.megatron(2, 4, 1, 2), recipes.megatron(2, 2, 2, 4)],
    ids=lambda method: method.name,
)
def test_cut_attention_is_that_of_one_device(method: Any, shared: int) -> None:
    step = make_step(autopar.dot_product_attention, shared, biased=True, by_length=True)
    params, batch = make_params(shared), make_batch()
    actual = jax.tree.map(autopar.gather, autopar.parallelize(step, method=method)(params, batch))
    close(actual, jax.jit(step)(params, batch))


def test_heads_are_cut() -> None:
    """All operands of attention are in pieces: nothing is gathered for it."""
    step = make_step(autopar.dot_product_attention, 8)
    traced = autopar.parallelize(step, method=recipes.megatron(1, 8, 1, 1)).trace(make_params(8), make_batch())
    text = "".join(traced.plan().as_text().values())
    calls = [line for line in text.splitlines() if "= attention" in line]
    assert len(calls) == 4
    assert all(line.count("[-,-,y,-]") >= 3 for line in calls)
    gathered = [before for before, line in itertools.pairwise(text.splitlines()) if "all_gather" in line]
    assert all("float32[16,12,16]" in line for line in gathered)  # what goes from layer to layer


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"biased": True}, {"by_length": True}, {"local_window_size": (3, 0)}], ids=str)
def test_calls_of_cudnn_run_without_a_gpu(options: Options) -> None:
    """`implementation="cudnn"` traces where there is neither, and is attention block by block on CPUs."""
    bfloat16 = jnp.bfloat16
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    params, batch = make_params(2, bfloat16), make_batch(bfloat16)
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.make_jaxpr(make_step(cudnn, 2, **options))(params, batch)
    parallel = autopar.parallelize(make_step(cudnn, 2, **options), method=recipes.megatron(2, 4, 1, 2))
    actual = jax.tree.map(autopar.gather, parallel(params, batch))
    expected = jax.jit(make_step(jax.nn.dot_product_attention, 2, **options))(params, batch)
    close(actual, expected, 2e-2)
    with pytest.raises(RuntimeError, match="cuDNN"):  # as before
        jax.make_jaxpr(make_step(cudnn, 2, **options))(params, batch)


@given(st.integers(1, 9), st.integers(1, 9), st.none() | st.integers(0, 4), st.none() | st.integers(0, 4))
def test_pairs_that_are_seen(length: int, keys: int, left: int | None, right: int | None) -> None:
    def sees(q: int, k: int) -> bool:
        return (right is None or k <= q + right) and (left is None or k >= q - left)

    expected = sum(sees(q, k) for q in range(length) for k in range(keys))
    assert seen_pairs(Form(1.0, left, right), length, keys) == expected


def test_speed_of_attention() -> None:
    """What was published is given back; between it nothing jumps, and the backward pass is slower."""
    assert attention_share(Attention(4096, True, 128, False)) == pytest.approx(518 / 989.4)
    assert attention_share(Attention(2048, False, 128, True)) == pytest.approx(465 / 989.4)
    assert attention_share(Attention(16384, False, 64, False)) == pytest.approx(413 / 989.4)
    assert attention_share(Attention(1024, True, 256, False)) == pytest.approx(391 / 989.4)
    for masked in (False, True):
        shares = [attention_share(Attention(keys, masked, 96, True)) for keys in np.geomspace(16, 1 << 20, 200)]
        assert all(0 < share < 0.6 for share in shares)
        assert max(b / a for a, b in itertools.pairwise(shares)) < 1.1


@needs_cuda_compiler
@pytest.mark.parametrize(
    ("dtype", "options", "calls"),
    [
        (jnp.bfloat16, {}, 4),
        (jnp.bfloat16, {"biased": True, "by_length": True}, 4),
        (jnp.bfloat16, {"local_window_size": (3, 0)}, 4),
        (jnp.bfloat16, {"local_window_size": (3, 1)}, 4),  # of a causal mask nothing is to the right
        (jnp.float32, {}, 0),
    ],
    ids=str,
)
def test_gpus_run_cudnn_where_it_can(dtype: Any, options: Options, calls: int) -> None:
    """A call each way for each layer; else it is computed block by block there, too."""
    sharding = jax.sharding.SingleDeviceSharding(h100_devices(1)[0])
    arrays = make_params(2, dtype), make_batch(dtype)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)
    step = make_step(autopar.dot_product_attention, 2, **options)
    assert jax.jit(step).lower(*given).as_text().count("__cudnn$fmha") == calls


@needs_cuda_compiler
def test_memory_of_fused_attention_is_that_of_xla() -> None:
    """Statistics instead of scores: 12.6 MB instead of 200 MB an array of scores."""
    length, heads, width = 2048, 12, 64
    bfloat16 = jnp.bfloat16

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            h = x
            for weights in params:
                query, key, value = jnp.split((h @ weights["qkv"]).reshape(*h.shape[:2], 3 * heads, width), 3, axis=2)
                result = autopar.dot_product_attention(query, key, value, is_causal=True)
                h = h + result.reshape(h.shape) @ weights["o"]
            return jnp.mean(jnp.square(h.astype(jnp.float32)))

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    size = heads * width
    layer = {"qkv": jax.ShapeDtypeStruct((size, 3 * size), bfloat16), "o": jax.ShapeDtypeStruct((size, size), bfloat16)}
    batch = jax.ShapeDtypeStruct((16, length, size), bfloat16)
    cluster = autopar.load_preset("dgx-h100", num_hosts=1, devices_per_host=4)
    parallel = autopar.parallelize(step, method=recipes.data_parallel(1))
    plan = parallel.trace([layer] * 4, batch).plan(cluster=cluster)
    (program,) = plan.verify_with_xla().programs
    assert abs(program.memory_error) < 0.1
    assert plan.peak_memory < 16 / 4 * heads * length**2 * 2  # of one layer's scores
