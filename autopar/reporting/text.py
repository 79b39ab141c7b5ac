"""A report as text: the answer, then a table for each question."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from autopar.ir.plan_text import plan_parts
from autopar.ir.units import bytes_text, count_text, metric_text, ranges_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopar.reporting.diff import Change, PlanDiff
    from autopar.reporting.record import Details, ReportRecord

NEEDS_STEP = (
    "This plan was read from a file. Where the time goes, memory over time, layers, operators and links need its step: "
    "report on step.plan(state, batch, method=plan), which is the same plan."
)
PREDICTED = (
    "Nothing here was verified: all times and bytes are predictions. plan.verify_with_xla() holds memory, and what is "
    "sent, against XLA."
)
PART_TITLES = {
    "compute": "compute",
    "collectives": "collectives",
    "resharding": "resharding",
    "launches": "launches",
    "waiting": "waiting for transfers",
    "bubble": "bubble",
}


def report_parts(report: ReportRecord, max_rows: int | None) -> list[RenderableType]:
    """What a report prints, with at most so many rows a table."""
    plan, details = report.plan, report.details
    parts: list[RenderableType] = [Text("\n".join(answer_lines(report))), Text()]
    if details is None:
        parts += [Text(NEEDS_STEP), Text()]
    else:
        parts += [_splits(report, details), Text()]
        parts += [each for flag in report.xla_flags for each in (Text(f"beside kernels: by XLA's flag {flag}"), Text())]
    parts += [_memory(report), Text()]
    if details is not None:
        parts += [_layers(details), Text(), *_operators(details, max_rows), Text(), *_links(details, max_rows), Text()]
    parts += [*plan_parts(plan, max_rows), Text()]
    if report.comparison is not None:
        parts += [report.comparison, Text()]
    if report.diff is not None:
        parts += [*_diff(report.diff, max_rows), Text()]
    parts.append(Text(PREDICTED) if report.verification is None else report.verification)
    return parts


def answer_lines(report: ReportRecord) -> list[str]:
    """The answer first."""
    plan, fullest = report.plan, report.fullest
    rate = f"{rate_text(report.examples_per_second)} examples/s"
    if report.tokens_per_second is not None:
        rate += f", {rate_text(report.tokens_per_second)} tokens/s"
    lines = [
        f"Report on {plan.function} by method {plan.method} on {plan.cluster.name} "
        f"({count_text(plan.cluster.num_devices, 'device')})",
        f"step time    {seconds_text(plan.step_time)}, {rate}",
        f"memory       {bytes_text(fullest.total)} of {bytes_text(fullest.capacity)} on the fullest devices "
        f"({ranges_text(fullest.devices)}), {bytes_text(fullest.reserve)} kept free besides",
    ]
    if report.utilisation is not None and report.details is not None:
        flops = metric_text(report.details.model_flops, "FLOP")
        lines.append(f"utilisation  {report.utilisation:.1%} of the peak by the {flops} of the model's own products")
    searched = "" if report.details is None or report.details.planning_seconds is None else (
        f"searched for {report.details.planning_seconds:.1f} s, "
    )  # fmt: skip
    lines.append(
        f"search       {searched}gap {plan.gap:.2%}, lower bound {seconds_text(plan.lower_bound)} of the stages' sum"
    )
    return lines


def rate_text(number: float) -> str:
    """Four digits, in thousands."""
    if number >= 1e6:
        return f"{number / 1e6:.4g} million"
    return f"{float(f'{number:.4g}'):,.0f}" if number >= 1000 else f"{number:.4g}"


def table(first: str, *headers: str, left: Sequence[str] = ()) -> Table:
    """Numbers to the right."""
    empty_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    empty_table.add_column(first, overflow="fold")
    for header in headers:
        empty_table.add_column(header, justify="left" if header in left else "right", overflow="fold")
    return empty_table


def _splits(report: ReportRecord, details: Details) -> Table:
    hides = any(split.hidden for split in details.splits)
    split_table = table("seconds of a step", *PART_TITLES.values(), *(("beside kernels",) if hides else ()))
    rows = [(f"stage {ranges_text(split.stages)}", split) for split in details.splits]
    if len(rows) > 1 and report.split is not None:
        rows.append(("mean", report.split))
    for name, split in rows:
        total = math.fsum(split.parts.values()) or 1.0
        split_table.add_row(
            name, *(f"{seconds_text(part)} {part / total:.0%}" if part else "-" for part in split.parts.values()),
            *((seconds_text(split.hidden) if split.hidden else "-",) if hides else ()),
        )  # fmt: skip
    return split_table


def _memory(report: ReportRecord) -> Table:
    memory_table = table("devices", "stages", "peak", "capacity", "of it", "reserve")
    for group in report.groups:
        share = f"{group.total / group.capacity:.1%}" if group.capacity else "-"
        memory_table.add_row(
            ranges_text(group.devices), ranges_text(group.stages), bytes_text(group.total),
            bytes_text(group.capacity), share, bytes_text(group.reserve),
        )  # fmt: skip
    return memory_table


def _layers(details: Details) -> Table:
    layer_table = table("layer", "stage", "name", "parameters", "forward", "hands on", left=("name",))
    for k, layer in enumerate(details.layers):
        layer_table.add_row(
            str(k), str(layer.stage), Text(layer.name + (f" ×{layer.count}" if layer.count > 1 else "")),
            bytes_text(layer.parameters), metric_text(layer.flops, "FLOP"), bytes_text(layer.handed_on),
        )  # fmt: skip
    return layer_table


def _operators(details: Details, max_rows: int | None) -> list[RenderableType]:
    left = ("phase", "sharding, source")
    operator_table = table("operator", "phase", "stages", "count", "compute", "sent", "sharding, source", left=left)
    rows = details.operators[:max_rows]
    parts: list[RenderableType] = [operator_table]
    for each in rows:
        sharding = f"{' '.join(map(sharding_of, each.operands))} -> {' '.join(map(sharding_of, each.results))}"
        operator_table.add_row(
            Text(each.name), each.phase, ranges_text(each.stages), f"{each.count} × {each.runs}",
            seconds_text(each.compute), seconds_text(each.communication) if each.communication else "-",
            Text(f"{sharding}  {each.source}"),
        )  # fmt: skip
    hidden = len(details.operators) - len(rows) + details.other_operators
    if hidden:
        seconds = details.other_seconds + sum(each.seconds for each in details.operators[len(rows) :])
        parts.append(Text(f"... and {hidden} more, {seconds_text(seconds)} together"))
    for each in rows:
        for why in each.whys:
            parts += [Text(), Text(str(why))]
    return parts


def sharding_of(array: str) -> str:
    """The last part of an operator's operand."""
    return array.rpartition(" ")[2]


