"""Which arguments hold the examples: as the user says, or found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import jax

from autopar.errors import BatchAxisError
from autopar.ir.graph import BatchDim, Graph, Value
from autopar.passes.batch import When, analyse_batch
from autopar.passes.rules.table import rule_of

_REMEDY = (
    "Pass batch_axes, a pytree prefix of the arguments with an int or None per leaf, e.g. batch_axes=(None, 0); or "
    "None, if there is no axis of examples."
)
_MOST_LISTED = 12


def resolve_batch_axes(graph: Graph, batch_axes: Any, state: Set[Value] = frozenset()) -> dict[Value, int]:
    """The batch axis of each batch argument.

    `batch_axes` is "auto" or, like the `in_axes` of `jax.vmap`, an int, or a pytree prefix of the positional arguments
    (without static ones) with an int or None at its leaves; keyword arguments hold no examples then. None says that
    nothing does: the step makes its own, and runs in one microbatch. "auto" takes the leaves that are not state
    (carried from inputs to outputs, or in `state`), are no PRNG keys, and share the size of their leading axis;
    arguments whose own leaves differ in it are parameters that no one changes. Arguments in whose place something comes
    out that has a row for each of these examples hold examples, too.

    Raises:
      BatchAxisError: no candidate, an ambiguous choice, or a malformed `batch_axes`.
    """
    if batch_axes == "auto":
        return _find(graph, state)
    args_tree, kwargs_tree = graph.in_tree.children()
    if isinstance(batch_axes, int) or batch_axes is None:
        axes: list[Any] = [batch_axes] * args_tree.num_leaves
    else:
        try:
            args = jax.tree.unflatten(args_tree, [0] * args_tree.num_leaves)
            axes = jax.tree.broadcast(
                tuple(batch_axes) if isinstance(batch_axes, list) else batch_axes, args, is_leaf=lambda x: x is None
            )
            axes = jax.tree.leaves(axes, is_leaf=lambda x: x is None)
        except (ValueError, TypeError) as error:
            raise BatchAxisError(
                f"batch_axes={batch_axes!r} is no pytree prefix of the positional arguments of {graph.name}: {error}"
            ) from error
    axes += [None] * kwargs_tree.num_leaves
    resolved = {}
    for value, path, axis in zip(graph.inputs, graph.input_paths, axes, strict=True):
        if axis is None:
            continue
        if not isinstance(axis, int) or not -len(value.shape) <= axis < len(value.shape):
            raise BatchAxisError(f"batch_axes: {axis!r} for {path}, which has shape {value.shape}: no such axis.")
        resolved[value] = axis % len(value.shape)
    if not resolved and batch_axes is not None:
        raise BatchAxisError(_none_found(graph, "batch_axes gives no leaf an axis"))
    return resolved


def _find(graph: Graph, known: Set[Value]) -> dict[Value, int]:
    keys = _keys(graph)
    state = {*known, *(graph.inputs[i] for i in graph.carried.values())}
    every = {
        value: path
        for value, path in zip(graph.inputs, graph.input_paths, strict=True)
        if value not in state and value.shape and value not in keys
    }
    if not every:
        why = f"every array argument comes out again as state or is a PRNG key ({len(graph.inputs)} leaves)"
        raise BatchAxisError(_none_found(graph, why))
    candidates = _without_parameters(every)
    if not state and every == candidates and len({_argument(path) for path in candidates.values()}) > 1:
        raise BatchAxisError(
            f"batch_axes='auto' is ambiguous for {graph.name}: no argument comes out again as state"
            f"{_other_dtype(graph)}, so that parameters and examples look alike among {_listed(candidates)}. {_REMEDY}"
        )
    leading = {value.shape[0] for value in candidates}
    if len(leading) > 1:
        shared = set.intersection(*(set(value.shape) for value in candidates))
        hint = f"; they share the size {sorted(shared)[-1]}, though not on their first axes" if shared else ""
        raise BatchAxisError(
            f"batch_axes='auto' is ambiguous for {graph.name}: the candidates {_listed(candidates)} have different "
            f"leading sizes{hint}. {_REMEDY}"
        )
    (size,) = leading
    examples = {*candidates, *_replaced_by_rows(graph, candidates.keys(), size, {*known, *keys})}
    return dict.fromkeys((v for v in graph.inputs if v in examples), 0)


def _other_dtype(graph: Graph) -> str:
    """What comes out with the shapes of an argument but in other types, which is then no state."""
    arguments: dict[str, list[tuple[str, Value]]] = {}
    for value, path in zip(graph.inputs, graph.input_paths, strict=True):
        arguments.setdefault(_argument(path), []).append((path, value))
    for leaves in arguments.values():
        shapes = [value.shape for _, value in leaves]
        for start in range(len(graph.outputs) - len(leaves) + 1):
            outputs = graph.outputs[start : start + len(leaves)]
            if not any(shapes) or [out.shape for out in outputs] != shapes:
                continue
            for (path, value), out in zip(leaves, outputs, strict=True):
                if out.dtype != value.dtype:
                    return f" ({path} goes in as {value.dtype} and comes out as {out.dtype}, so it is none)"
    return ""


def _replaced_by_rows(graph: Graph, examples: Set[Value], size: int, others: Set[Value]) -> Iterator[Value]:
    """The leaves of arguments that seem to be state, but have a row for each example as what replaces them has.

    So has the reconstruction of a batch, or the hidden state of a recurrent model. What has so many rows by chance is
    replaced by sums over the examples; or, if all parameters have as many, nothing is computed for each example any
    more, since products sum over what would be the examples.
    """
    replacing = {graph.inputs[i]: graph.outputs[k] for k, i in graph.carried.items()}
    arguments: dict[str, list[Value]] = {}
    for value, path in zip(graph.inputs, graph.input_paths, strict=True):
        arguments.setdefault(_argument(path), []).append(value)
    alone = None
    for leaves in arguments.values():
        if not all(v in replacing and v.shape[:1] == (size,) and v not in others for v in leaves):
            continue
        alone = alone or analyse_batch(graph, dict.fromkeys(examples, 0), rule_of)
        together = analyse_batch(graph, dict.fromkeys((*examples, *leaves), 0), rule_of)
        rows = {v for v, state in together.states.items() if state.batch == BatchDim(0, 1, size, 1)}
        are_rows = together.most_microbatches >= alone.most_microbatches and all(replacing[v] in rows for v in leaves)
        if are_rows and all(together.when[i] is When.LOOP for i, when in alone.when.items() if when is When.LOOP):
            yield from leaves


def _without_parameters(candidates: Mapping[Value, str]) -> Mapping[Value, str]:
    """Without the arguments, such as a frozen teacher's parameters, whose leaves' first axes differ among themselves.

    The first axes of all other arguments must agree, in a size that fewer than half of those leaves have.
    """
    sizes: dict[str, list[int]] = {}
    for value, path in candidates.items():
        sizes.setdefault(_argument(path), []).append(value.shape[0])
    alike = {leading[0] for leading in sizes.values() if len(set(leading)) == 1}
    if len(alike) != 1:
        return candidates
    (size,) = alike
    mixed = {argument: leading for argument, leading in sizes.items() if len(set(leading)) > 1}
    if any(2 * leading.count(size) >= len(leading) for leading in mixed.values()):
        return candidates
    return {value: path for value, path in candidates.items() if _argument(path) not in mixed}


def _argument(path: str) -> str:
    """`state` of `state['w']`."""
    return path.split("[")[0].split(".")[0]


def _listed(candidates: Mapping[Value, str]) -> str:
    texts = [f"{path} {list(value.shape)}" for value, path in candidates.items()]
    more = len(texts) - _MOST_LISTED
    return ", ".join(texts[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _keys(graph: Graph) -> set[Value]:
    """Arguments that are PRNG keys, typed or raw (what is wrapped into one)."""
    keys = {v for v in graph.inputs if v.is_key}
    for eqn in graph.equations:
        if eqn.primitive.name == "random_wrap":
            keys.update(eqn.values)
    return keys


def _none_found(graph: Graph, why: str) -> str:
    return (
        f"{graph.name} has no batch argument: {why}. Pass batch_axes, e.g. batch_axes=(None, 0) if the second argument "
        "holds the examples along its first axis, or batch_axes=None if no argument holds examples."
    )
