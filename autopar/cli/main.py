"""The command line: `autopar plan | report | verify | compare | run | profile | replay TARGET`, `autopar calibrate`.

Each command finds out one answer, which goes to stdout; everything else that is said on the way goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
import jax
from rich.console import Console

from autopar.api import Parallelized, parallelize
from autopar.calibration.calibrator import calibrate as measure
from autopar.calibration.from_profile import cluster_from_profile
from autopar.calibration.timer import made_up_arguments, time_steps
from autopar.cli.arguments import TargetCall, load_call
from autopar.cli.group import Answer, answering, give_answer, main, on_target
from autopar.cli.options import METHOD, OUTPUT, PLAN, PlanSource, chip_option, cluster_option, plan_source
from autopar.cost_model.hardware import devices_by_host
from autopar.cost_model.targets import CPU, load_target, target_of
from autopar.debugging import replay as compute_again
from autopar.errors import ArgumentError, ClusterError
from autopar.executable import Executable
from autopar.ir.cluster_json import cluster_to_json
from autopar.ir.json_file import write_path
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.planned import Planned
from autopar.planning.baselines import usual_methods
from autopar.planning.slow_hosts import when_slower
from autopar.profiling import profile_of
from autopar.reporting.comparison import Comparison
from autopar.reporting.progress import ProgramBar
from autopar.reporting.report import Report
from autopar.reporting.template import check_page
from autopar.runtime.ahead import absent_gpus
from autopar.runtime.launcher import initialize, is_launched, run_script
from autopar.runtime.local_job import WHEN_SLOWER, Elastic, bounds_of, launch, launch_elastic
from autopar.wrapped import WrappedStep

__all__ = ["main"]


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Says so on a terminal while it lasts."""
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


def _load(target: str, cluster: Cluster | None) -> tuple[Parallelized, TargetCall]:
    """The step and its arguments."""
    _wake_cpus_only(cluster)
    call = load_call(target)
    step = call.step
    while isinstance(step, WrappedStep):
        step = step.step
    return step if isinstance(step, Parallelized) else parallelize(step), call


def _wake_cpus_only(cluster: Cluster | None) -> None:
    """Where it is known what to plan for, unless another platform was asked for."""
    if cluster is not None and not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", CPU)


def _planned(target: str, source: PlanSource, verify: bool | str = False) -> Planned:
    cluster = source.known
    step, call = _load(target, cluster)
    with _waiting(f"planning {target}") if not verify else contextlib.nullcontext():  # which has a bar of its own
        return step.plan(*call.args, cluster=cluster, method=source.made or source.method, verify=verify, **call.kwargs)


def _wake_compilers(known: Cluster | None, chip: str | None) -> None:
    """Let JAX start with what the target needs, which is looked for before a long search."""
    chips = {chip} if chip is not None else {target_of(host.kind) for host in known.hosts} if known else set()
    if known is not None and CPU in chips:
        _virtual_devices(known.num_devices)
    _wake_cpus_only(known)
    for each in chips - {CPU}:
        absent_gpus(load_target(each), 1, 1)


def _virtual_devices(number: int) -> None:
    """Let JAX have so many CPU devices, if it has not started, nor been told a number."""
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not told and jax.config.values["jax_num_cpu_devices"] < number:
        with contextlib.suppress(RuntimeError):  # it has started
            jax.config.update("jax_num_cpu_devices", number)


def _devices_at_hand(number: int | None) -> Sequence[jax.Device]:
    """The first so many, or all."""
    if number is not None:
        _virtual_devices(number)
    there = devices_by_host()
    if number is not None and len(there) < number:
        raise ArgumentError(
            f"--devices {number}: there are {len(there)} of platform {there[0].platform}; ask for these."
        )
    return there[:number]


# The commands


@dataclasses.dataclass(frozen=True)
class _EveryRow:
    """A plan or report whose tables are not cut short."""

    answer: Plan | Report

    def __str__(self) -> str:
        return self.answer.to_text(max_rows=None)

    def to_json(self) -> str:
        return self.answer.to_json()


