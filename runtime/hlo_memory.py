"""What a compiled program holds at its peak, read from XLA's text: the live ranges of its buffers in its schedule.

XLA packs buffers into one allocation, with gaps; the sum here is a little less than what it sets aside. A value lives
from its instruction to its last reader. Views share their operand's buffer, and so do results that XLA writes in place
of an operand: of loops, of `dynamic-update-slice`, of fusions that end in one, of all-reduces.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from autopar.runtime.hlo_text import HloInstruction, Module, array_bytes, parse

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
    buffers = _peak(module, module.entry, {})
    return tuple(sorted(buffers, key=lambda held: -held.nbytes))


_Buffer = tuple[str, int]  # the instruction that makes it, the number of its result


def _peak(module: Module, name: str, known: dict[str, list[Held]]) -> list[Held]:
    if name in known:
        return known[name]
    body = module.computations[name]
    lies = _places(module, body)
    ends: dict[_Buffer, int] = {}
    for k, instruction in enumerate(body.values()):
        # What picks one of several results needs only that one.
        picks = instruction.opcode == "get-tuple-element"
        for place in [lies[instruction.name]] if picks else [lies.get(operand, ()) for operand in instruction.operands]:
            ends.update(dict.fromkeys(_all(place), k))
    (root,) = (i for i in body.values() if i.root)
    given = {buffer for i in body.values() if i.opcode in ("parameter", "constant") for buffer in _all(lies[i.name])}
    given.update(_all(lies[root.name]))  # results, and what is handed to the next round of a loop
    live: dict[_Buffer, int] = {}
    now = most = 0
    best: list[Held] = []
    for k, instruction in enumerate(body.values()):
        for number, nbytes in enumerate(_made(instruction, body)):
            buffer = (instruction.name, number)
            if buffer in _all(lies[instruction.name]) and buffer not in given:
                live[buffer] = nbytes
                now += nbytes
        inside = [
            held
            for called in instruction.computations("body", "branch_computations", "true_computation")
            for held in _peak(module, called, known)
        ]
        here = now + sum(held.nbytes for held in inside)
        if here > most:
            most, best = here, [_held(body[made], nbytes) for (made, _), nbytes in live.items()] + inside
        for buffer in [b for b in live if ends.get(b, k) <= k]:
            now -= live.pop(buffer)
    known[name] = best
    return best


_Place = Sequence[frozenset[_Buffer]]  # by result


def _all(place: _Place) -> frozenset[_Buffer]:
    return frozenset().union(*place)


def _places(module: Module, body: Mapping[str, HloInstruction]) -> dict[str, _Place]:
    """The buffers in which each instruction's results lie."""
    places: dict[str, _Place] = {}
    for name, i in body.items():
        operands = [places.get(operand, ()) for operand in i.operands]
        if i.opcode == "tuple":
            places[name] = [_all(place) for place in operands]
        elif i.opcode == "get-tuple-element":
            index = int(re.search(r"index=(\d+)", i.attributes)[1])  # type: ignore[index]
            whole = operands[0]
            places[name] = [whole[index] if index < len(whole) else _all(whole)]
        elif operands and (i.opcode in _VIEWS or i.opcode in _IN_PLACE or i.opcode.endswith("-done")):
            places[name] = operands[0]
        elif i.opcode == "fusion" and (at := _updated(module, i)) is not None:
            places[name] = operands[at]
        else:
            places[name] = [frozenset({(name, number)}) for number in range(len(_made(i, body)))]
    return places


def _updated(module: Module, fusion: HloInstruction) -> int | None:
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


def _made(instruction: HloInstruction, body: Mapping[str, HloInstruction]) -> list[int]:
    """Bytes of each result; what has started has one, which its operands are no part of."""
    made = array_bytes(instruction.type)
    if instruction.opcode.endswith("-start"):
        given = sum(sum(array_bytes(body[operand].type)) for operand in instruction.operands)
        return [max(0, sum(made) - given)]
    return made


def _held(instruction: HloInstruction, nbytes: int) -> Held:
    match = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return Held(nbytes, instruction.opcode, match[1] if match else "")
