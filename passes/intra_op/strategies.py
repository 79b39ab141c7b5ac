"""The strategies of an equation on a mesh, and the shardings that each implies for operands and results."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.ir.graph import Equation, Value
from autopar.ir.local import LocalKernel, LocalRound, LocalStep
from autopar.ir.mesh import Mesh
from autopar.ir.rule import DimMap, Halo, InnerSum, Rule, Scattering, halo_hops, product_sizes
from autopar.ir.sharding import Collective, Sharding, StepKind
from autopar.ir.strategy import REPLICATED, AxisAssignment, AxisChoice, Gathered, Partial, Split
from autopar.passes.collectives import moved_axes, shift, sum_kinds


@dataclasses.dataclass(eq=False)
class Shardings:
    """Shardings of one value to choose from."""

    each: tuple[Sharding, ...]
    share: np.ndarray[Any, Any]  # the part of the value that one device holds
    partial: np.ndarray[Any, Any]  # whether it is a partial sum
    _nbytes: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict, repr=False)

    @staticmethod
    def of(each: Iterable[Sharding], mesh: Mesh) -> Shardings:
        shardings = tuple(each)
        share = np.array([1 / math.prod(s.tiles(mesh)) for s in shardings])
        return Shardings(shardings, share, np.array([bool(s.partial) for s in shardings], bool))

    def nbytes(self, value: Value) -> Any:
        """Bytes of the value that one device holds."""
        key = (value.sum_nbytes, value.nbytes)
        if key not in self._nbytes:
            self._nbytes[key] = np.where(self.partial, *key) * self.share
        return self._nbytes[key]


@dataclasses.dataclass
class PartOptions:
    """The axis assignments of one part of an equation with what they imply, by index."""

    assignments: tuple[AxisAssignment, ...]
    operands: list[Shardings]  # [operand of the part]
    results: list[Shardings]  # [result of the part]
    share: np.ndarray[Any, Any]  # [assignment] share of the iteration space that one device computes


class OptionsCache:
    """Options on meshes of one shape, found once; equal lists of shardings are the same object."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._lists: dict[tuple[Sharding, ...], Shardings] = {}
        self._options: dict[Any, PartOptions] = {}

    def shardings(self, each: Iterable[Sharding]) -> Shardings:
        key = tuple(each)
        shardings = self._lists.get(key)
        if shardings is None:
            shardings = self._lists[key] = Shardings.of(key, self._mesh)
        return shardings

    def of(self, rule: Rule, partial_sums: frozenset[int], allow: Callable[[AxisAssignment], bool]) -> PartOptions:
        """The axis assignments of one part that are allowed; the first, replicated, is always possible."""
        key = (rule.factors, rule.inputs, rule.outputs, tuple(sorted(rule.reduced.items())), rule.whole,
               rule.linear, tuple(sorted(rule.unaffected.items())), rule.gatherings, partial_sums)  # fmt: skip
        every = self._options.get(key)
        if every is None:
            every = self._options[key] = self._of_assignments(
                rule, enumerate_assignments(rule, self._mesh, partial_sums)
            )
        allowed = tuple(assignment for assignment in every.assignments if allow(assignment)) or every.assignments[:1]
        if len(allowed) == len(every.assignments):
            return every
        options = self._options.get((*key, allowed))
        if options is None:
            options = self._options[*key, allowed] = self._of_assignments(rule, allowed)
        return options

    def _of_assignments(self, rule: Rule, assignments: tuple[AxisAssignment, ...]) -> PartOptions:
        operands = zip(*(operand_shardings(rule, assignment, self._mesh) for assignment in assignments), strict=True)
        results = zip(*(result_shardings(rule, assignment, self._mesh) for assignment in assignments), strict=True)
        share = np.array([1 / math.prod(pieces(rule, assignment, self._mesh).values()) for assignment in assignments])
        return PartOptions(assignments, [*map(self.shardings, operands)], [*map(self.shardings, results)], share)


