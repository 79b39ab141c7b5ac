"""The order in which XLA for GPUs runs a program's kernels, and the buffers that are live then.

XLA forgets the order in which a program was written, barriers aside (`OptimizationBarrierExpander` runs later):

1. Collectives of one kind that do not need one another become one, in post order, up to a size of results
   (`CombineInstructionsByKey`).
2. Three orders are tried, and the one that holds least is taken (`DefaultMemoryScheduler`): greedily the kernel that
   frees most beyond what it makes; depth first, operands with most readers before them first; depth first as written.
3. Where there are collectives, to run beside other kernels (`LatencyHidingScheduler`, from the end on), what leads to
   nothing but sums over devices and results waits until a sum needs it, or the end: products that give gradients of
   parameters wait for the sum that theirs is part of, and what they read is held until then. What makes no more than a
   number, as the loss is, does not wait: much of it is computed along with what else reads the same.

The names are those of XLA's passes. The third is a likeness of theirs: which of several kernels that can wait it takes
first follows from estimated seconds. A rule by the bytes that each holds fits some programs better, more of them worse.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

_MOST_COMBINED = 256  # collectives that become one
_NUMBER = 16  # bytes, at most


@dataclasses.dataclass(frozen=True)
class Combining:
    """Collectives with equal keys may become one."""

    key: Hashable
    sums: bool


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What runs at once."""

    reads: tuple[int, ...]  # buffers
    makes: tuple[int, ...]
    held: int = 0  # bytes, besides, while it runs
    places: tuple[tuple[int, int], ...] = ()  # results that lie where an operand does that nothing else reads after it
    combining: Combining | None = None
    last: bool = False  # after all others


class Kernels:
    """The kernels of a program, told in its order, with values by any key.

    A value lies in a buffer, or is computed in each kernel that reads it, from buffers; what was not told is there
    without any.
    """

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.sizes: list[int] = []  # bytes of each buffer
        self.values: list[Hashable] = []  # what it is for
        self.leaving: list[int] = []  # buffers that are there to the end
        self._at: dict[Hashable, tuple[int, ...]] = {}

    def buffers(self, values: Iterable[Hashable]) -> tuple[int, ...]:
        """What is read to have these values."""
        return tuple(dict.fromkeys(buffer for value in values for buffer in self._at.get(value, ())))

    def fuse(self, value: Hashable, reads: tuple[int, ...]) -> None:
        """The value is computed wherever it is read, from these buffers."""
        self._at[value] = reads

    def run(
        self, reads: Iterable[Hashable], makes: Sequence[tuple[Hashable, int]], *, held: int = 0,
        places: Mapping[Hashable, Hashable] | None = None, combining: Combining | None = None, last: bool = False,
    ) -> None:  # fmt: skip
        """A kernel that makes values of so many bytes, some in the places of others."""
        made = range(len(self.sizes), len(self.sizes) + len(makes))
        lie = [
            (buffer, taken[0])
            for (value, _), buffer in zip(makes, made, strict=True)
            if places is not None and value in places and len(taken := self.buffers([places[value]])) == 1
        ]
        self.sizes += [nbytes for _, nbytes in makes]
        self.values += [value for value, _ in makes]
        self.kernels.append(Kernel(self.buffers(reads), tuple(made), held, tuple(lie), combining, last))
        self._at.update({value: (buffer,) for (value, _), buffer in zip(makes, made, strict=True)})

    def fence(self, pairs: Iterable[tuple[Hashable, Hashable]], after: Iterable[Hashable] = ()) -> None:
        """Pairs of names of one buffer, the first for readers that wait until all of them are there."""
        pairs = list(pairs)
        here = [self.buffers([value]) for _, value in pairs]
        token = len(self.sizes)
        self.sizes.append(0)
        self.values.append(None)
        self.kernels.append(Kernel(self.buffers([*(value for _, value in pairs), *after]), (token,)))
        self._at.update({name: (*taken, token) for (name, _), taken in zip(pairs, here, strict=True)})

    def run_rounds(
        self, reads: Iterable[Hashable], makes: Sequence[tuple[Hashable, int]], places: Mapping[int, Hashable | None],
        held: int = 0,
    ) -> None:  # fmt: skip
        """A loop: results lie, by their numbers, where the carry did, or are filled, which XLA begins with zeros."""
        begun: dict[Hashable, Hashable] = {}
        for k, place in places.items():
            value, nbytes = makes[k]
            begun[value] = place
            if place is None or not self.buffers([place]):
                begun[value] = (value, "begun")
                self.run([], [(begun[value], nbytes)])
                self.values[-1] = value
        self.run([*reads, *begun.values()], makes, held=held, places=begun)

    def leave(self, value: Hashable) -> None:
        """The value is a result."""
        self.leaving += self.buffers([value])


@dataclasses.dataclass(frozen=True)
class Live:
    """The buffers that kernels make, in the order in which these run."""

    order: tuple[Kernel, ...]
    ranges: dict[int, tuple[int, int]]  # buffer -> positions in the order between which it is live


