"""Attention as two primitives, forward and backward: one operator to the planner, whoever computes it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from autopar.errors import UserError
from autopar.ops import blockwise, cudnn
from autopar.ops.blockwise import OPTIONAL, START, Form

attention_p = Primitive("attention")
attention_p.multiple_results = True
attention_backward_p = Primitive("attention_backward")
attention_backward_p.multiple_results = True


def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: float | None = None,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None, implementation: str | None = None,
    return_residual: bool = False,
) -> Any:  # fmt: skip
    """Scaled dot-product attention that never has all scores in memory; `jax.nn.dot_product_attention` otherwise.

    softmax(scale * query @ key.T + bias) @ value for each example and head (Vaswani et al. 2017). On GPUs cuDNN
    computes it where it can, elsewhere it is computed block by block (Dao et al. 2022), so that one script runs on a
    laptop and on a cluster. The planner knows it as one operator: examples, heads and positions can be cut.

    Args:
      query: [B, T, N, H] or [T, N, H]: examples, positions, heads, width.
      key: [B, S, K, H] or [S, K, H], where K divides N: so many query heads share one of these.
      value: like `key`.
      bias: added to the scores; broadcastable to [B, N, T, S].
      mask: which keys a query sees, bool; broadcastable to [B, N, T, S].
      scale: of the products of queries and keys; None: 1 / sqrt(H).
      is_causal: whether a query sees no keys after its own position.
      query_seq_lengths: [B], int32: how many positions of each example are queries; the results of others are zero.
      key_value_seq_lengths: [B], int32: how many positions of each example are keys.
      local_window_size: how many positions before its own, and after, a query sees; one number for both.
      implementation: "xla" is JAX's own, with an array of all scores; "cudnn" is None here, so that a step written for
        GPUs runs elsewhere, too.
      return_residual: whether to return the logarithms of the sums of the scores' exponentials, too.

    Returns:
      Like `query`; with `return_residual`, also [B, T, N] or [T, N] in the type of the keys, with no gradient.

    Raises:
      UserError: shapes or types do not fit one another, or there is no such implementation.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise UserError(f'implementation must be None, "xla" or "cudnn", but is {implementation!r}')
    if implementation == "xla":
        jax_own: Any = jax.nn.dot_product_attention
        return jax_own(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size, implementation="xla",
            return_residual=return_residual,
        )  # fmt: skip
    operands = {"query": query, "key": key, "value": value}
    arrays = {name: jnp.asarray(x) for name, x in operands.items()}
    squeezed = arrays["query"].ndim == 3
    arrays = {name: x[None] if x.ndim == 3 else x for name, x in arrays.items()}
    others = {
        name: jnp.asarray(x)
        for name, x in zip(OPTIONAL, (bias, mask, query_seq_lengths, key_value_seq_lengths), strict=True)
        if x is not None
    }
    others.update((name, _of_scores(x)) for name, x in others.items() if name in ("bias", "mask"))
    _check(arrays, others)
    left, right = (None, None) if local_window_size is None else _window(local_window_size)
    form = Form(1 / math.sqrt(arrays["query"].shape[-1]) if scale is None else float(scale), left, right)
    if is_causal:
        form = form._replace(right=0 if right is None else min(right, 0))
    result, statistics = _attention(*arrays.values(), others, form)
    if not return_residual:
        return result[0] if squeezed else result
    residual = jax.lax.stop_gradient(jnp.transpose(statistics, (0, 2, 1)).astype(arrays["key"].dtype))
    return (result[0], residual[0]) if squeezed else (result, residual)


def _of_scores(x: Any) -> Any:
    """With the dimensions of scores, from the last one on."""
    return jnp.expand_dims(x, tuple(range(4 - x.ndim))) if x.ndim < 4 else x


