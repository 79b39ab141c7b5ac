"""The order in which XLA for GPUs runs a program's kernels, and the buffers that are live then.

XLA forgets the order in which a program was written, barriers aside (`OptimizationBarrierExpander` runs later):

1. Collectives of one kind that do not need one another become one, in post order, up to a size of results
   (`CombineInstructionsByKey`).
2. Three orders are tried, and the one that holds least is taken (`DefaultMemoryScheduler`): greedily the kernel that
   frees most beyond what it makes; depth first, operands with most readers before them first; depth first as written.
3. Where there are collectives, to run beside other kernels, it is changed once more: see `latency_hiding.py`.

The names are those of XLA's passes.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from autopar.cost_model.dependencies import Dependencies
from autopar.cost_model.latency_hiding import IssuedKernel, hide_latency

_MOST_COMBINED = 256  # collectives that become one


@dataclasses.dataclass(frozen=True)
class Combining:
    """Of a collective: those with equal keys may become one."""

    key: Hashable  # None: with no other
    sums: bool
    latency: float = 0.0  # seconds of one of no bytes, which several that become one have once


@dataclasses.dataclass(frozen=True)
class ProgramKernel:
    """What runs at once."""

    reads: tuple[int, ...]  # buffers
    makes: tuple[int, ...]
    held: int = 0  # bytes, besides, while it runs
    # Results and, for each, operands in whose place it may lie: the first of them that nothing else reads after it.
    aliases: tuple[tuple[int, int], ...] = ()
    collective: Combining | None = None  # None: it is none
    seconds: float = 0.0  # that XLA's scheduler expects it to take
    cost: float = 0.0  # seconds that it takes by the cost model
    starts: bool = True  # it begins here
    ends: bool = True


class ProgramKernels:
    """The kernels of a program, told in its order, with values by any key.

    A value lies in a buffer, or is computed in each kernel that reads it, from buffers; what was not told is there
    without any.
    """

    def __init__(self) -> None:
        self.kernels: list[ProgramKernel] = []
        self.sizes: list[int] = []  # bytes of each buffer
        self.values: list[Hashable] = []  # what it is for
        self.leaving: list[int] = []  # buffers that are there to the end
        self.elsewhere: set[int] = set()  # buffers for which no memory is set aside
        self._at: dict[Hashable, tuple[int, ...]] = {}
        self._maker: dict[int, int] = {}  # buffer -> the number of its kernel
        self._dependencies = Dependencies()  # of kernels, by their numbers
        self._parts: dict[Hashable, int] = {}

    def buffers(self, values: Iterable[Hashable]) -> tuple[int, ...]:
        """What is read to have these values."""
        return tuple(dict.fromkeys(buffer for value in values for buffer in self._at.get(value, ())))

    def fuse(self, value: Hashable, reads: tuple[int, ...]) -> None:
        """The value is computed wherever it is read, from these buffers."""
        self._at[value] = reads

    def run(
        self, reads: Iterable[Hashable], makes: Sequence[tuple[Hashable, int]], *, held: int = 0,
        aliases: Mapping[Hashable, Hashable] | None = None, collective: Combining | None = None,
        in_place: Iterable[Hashable] = (), seconds: float = 0.0, cost: float = 0.0, part_of: Hashable = None,
    ) -> None:  # fmt: skip
        """A kernel that makes values of so many bytes, some in the places of others.

        `in_place`: operands whose buffers results of the same sizes may take. `seconds`: how long XLA's scheduler
        expects it to take; of a collective, how long after its start it ends. `cost`: how long it takes by the cost
        model. `part_of`: results with an equal one are those of one kernel, unless one needs another by way of other
        kernels.
        """
        made = range(len(self.sizes), len(self.sizes) + len(makes))
        lie = [
            (buffer, taken[0])
            for (value, _), buffer in zip(makes, made, strict=True)
            if aliases is not None and value in aliases and len(taken := self.buffers([aliases[value]])) == 1
        ]
        taken, whole = self.buffers(reads), self._parts.get(part_of)
        if whole is not None and not self._dependencies.can_extend(whole, self._makers(taken)):
            whole = None
        free = [b for b in self.buffers(in_place) if whole is None or self._maker.get(b) != whole]
        lie += [
            (buffer, taken)
            for (_, nbytes), buffer in zip(makes, made, strict=True)
            for taken in free
            if self.sizes[taken] == nbytes
        ]
        self.sizes += [nbytes for _, nbytes in makes]
        self.values += [value for value, _ in makes]
        if whole is not None:
            self._dependencies.extend(whole, self._makers(taken))
            begun, others = self.kernels[whole], (b for b in taken if self._maker.get(b) != whole)
            self.kernels[whole] = dataclasses.replace(
                begun, reads=tuple(dict.fromkeys((*begun.reads, *others))), makes=(*begun.makes, *made),
                aliases=(*begun.aliases, *lie), seconds=begun.seconds + seconds, cost=begun.cost + cost,
            )  # fmt: skip
        else:
            whole = self._dependencies.add(self._makers(taken))
            self.kernels.append(ProgramKernel(taken, tuple(made), held, tuple(lie), collective, seconds, cost))
            if part_of is not None:
                self._parts[part_of] = whole
        self._maker.update(dict.fromkeys(made, whole))
        self._at.update({value: (buffer,) for (value, _), buffer in zip(makes, made, strict=True)})

    def _makers(self, buffers: Iterable[int]) -> list[int]:
        return [self._maker[b] for b in buffers if b in self._maker]

    def fence(self, pairs: Iterable[tuple[Hashable, Hashable]], after: Iterable[Hashable] = ()) -> None:
        """Pairs of names of one buffer, the first for readers that wait until all of them are there."""
        pairs = list(pairs)
        here = [self.buffers([value]) for _, value in pairs]
        token = len(self.sizes)
        self.sizes.append(0)
        self.values.append(None)
        taken = self.buffers([*(value for _, value in pairs), *after])
        self._maker[token] = self._dependencies.add(self._makers(taken))
        self.kernels.append(ProgramKernel(taken, (token,)))
        self._at.update({name: (*taken, token) for (name, _), taken in zip(pairs, here, strict=True)})

    def run_rounds(
        self, reads: Iterable[Hashable], makes: Sequence[tuple[Hashable, int]], aliases: Mapping[int, Hashable | None],
        held: int = 0, seconds: float = 0.0, cost: float = 0.0,
    ) -> None:  # fmt: skip
        """A loop: results lie, by their numbers, where the carry did, or are filled, which XLA begins with zeros."""
        begun: dict[Hashable, Hashable] = {}
        for k, place in aliases.items():
            value, nbytes = makes[k]
            begun[value] = place
            if place is None or not self.buffers([place]):
                begun[value] = (value, "begun")
                self.run([], [(begun[value], nbytes)])
                self.values[-1] = value
        self.run([*reads, *begun.values()], makes, held=held, aliases=begun, seconds=seconds, cost=cost)

    def lie_elsewhere(self, results: Collection[int]) -> None:
        """These buffers lie where arguments do, and so in no operand's place; no memory is set aside for them."""
        self.elsewhere.update(results)
        self.kernels = [
            dataclasses.replace(kernel, aliases=tuple(pair for pair in kernel.aliases if pair[0] not in results))
            if any(result in results for result, _ in kernel.aliases) else kernel
            for kernel in self.kernels
        ]  # fmt: skip

    def leave(self, value: Hashable) -> None:
        """The value is a result."""
        self.leaving += self.buffers([value])


