"""From a Python function to a `Graph`: the one file that knows how JAX traces.

1. Flatten the arguments; keep each leaf's path. 2. Trace to a jaxpr. 3. Inline every call (`jit`,
`custom_jvp`, `custom_vjp`, `checkpoint`), so that one flat list of pure equations is left; a rematerialised
body is fenced by an `optimization_barrier`, as JAX's own lowering does, lest XLA merges it with the forward
pass. 4. What `jax.debug.print` prints becomes a further output, in a `scan` one that is stacked over the rounds.
5. Take conditions apart (`conditions.py`); drop what no output needs. 6. Read each equation's phase from JAX's name
stack. 7. Find the state: the inputs that the outputs replace.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from autopar.errors import TraceError
from autopar.ir.graph import Equation, Graph, Operand, Phase, Value, least_sum_bytes
from autopar.ir.hint import Hint
from autopar.ir.pieces import Pieces
from autopar.ir.placed_examples import PlacedExamples
from autopar.ops.cudnn_calls import as_if_on_gpu
from autopar.tracing.build import CALLS, Builder, is_library, live_equations, live_jaxpr, source_of
from autopar.tracing.conditions import taken_apart
from autopar.tracing.loop_callbacks import CALLBACKS
from autopar.tracing.static_leaf import IsStatic, flatten_arrays, unflatten_arrays

_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_SEE_DOCS = "See https://"
_UNBOUND = "unbound axis name"

_TRANSPARENT = frozenset({*CALLS, "scan"})  # callbacks inside are carried out as those outside

_TYPED = (jax.Array, jax.ShapeDtypeStruct, Pieces, PlacedExamples)

LeafSpec = tuple[tuple[int, ...], Any]  # shape, and dtype or its name


def leaf_specs(leaves: Sequence[Any]) -> tuple[LeafSpec, ...]:
    """Shape and dtype of each leaf as JAX sees it; of what is no array its type, for `trace` to complain about."""
    return tuple((shape, dtype) for shape, dtype, _ in call_specs(leaves))


def call_specs(leaves: Sequence[Any]) -> tuple[tuple[tuple[int, ...], Any, bool], ...]:
    """As `leaf_specs`, with whether the type is a weak one, as Python numbers have it."""
    return tuple(
        (x.shape, x.dtype, getattr(x, "weak_type", False)) if isinstance(x, _TYPED) else _spec_on_host(x)
        for x in leaves
    )


@jax.jit
def _nothing() -> tuple[()]:
    return ()


def configuration() -> Any:
    """One object for as long as what is traced and compiled means the same: JAX's own memory of a function is asked.

    Covers whatever `jax.jit` makes another program for: settings such as `jax_enable_x64` and the default precision,
    whether they are changed for good or by a context manager. After `jax.clear_caches()` there is another.
    """
    return _nothing.trace().jaxpr


def _spec_on_host(x: Any) -> tuple[tuple[int, ...], Any, bool]:
    try:
        aval = jax.typeof(x)
    except TypeError:
        return (), type(x), False
    return aval.shape, aval.dtype, aval.weak_type


def _is_below_a_byte(dtype: Any) -> bool:
    is_integer, is_float = (jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating))
    info: Any = jnp.iinfo if is_integer else jnp.finfo
    return bool((is_integer or is_float) and info(dtype).bits < 8)


def trace(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    is_static: IsStatic = callable,
    reduces_own_dtype: bool = False,
) -> Graph:
    """Trace `fun(*args, **kwargs)`; leaves are arrays or `jax.ShapeDtypeStruct`s, static values are bound before.

    Leaves that are static are those of the structure, of arguments (in a `StaticLeaf`) and results alike.
    `reduces_own_dtype`: partial sums of 16 bits are added up as such.

    Raises:
      TraceError: an argument leaf or an output is not an array, an argument has elements of less than a byte, or the
        function has side effects.
    """
    paths_and_leaves, in_tree = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))
    paths = tuple(_argument_path(fun, path) for path, _ in paths_and_leaves)
    avals = []
    for path, (_, leaf) in zip(paths, paths_and_leaves, strict=True):
        try:
            avals.append(jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf)
        except TypeError as error:
            raise TraceError(
                f"argument {path} of {name} is {leaf!r}, which is not an array. Pass arrays or "
                "jax.ShapeDtypeStruct leaves, or name the argument in static_argnums / static_argnames."
            ) from error
    for path, aval in zip(paths, avals, strict=True):
        if _is_below_a_byte(aval.dtype):
            raise TraceError(
                f"argument {path} of {name} has the type {aval.dtype}: JAX hands no array of less than a byte an "
                "element to a program that is compiled before. Keep it in 8 bits, and convert it in the step."
            )
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
    flat = _FlatFunction(fun, name, in_tree, is_static)
    closed = _jaxpr_of(flat, specs, paths, [leaf for _, leaf in paths_and_leaves])
    if closed.effects:
        _check_effects(name, closed)
    builder = Builder(least_sum_bytes=2 if reduces_own_dtype else 4)
    inputs = tuple(builder.value(aval) for aval in closed.in_avals)
    outputs = builder.inline(live_jaxpr(closed), closed.consts, inputs)
    in_leaves = [(v.shape, str(v.dtype)) for v in inputs]
    out_leaves = [(v.shape, str(v.dtype)) for v in outputs]
    carried = matching_leaves(in_tree, in_leaves, flat.out_tree, out_leaves)
    _give_leaves_values_of_their_own(builder, outputs, closed.out_avals, {k: inputs[i] for k, i in carried.items()})
    operands = [v for callback in builder.callbacks for v in callback.values]
    outputs += operands
    out_paths = (*flat.out_paths, *["an operand of a callback"] * len(operands))
    parts = list(taken_apart(builder.equations))
    if len(parts) > len(builder.equations):
        parts = [dataclasses.replace(e, id=number) for number, e in enumerate(parts)]
    equations = tuple(dataclasses.replace(e, origin=(e.id, 0)) for e in live_equations(parts, outputs))
    used = {v for eqn in equations for v in eqn.values} | {v for v in outputs if isinstance(v, Value)}
    constants = {v: c for v, c in builder.constants.items() if v in used}
    return Graph(
        name, equations, inputs, tuple(outputs), constants, paths, out_paths, carried, in_tree, flat.out_tree,
        fingerprint(equations, inputs, outputs), callbacks=tuple(builder.callbacks),
    )  # fmt: skip


def _give_leaves_values_of_their_own(
    builder: Builder, outputs: list[Operand], avals: Sequence[Any], leaves: Mapping[int, Value]
) -> None:
    """Copy what comes out in the place of a leaf of the state but lies in another's: the next call wants it there.

    A state may keep its last value, exchange two leaves, or have one new value twice. `leaves`: by output.
    """
    taken: set[Value] = set()
    others = {*leaves.values()}
    for k, leaf in leaves.items():
        out = outputs[k]
        if not isinstance(out, Value) or out.is_key:
            continue
        if out in taken or (out is not leaf and out in others):
            (copy,) = jax.make_jaxpr(jnp.copy)(jax.ShapeDtypeStruct(out.shape, out.dtype)).eqns
            (out,) = builder.add(copy.primitive, copy.params, [out], [avals[k]], Phase.UPDATE, "")
            outputs[k] = out
        taken.add(out)


class _FlatFunction:
    """A function whose results are leaves; what structure they have is known once it was called."""

    def __init__(self, fun: Callable[..., Any], name: str, in_tree: Any, is_static: IsStatic) -> None:
        self.fun, self.name, self.in_tree, self.is_static = fun, name, in_tree, is_static
        self.out_tree: Any = None
        self.out_paths: tuple[str, ...] = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> list[Any]:
        leaves, _ = jax.tree.flatten((args, kwargs))
        args, kwargs = unflatten_arrays(self.in_tree, leaves)
        results, self.out_tree = flatten_arrays(self.fun(*args, **kwargs), self.is_static)
        pairs, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(self.out_tree, results))
        self.out_paths = tuple(f"output{jax.tree_util.keystr(path)}" for path, _ in pairs)
        for path, (_, leaf) in zip(self.out_paths, pairs, strict=True):
            try:
                jax.typeof(leaf)
            except TypeError as error:
                raise TraceError(
                    f"{path} of {self.name} is {leaf!r} of type {type(leaf).__name__}, which is not an array. Return "
                    "only arrays from a parallelized step; keep other values outside of it."
                ) from error
        return [leaf for _, leaf in pairs]

    def of_leaves(self, *leaves: Any) -> list[Any]:
        """Of the arguments' leaves."""
        args, kwargs = jax.tree.unflatten(self.in_tree, leaves)
        return self(*args, **kwargs)


