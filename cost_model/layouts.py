"""In which order arrays lie in memory, where a compiler goes through them element by element, as XLA does for CPUs.

What a kernel makes lies row-major, a view of it as it does itself. A kernel whose result is row-major reads a
transposed view against its order. Where nothing reads a product of matrices but its transposition, XLA makes the
transposed product instead (`AlgebraicSimplifier`), which so lies row-major: the gradients of layers are such. Products
and reductions want their operands in an order, and get a copy where these lie in another one. Orders are those of whole
arrays: that a piece may be one long in a dimension is not considered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from autopar.ir.graph import Equation, Value
from autopar.ir.rule import Rule, is_reduction

Order = tuple[int, ...] | None  # dimensions longer than 1, the outermost in memory first; None: pieces of them mixed
Read = tuple[Value, Order]  # what is in memory, and its order in the dimensions of what it is read for


class Reading(NamedTuple):
    """How a kernel reads what is in memory."""

    value: Value
    strided: bool  # against its order in memory
    copied: bool  # before, into the order that is wanted


class Layouts:
    """Of the values of a program, in the order of its equations."""

    def __init__(self, equations: Sequence[Equation], rules: Mapping[int, Rule], outputs: Collection[Value]) -> None:
        self._instead = _made_transposed(equations, rules, outputs)
        self._views: dict[Value, Order] = {}
        self._fused: dict[Value, list[Read]] = {}

    def view(self, eqn: Equation, rule: Rule) -> None:
        """Each result is the operand at its position, perhaps in another order or shape."""
        for k, (before, after) in enumerate(zip(eqn.inputs, eqn.outputs, strict=True)):
            if isinstance(before, Value):
                made = after in self._instead
                self._views[after] = _row_major(after) if made else _through(rule, k, k, self._of(before))

    def fuse(self, eqn: Equation, rule: Rule) -> None:
        """The results are computed inside the kernels that read them."""
        for k, result in enumerate(eqn.outputs):
            self._fused[result] = self._sources(eqn, rule, k)

    def run(self, eqn: Equation, rule: Rule) -> list[Reading]:
        """The equation is computed by a kernel: how this reads what is in memory."""
        if rule.kernels:
            return []
        if rule.is_fusible:
            last = _row_major(eqn.outputs[0])[-1:]
            return [Reading(v, _is_against(order, last), False) for v, order in self._sources(eqn, rule, 0)]
        if rule.sides is not None and rule.patches is None:
            operands = enumerate(eqn.inputs[:2])
            return [_of_product(rule, i, v, self._of(v)) for i, v in operands if isinstance(v, Value)]
        if is_reduction(eqn, rule):
            (summed,) = eqn.values
            return [_of_reduction(summed, v, order) for v, order in self._read_for(summed)]
        return []

    def order(self, value: Value) -> Order:
        """In which a value lies, or is seen as a view."""
        return self._of(value)

    def _of(self, value: Value) -> Order:
        return self._views.get(value, _row_major(value))

    def _read_for(self, value: Value) -> list[Read]:
        return self._fused.get(value, [(value, self._of(value))])

    def _sources(self, eqn: Equation, rule: Rule, result: int) -> list[Read]:
        """What a result of an elementwise equation is computed from; twice what is read in two orders."""
        operands = ((position, v) for position, v in enumerate(eqn.inputs) if isinstance(v, Value))
        sources = {
            (source, _through(rule, position, result, order)): None
            for position, v in operands
            for source, order in self._read_for(v)
        }
        return [*sources]


def _made_transposed(
    equations: Sequence[Equation], rules: Mapping[int, Rule], outputs: Collection[Value]
) -> set[Value]:
    """Transposed products of which nothing else is read: XLA makes these."""
    read = Counter(v for eqn in equations for v in eqn.values)
    read.update(outputs)
    products: set[Value] = set()
    transposed: set[Value] = set()
    for eqn in equations:
        rule = rules[eqn.id]
        if _is_of_matrices(eqn, rule):
            products.update(eqn.outputs)
        elif products.intersection(eqn.values) and read[eqn.values[0]] == 1 and _swaps_the_last_two(eqn, rule):
            transposed.update(eqn.outputs)
    return transposed


def _is_of_matrices(eqn: Equation, rule: Rule) -> bool:
    """Whether a product has rows and columns of one dimension each, in types that XLA for CPUs does not convert."""
    if rule.sides is None or rule.patches is not None or len(rule.outputs[0]) < 2:
        return False
    if len({v.dtype for v in (*eqn.inputs, *eqn.outputs)}) > 1 or eqn.outputs[0].dtype.itemsize < 4:
        return False
    (_, batch), (_, rows), (_, columns), _ = rule.sides.each
    *before, row, column = rule.outputs[0]
    return all(batch.issuperset(dim) for dim in before) and rows.issuperset(row) and columns.issuperset(column)


def _swaps_the_last_two(eqn: Equation, rule: Rule) -> bool:
    if len(eqn.inputs) != 1 or len(eqn.outputs) != 1 or not rule.is_fusible or len(rule.inputs[0]) < 2:
        return False
    *before, row, column = rule.inputs[0]
    return row != column and tuple(rule.outputs[0]) == (*before, column, row)


def _row_major(value: Value) -> tuple[int, ...]:
    return tuple(d for d, size in enumerate(value.shape) if size > 1)


def _through(rule: Rule, position: int, result: int, order: Order) -> Order:
    """The order of an operand in the dimensions of a result."""
    if order is None:
        return None
    place = {f: d for d, dim in enumerate(rule.outputs[result]) for f in dim}
    factors = [f for d in order for f in rule.inputs[position][d] if rule.factors[f] > 1 and f in place]
    dims = tuple(dict.fromkeys(place[f] for f in factors))
    in_order = [f for d in dims for f in rule.outputs[result][d] if f in factors]
    return dims if in_order == factors else None


def _is_against(order: Order, last: Sequence[int]) -> bool:
    """Whether neighbours along the last dimension are no neighbours in memory; what does not have it is broadcast."""
    return order is None or (order[-1:] != tuple(last) and any(d in order for d in last))


def _of_reduction(summed: Value, value: Value, order: Order) -> Reading:
    if order is not None and order == tuple(sorted(order)):
        return Reading(value, False, False)
    return Reading(value, _is_against(order, _row_major(summed)[-1:]), True)


def comes_turned(eqn: Equation, rule: Rule, turned: Collection[Value]) -> bool:
    """Whether the results lie in a convolution's order on GPUs: channels last, and filters with what they make first.

    `turned`: the values before that do.
    """
    if rule.channels_last is not None:
        return not rule.channels_last[2]
    return rule.is_fusible and any(v in turned and v.shape == eqn.outputs[0].shape for v in eqn.values)


def filters_to_turn(eqn: Equation, rule: Rule, turned: Collection[Value]) -> list[int]:
    """The operands that a convolution needs in another order than they lie in; of a filter's gradient none."""
    if rule.channels_last is None or not rule.channels_last[2]:
        return []
    return [i for i, is_last in enumerate(rule.channels_last[:2]) if not is_last and eqn.inputs[i] not in turned]


