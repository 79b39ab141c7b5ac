"""A report as one HTML page that needs no network: Jinja2 writes it, Bokeh draws what is zoomed into.

Large plans: equal layers and operators come as one from the report; of very many events and changes of memory the page
draws as many as a browser takes easily, and says so. The trace has all.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import math
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from autopar.errors import ReportError
from autopar.ir.plan_record import LeafPlan
from autopar.ir.plan_text import fold
from autopar.ir.report_json import report_to_json
from autopar.ir.report_text import NEEDS_STEP, PART_TITLES, PREDICTED, rate_text, sharding_of
from autopar.ir.report_trace import trace_json
from autopar.ir.units import bytes_text, count_text, metric_text, ranges_text, seconds_text
from autopar.ir.verification import LEFT_OUT

if TYPE_CHECKING:
    from autopar.ir.report_record import Details, MemoryCurve, Operator, ReportRecord
    from autopar.ir.why import Alternative, Why

_NEEDED = ("bokeh", "jinja2")
_MOST_EVENTS = 20_000  # that the timeline draws
_MOST_CHANGES = 600  # of the memory of one group of devices
_MOST_LEAVES = 20_000  # that can be searched

# Okabe and Ito's palette, which colour-blind people tell apart.
_BLUE, _SKY, _GREEN, _ORANGE, _RED, _PURPLE, _GREY = (
    "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#8a8f98",
)  # fmt: skip
_PART_COLOURS = dict(zip(PART_TITLES, (_BLUE, _ORANGE, _PURPLE, _GREY, _SKY, "#dfe3e8"), strict=True))
_PHASES = {
    "prologue": ("before the microbatches", _GREY),
    "forward": ("forward", _BLUE),
    "backward": ("backward", _ORANGE),
    "weights": ("gradients of parameters", _GREEN),
    "update": ("update", _PURPLE),
}
_KINDS = {
    "parameters": _BLUE, "other state": _SKY, "gradients": _GREEN, "activations": _ORANGE, "temporaries": _PURPLE,
}  # fmt: skip
_PART_MEANINGS = {
    "compute": "kernels",
    "collectives": "sums over devices, and what operators exchange by themselves",
    "resharding": "values gathered or moved from one sharding to another within a stage",
    "launches": "starting programs",
    "waiting": "idle while another stage's transfer is under way, or while other virtual devices have the cores",
    "bubble": "idle otherwise: the pipeline fills, drains, or waits for a slower stage",
}


def check_page() -> None:
    """Raise ReportError if what writes and draws the page is not installed."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ReportError(
            f"a report as a page needs {' and '.join(missing)}, not installed: pip install 'autopar[report]'."
        )


def page(report: ReportRecord) -> str:
    """The page.

    Raises:
      ReportError: Bokeh or Jinja2 is not installed.
    """
    check_page()
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"bytes": bytes_text, "seconds": seconds_text, "ranges": ranges_text}
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    scripts, figures = _figures(report)
    context = _context(report)
    return template.render(
        **context, scripts=Markup(scripts), figures={name: Markup(text) for name, text in figures.items()},
        data=Markup(_embedded(_data(report))),
    )  # fmt: skip


_TEMPLATE = pathlib.Path(__file__).with_name("report_page.html")


