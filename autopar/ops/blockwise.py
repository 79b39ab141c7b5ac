"""Attention block by block of the keys, which never has all scores at once (Dao et al. 2022, "FlashAttention").

Exact but for rounding, in plain JAX operations: what computes attention where cuDNN does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 512  # keys of a block, at most
_UNSEEN = -0.7 * float(np.finfo(np.float32).max)  # the score of a key that a query does not see, as JAX has it


class Form(NamedTuple):
    """What attention is besides its operands; hashable.

    A query sees the keys from `left` positions before its own to `right` positions after it; None: any.
    """

    scale: float  # of products of queries and keys
    left: int | None = None
    right: int | None = None


# Optional operands, in their order: added to the scores [1|B, 1|N, 1|T, 1|S]; which keys are seen, the same shape; how
# many positions of each example's queries, and of its keys, count [B].
OPTIONAL = ("bias", "mask", "query_lengths", "key_lengths")
START = "query_start"  # the last of the optional operands, of pieces only: the position of the first query, []


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, others: Mapping[str, jax.Array], form: Form,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Softmax of the scores times the values, and the logarithms of the sums of the scores' exponentials.

    Args:
      query: [B, T, N, H]: examples, positions, heads, width.
      key: [B, S, K, H], where K divides N: so many heads share one of these.
      value: [B, S, K, V].
      others: some of `OPTIONAL`, and perhaps `START`.
      form: what else there is to it.
      block: keys of a block, at most; None: as many as are usual.

    Returns:
      [B, T, N, V] in the type of the queries, and [B, N, T] in 32 bits or more.
    """
    blocks = _Blocks(query, key, value, others, form, block)
    shape = blocks.grouped[:-2]  # [B, K, G, T]
    start = (
        jnp.full(shape, -jnp.inf, blocks.wide),
        jnp.zeros(shape, blocks.wide),
        jnp.zeros((*shape, value.shape[-1]), blocks.wide),
    )

    def step(carry: Any, index: Any) -> tuple[Any, None]:
        most, total, result = carry
        scores, _ = blocks.scores(index)
        higher = jnp.maximum(most, scores.max(-1))
        origin = jnp.where(jnp.isneginf(higher), 0.0, higher)  # nothing was seen: no difference of infinities
        weights = jnp.exp(scores - origin[..., None])
        kept = jnp.exp(most - origin)
        found = _product("bkgts,bskv->bkgtv", weights.astype(value.dtype), blocks.value(index), blocks.wide)
        return (higher, kept * total + weights.sum(-1), kept[..., None] * result + found), None

    (most, total, result), _ = blocks.scan(step, start)
    batch, length, heads, _ = query.shape
    result = jnp.transpose(result / total[..., None], (0, 3, 1, 2, 4)).reshape(batch, length, heads, -1)
    if (rows := blocks.rows) is not None:
        result = jnp.where(rows[:, :, None, None], result, 0.0)
    return result.astype(query.dtype), (most + jnp.log(total)).reshape(batch, heads, length)


