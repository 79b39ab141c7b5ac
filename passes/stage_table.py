"""What the stage search knows: the places that stages may have, and the costs that it has asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from autopar.ir.mesh import Mesh
from autopar.passes.stage_oracle import StageCost, StageOracle, StageSpace, Turns, pipeline_time
from autopar.passes.submeshes import device_groups, mesh_at

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

StageRow = tuple[int, int, int, float, float, float]  # group, layers [from, to), `StageCost`
_Asked = tuple[int, int, int, int]  # kind of mesh, layers [from, to), microbatches in flight


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
        groups: list[tuple[int, int, int]] = []
        for start, stop in device_groups(space.cluster):
            alike = oracle.alike(start, stop - start)
            for shape in space.shapes(space.cluster, start, stop - start):
                number = numbers.setdefault((alike, shape), len(numbers))
                groups.append((start, stop, number))
        starts, stops, kind = np.array(groups, dtype=np.int64).reshape(-1, 3).T
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


class KnownCosts:
    """Asks for stage costs, each once."""

    def __init__(self, places: Places, oracle: StageOracle, one_stage: bool) -> None:
        """`one_stage`: all layers are one span, of which nothing but its own cost tells more."""
        self.places, self.oracle, self.one_stage = places, oracle, one_stage
        self.kind = places.kind
        _, first = np.unique(places.kind, return_index=True)
        self.meshes = [places.mesh(index) for index in first.tolist()]  # per kind, the first of it
        self.shape = (len(self.meshes), places.num_layers, places.num_layers + 1)
        # (3, kinds of mesh, first layer, layer after the last). inf: does not fit. NaN: not asked for yet.
        self.least: Floats = np.full((3, *self.shape), np.nan)
        self.tables: dict[int, Floats] = {}  # by the number in flight: what is known, or a bound by what is
        self.known: dict[int, Bools] = {}
        self.bounded: set[_Asked] = set()  # what bounds were asked for
        self._factors: Floats | None = None  # of what is known now

    @property
    def factors(self) -> Floats:
        """(3, kinds of mesh, first layer, layer after the last): how many times the least that costs are."""
        if self._factors is None:
            self._factors = self._measured()
        return self._factors

    def _measured(self) -> Floats:
        """Ask how much above the least the costs of each layer on each kind of mesh are.

        Of one stage nothing is asked, and its cost taken to be the least: to know its layers takes as long as a bound.
        """
        if self.one_stage:
            return np.ones((3, *self.shape))
        layers = range(self.places.num_layers)
        each = np.array([[self.oracle.overhead(layer, mesh) for layer in layers] for mesh in self.meshes])
        least, times = np.moveaxis(each.reshape(*self.shape[:2], 2), 2, 0)  # reshaped where there is no mesh
        factors = np.ones((3, *self.shape))
        for first in layers:
            total = np.cumsum(least[:, first:], axis=1)
            costs = np.cumsum((least * times)[:, first:], axis=1)
            factors[:2, :, first, first + 1 :] = np.divide(costs, total, out=np.ones_like(total), where=total > 0)
        return factors

    def known_of(self, mesh: Ints, first: Ints, last: Ints, held: int) -> Floats:
        """(3, n): per microbatch, per step, memory of these stages; the least where it has not been asked for."""
        if held not in self.tables:
            fewer = max((number for number in self.tables if number < held), default=0)
            self.tables[held] = self.tables[fewer].copy() if fewer else np.full((3, *self.shape), np.nan)
            self.known[held] = np.zeros(self.shape, np.bool_)
        table, kind = self.tables[held], self.kind[mesh]
        for at in np.flatnonzero(np.isnan(self.least[0, kind, first, last])):
            k, i, j = int(kind[at]), int(first[at]), int(last[at])
            if np.isnan(self.least[0, k, i, j]):
                self.least[:, k, i, j] = _row(self.oracle.least((i, j), self.meshes[k]))
        known = table[:, kind, first, last]
        # What is known of a stage itself is above what is known of its layers, if not in each criterion.
        return np.where(np.isnan(known), self.least[:, kind, first, last] * self.factors[:, kind, first, last], known)

    def _ask(self, kind: int, first: int, last: int, held: int) -> None:
        cost = _row(self.oracle.cost((first, last), self.meshes[kind], held))
        for number, table in self.tables.items():
            if number == held:
                table[:, kind, first, last] = cost
                self.known[number][kind, first, last] = True
            elif number > held and not self.known[number][kind, first, last]:
                table[:, kind, first, last] = np.fmax(table[:, kind, first, last], cost)
            if number >= held and np.isinf(cost[0]):
                table[:, kind, : first + 1, last:] = np.inf

    def unknown(self, rows: Sequence[StageRow], numbers: Sequence[int]) -> list[_Asked]:
        """Those of these stages with so many in flight whose costs have not been asked for."""
        unknown = []
        for (mesh, first, last, *_), number in zip(rows, numbers, strict=True):
            place = (int(self.kind[mesh]), first, last)
            if not self.known[number][place] and not np.isinf(self.tables[number][(0, *place)]):
                unknown.append((*place, number))
        return unknown

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
        if asked:
            self._factors = None
        return bool(asked)

    def ask(self, unknown: Sequence[_Asked]) -> None:
        """Ask for costs."""
        for kind, first, last, held in unknown:
            if not np.isinf(self.tables[held][0, kind, first, last]):
                self._ask(kind, first, last, held)
        if unknown:
            self._factors = None

    def time(self, rows: Sequence[StageRow], numbers: Sequence[int], turns: Turns) -> float:
        """Seconds per step of these stages with so many in flight, by what is known."""
        costs = self.of(rows, numbers)
        fits = all(np.isfinite(cost.memory) for cost in costs)
        return pipeline_time(costs, turns.num_microbatches, turns.rounds) if fits else np.inf

    def of(self, rows: Sequence[StageRow], numbers: Sequence[int]) -> list[StageCost]:
        """The costs of these stages with so many in flight."""
        return [
            StageCost(*(float(x) for x in self.tables[number][:, self.kind[mesh], first, last]))
            for (mesh, first, last, *_), number in zip(rows, numbers, strict=True)
        ]


def _row(cost: StageCost | None) -> tuple[float, float, float]:
    return (np.inf, np.inf, np.inf) if cost is None else (cost.per_microbatch, cost.per_step, cost.memory)
