"""Reports as text, JSON, trace and page, and how nouns are shown in notebooks and terminals."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import json
import pathlib
from collections import defaultdict

import pytest
from rich.console import Console

from autopar.errors import ReportError
from autopar.reporting.report import Report
from tests.reports import NAMES, Page, details_of, from_file, plan_of


@pytest.mark.parametrize("name", NAMES)
def test_text_and_json(name: str) -> None:
    plan = plan_of(name)
    report = plan.report(explain=2)
    text = str(report)
    assert text.startswith(f"Report on train_step by method {plan.method} on test")
    for words in ("step time", "utilisation", "seconds of a step", "capacity", "operator", "link", "state"):
        assert words in text
    content = json.loads(report.to_json())
    assert content["step_time"] == plan.step_time
    assert content["split"]["compute"] == pytest.approx(report.split.compute if report.split else None)
    assert len(content["leaves"]) == len(plan.leaves)
    assert len(content["details"]["spans"]) == len(details_of(report).spans)
    # On one device there is nothing to choose.
    assert any(each["whys"] for each in content["details"]["operators"]) == (plan.stages[0].mesh.size > 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_is_the_timeline(name: str) -> None:
    report = plan_of(name).report(explain=0)
    details = details_of(report)
    trace = json.loads(report.to_trace())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(details.spans) + len(details.copies)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(report.plan.step_time * 1e6)
    # Slices of a thread follow one another, or Perfetto would put them elsewhere.
    rows = defaultdict(list)
    for event in slices:
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        assert all(after[0] >= before[1] - 1e-6 for before, after in itertools.pairwise(sorted(row)))
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(rows) <= named


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_well_formed_and_needs_no_network(name: str) -> None:
    plan = plan_of(name)
    other = plan_of("one program" if name == "one stage" else "one stage")
    report = plan.report(explain=2, against=other)
    text = report.to_html()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    for part in ("answer", "time", "figure-timeline", "figure-memory", "graph", "operators", "links", "leaves", "diff"):
        assert part in page.ids
    for address in page.addresses:
        assert address.startswith(("#", "data:"))
    assert "default-src 'none'" in text  # what a browser would load is refused
    assert len(text.encode()) < 3_000_000
    assert "NaN" not in page.text
    assert f"{report.utilisation or 0:.1%}".replace("%", " %") in page.text


def test_names_cannot_break_the_page() -> None:
    plan = plan_of("one stage")
    bad = '</script><script>alert(1)</script><b title="\'&">'
    leaves = (dataclasses.replace(plan.leaves[0], path=bad), *plan.leaves[1:])
    report = dataclasses.replace(plan.report(explain=0), plan=dataclasses.replace(plan, leaves=leaves, function=bad))
    text = report.to_html()
    assert "<script>alert" not in text
    assert bad in Page(text).text


def test_a_page_of_a_plan_from_a_file() -> None:
    page = Page(Report(from_file(plan_of("pipeline"))).to_html())
    assert "figure-timeline" not in page.ids
    assert "leaves" in page.ids
    assert "report on step.plan(state, batch, method=plan)" in page.text


def test_files_are_written_whole_or_not_at_all(tmp_path: pathlib.Path) -> None:
    report = plan_of("one stage").report(explain=0)
    report.save(tmp_path / "report.html")
    report.save_trace(tmp_path / "trace.json")
    assert "<h1>train_step on test" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(report.to_trace())
    with pytest.raises(ReportError, match="nowhere"):
        report.save(tmp_path / "nowhere" / "report.html")


def test_what_is_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bokeh" else found(name))
    report = plan_of("one stage").report(explain=0)
    with pytest.raises(ReportError, match=r"needs bokeh, not installed: pip install 'autopar\[report\]'"):
        report.to_html()
    assert str(report)


# Notebooks and terminals


def test_plans_and_clusters_are_shown_in_notebooks_and_terminals() -> None:
    plan = plan_of("pipeline")
    for noun, words in ((plan, "of memory"), (plan.cluster, "kept free")):
        html = noun._repr_html_()
        page = Page(html)
        assert words in page.text
        assert "script" not in html
        console = Console(file=io.StringIO(), width=200)
        console.print(noun)
        assert words in console.file.getvalue()  # type: ignore[attr-defined]
    assert all(line in Page(plan._repr_html_()).text for line in ("4 stages", "state[0]['embedding']"))
    bad = dataclasses.replace(plan.cluster, name="[bold]<b>")
    assert "[bold]<b>" in Page(bad._repr_html_()).text
