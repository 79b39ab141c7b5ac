"""From a plan to what runs: every program emitted, compiled ahead of time, and wired up for the worker.

The whole pipeline, a line a pass:

    trace -> analyse_batch -> split_batch -> cluster_layers -> plan_stages(oracle) -> place -> solve -> assemble
          -> simulate = Plan      ->  write_instructions -> emit -> compile = Worker
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compiling.program_sources import border_array, crossing_copies, device_mesh, instructions_of, write_sources
from autopar.ir.graph import Graph, Literal, Value
from autopar.ir.instructions import InstructionList, Register
from autopar.ir.local import Port
from autopar.ir.schedule import ScheduleName
from autopar.ir.sharding import Sharding
from autopar.passes.emit import port_dtype
from autopar.passes.launches import check_launches
from autopar.passes.lower import Crossing, LoweredStep
from autopar.runtime.placement import Array, weakly_typed
from autopar.runtime.preparing import copied, on_device
from autopar.runtime.processes import Processes
from autopar.runtime.transfer import TileTransfer
from autopar.runtime.wiring import Wiring
from autopar.runtime.worker import Worker


def build(
    lowered: LoweredStep,
    schedule: ScheduleName,
    devices: Sequence[jax.Device],
    donate: frozenset[int],
    job: Processes | None = None,
) -> Worker:
    """Compile every program of a lowered step for the devices; device i of the cluster is `devices[i]`.

    Where the devices are those of several processes, `job`, each compiles the programs that it has devices for.
    """
    placed, step = lowered.placed, lowered.placed.step
    graph = step.graph
    meshes = [device_mesh(s.mesh, devices) for s in lowered.shardings]

    def array(stage: int, port: Port) -> Array:
        return border_array(port, lowered.shardings[stage].mesh, meshes[stage])

    instructions = instructions_of(lowered, schedule, donate)
    sources = write_sources(lowered, instructions, meshes)
    index_of = {v: i for i, v in enumerate(graph.inputs)}
    feeds = {}
    for (value, stage, microbatch), (register, port) in instructions.feeds.items():
        source, batch = step.feeds[value]
        feeds[register] = (index_of[source], batch, microbatch, array(stage, port))
    read = {v for p in placed.programs for v in p.inputs}
    homes = {v: array(placed.home[v], port) for v, port in lowered.homes.items() if v in read and v not in step.feeds}
    replaced = frozenset(i for k, i in graph.carried.items() if i in donate and step.outputs[k] is not graph.inputs[i])
    results = tuple(
        None if held is not None else _passed_through(out, graph, replaced)
        for out, held in zip(step.outputs, instructions.results, strict=True)
    )
    # State that a step only reads comes out where it is read, and so is brought there once.
    kept = {
        k: out
        for k, out in enumerate(step.outputs)
        if results[k] is not None and k in graph.carried and out in homes and index_of[out] not in replaced
    }
    wiring = Wiring(
        graph.name, instructions, step.num_microbatches, graph.inputs, graph.input_paths, homes, feeds,
        {r: (step.constants[v], array(s, p)) for (v, s), (r, p) in instructions.constants.items()},
        {r: (i, array(s, Port(step.microbatch, Sharding(())))) for (s, i), r in instructions.microbatch.items()},
        {r: array(s, p) for r, (s, p) in instructions.sums.items()},
        transfers_of(lowered, meshes), results, kept, donate, {i: k for k, i in graph.carried.items()},
        *_made(lowered, instructions, array),
        tuple(frozenset(device.process_index for device in mesh.devices.flat) for mesh in meshes),
    )  # fmt: skip
    if job is not None:
        job.agree(graph.name, {"the plan": fingerprint(lowered, instructions)})
        job.share(meshes)
        check_launches([instructions.of_stages(wiring.stages_of(p)) for p in range(job.count)], wiring.processes)
    return Worker(sources, wiring, job)


def transfers_of(lowered: LoweredStep, meshes: Sequence[jax.sharding.Mesh]) -> tuple[TileTransfer, ...]:
    """How what crosses between the stages, which have these meshes, goes from device to device."""

    def transfer(crossing: Crossing) -> TileTransfer:
        sent, received = (Port(crossing.value, at) for at in (crossing.plan.sent, crossing.plan.received))
        source, target = (
            border_array(port, lowered.shardings[stage].mesh, meshes[stage]).sharding
            for stage, port in ((crossing.source, sent), (crossing.target, received))
        )
        return TileTransfer(
            crossing_copies(lowered, crossing), crossing.value.shape, port_dtype(sent), source, target
        )  # fmt: skip

    return tuple(map(transfer, lowered.crossings))


# Bytes of a result that all processes get to know, though its stage is on others: what a script reads after a step. Of
# the state only numbers, such as that of the step.
_MOST_BYTES_KNOWN = 2**20


def _made(
    lowered: LoweredStep, instructions: InstructionList, array: Callable[[int, Port], Array]
) -> tuple[dict[Register, Array], frozenset[Register], frozenset[Register]]:
    """Results of programs; of these what every process gets to know, such as metrics that are not cut; the state."""
    graph = lowered.placed.step.graph
    made: dict[Register, Array] = {}
    known, carried = set(), set()
    for number, (register, held) in enumerate(zip(instructions.results, lowered.results, strict=True)):
        if register is None or held is None:
            continue
        out = graph.outputs[number]
        made[register] = dataclasses.replace(array(*held), weak_type=out.weak_type)
        if number in graph.carried:
            carried.add(register)
        size = math.prod(out.shape) * out.dtype.itemsize
        is_small = not out.shape if number in graph.carried else size <= _MOST_BYTES_KNOWN
        if is_small and made[register].sharding.is_fully_replicated:
            known.add(register)
    return made, frozenset(known), frozenset(carried)


def fingerprint(lowered: LoweredStep, instructions: InstructionList) -> str:
    """Equal where processes run the same programs, send the same and in the same order."""

    def ports(of: Sequence[Port]) -> list[tuple[int, str]]:
        return [(port.value.id, str(port.sharding)) for port in of]

    programs = [(p.program.name, p.mesh, ports(p.inputs), ports(p.outputs), len(p.ops)) for p in lowered.programs]
    crossings = [(c.source, c.target, c.value.id, str(c.plan.sent), str(c.plan.received)) for c in lowered.crossings]
    text = repr((programs, crossings, instructions.instructions))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _passed_through(out: Value | Literal, graph: Graph, replaced: frozenset[int]) -> Callable[[Sequence[Any]], Any]:
    """An output that no program makes: an argument (copied where it is overwritten), a constant or a literal."""
    if isinstance(out, Value) and out in graph.inputs:
        at = graph.inputs.index(out)
        return lambda leaves: on_device(copied(leaves[at]) if at in replaced else leaves[at])
    if isinstance(out, Literal):
        number = jnp.asarray(out.value, out.dtype)
        fixed = weakly_typed(number) if out.weak_type else number
    else:
        fixed = jnp.asarray(graph.constants[out])
    return lambda leaves: fixed
