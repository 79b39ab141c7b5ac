"""The figures of a report's page that are zoomed into, drawn by Bokeh: the timeline, and memory over time.

Of very many events and changes of memory as many are drawn as a browser takes easily, and the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from autopar.ir.units import ranges_text, seconds_text

if TYPE_CHECKING:
    from autopar.reporting.record import Copying, Details, Group, MemoryCurve, ReportRecord, TimelineSpan

    Events: TypeAlias = tuple[Sequence[TimelineSpan], Sequence[Copying]]  # programs, and what stages send

_MOST_EVENTS = 20_000  # that the timeline draws
_MOST_CHANGES = 600  # of the memory of one group of devices

# Okabe and Ito's palette, which colour-blind people tell apart.
BLUE, SKY, GREEN, ORANGE, RED, PURPLE, GREY = (
    "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#8a8f98",
)  # fmt: skip
PHASES = {
    "prologue": ("before the microbatches", GREY),
    "forward": ("forward", BLUE),
    "backward": ("backward", ORANGE),
    "weights": ("gradients of parameters", GREEN),
    "update": ("update", PURPLE),
}
KINDS = {
    "parameters": BLUE, "other state": SKY, "gradients": GREEN, "activations": ORANGE, "temporaries": PURPLE,
}  # fmt: skip


def axis_unit(seconds: float) -> tuple[str, float]:
    """The unit of an axis of so many seconds, and how many of it a second has."""
    return ("s", 1.0) if seconds >= 10 else ("ms", 1e3) if seconds >= 1e-2 else ("µs", 1e6)


def _drawn(spans: Sequence[TimelineSpan], copies: Sequence[Copying]) -> Events:
    """The events that are drawn: all, or the first and last microbatches if there are too many."""
    if len(spans) + len(copies) <= _MOST_EVENTS:
        return spans, copies
    last = max(span.microbatch for span in spans)
    kept = max(1, int((last + 1) * _MOST_EVENTS / (len(spans) + len(copies)) / 2))

    def near_an_end(events: Iterable[Any]) -> list[Any]:
        return [e for e in events if e.microbatch < kept or e.microbatch > last - kept]

    return near_an_end(spans), near_an_end(copies)


def drawn_text(spans: Sequence[TimelineSpan], copies: Sequence[Copying]) -> str:
    """What of a timeline is not drawn; "" if all of it is."""
    drawn = sum(map(len, _drawn(spans, copies)))
    there = len(spans) + len(copies)
    if drawn == there:
        return ""
    return f"Drawn are the first and the last microbatches, {drawn:,} of {there:,} events; the trace has all."


def phases_met(spans: Iterable[TimelineSpan]) -> dict[str, tuple[str, str]]:
    """Of the phases that are drawn, the title and the colour."""
    met = {span.phase for span in spans}
    return {name: value for name, value in PHASES.items() if name in met}


def figures(report: ReportRecord) -> tuple[str, dict[str, str]]:
    """Scripts, and where each figure goes."""
    details = report.details
    if details is None:
        return "", {}
    seconds = report.plan.step_time
    return _components(
        {
            "timeline": _timeline(report.groups, (details.spans, details.copies), seconds, _whole(seconds)),
            "memory": _memory(report, details),
        }
    )


def compared_figures(
    groups: Sequence[Group], measured: Events, predicted: Events, seconds: float
) -> tuple[str, dict[str, str]]:
    """Scripts, and where the timelines "measured" and "predicted" go, which are zoomed into as one.

    `seconds`: of the longer one.
    """
    whole = _whole(seconds)
    return _components(
        {
            "measured": _timeline(groups, measured, seconds, whole),
            "predicted": _timeline(groups, predicted, seconds, whole),
        }
    )


def _components(figures: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    from bokeh.embed import components
    from bokeh.resources import Resources

    script, places = components(dict(figures))
    return Resources(mode="inline", components=["bokeh"]).render() + script, dict(places)


def _whole(seconds: float) -> Any:
    """What is seen of a timeline: at first all."""
    from bokeh.models import Range1d

    end = seconds * axis_unit(seconds)[1]
    return Range1d(start=0, end=end, bounds=(-0.02 * end, 1.02 * end), name="timeline-range")


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


def _timeline(groups: Sequence[Group], events: Events, seconds: float, whole: Any) -> Any:
    """A row for each group of devices: its programs, and lines for what is sent."""
    from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d

    unit, scale = axis_unit(seconds)
    spans, copies = _drawn(*events)
    plot = _figure(
        height=max(170, min(640, 70 + 34 * len(groups))), x_range=whole,
        y_range=Range1d(start=0.4 - len(groups), end=0.6),
        x_axis_label=f"{unit} since the step began",
    )  # fmt: skip
    plot.yaxis.ticker = FixedTicker(ticks=[-k for k in range(len(groups))][:: max(1, len(groups) // 24)])
    plot.yaxis.major_label_overrides = {-k: f"stage {ranges_text(group.stages)}" for k, group in enumerate(groups)}
    rounds = {stage: k for group in groups for k, stage in enumerate(group.stages)}
    most = max(rounds.values(), default=0) or 1
    source = ColumnDataSource(
        {
            "left": [span.start * scale for span in spans], "right": [span.end * scale for span in spans],
            "top": [-span.group + 0.36 for span in spans], "bottom": [-span.group - 0.36 for span in spans],
            "colour": [PHASES[span.phase][1] for span in spans],
            "alpha": [1.0 - 0.45 * rounds[span.stage] / most for span in spans],
            "what": [PHASES[span.phase][0] for span in spans], "stage": [span.stage for span in spans],
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
            "what": [", ".join([f"{x.source} → {x.target}", *PHASES.get(x.phase, [])[:1]]) for x in copies],
            "microbatch": ["–" if copy.microbatch < 0 else str(copy.microbatch) for copy in copies],
            "took": [seconds_text(copy.end - copy.start) for copy in copies],
            "from": [seconds_text(copy.start) for copy in copies],
        }
    )  # fmt: skip
    lines = plot.segment(
        x0="x0", x1="x1", y0="y0", y1="y1", line_color=RED, line_width=1.6, line_alpha=0.75, source=sent
    )
    facts = [("starts", "@from"), ("takes", "@took"), ("microbatch", "@microbatch")]
    plot.add_tools(
        HoverTool(renderers=[bars], tooltips=[("", "stage @stage, @what"), *facts]),
        HoverTool(renderers=[lines], tooltips=[("", "transfer @what"), *facts], line_policy="interp"),
    )
    return plot


FAR = 0.4  # of the capacity: peaks below it are drawn without the line of the capacity


def _memory(report: ReportRecord, details: Details) -> Any:
    """What one group of devices holds, by kind; the page's script puts another group's in its place."""
    from bokeh.models import ColumnDataSource, HoverTool, Range1d
    from bokeh.models.annotations import Label, Span

    unit, scale = axis_unit(report.plan.step_time)
    fullest = [group.devices for group in report.groups].index(report.fullest.devices)
    columns = [memory_columns(curve, report.plan.step_time) for curve in details.memory]
    capacity = max(curve.capacity for curve in details.memory) / _GIB
    peak = max(column["peak"] for column in columns)
    shows = peak >= FAR * capacity
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


def memory_columns(curve: MemoryCurve, step_time: float) -> dict[str, Any]:
    """A group's memory in as many changes as are drawn: times in the axis' unit, GiB by kind."""
    _, scale = axis_unit(step_time)
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
        spans: list[list[float]] = []
        for start, stop, *held in merged:
            sizes = [rounded(held[k] / _GIB) for k in which]
            if spans and spans[-1][2:] == sizes:
                spans[-1][1] = rounded(stop * scale)
            elif stop > start:
                spans.append([rounded(start * scale), rounded(stop * scale), *sizes])
        return spans

    return {
        "base": [[kind, rounded(nbytes / _GIB)] for kind, nbytes in base.items()],
        "activations": runs(0),
        "temporaries": runs(0, 1),
        "peak": rounded((sum(base.values()) + max(c + d for _, _, c, d in merged)) / _GIB),
        "end": rounded(step_time * scale),
    }


def _quads(columns: dict[str, Any]) -> dict[str, list[Any]]:
    """As the page's script makes them for other groups."""
    quads: dict[str, list[Any]] = {name: [] for name in ("left", "right", "bottom", "top", "colour", "kind", "held")}
    base = 0.0

    def add(left: float, right: float, bottom: float, size: float, kind: str) -> None:
        values = (left, right, bottom, bottom + size, KINDS[kind], kind, f"{size:.2f} GiB")
        for name, value in zip(quads, values, strict=True):
            quads[name].append(value)

    for kind, size in columns["base"]:
        add(0.0, columns["end"], base, size, kind)
        base += size
    for left, right, size in columns["activations"]:
        add(left, right, base, size, "activations")
    for left, right, below, size in columns["temporaries"]:
        add(left, right, base + below, size, "temporaries")
    return quads