def is_apart(rule: Rule, position: int, order: Order) -> bool:
    """Whether an operand of a product cannot be read as matrices: after what is batched, rows and columns are mixed."""
    if order is None:
        return True
    assert rule.sides is not None
    (_, batch), _, _, (_, summed) = rule.sides.each
    sorts = ["batch" if f in batch else "sum" if f in summed else "own"
             for d in order for f in rule.inputs[position][d]]  # fmt: skip
    changes = [sort for i, sort in enumerate(sorts) if i == 0 or sorts[i - 1] != sort]
    return "batch" in changes[1:] or len(changes) > len(set(changes))


def _of_product(rule: Rule, position: int, value: Value, order: Order) -> Reading:
    """What is batched comes first; of several rows, columns or sums the left operand ends with what is summed.

    Where there is one dimension of each, either may come first.
    """
    if order is None:
        return Reading(value, True, True)
    assert rule.sides is not None
    (_, batch), (_, rows), (_, columns), _ = rule.sides.each
    own = rows if position == 0 else columns
    sorts = ["batch" if f in batch else "own" if f in own else "sum"
             for d in order for f in rule.inputs[position][d]]  # fmt: skip
    changes = [sort for i, sort in enumerate(sorts) if i == 0 or sorts[i - 1] != sort]
    wanted = ["own", "sum"] if position == 0 else ["sum", "own"]
    single = sorts.count("own") <= 1 and sorts.count("sum") <= 1
    matrix = [sort for sort in changes if sort != "batch"]
    if "batch" not in changes[1:] and (single or matrix == [sort for sort in wanted if sort in matrix]):
        return Reading(value, False, False)
    return Reading(value, sorts[-1] == "batch" if single else sorts[-1] != wanted[-1], True)
