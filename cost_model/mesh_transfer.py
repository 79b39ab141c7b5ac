"""What devices of one mesh send to those of another, and what it takes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

from autopar.cost_model.reshard import Resharder, shardings
from autopar.errors import InternalError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding, TileCopies, TileCopy


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """Moving an array between meshes: reshard to `sent`, copy tile by tile, reshard from `received`.

    Where the two cut the array differently, tiles are cut before they are sent, and joined where they arrive.
    """

    sent: Sharding  # on the source mesh; never partial
    received: Sharding  # on the target mesh; never partial
    seconds: float  # both reshardings and the copies


def _tile_of_position(sharding: Sharding, mesh_shape: tuple[int, ...], axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The tile that each device of the mesh holds, by position: its place along each dimension."""
    mesh = Mesh(tuple(range(math.prod(mesh_shape))), mesh_shape, axes)
    tiles = []
    for coordinates in itertools.product(*map(range, mesh_shape)):
        at = dict(zip(axes, coordinates, strict=True))
        tile = []
        for dim in sharding.dims:
            place = 0
            for axis in dim:
                place = place * mesh.axis_size(axis) + at[axis]
            tile.append(place)
        tiles.append(tuple(tile))
    return tiles


def tile_copies(
    shape: tuple[int, ...], sent: Sharding, source_mesh: Mesh, received: Sharding, target_mesh: Mesh
) -> TileCopies:
    """Which device feeds which with what, where tiles may have to be cut and joined.

    The devices that hold a tile share what is sent of it evenly, neighbours with neighbours. Raises InternalError if
    a value is partial, or its dimensions cannot be divided as finely as both shardings together do.
    """
    cut, joined = sent.tiles(source_mesh), received.tiles(target_mesh)
    if sent.partial or received.partial or not _go_together(shape, cut, joined):
        raise InternalError(f"{shape} cannot be copied tile by tile from {sent} to {received}")
    return _copies(sent, source_mesh.shape, source_mesh.axes, received, target_mesh.shape, target_mesh.axes)


def _go_together(shape: tuple[int, ...], cut: tuple[int, ...], joined: tuple[int, ...]) -> bool:
    """Whether each dimension can be divided as finely as the two numbers of tiles together do."""
    return all(size % math.lcm(*both) == 0 for size, *both in zip(shape, cut, joined, strict=True))


@functools.lru_cache(maxsize=65536)
def _copies(
    sent: Sharding,
    source_shape: tuple[int, ...],
    source_axes: tuple[str, ...],
    received: Sharding,
    target_shape: tuple[int, ...],
    target_axes: tuple[str, ...],
) -> TileCopies:
    held = _tile_of_position(sent, source_shape, source_axes)
    wanted = _tile_of_position(received, target_shape, target_axes)
    tiles = [[max(along) + 1 for along in zip(*each, strict=True)] for each in (held, wanted)]
    grid = [math.lcm(*both) for both in zip(*tiles, strict=True)]
    cuts, joins = (tuple(n // t for n, t in zip(grid, each, strict=True)) for each in tiles)
    holders: dict[tuple[int, ...], list[int]] = {}
    for position, tile in enumerate(held):
        holders.setdefault(tile, []).append(position)
    receivers = len(wanted) * math.prod(cuts) // math.prod(tiles[1])  # of each tile that is held, of any of its parts
    served = dict.fromkeys(itertools.product(*map(range, grid)), 0)
    copies = []
    for position, tile in enumerate(wanted):
        for place, part in enumerate(itertools.product(*map(range, joins))):
            at = tuple(t * n + i for t, n, i in zip(tile, joins, part, strict=True))  # in the grid
            inside = [i % n for i, n in zip(at, cuts, strict=True)]
            cut = 0
            for i, n in zip(inside, cuts, strict=True):
                cut = cut * n + i
            sharing = holders[tuple(i // n for i, n in zip(at, cuts, strict=True))]
            turn = cut * (receivers // math.prod(cuts)) + served[at]
            copies.append(TileCopy(sharing[turn * len(sharing) // receivers], position, cut, place))
            served[at] += 1
    return TileCopies(cuts, joins, tuple(copies))


def plan_transfer(
    shape: tuple[int, ...],
    itemsize: int,
    source: Sharding,
    target: Sharding,
    source_resharder: Resharder,
    target_resharder: Resharder,
    link: Callable[[Sequence[tuple[int, int]], int], float],
) -> TransferPlan:
    """The cheapest way to move an array from `source` on the mesh of one resharder to `target` on that of the other.

    `link([(source device, target device), ..], bytes)` are the seconds of these copies of so many bytes. Sending every
    tile once and gathering at the target (Alpa, section 6.2: "local all-gather") is one of the candidates, not a
    special case.

    1. Candidates: all pairs of full (not partial) shardings, one a mesh, that cut the array alike; and those that cut
       it otherwise, but need no resharding on one side.
    2. Reshard seconds on either side come from the two resharders; so do those of cutting and joining tiles.
    3. Candidates in the order of those; the copies of one are priced only while it can still win.
    """
    source_mesh, target_mesh = source_resharder.mesh, target_resharder.mesh
    senders = [s for s in shardings(len(shape), source_mesh) if not s.partial and s.divides(shape, source_mesh)]
    takers = [s for s in shardings(len(shape), target_mesh) if not s.partial and s.divides(shape, target_mesh)]
    before = source_resharder.matrix(shape, itemsize, (source,), senders)[0]
    after = target_resharder.matrix(shape, itemsize, takers, (target,))[:, 0]
    nbytes = math.prod(shape) * itemsize
    cuts, joins = [s.tiles(source_mesh) for s in senders], [s.tiles(target_mesh) for s in takers]
    cutting = [source_resharder.local_time(nbytes // math.prod(tiles)) for tiles in cuts]
    joining = [target_resharder.local_time(nbytes // math.prod(tiles)) for tiles in joins]
    candidates = []
    for i, cut in enumerate(cuts):
        for j, joined in enumerate(joins):
            if cut == joined or (min(before[i], after[j]) == 0.0 and _go_together(shape, cut, joined)):
                grid = list(map(math.lcm, cut, joined))
                local = (cutting[i] if grid != [*cut] else 0.0) + (joining[j] if grid != [*joined] else 0.0)
                candidates.append((float(before[i] + after[j]) + local, i, j, nbytes // math.prod(grid)))
    best: TransferPlan | None = None
    for resharding, i, j, part in sorted(candidates):
        if best is not None and resharding >= best.seconds:
            break
        sent, received = senders[i], takers[j]
        copies = tile_copies(shape, sent, source_mesh, received, target_mesh).copies
        pairs = [(source_mesh.devices[copy.source], target_mesh.devices[copy.target]) for copy in copies]
        total = resharding + link(pairs, part)
        if best is None or total < best.seconds:
            best = TransferPlan(sent, received, total)
    if best is None:  # the replicated pair is always a candidate
        raise InternalError(f"no way from {source} to {target} for {shape}")
    return best
