"""Where in a program a NaN or an infinity arises: its equations are run again one by one, on one device.

From a result that has one it goes back, through values that have one, to an equation whose operands have none; into
the rounds of a loop and the branches of a condition likewise.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from autopar.ir.graph import Equation, Graph, Phase, Value
from autopar.ir.local import Accumulate, LocalProgram
from autopar.ir.schedule import ScheduleName, schedule_for
from autopar.passes.lower import LoweredStep
from autopar.runtime.checked import Launch, has
from autopar.tracing.build import CALLS, source_of
from autopar.tracing.interpret import opened


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where one arises."""

    operator: str  # the primitive; "": unknown
    source: str  # the user's line; "": unknown
    phase: Phase
    stage: int = 0
    num_stages: int = 1
    microbatch: int | None = None  # None: it is not of a microbatch, or there is but one
    num_microbatches: int = 1

    def __str__(self) -> str:
        where = {
            Phase.PROLOGUE: "before the microbatches",
            Phase.FORWARD: "in the forward pass",
            Phase.UPDATE: "in the update",
        }.get(self.phase, "in the backward pass")
        operator = f"{self.operator} at {self.source or 'an unknown line'}" if self.operator else "a program"
        parts = [f"{operator}, {where}"]
        if self.num_stages > 1:
            parts.append(f"stage {self.stage} of {self.num_stages}")
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch} of {self.num_microbatches}")
        return ", ".join(parts)


def origin_of(lowered: LoweredStep, schedule: ScheduleName, launch: Launch, mark: str) -> Origin | None:
    """Where what is looked for arises in a run of a program. All processes that have a part of it come here.

    Without the operator where the program's operands need more memory than one device has. None where the equations one
    by one make nothing of the kind, as where a sum over devices alone overflows.
    """
    local = lowered.programs[launch.program]
    program, step = local.program, lowered.placed.step
    found: _Line | None = _Line(None, {}, (), (), "", program.phase)
    with contextlib.suppress(Exception):  # nothing that cannot be run again hides what was found
        found = _found_in(local, launch, mark)
    if found is None:
        return None
    phase = found.phase or program.phase
    microbatch = None
    if step.num_microbatches > 1 and phase.in_loop:
        microbatch = lowered.loop_microbatches  # the last one, which is computed with the update
        if program.in_loop:
            rows = schedule_for(schedule, [s.mesh for s in lowered.shardings], lowered.loop_microbatches)
            tasks = rows.tasks[rows.group_of(program.stage)]
            mine = [task for task in tasks if (task.stage, task.phase) == (program.stage, program.phase)]
            microbatch = mine[launch.number].microbatch
    operator = "" if found.primitive is None else found.primitive.name
    return Origin(
        operator, found.source, phase, program.stage, lowered.placed.num_stages, microbatch, step.num_microbatches
    )  # fmt: skip


def _found_in(local: LocalProgram, launch: Launch, mark: str) -> _Line | None:
    """The equation of a program in which it arises."""
    values = {
        port.value: _added_up(x, port.value) if port.sharding.partial else x
        for port, x in zip(local.inputs, launch.whole_operands(), strict=True)
    }
    added = [op.partial_sum for op in local.ops if isinstance(op, Accumulate)]
    return _run(_lines_of(local.program.equations), values, [*local.program.outputs, *added], mark)[0]


@dataclasses.dataclass(frozen=True)
class Computed:
    """What one device makes of a call."""

    is_found: bool  # whether results have what is looked for
    is_given: bool  # whether arguments have it
    origin: Origin | None = None  # where it arises, if that is known


def origin_in(graph: Graph, leaves: Sequence[Any], mark: str) -> Computed:
    """Whether the results of a step have what is looked for, computed on one device, and where it arises.

    `leaves`: of the arguments, whole.
    """
    values = {
        **graph.constants,
        **{v: jnp.asarray(x, None if v.is_key else v.dtype) for v, x in zip(graph.inputs, leaves, strict=True)},
    }
    is_given = any(has(mark, values[v]) for v in graph.inputs)
    found, values = _run(_lines_of(graph.equations), values, graph.outputs, mark)
    made = [values[v] for v in graph.outputs if isinstance(v, Value)]
    is_found = any(has(mark, x) for x in made)
    if not is_found or found is None:
        return Computed(is_found, is_given)
    return Computed(True, is_given, Origin(found.primitive.name, found.source, found.phase or Phase.UPDATE))


