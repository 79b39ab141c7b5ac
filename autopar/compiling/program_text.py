"""The programs of a lowered step as text: what each device computes, with every collective and transfer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopar.cost_model.reshard import applied_steps
from autopar.ir.graph import Operand, Value
from autopar.ir.local import Accumulate, Compute, LocalOp, Port, Reshard
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.ir.units import array_text, bytes_text, ranges_text
from autopar.passes.lower import LoweredStep


def programs_as_text(lowered: LoweredStep) -> dict[str, str]:
    """The text of each program, by name, in an order that respects every dependency.

    A line is an equation, with the shape that a value has on one device and, in brackets, how it is sharded; of several
    mesh axes the major one comes first, and those after a "+" have a partial sum each. Below an equation stand the
    collectives that belong to it, and where a sharding changes those that change it, with the bytes of the result on
    one device (of a reduce-scatter: of the operand).
    """
    step = lowered.placed.step
    arguments = dict(zip(step.graph.inputs, step.graph.input_paths, strict=True))
    names = arguments | {v: f"a microbatch of {arguments[source]}" for v, (source, _) in step.feeds.items()}
    names |= dict.fromkeys(step.accumulate.values(), "the sum so far")
    arriving: dict[tuple[int, Port], list[str]] = defaultdict(list)
    leaving: dict[tuple[int, Port], list[str]] = defaultdict(list)
    for crossing in lowered.crossings:
        value, plan = crossing.value, crossing.plan
        arriving[crossing.target, Port(value, plan.received)].append(
            f"        from stage {crossing.source}, where it is {plan.sent}"
        )
        leaving[crossing.source, Port(value, plan.sent)].append(
            f"        to stage {crossing.target} as {plan.received}, {bytes_text(value.nbytes)} in all"
        )
    texts: dict[str, list[str]] = {}
    for local in lowered.programs:
        mesh, program = local.mesh, local.program
        lines = texts[program.name] = [
            f"{program.name}: stage {program.stage}, mesh {mesh.text or 'of one'}, devices {ranges_text(mesh.devices)}"
        ]
        for port in local.inputs:
            name = names.get(port.value)
            lines.append(f"  in  {_port(port, mesh)}" + (f"  # {name}" if name else ""))
            lines += arriving[program.stage, port]
        for op in local.ops:
            lines += [f"  {line}" for line in _op(op, mesh)]
        for port in local.outputs:
            lines.append(f"  out {_port(port, mesh)}")
            lines += leaving[program.stage, port]
    return {name: "\n".join(lines) for name, lines in texts.items()}


def _op(op: LocalOp, mesh: Mesh) -> Iterator[str]:
    if isinstance(op, Compute):
        eqn = op.equation
        results = ", ".join(_value(v, s, mesh) for v, s in zip(eqn.outputs, op.results, strict=True))
        operands = " ".join(_operand(x, s) for x, s in zip(eqn.inputs, op.operands, strict=True))
        yield f"{results} = {eqn.primitive.name} {operands}" + (f"  # {eqn.source}" if eqn.source else "")
        for collective in op.combined:
            yield f"      {collective.kind} over {_axes(collective.axes)}, {bytes_text(collective.payload)}"
    elif isinstance(op, Reshard):
        yield f"{_value(op.value, op.target, mesh)} = reshard {_operand(op.value, op.source)}"
        value = op.value
        for step, axes, payload, _ in applied_steps(
            op.steps, value.shape, value.itemsize, op.source, mesh, value.sum_itemsize
        ):
            if axes:
                yield f"      {step.kind} over {_axes(axes)}, {bytes_text(payload)}"
    elif isinstance(op, Accumulate):
        yield f"{_value(op.total, op.sharding, mesh)} += {_operand(op.partial_sum, op.sharding)}"
    else:
        yield f"{_value(op.copy, op.sharding, mesh)} = {_operand(op.value, op.sharding)}"


def _axes(axes: tuple[str, ...]) -> str:
    return "·".join(axes)


def _port(port: Port, mesh: Mesh) -> str:
    return _value(port.value, port.sharding, mesh)


def _value(value: Value, sharding: Sharding, mesh: Mesh) -> str:
    piece = array_text(value.held_dtype(bool(sharding.partial)), sharding.local_shape(value.shape, mesh))
    return f"%{value.id}:{piece} {sharding}"


def _operand(operand: Operand, sharding: Sharding | None) -> str:
    return f"%{operand.id}{sharding}" if isinstance(operand, Value) else str(operand.value)
