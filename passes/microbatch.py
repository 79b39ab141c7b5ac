"""The step cut into microbatches: what the batch analysis decided, carried out.

Each loop equation is rewritten to one microbatch's sizes by its rule's own `emit`, traced; batch-free values are
emitted where they are wanted first, sliced versions by their own equation where that can be split (iota, random
bits), else by a slice of the whole. What crosses the end of the loop is summed (partial sums) or joined (examples).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import MicrobatchError
from autopar.ir.context import Pairs
from autopar.ir.graph import BatchDim, Equation, Literal, Operand, Phase, StepGraph, Value, operand_signature
from autopar.ir.rule import Local, Rule, emit_piece
from autopar.ir.sharding import StepKind
from autopar.passes.batch import BatchAnalysis, Kind, When
from autopar.passes.rules.split import (
    Split,
    Unsplittable,
    batch_in_dims,
    batch_to_factor,
    check_position,
    slice_units,
)
from autopar.tracing.build import Builder, live_equations, trace_emission


@dataclasses.dataclass
class _TimeLocal(Local):
    """The piece of one microbatch, for `emit`."""

    rule: Rule
    split: Split | None  # None: every microbatch computes the whole
    num_microbatches: int
    index: Any  # traced int32 scalar

    def size(self, factor: int) -> int:
        whole = self.rule.factors[factor]
        return whole // self.num_microbatches if self.is_split(factor) else whole

    def is_split(self, factor: int) -> bool:
        return self.split is not None and factor == self.split.factor

    def start(self, factor: int) -> Any:
        if self.split is None or not self.is_split(factor):
            return 0
        check_position(self.split.batch)
        return self.index * self.size(factor)

    def number(self, factor: int) -> Any:
        return self.index if self.is_split(factor) else 0

    def total(self, factor: int, x: Any, value: Value) -> Any:
        raise Unsplittable("examples are added up on the way")

    def extreme(self, factor: int, x: Any, largest: bool) -> Any:
        raise Unsplittable("examples are compared on the way")

    def halo(self, factor: int, x: Any, dim: int, before: int, after: int, fill: Any) -> Any:
        if before or after:
            raise Unsplittable("windows reach from one microbatch into the next")
        return x

    def send(self, factor: int, x: Any, kind: StepKind, dim: int = 0, to_dim: int = 0, pairs: Pairs = ()) -> Any:
        raise Unsplittable("positions of attention lie in several microbatches")


class _Splitter:
    """Rewrites a graph for a number of microbatches."""

    def __init__(self, analysis: BatchAnalysis, num_microbatches: int) -> None:
        self.analysis = analysis
        self.m = num_microbatches
        self.graph = analysis.graph
        self.producer = {v: eqn for eqn in self.graph.equations for v in eqn.outputs}
        self.builder = Builder(self.graph.next_value_id, least_sum_bytes=self.graph.least_sum_bytes)
        self.microbatch = self.builder.value(jax.ShapeDtypeStruct((), jnp.int32))
        self.loop: dict[tuple[Value, BatchDim | None], Operand] = {}  # loop operands, sliced versions of FREE ones too
        self.full: dict[Value, Operand] = {}  # FREE and FINAL values in full size
        self.prologue: dict[Value, Operand] = {}
        self.feeds: dict[Value, tuple[Value, BatchDim]] = {}
        self.accumulate: dict[Value, Value] = {}
        self.keep: dict[Value, tuple[Value, ...]] = {}
        self.made_in_loop: set[Value] = set()  # by those equations that were looked at, so many
        self.num_indexed = 0
        self.backward: set[Operand] = set()  # loop values that depend on the backward pass
        self.replicable: set[int] = set()
        self.partial: set[Value] = set()
        self.behind_fence = self._find_behind_fence()
        self.keys_in_loop: set[Value] = set()
        self.emissions: dict[Hashable, Any] = {}  # closed jaxprs; equal equations are traced once

    def run(self) -> StepGraph:
        analysis, builder = self.analysis, self.builder
        inputs = set(self.graph.inputs) | set(self.graph.constants)
        for value in inputs:
            self.full[value] = self.prologue[value] = value
        for eqn in self.graph.equations:
            when = analysis.when[eqn.id]
            if when is When.FREE:
                pass  # emitted when wanted
            elif when is When.BEFORE:
                self._prologue_of(eqn.outputs[0])
            elif when is When.LOOP:
                self._emit_loop(eqn)
            else:
                operands = [self._after(v, eqn) for v in eqn.inputs]
                self._copy(eqn, operands, Phase.UPDATE, self.full)
        outputs = tuple(self._after(v, None) for v in self.graph.outputs)
        equations = _in_phase_order(live_equations(builder.equations, self._wanted(outputs)), outputs, self)
        live = {v for eqn in equations for v in (*eqn.values, *eqn.outputs)} | set(outputs)
        batched: set[Value] = set(self.feeds)
        for eqn in equations:
            if eqn.phase.in_loop and any(v in batched or v is self.microbatch for v in eqn.values):
                batched.update(eqn.outputs)
        return StepGraph(
            self.graph, self.m, tuple(equations), {**self.graph.constants, **builder.constants}, self.microbatch,
            {k: v for k, v in self.feeds.items() if k in live},
            {k: v for k, v in self.accumulate.items() if v in live},
            {k: v for k, v in self.keep.items() if v[0] in live},
            outputs, frozenset(self.replicable), frozenset(batched), frozenset(self.partial),
        )  # fmt: skip

    def _wanted(self, outputs: Sequence[Operand]) -> list[Operand]:
        """Outputs and everything that reaches them over the end of the loop."""
        return [*outputs, *self.accumulate, *self.keep]

    def _copy(
        self, eqn: Equation, operands: Sequence[Operand], phase: Phase, env: dict[Value, Operand]
    ) -> tuple[Value, ...]:
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.weak_type) for v in eqn.outputs]
        outputs = self.builder.add(eqn.primitive, eqn.params, operands, avals, phase, eqn.source)
        env.update(zip(eqn.outputs, outputs, strict=True))
        return outputs

    def _free(self, v: Operand) -> Operand:
        """A FREE value in full size, emitted at its first use."""
        v = self._unfenced(v)
        if isinstance(v, Literal) or v in self.full:
            return v if isinstance(v, Literal) else self.full[v]
        for eqn in self._cone(v, self.full):
            if self.analysis.when[eqn.id] is When.BEFORE:
                self.full.update({out: self._prologue_of(out) for out in eqn.outputs})
                continue
            moved = self.analysis.before[eqn.id]
            operands = [self._prologue_of(x) if x in moved else self._have(x, self.full) for x in eqn.inputs]
            self._copy(eqn, operands, Phase.PROLOGUE, self.full)
            rule = self.analysis.rules[eqn.id]
            if rule.unit != "matmul" and not rule.replicates and not moved:
                self.replicable.add(self.builder.equations[-1].id)
        return self.full[v]

    def _prologue_of(self, v: Operand) -> Operand:
        """A value that no parameter enters, computed over the whole batch before the loop."""
        v = self._unfenced(v)
        if isinstance(v, Literal) or v in self.prologue:
            return v if isinstance(v, Literal) else self.prologue[v]
        for eqn in self._cone(v, self.prologue):
            operands = [self._have(x, self.prologue) for x in eqn.inputs]
            self._copy(eqn, operands, Phase.PROLOGUE, self.prologue)
        return self.prologue[v]

    def _unfenced(self, v: Operand) -> Operand:
        """What the loop's separable equations pass on as `v`: outside of the loop they are left out."""
        while (eqn := self.producer.get(v)) is not None and self._is_fence(eqn):  # type: ignore[arg-type]
            v = eqn.inputs[eqn.outputs.index(v)]
        return v

    def _is_fence(self, eqn: Equation) -> bool:
        return self.analysis.rules[eqn.id].separable and self.analysis.when[eqn.id] is When.LOOP

    def _have(self, v: Operand, env: Mapping[Value, Operand]) -> Operand:
        v = self._unfenced(v)
        return v if isinstance(v, Literal) else env[v]

    def _cone(self, v: Value, have: Mapping[Value, Operand]) -> list[Equation]:
        """Equations still missing for `v`, in order."""
        missing: dict[int, Equation] = {}
        stack = [v]
        while stack:
            w = self._unfenced(stack.pop())
            if isinstance(w, Literal) or w in have:
                continue
            eqn = self.producer[w]
            if eqn.id not in missing:
                missing[eqn.id] = eqn
                moved = self.analysis.before[eqn.id] if have is self.full else frozenset()
                stack.extend(x for x in eqn.values if x not in moved)
        return [missing[i] for i in sorted(missing)]

    def _in_loop(self, v: Operand, batch: BatchDim | None, moved: frozenset[Value]) -> Operand:
        """An operand of a loop equation; a FREE one is sliced if `batch` asks for it."""
        if isinstance(v, Literal):
            return v
        if v in moved:  # the loop may have its partial sums as well
            whole = self._prologue_of(v)
            return whole if batch is None else self._slice(whole, batch)
        key = (v, batch)
        if key in self.loop:
            return self.loop[key]
        state = self.analysis.states[v]
        if state.kind is not Kind.FREE:
            if v in self.graph.inputs:
                assert state.batch is not None
                value = self._value(v, state.batch)
                self.feeds[value] = (v, state.batch)
                self.loop[(v, state.batch)] = self.loop[(v, None)] = value
                return value
            whole = self.loop[(v, None)]
            if batch is not None and state.kind is Kind.ALIKE:
                whole = self.loop[key] = self._slice(whole, batch)
            return whole
        if batch is None and v.is_key and v in self.behind_fence:
            return self._key_in_loop(v)
        whole = self._free(v)
        if batch is None:
            return whole
        self.loop[key] = result = self._slice_by_rule(self._unfenced(v), batch) or self._slice(whole, batch)
        return result

    def _find_behind_fence(self) -> set[Value]:
        """FREE values that come from what a fence of the loop passes on, by FREE values alone."""
        behind_fence: set[Value] = set()
        for eqn in self.graph.equations:
            if self._is_fence(eqn):
                behind_fence.update(v for v in eqn.outputs if self.analysis.states[v].kind is Kind.FREE)
            elif behind_fence.isdisjoint(eqn.values):
                continue
            elif self.analysis.when[eqn.id] is When.FREE and not self.analysis.before[eqn.id]:
                behind_fence.update(eqn.outputs)
        return behind_fence

    def _key_in_loop(self, v: Value) -> Operand:
        """A key made behind the fence again, so that what is drawn from it is drawn again: it is not worth its memory.

        Of what else is FREE, fences are left out: it is computed once.
        """
        missing: dict[int, Equation] = {}
        stack = [v]
        while stack:
            eqn = self.producer[stack.pop()]
            missing[eqn.id] = eqn
            stack += [x for x in eqn.values if x.is_key and x in self.behind_fence and (x, None) not in self.loop]
        for i in sorted(missing):
            eqn = missing[i]
            operands = [self._in_loop(x, None, frozenset()) for x in eqn.inputs]
            phase = self._loop_phase(eqn, operands)
            results = self._copy(eqn, operands, phase, {})
            self.loop.update({(old, None): new for old, new in zip(eqn.outputs, results, strict=True)})
            self.keys_in_loop.update(results)
            if phase is Phase.BACKWARD:
                self.backward.update(results)
        return self.loop[v, None]

    def _value(self, v: Value, batch: BatchDim) -> Value:
        shape = tuple(batch.local_size(self.m) if d == batch.dim else n for d, n in enumerate(v.shape))
        return self.builder.value(jax.ShapeDtypeStruct(shape, v.dtype, weak_type=v.weak_type))

    def _slice_by_rule(self, v: Operand, batch: BatchDim) -> Operand | None:
        """The microbatch's slice of a FREE value, computed as such by its own equation (iota, random bits, ..)."""
        if isinstance(v, Literal):
            return None
        eqn = self.producer.get(v)
        if eqn is None or self.analysis.when[eqn.id] is not When.FREE or self.analysis.before[eqn.id]:
            return None
        rule = self.analysis.rules[eqn.id]
        try:
            split = batch_to_factor(batch, rule.outputs[eqn.outputs.index(v)][batch.dim], rule.factors)
            if split.batch.units != batch.units or split.factor in rule.whole:
                return None
            first = len(self.builder.equations)
            sliced = self._emit(eqn, rule, split)[eqn.outputs.index(v)]
        except (Unsplittable, IndexError):
            return None
        emitted = self.builder.equations[first:]
        own = {self.microbatch, *self.keys_in_loop}
        if own.isdisjoint(x for e in emitted for x in e.values) and rule.unit != "matmul":
            self.replicable.update(e.id for e in emitted)  # alike in every microbatch
        return sliced

    def _slice(self, v: Operand, batch: BatchDim) -> Operand:
        def slice_out(x: Any, index: Any) -> Sequence[Any]:
            return [slice_units(x, batch, self.m, index)]

        phase = Phase.BACKWARD if v in self.backward else Phase.FORWARD
        return self._trace(slice_out, [v, self.microbatch], phase, "")[0]

    def _emit_loop(self, eqn: Equation) -> None:
        self.builder.origin = eqn.origin
        if self._is_fence(eqn):
            self._emit_fence(eqn)
            return
        rule = self.analysis.rules[eqn.id]
        split = self.analysis.splits.get(eqn.id)  # None: linear in partial operands, or alike; in full sizes
        try:
            outputs = self._emit(eqn, rule, split)
        except Unsplittable as error:
            raise MicrobatchError(
                f"num_microbatches={self.m}: {eqn.primitive.name} at {eqn.source or 'an unknown line'}: {error}. "
                "Put the batch on the leading axis, or use num_microbatches=1."
            ) from error
        for old, new in zip(eqn.outputs, outputs, strict=True):
            state = self.analysis.states[old]
            self.loop[(old, None)] = self.loop[(old, state.batch)] = new
            if isinstance(new, Value) and state.kind is Kind.PARTIAL:
                self.partial.add(new)

    def _emit_fence(self, eqn: Equation) -> None:
        """A separable equation, on those of its operands that the loop has."""
        states = self.analysis.states
        positions = [k for k, out in enumerate(eqn.outputs) if states[out].kind is not Kind.FINAL]
        operands = [self._in_loop(eqn.inputs[k], None, frozenset()) for k in positions]
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in operands]
        phase = self._loop_phase(eqn, operands)
        results = self.builder.add(eqn.primitive, eqn.params, operands, avals, phase, eqn.source)
        if phase is Phase.BACKWARD:
            self.backward.update(results)
        for k, result in zip(positions, results, strict=True):
            old = eqn.outputs[k]
            self.loop[(old, None)] = self.loop[(old, states[old].batch)] = result
            if states[old].kind is Kind.PARTIAL:
                self.partial.add(result)

    def _emit(self, eqn: Equation, rule: Rule, split: Split | None) -> list[Operand]:
        moved = self.analysis.before[eqn.id]
        operands = [
            self._in_loop(v, None if split is None else batch_in_dims(split, dims, rule.factors), moved)
            for v, dims in zip(eqn.inputs, rule.inputs, strict=True)
        ]
        partial_sums = [self.analysis.states[v].kind is Kind.PARTIAL for v in eqn.outputs]
        phase = self._loop_phase(eqn, operands)
        if split is None and all(v.held_dtype(a) == v.dtype for v, a in zip(eqn.outputs, partial_sums, strict=True)):
            copies = self._copy(eqn, operands, phase, {})
            if phase is Phase.BACKWARD:
                self.backward.update(copies)
            return list(copies)

        def emit(*args: Any) -> Sequence[Any]:
            *xs, index = args
            return emit_piece(rule, _TimeLocal(rule, split, self.m, index), eqn, xs, partial_sums)

        key = (eqn.signature, split, tuple(partial_sums), tuple(map(operand_signature, operands)))
        if key not in self.emissions:
            self.emissions[key], _ = trace_emission(emit, [*operands, self.microbatch])
        values = [v for v in operands if isinstance(v, Value)]
        return self._inline(self.emissions[key], [*values, self.microbatch], phase, eqn.source)

    def _trace(self, fun: Callable[..., Any], operands: Sequence[Operand], phase: Phase, source: str) -> list[Operand]:
        return self._inline(*trace_emission(fun, operands), phase, source)

    def _inline(self, closed: Any, values: Sequence[Value], phase: Phase, source: str) -> list[Operand]:
        first = len(self.builder.equations)
        results = self.builder.inline(closed.jaxpr, closed.consts, values, source=source, phase=phase)
        if phase is Phase.BACKWARD:
            for new in self.builder.equations[first:]:
                self.backward.update(new.outputs)
        return results

    def _loop_phase(self, eqn: Equation, operands: Sequence[Operand]) -> Phase:
        after_backward = any(v in self.backward for v in operands)
        return Phase.BACKWARD if eqn.phase is Phase.BACKWARD or after_backward else Phase.FORWARD

    def _given(self, local: Value) -> Operand | None:
        """What an equation of the loop only hands on, in full size, as a body that returns a parameter does."""
        if local in self.feeds:
            return self.full[self.feeds[local][0]]
        added = self.builder.equations[self.num_indexed :]
        self.num_indexed += len(added)
        self.made_in_loop.update(v for eqn in added if eqn.phase.in_loop for v in eqn.outputs)
        return None if local in self.made_in_loop else local

    def _after(self, v: Operand, eqn: Equation | None) -> Operand:
        """An operand in full size after the loop."""
        if isinstance(v, Literal):
            return v
        if v in self.full:
            return self.full[v]
        if eqn is not None and v in self.analysis.before[eqn.id]:
            return self._prologue_of(v)
        state = self.analysis.states[v]
        if state.kind is Kind.FREE:
            return self._free(v)
        if state.kind is Kind.FINAL:
            return self._after(self._unfenced(v), eqn)
        local = self._in_loop(v, None, frozenset())
        if isinstance(local, Literal):
            raise MicrobatchError(f"{v!r} is a constant of the loop")  # cannot be: batched values have a rank
        if (given := self._given(local)) is not None:
            self.full[v] = given
            return given
        if state.kind is Kind.PARTIAL:
            if local not in self.accumulate:
                sums = jax.ShapeDtypeStruct(v.shape, v.accumulator_dtype, weak_type=v.weak_type)
                self.accumulate[local] = self.builder.value(sums)
            whole: Operand = (total := self.accumulate[local])
            if total.dtype != v.dtype:

                def narrow(x: Any) -> Sequence[Any]:
                    return [jax.lax.convert_element_type(x, v.dtype)]

                (whole,) = self._trace(narrow, [total], Phase.UPDATE, eqn.source if eqn else "")
            self.full[v] = whole
            return whole
        batch = state.batch
        if local not in self.keep:
            piece = jax.ShapeDtypeStruct(local.shape, local.dtype, weak_type=v.weak_type)
            self.keep[local] = tuple(self.builder.value(piece) for _ in range(self.m))
        pieces = self.keep[local]
        if batch is None:  # alike in every microbatch
            self.full[v] = pieces[0]
            return pieces[0]

        def join(*xs: Any) -> Sequence[Any]:
            d = batch.dim
            parts = [x.reshape(*x.shape[:d], batch.outer, x.shape[d] // batch.outer, *x.shape[d + 1 :]) for x in xs]
            return [jnp.concatenate(parts, d + 1).reshape(v.shape)]

        self.full[v] = result = self._trace(join, pieces, Phase.UPDATE, eqn.source if eqn else "")[0]
        return result


def _in_phase_order(equations: Sequence[Equation], outputs: Sequence[Operand], splitter: _Splitter) -> list[Equation]:
    """Renumber, and let batch-free equations that only the update needs run there."""
    for_loop: set[Value] = set()
    for eqn in reversed(equations):
        if eqn.phase.in_loop or any(v in for_loop for v in eqn.outputs):
            for_loop.update(eqn.values)
    moved = [
        dataclasses.replace(eqn, phase=Phase.UPDATE)
        if eqn.phase is Phase.PROLOGUE and not any(v in for_loop for v in eqn.outputs)
        else eqn
        for eqn in equations
    ]
    order = list(Phase)
    moved.sort(key=lambda eqn: order.index(eqn.phase))  # stable: topological within a phase
    renumbered = [dataclasses.replace(eqn, id=i) for i, eqn in enumerate(moved)]
    splitter.replicable = {new.id for new, old in zip(renumbered, moved, strict=True) if old.id in splitter.replicable}
    return renumbered


def split_batch(analysis: BatchAnalysis, num_microbatches: int) -> StepGraph:
    """The step cut into this many microbatches of consecutive examples.

    Raises:
      MicrobatchError, BatchAxisError: see `BatchAnalysis.check`.
    """
    analysis.check(num_microbatches)
    if num_microbatches == 1:
        return _uncut(analysis)
    return _Splitter(analysis, num_microbatches).run()


def _uncut(analysis: BatchAnalysis) -> StepGraph:
    """One microbatch: nothing is rewritten, couplings are harmless; only phases are settled."""
    graph = analysis.graph
    builder = Builder(graph.next_value_id, least_sum_bytes=graph.least_sum_bytes)
    microbatch = builder.value(jax.ShapeDtypeStruct((), jnp.int32))
    depends = {v for v in graph.inputs if analysis.states[v].kind is Kind.BATCHED}  # on the examples
    for eqn in graph.equations:
        if any(v in depends for v in eqn.values):
            depends.update(eqn.outputs)
    in_loop: set[int] = set()
    needed: set[Value] = set()  # by the forward or backward pass
    for eqn in reversed(graph.equations):
        splits = analysis.when[eqn.id] is When.LOOP and eqn.id in analysis.splits
        if eqn.phase is not Phase.UPDATE or splits or any(v in needed for v in eqn.outputs):
            in_loop.add(eqn.id)
            needed.update(eqn.values)
    backward: set[Value] = set()
    replicable = set()
    equations: list[Equation] = []
    for eqn in graph.equations:
        rule = analysis.rules[eqn.id]
        if eqn.id not in in_loop:
            phase = Phase.UPDATE
        elif not any(v in depends for v in eqn.values):
            phase = Phase.PROLOGUE
            if rule.unit != "matmul" and not rule.replicates:
                replicable.add(eqn.id)
        elif eqn.phase is Phase.BACKWARD or any(v in backward for v in eqn.values):
            phase = Phase.BACKWARD
            backward.update(eqn.outputs)
        else:
            phase = Phase.FORWARD
        equations.append(dataclasses.replace(eqn, phase=phase))
    equations.sort(key=lambda eqn: list(Phase).index(eqn.phase))
    renumbered = [dataclasses.replace(eqn, id=i) for i, eqn in enumerate(equations)]
    feeds = {v: (v, state.batch) for v in graph.inputs if (state := analysis.states[v]).batch is not None}
    return StepGraph(
        graph, 1, tuple(renumbered), graph.constants, microbatch, feeds, {}, {}, graph.outputs,
        frozenset(n.id for n, o in zip(renumbered, equations, strict=True) if o.id in replicable), frozenset(depends),
        frozenset(v for v in depends if analysis.states[v].kind is Kind.PARTIAL),
    )  # fmt: skip
