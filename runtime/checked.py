"""A worker that looks at what its programs make, and keeps what those were given that made a NaN or an infinity."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
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


_MOST = 8  # launches that are kept, of the programs of the same processes, with their operands until the step is over

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


@functools.cache
def _whole_everywhere(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    """The array on each device of a mesh."""
    return jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """A run of a program that made what is looked for of operands without it."""

    program: int  # index into the lowered step's programs
    number: int  # of its runs in the step before
    operands: tuple[jax.Array, ...]
    processes: frozenset[int]  # that have a part of it

    def whole_operands(self) -> list[jax.Array]:
        """On one device of this process. All processes that have a part of the program come here."""
        whole: list[jax.Array] = []
        for x in self.operands:
            if not x.is_fully_addressable:
                x = _whole_everywhere(x.sharding.mesh)(x).addressable_data(0)  # type: ignore[attr-defined]
            device = min(whole[0].devices() if whole else x.devices(), key=lambda device: device.id)
            whole.append(jax.device_put(x, device))
        return whole


def _processes_of(arrays: Sequence[jax.Array]) -> frozenset[int]:
    devices: Iterable[Any] = itertools.chain.from_iterable(x.sharding.device_set for x in arrays)
    return frozenset(device.process_index for device in devices)


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
            if begins:
                launch = Launch(program, self._runs[program], tuple(arguments), _processes_of(outputs))
                # Processes that share programs keep the same of these, since they look at them together later on.
                if sum(launch.processes == other.processes for other in launches) < _MOST:
                    launches.append(launch)
        self._runs[program] += 1
        return outputs
