"""A worker that looks at what its programs make, and keeps what those were given that made a NaN or an infinity."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.instructions import Run
from autopar.runtime.processes import Processes
from autopar.runtime.source import Source
from autopar.runtime.wiring import Wiring
from autopar.runtime.worker import Worker


def _any_of(find: Callable[[Any], jax.Array], x: Any) -> jax.Array:
    return jnp.any(find(x))


_MOST = 8  # launches that are kept, with their operands, until the step is over

_ANY = {mark: jax.jit(functools.partial(_any_of, find)) for mark, find in (("nan", jnp.isnan), ("inf", jnp.isinf))}


def has(mark: str, x: Any) -> bool:
    """Whether an array holds a NaN ("nan") or an infinity ("inf"); what has no part in this process does not.

    All processes that have a part of it come here.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return False
    if isinstance(x, jax.Array) and not x.addressable_shards:
        return False
    return bool(_ANY[mark](x))


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """A run of a program that made what is looked for of operands without it."""

    program: int  # index into the lowered step's programs
    number: int  # of its runs in the step before
    operands: tuple[jax.Array, ...]

    @property
    def is_here(self) -> bool:
        """Whether all its operands are this process's."""
        return all(x.is_fully_addressable for x in self.operands)


class CheckedWorker(Worker):
    """Gives no array away, so that operands are still there when a program has ended; waits for every program."""

    def __init__(self, sources: Sequence[Source], wiring: Wiring, job: Processes | None = None) -> None:
        """As a worker's."""
        super().__init__([dataclasses.replace(source, donated=()) for source in sources], wiring, job)
        self.launches: dict[str, list[Launch]] = {}  # of the last step, by what is looked for
        self._runs: collections.Counter[int] = collections.Counter()

    def look_for(self, marks: Sequence[str], leaves: Sequence[Any]) -> Sequence[Any]:
        """One step, in which programs are looked at for these marks, "nan" and "inf": see `launches`."""
        self.launches = {mark: [] for mark in marks}
        self._runs.clear()
        return self(leaves)

    def position_of(self, launch: Launch) -> int:
        """Of a run of a program in the instructions of all processes."""
        instructions = self.wiring.instructions.instructions
        runs = (k for k, i in enumerate(instructions) if isinstance(i, Run) and i.program == launch.program)
        return next(itertools.islice(runs, launch.number, None))

    def _launch(self, program: int, arguments: Sequence[Any]) -> Sequence[jax.Array]:
        outputs = super()._launch(program, arguments)
        for mark, launches in self.launches.items():
            # Asked first, and of every program: processes that share one look at it together.
            begins = any(has(mark, x) for x in outputs) and not any(has(mark, x) for x in arguments)
            if begins and len(launches) < _MOST:
                launches.append(Launch(program, self._runs[program], tuple(arguments)))
        self._runs[program] += 1
        return outputs