def _jaxpr_of(flat: _FlatFunction, specs: Sequence[Any], paths: Sequence[str], leaves: Sequence[Any]) -> Any:
    """The closed jaxpr for arguments of these shapes; what JAX does not like is said in the user's terms."""
    name = flat.name
    args, kwargs = jax.tree.unflatten(flat.in_tree, specs)

    @functools.wraps(flat.fun)  # JAX's messages name the function's own arguments
    def named(*args: Any, **kwargs: Any) -> list[Any]:
        return flat(*args, **kwargs)

    try:
        with jax.disable_jit(False), as_if_on_gpu():
            return jax.make_jaxpr(named)(*args, **kwargs)
    except _NEEDS_VALUE as error:
        raise TraceError(
            f"{name} needs a value at {_place(error) or 'an unknown line'} that only a running step has: "
            f"{str(error).split(_SEE_DOCS)[0].strip()}\nPass what is a constant of the step by static_argnums, "
            "static_argnames or static_leaves, or decide on the device, with jnp.where or jax.lax.cond."
        ) from error
    except NameError as error:
        if _UNBOUND not in str(error):
            raise
        raise TraceError(
            f"{name} uses an axis name at {_place(error) or 'an unknown line'} that no vmap or shard_map around it "
            f"binds: {str(error).partition('.')[0]}. A parallelized step sees the whole batch, as on one device: leave "
            "out the pmean or psum, and the axis_name of layers such as BatchNorm."
        ) from error
    except Exception as error:
        wanted = _numbers_wanted(flat.of_leaves, specs, leaves)
        if not wanted:
            raise
        values = ", ".join(f"{paths[i]} = {leaves[i]!r}" for i in wanted)
        raise TraceError(
            f"{name} needs the value of {values} at {_place(error) or 'an unknown line'}, but numbers among the leaves "
            f"of its arguments are arrays to a traced step ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Let static_leaves take them for a part of the structure: parallelize(.., static_leaves=lambda leaf: not "
            "isinstance(leaf, jax.Array)), as equinox.filter_jit does."
        ) from error


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called in plans and messages: through `functools.partial` and other wrappers, its own name.

    Of an object that is called without being a function, the name of its class.
    """
    while not (name := getattr(function, "__name__", "")):
        inner = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
        if inner is None:
            return type(function).__name__
        function = inner
    return str(name)


def _place(error: Exception) -> str:
    """The user's line that raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""


