"""A report as one HTML page that needs no network: Jinja2 writes it, Bokeh draws what is zoomed into.

Large plans: equal layers and operators come as one from the report; of very many events and changes of memory the page
draws as many as a browser takes easily, and says so. The trace has all.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.ir.plan_record import LeafPlan
from autopar.ir.plan_text import fold
from autopar.ir.units import array_text, bytes_text, count_text, metric_text, ranges_text, seconds_text
from autopar.ir.verification import LEFT_OUT
from autopar.reporting.figures import (
    BLUE,
    FAR,
    GREY,
    KINDS,
    ORANGE,
    PHASES,
    PURPLE,
    SKY,
    axis_unit,
    drawn_text,
    figures,
    memory_columns,
    phases_met,
)
from autopar.reporting.perfetto import trace_json
from autopar.reporting.report_json import report_to_json
from autopar.reporting.template import check_page, download, embedded, file_name, rendered
from autopar.reporting.text import NEEDS_STEP, PART_TITLES, PREDICTED, rate_text, sharding_of

if TYPE_CHECKING:
    from autopar.ir.why import Alternative, Why
    from autopar.reporting.record import Details, Operator, ReportRecord

_MOST_LEAVES = 20_000  # that can be searched

_PART_COLOURS = dict(zip(PART_TITLES, (BLUE, ORANGE, PURPLE, GREY, SKY, "#dfe3e8"), strict=True))
_PART_MEANINGS = {
    "compute": "kernels",
    "collectives": "sums over devices, and what operators exchange by themselves, while no kernel runs",
    "resharding": "values gathered or moved from one sharding to another within a stage, while no kernel runs",
    "launches": "starting programs",
    "waiting": "idle while another stage's transfer is under way, or while other virtual devices have the cores",
    "bubble": "idle otherwise: the pipeline fills, drains, or waits for a slower stage",
}


def page(report: ReportRecord) -> str:
    """The page.

    Raises:
      ReportError: Bokeh or Jinja2 is not installed.
    """
    check_page()
    scripts, places = figures(report)
    return rendered("report_page.html", scripts, places, **_context(report), data=embedded(_data(report)))


# What the template shows


def _context(report: ReportRecord) -> dict[str, Any]:
    plan, details, fullest = report.plan, report.details, report.fullest
    colours = _stage_colours(len(plan.stages))
    split = report.split
    return {
        "plan": plan,
        "report": report,
        "details": details,
        "cluster": f"{plan.cluster.name} ({count_text(plan.cluster.num_devices, 'device')})",
        "hardware": str(plan.cluster),
        "microbatches": count_text(plan.num_microbatches, "microbatch").replace("microbatchs", "microbatches"),
        "num_stages": count_text(len(plan.stages), "stage"),
        "rate": rate_text(report.examples_per_second),
        "tokens": None if report.tokens_per_second is None else rate_text(report.tokens_per_second),
        "model_flops": None if details is None else metric_text(details.model_flops, "FLOP"),
        "computed_flops": metric_text(plan.flops, "FLOP"),
        "fullest": fullest,
        "full": fullest.total / fullest.capacity if fullest.capacity else math.inf,
        "titles": PART_TITLES,
        "part_colours": _PART_COLOURS,
        "meanings": _PART_MEANINGS,
        "split": None if split is None else _bar(split.parts),
        "hidden": 0.0 if split is None else split.hidden,
        "splits": []
        if details is None
        else [(_group_name(s.stages, s.devices), _bar(s.parts)) for s in details.splits],
        "phases": {} if details is None else phases_met(details.spans),
        "kinds": KINDS,
        "memory_bars": _memory_bars(report),
        "far_below": details is not None and max(curve.peak for curve in details.memory) < FAR * fullest.capacity,
        "drawn": "" if details is None else drawn_text(details.spans, details.copies),
        "stage_colours": colours,
        "graph": None if details is None else _graph(details, colours),
        "operators": [] if details is None else [_operator(each, report, colours) for each in details.operators],
        "others": None if details is None else (details.other_operators, details.other_seconds),
        "links": [] if details is None else _links(details),
        "leaf_rows": [_leaf(row.leaf, row.path, row.count) for row in fold(plan.leaves)],
        "stage_rows": _stage_rows(report),
        "weights_apart": any(stage.weights for stage in report.plan.stages),
        "comparison": _comparison(report),
        "diff": report.diff,
        "verification": report.verification,
        "left_out": LEFT_OUT,
        "needs_step": NEEDS_STEP,
        "predicted": PREDICTED,
        "trace": None if details is None else download(trace_json(report)),
        "json": download(report_to_json(report)),
        "file": file_name(plan.function),
    }


def _bar(parts: dict[str, float]) -> list[tuple[str, float, float]]:
    """(name, seconds, share) of parts of a whole."""
    total = math.fsum(parts.values()) or 1.0
    return [(name, seconds, seconds / total) for name, seconds in parts.items()]


def _group_name(stages: Sequence[int], devices: Sequence[int]) -> str:
    noun = "Stage" if len(stages) == 1 else "Stages"
    return f"{noun} {ranges_text(stages)} · dev {ranges_text(devices)}"


def _memory_bars(report: ReportRecord) -> list[dict[str, Any]]:
    """By group of devices: bytes by kind at the peak that the plan counts with, as shares of the capacity."""
    bars = []
    for k, group in enumerate(report.groups):
        stages = [report.plan.stages[stage].memory for stage in group.stages]
        if report.details is None:
            kinds = {"parameters": 0, "other state": sum(m.state for m in stages)}
        else:
            kinds = dict(report.details.memory[k].state)
        kinds |= {
            "gradients": sum(m.gradients for m in stages), "activations": sum(m.activations for m in stages),
            "temporaries": group.temporaries,
        }  # fmt: skip
        most = max(group.capacity, group.total) or 1
        bars.append(
            {
                "name": _group_name(group.stages, group.devices), "total": group.total, "capacity": group.capacity,
                "share": group.total / group.capacity if group.capacity else math.inf,
                "kinds": [(kind, nbytes, nbytes / most) for kind, nbytes in kinds.items() if nbytes],
            }
        )  # fmt: skip
    return bars


def _stage_rows(report: ReportRecord) -> list[dict[str, Any]]:
    plan = report.plan
    return [
        {
            "number": k, "devices": ranges_text(stage.mesh.devices), "mesh": _mesh(stage.mesh.axes, stage.mesh.shape),
            "layers": ranges_text(range(*stage.layers)) or "–", "forward": seconds_text(stage.forward),
            "backward": seconds_text(stage.backward), "weights": seconds_text(stage.weights),
            "once": seconds_text(stage.once), "again": len(stage.recomputed),
            "reshard_after_forward": stage.reshard_after_forward,
        }
        for k, stage in enumerate(plan.stages)
    ]  # fmt: skip


def _mesh(axes: Sequence[str], shape: Sequence[int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(axes, shape, strict=True))


def _leaf(leaf: LeafPlan, path: str, count: int) -> dict[str, Any]:
    window = "" if leaf.window is None else f" {leaf.window[1]}:{leaf.window[2]}"
    return {
        "path": path + window, "type": array_text(leaf.dtype, leaf.shape), "stage": leaf.stage,
        "sharding": str(leaf.sharding), "count": count, "kind": _leaf_kind(leaf),
    }  # fmt: skip


def _leaf_kind(leaf: LeafPlan) -> str:
    return "examples" if leaf.batch_axis is not None else "state" if leaf.state else "read only"


def _links(details: Details) -> list[dict[str, Any]]:
    """By link and kind, with what they are made of."""
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for use in details.links:
        groups[use.link, use.kind].append(use)
    rows = []
    for (link, kind), uses in groups.items():
        seconds: dict[int, float] = defaultdict(float)  # by stage that sends
        for use in uses:
            seconds[use.stage] += use.seconds
        rows.append(
            {
                "link": link, "kind": kind, "count": sum(use.count for use in uses),
                "nbytes": sum(use.nbytes for use in uses), "seconds": max(seconds.values()), "uses": uses,
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row["seconds"])


def _comparison(report: ReportRecord) -> list[dict[str, Any]]:
    if report.comparison is None:
        return []
    times = [each.plan.step_time for each in report.comparison.candidates if each.plan is not None]
    least, most = (min(times), max(times)) if times else (1.0, 1.0)
    return [
        {
            "name": each.name, "plan": each.plan, "reason": each.reason,
            "ratio": each.plan.step_time / least if each.plan is not None and least else None,
            "width": each.plan.step_time / most if each.plan is not None and most else 0.0,
        }
        for each in report.comparison.candidates
    ]  # fmt: skip


# Operators


def _operator(each: Operator, report: ReportRecord, colours: Sequence[str]) -> dict[str, Any]:
    assert report.details is not None, "there are operators"
    step, longest = report.plan.step_time or 1.0, report.details.operators[0].seconds or 1.0
    where = _short(each.source)
    whys = [_why(why) for why in each.whys]
    searchable = (each.name, each.source, each.phase, *(f"stage {s}" for s in each.stages), *each.operands,
                  *each.results)  # fmt: skip
    return {
        "name": each.name, "where": where, "source": each.source, "phase": each.phase,
        "colour": PHASES.get(each.phase, ("", GREY))[1], "stages": ranges_text(each.stages),
        "stage_colour": colours[each.stages[0]], "layers": " ".join(map(str, each.layers)), "mesh": each.mesh,
        "count": each.count, "runs": each.runs, "compute": each.compute, "communication": each.communication,
        "share": each.seconds / step, "length": each.seconds / longest, "collectives": each.collectives,
        "operands": [array.rpartition(" ")[::2] for array in each.operands],
        "results": [array.rpartition(" ")[::2] for array in each.results],
        "sharding": _abbreviated([sharding_of(a) for a in each.operands], [sharding_of(a) for a in each.results]),
        "whys": whys, "text": " ".join(searchable).lower(),
    }  # fmt: skip


_MOST_SHOWN = 4  # shardings in a line


def _abbreviated(operands: Sequence[str], results: Sequence[str]) -> str:
    sides = []
    for side in (operands, results):
        more = f" … {len(side) - _MOST_SHOWN} more" if len(side) > _MOST_SHOWN else ""
        sides.append(" ".join(side[:_MOST_SHOWN]) + more)
    return f"{sides[0] or '()'} → {sides[1]}"


def _short(source: str) -> str:
    """ "model.py:55 mlp" of a line of code."""
    match = re.match(r"(?:.*[/\\])?([^/\\:]+):(\d+)(?::\d+)?(?: \(([^()]*)\))?", source)
    if match is None:
        return source
    file, line, function = match.groups()
    return f"{file}:{line}" + (f" {function.split('.')[-1]}" if function else "")


def _why(why: Why) -> dict[str, Any]:
    chosen = why.chosen
    return {
        "chosen": {"sharding": _alternative_text(chosen, chosen), "seconds": seconds_text(chosen.seconds)},
        "others": [
            {
                "sharding": _alternative_text(other, chosen), "seconds": seconds_text(other.seconds),
                "verdict": other.verdict, "fits": other.fits, "because": _because(other),
            }
            for other in why.others
        ],
    }  # fmt: skip


def _alternative_text(one: Alternative, chosen: Alternative) -> list[str]:
    """The shardings; of operators of many operands only those that differ from the chosen."""
    if len(one.operands) + len(one.results) <= 2 * _MOST_SHOWN:
        return [str(one).replace("->", "→")]
    if one is chosen:
        return ["as above"]
    differing = []
    for side, mine, its in (("operand", one.operands, chosen.operands), ("result", one.results, chosen.results)):
        moved: dict[tuple[str, str], list[int]] = defaultdict(list)
        for k, (new, old) in enumerate(zip(mine, its, strict=True)):
            if new != old:
                moved[str(old), str(new)].append(k)
        differing += [f"{side} {ranges_text(numbers)}: {new} instead of {old}" for (old, new), numbers in moved.items()]
    shown = differing[: 2 * _MOST_SHOWN]
    return shown + ([f"… {len(differing) - len(shown)} more"] if len(differing) > len(shown) else [])


def _because(one: Alternative) -> str:
    """What an alternative would have broken."""
    if not one.fits:
        return "over the memory of the stage, whatever else is chosen"
    parts = []
    for seconds, what in ((one.operators_seconds, "operators"), (one.resharding_seconds, "resharding and sums")):
        if abs(seconds) > 0.01 * (abs(one.operators_seconds) + abs(one.resharding_seconds)):
            parts.append(f"{what} {'+−'[seconds < 0]}{seconds_text(abs(seconds))}")
    text = ", ".join(parts) or "costs the same"
    return text + (f"; {count_text(one.changed, 'other operator')} cut otherwise" if one.changed else "")


# The graph of layers, as SVG: a column of layers, what they hand on beyond the next one as arcs beside it.

_NODE = (6, 266, 38, 16)  # left, width, height, gap
_GRAPH_WIDTH = 350


def _graph(details: Details, colours: Sequence[str]) -> dict[str, Any]:
    left, width, height, gap = _NODE
    nodes = []
    edges = []
    most = max((nbytes for layer in details.layers for _, nbytes, _ in layer.reads), default=1) or 1
    longest = max((k - s for k, layer in enumerate(details.layers) for s, _, _ in layer.reads), default=1)
    for k, layer in enumerate(details.layers):
        top = gap / 2 + k * (height + gap)
        what = f"{bytes_text(layer.parameters)} of parameters, {metric_text(layer.flops, 'FLOP')} forward per step"
        name = layer.name + (f"  ×{layer.count}" if layer.count > 1 else "")
        facts = f"{bytes_text(layer.parameters)} · {metric_text(layer.flops, 'FLOP')}"
        each = " each" if layer.count > 1 else ""
        nodes.append(
            {
                "number": k, "top": top, "name": name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…",
                "facts": facts + each, "stage": layer.stage, "colour": colours[layer.stage],
                "title": f"Layer {k}, stage {layer.stage}: {name}, {count_text(layer.operators, 'operator')}{each}, "
                f"{what}{each}, hands on {bytes_text(layer.handed_on)}",
            }
        )  # fmt: skip
        for source, nbytes, shared in layer.reads:
            title = f"layer {source} → layer {k}: {bytes_text(nbytes)} {'shared state' if shared else 'per step'}"
            thick = 1 + 2.5 * math.log2(1 + nbytes) / math.log2(1 + most)
            y0, y1 = (gap / 2 + n * (height + gap) + height * share for n, share in ((source, 1.0), (k, 0.0)))
            if k == source + 1 and not shared:
                x = left + width / 2
                path = f"M{x} {y0}L{x} {y1 - 4}"
                edges.append({"path": path, "width": thick, "title": title, "shared": shared, "straight": True})
            else:
                x = left + width
                reach = x + (_GRAPH_WIDTH - x - 6) * 4 / 3 * (k - source) / longest
                y0, y1 = y0 - height * 0.4, y1 + height * 0.4
                path = f"M{x} {y0:.1f}C{reach:.1f} {y0:.1f} {reach:.1f} {y1:.1f} {x + 5} {y1:.1f}"
                edges.append({"path": path, "width": thick, "title": title, "shared": shared, "straight": False})
    return {
        "nodes": nodes, "edges": edges, "left": left, "width": width, "height": height,
        "box": (_GRAPH_WIDTH, gap + len(details.layers) * (height + gap)),
    }  # fmt: skip


_LABEL = 38  # characters in a node


def _stage_colours(count: int) -> list[str]:
    """Dark enough for white text: from blue over green to brown."""
    stops = ((0, 78, 137), (0, 114, 120), (60, 125, 70), (140, 110, 20), (150, 70, 30))
    colours = []
    for k in range(count):
        at = k / max(1, count - 1) * (len(stops) - 1)
        low = min(int(at), len(stops) - 2)
        mixed = (round(a + (at - low) * (b - a)) for a, b in zip(stops[low], stops[low + 1], strict=True))
        colours.append("#" + "".join(f"{part:02x}" for part in mixed))
    return colours


def _data(report: ReportRecord) -> dict[str, Any]:
    """What the page's own script reads."""
    plan, details = report.plan, report.details
    leaves = [
        [leaf.path + ("" if leaf.window is None else f" {leaf.window[1]}:{leaf.window[2]}"),
         array_text(leaf.dtype, leaf.shape), leaf.stage, str(leaf.sharding), _leaf_kind(leaf)]
        for leaf in plan.leaves[:_MOST_LEAVES]
    ]  # fmt: skip
    return {
        "end": plan.step_time * axis_unit(plan.step_time)[1],
        "leaves": leaves,
        "memory": [] if details is None else [memory_columns(curve, plan.step_time) for curve in details.memory],
    }
