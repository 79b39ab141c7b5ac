"""What a plan has been made for: so it can be verified, reported on, and compared."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from autopar.baselines import plan_beside_recipes, usual_methods
from autopar.finisher import Finisher, Restored
from autopar.garbage import uncollected
from autopar.ir.comparison import Comparison
from autopar.ir.graph import Graph
from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.ir.plan_diff import PlanDiff
from autopar.ir.report import Report
from autopar.ir.verification import Verification
from autopar.ir.why import Why
from autopar.passes.batch import BatchAnalysis
from autopar.passes.lower import LoweredStep
from autopar.progress import ProgramBar
from autopar.reporter import gather_details
from autopar.traced import Traced
from autopar.verifier import verify
from autopar.why import explain

if TYPE_CHECKING:
    from autopar.ir.comparison import Trial


@dataclasses.dataclass(frozen=True, eq=False)
class StepOrigin:
    """The traced step of a plan."""

    analysis: BatchAnalysis
    donated: frozenset[int]  # argument leaves
    memory_limit: int | None  # bytes of each device
    seconds: float | None  # that planning took; None: the plan was given
    restored: Restored | None = None  # of a plan that was given

    def verify(self, plan: Plan, target: str | None, show_progress: bool, most_operations: int | None) -> Verification:
        """See `Plan.verify_with_xla`."""
        finisher = self._finisher(plan)
        fresh, lowered, _ = self._restored(plan, finisher)
        donated = inputs_of(self.donated, lowered.placed.step.graph)
        with ProgramBar(f"compiling {plan.function}", show_progress) as bar:
            return verify(finisher.stages.prices, fresh, lowered, donated, target, bar, most_operations)

    @uncollected()
    def report(
        self, plan: Plan, compare: bool, verification: Verification | None, against: Plan | None, most_explained: int,
        show_progress: bool,
    ) -> Report:  # fmt: skip
        """See `Plan.report`."""
        finisher = self._finisher(plan)
        restored = self._restored(plan, finisher)
        details = gather_details(finisher, restored, most_explained, self.seconds)
        fresh = restored.plan
        comparison = self._compared(fresh, show_progress) if compare else None
        diff = None if against is None else PlanDiff.of(fresh, against)
        return Report(fresh, details, comparison, verification, diff)

    @uncollected()
    def why(self, plan: Plan, where: str, most: int) -> tuple[Why, ...]:
        """See `Parallelized.why`."""
        finisher = self._finisher(plan)
        return explain(finisher, self._restored(plan, finisher), where, most)

    def _restored(self, plan: Plan, finisher: Finisher) -> Restored:
        known = self.restored
        return known if known is not None and known.plan == plan else finisher.restore(plan)

    def _finisher(self, plan: Plan) -> Finisher:
        return Finisher(self.analysis, plan.cluster, dataclasses.replace(AUTO, memory_limit=self.memory_limit))

    def _compared(self, plan: Plan, show_progress: bool) -> Comparison:
        """The plan beside those of other methods."""

        def planned(method: Method) -> Plan:
            limited = dataclasses.replace(method, memory_limit=self.memory_limit)
            return plan_beside_recipes(self.analysis, plan.cluster, limited, None)[0]

        others = [method for method in usual_methods(plan.cluster) if method.name != plan.method]
        trials: list[Trial] = [
            (f"this plan: {plan.method}", plan.cluster, lambda: plan),
            *((method.name, plan.cluster, functools.partial(planned, method)) for method in others),
        ]
        with ProgramBar(f"planning {plan.function}", show_progress) as bar:
            return Comparison.tried(plan.function, trials, bar, bar.say if show_progress else lambda _: None)


def origin_of(traced: Traced, method: Method | Plan, seconds: float | None) -> StepOrigin:
    """Of a plan of this step; `seconds`: that the search took, None where the plan was given."""
    limit = method.memory_limit if isinstance(method, Method) else None
    return StepOrigin(traced.analysis, traced.donated, limit, seconds)


def planned_for(
    traced: Traced, cluster: Cluster, method: Method | Plan, *, with_relaxations: bool = True
) -> tuple[Plan, LoweredStep]:
    """A step by a method, or as a plan says that was made before; that has its origin then."""
    if isinstance(method, Method):
        return traced.search(cluster, method, with_relaxations=with_relaxations)
    restored = traced.restore(method, cluster)
    origin = dataclasses.replace(origin_of(traced, method, None), restored=restored)
    return dataclasses.replace(restored.plan, origin=origin), restored.lowered


def inputs_of(leaves: frozenset[int], graph: Graph) -> frozenset[int]:
    """The inputs that argument leaves have become."""
    return frozenset(k for i in leaves for k in graph.inputs_of[i])
