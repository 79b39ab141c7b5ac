"""What a sharding rule is: the factors (loop dimensions) of one equation, and how its piece is computed.

A rule serves two masters alike. Cutting the batch into microbatches (time) and cutting arrays over mesh
axes (space) are both "split a factor": the operands that carry it become smaller, a reduced factor leaves
partial sums to be summed, and `emit` computes the same primitive on the local pieces. Engines know no primitive.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from autopar.ir.context import ContextParallel, Pairs
from autopar.ir.graph import Equation, Operand, Value
from autopar.ir.hint import Hint
from autopar.ir.mesh import Attention, Patches, Pooling, ProductSizes
from autopar.ir.sharding import StepKind
from autopar.ir.strategy import AxisChoice, Gathered, Split

DimMap = tuple[tuple[int, ...], ...]  # per dimension its factors, major to minor; () = size 1 or broadcast
Unit = Literal["matmul", "vector", "none"]
ReduceOp = Literal["sum", "max", "min", "prod", "and", "or"]

FUNCTION = 4.0  # operations of a transcendental function that XLA has an instruction for


class Local(Protocol):
    """The piece that `emit` computes.

    What several pieces make together is here what one makes that is alone.
    """

    def size(self, factor: int) -> int:
        """Local size of the factor."""

    def is_split(self, factor: int) -> bool: ...

    def start(self, factor: int) -> Any:
        """Index (int32 scalar, traced) of the piece's first element along the factor; 0 if not split."""

    def number(self, factor: int) -> Any:
        """Of the piece, among those along the factor, which need not be consecutive there: int32 scalar, traced."""
        return self.start(factor) // self.size(factor)

    def total(self, factor: int, x: Any, value: Value) -> Any:
        """The sum of every piece's `x`, partial sums of a value, on every piece; in its type or that of these."""
        return x

    def extreme(self, factor: int, x: Any, largest: bool) -> Any:
        """The largest (or smallest) of every piece's `x`, element by element, on every piece."""
        return x

    def halo(self, factor: int, x: Any, dim: int, before: int, after: int, fill: Any) -> Any:
        """`x` between so many elements of the pieces before and after it; `fill` (None: zeros) beyond the ends."""
        return x

    def send(self, factor: int, x: Any, kind: StepKind, dim: int = 0, to_dim: int = 0, pairs: Pairs = ()) -> Any:
        """What a collective among the pieces of a factor makes of `x`; see `ContextParallel`."""
        return x

    def gather(self, operand: int, x: Any) -> Any:
        """A round's slice of an operand, whole; see `Gathering`."""
        return x

    def is_scattered(self, index: int) -> bool:
        """Whether the piece is one of this `Scattering`, by its number in `Rule.gatherings`."""
        return False

    def scatter(self, result: int, x: Any) -> Any:
        """A round's slice of a result, as it is kept; see `Gathering`."""
        return x


Emit = Callable[[Local, Equation, Sequence[Any]], Sequence[Any]]  # results in the types of the equation's

Branches = Callable[[Local, Equation, Sequence[Any]], Sequence[Callable[[], Sequence[Any]]]]


