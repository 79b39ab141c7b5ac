"""Equations of a graph replaced by what else computes the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.ir.graph import Graph, Operand, Value
from autopar.tracing.build import Builder, live_equations, trace_emission
from autopar.tracing.trace import fingerprint

# Operands, in the graph as it is, and a function of them that gives the equation's results.
Replacement = tuple[Sequence[Operand], Callable[..., Sequence[Any]]]


def rewritten(graph: Graph, replacements: Mapping[int, Replacement]) -> Graph:
    """The graph in which these equations, by id, are what the functions are traced to; plans of it are its own."""
    if not replacements:
        return graph
    builder = Builder(graph.next_value_id, least_sum_bytes=graph.least_sum_bytes)
    new: dict[Value, Operand] = {}

    def renamed(operands: Sequence[Operand]) -> list[Operand]:
        return [new.get(v, v) if isinstance(v, Value) else v for v in operands]

    for eqn in graph.equations:
        if eqn.id not in replacements:
            kept = dataclasses.replace(eqn, id=len(builder.equations), inputs=tuple(renamed(eqn.inputs)))
            builder.equations.append(kept)
            continue
        operands, function = replacements[eqn.id]
        closed, values = trace_emission(function, renamed(operands))
        results = builder.inline(closed.jaxpr, closed.consts, values, source=eqn.source, phase=eqn.phase)
        new.update(zip(eqn.outputs, results, strict=True))
    return with_equations(graph, builder, tuple(renamed(graph.outputs)))


def with_equations(graph: Graph, builder: Builder, outputs: tuple[Operand, ...]) -> Graph:
    """The graph with the equations of a builder instead of its own, which compute its results; plans of it are its own.

    What no result needs is left out.
    """
    equations = tuple(dataclasses.replace(e, origin=(e.id, 0)) for e in live_equations(builder.equations, outputs))
    used = {v for eqn in equations for v in eqn.values} | {v for v in outputs if isinstance(v, Value)}
    constants = {v: c for v, c in {**graph.constants, **builder.constants}.items() if v in used}
    return dataclasses.replace(
        graph, equations=equations, outputs=outputs, constants=constants,
        fingerprint=fingerprint(equations, graph.inputs, outputs),
    )  # fmt: skip
