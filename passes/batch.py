"""Microbatching as sharding in time: which values depend on which examples, and the step cut accordingly.

Analysis (`analyse_batch`), once per graph, says for every value how it depends on the microbatch:

    FREE      not at all (parameters, keys, and what is computed from them alone)
    BATCHED   it holds the microbatch's examples along one dimension (outer, units, inner)
    PARTIAL   it is a partial sum: the value of the whole batch is the sum over microbatches
    FINAL     it needs the whole batch, hence exists only after the last microbatch
    ALIKE     an equation with a body makes it beside what holds examples; it is the same in every microbatch

and for every equation when it runs:

 1. An equation with a BATCHED operand splits along the factor that carries the batch, if its rule allows it:
    results are BATCHED, or PARTIAL where the factor is summed. A FREE operand with that factor is sliced.
 2. An equation linear in its PARTIAL operands (the others FREE) keeps them PARTIAL.
 3. Anything else needs the whole batch. If it depends on no parameter it moves to the prologue and is FREE;
    otherwise its operands are finalised (summed, or stacked) and it runs after the loop, in the update phase.
    That is exact, but where the gradient needs stacked examples (batch normalisation, contrastive logits) it would
    undo the microbatching: such couplings are reported with the user's line.
 4. A separable equation (the fence around rematerialisation) passes each operand's state on to its result.

`split_batch` then rewrites the graph for a number of microbatches, each loop equation by its rule's own `emit`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.errors import BatchAxisError, MicrobatchError
from autopar.ir.graph import BatchDim, Equation, Graph, Phase, Value
from autopar.ir.rule import Rule, RuleOf
from autopar.passes.example_reductions import EXTREMES, in_two_steps, is_of_more
from autopar.passes.rules.split import Split, Unsplittable, batch_in_dims, split_of
from autopar.tracing.build import live_equations


class Kind(enum.Enum):
    """How a value depends on the microbatch; see the module."""

    FREE = "free"
    BATCHED = "batched"
    PARTIAL = "partial"
    FINAL = "final"
    ALIKE = "alike"


class When(enum.Enum):
    """When an equation runs."""

    FREE = "free"  # whenever it is wanted
    BEFORE = "before"  # prologue, on the whole batch
    LOOP = "loop"
    AFTER = "after"


@dataclasses.dataclass(frozen=True)
class State:
    """How a value depends on the microbatch."""

    kind: Kind
    batch: BatchDim | None = None  # BATCHED only
    parameters: bool = False  # depends on a parameter


@dataclasses.dataclass(frozen=True)
class Coupling:
    """An equation on the way to a gradient that needs several microbatches at once."""

    equation: Equation
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class BatchAnalysis:
    """What is known about a graph before the number of microbatches is chosen."""

    graph: Graph
    rules: Mapping[int, Rule]  # by equation id
    batch_size: int
    states: Mapping[Value, State]
    when: Mapping[int, When]  # by equation id
    splits: Mapping[int, Split]  # by equation id, loop equations with a batched operand
    before: Mapping[int, frozenset[Value]]  # operands that an equation takes from the prologue
    couplings: tuple[Coupling, ...]
    max_microbatches: int  # legal numbers of microbatches divide this

    @property
    def most_microbatches(self) -> int:
        """Possible numbers of microbatches divide this: 1 where examples are coupled."""
        return 1 if self.couplings else self.max_microbatches

    def check(self, num_microbatches: int) -> None:
        """Raise unless the step can be cut into this many microbatches.

        Raises:
          MicrobatchError: examples are coupled, and `num_microbatches` is more than one.
          BatchAxisError: the batch is not divisible.
        """
        if num_microbatches == 1:
            return
        if num_microbatches < 1:
            raise BatchAxisError(f"num_microbatches={num_microbatches}: must be 1 or more.")
        if self.couplings:
            first = self.couplings[0]
            raise MicrobatchError(
                f"num_microbatches={num_microbatches}: {self.graph.name} couples the examples of its batch at "
                f"{first.equation.source or 'an unknown line'} ({first.equation.primitive.name}: {first.reason}). "
                "Use num_microbatches=1 (sharding over devices is still free), or compute it per example."
            )
        if self.max_microbatches % num_microbatches:
            unit = self.batch_size // self.max_microbatches
            raise BatchAxisError(
                f"num_microbatches={num_microbatches} does not divide the batch of {self.batch_size}"
                + (f" in groups of {unit} examples" if unit > 1 else "")
                + f" ({self._arguments}). Use a divisor of {self.max_microbatches}."
            )

    @property
    def _arguments(self) -> str:
        """The batch arguments, each with its batch axis."""
        arguments = [
            f"axis {batch.dim} of {path}"
            for v, path in zip(self.graph.inputs, self.graph.input_paths, strict=True)
            if (batch := self.states[v].batch) is not None
        ]
        return ", ".join(arguments[:3]) + (f" and {len(arguments) - 3} more" if len(arguments) > 3 else "")

    def check_shards(self, num_microbatches: int, data_shards: int, method: str) -> None:
        """Raise unless every microbatch has a whole number of examples for each of a method's data shards.

        Raises:
          BatchAxisError: it has not.
        """
        pieces = num_microbatches * data_shards
        if pieces > 1 and all(state.batch is None for state in self.states.values()):
            raise BatchAxisError(
                f"method {method!r} shares out the examples of a batch, of which {self.graph.name} has none "
                "(batch_axes=None). Use method='auto' or another recipe."
            )
        if self.batch_size % pieces:
            raise BatchAxisError(
                f"method {method!r}: the batch of {self.batch_size} is not divisible by {num_microbatches} "
                f"microbatches × {data_shards} data shards = {pieces} ({self._arguments}). Use a batch that is a "
                f"multiple of {pieces} (padded with examples of weight 0, if need be), fewer microbatches, fewer "
                "devices, or method='auto'."
            )


def analyse_batch(graph: Graph, batch_axes: Mapping[Value, int], rule_of: RuleOf) -> BatchAnalysis:
    """How everything in `graph` depends on the examples; `batch_axes` gives the batch axis of the batch inputs.

    Raises:
      BatchAxisError: no batch input, an axis out of range, or different batch sizes.
    """
    batch_size = batch_size_of(graph, batch_axes)
    analysis = _analysed(graph, batch_axes, rule_of, batch_size)
    waiting = {eqn.id: batch for eqn in graph.equations if (batch := analysis.waits_for_examples(eqn)) is not None}
    if waiting:
        graph = in_two_steps(graph, waiting)
        analysis = _analysed(graph, batch_axes, rule_of, batch_size)
    return BatchAnalysis(
        graph, analysis.rules, batch_size, analysis.states, analysis.when, analysis.splits, analysis.before,
        _on_the_way_to_a_gradient(graph, analysis.couplings), math.gcd(analysis.units, batch_size),
    )  # fmt: skip


def _analysed(graph: Graph, batch_axes: Mapping[Value, int], rule_of: RuleOf, batch_size: int) -> _Analysis:
    analysis = _Analysis(graph, batch_axes, {eqn.id: rule_of(eqn) for eqn in graph.equations}, batch_size)
    for eqn in graph.equations:
        analysis.add(eqn)
    return analysis


class _Analysis:
    """What is known of the values, equation by equation."""

    def __init__(
        self, graph: Graph, batch_axes: Mapping[Value, int], rules: Mapping[int, Rule], batch_size: int
    ) -> None:
        self.rules, self.units = rules, batch_size
        self.states: dict[Value, State] = {}
        for i, value in enumerate(graph.inputs):
            if value in batch_axes:
                self.states[value] = State(Kind.BATCHED, BatchDim(batch_axes[value], 1, batch_size, 1))
            else:
                inexact = isinstance(value.dtype, np.dtype) and jnp.issubdtype(value.dtype, jnp.inexact)
                parameters = inexact and (i in graph.carried.values() or value.shape != ())
                self.states[value] = State(Kind.FREE, parameters=parameters)
        for value in graph.constants:
            self.states[value] = State(Kind.FREE)
        self.when: dict[int, When] = {}
        self.splits: dict[int, Split] = {}
        self.before: dict[int, frozenset[Value]] = {}
        self.couplings: list[Coupling] = []
        self.examples_nbytes = sum(v.nbytes for v in batch_axes)
        self.extremes: dict[Value, Coupling] = {}  # what is made of the largest of all examples, by what that is

    def waits_for_examples(self, eqn: Equation) -> BatchDim | None:
        """How examples lie in the operand of an equation that waits for all of them, but need not keep them whole."""
        if eqn.primitive.name not in EXTREMES or self.when[eqn.id] is not When.AFTER:
            return None
        (operand,) = eqn.values
        batch = self.states[operand].batch
        return batch if batch is not None and is_of_more(eqn, batch) else None

    def add(self, eqn: Equation) -> None:
        """The next equation."""
        states, rule = self.states, self.rules[eqn.id]
        parameters = any(states[v].parameters for v in eqn.values)
        kinds = {v: states[v].kind for v in eqn.values}
        if rule.separable and {Kind.BATCHED, Kind.PARTIAL, Kind.ALIKE} & set(kinds.values()):
            self.before[eqn.id] = frozenset()
            self.when[eqn.id] = When.LOOP
            for out, v in zip(eqn.outputs, eqn.inputs, strict=True):
                states[out] = states[v] if isinstance(v, Value) else State(Kind.FREE)
            return
        partial = [i for i, v in enumerate(eqn.inputs) if isinstance(v, Value) and kinds[v] is Kind.PARTIAL]
        moved = frozenset[Value]()
        if partial and not _stays_partial(rule, partial, kinds.values()):
            # Step 3: sums that no parameter enters are taken from the prologue.
            moved = frozenset(v for v, k in kinds.items() if k is Kind.PARTIAL and not states[v].parameters)
            kinds.update(dict.fromkeys(moved, Kind.FREE))
            partial = [i for i in partial if eqn.inputs[i] not in moved]
        self.before[eqn.id] = moved
        present = set(kinds.values())
        batches = {
            i: b for i, v in enumerate(eqn.inputs)
            if isinstance(v, Value) and kinds[v] is Kind.BATCHED and (b := states[v].batch) is not None
        }  # fmt: skip
        once = "once is enough"
        if Kind.FINAL in present:
            self._wait(eqn, "it needs a result of the whole batch", parameters, coupled=bool(batches))
        elif partial and not _stays_partial(rule, partial, present):
            reason = "it combines a sum over the batch with " + ("single examples" if batches else "other values")
            self._wait(eqn, reason, parameters, coupled=bool(batches))
        elif partial:
            if eqn.phase is Phase.UPDATE or rule.unit == "matmul":
                self._wait(eqn, once, parameters, coupled=bool(batches))
            else:
                self._all(eqn, When.LOOP, Kind.PARTIAL, parameters)
        elif batches:
            self._split(eqn, batches, parameters)
        elif Kind.ALIKE in present:
            if eqn.phase is Phase.UPDATE:
                self._wait(eqn, once, parameters, coupled=False)
            else:
                self._all(eqn, When.LOOP, Kind.ALIKE, parameters)
        else:
            self._all(eqn, When.FREE, Kind.FREE, parameters)

    def _wait(self, eqn: Equation, reason: str, parameters: bool, *, coupled: bool) -> None:
        """An equation that is computed of the whole batch; `coupled`: though it has single examples."""
        self._all(eqn, When.AFTER, Kind.FINAL, parameters)
        cause = next((self.extremes[v] for v in eqn.values if v in self.extremes), None)
        if coupled and eqn.phase is not Phase.UPDATE:
            self.couplings.append(cause or Coupling(eqn, reason))
        if cause is not None:
            self.extremes.update(dict.fromkeys(eqn.outputs, cause))

    def _all(self, eqn: Equation, when: When, kind: Kind, parameters: bool) -> None:
        """All results of an equation are of a kind."""
        self.when[eqn.id] = when
        self.states.update((v, State(kind, None, parameters)) for v in eqn.outputs)

    def _split(self, eqn: Equation, batches: Mapping[int, BatchDim], parameters: bool) -> None:
        """An equation of single examples."""
        rule = self.rules[eqn.id]
        try:
            split = split_of(rule, batches)
            if rule.communicates(split.factor):
                raise Unsplittable("its pieces need something of one another")
        except Unsplittable as error:
            if parameters:
                # What each example gives is little to keep: only what needs the whole batch's result is coupled.
                kept = sum(v.nbytes for v in eqn.values if self.states[v].kind is Kind.BATCHED)
                is_little = eqn.primitive.name in EXTREMES and kept <= self.examples_nbytes
                if is_little:
                    self.extremes.update(dict.fromkeys(eqn.outputs, Coupling(eqn, str(error))))
                self._wait(eqn, str(error), parameters, coupled=not is_little)
                return
            self.before[eqn.id] = frozenset(eqn.values)
            self._all(eqn, When.BEFORE, Kind.FREE, False)
            return
        self.splits[eqn.id] = split
        self.when[eqn.id] = When.LOOP
        self.units = math.gcd(self.units, split.batch.units)
        for k, (v, dims) in enumerate(zip(eqn.outputs, rule.outputs, strict=True)):
            batch = batch_in_dims(split, dims, rule.factors)
            without = Kind.PARTIAL if rule.is_partial_sum(split.factor, k) else Kind.ALIKE
            self.states[v] = State(without if batch is None else Kind.BATCHED, batch, parameters)


def _on_the_way_to_a_gradient(graph: Graph, couplings: Sequence[Coupling]) -> tuple[Coupling, ...]:
    """Without those that only results need (the largest loss of the batch): these may wait for the whole batch."""
    for_gradient: set[Value] = set()
    # What is rematerialised in the backward pass only to be printed leads to no gradient.
    returned = {eqn.id for eqn in live_equations(graph.equations, graph.returned)}
    for eqn in reversed(graph.equations):
        if (eqn.phase is Phase.BACKWARD and eqn.id in returned) or any(v in for_gradient for v in eqn.outputs):
            for_gradient.update(eqn.values)
            for_gradient.update(eqn.outputs)
    return tuple(c for c in couplings if any(v in for_gradient for v in c.equation.outputs))


def _stays_partial(rule: Rule, partial: Sequence[int], kinds: Any) -> bool:
    return frozenset(partial) in rule.linear and not {Kind.BATCHED, Kind.FINAL} & set(kinds)


def batch_size_of(graph: Graph, batch_axes: Mapping[Value, int]) -> int:
    """How many examples there are; 1 if no argument holds any.

    Raises:
      BatchAxisError: an axis is out of range, or batch sizes differ.
    """
    sizes: dict[int, str] = {}
    for value, path in zip(graph.inputs, graph.input_paths, strict=True):
        axis = batch_axes.get(value)
        if axis is None:
            continue
        if not -len(value.shape) <= axis < len(value.shape):
            raise BatchAxisError(f"batch_axes: {path} has shape {value.shape}, hence no axis {axis}.")
        sizes.setdefault(value.shape[axis], path)
    if not sizes:
        return 1  # the step makes its own examples
    if len(sizes) > 1:
        met = ", ".join(f"{path}: {size}" for size, path in sizes.items())
        raise BatchAxisError(f"batch_axes: the batch arguments have different sizes along their batch axes ({met}).")
    ((size, path),) = sizes.items()
    if not size:
        raise BatchAxisError(
            f"the batch of {graph.name} is empty: {path} has no examples along axis "
            f"{next(axis for v, axis in batch_axes.items() if not v.shape[axis])}. Leave out the call."
        )
    return size
