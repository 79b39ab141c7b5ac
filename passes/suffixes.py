"""The passes over suffixes of a pipeline by which `plan_stages` is exact.

Bounds backwards and forwards, then all suffixes that none dominates.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from autopar.ir.mesh import Mesh
from autopar.ir.schedule import ScheduleName
from autopar.passes.stage_oracle import StageCost, StageOracle, StageSpace, in_flight, pipeline_time
from autopar.passes.submeshes import device_groups, mesh_at

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


# Criteria are arrays (3, n): the sum of seconds per microbatch, the largest of them, the largest seconds per step.
# Placing one piece of a pipeline beside another adds the first row and takes the maximum of the others.


def _join(left: Floats, right: Floats) -> Floats:
    return np.stack([left[0] + right[0], np.maximum(left[1], right[1]), np.maximum(left[2], right[2])])


_StageRow = tuple[int, int, int, float, float, float]  # group, layers [from, to), `StageCost`
_Asked = tuple[int, int, int, int]  # kind of mesh, layers [from, to), microbatches in flight
_Tail = tuple[_StageRow, "_Tail"] | None  # the stages of a suffix: the first one and the rest


@dataclasses.dataclass
class BestPipeline:
    """The quickest plan so far."""

    num_microbatches: int
    rounds: int
    time: float = np.inf  # seconds
    stages: _Tail = None

    @property
    def times_slowest(self) -> float:
        """How often the slowest stage's time counts, beside the sum of all."""
        return self.num_microbatches - 1 / self.rounds

    def time_of(self, criteria: Floats) -> Floats:
        slowest = self.times_slowest * criteria[1] if self.times_slowest else 0.0  # 0 * inf would be NaN
        return np.asarray(criteria[0] / self.rounds + slowest + criteria[2])

    def beaten_by(self, criteria: Floats) -> Bools:
        return np.asarray(self.time_of(criteria) < self.time)

    def update(self, criteria: Floats, plans: list[_Tail]) -> None:
        time = self.time_of(criteria)
        index = int(time.argmin())
        if time[index] < self.time:
            self.time, self.stages = float(time[index]), plans[index]


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Everything a stage may be made of."""

    num_layers: int
    num_devices: int
    starts: Ints  # per group of devices with a shape: its first device
    stops: Ints  # the device after its last one
    kind: Ints  # the same where a span costs the same
    shapes: tuple[tuple[int, ...], ...]  # per kind

    @staticmethod
    def of(space: StageSpace, oracle: StageOracle) -> Places:
        numbers: dict[tuple[Hashable, tuple[int, ...]], int] = {}
        found: list[tuple[int, int, int]] = []
        for start, stop in device_groups(space.cluster):
            for shape in space.shapes(space.cluster, start, stop - start):
                number = numbers.setdefault((oracle.alike(start, stop - start), shape), len(numbers))
                found.append((start, stop, number))
        starts, stops, kind = np.array(found, dtype=np.int64).reshape(-1, 3).T
        return Places(
            space.num_layers, space.cluster.num_devices, starts, stops, kind, tuple(shape for _, shape in numbers)
        )

    def mesh(self, index: int) -> Mesh:
        """Of a group of devices with a shape."""
        return mesh_at(int(self.starts[index]), self.shapes[self.kind[index]])

    @property
    def shape(self) -> tuple[int, int]:
        """States are (first device, first layer) of what is still to be placed, numbered row by row."""
        return self.num_devices + 1, self.num_layers + 1

    @property
    def num_states(self) -> int:
        return self.shape[0] * self.shape[1]

    def fewest_groups(self, allowed: range) -> Floats:
        """Per device d: the least number of groups, among those allowed, that cover all devices before d; or inf."""
        fewest = np.full(self.num_devices + 1, np.inf)
        covered = np.zeros(self.num_devices + 1, dtype=np.bool_)
        covered[0] = True
        for number in range(allowed.stop):
            if number in allowed:
                fewest[covered & np.isinf(fewest)] = number
            reached = self.stops[covered[self.starts]]
            covered = np.zeros_like(covered)
            covered[reached] = True
        return fewest


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

    def row(self, index: int) -> _StageRow:
        micro, step, memory = (float(x) for x in self.cost[:, index])
        return int(self.mesh[index]), int(self.span[0, index]), int(self.span[1, index]), micro, step, memory


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """What the backward pass found for one number of remaining stages."""

    stages: _Stages
    suffix: Floats  # (3, states): least value of each criterion by itself over what follows these stages


class KnownCosts:
    """Asks for stage costs, each once."""

    def __init__(self, space: Places, oracle: StageOracle, one_stage: bool) -> None:
        """`one_stage`: all layers are one span, of which nothing but its own cost tells more."""
        self.space, self.oracle, self.one_stage = space, oracle, one_stage
        self.kind = space.kind
        _, first = np.unique(space.kind, return_index=True)
        self.meshes = [space.mesh(index) for index in first.tolist()]  # per kind, the first of it
        self.shape = (len(self.meshes), space.num_layers, space.num_layers + 1)
        # (3, kinds of mesh, first layer, layer after the last). inf: does not fit. NaN: not asked for yet.
        self.least: Floats = np.full((3, *self.shape), np.nan)
        self.tables: dict[int, Floats] = {}  # by the number in flight: what is known, or a bound by what is
        self.known: dict[int, Bools] = {}
        self.bounded: set[_Asked] = set()  # what bounds were asked for
        self.measure()

    def measure(self) -> None:
        """Ask how much above the least the costs of each layer on each kind of mesh are."""
        layers = range(self.space.num_layers)
        each = np.array([[self.oracle.overhead(layer, mesh) for layer in layers] for mesh in self.meshes])
        least, times = np.moveaxis(each.reshape(*self.shape[:2], 2), 2, 0)  # reshaped where there is no mesh
        self.factors = np.ones((3, *self.shape))
        for first in layers:
            total = np.cumsum(least[:, first:], axis=1)
            costs = np.cumsum((least * times)[:, first:], axis=1)
            self.factors[:2, :, first, first + 1 :] = np.divide(costs, total, out=np.ones_like(total), where=total > 0)

    def known_of(self, mesh: Ints, first: Ints, last: Ints, in_flight: int) -> Floats:
        """(3, n): per microbatch, per step, memory of these stages; the least where it has not been asked for."""
        if in_flight not in self.tables:
            fewer = max((number for number in self.tables if number < in_flight), default=0)
            self.tables[in_flight] = self.tables[fewer].copy() if fewer else np.full((3, *self.shape), np.nan)
            self.known[in_flight] = np.zeros(self.shape, np.bool_)
        table, kind = self.tables[in_flight], self.kind[mesh]
        for at in np.flatnonzero(np.isnan(self.least[0, kind, first, last])):
            k, i, j = int(kind[at]), int(first[at]), int(last[at])
            if np.isnan(self.least[0, k, i, j]):
                self.least[:, k, i, j] = _row(self.oracle.least((i, j), self.meshes[k]))
        found = table[:, kind, first, last]
        # What is known of a stage itself is above what is known of its layers, if not in each criterion.
        return np.where(np.isnan(found), self.least[:, kind, first, last] * self.factors[:, kind, first, last], found)

    def _ask(self, kind: int, first: int, last: int, in_flight: int) -> None:
        cost = _row(self.oracle.cost((first, last), self.meshes[kind], in_flight))
        for number, table in self.tables.items():
            if number == in_flight:
                table[:, kind, first, last] = cost
                self.known[number][kind, first, last] = True
            elif number > in_flight and not self.known[number][kind, first, last]:
                table[:, kind, first, last] = np.fmax(table[:, kind, first, last], cost)
            if number >= in_flight and np.isinf(cost[0]):
                table[:, kind, : first + 1, last:] = np.inf

    def unknown(self, rows: Sequence[_StageRow], numbers: Sequence[int]) -> list[_Asked]:
        """Those of these stages with so many in flight whose costs have not been asked for."""
        found = []
        for (mesh, first, last, *_), number in zip(rows, numbers, strict=True):
            place = (int(self.kind[mesh]), first, last)
            if not self.known[number][place] and not np.isinf(self.tables[number][(0, *place)]):
                found.append((*place, number))
        return found

    def bound(self, unknown: Sequence[_Asked]) -> bool:
        """Ask for bounds; whether there was one to ask for."""
        asked = [stage for stage in unknown if stage not in self.bounded]
        for kind, first, last, held in asked:
            cost = _row(self.oracle.bound((first, last), self.meshes[kind], held))
            for number, table in self.tables.items():
                if number >= held and np.isinf(cost[0]):
                    table[:, kind, : first + 1, last:] = np.inf
                elif not np.isinf(cost[0]) and not self.known[number][kind, first, last]:
                    table[:, kind, first, last] = np.fmax(table[:, kind, first, last], cost)
        self.bounded.update(asked)
        if asked and not self.one_stage:
            self.measure()
        return bool(asked)

    def ask(self, unknown: Sequence[_Asked]) -> None:
        """Ask for costs."""
        for kind, first, last, held in unknown:
            if not np.isinf(self.tables[held][0, kind, first, last]):
                self._ask(kind, first, last, held)
        if unknown and not self.one_stage:
            self.measure()

    def time(self, rows: Sequence[_StageRow], numbers: Sequence[int], best: BestPipeline) -> float:
        """Seconds per step of these stages with so many in flight, by what is known."""
        costs = self.of(rows, numbers)
        fits = all(np.isfinite(cost.memory) for cost in costs)
        return pipeline_time(costs, best.num_microbatches, best.rounds) if fits else np.inf

    def of(self, rows: Sequence[_StageRow], numbers: Sequence[int]) -> list[StageCost]:
        """The costs of these stages with so many in flight."""
        found = []
        for (mesh, first, last, *_), number in zip(rows, numbers, strict=True):
            found.append(StageCost(*(float(x) for x in self.tables[number][:, self.kind[mesh], first, last])))
        return found


def _row(cost: StageCost | None) -> tuple[float, float, float]:
    return (np.inf, np.inf, np.inf) if cost is None else (cost.per_microbatch, cost.per_step, cost.memory)


def unrolled(tail: _Tail) -> list[_StageRow]:
    """The stages of a suffix, the first one first."""
    rows = []
    while tail is not None:
        row, tail = tail
        rows.append(row)
    return rows


def bound_suffixes(
    space: Places,
    costs: KnownCosts,
    schedule: ScheduleName,
    best: BestPipeline,
    most: int,
    exactly: bool,
) -> list[_Step]:
    """Pass 1: the stages worth a look by number of remaining stages, from 1; finds a first good plan.

    Plans have at most, or exactly, `most` stages.
    """
    suffix = np.full((3, space.num_states), np.inf)
    suffix[:, -1] = 0.0  # all layers and devices are placed
    quickest = suffix  # one real suffix per state: its criteria
    tails: dict[int, _Tail] = {space.num_states - 1: None}  # and its stages
    steps: list[_Step] = []
    first_layer = np.arange(space.num_layers + 1)
    for remaining in range(1, most + 1):
        before = range(most - remaining if exactly else 0, most - remaining + 1)  # how many stages may come before
        fewest = space.fewest_groups(before)
        startable = first_layer >= fewest[:, None]  # (device, layer): a layer for every stage before
        startable[0, 1:] = False
        alive = best.beaten_by(suffix).reshape(space.shape)
        possible = (
            startable[space.starts, :-1, None] & alive[space.stops][:, None, :] & (first_layer[:-1, None] < first_layer)
        )  # (mesh, first layer, layer after the last)
        mesh, first, last = np.nonzero(possible)
        order = np.lexsort((last, mesh, first, space.starts[mesh]))
        mesh, first, last = mesh[order], first[order], last[order]
        cost = costs.known_of(mesh, first, last, in_flight(schedule, best.num_microbatches, remaining))
        source = space.starts[mesh] * space.shape[1] + first
        target = space.stops[mesh] * space.shape[1] + last
        stages = _Stages(mesh, np.stack([first, last]), source, target, cost)
        bound = _join(stages.criteria, suffix[:, target])
        kept = best.beaten_by(bound)
        stages, bound = stages.keep(kept), bound[:, kept]
        steps.append(_Step(stages, suffix))
        suffix = _least(bound, stages.source, space.num_states)
        quickest, tails = _extend(stages, quickest, tails, best)
        if not np.isfinite(suffix).any():
            break
    return steps


def bound_prefixes(space: Places, steps: list[_Step], best: BestPipeline) -> list[tuple[_Stages, Floats]]:
    """Pass 2: per number of remaining stages, those stages that a better plan may use, and the bounds before them."""
    prefix = np.full((3, space.num_states), np.inf)
    result = []
    for step in reversed(steps):
        prefix[:, 0] = 0.0  # a plan may begin with any number of stages for which pass 1 lets stages start at 0
        stages = step.stages
        before = _join(prefix[:, stages.source], stages.criteria)
        kept = best.beaten_by(_join(before, step.suffix[:, stages.target]))
        stages, before = stages.keep(kept), before[:, kept]
        result.append((stages, prefix))
        prefix = _least(before, stages.target, space.num_states)
    return result[::-1]


def best_of_suffixes(space: Places, steps: list[tuple[_Stages, Floats]], best: BestPipeline) -> None:
    """Pass 3: the best plan among the stages left, from all suffixes that none dominates."""
    nothing: list[_Tail] = [None]
    suffixes = {space.num_states - 1: (np.zeros((3, 1)), nothing)}  # per state: criteria, and the stages of each
    for stages, prefix in steps:
        found: dict[int, tuple[Floats, list[_Tail]]] = {}
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
            found[source] = criteria[:, useful], ends
            if source == 0:
                best.update(criteria[:, useful], ends)
        suffixes = found


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
        dominated = criteria[0, first] + best.rounds * lost <= criteria[0, waiting]
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
