"""`debug`: a step that says where its NaNs and infinities arise, and keeps its arguments; and such a step again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax

from autopar.api import Parallelized
from autopar.compiling.origin import Computed, origin_in
from autopar.errors import CheckpointError, NotFiniteError, TraceError, UserError
from autopar.ir.placed_examples import PlacedExamples
from autopar.wrapped import WrappedStep, check_step


class Debugged(WrappedStep):
    """A step whose calls are looked at: see `debug`."""

    def __init__(self, step: Parallelized | WrappedStep, infs: bool, save_to: Any) -> None:
        super().__init__(step)
        self._infs, self._save_to = infs, save_to

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with jax.debug_nans(True), jax.debug_infs(self._infs):
            try:
                return self.step(*args, **kwargs)
            except NotFiniteError as error:
                if self._save_to is None:
                    raise
                found = error
        raise NotFiniteError(f"{found} {self._saved(args, kwargs)}") from found

    def _saved(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Save the arguments of a call; where, or why not."""
        if any(isinstance(leaf, PlacedExamples) for leaf in jax.tree.leaves((args, kwargs))):
            return (
                "Its arguments are not saved, since a batch of its batches() lies on the devices in parts: call it "
                "with what that iterator is given."
            )
        checkpoints = _checkpoints()
        try:
            number = (checkpoints.latest_step(self._save_to) or 0) + 1
            checkpoints.write(self._save_to, _saved_as(args, kwargs), number)
            checkpoints.wait_until_saved()
        except (UserError, OSError, ValueError) as error:
            return f"Its arguments could not be saved: {error}"
        return f"Its arguments are saved: `autopar replay TARGET {self._save_to}` computes them again on one device."


def _checkpoints() -> Any:
    """The module, which needs packages that not everyone has."""
    from autopar.checkpointing import checkpoints

    return checkpoints


def debug(step: Parallelized | WrappedStep, *, infs: bool = True, save_to: Any = None) -> Debugged:
    """A step that raises where one of its results has a NaN or an infinity, and names the operator that made it.

    With the line of the step's source, the pass, the stage and the microbatch in which it arose. Calls are those of the
    step under `jax.debug_nans(True)`: programs run one after the other and are looked at, and no state is given away,
    so that it is still there; that takes memory for the state twice. Of several processes all raise the same.

    Args:
      infs: look for infinities, too, as `jax.debug_infs(True)` does. Only those of results are errors.
      save_to: a folder for the arguments of a call that fails, for `autopar replay` (needs autopar[checkpoint]).

    Raises:
      PlanError: `step` is a plain function.
      NotFiniteError: when called, see above.
    """
    check_step("debug", step)
    if save_to is not None:
        _checkpoints()  # sooner than a step fails
    return Debugged(step, infs, save_to)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a call came to when it was computed again, operator by operator on one device."""

    function: str
    found: str  # "nan" or "inf"; "": all results are finite
    computed: Computed

    def __str__(self) -> str:
        if not self.found:
            return f"{self.function}: all results are finite on one device."
        told = f"{self.function}: invalid value ({self.found})"
        if self.computed.origin is not None:
            told += f" arises in {self.computed.origin}."
        else:
            told += " in its results, of no operator whose operands have none."
        return told + (" Arguments have such values, too." if self.computed.is_given else "")

    def to_json(self) -> str:
        """The same, for programs."""
        origin = self.computed.origin
        where = None if origin is None else {"operator": origin.operator, "source": origin.source}
        found = {"function": self.function, "found": self.found or None, "origin": where}
        return json.dumps({**found, "in_arguments": self.computed.is_given})


def replay(step: Parallelized, folder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Replay:
    """Compute a call again that `debug` has saved, on one device and operator by operator.

    `args`, `kwargs`: arguments of the same structure and shapes (arrays or `jax.ShapeDtypeStruct`s).

    Raises:
      CheckpointError: the folder holds no arguments of such a call.
      TraceError: the step has static arguments, which are not saved.
    """
    checkpoints = _checkpoints()
    if checkpoints.latest_step(folder) is None:
        raise CheckpointError(f"{folder} holds no arguments of a call: autopar.debug(step, save_to=folder) saves them.")
    saved = checkpoints.restore(folder, like=_saved_as(args, kwargs))
    call = step._function.call(tuple(saved["args"]), saved["kwargs"])
    if call.positional or call.named:
        raise TraceError(f"replay: {step._name} has static arguments, which are not saved. Bind them in the target.")
    graph = step._trace(call).graph
    computed = {mark: origin_in(graph, call.leaves, mark) for mark in ("nan", "inf")}
    found = next((mark for mark, each in computed.items() if each.is_found), "")
    return Replay(step._name, found, computed[found or "nan"])


def _saved_as(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"args": list(args), "kwargs": dict(kwargs)}