def bind(eqn: Equation, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """Apply the equation's primitive to other operands, with some parameters changed."""
    result = eqn.primitive.bind(*operands, **{**eqn.params, **changed})
    return result if eqn.primitive.multiple_results else [result]


def emit_piece(
    rule: Rule, local: Local, eqn: Equation, operands: Sequence[Any], partial_sums: Sequence[bool]
) -> Sequence[Any]:
    """The results of a piece. Those that are `partial_sums` come in the type in which they are summed.

    So do operands that are: 16-bit floats are rounded after the sum, as on one device, and not before.
    """
    wide = {
        v.dtype: v.accumulator_dtype for v, partial_sum in zip(eqn.outputs, partial_sums, strict=True) if partial_sum
    }
    if all(narrow == dtype for narrow, dtype in wide.items()):
        return rule.emit(local, eqn, operands)
    outputs = tuple(
        dataclasses.replace(v, dtype=v.accumulator_dtype) if partial_sum else v
        for v, partial_sum in zip(eqn.outputs, partial_sums, strict=True)
    )
    if not rule.separable and any(_is_wider(x, v) for x, v in zip(operands, eqn.inputs, strict=True)):
        operands = [
            _widened(x, v, wide[v.dtype]) if v.dtype in wide else x for x, v in zip(operands, eqn.inputs, strict=True)
        ]
    results = rule.emit(local, dataclasses.replace(eqn, outputs=outputs), operands)
    return [
        jax.lax.convert_element_type(x, v.dtype) if partial_sum else x
        for x, v, partial_sum in zip(results, outputs, partial_sums, strict=True)
    ]


def _widened(x: Any, operand: Operand, dtype: Any) -> Any:
    narrow = x if isinstance(operand, Value) else jnp.asarray(x, operand.dtype)
    return jax.lax.convert_element_type(narrow, dtype)


def _is_wider(x: Any, operand: Operand) -> bool:
    return isinstance(operand, Value) and x.dtype != operand.dtype


def emit_same(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """For primitives whose parameters name no sizes."""
    return bind(eqn, operands)


def emit_cast(local: Local, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """For the conversion to another type: that of the result, which is wider where it is a partial sum."""
    return bind(eqn, operands, new_dtype=eqn.outputs[0].dtype)


@dataclasses.dataclass(frozen=True)
class InnerSum:
    """A sum over the pieces of a factor in the midst of an equation with a body."""

    factor: int
    size: int  # elements of the whole array
    itemsize: int  # bytes of an element, before and after
    sum_itemsize: int  # .. and while it is added up
    held: frozenset[int | Gathered]  # factors whose pieces it is cut into, and scatterings
    times: int
    kind: Literal["sum", "scatter", "gather"] = "sum"  # "scatter": each piece takes a part; "gather": nothing is added
    within: Gathered | None = None  # the scattering in which alone it is needed
    without: Gathered | None = None  # .. in which it is not


@dataclasses.dataclass(frozen=True)
class RoundSlice:
    """A round's slice of a stacked operand or result."""

    position: int  # of the operand or result
    nbytes: int  # of the whole slice, as it is gathered or summed; 0: nothing is sent


@dataclasses.dataclass(frozen=True)
class Gathering:
    """A further way to split a factor of a loop: stacks that it leaves whole are kept in pieces.

    Every round gathers its slices of the operands; of results it keeps a piece of each slice, summed if the slices are
    partial sums. That is how parameters of layers are fully sharded (FSDP; Zhao et al. 2023).
    """

    factor: int
    operands: tuple[RoundSlice, ...]
    results: tuple[RoundSlice, ...]
    times: int


@dataclasses.dataclass(frozen=True)
class Scattering:
    """A further way to split a factor of a loop with sums: these are scattered, and what follows is kept in pieces.

    That is sequence parallelism (Korthikanti et al. 2022). The pieces are gathered where the factor's own equations
    need the whole.
    """

    factor: int
    operands: tuple[tuple[int, int], ...]  # those that come in pieces: position, dimension
    results: tuple[tuple[int, int], ...]
    partial_sums: frozenset[int]  # results that are these, by position
    units: int  # into how many pieces it can be cut at most; others must divide it
    apart: frozenset[int]  # factors that no axis can split beside it


@dataclasses.dataclass(frozen=True)
class RoundStep:
    """Kernels that a round of a loop runs as one, or what it sends there.

    That is one of the sums of the rule, or a slice of a stacked operand or result, by its position, which is gathered,
    or summed and scattered, where the stack is kept in pieces (`Gathering`).
    """

    before: tuple[int, ...]  # the steps, by number, whose results it reads
    makes: tuple[Side, ...]  # bytes of each result, and the factors that cut it
    kernels: tuple[int, ...] = ()  # of `Rule.kernels`, by number
    sum: int | None = None
    operand: int | None = None
    result: int | None = None
    dtype: str = ""  # of what is sent


@dataclasses.dataclass(frozen=True)
class Round:
    """What a loop runs and sends in one of its rounds, in an order in which it can."""

    steps: tuple[RoundStep, ...]
    times: int  # that it goes round


# Bytes live at once, and what cuts them: factors, and gatherings that keep them in pieces.
LiveSet = tuple[tuple[int, frozenset[int | Gathered]], ...]


Side = tuple[float, frozenset[int | Gathered]]  # a size, and the factors and scatterings that cut it


class Sides(NamedTuple):
    """Of `ProductSizes`."""

    batch: Side
    rows: Side
    columns: Side
    depth: Side
    patches: Patches | None = None
    attention: Attention | None = None

    @property
    def each(self) -> tuple[Side, Side, Side, Side]:
        return self[:4]


def product_sizes(sides: Sides | None, split: Mapping[Any, int]) -> ProductSizes | None:
    """The sizes of one piece of a product, with some factors cut in so many pieces; None if it is no product."""
    if sides is None:
        return None
    batch, rows, columns, depth = (size / math.prod(split.get(f, 1) for f in held) for size, held in sides.each)
    return ProductSizes(batch, rows, columns, depth, sides.patches, sides.attention)


@dataclasses.dataclass(frozen=True)
class BodyKernel:
    """What one equation of a body does in all rounds, on whole arrays."""

    flops: float
    held: frozenset[int | Gathered]  # factors that cut them, and scatterings
    # Bytes through memory, and what cuts them: factors, and gatherings that keep them in pieces.
    traffic: tuple[tuple[float, frozenset[int | Gathered]], ...]
    sides: Sides | None  # of a product, in one round
    dtype: str
    times: float  # that it is launched
    rematerialized: bool = False  # see `Equation`
    pooling: Pooling | None = None
    rounds: float = 1.0
    plain_attention: bool = False  # it reads or writes all scores of an attention
    # Bytes through memory beyond `traffic`, since partial sums are wider, the factors that cut them, and those over
    # whose pieces they are partial sums.
    widened: tuple[tuple[float, frozenset[int | Gathered], frozenset[int | Gathered]], ...] = ()
    widens: bool = False  # its result has more bytes an element than what it is made of

    def moved(self, split: Mapping[int | Gathered, int]) -> float:
        """Bytes through memory of one piece, with `split` as for `Rule.temporaries`."""
        moved = sum(nbytes / math.prod(split.get(f, 1) for f in held) for nbytes, held in self.traffic)
        for nbytes, held in self._widened(split):
            moved += nbytes / math.prod(split.get(f, 1) for f in held)
        return moved

    def is_widening(self, split: Mapping[int | Gathered, int]) -> bool:
        """Whether a result has more bytes an element, be it as a partial sum."""
        return self.widens or any(True for _ in self._widened(split))

    def _widened(self, split: Mapping[int | Gathered, int]) -> Iterator[tuple[float, frozenset[int | Gathered]]]:
        for nbytes, held, partial in self.widened:
            if any(split.get(f, 1) > 1 for f in partial):
                yield nbytes, held


@dataclasses.dataclass(frozen=True)
class Halo:
    """What each piece of an operand borrows from the pieces before and after it along a dimension."""

    operand: int
    dim: int
    factor: int  # that cuts the dimension
    before: int  # elements along the dimension
    after: int
    itemsize: int  # bytes
    fill: Hashable  # says what is beyond the ends


def halo_hops(width: int, piece: int, pieces: int) -> Iterator[tuple[int, int]]:
    """From how far away (in pieces) how many elements come; beyond the ends of the whole there are none."""
    for distance in range(1, min(math.ceil(width / piece), pieces - 1) + 1):
        yield distance, min(piece, width - (distance - 1) * piece)


@dataclasses.dataclass(frozen=True)
class Hinted:
    """An array, in the equation or in its body, whose sharding the user has pinned: it may be no partial sum."""

    hint: Hint
    dims: tuple[frozenset[int], ...]  # per dimension the factors that cut it
    partial_sum: frozenset[int]  # factors over whose pieces it is a partial sum

    def renamed(self, outer: Mapping[int, int], passing: Collection[int]) -> Hinted:
        """In the factors of the equation in whose body it is.

        `outer`: by outer factor the one that its cut splits; `passing`: outer factors that leave all as partial sums.
        """
        dims = tuple(frozenset(f for f, inner in outer.items() if inner in dim) for dim in self.dims)
        partial_sum = frozenset(f for f, inner in outer.items() if inner in self.partial_sum)
        return dataclasses.replace(self, dims=dims, partial_sum=partial_sum.union(passing))


_FUNCTIONS = ("emit", "branches")  # fields of a rule


@dataclasses.dataclass(frozen=True)
class Rule:
    """The factors of one equation.

    A factor in several operands or results cuts all of them together. A factor that occurs in operands only is
    reduced and must be listed in `reduced` (or be `whole`). A factor that no operand has (iota, broadcast) is free.
    """

    factors: tuple[int, ...]  # sizes
    inputs: tuple[DimMap, ...]  # one per operand, literals included (scalars: ())
    outputs: tuple[DimMap, ...]
    reduced: Mapping[int, ReduceOp] = dataclasses.field(default_factory=dict)
    whole: frozenset[int] = frozenset()  # factors that cannot be split
    # Sets of operands in which the equation is jointly linear, the others fixed: if exactly these are partial
    # sums, so is every result. `mul`: {0}, {1}; `add`: {0, 1}; `dot_general`: {0}, {1}.
    linear: tuple[frozenset[int], ...] = ()
    emit: Emit = emit_same
    flops: float = 1.0  # per point of the iteration space (the product of all factors)
    unit: Unit = "vector"  # "none": moves or renames data at most
    is_bitcast: bool = False  # a reshape: elements keep their order, even where the factors do not show it
    patches: Patches | None = None  # of a product of windows
    # Of a convolution, for its operands and its result: whether examples come first and channels last.
    channels_last: tuple[bool, bool, bool] | None = None
    separable: bool = False  # result i depends on operand i alone: each may be split in its own way
    replicates: bool = False  # the fallback: nothing can be split
    # Results that lie where an operand did, by its position, and those that rounds fill bit by bit (None).
    aliases: Mapping[int, int | None] = dataclasses.field(default_factory=dict)
    halos: tuple[Halo, ...] = ()  # in the order in which `emit` borrows
    contexts: tuple[ContextParallel, ...] = ()  # of an attention, or of those in a body
    windows: frozenset[int] = frozenset()  # factors along which windows of a convolution lie
    pooling: Pooling | None = None
    # Of an equation with a body:
    unaffected: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)  # factor -> results alike on all
    sums: tuple[InnerSum, ...] = ()
    kernels: tuple[BodyKernel, ...] = ()
    gatherings: tuple[Gathering | Scattering, ...] = ()
    live_sets: tuple[LiveSet, ...] = ()  # when most of what one round makes for itself is live
    round: Round | None = None  # of a loop; of a `while` as if it went round once
    hints: tuple[Hinted, ...] = ()
    # Of an equation whose first operand says which of several it computes: what each computes. Such equations with the
    # same first operand may be computed as one.
    branches: Branches | None = None

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for rules that can be split alike at the same costs."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in _FUNCTIONS)
        return tuple(tuple(sorted(v.items())) if isinstance(v, Mapping) else v for v in values)

    @functools.cached_property
    def parts(self) -> tuple[Rule, ...]:
        """What is split in ways of its own: the rule itself, or of a separable one each operand with its result."""
        if not self.separable:
            return (self,)
        return tuple(
            dataclasses.replace(self, inputs=(ins,), outputs=(outs,), separable=False, linear=(frozenset({0}),))
            for ins, outs in zip(self.inputs, self.outputs, strict=True)
        )

    def points(self) -> int:
        """Size of the iteration space."""
        return math.prod(self.factors)

    def work(self, split: Mapping[Any, int]) -> float:
        """FLOPs of one piece, with some factors cut in so many pieces."""
        if self.kernels:
            return sum(k.flops / math.prod(split.get(f, 1) for f in k.held) for k in self.kernels)
        if not self.flops:
            return 0.0  # the points of a separable rule may be more than a float can say
        return float(self.flops * self.points() / math.prod(split.values()))

    def factor_of(self, choice: AxisChoice) -> int | None:
        """The factor that a mesh axis splits, gathered or not; None if it splits none."""
        if isinstance(choice, Split):
            return choice.factor
        return self.gatherings[choice.index].factor if isinstance(choice, Gathered) else None

    def temporaries(self, split: Mapping[int | Gathered, int]) -> float:
        """Most bytes of one piece that a body holds at once beyond operands and results.

        `split`: into how many pieces factors are cut, and over how many devices what is gathered lies.
        """
        most = max(
            (sum(n / math.prod(split.get(f, 1) for f in held) for n, held in live_set) for live_set in self.live_sets),
            default=0.0,
        )
        cut = {f: n for f, n in split.items() if not isinstance(f, Gathered)}
        return most + max((context.temporaries(cut) for context in self.contexts), default=0)

    @functools.cached_property
    def splittable(self) -> tuple[int, ...]:
        """Factors that mesh axes may split: contiguous pieces in every operand and result."""
        maps = (*self.inputs, *self.outputs)
        present = {f for dims in maps for dim in dims for f in dim}
        splittable = []
        for factor, size in enumerate(self.factors):
            if size <= 1 or factor in self.whole or factor not in present:
                continue
            major = all(
                factor not in dim or math.prod(self.factors[f] for f in dim[: dim.index(factor)]) == 1
                for dims in maps
                for dim in dims
            )
            once = all(sum(factor in dim for dim in dims) <= 1 for dims in maps)
            held = any(factor in dim for dims in self.outputs for dim in dims)
            if major and once and (held or factor in self.reduced or factor in self.unaffected):
                splittable.append(factor)
        return tuple(splittable)

    @property
    def products(self) -> float:
        """FLOPs in matrix products."""
        if self.kernels:
            return sum(k.flops for k in self.kernels if k.sides)
        return self.work({}) if self.unit == "matmul" else 0.0

    @functools.cached_property
    def sides(self) -> Sides | None:
        """Of a product: factors of the result that one operand has, or both, and the work that each element is."""
        if self.unit != "matmul" or self.kernels:
            return None
        left, right, result = ({f for dim in dims for f in dim} for dims in (*self.inputs[:2], self.outputs[0]))
        both, columns = result & left & right, result & right - left
        batch, rows, wide = (
            (math.prod(self.factors[f] for f in side), frozenset(side))
            for side in (both, result - both - columns, columns)
        )
        size = batch[0] * rows[0] * wide[0]
        depth = self.work({}) / (2 * size) if size else 0.0
        summed = frozenset(range(len(self.factors))) - result
        return Sides(batch, rows, wide, (depth, summed), self.patches)

    @functools.cached_property
    def is_fusible(self) -> bool:
        """Whether XLA would fuse the equation into its readers, so that its result need not go through memory.

        That is what moves elements, and what computes each from one of each operand.
        """
        if self.unit == "matmul" or self.replicates or self.kernels or self.aliases or self.pooling == "gradient":
            return False
        return not self.flops or not (self.reduced or self.whole)

    @functools.cached_property
    def elementwise(self) -> tuple[bool, ...]:
        """By operand: whether each element of the first result needs the operand's element of the same place alone."""
        if self.is_bitcast or self.whole or not self.is_fusible:
            return (self.is_bitcast,) * len(self.inputs)
        made, *taken = (tuple(itertools.chain(*dims)) for dims in (self.outputs[0], *self.inputs))
        return tuple(order == made for order in taken)

    def communicates(self, factor: int) -> bool:
        """Whether the pieces of a factor need something of one another while they are computed."""
        sums = [each for each in self.sums if each.within is None]
        communicating: list[InnerSum | Halo | ContextParallel] = [*sums, *self.halos, *self.contexts]
        return any(each.factor == factor for each in communicating)

    def is_extreme(self, factor: int) -> bool:
        """Whether the results are the largest or smallest of all pieces of a factor, of what has an order."""
        return self.reduced.get(factor) in ("max", "min")

    def is_partial_sum(self, factor: int, result: int) -> bool:
        """Whether the pieces of a factor leave partial sums of a result."""
        held = any(factor in dim for dim in self.outputs[result])
        return self.reduced.get(factor) == "sum" and not held and result not in self.unaffected.get(factor, ())


RuleOf = Callable[[Equation], Rule]  # how to find the rule of an equation


def is_reduction(eqn: Equation, rule: Rule) -> bool:
    """Whether the results are made of all elements of one operand along some dimensions."""
    return bool(rule.reduced) and rule.unit == "vector" and not rule.whole and len(eqn.values) == 1


def reduced_dims(rule: Rule) -> list[bool]:
    """Of a reduction, by dimension of its operand: whether it is reduced."""
    return [bool(dim) and all(f in rule.reduced for f in dim) for dim in rule.inputs[0]]
