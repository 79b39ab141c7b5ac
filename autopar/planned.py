"""A plan with the step that it was made for: so it can be reported on, compared, held against XLA and compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autopar.compiling.program_text import programs_as_text
from autopar.compiling.verifier import verify
from autopar.cost_model.program_cost import KindWork
from autopar.errors import PlanError, ReportError
from autopar.ir.graph import Graph
from autopar.ir.local import OperatorKind
from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.ir.verification import Verification
from autopar.ir.why import Why
from autopar.passes.lower import LoweredStep
from autopar.planning import plan_cache
from autopar.planning.alternatives import explain
from autopar.planning.baselines import usual_methods
from autopar.planning.details import gather_details, work_of
from autopar.planning.finisher import Finisher, Restored
from autopar.planning.garbage import uncollected
from autopar.planning.traced import TracedStep
from autopar.reporting.comparison import Comparison
from autopar.reporting.diff import PlanDiff
from autopar.reporting.progress import ProgramBar
from autopar.reporting.report import Report

if TYPE_CHECKING:
    from autopar.executable import Executable
    from autopar.reporting.comparison import Trial


@dataclasses.dataclass(frozen=True, eq=False)
class Planned(Plan):
    """A plan of a step that is at hand, as `step.plan` and `Traced.plan` give it; equal to the plan alone.

    A plan from a file has no step: `step.plan(.., method=plan)` gives one that has.
    """

    step: TracedStep = dataclasses.field(kw_only=True, repr=False)
    memory_limit: int | None = dataclasses.field(kw_only=True, repr=False)  # bytes of each device
    seconds: float | None = dataclasses.field(kw_only=True, repr=False)  # that planning took; None: the plan was given
    # What was made of a plan, as long as it is at hand: it can be made again, and is where that plan has been edited.
    lowered: tuple[Plan, LoweredStep] | None = dataclasses.field(default=None, kw_only=True, repr=False)
    restored: Restored | None = dataclasses.field(default=None, kw_only=True, repr=False)
    compiler: Callable[[Planned], Executable] | None = dataclasses.field(default=None, kw_only=True, repr=False)
    # What the same method finds on another cluster. None: this is no plan of a method for the step's own cluster.
    planner: Callable[[Cluster], Planned] | None = dataclasses.field(default=None, kw_only=True, repr=False)

    @staticmethod
    def of(
        plan: Plan, step: TracedStep, method: Method | Plan, seconds: float | None = None,
        lowered: LoweredStep | None = None,
    ) -> Planned:  # fmt: skip
        """A plan with its step, found by a method or given; `step` may have its dimensions padded or not."""
        limit = method.memory_limit if isinstance(method, Method) else None
        made = None if lowered is None else (plan, lowered)
        own = step.padded(plan.padding)
        return Planned(**plan.fields(), step=own, memory_limit=limit, seconds=seconds, lowered=made)

    @staticmethod
    def of_restored(restored: Restored, step: TracedStep, method: Method | Plan, seconds: float | None) -> Planned:
        """A plan with its step, whose stages were known."""
        planned = Planned.of(restored.plan, step, method, seconds, restored.lowered)
        return dataclasses.replace(planned, restored=restored)

    def compile(self) -> Executable:
        """Compile the plan's programs for the devices that there are.

        Raises:
          PlanMismatchError: there are fewer devices than it is for, or it was edited inconsistently.
        """
        assert self.compiler is not None, "`Traced.plan` gives a compiler"
        return self.compiler(self)

    def work(self) -> dict[OperatorKind, KindWork]:
        """What a step's operators do, by their kinds, on all devices together, as predicted.

        Raises:
          PlanMismatchError: the plan was edited inconsistently.
        """
        return work_of(self._finisher(), self.with_programs().made[1])

    def as_text(self) -> dict[str, str]:
        """The plan's programs, by name, as they are before XLA compiles them, with every collective and transfer.

        What XLA makes of them is `Executable.as_text`.

        Raises:
          PlanMismatchError: the plan was edited inconsistently.
        """
        return programs_as_text(self.with_programs().made[1])

    def verify_with_xla(
        self, target: str | None = None, *, show_progress: bool = False, most_operations: int | None = 200_000
    ) -> Verification:
        """XLA's verdict: every program compiled ahead of time for the cluster, which need not be there.

        Args:
          target: a chip ("h100", ..), a file with XLA's description of one, or "cpu" for virtual CPU devices. Default:
            the chips of the plan's cluster.
          show_progress: a progress bar on the terminal.
          most_operations: of all programs together, lest this takes long.

        Raises:
          TargetError: the target is not known, its compiler is not installed, or there is too much to compile.
          PlanMismatchError: the plan was edited inconsistently.
        """
        plan, lowered = self.with_programs().made
        donated = inputs_of(self.step.donated, lowered.placed.step.graph)
        with ProgramBar(f"compiling {self.function}", show_progress) as bar:
            return verify(self._finisher().stages.prices, plan, lowered, donated, target, bar, most_operations)

    @uncollected()
    def report(
        self, *, compare: bool = False, verification: Verification | None = None, against: Plan | None = None,
        explain: int = 12, show_progress: bool = False,
    ) -> Report:  # fmt: skip
        """All that is known and predicted of the plan: `print` it, or `save("report.html")` one page of it.

        Of a plan from a file alone `autopar.Report(plan)` is what the file holds.

        Args:
          compare: plan by every usual recipe, too, which takes about as long as planning did for each.
          verification: XLA's verdict on this plan, to be shown beside what is only predicted.
          against: another plan, to say what differs.
          explain: of so many operators, those that take longest, say what other shardings would cost, and why.
          show_progress: a progress bar on the terminal.

        Raises:
          ReportError: `explain` is no whole number of 0 or more.
          PlanMismatchError: the plan was edited inconsistently.
        """
        if type(explain) is not int or explain < 0:
            raise ReportError(f"report(explain={explain!r}): explain must be a whole number of 0 or more.")
        finisher = self._finisher()
        restored = self._restored(finisher)
        details = gather_details(finisher, restored, explain, self.seconds)
        fresh = restored.plan
        comparison = self._compared(fresh, show_progress) if compare else None
        diff = None if against is None else PlanDiff.of(fresh, against)
        return Report(fresh, details, comparison, verification, diff)

    @uncollected()
    def why(self, where: str = "", most: int = 3) -> tuple[Why, ...]:
        """Why operators are cut as they are: what each of their other strategies costs, and would cost their stage.

        Of the operators with `where` in their name or in their line of code (`"model.py:55"`, `"dot_general"`) those
        of most work, at most `most`. Each strategy of each operator is a problem to solve: this takes seconds.

        Raises:
          PlanError: there is no such operator.
        """
        finisher = self._finisher()
        return explain(finisher, self._restored(finisher), where, most)

    def with_programs(self) -> Planned:
        """Itself with programs that are `made`; where it has been edited it is priced anew, too.

        Raises:
          PlanMismatchError: the plan was edited inconsistently.
        """
        if self.lowered is not None and self._is(self.lowered[0]):
            return self
        return Planned.of_restored(self._restored(self._finisher()), self.step, self._method, self.seconds)

    @property
    def made(self) -> tuple[Plan, LoweredStep]:
        """The plan and the programs that are at hand."""
        assert self.lowered is not None, "`with_programs` has them"
        return self.lowered

    def played(self) -> tuple[Finisher, Restored]:
        """What `played_timeline` plays."""
        finisher = self._finisher()
        return finisher, self._restored(finisher)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, tuple(self.fields().values())  # the plan alone

    def _is(self, made: Plan) -> bool:
        """Whether it is what was made, whatever has been noted since."""
        return dataclasses.replace(made, notes=self.notes) == self

    def _restored(self, finisher: Finisher) -> Restored:
        if self.restored is not None and self._is(self.restored.plan):
            return self.restored._replace(plan=dataclasses.replace(self.restored.plan, notes=self.notes))
        return finisher.restore(self)

    @property
    def _method(self) -> Method:
        """What is known of the method: enough to price a plan."""
        return dataclasses.replace(AUTO, memory_limit=self.memory_limit)

    def _finisher(self) -> Finisher:
        return Finisher(self.step.analysis, self.cluster, self._method)

    def _compared(self, plan: Plan, show_progress: bool) -> Comparison:
        """The plan beside those of other methods."""

        def planned(method: Method) -> Plan:
            limited = dataclasses.replace(method, memory_limit=self.memory_limit)
            return self.step.padded(()).best(plan.cluster, limited, None)[0]

        others = [method for method in usual_methods(plan.cluster) if method.name != plan.method]
        trials: list[Trial] = [
            (f"this plan: {plan.method}", plan.cluster, lambda: plan),
            *((method.name, plan.cluster, functools.partial(planned, method)) for method in others),
        ]
        with ProgramBar(f"planning {plan.function}", show_progress) as bar:
            return Comparison.tried(plan.function, trials, bar, bar.say if show_progress else lambda _: None)


def planned_for(step: TracedStep, cluster: Cluster, method: Method | Plan, *, with_relaxations: bool = True) -> Planned:
    """A step by a method, or as a plan says that was made before.

    Raises:
      InfeasiblePlanError, MicrobatchError, PlanMismatchError, PlanError: as `TracedStep.search` and `restore`.
    """
    if isinstance(method, Method):
        started = time.perf_counter()
        entry = plan_cache.entry_of(step, cluster, method)
        if entry is not None and (kept := entry.read()) is not None:
            with contextlib.suppress(PlanError):  # of a file that was edited, say: it is planned anew
                restored = step.restore(kept, cluster)
                return Planned.of_restored(restored, step, method, time.perf_counter() - started)
        plan, lowered = step.search(cluster, method, with_relaxations=with_relaxations)
        if entry is not None:
            entry.write(plan)
        return Planned.of(plan, step, method, time.perf_counter() - started, lowered)
    return Planned.of_restored(step.restore(method, cluster), step, method, None)


def inputs_of(leaves: frozenset[int], graph: Graph) -> frozenset[int]:
    """The inputs that argument leaves have become."""
    return frozenset(k for i in leaves for k in graph.inputs_of[i])
