"""A step with its loops over layers cut: the equations written for the parts, and what is stacked for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.context import Pairs
from autopar.ir.graph import BatchDim, Equation, Graph, LeafCut, Operand, Phase, Value, operand_signature
from autopar.ir.rule import Local, Rule
from autopar.ir.sharding import StepKind
from autopar.passes.rules.loops import Chain, chain_of
from autopar.passes.rules.split import (
    Split,
    Unsplittable,
    batch_in_dims,
    batch_to_factor,
    check_position,
    split_of,
)
from autopar.tracing.build import Builder, live_equations, trace_emission

Bounds = tuple[int, ...]  # rounds at which a loop is cut, from 0 to its length


@dataclasses.dataclass(frozen=True)
class LoopCut:
    """How a value is cut."""

    batch: BatchDim  # `units` are rounds
    bounds: Bounds
    loop: int  # the loop that it was first cut for


class Spread:
    """How a cut of some loops or leaves spreads."""

    def __init__(self, graph: Graph, rules: Mapping[int, Rule], whole: frozenset[Value]) -> None:
        """`rules` by equation id; `whole`: inputs that are never cut."""
        self.graph, self.rules, self.whole = graph, rules, whole
        self.chains = {e.id: chain for e in graph.equations if (chain := chain_of(e)) is not None}
        self.producer = {v: e for e in graph.equations for v in e.outputs}
        self.given: dict[Value, LoopCut] = {}  # inputs
        self.loops: dict[int, LoopCut] = {}  # by equation id
        self.chosen: dict[int, tuple[Split, LoopCut]] = {}  # equations that make what others want cut
        self.states: dict[Value, LoopCut] = {}
        self.splits: dict[int, tuple[Split, LoopCut]] = {}

    def run(self) -> None:
        inputs = set(self.graph.inputs)
        changed = True
        while changed:
            self._forward()
            changed = False
            for v, cut in self.wanted.items():
                if v in self.states or v.is_key or v in self.whole:
                    continue
                if v in inputs:
                    if cut.batch.outer == cut.batch.inner == 1:
                        self.given[v] = cut
                        changed = True
                elif v in self.producer:
                    changed |= self._choose(self.producer[v], cut)
            for k, i in self.graph.carried.items():
                out, into = self.graph.outputs[k], self.graph.inputs[i]
                if isinstance(out, Value) and out in self.states and into not in self.given and into not in self.whole:
                    cut = self.states[out]
                    if cut.batch.outer == cut.batch.inner == 1 and not into.is_key:
                        self.given[into] = cut
                        changed = True

    def _choose(self, eqn: Equation, cut: LoopCut) -> bool:
        rule = self.rules[eqn.id]
        if eqn.id in self.chosen or eqn.id in self.splits or eqn.id in self.loops:
            return False
        if len(eqn.outputs) > 1 or rule.separable:
            return False
        try:
            split = batch_to_factor(cut.batch, rule.outputs[0][cut.batch.dim], rule.factors)
        except (Unsplittable, IndexError):
            return False
        if split.factor in rule.whole or split.batch.units != cut.batch.units or rule.communicates(split.factor):
            return False
        self.chosen[eqn.id] = (split, cut)
        return True

    def _forward(self) -> None:
        self.states = dict(self.given)
        self.splits = {}
        self.wanted: dict[Value, LoopCut] = {}  # what readers want cut
        for eqn in self.graph.equations:
            met = {i: cut for i, v in enumerate(eqn.inputs) if isinstance(v, Value) and (cut := self.states.get(v))}
            if eqn.id in self.chains:
                self._loop(eqn, self.chains[eqn.id], met)
            elif self.rules[eqn.id].separable:
                for i, cut in met.items():
                    self.states[eqn.outputs[i]] = cut
            elif met or eqn.id in self.chosen:
                self._equation(eqn, met)

    def _loop(self, eqn: Equation, chain: Chain, met: Mapping[int, LoopCut]) -> None:
        if eqn.id not in self.loops:
            for i in chain.stacked_in:
                if i in met and met[i].batch == BatchDim(0, 1, chain.length, 1):
                    self.loops[eqn.id] = met[i]
                    break
            else:
                return
        cut = self.loops[eqn.id]
        for k in chain.stacked_out:
            self.states[eqn.outputs[k]] = cut
        for i in chain.stacked_in:
            v = eqn.inputs[i]
            if isinstance(v, Value):
                self.wanted.setdefault(v, cut)

    def _equation(self, eqn: Equation, met: Mapping[int, LoopCut]) -> None:
        rule = self.rules[eqn.id]
        if met:
            cut = next(iter(met.values()))
            same = {i: other.batch for i, other in met.items() if other.bounds == cut.bounds}
            try:
                split = split_of(rule, same)
            except Unsplittable:
                return
            if split.batch.units != cut.batch.units or rule.communicates(split.factor):
                return
        else:
            split, cut = self.chosen[eqn.id]
        self.splits[eqn.id] = (split, cut)
        for i, (v, dims) in enumerate(zip(eqn.inputs, rule.inputs, strict=True)):
            piece = batch_in_dims(split, dims, rule.factors)
            if isinstance(v, Value) and piece is not None and i not in met:
                self.wanted.setdefault(v, dataclasses.replace(cut, batch=piece))
        for v, dims in zip(eqn.outputs, rule.outputs, strict=True):
            piece = batch_in_dims(split, dims, rule.factors)
            if piece is not None:
                self.states[v] = dataclasses.replace(cut, batch=piece)


@dataclasses.dataclass
class _Piece(Local):
    """The piece [start, stop) of a split, for `emit`."""

    rule: Rule
    split: Split
    start_unit: int
    stop_unit: int
    start_matters: bool = False  # `emit` has asked for it

    def size(self, factor: int) -> int:
        whole = self.rule.factors[factor]
        if not self.is_split(factor):
            return whole
        return whole // self.split.batch.units * (self.stop_unit - self.start_unit)

    def is_split(self, factor: int) -> bool:
        return factor == self.split.factor

    def start(self, factor: int) -> Any:
        if not self.is_split(factor):
            return 0
        check_position(self.split.batch)
        self.start_matters = True
        return jnp.int32(self.start_unit * self.split.batch.inner)

    def total(self, factor: int, x: Any, value: Value) -> Any:
        raise Unsplittable("pieces are added up on the way")

    def extreme(self, factor: int, x: Any, largest: bool) -> Any:
        raise Unsplittable("pieces are compared on the way")

    def halo(self, factor: int, x: Any, dim: int, before: int, after: int, fill: Any) -> Any:
        raise Unsplittable("windows reach from one piece into the next")

    def send(self, factor: int, x: Any, kind: StepKind, dim: int = 0, to_dim: int = 0, pairs: Pairs = ()) -> Any:
        raise Unsplittable("positions of attention lie in several pieces")


class Cutter:
    """Writes the graph anew."""

    def __init__(self, spread: Spread) -> None:
        self.spread, self.graph = spread, spread.graph
        self.builder = Builder(self.graph.next_value_id, least_sum_bytes=self.graph.least_sum_bytes)
        self.wholes: dict[Value, Operand] = {v: v for v in (*self.graph.inputs, *self.graph.constants)}
        self.pieces: dict[tuple[Value, BatchDim, Bounds], list[Operand]] = {}
        self.emissions: dict[Hashable, Any] = {}  # closed jaxprs; equal pieces are traced once
        self.here: Equation | None = None  # what is written

    def run(self) -> Graph:
        graph, spread = self.graph, self.spread
        inputs: list[Value] = []
        paths: list[str] = []
        input_cuts: dict[int, LeafCut] = {}
        first: list[int] = []  # by old input: its first new one
        for i, (v, path) in enumerate(zip(graph.inputs, graph.input_paths, strict=True)):
            first.append(len(inputs))
            cut = spread.given.get(v)
            if cut is None:
                inputs.append(v)
                paths.append(path)
                continue
            input_cuts[i] = leaf = LeafCut(cut.batch.dim, cut.bounds)
            made = [self.builder.value(_resized(v, leaf.axis, stop - start)) for start, stop in leaf.windows]
            del self.wholes[v]
            self.pieces[v, cut.batch, cut.bounds] = list(made)
            inputs += made
            paths += [f"{path}{_window_text(leaf.axis, *window)}" for window in leaf.windows]
        for eqn in graph.equations:
            self._write(eqn)
        outputs: list[Operand] = []
        out_paths: list[str] = []
        output_cuts: dict[int, LeafCut] = {}
        carried: dict[int, int] = {}
        self.here = None
        for k, (out, path) in enumerate(zip(graph.outputs, graph.output_paths, strict=True)):
            into = graph.carried.get(k)
            if into is not None:
                number = len(input_cuts[into].windows) if into in input_cuts else 1
                carried.update({len(outputs) + n: first[into] + n for n in range(number)})
            if into is not None and into in input_cuts:
                output_cuts[k] = leaf = input_cuts[into]
                outputs += self._cut(out, spread.given[graph.inputs[into]].batch, leaf.bounds)
                out_paths += [f"{path}{_window_text(leaf.axis, *window)}" for window in leaf.windows]
            else:
                outputs.append(self._whole(out))
                out_paths.append(path)
        equations = [
            dataclasses.replace(e, id=i) for i, e in enumerate(live_equations(self.builder.equations, outputs))
        ]
        used = {v for e in equations for v in e.values} | {v for v in outputs if isinstance(v, Value)}
        constants = {v: c for v, c in {**graph.constants, **self.builder.constants}.items() if v in used}
        return dataclasses.replace(
            graph, equations=tuple(equations), inputs=tuple(inputs), outputs=tuple(outputs), constants=constants,
            input_paths=tuple(paths), output_paths=tuple(out_paths), carried=carried, input_cuts=input_cuts,
            output_cuts=output_cuts,
        )  # fmt: skip

    # Operands, whole and in pieces.

    def _whole(self, v: Operand) -> Operand:
        if not isinstance(v, Value):
            return v
        if v not in self.wholes:
            cut = self.spread.states[v]
            pieces = self.pieces[v, cut.batch, cut.bounds]
            self.wholes[v] = self._trace(functools.partial(_join, cut.batch), pieces, cut.bounds[0])[0]
        return self.wholes[v]

    def _cut(self, v: Operand, batch: BatchDim, bounds: Bounds) -> list[Operand]:
        if not isinstance(v, Value):
            return [v] * (len(bounds) - 1)
        key = (v, batch, bounds)
        if key not in self.pieces:
            whole = self._whole(v)
            self.pieces[key] = [
                self._trace(functools.partial(_window, batch, start, stop), [whole], start)[0]
                for start, stop in LeafCut(0, bounds).windows
            ]
        return self.pieces[key]

    def _trace(self, fun: Callable[..., Sequence[Any]], operands: Sequence[Operand], start: int) -> list[Operand]:
        return self._inline(*trace_emission(fun, operands), start)

    def _inline(self, closed: Any, values: Sequence[Value], start: int) -> list[Operand]:
        eqn = self.here
        self.builder.origin = (-1 if eqn is None else eqn.origin[0], start)
        phase = Phase.UPDATE if eqn is None else eqn.phase
        return self.builder.inline(closed.jaxpr, closed.consts, values, source=eqn.source if eqn else "", phase=phase)

    # Equations.

    def _write(self, eqn: Equation) -> None:
        self.here = eqn
        if eqn.id in self.spread.loops:
            self._write_loop(eqn, self.spread.chains[eqn.id], self.spread.loops[eqn.id].bounds)
        elif self.spread.rules[eqn.id].separable:
            self._write_fence(eqn)
        elif eqn.id not in self.spread.splits or not self._write_pieces(eqn, *self.spread.splits[eqn.id]):
            results = self._add(eqn, [self._whole(v) for v in eqn.inputs], _avals(eqn.outputs), 0)
            self.wholes.update(zip(eqn.outputs, results, strict=True))

    def _add(
        self, eqn: Equation, operands: Sequence[Operand], avals: Sequence[Any], start: int, **changed: Any
    ) -> tuple[Value, ...]:
        self.builder.origin = (eqn.origin[0], start)
        return self.builder.add(eqn.primitive, {**eqn.params, **changed}, operands, avals, eqn.phase, eqn.source)

    def _write_pieces(self, eqn: Equation, split: Split, cut: LoopCut) -> bool:
        rule = self.spread.rules[eqn.id]
        windows = LeafCut(0, cut.bounds).windows
        operands = []
        for v, dims in zip(eqn.inputs, rule.inputs, strict=True):
            batch = batch_in_dims(split, dims, rule.factors)
            operands.append([self._whole(v)] * len(windows) if batch is None else self._cut(v, batch, cut.bounds))
        window_results: list[list[Operand]] = []
        try:
            for k, window in enumerate(windows):
                mine = [pieces[k] for pieces in operands]
                values = [v for v in mine if isinstance(v, Value)]
                window_results.append(self._inline(self._emission(eqn, rule, split, window, mine), values, window[0]))
        except Unsplittable:
            return False
        for o, (v, dims) in enumerate(zip(eqn.outputs, rule.outputs, strict=True)):
            batch = batch_in_dims(split, dims, rule.factors)
            each = [results[o] for results in window_results]
            if batch is not None:
                self.pieces[v, batch, cut.bounds] = each
            elif rule.is_partial_sum(split.factor, o):
                self.wholes[v] = self._sum(each, cut.bounds[:-1])
            else:
                self.wholes[v] = each[0]
        return True

    def _emission(
        self, eqn: Equation, rule: Rule, split: Split, window: tuple[int, int], operands: Sequence[Operand]
    ) -> Any:
        """The closed jaxpr of a piece."""
        start, stop = window
        key = (eqn.signature, split, stop - start, tuple(map(operand_signature, operands)))
        for known in (key, (*key, start)):
            if known in self.emissions:
                return self.emissions[known]
        piece = _Piece(rule, split, start, stop)
        closed, _ = trace_emission(lambda *xs: rule.emit(piece, eqn, xs), operands)
        self.emissions[(*key, start) if piece.start_matters else key] = closed
        return closed

    def _sum(self, partial_sums: Sequence[Operand], starts: Sequence[int]) -> Operand:
        total = partial_sums[0]
        for x, start in zip(partial_sums[1:], starts[1:], strict=True):
            total = self._trace(lambda a, b: [jax.lax.add(a, b)], [total, x], start)[0]
        return total

    def _write_fence(self, eqn: Equation) -> None:
        """A fence around each piece, and one around what is whole."""
        cuts = {v: self.spread.states[out] for v, out in zip(eqn.inputs, eqn.outputs, strict=True)
                if isinstance(v, Value) and out in self.spread.states}  # fmt: skip
        whole = [(v, out) for v, out in zip(eqn.inputs, eqn.outputs, strict=True) if v not in cuts]
        if whole:
            results = self._add(eqn, [self._whole(v) for v, _ in whole], _avals([out for _, out in whole]), 0)
            self.wholes.update(zip((out for _, out in whole), results, strict=True))
        for bounds in dict.fromkeys(cut.bounds for cut in cuts.values()):
            mine = [(v, out, cuts[v]) for v, out in zip(eqn.inputs, eqn.outputs, strict=True)
                    if isinstance(v, Value) and v in cuts and cuts[v].bounds == bounds]  # fmt: skip
            pieces = [self._cut(v, cut.batch, bounds) for v, _, cut in mine]
            fenced: list[list[Operand]] = [[] for _ in mine]
            for k, start in enumerate(bounds[:-1]):
                operands = [p[k] for p in pieces]
                for each, result in zip(fenced, self._add(eqn, operands, _avals(operands), start), strict=True):
                    each.append(result)
            for (_, out, cut), each in zip(mine, fenced, strict=True):
                self.pieces[out, cut.batch, bounds] = each

    def _write_loop(self, eqn: Equation, chain: Chain, bounds: Bounds) -> None:
        rounds = BatchDim(0, 1, chain.length, 1)
        parts = list(enumerate(LeafCut(0, bounds).windows))
        stacked = {i: self._cut(eqn.inputs[i], rounds, bounds) for i in chain.stacked_in}
        operands = [v if i in stacked else self._whole(v) for i, v in enumerate(eqn.inputs)]
        made: dict[int, list[Operand]] = {k: [] for k in chain.stacked_out}
        partial_sums: dict[int, list[Operand]] = {k: [] for k in chain.adding}
        order = parts[::-1] if chain.reverse else parts
        for number, (k, (start, stop)) in enumerate(order):
            inputs = [stacked[i][k] if i in stacked else v for i, v in enumerate(operands)]
            avals = [
                _resized(v, 0, stop - start) if o in made else v for o, v in enumerate(_avals(eqn.outputs))
            ]  # fmt: skip
            if number:
                for o in chain.adding:
                    inputs[chain.carried[o]] = self._zeros(eqn.outputs[o], start)
            results = self._add(eqn, inputs, avals, start, length=stop - start)
            for o, result in enumerate(results):
                if o in made:
                    made[o].append(result)
                elif o in partial_sums:
                    partial_sums[o].append(result)
                else:
                    operands[chain.carried[o]] = result
        for o, v in enumerate(eqn.outputs):
            if o in made:
                self.pieces[v, rounds, bounds] = made[o][::-1] if chain.reverse else made[o]
            elif o in partial_sums:
                self.wholes[v] = self._sum(partial_sums[o], [start for _, (start, _) in order])
            else:
                self.wholes[v] = operands[chain.carried[o]]

    def _zeros(self, like: Value, start: int) -> Operand:
        return self._trace(lambda: [jnp.zeros(like.shape, like.dtype)], [], start)[0]


def _window_text(axis: int, start: int, stop: int) -> str:
    return f"[{':, ' * axis}{start}:{stop}]"


def _avals(values: Iterable[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.weak_type) for v in values]


def _resized(v: Any, axis: int, size: int) -> Any:
    shape = (*v.shape[:axis], size, *v.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, v.dtype, weak_type=v.weak_type)


def _window(batch: BatchDim, start: int, stop: int, x: Any) -> Sequence[Any]:
    before, after = x.shape[: batch.dim], x.shape[batch.dim + 1 :]
    parts = x.reshape(*before, batch.outer, batch.units, batch.inner, *after)
    part = jax.lax.slice_in_dim(parts, start, stop, axis=batch.dim + 1)
    return [part.reshape(*before, batch.outer * (stop - start) * batch.inner, *after)]


def _join(batch: BatchDim, *xs: Any) -> Sequence[Any]:
    before, after = xs[0].shape[: batch.dim], xs[0].shape[batch.dim + 1 :]
    parts = [x.reshape(*before, batch.outer, -1, batch.inner, *after) for x in xs]
    return [jax.lax.concatenate(parts, batch.dim + 1).reshape(*before, batch.size, *after)]
