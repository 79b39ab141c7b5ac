"""What the programs of a stage keep in memory, and when; and a bound on their time that follows from it.

Sizes are those of whole values. A time is a position in a program.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import numpy as np

from autopar.cost_model.compute import compute_time
from autopar.ir.graph import Value
from autopar.ir.mesh import DeviceKind
from autopar.ir.program import Program
from autopar.passes.rules.base import Kernel, Rule, is_fusible

_MEMORY_TIMES_PER_PROGRAM = 6


def least_seconds(program: Program, rules: Mapping[int, Rule], kind: DeviceKind, num_devices: int) -> float:
    """Seconds of one run that no sharding over so many devices can beat: every equation and array cut evenly."""
    in_memory = materialised_values(program, rules)
    read: set[Value] = set()
    total = 0.0
    for eqn in program.equations:
        rule = rules[eqn.id]
        moved = sum(v.nbytes for v in eqn.outputs if v in in_memory)
        fresh = {v for v in eqn.values if v in in_memory} - read
        read |= fresh
        moved += sum(v.nbytes for v in fresh)
        if rule.kernels:
            total += sum(_least_of_kernel(kernel, kind, num_devices) for kernel in rule.kernels)
            continue
        flops = rule.flops * rule.points() / num_devices
        matmul = rule.unit == "matmul"
        dtype = eqn.kernel_dtype(matmul)
        total += compute_time(kind, flops=flops, bytes_moved=moved / num_devices, dtype=dtype, matmul=matmul)
        total += kind.launch_overhead if moved else 0.0
    return total


def _least_of_kernel(kernel: Kernel, kind: DeviceKind, num_devices: int) -> float:
    moved = sum(nbytes for nbytes, _ in kernel.traffic) / num_devices
    seconds = compute_time(
        kind, flops=kernel.flops / num_devices, bytes_moved=moved, dtype=kernel.dtype, matmul=kernel.matmul
    )
    return seconds + (kind.launch_overhead * kernel.times if moved else 0.0)


def materialised_values(program: Program, rules: Mapping[int, Rule]) -> set[Value]:
    """Values that go through memory: XLA fuses chains of elementwise operations between matrix products."""
    found = set(program.inputs) | set(program.outputs)
    for eqn in program.equations:
        if rules[eqn.id].unit == "matmul":
            found.update(eqn.values)
            found.update(eqn.outputs)
        elif not is_fusible(rules[eqn.id]):
            found.update(eqn.outputs)
    return found


def lifetimes(program: Program, rules: Mapping[int, Rule], addends: Collection[Value]) -> dict[Value, tuple[int, int]]:
    """Positions between which each materialised value that the program makes is live.

    `addends` are added to their sums as soon as nothing else reads them.
    """
    in_memory = materialised_values(program, rules)
    born: dict[Value, int] = {}
    dies: dict[Value, int] = {}
    for position, eqn in enumerate(program.equations):
        for v in eqn.outputs:
            born[v] = dies[v] = position
        fence = rules[eqn.id].separable  # hands on the buffers that it takes
        for v in eqn.values:
            dies[v] = max(dies.get(v, 0), position - fence)
        if fence:
            in_memory.update((*eqn.values, *eqn.outputs))
    for v in set(program.outputs) - set(addends):
        dies[v] = len(program.equations)
    return {v: (at, dies[v]) for v, at in born.items() if v in in_memory}


def peak_positions(program: Program, rules: Mapping[int, Rule], addends: Collection[Value]) -> list[int]:
    """Positions where most bytes are live (in full sizes), one for each of a few stretches of the program."""
    count = len(program.equations)
    live = np.zeros(count + 1)
    for v, (born, dies) in lifetimes(program, rules, addends).items():
        live[born] += v.nbytes
        if dies < count:
            live[dies + 1] -= v.nbytes
    live = np.cumsum(live)[: max(1, count)]
    for position, eqn in enumerate(program.equations):
        live[position] += rules[eqn.id].temporaries({})
    bounds = np.linspace(0, len(live), _MEMORY_TIMES_PER_PROGRAM + 1).astype(int)
    return [int(a + np.argmax(live[a:b])) for a, b in itertools.pairwise(bounds) if b > a]
