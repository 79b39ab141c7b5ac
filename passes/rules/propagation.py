"""A cut carried through the body of a loop: what else is cut, summed or left whole by it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.cost_model.fusion import memory_traffic
from autopar.ir.graph import BatchDim, Equation, Operand, Value
from autopar.ir.local import Traffic
from autopar.ir.rule import DimMap, Local, Rule
from autopar.passes.rules.split import (
    Split,
    Unsplittable,
    batch_in_dims,
    batch_to_factor,
    check_position,
    split_of,
)

_MAX_ROUNDS = 100  # of propagation, for one cut


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """One or several jaxprs with the same inputs, as equations with their rules."""

    equations: tuple[Equation, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Operand, ...]
    constants: Mapping[Value, Any]
    rules: Mapping[int, Rule]
    carried: Mapping[int, int]  # output index -> input index that it becomes in the next round
    agreeing: tuple[tuple[int, ...], ...] = ()  # outputs that must be in the same state (of branches)
    whole: tuple[int, ...] = ()  # outputs that every piece must have whole

    @functools.cached_property
    def by_id(self) -> Mapping[int, Equation]:
        """Equations by id."""
        return {e.id: e for e in self.equations}

    @functools.cached_property
    def producer(self) -> Mapping[Value, Equation]:
        """The equation that makes a value."""
        return {v: e for e in self.equations for v in e.outputs}

    @functools.cached_property
    def readers(self) -> Mapping[Value, Sequence[tuple[Equation, int]]]:
        """The equations that read a value, each with the operand's position."""
        readers: dict[Value, list[tuple[Equation, int]]] = defaultdict(list)
        for e in self.equations:
            for i, v in enumerate(e.inputs):
                if isinstance(v, Value):
                    readers[v].append((e, i))
        return readers

    @functools.cached_property
    def traffic(self) -> Mapping[int, Traffic]:
        """By equation: what goes through memory in one round."""
        outputs = [v for v in self.outputs if isinstance(v, Value)]
        return memory_traffic(self.equations, self.rules, self.inputs, outputs)

    def flops(self, equation: Equation) -> float:
        """Work of one equation in one round."""
        return self.rules[equation.id].work({})

    @functools.cached_property
    def split_from(self) -> Callable[[int, tuple[tuple[int, BatchDim], ...]], Split | None]:
        """The factor that an equation, by id, splits if these operands come in pieces; None if it cannot."""

        @functools.cache
        def find(eqn: int, batches: tuple[tuple[int, BatchDim], ...]) -> Split | None:
            rule = self.rules[eqn]
            try:
                split = split_of(rule, dict(batches), takes_extremes=True)
            except Unsplittable:
                return None
            return None if any(halo.factor == split.factor for halo in rule.halos) else split  # it has no neighbours

        return find

    @functools.cached_property
    def pieces(self) -> Callable[[int, Split], tuple[Sequence[BatchDim | None], Sequence[State]]]:
        """What an equation, by id, reads and what it makes if it splits a factor."""

        @functools.cache
        def find(eqn: int, split: Split) -> tuple[Sequence[BatchDim | None], Sequence[State]]:
            rule = self.rules[eqn]
            results: list[State] = [batch_in_dims(split, dims, rule.factors) for dims in rule.outputs]
            for k, piece in enumerate(results):
                if piece is None and rule.is_partial_sum(split.factor, k):
                    results[k] = PARTIAL
            return [batch_in_dims(split, dims, rule.factors) for dims in rule.inputs], results

        return find


class _Partial:
    """State of a value whose pieces are partial sums."""


PARTIAL = _Partial()
State = BatchDim | _Partial | None  # None: every piece has the whole


@dataclasses.dataclass(frozen=True, eq=False)
class BodyCut:
    """One way to split a body."""

    units: int  # into how many pieces at most; others must divide it
    states: Mapping[Value, State]  # those that are not None
    splits: Mapping[int, Split]  # by equation id: the factor it splits
    passing: frozenset[int]  # ids of equations that keep partial sums, or pass each state on
    sums: frozenset[Value]  # partial sums that some reader needs summed
    slices: Mapping[tuple[int, int], BatchDim]  # (equation id, operand): a whole value of which it takes a slice
    ends: frozenset[int]  # outputs whose partial sums are summed before they leave
    # (equation id, operand): a whole value that is added to partial sums, and so counts on the first piece alone.
    on_first: frozenset[tuple[int, int]] = frozenset()

    @property
    def sent(self) -> int:
        """Bytes of what is added up in each round, before and after."""
        return sum(v.nbytes + v.sum_nbytes for v in self.sums)

    def leaving(self, body: Body, output: int) -> State:
        """How an output leaves the body."""
        return None if output in self.ends else self.state(body.outputs[output])

    def state(self, operand: Operand) -> State:
        return _state(self.states, operand)


