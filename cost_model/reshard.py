"""The cheapest way from one sharding to another: the steps that will be carried out, and their seconds.

On one mesh, the shardings of an array are the nodes of a graph and the `ReshardStep`s its edges; a resharding
is a shortest path. Between two meshes, `plan_transfer` copies tile by tile, or parts of tiles where the two
shardings cut the array differently.

1. The graph depends on the rank and the mesh only: built once, edges sorted by the state they lead to.
2. A size divides only by the tile counts that divide gcd(size, mesh size), and a payload is the array's bytes
   over a number of tiles: arrays with the same gcds and the same bytes, as they are and as they are summed, share
   all prices.
3. An edge's price depends on (kind, axes, tiles, whether of partial sums) only, so each such class is priced once for
   each array.
4. Seconds from a few sources to everywhere: Bellman-Ford, all sources and edges at once in numpy.
5. The steps of one resharding: Dijkstra; equal times are decided by fewer steps, then by the order of `moves`.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import InternalError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import ReshardStep, Sharding, StepKind, sum_itemsize

# (kind, axes in mesh order, payload in bytes as in `Collective`) -> seconds. Local steps cost memory traffic.
StepPrice = Callable[[StepKind, tuple[str, ...], int], float]

LOCAL_KINDS: frozenset[StepKind] = frozenset({"slice", "mask"})
SUM_KINDS: frozenset[StepKind] = frozenset({"all_reduce", "reduce_scatter"})


def step_result(step: ReshardStep, sharding: Sharding) -> Sharding:
    """The sharding after one step. Raises InternalError if the step does not apply.

    `permute` with `dim >= 0` reorders the axes of one dimension; with `dim == -1`, `axes == (a, b)` and
    `order == (b, a)` it exchanges the roles of two axes of equal size wherever they occur.
    """
    dims, partial = list(sharding.dims), set(sharding.partial)
    unused = not (set(step.axes) & (sharding.axes | partial))
    legal = bool(step.axes) and len(set(step.axes)) == len(step.axes)
    match step.kind:
        case "all_reduce" | "reduce_scatter":
            legal &= set(step.axes) <= partial
            partial -= set(step.axes)
            if step.kind == "reduce_scatter":
                dims[step.dim] += step.axes
        case "all_gather":
            kept = len(dims[step.dim]) - len(step.axes)
            legal &= kept >= 0 and dims[step.dim][kept:] == step.axes
            dims[step.dim] = dims[step.dim][: max(kept, 0)]
        case "all_to_all":
            legal &= len(step.axes) == 1 and dims[step.dim][-1:] == step.axes and step.dim != step.to_dim
            dims[step.dim] = dims[step.dim][:-1]
            dims[step.to_dim] += step.axes
        case "slice":
            legal &= unused
            dims[step.dim] += step.axes
        case "mask":
            legal &= unused
            partial |= set(step.axes)
        case "permute" if step.dim >= 0:
            legal &= dims[step.dim] == step.axes and sorted(step.order) == sorted(step.axes)
            dims[step.dim] = step.order
        case "permute":
            legal &= len(step.axes) == 2 and step.order == step.axes[::-1]
            renamed = dict(zip(step.axes, step.order, strict=False))
            dims = [tuple(renamed.get(axis, axis) for axis in dim) for dim in dims]
            partial = {renamed.get(axis, axis) for axis in partial}
    if not legal:
        raise InternalError(f"{step} does not apply to {sharding}")
    return Sharding(tuple(dims), tuple(sorted(partial)))


def step_payload(
    step: ReshardStep, shape: tuple[int, ...], itemsize: int, sharding: Sharding, mesh: Mesh, summed: int | None = None
) -> int:
    """Bytes of the local result of the step applied to `sharding`; of the local operand for a reduce-scatter.

    `summed`: bytes of an element of partial sums; default: see `sum_itemsize`.
    """
    summed = sum_itemsize(itemsize) if summed is None else summed
    state = sharding if step.kind == "reduce_scatter" else step_result(step, sharding)
    width = summed if step.kind in SUM_KINDS or state.partial else itemsize
    return math.prod(state.local_shape(shape, mesh)) * width


@functools.lru_cache(maxsize=4096)
def _permuted(step: ReshardStep, named: tuple[str, ...], shape: tuple[int, ...]) -> tuple[tuple[str, ...], Any]:
    """The axes along which a permute step moves pieces on a mesh, and an array of where pieces come from and go to.

    [end, axis, piece]: coordinates along these axes.
    """
    size_of = dict(zip(named, shape, strict=True))
    axes = tuple(axis for axis in named if axis in step.axes)
    sizes = [size_of[axis] for axis in axes]
    # The device at coordinates c (along `order`) must get the piece that lies at the same coordinates along
    # `axes`. Exchanging two axes is the same thing: (i, j) gets what (j, i) has.
    target = dict(zip(axes, np.unravel_index(np.arange(math.prod(sizes)), sizes), strict=True))
    tile = np.ravel_multi_index([target[axis] for axis in step.order], [size_of[axis] for axis in step.order])
    source = dict(zip(step.axes, np.unravel_index(tile, [size_of[axis] for axis in step.axes]), strict=True))
    moved = tuple(axis for axis in axes if (source[axis] != target[axis]).any())
    return moved, np.array([[end[axis] for axis in moved] for end in (source, target)])


def permutation(step: ReshardStep, mesh: Mesh) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The axes along which a permute step moves pieces, and (from, to) for each position along them.

    The axes are in mesh order; a position is row-major over them. No axes: nothing moves.
    """
    moved, ends = _permuted(step, mesh.axes, mesh.shape)
    if not moved:
        return (), ()
    sizes = [mesh.axis_size(axis) for axis in moved]
    pairs = np.unique([np.ravel_multi_index(tuple(end), sizes) for end in ends], axis=1)
    return moved, tuple((int(source), int(target)) for source, target in pairs.T)


