"""Dimensions that devices do not divide, padded: a vocabulary of 50,257 words becomes one of 50,264 within the step.

What a product has along such a dimension cannot be cut into equal pieces, and every device would compute the whole. So
equations around the products are computed with a few elements more, which stand at the end of the dimension. Arguments
are padded with zeros where they enter, results are cut where they leave, and what a reduction or a product sums up is
masked before: nothing of it is seen outside, neither in the state nor in a checkpoint. Which equations take part is a
minimum cut: the products do, and of all others those for which the fewest bytes are padded and cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.ir.graph import Equation, Graph, Operand, Phase, Value
from autopar.ir.rule import Local, ReduceOp, Rule, RuleOf, is_reduction
from autopar.passes.batch import BatchAnalysis, analyse_batch
from autopar.passes.rules.table import registered_rules
from autopar.tracing.build import Builder, trace_emission
from autopar.tracing.rewrite import with_equations

Padding = tuple[tuple[int, int], ...]  # sizes of dimensions of products, and what they shall be at least
_Dim = tuple[Value, int]
_Factor = tuple[int, int]  # an equation by its id, and one of its factors
_WHOLE = "whole"
_Sizes = tuple[tuple[int, int], ...]  # of a version of a value: padded dimensions, with their sizes


def padded(analysis: BatchAnalysis, padding: Padding, rule_of: RuleOf) -> BatchAnalysis | None:
    """The step with dimensions of products padded; None where none of these sizes can be.

    Not padded are examples, what a loop's body has inside, what equations by a user's own rule have, and dimensions
    that something pairs with themselves, as attention does positions.
    """
    graph = analysis.graph
    factors: dict[_Factor, int] = {}
    for group in _groups(analysis, {size: to for size, to in padding if to > size}):
        factors.update(group.chosen(graph, analysis.rules))
    if not factors:
        return None
    larger = dataclasses.replace(_Padding(graph, analysis.rules, factors).run(), padding=padding)
    axes = {v: batch.dim for v in graph.inputs if (batch := analysis.states[v].batch) is not None}
    return analyse_batch(larger, axes, rule_of)


def padding_text(padding: Padding) -> str:
    """In words."""
    return ", ".join(f"{size:,} to {to:,}" for size, to in padding)


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Dimensions that are padded together, if at all."""

    dims: Sequence[_Dim]
    factors: Mapping[_Factor, int]  # of equations, with the number of elements for each of `base`
    needed: frozenset[_Factor]  # those of products for which it is done
    base: int
    to: int

    def chosen(self, graph: Graph, rules: Mapping[int, Rule]) -> dict[_Factor, int]:
        """Which factors of equations are padded, with their sizes: those of the fewest bytes at their border."""
        import networkx as nx  # slow to import

        network = nx.DiGraph()
        network.add_nodes_from(("padded", _WHOLE))
        network.add_edges_from(("padded", node) for node in self.needed)  # without a limit
        readers, makers = self._ends(graph, rules)
        for v, d in self.dims:
            nbytes = 1 + v.nbytes * self.to // self.base
            enters, leaves = ((way, v.id, d) for way in ("enters", "leaves"))
            maker = makers.get((v, d), _WHOLE)
            network.add_edge(enters, maker, capacity=nbytes)
            network.add_edge(maker, leaves, capacity=nbytes)
            for reader in readers[v, d]:
                network.add_edge(reader, enters)
                network.add_edge(leaves, reader)
        if not nx.has_path(network, "padded", _WHOLE):
            inside = set(self.factors)
        else:
            _, (inside, _) = nx.minimum_cut(network, "padded", _WHOLE)
        return {node: self.to * inner for node, inner in self.factors.items() if node in inside}

    def _ends(
        self, graph: Graph, rules: Mapping[int, Rule]
    ) -> tuple[Mapping[_Dim, Sequence[Any]], Mapping[_Dim, _Factor]]:
        """By dimension: which factors of equations read it, `_WHOLE` for all else that does, and which one makes it."""
        readers: dict[_Dim, list[Any]] = defaultdict(list)
        makers: dict[_Dim, _Factor] = {}
        mine: dict[Operand, list[_Dim]] = defaultdict(list)
        for v, d in self.dims:
            mine[v].append((v, d))
        for eqn in graph.equations:
            rule = rules[eqn.id]
            for x, dims in zip(eqn.inputs, rule.inputs, strict=True):
                for dim in mine.get(x, ()):
                    readers[dim].append(self._node(eqn, dims[dim[1]]) or _WHOLE)
            for x, dims in zip(eqn.outputs, rule.outputs, strict=True):
                for dim in mine.get(x, ()):
                    if node := self._node(eqn, dims[dim[1]]):
                        makers[dim] = node
        for x in graph.outputs:
            for dim in mine.get(x, ()):
                readers[dim].append(_WHOLE)
        return readers, makers

    def _node(self, eqn: Equation, factors: Sequence[int]) -> _Factor | None:
        node = (eqn.id, factors[0]) if factors else None
        return node if node in self.factors else None


