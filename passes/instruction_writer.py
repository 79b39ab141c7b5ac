"""From a lowered step and a schedule to instruction lists.

 1. Lists: each stage's bridges and prologue, the schedule's tasks of each group of devices, each stage's bridges and
update. 2. A register per (stage, value, sharding, microbatch). 3. The lists are interleaved by playing them: an entry
is issued once its inputs have been. A value is sent as soon as it has been made. 4. What nobody reads again is freed at
its last reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from autopar.errors import InternalError
from autopar.ir.graph import Phase, Value
from autopar.ir.instructions import Copy, Free, Instruction, InstructionList, Register, Run
from autopar.ir.local import LocalProgram, Port
from autopar.ir.schedule import Schedule
from autopar.passes.lower import LoweredStep

# A program with its microbatch, or a stage and a phase: "send what was stored before it".
_Entry = tuple[int, int | None] | tuple[int, Phase]


class _Writer:
    def __init__(self, lowered: LoweredStep, schedule: Schedule, donate: frozenset[Value]) -> None:
        self.lowered, self.schedule, self.donate = lowered, schedule, donate
        self.step = lowered.placed.step
        self.numbers: dict[Hashable, Register] = {}
        self.ready: set[Register] = set()
        self.feeds: dict[tuple[Value, int, int], tuple[Register, Port]] = {}
        self.constants: dict[tuple[Value, int], tuple[Register, Port]] = {}
        self.microbatch: dict[tuple[int, int], Register] = {}
        self.sums: dict[Register, tuple[int, Port]] = {}
        self.kept = {p: (v, i) for v, ps in self.step.keep.items() for i, p in enumerate(ps)}
        self.totals = set(self.step.accumulate.values())
        self.inputs = set(self.step.graph.inputs)
        self.leaves: dict[Value, Register] = {}
        for value, port in lowered.homes.items():
            register = self._number((lowered.placed.home[value], value, port.sharding, None))
            self.leaves[value] = register
            self.ready.add(register)
        self.instructions: list[Instruction] = []
        self.copies = 0
        self.programs: dict[tuple[int, Phase], list[int]] = defaultdict(list)
        for i, local in enumerate(lowered.programs):
            self.programs[local.program.stage, local.program.phase].append(i)
        self.leaving: dict[int, list[int]] = defaultdict(list)  # of a stage: the crossings
        for number, crossing in enumerate(lowered.crossings):
            self.leaving[crossing.source].append(number)
        # A program is issued for each microbatch, but gives away and sends the same.
        self.given = list(map(self._donated, lowered.programs))
        self.sent = list(map(self._sent, lowered.programs))

    def _number(self, key: Hashable) -> Register:
        return self.numbers.setdefault(key, len(self.numbers))

    def _register(self, stage: int, port: Port, microbatch: int | None) -> Register:
        """The register of a port; those that the caller fills are noted."""
        value, sharding, step = port.value, port.sharding, self.step
        if value in self.kept:
            value, microbatch = self.kept[value]
        if value is step.microbatch:
            register = self._number((stage, "microbatch", microbatch))
            self.microbatch[stage, microbatch or 0] = register
            self.ready.add(register)
        elif value in step.feeds:
            register = self._number((stage, value, "feed", microbatch or 0))
            self.feeds[value, stage, microbatch or 0] = (register, port)
            self.ready.add(register)
        elif value in step.constants:
            register = self._number((stage, value, sharding))
            self.constants[value, stage] = (register, port)
            self.ready.add(register)
        else:
            varies = value in step.batched
            register = self._number((stage, value, sharding, (microbatch or 0) if varies else None))
        return register

    def run(self) -> InstructionList:
        stages = range(self.lowered.placed.num_stages)
        # No update is issued before the last microbatch of every stage: what fails till then leaves the state intact.
        self._interleave([self._once(s, Phase.PROLOGUE) for s in stages])
        self._interleave([self._loop_queue(group) for group in range(self.schedule.num_groups)])
        self._interleave([self._once(s, Phase.UPDATE) for s in stages])
        results = [None if r is None else self._register(r[0], r[1], None) for r in self.lowered.results]
        for k, register in enumerate(results):
            if register is not None and register not in self.ready:
                raise InternalError(f"nothing makes result {k} of the step, {self.lowered.results[k]}")
        return InstructionList(
            tuple(self._with_frees({r for r in results if r is not None})), len(self.numbers), self.leaves,
            self.feeds, self.constants, self.microbatch, self.sums, tuple(results),
        )  # fmt: skip

    def _interleave(self, queues: list[list[_Entry]]) -> None:
        heads = [0] * len(queues)
        while any(head < len(queue) for head, queue in zip(heads, queues, strict=True)):
            moved = False
            for number, queue in enumerate(queues):
                while heads[number] < len(queue) and self._issue(queue[heads[number]]):
                    heads[number] += 1
                    moved = True
            if not moved:
                stuck = [queue[head] for head, queue in zip(heads, queues, strict=True) if head < len(queue)]
                raise InternalError(f"the schedule cannot go on: all devices wait ({stuck})")

    def _loop_queue(self, group: int) -> list[_Entry]:
        """The schedule's tasks of a group of devices."""
        tasks = self.schedule.tasks[group]
        return [(i, task.microbatch) for task in tasks for i in self.programs[task.stage, task.phase]]

    def _once(self, stage: int, phase: Phase) -> list[_Entry]:
        """Bridges, then "send what was stored before this phase", then the phase's programs."""
        programs = self.programs[stage, phase]
        bridges = [i for i in programs if not self.lowered.programs[i].program.equations]
        if phase is Phase.UPDATE and self.lowered.loop_microbatches < self.step.num_microbatches:
            return [(i, self.lowered.loop_microbatches) for i in programs]
        return [*((i, None) for i in bridges), (stage, phase), *((i, None) for i in programs if i not in bridges)]

    def _issue(self, entry: _Entry) -> bool:
        index, microbatch = entry
        if isinstance(microbatch, Phase):
            self._send_stored(index, microbatch)
            return True
        local = self.lowered.programs[index]
        stage = local.program.stage
        inputs = [self._register(stage, port, microbatch) for port in local.inputs]
        for register, port in zip(inputs, local.inputs, strict=True):
            if port.value in self.totals and register not in self.ready and local.program.in_loop:
                self.sums[register] = (stage, port)
                self.ready.add(register)
        if not all(register in self.ready for register in inputs):
            return False
        outputs = [self._register(stage, port, microbatch) for port in local.outputs]
        given = self.given[index]
        self.instructions.append(Run(stage, index, local.program.phase, tuple(inputs), tuple(outputs), given))
        self.ready.update(outputs)
        for number, port in self.sent[index]:
            self._copy(number, port, microbatch)
        return True

    def _sent(self, local: LocalProgram) -> list[tuple[int, Port]]:
        """The crossings for which a program makes what is sent at once."""
        sent, made = [], set(local.outputs)
        for number in self.leaving[local.program.stage]:
            crossing = self.lowered.crossings[number]
            port = Port(crossing.value, crossing.plan.sent)
            if port in made and crossing.value not in self.totals and crossing.value not in self.kept:
                sent.append((number, port))
        return sent

    def _donated(self, local: LocalProgram) -> tuple[int, ...]:
        """Inputs whose buffers the outputs can take over: running sums, and leaves that this very program renews.

        A leaf that a later program reads as well is not given away, nor one that the same program reads again for the
        next microbatch (where the next value is a sum over the microbatches, as in a step that returns its gradients).
        """
        renewed = {}  # leaf -> the port of its next value
        for k, i in self.step.graph.carried.items():
            result = self.lowered.results[k]
            if result is not None:
                renewed[self.step.graph.inputs[i]] = result[1]
        runs_once = not local.program.in_loop or self.step.num_microbatches == 1
        donated = []
        for position, port in enumerate(local.inputs):
            if (port.value in self.totals and (local.program.in_loop or port in local.outputs)) or (
                port.value in self.donate
                and runs_once
                and port == self.lowered.homes.get(port.value)
                and renewed.get(port.value) in local.outputs
                and not self._read_after(local, port)
            ):
                donated.append(position)
        return tuple(donated)

    def _read_after(self, local: LocalProgram, port: Port) -> bool:
        later = self.lowered.programs[self.lowered.programs.index(local) + 1 :]
        return any(p.program.stage == local.program.stage and port in p.inputs for p in later)

    def _send_stored(self, stage: int, phase: Phase) -> None:
        """Send what no program of its own makes: leaves before the loop, sums and kept values after it."""
        for number in self.leaving[stage]:
            crossing = self.lowered.crossings[number]
            value = crossing.value
            stored = value in self.inputs if phase is Phase.PROLOGUE else value in self.totals or value in self.kept
            if stored:
                self._copy(number, Port(value, crossing.plan.sent), None)

    def _copy(self, number: int, port: Port, microbatch: int | None) -> None:
        crossing = self.lowered.crossings[number]
        source = self._register(crossing.source, port, microbatch)
        if source not in self.ready:
            raise InternalError(f"{port} is sent before it is made")
        varies = port.value in self.step.batched
        key = (crossing.target, port.value, crossing.plan.received, (microbatch or 0) if varies else None)
        target = self._number(key)
        if port.value in self.kept:
            value, piece = self.kept[port.value]
            target = self._number((crossing.target, value, crossing.plan.received, piece))
        self.ready.add(target)
        self.copies += 1
        self.instructions.append(Copy(crossing.source, crossing.target, self.copies - 1, number, source, target))

    def _with_frees(self, results: set[Register]) -> list[Instruction]:
        """Free each register after its last use; what outlives the step (constants, indices) stays."""
        permanent = {r for r, _ in self.constants.values()} | set(self.microbatch.values()) | results
        last: dict[Register, int] = {}
        for position, instruction in enumerate(self.instructions):
            if isinstance(instruction, Run):
                last.update(dict.fromkeys((*instruction.inputs, *instruction.outputs), position))
            elif isinstance(instruction, Copy):
                last.update(dict.fromkeys((instruction.source, instruction.target), position))
        dying: dict[int, list[Register]] = defaultdict(list)
        for register, position in last.items():
            if register not in permanent:
                dying[position].append(register)
        instructions: list[Instruction] = []
        for position, instruction in enumerate(self.instructions):
            instructions.append(instruction)
            if dying[position]:
                instructions.append(Free(instruction.stage, tuple(dying[position])))
        return instructions


def write_instructions(lowered: LoweredStep, schedule: Schedule, donate: frozenset[Value]) -> InstructionList:
    """The instruction lists of one step; `donate` are the graph inputs whose buffers may be overwritten."""
    return _Writer(lowered, schedule, donate).run()
