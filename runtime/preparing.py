"""What is made before the first step: programs compiled, and how to get at a list's registers."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from autopar.errors import PlanMismatchError
from autopar.ir.instructions import Free, Register, Run
from autopar.runtime.placement import Array
from autopar.runtime.source import Source, beside_no_other, compile_options, compiler_options
from autopar.runtime.transfer import TileTransfer


@dataclasses.dataclass(frozen=True, eq=False)
class DirectCall:
    """How a step that is one program is called. Of thousands of leaves each further look takes as long as the program.

    Positions are those in the arguments' leaves, what is always the same after them, and then what is moved and has no
    leaf's position to itself.
    """

    program: int
    arguments: Callable[[Sequence[Any]], Sequence[Any]]
    after: Sequence[Any]  # the leaves: what is always the same, and None for what is moved
    moved: Sequence[tuple[Register, int]]
    results: Callable[[Sequence[Any]], Sequence[Any]] | None  # of what it returns, and None after it; None: as they are
    passes: Sequence[tuple[int, int]]  # results that are arguments
    given: Callable[[Sequence[Any]], Sequence[Any]]  # leaves of the state that the program takes over


class HowToCopy(NamedTuple):
    """A copy from one mesh to another."""

    source: Register
    target: Register
    tiles: TileTransfer
    may_alias: bool  # as in `Sending`
    is_fragile: bool


class Put(NamedTuple):
    """A copy within this process that is one call of `jax.device_put`."""

    source: Register
    target: Register
    destination: jax.Device | jax.sharding.NamedSharding
    may_alias: bool  # as in `Sending`
    stage: int  # the sender
    receiver: int


@dataclasses.dataclass(frozen=True, eq=False)
class Together:
    """Copies that are one message, or cut and join tiles."""

    number: int
    stage: int  # the sender
    receiver: int
    copies: list[HowToCopy] = dataclasses.field(default_factory=list)


def described(played: Sequence[Run | Free | Put | Together], instruction: Any) -> str:
    """Which of the instructions that are played this is, in words."""
    at = next(k for k, each in enumerate(played) if each is instruction)
    what = "copies between stages" if isinstance(instruction, Put | Together) else "frees"
    if isinstance(instruction, Run):
        runs = [k for k, each in enumerate(played) if isinstance(each, Run) and each.program == instruction.program]
        what = f"{instruction.phase.value} of stage {instruction.stage}"
        what += f" (run {1 + runs.index(at)} of {len(runs)})" if len(runs) > 1 else ""
    return f"{what}, instruction {at + 1} of {len(played)}"


def getter_of(positions: Iterable[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What a sequence has at these positions."""
    at = tuple(positions)
    if at and at == tuple(range(at[0], at[0] + len(at))):
        return operator.itemgetter(slice(at[0], at[-1] + 1))
    return operator.itemgetter(*at) if len(at) > 1 else lambda sequence: [sequence[i] for i in at]


def changed_by(instruction: Run | Free | Put | Together) -> Sequence[Register]:
    """The registers that a program's results go to, in their order, or that are freed."""
    if isinstance(instruction, Run):
        return instruction.outputs
    return sorted(instruction.registers) if isinstance(instruction, Free) else ()


def spans_of(registers: Sequence[Register]) -> list[tuple[slice, slice]]:
    """Registers that follow one another, and where in the sequence they are."""
    spans: list[tuple[slice, slice]] = []
    for at, register in enumerate(registers):
        if spans and spans[-1][0].stop == register:
            span, positions = spans.pop()
            first, start = span.start, positions.start
        else:
            first, start = register, at
        spans.append((slice(first, register + 1), slice(start, at + 1)))
    return spans


def is_deleted(leaf: Any) -> bool:
    """Whether an argument was given away and is gone; what lies on the host never is."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def copied(leaf: Any) -> Any:
    """An argument of which the original may be given away; those of the host are copied where they are placed."""
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def on_device(leaf: Any) -> Any:
    """An argument as JAX's array; those of the host are copied."""
    return leaf if isinstance(leaf, jax.Array) else jnp.array(leaf)


def compile_all(sources: Sequence[Source]) -> list[Any]:
    """Trace and lower one after the other, compile side by side (XLA compiles outside the interpreter's lock)."""
    lowered, options = [], []
    for source in sources:
        traced = source.trace()
        options.append(compile_options(source, traced))
        with beside_no_other(source.mesh):
            lowered.append(traced.lower())
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda low, chosen: low.compile(chosen), lowered, options))


def zero_programs(sums: Mapping[Register, Array]) -> list[tuple[tuple[Register, ...], Any]]:
    """One program a mesh that makes all its running sums."""
    by_mesh: dict[Any, list[Register]] = {}
    for register, array in sums.items():
        by_mesh.setdefault(array.sharding.mesh, []).append(register)
    programs = []
    for registers in by_mesh.values():
        arrays = [sums[r] for r in registers]

        def zeros(arrays: list[Array] = arrays) -> list[Any]:
            return [jnp.zeros(a.shape, a.dtype) for a in arrays]

        mesh: Any = arrays[0].sharding.mesh
        with beside_no_other(mesh):
            lowered = jax.jit(zeros, out_shardings=[a.sharding for a in arrays]).lower()
        programs.append((tuple(registers), lowered.compile(compiler_options(mesh.devices.flat))))
    return programs


def check_devices(wanted: int, devices: Sequence[jax.Device]) -> None:
    """Raise unless there are enough devices for a plan."""
    if len(devices) < wanted:
        processes = len({device.process_index for device in devices})
        raise PlanMismatchError(
            f"the plan is for {wanted} devices, there are {len(devices)}"
            f"{f' (of {processes} processes)' if processes > 1 else ''}: plan for those there are, or start more "
            "(jax_num_cpu_devices makes virtual ones)."
        )


def wait_for(outputs: Sequence[jax.Array]) -> None:
    """Wait for a program to end on its devices: all its results are there at once."""
    if outputs:
        outputs[-1].block_until_ready()


def constant(x: jax.Array, _: Sequence[Any]) -> jax.Array:
    """A result that is the same in every step, whatever its arguments are."""
    return x
