"""A step in a wrapper that does something at its calls."""

from __future__ import annotations

import abc
import functools
from typing import Any, cast

from autopar.api import Parallelized
from autopar.errors import PlanError
from autopar.executable import Executable, HasExecutable
from autopar.runtime.spent import wait_for


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


class CountedStep(WrappedStep):
    """A step whose calls are counted, those for an executable together."""

    def __init__(self, step: Parallelized | WrappedStep, start: int) -> None:
        """`start`: the steps that were made before."""
        super().__init__(step)
        self._number = start
        self._executable: Executable | None = None  # that the calls since then were of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.step(*args, **kwargs)
        self._number += 1
        executable: Executable | None = self.last_executable
        if executable is not self._executable:  # this call may have planned and compiled it
            wait_for(result)
            self._executable = executable
            self._begin(executable)
        elif executable is not None:
            self._count(executable, result)
        return result

    @abc.abstractmethod
    def _begin(self, executable: Executable | None) -> None:
        """After the first call for an executable; None: under `jax.disable_jit`."""

    @abc.abstractmethod
    def _count(self, executable: Executable, result: Any) -> None:
        """After another one, whose result may still be computed."""


def check_step(what: str, step: Any) -> None:
    """Raise PlanError unless it is a step, for `what`."""
    if not isinstance(step, Parallelized | WrappedStep):
        raise PlanError(f"{what}({step!r}): make it a step by autopar.parallelize first; a plain function has no plan.")
