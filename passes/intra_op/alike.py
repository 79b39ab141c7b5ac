"""Which equations of a stage do the same to arrays that come from and go to the same.

Models repeat their layers, and a good plan for one of them is a good plan for all. While stages are searched, alike
equations choose together, so that a problem does not grow with the number of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

from autopar.ir.graph import Equation, Literal, Value
from autopar.ir.program import Program

Place = tuple[int, int]  # program, equation id


def alike_equations(
    programs: Sequence[Program], signature: Callable[[Program, Equation], Hashable], kind: Callable[[Value], Hashable]
) -> Mapping[Place, int]:
    """A number per equation, the same for alike ones.

    `signature` says what matters of an equation by itself, `kind` of a value that no equation of the programs makes.
    Alike are equations that look alike, read from and give to such that look alike, and are both in even or both in odd
    layers: of equal layers in a row, a good plan may treat every second one differently (a matrix split by columns, the
    next by rows), but hardly more than that.
    """
    numbers: dict[Hashable, int] = {}
    signatures: dict[Place, int] = {}
    maker: dict[tuple[int | None, Value], int] = {}  # the signature of what makes a value
    readers: dict[tuple[int | None, Value], list[tuple[int, int]]] = defaultdict(list)  # signature, position

    def slot(program: Program, value: Value) -> tuple[int | None, Value]:
        return (program.index if value in program.copies else None, value)

    for program in programs:
        for eqn in program.equations:
            number = signatures[program.index, eqn.id] = numbers.setdefault(signature(program, eqn), len(numbers))
            maker.update((slot(program, v), number) for v in eqn.outputs)
            for position, v in enumerate(eqn.inputs):
                if not isinstance(v, Literal):
                    readers[slot(program, v)].append((number, position))
    alike: dict[Place, int] = {}
    classes: dict[Hashable, int] = {}
    counts: dict[int, int] = defaultdict(int)
    for program in programs:
        for eqn in program.equations:
            place = (program.index, eqn.id)
            slots = [slot(program, v) for v in eqn.inputs if isinstance(v, Value)]
            sources = tuple(maker[s] if s in maker else (kind(s[1]),) for s in slots)
            targets = tuple(tuple(sorted(readers[slot(program, v)])) for v in eqn.outputs)
            role = classes.setdefault((signatures[place], sources, targets), len(classes))
            alike[place] = 2 * role + counts[role] % 2
            counts[role] += 1
    return alike
