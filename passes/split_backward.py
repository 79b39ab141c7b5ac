"""Gradients of parameters apart from what the backward pass hands on: a pipeline then fills its bubble with them.

Nothing waits for them but the update (Qi et al. 2024, Zero Bubble Pipeline Parallelism). In a program they are whole
equations; a loop over layers is cut in two: one hands the cotangent on and stacks what the other reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from autopar.ir.graph import Equation, Graph, Literal, Operand, Phase, Value
from autopar.ir.rule import RuleOf, bind
from autopar.passes.rules.loops import chain_of
from autopar.passes.rules.nested import make_body
from autopar.passes.rules.propagation import Body
from autopar.tracing.axis_collectives import scan_counts
from autopar.tracing.build import Builder, trace_emission

IsHeavy = Callable[[Equation], bool]


def put_off(
    equations: Sequence[Equation], waited_for: Collection[Value], heavy: IsHeavy, late: Collection[Value] = ()
) -> frozenset[int]:
    """Ids of the equations, in order, that need not run before `waited_for` is there, and are worth putting off.

    The heavy ones, with what only leads to them and what follows from them or from `late` values; none, if what is
    waited for reads these.
    """
    waiting = set(waited_for)
    needed: set[int] = set()
    postponed: set[int] = set()
    leading: set[Value] = set()
    for eqn in reversed(equations):
        if any(v in waiting for v in eqn.outputs):
            waiting.update(eqn.values)
            needed.add(eqn.id)
        elif heavy(eqn) or any(v in leading for v in eqn.outputs):
            postponed.add(eqn.id)
            leading.update(eqn.values)
    made = set(late)
    for eqn in equations:
        if eqn.id in postponed or any(v in made for v in eqn.values):
            postponed.add(eqn.id)
            made.update(eqn.outputs)
    return frozenset() if postponed & needed else frozenset(postponed)


def split_loops(graph: Graph, rule_of: RuleOf) -> Graph:
    """The graph with each loop of the backward pass in two, where it computes gradients that no round waits for."""
    builder = Builder(graph.next_value_id, least_sum_bytes=graph.least_sum_bytes)
    renamed: dict[Operand, Operand] = {}
    for eqn in graph.equations:
        inputs = [renamed.get(v, v) for v in eqn.inputs]
        loop = _Loop.of(eqn, rule_of) if eqn.phase is Phase.BACKWARD else None
        if loop is None or not loop.late:
            builder.equations.append(dataclasses.replace(eqn, id=len(builder.equations), inputs=tuple(inputs)))
            continue
        builder.origin = eqn.origin
        closed, operands = trace_emission(loop.run, inputs)
        results = builder.inline(closed.jaxpr, closed.consts, operands, source=eqn.source, phase=eqn.phase)
        renamed.update(zip(eqn.outputs, results, strict=True))
    if not renamed:
        return graph
    return dataclasses.replace(
        graph, equations=tuple(builder.equations), outputs=tuple(renamed.get(v, v) for v in graph.outputs),
        constants={**graph.constants, **builder.constants},
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class _Loop:
    """A `scan` whose body can be cut: in what hands on from round to round, and gradients that nothing there needs.

    Those that share no operand become loops of their own: no cut would split all that they read.
    """

    params: Mapping[str, Any]
    body: Body
    late: tuple[frozenset[int], ...]  # ids of the equations of each further loop

    @staticmethod
    def of(eqn: Equation, rule_of: RuleOf) -> _Loop | None:
        chain = chain_of(eqn)
        if chain is None:
            return None
        closed = eqn.params["jaxpr"]
        body = make_body(closed.in_avals, [(closed, range(len(closed.in_avals)))], rule_of)
        waited_for = {v for k in chain.carried if k not in chain.adding and isinstance(v := body.outputs[k], Value)}

        def heavy(eqn: Equation) -> bool:
            return body.rules[eqn.id].products > 0

        sums: set[Value] = set()  # what is added to in a later loop enters it
        while True:
            late = put_off(body.equations, waited_for, heavy, sums)
            made = {v for e in body.equations if e.id in late for v in e.outputs}
            more = {body.inputs[chain.carried[k]] for k in chain.adding if body.outputs[k] in made} - sums
            if not more:
                break
            sums |= more
        varying = {v for e in body.equations for v in e.outputs} | {*body.inputs[scan_counts(eqn.params)[0] :]}
        import networkx as nx  # slow to import

        shared = nx.Graph()
        for e in body.equations:
            if e.id in late:
                shared.add_edges_from((e.id, v) for v in (*e.values, *e.outputs) if v in varying)
        parts = [frozenset(x for x in part if isinstance(x, int)) for part in nx.connected_components(shared)]
        return _Loop(eqn.params, body, tuple(sorted(parts, key=min)))

    def run(self, *operands: Any) -> Sequence[Any]:
        """All loops; gives the results of the one."""
        body, p = self.body, self.params
        consts, carries = scan_counts(p)
        part_of = {id_: number for number, ids in enumerate(self.late, 1) for id_ in ids}
        made_in = {v: part_of.get(e.id, 0) for e in body.equations for v in e.outputs}
        number_of = [made_in.get(v, 0) if isinstance(v, Value) else 0 for v in body.outputs]
        fixed = {**dict(zip(body.inputs[:consts], operands[:consts], strict=True)), **body.constants}
        stacked = dict(zip(body.inputs[consts + carries :], operands[consts + carries :], strict=True))
        carried = list(zip(body.inputs[consts : consts + carries], operands[consts : consts + carries], strict=True))
        first = {v: number for (v, _), number in zip(carried, number_of, strict=False)}

        def is_handed(v: Value, number: int) -> bool:
            return not (v in fixed or v in stacked) and made_in.get(v, first.get(v, 0)) != number

        handed = dict.fromkeys(
            v for e in body.equations for v in e.values if is_handed(v, part_of.get(e.id, 0))
        )  # what the first loop stacks for the others

        def loop(number: int, rounds: Mapping[Value, Any], extra: Sequence[Value] = ()) -> list[Any]:
            mine = [k for k, other in enumerate(number_of) if other == number]
            equations = [e for e in body.equations if part_of.get(e.id, 0) == number]
            read = {v for e in equations for v in e.values} | {body.outputs[k] for k in mine} | {*extra}
            # An operand that the loop does not read would be of no cut.
            rounds = {v: x for v, x in rounds.items() if v in read}
            starts = [carried[k] for k in mine if k < carries]

            def one_round(carry: list[Any], xs: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
                env = {**fixed, **{v: xs[v.id] for v in rounds}}
                env.update(zip((v for v, _ in starts), carry, strict=True))
                for eqn in equations:
                    outputs = bind(eqn, [_read(env, v) for v in eqn.inputs])
                    env.update(zip(eqn.outputs, outputs, strict=True))
                out = [_read(env, body.outputs[k]) for k in mine]
                return out[: len(starts)], [*out[len(starts) :], *(env[v] for v in extra)]

            end, ys = jax.lax.scan(
                one_round, [x for _, x in starts], {v.id: x for v, x in rounds.items()},
                length=p["length"], reverse=p["reverse"], unroll=p.get("unroll", 1),
            )  # fmt: skip
            return [*end, *ys]

        results = loop(0, stacked, tuple(handed)) if handed or 0 in number_of else []
        at = len(results) - len(handed)
        stacked.update(zip(handed, results[at:], strict=True))
        supply = [iter(results[:at]), *(iter(loop(number, stacked)) for number in range(1, 1 + len(self.late)))]
        return [next(supply[number]) for number in number_of]


def _read(env: Mapping[Value, Any], operand: Operand) -> Any:
    return operand.value if isinstance(operand, Literal) else env[operand]
