"""The layouts that a value may have in a stage's problem, and the ends of the edges between nodes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.ir.graph import Value
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.ir.sharding import Sharding
from autopar.ir.strategy import AxisChoice, Gathered, Split
from autopar.passes.intra_op.strategies import PartOptions, Shardings

_MAX_LAYOUTS = 48


@dataclasses.dataclass
class End:
    """One end of an edge: a node, and the sharding that each of its strategies gives or wants."""

    node: int
    shardings: Shardings
    in_loop: bool  # once per microbatch, not once per step
    # [strategy] Whether another one differs only in that rounds gather, or scatter, what this one has as a whole stack.
    stacked: np.ndarray[Any, Any] | None = None
    in_rows: bool = False  # whether what it gives lies in the order of rows, whatever takes it


def without_copies(matrix: Any, source: End, target: End, fits: Any) -> Any:
    """The seconds of an edge, where it makes no copy that `fits` nowhere, nor of a stack that rounds could do without.

    The copy that an edge makes is not counted as memory; all that is saved by it are latencies.
    """
    before, after = source.shardings.share[:, None], target.shardings.share[None, :]
    if source.stacked is not None:
        matrix = np.where(source.stacked[:, None] & (before > after), np.inf, matrix)
    if target.stacked is not None:
        matrix = np.where(target.stacked[None, :] & (before < after), np.inf, matrix)
    return np.where(fits, matrix, np.inf)


def with_sums_alone(matrix: Any, source: Shardings, target: Shardings, axes: Sequence[str]) -> Any:
    """The seconds of an edge, where over these axes it does nothing but sum: it gathers, moves and scatters nothing."""
    for axis in axes:
        before, after = ([_place(axis, sharding) for sharding in end.each] for end in (source, target))
        same = np.array(before, object)[:, None] == np.array(after, object)[None, :]
        whole = np.array([place is None for place in before])[:, None]
        sums = np.array([place == "sum" for place in before])[:, None] & np.array([place is None for place in after])
        matrix = np.where(same | whole | sums, matrix, np.inf)
    return matrix


def _place(axis: str, sharding: Sharding) -> int | str | None:
    """The dimension that an axis cuts; "sum" where it has partial sums; else None."""
    if axis in sharding.partial:
        return "sum"
    return next((d for d, axes in enumerate(sharding.dims) if axis in axes), None)


def strategies_by_round(rule: Rule, options: PartOptions) -> list[list[int]]:
    """For each strategy those that differ in that rounds gather, over some axes, what it has whole; see `Gathering`."""
    way: dict[AxisChoice, AxisChoice] = {Split(each.factor): Gathered(k) for k, each in enumerate(rule.gatherings)}
    if not way:
        return []
    index = {assignment: i for i, assignment in enumerate(options.assignments)}
    by_round = []
    for assignment in options.assignments:
        others = itertools.product(*([choice, way[choice]] if choice in way else [choice] for choice in assignment))
        by_round.append([index[other] for other in others if other in index and other != assignment])
    return by_round


def is_finer(shardings: Shardings, by_round: Sequence[Sequence[int]]) -> np.ndarray[Any, Any] | None:
    """[strategy] Whether a strategy by rounds cuts a value finer."""
    if not by_round:
        return None
    share = shardings.share
    return np.array([any(share[other] < share[i] for other in others) for i, others in enumerate(by_round)])


def candidate_layouts(
    value: Value, ends: Sequence[Shardings], may_be_partial: bool, is_stored: bool, mesh: Mesh
) -> list[Sharding]:
    """The shardings in which a value may be kept that some end of its edges has, and for want of others replicated.

    Of too many, those with few partial sums; but up to half of them as the value is made, `ends[0]`, where it may be
    kept as partial sums: those that leave fewest axes unused.
    """
    shardings = dict.fromkeys(sharding for end in ends for sharding in end.each)
    if is_stored:
        shardings.update(dict.fromkeys(_simple_shardings(value, mesh)))
    candidates = [s for s in shardings if (may_be_partial or not s.partial) and s.divides(value.shape, mesh)]
    replicated = Sharding.replicated(len(value.shape))
    if replicated not in candidates:
        candidates.append(replicated)
    if len(candidates) <= _MAX_LAYOUTS:
        return candidates
    made = set(ends[0].each) if may_be_partial else set()
    as_made = sorted((s for s in candidates if s in made), key=lambda s: -len(s.axes) - len(s.partial))
    candidates.sort(key=lambda s: (len(s.partial), sum(len(d) > 1 for d in s.dims)))
    return [*dict.fromkeys([*as_made[: _MAX_LAYOUTS // 2], *candidates])][:_MAX_LAYOUTS]


def _simple_shardings(value: Value, mesh: Mesh) -> list[Sharding]:
    """Every way to cut a stored array: each axis in some dimension or none."""
    rank = len(value.shape)
    shardings = []
    for where in itertools.product(range(-1, rank), repeat=len(mesh.axes)):
        dims = tuple(tuple(a for a, d in zip(mesh.axes, where, strict=True) if d == dim) for dim in range(rank))
        sharding = Sharding(dims)
        if sharding.divides(value.shape, mesh):
            shardings.append(sharding)
    return shardings
