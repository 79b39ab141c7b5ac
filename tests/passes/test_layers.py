"""Clustering against arithmetic by hand and against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from jax.extend.core import Primitive

from autopar.errors import PlanError
from autopar.ir.graph import Equation, Phase, Value
from autopar.passes.layers import (
    cluster_layers,
    default_num_layers,
    heavy_equations,
    live_bytes,
)

DOT, LIGHT = Primitive("dot"), Primitive("light")
F32 = np.dtype("float32")


class Program:
    """Equations written one after another; values have so many float32 elements."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.work: dict[int, float] = {}
        self.ids: Iterator[int] = itertools.count()

    def value(self, elements: int) -> Value:
        return Value(next(self.ids), (elements,), F32)

    def add(self, work: float, elements: int, *inputs: Value, primitive: Primitive = DOT) -> Value:
        output = self.value(elements)
        eqn = Equation(len(self.equations), primitive, {}, inputs, (output,), Phase.FORWARD)
        self.equations.append(eqn)
        self.work[eqn.id] = work
        return output

    def flops(self, eqn: Equation) -> float:
        return self.work[eqn.id]


def always(value: Value) -> bool:
    return True


def residual_blocks(number: int, head: bool = False) -> Program:
    """x -> x + out(act(up(x))) of width 8, hidden width 32, so that a block's border is the narrow place."""
    program = Program()
    x = program.value(8)
    for _ in range(number):
        hidden = program.add(1000.0, 32, x, program.value(256))
        active = program.add(1.0, 32, hidden, primitive=LIGHT)
        out = program.add(1000.0, 8, active, program.value(256))
        x = program.add(1.0, 8, x, out, primitive=LIGHT)
    if head:
        program.add(500.0, 64, x)
    return program


def test_live_bytes_counts_a_value_at_every_cut_it_crosses() -> None:
    program = Program()
    a = program.add(1.0, 1, program.value(100))  # an input is not made here: it never counts
    b = program.add(1.0, 2, a)
    c = program.add(1.0, 4, b)
    program.add(1.0, 8, a, c)
    # Before equation 1: a (4 bytes). Before 2: a, b (4 + 8). Before 3: a, c (4 + 16). The last result is not read.
    assert live_bytes(program.equations, always).tolist() == [0, 4, 12, 20, 0]
    assert live_bytes(program.equations, lambda value: value is not a).tolist() == [0, 0, 8, 16, 0]


def test_cuts_fall_between_identical_blocks() -> None:
    program = residual_blocks(6)
    layers = cluster_layers(program.equations, 6, program.flops, always)
    assert layers == tuple(block for block in range(6) for _ in range(4))
    # Three layers of two blocks: among the narrow places those that balance.
    assert cluster_layers(program.equations, 3, program.flops, always) == tuple(k for k in range(3) for _ in range(8))


def test_values_that_do_not_cross_do_not_matter() -> None:
    program = Program()
    table = program.add(1.0, 1000, program.value(1))  # a cheap mask, made once and read everywhere
    x = program.value(1)
    for elements in (9, 1, 9, 9):
        x = program.add(100.0, elements, x, table)
    small = cluster_layers(program.equations, 2, program.flops, lambda value: value is not table, max_imbalance=0.5)
    assert small == (0, 0, 0, 1, 1)
    # If the table counts, reading it before the cut does not help: it is needed on both sides anyway.
    assert cluster_layers(program.equations, 2, program.flops, always, max_imbalance=0.5) == small


def test_the_limit_is_kept_though_a_cheaper_cut_exists() -> None:
    program = Program()
    x = program.value(1)
    for elements in (1, 5, 5, 5):
        x = program.add(100.0, elements, x)
    # The cheap cut (4 bytes) leaves 100 + 300 FLOPs: 1.5 shares of 200.
    assert cluster_layers(program.equations, 2, program.flops, always, max_imbalance=0.25) == (0, 0, 1, 1)
    assert cluster_layers(program.equations, 2, program.flops, always, max_imbalance=0.5) == (0, 1, 1, 1)


def test_the_limit_gives_way_to_an_equation_that_exceeds_it() -> None:
    program = residual_blocks(2)
    program.add(20_000.0, 64, program.equations[-1].outputs[0])  # 20000 of 24004 FLOPs: 2.5 shares of three
    layers = cluster_layers(program.equations, 3, program.flops, always)
    assert layers == (0,) * 4 + (1,) * 4 + (2,)


def partitions(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, n), parts - 1):
        yield (0, *cuts, n)


def evaluate(program: Program, bounds: Sequence[int]) -> tuple[int, float, float]:
    """(bytes over the cuts, sum of squares of work, most work), from the definition, value by value."""
    layer = {i: k for k, (low, high) in enumerate(itertools.pairwise(bounds)) for i in range(low, high)}
    made = {v: layer[e.id] for e in program.equations for v in e.outputs}
    last = {v: layer[e.id] for e in program.equations for v in e.values}
    traffic = sum(v.nbytes * (last[v] - made[v]) for v in made if v in last)
    work = [sum(program.work[i] for i in range(low, high)) for low, high in itertools.pairwise(bounds)]
    return traffic, sum(w * w for w in work), max(work)


