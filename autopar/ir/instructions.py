"""What the runtime executes: a static list over numbered registers, decided before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from autopar.ir.graph import Phase, Value
from autopar.ir.local import Port

Register = int


@dataclasses.dataclass(frozen=True)
class Run:
    """Run a program; it may overwrite input registers (running sums, donated state)."""

    stage: int
    program: int  # index into the lowered step's programs
    phase: Phase
    inputs: tuple[Register, ...]
    outputs: tuple[Register, ...]
    donated: tuple[int, ...]  # positions of inputs whose buffers the outputs take over


@dataclasses.dataclass(frozen=True)
class Copy:
    """Copy a value tile by tile to another stage's mesh."""

    stage: int  # the sender
    to: int  # the receiver
    number: int  # among the copies of a step
    crossing: int  # index into the lowered step's crossings
    source: Register
    target: Register


@dataclasses.dataclass(frozen=True)
class Free:
    """Forget registers whose last reader has been issued."""

    stage: int
    registers: tuple[Register, ...]


Instruction = Run | Copy | Free


@dataclasses.dataclass(frozen=True, eq=False)
class InstructionList:
    """One step. The order is a valid interleaving; the instructions of one stage form that mesh's own list."""

    instructions: tuple[Instruction, ...]
    num_registers: int
    leaves: Mapping[Value, Register]  # graph input at its home
    feeds: Mapping[tuple[Value, int, int], tuple[Register, Port]]  # (loop value, stage, microbatch) -> batch slices
    constants: Mapping[tuple[Value, int], tuple[Register, Port]]  # (value, stage)
    microbatch: Mapping[tuple[int, int], Register]  # (stage, microbatch) -> its index
    sums: Mapping[Register, tuple[int, Port]]  # running sums, to be set to zero: register -> (stage, port)
    results: tuple[Register | None, ...]  # per graph output; None for an input, constant or literal passed through

    def together(self) -> dict[int, int]:
        """Of the copies between the same two stages that no program comes between, the first's number, by number.

        All of them may be made where the first is: none copies what another one has brought.
        """
        together: dict[int, int] = {}
        first: dict[tuple[int, int], int] = {}
        for instruction in self.instructions:
            if isinstance(instruction, Run):
                first = {}
            elif isinstance(instruction, Copy):
                number = instruction.number
                together[number] = first.setdefault((instruction.stage, instruction.to), number)
        return together

    def of_stages(self, stages: Set[int]) -> tuple[Instruction, ...]:
        """What a process plays that has devices of these stages: its part of all, in the order of all.

        Programs of its stages, copies that leave or reach them, and after each what may be forgotten then.
        """
        instructions: list[Instruction] = []
        kept = False
        for instruction in self.instructions:
            if isinstance(instruction, Run):
                kept = instruction.stage in stages
            elif isinstance(instruction, Copy):
                kept = not stages.isdisjoint((instruction.stage, instruction.to))
            if kept:
                instructions.append(instruction)
        return tuple(instructions)