@dataclasses.dataclass(frozen=True)
class Live:
    """The buffers that kernels make, in the order in which these run."""

    order: tuple[ProgramKernel, ...]
    ranges: dict[int, tuple[int, int]]  # buffer -> positions in the order between which it is live


def live(told: ProgramKernels, *, combined: int = 0, contiguous: bool = False, hides_latency: bool = False) -> Live:
    """The order of the kernels; see the module.

    Args:
      told: the program.
      combined: bytes of results up to which collectives become one; 0: none do.
      contiguous: whether sums that become one are copied into one array, so that none lies in its operand's place.
      hides_latency: whether collectives run beside other kernels.
    """
    kernels, leaving = list(told.kernels), set(told.leaving)
    if combined:
        kernels = _combine(kernels, told, combined, contiguous)
    graph = _KernelGraph(kernels, told.sizes, told.leaving)
    orders = (_greedy(graph), _deepest_first(graph), graph.post_order())
    order = min(orders, key=lambda order: _most([kernels[i] for i in order], told))
    if hides_latency and any(kernel.collective is not None for kernel in kernels):
        ordered = _beside_collectives(graph, order)
    else:
        ordered = [kernels[i] for i in order]
    count = len(ordered)
    ranges = _ranges(ordered, told.leaving)
    return Live(tuple(ordered), {b: (at, count if b in leaving else end) for b, (at, end) in ranges.items()})


class _KernelGraph:
    def __init__(self, kernels: Sequence[ProgramKernel], sizes: Sequence[int], leaving: Sequence[int]) -> None:
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
        order: list[int] = []
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
                    order.append(i)
        return order


