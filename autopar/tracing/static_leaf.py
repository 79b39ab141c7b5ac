"""Leaves of a pytree that are no arrays (functions, flags), taken for part of its structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.errors import TraceError
from autopar.ir.pieces import Pieces

IsStatic = Callable[[Any], bool]  # of a leaf that is no array


@dataclasses.dataclass(frozen=True)
class StaticLeaf:
    """A node without leaves: its value belongs to the structure, and so to what a step is traced for."""

    value: Any
    kind: Any  # of the value, see `kind_of`


jax.tree_util.register_static(StaticLeaf)


def flatten_arrays(tree: Any, is_static: IsStatic) -> tuple[list[Any], Any]:
    """The other leaves, one in pieces as one, and the structure with every static leaf in a `StaticLeaf`.

    Raises:
      TraceError: a static leaf is not hashable.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_pieces)
    # Before the predicate's own answer: "is no jax.Array" holds of numpy arrays and of shapes too.
    static = {i for i, x in enumerate(leaves) if not isinstance(x, jax.Array) and not _is_array(x) and is_static(x)}
    if not static:
        return leaves, structure
    for i in static:
        _check_hashable(leaves[i])
    held = [StaticLeaf(x, kind_of(x)) if i in static else x for i, x in enumerate(leaves)]
    return jax.tree.flatten(jax.tree.unflatten(structure, held), is_leaf=_is_pieces)


def kind_of(value: Any) -> Any:
    """What tells equal values apart that a step may treat differently, such as 1, True and 1.0: their types."""
    return (type(value), *map(kind_of, value)) if isinstance(value, tuple) else type(value)


def unflatten_arrays(structure: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of `flatten_arrays`."""
    tree = jax.tree.unflatten(structure, leaves)
    return jax.tree.map(lambda x: x.value if _is_held(x) else x, tree, is_leaf=lambda x: _is_held(x) or _is_pieces(x))


def has_static(structure: Any) -> bool:
    """Whether some leaf is held in the structure."""
    node = structure.node_data()  # nothing is unflattened: a class may refuse what is no array
    return (node is not None and node[0] is StaticLeaf) or any(map(has_static, structure.children()))


def _is_pieces(x: Any) -> bool:
    return isinstance(x, Pieces)


def _is_held(x: Any) -> bool:
    return isinstance(x, StaticLeaf)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _check_hashable(value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise TraceError(
            f"static_leaves takes {value!r} of type {type(value).__name__}, which is not hashable. Leave it out of "
            "static_leaves, or give it a __hash__ and an __eq__."
        ) from error