@dataclasses.dataclass(frozen=True, eq=False)
class _Line:
    """An equation, of ours or of a jaxpr."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: Sequence[Any]  # variables, or literals
    outputs: Sequence[Any]
    source: str
    phase: Phase | None = None  # None: that of what it is inside of


def _lines_of(equations: Sequence[Equation]) -> list[_Line]:
    return [_Line(eqn.primitive, eqn.params, eqn.inputs, eqn.outputs, eqn.source, eqn.phase) for eqn in equations]


def _added_up(x: jax.Array, value: Value) -> jax.Array:
    """The pieces of a partial sum."""
    return jnp.sum(x, 0, dtype=x.dtype).astype(value.dtype)


def _run(
    lines: Sequence[_Line], values: dict[Any, Any], results: Sequence[Any], mark: str
) -> tuple[_Line | None, dict[Any, Any]]:
    """Run equations in order; from which of them the results have what is looked for, if they do, and the results."""
    last_read: dict[Hashable, int] = {v: len(lines) for v in results if not _is_literal(v)}
    for position, line in enumerate(lines):
        for v in line.inputs:
            if not _is_literal(v):
                last_read[v] = max(last_read.get(v, position), position)
    makers: dict[Any, int] = {}  # of values that have it: the position of the equation
    first: dict[int, Sequence[Any]] = {}  # equations that make it of operands without it, with these
    for position, line in enumerate(lines):
        if not line.outputs:  # it prints, say
            continue
        operands = [v.val if isinstance(v, core.Literal) else v.value if _is_literal(v) else values[v]
                    for v in line.inputs]  # fmt: skip
        made = _results(line, operands, mark)
        values.update(zip(line.outputs, made, strict=True))
        bad = [v for v, x in zip(line.outputs, made, strict=True) if has(mark, x)]
        if bad:
            makers.update(dict.fromkeys(bad, position))
            if not any(_has_operand(mark, v, x) for v, x in zip(line.inputs, operands, strict=True)):
                first[position] = operands
        for v in (*line.inputs, *line.outputs):
            if not _is_literal(v) and last_read.get(v, -1) <= position:
                values.pop(v, None)
    waiting, seen = [makers[v] for v in results if not _is_literal(v) and v in makers], set[int]()
    while waiting:
        position = waiting.pop()
        if position not in seen:
            seen.add(position)
            waiting += [makers[v] for v in lines[position].inputs if not _is_literal(v) and v in makers]
    origins = seen & first.keys()
    if not origins:
        return None, values
    line = lines[min(origins)]
    inside = _inside(line, first[min(origins)], mark)
    if inside is not None:
        line = dataclasses.replace(inside, source=inside.source or line.source, phase=line.phase)
    return line, values


def _results(line: _Line, operands: Sequence[Any], mark: str) -> Sequence[Any]:
    """Of an equation; functions with gradients of their own are not bound again but computed, as they are here."""
    body = _called(line)
    if body is not None:
        return _run_body(body, operands, mark)[1]
    made = line.primitive.bind(*operands, **line.params)
    return list(made) if line.primitive.multiple_results else [made]


def _is_literal(v: Any) -> bool:
    return isinstance(v, core.Literal) or not isinstance(v, core.Var | Value)


def _has_operand(mark: str, v: Any, x: Any) -> bool:
    """Whether an operand has what is looked for. A NaN that is written down arises where it is read."""
    if _is_literal(v):
        return mark != "nan" and has(mark, jnp.asarray(x))
    return has(mark, x)


def _inside(line: _Line, operands: Sequence[Any], mark: str) -> _Line | None:
    """The equation of a body in which it arises; None where there is no body that can be run alone."""
    params = line.params
    carry: Sequence[Any]
    match line.primitive.name:
        case "scan":
            consts, carried = params["num_consts"], params["num_consts"] + params["num_carry"]
            fixed, carry, stacked = operands[:consts], operands[consts:carried], operands[carried:]
            rounds = range(params["length"])
            for i in reversed(rounds) if params["reverse"] else rounds:
                found, made = _run_body(params["jaxpr"], [*fixed, *carry, *(x[i] for x in stacked)], mark)
                if found is not None:
                    return found
                carry = made[: carried - consts]
        case "while":
            first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            of_test, of_body, carry = operands[:first], operands[first:second], operands[second:]
            while _run_body(params["cond_jaxpr"], [*of_test, *carry], mark)[1][0]:
                found, carry = _run_body(params["body_jaxpr"], [*of_body, *carry], mark)
                if found is not None:
                    return found
        case "cond":
            return _run_body(params["branches"][int(operands[0])], operands[1:], mark)[0]
        case _:
            body = _called(line)
            return None if body is None else _run_body(body, operands, mark)[0]
    return None


def _called(line: _Line) -> Any:
    """The body of a call, such as that of a function with a gradient of its own; None: it is no call."""
    body = line.params.get(CALLS.get(line.primitive.name, ""))
    return body if body is not None and len(opened(body)[0].invars) == len(line.inputs) else None


def _run_body(body: Any, operands: Sequence[Any], mark: str) -> tuple[_Line | None, list[Any]]:
    jaxpr, consts = opened(body)
    lines = [_Line(eqn.primitive, eqn.params, eqn.invars, eqn.outvars, source_of(eqn)) for eqn in jaxpr.eqns]
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
    found, values = _run(lines, values, jaxpr.outvars, mark)
    return found, [v.val if isinstance(v, core.Literal) else values[v] for v in jaxpr.outvars]
