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
from jax.extend import core

from autopar.tracing.axis_collectives import scan_counts
from autopar.tracing.interpret import EquationRule, bind_again, literal_value, tracing_interpreter

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
        silencer = _Silencer(self._calls)

        def one_round(carry: list[Any], xs: list[Any]) -> tuple[list[Any], Any]:
            silencer.seen.clear()
            silencer.shown.clear()
            results = silencer.interpreter.function_of(closed)(*operands[:consts], *carry, *xs)
            return results[:carries], (results[carries:], [*silencer.shown])

        start = [jnp.asarray(x) for x in operands[consts : consts + carries]]
        how = {name: self.params[name] for name in ("length", "reverse", "unroll")}
        end, (ys, shown) = jax.lax.scan(one_round, start, list(operands[consts + carries :]), **how)
        self.rounds = Loop(self.params["length"], self.params["reverse"], tuple(silencer.seen))
        return [*end, *ys, *shown]


class _Silencer:
    """Of a body: its callbacks go to `seen`, what they are given to `shown`; calls are inlined."""

    def __init__(self, calls: Mapping[str, str]) -> None:
        self._calls = calls
        self.seen: list[LoopCallback | Loop] = []
        self.shown: list[Any] = []
        rules: dict[str, EquationRule] = {
            **dict.fromkeys(CALLBACKS, self._call_back), **dict.fromkeys(calls, self._call), "scan": self._scan,
        }  # fmt: skip
        self.interpreter = tracing_interpreter(rules, literal_value)

    def _call_back(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        literals = tuple(atom if isinstance(atom, core.Literal) else None for atom in eqn.invars)
        self.seen.append(LoopCallback(eqn.primitive, eqn.params, literals))
        self.shown += [x for x, literal in zip(operands, literals, strict=True) if literal is None]
        return []

    def _call(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return self.interpreter.function_of(eqn.params[self._calls[eqn.primitive.name]])(*operands)

    def _scan(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if not calls_back(eqn):
            return bind_again(eqn, operands)
        silenced = Silenced(eqn.params, self._calls)
        results = silenced.run(*operands)
        self.seen.append(silenced.rounds)
        self.shown += results[len(eqn.outvars) :]
        return results[: len(eqn.outvars)]