@on_target
@plan_source
@click.option(
    "--verify", "verified", is_flag=True, help="Compile the plan, and plan again where XLA finds it too large."
)
@chip_option
@click.option("-o", "--output", type=OUTPUT, help="Save the plan in this file.")
@click.option("--all", "every_row", is_flag=True, help="Print all rows of the table of the state.")
def plan(
    target: str, source: PlanSource, verified: bool, chip: str | None, output: pathlib.Path | None, every_row: bool
) -> tuple[Answer, bool]:
    """Plan a step, for a cluster that need not be there.

    Prints for each stage its devices, mesh, layers, predicted times and memory, and the sharding of each argument.
    With --json that is the plan file itself.

    \b
      autopar plan model:train --cluster dgx-h100:4 -o plan.json
      autopar plan model:train --method 'megatron(2,4,1,8)'
      autopar plan model:train --cluster dgx-a100 --method 'auto(num_stages=2, time_limit=60)'
      autopar plan model:train --cluster dgx-h100:4 --verify -o plan.json
    """
    if verified:
        _wake_compilers(source.known, chip)
    elif chip is not None:
        raise click.UsageError("--target is what --verify compiles for. Add --verify, or leave out --target.")
    planned = _planned(target, source, (chip or True) if verified else False)
    if output is not None:
        planned.save(output)
        click.echo(f"autopar: the plan is in {output}", err=True)
    return (_EveryRow(planned) if every_row else planned), True


@on_target
@plan_source
@click.option("--html", "page", type=OUTPUT, help="Write one page that needs no network (needs autopar[report]).")
@click.option(
    "--trace", type=OUTPUT, help="Write the timeline for Perfetto (ui.perfetto.dev) and Chrome's about:tracing."
)
@click.option("--against", type=PLAN, help="Say what differs from the plan in this file.")
@click.option("--compare/--no-compare", default=False, help="Plan by every usual recipe, too; takes as long for each.")
@click.option("--verify/--no-verify", default=False, help="Compile every program by XLA, as `autopar verify` does.")
@click.option(
    "--explain", type=click.IntRange(min=0), default=12, show_default=True,
    help="Of so many operators, say what other shardings would cost.",
)  # fmt: skip
@click.option("--all", "every_row", is_flag=True, help="Print all rows of the tables.")
def report(
    target: str, source: PlanSource, page: pathlib.Path | None, trace: pathlib.Path | None, against: Plan | None,
    every_row: bool, verify: bool, compare: bool, explain: int,
) -> tuple[Answer, bool]:  # fmt: skip
    """Say all that is known and predicted of a plan: where time and memory go, and why.

    Step time, throughput, utilisation, memory, the pipeline's timeline, layers, operators with their shardings and what
    others would cost, collectives by link, where each leaf lies, and what was verified.

    \b
      autopar report model:train --cluster dgx-h100:4 --html report.html
      autopar report model:train --plan plan.json --compare --verify --html report.html
      autopar report model:train --plan after.json --against before.json --trace step.trace.json
    """
    if page is not None:
        check_page()  # before the long search
    if verify:
        _wake_compilers(source.known, None)
    planned = _planned(target, source)
    with_bar = sys.stderr.isatty()
    verdict = planned.verify_with_xla(show_progress=with_bar) if verify else None
    answer = planned.report(
        verification=verdict, against=against, show_progress=with_bar, compare=compare, explain=explain
    )
    if page is not None:
        answer.save(page)
        click.echo(f"autopar: the report is in {page}", err=True)
    if trace is not None:
        answer.save_trace(trace)
        click.echo(f"autopar: the timeline is in {trace}", err=True)
    return (_EveryRow(answer) if every_row else answer), verdict is None or verdict.fits


