"""What is only gathered to be narrowed is narrowed first, under any choice of strategies."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.graph import Value
from autopar.ir.local import Compute, LocalProgram, Reshard
from tests import models
from tests.planned import analyse, compiled_collectives, lowered_collectives
from tests.random_plans import plan_by_lot

WIDTHS = (16, 32, 32, 8)


def loss(params: Any, batch: Any) -> Any:
    """In 16 bits, of parameters in 32."""
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
    return models.mlp_loss(params, batch).astype(jnp.float32)


def narrowings(local: LocalProgram) -> dict[Value, Value]:
    """Operands in 32 bits and results in 16 of the program's conversions."""
    return {
        v: op.equation.outputs[0]
        for op in local.ops
        if isinstance(op, Compute) and str(op.equation.primitive) == "convert_element_type"
        and op.equation.outputs[0].dtype == jnp.bfloat16
        and isinstance(v := op.equation.inputs[0], Value) and v.dtype == jnp.float32
    }  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "seeds"), [((2, 2), range(4)), ((2, 4), range(4, 7))])
def test_what_is_gathered_to_be_narrowed_is_narrowed_first(shape: tuple[int, ...], seeds: range) -> None:
    step = models.sgd(loss)
    params, batch = models.mlp_params(WIDTHS), models.mlp_batch(32, WIDTHS)
    expected = jax.tree.leaves(jax.jit(step)(params, batch))
    analysis = analyse(step, params, batch)
    sent_narrow = 0
    for seed in seeds:
        planned = plan_by_lot(analysis, shape, 1, 1, np.random.default_rng(seed))
        executable = planned.build(jax.devices())
        for source, local, program in zip(
            executable.sources, planned.lowered.programs, executable.programs, strict=True
        ):
            found = narrowings(local)
            readers = {v: [e for e in local.program.equations if v in e.inputs] for v in found}
            kinds: dict[Value, set[str]] = defaultdict(set)
            for op in local.ops:
                if isinstance(op, Reshard):
                    kinds[op.value].update(step.kind for step in op.steps)
            for v, w in found.items():
                if len(readers[v]) == 1 and v not in local.program.outputs:
                    assert kinds[v] != {"all_gather"}
                sent_narrow += bool(kinds[w])
            assert lowered_collectives(source, local) == planned.priced(local)
            assert compiled_collectives(program, local).total() <= planned.priced(local).total()
        outputs = executable(jax.tree.leaves((params, batch)))
        for output, reference in zip(outputs, expected, strict=True):
            assert np.asarray(output) == pytest.approx(np.asarray(reference), rel=2e-2, abs=2e-2)
    assert sent_narrow