def _numbers_wanted(flat: Callable[..., Any], specs: Sequence[Any], leaves: Sequence[Any]) -> list[int]:
    """The leaves that are Python's numbers and keep a function of all leaves from being traced, if they alone do."""
    numbers = [i for i, leaf in enumerate(leaves) if type(leaf) in (bool, int, float, complex)]

    def is_traced(held: Collection[int]) -> bool:
        def with_values(*rest: Any) -> Any:
            supply = iter(rest)
            return flat(*(leaf if i in held else next(supply) for i, leaf in enumerate(leaves)))

        try:
            jax.make_jaxpr(with_values)(*(spec for i, spec in enumerate(specs) if i not in held))
        except Exception:  # whatever the user's function raises
            return False
        return True

    if not numbers or not is_traced(numbers):
        return []
    if len(numbers) > _MOST_NUMBERS:
        return numbers[:_MOST_NUMBERS]
    return [i for i in numbers if not is_traced({*numbers} - {i})] or numbers


_MOST_NUMBERS = 8  # that are tried one by one, and named


def _argument_path(fun: Callable[..., Any], path: tuple[Any, ...]) -> str:
    """`state['w']` for the leaf at `path` of `(args, kwargs)`."""
    kind, which, *rest = path
    if kind.idx == 1:
        head = str(which.key)
    else:
        head = _parameter_name(fun, which.idx)
    return head + jax.tree_util.keystr(tuple(rest))


def _parameter_name(fun: Callable[..., Any], position: int) -> str:
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):
        return f"args[{position}]"
    for index, parameter in enumerate(parameters[: position + 1]):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{position - index}]"
    return parameters[position].name if position < len(parameters) else f"args[{position}]"


def _check_effects(name: str, closed: Any) -> None:
    """Raise for side effects other than callbacks that run once whenever the step runs.

    Raises:
      TraceError: names the first other one.
    """
    culprit = _effectful(closed.jaxpr)
    if culprit is None:
        return
    eqn, inside = culprit
    message = f"{name} has side effects ({', '.join(sorted(map(str, eqn.effects)))}) at {source_of(eqn)} "
    if eqn.primitive.name in CALLBACKS:
        raise TraceError(
            f"{message}({eqn.primitive.name} inside {inside}). A parallelized step calls back once, after it has run: "
            f"move the call out of the {inside}, and let that return what is to be seen."
        )
    raise TraceError(
        f"{message}({eqn.primitive.name}). A parallelized step must be pure but for jax.debug.print and "
        "jax.debug.callback: return the values instead of calling back or mutating."
    )


