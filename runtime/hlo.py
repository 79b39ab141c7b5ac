"""The collectives of a compiled program, read from XLA's text (`jax.stages.Compiled.as_text()`).

What XLA writes is brought back to the terms of `Collective`:

- Payloads come from the operands: the results of the asynchronous forms (`all-gather-start`, …) are tuples of
  operands, results and contexts that differ between backends. `-done` halves are not counted again.
- A combined collective (several operands) counts as one collective an operand, also where the GPU's
  compiler concatenates the operands of several all-reduces; but an all-to-all without
  `dimensions`, whose operands are the slices for each peer (how the CPU writes it), is one collective.
- Partition numbers are positions in the mesh, row-major. Groups must be those of a set of mesh axes; pairs of a
  permute belong to the axes along which some pair differs. What moves nothing is not counted.
- XLA may send 16-bit floats as float32. A reduction that it promoted so calls a computation named `…_promoted`;
  any other collective counts as 16-bit if all its operands were just widened from 16 bit or all its uses
  just narrow to 16 bit. Where neither can be seen, the 32 bits that are really sent count.
- A while loop multiplies by its known trip count.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from autopar.errors import InternalError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Collective, StepKind
from autopar.runtime.hlo_text import HloInstruction, Module, array_bytes, ints, parse

_KINDS: Mapping[str, StepKind] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
# The others that send; a count that ignored them would be wrong in silence.
_UNKNOWN = frozenset({"ragged-all-to-all", "collective-broadcast", "send", "recv"})
_LAYOUT_ONLY = frozenset({"copy", "bitcast", "transpose", "reshape", "slice", "concatenate", "get-tuple-element"})


def collectives_in_hlo(text: str, mesh: Mesh, *, as_sent: bool = False) -> tuple[Collective, ...]:
    """The collectives that one run of the program carries out, in the order of the text, callees in place.

    `as_sent`: 16-bit floats that are sent as float32 count as such.

    Raises InternalError for a communicating loop without a known trip count, for branches that communicate
    differently, for groups that are no mesh axes, and for communication that it does not know.
    """
    module = parse(text)
    return tuple(HloCollectives(module, mesh, as_sent=as_sent).of_computation(module.entry))


class HloCollectives:
    """What a program's instructions send."""

    def __init__(self, module: Module, mesh: Mesh, *, as_sent: bool = False) -> None:
        self._module, self._mesh, self._as_sent = module, mesh, as_sent
        self._known: dict[str, list[Collective]] = {}

    def of_computation(self, name: str) -> list[Collective]:
        """In the order of the text; raises as `collectives_in_hlo`."""
        if name not in self._known:
            body = self._module.computations[name]
            self._known[name] = [c for instruction in body.values() for c in self.of(instruction, name)]
        return self._known[name]

    def of(self, instruction: HloInstruction, computation: str) -> list[Collective]:
        """Of one instruction of a computation; raises as `collectives_in_hlo`."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _KINDS:
            kind = _KINDS[opcode]
            return _collectives_of(self._module, computation, instruction, kind, self._mesh, self._as_sent)
        if opcode in _UNKNOWN:
            raise InternalError(f"cannot count {instruction.opcode} in compiled HLO")
        if opcode == "while":
            body = [c for called in instruction.computations("body", "condition") for c in self.of_computation(called)]
            if body and instruction.trips is None:
                raise InternalError(f"{instruction.name} communicates and its trip count is not known")
            return body * (instruction.trips or 0)
        if opcode == "conditional":
            names = instruction.computations("branch_computations", "true_computation", "false_computation")
            branches = [self.of_computation(called) for called in names]
            if any(branch != branches[0] for branch in branches):
                raise InternalError(f"the branches of {instruction.name} communicate differently")
            return branches[0]
        names = instruction.computations("calls", "to_apply", "called_computations")
        return [c for called in names for c in self.of_computation(called)]


def _collectives_of(
    module: Module, computation: str, instruction: HloInstruction, kind: StepKind, mesh: Mesh, as_sent: bool
) -> list[Collective]:
    if kind == "permute":
        axes, members = _permute_axes(instruction.attributes, mesh), 1
    else:
        axes = _group_axes(instruction.attributes, mesh)
        members = math.prod(mesh.axis_size(axis) for axis in axes)
    if not axes:
        return []
    body = module.computations[computation]
    sizes = [sum(array_bytes(body[operand].type)) for operand in instruction.operands]
    if kind == "all_reduce":
        sizes = [size for operand in instruction.operands for size in _combined(module, computation, operand)]
    if not as_sent and _sent_wider(module, computation, instruction):
        sizes = [size // 2 for size in sizes]
    if kind == "all_gather":
        sizes = [size * members for size in sizes]
    if kind == "all_to_all" and "dimensions=" not in instruction.attributes:
        sizes = [sum(sizes)]
    return [Collective(kind, axes, size) for size in sizes]


def _combined(module: Module, computation: str, name: str) -> list[int]:
    """Bytes of the operands that XLA laid end to end to reduce them at once; of the value itself if it did not."""
    body = module.computations[computation]
    instruction = body[name]
    if instruction.opcode == "fusion":
        called = instruction.computations("calls")[0]
        return _combined(module, called, next(i.name for i in module.computations[called].values() if i.root))
    # What the user concatenated has the user's name.
    if instruction.opcode == "concatenate" and "op_name=" not in instruction.attributes:
        return [sum(array_bytes(body[operand].type)) for operand in instruction.operands]
    return [sum(array_bytes(instruction.type))]


# --- 16-bit floats sent as 32-bit -------------------------------------------------------------------------------


def _sent_wider(module: Module, computation: str, instruction: HloInstruction) -> bool:
    body = module.computations[computation]
    if any(not body[operand].type.startswith("f32[") for operand in instruction.operands):
        return False
    reduction = instruction.computations("to_apply")
    if reduction:
        return reduction[0].endswith("_promoted")
    return all(_widens(module, computation, operand) for operand in instruction.operands) or _narrows(
        module, computation, instruction.name
    )


def _is_16_bit(type_: str) -> bool:
    return type_.startswith(("bf16[", "f16["))


def _widens(module: Module, computation: str, name: str) -> bool:
    """Whether a value is a converted 16-bit float, perhaps moved about since."""
    body = module.computations[computation]
    instruction = body[name]
    if instruction.opcode == "convert":
        return _is_16_bit(body[instruction.operands[0]].type)
    if instruction.opcode == "fusion":
        called = instruction.computations("calls")[0]
        root = next(i.name for i in module.computations[called].values() if i.root)
        return _widens(module, called, root)
    if instruction.opcode in _LAYOUT_ONLY:
        return all(_widens(module, computation, operand) for operand in instruction.operands)
    return False


def _narrows(module: Module, computation: str, name: str) -> bool:
    """Whether every use of a value only moves it about and then converts it to a 16-bit float."""
    body = module.computations[computation]
    uses = [i for i in body.values() if name in i.operands]

    def narrows(use: HloInstruction) -> bool:
        if use.opcode == "convert":
            return _is_16_bit(use.type)
        if use.opcode == "fusion":
            called = use.computations("calls")[0]
            inner = module.computations[called].values()
            numbers = [str(k) for k, operand in enumerate(use.operands) if operand == name]
            # A parameter's "operand" is its number.
            parameters = [i.name for i in inner if i.opcode == "parameter" and i.operands[0] in numbers]
            return all(_narrows(module, called, parameter) for parameter in parameters)
        moves_about = use.opcode in _LAYOUT_ONLY or use.opcode.endswith("-done")
        return moves_about and not use.root and _narrows(module, computation, use.name)

    return bool(uses) and all(narrows(use) for use in uses)


# --- from device groups to mesh axes ----------------------------------------------------------------------------


def _group_axes(attributes: str, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes whose groups of positions are the replica groups of an instruction."""
    groups = _groups(attributes, mesh)
    axes = _differing_axes(((group[0], member) for group in groups for member in group), mesh)
    size = math.prod(mesh.axis_size(axis) for axis in axes)
    if any(len(set(group)) != size for group in groups) or size * len(groups) != mesh.size:
        raise InternalError(f"replica groups {groups} are no axes of mesh {mesh.axes}={mesh.shape}")
    return axes