def live(told: Kernels, *, combined: int = 0, late: bool = False) -> Live:
    """The order of the kernels; see the module.

    Args:
      told: the program.
      combined: bytes of results up to which collectives become one; 0: none do.
      late: whether collectives run beside other kernels, so that what only sums over devices need waits for them.
    """
    kernels, leaving = list(told.kernels), set(told.leaving)
    if combined:
        kernels = _combine(kernels, told, combined)
    graph = _Graph(kernels, told.sizes, told.leaving)
    orders = (_greedy(graph), _deepest_first(graph), graph.post_order())
    order = min(orders, key=lambda order: _most(graph, _ranges(graph, order), order))
    if late and any(kernel.combining for kernel in kernels):
        order = _late(graph, order)
    ranges = _ranges(graph, order)
    count = len(order)
    return Live(
        tuple(kernels[i] for i in order), {b: (at, count if b in leaving else end) for b, (at, end) in ranges.items()}
    )


class _Graph:
    def __init__(self, kernels: Sequence[Kernel], sizes: Sequence[int], leaving: Sequence[int]) -> None:
        self.kernels, self.sizes, self.leaving = kernels, sizes, leaving
        self.maker = {buffer: i for i, kernel in enumerate(kernels) for buffer in kernel.makes}
        self.readers: list[list[int]] = [[] for _ in sizes]  # of each buffer
        for i, kernel in enumerate(kernels):
            for buffer in kernel.reads:
                self.readers[buffer].append(i)
        made = [[self.maker[b] for b in kernel.reads if b in self.maker] for kernel in kernels]
        self.before = [list(dict.fromkeys(makers)) for makers in made]

    def post_order(self, first: Callable[[int], tuple[int, ...]] | None = None) -> list[int]:
        """Kernels after those that they need, from the results on; `first` sorts what one needs."""
        before = self.before if first is None else [sorted(each, key=first) for each in self.before]
        found: list[int] = []
        seen = bytearray(len(self.kernels))  # 1: begun, 2: done
        for root in [*(self.maker[b] for b in self.leaving if b in self.maker), *range(len(self.kernels))]:
            todo = [root]
            while todo:
                i = todo[-1]
                if not seen[i]:
                    seen[i] = 1
                    todo += [k for k in reversed(before[i]) if not seen[k]]
                    continue
                todo.pop()
                if seen[i] == 1:
                    seen[i] = 2
                    found.append(i)
        return found


def _combine(kernels: Sequence[Kernel], told: Kernels, most: int) -> list[Kernel]:
    graph = _Graph(kernels, told.sizes, told.leaving)
    groups: list[list[int]] = []
    before: list[int] = []  # the groups that each needs, as bits
    needs = [0] * len(kernels)  # the groups that a kernel needs
    joined: dict[Hashable, tuple[int, int]] = {}  # the group of a kind that takes more, and its bytes

    def all_before(some: int) -> int:
        found, todo = some, some
        while todo:
            group = todo.bit_length() - 1
            todo ^= 1 << group
            todo |= before[group] & ~found
            found |= before[group]
        return found

    for i in graph.post_order():
        kernel, needed = kernels[i], 0
        for k in graph.before[i]:
            needed |= needs[k]
        if kernel.combining is not None:
            nbytes = sum(told.sizes[b] for b in kernel.makes)
            group, size = joined.get(kernel.combining.key, (-1, most))
            if nbytes > most:  # never one with others
                group, size = -1, -1
            elif group >= 0:
                full = size + nbytes > most or len(groups[group]) >= _MOST_COMBINED
                if full or all_before(needed) >> group & 1:
                    group, size = -1, 0
            else:
                size = 0
            if group < 0:
                group = len(groups)
                groups.append([])
                before.append(0)
            groups[group].append(i)
            before[group] |= needed
            if size >= 0:
                joined[kernel.combining.key] = group, size + nbytes
            needed = 1 << group
        needs[i] = needed
    made_one: dict[int, Kernel | None] = {}
    for together in groups:
        if len(together) > 1:
            members = [kernels[i] for i in together]
            reads = dict.fromkeys(b for each in members for b in each.reads)
            makes = [b for each in members for b in each.makes]
            made_one.update(dict.fromkeys(together, None))
            places = tuple(place for each in members for place in each.places)
            made_one[together[-1]] = dataclasses.replace(
                members[0], reads=tuple(reads), makes=tuple(makes), places=places
            )
    return [one for i, kernel in enumerate(kernels) if (one := made_one.get(i, kernel)) is not None]