def _embedded(data: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", " ").replace("\u2029", " ")


def _download(text: str) -> str:
    """A link's address that holds a compressed file."""
    return "data:application/gzip;base64," + base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


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
        "splits": []
        if details is None
        else [(_group_name(s.stages, s.devices), _bar(s.parts)) for s in details.splits],
        "phases": _phases_met(details),
        "kinds": _KINDS,
        "memory_bars": _memory_bars(report),
        "far_below": details is not None and max(curve.peak for curve in details.memory) < _FAR * fullest.capacity,
        "drawn": _drawn_text(details),
        "stage_colours": colours,
        "graph": None if details is None else _graph(details, colours),
        "operators": [] if details is None else [_operator(each, report, colours) for each in details.operators],
        "others": None if details is None else (details.other_operators, details.other_seconds),
        "links": [] if details is None else _links(details),
        "leaf_rows": [_leaf(row.leaf, row.path, row.count) for row in fold(plan.leaves)],
        "stage_rows": _stage_rows(report),
        "comparison": _comparison(report),
        "diff": report.diff,
        "verification": report.verification,
        "left_out": LEFT_OUT,
        "needs_step": NEEDS_STEP,
        "predicted": PREDICTED,
        "trace": None if details is None else _download(trace_json(report)),
        "json": _download(report_to_json(report)),
        "file": re.sub(r"\W+", "-", plan.function).strip("-") or "plan",
    }


def _bar(parts: dict[str, float]) -> list[tuple[str, float, float]]:
    """(name, seconds, share) of parts of a whole."""
    total = math.fsum(parts.values()) or 1.0
    return [(name, seconds, seconds / total) for name, seconds in parts.items()]


def _group_name(stages: Sequence[int], devices: Sequence[int]) -> str:
    noun = "Stage" if len(stages) == 1 else "Stages"
    return f"{noun} {ranges_text(stages)} · dev {ranges_text(devices)}"


def _phases_met(details: Details | None) -> dict[str, tuple[str, str]]:
    met = set() if details is None else {span.phase for span in details.spans}
    return {name: value for name, value in _PHASES.items() if name in met}


def _memory_bars(report: ReportRecord) -> list[dict[str, Any]]:
    """By group of devices: bytes by kind at the peak that the plan counts with, as shares of the capacity."""
    found = []
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
        found.append(
            {
                "name": _group_name(group.stages, group.devices), "total": group.total, "capacity": group.capacity,
                "share": group.total / group.capacity if group.capacity else math.inf,
                "kinds": [(kind, nbytes, nbytes / most) for kind, nbytes in kinds.items() if nbytes],
            }
        )  # fmt: skip
    return found


def _stage_rows(report: ReportRecord) -> list[dict[str, Any]]:
    plan = report.plan
    return [
        {
            "number": k, "devices": ranges_text(stage.mesh.devices), "mesh": _mesh(stage.mesh.axes, stage.mesh.shape),
            "layers": ranges_text(range(*stage.layers)) or "–", "forward": seconds_text(stage.forward),
            "backward": seconds_text(stage.backward), "weights": seconds_text(stage.weights),
            "once": seconds_text(stage.once), "again": len(stage.recomputed),
            "regathers": stage.regathers,
        }
        for k, stage in enumerate(plan.stages)
    ]  # fmt: skip


def _mesh(axes: Sequence[str], shape: Sequence[int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(axes, shape, strict=True))


def _leaf(leaf: LeafPlan, path: str, count: int) -> dict[str, Any]:
    window = "" if leaf.window is None else f" {leaf.window[1]}:{leaf.window[2]}"
    return {
        "path": path + window, "type": f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]", "stage": leaf.stage,
        "sharding": str(leaf.sharding), "count": count, "kind": _leaf_kind(leaf),
    }  # fmt: skip


def _leaf_kind(leaf: LeafPlan) -> str:
    return "examples" if leaf.batch_axis is not None else "state" if leaf.state else "read only"


