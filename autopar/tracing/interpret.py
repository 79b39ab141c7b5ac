"""The one loop over the equations of a jaxpr; what an equation becomes is told by a table of rules.

What values are is the caller's: traced arrays, arrays batched along named axes, or operands of our own graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend import core, source_info_util

# (equation, operands) -> results. Of an equation of a jaxpr; operands are what the interpreter's values are.
EquationRule = Callable[[Any, Sequence[Any]], Sequence[Any]]


class Interpreter:
    """Applies jaxprs to values, by `rules` for some primitives, and `default` for all others."""

    def __init__(self, rules: Mapping[str, EquationRule], default: EquationRule, literal: Callable[[Any], Any]) -> None:
        """`literal`: the value of a `core.Literal`."""
        self.rules, self.default, self.literal = rules, default, literal

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results; consts are values already."""
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return self.literal(atom) if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            rule = self.rules.get(eqn.primitive.name, self.default)
            env.update(zip(eqn.outvars, rule(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def function_of(self, body: Any) -> Callable[..., list[Any]]:
        """What a body computes, closed or not."""
        jaxpr, consts = opened(body)
        return lambda *args: self.run(jaxpr, consts, args)


def opened(body: Any) -> tuple[Any, Sequence[Any]]:
    """A body that is closed or not as a jaxpr and its constants."""
    return (body.jaxpr, body.consts) if isinstance(body, core.ClosedJaxpr) else (body, ())


def bind_again(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """The same primitive on traced arrays."""
    results = eqn.primitive.bind(*operands, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def literal_value(atom: Any) -> Any:
    """What a literal of a jaxpr is."""
    return atom.val


def tracing_interpreter(
    rules: Mapping[str, EquationRule], literal: Callable[[Any], Any], default: EquationRule = bind_again,
    stack: Any = None,
) -> Interpreter:  # fmt: skip
    """An interpreter of traced arrays, which by default binds primitives without a rule again.

    What it makes is of the line and name stack of the equation that it is made for, in `stack` if that is given.
    `literal`: see `Interpreter`.
    """
    at_their_lines = {name: _at_its_line(rule, stack) for name, rule in rules.items()}
    return Interpreter(at_their_lines, _at_its_line(default, stack), literal)


def _at_its_line(rule: EquationRule, stack: Any) -> EquationRule:
    """A rule whose results are of the equation's line and name stack."""

    def run(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        own = eqn.source_info.name_stack
        name_stack = own if stack is None else stack + own
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack):
            return rule(eqn, operands)

    return run
