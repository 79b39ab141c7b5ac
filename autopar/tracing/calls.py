"""The arguments of one call of a step: its leaves, with static arguments apart, and what calls of one program share."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.errors import TraceError
from autopar.tracing.argnums import argnums_of, check_argnames, positional_names, resolved
from autopar.tracing.static_leaf import IsStatic, flatten_arrays, kind_of
from autopar.tracing.trace import call_specs, configuration, name_of


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, static ones apart."""

    leaves: tuple[Any, ...]
    tree: Any  # of (args, kwargs) without the static arguments
    positional: tuple[tuple[int, Any], ...]  # static arguments with their position
    named: tuple[tuple[str, Any], ...]  # static keyword arguments
    key: Any  # equal for calls that one executable serves


class StepFunction:
    """A function and which of its arguments are static or may be overwritten, as `jax.jit` is told.

    Raises:
      TraceError: `static_argnums`, `static_argnames` or `donate_argnums` name no argument of the function.
    """

    def __init__(
        self, fun: Callable[..., Any], *, static_argnums: Any = (), static_argnames: Sequence[str] = (),
        static_leaves: IsStatic = callable, donate_argnums: Any = "auto",
    ) -> None:  # fmt: skip
        self.fun = fun
        self.name = name_of(fun)
        self.is_static = static_leaves
        self._static_argnums = argnums_of(fun, self.name, "static_argnums", static_argnums)
        self._static_argnames = tuple(static_argnames)
        check_argnames(fun, self.name, self._static_argnames)
        self._donate_argnums: tuple[int, ...] | None = None  # whatever comes out again
        if not isinstance(donate_argnums, str) or donate_argnums != "auto":
            self._donate_argnums = argnums_of(fun, self.name, "donate_argnums", donate_argnums)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Take arguments apart.

        Raises:
          TraceError: a static argument is not hashable.
        """
        positional, named = self._static(args, kwargs)
        if positional or named:
            numbers, names = dict(positional), dict(named)
            args = tuple(a for i, a in enumerate(args) if i not in numbers)
            kwargs = {k: v for k, v in kwargs.items() if k not in names}
        leaves, tree = flatten_arrays((args, dict(kwargs)), self.is_static)
        kinds = [kind_of(value) for _, value in (*positional, *named)]
        key = tree, call_specs(leaves), positional, named, tuple(kinds), configuration()
        return Call(tuple(leaves), tree, positional, named, key)

    def bound(self, call: Call) -> Callable[..., Any]:
        """The function of the arguments of a call that are not static."""
        if not call.positional and not call.named:
            return self.fun

        def bound(*args: Any, **kwargs: Any) -> Any:
            full = list(args)
            for i, value in call.positional:
                full.insert(i, value)
            return self.fun(*full, **kwargs, **dict(call.named))

        taken = {i for i, _ in call.positional}
        parameters = list(inspect.signature(self.fun).parameters.values())
        kept = [p for i, p in enumerate(parameters) if i not in taken and p.name not in dict(call.named)]
        bound.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return bound

    def donated(self, call: Call, args_tree: Any, carried: frozenset[int]) -> frozenset[int]:
        """The argument leaves that a step may overwrite: of those asked for the ones that come out again, `carried`.

        `args_tree`: of the positional arguments that are not static.
        """
        if self._donate_argnums is None:
            return carried
        static = {i for i, _ in call.positional}
        count = len(args_tree.children()) + len(static)
        numbers = resolved(self._donate_argnums, count)
        dynamic = [i for i in range(count) if i not in static]
        first = 0
        asked_for: set[int] = set()
        for i, child in zip(dynamic, args_tree.children(), strict=True):
            if i in numbers:
                asked_for.update(range(first, first + child.num_leaves))
            first += child.num_leaves
        return frozenset(asked_for) & carried

    def _static(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[tuple[int, Any], ...], tuple[tuple[str, Any], ...]]:
        """The static arguments by position and by name; as in `jax.jit` either option covers both ways to pass them."""
        if not self._static_argnums and not self._static_argnames:
            return (), ()
        parameters = positional_names(self.fun)
        numbers = resolved(self._static_argnums, max(len(parameters), len(args)))
        numbers |= {parameters.index(name) for name in self._static_argnames if name in parameters}
        names = {parameters[n] for n in numbers if n < len(parameters)} | set(self._static_argnames)
        positional = tuple((i, a) for i, a in enumerate(args) if i in numbers)
        named = tuple(sorted(((k, v) for k, v in kwargs.items() if k in names), key=lambda item: item[0]))
        called = {i: parameters[i] if i < len(parameters) else f"number {i}" for i, _ in positional}
        for which, value in (*((called[i], a) for i, a in positional), *named):
            try:
                hash(value)
            except TypeError as error:
                raise TraceError(
                    f"static argument {which} of {self.name} is {value!r} of type {type(value).__name__}, which is "
                    "not hashable. Pass a hashable value (a tuple for a list), or leave it out of static_argnums and "
                    "static_argnames."
                ) from error
        return positional, named
