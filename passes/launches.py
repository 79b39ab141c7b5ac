"""Proof that the processes of a job cannot wait for one another in a circle.

Each process plays a list of its own. The proof plays all of them on an abstract machine that waits wherever a real one
may: a program over several processes starts when all of them have come to it (collectives meet there), and when what
it reads has been made or sent. Nothing on that machine is a choice, and whoever can go on still can after others have:
if it comes to the end once, it always does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence, Set

from autopar.errors import InternalError
from autopar.ir.instructions import Copy, Instruction, Register, Run

_Start = tuple[Run, int]  # a program, and how many times it has been run before


class _Machine:
    def __init__(self, lists: Sequence[Sequence[Instruction]], processes_of: Sequence[Set[int]]) -> None:
        self.lists, self.processes_of = lists, processes_of
        self.heads = [0] * len(lists)
        self.times = [defaultdict[Run, int](int) for _ in lists]
        self.arrived: dict[_Start, set[int]] = defaultdict(set)
        self.sent: dict[Copy, set[int]] = defaultdict(set)  # by which processes
        self.waits: list[dict[Register, Copy]] = [{} for _ in lists]  # what a process has been promised
        self.asleep: dict[Copy, set[int]] = defaultdict(set)
        self.awake = deque(range(len(lists)))

    def play(self) -> None:
        while self.awake:
            process = self.awake.popleft()
            while self.heads[process] < len(self.lists[process]) and self._step(process):
                self.heads[process] += 1
        stuck = [p for p, head in enumerate(self.heads) if head < len(self.lists[p])]
        if stuck:
            where = "; ".join(f"process {p} at {self.lists[p][self.heads[p]]}" for p in stuck[:4])
            raise InternalError(f"{len(stuck)} of {len(self.lists)} processes would wait for ever: {where}")

    def _step(self, process: int) -> bool:
        """Whether the process is done with the instruction at its head."""
        instruction = self.lists[process][self.heads[process]]
        if isinstance(instruction, Copy):
            self._copy(process, instruction)
        elif isinstance(instruction, Run):
            return self._run(process, instruction)
        return True

    def _copy(self, process: int, copy: Copy) -> None:
        if process in self.processes_of[copy.stage]:
            self.sent[copy].add(process)
            self.awake.extend(self.asleep.pop(copy, ()))
        if process in self.processes_of[copy.to]:
            self.waits[process][copy.target] = copy

    def _run(self, process: int, run: Run) -> bool:
        for register in run.inputs:
            copy = self.waits[process].get(register)
            if copy is not None and not self.sent[copy] >= self.processes_of[copy.stage]:
                self.asleep[copy].add(process)
                return False
        start = run, self.times[process][run]
        self.arrived[start].add(process)
        if not self.arrived[start] >= self.processes_of[run.stage]:
            return False
        for other in self.processes_of[run.stage]:
            self.times[other][run] += 1
            if other != process:  # it waits at this very instruction
                self.heads[other] += 1
                self.awake.append(other)
        return True


def check_launches(lists: Sequence[Sequence[Instruction]], processes_of: Sequence[Set[int]]) -> None:
    """Play the lists of all processes on an abstract machine; `processes_of[stage]` have devices of that stage.

    Raises:
      InternalError: some would wait for ever; says which, and where.
    """
    _Machine(lists, processes_of).play()
