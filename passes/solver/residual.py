"""What the search gives an integer program, and what it gets back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopar.passes.solver.network import Network
from autopar.passes.solver.problem import Array, Integers


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an integer program gave."""

    positions: dict[int, int] | None  # a choice, if one was found
    bound: float  # seconds over the base: no choice costs less; inf = there is none within the room
    seconds: float  # deterministic time that it took


@dataclasses.dataclass(frozen=True)
class Residual:
    """A network in costs over a lower bound, for an integer program."""

    network: Network
    nodes: dict[int, Array]  # seconds over the base per strategy
    edges: dict[tuple[int, int], Array]  # seconds over the base [K_u, K_v], u < v
    prices: Array  # seconds per byte left free at each point in time
    points: Integers  # in time at which the memory counts; all that have a price
    room: float  # seconds over the base from which on a choice is of no interest
    hint: tuple[int, ...] | None  # a choice in the problem's numbers
    seed: int
    work_seconds: float  # limit on deterministic time
    wall_seconds: float


IntegerProgram = Callable[[Residual], Outcome]
