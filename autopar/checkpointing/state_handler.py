"""What a checkpoint holds, as Orbax writes and reads it: a state's leaves by their names, and where each is to lie."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from autopar.checkpointing import checksums
from autopar.checkpointing.stored_leaves import LeafHandler, ReadLeaf, StoredLeaf
from autopar.errors import StateError
from autopar.executable import HasExecutable
from autopar.ir.pieces import Pieces
from autopar.runtime.placement import Home
from autopar.runtime.preparing import is_deleted
from autopar.runtime.processes import this_job
from autopar.runtime.random_keys import plain_struct
from autopar.tracing.static_leaf import unflatten_arrays

BATCHES = "batches"  # the files of its positions
_Key = tuple[str, ...]


class StateHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Orbax's handler of pytrees, with checksums of what it writes, and leaves that lie on some processes only."""

    def __init__(self, processes: Any) -> None:
        leaves = LeafHandler()
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, leaves),  # for Orbax, which asks how these would be handled
            (StoredLeaf, leaves),
            (int, ocp.type_handlers.ScalarHandler()),
            (float, ocp.type_handlers.ScalarHandler()),
            (np.ndarray, ocp.type_handlers.NumpyHandler()),
            (str, ocp.type_handlers.StringHandler()),
        )
        options: dict[str, Any] = {"type_handler_registry": registry, "multiprocessing_options": processes}
        # Arrays of no elements are valid, and have no numbers in the files.
        merging = ocp.BasePyTreeCheckpointHandler(enable_post_merge_validation=False, **options)
        self._trees = ocp.PyTreeCheckpointHandler(handler_impl=merging, **options)

    async def async_save(self, directory: Any, args: SavedState) -> list[Any]:
        written = await self._trees.async_save(directory, args=ocp.args.PyTreeSave(args.state))
        return [
            ocp.future.CommitFutureAwaitingContractedSignals(
                _recorded(directory, written, args.position), name="autopar_state"
            )
        ]

    def save(self, directory: epath.Path, args: SavedState) -> None:
        raise NotImplementedError  # checkpoints are written while the steps go on

    def restore(self, directory: epath.Path, args: Any) -> Any:
        """The tree; `args`: of it as `metadata` has it, one for each leaf."""
        return self._trees.restore(directory, args=ocp.args.PyTreeRestore(restore_args=args))

    def metadata(self, directory: epath.Path) -> Any:
        """The tree, of the shapes and types of its leaves."""
        return self._trees.metadata(directory).tree

    def finalize(self, directory: epath.Path) -> None:
        with _told():
            self._trees.finalize(directory)
            checksums.record_rest(directory)

    def close(self) -> None:
        self._trees.close()


