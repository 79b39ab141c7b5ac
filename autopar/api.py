"""`parallelize`: a plain JAX step in, a planned, sharded, pipelined one out. Mirrors `jax.jit` and its stages."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, overload

import jax

from autopar.batches import Batches
from autopar.calls import Call, StepFunction
from autopar.compiler import build
from autopar.cost_model.hardware import cluster_from_devices, devices_by_host
from autopar.errors import InfeasiblePlanError, PlanError, PlanMismatchError, TraceError
from autopar.executable import Executable, Steady, steady_calls
from autopar.finisher import Finisher, LeafHome
from autopar.ir.graph import Graph, Value
from autopar.ir.hint import Hint
from autopar.ir.in_place import renew, returning_changed
from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.pieces import Pieces
from autopar.ir.placed_examples import PlacedExamples
from autopar.ir.plan import Plan
from autopar.ir.static_leaf import IsStatic, flatten_arrays, unflatten_arrays
from autopar.ir.why import Why
from autopar.launcher import check_joined
from autopar.origin import StepOrigin, inputs_of, origin_of, planned_for
from autopar.passes.lower import LoweredStep
from autopar.replanner import checked, plan_that_fits
from autopar.runtime.buffers import Buffers
from autopar.runtime.executable import check_devices
from autopar.runtime.feeding import DataShard
from autopar.runtime.placement import absent, is_here
from autopar.runtime.processes import Processes, compiler_options, this_job
from autopar.state import argument_like, gather, homes_of, pieces_of, uncommitted
from autopar.traced import Traced, TraceOptions, trace_step


class Parallelized:
    """A step function that is planned at its first call and then runs on all devices."""

    __name__: str

    def __init__(
        self, fun: Callable[..., Any], *, cluster: Cluster | None, method: str | Method | Plan,
        num_microbatches: str | int, batch_axes: Any, static_argnums: Sequence[int] | int | None,
        static_argnames: Sequence[str], static_leaves: IsStatic,
        donate_argnums: str | Sequence[int] | int | None, devices: Sequence[jax.Device] | None,
        follow: Parallelized | None, hints: Mapping[str, Any], narrow_sums: bool,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, fun)
        self._cluster, self._devices, self._follow = cluster, devices, follow
        self._method = _method(method)
        number = _microbatches(num_microbatches)
        self._function = StepFunction(
            fun, static_argnums=static_argnums, static_argnames=static_argnames, static_leaves=static_leaves,
            donate_argnums=donate_argnums,
        )  # fmt: skip
        self._name = self._function.name
        pinned = {pattern: Hint.of(spec, f"hints[{pattern!r}]") for pattern, spec in hints.items()}
        self._options = TraceOptions(number, batch_axes, pinned, narrow_sums)
        self._executables: dict[Any, Executable] = {}
        self._traced: dict[Any, Traced] = {}
        self._buffers = Buffers()
        self._steady: Steady | None = None  # for a call with the state that the last one left
        self._shown: tuple[Any, tuple[Plan, LoweredStep]] | None = None  # by `plan`, for a call that may follow

    @property
    def cluster(self) -> Cluster:
        """What it is planned for: the plan's cluster where it has one, its own, or the devices there are."""
        if isinstance(self._method, Plan):
            return self._method.cluster
        return self._cluster or cluster_from_devices(self._devices)

    def with_options(
        self, *, cluster: Cluster | None = None, method: str | Method | Plan | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> Parallelized:  # fmt: skip
        """The same step, not planned yet, with these of its options replaced; None keeps its own."""
        other = copy.copy(self)
        other._cluster = self._cluster if cluster is None else cluster
        other._method = self._method if method is None else _method(method)
        other._devices = self._devices if devices is None else devices
        other._executables, other._traced, other._shown, other._steady = {}, {}, None, None
        return other

    # Ahead-of-time stages.

    def trace(self, *args: Any, **kwargs: Any) -> Graph:
        """The step as a graph; arguments may be `jax.ShapeDtypeStruct`s.

        Raises:
          TraceError: an argument or a result is no array, or the step has side effects.
          BatchAxisError: the examples are not found among the arguments.
        """
        return self._trace(self._function.call(args, kwargs)).graph

    def plan(
        self, *args: Any, cluster: Cluster | None = None, method: str | Method | Plan | None = None,
        verify: bool | str = False, **kwargs: Any,
    ) -> Plan:  # fmt: skip
        """The plan for arguments of these shapes, on a cluster that need not be there.

        A given `cluster` or `method` takes the place of the step's own, whatever has been planned before. With
        `verify`, XLA compiles the plan's programs (as `Plan.verify_with_xla` has them compiled, for the target that
        `verify` names, or else for the chips of the cluster), and where it finds a stage over memory, the search runs
        again with what it sets aside beyond the prediction withheld.

        Raises:
          InfeasiblePlanError: the step fits under no plan, or by XLA's verdict under none of those found.
          TargetError: there is nothing to verify with.
        """
        call = self._function.call(args, kwargs)
        traced = self._trace(call)
        own = cluster is None and method is None
        if own and call.key in self._executables:
            plan = self._executables[call.key].plan
            return checked(plan, verify) if verify else plan
        chosen = self._method if method is None else _method(method)
        if cluster is None:
            cluster = chosen.cluster if isinstance(chosen, Plan) else self.cluster
        led = own and self._leader() is not None
        started = time.perf_counter()
        if led:
            found = self._planned(call, traced)
        elif verify and isinstance(chosen, Method):
            found = _found_to_fit(traced, cluster, chosen, verify)
        else:
            found = planned_for(traced, cluster, chosen)
        plan, lowered = found
        if plan.origin is None:
            plan = dataclasses.replace(plan, origin=origin_of(traced, chosen, _since(started, chosen)))
        if verify and (led or isinstance(chosen, Plan)):
            plan = checked(plan, verify)
        if own:
            self._shown = (call.key, (plan, lowered))
        return plan

    def why(
        self, *args: Any, where: str = "", most: int = 3, plan: Plan | None = None, **kwargs: Any
    ) -> tuple[Why, ...]:
        """Why operators are cut as they are: what each of their other strategies costs, and would cost their stage.

        Of the operators with `where` in their name or in their line of code (`"model.py:55"`, `"dot_general"`) those
        of most work, at most `most`. `plan`: one that was made for these shapes; default: the step's own. Each
        strategy of each operator is a problem to solve: this takes seconds.

        Raises:
          PlanError: there is no such operator, or `plan` is for something else.
        """
        call = self._function.call(args, kwargs)
        plan = self.plan(*args, **kwargs) if plan is None else plan
        origin = plan.origin
        if not isinstance(origin, StepOrigin):  # it was read from a file
            origin = origin_of(self._trace(call), plan, None)
        return origin.why(plan, where, most)

    def fewest_devices(
        self, *args: Any, step_time: float, clusters: Sequence[Cluster], method: str | Method | None = None,
        **kwargs: Any,
    ) -> Plan:  # fmt: skip
        """The plan on the smallest of the clusters on which a step takes at most so many seconds.

        The clusters are tried by their number of devices, such as `[load_preset("dgx-a100", num_hosts=n) for n in (1,
        2, 4)]`.

        Raises:
          InfeasiblePlanError: on none of them; says what the best does, or why nothing fits.
        """
        if not clusters or not step_time > 0:
            raise PlanError(
                f"fewest_devices(step_time={step_time!r}, clusters={len(clusters)} of them): give seconds above 0, and "
                "at least one cluster."
            )
        call = self._function.call(args, kwargs)
        traced = self._trace(call)
        chosen = self._method if method is None else _method(method)
        best: Plan | None = None
        reason = ""
        for cluster in sorted(clusters, key=lambda c: c.num_devices):
            try:
                plan, _ = planned_for(traced, cluster, chosen, with_relaxations=False)
            except InfeasiblePlanError as error:
                reason = str(error)
                continue
            if plan.step_time <= step_time:
                return plan
            if best is None or plan.step_time < best.step_time:
                best = plan
        if best is None:
            raise InfeasiblePlanError(f"{self._name} fits on none of {len(clusters)} clusters. {reason}")
        raise InfeasiblePlanError(
            f"{self._name} takes more than step_time={step_time} s on each of {len(clusters)} clusters; at best "
            f"{best.step_time:.4g} s, on {best.cluster.name!r} ({best.cluster.num_devices} devices). Give it more "
            "devices, faster ones, or more time."
        )

    def compile(self, *args: Any, **kwargs: Any) -> Executable:
        """Plan and compile for arguments of these shapes (arrays or `jax.ShapeDtypeStruct`s)."""
        return self._executable(self._function.call(args, kwargs))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method, like a function."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        steady = self._steady
        if steady is not None:
            leaves = steady.serves((args, kwargs))
            if leaves is not None:
                return steady(leaves)
        config: Any = jax.config
        if config.jax_disable_jit:  # as under jit: the plain function, whose values can be looked at
            if any(isinstance(leaf, PlacedExamples) for leaf in jax.tree.leaves((args, kwargs))):
                raise TraceError(
                    f"{self._name} was called under jax.disable_jit with a batch of its batches(), which lies on the "
                    "devices in parts: call it with what that iterator is given."
                )
            return renew(returning_changed(self._function.fun)(*gather(args), **gather(kwargs)), args, kwargs)
        call = self._function.call(args, kwargs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in call.leaves):
            raise TraceError(
                f"{self._name} was called under a transformation of JAX (jit, grad, vmap, scan, ..), but a "
                "parallelized step runs on devices of its own, outside of them. Call it from plain Python, or call "
                "what it was made of, its __wrapped__, inside."
            )
        static = dict(call.positional)
        dynamic = [arg for i, arg in enumerate(args) if i not in static]
        executable = self._executable(call)
        following = None if static or call.named else steady_calls(executable, call.leaves, (args, kwargs))
        result = executable._run(call.leaves)
        self._steady = None if following is None else following(result)
        return renew(result, dynamic, kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """The state that `init_fn(*args)` makes, each leaf born where the plan keeps it.

        The step must have been compiled (or called) before, so that there is a plan. XLA partitions `init_fn` by
        the shardings of its results, stage by stage; no device holds more than its own pieces and their temporaries.

        Raises:
          PlanError: there is no plan yet, or the result of `init_fn` is no argument of the step.
        """
        executable = self._leader_for("init")
        tree: Any = None

        def make_leaves(*xs: Any) -> list[Any]:
            nonlocal tree
            leaves, tree = flatten_arrays(init_fn(*xs), self._function.is_static)
            return leaves

        leaves = jax.eval_shape(make_leaves, *args)
        first, structure = argument_like(executable._graph, tree, leaves)
        homes = [executable.home_of(first + i) for i in range(len(leaves))]
        cuts = {i: home.cut for i, home in enumerate(homes) if home.cut is not None}
        shardings = {(i, k): sharding for i, home in enumerate(homes) for k, sharding in enumerate(home.shardings)}
        by_mesh: dict[Any, list[tuple[int, int]]] = {}
        for piece, sharding in shardings.items():
            by_mesh.setdefault(getattr(sharding, "mesh", None), []).append(piece)
        placed: dict[tuple[int, int], Any] = {}
        for mesh, pieces in by_mesh.items():
            if mesh is not None and not is_here(mesh):
                apart = [(i, k) for i, k in pieces if i not in cuts and leaves[i].ndim == 0]
                for i, k in set(pieces) - set(apart):
                    placed[i, k] = absent(dataclasses.replace(homes[i], weak_type=leaves[i].weak_type).arrays[k])
                mesh, pieces = None, apart  # numbers are known to all processes: they are made here, too
            if not pieces:
                continue

            def make(*xs: Any, pieces: list[tuple[int, int]] = pieces) -> list[Any]:
                state = make_leaves(*xs)
                return [pieces_of(state[i], cuts[i])[k] if i in cuts else state[i] for i, k in pieces]

            wanted = None if mesh is None else [shardings[piece] for piece in pieces]
            # Ended here: a step's first program must not meet it on virtual CPU devices (see the worker).
            options = None if mesh is None else compiler_options(mesh.devices.flat)
            program = jax.jit(make, out_shardings=wanted, compiler_options=options)
            made = jax.block_until_ready(program(*jax.tree.map(uncommitted, args)))
            placed.update(zip(pieces, made, strict=True))
        return unflatten_arrays(
            structure,
            [
                Pieces(tuple(placed[i, k] for k in range(len(cuts[i].windows))), cuts[i]) if i in cuts else placed[i, 0]
                for i in range(len(leaves))
            ],
        )

    def batches(self, batches: Iterable[Any]) -> Batches:
        """What an iterator gives, placed on the devices one step ahead: `for batch in step.batches(loader)`.

        Of any kind: NumPy arrays, Grain's, tf.data's (`as_numpy_iterator()`), PyTorch's. It gives the argument of
        examples, or a tuple of them where there are several: whole batches, the same on all processes, or this
        process's part of each, `data_shard`. The step must have been compiled before.

        Raises:
          PlanError: there is no plan yet.
          BatchAxisError: examples are in an argument with other leaves.
        """
        return Batches(self._leader_for("batches", own=True), batches)

    @property
    def data_shard(self) -> DataShard:
        """Which part of each batch this process has to read; see `Executable.data_shard`."""
        return self._leader_for("data_shard", own=True).data_shard

    # Within.

    def _trace(self, call: Call) -> Traced:
        if call.key not in self._traced:

            def state_of(graph: Graph) -> set[Value]:
                leader = self._leader()
                return set() if leader is None else {graph.inputs[i] for i in _homes(leader, graph, call.leaves)}

            self._traced[call.key] = trace_step(self._function, call, self._options, state_of)
            if self._options.batch_axes == "auto":
                _say_batch(self._traced[call.key])
        return self._traced[call.key]

    def _leader(self) -> Executable | None:
        """The executable whose state placement this call must respect."""
        if self._follow is None:
            return next(iter(self._executables.values()), None)
        leader = self._follow._leader()
        if leader is None:
            raise PlanError(
                f"follow: {self._follow._name} has no plan yet, so that {self._name} cannot know where its state lies. "
                f"Call or compile {self._follow._name} first."
            )
        return leader

    def _leader_for(self, what: str, own: bool = False) -> Executable:
        """The same, or the step's own, for what needs one. Raises PlanError where there is none."""
        leader = next(iter(self._executables.values()), None) if own else self._leader()
        if leader is None:
            raise PlanError(
                f"{what}: {self._name} has no plan yet. Call {self._name}.compile(state, batch) first; shapes do, as "
                "jax.eval_shape gives them."
            )
        return leader

    def _planned(self, call: Call, traced: Traced) -> tuple[Plan, LoweredStep]:
        """Where the state lies already; the first time wherever is best."""
        leader = self._leader()
        if leader is None:
            return planned_for(traced, self.cluster, self._method)
        lies = _homes(leader, traced.graph, call.leaves)
        finisher = Finisher(traced.analysis, leader.plan.cluster)
        limit = traced.analysis.most_microbatches
        wanted = self._options.num_microbatches or (leader.plan.num_microbatches if traced.graph.carried else 1)
        count = max(m for m in range(1, wanted + 1) if limit % m == 0)
        return finisher.follow(leader.plan.stages, count, lies)

    def _executable(self, call: Call) -> Executable:
        found = self._executables.get(call.key)
        if found is not None:
            return found
        job = this_job()
        if job is None:
            check_joined()
        traced = self._trace(call)
        leader = self._leader()
        devices = tuple(self._devices or devices_by_host()) if leader is None else leader._devices
        if leader is None:
            check_devices(self.cluster.num_devices, devices)
            if job is not None and job.index == 0:
                _say_idle(self._name, devices, self.cluster.num_devices)
        shown, self._shown = self._shown, None  # state may lie otherwise afterwards
        started = time.perf_counter()
        mine = shown[1] if shown is not None and shown[0] == call.key else None
        if job is None or leader is not None:
            plan, lowered = mine or self._planned(call, traced)
        else:
            plan, lowered = self._planned_by_first(job, call, traced, mine)
        if plan.origin is None:
            plan = dataclasses.replace(plan, origin=origin_of(traced, self._method, _since(started, self._method)))
        step = lowered.placed.step
        donated = inputs_of(traced.donated, step.graph)
        with jax.disable_jit(False):
            runtime = build(lowered, plan.schedule, devices, donated, job)
        runtime.buffers = self._buffers
        self._executables[call.key] = Executable(
            plan, runtime, traced.graph, step.graph, devices, self._function.is_static
        )
        return self._executables[call.key]

    def _said(self) -> dict[str, str]:
        """What all processes of a job have to say alike of the step, beside what they trace of it.

        Of a plan and of a cluster not the figures: each process may have planned, or have measured its host, by itself.
        """
        method, cluster = self._method, self._cluster
        found = {"the method": repr(method), "num_microbatches": str(self._options.num_microbatches or "auto")}
        if isinstance(method, Plan):
            meshes = [stage.mesh.shape for stage in method.stages]
            found["the method"] = f"a plan of {method.num_microbatches} microbatches, stages on meshes of {meshes}"
        if cluster is not None:
            kinds = sorted({host.kind.name for host in cluster.hosts})
            found["the cluster"] = f"{cluster.num_devices} devices in {len(cluster.hosts)} hosts, {', '.join(kinds)}"
        if self._devices is not None:
            found["the devices"] = str([device.id for device in self._devices])
        return found

    def _planned_by_first(
        self, job: Processes, call: Call, traced: Traced, mine: tuple[Plan, LoweredStep] | None
    ) -> tuple[Plan, LoweredStep]:
        """Process 0 plans, and the others take its plan."""
        versions = {f"the version of {name}": metadata.version(name) for name in ("jax", "jaxlib", "autopar")}
        graph = traced.graph
        step = f"of {len(graph.equations)} equations, fingerprint {graph.fingerprint}"
        try:
            job.agree(self._name, {**versions, **self._said(), "the step": step})
        except PlanMismatchError:
            # Of thousands of leaves only where that says more.
            leaves = zip(graph.input_paths, graph.inputs, strict=True)
            job.agree(self._name, {path: f"{value.dtype}{list(value.shape)}" for path, value in leaves})
            raise
        found = mine

        def plan() -> str:
            nonlocal found
            found = found or self._planned(call, traced)
            return found[0].to_json()

        text = job.from_first(plan)
        if job.index or found is None:
            made = Plan.from_json(text)
            restored = Finisher(traced.analysis, made.cluster).restore(made)
            found = restored.plan, restored.lowered
        return found


def _say_idle(name: str, devices: Sequence[jax.Device], wanted: int) -> None:
    """Which of a job's processes a plan leaves out."""
    left_out = {each.process_index for each in devices} - {each.process_index for each in devices[:wanted]}
    if left_out:
        sys.stderr.write(
            f"autopar: {name}: the plan is for {wanted} of {len(devices)} devices; those of process "
            f"{', '.join(map(str, sorted(left_out)))} have no part in it\n"
        )


def _say_batch(traced: Traced) -> None:
    """Which arguments were found to hold the examples, once in a job: what was guessed users should see."""
    job, graph = this_job(), traced.graph
    if job is None or job.index == 0:
        where = ", ".join(path for v, path in zip(graph.inputs, graph.input_paths, strict=True) if v in graph.examples)
        sys.stderr.write(f"autopar: {graph.name}: batch of {traced.analysis.batch_size} along axis 0 of {where}\n")


def _found_to_fit(traced: Traced, cluster: Cluster, method: Method, target: bool | str) -> tuple[Plan, LoweredStep]:
    """The plan of the search that XLA finds to fit."""

    def search(tightened: Cluster) -> Plan:
        return traced.search(tightened, method, with_relaxations=tightened == cluster)[0]

    def priced(plan: Plan) -> tuple[Plan, LoweredStep]:
        plan, lowered, _ = Finisher(traced.analysis, cluster, method).restore(
            dataclasses.replace(plan, cluster=cluster)
        )
        return dataclasses.replace(plan, origin=origin_of(traced, method, None)), lowered

    return plan_that_fits(cluster, method.memory_limit, search, priced, target)


def _since(started: float, method: Method | Plan) -> float | None:
    return None if isinstance(method, Plan) else time.perf_counter() - started


def _homes(leader: Executable, graph: Graph, leaves: Sequence[Any]) -> dict[int, LeafHome]:
    return homes_of(leader.plan, leader._graph, leader._devices, graph, leaves)


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


@overload
def parallelize(
    fun: Callable[..., Any],
    *,
    cluster: Cluster | None = ...,
    method: str | Method | Plan = ...,
    num_microbatches: str | int = ...,
    batch_axes: Any = ...,
    static_argnums: Sequence[int] | int | None = ...,
    static_argnames: Sequence[str] | str = ...,
    static_leaves: IsStatic = ...,
    donate_argnums: str | Sequence[int] | int | None = ...,
    devices: Sequence[jax.Device] | None = ...,
    follow: Parallelized | None = ...,
    hints: Mapping[str, Any] | None = ...,
    narrow_sums: bool = ...,
) -> Parallelized: ...
@overload
def parallelize(
    fun: None = None,
    *,
    cluster: Cluster | None = ...,
    method: str | Method | Plan = ...,
    num_microbatches: str | int = ...,
    batch_axes: Any = ...,
    static_argnums: Sequence[int] | int | None = ...,
    static_argnames: Sequence[str] | str = ...,
    static_leaves: IsStatic = ...,
    donate_argnums: str | Sequence[int] | int | None = ...,
    devices: Sequence[jax.Device] | None = ...,
    follow: Parallelized | None = ...,
    hints: Mapping[str, Any] | None = ...,
    narrow_sums: bool = ...,
) -> Callable[[Callable[..., Any]], Parallelized]: ...
def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | None = None,
    method: str | Method | Plan = "auto",
    num_microbatches: str | int = "auto",
    batch_axes: Any = "auto",
    static_argnums: Sequence[int] | int | None = (),
    static_argnames: Sequence[str] | str = (),
    static_leaves: IsStatic = callable,
    donate_argnums: str | Sequence[int] | int | None = "auto",
    devices: Sequence[jax.Device] | None = None,
    follow: Parallelized | None = None,
    hints: Mapping[str, Any] | None = None,
    narrow_sums: bool = False,
) -> Parallelized | Callable[[Callable[..., Any]], Parallelized]:
    """Run a plain JAX step on all devices there are, planned for the least step time.

    Args:
      fun: a pure function of pytrees of arrays, e.g. `train_step(state, batch) -> (state, metrics)`.
      cluster: what to plan for; default: the devices there are. Device i of the cluster runs on `devices[i]`.
      method: "auto", a recipe of `autopar.recipes`, or a `Plan` made before.
      num_microbatches: "auto" or a number that divides the batch.
      batch_axes: "auto" or a pytree prefix of the positional arguments with an int or None per leaf, as `in_axes`
        of `jax.vmap`; without the static arguments. Keyword arguments hold examples only under "auto". None: the step
        makes its own examples.
      static_argnums, static_argnames: as in `jax.jit`.
      static_leaves: which leaves of arguments and results are part of the structure, as in `equinox.filter_jit`; asked
        of leaves that are no arrays. Default: functions. Equinox modules with flags need
        `lambda leaf: not eqx.is_array(leaf)`.
      donate_argnums: "auto" donates the state (the leaves that come out again, never examples); () or None keeps it.
      devices: default `jax.devices()`, those of a host next to one another.
      follow: another parallelized function, called or compiled before, whose state this one takes where it lies.
      hints: how arguments have to be cut, a spec of `autopar.hint` by the path of a leaf, such as
        `{"state['params']['w*']": (None, -1)}`; '*' stands for any text, '?' for any character.
      narrow_sums: numbers of 16 bits are added up over microbatches and devices in 16 bits, not in 32 as otherwise:
        half the memory and traffic of their gradients, which become less exact.

    Raises:
      TraceError, BatchAxisError, MicrobatchError, InfeasiblePlanError, ..: see `autopar.errors`; at the first call.
    """
    if fun is None:
        return functools.partial(
            parallelize, cluster=cluster, method=method, num_microbatches=num_microbatches, batch_axes=batch_axes,
            static_argnums=static_argnums, static_argnames=static_argnames, static_leaves=static_leaves,
            donate_argnums=donate_argnums, devices=devices, follow=follow, hints=hints, narrow_sums=narrow_sums,
        )  # fmt: skip
    return Parallelized(
        fun, cluster=cluster, method=method, num_microbatches=num_microbatches, batch_axes=batch_axes,
        static_argnums=static_argnums,
        static_argnames=(static_argnames,) if isinstance(static_argnames, str) else static_argnames,
        static_leaves=static_leaves, donate_argnums=donate_argnums,
        devices=devices, follow=follow, hints=hints or {}, narrow_sums=narrow_sums,
    )  # fmt: skip
