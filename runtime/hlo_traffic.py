"""The kernels of a compiled program and the bytes that they move, read from XLA's text.

- What is launched is an instruction that is no view: a fusion, a library's call, a copy, whatever is not fused. Of an
  asynchronous pair the start counts. Collectives are no kernels (`hlo.py` counts them).
- A kernel reads of an operand what it needs of it: a fused slice or look-up a part, everything else all, once.
- What is written in an operand's place, a slice or what is scattered, moves as many bytes as it has; the rest of the
  operand stays where it lies.
- Of what a library's call returns, bytes without a meaning (`s8`, `u8`) are its workspace.
- A while loop multiplies by its known trip count; of branches the one that moves most counts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping

from autopar.errors import InternalError
from autopar.runtime.hlo_text import HloInstruction, Module, array_bytes, ints, parse

_FREE = frozenset({
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "optimization-barrier",
    "partition-id", "replica-id", "domain", "add-dependency",
})  # fmt: skip
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all", "send", "recv",
)  # fmt: skip
_PARTS = frozenset({"slice", "dynamic-slice", "gather"})  # that need as many elements as they make
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})


@dataclasses.dataclass(frozen=True)
class HloKernel:
    """One instruction that is launched."""

    name: str
    opcode: str
    scope: str  # of the name scopes that it was traced under
    times: int
    read: float  # bytes each time
    written: float  # bytes each time
    flops: float = 0.0  # of products of matrices, each time
    dtype: str = ""  # of their operands, as XLA writes it

    @property
    def nbytes(self) -> float:
        """All times."""
        return self.times * (self.read + self.written)


def is_free(opcode: str) -> bool:
    """Whether an instruction is a view, or the end of an asynchronous pair."""
    return opcode in _FREE or opcode.endswith(("-done", "-update"))


def is_collective(opcode: str) -> bool:
    """Whether an instruction, or the pair that it begins, is a collective."""
    return opcode.startswith(_COLLECTIVES)


def kernels_in_hlo(text: str) -> tuple[HloKernel, ...]:
    """In the order of the text, those of a loop in its place.

    Raises InternalError for a loop without a known trip count.
    """
    module = parse(text)
    return tuple(HloKernels(module).of_computation(module.entry))


class HloKernels:
    """What a program's instructions launch."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, list[HloKernel]] = {}

    def of_computation(self, name: str) -> list[HloKernel]:
        """In the order of the text; raises as `kernels_in_hlo`."""
        if name not in self._known:
            body = self._module.computations[name]
            self._known[name] = [kernel for instruction in body.values() for kernel in self.of(instruction, body)]
        return self._known[name]

    def of(self, i: HloInstruction, body: Mapping[str, HloInstruction]) -> list[HloKernel]:
        """Of one instruction of a computation; raises as `kernels_in_hlo`."""
        opcode = i.opcode.removesuffix("-start")
        if is_free(opcode) or is_collective(opcode):
            return []
        if opcode == "while":
            rounds = [k for called in i.computations("body") for k in self.of_computation(called)]
            if rounds and i.trips is None:
                raise InternalError(f"the trip count of {i.name} is not known")
            return [dataclasses.replace(k, times=k.times * (i.trips or 0)) for k in rounds]
        if opcode == "conditional":
            names = i.computations("branch_computations", "true_computation", "false_computation")
            return max(map(self.of_computation, names), key=lambda kernels: sum(k.nbytes for k in kernels))
        if opcode in ("call", "async"):
            return [k for called in i.computations("to_apply", "calls") for k in self.of_computation(called)]
        match = re.search(r'op_name="([^"]*)"', i.attributes)
        moved, product = _moved(self._module, i, body), _product(self._module, i, body)
        return [HloKernel(i.name, opcode, match[1] if match else "", 1, *moved, *product)]


