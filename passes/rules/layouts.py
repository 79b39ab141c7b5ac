"""In which order arrays lie in memory, where a compiler goes through them element by element, as XLA does for CPUs.

What a kernel makes lies row-major, a view of it as it does itself. A kernel whose result is row-major reads a
transposed view against its order. Products and reductions want their operands in an order, and get a copy where these
lie in another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.ir.graph import Equation, Value
from autopar.passes.rules.base import Rule, is_fusible

Order = tuple[int, ...] | None  # dimensions longer than 1, the outermost in memory first; None: pieces of them mixed


class Reading(NamedTuple):
    """How an equation's kernel reads an operand."""

    against: bool  # its order in memory
    copied: bool  # before, into the order that is wanted


_IN_ORDER = Reading(against=False, copied=False)


class Layouts:
    """Of the values of a program, in the order of its equations."""

    def __init__(self) -> None:
        self._views: dict[Value, Order] = {}
        self._fused: dict[Value, Mapping[Value, Order]] = {}  # by what is in memory: how it is read through the value

    def view(self, eqn: Equation, rule: Rule) -> None:
        """The result is the operand in another order or shape."""
        (before,), (after,) = eqn.values, eqn.outputs
        self._views[after] = _through(rule, 0, self._of(before))

    def fuse(self, eqn: Equation, rule: Rule) -> None:
        """The results are computed inside the kernels that read them."""
        self._fused.update(dict.fromkeys(eqn.outputs, self._sources(eqn, rule)))

    def run(self, eqn: Equation, rule: Rule) -> list[tuple[Value, Reading]]:
        """The equation is computed by a kernel: how this reads what is in memory."""
        if rule.kernels or not eqn.outputs:
            return []
        if is_fusible(rule):
            last = _row_major(eqn.outputs[0])[-1:]
            return [(v, Reading(_is_against(order, last), False)) for v, order in self._sources(eqn, rule).items()]
        if rule.sides is not None and rule.patches is None:
            operands = enumerate(eqn.inputs[:2])
            return [(v, _of_product(rule, i, self._of(v))) for i, v in operands if isinstance(v, Value)]
        if rule.reduced and rule.unit == "vector" and len(eqn.values) == 1:
            (summed,) = eqn.values
            return [(v, _of_reduction(summed, order)) for v, order in self._read_for(summed).items()]
        return []

    def _of(self, value: Value) -> Order:
        return self._views.get(value, _row_major(value))

    def _read_for(self, value: Value) -> Mapping[Value, Order]:
        """What is in memory and has to be read for a value, each in the value's dimensions."""
        return self._fused.get(value, {value: self._of(value)})

    def _sources(self, eqn: Equation, rule: Rule) -> dict[Value, Order]:
        """What an elementwise equation is computed from, each in the dimensions of the result."""
        found: dict[Value, Order] = {}
        for position, v in enumerate(eqn.inputs):
            if isinstance(v, Value):
                for source, order in self._read_for(v).items():
                    found.setdefault(source, _through(rule, position, order))
        return found


def _row_major(value: Value) -> tuple[int, ...]:
    return tuple(d for d, size in enumerate(value.shape) if size > 1)


def _through(rule: Rule, position: int, order: Order) -> Order:
    """The order in the dimensions of the equation's first result."""
    if order is None or not rule.outputs:
        return None
    place = {f: d for d, dim in enumerate(rule.outputs[0]) for f in dim}
    factors = [f for d in order for f in rule.inputs[position][d] if rule.factors[f] > 1 and f in place]
    dims = tuple(dict.fromkeys(place[f] for f in factors))
    in_order = [f for d in dims for f in rule.outputs[0][d] if f in set(factors)]
    return dims if in_order == factors else None


def _is_against(order: Order, last: Sequence[int]) -> bool:
    """Whether neighbours along the last dimension are no neighbours in memory."""
    return order is None or (order[-1:] != tuple(last) and any(d in order for d in last))


def _of_reduction(value: Value, order: Order) -> Reading:
    wanted = _row_major(value)
    return _IN_ORDER if order == wanted else Reading(_is_against(order, wanted[-1:]), True)


def _of_product(rule: Rule, position: int, order: Order) -> Reading:
    """What is batched comes first; of several rows, columns or sums the left operand ends with what is summed.

    Where there is one dimension of each, either may come first.
    """
    if order is None:
        return Reading(True, True)
    assert rule.sides is not None
    (_, batch), (_, rows), (_, columns), _ = rule.sides.each
    own = rows if position == 0 else columns
    sorts = ["batch" if f in batch else "own" if f in own else "sum"
             for d in order for f in rule.inputs[position][d]]  # fmt: skip
    changes = [sort for i, sort in enumerate(sorts) if i == 0 or sorts[i - 1] != sort]
    batched_first = "batch" not in changes[1:]
    wanted = ["own", "sum"] if position == 0 else ["sum", "own"]
    single = sorts.count("own") <= 1 and sorts.count("sum") <= 1
    matrix = [sort for sort in changes if sort != "batch"]
    if batched_first and (single or matrix == [sort for sort in wanted if sort in matrix]):
        return _IN_ORDER
    return Reading(sorts[-1] == "batch" if single else sorts[-1] != wanted[-1], True)