def step_axes(step: ReshardStep, mesh: Mesh) -> tuple[str, ...]:
    """The axes that a step communicates (or cuts, or masks) over: in mesh order, those of size 1 left out."""
    if step.kind == "permute":
        return _permuted(step, mesh.axes, mesh.shape)[0]
    return tuple(axis for axis in mesh.axes if axis in step.axes and mesh.axis_size(axis) > 1)


class AppliedStep(NamedTuple):
    """A step of a resharding where it stands."""

    step: ReshardStep
    axes: tuple[str, ...]  # see `step_axes`
    payload: int  # bytes, see `step_payload`; 0 without axes
    after: Sharding


def applied_steps(
    steps: Sequence[ReshardStep],
    shape: tuple[int, ...],
    itemsize: int,
    before: Sharding,
    mesh: Mesh,
    summed: int | None = None,
) -> Iterator[AppliedStep]:
    """Each step of a resharding of an array, with what it takes; `summed`: see `step_payload`."""
    for step in steps:
        axes, after = step_axes(step, mesh), step_result(step, before)
        payload = step_payload(step, shape, itemsize, before, mesh, summed) if axes else 0
        yield AppliedStep(step, axes, payload, after)
        before = after


def shardings(rank: int, mesh: Mesh) -> tuple[Sharding, ...]:
    """Every sharding of an array of this rank, partial ones included: each axis unused, partial, or in a dimension."""
    unused, partial = rank, rank + 1
    all_shardings = []
    for roles in itertools.product(range(rank + 2), repeat=len(mesh.axes)):
        members = [[a for a, role in zip(mesh.axes, roles, strict=True) if role == which] for which in range(rank + 2)]
        arranged = itertools.product(*(itertools.permutations(axes) for axes in members[:unused]))
        all_shardings += [Sharding(dims, tuple(sorted(members[partial]))) for dims in arranged]
    return tuple(all_shardings)


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _arrangements(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(axes) + 1):
        yield from itertools.permutations(axes, count)


def moves(sharding: Sharding, mesh: Mesh) -> Iterator[ReshardStep]:
    """Every step that applies to a sharding, divisibility aside."""
    rank = range(len(sharding.dims))
    unused = [axis for axis in mesh.axes if axis not in sharding.axes and axis not in sharding.partial]
    for dim, axes in enumerate(sharding.dims):
        for count in range(1, len(axes) + 1):
            yield ReshardStep("all_gather", axes[-count:], dim)
        for to_dim in rank:
            if axes and to_dim != dim:
                yield ReshardStep("all_to_all", axes[-1:], dim, to_dim)
        for order in itertools.permutations(axes):
            if order != axes:
                yield ReshardStep("permute", axes, dim, order=order)
    for axes in _subsets(sharding.partial):
        yield ReshardStep("all_reduce", axes)
    for axes in _arrangements(sharding.partial):
        for dim in rank:
            yield ReshardStep("reduce_scatter", axes, dim)
    for axes in _arrangements(unused):
        for dim in rank:
            yield ReshardStep("slice", axes, dim)
    for axes in _subsets(unused):
        yield ReshardStep("mask", axes)
    for axes in itertools.combinations(mesh.axes, 2):
        if mesh.axis_size(axes[0]) == mesh.axis_size(axes[1]):
            swap = ReshardStep("permute", axes, order=axes[::-1])
            if step_result(swap, sharding) != sharding:
                yield swap


