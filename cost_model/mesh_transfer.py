"""What devices of one mesh send to those of another, and what it takes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from autopar.cost_model.reshard import Resharder, shardings
from autopar.errors import InternalError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding, TileCopies, TileCopy

Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """Moving an array between meshes: reshard to `sent`, copy tile by tile, reshard from `received`.

    Where the two cut the array differently, tiles are cut before they are sent, and joined where they arrive.
    """

    sent: Sharding  # on the source mesh; never partial
    received: Sharding  # on the target mesh; never partial
    seconds: float  # both reshardings and the copies


def _tile_of_position(sharding: Sharding, mesh_shape: tuple[int, ...], axes: tuple[str, ...]) -> Array:
    """The tile that each device of the mesh holds: its place along each dimension, as an array [position, dim]."""
    at = dict(zip(axes, np.indices(mesh_shape).reshape(len(mesh_shape), math.prod(mesh_shape)), strict=True))
    sizes = dict(zip(axes, mesh_shape, strict=True))
    tiles = np.zeros((math.prod(mesh_shape), len(sharding.dims)), dtype=np.int64)
    for k, dim in enumerate(sharding.dims):
        for axis in dim:
            tiles[:, k] = tiles[:, k] * sizes[axis] + at[axis]
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
    cuts, joins, copies = _copies(
        sent, source_mesh.shape, source_mesh.axes, received, target_mesh.shape, target_mesh.axes
    )
    return TileCopies(cuts, joins, tuple(itertools.starmap(TileCopy, copies.tolist())))


def _go_together(shape: tuple[int, ...], cut: tuple[int, ...], joined: tuple[int, ...]) -> bool:
    """Whether each dimension can be divided as finely as the two numbers of tiles together do."""
    return all(size % math.lcm(*both) == 0 for size, *both in zip(shape, cut, joined, strict=True))


@functools.lru_cache(maxsize=256)  # between large meshes one is megabytes
def _copies(
    sent: Sharding,
    source_shape: tuple[int, ...],
    source_axes: tuple[str, ...],
    received: Sharding,
    target_shape: tuple[int, ...],
    target_axes: tuple[str, ...],
) -> tuple[tuple[int, ...], tuple[int, ...], Array]:
    """`TileCopies` with its copies as an array: a row for each, with the columns of `TileCopy`."""
    held = _tile_of_position(sent, source_shape, source_axes)
    wanted = _tile_of_position(received, target_shape, target_axes)
    tiles = [tuple(int(n) + 1 for n in each.max(axis=0)) for each in (held, wanted)]
    grid = [math.lcm(*both) for both in zip(*tiles, strict=True)]
    cuts, joins = (tuple(n // t for n, t in zip(grid, each, strict=True)) for each in tiles)
    places = np.indices(joins).reshape(len(joins), math.prod(joins)).T
    # Of every device's every part, by target, then by place: where it is in the grid.
    at = (wanted[:, None, :] * np.array(joins, dtype=np.int64) + places).reshape(len(wanted) * len(places), len(grid))
    cut = _flat(at % np.array(cuts, dtype=np.int64), cuts)
    holders = np.argsort(_flat(held, tiles[0]), kind="stable").reshape(math.prod(tiles[0]), -1)  # by tile
    sharing = holders[_flat(at // np.array(cuts, dtype=np.int64), tiles[0])]
    receivers = len(wanted) * math.prod(cuts) // math.prod(tiles[1])  # of each tile that is held, of any of its parts
    turn = cut * (receivers // math.prod(cuts)) + _times_before(_flat(at, grid))
    source = np.take_along_axis(sharing, (turn * holders.shape[1] // receivers)[:, None], axis=1)[:, 0]
    target, place = np.divmod(np.arange(len(at)), len(places))
    return cuts, joins, np.column_stack([source, target, cut, place])


def _flat(places: Array, sizes: Sequence[int]) -> Array:
    """Row-major numbers of places [place, dim] in a grid of so many."""
    numbers = np.zeros(len(places), dtype=np.int64)
    for k, size in enumerate(sizes):
        numbers = numbers * size + places[:, k]
    return numbers


def _times_before(numbers: Array) -> Array:
    """How often each number stands before it.

    >>> _times_before(np.array([7, 5, 7, 7, 5])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = np.argsort(numbers, kind="stable")
    _, first, counts = np.unique(numbers[order], return_index=True, return_counts=True)
    times = np.empty(len(numbers), dtype=np.int64)
    times[order] = np.arange(len(numbers)) - np.repeat(first, counts)
    return times


def plan_transfer(
    shape: tuple[int, ...],
    itemsize: int,
    source: Sharding,
    target: Sharding,
    source_resharder: Resharder,
    target_resharder: Resharder,
    link: Callable[[Array, int], float],
) -> TransferPlan:
    """The cheapest way to move an array from `source` on the mesh of one resharder to `target` on that of the other.

    `link(copies, bytes)`: seconds of copies of so many bytes, an array with a row (source device, target device) for
    each. Sending every
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
    sending, receiving = np.array(source_mesh.devices), np.array(target_mesh.devices)
    best: TransferPlan | None = None
    for resharding, i, j, part in sorted(candidates):
        if best is not None and resharding >= best.seconds:
            break
        sent, received = senders[i], takers[j]
        *_, copies = _copies(sent, source_mesh.shape, source_mesh.axes, received, target_mesh.shape, target_mesh.axes)
        total = resharding + link(np.column_stack([sending[copies[:, 0]], receiving[copies[:, 1]]]), part)
        if best is None or total < best.seconds:
            best = TransferPlan(sent, received, total)
    if best is None:  # the replicated pair is always a candidate
        raise InternalError(f"no way from {source} to {target} for {shape}")
    return best