def _links(details: Details) -> list[dict[str, Any]]:
    """By link and kind, with what they are made of."""
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for use in details.links:
        groups[use.link, use.kind].append(use)
    found = []
    for (link, kind), uses in groups.items():
        seconds: dict[int, float] = defaultdict(float)  # by stage that sends
        for use in uses:
            seconds[use.stage] += use.seconds
        found.append(
            {
                "link": link, "kind": kind, "count": sum(use.count for use in uses),
                "nbytes": sum(use.nbytes for use in uses), "seconds": max(seconds.values()), "uses": uses,
            }
        )  # fmt: skip
    return sorted(found, key=lambda row: -row["seconds"])


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
        "colour": _PHASES.get(each.phase, ("", _GREY))[1], "stages": ranges_text(each.stages),
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
    found = re.match(r"(?:.*[/\\])?([^/\\:]+):(\d+)(?::\d+)?(?: \(([^()]*)\))?", source)
    if found is None:
        return source
    file, line, function = found.groups()
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
    found = []
    for k in range(count):
        at = k / max(1, count - 1) * (len(stops) - 1)
        low = min(int(at), len(stops) - 2)
        mixed = (round(a + (at - low) * (b - a)) for a, b in zip(stops[low], stops[low + 1], strict=True))
        found.append("#" + "".join(f"{part:02x}" for part in mixed))
    return found


# Figures


def _unit(seconds: float) -> tuple[str, float]:
    """The unit of an axis of so many seconds, and how many of it a second has."""
    return ("s", 1.0) if seconds >= 10 else ("ms", 1e3) if seconds >= 1e-2 else ("µs", 1e6)


def _drawn(details: Details) -> tuple[list[Any], list[Any]]:
    """The events that are drawn: all, or the first and last microbatches if there are too many."""
    if len(details.spans) + len(details.copies) <= _MOST_EVENTS:
        return list(details.spans), list(details.copies)
    last = max(span.microbatch for span in details.spans)
    kept = max(1, int((last + 1) * _MOST_EVENTS / (len(details.spans) + len(details.copies)) / 2))

    def near_an_end(events: Iterable[Any]) -> list[Any]:
        return [e for e in events if e.microbatch < kept or e.microbatch > last - kept]

    return near_an_end(details.spans), near_an_end(details.copies)


def _drawn_text(details: Details | None) -> str:
    if details is None:
        return ""
    drawn = sum(map(len, _drawn(details)))
    there = len(details.spans) + len(details.copies)
    if drawn == there:
        return ""
    return f"Drawn are the first and the last microbatches, {drawn:,} of {there:,} events; the trace has all."


def _data(report: ReportRecord) -> dict[str, Any]:
    """What the page's own script reads."""
    plan, details = report.plan, report.details
    leaves = [
        [leaf.path + ("" if leaf.window is None else f" {leaf.window[1]}:{leaf.window[2]}"),
         f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]", leaf.stage, str(leaf.sharding), _leaf_kind(leaf)]
        for leaf in plan.leaves[:_MOST_LEAVES]
    ]  # fmt: skip
    return {
        "end": plan.step_time * _unit(plan.step_time)[1],
        "leaves": leaves,
        "memory": [] if details is None else [_memory_columns(curve, plan.step_time) for curve in details.memory],
    }


def _figures(report: ReportRecord) -> tuple[str, dict[str, str]]:
    """Scripts, and where each figure goes."""
    details = report.details
    if details is None:
        return "", {}
    from bokeh.embed import components
    from bokeh.resources import Resources

    figures = {"timeline": _timeline(report, details), "memory": _memory(report, details)}
    script, places = components(figures)
    return Resources(mode="inline", components=["bokeh"]).render() + script, dict(places)


def _figure(**options: Any) -> Any:
    """A figure of the page's style, zoomed along time by dragging, pinching, or the wheel with the control key."""
    from bokeh.models import BoxZoomTool, PanTool, ResetTool, SaveTool, WheelZoomTool
    from bokeh.plotting import figure

    zoom = BoxZoomTool(dimensions="width")
    plot = figure(
        sizing_mode="stretch_width", toolbar_location="above", output_backend="canvas",
        tools=[
            zoom, PanTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers="ctrl"), ResetTool(),
            SaveTool(),
        ],
        active_drag=zoom, active_scroll=None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.outline_line_color = None
    plot.ygrid.grid_line_color = None
    plot.xgrid.grid_line_color = "#eceff3"
    for axis in plot.axis:
        axis.axis_line_color = "#c3c9d1"
        axis.major_tick_line_color = "#c3c9d1"
        axis.minor_tick_line_color = None
        axis.major_label_text_color = axis.axis_label_text_color = "#3d4551"
        axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
    return plot


