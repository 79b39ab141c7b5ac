"""Plans that can be verified and reported on, by way of `benchmarks.traced`: without what runs steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.planned import Planned, planned_for
from benchmarks.traced import trace


def plan(function: Callable[..., Any], *args: Any, cluster: Cluster, method: Method | Plan = AUTO) -> Planned:
    """As `Parallelized.plan` finds it."""
    return planned_for(trace(function, *args), cluster, method)