def _combine(
    kernels: Sequence[ProgramKernel], told: ProgramKernels, most: int, contiguous: bool
) -> list[ProgramKernel]:
    graph = _KernelGraph(kernels, told.sizes, told.leaving)
    groups: list[list[int]] = []
    dependencies = Dependencies()  # of groups
    needs = [0] * len(kernels)  # the groups that a kernel needs
    joined: dict[Hashable, tuple[int, int]] = {}  # the group of a kind that takes more, and its bytes

    for i in graph.post_order():
        kernel, needed = kernels[i], 0
        for k in graph.before[i]:
            needed |= needs[k]
        key = None if kernel.collective is None else kernel.collective.key
        if key is not None:
            nbytes, direct = sum(told.sizes[b] for b in kernel.makes), _bits(needed)
            group, size = joined.get(key, (-1, most))
            if nbytes > most:  # never one with others
                group, size = -1, -1
            elif group >= 0:
                full = size + nbytes > most or len(groups[group]) >= _MOST_COMBINED
                if full or needed >> group & 1 or not dependencies.can_extend(group, direct):
                    group, size = -1, 0
            else:
                size = 0
            if group < 0:
                group = dependencies.add(direct)
                groups.append([])
            else:
                dependencies.extend(group, direct)
            groups[group].append(i)
            if size >= 0:
                joined[key] = group, size + nbytes
            needed = 1 << group
        needs[i] = needed
    made_one: dict[int, ProgramKernel | None] = {}
    for together in groups:
        if len(together) > 1:
            members = [kernels[i] for i in together]
            first = members[0].collective  # as all of them
            copied = contiguous and first is not None and first.sums
            reads = dict.fromkeys(b for each in members for b in each.reads)
            makes = [b for each in members for b in each.makes]
            made_one.update(dict.fromkeys(together, None))
            aliases = () if copied else tuple(place for each in members for place in each.aliases)
            latency = max(how.latency for each in members if (how := each.collective))
            made_one[together[-1]] = dataclasses.replace(
                members[0],
                reads=tuple(reads),
                makes=tuple(makes),
                aliases=aliases,
                seconds=sum(each.seconds - how.latency for each in members if (how := each.collective)) + latency,
                cost=sum(each.cost for each in members),
            )
    return [one for i, kernel in enumerate(kernels) if (one := made_one.get(i, kernel)) is not None]


def _bits(number: int) -> list[int]:
    """Of those that are set, which they are."""
    bits = []
    while number:
        bits.append(number.bit_length() - 1)
        number ^= 1 << bits[-1]
    return bits


def _greedy(graph: _KernelGraph) -> list[int]:
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
    order: list[int] = []

    def put(i: int) -> None:
        kernel = kernels[i]
        freed = sum(sizes[b] for b in kernel.reads if unread[b] == 1 and b in graph.maker)
        rank = (-(freed - made[i]), -used[i])
        if current[i] != rank:
            current[i] = rank
            heapq.heappush(ready, (*rank, -len(order), i))

    for i, count in enumerate(missing):
        if not count:
            put(i)
    done = bytearray(len(kernels))
    while ready:
        freed, most_read, _, i = heapq.heappop(ready)
        if done[i] or current[i] != (freed, most_read):
            continue
        done[i] = 1
        order.append(i)
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
    return order


def _deepest_first(graph: _KernelGraph) -> list[int]:
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


def _beside_collectives(graph: _KernelGraph, order: Sequence[int]) -> list[ProgramKernel]:
    """The kernels in the order in which collectives are hidden; each of these twice, as its start and as its end."""
    kernels = graph.kernels
    steps = hide_latency(
        order, graph.before, [k.seconds for k in kernels], [k.collective is not None for k in kernels],
    )  # fmt: skip
    return [_part(kernels[step.kernel], step) for step in steps]


def _part(kernel: ProgramKernel, step: IssuedKernel) -> ProgramKernel:
    """What is read and made is there until the end; but for operands that results may take the place of."""
    if step.starts:
        return dataclasses.replace(kernel, ends=step.ends)
    taken = {operand for _, operand in kernel.aliases}
    reads = (*(b for b in kernel.reads if b not in taken), *kernel.makes)
    return dataclasses.replace(kernel, reads=reads, makes=(), aliases=(), starts=False)


def _ranges(order: Sequence[ProgramKernel], leaving: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Positions between which each buffer is live; what leaves is so to the end."""
    born: dict[int, int] = {}
    ends: dict[int, int] = {}
    for position, kernel in enumerate(order):
        born.update(dict.fromkeys(kernel.makes, position))
        ends.update(dict.fromkeys((*kernel.reads, *kernel.makes), position))
    ends.update(dict.fromkeys(leaving, len(order)))
    for position, kernel in enumerate(order):
        lying = set()
        for result, taken in kernel.aliases:
            if result not in lying and taken in born and ends[taken] == position:
                ends[taken] = position - 1
                lying.add(result)
    return {b: (at, ends[b]) for b, at in born.items()}


def _most(order: Sequence[ProgramKernel], told: ProgramKernels) -> int:
    ranges = {b: at for b, at in _ranges(order, told.leaving).items() if b not in told.elsewhere}
    return max(held_by(ranges, told.sizes, order), default=0)


def held_by(ranges: dict[int, tuple[int, int]], sizes: Sequence[int], order: Sequence[ProgramKernel]) -> list[int]:
    """Bytes while each kernel runs."""
    changes = [0] * (len(order) + 1)
    for buffer, (at, end) in ranges.items():
        changes[at] += sizes[buffer]
        if end < len(order):
            changes[end + 1] -= sizes[buffer]
    held, now = [], 0
    for change, kernel in zip(changes, order, strict=False):
        now += change
        held.append(now + kernel.held)
    return held