@on_target
@plan_source
@chip_option
@click.option(
    "--most-operations", type=click.IntRange(min=1), default=200_000, show_default=True,
    help="Refuse to compile programs of more operations together.",
)  # fmt: skip
@click.option("-o", "--output", type=OUTPUT, help="Save the verdict in this file, as JSON.")
def verify(
    target: str, source: PlanSource, chip: str | None, most_operations: int, output: pathlib.Path | None
) -> tuple[Answer, bool]:
    """Hold a plan against XLA; exit code 1 if it does not fit.

    Every program of the plan is compiled for the chips of its cluster, none of which has to be there, and XLA's
    figures of memory and collectives are printed beside the predicted ones. NVIDIA's chips need the extra
    autopar[verify].

    \b
      autopar verify model:train --plan plan.json
      autopar verify model:train --cluster dgx-h100:4 --method 'zero(3)'
      autopar verify model:train --cluster dgx-h100 --target cpu
    """
    _wake_compilers(source.known, chip)
    planned = _planned(target, source)
    if chip == CPU:
        _virtual_devices(max(stage.mesh.size for stage in planned.stages))
    verdict = planned.verify_with_xla(chip, show_progress=sys.stderr.isatty(), most_operations=most_operations)
    if output is not None:
        verdict.save(output)
        click.echo(f"autopar: the verdict is in {output}", err=True)
    return verdict, verdict.fits


@on_target
@cluster_option
@click.option("--method", "methods", type=METHOD, multiple=True, help="One to compare; may be given several times.")
@click.option("--plan", "made", type=PLAN, multiple=True, help="A plan file to compare; may be given several times.")
def compare(
    target: str, cluster: Cluster | None, methods: Sequence[Method], made: Sequence[Plan]
) -> tuple[Answer, bool]:
    """Compare methods, or plan files, in the same cost model; exit code 1 if none fits.

    Without --method and --plan: the search beside data parallelism, ZeRO, Megatron's tensor parallelism with and
    without a pipeline, and a pipeline of single devices, each in the number of microbatches that is best for it. What
    each gives is said on stderr as soon as it is planned.

    \b
      autopar compare model:train --cluster dgx-h100:2
      autopar compare model:train --cluster dgx-h100 --method auto --method 'zero(3, 4)'
      autopar compare model:train --plan before.json --plan after.json
    """
    step, call = _load(target, cluster or (made[0].cluster if made else None))
    graph = step.trace(*call.args, **call.kwargs).graph  # what is wrong with the step is so under all methods
    cluster = cluster or (made[0].cluster if made else step.cluster)
    named: list[tuple[str, Cluster, Method | Plan]] = [
        *((method.name, cluster, method) for method in methods or (() if made else usual_methods(cluster))),
        *((f"plan {number}: {each.method}", each.cluster, each) for number, each in enumerate(made, 1)),
    ]
    trials = [
        (name, where, functools.partial(step.plan, *call.args, cluster=where, method=method, **call.kwargs))
        for name, where, method in named
    ]
    with ProgramBar(f"planning {graph.name}", sys.stderr.isatty()) as bar:
        comparison = Comparison.tried(graph.name, trials, bar, bar.say)
    return comparison, comparison.best is not None


class _RunsScripts(click.Command):
    """What follows the name of a script is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = list(args)
        script = next((at for at, text in enumerate(args) if text.endswith(".py")), None)
        return super().parse_args(ctx, args if script is None else [*args[: script + 1], "--", *args[script + 1 :]])


_TYPED = "autopar.typed"


class _Elastic(click.ParamType):  # type: ignore[type-arg]  # generic in the newest only
    """MIN:MAX, both whole numbers."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        bounds = bounds_of(str(value))
        if bounds is None:
            self.fail(f"{value!r} is no MIN:MAX, two numbers of processes such as 1:4.", param, ctx)
        return bounds


