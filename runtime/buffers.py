"""Arrays that are remembered, and which of them have buffers in common: what is given away must have its own."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax


class References:
    """Remembers arrays: small ones by themselves, others by weak references, so that the caller can let go of them.

    To make weak references to a thousand arrays takes a part of the time of a call with them that shows.
    """

    SMALL = 1 << 14  # bytes of an array

    def __init__(self, small: Sequence[jax.Array], others: Iterable[jax.Array]) -> None:
        self._small = small
        self._others = list(map(weakref.ref, others))

    def are(self, small: Sequence[Any], others: Sequence[Any]) -> bool:
        """Whether these are the same in the same order."""
        return all(map(operator.is_, self._small, small)) and all(
            map(operator.is_, map(operator.call, self._others), others)
        )

    def by_id(self) -> dict[int, weakref.ref[jax.Array]]:
        """All that are still there, by their ids."""
        there = [x for ref in self._others if (x := ref()) is not None]
        return {id(x): weakref.ref(x) for x in (*self._small, *there)}


class Buffers:
    """Finds shared buffers, and remembers arrays of which none shares one with another.

    To ask a fresh array of many devices for its buffers takes longer than to run it through a step.
    """

    def __init__(self) -> None:
        self._remembered = References((), ())
        self._own: dict[int, weakref.ref[jax.Array]] | None = None  # by their ids; None: not made yet

    def shared(self, leaves: Sequence[Any], in_place: Sequence[int], given: Set[int]) -> Set[int]:
        """The leaves that have to be copied lest a buffer of another is given away.

        `in_place`: those that programs take as they are; `given`: those that may be given away. Of several that share a
        buffer and may all be given away, the first is left out.
        """
        shared = _met_again({at: id(leaf) for at, leaf in enumerate(leaves)}, given)
        if not all(self._is_known(leaves[at]) for at in in_place):
            shared |= _met_again({at: _buffer(leaves[at]) for at in in_place}, given)
        return shared

    def remember(self, arrays: References) -> None:
        """These have buffers of their own; what was remembered before is forgotten."""
        self._remembered, self._own = arrays, None

    def _is_known(self, leaf: jax.Array) -> bool:
        if self._own is None:
            self._own = self._remembered.by_id()
        known = self._own.get(id(leaf))
        return known is not None and known() is leaf


def _met_again(buffers: Mapping[int, int], given: Set[int]) -> Set[int]:
    first_of: dict[int, int] = {}
    repeated = set()
    for at, buffer in buffers.items():
        first = first_of.setdefault(buffer, at)
        if first != at:
            repeated.add(at if at in given else first)
    return repeated & given


def _buffer(leaf: jax.Array) -> int:
    """Equal for arrays that have a buffer on their first device in common."""
    try:
        return int(leaf.addressable_data(0).unsafe_buffer_pointer())
    except RuntimeError:  # of a backend that does not tell
        return id(leaf)
