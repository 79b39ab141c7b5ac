"""What a forward program of its own keeps for its backward program: as few bytes as give all that is read there.

JAX's differentiation hands on what each equation's derivative happens to read: of a layer norm or a GELU several arrays
of the same size, some of them wider than what they are made of. Where both passes are one program, XLA fuses such
elementwise equations into whatever reads them and keeps what they are made of. It cannot where they are two programs,
as in a pipeline: all that one reads of the other goes through memory, and is kept for each microbatch in flight. So
the backward program repeats elementwise equations of the forward pass; what both need, the residuals, is a minimum cut
between what the forward pass has in memory anyway and what the backward pass reads, by bytes. PyTorch's compiler
divides the passes so (He and Yu 2023, a minimum cut, too); it may repeat more than this does.

Repeated is only what fusion makes free: elementwise equations, from values that kernels of the forward pass write
whether or not the backward pass reads them. What a product, a loop or a reduction of the backward pass reads is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence, Set

from autopar.cost_model.fusion import stored
from autopar.ir.graph import Equation, Phase, StepGraph, Value
from autopar.ir.rule import Rule

_End = tuple[int, bool, bool]  # of a value: bytes to keep it, whether it is read, and whether it can be made again
_Edge = tuple[int, int]  # an equation makes the second value of the first, by number


def repeated(step: StepGraph, rules: Mapping[int, Rule]) -> Mapping[Value, Equation]:
    """By value of the forward pass: the equation with which a backward program of its own makes it again.

    Values that it reads from the forward program instead are not in it.
    """
    made = {v for eqn in step.forward for v in eqn.outputs}
    backward = [eqn for eqn in step.equations if eqn.phase is Phase.BACKWARD]
    kept = {v for eqn in backward if reads_memory(rules[eqn.id]) for v in eqn.values}
    kept.update(v for eqn in step.equations if not eqn.phase.in_loop for v in eqn.values)
    kept.update(v for v in (*step.accumulate, *step.keep, *step.outputs) if isinstance(v, Value))
    read = {v for eqn in backward for v in eqn.values if v in made}
    return made_again(step.forward, rules, read, kept)


def reads_memory(rule: Rule) -> bool:
    """Whether what an equation reads is in memory, so that no kernel makes it on the way."""
    return not rule.is_fusible or rule.separable


def made_again(
    equations: Sequence[Equation], rules: Mapping[int, Rule], read: Set[Value], kept: Set[Value],
    written: Set[Value] = frozenset(), priced: Collection[Value] = (),
) -> dict[Value, Equation]:  # fmt: skip
    """Which values another program makes again if that which it takes over instead has the fewest bytes.

    Args:
      equations: of the one program.
      rules: by equation id.
      read: what the other reads of it.
      kept: what is in memory for the other program, whatever is chosen here.
      written: what the one program writes to memory, and the other has only if it is kept for it.
      priced: what the equations take that is not there for the other program, unless it is kept; all else is there.
    """
    made = {v: eqn for eqn in equations for v in eqn.outputs}
    in_memory = stored(equations, rules, (), kept | written)
    repeatable = {v for v, eqn in made.items() if v not in in_memory and _is_elementwise(eqn, rules[eqn.id])}
    there = kept | (read - repeatable)
    found: dict[Value, Equation] = {}
    known: dict[Hashable, frozenset[int]] = {}  # alike layers have alike cuts
    for part in _parts(read & repeatable, made, repeatable, there, priced):
        number = {v: k for k, v in enumerate(part)}
        ends = tuple((v.nbytes, v in read, v in repeatable) for v in part)
        edges = tuple(
            (number[u], k) for v, k in number.items() if v in repeatable for u in made[v].values if u in number
        )
        if (ends, edges) not in known:
            known[ends, edges] = _behind_the_cut(ends, edges)
        found.update((part[k], made[part[k]]) for k in known[ends, edges])
    return found


def _is_elementwise(eqn: Equation, rule: Rule) -> bool:
    """Whether each element of its one result is made of one of each operand, with nothing sent, however it is cut."""
    return len(eqn.outputs) == 1 and rule.is_fusible and not (rule.reduced or rule.whole or rule.separable)


def _parts(
    read: Set[Value], made: Mapping[Value, Equation], repeatable: Set[Value], there: Set[Value],
    priced: Collection[Value],
) -> list[list[Value]]:  # fmt: skip
    """What these can be made of, in parts that share nothing that could be kept for the one and serve the other."""
    import networkx as nx  # slow to import

    order: dict[Value, int] = {v: k for k, v in enumerate((*priced, *made))}
    together = nx.Graph()
    todo, seen = [*read], {*read}
    while todo:
        v = todo.pop()
        together.add_node(v)
        for u in made[v].values:
            if u in there or u not in order:
                continue  # it costs nothing
            together.add_edge(u, v)
            if u in repeatable and u not in seen:
                seen.add(u)
                todo.append(u)
    return [sorted(part, key=order.__getitem__) for part in nx.connected_components(together)]


def _behind_the_cut(ends: tuple[_End, ...], edges: tuple[_Edge, ...]) -> frozenset[int]:
    """The values that are made again if those of the least bytes are kept; of equal cuts the one with the fewest."""
    import networkx as nx  # slow to import

    network = nx.DiGraph()  # each value is an edge from where it is made to where it is read
    network.add_nodes_from(("source", "read"))
    for k, (nbytes, is_read, is_repeatable) in enumerate(ends):
        network.add_edge((k, "made"), (k, "there"), capacity=nbytes)
        if is_read:
            network.add_edge((k, "there"), "read")  # without a limit
        if not is_repeatable:
            network.add_edge("source", (k, "made"))
    for u, v in edges:
        network.add_edge((u, "there"), (v, "made"))
    _, (_, behind) = nx.minimum_cut(network, "source", "read")
    return frozenset(k for k in range(len(ends)) if (k, "made") in behind)
