"""The passes over suffixes of a pipeline by which `plan_stages` is exact.

Bounds backwards and forwards, then all suffixes that none dominates.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from autopar.passes.stage_oracle import Turns, in_flight
from autopar.passes.stage_table import Bools, Floats, Ints, KnownCosts, Places, StageRow

# Criteria are arrays (3, n): the sum of seconds per microbatch, the largest of them, the largest seconds per step.
# Placing one piece of a pipeline beside another adds the first row and takes the maximum of the others.


def _join(left: Floats, right: Floats) -> Floats:
    return np.stack([left[0] + right[0], np.maximum(left[1], right[1]), np.maximum(left[2], right[2])])


_Tail = tuple[StageRow, "_Tail"] | None  # the stages of a suffix: the first one and the rest


@dataclasses.dataclass
class BestPipeline:
    """The quickest plan so far."""

    turns: Turns
    time: float = np.inf  # seconds
    stages: _Tail = None

    @property
    def times_slowest(self) -> float:
        """How often the slowest stage's time counts, beside the sum of all."""
        return self.turns.num_microbatches - 1 / self.turns.rounds

    def time_of(self, criteria: Floats) -> Floats:
        slowest = self.times_slowest * criteria[1] if self.times_slowest else 0.0  # 0 * inf would be NaN
        return np.asarray(criteria[0] / self.turns.rounds + slowest + criteria[2])

    def beaten_by(self, criteria: Floats) -> Bools:
        return np.asarray(self.time_of(criteria) < self.time)

    def update(self, criteria: Floats, plans: list[_Tail]) -> None:
        time = self.time_of(criteria)
        index = int(time.argmin())
        if time[index] < self.time:
            self.time, self.stages = float(time[index]), plans[index]


@dataclasses.dataclass(frozen=True, eq=False)
class _Stages:
    """The stages that may stand with the same number of stages behind them."""

    mesh: Ints  # index in `Places`
    span: Ints  # (2, n): first layer, layer after the last
    source: Ints  # the state before the stage: sorted
    target: Ints  # the state after it
    cost: Floats  # (3, n): per microbatch, per step, memory

    @property
    def criteria(self) -> Floats:
        return self.cost[[0, 0, 1]]

    def criteria_of(self, index: int) -> Floats:
        return self.cost[[0, 0, 1], index, None]

    def keep(self, mask: Bools) -> _Stages:
        return _Stages(self.mesh[mask], self.span[:, mask], self.source[mask], self.target[mask], self.cost[:, mask])

    def row(self, index: int) -> StageRow:
        micro, step, memory = (float(x) for x in self.cost[:, index])
        return int(self.mesh[index]), int(self.span[0, index]), int(self.span[1, index]), micro, step, memory


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """What the backward pass found for one number of remaining stages."""

    stages: _Stages
    suffix: Floats  # (3, states): least value of each criterion by itself over what follows these stages


def unrolled(tail: _Tail) -> list[StageRow]:
    """The stages of a suffix, the first one first."""
    rows = []
    while tail is not None:
        row, tail = tail
        rows.append(row)
    return rows


def bound_suffixes(
    places: Places,
    costs: KnownCosts,
    best: BestPipeline,
    most: int,
    exactly: bool,
) -> list[_Step]:
    """Pass 1: the stages worth a look by number of remaining stages, from 1; finds a first good plan.

    Plans have at most, or exactly, `most` stages.
    """
    suffix = np.full((3, places.num_states), np.inf)
    suffix[:, -1] = 0.0  # all layers and devices are placed
    quickest = suffix  # one real suffix per state: its criteria
    tails: dict[int, _Tail] = {places.num_states - 1: None}  # and its stages
    steps: list[_Step] = []
    first_layer = np.arange(places.num_layers + 1)
    for remaining in range(1, most + 1):
        before = range(most - remaining if exactly else 0, most - remaining + 1)  # how many stages may come before
        fewest = places.fewest_groups(before)
        startable = first_layer >= fewest[:, None]  # (device, layer): a layer for every stage before
        startable[0, 1:] = False
        alive = best.beaten_by(suffix).reshape(places.shape)
        possible = (
            startable[places.starts, :-1, None]
            & alive[places.stops][:, None, :]
            & (first_layer[:-1, None] < first_layer)
        )  # (mesh, first layer, layer after the last)
        mesh, first, last = np.nonzero(possible)
        order = np.lexsort((last, mesh, first, places.starts[mesh]))
        mesh, first, last = mesh[order], first[order], last[order]
        cost = costs.known_of(mesh, first, last, in_flight(best.turns.schedule, best.turns.num_microbatches, remaining))
        source = places.starts[mesh] * places.shape[1] + first
        target = places.stops[mesh] * places.shape[1] + last
        stages = _Stages(mesh, np.stack([first, last]), source, target, cost)
        bound = _join(stages.criteria, suffix[:, target])
        kept = best.beaten_by(bound)
        stages, bound = stages.keep(kept), bound[:, kept]
        steps.append(_Step(stages, suffix))
        suffix = _least(bound, stages.source, places.num_states)
        quickest, tails = _extend(stages, quickest, tails, best)
        if not np.isfinite(suffix).any():
            break
    return steps


