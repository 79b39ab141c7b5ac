"""The proof that processes do not wait in a circle finds those that do."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import InternalError
from autopar.ir.graph import Phase
from autopar.ir.instructions import Copy, Free, Instruction, InstructionList, Run
from autopar.ir.method import Method
from autopar.ir.schedule import make_schedule
from autopar.passes.launches import check_launches
from autopar.recipes import gpipe, megatron, pipeline
from benchmarks.models import gpt, shared
from tests.planned import analysis_of, cluster_of, plan_analysis


def _run(stage: int, inputs: Sequence[int], outputs: Sequence[int]) -> Run:
    return Run(stage, outputs[0], Phase.FORWARD, tuple(inputs), tuple(outputs), ())


def _copy(stage: int, to: int, number: int, source: int, target: int) -> Copy:
    return Copy(stage, to, number, number, source, target)


SHARED_FIRST, SHARED_SECOND = _run(0, [0], [1]), _run(1, [2], [3])


def test_opposite_orders_of_programs_that_two_processes_share() -> None:
    both = [{0, 1}, {0, 1}]
    check_launches([[SHARED_FIRST, SHARED_SECOND]] * 2, both)
    with pytest.raises(InternalError, match=r"2 of 2 processes would wait for ever: process 0 at Run\(stage=0"):
        check_launches([[SHARED_FIRST, SHARED_SECOND], [SHARED_SECOND, SHARED_FIRST]], both)


def test_a_program_that_only_one_of_its_processes_runs() -> None:
    with pytest.raises(InternalError, match="1 of 2 processes"):
        check_launches([[SHARED_FIRST], []], [{0, 1}])


def test_each_waits_for_what_the_other_sends_later() -> None:
    here, there = _copy(0, 1, 0, 1, 5), _copy(1, 0, 1, 3, 6)
    mine = [_run(0, [6], [1])]
    theirs = [_run(1, [5], [3])]
    with pytest.raises(InternalError, match="2 of 2"):
        check_launches([[there, *mine, here], [here, *theirs, there]], [{0}, {1}])
    # The same with nothing to wait for on one side.
    check_launches([[_run(0, [0], [1]), here, there], [here, *theirs, there]], [{0}, {1}])


def test_the_same_program_twice() -> None:
    check_launches([[SHARED_FIRST, SHARED_FIRST]] * 2, [{0, 1}])
    with pytest.raises(InternalError):
        check_launches([[SHARED_FIRST, SHARED_FIRST], [SHARED_FIRST]], [{0, 1}])


_OPTIMIZER = shared.make_optimizer(1e-3, 1, 10)
METHODS: list[tuple[Method, str]] = [
    (gpipe(4, 4), "gpipe"),
    (megatron(1, 1, 4, 4), "1f1b"),
    (megatron(1, 2, 2, 2, 2), "interleaved"),
    (pipeline([(1, (2,))] * 2, 4, "zero-bubble"), "zero-bubble"),
]


@pytest.fixture(scope="module", params=METHODS, ids=[name for _, name in METHODS])
def instructions(request: pytest.FixtureRequest) -> tuple[InstructionList, int]:
    """Of a GPT with a tied embedding, whose gradients cross in the update; and its stages."""
    from autopar.compiling.program_sources import instructions_of

    method, schedule = request.param
    config = gpt.GPTConfig(64, 8, 4, width=16, num_heads=4)
    planned = plan_analysis(analysis_of(gpt, config, 8, _OPTIMIZER), cluster_of(1, 4), method, None)
    assert planned.plan.schedule == schedule
    lists = instructions_of(planned.lowered, planned.plan.schedule, frozenset())
    return lists, len(planned.plan.stages)


def _split(of: InstructionList, processes_of: Sequence[set[int]], count: int) -> list[tuple[Instruction, ...]]:
    return [of.of_stages({s for s, there in enumerate(processes_of) if p in there}) for p in range(count)]


@pytest.mark.parametrize("seed", range(25))
def test_parts_of_one_order_never_wait_in_a_circle(instructions: tuple[InstructionList, int], seed: int) -> None:
    """Stages on processes of their own, on several, and processes with several stages."""
    of, stages = instructions
    numbers = random.Random(seed)
    count = numbers.randint(1, 6)
    processes_of = [set(numbers.sample(range(count), numbers.randint(1, count))) for _ in range(stages)]
    parts = _split(of, processes_of, count)
    check_launches(parts, processes_of)
    for instruction in of.instructions:
        there = [instruction in part for part in parts]
        if isinstance(instruction, Run):
            assert there == [p in processes_of[instruction.stage] for p in range(count)]
        elif isinstance(instruction, Copy):
            ends = processes_of[instruction.stage] | processes_of[instruction.to]
            assert there == [p in ends for p in range(count)]


def test_copies_go_together_where_no_program_comes_between(instructions: tuple[InstructionList, int]) -> None:
    """What goes with the first of them has been made by then, in the list of every process."""
    of, stages = instructions
    first_of = of.together()
    made: dict[int, int] = {}
    at: dict[int, int] = {}
    programs = 0
    before: list[int] = []  # of a copy, by number: how many programs come before it
    for position, instruction in enumerate(of.instructions):
        if isinstance(instruction, Run):
            programs += 1
            made |= dict.fromkeys(instruction.outputs, position)
        elif isinstance(instruction, Copy):
            at[instruction.number] = position
            before.append(programs)
            made[instruction.target] = position
    copies = {i.number: i for i in of.instructions if isinstance(i, Copy)}
    assert first_of.keys() == copies.keys()
    for number, copy in copies.items():
        first = copies[first_of[number]]
        assert first.number <= number and (first.stage, first.to) == (copy.stage, copy.to)
        assert before[first.number] == before[number]
        assert made.get(copy.source, -1) < at[first.number]
    for stage in range(stages):
        seen = [i.number for i in of.of_stages({stage}) if isinstance(i, Copy)]
        assert all(first_of[number] in seen for number in seen)


def test_what_a_program_makes_goes_to_the_next_stage_together() -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            kept = jnp.tanh(x @ weights["a"])
            main = jnp.sin(kept @ weights["b"])
            return ((main @ weights["c"]) * kept).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), loss

    weights = {name: np.eye(8, dtype=np.float32) for name in "abc"}
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    found = autopar.parallelize(step, devices=jax.devices()[:2], method=gpipe(2, 2), batch_axes=(None, 0))
    executable = found.compile(weights, x)
    together = executable._worker.wiring.instructions.together()
    sizes = collections.Counter(together.values())
    assert sum(size == 2 for size in sizes.values()) >= 2, "two values go forward in each microbatch"
    for ours, theirs in zip(*map(jax.tree.leaves, (found(weights, x), jax.jit(step)(weights, x))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_register_is_forgotten_where_it_was_read_last(instructions: tuple[InstructionList, int]) -> None:
    of, stages = instructions
    for stage in range(stages):
        held: set[int] = set()
        for instruction in of.of_stages({stage}):
            if isinstance(instruction, Run):
                held |= {*instruction.inputs, *instruction.outputs}
            elif isinstance(instruction, Copy):
                held |= {instruction.source if instruction.stage == stage else instruction.target}
            elif isinstance(instruction, Free):
                held -= set(instruction.registers)
        kept = {r for r in of.results if r is not None} | {r for r, _ in of.constants.values()}
        assert held <= kept | set(of.microbatch.values())


def test_an_order_that_is_not_that_of_all_is_found(instructions: tuple[InstructionList, int]) -> None:
    """One process runs two of its programs the wrong way round, where another shares both."""
    of, stages = instructions
    everybody = [{0, 1}] * stages
    first, second = _split(of, everybody, 2)
    runs = [at for at, instruction in enumerate(second) if isinstance(instruction, Run)]
    swapped = list(second)
    swapped[runs[0]], swapped[runs[1]] = swapped[runs[1]], swapped[runs[0]]
    with pytest.raises(InternalError, match="would wait for ever"):
        check_launches([first, swapped], everybody)


def test_schedules_of_many_processes_are_proved_quickly() -> None:
    """Sixty-four stages on 64 hosts: the lists of a pipeline as its schedule gives them."""
    schedule = make_schedule("1f1b", 64, 128)
    lists: list[list[Instruction]] = []
    for stage, row in enumerate(schedule.tasks):
        found: list[Instruction] = []
        for task in row:
            m, is_forward = task.microbatch, task.phase is Phase.FORWARD
            near = stage - 1 if is_forward else stage + 1
            arrives = ("F" if is_forward else "B", near, m)
            if 0 <= near < 64:
                found.append(_copy(near, stage, _number(*arrives), _number(*arrives), 10**6 + _number(*arrives)))
            inputs = [10**6 + _number(*arrives)] if 0 <= near < 64 else []
            made = _number("F" if is_forward else "B", stage, m)
            found.append(_run(stage, inputs, [made]))
            to = stage + 1 if is_forward else stage - 1
            if 0 <= to < 64:
                found.append(_copy(stage, to, made, made, 10**6 + made))
        lists.append(found)
    check_launches(lists, [{stage} for stage in range(64)])


def _number(kind: str, stage: int, microbatch: int) -> int:
    return (stage * 128 + microbatch) * 2 + (kind == "B")
