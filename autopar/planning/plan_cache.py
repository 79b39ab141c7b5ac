"""Plans kept in a folder, so that a step that was planned before is not planned again.

A file is named by all that its plan follows from: what the step computes, its shapes, what its user says of it, the
cluster, the method, and the versions of the planner and of what it builds on. What another version wrote has another
name. A file that cannot be read is no plan, and is written anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.extend import core

from autopar.errors import PlanError, warn
from autopar.ir.cluster_json import cluster_data
from autopar.ir.json_file import write_path
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.ir.schedule import registered
from autopar.passes.rules.table import registered_rules, rule_of
from autopar.planning.traced import TracedStep

FOLDER = "AUTOPAR_PLAN_CACHE"  # the variable that names the folder; without it no plan is kept
_BUILDS_ON = ("jax", "jaxlib", "numpy", "scipy", "ortools", "networkx")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a plan is kept, or will be."""

    path: pathlib.Path

    def read(self) -> Plan | None:
        """The plan, if there is one that can be read."""
        with contextlib.suppress(PlanError):
            return Plan.load(self.path)
        return None

    def write(self, plan: Plan) -> None:
        """Keep a plan. Where that fails, the job goes on without."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_path(self.path, plan.to_json(), "plan file", PlanError)
        except (OSError, PlanError) as error:
            warn(f"{FOLDER}: the plan is not kept: {error}")


def entry_of(step: TracedStep, cluster: Cluster, method: Method) -> Entry | None:
    """Where the step's plan on this cluster by this method is kept; None: nowhere.

    A search that time ends, and hints, which no plan file may be used with, leave nothing to keep.
    """
    folder = os.environ.get(FOLDER)
    if not folder or method.time_limit is not None or step.options.hints:
        return None
    digest = hashlib.sha256()
    for text in _said(step, cluster, method):
        digest.update(text.encode())
        digest.update(b"\0")
    name = f"{_NAME.sub('_', step.graph.name)}-{digest.hexdigest()[:32]}.json"
    return Entry(pathlib.Path(folder).expanduser() / name)


def _said(step: TracedStep, cluster: Cluster, method: Method) -> Iterator[str]:
    """All that a plan follows from."""
    graph, analysis = step.graph, step.analysis
    yield json.dumps({name: metadata.version(name) for name in _BUILDS_ON})
    yield _sources()
    yield json.dumps(cluster_data(cluster), sort_keys=True)
    yield repr((method, jax.config.values["jax_threefry_partitionable"]))
    yield repr((step.options.num_microbatches, step.options.reduces_own_dtype, sorted(step.donated), graph.heeds_hints))
    yield repr((graph.input_paths, graph.output_paths, sorted(graph.carried.items()), graph.fingerprint))
    yield repr([(i, graph.input_cuts[i]) for i in sorted(graph.input_cuts)])
    yield repr((analysis.batch_size, analysis.max_microbatches, [v.id for v in graph.inputs if v in graph.examples]))
    yield from (f"{name} {_code(order)}" for name, order in sorted(registered().items()))
    texts = [f"{e.primitive.name} {e.phase} {e.rematerialized} {_text(e.params)}" for e in graph.equations]
    yield from texts
    if registered_rules() or any("custom_partitioning" in text for text in texts):  # also in bodies of loops
        yield from (_ADDRESS.sub("", repr(rule_of(e))) for e in graph.equations)  # which code of the user's gives


def _code(function: Any) -> str:
    """What a function of the user's does, as far as its own code says it."""
    code = getattr(function, "__code__", None)
    if code is None:
        return _ADDRESS.sub("", repr(function))
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    said = (code.co_code, code.co_consts, code.co_names, function.__defaults__, closed)
    return _ADDRESS.sub("", repr(said))


def _text(value: Any) -> str:
    """Of a parameter of an equation, the same in every process; of arrays only what they look like."""
    if isinstance(value, core.ClosedJaxpr):
        return _text(value.jaxpr)
    if isinstance(value, core.Jaxpr):
        return _text_of_jaxpr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {_text(value[k])}' for k in sorted(value, key=str))}}}"
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, np.generic):
        return f"{value.dtype}({value.item()!r})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{np.shape(value)}"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return _ADDRESS.sub("", repr(value))


def _text_of_jaxpr(jaxpr: core.Jaxpr) -> str:
    numbers: dict[Any, int] = {}

    def name(x: Any) -> str:
        if isinstance(x, core.Literal):
            return f"{_text(x.val) if np.ndim(x.val) else x.val}:{x.aval}"
        return f"{numbers.setdefault(x, len(numbers))}:{x.aval}"

    lines = [f"{list(map(name, [*jaxpr.constvars, *jaxpr.invars]))}"]
    for eqn in jaxpr.eqns:
        given, made = list(map(name, eqn.invars)), list(map(name, eqn.outvars))
        lines.append(f"{eqn.primitive.name} {_text(eqn.params)} {given} {made}")
    lines.append(f"{list(map(name, jaxpr.outvars))}")
    return "\n".join(lines)


@functools.cache
def _sources() -> str:
    """The hash of autopar's own files."""
    package = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    found = []
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]  # Python's, and Numba's, made on the way
        found += [os.path.join(folder, name) for name in names]
    for path in sorted(found):
        digest.update(os.path.relpath(path, package).encode())
        digest.update(pathlib.Path(path).read_bytes())
    return digest.hexdigest()
