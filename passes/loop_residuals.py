"""What a loop over layers hands on to the loop of its backward pass: as few bytes as give all that is read there.

JAX stacks every intermediate value that a derivative happens to read, one slice per round, and no compiler looks across
two loops: the stacks of a norm in 32 bits or of a GELU are several times what an expert would keep. Here the second
loop computes elementwise values again from slices of fewer bytes, by the same minimum cut as between two programs
(`residuals.py`). What enters the first loop from outside, parameters for instance, the second one reads itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from jax.extend import core

from autopar.ir.graph import Equation, Graph, Operand, Phase, Value
from autopar.ir.graph import Literal as GraphLiteral
from autopar.ir.rule import RuleOf
from autopar.passes.residuals import made_again, reads_memory
from autopar.passes.rules.nested import make_body
from autopar.passes.rules.propagation import Body
from autopar.tracing.axis_collectives import scan_counts
from autopar.tracing.build import Builder, trace_emission
from autopar.tracing.interpret import bind_again, literal_value, tracing_interpreter
from autopar.tracing.loop_bodies import OneRound, scanned, with_all_values
from autopar.tracing.trace import fingerprint


def thin_loops(graph: Graph, rule_of: RuleOf) -> Graph:
    """The graph with loops that hand on fewer bytes to others which only read their stacks, round by round."""
    uses = _Uses.of(graph)
    for number in range(sum(eqn.primitive.name == "scan" for eqn in graph.equations)):
        scans = [eqn for eqn in uses.graph.equations if eqn.primitive.name == "scan"]
        thinning = _Thinning.of(uses, scans[number], rule_of)
        if thinning is not None:
            uses = _Uses.of(thinning.applied())
    if uses.graph is graph:
        return graph
    thinned = uses.graph  # plans of the graph before are none of this one
    return dataclasses.replace(thinned, fingerprint=fingerprint(thinned.equations, thinned.inputs, thinned.outputs))


@dataclasses.dataclass(frozen=True)
class _Uses:
    """A graph, and who reads what in it."""

    graph: Graph
    readers: Mapping[Value, Sequence[tuple[Equation, int]]]  # with the position of the operand
    there: Set[Value]  # what is in memory during the backward pass, whichever loops read it

    @staticmethod
    def of(graph: Graph) -> _Uses:
        readers: dict[Value, list[tuple[Equation, int]]] = defaultdict(list)
        there = {*graph.inputs, *graph.constants}
        for eqn in graph.equations:
            if eqn.phase is not Phase.FORWARD:
                there.update(eqn.values)
            for position, v in enumerate(eqn.inputs):
                if isinstance(v, Value):
                    readers[v].append((eqn, position))
        return _Uses(graph, readers, there)


@dataclasses.dataclass(frozen=True)
class _Thinning:
    """What a loop of a graph hands on instead of some of its stacks."""

    graph: Graph
    loop: _Loop
    later: Mapping[int, _Loop]  # those that read its stacks, by equation id
    again: Collection[Value]  # values of the body that later loops make again
    dropped: Mapping[Value, Value]  # stacks -> their slices in the body
    kept: tuple[int, ...]  # the other stacks, by number
    added: tuple[Value, ...]  # values of the body of which there are stacks instead

    @staticmethod
    def of(uses: _Uses, first: Equation, rule_of: RuleOf) -> _Thinning | None:
        """None where nothing is gained."""
        stacks = _stacks(uses, first)
        if not stacks:
            return None
        loop = _Loop.of(first, rule_of)
        reading = {eqn.id: eqn for readers in stacks.values() for eqn, _ in readers}
        later = {id_: _Loop.of(eqn, rule_of) for id_, eqn in reading.items()}
        slices, body = loop.slices, loop.body
        handed_on = {v for v in body.outputs[: loop.carries] if isinstance(v, Value)}
        kept = {v for k, v in enumerate(slices) if k not in stacks and isinstance(v, Value)}
        read: set[Value] = set()
        for k, readers in stacks.items():
            if isinstance(v := slices[k], Value):
                needed = v.is_key or any(later[eqn.id].needs(position) for eqn, position in readers)
                (kept if needed else read).add(v)
        entering = zip(body.inputs, first.inputs, strict=True)
        outside = [v for v, x in entering if loop.is_carried(v) or (isinstance(x, Value) and x not in uses.there)]
        again = made_again(body.equations, body.rules, read, kept, handed_on, outside)
        gone = {k: v for k in stacks if isinstance(v := slices[k], Value) and v in again}
        dropped = {first.outputs[loop.carries + k]: v for k, v in gone.items()}
        remaining = tuple(k for k in range(len(slices)) if k not in gone)
        there = {v for k in remaining if isinstance(v := slices[k], Value) and not loop.enters(v)}
        sources = [v for v in loop.sources(dropped.values(), again) if v not in there]
        saved = sum(v.nbytes for v in {*dropped.values()})
        if saved <= sum(v.nbytes for v in sources if v in outside or not loop.enters(v)):
            return None
        added = tuple(v for v in sources if not loop.enters(v))
        return _Thinning(uses.graph, loop, later, again.keys(), dropped, remaining, added)

    def applied(self) -> Graph:
        """The graph with these loops."""
        graph, loop = self.graph, self.loop
        builder = Builder(graph.next_value_id, least_sum_bytes=graph.least_sum_bytes)
        renamed: dict[Operand, Operand] = {}
        stacks: dict[Operand, Operand] = {}  # of values of the body
        for eqn in graph.equations:
            inputs = [renamed.get(v, v) for v in eqn.inputs]
            number = len(builder.equations)
            if eqn is loop.equation:
                stacks.update((v, x) for v, x in zip(loop.body.inputs, inputs, strict=True) if loop.enters(v))
                run: Callable[..., Sequence[Any]] = functools.partial(loop.run, kept=self.kept, added=self.added)
            elif eqn.id in self.later:
                inputs, run = self._rewritten(self.later[eqn.id], inputs, stacks)
            else:
                is_same = eqn.id == number and renamed.keys().isdisjoint(eqn.inputs)
                builder.equations.append(eqn if is_same else dataclasses.replace(eqn, id=number, inputs=tuple(inputs)))
                continue
            builder.origin = eqn.origin
            closed, operands = trace_emission(run, inputs)
            results = builder.inline(closed.jaxpr, closed.consts, operands, source=eqn.source, phase=eqn.phase)
            if eqn is loop.equation:
                left = [*range(loop.carries), *(loop.carries + k for k in self.kept)]
                renamed.update((eqn.outputs[k], x) for k, x in zip(left, results, strict=False))
                others = zip(self.kept, results[loop.carries :], strict=False)
                made = ((loop.slices[k], x) for k, x in others)
                stacks.update((v, x) for v, x in made if isinstance(v, Value) and not loop.enters(v))
                stacks.update(zip(self.added, results[len(left) :], strict=True))
            else:
                renamed.update(zip(eqn.outputs, results, strict=True))
        outputs = tuple(renamed.get(v, v) for v in graph.outputs)
        constants = {**graph.constants, **builder.constants}
        return dataclasses.replace(graph, equations=tuple(builder.equations), outputs=outputs, constants=constants)

    def _rewritten(
        self, later: _Loop, inputs: Sequence[Operand], stacks: Mapping[Operand, Operand]
    ) -> tuple[list[Operand], Callable[..., Sequence[Any]]]:
        """The operands of a later loop, and the function of them that it becomes."""
        first, before = self.loop, later.consts + later.carries
        read = enumerate(later.equation.inputs)
        gone = {k: self.dropped[v] for k, v in read if isinstance(v, Value) and v in self.dropped}
        sources = [*first.sources(gone.values(), self.again)]
        fixed = [v for v in sources if first.enters(v) and not first.is_sliced(v)]
        left = [k for k in range(before, len(inputs)) if k not in gone]
        at = {inputs[k]: k for k in left}
        shared = {v: at[stacks[v]] for v in sources if v not in fixed and stacks[v] in at}  # it reads these already
        sliced = [v for v in sources if v not in fixed and v not in shared]
        operands = [
            *inputs[: later.consts], *(stacks[v] for v in fixed), *inputs[later.consts : before],
            *(inputs[k] for k in left), *(stacks[v] for v in sliced),
        ]  # fmt: skip

        def one_round(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            supply = iter(operands)
            taken: dict[int, Any] = {k: next(supply) for k in range(later.consts)}
            known = {v: next(supply) for v in fixed}
            taken.update((k, next(supply)) for k in [*range(later.consts, before), *left])
            known.update(zip(sliced, supply, strict=True))
            known.update((v, taken[k]) for v, k in shared.items())
            anew = _Anew(first, known)
            args = [_Late(anew, gone[k]) if k in gone else taken[k] for k in range(len(inputs))]
            results = tracing_interpreter({}, literal_value, _bind_late).run(
                later.closed.jaxpr, later.closed.consts, args
            )
            return results[: later.carries], results[later.carries : later.count]

        return operands, lambda *operands: later.scanned(one_round, operands, later.consts + len(fixed))


def _stacks(uses: _Uses, first: Equation) -> dict[int, Sequence[tuple[Equation, int]]]:
    """The stacks of a loop, by number, that only loops of as many rounds read, slice by slice, and these."""

    def is_slice(eqn: Equation, position: int) -> bool:
        is_loop = eqn.primitive.name == "scan" and eqn.params["length"] == first.params["length"]
        return is_loop and position >= sum(scan_counts(eqn.params))

    outputs = {v for v in uses.graph.outputs if isinstance(v, Value)}
    _, carries = scan_counts(first.params)
    stacks = [(k, v, uses.readers.get(v, ())) for k, v in enumerate(first.outputs[carries:])]
    return {
        k: readers
        for k, v, readers in stacks
        if v not in outputs and readers and all(is_slice(*reader) for reader in readers)
    }


@dataclasses.dataclass(frozen=True, eq=False)
class _Loop:
    """A `scan` with the calls in its body inlined, so that each intermediate value of it can be had."""

    equation: Equation
    consts: int
    carries: int
    count: int  # of the results of the body; all its other values follow these
    closed: Any
    body: Body

    @staticmethod
    def of(eqn: Equation, rule_of: RuleOf) -> _Loop:
        closed = eqn.params["jaxpr"]
        count, every = len(closed.jaxpr.outvars), with_all_values(closed)
        body = make_body(every.in_avals, [(every, range(len(every.in_avals)))], rule_of)
        return _Loop(eqn, *scan_counts(eqn.params), count, every, body)

    @functools.cached_property
    def _at(self) -> Mapping[Operand, int]:
        """By value: where it is first among what the body returns and, after that, takes."""
        every = (*self.body.outputs, *self.body.inputs)
        return {v: k for k, v in reversed([*enumerate(every)]) if isinstance(v, Value)}

    @functools.cached_property
    def value_of(self) -> Mapping[Any, Operand]:
        """By variable of the jaxpr, but for its constants."""
        pairs: list[tuple[Any, Operand]] = [*zip(self.closed.jaxpr.invars, self.body.inputs, strict=True)]
        pairs += zip(self.closed.jaxpr.outvars, self.body.outputs, strict=True)
        return {var: v for var, v in pairs if not isinstance(var, core.Literal)}

    @functools.cached_property
    def maker(self) -> Mapping[Any, Any]:
        """By variable: the equation of the jaxpr."""
        return {var: eqn for eqn in self.closed.jaxpr.eqns for var in eqn.outvars}

    def variable(self, v: Value) -> Any:
        """That of a value which the body makes."""
        return self.closed.jaxpr.outvars[self._at[v]]

    @property
    def slices(self) -> Sequence[Operand]:
        """What a round adds to each stack that the loop makes."""
        return self.body.outputs[self.carries : self.count]

    def needs(self, position: int) -> bool:
        """Whether an operand of the body has to be in memory for its readers."""
        v, rules = self.body.inputs[position], self.body.rules
        readers = self.body.readers.get(v, ())
        return v in self.body.outputs[: self.count] or any(reads_memory(rules[eqn.id]) for eqn, _ in readers)

    @functools.cached_property
    def _enters_at(self) -> Mapping[Value, int]:
        return {v: k for k, v in enumerate(self.body.inputs)}

    def is_carried(self, v: Value) -> bool:
        """Whether it enters the body, another one in each round, from the round before."""
        return self.consts <= self._enters_at.get(v, -1) < self.consts + self.carries

    def is_sliced(self, v: Value) -> bool:
        """Whether it enters the body as a slice of a stack."""
        return self._enters_at.get(v, -1) >= self.consts + self.carries

    def enters(self, v: Value) -> bool:
        """Whether it enters the body from outside the loop."""
        return v in self._enters_at and not self.is_carried(v)

    def sources(self, values: Iterable[Value], again: Collection[Value]) -> dict[Value, None]:
        """From what these are made again: other values of the body, or what enters it."""
        found: dict[Value, None] = {}
        todo, seen = [self.variable(v) for v in values], set[Any]()
        while todo:
            var = todo.pop()
            if isinstance(var, core.Literal) or var in seen:
                continue
            seen.add(var)
            v = self.value_of.get(var)
            if not isinstance(v, Value) or v in self.body.constants:
                continue
            if v in again:
                todo += self.maker[var].invars
            else:
                found[v] = None
        return found

    def run(self, *operands: Any, kept: Sequence[int], added: Sequence[Value]) -> list[Any]:
        """The loop with some of its stacks, by number, and with stacks of other values."""
        wanted = [*(self.carries + k for k in kept), *(self._at[v] for v in added)]

        def one_round(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = tracing_interpreter({}, literal_value).run(self.closed.jaxpr, self.closed.consts, operands)
            every = [*results, *operands]
            return results[: self.carries], [every[k] for k in wanted]

        return self.scanned(one_round, operands, self.consts)

    def scanned(self, one_round: OneRound, operands: Sequence[Any], consts: int) -> list[Any]:
        """A loop as this one with another body and so many constants."""
        return scanned(self.equation.params, one_round, operands, consts, self.carries)


class _Anew:
    """Values of the body of a loop, made in the body of a later one when they are first asked for."""

    def __init__(self, loop: _Loop, known: Mapping[Value, Any]) -> None:
        self.loop, self.known = loop, known
        self.made: dict[Any, Any] = dict(zip(loop.closed.jaxpr.constvars, loop.closed.consts, strict=True))
        self.bind = tracing_interpreter({}, literal_value).default

    def get(self, var: Any) -> Any:
        if isinstance(var, core.Literal):
            return literal_value(var)
        if var not in self.made:
            v = self.loop.value_of[var]
            if isinstance(v, GraphLiteral):
                return v.value
            if v in self.known:
                return self.known[v]
            eqn = self.loop.maker[var]
            self.made.update(zip(eqn.outvars, self.bind(eqn, [self.get(x) for x in eqn.invars]), strict=True))
        return self.made[var]


@dataclasses.dataclass(frozen=True)
class _Late:
    """A value that is made when an equation reads it."""

    anew: _Anew
    value: Value


def _bind_late(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    return bind_again(eqn, [x.anew.get(x.anew.loop.variable(x.value)) if isinstance(x, _Late) else x for x in operands])
