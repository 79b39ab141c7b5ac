"""Spans of layers that are alike: the stage search prices one of them for all.

Spans are alike if their layers, each as a stage of its own, have programs that are alike, and if what these hand to one
another is alike within the span; of what lies outside it only counts whether it is before or behind. Alike spans become
the same programs, but for where in arrays pieces lie that they read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

from autopar.ir.graph import Operand, Value, dtype_name
from autopar.ir.program import PlacedStep
from autopar.passes.rules.table import without_places
from autopar.passes.stage_oracle import Span


class Spans:
    """The spans of the layers of a step."""

    def __init__(self, finest: PlacedStep) -> None:
        """`finest`: the step with each layer as a stage of its own."""
        self._layers = stage_signatures(finest)
        self._first: dict[Hashable, Span] = {}
        self.first_alike = functools.cache(self._first_alike)  # decorated, it would keep this for ever

    def _first_alike(self, span: Span) -> Span:
        """The first span asked for that becomes the same programs as this one."""
        start, stop = span
        signatures = tuple(self._layers[k].within(start - k, stop - k) for k in range(start, stop))
        return self._first.setdefault((start == 0, stop == len(self._layers), signatures), span)


@dataclasses.dataclass(frozen=True)
class _Wire:
    """A value that stages exchange; distances are in stages from the one that this belongs to."""

    name: int  # in the order in which the programs of the stage name their values
    source: int | None  # where it is made or stored
    number: int | None  # among all that the source sends here
    readers: tuple[int, ...]

    def within(self, low: int, high: int) -> Hashable:
        """What of it can be told apart from the stages at these distances."""

        def side(distance: int) -> int:
            return max(low - 1, min(high, distance))

        inside = self.source is not None and low <= self.source < high
        source = None if self.source is None else side(self.source)
        return self.name, source, self.number if inside else None, tuple(dict.fromkeys(map(side, self.readers)))


@dataclasses.dataclass(frozen=True)
class StageSignature:
    """What there is to see of a stage: equal for stages that become the same programs."""

    digest: str
    wires: tuple[_Wire, ...]

    def within(self, low: int, high: int) -> Hashable:
        """What of it can be told apart from the stages at these distances."""
        return self.digest, tuple(wire.within(low, high) for wire in self.wires)


def stage_signatures(placed: PlacedStep) -> list[StageSignature]:
    """Of each stage."""
    step = placed.step
    readers: dict[Value, set[int]] = defaultdict(set)
    for program in placed.programs:
        for v in program.inputs:
            readers[step.loop_values.get(v, v)].add(program.stage)
    sent: dict[tuple[Value, int], int] = {}  # its number among all that one stage sends to another
    count: Counter[tuple[int, int]] = Counter()
    for program in placed.programs:
        for v in program.outputs:
            for reader in readers[v]:
                sent[v, reader] = count[program.stage, reader]
                count[program.stage, reader] += 1

    def wire(name: int, v: Value, stage: int) -> _Wire:
        v = step.loop_values.get(v, v)
        others = tuple(sorted(at - stage for at in readers.get(v, ())))
        if v in placed.producer:
            return _Wire(name, placed.stage_of(v) - stage, sent.get((v, stage)), others)
        return _Wire(name, placed.home[v] - stage if v in placed.home else None, None, others)

    texts: dict[int, tuple[Any, str]] = {}  # by id of a parameter, with it: the parts of a loop share its body
    signatures = []
    for stage in range(placed.num_stages):
        digest, values = _digest(placed, stage, texts)
        wires = [wire(name, v, stage) for v, name in values.items()]
        signatures.append(StageSignature(digest, tuple(w for w in wires if {w.source, *w.readers} - {0, None})))
    return signatures


def _digest(placed: PlacedStep, stage: int, texts: dict[int, tuple[Any, str]]) -> tuple[str, Mapping[Value, int]]:
    """Of the equations of a stage's programs, their shapes and parameters; and the values in the order of naming."""
    step = placed.step
    outputs = {v for v in step.outputs if isinstance(v, Value)}
    inputs = set(step.graph.inputs)
    numbers: dict[Value, int] = {}

    def name(v: Operand) -> str:
        if not isinstance(v, Value):
            return "literal"
        if v in numbers:
            return str(numbers[v])
        numbers[v] = len(numbers)
        kind = "input" if v in inputs else ("sum" if v in placed.producer and v not in step.batched else "")
        if v in inputs and placed.home[v] != stage:
            kind = "remote input"
        return f"{numbers[v]}:{v.shape}:{dtype_name(v.dtype)}:{kind}:{v in outputs}:{step.hints.get(v)}"

    def text(parameter: Any) -> str:
        if id(parameter) not in texts:
            texts[id(parameter)] = parameter, str(parameter)
        return texts[id(parameter)][1]

    digest = hashlib.sha256()
    for program in placed.programs:
        if program.stage == stage:
            digest.update(program.phase.value.encode())
            for eqn in program.equations:
                ins, outs = " ".join(map(name, eqn.inputs)), " ".join(map(name, eqn.outputs))
                params = " ".join(
                    f"{k}={text(v)}" for k, v in without_places(eqn).items() if not callable(v) and k != "update_jaxpr"
                )
                digest.update(f"{eqn.primitive.name} {ins} -> {outs} {params}\n".encode())
            digest.update(" ".join(map(name, program.inputs)).encode())
            digest.update(" ".join(map(name, program.outputs)).encode())
            for total_of in program.outputs:
                if total_of in step.accumulate:
                    digest.update(name(step.accumulate[total_of]).encode())
    return digest.hexdigest(), numbers
