"""What XLA's kernels read from memory and write to it: which equations share a kernel, as its fusion passes decide.

An elementwise equation is computed inside every kernel that needs its result, from what is in memory. A kernel has one
result in memory, or several that are elementwise over one shape (or reduce the same dimensions of one shape) and read
the same or one another: XLA's multi-output fusion. Products of matrices, sorts and bodies are kernels of their own,
whose operands are in memory. Transposes and reshapes of what is in memory are views: layouts absorb them.

XLA for CPUs gives a kernel a single output: it merges none, reductions read what is in memory (and may multiply it
first), and what lies in another order is read element by element (`layouts.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence

from autopar.ir.graph import Equation, Value
from autopar.ir.liveness import Step, last_reads
from autopar.ir.local import Traffic
from autopar.passes.rules.base import Rule, is_fusible, is_reduction
from autopar.passes.rules.layouts import Layouts

_MOST_OPERANDS = 64  # of one kernel; XLA has such a limit too

_Place = tuple[int, int]  # an equation and the position of its operand


@dataclasses.dataclass(eq=False)
class _Kernel:
    number: int
    key: tuple[Hashable, ...]  # equal for kernels that may become one
    reads: set[Value] = dataclasses.field(default_factory=set)


def _is_view(eqn: Equation, rule: Rule) -> bool:
    """Whether the result has the operand's elements in another order or shape."""
    if rule.flops or rule.separable or not is_fusible(rule) or len(eqn.inputs) != 1 or len(eqn.outputs) != 1:
        return False
    (before,), (after,) = eqn.inputs, eqn.outputs
    if not isinstance(before, Value) or before.dtype != after.dtype:
        return False
    return math.prod(before.shape) == math.prod(after.shape)


@dataclasses.dataclass(frozen=True)
class _Memory:
    stored: set[Value]  # what goes through memory, views included
    places: Mapping[int, tuple[tuple[int, int | None], ...]]  # by equation: see `Traffic`


def stored(
    equations: Sequence[Equation], rules: Mapping[int, Rule], inputs: Collection[Value], outputs: Collection[Value]
) -> set[Value]:
    """The values that go through memory, views of them included."""
    return _memory(equations, rules, inputs, outputs).stored


