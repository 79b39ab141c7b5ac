"""Calls of JAX's attention by cuDNN, as the operator that the planner knows.

`jax.nn.dot_product_attention(.., implementation="cudnn")` asks for cuDNN and a GPU while it is traced. What is planned
for GPUs that are not there is traced as if they were, and what runs on other devices is computed block by block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

from autopar.ops.attention import attention_backward_p, attention_p
from autopar.ops.blockwise import OPTIONAL, Form

_VERSION = 91100  # of cuDNN, where there is none: the oldest that takes all GPUs of today
_OTHERS = 7  # operands after the keys and values: bias, lengths, offsets of packed examples, tables of pages


@contextlib.contextmanager
def as_if_on_gpu() -> Iterator[None]:
    """Where JAX finds no cuDNN, let it take one and a recent GPU for granted."""
    try:
        fused.check_cudnn_version()
    except RuntimeError:
        answers = {
            "check_cudnn_version": lambda: _VERSION,
            "check_compute_capability": lambda capability: True,
            "is_cuda_compute_capability_equal": lambda capability: False,
        }
        asked = {name: getattr(fused, name) for name in answers}
        try:
            vars(fused).update(answers)
            yield
        finally:
            vars(fused).update(asked)
    else:
        yield


def forward(params: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> Callable[..., Any] | None:
    """A function that does what the primitive does, by ours; None if ours does not do it."""
    call = _read(params, shapes)
    if call is None:
        return None

    def run(*operands: Any) -> Any:
        results = attention_p.bind(*call.operands(operands), **call.params)
        found = [call.turned(results[0]), results[1].astype(jnp.float32)]
        return found if params["is_training"] else found[:1]

    return run


def backward(params: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> Callable[..., Any] | None:
    """The same for the gradients."""
    call = _read(params, shapes)
    if call is None:
        return None

    def run(*operands: Any) -> Any:
        statistics, result, gradient = operands[3 + _OTHERS :]
        first = call.operands(operands)
        dtypes = tuple(x.dtype for x in operands[: 4 if "bias" in call.optional else 3])
        found = attention_backward_p.bind(
            *first, call.turned(result), statistics, call.turned(gradient), dtypes=dtypes, **call.params
        )
        _, has_gradient_of_bias = params["variadic_args"]
        return [*map(call.turned, found[:3]), *(found[3:] if has_gradient_of_bias else ())]

    return run


class _Call:
    """What a call is, in our terms."""

    def __init__(self, optional: tuple[str, ...], form: Form, heads_first: bool) -> None:
        self.optional = optional
        self.params: Mapping[str, Any] = {"optional": optional, "form": form}
        self._heads_first = heads_first

    def turned(self, x: Any) -> Any:
        """[B, N, T, H], if that is how arrays lie, as [B, T, N, H], and the other way round."""
        return jnp.swapaxes(x, 1, 2) if self._heads_first else x

    def operands(self, given: Sequence[Any]) -> list[Any]:
        query, key, value, bias, query_lengths, key_lengths = given[:6]
        others = dict(zip(OPTIONAL, (bias, None, query_lengths, key_lengths), strict=True))
        return [*map(self.turned, (query, key, value)), *(others[name] for name in self.optional)]


def _read(params: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> _Call | None:
    """None where there is dropout, or where examples are packed or paged."""
    if params["dropout_rate"] or any(tuple(shape) != (0,) for shape in shapes[6 : 3 + _OTHERS]):
        return None
    mask = fused.MaskType(params["mask_type"])
    if mask is fused.MaskType.ALIBI:
        return None
    has_bias, _ = params["variadic_args"]
    optional = (
        *(["bias"] if has_bias else []),
        *(["query_lengths", "key_lengths"] if fused.has_padding(mask) else []),
    )
    window = params["sliding_window_length"]
    is_causal = mask in (fused.MaskType.CAUSAL, fused.MaskType.PADDING_CAUSAL)
    form = Form(float(params["scale"]), None if window is None else window - 1, 0 if is_causal or window else None)
    return _Call(optional, form, params["layout"] == fused.AttentionLayout.BNTH.value)


TAKEN_OVER: Mapping[str, Callable[[Mapping[str, Any], Sequence[Sequence[int]]], Callable[..., Any] | None]] = {
    "dot_product_attention_fwd_wrapper": forward,
    "dot_product_attention_bwd_wrapper": backward,
}