def _effectful(jaxpr: Any, inside: str = "") -> tuple[Any, str] | None:
    """The first equation with a side effect that cannot be carried out, and the loop or branch it is in, if any."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if not eqn.effects or (name in CALLBACKS and not inside):
            continue
        for inner in jex_core.jaxprs_in_params(eqn.params):
            effectful = _effectful(inner, inside if name in _TRANSPARENT else name)
            if effectful:
                return effectful
        if name not in _TRANSPARENT:
            return eqn, inside
    return None


def _subtrees(tree: Any, first: int = 0) -> Iterator[tuple[Any, int]]:
    """Each subtree with the index of its first leaf, outer ones first."""
    level = [(tree, first)]
    while level:
        below = []
        for node, start in level:
            yield node, start
            for child in node.children():
                below.append((child, start))
                start += child.num_leaves
        level = below


def with_examples(graph: Graph, examples: Set[Value]) -> Graph:
    """A traced graph of which these inputs hold the examples, and so are no state, whatever comes out.

    What replaces which of the others is looked for anew.
    """
    returned = [(v.shape, str(v.dtype)) for v in graph.outputs[: graph.out_tree.num_leaves]]
    carried = matching_leaves(graph.in_tree, state_specs(graph, examples), graph.out_tree, returned)
    return dataclasses.replace(graph, carried=carried, examples=frozenset(examples))


def state_specs(graph: Graph, examples: Set[Value]) -> list[LeafSpec | None]:
    """What `matching_leaves` needs to know of a graph's inputs; None of those that hold examples."""
    return [None if v in examples else (v.shape, str(v.dtype)) for v in graph.inputs]


def matching_leaves(
    in_tree: Any, ins: Sequence[LeafSpec | None], out_tree: Any, outs: Sequence[LeafSpec]
) -> dict[int, int]:
    """Output leaf -> input leaf it replaces: the largest argument subtrees that come out with the same structure.

    `in_tree` is the structure of (args, kwargs); an input of None matches nothing. A bare array is taken for state only
    at the top: argument i against the whole output or its i-th element.
    """
    matches: dict[int, int] = {}
    leaf = jax.tree.structure(0)
    tops = {index: start for index, (child, start) in enumerate(_children(out_tree, 0)) if child == leaf}
    # Larger subtrees by structure and leaves, outer ones first: each is looked at about once.
    unmatched: dict[Any, collections.deque[tuple[Any, int]]] = {}
    for tree, start in _subtrees(out_tree):
        if tree != leaf and tree.num_leaves:
            key = _structure_hash(tree), tuple(outs[start : start + tree.num_leaves])
            unmatched.setdefault(key, collections.deque()).append((tree, start))

    def output_start(tree: Any, first: int, position: int | None) -> int | None:
        """The first leaf of what a subtree comes out as."""
        n = tree.num_leaves
        if tree == leaf:
            start = 0 if out_tree == leaf else tops.get(-1 if position is None else position)
            free = position is not None and start is not None and start not in matches and ins[first] == outs[start]
            return start if free else None
        candidates = unmatched.get((_structure_hash(tree), tuple(ins[first : first + n])), collections.deque())
        for _ in range(len(candidates)):
            candidate, start = candidates.popleft()
            if any(start + k in matches for k in range(n)):
                continue
            if candidate == tree:
                return start
            candidates.append((candidate, start))
        return None

    def match(tree: Any, first: int, position: int | None) -> None:
        n = tree.num_leaves
        if n == 0:
            return
        start = output_start(tree, first, position)
        if start is not None:
            matches.update({start + k: first + k for k in range(n)})
            return
        for child, at in _children(tree, first):
            match(child, at, None)

    args_tree, kwargs_tree = in_tree.children()
    for index, (arg, first) in enumerate(_children(args_tree, 0)):
        match(arg, first, index)
    for arg, first in _children(kwargs_tree, args_tree.num_leaves):
        match(arg, first, None)
    return matches


def _structure_hash(tree: Any) -> int:
    try:
        return hash(tree)
    except TypeError:  # static fields that have no hash
        return int(tree.num_leaves)


def _children(tree: Any, first: int) -> Iterator[tuple[Any, int]]:
    for child in tree.children():
        yield child, first
        first += child.num_leaves


def fingerprint(equations: Sequence[Equation], inputs: Sequence[Value], outputs: Sequence[Operand]) -> str:
    """Equal for equal programs in any process: structure, shapes, dtypes and plain parameters."""
    digest = hashlib.sha256(b"reduce_dtype=None" if least_sum_bytes(inputs, equations) < 4 else b"")

    def name(v: Operand) -> str:
        return f"{v.id}:{v.dtype}{v.shape}" if isinstance(v, Value) else f"{v.value}:{v.dtype}"

    digest.update(" ".join(map(name, inputs)).encode())
    for eqn in equations:
        params = [f"{k}={v}" for k, v in sorted(eqn.params.items()) if _plain(v)]
        text = f"{eqn.primitive.name} {params} {list(map(name, eqn.inputs))} {list(map(name, eqn.outputs))}\n"
        digest.update(text.encode())
    digest.update(" ".join(map(name, outputs)).encode())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str | bool | np.dtype | Hint | type(None)) or (
        isinstance(value, tuple) and all(_plain(v) for v in value)
    )