def _groups(analysis: BatchAnalysis, sizes: Mapping[int, int]) -> list[_Group]:
    """What can be padded of these sizes."""
    import networkx as nx  # slow to import

    graph, rules = analysis.graph, analysis.rules
    joined, wanted = nx.utils.UnionFind(), set[_Factor]()
    for eqn in graph.equations:
        rule = rules[eqn.id]
        arrays = [*zip(eqn.inputs, rule.inputs, strict=True), *zip(eqn.outputs, rule.outputs, strict=True)]
        for f in _paddable(eqn, rule):
            node = (eqn.id, f)
            joined.union(node, *((v, d) for v, dims in arrays for d, dim in enumerate(dims) if f in dim))
            if rule.unit == "matmul" and rule.factors[f] in sizes:
                wanted.add(node)
    members: dict[Any, list[Any]] = defaultdict(list)
    for x in [*joined.parents]:  # in the same order in every process
        members[joined[x]].append(x)
    tops = dict.fromkeys(joined[node] for node in sorted(wanted))
    found = (_group_of(members[top], analysis, sizes, wanted) for top in tops)
    return [group for group in found if group is not None]


def _paddable(eqn: Equation, rule: Rule) -> Iterator[int]:
    """The factors along which an equation may have more elements than it has."""
    has_body = rule.kernels or rule.round is not None or rule.branches is not None
    if rule.replicates or has_body or eqn.primitive.name in registered_rules():
        return
    # Zeros add nothing to a sum that is linear in all that is summed up.
    linear = frozenset[int]().union(*rule.linear)
    for f in rule.splittable:
        if rule.communicates(f) or f in rule.windows or f in rule.unaffected:
            continue
        holding = [k for k, dims in enumerate(rule.inputs) if any(f in dim for dim in dims)]
        masked = is_reduction(eqn, rule) or (rule.reduced.get(f) == "sum" and linear.issuperset(holding))
        if f in rule.reduced and not masked:
            continue
        values = [eqn.inputs[k] for k in holding]
        values += [v for v, dims in zip(eqn.outputs, rule.outputs, strict=True) if any(f in dim for dim in dims)]
        if all(isinstance(v, Value) and not v.is_key for v in values):
            yield f


