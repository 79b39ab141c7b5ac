"""The stages of a parallelized step, as `jax.stages` has them: traced, planned, compiled."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

from autopar.compiling.compiler import build
from autopar.compiling.replanner import checked, plan_that_fits
from autopar.cost_model.hardware import cluster_from_devices, devices_by_host
from autopar.errors import InfeasiblePlanError, PlanError, PlanMismatchError
from autopar.executable import Executable
from autopar.ir.graph import Graph
from autopar.ir.mesh import Cluster
from autopar.ir.method import AUTO, Method
from autopar.ir.plan import Plan
from autopar.ir.verification import Verification
from autopar.planned import Planned, inputs_of, planned_for
from autopar.planning.finisher import Finisher, LeafHome
from autopar.planning.plans_ahead import make_ahead
from autopar.planning.slow_hosts import as_remembered, when_slower
from autopar.planning.traced import TracedStep, TraceOptions, trace_step
from autopar.runtime.buffers import Buffers
from autopar.runtime.launcher import check_joined
from autopar.runtime.preparing import check_devices
from autopar.runtime.processes import Processes, this_job
from autopar.tracing.calls import StepFunction
from autopar.tracing.static_leaf import IsStatic


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Options(TraceOptions):
    """What a user says of a step; see `parallelize`."""

    cluster: Cluster | None = None
    method: Method | Plan = AUTO
    devices: tuple[jax.Device, ...] | None = None

    @property
    def target(self) -> Cluster:
        """What is planned for: the plan's cluster where it has one, the one given, or the devices that there are."""
        if isinstance(self.method, Plan):
            return self.method.cluster
        cluster = self.cluster or cluster_from_devices(self.devices)
        return cluster if when_slower() is None else self._as_remembered(cluster)

    def _as_remembered(self, cluster: Cluster) -> Cluster:
        """With what was found to be slow before the job was started again."""
        job = this_job()
        names = (platform.node(),) if job is None else job.hosts
        return as_remembered(cluster, self.devices or devices_by_host(), names)


