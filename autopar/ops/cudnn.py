"""Attention by cuDNN's fused kernels, through what JAX has for it.

JAX's own primitives are bound here, below its public function, which asks for a GPU while it is traced: programs are
compiled for GPUs that are not there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

from autopar.ops.blockwise import START, Form

_WIDEST = 128  # of a head, on every GPU that has such kernels
_WIDEST_ON_HOPPER = 256
_HOPPER = (9, 0)


def why_not(query: Any, key: Any, value: Any, others: Mapping[str, Any], form: Form) -> str:
    """Why cuDNN does not compute this, in words; empty if it does.

    These are the limits that JAX checks (`check_is_flash_attention`), for the forward and the backward pass alike.
    """
    width = query.shape[3]
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"it takes float16 and bfloat16, not {query.dtype}"
    if value.shape[3] != width:
        return f"heads of {width} and values of {value.shape[3]} differ in width"
    if width % 8 or width > (_WIDEST_ON_HOPPER if _has_hopper() else _WIDEST):
        return f"heads are {width} wide: it takes multiples of 8 up to {_WIDEST}, from Hopper on {_WIDEST_ON_HOPPER}"
    if form.right not in (None, 0) or (form.right is None and form.left is not None):
        return "it has no window to the right, and one to the left only where attention is causal"
    if START in others and (len(others) > 1 or form != Form(form.scale, None, 0)):
        return "of a piece of the positions it takes neither bias, mask and lengths nor windows"
    if {"bias", "mask"} & others.keys() and (query.shape[1] % 2 or key.shape[1] % 2):
        return "with a bias or a mask it takes even numbers of positions"
    return ""


def _has_hopper() -> bool:
    """Whether all GPUs are of compute capability 9.0 or above; where there are none, those of a target are."""
    if jax.default_backend() != "gpu":
        return True
    capabilities = (str(device.compute_capability).split(".") for device in jax.local_devices(backend="gpu"))
    return all(tuple(map(int, numbers)) >= _HOPPER for numbers in capabilities)


def attend(query: Any, key: Any, value: Any, others: Mapping[str, Any], form: Form) -> Any:
    """As `blockwise.attend`."""
    if START in others:
        return _attend_from(query, key, value, others[START], form)
    operands, params = _call(query, key, value, others, form)
    return fused._dot_product_attention_fwd_p.bind(*operands, is_training=True, **params)


def attend_backward(
    query: Any, key: Any, value: Any, others: Mapping[str, Any], result: Any, statistics: Any, gradient: Any,
    form: Form, dtypes: Sequence[Any],
) -> Any:  # fmt: skip
    """As `blockwise.attend_backward`."""
    if START in others:
        return _attend_from_backward(query, key, value, others[START], result, statistics, gradient, form, dtypes)
    operands, params = _call(query, key, value, others, form)
    found = fused._dot_product_attention_bwd_p.bind(*operands, statistics, result, gradient, **params)
    bias = others.get("bias")
    gradients = [*found[:3]]
    if bias is not None:
        sums = [d for d in range(4) if bias.shape[d] == 1 and found[3].shape[d] != 1]
        gradients.append(found[3].sum(sums, keepdims=True) if sums else found[3])
    return [x.astype(dtype) for x, dtype in zip(gradients, dtypes, strict=True)]


def _attend_from(query: Any, key: Any, value: Any, start: Any, form: Form) -> Any:
    """Of the queries from one position on, under a causal mask: of all keys before them, and of those beside them.

    cuDNN skips the keys that lengths exclude, so that no piece computes more than it sees.
    """
    before, beside = _parts(query, key, value, start, form)
    (first, sums), (second, more) = attend(*before), attend(*beside)
    sums = jnp.where(start > 0, sums, -jnp.inf)
    both = jnp.logaddexp(sums, more)

    def weighed(x: Any, sums: Any) -> Any:
        weights = jnp.transpose(jnp.exp(sums - both), (0, 2, 1))[..., None]
        return jnp.where(weights > 0, weights * x.astype(weights.dtype), 0.0)

    return (weighed(first, sums) + weighed(second, more)).astype(query.dtype), both


def _attend_from_backward(
    query: Any, key: Any, value: Any, start: Any, result: Any, statistics: Any, gradient: Any, form: Form,
    dtypes: Sequence[Any],
) -> Any:  # fmt: skip
    """With the result and the statistics of both parts, each gives its part of the gradients."""
    before, beside = _parts(query, key, value, start, form)
    rest = result, statistics, gradient
    of_before, of_beside = (attend_backward(*part[:4], *rest, part[4], dtypes) for part in (before, beside))
    seen = (jnp.arange(key.shape[1]) < start)[:, None, None]
    of_query, of_key, of_value = (
        jnp.where(is_seen, x, jnp.zeros_like(x)) for is_seen, x in zip((start > 0, seen, seen), of_before, strict=True)
    )

    def added(x: Any, more: Any) -> Any:
        own = jax.lax.dynamic_slice_in_dim(x, start, more.shape[1], 1)
        return jax.lax.dynamic_update_slice_in_dim(x, own + more, start, 1)

    return [of_query + of_beside[0], added(of_key, of_beside[1]), added(of_value, of_beside[2])]


_Operands = tuple[Any, Any, Any, Mapping[str, Any], Form]  # of `attend`


def _parts(query: Any, key: Any, value: Any, start: Any, form: Form) -> tuple[_Operands, _Operands]:
    """What `attend` takes for the keys before the queries, and for those beside them."""
    batch, length = query.shape[:2]
    lengths = {"key_lengths": jnp.full(batch, start, jnp.int32)}
    own_key, own_value = (jax.lax.dynamic_slice_in_dim(x, start, length, 1) for x in (key, value))
    return (query, key, value, lengths, Form(form.scale)), (query, own_key, own_value, {}, form)


def _call(query: Any, key: Any, value: Any, others: Mapping[str, Any], form: Form) -> tuple[list[Any], dict[str, Any]]:
    """The operands and parameters of JAX's primitives."""
    none = jnp.zeros(0, query.dtype)
    bias = fused.combine_bias_and_mask(others.get("bias"), others.get("mask"), query.dtype)
    lengths = [none, none]
    padded = {"query_lengths", "key_lengths"} & others.keys()
    if padded:
        batch, length, keys = query.shape[0], query.shape[1], key.shape[1]
        lengths = [
            others.get("query_lengths", jnp.full(batch, length, jnp.int32)),
            others.get("key_lengths", jnp.full(batch, keys, jnp.int32)),
        ]
    if bias is not None:  # positions are never broadcast
        bias = jnp.broadcast_to(bias.astype(query.dtype), (*bias.shape[:2], query.shape[1], key.shape[1]))
    kinds = {
        (False, False): fused.MaskType.NO_MASK,
        (False, True): fused.MaskType.PADDING,
        (True, False): fused.MaskType.CAUSAL,
        (True, True): fused.MaskType.PADDING_CAUSAL,
    }
    params = {
        "scale": form.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, "bias" in others),
        "mask_type": kinds[form.right == 0, bool(padded)],
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": None if form.left is None else form.left + 1,
    }
    operands = [query, key, value, none if bias is None else bias, *lengths, none, none, none, none]
    return operands, params
