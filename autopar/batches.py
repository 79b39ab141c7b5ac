"""Batches from any iterator onto the devices, one ahead of the step."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from autopar.errors import BatchAxisError, PlanMismatchError, StateError
from autopar.executable import Executable
from autopar.runtime.spent import spent_on


@dataclasses.dataclass(frozen=True)
class _Read:
    """A batch that is placed, and how to go on after it."""

    batch: Any
    state: Any  # of the iterator, where it can tell


class Batches(Iterator[Any]):
    """The arguments of examples for each step, on the devices, made of what an iterator gives.

    The next batch is read and copied by a thread while the step runs on the one before.
    """

    def __init__(self, executable: Executable, batches: Iterable[Any]) -> None:
        graph = executable.graph
        args, kwargs = graph.in_tree.children()
        is_example = [value in graph.examples for value in graph.inputs]
        self._numbers: list[list[int]] = []  # of the leaves of each argument of examples
        self._trees: list[Any] = []
        first = 0
        for child in (*args.children(), kwargs):
            numbers = list(range(first, first + child.num_leaves))
            first += child.num_leaves
            of_examples = [is_example[i] for i in numbers]
            if any(of_examples):
                if not all(of_examples) or child == kwargs:
                    raise BatchAxisError(
                        f"batches: {graph.name} takes examples ({graph.input_paths[numbers[of_examples.index(True)]]}) "
                        "in an argument with other leaves, or by name. Give them positional arguments of their own."
                    )
                self._numbers.append(numbers)
                self._trees.append(child)
        returned = [i for i, v in enumerate(graph.inputs) if v in graph.examples and v in graph.outputs]
        if returned:
            raise BatchAxisError(
                f"batches: {graph.name} returns or prints {graph.input_paths[returned[0]]} as it is, which is in no "
                "one place once it is placed. Pass it what the iterator gives, or let the loop keep that leaf."
            )
        self._executable = executable
        self._axes = executable.batch_axes
        self._batches = batches
        self._iterator = iter(batches)
        self._x64 = bool(jax.config.values["jax_enable_x64"])  # which another thread does not see
        # A loader of PyTorch's that can tell its position is the iterable, not its iterator.
        self._positioned = next((x for x in (self._iterator, batches) if _position_of(x)), None)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "autopar: batches")
        self._next: concurrent.futures.Future[_Read] | None = None
        self._count = 0
        self._state: Any = None

    def __next__(self) -> Any:
        """The batch, or a tuple of one for each argument of examples.

        Raises:
          PlanMismatchError: it has another structure or other shapes than the step was compiled for.
        """
        with spent_on("input"):
            read = (self._next or self._pool.submit(self._read)).result()
        self._next = self._pool.submit(self._read)
        self._count += 1
        self._state = read.state
        return read.batch

    def get_state(self) -> dict[str, Any]:
        """The position after the batches that were taken, to go on from there."""
        return {"count": self._count, "shard": list(self._executable.data_shard), "state": self._state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a position: that of the iterator where it can be set, else what was taken is read again.

        Raises:
          StateError: batches were taken already, or there are fewer than were taken.
        """
        if self._next is not None:
            raise StateError("batches: the position can only be set before the first batch is taken.")
        position = _position_of(self._positioned)
        if state["state"] is not None and position and state["shard"] == list(self._executable.data_shard):
            position.set(state["state"])
            if self._positioned is self._batches:
                self._iterator = iter(self._batches)
            self._state = state["state"]
        else:
            for number in range(state["count"]):
                if next(self._iterator, self) is self:
                    raise StateError(f"batches: {state['count']} were taken, but the iterator gives only {number}.")
        self._count = state["count"]

    def _read(self) -> _Read:
        given = next(self._iterator)
        with jax.enable_x64(self._x64):
            return self._placed(given)

    def _placed(self, given: Any) -> _Read:
        position = _position_of(self._positioned)
        state = None if position is None else position.get()
        parts = [given] if len(self._trees) == 1 else list(given)
        graph = self._executable.graph
        if len(parts) != len(self._trees):
            raise PlanMismatchError(
                f"{graph.name} takes {len(self._trees)} arguments of examples, the iterator gives {len(parts)}."
            )
        leaves: dict[int, np.ndarray[Any, Any]] = {}
        for part, tree, numbers in zip(parts, self._trees, self._numbers, strict=True):
            flat, structure = jax.tree.flatten(part)
            if structure != tree:
                raise PlanMismatchError(
                    f"{graph.name} was compiled for examples of structure {tree}, the iterator gives {structure}."
                )
            leaves.update({i: self._checked(i, leaf) for i, leaf in zip(numbers, flat, strict=True)})
        sizes = {leaf.shape[self._axes[i]] for i, leaf in leaves.items() if i in self._axes}
        if len(sizes) > 1:
            raise PlanMismatchError(f"{graph.name}: the leaves of one batch have {sorted(sizes)} examples.")
        placed = self._executable.place_examples(leaves)
        made = [
            jax.tree.unflatten(tree, [placed[i] for i in numbers])
            for tree, numbers in zip(self._trees, self._numbers, strict=True)
        ]
        return _Read(made[0] if len(made) == 1 else tuple(made), state)

    def _checked(self, number: int, leaf: Any) -> np.ndarray[Any, Any]:
        """As an array of the host, whole or this process's part."""
        graph = self._executable.graph
        array, axis, count = np.asarray(leaf), self._axes.get(number), self._executable.data_shard.shard_count
        if axis is None:  # nobody reads it
            return array
        value = graph.inputs[number]
        shape = value.shape
        allowed = [shape]
        if count > 1:
            allowed.append((*shape[:axis], shape[axis] // count, *shape[axis + 1 :]))
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if array.shape not in allowed or dtype != value.dtype:
            whole = f"{value.dtype}{list(allowed[0])}"
            part = f", or of this process's part, {list(allowed[1])}" if len(allowed) > 1 else ""
            raise PlanMismatchError(
                f"{graph.name} was compiled for {graph.input_paths[number]} of {whole}{part}; the iterator gives "
                f"{array.dtype}{list(array.shape)}. Batches have to be of one size: let the loader leave out the rest."
            )
        return array.astype(dtype, copy=False)


class _Position(NamedTuple):
    """How an iterator tells its position, and is set to one."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _position_of(x: Any) -> _Position | None:
    """As Grain's iterators say it, or as PyTorch's stateful loaders do; None: it cannot tell."""
    for get, put in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(x, get) and hasattr(x, put):
            return _Position(getattr(x, get), getattr(x, put))
    return None