@pytest.mark.parametrize("seed", range(150))
def test_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    program = Program()
    values = [program.value(1)]
    for _ in range(draw.randint(5, 11)):
        # Few distinct numbers, so that there are ties; whole numbers, so that sums are exact.
        inputs = draw.choices(values[-4:], k=2)
        values.append(program.add(draw.choice([0, 1, 64, 64, 128]), draw.choice([1, 1, 2, 3]), *inputs))
    n = len(program.equations)
    work = np.array([program.work[i] for i in range(n)], dtype=float)
    heavy = heavy_equations(work)
    imbalance = draw.choice([0.1, 0.25, 1.0])
    for num_layers in range(1, int(heavy.sum()) + 1):
        layers = cluster_layers(program.equations, num_layers, program.flops, always, imbalance)
        bounds = [0, *(layers.index(k) for k in range(1, num_layers)), n]
        assert list(layers) == sorted(layers)
        assert set(layers) == set(range(num_layers))
        found = evaluate(program, bounds)
        whole = [b for b in partitions(n, num_layers) if all(heavy[i:j].any() for i, j in itertools.pairwise(b))]
        costs = [evaluate(program, b) for b in whole]
        limit = (1 + imbalance) * work.sum() / num_layers
        if any(most <= limit * (1 + 1e-12) for _, _, most in costs):
            assert found[:2] == min(cost[:2] for cost in costs if cost[2] <= limit * (1 + 1e-12))
        else:
            # The limit was raised: the cut is the best one for some higher limit, at least for its own maximum.
            assert found[:2] == min(cost[:2] for cost in costs if cost[2] <= found[2])
            least = min(most for _, _, most in costs)
            assert found[2] <= least * (1 + max(imbalance, 0.1)) * (1 + 1e-9)


@pytest.mark.parametrize("num_layers", [-1, 0, 13, 100])
def test_impossible_numbers_are_refused(num_layers: int) -> None:
    program = residual_blocks(6)  # 12 dots
    with pytest.raises(PlanError, match=f"num_layers={num_layers}, .* has 12 heavy equations .* choose 1 to 12"):
        cluster_layers(program.equations, num_layers, program.flops, always)


def test_one_layer_needs_no_heavy_equation() -> None:
    program = Program()
    program.add(0.0, 1, program.value(1))
    assert cluster_layers(program.equations, 1, program.flops, always) == (0,)
    assert cluster_layers([], 1, program.flops, always) == ()


def test_every_layer_is_heavy() -> None:
    program = residual_blocks(6)
    layers = cluster_layers(program.equations, 12, program.flops, always)
    dots = [layer for layer, eqn in zip(layers, program.equations, strict=True) if eqn.primitive is DOT]
    assert dots == list(range(12))


def test_a_long_program_of_equal_cuts_is_balanced() -> None:
    """The worst case for ties: every position costs the same. 4000 equations of 1 FLOP in 10 layers of 400."""
    program = Program()
    x = program.value(1)
    for _ in range(4000):
        x = program.add(1.0, 1, x)
    layers = cluster_layers(program.equations, 10, program.flops, always)
    assert layers == tuple(i // 400 for i in range(4000))


@pytest.mark.parametrize(
    ("blocks", "head", "limit", "expected"),
    [
        (6, False, 16, 6),  # a layer a block
        (24, True, 16, 12),  # the largest divisor within the limit; the head does not disturb
        (7, False, 4, 4),  # 7 has no divisor of use: the limit
        (1, False, 16, 2),  # nothing repeats but the two dots themselves
        (6, False, 1, 1),
    ],
)
def test_default_number_of_layers(blocks: int, head: bool, limit: int, expected: int) -> None:
    program = residual_blocks(blocks, head)
    assert default_num_layers(program.equations, program.flops, limit) == expected


@pytest.mark.parametrize(
    ("blocks", "stages", "expected"),
    [
        (22, 1, 11),
        (22, 11, 11),
        (22, 8, 16),  # of 11 layers, a stage of two would have 4 blocks; of 16 it has 3
        (24, 8, 16),
        (24, 12, 12),
        (24, 17, 12),  # more than there may be layers
    ],
)
def test_layers_that_stages_can_share_evenly(blocks: int, stages: int, expected: int) -> None:
    program = residual_blocks(blocks, False)
    assert default_num_layers(program.equations, program.flops, 16, stages) == expected


def test_default_number_of_layers_without_repetition_or_work() -> None:
    program = Program()
    x = program.value(1)
    for k in range(5):
        x = program.add(1000.0 + k, 1, x)
    assert default_num_layers(program.equations, program.flops, 16) == 5
    assert default_num_layers(program.equations, program.flops, 3) == 3
    assert default_num_layers(program.equations, lambda eqn: 0.0, 16) == 1