def _window(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check(arrays: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raises UserError where shapes or types do not fit."""
    query, key, value = arrays.values()
    told = ", ".join(f"{name} {x.dtype.name}{list(x.shape)}" for name, x in {**arrays, **others}.items())
    if any(x.ndim != 4 for x in (query, key, value)):
        raise UserError(f"dot_product_attention takes arrays of 3 or 4 dimensions, but got {told}")
    (batch, length, heads, width), (_, keys, shared, _) = query.shape, key.shape
    if key.shape[:3] != value.shape[:3] or (batch, width) != (key.shape[0], key.shape[3]):
        raise UserError(
            f"dot_product_attention takes query [B, T, N, H], key [B, S, K, H] and value [B, S, K, V], but got {told}"
        )
    if not shared or heads % shared:
        raise UserError(f"the heads of key and value must divide those of query, but got {told}")
    if not query.dtype == key.dtype == value.dtype or not jnp.issubdtype(query.dtype, jnp.floating):
        raise UserError(f"query, key and value must be of one floating type, but got {told}")
    scores = (batch, heads, length, keys)
    for name in ("bias", "mask"):
        if name in others:
            shape = others[name].shape
            if len(shape) != 4 or any(n not in (1, whole) for n, whole in zip(shape, scores, strict=True)):
                raise UserError(f"{name} must be broadcastable to {list(scores)}, but got {told}")
    if "mask" in others and others["mask"].dtype != jnp.bool_:
        raise UserError(f"mask must be bool (an additive one is a bias), but got {told}")
    for name in ("query_lengths", "key_lengths"):
        if name in others and (others[name].shape != (batch,) or others[name].dtype != jnp.int32):
            raise UserError(f"{name} must be int32[{batch}], but got {told}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(query: Any, key: Any, value: Any, others: Mapping[str, Any], form: Form) -> Any:
    return tuple(_bind(query, key, value, others, form))


def _bind(query: Any, key: Any, value: Any, others: Mapping[str, Any], form: Form) -> Any:
    return attention_p.bind(query, key, value, *ordered(others), optional=names(others), form=form)


def _forward(query: Any, key: Any, value: Any, others: Mapping[str, Any], form: Form) -> Any:
    result, statistics = _bind(query, key, value, others, form)
    return (result, statistics), (query, key, value, others, result, statistics)


def _backward(form: Form, kept: Any, gradients: Any) -> Any:
    query, key, value, others, result, statistics = kept
    given, _ = gradients  # the statistics have none
    dtypes = tuple(x.dtype for x in (query, key, value, *([others["bias"]] if "bias" in others else [])))
    found = attention_backward_p.bind(
        query, key, value, *ordered(others), result, statistics, given, optional=names(others), form=form, dtypes=dtypes
    )
    of_others = {name: found[3] if name == "bias" else None for name in others}
    return (*found[:3], of_others)


_attention.defvjp(_forward, _backward)


def names(others: Mapping[str, Any]) -> tuple[str, ...]:
    """Which optional operands there are."""
    return tuple(name for name in (*OPTIONAL, START) if name in others)


def ordered(others: Mapping[str, Any]) -> list[Any]:
    """The optional operands that there are."""
    return [others[name] for name in names(others)]


def _sizes(query: Any, key: Any, value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the result and the statistics."""
    batch, length, heads, _ = query.shape
    return (batch, length, heads, value.shape[-1]), (batch, heads, length)


def _abstract(query: Any, key: Any, value: Any, *others: Any, optional: tuple[str, ...], form: Form) -> Any:
    result, statistics = _sizes(query, key, value)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return jax.core.ShapedArray(result, query.dtype), jax.core.ShapedArray(statistics, wide)


def _abstract_backward(*operands: Any, optional: tuple[str, ...], form: Form, dtypes: Sequence[Any]) -> Any:
    wanted = operands[: 4 if "bias" in optional else 3]
    return [jax.core.ShapedArray(x.shape, dtype) for x, dtype in zip(wanted, dtypes, strict=True)]


def _compute(query: Any, key: Any, value: Any, *others: Any, optional: tuple[str, ...], form: Form) -> Any:
    return blockwise.attend(query, key, value, dict(zip(optional, others, strict=True)), form)


def _compute_backward(
    query: Any, key: Any, value: Any, *rest: Any, optional: tuple[str, ...], form: Form, dtypes: Sequence[Any]
) -> Any:
    *others, result, statistics, gradient = rest
    named = dict(zip(optional, others, strict=True))
    return blockwise.attend_backward(query, key, value, named, result, statistics, gradient, form, dtypes)


def in_one_block(primitive: str, params: Mapping[str, Any]) -> Callable[..., Any]:
    """What a primitive computes, with all scores at once: as two products around a softmax."""

    def compute(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        block, named = key.shape[1], dict(zip(params["optional"], rest, strict=False))
        if primitive == attention_p.name:
            return blockwise.attend(query, key, value, named, params["form"], block)
        result, statistics, gradient = rest[-3:]
        form, dtypes = params["form"], params["dtypes"]
        return blockwise.attend_backward(query, key, value, named, result, statistics, gradient, form, dtypes, block)

    return compute


def _compute_on_gpu(query: Any, key: Any, value: Any, *others: Any, optional: tuple[str, ...], form: Form) -> Any:
    named = dict(zip(optional, others, strict=True))
    if cudnn.why_not(query, key, value, named, form):
        return blockwise.attend(query, key, value, named, form)
    return cudnn.attend(query, key, value, named, form)


def _compute_backward_on_gpu(
    query: Any, key: Any, value: Any, *rest: Any, optional: tuple[str, ...], form: Form, dtypes: Sequence[Any]
) -> Any:
    *others, result, statistics, gradient = rest
    named = dict(zip(optional, others, strict=True))
    way = blockwise if cudnn.why_not(query, key, value, named, form) else cudnn
    return way.attend_backward(query, key, value, named, result, statistics, gradient, form, dtypes)


for primitive, static, abstract, plain, on_gpu in (
    (attention_p, ("optional", "form"), _abstract, _compute, _compute_on_gpu),
    (
        attention_backward_p, ("optional", "form", "dtypes"), _abstract_backward, _compute_backward,
        _compute_backward_on_gpu,
    ),
):  # fmt: skip
    primitive.def_abstract_eval(abstract)
    primitive.def_impl(jax.jit(plain, static_argnames=static))
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    mlir.register_lowering(primitive, mlir.lower_fun(on_gpu, multiple_results=True), platform="cuda")


def _batched(primitive: Primitive, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """`jax.vmap`: what is mapped over becomes a part of the examples."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    apart = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    batch = apart[0].shape[1]
    merged = [jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:]) for x in apart]
    results = [x.reshape(size, batch, *x.shape[1:]) for x in primitive.bind(*merged, **params)]
    if primitive is attention_backward_p and "bias" in params["optional"] and apart[3].shape[1] < batch:
        results[3] = results[3].sum(1, keepdims=True)  # one bias for all examples
    return results, [0] * len(results)


batching.primitive_batchers[attention_p] = functools.partial(_batched, attention_p)
batching.primitive_batchers[attention_backward_p] = functools.partial(_batched, attention_backward_p)