def attend_backward(
    query: jax.Array, key: jax.Array, value: jax.Array, others: Mapping[str, jax.Array], result: jax.Array,
    statistics: jax.Array, gradient: jax.Array, form: Form, dtypes: Sequence[Any], block: int | None = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The gradients of the queries, keys and values, and of the bias if there is one.

    Args:
      query, key, value, others, form, block: as for `attend`.
      result, statistics: what `attend` made of them.
      gradient: of the result.
      dtypes: of the gradients.
    """
    blocks = _Blocks(query, key, value, others, form, block)
    wide = blocks.wide
    if (rows := blocks.rows) is not None:
        gradient = jnp.where(rows[:, :, None, None], gradient, jnp.zeros_like(gradient))
    given = blocks.by_group(gradient)  # [B, K, G, T, V]
    dot = (given.astype(wide) * blocks.by_group(result).astype(wide)).sum(-1)
    logarithms = statistics.reshape(dot.shape)
    blind = (logarithms <= _UNSEEN / 2)[..., None]
    bias = others.get("bias")

    def step(carry: Any, index: Any) -> tuple[Any, Any]:
        scores, seen = blocks.scores(index)
        # Beside the score of what is not seen, the logarithm of how many there are is lost in rounding.
        weights = jnp.where(blind, 1 / blocks.length, jnp.exp(scores - logarithms[..., None]))
        of_value = _product("bkgts,bkgtv->bskv", weights.astype(value.dtype), given, wide)
        of_weights = _product("bkgtv,bskv->bkgts", given, blocks.value(index), wide)
        of_scores = weights * (of_weights - dot[..., None])
        if seen is not None:
            of_scores = jnp.where(seen, of_scores, 0.0)
        narrow = (form.scale * of_scores).astype(query.dtype)
        of_query = carry + _product("bkgts,bskh->bkgth", narrow, blocks.key(index), wide)
        of_key = _product("bkgts,bkgth->bskh", narrow, blocks.query, wide)
        of_bias = () if bias is None else (_like(bias, of_scores),)
        return of_query, (of_key, of_value, *of_bias)

    of_query, (of_key, of_value, *of_bias) = blocks.scan(step, jnp.zeros(blocks.query.shape, wide))
    batch, length, heads, width = query.shape
    of_query = jnp.transpose(of_query, (0, 3, 1, 2, 4)).reshape(batch, length, heads, width)
    gradients = [of_query, blocks.joined(of_key, 1), blocks.joined(of_value, 1)]
    if bias is not None:
        gradients.append(of_bias[0].sum(0) if bias.shape[-1] == 1 else blocks.joined(of_bias[0], 3))
    return tuple(x.astype(dtype) for x, dtype in zip(gradients, dtypes, strict=True))


class _Blocks:
    """The operands, cut into blocks of keys; arrays of scores are [B, K, G, T, keys of the block]."""

    def __init__(
        self, query: Any, key: Any, value: Any, others: Mapping[str, Any], form: Form, block: int | None
    ) -> None:
        self.form, self.others = form, others
        self.wide = jnp.promote_types(query.dtype, jnp.float32)
        self.length = key.shape[1]
        self.count = max(1, math.ceil(self.length / (block or _BLOCK)))
        self.size = math.ceil(self.length / self.count)
        self.heads = key.shape[2]
        self.query = self.by_group(query)
        self.grouped = (*self.query.shape[:-1], self.size, 0)
        self._key, self._value = self._padded(key, 1), self._padded(value, 1)

    def by_group(self, x: Any) -> Any:
        """[B, T, N, H] -> [B, K, G, T, H]."""
        batch, length, heads, width = x.shape
        split = x.reshape(batch, length, self.heads, heads // self.heads, width)
        return jnp.transpose(split, (0, 2, 3, 1, 4))

    def _padded(self, x: Any, dim: int) -> Any:
        more = self.count * self.size - self.length
        return jnp.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)]) if more else x

    def _block(self, x: Any, index: Any, dim: int) -> Any:
        if self.count == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, index * self.size, self.size, dim)

    def key(self, index: Any) -> Any:
        return self._block(self._key, index, 1)

    def value(self, index: Any) -> Any:
        return self._block(self._value, index, 1)

    def scan(self, step: Any, start: Any) -> tuple[Any, Any]:
        """All blocks, one after the other; what each leaves is stacked."""
        if self.count > 1:
            return jax.lax.scan(step, start, jnp.arange(self.count, dtype=jnp.int32))
        end, left = step(start, 0)
        return end, jax.tree.map(lambda x: x[None], left)

    def joined(self, x: Any, dim: int) -> Any:
        """What the blocks left, one behind the other along a dimension, without what is beyond the keys."""
        rest = x.shape[1:]
        whole = jnp.moveaxis(x, 0, dim).reshape(*rest[:dim], self.count * rest[dim], *rest[dim + 1 :])
        return jax.lax.slice_in_dim(whole, 0, self.length, axis=dim)

    @property
    def rows(self) -> Any:
        """Which queries count [B, T]; None: all."""
        lengths = self.others.get("query_lengths")
        return None if lengths is None else self._positions < lengths[:, None]

    @property
    def _positions(self) -> Any:
        """Of the queries."""
        return self.others.get(START, 0) + jnp.arange(self.query.shape[3])

    def scores(self, index: Any) -> tuple[Any, Any]:
        """The scores of a block's keys, and which of them are seen (None: all).

        What is not seen has a score that is lower than any, but finite, so that a query that sees nothing takes the
        mean of all values, as with `jax.nn.dot_product_attention`. Beyond the keys there is nothing: -inf.
        """
        scores = _product("bkgth,bskh->bkgts", self.query, self.key(index), self.wide) * self.form.scale
        if (bias := self.others.get("bias")) is not None:
            scores = scores + self._by_group(self._block_of_scores(bias, index)).astype(self.wide)
        places = index * self.size + jnp.arange(self.size)
        seen = self._seen(index, places)
        if seen is not None:
            scores = jnp.where(seen, scores, jnp.asarray(_UNSEEN, self.wide))
        if self.count * self.size > self.length:
            scores = jnp.where(places < self.length, scores, -jnp.inf)
        return scores, seen

    def _seen(self, index: Any, places: Any) -> Any:
        at = self._positions[:, None]
        found = []
        if self.form.right is not None:
            found.append(places <= at + self.form.right)
        if self.form.left is not None:
            found.append(places >= at - self.form.left)
        if (mask := self.others.get("mask")) is not None:
            found.append(self._by_group(self._block_of_scores(mask, index)))
        if (lengths := self.others.get("key_lengths")) is not None:
            found.append((places < lengths[:, None])[:, None, None, None, :])
        if (rows := self.rows) is not None:
            found.append(rows[:, None, None, :, None])
        seen = None
        for each in found:
            seen = each if seen is None else jnp.logical_and(seen, each)
        return seen

    def _block_of_scores(self, x: Any, index: Any) -> Any:
        return x if x.shape[3] == 1 else self._block(self._padded(x, 3), index, 3)

    def _by_group(self, x: Any) -> Any:
        """[1|B, 1|N, 1|T, 1|S] -> [1|B, 1|K, 1|G, 1|T, 1|S]."""
        batch, heads, *rest = x.shape
        return x.reshape(batch, *((1, 1) if heads == 1 else (self.heads, heads // self.heads)), *rest)


def _like(bias: Any, of_scores: Any) -> Any:
    """The gradient of a bias, from that of the scores [B, K, G, T, S]: the sum over what it is broadcast along."""
    batch, groups, each, *rest = of_scores.shape
    whole = of_scores.reshape(batch, groups * each, *rest)
    return whole.sum([d for d in range(4) if bias.shape[d] == 1], keepdims=True)


def _product(spec: str, left: Any, right: Any, dtype: Any) -> Any:
    return jnp.einsum(spec, left, right, preferred_element_type=dtype)
