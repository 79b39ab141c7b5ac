"""Plans that can be verified and reported on, by way of `benchmarks.traced`: without what runs steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.origin import origin_of, planned_for
from benchmarks.traced import trace


def plan(function: Callable[..., Any], *args: Any, cluster: Cluster, method: Method | Plan = AUTO) -> Plan:
    """As `Parallelized.plan` finds it."""
    traced = trace(function, *args)
    found, _ = planned_for(traced, cluster, method)
    return found if found.origin else dataclasses.replace(found, origin=origin_of(traced, method, None))