def bound_prefixes(places: Places, steps: list[_Step], best: BestPipeline) -> list[tuple[_Stages, Floats]]:
    """Pass 2: per number of remaining stages, those stages that a better plan may use, and the bounds before them."""
    prefix = np.full((3, places.num_states), np.inf)
    result = []
    for step in reversed(steps):
        prefix[:, 0] = 0.0  # a plan may begin with any number of stages for which pass 1 lets stages start at 0
        stages = step.stages
        before = _join(prefix[:, stages.source], stages.criteria)
        kept = best.beaten_by(_join(before, step.suffix[:, stages.target]))
        stages, before = stages.keep(kept), before[:, kept]
        result.append((stages, prefix))
        prefix = _least(before, stages.target, places.num_states)
    return result[::-1]


def best_of_suffixes(places: Places, steps: list[tuple[_Stages, Floats]], best: BestPipeline) -> None:
    """Pass 3: the best plan among the stages left, from all suffixes that none dominates."""
    nothing: list[_Tail] = [None]
    suffixes = {places.num_states - 1: (np.zeros((3, 1)), nothing)}  # per state: criteria, and the stages of each
    for stages, prefix in steps:
        longer: dict[int, tuple[Floats, list[_Tail]]] = {}
        starts = np.flatnonzero(np.diff(stages.source, prepend=-1))
        for low, high in itertools.pairwise([*starts.tolist(), len(stages.source)]):
            source = int(stages.source[low])
            parts = [(i, *suffixes[target]) for i in range(low, high) if (target := int(stages.target[i])) in suffixes]
            if not parts:
                continue
            criteria = np.concatenate([_join(stages.criteria_of(i), rest) for i, rest, _ in parts], axis=1)
            origin = [(i, tail) for i, _, tails in parts for tail in tails]
            useful = np.flatnonzero(best.beaten_by(_join(prefix[:, [source]], criteria)))
            useful = useful[_undominated(criteria[:, useful], best)]
            if len(useful) == 0:
                continue
            ends: list[_Tail] = [(stages.row(origin[k][0]), origin[k][1]) for k in useful]
            longer[source] = criteria[:, useful], ends
            if source == 0:
                best.update(criteria[:, useful], ends)
        suffixes = longer


def _undominated(criteria: Floats, best: BestPipeline) -> Ints:
    """Indices of the suffixes worth keeping.

    Before a suffix (a, b, c) stands some prefix (a', b', c'); with n = m - 1 / r together they take
    (a + a') / r + n * max(b, b') + max(c, c'). Whatever the prefix, a suffix is no worse than another if it saves
    in its sum at least what it can lose in the two maxima: a1 / r + n * max(0, b1 - b2) + max(0, c1 - c2) <= a2 / r.
    """
    waiting = np.lexsort(criteria[::-1])  # by sum, largest, once: nobody is dominated by one that comes later
    kept = []
    while len(waiting):
        first, waiting = waiting[0], waiting[1:]
        kept.append(first)
        loss = np.maximum(0.0, criteria[1:, [first]] - criteria[1:, waiting])
        lost = best.times_slowest * loss[0] + loss[1]
        dominated = criteria[0, first] + best.turns.rounds * lost <= criteria[0, waiting]
        waiting = waiting[~dominated]
    return np.array(kept, dtype=np.int64)


def _extend(
    stages: _Stages, quickest: Floats, tails: dict[int, _Tail], best: BestPipeline
) -> tuple[Floats, dict[int, _Tail]]:
    """Per state the suffix that takes the least time by itself, if behind each stage comes such a suffix."""
    criteria = _join(stages.criteria, quickest[:, stages.target])
    order = np.lexsort((best.time_of(criteria), stages.source))
    chosen = order[np.flatnonzero(np.diff(stages.source[order], prepend=-1))]
    sources, targets = stages.source[chosen].tolist(), stages.target[chosen].tolist()
    longer: dict[int, _Tail] = {
        s: (stages.row(i), tails[t]) for i, s, t in zip(chosen.tolist(), sources, targets, strict=True)
    }
    result = np.full_like(quickest, np.inf)
    result[:, sources] = criteria[:, chosen]
    if 0 in longer:
        best.update(result[:, [0]], [longer[0]])
    return result, longer


def _least(criteria: Floats, state: Ints, num_states: int) -> Floats:
    """(3, states): per state the least value of each criterion by itself, inf where there is none."""
    result = np.full((3, num_states), np.inf)
    for row, values in zip(result, criteria, strict=True):
        np.minimum.at(row, state, values)
    return result
