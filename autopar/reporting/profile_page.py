"""A profile as one HTML page that needs no network: what was measured above what was predicted."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

from autopar.ir.units import count_text, ranges_text, seconds_text
from autopar.reporting.figures import axis_unit, compared_figures, drawn_text, phases_met
from autopar.reporting.record import ReportRecord
from autopar.reporting.template import check_page, download, embedded, file_name, rendered
from autopar.reporting.text import rate_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autopar.reporting.profile import Profile, Row

_LATE = 1.1  # times the prediction


def profile_page(profile: Profile) -> str:
    """The page.

    Raises:
      ReportError: Bokeh or Jinja2 is not installed.
    """
    check_page()
    measured, predicted = profile.measured, profile.predicted
    seconds = max(measured.seconds, predicted.seconds)
    scripts, places = compared_figures(
        ReportRecord(profile.plan, None).groups, (measured.programs, measured.copies),
        (predicted.programs, predicted.copies), seconds,
    )  # fmt: skip
    data = embedded({"end": seconds * axis_unit(seconds)[1]})
    return rendered("profile_page.html", scripts, places, data, **_context(profile))


def _context(profile: Profile) -> dict[str, Any]:
    plan, measured, predicted = profile.plan, profile.measured, profile.predicted
    mean = statistics.fmean(profile.seconds)
    return {
        "plan": plan,
        "cluster": f"{plan.cluster.name} ({count_text(plan.cluster.num_devices, 'device')})",
        "hardware": str(plan.cluster),
        "num_stages": count_text(len(plan.stages), "stage"),
        "steps": count_text(len(profile.seconds), "step"),
        "mean": mean,
        "least": min(profile.seconds),
        "most": max(profile.seconds),
        "times": mean / plan.step_time if plan.step_time else None,
        "late": _LATE,
        "rate": rate_text(plan.batch_size / mean),
        "idle": measured.bubble,
        "predicted_idle": plan.bubble,
        "unaccounted": measured.unaccounted,
        "phases": phases_met([*measured.programs, *predicted.programs]),
        "has_copies": bool(measured.copies or predicted.copies),
        "drawn": drawn_text(measured.programs, measured.copies) or drawn_text(predicted.programs, predicted.copies),
        "programs": _rows(profile, [row for row in profile.rows if row.to is None]),
        "copies": _rows(profile, [row for row in profile.rows if row.to is not None]),
        "kernels": profile.kernels,
        "devices": _devices(profile),
        "trace": download(profile.to_trace()),
        "json": download(profile.to_json()),
        "file": file_name(plan.function),
    }


def _rows(profile: Profile, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """With the length of a bar for each, of the longest."""
    longest = max((max(row.measured, row.predicted or 0.0) for row in rows), default=0.0) or 1.0
    return [
        {
            **dataclasses.asdict(row), "ratio": row.ratio, "rate": profile.bandwidth(row),
            "length": row.measured / longest, "predicted_length": (row.predicted or 0.0) / longest,
        }
        for row in rows
    ]  # fmt: skip


def _devices(profile: Profile) -> list[dict[str, Any]]:
    rows = []
    for k, group in enumerate(ReportRecord(profile.plan, None).groups):
        busy, expected = profile.measured.busy(k), profile.predicted.busy(k)
        rows.append(
            {
                "stages": ranges_text(group.stages), "devices": ranges_text(group.devices),
                "busy": seconds_text(busy), "idle": 1 - busy / profile.measured.seconds,
                "predicted_idle": 1 - expected / profile.predicted.seconds,
            }
        )  # fmt: skip
    return rows
