"""What a program computes or sends twice, it computes and sends once: XLA would merge it, so the price must know.

Users compute the same table in every layer (rotary angles, masks). Two operations are equal if they are the same
primitive with equal parameters on equal operands, cut alike. Equal equations that are cut differently stay apart, as
do those whose results leave the program, fences, and what is read anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.ir.graph import Equation, Operand, Value
from autopar.ir.local import Accumulate, Compute, LocalOp, Port, Reread, Reshard
from autopar.ir.rule import Rule
from autopar.ir.sharding import Sharding

_Held = tuple[Value, Sharding]


def merge_equal_ops(ops: Sequence[LocalOp], outputs: Iterable[Port], rules: Mapping[int, Rule]) -> tuple[LocalOp, ...]:
    """The operations without those whose results are there already; their readers take these."""
    leaving = {port.value for port in outputs}
    twin: dict[_Held, Value] = {}  # what is not made -> the value that equals it in the same sharding
    made: set[_Held] = set()
    first: dict[Any, Compute] = {}
    kept: list[LocalOp] = []

    def standing_for(v: Value, sharding: Sharding) -> Value:
        return twin.get((v, sharding), v)

    for op in ops:
        if isinstance(op, Accumulate):
            kept.append(dataclasses.replace(op, partial_sum=standing_for(op.partial_sum, op.sharding)))
        elif isinstance(op, Reread):
            after = op.after and (standing_for(*op.after), op.after[1])
            kept.append(dataclasses.replace(op, value=standing_for(op.value, op.sharding), after=after))
            made.add((op.copy, op.sharding))
        elif isinstance(op, Reshard):
            value = standing_for(op.value, op.source)
            if value is not op.value:
                twin[op.value, op.target] = value
            if (value, op.target) not in made:
                made.add((value, op.target))
                kept.append(op if value is op.value else dataclasses.replace(op, value=value))
        else:
            eqn = op.equation
            inputs = tuple(
                standing_for(v, s) if isinstance(v, Value) and s is not None else v
                for v, s in zip(eqn.inputs, op.operands, strict=True)
            )
            key = None if rules[eqn.id].separable or leaving & set(eqn.outputs) else _key(eqn, inputs, op)
            if key is not None and key in first:
                its = first[key].equation.outputs
                twin.update({(v, s): w for v, w, s in zip(eqn.outputs, its, op.results, strict=True)})
                continue
            if any(a is not b for a, b in zip(inputs, eqn.inputs, strict=True)):
                op = dataclasses.replace(op, equation=dataclasses.replace(eqn, inputs=inputs))
            if key is not None:
                first[key] = op
            made.update(zip(eqn.outputs, op.results, strict=True))
            kept.append(op)
    return tuple(kept)


def _key(eqn: Equation, inputs: Sequence[Operand], op: Compute) -> Any:
    """Equal for equal operations; None where parameters cannot be compared."""
    operands = tuple(
        v if isinstance(v, Value) else (str(v.dtype), v.weak_type, np.asarray(v.value).tobytes()) for v in inputs
    )
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    results = tuple((v.shape, v.dtype, v.weak_type) for v in eqn.outputs)
    key = (eqn.primitive, params, operands, op.operands, op.strategy, op.results, results)
    try:
        hash(key)
    except TypeError:
        return None
    return key