async def _recorded(directory: Any, written: Sequence[Any], position: str | None) -> None:
    """Wait for what this process writes, and note its checksums."""
    with _told():
        for future in written:
            await asyncio.to_thread(future.result)
        if position is not None:
            file = epath.Path(directory) / f"{BATCHES}.{jax.process_index()}.json"
            await asyncio.to_thread(file.write_text, position)
        await asyncio.to_thread(checksums.record_own, epath.Path(directory), jax.process_index())


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """In a job, one that fails to write ends all: the others would wait for it as long as Orbax does."""
    try:
        yield
    except Exception as error:
        if this_job() is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        raise


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SavedState(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What `StateHandler` saves."""

    state: Any
    position: str | None  # of batches, on this process


def key_of(key: Sequence[Any]) -> _Key:
    """A path to a leaf, of text alone."""
    return tuple(map(str, key))


def leaves_by_key(tree: Any) -> dict[_Key, Any]:
    """The leaves of a tree, by names that a class and the dictionary that is stored for it have in common."""
    return {key_of(key): leaf for key, leaf in ocp.tree.to_flat_dict(tree, is_leaf=is_pieces).items()}


def is_pieces(x: Any) -> bool:
    """Whether a leaf is cut between stages."""
    return isinstance(x, Pieces)


def check_present(state: Any) -> None:
    """Raises StateError where a leaf of a state was donated."""
    for path, leaf in jax.tree.leaves_with_path(state):
        if is_deleted(leaf):
            raise StateError(
                f"save: state{jax.tree_util.keystr(path)} was donated to a step and is gone. Save the state that that "
                "step returned."
            )


def stored_leaf(leaf: Any) -> Any:
    """A leaf as Orbax is given it; None where it is part of the structure."""
    if isinstance(leaf, jax.Array | Pieces):
        return StoredLeaf.of(leaf)
    if isinstance(leaf, np.generic | complex):
        return np.asarray(leaf)
    return leaf if isinstance(leaf, np.ndarray | int | float | str) else None


@dataclasses.dataclass(frozen=True)
class SavedArgument:
    """A tree to fill: of what its leaves become, by their keys, where they are no parts of it already."""

    tree: Any
    wanted: Mapping[_Key, ocp.RestoreArgs]

    @classmethod
    def of(cls, tree: Any) -> SavedArgument:
        """`tree`: with a `Home` for each leaf that is an array, or arrays and shapes."""
        wanted = {key: _wanted(leaf) for key, leaf in leaves_by_key(tree).items()}
        return cls(tree, {key: wish for key, wish in wanted.items() if wish is not None})

    def differences(self, stored: Mapping[_Key, Any]) -> list[str]:
        """From what a checkpoint has."""
        own = leaves_by_key(self.tree)
        differences = [f"{_name(key)} is not there" for key in self.wanted.keys() - stored.keys()]
        differences += [f"{_name(key)} is there, but not wanted" for key in stored.keys() - own.keys()]
        for key in self.wanted.keys() & stored.keys():
            home = getattr(self.wanted[key], "home", None)
            if home is None:
                continue
            numbers = plain_struct(jax.ShapeDtypeStruct(home.shape, home.dtype))
            shape, dtype = getattr(stored[key], "shape", None), getattr(stored[key], "dtype", None)
            if dtype is None or shape != numbers.shape or jax.dtypes.canonicalize_dtype(dtype) != numbers.dtype:
                differences.append(
                    f"{_name(key)} is {dtype}{list(shape or ())}, but {numbers.dtype}{list(numbers.shape)} is wanted"
                )
        return sorted(differences)

    def filled(self, leaves: Mapping[_Key, Any]) -> Any:
        """With what was read in the place of what stands for it."""
        structure = jax.tree.structure(self.tree, is_leaf=is_pieces)
        every = [
            _as(leaf, leaves[key]) if key in self.wanted else leaf for key, leaf in leaves_by_key(self.tree).items()
        ]
        return jax.tree.unflatten(structure, every)


def _as(leaf: Any, stored: Any) -> Any:
    """Scalars are stored as arrays."""
    return type(leaf)(np.asarray(stored)[()]) if isinstance(leaf, np.generic | complex) else stored


def _wanted(leaf: Any) -> ocp.RestoreArgs | None:
    """None: the leaf is there already, as a function is."""
    if isinstance(leaf, Home):
        return ReadLeaf(home=leaf)
    if isinstance(leaf, Pieces):
        pieces = tuple(getattr(piece, "sharding", None) for piece in leaf.pieces)
        return ReadLeaf(home=Home(leaf.shape, leaf.dtype, _is_weak(leaf.pieces[0]), pieces, leaf.cut))
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return ReadLeaf(home=Home(leaf.shape, leaf.dtype, _is_weak(leaf), (leaf.sharding,)))
    if isinstance(leaf, np.ndarray | np.generic | complex):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    if isinstance(leaf, int | float | str):
        return ocp.RestoreArgs(restore_type=type(leaf))
    return None


def _is_weak(x: Any) -> bool:
    return bool(getattr(x, "weak_type", False))  # random keys have none


def arguments_of(step: HasExecutable) -> list[SavedArgument]:
    """Of a step: what a checkpoint can be of."""
    executable = step.executable_for("restore")
    arguments, first = [], 0
    args, kwargs = executable.graph.in_tree.children()
    for child in (*args.children(), *kwargs.children()):
        homes = [executable.home_of(first + i) for i in range(child.num_leaves)]
        arguments.append(SavedArgument.of(unflatten_arrays(child, homes)))
        first += child.num_leaves
    return arguments


def _name(key: _Key) -> str:
    return "/".join(key)