@dataclasses.dataclass(frozen=True, eq=False)
class _Network:
    """All shardings of one rank on one mesh shape, and the steps between them."""

    states: tuple[Sharding, ...]
    index: dict[Sharding, int]
    tiles: npt.NDArray[np.int64]  # [state, dimension]
    steps: tuple[ReshardStep, ...]  # by edge, edges sorted by `target`
    source: npt.NDArray[np.int64]  # [edge] state
    target: npt.NDArray[np.int64]  # [edge] state
    price_class: npt.NDArray[np.int64]  # [edge] index into `classes`
    # (kind, axes, tiles that the payload is one of, whether in the type in which partial sums are summed)
    classes: tuple[tuple[StepKind, tuple[str, ...], int, bool], ...]
    first: npt.NDArray[np.int64]  # [state] its first edge; every state has one, as every step can be undone
    leaving: tuple[tuple[int, ...], ...]  # [state] edges that leave it


@functools.lru_cache(maxsize=256)
def _network(rank: int, mesh: Mesh) -> _Network:
    states = shardings(rank, mesh)
    index = {state: i for i, state in enumerate(states)}
    tiles = np.array([state.tiles(mesh) for state in states], np.int64).reshape(len(states), rank)
    pieces = [math.prod(map(int, row)) for row in tiles]
    classes: dict[tuple[StepKind, tuple[str, ...], int, bool], int] = {}
    edges: list[tuple[int, int, int, ReshardStep]] = []
    for source, state in enumerate(states):
        for step in moves(state, mesh):
            target = index[step_result(step, state)]
            payload_of = source if step.kind == "reduce_scatter" else target
            wide = step.kind in SUM_KINDS or bool(states[payload_of].partial)
            key = (step.kind, step_axes(step, mesh), pieces[payload_of], wide)
            edges.append((target, source, classes.setdefault(key, len(classes)), step))
    edges.sort(key=lambda edge: edge[0])  # stable: within a target the order of `moves` stays
    columns = np.array([edge[:3] for edge in edges], np.int64).reshape(len(edges), 3)
    leaving: list[list[int]] = [[] for _ in states]
    for i, (_, source, _, _) in enumerate(edges):
        leaving[source].append(i)
    return _Network(
        states=states,
        index=index,
        tiles=tiles,
        steps=tuple(edge[3] for edge in edges),
        source=columns[:, 1],
        target=columns[:, 0],
        price_class=columns[:, 2],
        classes=tuple(classes),
        first=np.searchsorted(columns[:, 0], np.arange(len(states))),
        leaving=tuple(map(tuple, leaving)),
    )


def _distances(network: _Network, cost: npt.NDArray[np.float64], sources: Sequence[int]) -> npt.NDArray[np.float64]:
    """Seconds [source, state] of the shortest paths."""
    seconds = np.full((len(sources), len(network.states)), np.inf)
    seconds[np.arange(len(sources)), list(sources)] = 0.0
    if not network.steps:
        return seconds
    while True:
        arriving = np.minimum.reduceat(seconds[:, network.source] + cost, network.first, axis=1)
        better = np.minimum(seconds, arriving)
        if np.array_equal(better, seconds):
            return seconds
        seconds = better


def _shortest_path(network: _Network, cost: npt.NDArray[np.float64], source: int, target: int) -> list[int]:
    """The edges of the shortest path; of equally short ones that with fewest edges, then the first found."""
    best: dict[int, tuple[float, int]] = {source: (0.0, 0)}
    arrived_by: dict[int, int] = {}
    done: set[int] = set()
    heap = [(0.0, 0, source)]
    while heap:
        seconds, length, state = heapq.heappop(heap)
        if state == target:
            break
        if state in done:
            continue
        done.add(state)
        for edge in network.leaving[state]:
            reached = (seconds + float(cost[edge]), length + 1)
            to = int(network.target[edge])
            if reached[0] < math.inf and (to not in best or reached < best[to]):
                best[to] = reached
                arrived_by[to] = edge
                heapq.heappush(heap, (*reached, to))
    path: list[int] = []
    while target != source:
        path.append(arrived_by[target])
        target = int(network.source[path[-1]])
    return path[::-1]