def is_gathered(eqn: Equation, v: Value, sums: BodyCut, between: BodyCut) -> bool:
    """Whether an equation needs a value whole that comes in pieces between the sums of a cut.

    It does not where the other cut splits it, nor where it takes the value before it is summed.
    """
    if eqn.id in between.splits or eqn.id in between.passing or not isinstance(between.states.get(v), BatchDim):
        return False
    return eqn.id not in sums.passing or sums.states.get(v) is not PARTIAL


def widens(eqn: Equation) -> bool:
    """Whether an equation's result has more bytes than its operands."""
    return eqn.outputs[0].nbytes > sum(v.nbytes for v in eqn.values) > 0


class _Failed(Exception):
    """There is no such cut."""


class Propagation:
    """Finds the cut that follows from splitting some inputs of a body."""

    def __init__(
        self, body: Body, *, before_widening: bool = False, on_first: bool = False, gathers: bool = False,
        alone: bool = False,
    ) -> None:  # fmt: skip
        self.body = body
        self.gathers = gathers  # whether an equation that cannot take pieces gathers them
        self.alone = alone  # whether partial sums are added up before they meet what is whole
        self.before_widening = before_widening  # whether partial sums are added up before they become wider
        self.may_be_on_first = on_first  # whether what is whole may be added to partial sums, see `BodyCut`
        self.given: dict[Value, State] = {}  # inputs
        self.chosen: dict[int, Split] = {}  # equations without split operands that make what others want split
        self.ends: set[int] = set()  # outputs whose partial sums are summed before they leave

    def run(self, seeds: Mapping[Value, State]) -> BodyCut | None:
        self.given = dict(seeds)
        try:
            for _ in range(_MAX_ROUNDS):
                self._forward()
                if not (self._tie() or self._demand()):
                    return self._cut()
        except _Failed:
            pass
        return None

    def _forward(self) -> None:
        self.states: dict[Value, State] = dict(self.given)
        self.splits: dict[int, Split] = {}
        self.passing: set[int] = set()
        self.sums: set[Value] = set()
        self.wanted: dict[Value, list[BatchDim | None]] = defaultdict(list)  # what readers want of whole values
        self.slices: dict[tuple[int, int], BatchDim] = {}
        self.on_first: set[tuple[int, int]] = set()
        for eqn in self.body.equations:
            if eqn.id in self.chosen or any(self.states.get(v) is not None for v in eqn.values):
                self._equation(eqn)
            elif not self.body.rules[eqn.id].separable:  # that wants what its readers want
                for v in eqn.values:
                    self.wanted[v].append(None)

    def _equation(self, eqn: Equation) -> None:
        rule = self.body.rules[eqn.id]
        if rule.separable:
            self.passing.add(eqn.id)
            for v, out in zip(eqn.inputs, eqn.outputs, strict=True):
                if isinstance(v, Value) and self.states.get(v) is not None:
                    self.states[out] = self.states[v]
            return
        states = [_state(self.states, v) for v in eqn.inputs]
        partial = frozenset(i for i, s in enumerate(states) if s is PARTIAL)
        batches = {i: s for i, s in enumerate(states) if isinstance(s, BatchDim)}
        together = self._linear_in(eqn, partial)
        passes = together is not None and not (self.before_widening and widens(eqn))
        if self.alone and any(isinstance(v, Value) and i not in partial for i, v in enumerate(eqn.inputs)):
            passes = False
        if partial and not batches and eqn.id not in self.chosen and passes:
            self.passing.add(eqn.id)
            self.on_first.update((eqn.id, i) for i in (together or partial) - partial)
            self.states.update(dict.fromkeys(eqn.outputs, PARTIAL))
            for i, v in enumerate(eqn.inputs):
                if isinstance(v, Value) and i not in partial:
                    self.wanted[v].append(None)
            return
        self.sums.update(eqn.inputs[i] for i in partial)  # type: ignore[misc]
        split = self.chosen.get(eqn.id)
        if batches:
            split = self.body.split_from(eqn.id, tuple(batches.items()))
            if self.gathers and (split is None or not self._is_in_order(eqn, split)):
                return
            if split is None:
                raise _Failed
        if split is None:
            return
        self.splits[eqn.id] = split
        read, made = self.body.pieces(eqn.id, split)
        for i, (v, piece) in enumerate(zip(eqn.inputs, read, strict=True)):
            if not isinstance(v, Value) or i in batches:
                continue
            if piece is not None:
                self.slices[eqn.id, i] = piece
            if states[i] is None:
                self.wanted[v].append(piece)
        self.states.update((v, state) for v, state in zip(eqn.outputs, made, strict=True) if state is not None)

    def _is_in_order(self, eqn: Equation, split: Split) -> bool:
        """Whether all pieces are consecutive, so that they can be gathered."""
        read, made = self.body.pieces(eqn.id, split)
        return all(piece.outer == 1 for piece in (*read, *made) if isinstance(piece, BatchDim))

    def _linear_in(self, eqn: Equation, partial: frozenset[int]) -> frozenset[int] | None:
        """The operands in which an equation is linear, those that are partial sums among them; None if in none such.

        There are others among them only where these may be taken on the first piece alone.
        """
        linear = self.body.rules[eqn.id].linear
        if partial in linear or not self.may_be_on_first:
            return partial if partial in linear else None
        return next((members for members in linear if partial < members), None)

    def _leaving(self, output: int) -> State:
        state = _state(self.states, self.body.outputs[output])
        return None if state is PARTIAL and output in self.ends else state

    def _tie(self) -> bool:
        """The carry must come out as it went in, and branches agree; True if something had to be changed for it."""
        changed = False
        for o, i in self.body.carried.items():
            entering = self.body.inputs[i]
            before, after = self.states.get(entering), self._leaving(o)
            if before is PARTIAL and entering in self.sums:  # its readers sum it: then once, where it leaves
                after = None
            if _alike(before, after):
                continue
            if before is None:
                self.given[entering] = after
            elif before is PARTIAL and after is None:
                self.given.pop(entering)
                self.ends.add(o)
            elif after is None:
                self._ask(o, before)
                continue
            else:
                raise _Failed
            changed = True
        for group in self.body.agreeing:
            states = {o: self._leaving(o) for o in group}
            split = next((s for s in states.values() if isinstance(s, BatchDim)), None)
            for o, state in states.items():
                if split is None and state is PARTIAL and not all(s is PARTIAL for s in states.values()):
                    self.ends.add(o)
                    changed = True
                elif split is not None and state is None:
                    self._ask(o, split)
                elif split is not None and not _alike(split, state):
                    raise _Failed
        if any(self._leaving(o) is not None for o in self.body.whole):
            raise _Failed
        return changed

    def _ask(self, output: int, state: State) -> None:
        """An output should leave in pieces."""
        out = self.body.outputs[output]
        if isinstance(out, Value) and isinstance(state, BatchDim):
            self.wanted[out].append(state)

    def _settled(self) -> bool:
        carried = all(
            _alike(self.states.get(self.body.inputs[i]), self._leaving(o)) for o, i in self.body.carried.items()
        )
        return carried and all(
            _alike(self._leaving(group[0]), self._leaving(o)) for group in self.body.agreeing for o in group
        )

    def _demand(self) -> bool:
        """Let what every reader wants split in the same way be made so; True if something changed."""
        body = self.body
        for eqn in reversed(body.equations):
            rule = body.rules[eqn.id]
            if rule.separable:
                for v, out in zip(eqn.inputs, eqn.outputs, strict=True):
                    if isinstance(v, Value) and out in self.wanted:
                        self.wanted[v] += self.wanted[out]
        changed = False
        for v, wishes in self.wanted.items():
            wish = wishes[0] if wishes else None
            if wish is None or any(not _alike(wish, w) for w in wishes) or self.states.get(v) is not None:
                continue
            if v in body.producer:
                eqn = body.producer[v]
                rule = body.rules[eqn.id]
                if eqn.id in self.splits or eqn.id in self.chosen or rule.separable:
                    continue
                split = self._wished(eqn, rule)
                if split is None:
                    continue
                # Where the batch is not the major dimension no piece has a position; such a value is sliced.
                if split.factor in rule.whole or any(halo.factor == split.factor for halo in rule.halos):
                    continue
                if split.batch.units < wish.units or split.batch.outer > 1:
                    continue
                self.chosen[eqn.id] = split
                changed = True
                continue
            if v in body.constants or v.is_key:
                continue
            self.given[v] = wish
            changed = True
        if changed:
            return True
        if not self._settled():
            raise _Failed  # no one could split what leaves whole
        return False

    def _wished(self, eqn: Equation, rule: Rule) -> Split | None:
        """How an equation would be split by which all of its results come out as they are wanted, if that is one."""
        found = None
        for out, dims in zip(eqn.outputs, rule.outputs, strict=True):
            for wish in self.wanted.get(out, ()):
                if wish is None:
                    return None
                try:
                    split = batch_to_factor(wish, dims[wish.dim], rule.factors)
                except (Unsplittable, IndexError):
                    return None
                if found is not None and split != found:
                    return None
                found = split
        return found

    def _cut(self) -> BodyCut | None:
        units = 0
        for state in self.states.values():
            if isinstance(state, BatchDim):
                units = math.gcd(units, state.units)
        for split in self.splits.values():
            units = math.gcd(units, split.batch.units)
        for piece in self.slices.values():
            units = math.gcd(units, piece.units)
        if units < 2 or not all(self._needs_no_position(e) for e in self.body.equations if e.id in self.splits):
            return None
        states = {v: s for v, s in self.states.items() if s is not None}
        ends = frozenset(o for o in self.ends if _state(states, self.body.outputs[o]) is PARTIAL)
        self.sums.update(self.body.outputs[o] for o in ends)  # type: ignore[misc]
        slices = {}
        for (e, i), piece in self.slices.items():
            operand = self.body.by_id[e].inputs[i]
            if _state(states, operand) is None or operand in self.sums:
                slices[e, i] = piece
        return BodyCut(
            units, states, dict(self.splits), frozenset(self.passing), frozenset(self.sums), slices, ends,
            frozenset(self.on_first),
        )  # fmt: skip

    def _needs_no_position(self, eqn: Equation) -> bool:
        """Whether the pieces can be computed where the split dimension is not the major one."""
        rule, split = self.body.rules[eqn.id], self.splits[eqn.id]
        if split.batch.outer == 1:
            return True
        local = _Anywhere(rule, split)

        def shape(v: Operand, dims: DimMap) -> Any:
            sizes = tuple(math.prod(local.size(f) for f in dim) for dim in dims)
            return jax.ShapeDtypeStruct(sizes, v.dtype) if isinstance(v, Value) else v.value

        operands = [shape(v, dims) for v, dims in zip(eqn.inputs, rule.inputs, strict=True)]
        arrays = [x for x in operands if isinstance(x, jax.ShapeDtypeStruct)]

        def emit(*xs: Any) -> Any:
            supply = iter(xs)
            return rule.emit(local, eqn, [next(supply) if isinstance(x, jax.ShapeDtypeStruct) else x for x in operands])

        try:
            jax.eval_shape(emit, *arrays)
        except Unsplittable:
            return False
        return True


@dataclasses.dataclass(frozen=True)
class _Anywhere(Local):
    """A piece without a position."""

    rule: Rule
    split: Split

    def size(self, factor: int) -> int:
        return self.rule.factors[factor] // (self.split.batch.units if self.is_split(factor) else 1)

    def is_split(self, factor: int) -> bool:
        return factor == self.split.factor

    def start(self, factor: int) -> Any:
        if self.is_split(factor):
            check_position(self.split.batch)
        return 0


def _state(states: Mapping[Value, State], operand: Operand) -> State:
    return states.get(operand) if isinstance(operand, Value) else None


def _alike(a: State, b: State) -> bool:
    if isinstance(a, BatchDim) and isinstance(b, BatchDim):
        return (a.dim, a.outer, a.size) == (b.dim, b.outer, b.size)
    return a is b
