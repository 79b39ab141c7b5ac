"""Attention whose positions are cut (context parallelism): what its pieces send one another.

Each piece has some positions of the queries, and the same of the keys and values. They meet in one of two ways:

1. Heads for positions: all-to-alls give each piece all positions of some heads, and take the results back (Ulysses;
   Jacobs et al. 2023).
2. Keys and values are gathered, and each piece computes its own queries (Grattafiori et al. 2024, section 3.3.2). Under
   a causal mask a late query sees more keys than an early one. Each piece then exchanges halves of its queries with
   others, so that it computes an early and a late part: of 2n parts number i and number 2n - 1 - i.

The first is taken where pieces divide the heads of the keys, and fewer bytes are sent for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from autopar.ir.sharding import StepKind

# How often the gradients of all keys, as they are added up, go through memory where two halves of the queries have one
# each: written by two calls each, of which the second adds its own, and added. Seen in what XLA compiles for an H100.
_ADDING_HALVES = 7

Pairs = tuple[tuple[int, int], ...]  # (from, to), for each piece


class Extent(NamedTuple):
    """A size of a whole array, and the factors that cut it."""

    size: int
    held: frozenset[int]

    def piece(self, cut: Mapping[int, int]) -> int:
        return self.size // math.prod(cut.get(f, 1) for f in self.held)

    def renamed(self, outer: Callable[[frozenset[int]], frozenset[int]]) -> Extent:
        return self._replace(held=outer(self.held))


class Sent(NamedTuple):
    """A collective among pieces."""

    kind: StepKind
    nbytes: int  # payload, as in `Collective`
    packed: int  # bytes read and written around it: pieces that are cut out before, or joined afterwards
    pairs: Pairs = ()  # of a permutation


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Of one attention, or its gradients. All numbers of bytes are those of one position of one head."""

    factor: int  # that cuts the positions
    length: int  # positions
    examples: Extent
    heads: Extent  # of the queries
    shared: Extent  # of the keys and values
    queries: tuple[int, ...]  # what is read of each query: itself and, for gradients, more
    results: tuple[int, ...]  # what is made of each query
    keys: tuple[int, ...]  # the keys and the values
    sums: tuple[tuple[int, int], ...]  # their gradients: bytes as they are, and as they are added up
    masks: tuple[Extent, ...]  # bytes, in all, of the mask and bias that differ from query to query
    bias_sums: tuple[Extent, ...]  # .. of the gradient of such a bias
    is_causal: bool  # a query sees all keys before it, and few after it
    may_exchange_heads: bool
    times: int = 1

    def pieces(self, cut: Mapping[int, int]) -> int:
        return cut.get(self.factor, 1)

    def exchanges_heads(self, cut: Mapping[int, int]) -> bool:
        """Whether heads are exchanged for positions where factors are cut into so many pieces."""
        count = self.pieces(cut)
        if not self.may_exchange_heads or self.shared.piece(cut) % count:
            return False
        exchanged, gathered = (sum(each.nbytes for each in way) for way in (self._exchanged(cut), self._gathered(cut)))
        return exchanged <= gathered

    def sent(self, cut: Mapping[int, int]) -> list[Sent]:
        """The collectives, in the order in which they are made."""
        if self.pieces(cut) == 1:
            return []
        return self._exchanged(cut) if self.exchanges_heads(cut) else self._gathered(cut)

    def temporaries(self, cut: Mapping[int, int]) -> int:
        """Bytes of one piece that are held for it beyond operands and results."""
        if self.pieces(cut) == 1:
            return 0
        if self.exchanges_heads(cut):
            return sum(sent.nbytes for sent in self._exchanged(cut))
        whole = self.examples.piece(cut) * self.length * self.shared.piece(cut)
        return whole * (sum(self.keys) + sum(wide for _, wide in self.sums))

    def halves(self, cut: Mapping[int, int]) -> tuple[int, int]:
        """How many of a piece's positions are in its first and in its second half; none in the second: no halves."""
        own = self.length // self.pieces(cut)
        return (own - own // 2, own // 2) if self.is_causal else (own, 0)

    def inside(self, factor: int, outer: Callable[[frozenset[int]], frozenset[int]], times: int) -> ContextParallel:
        """The same in the body of an equation, in whose factors it is told; `outer` names them."""
        return dataclasses.replace(
            self, factor=factor, times=self.times * times, examples=self.examples.renamed(outer),
            heads=self.heads.renamed(outer), shared=self.shared.renamed(outer),
            masks=tuple(each.renamed(outer) for each in self.masks),
            bias_sums=tuple(each.renamed(outer) for each in self.bias_sums),
        )  # fmt: skip

    def _exchanged(self, cut: Mapping[int, int]) -> list[Sent]:
        own = self.examples.piece(cut) * self.length // self.pieces(cut)
        of_heads, of_shared = own * self.heads.piece(cut), own * self.shared.piece(cut)
        sizes = [of_heads * n for n in (*self.queries, *self.results)]
        sizes += [of_shared * n for n in (*self.keys, *(narrow for narrow, _ in self.sums))]
        return [Sent("all_to_all", n, 4 * n) for n in sizes]

    def _gathered(self, cut: Mapping[int, int]) -> list[Sent]:
        examples, count, own = self.examples.piece(cut), self.pieces(cut), self.length // self.pieces(cut)
        of_shared, of_heads = (
            examples * self.length * self.shared.piece(cut),
            examples * own * self.heads.piece(cut),
        )
        several = 2 if examples > 1 else 0  # of several examples pieces lie apart
        sent = [Sent("all_gather", of_shared * n, several * of_shared * n) for n in self.keys]
        first, second = self.halves(cut)
        if second:
            there = [of_heads * n for n in self.queries] + [each.piece(cut) for each in self.masks]
            back = [of_heads * n for n in self.results] + [each.piece(cut) for each in self.bias_sums]
            for part, pairs in zip((first, second), halves_to(count), strict=True):
                if any(i != j for i, j in pairs):
                    ways = [(n, pairs) for n in there] + [(n, reverse(pairs)) for n in back]
                    sent += [Sent("permute", n // own * part, 4 * (n // own * part), way) for n, way in ways]
        adding = several + (_ADDING_HALVES if second else 0)
        return [*sent, *(Sent("reduce_scatter", n := of_shared * wide, adding * n) for _, wide in self.sums)]


@functools.cache
def halves_to(count: int) -> tuple[Pairs, Pairs]:
    """Where the first and the second half of each piece go, so that piece i has parts i and 2 * count - 1 - i of all.

    What comes of the first halves is a part of even number, what comes of the second one of odd number.
    """

    def to(part: int) -> int:
        return part if part < count else 2 * count - 1 - part

    return tuple((i, to(2 * i)) for i in range(count)), tuple((i, to(2 * i + 1)) for i in range(count))


def reverse(pairs: Pairs) -> Pairs:
    """The way back."""
    return tuple((j, i) for i, j in pairs)