def _memory(
    equations: Sequence[Equation], rules: Mapping[int, Rule], inputs: Collection[Value], outputs: Collection[Value],
    single_output: bool = False,
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
    sparse: set[Value] = set()  # such a number but for a few places
    places: dict[int, tuple[tuple[int, int | None], ...]] = {}
    maker = {v: eqn for eqn in equations for v in eqn.outputs} if single_output else {}
    for eqn in equations:
        rule = rules[eqn.id]
        if rule.kernels:
            places[eqn.id] = tuple(rule.places.items())
            needed.update(v for v in eqn.values if v not in uniform)
        elif rule.unit == "matmul" or rule.replicates or rule.separable:
            needed.update(eqn.values)
        elif rule.places:
            (taken,) = (eqn.inputs[i] for i in rule.places.values() if i is not None)
            if taken in uniform and read[eqn.outputs[0]] == 1:
                sparse.update(eqn.outputs)
                continue
            places[eqn.id] = tuple(rule.places.items())
            needed.update(v for v in [taken] if isinstance(v, Value) and v not in uniform)
        elif sparse.intersection(eqn.values):
            # What few numbers are added to takes them where it lies.
            others = [i for i, v in enumerate(eqn.inputs) if isinstance(v, Value) and v not in sparse]
            if _is_sum(rule) and len(others) == 1 and len(eqn.inputs) == 2:
                places[eqn.id] = ((0, others[0]),)
                needed.update(eqn.outputs)
                needed.add(eqn.values[others[0]])
            else:
                needed.update(sparse.intersection(eqn.values))
        elif is_fusible(rule) and eqn.inputs and all(v in uniform or math.prod(v.shape) == 1 for v in eqn.values):
            uniform.update(eqn.outputs)
        if not is_fusible(rule):
            needed.update(eqn.outputs)
        if single_output and is_reduction(eqn, rule):
            (summed,) = eqn.values
            made = maker.get(summed)
            multiplied = made is not None and _is_product(rules[made.id])
            needed.update(v for v in (made.values if made and multiplied else [summed]) if v not in uniform)
    needed = {viewed.get(v, v) for v in needed}
    return _Memory(needed | {view for view, v in viewed.items() if v in needed}, places)


def _is_sum(rule: Rule) -> bool:
    return is_fusible(rule) and frozenset({0, 1}) in rule.linear


def _is_product(rule: Rule) -> bool:
    return is_fusible(rule) and {frozenset({0}), frozenset({1})} <= {*rule.linear}


def memory_traffic(
    equations: Sequence[Equation], rules: Mapping[int, Rule], inputs: Collection[Value], outputs: Collection[Value],
    *, single_output: bool = False,
) -> dict[int, Traffic]:  # fmt: skip
    """The traffic of each equation, by its id, in a program with these inputs and outputs.

    `single_output`: for a compiler whose kernels have one result each (`XlaBackend.single_output`).
    """
    memory = _memory(equations, rules, inputs, outputs, single_output)
    layouts = Layouts()
    against: dict[_Place, int] = defaultdict(int)
    copied: dict[_Place, int] = defaultdict(int)
    sources: dict[Value, dict[Value, _Place]] = {}  # of what is not in memory: what it is computed from
    maker: dict[Value, _Kernel] = {}
    readers: dict[Value, dict[Hashable, _Kernel]] = defaultdict(dict)
    reads: dict[_Place, int] = defaultdict(int)
    launches: dict[int, int] = {}
    writes: dict[int, tuple[bool, ...]] = {}
    count = 0
    for eqn in equations:
        rule = rules[eqn.id]
        made = tuple(v in memory.stored for v in eqn.outputs)
        is_view = made[:1] == (True,) and _is_view(eqn, rule)
        if rule.separable or is_view:
            if single_output:
                layouts.view(eqn, rule)
            maker.update({v: maker[u] for u, v in zip(eqn.inputs, eqn.outputs, strict=True)
                          if isinstance(u, Value) and u in maker})  # fmt: skip
            continue
        writes[eqn.id] = made
        needs: dict[Value, _Place] = {}
        for position, v in enumerate(eqn.inputs):
            if isinstance(v, Value):
                for source, place in sources.get(v, {v: (eqn.id, position)}).items():
                    needs.setdefault(source, place)
        if not any(made):
            sources.update(dict.fromkeys(eqn.outputs, needs))
            if single_output:
                layouts.fuse(eqn, rule)
            continue
        kernel = None if single_output else _partner(_kind(eqn, rule), needs, maker, readers)
        if kernel is None:
            kernel = _Kernel(count, _kind(eqn, rule))
            count += 1
            launches[eqn.id] = 1
        for source, place in needs.items():
            if source not in kernel.reads and maker.get(source) is not kernel:
                kernel.reads.add(source)
                reads[place] += 1
                readers[source][kernel.key] = kernel
        for reading in layouts.run(eqn, rule) if single_output else ():
            place = needs[reading.value]
            against[place] += reading.against
            copied[place] += reading.copied
        maker.update(dict.fromkeys(eqn.outputs, kernel))
    return {
        eqn.id: Traffic(
            _by_operand(reads, eqn),
            writes.get(eqn.id, (False,) * len(eqn.outputs)),
            launches.get(eqn.id, 0),
            is_fusible(rules[eqn.id]),
            memory.places.get(eqn.id, ()),
            _by_operand(against, eqn),
            _by_operand(copied, eqn),
        )
        for eqn in equations
    }


def _by_operand(counts: Mapping[_Place, int], eqn: Equation) -> tuple[int, ...]:
    number = len(eqn.inputs)
    return tuple([counts.get((eqn.id, position), 0) for position in range(number)]) if counts else (0,) * number


def _kind(eqn: Equation, rule: Rule) -> tuple[Hashable, ...]:
    """What kernels that may be merged have in common; that of others is their own."""
    shape = eqn.outputs[0].shape
    if is_fusible(rule):
        return ("elementwise", shape)
    if is_reduction(eqn, rule):
        return ("reduction", shape, *(v.shape for v in eqn.values))
    return ("alone", eqn.id)


def _partner(
    key: tuple[Hashable, ...], needs: Mapping[Value, _Place], maker: Mapping[Value, _Kernel],
    readers: Mapping[Value, Mapping[Hashable, _Kernel]],
) -> _Kernel | None:  # fmt: skip
    """A kernel that reads or makes what is needed here and that can wait for the rest of it."""
    candidates = [k for v in needs if (k := maker.get(v)) is not None and k.key == key]
    candidates += [k for v in needs if v in readers and (k := readers[v].get(key)) is not None]
    latest = max((maker[v].number for v in needs if v in maker), default=-1)
    for kernel in candidates:
        waits = latest - (key[0] == "elementwise") >= kernel.number  # a reduction's result is there at its end
        if not waits and len(kernel.reads.union(needs)) <= _MOST_OPERANDS:
            return kernel
    return None


def live_until(
    equations: Sequence[Equation], rules: Mapping[int, Rule], traffic: Mapping[int, Traffic], leaving: Collection[Value]
) -> dict[Value, int]:
    """The position in which each value is read for the last time; see `last_reads`."""
    steps = [
        Step([v if isinstance(v, Value) else None for v in eqn.inputs], eqn.outputs,
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
