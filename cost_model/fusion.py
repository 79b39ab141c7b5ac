"""What XLA's kernels read from memory and write to it: which equations share a kernel, as its fusion passes decide.

An elementwise equation is computed inside every kernel that needs its result, or once, in a kernel of its own: see
`materialize.py`. Kernels that go through the same elements, and read the same or one another, become one with several
results in memory, of which one kind at most is reduced, unless one needs the other by way of a third: XLA's
multi-output fusion. Products of matrices, sorts and bodies are kernels of their own, whose operands are in memory.
Reshapes of what is in memory are views, and so are transposes, which layouts absorb; but where a product needs what was
not computed element by element in another order, a kernel copies it. So it is with the filters of convolutions; and
what is computed from their gradients lies in the order of these, and is copied back where it leaves the program.

XLA for CPUs gives a kernel a single output: it merges none, computes elementwise equations wherever they are needed,
reductions read what is in memory (and may multiply it first), and what lies in another order is read element by element
(`layouts.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autopar.cost_model.compute import INDEX_BYTES
from autopar.cost_model.dependencies import Dependencies
from autopar.cost_model.layouts import Layouts, Order, comes_turned, filters_to_turn, is_apart
from autopar.cost_model.materialize import MOST_IN_A_COLUMN, MOST_IN_A_ROW, MOST_OPERANDS, computed_anew
from autopar.ir.graph import Equation, Value
from autopar.ir.liveness import LivenessStep, last_reads
from autopar.ir.local import Traffic
from autopar.ir.mesh import XLA_FOR_GPUS, XlaBackend
from autopar.ir.rule import Rule, is_reduction, reduced_dims

_FEW = 4  # kernels that read a value and go through the same, the last ones, that another may become one with

_Place = tuple[int, int]  # an equation and the position of its operand


@dataclasses.dataclass(eq=False)
class _Fusion:
    """One kernel, while equations are added to it."""

    first: int  # the equation with which it begins
    number: int  # among `Dependencies`
    loop: tuple[int, ...]  # what it goes through; equal for kernels that may become one
    reduced: tuple[int, ...] | None  # the dimensions of it that are reduced, if any
    reads: set[Value] = dataclasses.field(default_factory=set)
    at_end: set[Value] = dataclasses.field(default_factory=set)  # of what it makes: what is not there before
    reductions: int = 0
    in_two_steps: bool = False  # whether one of these reductions is done in two
    reduces: set[Value] = dataclasses.field(default_factory=set)  # what these read

    def takes(self, loop: tuple[int, ...], reduced: tuple[int, ...] | None) -> bool:
        """Whether what goes through this can be computed along."""
        return self.loop == loop and (self.reduced is None or reduced is None or self.reduced == reduced)


def _is_view(eqn: Equation, rule: Rule) -> bool:
    """Whether the result has the operand's elements in another order or shape."""
    if rule.flops or rule.separable or not rule.is_fusible or len(eqn.inputs) != 1 or len(eqn.outputs) != 1:
        return False
    (before,), (after,) = eqn.inputs, eqn.outputs
    if not isinstance(before, Value) or before.dtype != after.dtype:
        return False
    return math.prod(before.shape) == math.prod(after.shape)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What XLA keeps in memory, and where."""

    stored: set[Value]  # what goes through memory, views included
    aliases: Mapping[int, tuple[tuple[int, int | None], ...]]  # by equation: see `Traffic`
    filled: Collection[int]  # equations that write to an array of one number, which a kernel makes before


def stored(
    equations: Sequence[Equation], rules: Mapping[int, Rule], inputs: Collection[Value], outputs: Collection[Value]
) -> set[Value]:
    """The values that go through memory, views of them included."""
    return _memory(equations, rules, inputs, outputs).stored


def _memory(
    equations: Sequence[Equation], rules: Mapping[int, Rule], inputs: Collection[Value], outputs: Collection[Value],
    xla: XlaBackend = XLA_FOR_GPUS, shapes: Mapping[Value, tuple[int, ...]] = MappingProxyType({}),
) -> _Memory:  # fmt: skip
    viewed: dict[Value, Value] = {}  # view -> what it is a view of
    read = Counter(v for eqn in equations for v in eqn.values)
    for eqn in equations:
        rule = rules[eqn.id]
        if _is_view(eqn, rule):
            (before,) = eqn.values
            viewed[eqn.outputs[0]] = viewed.get(before, before)
        elif rule.separable:  # hands on the buffers that it takes
            viewed.update({v: viewed.get(u, u) for u, v in zip(eqn.inputs, eqn.outputs, strict=True)
                           if isinstance(u, Value)})  # fmt: skip
    needed = {*inputs, *outputs}
    uniform: set[Value] = set()  # one number everywhere, which XLA makes inside loops and where it is added to
    filled: set[int] = set()  # equations that write little to such an array, which a kernel makes before
    sparse: set[Value] = set()  # such a number but for a few places
    aliases: dict[int, tuple[tuple[int, int | None], ...]] = {}
    maker = {v: eqn for eqn in equations for v in eqn.outputs} if xla.single_output else {}
    for eqn in equations:
        rule = rules[eqn.id]
        if rule.kernels:
            aliases[eqn.id] = tuple(rule.aliases.items())
            needed.update(v for v in eqn.values if v not in uniform)
        elif rule.unit == "matmul" or rule.replicates or rule.separable:
            needed.update(eqn.values)
        elif rule.aliases:
            (taken,) = (eqn.inputs[i] for i in rule.aliases.values() if i is not None)
            if taken in uniform and read[eqn.outputs[0]] == 1:
                sparse.update(eqn.outputs)
                continue
            if taken in uniform and not xla.single_output:
                filled.add(eqn.id)
                needed.update(eqn.outputs)
                continue
            aliases[eqn.id] = tuple(rule.aliases.items())
            needed.update(v for v in [taken] if isinstance(v, Value) and v not in uniform)
        elif sparse.intersection(eqn.values):
            # What few numbers are added to takes them where it lies.
            others = [i for i, v in enumerate(eqn.inputs) if isinstance(v, Value) and v not in sparse]
            if _is_sum(rule) and len(others) == 1 and len(eqn.inputs) == 2:
                aliases[eqn.id] = ((0, others[0]),)
                needed.update(eqn.outputs)
                needed.add(eqn.values[others[0]])
            else:
                needed.update(sparse.intersection(eqn.values))
        elif rule.is_fusible and eqn.inputs and all(v in uniform or math.prod(v.shape) == 1 for v in eqn.values):
            uniform.update(eqn.outputs)
        if not rule.is_fusible:
            needed.update(eqn.outputs)
        if xla.single_output and is_reduction(eqn, rule):
            (summed,) = eqn.values
            made = maker.get(summed)
            multiplied = made is not None and _is_product(rules[made.id])
            needed.update(v for v in (made.values if made and multiplied else [summed]) if v not in uniform)
    needed = {viewed.get(v, v) for v in needed}
    if not xla.single_output:
        anew = computed_anew(equations, rules, needed, viewed, shapes)
        for k, eqn in enumerate(equations):
            if k in anew:
                needed.difference_update(eqn.outputs)
            elif rules[eqn.id].is_fusible and not sparse.intersection(eqn.values):
                needed.update(v for v in eqn.outputs if v not in viewed and read[v])
    return _Memory(needed | {view for view, v in viewed.items() if v in needed}, aliases, filled)


def _is_sum(rule: Rule) -> bool:
    return rule.is_fusible and frozenset({0, 1}) in rule.linear


def _is_product(rule: Rule) -> bool:
    return rule.is_fusible and {frozenset({0}), frozenset({1})} <= {*rule.linear}


def memory_traffic(
    equations: Sequence[Equation], rules: Mapping[int, Rule], inputs: Collection[Value], outputs: Collection[Value],
    *, xla: XlaBackend = XLA_FOR_GPUS, shapes: Mapping[Value, tuple[int, ...]] = MappingProxyType({}),
) -> dict[int, Traffic]:  # fmt: skip
    """The traffic of each equation, by its id, in a program with these inputs and outputs.

    `xla`: the compiler. `shapes`: of values that are in pieces, those of a device's piece.
    """
    memory = _memory(equations, rules, inputs, outputs, xla, shapes)
    count = (_CountOnCpus if xla.single_output else _CountOnGpus)(equations, rules, outputs, memory, shapes)
    for eqn in equations:
        count.add(eqn, rules[eqn.id])
    return {eqn.id: count.traffic(eqn) for eqn in equations}


class _Count:
    """Counts the kernels of a program and what they read and write, equation by equation."""

    def __init__(
        self, equations: Sequence[Equation], rules: Mapping[int, Rule], outputs: Collection[Value], memory: _Memory,
        shapes: Mapping[Value, tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.rules, self.memory, self.shapes, self.leaving = rules, memory, shapes, {*outputs}
        self.layouts = Layouts(equations, rules, outputs)
        self.strided: dict[_Place, int] = defaultdict(int)
        self.copied: dict[_Place, int] = defaultdict(int)
        self.reads: dict[_Place, int] = defaultdict(int)
        self.launches: dict[int, int] = {}
        self.writes: dict[int, tuple[bool, ...]] = {}
        self.begins: dict[int, int] = {}  # by equation: the first one of its kernel
        # By equation, for each operand: whether it is needed element by element alone.
        self.shared: dict[int, Sequence[bool]] = {}
        self.sources: dict[Value, dict[Value, _Place]] = {}  # of what is not in memory: what it is computed from
        self.around: dict[Value, set[Value]] = {}  # .. and what it needs otherwise than element by element
        self.maker: dict[Value, _Fusion] = {}
        self.readers: dict[Value, dict[tuple[int, ...], list[_Fusion]]] = defaultdict(lambda: defaultdict(list))
        self.dependencies = Dependencies()  # of kernels
        self.bases: dict[Value, Value] = {}  # view -> what it is a view of
        self.moved: set[Value] = set()  # views in which elements lie elsewhere

    def add(self, eqn: Equation, rule: Rule) -> None:
        """The next equation."""
        made = tuple(v in self.memory.stored for v in eqn.outputs)
        self._note_order(eqn, rule)
        if rule.separable or (made[:1] == (True,) and _is_view(eqn, rule)):
            self._hand_on(eqn, rule)
            return
        self.writes[eqn.id] = made
        needs = self._needs(eqn)
        if not any(made):  # computed inside the kernels that need it
            self.sources.update(dict.fromkeys(eqn.outputs, needs))
            if apart := _needed_otherwise(eqn, rule, self.sources, self.around):
                self.around.update(dict.fromkeys(eqn.outputs, apart))
            self._fuse(eqn, rule)
            return
        self._share(eqn, rule, needs)
        kernel = self._kernel(eqn, rule, needs)
        for source, place in needs.items():
            if source not in kernel.reads and self.maker.get(source) is not kernel:
                kernel.reads.add(source)
                self.reads[place] += 1
                self.readers[source][kernel.loop].append(kernel)
        self._read_in_order(eqn, rule, needs)
        self.maker.update(dict.fromkeys(eqn.outputs, kernel))

    def traffic(self, eqn: Equation) -> Traffic:
        """Of one of the equations, once all were added."""
        kernel = self.maker.get(eqn.outputs[0]) if eqn.outputs else None
        return Traffic(
            _by_operand(self.reads, eqn),
            self.writes.get(eqn.id, (False,) * len(eqn.outputs)),
            self.launches.get(eqn.id, 0),
            self.begins.get(eqn.id, eqn.id),
            self.rules[eqn.id].is_fusible,
            _in_place(self.shared.get(eqn.id), kernel, len(eqn.inputs)),
            self.memory.aliases.get(eqn.id, ()),
            _by_operand(self.strided, eqn),
            _by_operand(self.copied, eqn),
        )

    def _hand_on(self, eqn: Equation, rule: Rule) -> None:
        """Results that are views of operands, or their buffers."""
        self.layouts.view(eqn, rule)
        self.bases.update({v: self.bases.get(u, u) for u, v in zip(eqn.inputs, eqn.outputs, strict=True)
                           if isinstance(u, Value)})  # fmt: skip
        for before, view in zip(eqn.inputs, eqn.outputs, strict=True):
            if before in self.moved or not (rule.separable or rule.elementwise[0]):
                self.moved.add(view)
            if isinstance(before, Value) and before in self.maker:
                self.maker[view] = self.maker[before]
                if before in self.maker[before].at_end:
                    self.maker[before].at_end.add(view)

    def _needs(self, eqn: Equation) -> dict[Value, _Place]:
        """What of memory its kernel reads, and for which operand of which equation."""
        needs: dict[Value, _Place] = {}
        for position, v in enumerate(eqn.inputs):
            if isinstance(v, Value):
                for source, place in self.sources.get(v, {v: (eqn.id, position)}).items():
                    needs.setdefault(source, place)
        return needs

    def _kernel(self, eqn: Equation, rule: Rule, needs: Mapping[Value, _Place]) -> _Fusion:
        """One of its own, or one with others."""
        loop, reduced = _loop(eqn, rule, self.shapes)
        made_by = [self.maker[v].number for v in needs if v in self.maker]
        kernel = self._partner(loop, reduced, needs)
        if kernel is None:
            kernel = _Fusion(eqn.id, self.dependencies.add(made_by), loop, reduced)
            self.launches[eqn.id] = 1 + (eqn.id in self.memory.filled)
        else:
            self.dependencies.extend(kernel.number, made_by)
            if reduced is not None:
                kernel.reduced = reduced
        self.begins[eqn.id] = kernel.first
        if reduced is not None:
            kernel.at_end.update(eqn.outputs)
            kernel.reductions += 1
            kernel.reduces.update(needs)
            self._reduce(eqn, kernel, loop, reduced)
        return kernel

    # What compilers do differently. Here these methods do nothing; a compiler that does the thing overrides them.

    def _note_order(self, eqn: Equation, rule: Rule) -> None:
        """Note which results are in the order of a convolution."""

    def _fuse(self, eqn: Equation, rule: Rule) -> None:
        """Note an equation that is computed inside other kernels."""

    def _share(self, eqn: Equation, rule: Rule, needs: Mapping[Value, _Place]) -> None:
        """Note which operands a result may lie in the place of."""

    def _partner(
        self, loop: tuple[int, ...], reduced: tuple[int, ...] | None, needs: Mapping[Value, _Place]
    ) -> _Fusion | None:
        """A kernel that is there already and that an equation may become a part of; None: it has one of its own."""
        return None

    def _reduce(self, eqn: Equation, kernel: _Fusion, loop: Sequence[int], reduced: Sequence[int]) -> None:
        """Note a reduction in a kernel."""

    def _read_in_order(self, eqn: Equation, rule: Rule, needs: Mapping[Value, _Place]) -> None:
        """Note what is copied into another order for an equation, or read against its order."""


class _CountOnCpus(_Count):
    """XLA for CPUs: a result each, and arrays in whatever order they lie."""

    def _fuse(self, eqn: Equation, rule: Rule) -> None:
        self.layouts.fuse(eqn, rule)

    def _read_in_order(self, eqn: Equation, rule: Rule, needs: Mapping[Value, _Place]) -> None:
        for reading in self.layouts.run(eqn, rule):
            place = needs[reading.value]
            self.strided[place] += reading.strided
            self.copied[place] += reading.copied


class _CountOnGpus(_Count):
    """XLA for GPUs: kernels of several results, copies into the orders that libraries want."""

    def __init__(self, *program: Any) -> None:
        super().__init__(*program)
        self.ordered: set[tuple[Value, Order]] = set()  # what has been copied into the order of a product
        self.turned: set[Value] = set()  # in the order of a convolution, not their own
        self.copied_filters: set[Value] = set()  # of which there is such a copy

    def _note_order(self, eqn: Equation, rule: Rule) -> None:
        if comes_turned(eqn, rule, self.turned):
            self.turned.update(eqn.outputs)

    def _share(self, eqn: Equation, rule: Rule, needs: Mapping[Value, _Place]) -> None:
        if not rule.is_fusible:
            return
        # What is reduced, and needed again beside what comes of that, is read twice by the kernel that XLA makes.
        apart = _needed_otherwise(eqn, rule, self.sources, self.around)
        apart.update(u for v in needs if v in self.maker for u in self.maker[v].reduces)
        apart, nbytes = {self.bases.get(v, v) for v in apart}, eqn.outputs[0].nbytes
        # What is read in another order, too, through a transposed view, cannot be written over.
        orders: dict[Value, set[Value | None]] = defaultdict(set)
        for v in needs:
            orders[self.bases.get(v, v)].add(v if v in self.moved else None)
        apart.update(v for v, views in orders.items() if len(views) > 1)
        self.shared[eqn.id] = [
            isinstance(v, Value) and rule.elementwise[k]
            and apart.isdisjoint(self.bases.get(u, u) for u in self.sources.get(v, [v]) if u.nbytes == nbytes)
            for k, v in enumerate(eqn.inputs)
        ]  # fmt: skip

    def _partner(
        self, loop: tuple[int, ...], reduced: tuple[int, ...] | None, needs: Mapping[Value, _Place]
    ) -> _Fusion | None:
        """A kernel that reads or makes what is needed here and that can wait for the rest of it."""
        candidates = [k for v in needs if (k := self.maker.get(v)) is not None]
        candidates += [k for v in needs if v in self.readers and math.prod(v.shape) > 1
                       for k in reversed(self.readers[v].get(loop, ())[-_FEW:])]  # fmt: skip
        made = [(v, self.maker[v]) for v in needs if v in self.maker]
        for kernel in candidates:
            if not kernel.takes(loop, reduced):
                continue
            if kernel.at_end and reduced and reduced[-1] < len(loop) - 1 and kernel.reads != needs.keys():
                continue  # columns are reduced together only where they are of the same
            if any(v in k.at_end for v, k in made if k is kernel) or len(kernel.reads.union(needs)) > MOST_OPERANDS:
                continue
            if self.dependencies.can_extend(kernel.number, [k.number for _, k in made]):
                return kernel
        return None

    def _reduce(self, eqn: Equation, kernel: _Fusion, loop: Sequence[int], reduced: Sequence[int]) -> None:
        if _in_two_steps(loop, reduced):
            kernel.in_two_steps = True
            self.launches[eqn.id] = self.launches.get(eqn.id, 0) + 1

    def _read_in_order(self, eqn: Equation, rule: Rule, needs: Mapping[Value, _Place]) -> None:
        # What a kernel computes element by element it leaves in the order that is wanted.
        if rule.sides is not None and rule.patches is None:
            for position, v in enumerate(eqn.inputs[:2]):
                if isinstance(v, Value) and is_apart(rule, position, order := self.layouts.order(v)):
                    base = self.bases.get(v, v)
                    is_copied = base not in self.maker or self.maker[base].loop[:1] == (-1,)
                    if (base, order) not in self.ordered and is_copied:
                        self._copy(eqn, position)
                    self.ordered.add((base, order))
        if rule.pooling == "gradient":
            # First where in its window each of the largest is, in indices that are written and read, beside what it
            # is; then another kernel adds its gradient there.
            of = eqn.outputs[0]
            self.launches[eqn.id] = self.launches.get(eqn.id, 0) + 1
            self.reads[eqn.id, 0] += (2 * len(of.shape) * INDEX_BYTES + 2 * of.itemsize + INDEX_BYTES) // of.itemsize
        for position in filters_to_turn(eqn, rule, self.turned):
            v = eqn.inputs[position]
            filters = self.bases.get(v, v) if isinstance(v, Value) else None
            if filters is not None and filters not in self.maker and filters not in self.copied_filters:
                self._copy(eqn, position)
                self.copied_filters.add(filters)
        leaves = self.leaving.intersection(eqn.outputs) and self.turned.intersection(eqn.outputs)
        if leaves and not self.copied_filters.intersection(eqn.values):
            # Back, as many bytes as an operand of the same size; of what is read turned, too, the kernel turns one.
            alike = [i for i, v in enumerate(eqn.inputs) if isinstance(v, Value) and v.nbytes == eqn.outputs[0].nbytes]
            self.launches[eqn.id] = self.launches.get(eqn.id, 0) + 1
            if alike:
                self.reads[eqn.id, alike[0]] += 2

    def _copy(self, eqn: Equation, position: int) -> None:
        """An operand is copied before, into the order that a library wants."""
        self.launches[eqn.id] += 1
        self.reads[eqn.id, position] += 2


def _in_place(shared: Sequence[bool] | None, kernel: _Fusion | None, count: int) -> tuple[bool, ...]:
    """Of which operands XLA lets results take the places (`FusionCanShareBufferHint`).

    A kernel does one reduction before it writes over what that reads; where there are several, or one is done in parts
    first, it writes over nothing.
    """
    if shared is None or kernel is None or kernel.reductions > 1 or kernel.in_two_steps:
        return (False,) * count
    return tuple(shared)


def _needed_otherwise(
    eqn: Equation, rule: Rule, sources: Mapping[Value, Collection[Value]], around: Mapping[Value, Collection[Value]]
) -> set[Value]:
    """What an equation needs, of what is in memory, otherwise than element by element."""
    needed = {source for v in eqn.values for source in around.get(v, ())}
    for position, v in enumerate(eqn.inputs):
        if isinstance(v, Value) and not rule.elementwise[position]:
            needed.update(sources.get(v, [v]))
    return needed


def _by_operand(counts: Mapping[_Place, int], eqn: Equation) -> tuple[int, ...]:
    number = len(eqn.inputs)
    return tuple([counts.get((eqn.id, position), 0) for position in range(number)]) if counts else (0,) * number


def _loop(
    eqn: Equation, rule: Rule, shapes: Mapping[Value, tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """What a kernel goes through, and which dimensions of it are reduced; kernels of a kind of their own share none."""
    if rule.is_fusible:
        return _long(shapes.get(eqn.outputs[0], eqn.outputs[0].shape)), None
    if is_reduction(eqn, rule):
        (summed,) = eqn.values
        shape = shapes.get(summed, summed.shape)
        numbers = itertools.accumulate(size > 1 for size in shape)
        sizes = zip(numbers, shape, reduced_dims(rule), strict=True)
        return _long(shape), tuple(d - 1 for d, size, is_reduced in sizes if is_reduced and size > 1)
    return (-1, eqn.id), None


def _in_two_steps(loop: Sequence[int], reduced: Sequence[int]) -> bool:
    """Whether so much is reduced that parts of it are first, and another kernel reduces what comes of these."""
    of_rows = reduced[-1:] == (len(loop) - 1,)
    return math.prod(loop[d] for d in reduced) > (MOST_IN_A_ROW if of_rows else MOST_IN_A_COLUMN)


def _long(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)


def live_until(
    equations: Sequence[Equation], rules: Mapping[int, Rule], traffic: Mapping[int, Traffic], leaving: Collection[Value]
) -> dict[Value, int]:
    """The position in which each value is read for the last time; see `last_reads`."""
    steps = [
        LivenessStep([v if isinstance(v, Value) else None for v in eqn.inputs], eqn.outputs,
             any(traffic[eqn.id].writes), rules[eqn.id].separable)
        for eqn in equations
    ]  # fmt: skip
    return last_reads(steps, leaving)


def moved_values(eqn: Equation, traffic: Traffic) -> list[tuple[Value, int]]:
    """What goes through memory, with bytes, of whole arrays."""
    moved = [(v, v.nbytes) for k, v in enumerate(eqn.outputs) if traffic.is_own(k)]
    largest = max(eqn.outputs, key=lambda v: math.prod(v.shape), default=None)
    for position, v in enumerate(eqn.inputs):
        if traffic.reads[position] and isinstance(v, Value) and largest is not None:
            nbytes = int(traffic.read_bytes(position, v, v.nbytes, math.prod(largest.shape)))
            moved.append((v if nbytes >= v.nbytes else largest, nbytes))
    return moved
