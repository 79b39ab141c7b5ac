"""A step cut into programs: one compiled program per (phase, stage, round)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.ir.graph import Equation, Phase, StepGraph, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations that run together on one stage's mesh. Cheap equations may be copied into several programs."""

    index: int  # position in the topological order of programs
    name: str
    phase: Phase  # of its first equations; a fused program may go on into later phases
    stage: int
    equations: tuple[Equation, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]  # values that other programs, the accumulators or the caller need
    copies: frozenset[Value]  # made here for this program alone: others may make them, too

    @property
    def in_loop(self) -> bool:
        """Whether it runs once per microbatch."""
        return self.phase.in_loop


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedStep:
    """A step graph cut over stages: the graph of programs is acyclic and listed in topological order."""

    step: StepGraph
    num_stages: int
    programs: tuple[Program, ...]
    producer: Mapping[Value, int]  # value -> index of the program that makes it
    home: Mapping[Value, int]  # graph input or constant -> stage where it is stored

    def stage_of(self, value: Value) -> int:
        """The stage where a value is made or stored."""
        if value in self.producer:
            return self.programs[self.producer[value]].stage
        return self.home[value]
