"""A compiled step: programs compiled ahead of time, and the instruction list that a worker plays over registers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import operator
import time
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from autopar.errors import StateError, StateLostError
from autopar.ir.instructions import Copy, Free, InstructionList, Register, Run
from autopar.ir.placed_examples import PlacedExamples
from autopar.runtime.buffers import Buffers, References
from autopar.runtime.feeding import Rows, place_rows, rows_of
from autopar.runtime.host_memory import keep_memory
from autopar.runtime.mail import Mail, state_of
from autopar.runtime.placement import Array, absent, guards_transfers, is_here, place, private
from autopar.runtime.preparing import (
    DirectCall,
    HowToCopy,
    Put,
    Together,
    changed_by,
    compile_all,
    constant,
    copied,
    described,
    getter_of,
    is_deleted,
    spans_of,
    wait_for,
    zero_programs,
)
from autopar.runtime.processes import Processes
from autopar.runtime.recorder import Recorder
from autopar.runtime.source import Source
from autopar.runtime.transfer import Sending, needs_waits, send
from autopar.runtime.wiring import Wiring, slice_of

_IS_DELETED = operator.methodcaller("is_deleted")
_DELETE = operator.methodcaller("delete")
_UNGUARDED = contextlib.nullcontext()
_ALONE = types.SimpleNamespace()  # whom nobody asks what it plays


class Worker:
    """Runs a step. Everything is compiled and constants are placed when it is made.

    Of several processes each compiles and runs what it has devices for. Results of other processes' stages are arrays
    without data, which say only where they lie.
    """

    def __init__(self, sources: Sequence[Source], wiring: Wiring, job: Processes | None = None) -> None:
        self.wiring, self.all_sources = wiring, tuple(sources)
        self.buffers = Buffers()  # its own, until another is set: executables that hand one another state share one
        here = [i for i, source in enumerate(sources) if is_here(source.mesh)]
        self.sources = tuple(sources[i] for i in here)  # of this process
        keep_memory(device for source in self.sources for device in source.mesh.local_devices)
        self.programs = compile_all(self.sources)
        for transfer in wiring.transfers:
            transfer.compile()
        self._calls = dict(zip(here, self.programs, strict=True))
        self._waits = {i: needs_waits(sources[i].mesh) for i in here}
        self._ever_waits = any(self._waits.values())
        self.dispatch_seconds = 0.0  # host time of the last step's instructions, waits left out
        self.recorder: Recorder | None = None  # of when instructions begin and end
        self._waited, self._has_run = 0.0, False  # of the last step: seconds in these waits; whether a program has run
        permanent: list[tuple[Register, Any, Array]] = [(r, c, a) for r, (c, a) in wiring.constants.items()]
        permanent += [(r, np.int32(i), a) for r, (i, a) in wiring.microbatch.items()]
        permanent = [(r, x, a) for r, x, a in permanent if is_here(a.sharding.mesh)]
        placed = place([c for _, c, _ in permanent], [a.sharding for _, _, a in permanent])
        self._permanent = [(r, x) for (r, _, _), x in zip(permanent, placed, strict=True)]
        self._sums = zero_programs({r: a for r, a in wiring.sums.items() if is_here(a.sharding.mesh)})
        self._homes = {v: a for v, a in wiring.homes.items() if is_here(a.sharding.mesh)}
        self._feeds = {r: feed for r, feed in wiring.feeds.items() if is_here(feed[-1].sharding.mesh)}
        self._leaf_at = {v: i for i, v in enumerate(wiring.inputs)}
        instructions = wiring.instructions
        self._passes = [(k, instructions.leaves[v]) for k, v in wiring.kept.items() if v in self._homes]
        passed = {k: result for k, result in enumerate(wiring.results) if result is not None}
        for k, v in wiring.kept.items():
            if v in self._homes:
                del passed[k]
            elif v.shape:  # numbers are known to all processes
                nothing = absent(dataclasses.replace(wiring.homes[v], weak_type=v.weak_type))
                passed[k] = functools.partial(constant, nothing)
        self._passed = list(passed.items())
        nowhere = instructions.num_registers  # a register more, for results that no program makes
        self._results = getter_of(nowhere if register is None else register for register in instructions.results)
        given = {i.inputs[k] for i in instructions.instructions if isinstance(i, Run) for k in i.donated}
        # Of each leaf that lies here, where it goes, and the result that comes in its place.
        self._kept = [(self._leaf_at[v], instructions.leaves[v], array) for v, array in self._homes.items()]
        made = {at: k for at, k in wiring.renewed.items() if instructions.results[k] is not None}
        self._next = {at: made.get(at) for at, _, _ in self._kept}
        sizes = {at: math.prod(array.shape) * array.dtype.itemsize for at, _, array in self._kept}
        self._small = frozenset(at for at, size in sizes.items() if size <= References.SMALL)
        # To the state that the last call left, where that is all that has to be looked at.
        self._expected = None if self._kept else References((), ())
        renewals = [None if k is None else instructions.results[k] for k in self._next.values()]
        renewed = [register for register in renewals if register is not None]
        # State comes out where it went in, and no two leaves of it as one.
        self._expects = len(renewed) == len(set(renewed)) and all(
            register is None or wiring.made[register].sharding == array.sharding
            for register, array in zip(renewals, self._homes.values(), strict=True)
        )
        # Copies to or from what may be given away, in this step or the next.
        state, copies = state_of(instructions), [i for i in instructions.instructions if isinstance(i, Copy)]
        fragile = state | given
        self._apart = frozenset(i.number for i in copies if fragile.intersection([i.source, i.target]))
        self._given = frozenset(self._leaf_at[v] for v, r in instructions.leaves.items() if r in given)
        self._instructions = instructions.of_stages(wiring.stages_of(jax.process_index()))
        # Beside each program of the list what gets its arguments, and the registers that are written or freed.
        played = self._with_copies_together(instructions, state)
        getters = [getter_of(i.inputs if isinstance(i, Run) else ()) for i in played]
        self._list = list(zip(played, getters, [spans_of(changed_by(i)) for i in played], strict=True))
        self._absent = {r: absent(a) for r, a in wiring.made.items() if not is_here(a.sharding.mesh)}
        self.mail = None
        if job is not None:
            together = frozenset().union(*(there for there in wiring.processes if job.index in there))
            channel = job.channel(wiring.function, together)
            self.mail = Mail(job, channel, instructions, {r: wiring.made[r] for r in wiring.known}, wiring.carried)
            channel.describe = functools.partial(described, [i for i, _, _ in self._list])
        self._expect_at([])

    @functools.cached_property
    def rows(self) -> Rows:
        """Of each batch, what this process reads."""
        return rows_of(self.wiring.feeds, jax.process_index())

    def place_examples(self, function: str, leaves: Mapping[int, np.ndarray[Any, Any]]) -> dict[int, PlacedExamples]:
        """Argument leaves of examples, whole or this process's rows of them, where this step wants them."""
        wiring = self.wiring
        arrays = place_rows(leaves, self._feeds, self.rows)
        by_leaf: dict[int, dict[Register, Any]] = {at: {} for at in leaves}
        for register, array in arrays.items():
            by_leaf[wiring.feeds[register][0]][register] = array
        values = {at: wiring.inputs[at] for at in leaves}
        return {at: PlacedExamples(v.shape, v.dtype, function, wiring, by_leaf[at]) for at, v in values.items()}

    @property
    def instruction_count(self) -> int:
        """Instructions of one step on this process, frees left out."""
        return sum(isinstance(i, Run | Copy) for i in self._instructions)

    def _expect_at(self, expected: Sequence[int]) -> None:
        """Which leaves of the arguments are what the last call left; the others are brought to the devices anew."""
        self._expected_at = expected
        there = set(expected)
        self.others = [at for at in range(len(self.wiring.inputs)) if at not in there]
        self._stays = [(at, register) for at, register, _ in self._kept if at in there]
        self._brought = [kept for kept in self._kept if kept[0] not in there]
        split = [at for at in expected if at in self._small], [at for at in expected if at not in self._small]
        self._state = tuple(map(getter_of, split))
        # The first program finds out by itself that one is gone.
        taken = next((set(i.inputs) for i in self._instructions if isinstance(i, Run)), set())
        self._unchecked = getter_of(at for at, register in self._stays if register not in taken)
        # Where a call's results, and after them its arguments, have what it leaves.
        count = len(self.wiring.results)
        self._leaves_results = all(self._next[at] is not None for at in expected)
        self._left = tuple(
            getter_of(count + at if (k := self._next[at]) is None else k for at in part) for part in split
        )
        self._direct = self._direct_call()

    def _direct_call(self) -> DirectCall | None:
        """Of a step that is one program, where its arguments come from while calls know the state; None: it is not."""
        runs = [i for i in self._instructions if isinstance(i, Run)]
        copies = any(isinstance(i, Copy) for i in self._instructions)
        if len(runs) != 1 or copies or self._sums or self._absent or self.mail is not None:
            return None
        (run,) = runs
        moved = {register: leaf for register, (leaf, _, _, _) in self._feeds.items()}
        moved |= {register: leaf for leaf, register, _ in self._brought}
        readers = collections.Counter([*moved.values(), *(leaf for leaf, _ in self._stays)])
        at = {register: leaf for register, leaf in moved.items() if readers[leaf] == 1}  # in the place of the leaf
        after = [*[r for r, _ in self._permanent], *(register for register in moved if register not in at)]
        at |= {register: len(self.wiring.inputs) + k for k, register in enumerate(after)}
        at |= {register: leaf for leaf, register in self._stays}
        made = {register: k for k, register in enumerate(run.outputs)}
        results = [made.get(-1 if r is None else r, len(made)) for r in self.wiring.instructions.results]
        return DirectCall(
            run.program, getter_of(at[register] for register in run.inputs),
            [*[x for _, x in self._permanent], *[None] * (len(after) - len(self._permanent))],
            [(register, at[register]) for register in moved],
            None if results == list(range(len(made))) else getter_of(results),
            [(k, at[register]) for k, register in self._passes],
            getter_of(sorted(at[r] for k in run.donated if (r := run.inputs[k]) not in moved)),
        )  # fmt: skip

    def _with_copies_together(
        self, instructions: InstructionList, state: Set[Register]
    ) -> list[Run | Free | Put | Together]:
        """This process's list; copies that go together are where the first of them is."""
        first_of = instructions.together()
        groups: dict[int, Together] = {}
        played: list[Run | Free | Put | Together] = []
        for instruction in self._instructions:
            if not isinstance(instruction, Copy):
                played.append(instruction)
                continue
            tiles, may_alias = self.wiring.transfers[instruction.crossing], instruction.number not in self._apart
            source, target = instruction.source, instruction.target
            if tiles.is_put:
                played.append(Put(source, target, tiles.destination, may_alias, instruction.stage, instruction.to))
                continue
            first = first_of[instruction.number]
            if first not in groups:
                groups[first] = Together(first, instruction.stage, instruction.to)
                played.append(groups[first])
            groups[first].copies.append(HowToCopy(source, target, tiles, may_alias, source in state))
        return played

    def knows(self, leaves: Sequence[Any]) -> bool:
        """Whether the state among the arguments' leaves is what the last call left, where it left it."""
        if self._expected is None:
            return False
        small, others = (state(leaves) for state in self._state)
        if not self._expected.are(small, others):
            return False
        if any(map(_IS_DELETED, self._unchecked(leaves))):
            return False
        if any(isinstance(leaves[at], jax.Array) for at, _, _ in self._brought):
            return False
        arrays = {id(leaf) for at in self.others if isinstance(leaf := leaves[at], jax.Array)}
        return not arrays or arrays.isdisjoint(map(id, (*small, *others)))

    def __call__(self, leaves: Sequence[Any], known: bool = False) -> Sequence[Any]:
        """One step on the arguments' leaves; returns the outputs' leaves.

        `known`: the state among the leaves is what the last call left (see `knows`), and all other leaves have the
        shapes that the step was compiled for.

        Raises:
          StateError: a leaf was donated to an earlier step, or lies on other devices than planned.
          StateLostError: a program failed after the state had been given to an update program.
        """
        if known and self._direct is not None and self.recorder is None:
            return self._call_direct(self._direct, leaves)
        wiring = self.wiring
        if self.mail is not None:
            self.mail.next_step()
        registers: list[Any] = [None] * (wiring.instructions.num_registers + 1)
        for register, value in self._permanent:
            registers[register] = value
        in_place = self._place(leaves, registers, known)
        for target, zeros in self._sums:
            totals = zeros()
            if self._ever_waits:
                wait_for(totals)
            for register, total in zip(target, totals, strict=True):
                registers[register] = total
        self._has_run, self._waited = False, 0.0
        playing: Any = self.recorder or (_ALONE if self.mail is None else self.mail.channel)
        try:
            passed = self._pass(leaves, registers, self._passes)
            started = time.perf_counter()
            for instruction, arguments_of, spans in self._list:
                playing.instruction = instruction
                if isinstance(instruction, Run):
                    outputs = self._launch(instruction.program, arguments_of(registers))
                    for there, positions in spans:
                        registers[there] = outputs[positions]
                elif isinstance(instruction, Put):
                    source, to, destination, may_alias, _, _ = instruction
                    registers[to] = jax.device_put(registers[source], destination, may_alias=may_alias)
                    if self.recorder is not None:
                        self.recorder.brought(instruction.stage, instruction.receiver, [(source, to)], [registers[to]])
                elif isinstance(instruction, Together):
                    message = None if self.mail is None else self.mail.message(instruction.number)
                    sent = [
                        Sending(tiles, registers[source], may_alias, is_fragile)
                        for source, _, tiles, may_alias, is_fragile in instruction.copies
                    ]
                    arrived = send(sent, message)
                    for copy, x in zip(instruction.copies, arrived, strict=True):
                        registers[copy.target] = x
                    if self.recorder is not None:
                        pairs = [(copy.source, copy.target) for copy in instruction.copies]
                        self.recorder.brought(instruction.stage, instruction.receiver, pairs, arrived)
                else:
                    for there, _ in spans:
                        registers[there] = [None] * (there.stop - there.start)
        except Exception as error:
            self._explain(error, leaves, known)
            raise
        finally:
            playing.instruction = None
        self.dispatch_seconds = time.perf_counter() - started - self._waited
        for register, nothing in self._absent.items():
            registers[register] = nothing
        if self.mail is not None:
            self.mail.share_results(registers)
        returned = list(self._results(registers))
        for k, argument in passed:
            returned[k] = argument
        if known:
            self._expected = self._remember_left(returned, leaves)
        else:
            self._expect(leaves, in_place, returned)
        return returned

    def _call_direct(self, direct: DirectCall, leaves: Sequence[Any]) -> Sequence[Any]:
        """As `__call__`, of a step that is one program, called with the state that it left."""
        moved: dict[Register, Any] = {}
        self._bring(leaves, moved, as_numpy=True)
        given = [*leaves, *direct.after]
        for register, at in direct.moved:
            given[at] = moved[register]
        self._has_run, self._waited = False, 0.0
        try:
            passed = self._pass(leaves, given, direct.passes)
            started = time.perf_counter()
            # That a step brings its examples to the devices is asked for, as it is of `jax.device_put`.
            with jax.transfer_guard_host_to_device("allow") if guards_transfers() else _UNGUARDED:
                outputs: Sequence[jax.Array] = self._calls[direct.program](*direct.arguments(given))
            self._has_run, returned = True, outputs
            if direct.results is not None:
                returned = list(direct.results((*outputs, None)))
                for k, x in passed:
                    returned[k] = x
            # While the program runs. If it fails, nobody has these, and the next call is looked at in full.
            self._expected = self._remember_left(returned, leaves)
            if self._waits[direct.program]:
                # What it took over is let go of meanwhile: the caller still has it, and that takes as long as the wait.
                collections.deque(map(_DELETE, direct.given(given)), maxlen=0)
                self._wait(direct.program, outputs)
        except Exception as error:
            self._explain(error, leaves, known=True)
            raise
        self.dispatch_seconds = time.perf_counter() - started - self._waited
        return returned

    def _pass(
        self, leaves: Sequence[Any], values: Sequence[Any], passes: Sequence[tuple[int, int]]
    ) -> list[tuple[int, Any]]:
        """Results that are arguments: made of the leaves, or (number, where it is among the values)."""
        passed = [(k, result(leaves)) for k, result in self._passed]
        passed += [(k, values[at]) for k, at in passes]
        if self._ever_waits:
            jax.block_until_ready(passed)
        return passed

    def _launch(self, program: int, arguments: Sequence[Any]) -> Sequence[jax.Array]:
        """Results of a program, which may be still to come."""
        outputs: Sequence[jax.Array] = self._calls[program](*arguments)
        self._has_run = True
        self._wait(program, outputs)
        if self.recorder is not None:
            self.recorder.ran(outputs, self._waits[program])
        return outputs

    def _wait(self, program: int, outputs: Sequence[jax.Array]) -> None:
        """For a program to end, where others must not overlap with it."""
        if self._waits[program]:
            launched = time.perf_counter()
            wait_for(outputs)
            self._waited += time.perf_counter() - launched

    def _explain(self, error: Exception, leaves: Sequence[Any], known: bool) -> None:
        """Raise what says more of a failed step than `error`, if there is such."""
        wiring = self.wiring
        if known and not self._has_run:
            for at, _ in self._stays:
                self._check_there(at, leaves[at])
        # Only update programs get leaves to overwrite: before the first of them all are there.
        lost = [wiring.input_paths[i] for i in sorted(wiring.donated) if is_deleted(leaves[i])]
        if lost:
            raise StateLostError(
                f"the step failed after {len(lost)} leaves of the state, among them {lost[0]}, had been given to "
                "update programs, so that the state is lost: restore it from a checkpoint. With donate_argnums=() a "
                "step keeps the old state, at the price of its memory."
            ) from error

    def _remember_left(self, returned: Sequence[Any], leaves: Sequence[Any]) -> References:
        """What a call leaves of its results and its arguments."""
        small, others = self._left
        left = returned if self._leaves_results else [*returned, *leaves]
        return self._remember(small(left), others(left))

    def _remember(self, small: Sequence[Any], others: Sequence[Any]) -> References:
        """What a call leaves, as arrays of which none shares a buffer with another."""
        own = References(small, others)
        if self._given:
            self.buffers.remember(own)
        return own

    def _expect(self, leaves: Sequence[Any], in_place: Sequence[int], returned: Sequence[Any]) -> None:
        """Remember what a call leaves: results where they take the place of state, else what it was given in place."""
        self._expected = None if self._kept else References((), ())
        placed = set(in_place)
        left = {
            at: leaves[at] if k is None else returned[k]
            for at, k in self._next.items()
            if k is not None or at in placed
        }
        small, others = ([x for at, x in left.items() if (at in self._small) is is_small] for is_small in (True, False))
        own = self._remember(small, others)
        # None to be given away twice, and what is brought anew each time a value of the host that nothing overwrites.
        if (
            self._expects
            and len(left) == len(set(map(id, left.values())))
            and not any(
                isinstance(leaves[at], jax.Array) or at in self._given for at in self._next.keys() - left.keys()
            )
        ):
            self._expected = own
            if left.keys() != set(self._expected_at):
                self._expect_at(list(left))

    def _place(self, leaves: Sequence[Any], registers: list[Any], known: bool) -> Sequence[int]:
        """Arguments to registers: state where it lies, everything else to where it is wanted; the former's numbers."""
        wiring = self.wiring
        in_place: dict[int, tuple[Register, Array]] = {}
        moves: list[tuple[Register, Any, Any]] = []
        if known:
            for at, register in self._stays:
                registers[register] = leaves[at]
            self._bring(leaves, registers)
            return self._expected_at
        for value, array in self._homes.items():
            at = self._leaf_at[value]
            leaf = leaves[at]
            register = wiring.instructions.leaves[value]
            if isinstance(leaf, jax.Array):
                self._check_there(at, leaf)
                if leaf.sharding == array.sharding:
                    registers[register] = leaf
                    in_place[at] = register, array
                    continue
                if not leaf.shape and not leaf.sharding.is_fully_addressable:
                    leaf = leaf.addressable_data(0)  # a number is known to all processes
                elsewhere = not leaf.sharding.is_equivalent_to(array.sharding, leaf.ndim)
                if elsewhere and not isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding):
                    raise StateError(
                        f"{wiring.input_paths[at]} lies on {len(leaf.sharding.device_set)} devices as {leaf.sharding}, "
                        f"but the plan keeps it as {array.sharding}. State is never moved silently: pass the state "
                        "that this step's init or last call returned, or autopar.gather(state) to start from; a "
                        "function on another step's state is made with follow=that_step."
                    )
            # An array that will be donated is copied first: `may_alias` does not keep device_put from reusing that of
            # one device as a tile, and the caller may have it elsewhere too (as the start of a moving average, say).
            moves.append((register, copied(leaf) if at in wiring.donated else leaf, array.sharding))
        if self._given:
            # XLA ends the process where a buffer is given away twice, or given away and read.
            for at in self.buffers.shared(leaves, tuple(in_place), self._given) & in_place.keys():
                register, array = in_place.pop(at)
                moves.append((register, leaves[at], array.sharding))
        self._move(leaves, registers, moves)
        return list(in_place)

    def _check_there(self, at: int, leaf: jax.Array) -> None:
        if leaf.is_deleted():
            raise StateError(
                f"{self.wiring.input_paths[at]} was donated to an earlier step and is gone. Use the state that that "
                "step returned, or pass donate_argnums=() to keep the old one."
            )

    def _bring(self, leaves: Sequence[Any], registers: Any, *, as_numpy: bool = False) -> None:
        """Of a call with known state what is not there: examples, and state that is brought each time."""
        moves = [(register, leaves[at], array.sharding) for at, register, array in self._brought]
        self._move(leaves, registers, moves, as_numpy=as_numpy)

    def _move(
        self, leaves: Sequence[Any], registers: Any, moves: list[tuple[Register, Any, Any]], *, as_numpy: bool = False
    ) -> None:
        """Examples, and what else is not where it is wanted, to there.

        `as_numpy`: examples for a program that brings them to its devices itself, which takes a fifth of the time of
        `jax.device_put`.
        """
        count = self.wiring.num_microbatches
        for register, (at, batch, microbatch, array) in self._feeds.items():
            leaf = leaves[at]
            if isinstance(leaf, PlacedExamples):
                if leaf.owner is not self.wiring:
                    raise StateError(
                        f"{self.wiring.input_paths[at]} was placed on the devices for {leaf.function}, which wants it "
                        "elsewhere than this step, or has other shapes: each step has its own batches()."
                    )
                registers[register] = leaf.arrays[register]
                continue
            examples = slice_of(leaf, batch, microbatch, count)
            if as_numpy and type(examples) is np.ndarray and examples.dtype == array.dtype:
                registers[register] = private(examples)
            else:
                moves.append((register, examples, array.sharding))
        if not moves:
            return
        placed = place([x for _, x, _ in moves], [s for _, _, s in moves])
        for (register, _, _), x in zip(moves, placed, strict=True):
            registers[register] = x
