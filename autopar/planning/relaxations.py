"""What of an infeasible request would have to go: found by planning without parts of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar import recipes
from autopar.ir.hint import Hint
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.ir.units import bytes_text, count_text
from autopar.passes.batch import BatchAnalysis
from autopar.planning.planner import Planner

_SECONDS = 10.0  # of planning, for each try
_MOST_TRIES = 24
_MOST_AT_ONCE = 3
_CLOSE = 1.1  # times a memory limit that is too little: near enough to the least


@dataclasses.dataclass(frozen=True)
class Request:
    """What a plan was asked for, beside the step and the cluster."""

    options: Mapping[str, Any]  # of `recipes.auto`
    num_microbatches: int | None
    hints: Mapping[int, Hint]  # by argument leaf
    heeds_hints: bool  # those inside the step

    @staticmethod
    def of(analysis: BatchAnalysis, method: Method, num_microbatches: int | None) -> Request:
        graph = analysis.graph
        return Request(dict(method.options), num_microbatches, graph.hints, graph.heeds_hints)

    def any_plan(self, analysis: BatchAnalysis, cluster: Cluster, method: Method) -> Plan | None:
        """A plan for this request, if one is found soon; `method` stands where it was not made by `recipes.auto`."""
        options = {**self.options, "time_limit": _SECONDS}
        chosen = recipes.auto(**options) if method.options else dataclasses.replace(method, time_limit=_SECONDS)
        graph = dataclasses.replace(analysis.graph, hints=self.hints, heeds_hints=self.heeds_hints)
        analysis = dataclasses.replace(analysis, graph=graph)
        return Planner(analysis, cluster, chosen).any_plan(self.num_microbatches)


Relaxation = Callable[[Request], Request]


def smallest_relaxations(
    analysis: BatchAnalysis, cluster: Cluster, method: Method, num_microbatches: int | None
) -> str:
    """In words, which parts of an infeasible request exclude one another: those without which there is a plan.

    As few as possible are left out; "" if the request fixes nothing.
    """
    request = Request.of(analysis, method, num_microbatches)
    parts = _parts(request, analysis, method)
    tries = 0
    for count in range(1, min(len(parts), _MOST_AT_ONCE) + 1):
        ways = []
        for names in itertools.combinations(parts, count):
            relaxed = request
            for name in names:
                relaxed = parts[name](relaxed)
            tries += 1
            if tries <= _MOST_TRIES and (plan := relaxed.any_plan(analysis, cluster, method)) is not None:
                ways.append(_way_text(names, plan, request, relaxed, analysis, cluster, method))
        if ways:
            return f"What works: {'; or '.join(ways)}."
    if not parts:
        return ""
    return f"No plan was found either without up to {min(len(parts), _MOST_AT_ONCE)} of: {', '.join(parts)}."


def _parts(request: Request, analysis: BatchAnalysis, method: Method) -> dict[str, Relaxation]:
    """What may be left out, by its name."""
    parts: dict[str, Relaxation] = {
        f"{name}={value!r}": functools.partial(_without_option, name)
        for name, value in method.excluding_options.items()
    }
    if request.num_microbatches is not None:
        parts[f"num_microbatches={request.num_microbatches}"] = _without_number
    alike: dict[Hint, list[int]] = defaultdict(list)
    for leaf, hint in request.hints.items():
        alike[hint].append(leaf)
    for hint, leaves in alike.items():
        others = f" and {count_text(len(leaves) - 1, 'other')}" if len(leaves) > 1 else ""
        name = f"the hint {hint} for {analysis.graph.input_paths[leaves[0]]}{others}"
        parts[name] = functools.partial(_without_hint, hint)
    if any(rule.hints for rule in analysis.rules.values()):
        parts["the hints inside the step"] = _without_inner_hints
    return parts


def _without_option(name: str, request: Request) -> Request:
    return dataclasses.replace(request, options={k: v for k, v in request.options.items() if k != name})


def _without_number(request: Request) -> Request:
    return dataclasses.replace(request, num_microbatches=None)


def _without_hint(hint: Hint, request: Request) -> Request:
    return dataclasses.replace(request, hints={k: v for k, v in request.hints.items() if v != hint})


def _without_inner_hints(request: Request) -> Request:
    return dataclasses.replace(request, heeds_hints=False)


def _way_text(
    names: Sequence[str], plan: Plan, request: Request, relaxed: Request, analysis: BatchAnalysis, cluster: Cluster,
    method: Method,
) -> str:  # fmt: skip
    """What was left out, and what there is instead."""
    if "memory_limit" in request.options and "memory_limit" not in relaxed.options:

        def is_enough(limit: int) -> bool:
            raised = dataclasses.replace(relaxed, options={**relaxed.options, "memory_limit": limit})
            return raised.any_plan(analysis, cluster, method) is not None

        # The search needs room beyond what its plan takes in the end.
        too_little, enough = request.options["memory_limit"], plan.peak_memory
        while not is_enough(enough):
            too_little, enough = enough, math.ceil(_CLOSE * enough)
        while enough > _CLOSE * too_little:
            middle = int(math.sqrt(too_little * enough))
            if is_enough(middle):
                enough = middle
            else:
                too_little = middle
        others = [name for name in names if not name.startswith("memory_limit=")]
        return f"memory_limit={enough} ({bytes_text(enough)})" + (f" without {' and '.join(others)}" if others else "")
    shapes = ", ".join(dict.fromkeys(str(stage.mesh.shape) for stage in plan.stages))
    return (
        f"without {' and '.join(names)} ({count_text(len(plan.stages), 'stage')} of mesh shape {shapes}, "
        f"num_microbatches={plan.num_microbatches})"
    )
