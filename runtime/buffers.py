"""Which arrays have buffers in common: what is given away must have its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax


class Buffers:
    """Finds shared buffers, and remembers arrays of which none shares one with another.

    To ask a fresh array of many devices for its buffers takes longer than to run it through a step.
    """

    def __init__(self) -> None:
        self._remembered: Sequence[weakref.ref[jax.Array]] = ()
        self._own: dict[int, weakref.ref[jax.Array]] | None = {}  # by their ids; None: not made yet

    def shared(self, leaves: Sequence[Any], in_place: Sequence[int], given: Set[int]) -> Set[int]:
        """The leaves that have to be copied lest a buffer of another is given away.

        `in_place`: those that programs take as they are; `given`: those that may be given away. Of several that share a
        buffer and may all be given away, the first is left out.
        """
        found = _met_again({at: id(leaf) for at, leaf in enumerate(leaves)}, given)
        if not all(self._is_known(leaves[at]) for at in in_place):
            found |= _met_again({at: _buffer(leaves[at]) for at in in_place}, given)
        return found

    def remember(self, arrays: Sequence[weakref.ref[jax.Array]]) -> None:
        """These have buffers of their own; what was remembered before is forgotten."""
        self._remembered, self._own = arrays, None

    def _is_known(self, leaf: jax.Array) -> bool:
        if self._own is None:
            self._own = {id(x): ref for ref in self._remembered if (x := ref()) is not None}
        known = self._own.get(id(leaf))
        return known is not None and known() is leaf


def _met_again(buffers: Mapping[int, int], given: Set[int]) -> Set[int]:
    first_of: dict[int, int] = {}
    found = set()
    for at, buffer in buffers.items():
        first = first_of.setdefault(buffer, at)
        if first != at:
            found.add(at if at in given else first)
    return found & given


def _buffer(leaf: jax.Array) -> int:
    """Equal for arrays that have a buffer on their first device in common."""
    try:
        return int(leaf.addressable_data(0).unsafe_buffer_pointer())
    except RuntimeError:  # of a backend that does not tell
        return id(leaf)
