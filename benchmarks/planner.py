"""The planner at the scale of the papers: `python -m benchmarks.planner --suite SUITE --json FILE`.

alpa: every case of Alpa's weak scaling (OSDI'22) on 1 to 64 V100s. The model is traced with abstract shapes and planned
with no recipe to fall back to; then the plans that Alpa, Megatron-LM and DeepSpeed published for it are priced in the
same cost model, with the compilers and the 16-bit sums of then, each with the shardings that the solver finds under
what it fixes, and all usual recipes with as many microbatches as is best for each: data parallelism, ZeRO, Megatron's
degrees, of the quickest of its pipelines GPipe's schedule and interleaved stages. Degrees that cannot be the best of
the others are given up early: within one stage those that take longer than another, pipelines those that take longer
than another pipeline, or so much longer than the best of all that interleaved stages would not make up for it. Bars:
our plan takes no longer than the best of the others; so does the one that users get, which may be a recipe's; every
published plan fits, since it ran; GPT-39B on 64 devices is planned in 60 s and 4 GiB, tracing included, and all cases
together in 10 minutes, one after the other. Where the published plan was measured, our time over the measured one is
printed beside that of the published plan.

megatron: the configurations of Megatron-LM (SC'21), 1.7B on 32 to 1008B on 3,072 A100s, beside the published degrees of
tensor, pipeline and data parallelism, in the published microbatch size or the best of a few, and the same recipes.
Bars: ours takes no longer; the largest is planned in 5 minutes.

h100: what was published of H100s, GPT of 1.7B on 48 to 462B on 6,144 and Llama 3 of 8B on 8 to 405B on 16,384, in 8,192
to 131,072 tokens, beside the published degrees (all in 16 bits, with the microbatches and interleaved stages that are
not published free to be the best of a few), and the same recipes. Bars: ours takes no longer; each is planned in 2
minutes and 4 GiB.

presets: models of Alpa's weak scaling on 1, 8 and 64 devices of each preset beside the same recipes. Bars: the same.

growth: planning time against the number of layers, scanned and unrolled, and of devices. Bars: the exponents.

public: planning time of code as the users of public frameworks write it (`python -m benchmarks.public.planned`).

The planning time of a case is wall time in a fresh process, once JAX is imported; of growth, CPU time. With `--keep
DIR` a run goes on where another one of the same sources was ended early: each case is kept as soon as it is finished.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar import recipes
from autopar.cost_model.hardware import load_preset, preset_names
from autopar.errors import UserError
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method, StageMethod
from autopar.ir.plan import Plan
from autopar.planning.candidate import Incumbent
from autopar.planning.garbage import uncollected
from autopar.planning.planner import Planner
from autopar.planning.traced import TracedStep
from benchmarks import common, growth, published
from benchmarks.sources import Sources
from benchmarks.traced import trace

DATA = pathlib.Path(__file__).parent / "data"
# What the specifications leave to Alpa's scripts.
COMMON: Mapping[str, Mapping[str, Any]] = {
    "gpt": {"dtype": "fp16", "optimizer": "adamw", "master_copy": "fp32", "remat": True},
    "moe": {"dtype": "fp16", "optimizer": "adafactor", "master_copy": "fp32", "remat": True, "mlp_factor": 8},
    "wresnet": {"optimizer": "sgd_momentum", "remat": True, "num_classes": 1024},
}
LARGEST = {"gpt 39B on 64": ("gpt_39B", 60.0), "megatron 1008.0B on 3072": ("megatron_1008B", 300.0)}  # seconds
# Relative: pipelines slower than the best of all by more are none that interleaving makes the best. Two rounds halve
# the bubble, which is at most as long as the rest of the step, there being no fewer microbatches than stages.
WORSE = 1 / 3
MISJUDGED = 0.1  # relative: what the stage search estimates to be slower by more is given up
DEPTHS = 4  # of Megatron's pipelines that are tried for each degree of tensor parallelism
OURS = ("ours", "with recipes")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a cluster, and what others did with it: their published plans, and the seconds that these took."""

    name: str
    spec: Mapping[str, Any]
    batch_size: int
    cluster: Cluster
    num_microbatches: int  # of the published plan; the parts of the batch whose norms are taken alone, if any
    rivals: Mapping[str, Method]
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by a prefix of the rival's name
    seconds_of_planning: float | None = None  # at most, if each case has its limit

    @property
    def scan(self) -> bool:
        """Whether the model is a scan over its layers."""
        return bool(self.spec["family"] in ("gpt", "decoder"))


