"""Writes docs/primitives.md from the rule table and the cases it is tested with: `make docs`."""

from __future__ import annotations

import string
from collections import defaultdict
from pathlib import Path

import jax

from autopar.ir.rule import DimMap, Rule
from autopar.passes.rules.omitted import OMITTED
from autopar.passes.rules.table import has_rule, rule_of
from autopar.tracing.build import CALLS, LINEAR_SOLVE, SHARD_MAP
from tests.passes.rules.cases import CLOSE, EXACT
from tests.passes.rules.harness import equations_of
from tests.passes.rules.primitives import primitives_of_jax

DOCUMENT = Path(__file__).parents[3] / "docs" / "primitives.md"

_OF_THE_BODY = "what its body allows: each cut of the body that comes out as it went in"
_WINDOWED = "every dimension; one with windows if array and windows divide alike, with a halo"
_REPLICATED = "nothing: its operands are gathered, with a warning"
# Those whose rules are tested in other ways than by a case.
ELSEWHERE = {
    "cholesky_update": "leading dimensions",
    "cond": _OF_THE_BODY,
    "custom_partitioning": "what the user's `sharding_rule` says; without one it is taken apart",
    "empty2": "a scalar",
    "geqp3": "leading dimensions",
    "one_minus_square": "every dimension",
    "ormqr": "leading dimensions",
    "pallas_call": "dimensions of the grid whose index goes unchanged into every result, in whole blocks",
    "philox4x32": "every dimension",
    "platform_index": "a scalar",
    "reduce_window": _WINDOWED,
    "relayout": "every dimension",
    "reshard": "every dimension",
    "rng_bit_generator": _REPLICATED,
    "rng_uniform": _REPLICATED,
    "scan": _OF_THE_BODY,
    "select_and_gather_add": _WINDOWED,
    "select_and_scatter_add": _WINDOWED,
    "stage": "every dimension",
    "threefry4x32": "every dimension",
    "while": _OF_THE_BODY,
    "zeros_like": "every dimension",
}

_HEAD = """# Primitives

What the planner can split of each primitive of JAX, over devices and, where the examples lie in it, over
microbatches. Written by `make docs` from the rule table and the cases that test it; jax {version}.

The primitives that a Pallas kernel is written in are left out: it is one `pallas_call`.

A letter is a dimension (or the major or minor part of one) that can be cut; wherever it occurs, all are cut together.
`*` is gathered: every device has it whole. `1` is of size 1 or broadcast. `sum b` leaves partial sums, which may stay
so through what is linear; `max b` and the like are combined at once. Nothing is said of dimensions that a size does
not divide: they are whole then.

Another primitive, a user's own among them, is gathered and runs whole on every device, with a warning that names the
line; `autopar.register_sharding_rule` gives it a rule. Calls are inlined, and what is in them splits by rules of its
own: {calls}. The mesh of a `shard_map` is left out: its axes become dimensions, its collectives operations along them.

"""


def _describe(dims: DimMap, letters: dict[int, str], rule: Rule) -> str:
    def one(dim: tuple[int, ...]) -> str:
        names = ["*" if f in rule.whole else letters.setdefault(f, string.ascii_lowercase[len(letters)]) for f in dim]
        return "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"

    return f"[{', '.join(map(one, dims))}]"


def signature(rule: Rule) -> str:
    """`[a, b] [b, c] → [a, c], sum b`."""
    letters: dict[int, str] = {}
    left = " ".join(_describe(dims, letters, rule) for dims in rule.inputs)
    right = " ".join(_describe(dims, letters, rule) for dims in rule.outputs)
    notes = [f"{op} {letters[f]}" for f, op in rule.reduced.items() if f in letters]
    return f"`{left} → {right}`" + "".join(f", {note}" for note in notes)


def _is_elementwise(rule: Rule) -> bool:
    (first, *others) = rule.outputs
    alike = all(dims == first for dims in others)
    broadcast = all(
        len(dims) in (0, len(first)) and all(dim in ((), full) for dim, full in zip(dims, first, strict=False))
        for dims in rule.inputs
    )
    return alike and broadcast and not rule.whole and not rule.reduced and not rule.separable


def rules_of_cases() -> dict[str, list[Rule]]:
    """The rules of the cases, by primitive."""
    found: dict[str, list[Rule]] = defaultdict(list)
    for fun, args in (*EXACT.values(), *CLOSE.values()):
        equation = equations_of(fun, *args)[-1]
        found[equation.primitive.name].append(rule_of(equation))
    return found


def document() -> str:
    """The text of docs/primitives.md."""
    known = primitives_of_jax()
    rules = rules_of_cases()
    elementwise = sorted(n for n, found in rules.items() if n in known and all(map(_is_elementwise, found)))
    calls = ", ".join(f"`{name}`" for name in sorted({*CALLS, LINEAR_SOLVE, SHARD_MAP} & known.keys()))
    lines = [_HEAD.format(version=jax.__version__, calls=calls)]
    lines += ["## Element by element: every dimension\n", ", ".join(f"`{n}`" for n in elementwise) + "\n"]
    lines += ["## Others\n", "| primitive | what can be split |", "| --- | --- |"]
    for name in sorted((rules.keys() | ELSEWHERE.keys()) & known.keys() - set(elementwise)):
        words = list(dict.fromkeys(map(signature, rules.get(name, ())))) or [ELSEWHERE[name]]
        lines.append(f"| `{name}` | {'<br>'.join(words)} |")
    lines += ["", "## Without a rule\n", "| why | primitives |", "| --- | --- |"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name in sorted(OMITTED.keys() & known.keys()):
        if not has_rule(name):
            reasons[OMITTED[name]].append(f"`{name}`")
    lines += [f"| {reason} | {', '.join(names)} |" for reason, names in reasons.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
