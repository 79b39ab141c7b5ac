"""Which values XLA for GPUs puts into memory, and which it computes anew in every kernel that reads them.

A model of its priority fusion. At first every equation is a kernel. Again and again the kernel whose result is best
computed inside all of its readers is: that which saves most seconds, by bytes through memory, operations and launches
as XLA's performance model counts them. A kernel that would not save any stays, and its result goes through memory. So
a chain is one kernel, what is cheap is made again, and a sum that many read is not.

What reduces columns in one step has a block of threads for some of them each, and reads what is broadcast for every
point. Where there are few blocks, it computes and reads at their speed.

Rows that are reduced and then combined with what they were reduced of, as a softmax does, are one kernel, which goes
through them once (XLA's normalization fusions) unless they are too long: what it makes can be made again in kernels of
the same kind.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.ir.graph import Equation, Value
from autopar.ir.rule import FUNCTION, Rule, is_reduction, reduced_dims

MOST_OPERANDS = 64  # of one kernel; XLA has such a limit too
# Elements that one kernel reduces at once; see XLA's tree reductions.
MOST_IN_A_ROW = 16384
MOST_IN_A_COLUMN = 4096
# What XLA's performance model takes for an H100, in bytes that memory moves in the same time.
_LAUNCH = 3.3e6  # of a microsecond, which a kernel takes to start
_OPERATION = 0.066  # of one cycle of a multiprocessor's lanes
_CYCLES = 7.0  # of a sum or a product; comparisons, choices and conversions take one
_CYCLES_OF_A_FUNCTION = 20.0  # by operation of a transcendental function
_OVERLAP = 0.95  # of the shorter one of computing and moving
_MULTIPROCESSORS = 132  # each computes for one block of a kernel
_BLOCKS = 52.9  # of a kernel that together read as fast as memory is, 32 bytes a cycle each
# How much faster what was read before is read again, by the most bytes of an array for it: from the caches.
_CACHES = ((33.8e6, 20.0), (50e6, 2.5), (math.inf, 1.0))
_WARP = 32  # threads, which read vectors of neighbouring columns


def computed_anew(
    equations: Sequence[Equation],
    rules: Mapping[int, Rule],
    stored: Collection[Value],
    views: Mapping[Value, Value],
    shapes: Mapping[Value, tuple[int, ...]],
) -> set[int]:
    """The numbers of the equations whose results are computed in their readers.

    Args:
      equations: a program.
      rules: theirs.
      stored: what is in memory in any case.
      views: of values that are others in another order or shape, what they are views of.
      shapes: of values that are in pieces, those of a device's piece.
    """
    queue = _Queue(equations, rules, stored, views, shapes)
    queue.run()
    return queue.gone


class _Queue:
    """Kernels by number: that of the equation that makes their result. Inputs have negative numbers."""

    def __init__(
        self, equations: Sequence[Equation], rules: Mapping[int, Rule], stored: Collection[Value],
        views: Mapping[Value, Value], shapes: Mapping[Value, tuple[int, ...]],
    ) -> None:  # fmt: skip
        self._shapes = shapes
        self._sizes: dict[Value, int] = {}
        self.gone: set[int] = set()
        number: dict[Value, int] = {}
        self.reads: dict[int, dict[int, None]] = {}
        self.users: dict[int, dict[int, None]] = {}
        self.nbytes: dict[int, float] = {}  # of a result
        self.itemsize: dict[int, float] = {}
        self.elements: dict[int, float] = {}  # of a result
        self.points: dict[int, float] = {}  # through which a kernel goes
        self.work: dict[int, float] = {}  # cycles
        self.fusible: set[int] = set()
        self.takes: set[int] = set()  # kernels that compute what they read
        self.rows: set[int] = set()  # kernels that go through rows, and reduce them in between
        self.plain: set[int] = set()  # kernels that could: these go through rows in order
        self.sums: set[int] = set()  # kernels whose result is one number a row
        self.columns: dict[int, tuple[int, int]] = {}  # of kernels that reduce columns: outer and inner ones
        inputs = 0
        for k, eqn in enumerate(equations):
            rule = rules[eqn.id]
            if all(v in views for v in eqn.outputs):
                continue
            operands: dict[int, None] = {}
            for v in eqn.values:
                v = views.get(v, v)
                n = number.get(v)
                if n is None:
                    inputs -= 1
                    n = number[v] = inputs
                    self._result(n, [v])
                operands[n] = None
                self.users[n][k] = None
            number.update(dict.fromkeys(eqn.outputs, k))
            self.reads[k] = operands
            self._result(k, eqn.outputs)
            reduces = is_reduction(eqn, rule)
            loop = eqn.values if reduces else eqn.outputs
            self.points[k] = max((self._size(v) for v in loop), default=0.0)
            self.work[k] = _cycles(eqn, rule) * self.points[k] if operands or self.elements[k] > 1 else 0.0
            if rule.is_fusible:
                self.takes.add(k)
                if not any(v in stored for v in eqn.outputs):
                    self.fusible.add(k)
                if not rule.whole:
                    self.plain.add(k)
            elif reduces:
                self.takes.add(k)
                if _reduces_rows(rule) and self.points[k] <= MOST_IN_A_ROW * self.elements[k]:
                    self.plain.add(k)
                    self.sums.add(k)
                elif (columns := _columns(rule, self._shape(eqn.values[0]))) is not None:
                    self.columns[k] = columns
            elif rule.aliases:
                self.takes.add(k)
        self.moved = {k: sum(self._read(n, k) for n in reads) + self.nbytes[k] for k, reads in self.reads.items()}
        self.seconds = {k: self._seconds(k, reads, self.work[k], self.moved[k]) for k, reads in self.reads.items()}

    def _shape(self, value: Value) -> tuple[int, ...]:
        return self._shapes.get(value, value.shape)

    def _size(self, value: Value) -> int:
        """How many elements there are."""
        size = self._sizes.get(value)
        if size is None:
            size = self._sizes[value] = math.prod(self._shape(value))
        return size

    def _result(self, k: int, values: Sequence[Value]) -> None:
        self.users[k] = {}
        sizes = [self._size(v) for v in values]
        self.nbytes[k] = float(sum([v.itemsize * size for v, size in zip(values, sizes, strict=True)]))
        self.elements[k] = float(max(sizes, default=0))
        self.itemsize[k] = self.nbytes[k] / max(1.0, self.elements[k])

    def _read(self, n: int, k: int) -> float:
        """Bytes that kernel k reads of n."""
        return min(self.nbytes[n], self.itemsize[n] * self.points[k])

    def _saved_by(self, p: int, c: int) -> float:
        """By computing p in its reader c, beside what p costs itself; -inf if that cannot be."""
        if c not in self.takes or (p in self.rows and not self._takes_rows(c, p)):
            return -math.inf
        own, reads = self.reads[p], self.reads[c]
        new = [n for n in own if n not in reads]
        if len(reads) + len(new) > MOST_OPERANDS:
            return -math.inf
        points, nbytes, itemsize = self.points[c], self.nbytes, self.itemsize
        moved = self.moved[c] - self._read(p, c)
        for n in new:  # what is read of it, without a call for each: this is done for each pair of kernels
            read = itemsize[n] * points
            moved += read if read < nbytes[n] else nbytes[n]
        work = self.work[c] + self.work[p] / max(1.0, self.elements[p]) * points
        if c not in self.columns:
            return self.seconds[c] - _seconds(work, moved)
        return self.seconds[c] - self._seconds(c, [n for n in reads if n != p] + new, work, moved)

    def _seconds(self, k: int, reads: Collection[int], work: float, moved: float) -> float:
        """Of a kernel, in bytes. One that reduces columns goes by its blocks, whatever is `moved` otherwise."""
        if k not in self.columns:
            return _seconds(work, moved)
        outer, inner = self.columns[k]
        vector = _vector(inner, min((self.itemsize[n] for n in reads), default=4.0))
        blocks = outer * math.ceil(inner / (_WARP * vector))
        fastest, moving = blocks / _BLOCKS, self.nbytes[k]
        for n in reads:
            read, whole = self._read(n, k), self.itemsize[n] * self.points[k]
            reread = next(times for most, times in _CACHES if read < most)
            moving += read / min(1.0, fastest) + (whole - read) / min(reread, fastest)
        return _seconds(work * max(1.0, _MULTIPROCESSORS / blocks), moving)

    def _takes_rows(self, c: int, p: int) -> bool:
        return c in self.plain and self.points[c] == self.points[p]

    def _join_rows(self) -> None:
        """Fuse what is reduced into what combines it with what it is reduced of."""
        for r in sorted(self.sums):
            path, at = [r], self._only_user(r)
            while at is not None and at in self.fusible and self.points[at] == self.elements[r]:
                path.append(at)
                at = self._only_user(at)
            if at is None or at not in self.plain or at in self.sums or self.points[at] != self.points[r]:
                continue
            if self._origins(r) & {n for operand in self.reads[at] for n in self._origins(operand)}:
                for p in path:
                    self._fuse(p, 1.0)
                self.rows.add(at)

    def _only_user(self, k: int) -> int | None:
        users = self.users[k]
        return next(iter(users)) if len(users) == 1 else None

    def _origins(self, k: int) -> set[int]:
        """What is before a chain of kernels that each have one operand and one reader, the links included."""
        origins = {k}
        while k in self.reads and len(self.reads[k]) == 1 and (k in self.fusible or k in self.sums):
            (k,) = self.reads[k]
            origins.add(k)
            if len(self.users[k]) > 1:
                break
        return origins

    def _fuse(self, p: int, times: float | None = None) -> None:
        """Compute p in its readers, so often for each; else once for each point that they go through."""
        own, work = self.reads[p], self.work[p] / max(1.0, self.elements[p])
        for c in self.users[p]:
            reads = self.reads[c]
            self.moved[c] -= self._read(p, c)
            del reads[p]
            for n in own:
                if n not in reads:
                    reads[n] = None
                    self.users[n][c] = None
                    self.moved[c] += self._read(n, c)
            self.work[c] += work * self.points[c] if times is None else times * self.work[p]
            self.seconds[c] = self._seconds(c, reads, self.work[c], self.moved[c])
            if p not in self.plain:
                self.plain.discard(c)
            if p in self.rows:
                self.rows.add(c)
                if c in self.sums and len(self.users[c]) == 1:
                    self.fusible.add(c)
        for n in own:
            del self.users[n][p]
        self.gone.add(p)

    def run(self) -> None:
        self._join_rows()
        by_user: dict[int, dict[int, float]] = {}
        total: dict[int, float] = {}  # of what is finite
        never: dict[int, int] = {}  # users that cannot compute it
        rank: dict[int, float] = {}
        heap: list[tuple[float, int]] = []

        def forget(p: int, c: int) -> None:
            saved = by_user[p].pop(c, None)
            if saved == -math.inf:
                never[p] -= 1
            elif saved is not None:
                total[p] -= saved

        def note(p: int, c: int) -> None:
            forget(p, c)
            saved = by_user[p][c] = self._saved_by(p, c)
            if saved == -math.inf:
                never[p] += 1
            else:
                total[p] += saved

        def note_all(p: int) -> None:
            by_user[p], total[p], never[p] = {}, 0.0, 0
            for c in self.users[p]:
                note(p, c)

        def put(p: int) -> None:
            saved = _LAUNCH + self.seconds[p] + total[p]
            if never[p] or not self.users[p]:
                saved = -1.0
            if rank.get(p) != saved:
                rank[p] = saved
                if saved >= 0:
                    heapq.heappush(heap, (-saved, p))

        for p in sorted(self.fusible - self.gone):
            note_all(p)
            put(p)
        while heap:
            saved, p = heapq.heappop(heap)
            if p in self.gone or rank[p] != -saved:
                continue
            own, users = self.reads[p], self.users[p]
            self._fuse(p)
            changed = {n: None for n in own if n in by_user}
            for n in changed:
                forget(n, p)
            for c in users:
                for n in self.reads[c]:
                    if n in by_user:
                        note(n, c)
                        changed[n] = None
            for c in users:
                if c in self.fusible:
                    note_all(c)
                    changed[c] = None
            for n in changed:
                put(n)


def _reduces_rows(rule: Rule) -> bool:
    reduced = reduced_dims(rule)
    return reduced[-1:] == [True] and reduced == sorted(reduced)


def _columns(rule: Rule, shape: Sequence[int]) -> tuple[int, int] | None:
    """Of what one kernel reduces along neighbouring dimensions: how many elements there are before, and after.

    Fewer than a warp of columns are reduced otherwise.
    """
    long = [k for k, is_reduced in enumerate(reduced_dims(rule)) if is_reduced and shape[k] > 1]
    if not long or math.prod(shape[k] for k in long) > MOST_IN_A_COLUMN:
        return None
    if any(shape[k] > 1 for k in range(long[0], long[-1]) if k not in long):
        return None
    outer, inner = math.prod(shape[: long[0]]), math.prod(shape[long[-1] + 1 :])
    return (outer, inner) if outer and inner >= _WARP else None


def _vector(columns: int, itemsize: float) -> int:
    """How many columns a thread reads at once."""
    if columns % (2 * _WARP) or itemsize >= 8:
        return 1
    return 4 if itemsize < 4 and columns % (4 * _WARP) == 0 else 2


def _cycles(eqn: Equation, rule: Rule) -> float:
    """For each point."""
    if rule.flops >= FUNCTION:
        return rule.flops * _CYCLES_OF_A_FUNCTION
    computes = len(eqn.inputs) > 1 and all(_is_inexact(x.dtype) for x in (*eqn.inputs, *eqn.outputs))
    return rule.flops * (_CYCLES if computes else 1.0)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _seconds(work: float, moved: float) -> float:
    """In bytes."""
    computing = work * _OPERATION
    return computing + moved - _OVERLAP * (computing if computing < moved else moved)