@dataclasses.dataclass(frozen=True, eq=False)
class Led:
    """Where an executable has the state of a step already, whose plan others have to follow."""

    leader: Executable
    homes: Mapping[int, LeafHome]  # by argument leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A step traced for arguments of certain shapes, as `step.trace` gives it."""

    step: TracedStep
    options: Options
    is_static: IsStatic
    led: Led | None  # None: nothing lies anywhere yet
    buffers: Buffers

    @property
    def graph(self) -> Graph:
        """What it computes."""
        return self.step.graph

    def plan(
        self, *, cluster: Cluster | None = None, method: str | Method | Plan | None = None, verify: bool | str = False
    ) -> Planned:
        """The plan on a cluster that need not be there.

        A given `cluster` or `method` takes the place of the step's own, whatever has been planned before. With
        `verify`, XLA compiles the plan's programs (as `Planned.verify_with_xla` has them compiled, for the target that
        `verify` names, or else for the chips of the cluster), and where it finds a stage over memory, the search runs
        again with what it sets aside beyond the prediction withheld.

        Raises:
          InfeasiblePlanError: the step fits under no plan, or by XLA's verdict under none of those found.
          MicrobatchError: the batch cannot be cut as it is asked for.
          PlanError, PlanMismatchError: the method is a plan that does not go with the step.
          TargetError: there is nothing to verify with.
        """
        own = cluster is None and method is None
        chosen = self.options.method if method is None else as_method(method)
        searches = cluster is None and isinstance(chosen, Method)
        if cluster is None:
            cluster = chosen.cluster if isinstance(chosen, Plan) else self.options.target
        led = own and self.led is not None
        if led:
            planned = self._following()
        elif verify and isinstance(chosen, Method):
            planned = self._found_to_fit(cluster, chosen, verify)
        else:
            planned = planned_for(self.step, cluster, chosen)
        if verify and (led or isinstance(chosen, Plan)):
            planned = verified(planned, verify)
        planner = (lambda cluster: self.plan(cluster=cluster, method=chosen)) if searches else None
        return dataclasses.replace(planned, compiler=self.compile, planner=planner)

    def fewest_devices(
        self, *, step_time: float, clusters: Sequence[Cluster], method: str | Method | None = None
    ) -> Planned:
        """The plan on the smallest of the clusters on which a step takes at most so many seconds.

        The clusters are tried by their number of devices, such as `[load_preset("dgx-a100", num_hosts=n) for n in (1,
        2, 4)]`.

        Raises:
          InfeasiblePlanError: on none of them; says what the best does, or why nothing fits.
          PlanError: there are no clusters, or no seconds above 0.
        """
        if not clusters or not step_time > 0:
            raise PlanError(
                f"fewest_devices(step_time={step_time!r}, clusters={len(clusters)} of them): give seconds above 0, and "
                "at least one cluster."
            )
        name = self.graph.name
        chosen = self.options.method if method is None else as_method(method)
        best: Plan | None = None
        reason = ""
        for cluster in sorted(clusters, key=lambda c: c.num_devices):
            try:
                planned = planned_for(self.step, cluster, chosen, with_relaxations=False)
            except InfeasiblePlanError as error:
                reason = str(error)
                continue
            if planned.step_time <= step_time:
                return dataclasses.replace(planned, compiler=self.compile)
            if best is None or planned.step_time < best.step_time:
                best = planned
        if best is None:
            raise InfeasiblePlanError(f"{name} fits on none of {len(clusters)} clusters. {reason}")
        raise InfeasiblePlanError(
            f"{name} takes more than step_time={step_time} s on each of {len(clusters)} clusters; at best "
            f"{best.step_time:.4g} s, on {best.cluster.name!r} ({best.cluster.num_devices} devices). Give it more "
            "devices, faster ones, or more time."
        )

    def compile(self, planned: Planned | None = None) -> Executable:
        """Compile a plan for the devices that there are; None: that of `plan()`.

        In a job of several processes all of them have to call this; process 0's plan is what all compile.

        Raises:
          PlanMismatchError: there are fewer devices than it is for, the plan was edited inconsistently, or the
            processes of a job have traced different steps.
        """
        check_joined()
        return self._compile(planned)

    def _compile(self, planned: Planned | None) -> Executable:
        job, led, method = this_job(), self.led, self.options.method
        devices = tuple(self.options.devices or devices_by_host()) if led is None else led.leader._devices
        if led is None or planned is not None:
            cluster = self.options.target if planned is None else planned.cluster
            check_devices(cluster.num_devices, devices)
            if job is not None and job.index == 0 and led is None:
                _say_idle(self.graph.name, devices, cluster.num_devices)
        is_own = led is None and (planned is None or planned.planner is not None)
        if job is not None and led is None:
            planned = self._planned_by_first(job, planned)
        elif planned is None:
            planned = self.plan()
        planned = planned.with_programs()
        lowered = planned.made[1]
        step = lowered.placed.step
        is_free = is_own and self.options.cluster is None and self.options.devices is None
        if is_free and isinstance(method, Method) and (job is None or job.index == 0):
            make_ahead(self.step, method, devices)
        with jax.disable_jit(False):
            worker = build(lowered, planned.schedule, devices, inputs_of(self.step.donated, step.graph), job)
        worker.buffers = self.buffers
        kept = dataclasses.replace(planned, compiler=self.compile)
        if led is None:  # they can be made again, but for those that lie where a leader's state does
            kept = dataclasses.replace(kept, lowered=None, restored=None)
        return Executable(kept, worker, self.graph, step.graph, devices, self.is_static)

    def _following(self) -> Planned:
        """Where the state lies already."""
        started = time.perf_counter()
        assert self.led is not None
        leader, lies = self.led.leader, self.led.homes
        finisher = Finisher(self.step.analysis, leader.plan.cluster)
        wanted = self.options.num_microbatches or (leader.plan.num_microbatches if self.graph.carried else 1)
        limit = self.step.analysis.most_microbatches
        count = max(m for m in range(1, wanted + 1) if limit % m == 0)
        restored = finisher.follow(leader.plan.stages, count, lies)
        seconds = None if isinstance(self.options.method, Plan) else time.perf_counter() - started
        return Planned.of_restored(restored, self.step, self.options.method, seconds)

    def _found_to_fit(self, cluster: Cluster, method: Method, target: bool | str) -> Planned:
        """The plan of the search that XLA finds to fit."""

        def search(tightened: Cluster) -> Plan:
            return self.step.search(tightened, method, with_relaxations=tightened == cluster)[0]

        def priced(plan: Plan) -> Planned:
            finisher = Finisher(self.step.padded(plan.padding).analysis, cluster, method)
            restored = finisher.restore(dataclasses.replace(plan, cluster=cluster))
            return Planned.of_restored(restored, self.step, method, None)

        started = time.perf_counter()
        planned = plan_that_fits(cluster, method.memory_limit, search, priced, _verifier(target))
        return dataclasses.replace(planned, seconds=time.perf_counter() - started)

    def _planned_by_first(self, job: Processes, mine: Planned | None) -> Planned:
        """Process 0 plans, and the others take its plan."""
        graph, planned = self.graph, mine
        versions = {f"the version of {name}": metadata.version(name) for name in ("jax", "jaxlib", "autopar")}
        step = f"of {len(graph.equations)} equations, fingerprint {graph.fingerprint}"
        try:
            job.agree(graph.name, {**versions, **self._said(), "the step": step})
        except PlanMismatchError:
            # Of thousands of leaves only where that says more.
            leaves = zip(graph.input_paths, graph.inputs, strict=True)
            job.agree(graph.name, {path: f"{value.dtype}{list(value.shape)}" for path, value in leaves})
            raise

        def plan() -> str:
            nonlocal planned
            planned = (planned or self.plan()).with_programs()
            return json.dumps([planned.seconds, planned.to_json()])

        seconds, text = json.loads(job.from_first(plan))
        if job.index or planned is None:
            made = Plan.from_json(text)
            restored = Finisher(self.step.padded(made.padding).analysis, made.cluster).restore(made)
            planned = Planned.of_restored(restored, self.step, self.options.method, seconds)
        return planned

    def _said(self) -> dict[str, str]:
        """What all processes of a job have to say alike of the step, beside what they trace of it.

        Of a plan and of a cluster not the figures: each process may have planned, or have measured its host, by itself.
        """
        options = self.options
        method, cluster = options.method, options.cluster
        said = {"the method": repr(method), "num_microbatches": str(options.num_microbatches or "auto")}
        if isinstance(method, Plan):
            meshes = [stage.mesh.shape for stage in method.stages]
            said["the method"] = f"a plan of {method.num_microbatches} microbatches, stages on meshes of {meshes}"
        if cluster is not None:
            kinds = sorted({host.kind.name for host in cluster.hosts})
            said["the cluster"] = f"{cluster.num_devices} devices in {len(cluster.hosts)} hosts, {', '.join(kinds)}"
        if options.devices is not None:
            said["the devices"] = str([device.id for device in options.devices])
        return said


