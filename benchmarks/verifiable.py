"""Plans that XLA can be asked about, by way of `benchmarks.traced`: verified without the runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.origin import origin_of
from benchmarks.traced import trace


def plan(function: Callable[..., Any], *args: Any, cluster: Cluster, method: Method = AUTO) -> Plan:
    """As `Parallelized.plan` finds it."""
    traced = trace(function, *args)
    found, _ = traced.search(cluster, method)
    return dataclasses.replace(found, origin=origin_of(traced, method, None))
