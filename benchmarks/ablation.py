"""What each part of the search brings: `python -m benchmarks.ablation --json FILE`.

Every case is planned by the whole search, and once without each of its parts: the neighbours that propose candidates,
and the bounds, shortcuts and corrections of `autopar.planning.parts`. A neighbour that neither proposed anything nor
took a thousandth of the time of the whole search is not left out: there is nothing to save. No plan falls back to a
recipe.

The cases: Alpa's and Megatron-LM's of `benchmarks.planner`, those of `benchmarks.growth` up to 96 layers and 64 hosts,
and four of the models of `benchmarks.models` on the devices of one host, of two and of eight.

For each part: by how much steps are slower without it, at most and in the mean, in how many cases their time changes by
0.1 %, and the CPU time of planning without it over that with it, of all cases of a suite together, in the suite where
that is most. So the cases that take longest to plan count most. A bar counts the parts that bring nothing: without
which no step is slower by 0.1 %, and planning no suite takes longer by 2 %.

It is also counted which part of the solver found the choice of each problem that the whole search gave it
(`autopar.passes.solver.problem.FoundBy`). Problems that begin from a known choice, as of a stage whose like equations
were tied before, are those of "start" where nothing better was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import pathlib
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar import recipes
from autopar.cost_model.hardware import load_preset
from autopar.errors import UserError
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.passes.solver import solve as solver
from autopar.passes.solver.problem import FoundBy
from autopar.planning.garbage import uncollected
from autopar.planning.neighbours import PHASES
from autopar.planning.parts import Part
from autopar.planning.planner import Planner
from autopar.planning.traced import TracedStep
from benchmarks import common, growth, planner, published, verify
from benchmarks.traced import trace

NEIGHBOURS = tuple(neighbour.__name__ for phase in PHASES for neighbour in phase)
PARTS = (*NEIGHBOURS, *Part)
_CLUSTERS = (("dgx-a100", 1), ("p3.16xlarge", 2), ("dgx-h100", 8))
_MOST_LAYERS, _MOST_HOSTS = 96, 64  # of the cases of `growth`
_SLOWER, _LONGER = 1e-3, 0.02  # relative: less is nothing
_IDLE = 1e-3  # of the CPU time of planning


@dataclasses.dataclass(frozen=True)
class Case:
    """A step on a cluster."""

    suite: str
    name: str
    traced: Callable[[], TracedStep]
    cluster: Cluster


@dataclasses.dataclass(frozen=True)
class _Published:
    case: planner.Case

    def __call__(self) -> TracedStep:
        case = self.case
        return trace(*published.train_step(case.spec, case.batch_size, case.num_microbatches, scan=case.scan))


@dataclasses.dataclass(frozen=True)
class _Grown:
    point: growth.Point

    def __call__(self) -> TracedStep:
        return growth.traced(self.point)


@dataclasses.dataclass(frozen=True)
class _OfModel:
    name: str
    num_devices: int

    def __call__(self) -> TracedStep:
        module, config, optimizer = verify.MODELS[self.name]
        config = dataclasses.replace(config, remat=True) if "gpt" in self.name else config
        state = jax.eval_shape(module.make_init(config, optimizer()), jax.random.key(0))
        return trace(
            module.make_train_step(config, optimizer()), state, module.abstract_batch(config, 16 * self.num_devices)
        )


def cases() -> list[Case]:
    """All."""
    found = [
        Case(suite, case.name, _Published(case), case.cluster)
        for suite, all_of in (("alpa", planner.alpa_cases()), ("megatron", planner.megatron_cases()))
        for case in all_of
    ]
    for point in growth.points():
        if point.hosts <= _MOST_HOSTS and (point.series == "hosts" or point.number <= _MOST_LAYERS):
            name = f"{point.series}, {point.number}"
            found.append(Case("growth", name, _Grown(point), load_preset("dgx-a100", num_hosts=point.hosts)))
    for preset, hosts in _CLUSTERS:
        cluster = load_preset(preset, num_hosts=hosts)
        for model in verify.MODELS:
            name = f"{model} on {cluster.num_devices} of {preset}"
            found.append(Case("models", name, _OfModel(model, cluster.num_devices), cluster))
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan of a case, without a part of the search or with all."""

    suite: str
    case: str
    without: str  # "" is the whole search
    seconds: float | None  # of a step; None where nothing was found
    planning: float  # CPU seconds, without tracing
    plan: str
    proposals: Mapping[str, int]  # by neighbour
    neighbours: Mapping[str, float]  # CPU seconds of each, with its candidates
    solutions: Mapping[str, int]  # of the solver, by its part that found them


class _Solutions(logging.Handler):
    """Counts what the solver logs."""

    def __init__(self) -> None:
        super().__init__()
        self.found_by: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        self.found_by[str(record.args[-1])] += 1


def _planned(case: Case, step: TracedStep, without: str) -> Row:
    method: Method = dataclasses.replace(recipes.auto(baselines=False), without=frozenset({without} - {""}))
    log, solutions = logging.getLogger(solver.__name__), _Solutions()
    level = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(solutions)
    seconds, text = None, ""
    search = Planner(step.analysis, case.cluster, method)
    started = time.process_time()
    try:
        with warnings.catch_warnings(action="ignore"), uncollected():  # as users plan
            plan, _ = search.plan()
    except UserError as error:
        text = str(error)
    else:
        meshes = "+".join("x".join(map(str, stage.mesh.shape)) for stage in plan.stages)
        seconds, text = plan.step_time, f"{plan.num_microbatches} microbatches, {plan.schedule}, {meshes}"
    finally:
        log.removeHandler(solutions)
        log.setLevel(level)
    took = time.process_time() - started
    assert search.state is not None
    return Row(
        case.suite, case.name, without, seconds, took, text, dict(search.state.proposals), dict(search.state.seconds),
        dict(solutions.found_by),
    )  # fmt: skip