def _product(module: Module, i: HloInstruction, body: Mapping[str, HloInstruction]) -> tuple[float, str]:
    """FLOPs of the products in a kernel, and the type of the operands of the largest."""
    if i.opcode == "fusion":
        fused = module.computations[i.computations("calls")[0]]
        products = [_product(module, each, fused) for each in fused.values()]
        return sum(flops for flops, _ in products), max(products)[1]
    match = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)', i.attributes)
    if i.opcode not in ("dot", "custom-call") or match is None:
        return 0.0, ""
    left = re.match(r"([a-z]\w*)\[([\d,]*)\]", body[i.operands[0]].type)
    made = re.search(r"\[([\d,]*)\]", i.type)
    if left is None or made is None:
        return 0.0, ""
    sizes = ints(left[2])
    return 2.0 * math.prod(ints(made[1])) * math.prod(sizes[k] for k in ints(match[1])), left[1]


def _moved(module: Module, i: HloInstruction, body: Mapping[str, HloInstruction]) -> tuple[float, float]:
    """Bytes read and written."""
    sizes = [_nbytes(body[operand]) for operand in i.operands]
    if i.opcode == "fusion":
        return _moved_by_fusion(module.computations[i.computations("calls")[0]], sizes)
    if i.opcode.endswith("-start"):  # of a copy: the types of both sides
        return sum(sizes), sum(sizes)
    if i.opcode in _PARTS:
        return _nbytes(i) + sum(sizes[1:]), _nbytes(i)
    if i.opcode in _UPDATES:
        update = sizes[_update(i)]
        return sum(sizes[1:]) + (update if i.opcode == "scatter" else 0), update
    results = array_bytes(i.type)
    if i.opcode == "custom-call" and len(results) > 1:
        elements = re.findall(r"([a-z]\w*)\[[\d,]*\]", i.type)
        results = [n for n, element in zip(results, elements, strict=True) if element not in ("s8", "u8")]
    return sum(sizes), sum(results)


def _nbytes(i: HloInstruction) -> int:
    return sum(array_bytes(i.type))


def _update(i: HloInstruction) -> int:
    """The operand that an update writes: of a scatter of one array, the last."""
    return 1 if i.opcode == "dynamic-update-slice" else len(i.operands) - 1


def _moved_by_fusion(body: Mapping[str, HloInstruction], sizes: list[int]) -> tuple[float, float]:
    """`sizes`: bytes of the operands.

    From the results on, what is needed of each value; never more than all of it, since kernels keep what they have.
    """
    (root,) = (i for i in body.values() if i.root)
    results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    needed: dict[str, float] = defaultdict(float)
    written = 0.0
    for result in results:
        at = _behind_views(result, body)
        if at.opcode in _UPDATES and _behind_views(body[at.operands[0]], body).opcode == "parameter":
            update = body[at.operands[_update(at)]]
            written += _nbytes(update)
            for operand in at.operands[1:]:
                needed[operand] = float(_nbytes(body[operand]))
            if at.opcode == "scatter":
                needed[at.operands[0]] = float(_nbytes(update))
        else:
            written += _nbytes(result)
            needed[result.name] = float(_nbytes(result))
    for i in reversed([*body.values()]):
        share = min(1.0, needed[i.name] / max(1, _nbytes(i)))
        needed[i.name] = share * _nbytes(i)
        if not share or i.opcode in ("parameter", "constant", "tuple"):
            continue
        for position, operand in enumerate(i.operands):
            whole = _nbytes(body[operand])
            if position == 0 and i.opcode in _PARTS:
                needed[operand] += min(whole, _elements(i) * share * whole / max(1, _elements(body[operand])))
            elif position == 0 and i.opcode in _UPDATES:
                needed[operand] += max(0, share * whole - _nbytes(body[i.operands[_update(i)]]))
            else:
                needed[operand] += share * whole
    read = 0.0
    for i in body.values():
        if i.opcode == "parameter":
            read += min(needed[i.name], sizes[int(i.operands[0])])
    return read, written


def _behind_views(i: HloInstruction, body: Mapping[str, HloInstruction]) -> HloInstruction:
    while i.opcode in ("bitcast", "get-tuple-element") and i.operands[0] in body:
        i = body[i.operands[0]]
    return i


def _elements(i: HloInstruction) -> int:
    return sum(math.prod(map(int, dims.split(","))) if dims else 1 for dims in re.findall(r"\[([\d,]*)\]", i.type))
