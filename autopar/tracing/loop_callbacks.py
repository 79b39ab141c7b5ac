"""Callbacks inside a `scan`, such as `jax.debug.print`, taken out of it.

What they are given in each round becomes a further stacked result, with which they are called once the loop is over:
round by round, in the order of the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from autopar.tracing.axis_collectives import scan_counts

# What they are given is whole on one device, after the step has run; they return nothing.
CALLBACKS = frozenset({"debug_callback", "debug_print"})


@dataclasses.dataclass(frozen=True, eq=False)
class LoopCallback:
    """One callback: its operands are literals, or None for what is to be handed in."""

    primitive: Any
    params: Mapping[str, Any]
    operands: tuple[Any, ...]  # core.Literal | None


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """Calls that are made in every round; what is handed in has a leading axis of rounds."""

    length: int
    reverse: bool
    calls: tuple[LoopCallback | Loop, ...]


def calls_back(eqn: Any) -> bool:
    """Whether an equation is a callback, or has one inside."""
    return bool(eqn.effects) and (
        eqn.primitive.name in CALLBACKS
        or any(calls_back(e) for inner in core.jaxprs_in_params(eqn.params) for e in inner.eqns)
    )


class Silenced:
    """A scan without its callbacks."""

    def __init__(self, params: Mapping[str, Any], calls: Mapping[str, str]) -> None:
        self.params, self._calls = params, calls  # `calls` names the parameter that holds what a primitive calls
        self.rounds = Loop(0, False, ())  # known when it has been run

    def run(self, *operands: Any) -> list[Any]:
        """The results of the scan, then what its callbacks are to be given, in order."""
        consts, carries = scan_counts(self.params)
        closed = self.params["jaxpr"]
        seen: list[LoopCallback | Loop] = []

        def one_round(carry: list[Any], xs: list[Any]) -> tuple[list[Any], Any]:
            seen.clear()
            shown: list[Any] = []
            args = (*operands[:consts], *carry, *xs)
            found = _evaluate(closed.jaxpr, closed.consts, args, self._calls, seen, shown)
            return found[:carries], (found[carries:], shown)

        start = [jnp.asarray(x) for x in operands[consts : consts + carries]]
        how = {name: self.params[name] for name in ("length", "reverse", "unroll")}
        end, (ys, shown) = jax.lax.scan(one_round, start, list(operands[consts + carries :]), **how)
        self.rounds = Loop(self.params["length"], self.params["reverse"], tuple(seen))
        return [*end, *ys, *shown]


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], calls: Mapping[str, str], seen: list[LoopCallback | Loop],
    shown: list[Any],
) -> list[Any]:  # fmt: skip
    """A body without its callbacks, its calls inlined: they go to `seen`, what they are given to `shown`."""
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = [read(atom) for atom in eqn.invars]
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
            if name in CALLBACKS:
                literals = tuple(atom if isinstance(atom, core.Literal) else None for atom in eqn.invars)
                seen.append(LoopCallback(eqn.primitive, eqn.params, literals))
                shown += [x for x, literal in zip(operands, literals, strict=True) if literal is None]
                results: Any = []
            elif name in calls:
                body = eqn.params[calls[name]]
                inner, inner_consts = (body.jaxpr, body.consts) if isinstance(body, core.ClosedJaxpr) else (body, ())
                results = _evaluate(inner, inner_consts, operands, calls, seen, shown)
            elif name == "scan" and calls_back(eqn):
                silenced = Silenced(eqn.params, calls)
                found = silenced.run(*operands)
                results, given = found[: len(eqn.outvars)], found[len(eqn.outvars) :]
                seen.append(silenced.rounds)
                shown += given
            else:
                results = eqn.primitive.bind(*operands, **eqn.params)
                results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
