"""Conditions taken apart: outputs of a `cond` that have no work in common become conditions of their own.

A step that accumulates gradients by hand updates all parameters in one `cond`. As one operator it could be split in few
ways, none of which suits every parameter, and planning would be of all of them at once. Branches are pure, so that a
`cond` of several outputs is a `cond` for each group of them, with the same index: only the branch that is taken runs
either way. Where programs are emitted, conditions with one index become one again (`emit.py`).

1. Inline the calls of each branch.
2. Two outputs belong together if they depend on the same heavy equation, one that reads or makes a large array: it
   would run twice. What is light (bias corrections, schedules, counters) or makes an array from numbers alone is
   computed in every group that needs it.
3. Each group becomes a `cond` with what its outputs need of the branches. Small outputs that need nothing heavy are one
   group.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from autopar.ir.graph import Equation, Operand, Value
from autopar.tracing.build import COND, Builder

_SMALL = 16  # elements


def taken_apart(equations: Iterable[Equation]) -> Iterator[Equation]:
    """The equations, each `cond` as those that it falls apart into; these have its id."""
    for eqn in equations:
        is_condition = eqn.primitive.name == COND and eqn.params.get("branches_platforms") is None
        if not is_condition or len(eqn.outputs) < 2:
            yield eqn
            continue
        groups = _groups(eqn.outputs, [_inlined(branch) for branch in eqn.params["branches"]])
        yield from [eqn] if len(groups) == 1 else [_part(eqn, outputs) for outputs in groups]


def _inlined(branch: Any) -> tuple[Sequence[Equation], Sequence[Operand]]:
    """Step 1, conditions inside taken apart: the equations of a branch, and its results."""
    builder = Builder()
    results = builder.inline(branch.jaxpr, branch.consts, [builder.value(aval) for aval in branch.in_avals])
    return list(taken_apart(builder.equations)), results


def _groups(
    outputs: Sequence[Value], branches: Sequence[tuple[Sequence[Equation], Sequence[Operand]]]
) -> list[list[int]]:
    """Steps 2 and 3: positions of the outputs that belong together, by the first of them."""
    leader = list(range(len(outputs)))  # a forest over the outputs, then over heavy equations

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = node = leader[leader[node]]
        return node

    def join(nodes: Sequence[int]) -> int:
        first, *rest = {find(node) for node in nodes}
        for node in rest:
            leader[node] = first
        return first

    heavy: set[int] = set()  # outputs
    for equations, results in branches:
        of: dict[Operand, int] = {}  # of what depends on heavy equations: one of them
        for each in equations:
            needed = [of[v] for v in each.values if v in of]
            if each.values and not all(map(_is_small, (*each.values, *each.outputs))):
                leader.append(len(leader))
                needed.append(len(leader) - 1)
            if needed:
                of.update(dict.fromkeys(each.outputs, join(needed)))
        for k, result in enumerate(results):
            if result in of:
                join([k, of[result]])
                heavy.add(k)
    if light := [k for k, v in enumerate(outputs) if k not in heavy and _is_small(v)]:
        join(light)
    groups: dict[int, list[int]] = defaultdict(list)
    for k in range(len(outputs)):
        groups[find(k)].append(k)
    return list(groups.values())


def _is_small(value: Operand) -> bool:
    return not isinstance(value, Value) or math.prod(value.shape) <= _SMALL


def _part(eqn: Equation, outputs: Sequence[int]) -> Equation:
    """The condition with these outputs alone."""
    wanted = [k in outputs for k in range(len(eqn.outputs))]
    branches = eqn.params["branches"]
    read = [False] * len(branches[0].in_avals)
    for branch in branches:
        _, used = partial_eval.dce_jaxpr(branch.jaxpr, wanted)
        read = [a or b for a, b in zip(read, used, strict=True)]
    parts: list[Any] = []
    for branch in branches:
        jaxpr, _ = partial_eval.dce_jaxpr(branch.jaxpr, wanted, instantiate=read)
        parts.append(jex_core.ClosedJaxpr(jaxpr, branch.consts))
    index, *operands = eqn.inputs
    return Equation(
        eqn.id, eqn.primitive, {**eqn.params, "branches": tuple(parts)},
        (index, *(x for x, used in zip(operands, read, strict=True) if used)),
        tuple(eqn.outputs[k] for k in outputs), eqn.phase, eqn.source, eqn.origin, eqn.rematerialized,
    )  # fmt: skip
