"""A step in a wrapper that does something at its calls."""

from __future__ import annotations

import abc
import functools
from typing import Any, cast

from autopar.api import Parallelized
from autopar.errors import PlanError
from autopar.executable import Executable, HasExecutable


class WrappedStep(HasExecutable):
    """A step whose calls are looked at. All else, such as `init` and `batches`, is the step's."""

    __name__: str

    def __init__(self, step: Parallelized | WrappedStep) -> None:
        wrapper: Any = self
        functools.update_wrapper(wrapper, cast(Any, step), updated=())
        self.step = step

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the step's."""

    def __getattr__(self, name: str) -> Any:
        if name in ("step", "__setstate__"):  # which it does not have yet, as in a copy
            raise AttributeError(name)
        return getattr(self.step, name)

    def executable_for(self, what: str) -> Executable:
        """The step's."""
        return self.step.executable_for(what)


def check_step(what: str, step: Any) -> None:
    """Raise PlanError unless it is a step, for `what`."""
    if not isinstance(step, Parallelized | WrappedStep):
        raise PlanError(f"{what}({step!r}): make it a step by autopar.parallelize first; a plain function has no plan.")
