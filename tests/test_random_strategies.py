"""Lowering for arbitrary strategies: random steps under random legal choices give what `jax.jit` gives."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from autopar.ir.graph import Value
from autopar.ir.local import Accumulate, LocalProgram, Reread, Reshard
from autopar.ir.sharding import Sharding
from tests.planned import analyse, compiled_collectives, lowered_collectives
from tests.random_plans import MESHES, plan_by_lot
from tests.random_steps import random_step


def norm(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def _reads(local: LocalProgram) -> set[tuple[Value, Sharding]]:
    """What something in the program uses, in the sharding in which it does."""
    found = {(port.value, port.sharding) for port in local.outputs}
    for op in local.ops:
        if isinstance(op, Reshard):
            found.add((op.value, op.source))
        elif isinstance(op, Reread):
            found.add((op.value, op.sharding))
        elif isinstance(op, Accumulate):
            found.add((op.partial_sum, op.sharding))
        else:
            wanted = zip(op.equation.inputs, op.operands, strict=True)
            found.update((v, s) for v, s in wanted if isinstance(v, Value) and s is not None)
    return found


# Every one of these meshes by default, with one or two stages and microbatches.
SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_choice_of_strategies_computes_the_same(seed: int) -> None:
    random = np.random.default_rng(seed)
    case = random_step(random)
    shape = MESHES[seed % len(MESHES)]
    size, m = math.prod(shape), int(random.integers(1, 3))
    wanted = int(random.integers(1, 3)) if size <= 4 else 1
    analysis = analyse(case.step, case.weights, case.x, batch_axes=(None, 0))
    planned = plan_by_lot(analysis, shape, wanted, m, random)
    executable = planned.build(jax.devices())

    # The same numbers. The change of the weights counts, not the weights; rounding is that of float32.
    outputs = executable(jax.tree.leaves((case.weights, case.x)))
    expected = jax.tree.leaves(jax.jit(case.step)(case.weights, case.x))
    before = [*case.weights, 0.0, 0.0]
    for output, reference, start in zip(outputs, expected, before, strict=True):
        bound = 1e-4 * norm(reference - start) + 1e-6 * norm(start) + 1e-5
        assert norm(np.asarray(output) - np.asarray(reference)) <= bound

    # No value is summed in two ways, which would round differently: readers must agree on it to the last bit.
    # What the step itself computes twice is summed for each. And nothing is resharded in vain.
    for local in planned.lowered.programs:
        sums = Counter(
            op.value for op in local.ops if isinstance(op, Reshard) and op.source.partial and not op.target.partial
        )
        looks = {
            v: (str(e.primitive), e.inputs, str(e.params), k)
            for e in local.program.equations
            for k, v in enumerate(e.outputs)
        }
        twice = Counter(looks.values())
        assert all(count <= twice[looks[v]] for v, count in sums.items() if v in looks)
        assert all(count == 1 for v, count in sums.items() if v not in looks)
        assert _reads(local) >= {(op.value, op.target) for op in local.ops if isinstance(op, Reshard)}

    # What was priced was lowered, and XLA added nothing to it. It may send less: it knows that a gathered
    # broadcast is a broadcast, and it merges what the user's code computes twice.
    for local, source, program in zip(planned.lowered.programs, executable.sources, executable.programs, strict=True):
        priced = planned.priced(local)
        assert lowered_collectives(source, local) == priced
        assert compiled_collectives(program, local) <= priced
