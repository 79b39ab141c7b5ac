"""The programs of a lowered step as XLA is given them, and the instructions that run them: what a plan comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from autopar.cost_model.mesh_transfer import tile_copies
from autopar.ir.instructions import InstructionList, Run
from autopar.ir.local import LocalProgram, Port
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import ScheduleName, schedule_for
from autopar.ir.sharding import TileCopies
from autopar.passes.emit import emit, partition_spec, port_dtype, port_shape
from autopar.passes.instruction_writer import write_instructions
from autopar.passes.lower import Crossing, LoweredStep
from autopar.runtime.placement import Array
from autopar.runtime.source import Source


def instructions_of(lowered: LoweredStep, schedule: ScheduleName, donate: frozenset[int]) -> InstructionList:
    """What the worker does in a step that may overwrite these argument leaves."""
    step = lowered.placed.step
    rows = schedule_for(schedule, [s.mesh for s in lowered.shardings], lowered.loop_microbatches)
    return write_instructions(lowered, rows, frozenset(step.graph.inputs[i] for i in donate))


def write_sources(
    lowered: LoweredStep, instructions: InstructionList, meshes: Sequence[jax.sharding.Mesh]
) -> list[Source]:
    """The programs to compile, given the devices of each stage."""
    donated = {i.program: i.donated for i in instructions.instructions if isinstance(i, Run)}

    weak = {
        held
        for held, out in zip(lowered.results, lowered.placed.step.graph.outputs, strict=True)
        if held is not None and out.weak_type
    }

    def arrays(local: LocalProgram, ports: Sequence[Port], results: bool = False) -> tuple[Array, ...]:
        stage = local.program.stage
        border_arrays = [border_array(port, local.mesh, meshes[stage]) for port in ports]
        weakly = [results and (stage, port) in weak for port in ports]
        return tuple(
            dataclasses.replace(a, weak_type=True) if w else a for a, w in zip(border_arrays, weakly, strict=True)
        )

    return [
        Source(
            local.program.name, emit(local, lowered.rules), arrays(local, local.inputs),
            arrays(local, local.outputs, results=True), donated.get(index, ()), lowered.xla.hides_latency,
        )
        for index, local in enumerate(lowered.programs)
    ]  # fmt: skip


def device_mesh(mesh: Mesh, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """A logical mesh of these devices; device i of the cluster is `devices[i]`."""
    grid = np.array([devices[d] for d in mesh.devices], dtype=object).reshape(mesh.shape)
    return jax.sharding.Mesh(grid, mesh.axes)


def border_array(port: Port, mesh: Mesh, devices: jax.sharding.Mesh) -> Array:
    """What a port of a program is, on these devices."""
    sharding = jax.sharding.NamedSharding(devices, partition_spec(port.sharding))
    return Array(port_shape(port, mesh), port_dtype(port), sharding)


def crossing_copies(lowered: LoweredStep, crossing: Crossing) -> TileCopies:
    """Which device of the source mesh feeds which of the target mesh with what."""
    source, target = lowered.shardings[crossing.source].mesh, lowered.shardings[crossing.target].mesh
    return tile_copies(crossing.value.shape, crossing.plan.sent, source, crossing.plan.received, target)
