"""A step traced for arguments of certain shapes: what it computes, where its examples are, and the search for its plan.

Nothing here runs a program or knows how one is run, so that what is planned, and what `benchmarks.planner` and
`benchmarks.accuracy` say of it, does not depend on the runtime.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax

from autopar.errors import InfeasiblePlanError, PlanError, PlanMismatchError
from autopar.ir.cluster_json import check_cluster
from autopar.ir.graph import Graph, Value
from autopar.ir.hint import Hint
from autopar.ir.json_file import nearest
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.ir.pieces import Pieces
from autopar.ir.placed_examples import PlacedExamples
from autopar.ir.plan import Plan
from autopar.passes.batch import BatchAnalysis, analyse_batch, batch_size_of
from autopar.passes.batch_axes import resolve_batch_axes
from autopar.passes.loop_residuals import thin_loops
from autopar.passes.loop_tails import without_tails
from autopar.passes.lower import LoweredStep
from autopar.passes.padding import Padding, padded
from autopar.passes.positions import index_within_examples
from autopar.passes.rules.table import rule_of, warn_missing
from autopar.planning.baselines import plan_beside_recipes
from autopar.planning.finisher import Finisher, Restored
from autopar.planning.garbage import uncollected
from autopar.planning.relaxations import smallest_relaxations
from autopar.tracing.calls import Call, StepFunction
from autopar.tracing.in_place import returning_changed
from autopar.tracing.trace import trace, with_examples


@dataclasses.dataclass(frozen=True, eq=False)
class TraceOptions:
    """What a user says of a step before it is planned; see `parallelize`."""

    num_microbatches: int | None = None
    batch_axes: Any = "auto"
    hints: Mapping[str, Hint] = dataclasses.field(default_factory=dict)
    reduces_own_dtype: bool = False  # whether partial sums of 16 bits are added up as such


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A step for arguments of certain shapes."""

    analysis: BatchAnalysis
    donated: frozenset[int]  # argument leaves that a step may overwrite
    options: TraceOptions
    unpadded: TracedStep | None = None  # where this one is padded: the step as it was traced

    @property
    def graph(self) -> Graph:
        """What it computes."""
        return self.analysis.graph

    @uncollected()
    def search(self, cluster: Cluster, method: Method, *, with_relaxations: bool = True) -> tuple[Plan, LoweredStep]:
        """The best plan that a method allows on a cluster.

        `with_relaxations`: where there is none, the error says what would have to be given up; this takes searches.

        Raises:
          InfeasiblePlanError: there is none.
          MicrobatchError: the batch cannot be cut as it is asked for.
        """
        check_cluster(cluster)
        number = self.options.num_microbatches
        shards = method.data_shards(cluster.num_devices)
        if shards > 1:
            self.analysis.check_shards(number or method.num_microbatches or 1, shards, method.name)
        try:
            return self.best(cluster, method, number)
        except InfeasiblePlanError as error:
            relaxations = smallest_relaxations(self.analysis, cluster, method, number) if with_relaxations else ""
            if relaxations:
                raise InfeasiblePlanError(f"{error} {relaxations}") from error
            raise

    def best(self, cluster: Cluster, method: Method, num_microbatches: int | None) -> tuple[Plan, LoweredStep]:
        """As `plan_beside_recipes`."""
        return plan_beside_recipes(self.analysis, cluster, method, num_microbatches, self._padded)

    def padded(self, padding: Padding) -> TracedStep:
        """The step that a plan with this `padding` is of."""
        step = self.unpadded or self
        found = step._padded(padding) if padding else None
        return step if found is None else TracedStep(found, self.donated, self.options, step)

    def _padded(self, padding: Padding) -> BatchAnalysis | None:
        if padding not in self._found:
            self._found[padding] = padded(self.analysis, padding, rule_of)
        return self._found[padding]

    @functools.cached_property
    def _found(self) -> dict[Padding, BatchAnalysis | None]:
        return {}

    @uncollected()
    def restore(self, plan: Plan, cluster: Cluster) -> Restored:
        """A plan that was made before, priced for this step.

        Raises:
          PlanError: hints say where something lies, and the plan does so, too.
          PlanMismatchError: the plan is for something else.
        """
        check_cluster(cluster)
        name = self.graph.name
        if self.options.hints:
            raise PlanError(
                f"{name} has hints, but the plan for {plan.function!r} says already where everything lies. "
                "Leave out hints, or the plan."
            )
        if cluster != plan.cluster:
            raise PlanMismatchError(
                f"the plan for {plan.function!r} is for cluster {plan.cluster.name!r} of "
                f"{plan.cluster.num_devices} devices, {name} was given cluster {cluster.name!r} of "
                f"{cluster.num_devices}: make a plan for this cluster, or leave out cluster."
            )
        return Finisher(self.padded(plan.padding).analysis, cluster).restore(plan)


