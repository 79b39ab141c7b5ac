"""Loops over layers cut into shorter ones, and what is stacked for them cut alike, so that stages can share a loop.

A scan over layers takes weights stacked along a leading axis. Cut into parts it is a chain of loops, each over its
part of the weights: what an unrolled model would be. The cut spreads by the rules: the leaf of the state becomes one
input for each piece, so do the optimizer's leaves; the backward loop, the update and everything between is computed
piece by piece; a sum over the layers becomes a sum of the pieces' sums. Where a rule cannot follow, pieces are joined,
or a whole value is sliced. A carry that rounds only add to starts at zero in every part, and the parts are summed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from autopar.ir.graph import BatchDim, Equation, Graph, LeafCut, Phase, Value
from autopar.passes.batch import BatchAnalysis, Kind, When
from autopar.passes.cut_loops import Bounds, Cutter, LoopCut, Spread
from autopar.passes.rules.loops import chain_of

MOST_PARTS = 12  # that the stage search tells apart in one loop
MOST_EVEN_PARTS = 16  # where there are as many hosts, or it takes so many to give each host as many as the others


def layer_loops(analysis: BatchAnalysis, num_hosts: int, num_layers: int | None) -> dict[int, Bounds]:
    """The forward loops over stacked parameters that do matrix products, each with the finest cut worth a look."""
    loops = {}
    for eqn in analysis.graph.equations:
        chain = chain_of(eqn)
        rule = analysis.rules[eqn.id]
        if chain is None or chain.length < 2 or rule.unit != "matmul" or eqn.phase is Phase.BACKWARD:
            continue
        states = [analysis.states[v] for i in chain.stacked_in if isinstance(v := eqn.inputs[i], Value)]
        layers = any(state.kind is Kind.FREE and state.parameters for state in states)
        if layers and analysis.when[eqn.id] is When.LOOP:
            loops[eqn.id] = finest(chain.length, num_hosts, num_layers)
    return loops


def finest(length: int, num_hosts: int = 1, num_layers: int | None = None) -> Bounds:
    """Equal parts if there are enough of them, so that alike stages are solved once, and as many for each host.

    `num_layers`: into so many layers the step will be cut, each of as many parts as the others.

    >>> finest(6), finest(48)[:3], finest(48, 8)[:3], finest(13)[:4], finest(48, num_layers=8)[:3]
    ((0, 1, 2, 3, 4, 5, 6), (0, 4, 8), (0, 3, 6), (0, 1, 2, 3), (0, 3, 6))
    """
    most = min(length, MOST_EVEN_PARTS if num_hosts >= MOST_EVEN_PARTS else MOST_PARTS)
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    if num_layers is not None and num_layers > 1:
        like = [n for n in divisors if n % num_layers == 0]
        parts = next((n for n in like if n >= most), like[-1]) if like else min(length, max(most, num_layers))
    else:
        parts = max(n for n in divisors if n <= most)
        parts = parts if 2 * parts > most else most
        even = [n for n in divisors if n % num_hosts == 0 and most < 2 * n <= 2 * MOST_EVEN_PARTS]
        if parts % num_hosts and even:
            parts = even[-1]
    return tuple(k * length // parts for k in range(parts + 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Stacks:
    """What can be cut for loops over layers."""

    leaves: Mapping[int, tuple[LeafCut, int]]  # by argument leaf: its finest cut, the loop it follows
    loops: Mapping[int, Bounds]  # the finest cuts of the loops that leaves follow
    alike: Mapping[int, int]  # loop -> the loop whose leaves it reads

    @property
    def lengths(self) -> set[int]:
        """Numbers of rounds of the loops."""
        return {bounds[-1] for bounds in self.loops.values()}

    def leaf_cuts(self, bounds: Mapping[int, Bounds]) -> dict[int, LeafCut]:
        """The cuts of leaves that follow from cuts of loops."""
        return {
            i: LeafCut(cut.axis, bounds[loop])
            for i, (cut, loop) in self.leaves.items()
            if len(bounds.get(loop, ())) > 2
        }  # fmt: skip


def find_stacks(analysis: BatchAnalysis, num_hosts: int = 1, num_layers: int | None = None) -> Stacks:
    """The loops over layers of a step, and the leaves of its arguments that must be cut with them; see `finest`."""
    loops = layer_loops(analysis, num_hosts, num_layers)
    spread = Spread(analysis.graph, analysis.rules, _never_cut(analysis))
    for i, bounds in loops.items():
        length = bounds[-1]
        spread.loops[i] = LoopCut(BatchDim(0, 1, length, 1), bounds, i)
    spread.run()
    leaves = {
        i: (LeafCut(cut.batch.dim, cut.bounds), cut.loop)
        for i, v in enumerate(analysis.graph.inputs)
        if (cut := spread.given.get(v)) is not None
    }
    followed = {at for _, at in leaves.values()}
    alike: dict[int, int] = {}
    for eqn in analysis.graph.equations:
        if eqn.id not in loops:
            continue
        stacked = [eqn.inputs[i] for i in spread.chains[eqn.id].stacked_in]
        read = [spread.states[v].loop for v in stacked if isinstance(v, Value) and v in spread.states]
        common = [loop for loop in read if loop in followed]
        if common:
            alike[eqn.id] = min(common)
    return Stacks(leaves, {i: b for i, b in loops.items() if i in followed}, alike)


def cut_leaves(analysis: BatchAnalysis, cuts: Mapping[int, LeafCut], whole: frozenset[int] = frozenset()) -> Graph:
    """The graph with these argument leaves in pieces, and everything else cut as follows from that; but for `whole`."""
    graph = analysis.graph
    kept = _never_cut(analysis) | {graph.inputs[i] for i in whole}
    spread = Spread(graph, analysis.rules, kept)
    for i, cut in cuts.items():
        value = graph.inputs[i]
        spread.given[value] = LoopCut(BatchDim(cut.axis, 1, value.shape[cut.axis], 1), cut.bounds, -1)
    spread.run()
    return Cutter(spread).run()


def _never_cut(analysis: BatchAnalysis) -> frozenset[Value]:
    return frozenset(v for v in analysis.graph.inputs if analysis.states[v].kind is Kind.BATCHED)


def loop_bounds(equations: Iterable[tuple[Equation, int]], stacks: Stacks) -> dict[int, Bounds]:
    """Where loops are cut so that each stage has its part: `equations` of the finest cut, each with its stage."""
    starts: dict[int, dict[int, int]] = {}  # loop -> first round of a part -> stage
    for eqn, stage in equations:
        loop, start = eqn.origin
        if loop in stacks.alike and chain_of(eqn) is not None:
            starts.setdefault(loop, {})[start] = stage
    cuts: dict[int, set[int]] = {loop: set() for loop in stacks.loops}
    for loop, stages in starts.items():  # loops over the same leaves are cut where any of them is
        cuts[stacks.alike[loop]] |= {b for a, b in itertools.pairwise(sorted(stages)) if stages[a] != stages[b]}
    return {loop: (0, *sorted(at), stacks.loops[loop][-1]) for loop, at in cuts.items()}