def _links(details: Details, max_rows: int | None) -> list[RenderableType]:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for use in details.links:
        total = sums[use.link, use.kind]
        for k, number in enumerate((use.count, use.nbytes, use.seconds)):
            total[k] += number
    link_table = table("link", "kind", "per step", "bytes per device", "seconds of all stages", left=("kind",))
    rows = sorted(sums.items(), key=lambda item: -item[1][2])
    for (link, kind), (count, nbytes, seconds) in rows[:max_rows]:
        link_table.add_row(Text(link), kind, f"{count:.0f}", bytes_text(nbytes), seconds_text(seconds))
    return [link_table] if rows else [Text("Nothing is sent between devices.")]


def _diff(diff: PlanDiff, max_rows: int | None) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(f"Beside {diff.other}")]
    for changes in (diff.plan, diff.stages, diff.leaves):
        if changes:
            parts += [Text(), _changes(changes[:max_rows])]
            if max_rows is not None and len(changes) > max_rows:
                parts.append(Text(f"... and {len(changes) - max_rows} more"))
    parts.append(Text(f"{count_text(diff.same_leaves, 'leaf').replace('leafs', 'leaves')} lie alike"))
    return parts


def _changes(changes: Sequence[Change]) -> Table:
    change_table = table("what differs", "here", "there", "ratio")
    for each in changes:
        ratio = "" if each.ratio is None else f"{each.ratio:.3f}"
        change_table.add_row(Text(each.what), Text(each.mine_text), Text(each.other_text), ratio)
    return change_table
