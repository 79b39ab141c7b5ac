"""The rule table: from the name of a primitive to the factors of an equation. The engines' only door to the rules."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.errors import MissingRuleWarning, UserError, warn
from autopar.ir.graph import Equation, Value
from autopar.ir.rule import Local, Rule
from autopar.ir.same import Signature
from autopar.passes.rules import (
    attention,
    dot,
    elementwise,
    gather,
    layout,
    linalg,
    loops,
    pallas,
    partitioned,
    ragged,
    random,
    reduce,
    slicing,
    windows,
)
from autopar.passes.rules.building import RuleBuilder, replicated
from autopar.passes.rules.omitted import OMITTED

_BUILT_IN: dict[str, RuleBuilder] = {
    **elementwise.RULES,
    **dot.RULES,
    **attention.RULES,
    **pallas.RULES,
    **partitioned.RULES,
    **ragged.RULES,
    **layout.RULES,
    **slicing.RULES,
    **reduce.RULES,
    **gather.RULES,
    **linalg.RULES,
    **random.RULES,
    **windows.RULES,
}
_REGISTERED: dict[str, RuleBuilder] = {}  # by users; these win


def has_rule(name: str) -> bool:
    """Whether the primitive of this name has a rule, built in or registered."""
    return name in _REGISTERED or name in _BUILT_IN


def rule_of(equation: Equation) -> Rule:
    """The rule of an equation; one that replicates where its primitive has none.

    Raises:
        UserError: a registered rule does not fit its equation.
    """
    return _rule_of(equation.signature, _REGISTERED.get(equation.primitive.name), random.is_partitionable())


def without_places(equation: Equation) -> Mapping[str, Any]:
    """The parameters of an equation; the rule's factors instead of those that only say where a piece lies."""
    places = slicing.PLACES.get(equation.primitive.name)
    if places is None:
        return equation.params
    rule = rule_of(equation)
    kept = {name: value for name, value in equation.params.items() if name not in places}
    return {**kept, "factors": (rule.factors, rule.inputs, rule.outputs)}


@functools.lru_cache(maxsize=8192)
def _rule_of(signature: Signature[Equation], registered: RuleBuilder | None, partitionable: bool) -> Rule:
    equation = signature.of
    name = equation.primitive.name
    if registered is None:
        return _BUILT_IN.get(name, replicated)(equation)
    rule = registered(equation)
    if not isinstance(rule, Rule):
        raise UserError(
            f"the sharding rule registered for primitive '{name}' returned {type(rule).__name__} instead of a Rule"
        )
    fault = find_fault(equation, rule)
    if fault is not None:
        raise UserError(f"the sharding rule registered for primitive '{name}' does not fit {equation!r}: {fault}")

    def emit(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """In the types of the user's primitive, which may know no others."""
        given = [jnp.asarray(x, v.dtype) if isinstance(v, Value) else x
                 for x, v in zip(operands, equation.inputs, strict=True)]  # fmt: skip
        return rule.emit(local, dataclasses.replace(eqn, outputs=equation.outputs), given)

    return dataclasses.replace(rule, emit=emit)


_LOOPS = loops.LoopRules(rule_of)
_BUILT_IN.update(_LOOPS.by_primitive)


def find_fault(equation: Equation, rule: Rule) -> str | None:
    """What is wrong with the factors of a rule, in words; None if they describe the equation.

    Every dimension must be the product of its factors (or be mapped to none: size 1), a factor may cut one dimension
    of an array only, and a factor that only operands have must be reduced or whole.
    """
    for kind, maps, arrays in (
        ("operand", rule.inputs, equation.inputs),
        ("result", rule.outputs, equation.outputs),
    ):
        if len(maps) != len(arrays):
            return f"it maps {len(maps)} {kind}s of {len(arrays)}"
        for position, (dims, array) in enumerate(zip(maps, arrays, strict=True)):
            used = [f for dim in dims for f in dim]
            if not all(0 <= f < len(rule.factors) for f in used):
                return f"{kind} {position} uses factors {used} of {len(rule.factors)}"
            sizes = tuple(math.prod(rule.factors[f] for f in dim) for dim in dims)
            if sizes != tuple(array.shape):
                return f"{kind} {position} has shape {tuple(array.shape)}, its factors give {sizes}"
            if len(set(used)) != len(used):
                return f"{kind} {position} uses a factor twice"
    read = {f for dims in rule.inputs for dim in dims for f in dim}
    written = {f for dims in rule.outputs for dim in dims for f in dim}
    unexplained = read - written - set(rule.reduced) - set(rule.unaffected) - rule.whole
    if unexplained:
        return f"factors {sorted(unexplained)} are in no result, so they must be reduced or whole"
    both = {f for f in written & set(rule.reduced) if f not in rule.unaffected}
    if both:
        return f"factors {sorted(both)} are reduced and yet in a result"
    return None


def warn_missing(equations: Iterable[Equation]) -> None:
    """Warn of what runs replicated for want of a rule: once for each primitive and line of the user's code."""
    seen = set()
    for equation in equations:
        place = (equation.primitive.name, equation.source)
        scalar = all(math.prod(x.shape) <= 1 for x in (*equation.inputs, *equation.outputs))
        if place in seen or scalar or not rule_of(equation).replicates:
            continue
        seen.add(place)
        name, source = equation.primitive.name, equation.source or "unknown source"
        if has_rule(name):  # which has looked at this equation: another one would be for all of its kind
            why, remedy = f"nothing in '{name}' can be split", ""
        else:
            why = f"no sharding rule for primitive '{name}'" + (f": {OMITTED[name]}" if name in OMITTED else "")
            remedy = f"; give it a rule with @autopar.register_sharding_rule('{name}')"
        warn(
            f"{why} (from {source}): its operands are gathered and it runs whole on every device{remedy}",
            MissingRuleWarning,
        )


def registered_rules() -> dict[str, RuleBuilder]:
    """Those that users have given, by the primitives' names."""
    return dict(_REGISTERED)


def register_sharding_rule(primitive_name: str) -> Callable[[RuleBuilder], RuleBuilder]:
    """Decorator: give a primitive a rule, or another than the built-in one.

    The decorated function takes an `Equation` and returns its `Rule`.

    Raises:
        UserError: the name is not that of a primitive, or what is decorated is not a function.
    """
    if not isinstance(primitive_name, str) or not primitive_name:
        raise UserError(
            f"register_sharding_rule takes the name of a primitive, such as 'my_kernel', but got {primitive_name!r}: "
            "write @autopar.register_sharding_rule('my_kernel') above the function that makes the rule"
        )

    def register(builder: RuleBuilder) -> RuleBuilder:
        if not callable(builder):
            raise UserError(
                f"the sharding rule of '{primitive_name}' must be a function from an Equation to a Rule, "
                f"but is {builder!r}"
            )
        _REGISTERED[primitive_name] = builder
        _rule_of.cache_clear()
        _LOOPS.forget()
        return builder

    return register