def _timeline(report: ReportRecord, details: Details) -> Any:
    """A row for each group of devices: its programs, and lines for what is sent."""
    from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d

    unit, scale = _unit(report.plan.step_time)
    groups = report.groups
    spans, copies = _drawn(details)
    end = report.plan.step_time * scale
    whole = Range1d(start=0, end=end, bounds=(-0.02 * end, 1.02 * end), name="timeline-range")
    plot = _figure(
        height=max(170, min(640, 70 + 34 * len(groups))), x_range=whole,
        y_range=Range1d(start=0.4 - len(groups), end=0.6),
        x_axis_label=f"{unit} since the step began", name="timeline",
    )  # fmt: skip
    plot.yaxis.ticker = FixedTicker(ticks=[-k for k in range(len(groups))][:: max(1, len(groups) // 24)])
    plot.yaxis.major_label_overrides = {-k: f"stage {ranges_text(group.stages)}" for k, group in enumerate(groups)}
    rounds = {stage: k for group in groups for k, stage in enumerate(group.stages)}
    most = max(rounds.values(), default=0) or 1
    source = ColumnDataSource(
        {
            "left": [span.start * scale for span in spans], "right": [span.end * scale for span in spans],
            "top": [-span.group + 0.36 for span in spans], "bottom": [-span.group - 0.36 for span in spans],
            "colour": [_PHASES[span.phase][1] for span in spans],
            "alpha": [1.0 - 0.45 * rounds[span.stage] / most for span in spans],
            "what": [_PHASES[span.phase][0] for span in spans], "stage": [span.stage for span in spans],
            "microbatch": ["–" if span.microbatch < 0 else str(span.microbatch) for span in spans],
            "took": [seconds_text(span.end - span.start) for span in spans],
            "from": [seconds_text(span.start) for span in spans],
        }
    )  # fmt: skip
    bars = plot.quad(
        left="left", right="right", top="top", bottom="bottom", fill_color="colour", fill_alpha="alpha",
        line_color="white", line_width=0.5, source=source,
    )  # fmt: skip
    row = {stage: k for k, group in enumerate(groups) for stage in group.stages}
    sent = ColumnDataSource(
        {
            "x0": [copy.start * scale for copy in copies], "x1": [copy.end * scale for copy in copies],
            "y0": [-row[copy.source] for copy in copies], "y1": [-row[copy.target] for copy in copies],
            "what": [f"{copy.source} → {copy.target}, {_PHASES[copy.phase][0]}" for copy in copies],
            "microbatch": ["–" if copy.microbatch < 0 else str(copy.microbatch) for copy in copies],
            "took": [seconds_text(copy.end - copy.start) for copy in copies],
            "from": [seconds_text(copy.start) for copy in copies],
        }
    )  # fmt: skip
    lines = plot.segment(
        x0="x0", x1="x1", y0="y0", y1="y1", line_color=_RED, line_width=1.6, line_alpha=0.75, source=sent
    )
    facts = [("starts", "@from"), ("takes", "@took"), ("microbatch", "@microbatch")]
    plot.add_tools(
        HoverTool(renderers=[bars], tooltips=[("", "stage @stage, @what"), *facts]),
        HoverTool(renderers=[lines], tooltips=[("", "transfer @what"), *facts], line_policy="interp"),
    )
    return plot


_FAR = 0.4  # of the capacity: peaks below it are drawn without the line of the capacity


def _memory(report: ReportRecord, details: Details) -> Any:
    """What one group of devices holds, by kind; the page's script puts another group's in its place."""
    from bokeh.models import ColumnDataSource, HoverTool, Range1d
    from bokeh.models.annotations import Label, Span

    unit, scale = _unit(report.plan.step_time)
    fullest = [group.devices for group in report.groups].index(report.fullest.devices)
    columns = [_memory_columns(curve, report.plan.step_time) for curve in details.memory]
    capacity = max(curve.capacity for curve in details.memory) / _GIB
    peak = max(column["peak"] for column in columns)
    shows = peak >= _FAR * capacity
    end = report.plan.step_time * scale
    plot = _figure(
        height=300, x_range=Range1d(start=0, end=end, bounds=(-0.02 * end, 1.02 * end)),
        y_range=Range1d(start=0, end=1.08 * max(peak, capacity if shows else 0.0) or 1.0),
        x_axis_label=f"{unit} since the step began", y_axis_label="GiB on each device", name="memory",
    )  # fmt: skip
    plot.ygrid.grid_line_color = "#eceff3"
    source = ColumnDataSource(_quads(columns[fullest]), name="memory-source")
    quads = plot.quad(left="left", right="right", top="top", bottom="bottom", fill_color="colour", line_color=None,
                      source=source)  # fmt: skip
    if shows:
        plot.add_layout(
            Span(location=capacity, dimension="width", line_color="#3d4551", line_dash="dashed", line_width=1.5)
        )
        plot.add_layout(Label(x=0, y=capacity, x_offset=6, y_offset=2, text=f"capacity {capacity:.1f} GiB",
                              text_font_size="12px", text_color="#3d4551"))  # fmt: skip
    plot.add_tools(
        HoverTool(renderers=[quads], tooltips=[("", "@kind"), ("held", "@held"), ("up to", "@top{0.00} GiB")])
    )
    return plot


_GIB = 2**30


def _memory_columns(curve: MemoryCurve, step_time: float) -> dict[str, Any]:
    """A group's memory in as many changes as are drawn: times in the axis' unit, GiB by kind."""
    _, scale = _unit(step_time)
    base = {**curve.state, "gradients": curve.gradients}
    times = [*curve.seconds, step_time]
    changes = list(zip(times, times[1:], curve.activations, curve.temporaries, strict=False))
    merged: list[list[float]] = []
    together = math.ceil(len(changes) / _MOST_CHANGES)
    for at in range(0, len(changes), together):
        some = changes[at : at + together]
        activations, temporaries = max((change[2:] for change in some), key=sum)
        merged.append([some[0][0], some[-1][1], activations, temporaries])

    def rounded(number: float) -> float:
        return float(f"{number:.6g}")

    def runs(*which: int) -> list[list[float]]:
        """Without seams between neighbours of the same height."""
        found: list[list[float]] = []
        for start, stop, *held in merged:
            sizes = [rounded(held[k] / _GIB) for k in which]
            if found and found[-1][2:] == sizes:
                found[-1][1] = rounded(stop * scale)
            elif stop > start:
                found.append([rounded(start * scale), rounded(stop * scale), *sizes])
        return found

    return {
        "base": [[kind, rounded(nbytes / _GIB)] for kind, nbytes in base.items()],
        "activations": runs(0),
        "temporaries": runs(0, 1),
        "peak": rounded((sum(base.values()) + max(c + d for _, _, c, d in merged)) / _GIB),
        "end": rounded(step_time * scale),
    }


def _quads(columns: dict[str, Any]) -> dict[str, list[Any]]:
    """As the page's script makes them for other groups."""
    found: dict[str, list[Any]] = {name: [] for name in ("left", "right", "bottom", "top", "colour", "kind", "held")}
    base = 0.0

    def add(left: float, right: float, bottom: float, size: float, kind: str) -> None:
        values = (left, right, bottom, bottom + size, _KINDS[kind], kind, f"{size:.2f} GiB")
        for name, value in zip(found, values, strict=True):
            found[name].append(value)

    for kind, size in columns["base"]:
        add(0.0, columns["end"], base, size, kind)
        base += size
    for left, right, size in columns["activations"]:
        add(left, right, base, size, "activations")
    for left, right, below, size in columns["temporaries"]:
        add(left, right, base + below, size, "temporaries")
    return found
