"""XLA's text of a compiled program (`jax.stages.Compiled.as_text()`), read into computations of instructions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from autopar.errors import InternalError


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One line of a computation."""

    name: str
    type: str  # as printed, e.g. "f32[8,4]{1,0}" or a tuple of such
    opcode: str
    operands: tuple[str, ...]  # names
    attributes: str
    root: bool

    def computations(self, *keys: str) -> list[str]:
        """Names of the computations called through any of these attributes."""
        names = []
        for key in keys:
            for listed, single in re.findall(rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes):
                names += re.findall(r"[\w.\-]+", listed) if listed else [single]
        return names

    @property
    def trips(self) -> int | None:
        """How often a while loop turns, if XLA knows it."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: Mapping[str, Mapping[str, HloInstruction]]  # in program order
    entry: str


_BITS = {"pred": 8, "token": 0, "opaque": 0}


def array_bytes(type_: str) -> list[int]:
    """Bytes of each array in a printed type."""
    sizes = []
    for element, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", type_):
        width = re.match(r"[a-z]+(\d+)", element)
        bits = _BITS[element] if element in _BITS else int(width[1]) if width else 0
        sizes.append(math.prod(ints(dims)) * bits // 8)
    return sizes


def parse(text: str) -> Module:
    """The computations of a program. Raises InternalError if this is no HLO text."""
    computations: dict[str, dict[str, HloInstruction]] = {}
    current: dict[str, HloInstruction] = {}
    entry = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*-> .*\{$", line)
        if header:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif instruction := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$", line):
            parsed = _instruction(instruction[2], instruction[3], root=bool(instruction[1]))
            current[parsed.name] = parsed
    if not entry:
        raise InternalError("this is no HLO text: it has no ENTRY computation")
    return Module(computations, entry)


def _instruction(name: str, text: str, *, root: bool) -> HloInstruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    type_, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside, opcode = rest[opening + 1 : closing - 1], rest[:opening]
    names = re.findall(r"%([\w.\-]+)", inside) or re.findall(r"[\w.\-]+", inside)
    return HloInstruction(name, type_, opcode, tuple(names), rest[closing:], root)


def _closing(text: str, opening: int) -> int:
    """One past the parenthesis that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise InternalError(f"unbalanced parentheses in HLO: {text[:200]!r}")


def ints(text: str) -> list[int]:
    """The whole numbers in a text."""
    return [int(n) for n in re.findall(r"\d+", text)]
