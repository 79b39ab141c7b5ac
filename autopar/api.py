"""`parallelize`: a plain JAX step in, a planned, sharded, pipelined one out. Mirrors `jax.jit` and its stages."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from autopar.batches import Batches
from autopar.errors import PlanError, TraceError
from autopar.executable import Executable, HasExecutable, Steady, steady_calls
from autopar.ir.graph import Graph, Value
from autopar.ir.hint import Hint
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.ir.placed_examples import PlacedExamples
from autopar.ir.plan import Plan
from autopar.ir.why import Why
from autopar.planned import Planned
from autopar.planning.finisher import LeafHome
from autopar.planning.traced import TracedStep, trace_step
from autopar.runtime.buffers import Buffers
from autopar.runtime.feeding import DataShard
from autopar.runtime.launcher import check_joined
from autopar.runtime.processes import this_job
from autopar.stages import Led, Options, Traced, as_method, verified
from autopar.state import gather, homes_of
from autopar.tracing.calls import Call, StepFunction
from autopar.tracing.in_place import renew, returning_changed
from autopar.tracing.static_leaf import IsStatic


class Parallelized(HasExecutable):
    """A step function that is planned at its first call and then runs on all devices."""

    __name__: str

    def __init__(self, function: StepFunction, options: Options, follow: Parallelized | None) -> None:
        functools.update_wrapper(self, function.fun)
        self._function, self._options, self._follow = function, options, follow
        self._name = function.name
        self._executables: dict[Any, Executable] = {}
        self._traced: dict[Any, TracedStep] = {}
        self._buffers = Buffers()
        self.last_executable: Executable | None = None  # that was called
        self._steady: Steady | None = None  # for a call with the state that the last one left
        self._shown: tuple[Any, Planned] | None = None  # by `plan`, for a call that may follow

    @property
    def cluster(self) -> Cluster:
        """What it is planned for: the plan's cluster where it has one, its own, or the devices there are."""
        return self._options.target

    def with_options(
        self, *, cluster: Cluster | None = None, method: str | Method | Plan | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> Parallelized:  # fmt: skip
        """The same step, not planned yet, with these of its options replaced; None keeps its own."""
        own = self._options
        options = dataclasses.replace(
            own,
            cluster=own.cluster if cluster is None else cluster,
            method=own.method if method is None else as_method(method),
            devices=own.devices if devices is None else tuple(devices),
        )
        return Parallelized(self._function, options, self._follow)

    # Ahead-of-time stages.

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The step traced; arguments may be `jax.ShapeDtypeStruct`s.

        Raises:
          TraceError: an argument or a result is no array, or the step has side effects.
          BatchAxisError: the examples are not found among the arguments.
        """
        return self._trace(self._function.call(args, kwargs))

    def plan(
        self, *args: Any, cluster: Cluster | None = None, method: str | Method | Plan | None = None,
        verify: bool | str = False, **kwargs: Any,
    ) -> Planned:  # fmt: skip
        """The plan for arguments of these shapes, on a cluster that need not be there: see `Traced.plan`."""
        call = self._function.call(args, kwargs)
        own = cluster is None and method is None
        if own and call.key in self._executables:
            planned = self._executables[call.key].plan
            return verified(planned, verify) if verify else planned
        planned = self._trace(call).plan(cluster=cluster, method=method, verify=verify)
        if own:
            self._shown = (call.key, planned)
        return planned

    def why(
        self, *args: Any, where: str = "", most: int = 3, plan: Plan | None = None, **kwargs: Any
    ) -> tuple[Why, ...]:
        """Why operators are cut as they are: see `Planned.why`.

        `plan`: one that was made for these shapes; default: the step's own. A `Planned` is asked about its own step.

        Raises:
          PlanError: there is no such operator.
          PlanMismatchError: `plan` is for something else.
        """
        if plan is None:
            planned = self.plan(*args, **kwargs)
        elif isinstance(plan, Planned):
            planned = plan
        else:
            planned = Planned.of(plan, self.trace(*args, **kwargs).step, plan)
        return planned.why(where, most)

    def fewest_devices(
        self, *args: Any, step_time: float, clusters: Sequence[Cluster], method: str | Method | None = None,
        **kwargs: Any,
    ) -> Planned:  # fmt: skip
        """The plan on the smallest of the clusters on which a step takes at most `step_time` seconds.

        See `Traced.fewest_devices`.
        """
        return self.trace(*args, **kwargs).fewest_devices(step_time=step_time, clusters=clusters, method=method)

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
        executable = self.last_executable = self._executable(call)
        following = None if static or call.named else steady_calls(executable, call.leaves, (args, kwargs))
        result = executable._run(call.leaves)
        self._steady = None if following is None else following(result)
        return renew(result, dynamic, kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """The state that `init_fn(*args)` makes, each leaf born where the plan keeps it: see `Executable.init`.

        The step must have been compiled (or called) before, so that there is a plan.

        Raises:
          PlanError: there is no plan yet, or the result of `init_fn` is no argument of the step.
        """
        # Of a step that it follows, which may have other static leaves.
        own = dataclasses.replace(self.executable_for("init"), _is_static=self._function.is_static)
        return own.init(init_fn, *args)

    def batches(self, batches: Iterable[Any]) -> Batches:
        """What an iterator gives, placed on the devices one step ahead: `for batch in step.batches(loader)`.

        Of any kind: NumPy arrays, Grain's, tf.data's (`as_numpy_iterator()`), PyTorch's. It gives the argument of
        examples, or a tuple of them where there are several: whole batches, the same on all processes, or this
        process's part of each, `data_shard`. The step must have been compiled before.

        Raises:
          PlanError: there is no plan yet.
          BatchAxisError: examples are in an argument with other leaves.
        """
        return Batches(self.executable_for("batches", own=True), batches)

    @property
    def data_shard(self) -> DataShard:
        """Which part of each batch this process has to read; see `Executable.data_shard`."""
        return self.executable_for("data_shard", own=True).data_shard

    # Within.

    def _trace(self, call: Call) -> Traced:
        leader = self._leader()
        if call.key not in self._traced:

            def state_of(graph: Graph) -> set[Value]:
                return set() if leader is None else {graph.inputs[i] for i in _homes(leader, graph, call.leaves)}

            self._traced[call.key] = trace_step(self._function, call, self._options, state_of)
            if self._options.batch_axes == "auto":
                _say_batch(self._traced[call.key])
        step = self._traced[call.key]
        led = None if leader is None else Led(leader, _homes(leader, step.graph, call.leaves))
        return Traced(step, self._options, self._function.is_static, led, self._buffers)

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

    def executable_for(self, what: str, own: bool = False) -> Executable:
        """The first that was compiled: of the step that this one follows, unless it must be its `own`.

        Raises:
          PlanError: there is none.
        """
        leader = next(iter(self._executables.values()), None) if own else self._leader()
        if leader is None:
            raise PlanError(
                f"{what}: {self._name} has no plan yet. Call {self._name}.compile(state, batch) first; shapes do, as "
                "jax.eval_shape gives them."
            )
        return leader

    def _executable(self, call: Call) -> Executable:
        executable = self._executables.get(call.key)
        if executable is None:
            check_joined()
            traced = self._trace(call)
            shown, self._shown = self._shown, None  # state may lie otherwise afterwards
            planned = shown[1] if shown is not None and shown[0] == call.key else None
            executable = self._executables[call.key] = traced._compile(planned)
        return executable


def _say_batch(step: TracedStep) -> None:
    """Which arguments were found to hold the examples, once in a job: what was guessed users should see."""
    job, graph = this_job(), step.graph
    if job is None or job.index == 0:
        where = ", ".join(path for v, path in zip(graph.inputs, graph.input_paths, strict=True) if v in graph.examples)
        sys.stderr.write(f"autopar: {graph.name}: batch of {step.analysis.batch_size} along axis 0 of {where}\n")


def _homes(leader: Executable, graph: Graph, leaves: Sequence[Any]) -> dict[int, LeafHome]:
    return homes_of(leader.plan, leader.graph, leader._devices, graph, leaves)


def _reduces_own_dtype(dtype: Any) -> bool:
    if dtype is None:
        return True
    try:
        if jnp.dtype(dtype) == jnp.float32:
            return False
    except TypeError:
        pass
    raise PlanError(f"reduce_dtype={dtype!r}: pass float32, or None for the numbers' own dtype.")


def _microbatches(number: str | int) -> int | None:
    if number == "auto":
        return None
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PlanError(f"num_microbatches={number!r}: pass 'auto' or an integer of 1 or more.")
    return number


class Given(TypedDict, total=False):
    """What `parallelize` takes beside the function."""

    cluster: Cluster | None
    method: str | Method | Plan
    num_microbatches: str | int
    batch_axes: Any
    static_argnums: Sequence[int] | int | None
    static_argnames: Sequence[str] | str
    static_leaves: IsStatic
    donate_argnums: str | Sequence[int] | int | None
    devices: Sequence[jax.Device] | None
    follow: Parallelized | None
    hints: Mapping[str, Any] | None
    reduce_dtype: Any


@overload
def parallelize(fun: Callable[..., Any], **options: Unpack[Given]) -> Parallelized: ...
@overload
def parallelize(fun: None = None, **options: Unpack[Given]) -> Callable[[Callable[..., Any]], Parallelized]: ...
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
    reduce_dtype: Any = jnp.float32,
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
      reduce_dtype: in which numbers of 16 bits are added up over microbatches and devices. Float32, or None: their own,
        which halves the memory and traffic of their gradients, and makes these less exact.

    Raises:
      TraceError, BatchAxisError, MicrobatchError, InfeasiblePlanError, ..: see `autopar.errors`; at the first call.
    """
    options = Options(
        num_microbatches=_microbatches(num_microbatches), batch_axes=batch_axes,
        hints={pattern: Hint.of(spec, f"hints[{pattern!r}]") for pattern, spec in (hints or {}).items()},
        reduces_own_dtype=_reduces_own_dtype(reduce_dtype), cluster=cluster, method=as_method(method),
        devices=None if devices is None else tuple(devices),
    )  # fmt: skip

    def made(fun: Callable[..., Any]) -> Parallelized:
        function = StepFunction(
            fun, static_argnums=static_argnums,
            static_argnames=(static_argnames,) if isinstance(static_argnames, str) else static_argnames,
            static_leaves=static_leaves, donate_argnums=donate_argnums,
        )  # fmt: skip
        return Parallelized(function, options, follow)

    return made if fun is None else made(fun)
