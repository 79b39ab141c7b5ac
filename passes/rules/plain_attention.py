"""Where a step computes attention as two products around a softmax, with all scores in memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from autopar.ir.graph import Equation, Operand, Value
from autopar.ir.rule import Rule

_PRODUCT = "dot_general"
# Attention as one operator scales scores, adds a bias and masks them, but has no cap for them, as of one of these.
_CAPS = frozenset({"tanh", "logistic", "erf", "sin", "atan"})


def plain_attention(equations: Sequence[Equation], rules: Mapping[int, Rule]) -> dict[int, Equation]:
    """Equations that read or write scores, or what is as large, by id: to the exponential of the forward pass.

    Scores are the result of a product which goes, element by element and without a cap, into an exponential, of which
    another product sums the last dimension. What else has their size and meets them element by element belongs to them,
    the backward pass included; what is on the other side of a product does not.
    """
    found: dict[int, Equation] = {}
    step = _Step(equations, rules)
    for eqn in equations:
        if eqn.primitive.name == "exp" and eqn.id not in found:
            scores = step.scores_of(eqn)
            if scores is not None and step.is_summed_by_a_product(eqn.outputs[0]):
                for each in step.around(scores):
                    found.setdefault(each.id, eqn)
    return found


class _Step:
    def __init__(self, equations: Sequence[Equation], rules: Mapping[int, Rule]) -> None:
        self.rules = rules
        self.makers = {v: eqn for eqn in equations for v in eqn.outputs}
        self.readers: dict[Value, list[Equation]] = defaultdict(list)
        for eqn in equations:
            for v in dict.fromkeys(eqn.values):
                self.readers[v].append(eqn)

    def _is_plain(self, eqn: Equation) -> bool:
        """Whether it makes each element of one of each operand."""
        return self.rules[eqn.id].is_fusible and len(eqn.outputs) == 1

    def scores_of(self, exponential: Equation) -> Value | None:
        """The result of a product from which an exponential is made element by element."""
        size = _size(exponential.outputs[0])
        waiting, seen = [*exponential.values], set[Value]()
        while waiting:
            v = waiting.pop()
            maker = self.makers.get(v)
            if v in seen or maker is None or _size(v) != size:
                continue
            seen.add(v)
            if maker.primitive.name == _PRODUCT:
                return v
            if self._is_plain(maker) and maker.primitive.name not in _CAPS:
                waiting += maker.values
        return None

    def is_summed_by_a_product(self, weights: Value) -> bool:
        """Whether a product sums the last dimension of what is made element by element of the weights."""
        size, keys = _size(weights), weights.shape[-1] if weights.shape else 1
        waiting, seen = [weights], set[Value]()
        while waiting:
            v = waiting.pop()
            if v in seen or _size(v) != size:
                continue
            seen.add(v)
            for eqn in self.readers[v]:
                if eqn.primitive.name == _PRODUCT:
                    (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
                    if eqn.inputs[0] != v:
                        (_, contracted), (_, batched) = eqn.params["dimension_numbers"]
                    if batched and math.prod(v.shape[d] for d in contracted) == keys:
                        return True
                elif self._is_plain(eqn):
                    waiting += eqn.outputs
        return False

    def around(self, scores: Value) -> Iterator[Equation]:
        """The equations that read or write the scores and what is made of them at their size."""
        size = _size(scores)
        waiting, values, met = [scores], {scores}, dict[int, Equation]()
        while waiting:
            v = waiting.pop()
            maker = self.makers.get(v)
            for eqn in (*self.readers[v], *([maker] if maker is not None else [])):
                if eqn.id in met:
                    continue
                met[eqn.id] = eqn
                if eqn.primitive.name == _PRODUCT:
                    continue
                for other in (*eqn.values, *eqn.outputs):
                    if other not in values and _size(other) == size:
                        values.add(other)
                        waiting.append(other)
        yield from met.values()


def _size(x: Operand) -> int:
    return math.prod(x.shape)
