"""What one round of a loop runs and sends, and what each needs: XLA hides collectives in a loop's body, too."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.ir.graph import Equation, Operand, Value
from autopar.ir.rule import Gathering, Round, RoundStep, Side
from autopar.passes.rules.loop_kernels import LoopLayout, Numbered, PlacedKernel, cut_by
from autopar.passes.rules.propagation import Body

# Where a sum is made: at a value, or within the equation with this number.
SumPlace = Value | int


def round_of(
    body: Body, numbered: Numbered, layout: LoopLayout, kernels: Sequence[PlacedKernel],
    sums: Sequence[SumPlace], gatherings: Sequence[Gathering],
) -> Round:  # fmt: skip
    """One round of a loop.

    Args:
      body: what is computed in a round.
      numbered: by factor of the loop's rule, how it cuts the body.
      layout: how the body's inputs and outputs lie in the equation's.
      kernels: those of the loop's rule, with where they are.
      sums: where those of the loop's rule are made.
      gatherings: of the loop's rule.
    """
    return _Round(body, numbered, kernels, sums).of(layout, gatherings)


class _Round:
    def __init__(
        self, body: Body, numbered: Numbered, kernels: Sequence[PlacedKernel],
        sums: Sequence[SumPlace],
    ) -> None:  # fmt: skip
        self._body, self._numbered = body, numbered
        self._kernels: dict[int | Value, list[int]] = defaultdict(list)
        for number, (_, place) in enumerate(kernels):
            if place is not None:
                self._kernels[place].append(number)
        self._sums: dict[SumPlace, list[int]] = defaultdict(list)
        for number, at in enumerate(sums):
            self._sums[at].append(number)
        self._steps: list[RoundStep] = []
        self._at: dict[Operand, tuple[int, ...]] = {}  # the steps whose results are read to have a value
        self._fused: dict[Operand, list[int]] = {}  # kernels of what is fused, until something reads it

    def of(self, layout: LoopLayout, gatherings: Sequence[Gathering]) -> Round:
        gathered = {way[-1]: position for position, way in layout.stacked_in.items()}
        for position in layout.stacked_in:
            v = self._body.inputs[position]
            if own := self._kernels.pop(v, None):
                self._add(v, (), kernels=own)
        for v in self._body.inputs:
            self._made(v, gathered)
        traffic = self._body.traffic
        for e in self._body.equations:
            rule = self._body.rules[e.id]
            if rule.separable:
                self._at.update({out: self._at.get(v, ()) for v, out in zip(e.inputs, e.outputs, strict=True)})
            else:
                written = [v for v, own in zip(e.outputs, traffic[e.id].writes, strict=True) if own]
                self._compute(e, [] if e.generates and not rule.kernels else written)
            for v in e.outputs:
                self._made(v, gathered)
        scattered = {s.position for way in gatherings for s in way.results if s.nbytes}
        for position in layout.stacked_out:
            self._leave(position, position in scattered)
        return Round(tuple(self._steps), layout.length)

    def _compute(self, e: Equation, written: Sequence[Value]) -> None:
        own, inner = self._kernels.pop(e.id, []), self._sums.get(e.id, ())
        before = tuple(dict.fromkeys(step for v in e.inputs for step in self._at.get(v, ())))
        if not written and not inner:
            self._at.update(dict.fromkeys(e.outputs, before))
            self._fused[e.outputs[0]] = own
            return
        own = [*itertools.chain.from_iterable(self._fused.pop(v, ()) for v in e.inputs), *own]
        at: tuple[int, ...] = (self._step(RoundStep(before, self._sides(written), tuple(own))),)
        for number in inner:
            at = (self._step(RoundStep(at, self._sides(written), sum=number, dtype=str(e.outputs[0].dtype))),)
        self._at.update({v: at if v in written else before for v in e.outputs})

    def _made(self, v: Value, gathered: Mapping[Value, int]) -> None:
        """What becomes of a value as soon as it is there: it is summed, or it is a stack's slice that is gathered."""
        for number in self._sums.get(v, ()):
            self._add(v, self._at.get(v, ()), sum=number)
        if v in gathered:
            self._add(v, self._at.get(v, ()), operand=gathered[v])

    def _leave(self, position: int, is_scattered: bool) -> None:
        v = self._body.outputs[position]
        if not isinstance(v, Value):
            return
        before = self._at.get(v, ())
        if is_scattered:
            held = (v.sum_nbytes, cut_by(v, self._numbered))
            before = (self._step(RoundStep(before, (held,), result=position, dtype=str(v.dtype))),)
        if own := self._kernels.pop(v, None):
            self._step(RoundStep(before, (), tuple(own)))

    def _add(
        self, v: Value, before: tuple[int, ...], kernels: Sequence[int] = (), sum: int | None = None,
        operand: int | None = None,
    ) -> None:  # fmt: skip
        step = RoundStep(before, self._sides([v]), tuple(kernels), sum, operand, dtype=str(v.dtype))
        self._at[v] = (self._step(step),)

    def _step(self, step: RoundStep) -> int:
        self._steps.append(step)
        return len(self._steps) - 1

    def _sides(self, values: Sequence[Value]) -> tuple[Side, ...]:
        return tuple((v.nbytes, cut_by(v, self._numbered)) for v in values)