# The three ways to print replica groups: "{{0,1},{2,3}}"; "[2,2]<=[2,2]T(1,0)"; and, with the names of the mesh
# that the partitioner used, "mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y':(2)2}", where the device numbers are
# left out if they count upwards, and ":(2)2" means the part of size 2 that has a part of size 2 before it.
_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\]"
    r"(?:, device_ids=\((?:\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<devices>[\d,]+))\))?"
    r" \{(?P<axes>[^}]*)\}"
)


def _groups(attributes: str, mesh: Mesh) -> list[list[int]]:
    """The replica groups of an instruction, as positions."""
    if iota := _IOTA.search(attributes):
        return _rows(_transposed(ints(iota[2]), ints(iota[3] or "")), ints(iota[1])[-1])
    if named := _NAMED.search(attributes):
        return _named_groups(named)
    if explicit := _EXPLICIT.search(attributes):
        # No groups at all: one group of everybody.
        return [ints(group) for group in re.findall(r"\{([\d,]*)\}", explicit[1])] or [list(range(mesh.size))]
    raise InternalError(f"cannot read the replica groups in {attributes[:200]!r}")


def _transposed(shape: list[int], order: list[int]) -> np.ndarray:
    """0, 1, 2, .. in this shape, its dimensions in another order ([]: as they are)."""
    return np.arange(math.prod(shape)).reshape(shape).transpose(order or range(len(shape)))