def _group_of(
    members: Sequence[Any], analysis: BatchAnalysis, sizes: Mapping[int, int], wanted: set[_Factor]
) -> _Group | None:  # fmt: skip
    """None where it cannot be padded."""
    rules, states = analysis.rules, analysis.states
    factors = {m: rules[m[0]].factors[m[1]] for m in members if not isinstance(m[0], Value)}
    dims = [m for m in members if isinstance(m[0], Value)]
    if len({v for v, _ in dims}) < len(dims):
        return None  # a value has two of them
    alone = [eqn for eqn, f in factors if not rules[eqn].separable]
    if len(set(alone)) < len(alone):
        return None  # an equation pairs them
    if any((batch := states[v].batch) is not None and batch.dim == d for v, d in dims):
        return None
    base = math.gcd(*factors.values())
    needed = frozenset(node for node in factors if node in wanted)
    to = max(math.ceil(sizes[factors[node]] * base / factors[node]) for node in needed)
    return _Group(dims, {node: size // base for node, size in factors.items()}, needed, base, to)


@dataclasses.dataclass
class _Larger(Local):
    """An equation with more elements along some factors, for `emit`: a piece of which one is enough."""

    rule: Rule
    sizes: Mapping[int, int]

    def size(self, factor: int) -> int:
        return self.sizes.get(factor, self.rule.factors[factor])

    def is_split(self, factor: int) -> bool:
        return factor in self.sizes

    def start(self, factor: int) -> Any:
        return 0

    def number(self, factor: int) -> Any:
        return 0


class _Padding:
    """A graph with some factors of its equations padded."""

    def __init__(self, graph: Graph, rules: Mapping[int, Rule], factors: Mapping[_Factor, int]) -> None:
        self._graph, self._rules = graph, rules
        self._sizes: dict[int, dict[int, int]] = defaultdict(dict)  # by equation: factors with their sizes
        for (eqn, f), size in factors.items():
            self._sizes[eqn][f] = size
        self._builder = Builder(graph.next_value_id, least_sum_bytes=graph.least_sum_bytes)
        # Of values, those that are padded in some dimensions, or () in none.
        self._versions: dict[Value, dict[_Sizes, Operand]] = {}
        self._zero: set[tuple[Value, _Sizes]] = set()  # versions whose padding is zero

    def run(self) -> Graph:
        graph = self._graph
        for v in (*graph.inputs, *graph.constants):
            self._versions[v] = {(): v}
        for eqn in graph.equations:
            sizes = self._sizes.get(eqn.id)
            if sizes:
                self._pad(eqn, sizes)
                continue
            inputs = tuple(self._version(v, (), eqn) for v in eqn.inputs)
            kept = dataclasses.replace(eqn, id=len(self._builder.equations), inputs=inputs)
            self._builder.equations.append(kept)
            self._versions.update((v, {(): v}) for v in eqn.outputs)
        outputs = tuple(self._version(v, (), None) for v in graph.outputs)
        return with_equations(graph, self._builder, outputs)

    def _pad(self, eqn: Equation, sizes: Mapping[int, int]) -> None:
        """Append an equation with more elements."""
        rule = self._rules[eqn.id]
        operands: list[Operand] = []
        are_zero: list[bool] = []
        for v, dims in zip(eqn.inputs, rule.inputs, strict=True):
            there = self._sizes_of(dims, rule, sizes)
            operand = self._version(v, there, eqn)
            is_zero = bool(there) and (v, there) in self._zero
            for f in sizes:
                d = next((d for d, dim in enumerate(dims) if f in dim), None)
                if d is not None and f in rule.reduced and isinstance(v, Value):
                    op = rule.reduced[f]
                    if not (is_zero and op == "sum"):
                        operand = self._traced(_masked(d, v.shape[d], op), [operand], eqn)[0]
            operands.append(operand)
            are_zero.append(is_zero or not there)
        local = _Larger(rule, sizes)
        results = self._traced(lambda *xs: rule.emit(local, eqn, xs), operands, eqn)
        changed = frozenset(k for k, dims in enumerate(rule.inputs) if self._sizes_of(dims, rule, sizes))
        values = frozenset(k for k, v in enumerate(eqn.inputs) if isinstance(v, Value))
        stays_zero = all(are_zero) and changed == values and (changed in rule.linear or rule.separable)
        for v, dims, result in zip(eqn.outputs, rule.outputs, results, strict=True):
            there = self._sizes_of(dims, rule, sizes)
            self._versions[v] = {there: result}
            if stays_zero:
                self._zero.add((v, there))

    def _sizes_of(self, dims: Any, rule: Rule, sizes: Mapping[int, int]) -> _Sizes:
        """Of an operand or a result."""
        return tuple(
            (d, math.prod(sizes.get(f, rule.factors[f]) for f in dim))
            for d, dim in enumerate(dims)
            if any(f in sizes for f in dim)
        )

    def _version(self, v: Operand, sizes: _Sizes, reader: Equation | None) -> Operand:
        """A value with these of its dimensions padded, for an equation, or None: as a result of the step."""
        if not isinstance(v, Value):
            return v
        versions = self._versions[v]
        if sizes in versions:
            return versions[sizes]
        if () not in versions:
            larger = next(iter(versions.values()))
            versions[()] = self._traced(lambda x: [lax.slice(x, [0] * x.ndim, v.shape)], [larger], reader)[0]
        if sizes:
            wanted = dict(sizes)
            config = [(0, wanted.get(d, n) - n, 0) for d, n in enumerate(v.shape)]
            whole = versions[()]
            versions[sizes] = self._traced(lambda x: [lax.pad(x, jnp.zeros((), x.dtype), config)], [whole], reader)[0]
            self._zero.add((v, sizes))
        return versions[sizes]

    def _traced(
        self, function: Callable[..., Sequence[Any]], operands: Sequence[Operand], eqn: Equation | None
    ) -> list[Operand]:
        """Of the line and phase of an equation; None: of the end of the step."""
        closed, values = trace_emission(function, operands)
        source, phase = ("", Phase.UPDATE) if eqn is None else (eqn.source, eqn.phase)
        first = len(self._builder.equations)
        results = self._builder.inline(closed.jaxpr, closed.consts, values, source=source, phase=phase)
        if eqn is not None and eqn.rematerialized:
            made = self._builder.equations
            made[first:] = [dataclasses.replace(each, rematerialized=True) for each in made[first:]]
        return results


def _masked(dim: int, size: int, op: ReduceOp) -> Callable[[Any], Sequence[Any]]:
    """An array whose elements from `size` on leave what a reduction makes of the others as it is."""

    def mask(x: Any) -> Sequence[Any]:
        index = lax.broadcasted_iota(np.int32, x.shape, dim)
        return [lax.select(index < size, x, lax.full_like(x, _neutral(op, x.dtype)))]

    return mask


def _neutral(op: ReduceOp, dtype: Any) -> Any:
    """What a reduction makes nothing of."""
    is_bool, is_whole = dtype == np.bool_, jnp.issubdtype(dtype, jnp.integer)
    if op in ("max", "min"):
        limits: Any = np.iinfo(dtype) if is_whole else None
        least, most = (False, True) if is_bool else (limits.min, limits.max) if is_whole else (-np.inf, np.inf)
        return least if op == "max" else most
    if op == "and":
        return True if is_bool else ~np.zeros((), dtype)
    return 1 if op == "prod" else 0