class _StepPrices:
    """What depends on the array: the edges' seconds, and the shortest paths asked for so far."""

    def __init__(
        self, network: _Network, gcds: tuple[int, ...], nbytes: int, sum_nbytes: int, price: StepPrice
    ) -> None:
        self.network = network
        self.divides = np.all(np.array(gcds, np.int64) % network.tiles == 0, axis=1)  # [state]
        asked = [
            (kind, axes, (sum_nbytes if wide else nbytes) // pieces) for kind, axes, pieces, wide in network.classes
        ]
        seconds = {key: price(*key) if key[1] else 0.0 for key in dict.fromkeys(asked)}
        prices = np.array([seconds[key] for key in asked])
        legal = self.divides[network.source] & self.divides[network.target]
        self.cost = np.where(legal, prices[network.price_class], np.inf) if network.steps else prices
        self.rows: dict[int, npt.NDArray[np.float64]] = {}  # source state -> seconds to each state
        self.paths: dict[tuple[int, int], tuple[ReshardStep, ...]] = {}

    def seconds(self, sources: Sequence[int], targets: Sequence[int]) -> npt.NDArray[np.float64]:
        missing = [source for source in dict.fromkeys(sources) if source not in self.rows]
        if missing:
            self.rows.update(zip(missing, _distances(self.network, self.cost, missing), strict=True))
        return np.stack([self.rows[source] for source in sources])[:, list(targets)]

    def path(self, source: int, target: int) -> tuple[ReshardStep, ...]:
        if (source, target) not in self.paths:
            edges = _shortest_path(self.network, self.cost, source, target)
            self.paths[source, target] = tuple(self.network.steps[edge] for edge in edges)
        return self.paths[source, target]


class Resharder:
    """Plans and prices reshardings on one mesh; remembers what it found."""

    def __init__(self, mesh: Mesh, price: StepPrice, least_sum_bytes: int = 4, dispatch: float = 0.0) -> None:
        """`least_sum_bytes`: see `sum_itemsize`; `dispatch`: seconds to start a program."""
        self.mesh, self._least_sum_bytes, self._dispatch = mesh, least_sum_bytes, dispatch
        self._price = price
        # Meshes that differ only in their devices share the network.
        self._logical = Mesh(tuple(range(mesh.size)), mesh.shape, mesh.axes)
        self._prices = functools.lru_cache(maxsize=1024)(self._make_prices)

    def _make_prices(self, gcds: tuple[int, ...], nbytes: int, sum_nbytes: int) -> _StepPrices:
        return _StepPrices(_network(len(gcds), self._logical), gcds, nbytes, sum_nbytes, self._price)

    def _prices_of(self, shape: tuple[int, ...], itemsize: int) -> _StepPrices:
        gcds, size = tuple(math.gcd(n, self.mesh.size) for n in shape), math.prod(shape)
        return self._prices(gcds, size * itemsize, size * sum_itemsize(itemsize, self._least_sum_bytes))

    def _states(self, prices: _StepPrices, shape: tuple[int, ...], asked: Sequence[Sharding]) -> list[int]:
        """Indices of the shardings. Raises InternalError for one that the array cannot have."""
        try:
            states = [prices.network.index[sharding] for sharding in asked]
        except KeyError as error:
            raise InternalError(f"{error.args[0]} is no sharding of {shape} on mesh {self.mesh.axes}") from None
        if not prices.divides[states].all():
            bad = next(s for s, i in zip(asked, states, strict=True) if not prices.divides[i])
            raise InternalError(f"{bad} does not divide {shape} on mesh {self.mesh.axes}={self.mesh.shape}")
        return states

    def plan(
        self, shape: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding
    ) -> tuple[ReshardStep, ...]:
        """The cheapest steps from `source` to `target`."""
        prices = self._prices_of(shape, itemsize)
        start, end = self._states(prices, shape, (source, target))
        return prices.path(start, end)

    def time(self, shape: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding) -> float:
        """Seconds of the cheapest steps."""
        return float(self.matrix(shape, itemsize, (source,), (target,))[0, 0])

    def local_time(self, nbytes: int) -> float:
        """Seconds in which each device cuts its tile of so many bytes, or joins it, in a program of its own."""
        return self._price("slice", (), nbytes) + self._dispatch

    def matrix(
        self, shape: tuple[int, ...], itemsize: int, sources: Sequence[Sharding], targets: Sequence[Sharding]
    ) -> npt.NDArray[np.float64]:
        """Seconds [source, target]."""
        if not sources or not targets:
            return np.zeros((len(sources), len(targets)))
        prices = self._prices_of(shape, itemsize)
        return prices.seconds(self._states(prices, shape, sources), self._states(prices, shape, targets))
