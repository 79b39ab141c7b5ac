"""What a compiled program holds at its peak, read from XLA's text: the live ranges of its buffers in its schedule.

XLA packs buffers into one allocation, with gaps; the sum here is a little less than what it sets aside. A value lives
from its instruction to its last reader. Views share their operand's buffer, and so do results that XLA writes in place
of an operand: of loops, of `dynamic-update-slice`, of fusions that end in one, of all-reduces.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from autopar.runtime.hlo_text import Instruction, Module, array_bytes, parse

_VIEWS = frozenset({"bitcast", "get-tuple-element", "tuple", "optimization-barrier", "while", "dynamic-update-slice"})
_IN_PLACE = frozenset({"all-reduce", "all-reduce-start"})


@dataclasses.dataclass(frozen=True)
class Held:
    """A buffer that is live at the peak."""

    nbytes: int
    opcode: str
    scope: str  # of the name scopes that the instruction was traced under


def held_at_peak(text: str) -> tuple[Held, ...]:
    """The temporary buffers of a compiled program when most of their bytes are live, the largest first.

    Neither its arguments nor its results are among them.
    """
    module = parse(text)
    found = _peak(module, module.entry, {})
    return tuple(sorted(found, key=lambda held: -held.nbytes))


def _peak(module: Module, name: str, known: dict[str, list[Held]]) -> list[Held]:
    if name in known:
        return known[name]
    body = module.computations[name]
    order = {instruction: k for k, instruction in enumerate(body)}
    owner = _owners(module, body)
    ends: dict[str, int] = {}
    for k, instruction in enumerate(body.values()):
        for operand in instruction.operands:
            for each in owner.get(operand, ()):
                ends[each] = k
    (root,) = (i for i in body.values() if i.root)
    given = {each for i in body.values() if i.opcode in ("parameter", "constant") for each in owner[i.name]}
    given.update(owner[root.name])  # results, and what is handed to the next round of a loop
    births: dict[int, list[str]] = {}
    for buffer in {each for owners in owner.values() for each in owners} - given:
        births.setdefault(order[buffer], []).append(buffer)
    live: dict[str, int] = {}
    now = most = 0
    best: list[Held] = []
    for k, instruction in enumerate(body.values()):
        for buffer in births.get(k, ()):
            live[buffer] = _made(body[buffer], body)
            now += live[buffer]
        inside = [
            held
            for called in instruction.computations("body", "branch_computations", "true_computation")
            for held in _peak(module, called, known)
        ]
        here = now + sum(held.nbytes for held in inside)
        if here > most:
            most, best = here, [_held(body[buffer], nbytes) for buffer, nbytes in live.items()] + inside
        for buffer in [b for b in live if ends.get(b, k) <= k]:
            now -= live.pop(buffer)
    known[name] = best
    return best


def _owners(module: Module, body: Mapping[str, Instruction]) -> dict[str, frozenset[str]]:
    """The buffers, by the instruction that makes them, in which each instruction's result lies."""
    owner: dict[str, frozenset[str]] = {}
    parts: dict[str, Sequence[frozenset[str]]] = {}  # of tuples, element by element
    for name, i in body.items():
        operands = [owner.get(operand, frozenset()) for operand in i.operands]
        if i.opcode == "tuple":
            parts[name] = operands
            owner[name] = frozenset().union(*operands)
        elif i.opcode == "get-tuple-element":
            index = int(re.search(r"index=(\d+)", i.attributes)[1])  # type: ignore[index]
            inner = parts.get(i.operands[0])
            owner[name] = operands[0] if inner is None else inner[index]
        elif i.opcode in _VIEWS or i.opcode in _IN_PLACE or i.opcode.endswith("-done"):
            owner[name] = operands[0] if operands else frozenset({name})
            if i.operands and i.operands[0] in parts:
                parts[name] = parts[i.operands[0]]
        elif i.opcode == "fusion" and (at := _updated(module, i)) is not None:
            owner[name] = operands[at]
        else:
            owner[name] = frozenset({name})
    return owner


def _updated(module: Module, fusion: Instruction) -> int | None:
    """The number of the operand in whose place a fusion writes its result, if it ends in an update of a slice."""
    called = module.computations[fusion.computations("calls")[0]]
    root = next(i for i in called.values() if i.root)
    while root.opcode == "bitcast":
        root = called[root.operands[0]]
    if root.opcode != "dynamic-update-slice":
        return None
    target = called[root.operands[0]]
    while target.opcode in ("bitcast", "convert", "copy"):
        target = called[target.operands[0]]
    return int(target.operands[0]) if target.opcode == "parameter" else None


def _made(instruction: Instruction, body: Mapping[str, Instruction]) -> int:
    """Bytes of a result; that of what has started repeats the operands."""
    made = sum(array_bytes(instruction.type))
    if instruction.opcode.endswith("-start"):
        made -= sum(sum(array_bytes(body[operand].type)) for operand in instruction.operands)
    return max(0, made)


def _held(instruction: Instruction, nbytes: int) -> Held:
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return Held(nbytes, instruction.opcode, found[1] if found else "")
