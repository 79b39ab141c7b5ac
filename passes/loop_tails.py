"""What a loop returns of each round without going on with it, computed after the loop, of all rounds at once.

The largest activation of each layer, or whether all of its values are finite, is made of all examples. Computed in the
body of a loop over layers it keeps the loop whole: no device or microbatch could go on without the others. But no round
needs it. So the loop returns what each example gives, or a partial sum, and what follows comes after it: all of that is
small. Where a loop of the backward pass only hands it on, as the running scales of products in 8 bits are handed on in
the place of their gradients, that is moved after it, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from autopar.ir.graph import BatchDim, Equation, Graph, Literal, Operand, Value
from autopar.ir.rule import RuleOf
from autopar.passes.example_reductions import EXTREMES, over_examples, within_examples
from autopar.tracing.axis_collectives import scan_counts
from autopar.tracing.build import Builder, barrier, live_equations
from autopar.tracing.interpret import literal_value, tracing_interpreter
from autopar.tracing.loop_bodies import scanned, with_all_values
from autopar.tracing.rewrite import Replacement, rewritten

_REDUCTIONS = frozenset({*EXTREMES, "reduce_sum"})
_SMALL = 1 / 8  # of what a round hands on: so much more a loop may return


def without_tails(graph: Graph, batch_size: int, rule_of: RuleOf) -> Graph:
    """The graph with loops that compute no more than their rounds need, where what is left of them is small.

    `batch_size`: the first dimension of a multiple of it is taken to hold the examples.
    """
    if batch_size < 2:
        return graph
    loops = _Loops(graph, batch_size, rule_of)
    # The number of those behind one does not change when it is rewritten.
    for left in range(len(loops.scans), 0, -1):
        tail = loops.tail(loops.scans[-left])
        if tail is not None:
            graph = rewritten(graph, {tail.equation.id: tail.replacement()})
            loops = _Loops(graph, batch_size, rule_of)
    return graph


class _Loops:
    """The loops of a graph, and which of them read what."""

    def __init__(self, graph: Graph, batch_size: int, rule_of: RuleOf) -> None:
        self.scans = [eqn for eqn in graph.equations if eqn.primitive.name == "scan"]
        self._batch_size, self._rule_of = batch_size, rule_of
        self._readers: dict[Value, list[tuple[Equation, int]]] = defaultdict(list)  # with the operand's position
        for eqn in self.scans:
            for position, v in enumerate(eqn.inputs):
                if isinstance(v, Value):
                    self._readers[v].append((eqn, position))
        self._searches: dict[int, _Search] = {}  # by equation id

    def tail(self, eqn: Equation) -> _Tail | None:
        """What is computed after a loop instead of in it; None if there is nothing."""
        if next(self._parts(eqn, self._search(eqn)), None) is None:
            return None
        every = with_all_values(eqn.params["jaxpr"], opens_checkpoints=True)
        search = _Search(_Body.of(every, eqn), self._batch_size, self._rule_of)
        found = list(self._parts(eqn, search))
        if not found:
            return None
        moved = frozenset[Value]().union(*(part.moved for part in found))
        returned = dict.fromkeys(v for part in found for v in part.returned)
        of_examples = dict.fromkeys(v for part in found for v in part.of_examples)
        return _Tail(
            eqn, every, search, moved, frozenset[int]().union(*(part.results for part in found)),
            frozenset[Value]().union(*(part.again for part in found)) - moved,
            tuple(v for v in returned if v not in moved),
            tuple(v for v in of_examples if not moved.issuperset(search.body.maker[v].values)),
        )  # fmt: skip

    def _search(self, eqn: Equation) -> _Search:
        if eqn.id not in self._searches:
            body = _Body.of(eqn.params["jaxpr"], eqn)
            self._searches[eqn.id] = _Search(body, self._batch_size, self._rule_of)
        return self._searches[eqn.id]

    def _parts(self, eqn: Equation, search: _Search) -> Iterator[_Part]:
        for seed in search.seeds():
            part = search.part(seed)
            if part is not None and all(self._can_wait(eqn.outputs[k]) for k in part.results):
                yield part

    def _can_wait(self, stack: Value) -> bool:
        """Whether no loop goes on with a stack: it reads it round by round, and only to return something of it."""
        for eqn, position in self._readers.get(stack, ()):
            search = self._search(eqn)
            start = search.body.consts + search.body.carries
            if position < start or search.part(search.body.inputs[position]) is None:
                return False
        return True


@dataclasses.dataclass(frozen=True, eq=False)
class _Body:
    """The body of a loop as equations, calls inlined."""

    consts: int
    carries: int
    inputs: Sequence[Value]
    every: Sequence[Operand]  # what it returns, and after that perhaps other values
    count: int  # of those that it returns
    equations: Sequence[Equation]
    constants: Mapping[Value, Any]

    @staticmethod
    def of(closed: Any, eqn: Equation) -> _Body:
        """`closed`: the body of the loop, perhaps with more results."""
        builder = Builder()
        inputs = [builder.value(aval) for aval in closed.in_avals]
        every = builder.inline(closed.jaxpr, closed.consts, inputs)
        count = len(eqn.outputs)
        return _Body(
            *scan_counts(eqn.params), inputs, every, count, live_equations(builder.equations, every[:count]),
            builder.constants,
        )  # fmt: skip

    @property
    def outputs(self) -> Sequence[Operand]:
        return self.every[: self.count]

    @functools.cached_property
    def at(self) -> Mapping[Value, int]:
        """By value: where it is first among all that is returned and, after that, what enters."""
        every = enumerate([*self.every, *self.inputs])
        return {v: k for k, v in reversed([*every]) if isinstance(v, Value)}

    @functools.cached_property
    def maker(self) -> Mapping[Value, Equation]:
        return {v: e for e in self.equations for v in e.outputs}

    @functools.cached_property
    def after(self) -> Mapping[Value, Sequence[Value]]:
        """By value: what is computed from it directly."""
        after: dict[Value, list[Value]] = defaultdict(list)
        for e in self.equations:
            for position, v in enumerate(e.inputs):
                if isinstance(v, Value):
                    after[v] += [e.outputs[position]] if _is_barrier(e) else e.outputs
        return after

    @functools.cached_property
    def entering(self) -> Set[Value]:
        """What is the same in all rounds or a slice of a stack, and so there outside of the loop."""
        start, stop = self.consts, self.consts + self.carries
        return {*self.inputs[:start], *self.inputs[stop:], *self.constants}

    @functools.cached_property
    def carried(self) -> Set[Value]:
        """What the next round depends on."""
        return set(_before(self, [v for v in self.outputs[: self.carries] if isinstance(v, Value)], set()))

    @functools.cached_property
    def stacks(self) -> Mapping[Value, Sequence[int]]:
        """The numbers of the results that are stacks, by the value of a round."""
        stacks: dict[Value, list[int]] = defaultdict(list)
        for k, v in enumerate(self.outputs[self.carries :], self.carries):
            if isinstance(v, Value):
                stacks[v].append(k)
        return stacks


def _before(body: _Body, values: Sequence[Value], known: Set[Value]) -> Iterator[Value]:
    """These values and all that they are computed from, but for what is behind known ones."""
    seen, waiting = set(values), list(values)
    while waiting:
        v = waiting.pop()
        yield v
        if v in known or v not in body.maker:
            continue
        eqn = body.maker[v]
        sources = [eqn.inputs[eqn.outputs.index(v)]] if _is_barrier(eqn) else eqn.inputs
        waiting += {x for x in sources if isinstance(x, Value)} - seen
        seen.update(waiting)


def _is_barrier(eqn: Equation) -> bool:
    return eqn.primitive is barrier()


def _can_be_mapped(eqn: Equation) -> bool:
    """Whether JAX knows how to apply a primitive to all rounds at once."""

    def apply(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.params)

    specs = [jax.ShapeDtypeStruct((2, *v.shape), v.dtype) for v in eqn.inputs]
    try:
        jax.eval_shape(jax.vmap(apply), *specs)
    except Exception:  # whatever a rule of another's primitive raises
        return False
    return True


@dataclasses.dataclass(frozen=True)
class _Part:
    """What is computed after a loop since it follows from one value of its body."""

    moved: frozenset[Value]  # values
    results: frozenset[int]  # of the loop, by number
    again: frozenset[Value]  # values that are computed there, too
    returned: frozenset[Value]  # what the loop returns for it instead
    of_examples: frozenset[Value]  # what is the largest of all examples, of which it returns that of each


class _Search:
    """Looks in the body of a loop for what can be computed after it."""

    def __init__(self, body: _Body, batch_size: int, rule_of: RuleOf) -> None:
        self.body, self.batch_size, self.rule_of = body, batch_size, rule_of

    def seeds(self) -> Iterator[Value]:
        """From where on something may be computed after the loop."""
        yield from self.body.inputs[self.body.consts + self.body.carries :]
        for e in self.body.equations:
            if e.primitive.name in _REDUCTIONS and self.examples(e) is not None:
                yield e.outputs[0]

    def part(self, seed: Value) -> _Part | None:
        """What follows from a value; None if a round needs it, or that is much, or nothing."""
        body = self.body
        if seed in body.carried:
            return None
        follows: set[Value] = set()
        waiting = [seed]
        while waiting:
            new = {*body.after.get(waiting.pop(), ())} - follows
            follows |= new
            waiting += new
        makers = {body.maker[v].id: body.maker[v] for v in follows}.values()
        maker = body.maker.get(seed)
        if any(map(self._has_to_stay, makers)):
            return None
        is_sum = maker is not None and maker.primitive.name == "reduce_sum"
        if is_sum and all(self._keeps_sums(e, {*follows, seed}) for e in makers):
            return None
        own = {seed} if maker is None or maker.primitive.name in EXTREMES else set[Value]()
        results = frozenset(k for v in follows | own for k in body.stacks.get(v, ()))
        moved = follows | own if maker is not None else follows
        is_unread = maker is None and not follows  # the loop can do without it
        return self._with_operands(frozenset(moved), results) if results or is_unread else None

    def _has_to_stay(self, eqn: Equation) -> bool:
        """Whether an equation is work, has a body that may be, or is not the same for all rounds at once as in each."""
        is_random = eqn.primitive.name.startswith(("random_", "rng_"))
        has_body = any(True for _ in jex_core.jaxprs_in_params(eqn.params))
        return is_random or has_body or self.rule_of(eqn).unit == "matmul"

    def _from_outside(self, v: Value) -> Sequence[Value] | None:
        """What has to be computed, in any order, to have a value outside of the loop; None if that is much."""
        body = self.body
        made = [x for x in _before(body, [v], body.entering) if x not in body.entering]
        return None if any(x not in body.maker or self._has_to_stay(body.maker[x]) for x in made) else made

    def _keeps_sums(self, eqn: Equation, values: Set[Value]) -> bool:
        positions = frozenset(i for i, v in enumerate(eqn.inputs) if v in values)
        return positions in self.rule_of(eqn).linear

    def _with_operands(self, moved: frozenset[Value], results: frozenset[int]) -> _Part | None:
        body = self.body
        again: set[Value] = set()
        returned: set[Value] = set()
        of_examples: dict[Value, int] = {}  # with the bytes that it takes
        for eqn in {body.maker[v].id: body.maker[v] for v in moved}.values():
            is_extreme = eqn.primitive.name in EXTREMES and not moved.issuperset(eqn.values)
            if is_extreme and (batch := self.examples(eqn)) is not None:
                of_examples[eqn.outputs[0]] = eqn.outputs[0].nbytes * batch.units
                continue
            for position, v in enumerate(eqn.inputs):
                here = not _is_barrier(eqn) or eqn.outputs[position] in moved
                if not isinstance(v, Value) or v in moved or v in body.entering or not here:
                    continue
                if v in body.stacks:
                    continue  # there is a stack of it that stays
                if (made := self._from_outside(v)) is not None:
                    again.update(made)
                else:
                    returned.add(v)
        needed = {*returned, *(v for result in of_examples for v in body.maker[result].values)}
        if len(body.every) > body.count and not body.at.keys() >= needed:
            return None  # it comes of what is taken apart, such as a condition that is known
        handed_on = sum(v.nbytes for v in body.outputs if isinstance(v, Value))
        if sum(v.nbytes for v in returned) + sum(of_examples.values()) > _SMALL * handed_on:
            return None
        makers = {body.maker[v].id: body.maker[v] for v in (*moved, *again)}.values()
        if not all(_is_barrier(e) or _can_be_mapped(e) for e in makers):
            return None
        return _Part(moved, results, frozenset(again), frozenset(returned), frozenset(of_examples))

    def examples(self, eqn: Equation) -> BatchDim | None:
        """How the operand of a reduction seems to hold the examples that are reduced; None if it does not."""
        ((x,), size) = eqn.values, self.batch_size
        dim = next((d for d, n in enumerate(x.shape) if n and n % size == 0), None)
        return BatchDim(dim, 1, size, x.shape[dim] // size) if dim in eqn.params["axes"] and dim is not None else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Tail:
    """A loop and what is computed after it."""

    equation: Equation
    closed: Any  # its body, with all values
    search: _Search
    moved: frozenset[Value]
    results: frozenset[int]  # of the loop that the tail gives
    again: frozenset[Value]
    returned: tuple[Value, ...]  # of which the loop has further stacks
    of_examples: tuple[Value, ...]  # for which it has stacks of what each example gives

    def replacement(self) -> Replacement:
        """The loop and its tail in the place of the loop."""
        return self.equation.inputs, self._run

    def _run(self, *operands: Any) -> list[Any]:
        body, eqn = self.search.body, self.equation
        given = [
            jnp.asarray(x, v.dtype) if isinstance(v, Literal) else x for v, x in zip(eqn.inputs, operands, strict=True)
        ]
        kept = [k for k in range(body.count) if k not in self.results]
        jaxpr, consts, used = self._one_round(kept)
        interpreter = tracing_interpreter({}, literal_value)

        def one_round(operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = interpreter.run(jaxpr, consts, operands)
            return results[: body.carries], results[body.carries :]

        fixed = sum(used[: body.consts])
        results = scanned(
            eqn.params, one_round, [x for x, is_used in zip(given, used, strict=True) if is_used], fixed, body.carries
        )
        by_number = dict(zip(kept, results, strict=False))
        stacks = {v: by_number[k] for v, numbers in body.stacks.items() for k in numbers if k in by_number}
        stacks.update(zip((*self.returned, *self.of_examples), results[len(kept) :], strict=True))
        slices = dict(zip(body.inputs, given, strict=True))
        by_number.update(self._tail(stacks, slices))
        return [by_number[k] for k in range(body.count)]

    def _one_round(self, kept: Sequence[int]) -> tuple[Any, Sequence[Any], Sequence[bool]]:
        """A round that returns these results and what the tail needs, and which operands it reads."""
        body = self.search.body

        def one_round(*operands: Any) -> list[Any]:
            interpreter = tracing_interpreter({}, literal_value)
            every = [*interpreter.run(self.closed.jaxpr, self.closed.consts, operands), *operands]

            def of_examples(eqn: Equation) -> Any:
                x, batch = every[body.at[eqn.values[0]]], self.search.examples(eqn)
                assert batch is not None
                return within_examples(eqn.primitive.name, x, eqn.params["axes"], batch)

            extremes = (of_examples(body.maker[v]) for v in self.of_examples)
            return [*(every[k] for k in kept), *(every[body.at[v]] for v in self.returned), *extremes]

        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in self.closed.in_avals]
        closed = jax.make_jaxpr(one_round)(*specs)
        keeps = [body.consts <= i < body.consts + body.carries for i in range(len(body.inputs))]
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=keeps)
        return jaxpr, closed.consts, used

    def _tail(self, stacks: Mapping[Value, Any], operands: Mapping[Value, Any]) -> dict[int, Any]:
        """The results that are computed after the loop, of all rounds."""
        body = self.search.body
        fixed = {v: operands[v] for v in body.inputs[: body.consts]}
        fixed.update({v: jnp.asarray(c) if not v.is_key else c for v, c in body.constants.items()})
        sliced = {v: operands[v] for v in body.inputs[body.consts + body.carries :]}
        computed = {*self.moved, *self.again}
        equations = [e for e in body.equations if not computed.isdisjoint(e.outputs)]
        wanted = sorted(self.results)

        def one_round(slices: Sequence[Any], returned: Sequence[Any]) -> list[Any]:
            known = {**fixed, **dict(zip(sliced, slices, strict=True))}
            given = dict(zip(stacks, returned, strict=True))
            known.update((v, x) for v, x in given.items() if v not in self.of_examples)

            def read(v: Operand) -> Any:
                return jnp.asarray(v.value, v.dtype) if isinstance(v, Literal) else known[v]

            for e in equations:
                if _is_barrier(e):
                    pairs = zip(e.outputs, e.inputs, strict=True)
                    known.update((out, read(v)) for out, v in pairs if out in computed)
                elif e.outputs[0] in self.of_examples and (batch := self.search.examples(e)) is not None:
                    each = given[e.outputs[0]]
                    known[e.outputs[0]] = over_examples(e.primitive.name, each, e.params["axes"], batch)
                else:
                    made = e.primitive.bind(*map(read, e.inputs), **e.params)
                    known.update(zip(e.outputs, made if e.primitive.multiple_results else [made], strict=True))
            return [read(body.outputs[k]) for k in wanted]

        length = self.equation.params["length"]
        results = jax.vmap(one_round, axis_size=length)([*sliced.values()], [*stacks.values()])
        return dict(zip(wanted, results, strict=True))