def alpa_cases() -> list[Case]:
    """The weak scaling of the three families."""
    data = json.loads((DATA / "alpa_plans.json").read_text())
    return [
        _alpa_case(data, family, int(devices), found)
        for family in COMMON
        for devices, (found,) in data["found_solutions"][family].items()
    ]


def _alpa_case(data: Mapping[str, Any], family: str, devices: int, found: Mapping[str, Any]) -> Case:
    sizes = found["model_config"]
    size = next(name for name, spec in data["model_specs"][family].items() if spec == sizes)
    m, batch_size = found["num_micro_batches"], found["batch_size"]
    arguments = found["parallel_args"]
    plan = {
        **arguments, "kind": "stages", "options": {"force_batch_dim_to_mesh_dim": None},
        "submesh_options": arguments["submesh_autosharding_option_dicts"],
    }  # fmt: skip
    rivals = {"alpa": published.method_of(plan, m)}
    best = data["megatron_best_gpt"].get(str(devices)) if family == "gpt" else None
    if best is not None and best[0] == batch_size and best[1] == size:
        _, _, dp, tp, pp, number = best
        rivals["megatron"] = recipes.megatron(dp, tp, pp, number, sequence_parallel=False)
    best = data["deepspeed_best_moe"].get(str(devices)) if family == "moe" else None
    if best is not None and best[0] == batch_size and best[1] == size:
        _, _, _, dp, tp, number, experts = best
        plan = {"kind": "dp_ep_tp_pp", "dp": dp, "ep": experts, "tp": tp, "pp": 1}
        rivals["deepspeed"] = published.method_of(plan, number)
    hosts = max(1, devices // 8)
    return Case(
        name=f"{family} {size} on {devices}",
        spec={"family": family, "alpa": False, **sizes, **COMMON[family]},
        batch_size=batch_size,
        cluster=load_preset(published.ALPAS, num_hosts=hosts, devices_per_host=devices // hosts),
        num_microbatches=m,
        rivals={name: method for name, method in rivals.items() if method is not None},
        measured={
            name: row.seconds
            for row in published.read(DATA / "alpa_osdi22_measured.json")
            if row.case == f"e2e {family} {devices}" and row.batch_size == batch_size and row.seconds is not None
            and sizes.items() <= row.spec.items() and not row.doubt
            for name in ("alpa", "megatron") if row.method in ("alpa.auto", "megatron") and row.method.startswith(name)
        },
    )  # fmt: skip


def megatron_cases() -> list[Case]:
    """The configurations of Megatron-LM's weak scaling."""
    with (DATA / "megatron_sc21_configurations.csv").open(newline="") as file:
        return [_megatron_case(row) for row in csv.DictReader(file)]


def _megatron_case(row: Mapping[str, str]) -> Case:
    tp, pp, gpus, batch_size = (int(row[name]) for name in ("TP", "PP", "gpus", "global_batch"))
    dp, layers = gpus // (tp * pp), int(row["layers"])
    sizes = [int(row["microbatch"])] if row["microbatch"] else published.MICROBATCH_SIZES
    numbers = [batch_size // (dp * size) for size in sizes if batch_size % (dp * size) == 0]
    # Interleaved with as few stages a device as the layers allow, where there is a pipeline.
    chunks = next((n for n in (2, 3) if pp > 1 and layers % (pp * n) == 0), 1)
    return Case(
        name=f"megatron {row['params_B']}B on {gpus}",
        spec=published.megatron_spec(row),
        batch_size=batch_size,
        cluster=load_preset(published.MEGATRONS, num_hosts=gpus // 8),
        num_microbatches=numbers[0],
        rivals={
            f"megatron in {m}" + (f", {n} stages a device" if n > 1 else ""): recipes.megatron(
                dp, tp, pp, m, n, sequence_parallel=False
            )
            for m in numbers
            for n in dict.fromkeys((1, chunks if m % pp == 0 else 1))
        },
        measured={
            row.family: row.seconds
            for row in published.read(DATA / "megatron_sc21_a100.csv")
            if row.cluster.num_devices == gpus
            and row.batch_size == batch_size
            and row.seconds is not None
            and row.spec["num_layers"] == layers
        },
    )


def h100_cases() -> list[Case]:
    """What was published of H100s, here all in 16 bits: in how many microbatches of how many stages a model ran."""
    found: dict[str, Case] = {}
    for row in published.read(DATA / "h100_published.csv"):
        system, model = row.case.split(" ", 1)
        name = f"{model.rsplit(' ', 2)[0]}, {row.spec['seq_len']} tokens, on {row.cluster.num_devices}"
        if not row.batch_size or name in found:
            continue
        ran = {f"{system} in {way.num_microbatches} of {way.method.num_stages}": way.method for way in row.ways}
        measured = {system: row.seconds} if row.seconds is not None and not row.doubt else {}
        m = row.ways[0].num_microbatches if row.ways else 1
        found[name] = Case(name, row.spec, row.batch_size, row.cluster, m, ran, measured, 120.0)
    return [*found.values()]


def preset_cases() -> list[Case]:
    """Models of Alpa's weak scaling on other clusters: those for 1, 8 and 16 V100s on 1, 8 and 64 devices of each."""
    alpa = {(case.spec["family"], case.cluster.num_devices): case for case in alpa_cases()}
    return [
        dataclasses.replace(
            case, name=f"{case.name.split(' on ')[0]} on {devices} of {name}", rivals={}, measured={},
            cluster=load_preset(name, num_hosts=-(-devices // 8), devices_per_host=min(8, devices)),
        )
        for name in preset_names()
        if name not in ("cpu", published.ALPAS, published.MEGATRONS)
        for devices, size in {1: 1, 8: 8, 64: 16}.items()
        for family in COMMON
        for case in [alpa[family, size]]
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A plan of a case; no time where nothing fits."""

    seconds: float | None
    memory: float | None  # bytes on the device that needs most
    tflops: float | None  # per device, of all that is computed
    planning: float  # seconds, tracing included
    peak_rss: float  # bytes of this process so far
    plan: str  # layers, mesh and microbatches, or why there is none


def _traced(case: Case, num_microbatches: int | None) -> TracedStep:
    """A case's step. Those who ran these summed in 16 bits what has 16."""
    m = num_microbatches or case.num_microbatches
    return trace(*published.train_step(case.spec, case.batch_size, m, scan=case.scan), reduces_own_dtype=True)


def planned(case: Case, method: Method) -> Outcome:
    """Trace and plan a case."""

    def plan() -> Plan:
        return _traced(case, method.num_microbatches).search(case.cluster, method, with_relaxations=False)[0]

    return _outcome(plan)


def _outcome(search: Callable[[], Plan]) -> Outcome:
    started = time.perf_counter()
    try:
        with warnings.catch_warnings(action="ignore"):
            plan = search()
    except UserError as error:  # nothing fits, or the batch cannot be cut so
        took, told = time.perf_counter() - started, f"{type(error).__name__}: {error}"
        return Outcome(None, None, None, took, common.most_memory(), told)
    seconds = time.perf_counter() - started
    each = (f"{s.layers[1] - s.layers[0]} on {'x'.join(map(str, s.mesh.shape))}" for s in plan.stages)
    alike = ((text, len(list(group))) for text, group in itertools.groupby(each))
    stages = " + ".join(text if number == 1 else f"{number} times {text}" for text, number in alike)
    tflops = plan.flops / plan.step_time / plan.num_devices / 1e12
    text = f"{plan.num_microbatches} microbatches, {plan.schedule}, layers {stages}"
    return Outcome(plan.step_time, plan.peak_memory, tflops, seconds, common.most_memory(), text)


def ours(case: Case) -> dict[str, Outcome]:
    """Our plan."""
    common.use_virtual_devices(1)
    return {"ours": planned(case, recipes.auto(baselines=False))}


def within_one_stage() -> dict[str, Method]:
    """Recipes with their microbatches free, and the solver's choice."""
    return {
        "data parallel": recipes.data_parallel(None),
        **{f"ZeRO-{stage}": recipes.zero(stage, None) for stage in (1, 2, 3)},
        "within one stage": recipes.intra_op_only(),
    }


def megatron_degrees(cluster: Cluster, state: int) -> dict[str, Method]:
    """Megatron's degrees of parallelism, with their microbatches free.

    For each degree of tensor parallelism within a host, the shallowest pipelines that divide so many bytes of state
    enough.
    """
    found = {}
    devices, width = cluster.num_devices, cluster.hosts[0].num_devices
    for tensor in (n for n in range(1, width + 1) if width % n == 0):
        deep = (n for n in range(1, devices // tensor + 1) if devices % (tensor * n) == 0)
        enough = (n for n in deep if tensor * n > 1 and state < tensor * n * cluster.hosts[0].kind.memory)
        for pipeline in itertools.islice(enough, DEPTHS):
            degrees = devices // (tensor * pipeline), tensor, pipeline
            found[f"megatron {'x'.join(map(str, degrees))}"] = recipes.megatron(*degrees)
    return found


def rivals(case: Case) -> dict[str, Outcome]:
    """The others' plans, and the one that users get, which may be a recipe's."""
    common.use_virtual_devices(1)
    _, state, _ = published.train_step(case.spec, case.batch_size, case.num_microbatches, scan=case.scan)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    others = {**case.rivals, **within_one_stage()}
    found = {name: planned(case, method) for name, method in others.items()}
    found |= by_degrees(case, megatron_degrees(case.cluster, nbytes), others, found)
    return {"with recipes": planned(case, recipes.auto()), **found}


def by_degrees(
    case: Case, degrees: Mapping[str, Method], others: Mapping[str, Method], outcomes: Mapping[str, Outcome]
) -> dict[str, Outcome]:
    """Plans of those degrees that may be the quickest of all; then of the quickest pipeline, GPipe's and interleaved.

    Args:
      case: what is planned.
      degrees: of parallelism, by name.
      others: other methods, by name.
      outcomes: what is known of those.
    """
    step = _traced(case, None)
    seconds = {name: outcome.seconds for name, outcome in outcomes.items() if outcome.seconds is not None}
    found: dict[str, Outcome] = {}

    def look(name: str, method: Method, below: float) -> None:
        # What one planner knows is forgotten before the next: for the largest cases it is gigabytes.
        found[name] = _outcome(lambda: _quicker(Planner(step.analysis, case.cluster, method), below))
        if (mine := found[name].seconds) is not None:
            seconds[name] = mine
        elif below < math.inf:
            found[name] = dataclasses.replace(found[name], plan=f"nothing fits in less than {below:.4g} s a step")

    methods = {**others, **degrees}
    # Of equal meshes, one stage each.
    pipelines = [name for name, method in methods.items() if method.mesh_shape and method.num_stages not in (None, 1)]
    for name, method in degrees.items():
        below = min(seconds.values(), default=math.inf)
        if name in pipelines:
            below = min((1 + WORSE) * below, *(seconds.get(pipeline, math.inf) for pipeline in pipelines))
        look(name, method, below)
    for name in sorted((name for name in pipelines if name in seconds), key=seconds.__getitem__)[:1]:
        method = methods[name]
        assert method.num_stages is not None and method.mesh_shape is not None
        dealt_out = (StageMethod(1, method.mesh_shape),) * (2 * method.num_stages)
        interleaved = dataclasses.replace(method, stages=dealt_out, mesh_shape=None, schedule="interleaved")
        look(f"{name}, GPipe", dataclasses.replace(method, schedule="gpipe"), min(seconds.values()))
        look(f"{name}, interleaved", interleaved, min(seconds.values()))
    return found


def folder_of(keep: pathlib.Path) -> pathlib.Path:
    """Where the cases are kept that these sources find on such a machine."""
    key = json.dumps([Sources().fingerprint("benchmarks.planner"), common.machine()])
    return keep / hashlib.sha256(key.encode()).hexdigest()[:16]


def kept(case: Case, work: Callable[[Case], Mapping[str, Outcome]], folder: pathlib.Path | None) -> dict[str, Outcome]:
    """What `work` finds of a case, or what a file in the folder says that it has found before."""
    if folder is None:
        return dict(work(case))
    path = folder / f"{case.name}, {work.__name__}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({name: dataclasses.asdict(outcome) for name, outcome in work(case).items()}))
        part.rename(path)
    return {name: Outcome(**outcome) for name, outcome in json.loads(path.read_text()).items()}


@uncollected()
def _quicker(planner: Planner, below: float) -> Plan:
    """The plan, if it takes less than `below` seconds a step. Raises InfeasiblePlanError where there is none."""
    estimate = (1 + MISJUDGED) * below
    planner.evaluator.best = Incumbent(below, estimate, estimate)
    return planner.plan()[0]


def margin(found: Mapping[str, Outcome], name: str = "ours") -> float:
    """Our seconds over those of the best of the others; 0 where only ours fits, inf where it does not."""
    times = {name: math.inf if outcome.seconds is None else outcome.seconds for name, outcome in found.items()}
    mine = times[name]
    best = min((time for other, time in times.items() if other not in OURS), default=math.inf)
    return math.inf if math.isinf(mine) else mine / best


def bars(rows: Sequence[tuple[Case, Mapping[str, Outcome]]]) -> dict[str, common.Bar]:
    """Of the cases that were run."""
    ours = {case.name: found["ours"] for case, found in rows}
    result = {
        "time_over_the_best_other": common.Bar(max(margin(found) for _, found in rows), 1.0, len(rows)),
        "time_over_the_best_other_with_recipes": common.Bar(
            max(margin(found, "with recipes") for _, found in rows), 1.0, len(rows)
        ),
        "published_plans_that_do_not_fit": common.Bar(
            sum(all(found[name].seconds is None for name in names) for case, found in rows for names in _plans(case)),
            0,
            len(rows),
        ),
    }
    limited = [(case.seconds_of_planning, ours[case.name]) for case, _ in rows if case.seconds_of_planning is not None]
    if limited:
        share = max(found.planning / limit for limit, found in limited)
        result["planning_seconds_over_the_limit_of_each"] = common.Bar(share, 1.0, len(limited))
        most = max(found.peak_rss for _, found in limited) / 2**30
        result["peak_rss_of_each"] = common.Bar(most, 4.0, len(limited))
    alpa = [case.name for case, _ in rows if "alpa" in case.rivals]
    if alpa:
        result["planning_seconds"] = common.Bar(sum(ours[name].planning for name in alpa), 600.0)
    for name, (short, limit) in LARGEST.items():
        if name in ours:
            result[f"planning_seconds_{short}"] = common.Bar(ours[name].planning, limit)
            result[f"peak_rss_{short}"] = common.Bar(ours[name].peak_rss / 2**30, 4.0)
    return result


def _plans(case: Case) -> list[list[str]]:
    """Names of rivals by who published them: one of those of an author is the plan that ran."""
    by_author: dict[str, list[str]] = {}
    for name in case.rivals:
        by_author.setdefault(name.split()[0], []).append(name)
    return list(by_author.values())


def beside_measured(case: Case, found: Mapping[str, Outcome]) -> dict[str, float]:
    """Predicted seconds of ours and of the published plan over what that plan was measured to take."""
    ratios = {}
    for author, measured in case.measured.items():
        times = [found[name].seconds for name in case.rivals if name.split()[0] == author]
        known = [seconds for seconds in times if seconds is not None]
        ours = found["ours"].seconds
        if known:
            ratios[f"{author} predicted / measured"] = min(known) / measured
        if ours is not None:
            ratios[f"ours / {author} measured"] = ours / measured
    return ratios


def _line(name: str, found: Outcome) -> str:
    if found.seconds is None or found.memory is None or found.tflops is None:
        return f"  {name}: none in {found.planning:.1f} s: {found.plan[:120]}"
    return (
        f"  {name}: {found.seconds:.4g} s a step, {found.tflops:.1f} TFLOP/s a device, {found.memory / 2**30:.2f} GiB; "
        f"{found.plan}; planned in {found.planning:.1f} s, {found.peak_rss / 2**30:.2f} GiB"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner", description="The planner at the scale of the papers."
    )
    names = ["alpa", "megatron", "h100", "presets", "growth", "public"]
    parser.add_argument("--suite", choices=names, required=True, help="which cases")
    parser.add_argument("--only", help="cases whose name contains this text")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    parser.add_argument(
        "--keep", type=pathlib.Path, metavar="DIR", help="keep cases there, and take known ones from it"
    )
    arguments = parser.parse_args()

    if arguments.keep is not None and arguments.suite in ("growth", "public"):
        parser.error(f"--keep: the suite {arguments.suite} takes minutes, and cannot go on where it was ended")
    if arguments.suite == "growth":
        growth.run(arguments.only, arguments.json)
        return
    if arguments.suite == "public":
        # A benchmark of its own: it needs frameworks and writes reports, on which the other suites do not depend.
        module = "benchmarks.public.planned"
        told = [f"--{name}={value}" for name in ("only", "json") if (value := getattr(arguments, name)) is not None]
        sys.exit(subprocess.run([sys.executable, "-m", module, *told], check=False).returncode)
    suites = {"alpa": alpa_cases, "megatron": megatron_cases, "h100": h100_cases, "presets": preset_cases}
    cases = [case for case in suites[arguments.suite]() if arguments.only is None or arguments.only in case.name]
    if not cases:
        parser.error(f"--only {arguments.only!r}: no case has this in its name")
    folder = None if arguments.keep is None else folder_of(arguments.keep)
    mine_of, others_of = (functools.partial(kept, work=work, folder=folder) for work in (ours, rivals))
    found_by_us = list(common.each_in_a_process(mine_of, cases))  # alone: their time counts
    print(f"{len(cases)} cases planned in {sum(mine['ours'].planning for mine in found_by_us):.0f} s", flush=True)
    found_by_others = common.each_in_a_process(others_of, cases, common.num_cores())
    rows = []
    for case, mine, others in zip(cases, found_by_us, found_by_others, strict=True):
        found = {**mine, **others}
        print(f"{case.name}: {margin(found):.3f} of the best other's time")
        print(*(_line(name, outcome) for name, outcome in found.items()), sep="\n")
        print(*(f"  {name}: {ratio:.2f}" for name, ratio in beside_measured(case, found).items()), sep="\n", flush=True)
        rows.append((case, found))
    content = [
        {
            "case": case.name,
            "measured": beside_measured(case, found),
            **{name: dataclasses.asdict(outcome) for name, outcome in found.items()},
        }
        for case, found in rows
    ]
    common.report(bars(rows), content, arguments.json)


if __name__ == "__main__":
    main()
