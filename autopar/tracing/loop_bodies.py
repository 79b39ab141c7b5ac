"""The body of a `scan` with its calls inlined, and a `scan` with another body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import source_info_util

from autopar.tracing.build import CALLS, REMAT
from autopar.tracing.interpret import bind_again, literal_value, opened, tracing_interpreter

# From constants, carries and slices to carries and slices.
OneRound = Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]


def scanned(
    params: Mapping[str, Any], one_round: OneRound, operands: Sequence[Any], consts: int, carries: int
) -> list[Any]:
    """What a `scan` with these parameters, so many constants and carries, and another body makes of its operands."""
    fixed, stop = operands[:consts], consts + carries
    end, stacks = jax.lax.scan(
        lambda carry, xs: one_round([*fixed, *carry, *xs]), [*operands[consts:stop]], [*operands[stop:]],
        params["length"], reverse=params["reverse"], unroll=params.get("unroll", 1),
    )  # fmt: skip
    return [*end, *stacks]


def with_all_values(closed: Any, *, opens_checkpoints: bool = False) -> Any:
    """A jaxpr with its calls inlined, whose results are followed by all other values.

    `opens_checkpoints`: those of `jax.checkpoint`, too, behind a barrier as in JAX's own lowering.
    """
    values: list[Any] = []

    def record(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        results = bind_again(eqn, operands)
        values.extend(results)
        return results

    def call(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        params, name = eqn.params, eqn.primitive.name
        body = params.get(CALLS[name])
        if body is None or params.get("sharding_rule") is not None or (name in REMAT and not opens_checkpoints):
            return record(eqn, operands)
        if name in REMAT:
            if params.get("differentiated") and params.get("prevent_cse", True):
                operands = jax.lax.optimization_barrier([*operands])
                values.extend(operands)
            stack = source_info_util.current_name_stack()
            inside = tracing_interpreter(dict.fromkeys(CALLS, call), literal_value, record, stack)
            jaxpr, consts = opened(body)
            return inside.run(jaxpr, consts, operands)
        return interpreter.function_of(body)(*operands)

    interpreter = tracing_interpreter(dict.fromkeys(CALLS, call), literal_value, record)

    def everything(*operands: Any) -> list[Any]:
        results = interpreter.run(closed.jaxpr, closed.consts, operands)
        return [*results, *values]

    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in closed.in_avals]
    return jax.make_jaxpr(everything)(*specs)
