"""`parallelize`: a plain JAX step in, a planned, sharded, pipelined one out. Mirrors `jax.jit` and its stages."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax

from autopar.compiler import Planner, build
from autopar.cost_model.hardware import cluster_from_devices
from autopar.errors import PlanError, PlanMismatchError
from autopar.ir.graph import Graph, Value
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.ir.sharding import Sharding
from autopar.passes.batch import BatchAnalysis, analyse_batch
from autopar.passes.batch_axes import resolve_batch_axes
from autopar.passes.rules.table import rule_of, warn_missing
from autopar.runtime.executable import Executable as RuntimeExecutable
from autopar.runtime.executable import check_devices
from autopar.trace import trace


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A step compiled for given shapes."""

    plan: Plan
    _runtime: RuntimeExecutable
    _graph: Graph
    _devices: tuple[jax.Device, ...]

    @property
    def instruction_count(self) -> int:
        """Programs and transfers that the worker issues per step."""
        return self._runtime.instruction_count

    @property
    def dispatch_seconds(self) -> float:
        """Host seconds that issuing the last step's instructions took."""
        return self._runtime.dispatch_seconds

    def as_text(self) -> dict[str, str]:
        """XLA's optimised HLO of each program, by name."""
        return {s.name: p.as_text() for s, p in zip(self._runtime.sources, self._runtime.programs, strict=True)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self._graph.in_tree:
            raise PlanMismatchError(
                f"{self._graph.name} was compiled for arguments of structure {self._graph.in_tree}, called with {tree}."
            )
        return jax.tree.unflatten(self._graph.out_tree, self._runtime(leaves))


@dataclasses.dataclass(frozen=True, eq=False)
class _Planned:
    """Everything known about the step for one set of shapes."""

    graph: Graph
    analysis: BatchAnalysis


class Parallelized:
    """A step function that is planned at its first call and then runs on all devices."""

    def __init__(
        self, fun: Callable[..., Any], *, cluster: Cluster | None, method: str | Method | Plan,
        num_microbatches: str | int, batch_axes: Any, static_argnums: Sequence[int], static_argnames: Sequence[str],
        donate_argnums: str | Sequence[int], devices: Sequence[jax.Device] | None, follow: Parallelized | None,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._cluster, self._devices, self._follow = cluster, devices, follow
        self._method = _method(method)
        self._num_microbatches = _microbatches(num_microbatches)
        self._batch_axes = batch_axes
        self._static_argnums = tuple(static_argnums)
        self._static_argnames = tuple(static_argnames)
        self._donate_argnums = donate_argnums
        self._executables: dict[Any, Executable] = {}
        self._traced: dict[Any, _Planned] = {}

    # Ahead-of-time stages.

    def trace(self, *args: Any, **kwargs: Any) -> Graph:
        """The step as a graph; arguments may be `jax.ShapeDtypeStruct`s."""
        return self._analyse(args, kwargs).graph

    def plan(self, *args: Any, cluster: Cluster | None = None, method: str | Method | None = None, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes on a cluster that need not be there.

        Raises:
          InfeasiblePlanError: the step fits under no plan.
        """
        planned = self._analyse(args, kwargs)
        chosen = self._method if method is None else _method(method)
        where = cluster or self._cluster or cluster_from_devices(self._devices)
        if isinstance(chosen, Plan):
            return Planner(planned.analysis, chosen.cluster).restore(chosen)[0]
        return self._planner(planned, where, chosen, args, kwargs)[1]

    def compile(self, *args: Any, **kwargs: Any) -> Executable:
        """Plan and compile for arguments of these shapes (arrays or `jax.ShapeDtypeStruct`s)."""
        return self._executable(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dynamic_args, dynamic_kwargs, _ = self._split_static(args, kwargs)
        return self._executable(args, kwargs)(*dynamic_args, **dynamic_kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """The state that `init_fn(*args)` makes, each leaf born where the plan keeps it.

        The step must have been compiled (or called) before, so that there is a plan. XLA partitions `init_fn` by
        the shardings of its results, stage by stage; no device holds more than its own pieces and their temporaries.

        Raises:
          PlanError: there is no plan yet, or the result of `init_fn` is no argument of the step.
        """
        if not self._executables:
            raise PlanError(f"init: {self._name} has no plan yet. Call {self._name}.compile(state, batch) first; shapes do.")
        executable = next(iter(self._executables.values()))
        shapes = jax.eval_shape(init_fn, *args)
        first = _position_of(executable._graph, shapes, self._name)
        leaves, tree = jax.tree.flatten(shapes)
        homes = executable._runtime.wiring.homes
        values = executable._graph.inputs[first : first + len(leaves)]
        placed: list[Any] = [None] * len(leaves)
        by_mesh: dict[Any, list[int]] = {}
        for i, value in enumerate(values):
            mesh = homes[value].sharding.mesh if value in homes else None
            by_mesh.setdefault(mesh, []).append(i)
        for mesh, indices in by_mesh.items():

            def make(*xs: Any, indices: list[int] = indices) -> list[Any]:
                made = jax.tree.leaves(init_fn(*xs))
                return [made[i] for i in indices]

            shardings = None if mesh is None else [homes[values[i]].sharding for i in indices]
            for i, x in zip(indices, jax.jit(make, out_shardings=shardings)(*_to_host(args)), strict=True):
                placed[i] = x
        return jax.tree.unflatten(tree, placed)

    # Within.

    def _split_static(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Dynamic arguments, and the static ones as a hashable key."""
        if not self._static_argnums and not self._static_argnames:
            return args, dict(kwargs), ()
        names = set(self._static_argnames)
        numbers = {n % len(args) if n < 0 else n for n in self._static_argnums}
        parameters = list(inspect.signature(self._fun).parameters)
        numbers |= {i for i, name in enumerate(parameters[: len(args)]) if name in names}
        names |= {parameters[n] for n in numbers if n < len(parameters)}
        static = (
            tuple((i, a) for i, a in enumerate(args) if i in numbers),
            tuple(sorted((k, v) for k, v in kwargs.items() if k in names)),
        )
        dynamic = tuple(a for i, a in enumerate(args) if i not in numbers)
        return dynamic, {k: v for k, v in kwargs.items() if k not in names}, static

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        dynamic, named, static = self._split_static(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic, named))
        shapes = tuple((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)
        return tree, shapes, static

    def _analyse(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Planned:
        key = self._key(args, kwargs)
        if key not in self._traced:
            dynamic, named, static = self._split_static(args, kwargs)
            graph = trace(_bind_static(self._fun, static), dynamic, named, name=self._name)
            warn_missing(graph.equations)
            axes = resolve_batch_axes(graph, self._batch_axes)
            self._traced[key] = _Planned(graph, analyse_batch(graph, axes, rule_of))
        return self._traced[key]

    def _planner(
        self, planned: _Planned, cluster: Cluster, method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Planner, Plan, Any]:
        dynamic, named, _ = self._split_static(args, kwargs)
        leader = self._leader()
        pinned = {} if leader is None else self._pinned(leader, planned.graph, jax.tree.leaves((dynamic, named)))
        if leader is not None and pinned:
            meshes = [stage.mesh for stage in leader.plan.stages]
            planner = Planner(planned.analysis, leader.plan.cluster, AUTO, pinned)
            limit = 1 if planned.analysis.couplings else planned.analysis.max_microbatches
            wanted = self._num_microbatches or (leader.plan.num_microbatches if planned.graph.carried else 1)
            count = max(m for m in range(1, wanted + 1) if limit % m == 0)
            plan, lowered = planner.follow(meshes, count)
        else:
            planner = Planner(planned.analysis, cluster, method)
            plan, lowered = planner.plan(self._num_microbatches)
        return planner, plan, lowered

    def _leader(self) -> Executable | None:
        """The executable whose state placement this call must respect."""
        if self._follow is not None:
            return self._follow._leader() or next(iter(self._follow._executables.values()), None)
        return next(iter(self._executables.values()), None)

    def _pinned(self, leader: Executable, graph: Graph, leaves: Sequence[Any]) -> dict[Value, tuple[int, Sharding]]:
        """Inputs that already lie on a stage of the leader's plan."""
        meshes = [_device_mesh_of(stage.mesh, leader._devices) for stage in leader.plan.stages]
        found: dict[Value, tuple[int, Sharding]] = {}
        for value, leaf in zip(graph.inputs, leaves, strict=True):
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh in meshes:
                found[value] = (meshes.index(sharding.mesh), _sharding_of(sharding, len(value.shape)))
        return found

    def _executable(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Executable:
        key = self._key(args, kwargs)
        if key in self._executables:
            return self._executables[key]
        planned = self._analyse(args, kwargs)
        devices = tuple(self._devices or jax.devices())
        method = self._method
        if isinstance(method, Plan) and not self._executables:
            planner = Planner(planned.analysis, method.cluster)
            plan, lowered, layered = planner.restore(method)
            rules = layered.rules
        else:
            free = AUTO if isinstance(method, Plan) else method
            cluster = self._cluster or cluster_from_devices(devices)
            planner, plan, lowered = self._planner(planned, cluster, free, args, kwargs)
            rules = {e.id: rule_of(e) for e in lowered.placed.step.equations}
        check_devices(plan.cluster.num_devices, devices)
        donate = self._donated(planned.graph)
        runtime = build(planner, lowered, plan.schedule, rules, devices, donate)
        self._executables[key] = Executable(plan, runtime, planned.graph, devices)
        return self._executables[key]

    def _donated(self, graph: Graph) -> frozenset[int]:
        """Argument leaves that a step may overwrite."""
        carried = frozenset(graph.carried.values())
        if self._donate_argnums == "auto":
            return carried
        numbers = set(self._donate_argnums)
        args_tree, _ = graph.in_tree.children()
        first, found = 0, set()
        for i, child in enumerate(args_tree.children()):
            if i in numbers:
                found.update(range(first, first + child.num_leaves))
            first += child.num_leaves
        return frozenset(found) & carried


def _bind_static(fun: Callable[..., Any], static: Any) -> Callable[..., Any]:
    if not static:
        return fun
    positional, named = static

    @functools.wraps(fun)
    def bound(*args: Any, **kwargs: Any) -> Any:
        full = list(args)
        for i, value in positional:
            full.insert(i, value)
        return fun(*full, **kwargs, **dict(named))

    return bound


def _method(method: str | Method | Plan) -> Method | Plan:
    if isinstance(method, Method | Plan):
        return method
    if method == "auto":
        return AUTO
    raise PlanError(f"method={method!r}: pass 'auto', a recipe of autopar.recipes, or a Plan.")


def _microbatches(number: str | int) -> int | None:
    if number == "auto":
        return None
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PlanError(f"num_microbatches={number!r}: pass 'auto' or an integer of 1 or more.")
    return number


def _position_of(graph: Graph, shapes: Any, name: str) -> int:
    """Index of the first argument leaf of the state that `init` returns: one argument, or a tuple of the first ones."""
    leaves, tree = jax.tree.flatten(shapes)
    args_tree, _ = graph.in_tree.children()
    first = 0
    for child in args_tree.children():
        values = graph.inputs[first : first + child.num_leaves]
        if child == tree and all(v.shape == x.shape and v.dtype == x.dtype for v, x in zip(values, leaves, strict=True)):
            return first
        first += child.num_leaves
    raise PlanError(
        f"init: what init_fn returns, {tree} with {len(leaves)} leaves, has the structure and shapes of no argument of {name}."
    )


def _to_host(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that no device is committed to, so that every stage's mesh may use them."""
    return tuple(jax.tree.map(_uncommitted, arg) for arg in args)


def _uncommitted(x: Any) -> Any:
    import numpy as np

    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.asarray(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _device_mesh_of(mesh: Mesh, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    import numpy as np

    return jax.sharding.Mesh(np.array([devices[d] for d in mesh.devices], dtype=object).reshape(mesh.shape), mesh.axes)


def _sharding_of(sharding: jax.sharding.NamedSharding, rank: int) -> Sharding:
    dims = [() if d is None else ((d,) if isinstance(d, str) else tuple(d)) for d in sharding.spec]
    return Sharding(tuple(dims) + ((),) * (rank - len(dims)))


def gather(tree: Any) -> Any:
    """A pytree whose arrays lie whole on the first device: what `jax.jit` accepts, whatever the plan was."""
    device = jax.devices()[0]
    return jax.tree.map(lambda x: jax.device_put(_uncommitted(x), device) if isinstance(x, jax.Array) else x, tree)


@overload
def parallelize(fun: Callable[..., Any], **options: Any) -> Parallelized: ...
@overload
def parallelize(fun: None = None, **options: Any) -> Callable[[Callable[..., Any]], Parallelized]: ...
def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | None = None,
    method: str | Method | Plan = "auto",
    num_microbatches: str | int = "auto",
    batch_axes: Any = "auto",
    static_argnums: Sequence[int] | int = (),
    static_argnames: Sequence[str] | str = (),
    donate_argnums: str | Sequence[int] | int = "auto",
    devices: Sequence[jax.Device] | None = None,
    follow: Parallelized | None = None,
) -> Parallelized | Callable[[Callable[..., Any]], Parallelized]:
    """Run a plain JAX step on all devices there are, planned for the least step time.

    Args:
      fun: a pure function of pytrees of arrays, e.g. `train_step(state, batch) -> (state, metrics)`.
      cluster: what to plan for; default: the devices there are. Device i of the cluster runs on `devices[i]`.
      method: "auto", a recipe of `autopar.recipes`, or a `Plan` made before.
      num_microbatches: "auto" or a number that divides the batch.
      batch_axes: "auto" or a pytree prefix of the positional arguments with an int or None per leaf, as `in_axes`
        of `jax.vmap`.
      static_argnums, static_argnames: as in `jax.jit`.
      donate_argnums: "auto" donates the state (the leaves that come out again); () keeps it.
      devices: default `jax.devices()`.
      follow: another parallelized function whose state this one takes where it lies.

    Raises:
      TraceError, BatchAxisError, MicrobatchError, InfeasiblePlanError, ..: see `autopar.errors`; at the first call.
    """
    if fun is None:
        return functools.partial(
            parallelize, cluster=cluster, method=method, num_microbatches=num_microbatches, batch_axes=batch_axes,
            static_argnums=static_argnums, static_argnames=static_argnames, donate_argnums=donate_argnums,
            devices=devices, follow=follow,
        )  # fmt: skip
    return Parallelized(
        fun, cluster=cluster, method=method, num_microbatches=num_microbatches, batch_axes=batch_axes,
        static_argnums=(static_argnums,) if isinstance(static_argnums, int) else static_argnums,
        static_argnames=(static_argnames,) if isinstance(static_argnames, str) else static_argnames,
        donate_argnums=(donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums,
        devices=devices, follow=follow,
    )  # fmt: skip