def enumerate_assignments(rule: Rule, mesh: Mesh, partial_sums: frozenset[int]) -> tuple[AxisAssignment, ...]:
    """All axis assignments of one part, the fully replicated one first; `partial_sums`: operands that can be these."""
    factors = rule.splittable
    options: list[AxisChoice] = [REPLICATED, *map(Split, factors)]
    options += [Gathered(k) for k, way in enumerate(rule.gatherings) if way.factor in factors]
    options += [Partial(k) for k, operands in enumerate(rule.linear) if operands & partial_sums]
    assignments = []
    per_axis = [options if size > 1 else [REPLICATED] for size in mesh.shape]
    for assignment in itertools.product(*per_axis):
        if all(rule.factors[f] % n == 0 for f, n in pieces(rule, assignment, mesh).items()):
            sets = {choice for choice in assignment if isinstance(choice, Partial)}
            # Pieces of a reduced factor are partial sums only if the rule sums; mixing two linear sets is pointless.
            if len(sets) <= 1 and _can_scatter(rule, assignment, mesh):
                assignments.append(assignment)
    return tuple(assignments)


def _can_scatter(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> bool:
    """Whether all that splits the factor of a scattering does it by that, and its pieces can be so many."""
    for _, way, axes in _scattered(rule, assignment, mesh):
        split = factor_by_axis(rule, assignment, mesh)
        others = {f for axis, f in split.items() if axis not in axes and mesh.axis_size(axis) > 1}
        if way.units % math.prod(map(mesh.axis_size, axes)) or way.factor in others or others & way.apart:
            return False
    return True


def _scattered(
    rule: Rule, assignment: AxisAssignment, mesh: Mesh
) -> Iterator[tuple[Gathered, Scattering, tuple[str, ...]]]:  # fmt: skip
    """The scatterings that axes of several devices take, each with these axes, major first."""
    for k, way in enumerate(rule.gatherings):
        if isinstance(way, Scattering) and (axes := _axes_of(Gathered(k), assignment, mesh)):
            yield Gathered(k), way, axes


def _axes_of(choice: AxisChoice, assignment: AxisAssignment, mesh: Mesh) -> tuple[str, ...]:
    """The axes of several devices with this choice, major first."""
    return tuple(a for a, c in zip(mesh.axes, assignment, strict=True) if c == choice and mesh.axis_size(a) > 1)


def can_sum(rule: Rule) -> bool:
    """Whether splitting the equation can leave partial sums."""
    return "sum" in rule.reduced.values() and any(rule.reduced.get(factor) == "sum" for factor in rule.splittable)


def pieces(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> dict[int, int]:
    """In how many pieces each split factor is cut."""
    cut: dict[int, int] = {}
    for size, choice in zip(mesh.shape, assignment, strict=True):
        factor = rule.factor_of(choice)
        if factor is not None:
            cut[factor] = cut.get(factor, 1) * size
    return cut


def cut_and_gathered(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> dict[Any, int]:
    """In how many pieces each split factor is cut, and over how many devices lies what each gathering gathers."""
    cut: dict[Any, int] = {**pieces(rule, assignment, mesh)}
    for size, choice in zip(mesh.shape, assignment, strict=True):
        if isinstance(choice, Gathered):
            cut[choice] = cut.get(choice, 1) * size
    return cut


def factor_by_axis(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> dict[str, int]:
    """The factor that each axis splits, gathered or not, of those that split one."""
    factors = zip(mesh.axes, map(rule.factor_of, assignment), strict=True)
    return {axis: factor for axis, factor in factors if factor is not None}


def _lay(dims: DimMap, split: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for axis, factor in split.items() if factor in dim) for dim in dims)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A stacked operand or result that is kept in pieces which a loop gathers, or makes, in each round."""

    dim: int  # that is cut; from the end
    axes: tuple[str, ...]  # major first
    collective: Collective | None  # in each round
    times: int


def kept_operands(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> dict[int, Kept]:
    """By position. See `Gathering`."""
    return _kept(rule, assignment, mesh, "all_gather")


def kept_results(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> dict[int, Kept]:
    """By position. See `Gathering`."""
    return _kept(rule, assignment, mesh, "reduce_scatter")


def _kept(rule: Rule, assignment: AxisAssignment, mesh: Mesh, kind: StepKind) -> dict[int, Kept]:
    """In pieces along the first dimension after that of the rounds which nothing cuts and the pieces divide."""
    kept: dict[int, Kept] = {}
    split = factor_by_axis(rule, assignment, mesh) if rule.gatherings else {}
    lie = _operands_lie if kind == "all_gather" else _results_lie
    for k, way in enumerate(rule.gatherings):
        axes = _axes_of(Gathered(k), assignment, mesh)
        if isinstance(way, Scattering) or not axes:
            continue
        count = math.prod(mesh.axis_size(axis) for axis in axes)
        slices, maps = (way.operands, rule.inputs) if kind == "all_gather" else (way.results, rule.outputs)
        for s in slices:
            dims = maps[s.position]
            cut = lie(rule, assignment, mesh, s.position, split)
            sizes = [math.prod(rule.factors[f] for f in dim) for dim in dims]
            free = (d for d in range(1, len(dims)) if not cut[d] and sizes[d] % count == 0)
            dim = next(free, None)
            if dim is not None and s.position not in kept:
                tiles = math.prod(mesh.axis_size(axis) for along in cut for axis in along)
                collective = Collective(kind, axes, s.nbytes // tiles) if s.nbytes else None
                kept[s.position] = Kept(dim - len(dims), axes, collective, way.times)
    return kept


def _operands_lie(
    rule: Rule, assignment: AxisAssignment, mesh: Mesh, position: int, split: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:  # fmt: skip
    """By dimension the axes that cut an operand, but for those over which rounds gather it."""
    ways = [(way.operands, axes) for _, way, axes in _scattered(rule, assignment, mesh)]
    return _with_scattered(_lay(rule.inputs[position], split), position, ways)


def _results_lie(
    rule: Rule, assignment: AxisAssignment, mesh: Mesh, position: int, split: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:  # fmt: skip
    ways = [(way.results, axes) for _, way, axes in _scattered(rule, assignment, mesh)]
    return _with_scattered(_lay(rule.outputs[position], split), position, ways)


def _with_scattered(
    dims: tuple[tuple[str, ...], ...], position: int,
    ways: Iterable[tuple[Iterable[tuple[int, int]], tuple[str, ...]]],
) -> tuple[tuple[str, ...], ...]:  # fmt: skip
    """`ways`: the dimensions that are cut, each after the position of its array, with the axes over which they are."""
    for lying, axes in ways:
        cut = {dim for at, dim in lying if at == position}
        dims = tuple((*along, *axes) if dim in cut else along for dim, along in enumerate(dims))
    return dims


def _with_kept(dims: tuple[tuple[str, ...], ...], kept: Kept | None) -> tuple[tuple[str, ...], ...]:
    if kept is None:
        return dims
    at = len(dims) + kept.dim
    return (*dims[:at], kept.axes, *dims[at + 1 :])


def operand_shardings(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> tuple[Sharding, ...]:
    """What each operand must be; literals get the sharding of a scalar."""
    shardings = []
    kept, split = kept_operands(rule, assignment, mesh), factor_by_axis(rule, assignment, mesh)
    for position in range(len(rule.inputs)):
        partial = tuple(
            sorted(
                axis
                for axis, choice in zip(mesh.axes, assignment, strict=True)
                if isinstance(choice, Partial) and position in rule.linear[choice.linear_set]
            )
        )
        laid = _operands_lie(rule, assignment, mesh, position, split)
        shardings.append(Sharding(_with_kept(laid, kept.get(position)), partial))
    return tuple(shardings)


def result_shardings(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> tuple[Sharding, ...]:
    """What each result is: partial over axes that split a summed factor or whose operands are partial."""
    shardings = []
    kept, split = kept_results(rule, assignment, mesh), factor_by_axis(rule, assignment, mesh)
    linear = [axis for axis, choice in zip(mesh.axes, assignment, strict=True) if isinstance(choice, Partial)]
    scattered = [*_scattered(rule, assignment, mesh)]
    over = {axis for _, _, axes in scattered for axis in axes}
    for k in range(len(rule.outputs)):
        made = over.union(kept[k].axes if k in kept else ())
        summed = [axis for axis, f in split.items() if axis not in made and rule.is_partial_sum(f, k)]
        summed += [axis for _, way, axes in scattered if k in way.partial_sums for axis in axes]
        laid = _with_kept(_results_lie(rule, assignment, mesh, k, split), kept.get(k))
        shardings.append(Sharding(laid, tuple(sorted(linear + summed))))
    return tuple(shardings)


def combined_axes(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Axes over which results must be combined at once, by operation (max, min, ..): no sum can stay partial there."""
    axes: dict[str, tuple[str, ...]] = {}
    for axis, factor in factor_by_axis(rule, assignment, mesh).items():
        if mesh.axis_size(axis) > 1 and (op := rule.reduced.get(factor)) not in (None, "sum"):
            axes[op] = (*axes.get(op, ()), axis)
    return axes


def inner_collectives(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> Iterator[tuple[Collective, int]]:
    """Collectives in the body of an equation, and how often."""
    cut = pieces(rule, assignment, mesh)
    for kept in (*kept_operands(rule, assignment, mesh).values(), *kept_results(rule, assignment, mesh).values()):
        if kept.collective is not None:
            yield kept.collective, kept.times
    for total in rule.sums:
        for collective in _summing(rule, total, assignment, mesh):
            yield collective, total.times
    for context in rule.contexts:
        axes = splitting_axes(rule, context.factor, assignment, mesh)
        for each in context.sent(cut) if axes else ():
            moved = moved_axes(axes, each.pairs, mesh) if each.pairs else axes
            yield Collective(each.kind, moved, each.nbytes), context.times


def _summing(rule: Rule, total: InnerSum, assignment: AxisAssignment, mesh: Mesh) -> list[Collective]:
    """What one sum in the body of an equation sends, one after the other."""
    axes = splitting_axes(rule, total.factor, assignment, mesh)
    scattered = {choice for choice, _, _ in _scattered(rule, assignment, mesh)} if rule.gatherings else ()
    if not axes or total.without in scattered or (total.within is not None and total.within not in scattered):
        return []
    cut = cut_and_gathered(rule, assignment, mesh)
    size = total.size // math.prod(cut.get(f, 1) for f in total.held)
    if total.kind == "gather":
        return [Collective("all_gather", axes, size * total.itemsize)]
    if total.kind == "scatter":
        return [Collective("reduce_scatter", axes, size * total.sum_itemsize)]
    count = math.prod(mesh.axis_size(axis) for axis in axes)
    kinds = sum_kinds(size, total.itemsize, total.sum_itemsize, count)
    return [Collective(kind, axes, size * itemsize) for kind, itemsize in kinds]


def local_round(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> LocalRound | None:
    """One round of a loop on one device; None where it sends nothing.

    What loops inside it send runs beside nothing, and is left out.
    """
    if rule.round is None:
        return None
    cut = cut_and_gathered(rule, assignment, mesh)
    operands, results = kept_operands(rule, assignment, mesh), kept_results(rule, assignment, mesh)
    steps = []
    for step in rule.round.steps:
        sent: list[Collective] = []
        if step.sum is not None:
            total = rule.sums[step.sum]
            sent = _summing(rule, total, assignment, mesh) if total.times == rule.round.times else []
        else:
            kept = [each.get(at) for each, at in ((operands, step.operand), (results, step.result)) if at is not None]
            sent = [each.collective for each in kept if each is not None and each.collective is not None]
        nbytes = sum(int(n) // math.prod(cut.get(f, 1) for f in held) for n, held in step.makes)
        steps.append(LocalStep(step.before, nbytes, step.kernels, tuple(sent), step.dtype, step.result is not None))
    return LocalRound(tuple(steps), rule.round.times) if any(step.collectives for step in steps) else None


def local_kernels(rule: Rule, cut: Mapping[Any, int], round_: LocalRound | None) -> tuple[LocalKernel, ...]:
    """The kernels of a body on one device, in all rounds.

    Args:
      rule: of an equation with a body.
      cut: see `cut_and_gathered`.
      round_: one round of it, if it sends something. What it hands on to the next is copied there, since the next makes
        the same in its place: the last of the kernels.
    """
    kernels = tuple(
        LocalKernel(
            k.flops / math.prod(cut.get(f, 1) for f in k.held), k.moved(cut), product_sizes(k.sides, cut), k.dtype,
            k.times, k.pooling, k.rounds, k.plain_attention, k.sides is not None and k.is_widening(cut),
        )
        for k in rule.kernels
    )  # fmt: skip
    if round_ is None or not round_.handed_on:
        return kernels
    times, arrays = round_.times, round_.handed_on
    return (*kernels, LocalKernel(0.0, 2.0 * times * sum(arrays), None, "float32", times * len(arrays), rounds=times))


def packing(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> tuple[float, float]:
    """Bytes through memory around what pieces of positions send one another, and the kernels that move them."""
    cut = pieces(rule, assignment, mesh)
    nbytes = launches = 0.0
    for context in rule.contexts:
        packed = [each.packed for each in context.sent(cut) if each.packed]
        nbytes += context.times * sum(packed)
        launches += context.times * 2 * len(packed)
    return nbytes, launches


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Some elements that every piece of an operand sends on: one hop of a halo.

    Equal exchanges of the same operand in the same sharding are made once in a program.
    """

    operand: int
    widened: tuple[Halo, ...]  # by which the piece has grown before
    dim: int
    distance: int  # in pieces, towards the end
    elements: int
    collective: Collective


def exchanges(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> Iterator[Exchange]:
    """The exchanges that halos take, in the order in which they are made."""
    cut = pieces(rule, assignment, mesh)
    grown: dict[int, tuple[Halo, ...]] = defaultdict(tuple)
    for halo in rule.halos:
        axes = splitting_axes(rule, halo.factor, assignment, mesh)
        if not axes:
            continue
        shape = [math.prod(rule.factors[f] // cut.get(f, 1) for f in dim) for dim in rule.inputs[halo.operand]]
        for other in grown[halo.operand]:
            shape[other.dim] += other.before + other.after
        size = shape[halo.dim]
        for width, way in ((halo.before, 1), (halo.after, -1)):
            for distance, elements in halo_hops(width, size, cut[halo.factor]):
                moved, _ = shift(axes, way * distance, mesh)
                payload = elements * halo.itemsize * math.prod(shape) // size
                yield Exchange(
                    halo.operand, grown[halo.operand], halo.dim, way * distance, elements,
                    Collective("permute", moved, payload),
                )  # fmt: skip
        # Factors are numbered by equation.
        grown[halo.operand] += (dataclasses.replace(halo, operand=0, factor=0),)


def temporaries(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> float:
    """Most bytes that the body of an equation holds at once on one device, beyond operands and results."""
    return rule.temporaries(cut_and_gathered(rule, assignment, mesh))


def scatters(rule: Rule, assignment: AxisAssignment, mesh: Mesh) -> frozenset[int]:
    """The scatterings that axes take, by number."""
    return frozenset(choice.index for choice, _, _ in _scattered(rule, assignment, mesh))


def splitting_axes(rule: Rule, factor: int, assignment: AxisAssignment, mesh: Mesh) -> tuple[str, ...]:
    """The axes of several devices that split a factor, in whatever way, major first."""
    return tuple(
        axis for axis, split in factor_by_axis(rule, assignment, mesh).items()
        if split == factor and mesh.axis_size(axis) > 1
    )  # fmt: skip


def part_operands(equation: Equation, rule: Rule, part_index: int) -> Sequence[int]:
    """Positions of the operands that belong to a part of an equation."""
    return (part_index,) if rule.separable else range(len(equation.inputs))
