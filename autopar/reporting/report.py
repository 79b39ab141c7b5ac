"""The report of a plan, as text, JSON, a page and a trace."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from autopar.errors import ReportError
from autopar.ir.json_file import write_path
from autopar.ir.plan_text import render
from autopar.reporting.page import page
from autopar.reporting.perfetto import trace_json
from autopar.reporting.record import ReportRecord
from autopar.reporting.report_json import report_to_json
from autopar.reporting.text import report_parts

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclasses.dataclass(frozen=True)
class Report(ReportRecord):
    """A plan with all that is known and predicted about it: `print` it, or `save` one page of it."""

    def to_json(self) -> str:
        """All of it but the search's choices, which are in the plan file, as JSON."""
        return report_to_json(self)

    def to_text(self, max_rows: int | None = 40) -> str:
        """What `print(report)` shows, with at most `max_rows` rows a table (None: all)."""
        return render(report_parts(self, max_rows))

    def to_html(self) -> str:
        """One page that needs no network.

        Raises:
          ReportError: what draws it is not installed.
        """
        return page(self)

    def to_trace(self) -> str:
        """The timeline as JSON that Perfetto and Chrome's about:tracing read.

        Raises:
          ReportError: the plan was read from a file, so that there is no timeline.
        """
        return trace_json(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, whole or not at all.

        Raises:
          ReportError: the file cannot be written, or as for `to_html`.
        """
        write_path(path, self.to_html(), "report", ReportError)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to a file, whole or not at all.

        Raises:
          ReportError: the file cannot be written, or as for `to_trace`.
        """
        write_path(path, self.to_trace(), "trace", ReportError)

    def __str__(self) -> str:
        return self.to_text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from report_parts(self, 40)
