"""Which arguments `static_argnums`, `static_argnames` and `donate_argnums` name, as in `jax.jit`."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autopar.errors import TraceError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positional_names(fun: Callable[..., Any]) -> list[str]:
    """The parameters of a function that can be passed by position, `*args` left out."""
    return [p.name for p in inspect.signature(fun).parameters.values() if p.kind in _POSITIONAL]


def argnums_of(fun: Callable[..., Any], name: str, option: str, given: Any) -> tuple[int, ...]:
    """The numbers of positional arguments, from 0 on or from -1 back: one, several, or None for none.

    Raises:
      TraceError: one is no whole number, or out of range; where a function takes any number of arguments, none is.
    """
    if given is None:
        return ()
    several = given if isinstance(given, Iterable) and not _is_index(given) else (given,)
    numbers = []
    for number in several:
        if not _is_index(number):
            raise TraceError(f"{option} of {name} has {number!r}; it must be numbers of positional arguments.")
        numbers.append(operator.index(number))
    _check_range(fun, name, option, numbers)
    return tuple(numbers)


def _is_index(given: Any) -> bool:
    try:
        operator.index(given)
    except TypeError:
        return False
    return not isinstance(given, bool)


def _check_range(fun: Callable[..., Any], name: str, option: str, numbers: Sequence[int]) -> None:
    try:
        kinds = [p.kind for p in inspect.signature(fun).parameters.values()]
    except (ValueError, TypeError):  # of something built in: nothing is known before it is called
        return
    count = len(positional_names(fun))
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return
    for number in numbers:
        if not -count <= number < count:
            raise TraceError(
                f"{option} of {name} has {number}, but it takes {count} positional arguments"
                + (f": choose from {-count} to {count - 1}." if count else ".")
            )


def check_argnames(fun: Callable[..., Any], name: str, names: Sequence[Any]) -> None:
    """Raise unless all are names of parameters.

    Raises:
      TraceError: one is not, and the function takes no others by name.
    """
    try:
        parameters = inspect.signature(fun).parameters
    except (ValueError, TypeError):
        return
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for given in names:
        if not isinstance(given, str) or not (takes_any or given in parameters):
            raise TraceError(
                f"static_argnames of {name} has {given!r}, but its parameters are {', '.join(parameters) or 'none'}."
            )


def resolved(numbers: Sequence[int], count: int) -> frozenset[int]:
    """The numbers from 0 on of `count` arguments; those of arguments that were not passed are left out."""
    return frozenset(n + count if n < 0 else n for n in numbers if -count <= n < count)