def ablated(case: Case, parts: Sequence[str] = PARTS) -> list[Row]:
    """By the whole search, and without each of some parts.

    The whole search is first, and once more last: the mean of both is its CPU time.
    """
    common.use_virtual_devices(1)
    step = case.traced()
    _planned(case, step, "")  # pays for what is loaded and compiled once
    whole = _planned(case, step, "")
    idle = {
        name for name in NEIGHBOURS
        if name not in whole.proposals and whole.neighbours.get(name, 0.0) < _IDLE * whole.planning
    }  # fmt: skip
    rows = [_planned(case, step, part) for part in parts if part not in idle]
    again = _planned(case, step, "")
    mean = (whole.planning + again.planning) / 2
    return [dataclasses.replace(whole, planning=mean), *rows]


@dataclasses.dataclass(frozen=True)
class Brought:
    """What a part of the search brings, over all cases that it could change."""

    part: str
    num_cases: int
    num_changed: int  # steps that are slower or quicker without it by 0.1 % or more
    num_lost: int  # cases without a plan, without it
    mean: float  # step time without it over that with it, minus 1
    most: float
    least: float  # below 0: a plan is quicker without it
    planning: float  # CPU time of planning a suite without it over that with it, minus 1: in the suite where it is most

    @property
    def is_nothing(self) -> bool:
        """Whether neither plans nor planning are worse without it."""
        return not self.num_lost and self.most < _SLOWER and self.planning < _LONGER


def brought(rows: Sequence[Row]) -> list[Brought]:
    """By each part of the search."""
    whole = {(row.suite, row.case): row for row in rows if not row.without}
    by_part: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.without:
            by_part[row.without].append(row)
    found = []
    total: dict[str, float] = defaultdict(float)
    for row in whole.values():
        total[row.suite] += row.planning
    for part in PARTS:
        pairs = [(row, whole[row.suite, row.case]) for row in by_part[part]]
        ratios = [a.seconds / b.seconds - 1 for a, b in pairs if a.seconds is not None and b.seconds is not None]
        longer: dict[str, float] = defaultdict(float)
        for a, b in pairs:
            longer[a.suite] += a.planning - b.planning
        lost = sum(a.seconds is None and b.seconds is not None for a, b in pairs)
        found.append(
            Brought(
                part, len(pairs), sum(abs(ratio) >= _SLOWER for ratio in ratios) + lost, lost,
                sum(ratios) / max(1, len(ratios)), max(ratios, default=0.0), min(ratios, default=0.0),
                max((more / total[suite] for suite, more in longer.items()), default=0.0),
            )
        )  # fmt: skip
    return found


def bars(rows: Sequence[Row]) -> dict[str, common.Bar]:
    """Parts that bring nothing, and for each part what it brings."""
    parts = [each for each in brought(rows) if each.num_cases]
    found = {"parts_that_bring_nothing": common.Bar(sum(each.is_nothing for each in parts), 0, len(parts))}
    for each in parts:
        found[f"slower_without_{each.part}"] = common.Bar(each.mean, None, each.num_cases, unit="%")
        found[f"planning_longer_without_{each.part}"] = common.Bar(each.planning, None, each.num_cases, unit="%")
    solutions: Counter[str] = Counter()
    for row in rows:
        if not row.without:
            solutions.update(row.solutions)
    for name in FoundBy:
        share = solutions[name] / max(1, solutions.total())
        found[f"solutions_by_{name}"] = common.Bar(share, None, solutions.total(), unit="%")
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation", description="What each part of the search brings."
    )
    parser.add_argument("--suite", choices=["alpa", "megatron", "growth", "models"], help="the cases of one suite only")
    parser.add_argument("--only", help="cases whose name contains this text")
    parser.add_argument("--without", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="these parts only")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    chosen = [
        case for case in cases()
        if arguments.suite in (None, case.suite) and (arguments.only is None or arguments.only in case.name)
    ]  # fmt: skip
    if not chosen:
        parser.error(f"--suite {arguments.suite}, --only {arguments.only!r}: there is no such case")
    rows: list[Row] = []
    for found in common.each_in_a_process(functools.partial(ablated, parts=arguments.without), chosen):
        whole = found[0]
        text = "nothing fits" if whole.seconds is None else f"{whole.seconds:.4g} s a step"
        print(f"{whole.case}: {text}, planned in {whole.planning:.1f} s; {whole.plan}", flush=True)
        for row in found[1:]:
            if row.seconds is not None and whole.seconds is not None:
                change = f"{row.seconds / whole.seconds - 1:+.2%} a step"
            else:
                change = "no plan either" if row.seconds is whole.seconds else "no plan" if whole.seconds else "a plan"
            print(f"  without {row.without}: {change}, {row.planning - whole.planning:+.1f} s of planning", flush=True)
        rows += found
    for each in brought(rows):
        print(
            f"{each.part}: of {each.num_cases} cases {each.num_changed} change; without it steps are slower by "
            f"{each.mean:.2%} in the mean, {each.least:+.2%} to {each.most:+.2%}, and planning takes "
            f"{each.planning:+.1%}" + (": brings nothing" if each.num_cases and each.is_nothing else "")
        )
    content: list[dict[str, Any]] = [dataclasses.asdict(row) for row in rows]
    common.report(bars(rows), content, arguments.json)


if __name__ == "__main__":
    main()