@uncollected()
def trace_step(
    function: StepFunction, call: Call, options: TraceOptions, state_of: Callable[[Graph], Set[Value]] | None = None
) -> TracedStep:
    """Trace a step for the shapes of a call.

    `state_of`: inputs that are known to be state, and so no examples.

    Raises:
      TraceError: an argument or a result is no array, or the step has side effects.
      BatchAxisError: the examples are not found among the arguments.
      PlanError: a hint fits no argument.
    """
    own = Pieces | PlacedExamples
    whole = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, own) else x for x in call.leaves]
    args, kwargs = jax.tree.unflatten(call.tree, whole)
    fun = returning_changed(function.bound(call))
    graph = index_within_examples(
        trace(
            fun, args, kwargs, name=function.name, is_static=function.is_static,
            reduces_own_dtype=options.reduces_own_dtype,
        )
    )  # fmt: skip
    graph = dataclasses.replace(graph, hints=_pinned_leaves(graph, options.hints))
    graph = thin_loops(graph, rule_of)
    warn_missing(graph.equations)
    state = frozenset() if state_of is None else frozenset(state_of(graph))
    axes = resolve_batch_axes(graph, options.batch_axes, state)
    graph = without_tails(with_examples(graph, axes.keys()), batch_size_of(graph, axes), rule_of)
    analysis = analyse_batch(graph, axes, rule_of)
    args_tree, _ = analysis.graph.in_tree.children()
    donated = function.donated(call, args_tree, frozenset(analysis.graph.carried.values()))
    return TracedStep(analysis, donated, options)


def _pinned_leaves(graph: Graph, hints: Mapping[str, Hint]) -> dict[int, Hint]:
    """The hints by number of the argument leaf. Raises PlanError where one fits no leaf, or two contradict."""
    pinned: dict[int, tuple[str, Hint]] = {}
    for pattern, hint in hints.items():
        # Brackets are those of paths, not sets of characters.
        matching = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."))
        numbers = [i for i, path in enumerate(graph.input_paths) if matching.fullmatch(path)]
        if not numbers:
            raise PlanError(
                f"hints[{pattern!r}] matches no argument of {graph.name}; {nearest(pattern, graph.input_paths)}"
                f"its arguments are {', '.join(graph.input_paths[:8])}{', ..' if len(graph.input_paths) > 8 else ''}. "
                "'*' stands for any text, '?' for any character."
            )
        for i in numbers:
            hint.check(graph.inputs[i].shape, f"hints[{pattern!r}], {graph.input_paths[i]}")
            before, other = pinned.setdefault(i, (pattern, hint))
            if other != hint:
                raise PlanError(
                    f"hints[{before!r}] and hints[{pattern!r}] both match {graph.input_paths[i]} of {graph.name}, with "
                    f"{other} and {hint}: let one pattern match it."
                )
    return {i: hint for i, (_, hint) in pinned.items()}