def _rows(numbers: np.ndarray, length: int) -> list[list[int]]:
    return [[int(n) for n in row] for row in numbers.reshape(-1, length)]


def _named_groups(named: re.Match[str]) -> list[list[int]]:
    """The replica groups of a match of `_NAMED`.

    Every axis is cut at the borders of the parts that are taken of it, so that each part is some dimensions of one
    grid of devices; groups run along the parts.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", named["sizes"])}
    parts = [
        (name, int(before or 1), int(size or sizes.get(name, 0)))
        for name, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", named["axes"])
    ]
    if any(name not in sizes for name, _, _ in parts):
        raise InternalError(f"the replica groups {named[0]!r} name an axis that their mesh lacks")
    shape: list[int] = []
    dimension: dict[tuple[str, int], int] = {}  # (axis, product of the sizes before on this axis) -> index in `shape`
    for name, size in sizes.items():
        taken = {edge for axis, before, part in parts if axis == name for edge in (before, before * part)}
        for here, after in itertools.pairwise(sorted({1, size} | taken)):
            dimension[name, here] = len(shape)
            shape.append(after // here)
    inside = [
        dim for name, before, part in parts for (axis, here), dim in dimension.items()
        if axis == name and before <= here < before * part
    ]  # fmt: skip
    outside = [dim for dim in range(len(shape)) if dim not in inside]
    if named["devices"]:
        numbers = np.array(ints(named["devices"]))
    else:
        numbers = _transposed(ints(named["shape"] or str(math.prod(shape))), ints(named["order"] or ""))
    groups = numbers.reshape(shape).transpose(outside + inside)
    return _rows(groups, math.prod(shape[dim] for dim in inside))


def _permute_axes(attributes: str, mesh: Mesh) -> tuple[str, ...]:
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if pairs is None:
        raise InternalError(f"cannot read the source-target pairs in {attributes[:200]!r}")
    numbers = ints(pairs[1])
    return _differing_axes(zip(numbers[::2], numbers[1::2], strict=True), mesh)


def _differing_axes(pairs: Iterable[tuple[int, int]], mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the positions of some pair differ, in mesh order."""
    differ: set[str] = set()
    for one, other in pairs:
        at_one, at_other = np.unravel_index(one, mesh.shape), np.unravel_index(other, mesh.shape)
        differ.update(axis for axis, i, j in zip(mesh.axes, at_one, at_other, strict=True) if i != j)
    return tuple(axis for axis in mesh.axes if axis in differ)