@main.command(cls=_RunsScripts)
@click.option(
    "--processes", type=click.IntRange(min=1),
    help="So many processes on this machine. Default: this one, in the job that it was started in (by Slurm, mpirun, "
    "Kubernetes) or alone.",
)  # fmt: skip
@click.option(
    "--devices-per-process", type=click.IntRange(min=1),
    help="GPUs of each process, or virtual devices on CPUs. Default: what JAX finds.",
)  # fmt: skip
@click.option(
    "--elastic", type=_Elastic(), metavar="MIN:MAX",
    help="As many processes on this machine as its GPUs have room for, within these bounds (on CPUs: MAX). When some "
    "are lost, all are started again; the script goes on from its latest checkpoint.",
)  # fmt: skip
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="With --elastic, at most.",
)
@click.option(
    "--heartbeat-timeout", type=click.IntRange(min=2), metavar="SECONDS",
    help="Of a job: after so many without a sign of life a process is lost, which ends the others with exit code 69. "
    "Default: AUTOPAR_HEARTBEAT_TIMEOUT, or 60.",
)  # fmt: skip
@click.option(
    "--replan-when-slower", type=click.FloatRange(min=1, min_open=True), metavar="FACTOR",
    help="When steps take so many times as long as before, say which device or link has become slower. If another plan "
    "is quicker on what there is now, end after a checkpoint with exit code 75, at which schedulers and --elastic "
    "start it again.",
)  # fmt: skip
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@plan_source
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="How many to measure.")
@click.option("--devices", type=click.IntRange(min=1), help="The first so many; on CPUs, so many virtual ones.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")
@click.pass_context
def run(
    context: click.Context, /, target: str, arguments: tuple[str, ...], processes: int | None,
    elastic: tuple[int, int] | None, max_restarts: int, devices_per_process: int | None, heartbeat_timeout: int | None,
    replan_when_slower: float | None, as_json: bool, **options: Any,
) -> int:  # fmt: skip
    """Run a script, or measure steps, on the devices at hand, also as several processes.

    TARGET is a Python script with its ARGUMENTS. It runs as it does alone; of several processes each runs it, for the
    devices that it has. What they print comes with the number of the process before it. When one fails, all end.

    \b
      autopar run train.py --epochs 3
      autopar run --processes 4 --devices-per-process 2 train.py --epochs 3
      autopar run --elastic 2:4 --devices-per-process 2 train.py
      srun autopar run train.py
      mpirun -n 4 -x JAX_COORDINATOR_ADDRESS=node1:1234 autopar run train.py

    Or TARGET is a function as for the other commands: measured seconds beside predicted ones. All arguments are made
    up from their shapes: floating point numbers are ones, all others zeros, random keys those of zero bits. The time
    is the median over the steps, after one that warms up, and none begins before the last one has ended.

    \b
      autopar run model:train --steps 20
      autopar run model:train --devices 8 --plan plan.json
      autopar run --processes 2 model:train --plan plan.json
    """
    is_script = target.endswith(".py")
    if arguments and not is_script:
        raise ArgumentError(f"TARGET {target!r} takes no further arguments ({' '.join(arguments)}): a script does.")
    if elastic is not None and (processes is not None or not is_script):
        raise ArgumentError("--elastic MIN:MAX is for a script, and takes the place of --processes.")
    if replan_when_slower is not None:
        if not is_script:
            raise ArgumentError("--replan-when-slower is for a script, which saves checkpoints.")
        os.environ[WHEN_SLOWER] = str(replan_when_slower)
    if (processes is not None or elastic is not None) and not is_launched():
        command = [sys.executable, "-m", "autopar", "run", *context.meta[_TYPED]]
        if elastic is not None:
            bounds = Elastic(*elastic, max_restarts, replans=when_slower() is not None)
            return launch_elastic(command, bounds, devices_per_process)
        return launch(command, processes or 1, devices_per_process, bare=as_json)
    joined = initialize(devices_per_process, heartbeat_timeout)
    if is_script:
        run_script(target, arguments)
        return 0
    return give_answer(functools.partial(_timed, target, joined=joined, **options), as_json)


def _timed(target: str, source: PlanSource, steps: int, devices: int | None, joined: bool) -> tuple[Answer, bool]:
    if joined and devices is not None:
        raise ArgumentError(f"--devices {devices}: the processes of a job take all; say --devices-per-process.")
    with _waiting(f"running {target}"):
        return time_steps(_compiled(target, source, devices), steps), True


def _compiled(target: str, source: PlanSource, devices: int | None) -> Executable:
    """The step for the devices at hand, or so many of them."""
    if devices is not None:
        _virtual_devices(devices)
    step, call = _load(target, None)
    step = step.with_options(
        cluster=source.cluster, method=source.made or source.method, devices=_devices_at_hand(devices)
    )
    return step.compile(*call.args, **call.kwargs)


