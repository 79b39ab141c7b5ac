"""What the programs of a step send to other processes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence, Set

import jax

from autopar.ir.instructions import Copy, InstructionList, Register
from autopar.runtime.placement import Array, weakly_typed
from autopar.runtime.processes import Channel, Processes


def state_of(instructions: InstructionList) -> frozenset[Register]:
    """What may be given away in this step or the next, since it is an argument or a result."""
    return frozenset(instructions.leaves.values()) | {r for r in instructions.results if r is not None}


@dataclasses.dataclass(frozen=True)
class Message:
    """What goes together in one step: tiles of copies, or results that every process receives."""

    job: Processes
    channel: Channel
    number: int  # among the messages of a step

    def offer(self, receiver: int, arrays: Sequence[jax.Array]) -> None:
        """Let another process have these, which may not be given away."""
        self.job.offer(self.channel.uuid(self.number, receiver), arrays)

    def pull(self, sender: int, arrays: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """What another process offers as this message."""
        self.channel.awaits(sender)
        return self.job.pull(self.channel.uuid(self.number, self.job.index), sender, arrays)


class Mail:
    """The messages of an executable: its copies between meshes, and the results that every process receives."""

    def __init__(
        self, job: Processes, channel: Channel, instructions: InstructionList, shared: Mapping[Register, Array],
        carried: Set[Register],
    ) -> None:  # fmt: skip
        """`shared`: the results that every process receives; `carried`: those that are state."""
        self._job, self.channel = job, channel
        copies = [i for i in instructions.instructions if isinstance(i, Copy)]
        self._number = max((copy.number for copy in copies), default=-1) + 1  # of the message after the copies
        self._shared = shared
        self._sent: dict[int, list[Register]] = {}  # to other processes
        self._received: dict[int, list[Register]] = {}  # from other processes
        self._own: list[Register] = []  # of this process, and of one device alone as on all others
        here, everybody = job.index, range(job.count)
        for register, array in shared.items():
            there = {device.process_index for device in array.sharding.mesh.devices.flat}
            if there == set(everybody):
                continue
            if here in there and register not in carried:
                self._own.append(register)
            if here not in there:
                self._received.setdefault(min(there), []).append(register)
            elif here == min(there):
                for other in set(everybody) - there:
                    self._sent.setdefault(other, []).append(register)
        self._copied = frozenset(itertools.chain(*self._sent.values()))
        self._device = jax.local_devices()[0]
        job.connect()

    def next_step(self) -> None:
        """The messages that follow are those of the next step."""
        self.channel.next_step()

    def message(self, number: int) -> Message:
        """In this step, for the tiles of the copies of which this is the first number, or for the results."""
        return Message(self._job, self.channel, number)

    def share_results(self, registers: list[jax.Array]) -> None:
        """Bring results to the processes that have no device of their stage: onto their first device."""
        message = self.message(self._number)
        sent = {r: registers[r].addressable_data(0).copy() for r in self._copied}
        for receiver, numbers in self._sent.items():
            message.offer(receiver, [sent[r] for r in numbers])
        for register in self._own:
            registers[register] = _as_result(registers[register].addressable_data(0), self._shared[register])
        here = jax.sharding.SingleDeviceSharding(self._device)
        for sender, numbers in self._received.items():
            wanted = [self._shared[r] for r in numbers]
            structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in wanted]
            for register, array, x in zip(numbers, wanted, message.pull(sender, structs), strict=True):
                registers[register] = _as_result(x, array)


def _as_result(x: jax.Array, array: Array) -> jax.Array:
    return weakly_typed(x) if array.weak_type else x