def trace(fun: Callable[..., Any], args: tuple[Any, ...], options: Options) -> Traced:
    """Trace a plain step for arguments of these shapes; what `options` leaves out is as `parallelize` has it.

    Raises:
      TraceError, BatchAxisError: as `Parallelized.trace`.
    """
    function = StepFunction(fun)
    step = trace_step(function, function.call(args, {}), options)
    return Traced(step, options, function.is_static, None, Buffers())


def as_method(method: str | Method | Plan) -> Method | Plan:
    """What `method=` stands for. Raises PlanError where it is none."""
    if isinstance(method, Method | Plan):
        return method
    if method == "auto":
        return AUTO
    raise PlanError(f"method={method!r}: pass 'auto', a recipe of autopar.recipes, or a Plan.")


def verified(planned: Planned, target: bool | str) -> Planned:
    """A plan whose places are fixed, with a note that XLA finds it to fit.

    Raises:
      InfeasiblePlanError: it does not.
      TargetError: as `Planned.verify_with_xla`.
    """
    return checked(planned, _verifier(target))


def _verifier(target: bool | str) -> Callable[[Planned], Verification]:
    """XLA's verdict for a target, or for the chips of a plan's cluster where it is True."""
    chip = target if isinstance(target, str) else None
    return lambda planned: planned.verify_with_xla(chip, show_progress=sys.stderr.isatty())


def _say_idle(name: str, devices: Sequence[jax.Device], wanted: int) -> None:
    """Which of a job's processes a plan leaves out."""
    left_out = {each.process_index for each in devices} - {each.process_index for each in devices[:wanted]}
    if left_out:
        sys.stderr.write(
            f"autopar: {name}: the plan is for {wanted} of {len(devices)} devices; those of process "
            f"{', '.join(map(str, sorted(left_out)))} have no part in it\n"
        )
