"""A step planned, lowered and compiled, with its collectives counted in three places."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from autopar.compiling.compiler import build
from autopar.cost_model.program_cost import program_cost, temporaries
from autopar.ir.local import LocalProgram, Reread, Reshard
from autopar.ir.mesh import Cluster, DeviceKind, Host, Link, XlaBackend
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.ir.sharding import Collective
from autopar.passes.batch import BatchAnalysis, analyse_batch
from autopar.passes.batch_axes import resolve_batch_axes
from autopar.passes.collectives import count_collectives
from autopar.passes.lower import LoweredStep
from autopar.passes.rules.table import rule_of
from autopar.planning.planner import Planner
from autopar.planning.pricing import Prices
from autopar.runtime.hlo import collectives_in_hlo
from autopar.runtime.processes import Processes
from autopar.runtime.source import Source
from autopar.runtime.worker import Worker
from autopar.tracing.trace import trace
from tests.clusters import IN_TURN


def cluster_of(
    hosts: int, devices: int, *, memory: int = 2**34, flops: float = 1e8, memory_bandwidth: float = 1e9,
    link: float = 1e12, network: float = 1e12, latency: float = 1e-9, launch: float = 1e-9,
) -> Cluster:  # fmt: skip
    """Equal hosts. By default the devices are so slow and the links so fast that splitting the work always pays.

    memory: bytes. flops: FLOP/s. memory_bandwidth, link, network: bytes/s. latency, launch: s.
    """
    kind = DeviceKind("device", memory, memory_bandwidth, {"float32": flops}, 1.0, 1.0, launch, launch, xla=IN_TURN)
    host = Host(kind, devices, Link("link", latency, link))
    return Cluster("test", (host,) * hosts, Link("network", latency, network))


def compiled_by(cluster: Cluster, xla: XlaBackend) -> Cluster:
    """A cluster whose programs this compiler compiles."""
    hosts = (dataclasses.replace(h, kind=dataclasses.replace(h.kind, xla=xla)) for h in cluster.hosts)
    return dataclasses.replace(cluster, hosts=tuple(hosts))


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    plan: Plan
    lowered: LoweredStep

    def build(self, devices: Sequence[Any], job: Processes | None = None) -> Worker:
        return build(self.lowered, self.plan.schedule, devices, frozenset(), job)

    def priced(self, local: LocalProgram) -> Counter[Collective]:
        prices = Prices(self.plan.cluster)
        return Counter(program_cost(local, prices.kind(local.mesh), prices.resharder(local.mesh)[1]).collectives)


def as_xla_for_cpus_merges(local: LocalProgram) -> LocalProgram:
    """Without what is gathered again: for CPUs, XLA drops fences before it looks for what is equal."""
    names = {op.copy: op.value for op in local.ops if isinstance(op, Reread)}
    made = set()
    ops = []
    for op in local.ops:
        if isinstance(op, Reshard):
            what = (names.get(op.value, op.value), op.source, op.target)
            if what in made:
                continue
            made.add(what)
        ops.append(op)
    return dataclasses.replace(local, ops=tuple(ops))


def analyse(
    step: Callable[..., Any], *args: Any, batch_axes: Any = "auto", reduces_own_dtype: bool = False
) -> BatchAnalysis:
    graph = trace(step, args, {}, name="step", reduces_own_dtype=reduces_own_dtype)
    return analyse_batch(graph, resolve_batch_axes(graph, batch_axes), rule_of)


def plan_step(
    step: Callable[..., Any], args: Sequence[Any], cluster: Cluster, method: Method, m: int | None,
    reduces_own_dtype: bool = False,
) -> Planned:  # fmt: skip
    return plan_analysis(analyse(step, *args, reduces_own_dtype=reduces_own_dtype), cluster, method, m)


def plan_analysis(analysis: BatchAnalysis, cluster: Cluster, method: Method, m: int | None) -> Planned:
    planner = Planner(analysis, cluster, method)
    return Planned(*planner.noted(planner.plan(m)))


ADAM = optax.adam(1e-3)


@functools.cache
def analysis_of(
    model: Any, config: Any, batch_size: int, optimizer: optax.GradientTransformation = ADAM
) -> BatchAnalysis:
    """Of the train step of a module of `benchmarks.models`, traced once in a process."""
    state = jax.eval_shape(model.make_init(config, optimizer), jax.random.key(0))
    return analyse(model.make_train_step(config, optimizer), state, model.abstract_batch(config, batch_size))


def lowered_collectives(source: Source, local: LocalProgram) -> Counter[Collective]:
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in source.inputs]
    return Counter(count_collectives(jax.make_jaxpr(source.jitted())(*args), local.mesh))


def compiled_collectives(program: Any, local: LocalProgram) -> Counter[Collective]:
    return Counter(collectives_in_hlo(program.as_text(), local.mesh))


def temporaries_of(local: LocalProgram, cluster: Cluster) -> int:
    """Bytes that the schedule of a program on one mesh of a cluster needs."""
    prices = Prices(cluster)
    return temporaries(local, prices.kind(local.mesh), prices.resharder(local.mesh)[1])
