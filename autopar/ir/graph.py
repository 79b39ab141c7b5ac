"""A traced step as plain data: values, equations, and the phases of a train step."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.ir.hint import Hint
from autopar.ir.same import Signature, number_signature, parameters_signature, signature_of


class Phase(enum.Enum):
    """When something runs: once before the microbatches, once for each, or once after them.

    Equations of the backward pass are all of BACKWARD; programs that no other stage waits for may be of WEIGHTS.
    """

    PROLOGUE = "prologue"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    UPDATE = "update"

    def __init__(self, name: str) -> None:
        self.in_loop = name in ("forward", "backward", "weights")


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """The result of one equation, or an input. Compared by identity; `id` is unique in its graph."""

    id: int
    shape: tuple[int, ...]
    dtype: Any  # numpy dtype, or JAX's key dtype
    weak_type: bool = False
    least_sum_bytes: int = 4  # of an element while partial sums are added up, see `accumulator_dtype`

    @property
    def is_key(self) -> bool:
        return not isinstance(self.dtype, np.dtype)

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of an element; a PRNG key counts 8 (threefry)."""
        return 8 if self.is_key else int(self.dtype.itemsize)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return math.prod(self.shape) * self.itemsize

    @functools.cached_property
    def sum_nbytes(self) -> int:
        """Bytes of the whole value while it is a partial sum."""
        return math.prod(self.shape) * self.sum_itemsize

    @functools.cached_property
    def sum_itemsize(self) -> int:
        """Bytes of an element while it is a partial sum."""
        return 8 if self.is_key else int(self.accumulator_dtype.itemsize)

    @property
    def accumulator_dtype(self) -> Any:
        """The type in which its partial sums are held and added up."""
        return accumulator_dtype(self.dtype, self.least_sum_bytes)

    def held_dtype(self, partial: bool) -> Any:
        """The type in which it is held, or in which its partial sums are."""
        return self.accumulator_dtype if partial else self.dtype

    def __repr__(self) -> str:
        return f"%{self.id}:{self.dtype}{list(self.shape)}"


def least_sum_bytes(inputs: Iterable[Value], equations: Sequence[Equation]) -> int:
    """That of a program's values, which all agree on it."""
    return min((v.least_sum_bytes for v in (*inputs, *(v for eqn in equations[:1] for v in eqn.outputs))), default=4)


def accumulator_dtype(dtype: Any, least_bytes: int = 4) -> Any:
    """The type in which partial sums of this type are held and added up, whatever makes the sum.

    Types of at least so many bytes are their own; smaller floats are added up in float32, and smaller integers in 32
    bits, which wrap in the end as they would.
    """
    if not isinstance(dtype, np.dtype) or dtype.itemsize >= least_bytes:
        return dtype
    if jnp.issubdtype(dtype, np.integer):
        return np.dtype(np.int32 if jnp.issubdtype(dtype, np.signedinteger) else np.uint32)
    return np.dtype(np.float32)