def _greedy(graph: _Graph) -> list[int]:
    """Next is what frees most beyond what it makes, then what has most readers, then what could run last."""
    kernels, sizes, readers = graph.kernels, graph.sizes, graph.readers
    missing = [len(before) for before in graph.before]
    unread = [len(each) for each in readers]
    for buffer in set(graph.leaving):
        unread[buffer] += 1
    made = [sum(sizes[b] for b in kernel.makes) + kernel.held for kernel in kernels]
    used = [sum(len(readers[b]) for b in kernel.makes) for kernel in kernels]
    ready: list[tuple[int, int, int, int]] = []
    current: list[tuple[int, int] | None] = [None] * len(kernels)
    found: list[int] = []

    def put(i: int) -> None:
        kernel = kernels[i]
        freed = sum(sizes[b] for b in kernel.reads if unread[b] == 1 and b in graph.maker)
        rank = (-(freed - made[i]), -used[i])
        if current[i] != rank:
            current[i] = rank
            heapq.heappush(ready, (*rank, -len(found), i))

    for i, count in enumerate(missing):
        if not count:
            put(i)
    done = bytearray(len(kernels))
    while ready:
        freed, most_read, _, i = heapq.heappop(ready)
        if done[i] or current[i] != (freed, most_read):
            continue
        done[i] = 1
        found.append(i)
        changed: dict[int, None] = {}
        for k in dict.fromkeys(k for b in kernels[i].makes for k in readers[b]):
            missing[k] -= 1
            if not missing[k]:
                changed[k] = None
        for b in kernels[i].reads:
            unread[b] -= 1
            if unread[b] == 1 and sizes[b]:
                changed.update(dict.fromkeys(k for k in readers[b] if not done[k] and not missing[k]))
        for k in changed:
            put(k)
    return found


def _deepest_first(graph: _Graph) -> list[int]:
    """Depth first: of what a kernel needs first that which has most readers on its way, then most bytes."""
    order = graph.post_order()
    readers = [0] * len(order)
    for before in graph.before:
        for k in before:
            readers[k] += 1
    more, nbytes, all_bytes = [0] * len(order), [0] * len(order), 0
    for i in order:
        size = sum(graph.sizes[b] for b in graph.kernels[i].makes)
        all_bytes += size
        more[i] = min(len(order), max(0, readers[i] - 1) + sum(more[k] for k in graph.before[i]))
        nbytes[i] = min(all_bytes, size + sum(nbytes[k] for k in graph.before[i]))
    return graph.post_order(lambda i: (-more[i], -nbytes[i], i))


def _late(graph: _Graph, order: Sequence[int]) -> list[int]:
    """The order, in which what leads to nothing but sums and results runs when a sum needs it, or at the end."""
    kernels = graph.kernels
    waits = bytearray(len(kernels))
    for i in reversed(order):
        kernel = kernels[i]
        makes_a_number = not kernel.last and 0 < sum(graph.sizes[b] for b in kernel.makes) <= _NUMBER
        if kernel.combining is not None or makes_a_number:
            continue
        readers = [k for b in kernel.makes for k in graph.readers[b]]
        waits[i] = all(waits[k] or ((how := kernels[k].combining) is not None and how.sums) for k in readers)
    rank = {i: position for position, i in enumerate(order)}
    found: list[int] = []
    done = bytearray(len(kernels))
    for i in sorted(order, key=lambda i: kernels[i].last):
        if waits[i]:
            continue
        now, todo = [i], [i]
        while todo:
            for k in graph.before[todo.pop()]:
                if waits[k] and not done[k]:
                    done[k] = 1
                    now.append(k)
                    todo.append(k)
        found += sorted(now, key=rank.__getitem__)
    return found + [i for i in sorted(order, key=lambda i: kernels[i].last) if waits[i] and not done[i]]


def _ranges(graph: _Graph, order: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Positions between which each buffer is live; what leaves is so to the end."""
    born: dict[int, int] = {}
    ends: dict[int, int] = {}
    for position, i in enumerate(order):
        kernel = graph.kernels[i]
        born.update(dict.fromkeys(kernel.makes, position))
        ends.update(dict.fromkeys((*kernel.reads, *kernel.makes), position))
    ends.update(dict.fromkeys(graph.leaving, len(order)))
    for position, i in enumerate(order):
        kernel = graph.kernels[i]
        for _, taken in kernel.places:
            if taken in born and ends[taken] == position:
                ends[taken] = position - 1
    return {b: (at, ends[b]) for b, at in born.items()}


def _most(graph: _Graph, ranges: dict[int, tuple[int, int]], order: Sequence[int]) -> int:
    return max(held_by(ranges, graph.sizes, [graph.kernels[i] for i in order]), default=0)


def held_by(ranges: dict[int, tuple[int, int]], sizes: Sequence[int], order: Sequence[Kernel]) -> list[int]:
    """Bytes while each kernel runs."""
    changes = [0] * (len(order) + 1)
    for buffer, (at, end) in ranges.items():
        changes[at] += sizes[buffer]
        if end < len(order):
            changes[end + 1] -= sizes[buffer]
    found, now = [], 0
    for change, kernel in zip(changes, order, strict=False):
        now += change
        found.append(now + kernel.held)
    return found
