"""Seconds of every strategy of an equation on a mesh: local compute, and the collectives that belong to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.cost_model.compute import (
    compute_time,
    memory_seconds,
    partial_sum_bytes,
    product_share,
    strided_read_seconds,
)
from autopar.cost_model.program_cost import hidden_in_rounds, kernel_seconds
from autopar.cost_model.reshard import StepPrice
from autopar.ir.graph import Equation, Value
from autopar.ir.local import Traffic
from autopar.ir.mesh import DeviceKind, Mesh, Pooling
from autopar.ir.rule import Rule, Sides, product_sizes
from autopar.passes.collectives import extreme_itemsize
from autopar.passes.intra_op.strategies import (
    PartOptions,
    combined_axes,
    cut_and_gathered,
    exchanges,
    inner_collectives,
    local_kernels,
    local_round,
    packing,
    part_operands,
    pieces,
)

# Times the seconds of the quickest strategy of a loop: what would take longer than this if all that it sends were
# hidden, counts as if nothing were.
_MUCH_DEARER = 2.0


class StrategySeconds:
    """What strategies cost on one mesh; arrays are by strategy."""

    def __init__(self, mesh: Mesh, kind: DeviceKind, price: StepPrice, hides_collectives: bool) -> None:
        """`hides_collectives`: whether those in rounds of loops count for less where kernels run beside them."""
        self.mesh, self.kind, self.price, self._hides = mesh, kind, price, hides_collectives
        self._peaks: dict[tuple[str, bool, Pooling | None], float] = {}

    def of(self, eqn: Equation, rule: Rule, part_index: int, options: PartOptions, traffic: Traffic) -> Any:
        """One run of a part of an equation."""
        part = rule.parts[part_index]
        outputs = [eqn.outputs[part_index]] if rule.separable else eqn.outputs
        if rule.kernels:
            seconds = self._body(rule, [cut_and_gathered(rule, each, self.mesh) for each in options.assignments])
        else:
            moved = self._moved(eqn, rule, part_index, options, traffic)
            matmul = rule.unit == "matmul"
            work = rule.work({}) * options.share
            dtype = eqn.kernel_dtype(matmul)
            cut = [pieces(rule, each, self.mesh) for each in options.assignments] if rule.sides is not None else []
            share, partial = self._product(rule.sides, cut, dtype)
            seconds = self._kernel(matmul, work / share, moved, partial, dtype, traffic.launches, rule.pooling)
            if any(traffic.strided) or any(traffic.copied):
                seconds += self._reordered(eqn, rule, part_index, options, traffic)
        if part.reduced:
            for i, assignment in enumerate(options.assignments):
                for axes in combined_axes(part, assignment, self.mesh).values():
                    payload = sum(
                        math.prod(v.shape) * extreme_itemsize(v.dtype) * options.results[k].share[i]
                        for k, v in enumerate(outputs)
                    )
                    seconds[i] += self.price("all_reduce", axes, int(payload))
        if part.sums or part.halos or part.gatherings or part.contexts:
            for i, assignment in enumerate(options.assignments):
                inner = [*inner_collectives(part, assignment, self.mesh)]
                inner += [(e.collective, 1) for e in exchanges(part, assignment, self.mesh)]
                for c, times in inner:
                    seconds[i] += times * self.price(c.kind, c.axes, c.payload)
                if part.contexts:
                    nbytes, launches = packing(part, assignment, self.mesh)
                    seconds[i] += memory_seconds(self.kind, nbytes) + self.kind.launch_overhead * launches
        if rule.round is not None and self.kind.xla.hides_latency:
            seconds += self._in_rounds(rule, options, seconds)
        return seconds

    def _in_rounds(self, rule: Rule, options: PartOptions, seconds: Any) -> Any:
        """What rounds hand on to the next takes, less what of their collectives runs beside kernels."""
        beyond, quickest = np.zeros(len(seconds)), np.min(seconds)
        for i, assignment in enumerate(options.assignments):
            round_ = local_round(rule, assignment, self.mesh)
            if round_ is None:
                continue
            kernels = local_kernels(rule, cut_and_gathered(rule, assignment, self.mesh), round_)
            beyond[i] = sum(kernel_seconds(each, self.kind) for each in kernels[len(rule.kernels) :])
            sent = sum(self.price(c.kind, c.axes, c.payload) for step in round_.steps for c in step.collectives)
            if self._hides and seconds[i] - round_.times * sent <= _MUCH_DEARER * quickest:
                beyond[i] -= hidden_in_rounds(round_, kernels, self.mesh, self.kind, self.price)
        return beyond

    def _moved(self, eqn: Equation, rule: Rule, part_index: int, options: PartOptions, traffic: Traffic) -> Any:
        """Bytes through one device's memory."""
        moved = np.zeros(len(options.assignments))
        if rule.separable:  # hands on the buffers that it takes
            return moved
        made = [math.prod(v.shape) * options.results[k].share for k, v in enumerate(eqn.outputs)]
        for place, position in enumerate(part_operands(eqn, rule, part_index)):
            v = eqn.inputs[position]
            if traffic.reads[position] and isinstance(v, Value):
                moved += traffic.read_bytes(position, v, options.operands[place].nbytes(v), np.max(made, axis=0))
        for k, v in enumerate(eqn.outputs):
            if traffic.is_own(k):
                moved += options.results[k].nbytes(v)
        return moved

    def _reordered(self, eqn: Equation, rule: Rule, part_index: int, options: PartOptions, traffic: Traffic) -> Any:
        """Seconds for operands that lie in another order."""
        seconds: Any = 0.0
        for place, position in enumerate(part_operands(eqn, rule, part_index)):
            v = eqn.inputs[position]
            if isinstance(v, Value):
                nbytes = options.operands[place].nbytes(v)
                strided, copied = traffic.strided[position], traffic.copied[position]
                seconds += strided_read_seconds(self.kind, nbytes, strided=strided, copied=copied)
        return seconds

    def _product(self, sides: Sides | None, cut: Sequence[Mapping[int, int]], dtype: str) -> tuple[Any, Any]:
        """Shares of the speed of large products, and bytes of partial sums beyond the result."""
        if sides is None:
            return 1.0, 0.0
        sizes = [product_sizes(sides, split) for split in cut]
        shares = np.array([product_share(self.kind, each, dtype) for each in sizes])
        return shares, np.array([partial_sum_bytes(self.kind, each, dtype) for each in sizes])

    def _body(self, rule: Rule, cut: Sequence[Mapping[Any, int]]) -> Any:
        """Every kernel of a body, in all rounds; `cut`: see `cut_and_gathered`."""
        shares: dict[frozenset[Any], Any] = {}

        def share(held: frozenset[Any]) -> Any:
            if held not in shares:
                shares[held] = np.array([1 / math.prod(split.get(f, 1) for f in held) for split in cut])
            return shares[held]

        total = np.zeros(len(cut))
        for k in rule.kernels:
            moved = np.array([k.moved(split) for split in cut])
            speed, partial = self._product(k.sides, cut, k.dtype)
            total += self._kernel(
                k.sides is not None, k.flops * share(k.held) / speed, moved, k.rounds * partial, k.dtype, k.times,
                k.pooling,
            )  # fmt: skip
        return total

    def _kernel(
        self, matmul: bool, work: Any, moved: Any, partial: Any, dtype: str, launches: float, pooling: Pooling | None
    ) -> Any:
        """`compute_time` of every strategy at once, with the launches, and with reading partial sums afterwards."""
        kind = self.kind
        key = (dtype, matmul, pooling)
        if key not in self._peaks:
            self._peaks[key] = compute_time(
                kind, flops=1.0, bytes_moved=0.0, dtype=dtype, matmul=matmul, pooling=pooling
            )
        seconds = np.maximum(work * self._peaks[key], memory_seconds(kind, moved + partial))
        return seconds + memory_seconds(kind, partial) + kind.launch_overhead * launches
