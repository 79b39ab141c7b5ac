"""Pages that need no network: Jinja2 writes them, Bokeh draws what is zoomed into."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from autopar.errors import ReportError
from autopar.ir.units import bytes_text, ranges_text, seconds_text

_NEEDED = ("bokeh", "jinja2")
_FOLDER = pathlib.Path(__file__).parent


def check_page() -> None:
    """Raise ReportError if what writes and draws a page is not installed."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ReportError(
            f"a report as a page needs {' and '.join(missing)}, not installed: pip install 'autopar[report]'."
        )


def rendered(name: str, scripts: str, figures: Mapping[str, str], data: str = "", **context: Any) -> str:
    """The page that a template makes.

    Args:
      name: of the template.
      scripts, figures: what Bokeh draws figures by, and what stands in their places.
      data: JSON for the page's own script.
      context: what else the template shows; texts are escaped.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"bytes": bytes_text, "seconds": seconds_text, "ranges": ranges_text}
    return environment.get_template(name).render(
        **context, scripts=Markup(scripts), figures={name: Markup(text) for name, text in figures.items()},
        data=Markup(data),
    )  # fmt: skip


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", " ").replace("\u2029", " ")


def download(text: str) -> str:
    """A link's address that holds a compressed file."""
    return "data:application/gzip;base64," + base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def file_name(function: str) -> str:
    """What files that are downloaded are called, without an ending."""
    return re.sub(r"\W+", "-", function).strip("-") or "plan"
