"""Arguments that a step changes in place instead of returning them, as Flax NNX modules are under `nnx.jit`.

Objects with attributes count, that are no values: a tuple, a list or a dict that a step fills is its own copy, as
under `jax.jit`, and so is a dataclass. What is changed in such an object and not returned becomes a further result,
by which the caller's own object is renewed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from autopar.errors import TraceError
from autopar.ir.pieces import Pieces
from autopar.tracing.static_leaf import unflatten_arrays


@dataclasses.dataclass(frozen=True)
class Renewed:
    """What a step returned, and the arguments in which it changed objects."""

    result: Any
    arguments: tuple[Any, ...]
    which: tuple[int | str, ...]  # their positions and names


jax.tree_util.register_dataclass(Renewed, data_fields=["result", "arguments"], meta_fields=["which"])


def returning_changed(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, with a `Renewed` for its result where it changes objects among its arguments that it does not return.

    Raises:
      TraceError: when called; an object has other leaves than before.
    """

    @functools.wraps(fun)
    def returning(*args: Any, **kwargs: Any) -> Any:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        objects = {key: _leaves_of_objects(value) for key, value in arguments.items()}
        result = fun(*args, **kwargs)
        returned = {id(leaf) for leaf in jax.tree.leaves(result)}
        changed = []
        for key, before in objects.items():
            after = _leaves_of_objects(arguments[key])
            new = [path for path, leaf in after.items() if leaf is not before.get(path) and id(leaf) not in returned]
            if new and after.keys() != before.keys():
                path = next(path for path in new if path not in before) if after.keys() - before.keys() else new[0]
                raise TraceError(
                    f"{getattr(fun, '__name__', 'the step')} changes in place what leaves its argument {key!r} has: "
                    f"{jax.tree_util.keystr(path)} among them. Return the argument, or keep its structure."
                )
            if new:
                changed.append(key)
        return Renewed(result, tuple(arguments[key] for key in changed), tuple(changed)) if changed else result

    return returning


def changed_in(out_tree: Any) -> frozenset[int | str]:
    """The positions and names of the arguments in which a step changes objects, by its result's structure."""
    returned = unflatten_arrays(out_tree, [None] * out_tree.num_leaves)
    return frozenset(returned.which) if isinstance(returned, Renewed) else frozenset()


def renew(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the step returned, after the caller's objects have been renewed if they were changed."""
    if not isinstance(result, Renewed):
        return result
    for key, new in zip(result.which, result.arguments, strict=True):
        old = args[key] if isinstance(key, int) else kwargs[key]
        for path, _ in _paths_and_leaves(new):
            _assign(old, new, path)
    return result.result


def _paths_and_leaves(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Pieces))


def _leaves_of_objects(tree: Any) -> dict[tuple[Any, ...], Any]:
    """The leaves of objects with attributes, wherever in containers these stand."""
    return {path: leaf for path, leaf in _paths_and_leaves(tree) if _in_object(tree, path)}


def _in_object(tree: Any, path: Sequence[Any]) -> bool:
    node = tree
    for key in path:
        if isinstance(key, GetAttrKey):
            return _is_object(node)
        if type(node) not in (tuple, list, dict):
            return False
        node = _child(node, key)
    return False


def _is_object(node: Any) -> bool:
    """Whether attributes can be assigned, and are not those of a value."""
    return not isinstance(node, tuple) and not dataclasses.is_dataclass(node)


def _child(node: Any, key: Any) -> Any:
    match key:
        case GetAttrKey(name=name):
            return getattr(node, name)
        case DictKey(key=name):
            return node[name]
        case SequenceKey(idx=index):
            return node[index]
    raise TraceError(f"{type(node).__name__} is changed in place, but its leaf {key} has no name. Return it instead.")


def _assign(old: Any, new: Any, path: Sequence[Any]) -> None:
    """Let the innermost object of `old` on the path have what it has there in `new`."""
    owner: tuple[Any, Any, str] | None = None
    for depth, key in enumerate(path):
        if isinstance(key, GetAttrKey) and _is_object(old):
            owner = (old, new, key.name)
        if depth + 1 < len(path):
            old, new = _child(old, key), _child(new, key)
    if owner is None:
        return
    old, new, name = owner
    if name not in getattr(old, "__dict__", {}) and hasattr(old, "__setstate__"):
        old.__setstate__(new.__getstate__())  # a leaf of another name than the attribute's: as the module copy does
    else:
        setattr(old, name, getattr(new, name))