@on_target
@plan_source
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="How many to measure.")
@click.option("--devices", type=click.IntRange(min=1), help="The first so many; on CPUs, so many virtual ones.")
@click.option("--kernels/--no-kernels", default=False, help="What kernels take by kind of operator, by JAX's profiler.")
@click.option("--html", "page", type=OUTPUT, help="Write one page that needs no network (needs autopar[report]).")
@click.option("--trace", type=OUTPUT, help="Write measured and predicted timelines to this file, for Perfetto.")
def profile(
    target: str, source: PlanSource, steps: int, devices: int | None, kernels: bool, page: pathlib.Path | None,
    trace: pathlib.Path | None,
) -> tuple[Answer, bool]:  # fmt: skip
    """Run steps on the devices at hand, and say what programs, transfers and idle time take beside the prediction.

    Arguments are made up as `autopar run TARGET` does. In a script: `executable.profile(state, batch)`.

    \b
      autopar profile model:train --kernels
      autopar profile model:train --devices 8 --method 'gpipe(2,4)' --html profile.html
    """
    if page is not None:
        check_page()  # before the steps
    with _waiting(f"profiling {target}"):
        executable = _compiled(target, source, devices)
        args, kwargs = made_up_arguments(executable)
        answer = profile_of(executable, args, kwargs, steps, kernels=kernels)
    if page is not None:
        answer.save(page)
    if trace is not None:
        answer.save_trace(trace)
    return answer, True


@on_target
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=pathlib.Path))
def replay(target: str, folder: pathlib.Path) -> tuple[Answer, bool]:
    """Compute a call again whose results were not finite; exit code 1 if they are not on one device either.

    FOLDER is what `autopar.debug(step, save_to=FOLDER)` has saved the call's arguments in. The step runs operator by
    operator, so that the line is named in which a NaN or an infinity arises. The latest such call is taken.

    \b
      autopar replay model:train bad_steps
      JAX_PLATFORMS=cpu autopar replay model:train bad_steps
    """
    step, call = _load(target, None)
    with _waiting(f"computing {target}"):
        answer = compute_again(step, folder, call.args, call.kwargs)
    return answer, not answer.found


@answering
@click.option("-o", "--output", type=OUTPUT, required=True, help="Write the cluster to this file.")
@click.option(
    "--seconds", type=float, default=300.0, show_default=True,
    help="How long it may take; the most telling probes come first.",
)  # fmt: skip
@click.option("--devices", type=click.IntRange(min=1), help="The first so many; on CPUs, so many virtual ones.")
@click.option(
    "--from-profile", "profiled", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="Measure nothing; take the speeds of a step that was profiled.",
)  # fmt: skip
def calibrate(
    output: pathlib.Path, seconds: float, devices: int | None, profiled: pathlib.Path | None
) -> tuple[Answer, bool]:
    """Measure this machine, for plans whose times can be trusted on it.

    Products and convolutions over sizes and types, memory, launches, collectives over groups of devices, and a few
    train steps, in a cluster file for --cluster; prints how well the cost model fits them. One host is measured: for
    several that are alike, edit "num_hosts" in the file. Nothing else should run on the machine meanwhile.

    \b
      autopar calibrate -o mine.json
      autopar calibrate --devices 8 --seconds 120 -o mine.json
      autopar plan model:train --cluster mine.json

    \b
      autopar profile model:train --kernels --json > profile.json
      autopar calibrate --from-profile profile.json -o mine.json
    """
    if profiled is not None:
        if devices is not None:
            raise ArgumentError(f"--devices {devices}: --from-profile measures nothing.")
        found = cluster_from_profile(profiled)
        write_path(output, cluster_to_json(found.cluster), "cluster file", ClusterError)
        click.echo(f"autopar: the cluster is in {output}", err=True)
        return found, True
    there = _devices_at_hand(devices)
    calibration = measure(there, seconds=seconds, show_progress=sys.stderr.isatty())
    calibration.save(output)
    click.echo(f"autopar: the cluster is in {output}", err=True)
    return calibration, True
