"""What the programs of a stage keep in memory, and when; and a bound on their time that follows from it.

Sizes are those of whole values. A time is a position in a program.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import numpy as np

from autopar.cost_model.compute import compute_time
from autopar.cost_model.fusion import live_until, moved_values
from autopar.ir.graph import Equation, Value
from autopar.ir.local import Traffic
from autopar.ir.mesh import DeviceKind
from autopar.ir.program import Program
from autopar.ir.rule import Rule

_MEMORY_TIMES_PER_PROGRAM = 6


def least_seconds(
    program: Program, rules: Mapping[int, Rule], traffic: Mapping[int, Traffic], kind: DeviceKind
) -> tuple[float, float]:
    """Seconds of one run that devices share at best, every equation and array cut evenly, and those that all spend."""
    shared, launches = 0.0, 0.0
    for eqn in program.equations:
        seconds, times = equation_seconds(eqn, rules[eqn.id], traffic[eqn.id], kind)
        shared, launches = shared + seconds, launches + times
    return shared, kind.launch_overhead * launches


def equation_seconds(eqn: Equation, rule: Rule, traffic: Traffic, kind: DeviceKind) -> tuple[float, float]:
    """Seconds of a whole equation without those of launches, and the number of these."""
    if not rule.kernels:
        moved = sum(nbytes for _, nbytes in moved_values(eqn, traffic))
        is_product = rule.unit == "matmul"
        dtype = eqn.kernel_dtype(is_product)
        seconds = compute_time(
            kind, flops=rule.work({}), bytes_moved=moved, dtype=dtype, matmul=is_product, pooling=rule.pooling
        )
        return seconds, traffic.launches
    shared, launches = 0.0, 0.0
    for k in rule.kernels:
        read_or_written = sum(nbytes for nbytes, _ in k.traffic)
        matmul = k.sides is not None
        shared += compute_time(
            kind, flops=k.flops, bytes_moved=read_or_written, dtype=k.dtype, matmul=matmul, pooling=k.pooling
        )
        launches += k.times
    return shared, launches


def lifetimes(
    program: Program, rules: Mapping[int, Rule], traffic: Mapping[int, Traffic], partial_sums: Collection[Value]
) -> dict[Value, tuple[int, int]]:
    """Positions between which each value that the program writes to memory is live.

    `partial_sums` are added to the running sums as soon as nothing else reads them.
    """
    dies = live_until(program.equations, rules, traffic, set(program.outputs) - set(partial_sums))
    return {
        v: (position, dies.get(v, position))
        for position, eqn in enumerate(program.equations)
        for v, written in zip(eqn.outputs, traffic[eqn.id].writes, strict=True)
        if written
    }


def peak_positions(program: Program, rules: Mapping[int, Rule], live_at: Mapping[Value, tuple[int, int]]) -> list[int]:
    """Positions where most bytes are live (in full sizes), one for each of a few stretches of the program."""
    count = len(program.equations)
    live = np.zeros(count + 1)
    for v, (born, dies) in live_at.items():
        live[born] += v.nbytes
        if dies < count:
            live[dies + 1] -= v.nbytes
    live = np.cumsum(live)[: max(1, count)]
    for position, eqn in enumerate(program.equations):
        live[position] += rules[eqn.id].temporaries({})
    bounds = np.linspace(0, len(live), _MEMORY_TIMES_PER_PROGRAM + 1).astype(int)
    return [int(a + np.argmax(live[a:b])) for a, b in itertools.pairwise(bounds) if b > a]
