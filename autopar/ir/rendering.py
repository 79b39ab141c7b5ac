"""What Rich renders, as HTML for notebooks."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, RenderableType

_FORMAT = '<pre style="overflow-x: auto; white-space: pre; line-height: 1.4; {stylesheet}">{code}</pre>'


def as_html(parts: Sequence[RenderableType]) -> str:
    """A block that scrolls sideways where it is wider than the page, without scripts."""
    console = Console(
        file=io.StringIO(), width=_WIDEST, record=True, color_system="truecolor", force_jupyter=False,
        legacy_windows=False,
    )  # fmt: skip
    for part in parts:
        console.print(part)
    html = console.export_html(inline_styles=True, code_format=_FORMAT.replace("{stylesheet}", ""))
    return "\n".join(line.rstrip() for line in html.splitlines())


_WIDEST = 10_000  # characters: tables are as wide as they need to be
