"""What computes the same, wherever it was traced: keys for caches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from jax.extend import core as jex_core

T = TypeVar("T")


class Signature(Generic[T]):
    """Of something: compared by structure, the hash found once. What it compares by identity it keeps alive."""

    __slots__ = ("__weakref__", "_hash", "_structure", "of")

    def __init__(self, of: T, structure: Hashable) -> None:
        self.of = of
        self._structure = structure
        self._hash = hash(structure)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Signature) and self._hash == other._hash and self._structure == other._structure

    def __hash__(self) -> int:
        return self._hash


_known: WeakValueDictionary[Hashable, Signature[Any]] = WeakValueDictionary()


def signature_of(of: T, structure: Hashable) -> Signature[T]:
    """The same object for all that is equal, as long as it is in use: so it is quickly compared."""
    signature = _known.get(structure)
    if signature is None:
        signature = _known[structure] = Signature(of, structure)
    return signature


class _This:
    """Equal to itself only, whatever the object's own equality, or the lack of it."""

    __slots__ = ("_object",)

    def __init__(self, it: Any) -> None:
        self._object = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _This) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)


def program_signature(closed: Any) -> Signature[Any]:
    """Equal for closed jaxprs that compute the same with the same constants."""
    return signature_of(closed, _closed(closed))


def parameters_signature(params: Mapping[str, Any]) -> Hashable:
    """Equal for parameters of an equation that say the same."""
    return tuple([(name, _parameter(value)) for name, value in sorted(params.items())])


def number_signature(value: Any) -> Hashable:
    """Equal for constants of the same bits."""
    array = np.asarray(value)
    return (array.dtype.str, array.shape, array.tobytes())


def _closed(closed: Any) -> Hashable:
    return (_structure(closed.jaxpr), tuple(map(_This, closed.consts)))


def _structure(jaxpr: Any) -> Hashable:
    """Equations with numbered variables."""
    numbers: dict[Any, int] = {}

    def operand(v: Any) -> Hashable:
        if isinstance(v, jex_core.Literal):
            return (str(v.aval), np.asarray(v.val).tobytes())
        return numbers.setdefault(v, len(numbers))

    def variables(values: Sequence[Any]) -> Hashable:
        return tuple([(operand(v), v.aval) for v in values])

    inputs = variables([*jaxpr.constvars, *jaxpr.invars])
    equations = tuple([
        (eqn.primitive, parameters_signature(eqn.params), tuple(map(operand, eqn.invars)), variables(eqn.outvars))
        for eqn in jaxpr.eqns
    ])  # fmt: skip
    return (inputs, equations, tuple(map(operand, jaxpr.outvars)))


def _parameter(value: Any) -> Hashable:
    if isinstance(value, jex_core.ClosedJaxpr):
        return _closed(value)
    if isinstance(value, jex_core.Jaxpr):
        return _structure(value)
    if isinstance(value, tuple | list):
        return (type(value), *map(_parameter, value))
    if isinstance(value, float | complex | bool | np.generic):  # equal to others: 0.0 and -0.0, True and 1
        return (type(value), repr(value))
    try:
        hash(value)
    except TypeError:
        return _This(value)
    hashable: Hashable = value
    return hashable
