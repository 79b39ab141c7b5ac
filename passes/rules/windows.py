"""Windows that slide over arrays: convolutions, reductions over windows, and their gradients.

Along a spatial dimension the windows of one piece reach into the pieces beside it. Where neighbouring pieces of the
array lie as far apart as neighbouring pieces of the windows, all pieces reach equally far: each borrows so many
elements from its neighbours (a halo) and slides over what it then has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.ir.graph import Equation, Value
from autopar.ir.mesh import Patches
from autopar.ir.rule import DimMap, Halo, Local, Rule, bind
from autopar.passes.rules.building import (
    DimFactors,
    Factors,
    RuleBuilder,
    linear_if_wide,
    local_size,
    without_sharding,
    work_per_point,
)


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Windows along one dimension.

    Tap `k` of window `o` is at `o * stride + k * dilation - low` of the array, whose elements lie `base` apart.
    """

    size: int  # elements of the array
    taps: int  # of a window
    count: int  # windows
    stride: int
    low: int  # padding before the array
    base: int = 1
    dilation: int = 1

    def reads(self) -> int:
        """Pairs of a window and a tap that meet an element."""
        start = np.arange(self.taps) * self.dilation - self.low
        step, end = self.base * self.stride, (self.size - 1) * self.base
        pairs = 0
        for first in range(min(self.base, self.count)):  # windows first, first + base, ..: on elements all or none
            at = first * self.stride + start
            windows = (self.count - 1 - first) // self.base + 1
            below, beyond = np.maximum(0, -(at // step)), np.minimum(windows, (end - at) // step + 1)
            pairs += int(np.sum(np.where(at % self.base == 0, np.maximum(0, beyond - below), 0)))
        return pairs

    def fits(self, parts: int, unit: int) -> bool:
        """Whether pieces of `parts` things, `unit` apart, lie as far apart as pieces of the array."""
        return self.size * self.base == parts * unit and math.gcd(self.size, parts) > 1

    def reach(self, factor: int, overlap: int) -> _Reach:
        """How far windows reach; `overlap`: by how much a piece's windows span more than the piece, padding aside."""
        return _Reach(factor, self.low // self.base, 1 + (overlap - self.low) // self.base)

    def padding(self, borrowed: int, held: int) -> tuple[int, int]:
        """Around `held` elements of which so many were borrowed in front."""
        low = self.low - borrowed * self.base
        span = (self.count - 1) * self.stride + (self.taps - 1) * self.dilation + 1
        return low, span - low - ((held - 1) * self.base + 1)


@dataclasses.dataclass(frozen=True)
class _Reach:
    """How many elements beyond a piece its windows reach; where negative, so many of its own they leave out."""

    factor: int
    before: int
    after: int


def _borrow(local: Local, x: Any, reaches: Mapping[int, _Reach], fill: Any) -> Any:
    """A piece as far as its windows reach, by dimension; `fill` (None: zeros) beyond the ends of the whole."""
    split = {d: reach for d, reach in reaches.items() if local.is_split(reach.factor)}
    for d, reach in split.items():
        x = local.halo(reach.factor, x, d, max(0, reach.before), max(0, reach.after), fill)
    for d, reach in split.items():  # last, so that all who borrow alike share what they borrow
        if reach.before < 0 or reach.after < 0:
            x = lax.slice_in_dim(x, max(0, -reach.before), x.shape[d] - max(0, -reach.after), axis=d)
    return x


def _halos(eqn: Equation, operand: int, reaches: Mapping[int, _Reach], fill: Hashable) -> list[Halo]:
    """What an operand borrows, dimension by dimension."""
    itemsize = eqn.inputs[operand].dtype.itemsize
    return [
        Halo(operand, dim, reach.factor, max(0, reach.before), max(0, reach.after), itemsize, fill)
        for dim, reach in reaches.items()
        if reach.before > 0 or reach.after > 0
    ]


def _common(factors: Factors, size: int, other: int) -> tuple[DimFactors, DimFactors]:
    """Two dimensions that are cut together: the common factor, and what is left of each, whole."""
    shared = math.gcd(size, other)
    factor = factors.new(shared)
    return factor + factors.new_whole(size // shared), factor + factors.new_whole(other // shared)


def _conv_general_dilated(eqn: Equation) -> Rule:
    """Batch, groups and features split as in a product of matrices, spatial dimensions with a halo.

    The gradient of the kernel is a convolution too: its kernel is the gradient of the result, and the batch counts as
    input features. There the spatial dimensions of both operands are cut together, and summed.
    """
    left, right = eqn.inputs
    (result,) = eqn.outputs
    p = eqn.params
    numbers = p["dimension_numbers"]
    batch_groups = p["batch_group_count"]
    groups = max(p["feature_group_count"], batch_groups)  # one of the two is 1
    factors = Factors()
    group = factors.new(groups)
    batch = factors.new(result.shape[numbers.out_spec[0]])
    in_features = factors.new(right.shape[numbers.rhs_spec[1]])
    out_features = group + factors.new(result.shape[numbers.out_spec[1]] // groups)
    of_left: dict[int, DimFactors] = {}
    of_right: dict[int, DimFactors] = {}
    of_out: dict[int, DimFactors] = {}
    of_left[numbers.lhs_spec[0]] = batch if batch_groups == 1 else group + batch
    of_left[numbers.lhs_spec[1]] = group + in_features if batch_groups == 1 else in_features
    of_right[numbers.rhs_spec[0]], of_right[numbers.rhs_spec[1]] = out_features, in_features
    of_out[numbers.out_spec[0]], of_out[numbers.out_spec[1]] = batch, out_features

    spatial = list(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True))
    each = [
        _Windows(left.shape[a], right.shape[k], result.shape[o], stride, low, base, dilation)
        for (a, k, o), stride, (low, _), base, dilation in zip(
            spatial, p["window_strides"], p["padding"], p["lhs_dilation"], p["rhs_dilation"], strict=True
        )
    ]
    reaches: dict[int, _Reach] = {}  # by dimension of the left operand
    summed = [*in_features]
    for (a, k, o), w in zip(spatial, each, strict=True):
        if w.fits(w.count, w.stride):
            of_left[a], of_out[o] = _common(factors, w.size, w.count)
            of_right[k] = factors.new_whole(w.taps)
            reaches[a] = w.reach(of_left[a][0], (w.taps - 1) * w.dilation - w.stride)
        elif w.fits(w.taps, w.dilation):
            of_left[a], of_right[k] = _common(factors, w.size, w.taps)
            of_out[o] = factors.new_whole(w.count)
            reaches[a] = w.reach(of_left[a][0], (w.count - 1) * w.stride - w.dilation)
            summed.append(of_left[a][0])
        else:
            of_left[a], of_right[k], of_out[o] = map(factors.new_whole, (w.size, w.taps, w.count))

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        x, kernel = operands
        x = _borrow(local, x, reaches, None)
        padding = list(p["padding"])
        for i, ((a, k, o), w) in enumerate(zip(spatial, each, strict=True)):
            if a in reaches and local.is_split(reaches[a].factor):
                piece = dataclasses.replace(w, taps=local_size(local, of_right[k]), count=local_size(local, of_out[o]))
                padding[i] = piece.padding(reaches[a].before, x.shape[a])
        count = {"feature_group_count": local_size(local, group)}
        if batch_groups > 1:
            count = {"batch_group_count": local_size(local, group)}
        # In its own type where the operands are: cuDNN has no convolution of 16-bit floats with a result in 32 bits,
        # and XLA would convert the operands for one.
        dtype = jnp.promote_types(x.dtype, kernel.dtype)
        x, kernel = x.astype(dtype), kernel.astype(dtype)
        result = p["preferred_element_type"] if dtype == eqn.inputs[0].dtype else eqn.outputs[0].dtype
        return bind(
            eqn, [x, kernel], padding=tuple(padding), preferred_element_type=result, **count,
            **without_sharding(eqn, "out_sharding"),
        )  # fmt: skip

    # Padding and the holes of dilated arrays are no work: forward and both gradients do the same.
    points = math.prod(factors.sizes[f] for f in (*batch, *in_features, *out_features))
    reads = [w.reads() for w in each]
    reuse = math.prod(reads) / max(1, math.prod(w.size for w in each))
    return factors.rule(
        [_in_order(of_left), _in_order(of_right)],
        [_in_order(of_out)],
        reduced=dict.fromkeys(summed, "sum"),
        linear=linear_if_wide(eqn, {0}, {1}),
        emit=emit,
        flops=work_per_point(2.0 * points * math.prod(reads), factors),
        unit="matmul",
        patches=Patches(math.prod(w.taps for w in each), reuse, math.prod(w.base for w in each)),
        channels_last=tuple(map(_is_channels_last, (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))),
        halos=_halos(eqn, 0, reaches, None),
        windows=frozenset(reach.factor for reach in reaches.values()),
    )


def _is_channels_last(spec: Sequence[int]) -> bool:
    """Examples, or what a filter makes, first; then space; then channels."""
    return spec[0] == 0 and spec[1] == len(spec) - 1


def _in_order(dims: Mapping[int, DimFactors]) -> DimMap:
    return tuple(dims[d] for d in range(len(dims)))


def _windows_of(eqn: Equation, sizes: Sequence[int], counts: Sequence[int]) -> list[_Windows]:
    p = eqn.params
    ones = (1,) * len(sizes)
    return [
        _Windows(size, taps, count, stride, low, base, dilation)
        for size, taps, count, stride, (low, _), base, dilation in zip(
            sizes,
            p["window_dimensions"],
            counts,
            p["window_strides"],
            p["padding"],
            p.get("base_dilation", ones),
            p.get("window_dilation", ones),
            strict=True,
        )
    ]


def _least(dtype: Any) -> Any:
    """What loses against every number."""
    return -np.inf if jnp.issubdtype(dtype, jnp.inexact) else np.iinfo(dtype).min


def _greatest(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.inexact) else np.iinfo(dtype).max


def _loser(eqn: Equation) -> Any:
    """What the selection of a `select_and_` primitive never takes."""
    return _least(eqn.inputs[1].dtype) if eqn.params["select_prim"].name == "ge" else _greatest(eqn.inputs[1].dtype)


@dataclasses.dataclass(frozen=True)
class _Start:
    """The scalar operand that a reduction starts from."""

    value: int  # id
    position: int = dataclasses.field(compare=False)


Fills = Callable[[Equation], Sequence[Hashable]]  # by array: what is beyond its ends


def _reduction(fills: Fills, linear: bool = False) -> RuleBuilder:
    """Arrays of one shape, perhaps scalars to start from; results have an element a window."""

    def build(eqn: Equation) -> Rule:
        factors = Factors()
        each = _windows_of(eqn, eqn.inputs[0].shape, eqn.outputs[0].shape)
        dims: list[DimFactors] = []
        output: list[DimFactors] = []
        reaches: dict[int, _Reach] = {}
        for d, w in enumerate(each):
            if w.fits(w.count, w.stride):
                array, windows = _common(factors, w.size, w.count)
                reaches[d] = w.reach(array[0], (w.taps - 1) * w.dilation - w.stride)
            else:
                array, windows = factors.new_whole(w.size), factors.new_whole(w.count)
            dims.append(array)
            output.append(windows)
        arrays = [i for i, x in enumerate(eqn.inputs) if x.shape == eqn.inputs[0].shape]

        def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
            padding = list(eqn.params["padding"])
            pieces = list(operands)
            for i, fill in zip(arrays, fills(eqn), strict=True):
                fill = operands[fill.position] if isinstance(fill, _Start) else fill
                pieces[i] = _borrow(local, operands[i], reaches, fill)
            for d, reach in reaches.items():
                if local.is_split(reach.factor):
                    piece = dataclasses.replace(each[d], count=local_size(local, output[d]))
                    padding[d] = piece.padding(reach.before, pieces[0].shape[d])
            return bind(eqn, pieces, padding=tuple(padding))

        work = float(math.prod(eqn.outputs[0].shape) * math.prod(w.taps for w in each))
        return factors.rule(
            [tuple(dims) if i in arrays else () for i in range(len(eqn.inputs))],
            [tuple(output)] * len(eqn.outputs),
            linear=linear_if_wide(eqn, {0}) if linear else (),
            emit=emit,
            flops=work_per_point(work, factors),
            pooling="result",
            halos=[halo for i, fill in zip(arrays, fills(eqn), strict=True) for halo in _halos(eqn, i, reaches, fill)],
        )

    return build


def _select_and_scatter_add(eqn: Equation) -> Rule:
    """The gradient of a maximum over windows: (gradients, an element a window; array) -> as the array.

    A piece needs the gradients of all windows that touch it, and all elements of these windows.
    """
    source, operand = eqn.inputs
    each = _windows_of(eqn, operand.shape, source.shape)
    factors = Factors()
    of_source: list[DimFactors] = []
    of_array: list[DimFactors] = []
    of_windows: dict[int, _Reach] = {}
    of_elements: dict[int, _Reach] = {}
    for d, w in enumerate(each):
        if w.fits(w.count, w.stride) and 0 <= w.low < w.taps and w.stride <= w.taps:
            array, windows = _common(factors, w.size, w.count)
            before, after = (w.taps - 1 - w.low) // w.stride, 1 + (w.low - 1) // w.stride
            of_windows[d] = _Reach(array[0], before, after)
            of_elements[d] = _Reach(array[0], w.low + before * w.stride, w.taps - w.low + (after - 1) * w.stride)
        else:
            array, windows = factors.new_whole(w.size), factors.new_whole(w.count)
        of_array.append(array)
        of_source.append(windows)

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        gradients, x = operands
        padding = list(eqn.params["padding"])
        split = [d for d in of_windows if local.is_split(of_windows[d].factor)]
        for d in split:
            padding[d] = (0, 0)  # the halo is as wide as the windows reach
        gradients = _borrow(local, gradients, of_windows, None)
        x = _borrow(local, x, of_elements, _loser(eqn))
        (result,) = bind(eqn, [gradients, x], padding=tuple(padding))
        for d in split:
            start = of_elements[d].before
            result = lax.slice_in_dim(result, start, start + local_size(local, of_array[d]), axis=d)
        return [result]

    work = float(math.prod(source.shape) * math.prod(w.taps for w in each))
    return factors.rule(
        [tuple(of_source), tuple(of_array)],
        [tuple(of_array)],
        linear=linear_if_wide(eqn, {0}),
        emit=emit,
        flops=work_per_point(work, factors),
        pooling="gradient",
        halos=[*_halos(eqn, 0, of_windows, None), *_halos(eqn, 1, of_elements, _loser(eqn))],
    )


def _starts(eqn: Equation) -> list[Hashable]:
    """Of a user's own reduction: the second half of its operands."""
    half = range(len(eqn.inputs) // 2, len(eqn.inputs))
    return [
        _Start(x.id, i) if isinstance(x, Value) else np.asarray(x.value).item()
        for i, x in ((i, eqn.inputs[i]) for i in half)
    ]


RULES: dict[str, RuleBuilder] = {
    "conv_general_dilated": _conv_general_dilated,
    "reduce_window": _reduction(_starts),
    "reduce_window_max": _reduction(lambda eqn: [_least(eqn.inputs[0].dtype)]),
    "reduce_window_min": _reduction(lambda eqn: [_greatest(eqn.inputs[0].dtype)]),
    "reduce_window_sum": _reduction(lambda eqn: [None], linear=True),
    "select_and_gather_add": _reduction(lambda eqn: [None, _loser(eqn)], linear=True),
    "select_and_scatter_add": _select_and_scatter_add,
}
