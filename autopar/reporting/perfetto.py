"""A report's timeline in Chrome's trace event format, which Perfetto reads, too.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are in microseconds.
Each group of devices is a process, with a thread of its programs, one for each pair of stages between which it sends,
and a counter of its memory.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from autopar.errors import ReportError
from autopar.ir.units import ranges_text

if TYPE_CHECKING:
    from autopar.reporting.record import ReportRecord

_MICROSECONDS = 1e6


def trace_json(report: ReportRecord) -> str:
    """The trace as text.

    Raises:
      ReportError: the plan was read from a file, so that there is no timeline.
    """
    plan, details = report.plan, report.details
    if details is None:
        raise ReportError(
            f"the plan for {plan.function!r} was read from a file and has no step to draw the timeline of: report on "
            "step.plan(state, batch, method=plan), which is the same plan."
        )
    groups = report.groups
    group_of = {stage: k for k, group in enumerate(groups) for stage in group.stages}
    events: list[dict[str, Any]] = []

    def name(what: str, process: int, thread: int, text: str) -> None:
        events.append(name_of(what, process, thread, text))

    for k, group in enumerate(groups):
        stages, devices = ranges_text(group.stages), ranges_text(group.devices)
        name("process_name", k, 0, f"stage {stages} on devices {devices}")
        name("thread_name", k, 0, "programs")
    links = {pair: 1 + k for k, pair in enumerate(sorted({(c.source, c.target) for c in details.copies}))}
    for (source, target), thread in links.items():
        name("thread_name", group_of[source], thread, f"stage {source} sends to {target}")
    events += [
        slice_of(span.phase, "program", span.group, 0, span.start, span.end, span.microbatch, stage=span.stage)
        for span in details.spans
    ]
    for copy in details.copies:
        title = f"{copy.phase} {copy.source} → {copy.target}"
        process, thread = group_of[copy.source], links[copy.source, copy.target]
        events.append(slice_of(title, "transfer", process, thread, copy.start, copy.end, copy.microbatch))
    for k, curve in enumerate(details.memory):
        for seconds, activations, temporaries in zip(curve.seconds, curve.activations, curve.temporaries, strict=True):
            held = {**curve.state, "gradients": curve.gradients, "activations": activations, "temporaries": temporaries}
            events.append({"ph": "C", "name": "memory", "pid": k, "ts": seconds * _MICROSECONDS, "args": held})
    about = {"function": plan.function, "method": plan.method, "cluster": plan.cluster.name, "predicted": True}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, separators=(",", ":"))


def name_of(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
    """The event that names a process ("process_name") or a thread ("thread_name")."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}}


def slice_of(
    title: str, kind: str, process: int, thread: int, start: float, end: float, microbatch: int, **more: Any
) -> dict[str, Any]:
    """The event of something that runs for a while."""
    arguments = {**more, "microbatch": microbatch} if microbatch >= 0 else more
    return {
        "ph": "X", "name": title, "cat": kind, "pid": process, "tid": thread, "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS, "args": arguments,
    }  # fmt: skip
