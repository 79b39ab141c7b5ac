"""Layers: the forward pass cut into contiguous pieces of like work, where little data flows between them.

A layer is what the stage search moves between stages; it is never split. As Alpa does (OSDI'22, section 5.2) the cuts
minimise the bytes that cross them while no layer does much more than its share of the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from autopar.errors import PlanError
from autopar.ir.graph import Equation, Value

FlopsFn = Callable[[Equation], float]  # floating-point operations of one equation
CrossesFn = Callable[[Value], bool]  # does sending this value to another stage cost traffic?
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

HEAVY_SHARE = 0.99  # the heaviest equations that do this share of all work together are called heavy
ROUNDING = 1e-9  # relative: sums of FLOPs in another order may differ by this
MORE_EVEN = 0.9  # stages are, if the largest of them has less than this share of the work that it has otherwise
TIE_BLOCK = 256  # rows of the matrices in which ties are compared: bounds their memory


def cluster_layers(
    equations: Sequence[Equation],
    num_layers: int,
    flops: FlopsFn,
    crosses: CrossesFn,
    max_imbalance: float = 0.25,
) -> tuple[int, ...]:
    """The layer of each equation, in 0..num_layers-1 and never decreasing along the program.

    `equations` are those of the forward pass in topological order. The cuts minimise the bytes that cross them: a
    value for which `crosses` holds counts at every cut between the equation that makes it and its last reader here.
    Among equals the work is spread most evenly (least sum of squares). Every layer holds a heavy equation, and at
    most (1 + max_imbalance) times its share of the FLOPs; where that is impossible, because one equation is larger
    or the pieces do not add up, at most (1 + max_imbalance) times what is about the smallest possible maximum.

    1. Position p is the place before equation p. `live[p]` = bytes that cross a cut there.
    2. From p the next cut may be at any q of a window: late enough that a heavy equation lies between, early enough
       that the FLOPs between stay below the limit. Both ends move right with p.
    3. `best[k][p]` = least bytes that cut what follows p into k layers = min over the window of
       live[q] + best[k - 1][q]: a range minimum, for all p at once. If there is none from the start, raise the limit.
    4. Walk forward over the positions that lie on some optimal cutting, and keep the least sum of squares.

    Raises PlanError if `num_layers` is below 1 or above the number of heavy equations.
    """
    work = np.array([flops(eqn) for eqn in equations], dtype=np.float64)
    heavy = heavy_equations(work)
    if not 1 <= num_layers <= max(1, int(heavy.sum())):
        raise PlanError(
            f"num_layers={num_layers}, but the forward pass has {int(heavy.sum())} heavy equations (together "
            f"{HEAVY_SHARE:.0%} of its FLOPs) and each layer needs one: choose 1 to {max(1, int(heavy.sum()))} layers"
        )
    if num_layers == 1:
        return (0,) * len(equations)
    live = live_bytes(equations, crosses)
    done = np.concatenate([[0.0], np.cumsum(work)]) * (num_layers / work.sum())  # in shares of one layer
    counts = np.concatenate([[0], np.cumsum(heavy)])
    first = np.searchsorted(counts, counts + 1)  # the window's start; len(live) where no heavy equation follows
    largest = float(np.diff(done).max())
    limit = 1 + max_imbalance
    if largest > limit:
        limit = largest * (1 + max_imbalance)
    while True:
        last = np.searchsorted(done, done + limit * (1 + ROUNDING), side="right")
        best = _least_traffic(live, first, last, num_layers)
        if np.isfinite(best[num_layers][0]):
            break
        limit *= 1 + max(max_imbalance, 0.1)
    cuts = _most_even(live, done, first, last, best)
    return tuple(int(layer) for layer in np.searchsorted(cuts, np.arange(len(equations)), side="right"))


def default_num_layers(equations: Sequence[Equation], flops: FlopsFn, limit: int, stages: int = 1) -> int:
    """A number of layers in 1..limit that suits the program.

    If most heavy equations form a repeated block, the number of blocks, or its largest divisor within the limit, so
    that layers are alike and cuts fall between blocks; unless a multiple of `stages`, of which there are probably as
    many, makes these more even. Otherwise one layer per heavy equation, as far as allowed.
    """
    work = np.array([flops(eqn) for eqn in equations], dtype=np.float64)
    heavy = [equations[i] for i in np.flatnonzero(heavy_equations(work)).tolist()]
    if not heavy:
        return 1
    kinds = [(eqn.primitive.name, flops(eqn), tuple(v.shape for v in eqn.outputs)) for eqn in heavy]
    number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    names = np.array([number[kind] for kind in kinds])
    repeats, period = _repeated_block(names)
    if repeats > 1 and repeats * period * 2 >= len(names):
        most = min(limit, repeats)
        divisor = max(n for n in range(1, most + 1) if repeats % n == 0)
        if stages <= most and _unevenness(repeats, stages) < MORE_EVEN * _unevenness(divisor, stages):
            return most - most % stages
        return divisor if divisor * 2 > most else most
    return max(1, min(limit, len(names)))


def _unevenness(parts: int, stages: int) -> float:
    """How many times the mean of all stages the largest has of equal parts."""
    return math.ceil(parts / stages) * stages / parts


def heavy_equations(work: Floats) -> npt.NDArray[np.bool_]:
    """Which equations carry the work: the largest ones that do `HEAVY_SHARE` of it together, and their equals.

    >>> heavy_equations(np.array([100.0, 0.1, 50.0, 0.1])).tolist()
    [True, False, True, False]
    """
    falling = np.sort(work)[::-1]
    if len(work) == 0 or falling[0] <= 0:
        return np.zeros(len(work), dtype=np.bool_)
    enough = np.searchsorted(np.cumsum(falling), HEAVY_SHARE * falling.sum())
    least = float(falling[min(int(enough), len(falling) - 1)])
    return np.asarray(work >= least * (1 - ROUNDING))


def live_bytes(equations: Sequence[Equation], crosses: CrossesFn) -> Floats:
    """For every position 0..n, the bytes made before it by these equations and read by one of them after it."""
    made: dict[Value, int] = {}
    last_read: dict[Value, int] = {}
    for position, eqn in enumerate(equations):
        last_read.update((value, position) for value in eqn.values if value in made)
        made.update((value, position) for value in eqn.outputs)
    change = np.zeros(len(equations) + 1)
    for value, reader in last_read.items():
        if crosses(value):
            change[made[value] + 1] += value.nbytes
            change[reader + 1] -= value.nbytes
    return np.cumsum(change)


def _least_traffic(live: Floats, first: Ints, last: Ints, num_layers: int) -> list[Floats]:
    """`best[k][p]`: least bytes over the cuts that divide what follows position p into k layers; inf if impossible."""
    best = [np.full(len(live), np.inf)]
    best[0][-1] = 0.0
    for _ in range(num_layers):
        best.append(_range_minimum(live + best[-1], first, last))
    return best


def _range_minimum(values: Floats, start: Ints, stop: Ints) -> Floats:
    """min(values[start:stop]) for many ranges, inf for empty ones, by minima over power-of-two blocks."""
    length = stop - start
    result = np.full(len(start), np.inf)
    blocks, size = values, 1  # blocks[i] = min(values[i : i + size])
    while len(blocks):
        here = np.flatnonzero((length >= size) & (length < 2 * size))
        result[here] = np.minimum(blocks[start[here]], blocks[stop[here] - size])
        blocks, size = np.minimum(blocks[:-size], blocks[size:]), 2 * size
    return result


def _most_even(live: Floats, done: Floats, first: Ints, last: Ints, best: list[Floats]) -> Ints:
    """The cuts of least traffic whose layers have the least sum of squares of work."""
    num_layers = len(best) - 1
    here = np.array([0])  # positions on an optimal cutting, after so many layers
    squares = np.array([0.0])  # least sum of squares that leads to each
    steps: list[tuple[Ints, Ints]] = []  # per layer: the positions, and for each the index of its predecessor
    for remaining in range(num_layers, 0, -1):
        total = live + best[remaining - 1]
        least = np.full(len(live), np.inf)
        come_from = np.zeros(len(live), dtype=np.int64)
        for block in range(0, len(here), TIE_BLOCK):
            rows = here[block : block + TIE_BLOCK]
            columns = np.arange(first[rows[0]], last[rows[-1]])  # the windows' ends never decrease
            tight = (
                (columns >= first[rows, None])
                & (columns < last[rows, None])
                & (total[columns] == best[remaining][rows, None])
            )
            some = tight.any(axis=0)
            columns, tight = columns[some], tight[:, some]
            sums = squares[block : block + TIE_BLOCK, None] + (done[columns] - done[rows, None]) ** 2
            sums[~tight] = np.inf
            row = sums.argmin(axis=0)
            value = sums[row, np.arange(len(columns))]
            better = value < least[columns]
            least[columns[better]] = value[better]
            come_from[columns[better]] = row[better] + block
        here = np.flatnonzero(np.isfinite(least))
        squares = least[here]
        steps.append((here, come_from[here]))
    cuts = []
    index = 0  # the walk ends at one position: the end of the program
    for positions, predecessor in reversed(steps):
        cuts.append(int(positions[index]))
        index = int(predecessor[index])
    return np.array(cuts[:0:-1], dtype=np.int64)


def _repeated_block(names: npt.NDArray[np.int64]) -> tuple[int, int]:
    """(repeats, period) of the block whose consecutive repetition covers most of the sequence; the shortest such."""
    repeats, period = 1, len(names)
    covered = 0
    for candidate in range(1, len(names) // 2 + 1):
        same = np.concatenate([[False], names[:-candidate] == names[candidate:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        runs = edges[1::2] - edges[::2]
        if len(runs) == 0:
            continue
        times = int(runs.max()) // candidate + 1
        if times > 1 and times * candidate > covered:
            repeats, period, covered = times, candidate, times * candidate
    return repeats, period
