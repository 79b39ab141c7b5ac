"""Two families of exceptions: the caller's mistakes and our bugs.

`UserError` means: change the argument that the message names. `InternalError` means: report a bug.
"""

from __future__ import annotations

import sys
import warnings

_WRAPPERS = ("contextlib", "functools")  # modules through which functions of ours are called


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of something that the user's line does: the innermost that is called from outside of the package."""
    package = __name__.partition(".")[0] + "."
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").startswith(package) or frame.f_globals.get("__name__") in _WRAPPERS
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class AutoparError(Exception):
    """Base of everything that autopar raises on purpose."""


class UserError(AutoparError):
    """The caller can repair this; the message names the argument, the values met and the remedy."""


class InternalError(AutoparError):
    """An invariant of autopar does not hold: a bug of ours, never the caller's."""


class ArgumentError(UserError):
    """What was typed on the command line names no step, cluster, method or device that is there."""


class TraceError(UserError):
    """The step function cannot be traced, or has side effects or outputs that are not arrays."""


class BatchAxisError(UserError):
    """The batch axis is missing, ambiguous or not divisible as asked."""


class MicrobatchError(UserError):
    """The step couples the examples of its batch: it cannot be split into microbatches."""


class ClusterError(UserError):
    """A cluster description is malformed, unknown or does not fit the devices there are."""


class PlanError(UserError):
    """A plan is malformed, corrupt, from another version, or made for something else."""


class PlanMismatchError(PlanError):
    """A plan for another function, other shapes or other devices."""


class InfeasiblePlanError(PlanError):
    """No plan fits: says which bytes are needed where, against the bytes that are there."""


class TargetError(UserError):
    """What a plan shall be verified for is unknown, cannot be compiled for here, or is too much to compile."""


class ReportError(UserError):
    """A report cannot be drawn or written, or needs what a plan from a file does not know."""


class StateError(UserError):
    """The state passed in is unusable: donated before, or not where its plan put it."""


class CheckpointError(UserError):
    """A checkpoint is not there, is damaged, or holds something else than what shall be restored from it."""


class PeerError(UserError):
    """Another process of the job failed: says which, and with what."""


class NotFiniteError(UserError, FloatingPointError):
    """A step returned a NaN or an infinity while JAX was told to look for them (`jax_debug_nans`, `jax_debug_infs`)."""


class StateLostError(AutoparError):
    """A step failed after its update programs had begun: the donated state is gone."""


class TimeLimitWarning(UserWarning):
    """Planning had too little time to find a plan: the step runs by a recipe."""


class UnsplitWarning(UserWarning):
    """Much work or state is whole on devices or stages that could have shared it: the message says what keeps it."""


class MissingRuleWarning(UserWarning):
    """A primitive without a sharding rule: it runs gathered and replicated."""
