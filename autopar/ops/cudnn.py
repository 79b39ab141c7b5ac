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

from autopar.ops.blockwise import Form

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
    operands, params = _call(query, key, value, others, form)
    return fused._dot_product_attention_fwd_p.bind(*operands, is_training=True, **params)


def attend_backward(
    query: Any, key: Any, value: Any, others: Mapping[str, Any], result: Any, statistics: Any, gradient: Any,
    form: Form, dtypes: Sequence[Any],
) -> Any:  # fmt: skip
    """As `blockwise.attend_backward`."""
    operands, params = _call(query, key, value, others, form)
    found = fused._dot_product_attention_bwd_p.bind(*operands, statistics, result, gradient, **params)
    bias = others.get("bias")
    gradients = [*found[:3]]
    if bias is not None:
        sums = [d for d in range(4) if bias.shape[d] == 1 and found[3].shape[d] != 1]
        gradients.append(found[3].sum(sums, keepdims=True) if sums else found[3])
    return [x.astype(dtype) for x, dtype in zip(gradients, dtypes, strict=True)]


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
