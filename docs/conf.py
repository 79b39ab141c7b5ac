"""The documentation site, which `make site` builds with Sphinx."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

import autopar

project = "autopar"
author = copyright = "the autopar authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
default_role = "py:obj"  # docstrings write `name`: a link where there is something of that name, else code
smartquotes = False
nitpicky = False  # the types of JAX, NumPy and Orbax are not part of this site

myst_heading_anchors = 3  # links such as figures.md#weak-scaling-of-gpt-executed

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
add_module_names = False
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "autopar"
html_copy_source = False

# Dataclasses that users make themselves: of others the constructor is left out.
_MADE_BY_USERS = {"Cluster", "DeviceKind", "Host", "Link", "Measured", "Report", "Rule", "XlaBackend"}
# Classes most of whose fields are for autopar itself, and the others.
_SOME_FIELDS = {"Executable": ("plan", "graph"), "Planned": ("memory_limit", "seconds"), "Traced": ()}

_COLON = "\ue000"  # stands for a colon while napoleon reads a docstring


def comments_of(cls: type) -> dict[str, str]:
    """What the source of a dataclass says of its fields: in comments behind a field, or in the lines above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in textwrap.dedent(inspect.getsource(cls)).splitlines():
        code, _, comment = (part.strip() for part in line.partition("#"))
        field = re.match(r"    (\w+): ", line)
        if field:
            found[field[1]] = " ".join([*above, comment]).strip()
        above = [*above, comment] if comment and not code else []
    return found


def adapt_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Let a name be followed by letters, as in "`Cluster`s", which reStructuredText does not allow as it stands.

    And the first line of a property have a colon, before which napoleon would look for a type.
    """
    lines[:] = [re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]
    if what == "property" and lines:
        lines[0] = lines[0].replace(":", _COLON)


def restore_colons(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """What `adapt_text` has hidden from napoleon."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def escaped(text: str) -> str:
    """Plain text as reStructuredText: nothing but what stands in backquotes is markup."""
    text = re.sub(r"^\.\.", r"\\..", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_|\\])", r"\\\1", part)
                   for part in re.split(r"(`[^`]*`)", text))  # fmt: skip


def describe_fields(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """List the fields of a dataclass, but those of a base class that the site describes as well."""
    if what != "class" or not dataclasses.is_dataclass(obj):
        return
    bases = [base for base in obj.__mro__[1:] if dataclasses.is_dataclass(base)]
    described = {
        field.name
        for base in bases
        if getattr(autopar, base.__name__, None) is base
        for field in dataclasses.fields(base)
    }
    comments: dict[str, str] = {}
    for cls in (*reversed(bases), obj):
        comments.update(comments_of(cls))
    wanted = _SOME_FIELDS.get(obj.__name__, [field.name for field in dataclasses.fields(obj)])
    lines.append("")
    for field in dataclasses.fields(obj):
        if field.name in wanted and field.name not in described:
            lines.append(f":ivar {field.name}: {escaped(comments.get(field.name, ''))}")
            lines.append(f":vartype {field.name}: {field.type}")


def short_constructor(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, annotation: str
) -> tuple[str, None] | None:
    """The parameters of a dataclass without their types, which its fields have; none where autopar alone makes it."""
    if what != "class":
        return None
    if obj.__name__ not in _MADE_BY_USERS:
        return "", None
    missing = dataclasses.MISSING
    parameters = [
        field.name if field.default is missing and field.default_factory is missing else f"{field.name}=..."
        for field in dataclasses.fields(obj)
        if field.init
    ]
    return f"({', '.join(parameters)})", None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", describe_fields, priority=400)  # both before napoleon
    app.connect("autodoc-process-docstring", adapt_text, priority=400)
    app.connect("autodoc-process-docstring", restore_colons, priority=600)
    app.connect("autodoc-process-signature", short_constructor)
