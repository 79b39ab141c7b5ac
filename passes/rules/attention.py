"""Attention as one operator (`autopar.dot_product_attention`): examples, heads and positions can be cut.

One kernel computes all of it, so that the scores are never in memory: it reads its operands once and writes its
results, with statistics of a number for each query and head instead of the scores. Pieces of positions send one
another what `ContextParallel` says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from autopar.ir.context import ContextParallel, Extent, halves_to, reverse
from autopar.ir.graph import Equation
from autopar.ir.mesh import Attention
from autopar.ir.rule import BodyKernel, DimMap, Local, Rule, Sides, bind
from autopar.ir.sharding import StepKind
from autopar.ops.blockwise import START
from autopar.passes.rules.building import DimFactors, Factors, RuleBuilder, is_number, linear_if_wide


class _Sizes:
    """The factors of attention: examples B, shared heads K, heads that share one G, and positions T; widths stay whole.

    Where there are as many keys as queries, their positions are cut alike; else the keys stay whole.
    """

    def __init__(self, eqn: Equation) -> None:
        batch, length, heads, width = eqn.inputs[0].shape
        _, keys, shared, wide = eqn.inputs[2].shape
        self.factors = Factors()
        new, whole = self.factors.new, self.factors.new_whole
        self.batch, self.shared, self.each = new(batch), new(shared), new(heads // shared if shared else 0)
        self.length, self.width, self.wide = new(length), whole(width), whole(wide)
        self.is_shared = keys == length
        self.keys = self.length if self.is_shared else whole(keys)
        self.of_scores = whole(keys)  # in arrays that have a number for each pair
        self.heads: DimFactors = self.shared + self.each
        self.query: DimMap = (self.batch, self.length, self.heads, self.width)
        self.key: DimMap = (self.batch, self.keys, self.shared, self.width)
        self.value: DimMap = (self.batch, self.keys, self.shared, self.wide)
        self.result: DimMap = (self.batch, self.length, self.heads, self.wide)
        self.statistics: DimMap = (self.batch, self.heads, self.length)
        self.numbers = (batch * heads, length, keys)
        self.widths = (width, wide)
        self.cut = frozenset((*self.batch, *self.heads))

    def optional(self, eqn: Equation) -> list[DimMap]:
        """Of the bias, the mask, the lengths and the first position that there are."""
        scores = (self.batch, self.heads, self.length, self.of_scores)
        found: list[DimMap] = []
        for name, operand in zip(eqn.params["optional"], eqn.inputs[3:], strict=False):
            if name in ("bias", "mask"):
                found.append(tuple(() if n == 1 else dim for n, dim in zip(operand.shape, scores, strict=True)))
            else:
                found.append(() if name == START else (self.batch,))
        return found

    def kernel(self, eqn: Equation, maps: Sequence[DimMap], work: float, *, backward: bool) -> BodyKernel:
        """What it computes: `work` is FLOPs for each pair of a query and a key that it sees."""
        batch, length, keys = self.numbers
        form = eqn.params["form"]
        pairs = seen_pairs(form, length, keys)
        flops = work * batch * pairs
        masked = form.left is not None or form.right is not None
        each = pairs / length if length else 0.0
        attention = Attention(2 * each if masked else each, masked, sum(self.widths) / 2, backward)
        positions = frozenset(self.length)
        cut = self.cut | positions
        traffic = tuple(
            (float(math.prod(x.shape) * x.dtype.itemsize), cut.intersection(f for dim in dims for f in dim))
            for x, dims in zip((*eqn.inputs, *eqn.outputs), maps, strict=True)
        )
        depth = flops / (2 * batch * length * keys) if batch * length * keys else 0.0
        none: frozenset[int] = frozenset()
        sides = Sides((batch, self.cut), (length, positions), (keys, none), (depth, none), None, attention)
        return BodyKernel(flops, cut, traffic, sides, eqn.kernel_dtype(True), times=1.0)

    def contexts(self, eqn: Equation, *, backward: bool) -> tuple[ContextParallel, ...]:
        """None where pieces of the positions need nothing of one another."""
        if not self.is_shared or not self.length:
            return ()
        batch, length, heads, width = eqn.inputs[0].shape
        shared, wide = eqn.inputs[2].shape[2:]
        query, key, value = (n * x.dtype.itemsize for n, x in zip((width, width, wide), eqn.inputs, strict=False))
        names, masks = eqn.params["optional"], []
        for name, v, dims in zip(names, eqn.inputs[3:], self.optional(eqn), strict=False):
            if name in ("bias", "mask"):
                masks.append((name, v, dims))
        varying = [(name, v, dims) for name, v, dims in masks if dims[2]]

        def cut(v: Any, dims: DimMap) -> Extent:
            return Extent(v.nbytes, (self.cut | frozenset(self.length)).intersection(f for dim in dims for f in dim))

        reads: tuple[int, ...] = (query,)
        makes: tuple[int, ...] = (wide * eqn.outputs[0].itemsize, eqn.outputs[1].itemsize)
        sums: tuple[tuple[int, int], ...] = ()
        bias_sums: tuple[Extent, ...] = ()
        if backward:
            result, statistics, given = (eqn.inputs[i].dtype.itemsize for i in (-3, -2, -1))
            reads = (query, wide * result, statistics, wide * given)
            makes = (width * eqn.outputs[0].itemsize,)
            sums = tuple(
                (n * v.itemsize, n * v.sum_itemsize) for n, v in zip((width, wide), eqn.outputs[1:3], strict=True)
            )
            bias_sums = tuple(cut(eqn.outputs[3], dims) for name, _, dims in varying if name == "bias")
        form = eqn.params["form"]
        return (
            ContextParallel(
                self.length[0], length,
                Extent(batch, frozenset(self.batch)), Extent(heads, frozenset(self.heads)),
                Extent(shared, frozenset(self.shared)), reads, makes, (key, value), sums,
                tuple(cut(v, dims) for _, v, dims in varying), bias_sums,
                is_causal=form.right is not None and form.left is None,
                may_exchange_heads=not any(dims[1] or dims[2] for _, _, dims in masks),
            ),
        )  # fmt: skip


def seen_pairs(form: Any, length: int, keys: int) -> float:
    """Pairs of a query and a key that it sees by its position."""
    at = np.arange(length, dtype=np.int64)
    first = np.zeros_like(at) if form.left is None else np.maximum(0, at - form.left)
    last = np.full_like(at, keys - 1) if form.right is None else np.minimum(keys - 1, at + form.right)
    return float(np.maximum(0, last - first + 1).sum())


def _attention(eqn: Equation) -> Rule:
    sizes = _Sizes(eqn)
    inputs = [sizes.query, sizes.key, sizes.value, *sizes.optional(eqn)]
    outputs = [sizes.result, sizes.statistics]
    width, wide = sizes.widths
    contexts = sizes.contexts(eqn, backward=False)
    return sizes.factors.rule(
        inputs,
        outputs,
        emit=functools.partial(_emit, sizes, contexts, _FORWARD),
        unit="matmul",
        kernels=(sizes.kernel(eqn, [*inputs, *outputs], 2.0 * (width + wide), backward=False),),
        contexts=contexts,
    )


def _attention_backward(eqn: Equation) -> Rule:
    """The scores are computed again: five products instead of two."""
    sizes = _Sizes(eqn)
    optional = sizes.optional(eqn)
    inputs = [sizes.query, sizes.key, sizes.value, *optional, sizes.result, sizes.statistics, sizes.result]
    outputs = [sizes.query, sizes.key, sizes.value]
    if "bias" in eqn.params["optional"]:
        outputs.append(optional[0])
    cut = sizes.cut | frozenset(sizes.length)
    held = [{f for dim in dims for f in dim} for dims in outputs]
    summed = sorted(f for f in cut if not all(f in each for each in held))
    summable = all(is_number(v) for v in eqn.outputs)
    width, wide = sizes.widths
    contexts = sizes.contexts(eqn, backward=True)
    # The gradient of the queries is added up in 32 bits, block by block of the keys.
    sums = 4 * math.prod(eqn.outputs[0].shape)
    return sizes.factors.rule(
        inputs,
        outputs,
        reduced=dict.fromkeys(summed, "sum") if summable else {},
        unaffected=dict.fromkeys(summed, frozenset()) if summable else {},
        whole=() if summable else summed,
        linear=linear_if_wide(eqn, {len(inputs) - 1}),
        emit=functools.partial(_emit, sizes, contexts, _BACKWARD),
        unit="matmul",
        kernels=(sizes.kernel(eqn, [*inputs, *outputs], 2.0 * (3 * width + 2 * wide), backward=True),),
        contexts=contexts,
        live_sets=(((sums, cut),),) if sums else (),
    )


class _Pass(NamedTuple):
    """Where positions and heads are in the operands and results that are in pieces of both."""

    reads: Mapping[int, tuple[int, int]]  # operand -> dimension of positions, and of heads
    makes: Mapping[int, tuple[int, int]]


_FORWARD = _Pass({0: (1, 2)}, {0: (1, 2), 1: (2, 1)})
_BACKWARD = _Pass({0: (1, 2), -3: (1, 2), -2: (2, 1), -1: (1, 2)}, {0: (1, 2)})
_KEYS = (1, 2)  # operands; their gradients are results
_POSITIONS, _HEADS = 1, 2  # dimensions of keys and values


def _emit(
    sizes: _Sizes, contexts: Sequence[ContextParallel], each_way: _Pass, local: Local, eqn: Equation,
    operands: Sequence[Any],
) -> Sequence[Any]:  # fmt: skip
    if not sizes.length or not local.is_split(sizes.length[0]):
        return _compute(eqn, operands)
    start = local.start(sizes.length[0])
    if not contexts:
        return _compute(eqn, operands, start)
    piece = _CutAttention(sizes, contexts[0], each_way, local, eqn, start)
    if contexts[0].exchanges_heads(piece.cut):
        return piece.with_heads_exchanged(operands)
    return piece.with_keys_gathered(operands)


def _compute(eqn: Equation, operands: Sequence[Any], start: Any = None, sums: Any = None) -> Sequence[Any]:
    """What the equation computes; `start`: position of the first query; `sums`: type of the gradients of the keys."""
    changed: dict[str, Any] = {}
    if "dtypes" in eqn.params:
        dtypes = [v.dtype for v in eqn.outputs]
        dtypes[1:3] = dtypes[1:3] if sums is None else [sums] * 2
        changed["dtypes"] = tuple(dtypes)
    form, optional = eqn.params["form"], eqn.params["optional"]
    positions_matter = form.left is not None or form.right is not None or "query_lengths" in optional
    if start is not None and positions_matter:
        at = 3 + len(optional)
        operands = [*operands[:at], start, *operands[at:]]
        changed["optional"] = (*optional, START)
    return bind(eqn, operands, **changed)


class _CutAttention:
    """A piece of the positions of one attention."""

    def __init__(
        self, sizes: _Sizes, context: ContextParallel, each_way: _Pass, local: Local, eqn: Equation, start: Any
    ) -> None:
        self.context, self.local, self.eqn, self.start = context, local, eqn, start
        self.factor = context.factor
        self.cut = {f: n // local.size(f) for f, n in enumerate(sizes.factors.sizes) if n}
        inputs, outputs = len(eqn.inputs), len(eqn.outputs)
        self.reads = {i % inputs: dims for i, dims in each_way.reads.items()}
        self.makes = dict(each_way.makes)
        self.is_backward = outputs > 2
        # Masks and biases that differ from query to query have no heads to exchange.
        self.masks = [
            i for i, dims in enumerate(sizes.optional(eqn), 3)
            if eqn.params["optional"][i - 3] in ("bias", "mask") and dims[2]
        ]  # fmt: skip
        self.bias = outputs - 1 if outputs > 3 else None
        self.bias_varies = 3 in self.masks

    def with_heads_exchanged(self, operands: Sequence[Any]) -> Sequence[Any]:
        given = self._given(operands)
        for i, (positions, heads) in [*self.reads.items(), *((k, (_POSITIONS, _HEADS)) for k in _KEYS)]:
            given[i] = self._send(given[i], "all_to_all", dim=positions, to_dim=heads)
        results = list(_compute(self.eqn, given))
        back = {**self.makes, **(dict.fromkeys(_KEYS, (_POSITIONS, _HEADS)) if self.is_backward else {})}
        for k, (positions, heads) in back.items():
            results[k] = self._send(results[k], "all_to_all", dim=heads, to_dim=positions)
        return results

    def with_keys_gathered(self, operands: Sequence[Any]) -> Sequence[Any]:
        given = self._given(operands)
        for i in _KEYS:
            given[i] = self._send(given[i], "all_gather", dim=_POSITIONS)
        sums = self.eqn.outputs[1].accumulator_dtype if self.is_backward else None
        first, second = self.context.halves(self.cut)
        if second:
            results = self._in_halves(given, first, sums)
        else:
            results = list(_compute(self.eqn, given, self.start, sums))
        for k in _KEYS if self.is_backward else ():
            results[k] = self._send(results[k], "reduce_scatter", dim=_POSITIONS).astype(self.eqn.outputs[k].dtype)
        return results

    def _given(self, operands: Sequence[Any]) -> list[Any]:
        """The operands; for gradients, not before the first is there: else XLA would keep what was sent before."""
        given = list(operands)
        if self.is_backward:
            fenced = [*_KEYS, *self.masks, *self.reads]
            for i, x in zip(fenced, jax.lax.optimization_barrier([given[i] for i in fenced]), strict=True):
                given[i] = x
        return given

    def _in_halves(self, operands: Sequence[Any], first: int, sums: Any) -> list[Any]:
        """An early and a late part of the queries; see `ContextParallel`."""
        own, count = self.local.size(self.factor), self.context.pieces(self.cut)
        index = self.start // own
        mirrored = 2 * count - 1 - index
        even, odd = (jnp.where(index % 2 == k, index, mirrored) for k in (0, 1))
        reads = {**{i: dims[0] for i, dims in self.reads.items()}, **dict.fromkeys(self.masks, 2)}
        makes = {k: dims[0] for k, dims in self.makes.items()}
        if self.bias is not None and self.bias_varies:
            makes[self.bias] = 2
        found = []
        for (low, high), pairs, start in zip(
            ((0, first), (first, own)), halves_to(count), (even // 2 * own, odd // 2 * own + first), strict=True
        ):
            given = list(operands)
            for i, dim in reads.items():
                given[i] = self._send(jax.lax.slice_in_dim(given[i], low, high, axis=dim), "permute", pairs=pairs)
            results = list(_compute(self.eqn, given, start, sums))
            for k in makes:
                results[k] = self._send(results[k], "permute", pairs=reverse(pairs))
            found.append(results)
        return [
            jax.lax.concatenate([x, y], makes[k]) if k in makes else x + y
            for k, (x, y) in enumerate(zip(*found, strict=True))
        ]

    def _send(self, x: Any, kind: StepKind, **how: Any) -> Any:
        return self.local.send(self.factor, x, kind, **how)


RULES: Mapping[str, RuleBuilder] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
}