@functools.cache
def dtype_name(dtype: Any) -> str:
    """`str(dtype)`, which NumPy puts together anew each time."""
    return str(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Literal:
    """A constant scalar inside an equation."""

    value: Any
    dtype: Any
    weak_type: bool = False
    shape: tuple[int, ...] = ()


Operand = Value | Literal


def operand_signature(operand: Operand) -> Hashable:
    """Equal for arrays of the same shape and type, and for literals of the same number as well."""
    if isinstance(operand, Value):
        return (operand.shape, operand.dtype, operand.weak_type, operand.least_sum_bytes)
    return (number_signature(operand.value), operand.dtype, operand.weak_type)


_FEW = 1024  # bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One primitive applied to operands. `shape`s are those of the graph the equation stands in."""

    id: int
    primitive: Any  # jax.extend.core.Primitive
    params: Mapping[str, Any]
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    phase: Phase  # what JAX's name stack says: FORWARD, BACKWARD, or UPDATE for neither
    source: str = ""  # file:line (function) of the user's code
    origin: tuple[int, int] = (-1, 0)  # the traced equation that it comes from, and the first round of its piece
    rematerialized: bool = False  # of what the step's own `jax.checkpoint` computes once more

    @property
    def generates(self) -> bool:
        """Whether arrays are made of a few numbers alone, as random bits are of a key; XLA does so in readers."""
        return sum(v.nbytes for v in self.values) <= _FEW and sum(v.nbytes for v in self.outputs) > _FEW

    def kernel_dtype(self, matmul: bool) -> str:
        """The type that it computes in: a product of matrices in that of its operands, whatever it gives."""
        if not matmul:
            return dtype_name(self.outputs[0].dtype)
        return dtype_name(max((x.dtype for x in self.inputs[:2]), key=lambda dtype: int(dtype.itemsize)))

    @functools.cached_property
    def values(self) -> tuple[Value, ...]:
        """The operands that are not literals."""
        return tuple(v for v in self.inputs if isinstance(v, Value))

    @functools.cached_property
    def signature(self) -> Signature[Equation]:
        """Equal for equations that do the same to arrays of the same shapes and types, whenever they run."""
        inputs = tuple([operand_signature(v) for v in self.inputs])
        outputs = tuple([operand_signature(v) for v in self.outputs])
        return signature_of(self, (self.primitive, parameters_signature(self.params), inputs, outputs))

    def __repr__(self) -> str:
        ins = ", ".join(map(repr, self.inputs))
        return f"{', '.join(map(repr, self.outputs))} = {self.primitive.name} {ins}  # {self.phase.value}"


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """Callbacks of a loop, to be called round by round: their operands have a leading axis of rounds."""

    length: int
    reverse: bool
    callbacks: tuple[Callback, ...]

    @property
    def values(self) -> tuple[Value, ...]:
        """The operands of all callbacks in order, literals left out."""
        return tuple(v for callback in self.callbacks for v in callback.values)


Callback = Equation | Rounds  # `jax.debug.print` and the like, or what a loop has of them


@dataclasses.dataclass(frozen=True)
class LeafCut:
    """A leaf of arguments or results cut along an axis: piece k is [bounds[k], bounds[k + 1])."""

    axis: int
    bounds: tuple[int, ...]  # from 0 to the size of the axis, rising

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Start and stop of each piece."""
        return tuple(itertools.pairwise(self.bounds))


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A traced function: pure equations in topological order, calls inlined.

    An argument leaf is one input, unless `input_cuts` says that it is one for each piece; results alike.
    """

    name: str
    equations: tuple[Equation, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Operand, ...]  # what the function returns, then the callbacks' operands
    constants: Mapping[Value, Any]  # captured arrays
    input_paths: tuple[str, ...]  # e.g. "state['params']['w']", one per input
    output_paths: tuple[str, ...]
    carried: Mapping[int, int]  # output index -> input index that it replaces (the state, never examples)
    in_tree: Any
    out_tree: Any
    fingerprint: str  # hash of structure, shapes and dtypes
    input_cuts: Mapping[int, LeafCut] = dataclasses.field(default_factory=dict)  # by number of the argument leaf
    output_cuts: Mapping[int, LeafCut] = dataclasses.field(default_factory=dict)  # by number of the result leaf
    callbacks: tuple[Callback, ...] = ()  # called on the host after each step
    hints: Mapping[int, Hint] = dataclasses.field(default_factory=dict)  # by number of the argument leaf
    heeds_hints: bool = True  # those of equations
    examples: frozenset[Value] = frozenset()  # inputs that hold them, once that is known
    padding: tuple[tuple[int, int], ...] = ()  # sizes of dimensions of products, and what they are within the step

    @property
    def least_sum_bytes(self) -> int:
        """Of an element while partial sums are added up, see `accumulator_dtype`."""
        return least_sum_bytes(self.inputs, self.equations)

    @property
    def next_value_id(self) -> int:
        """Above those of all values."""
        made = (v.id for eqn in self.equations for v in eqn.outputs)
        return 1 + max(itertools.chain(made, (v.id for v in (*self.inputs, *self.constants))), default=-1)

    @functools.cached_property
    def inputs_of(self) -> tuple[range, ...]:
        """The inputs of each argument leaf."""
        return _numbers(self.input_cuts, len(self.inputs))

    @functools.cached_property
    def outputs_of(self) -> tuple[range, ...]:
        """The outputs of each result leaf."""
        return _numbers(self.output_cuts, len(self.outputs))

    @property
    def returned(self) -> tuple[Operand, ...]:
        """The outputs without the callbacks' operands."""
        ranges = self.outputs_of[: self.out_tree.num_leaves]
        return self.outputs[: ranges[-1].stop] if ranges else ()

    def __repr__(self) -> str:
        lines = [f"graph {self.name}({', '.join(map(repr, self.inputs))}):"]
        lines += [f"  {eqn!r}" for eqn in self.equations]
        return "\n".join([*lines, f"  return {', '.join(map(repr, self.outputs))}"])


def _numbers(cuts: Mapping[int, LeafCut], count: int) -> tuple[range, ...]:
    ranges: list[range] = []
    first = 0
    while first < count:
        number = len(cuts[len(ranges)].windows) if len(ranges) in cuts else 1
        ranges.append(range(first, first + number))
        first += number
    return tuple(ranges)


@dataclasses.dataclass(frozen=True)
class BatchDim:
    """Where the batch lies in a value: dimension `dim` is (outer, units, inner), row-major.

    After a reshape `(T, B) -> (T*B,)` outer is T; after `(B, T) -> (B*T,)` inner is T. A unit is one
    example, or a group of several after a reshape such as `(B,) -> (B/4, 4)`.
    """

    dim: int
    outer: int
    units: int
    inner: int

    @property
    def size(self) -> int:
        return self.outer * self.units * self.inner

    def local_size(self, num_microbatches: int) -> int:
        return self.size // num_microbatches


@dataclasses.dataclass(frozen=True)
class Block:
    """Forward equations that the backward pass computes again: [start, stop) among those of a step that are placed.

    Kept for the backward pass is what other blocks read, and what is `saved`: pairs of an equation's number and that of
    its result.
    """

    start: int
    stop: int
    saved: tuple[tuple[int, int], ...] = ()

    def within(self, start: int, stop: int) -> Block:
        """The part of it in [start, stop)."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return Block(start, max(start, stop), tuple(pair for pair in self.saved if start <= pair[0] < stop))

    def moved(self, by: int) -> Block:
        """The same, so many equations later."""
        return Block(self.start + by, self.stop + by, tuple((at + by, k) for at, k in self.saved))


@dataclasses.dataclass(frozen=True, eq=False)
class StepGraph:
    """A step cut in time: loop equations stand in the sizes of one microbatch, the others in full sizes.

    A loop equation is one whose phase is FORWARD or BACKWARD. What the loop takes and hands on is listed here;
    every other value that crosses phases is the same value on both sides.
    """

    graph: Graph  # where it comes from
    num_microbatches: int
    equations: tuple[Equation, ...]  # topological within a phase; phases run in the order of `Phase`
    constants: Mapping[Value, Any]
    microbatch: Value  # int32 scalar: the index of the running microbatch, an implicit input of the loop
    feeds: Mapping[Value, tuple[Value, BatchDim]]  # loop value <- its slice of a graph input
    accumulate: Mapping[Value, Value]  # loop value (a part of a sum, per microbatch) -> step value (the sum): one type
    keep: Mapping[Value, tuple[Value, ...]]  # loop value -> step values: what it was in each microbatch
    outputs: tuple[Operand, ...]
    replicable: frozenset[int]  # ids of cheap batch-free equations: copied to wherever they are used
    batched: frozenset[Value]  # loop values that differ between microbatches
    partial: frozenset[Value]  # those of them that are partial sums of full size, in the type in which they are summed
    recomputed: tuple[Block, ...] = ()  # what the backward pass computes again, by its own equations

    @functools.cached_property
    def kept(self) -> Mapping[Value, Value]:
        """By step value of `keep`: the loop value that it is of a microbatch."""
        return {piece: value for value, pieces in self.keep.items() for piece in pieces}

    @functools.cached_property
    def loop_values(self) -> Mapping[Value, Value]:
        """By step value: the loop value that it is the sum of, or of one microbatch."""
        return {**{total: value for value, total in self.accumulate.items()}, **self.kept}

    @functools.cached_property
    def copied(self) -> Mapping[Value, Equation]:
        """What `replicable` equations make, by which."""
        return {v: eqn for eqn in self.equations if eqn.id in self.replicable for v in eqn.outputs}

    @property
    def next_value_id(self) -> int:
        """Above those of all values."""
        made = (v.id for eqn in self.equations for v in (*eqn.values, *eqn.outputs))
        return 1 + max(itertools.chain(made, (v.id for v in self.accumulate.values())), default=-1)

    @functools.cached_property
    def forward(self) -> tuple[Equation, ...]:
        """The forward equations that get a stage, in order: all but what is copied to wherever it is used."""
        return tuple(e for e in self.equations if e.phase is Phase.FORWARD and e.id not in self.replicable)

    @functools.cached_property
    def hints(self) -> Mapping[Value, Hint]:
        """By argument, and by microbatch of one."""
        graph = self.graph
        hints = {graph.inputs[k]: hint for leaf, hint in graph.hints.items() for k in graph.inputs_of[leaf]}
        return hints | {v: hints[source] for v, (source, _) in self.feeds.items() if source in hints}
