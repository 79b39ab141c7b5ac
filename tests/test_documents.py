"""The documents: their Python snippets run as they stand, their links lead somewhere, and the README stays short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
MOST_BYTES = 9_000  # of the README

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def snippets_of(page: Path) -> list[str]:
    """What stands in fences of `python`; those of `py` are not run."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def links_of(page: Path) -> list[str]:
    """The relative targets of links, without what follows a #."""
    text = re.sub(r"^(```+).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "code", text)
    targets = re.findall(r"\]\(([^()\s]+)\)", text) + re.findall(r"^\[[^]]+\]:\s*(\S+)", text, re.MULTILINE)
    paths = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:", target)]
    return [path for path in paths if path]


PAGES = [README, TUTORIAL, ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]


def test_readme_and_tutorial_have_snippets() -> None:
    assert snippets_of(README)
    assert snippets_of(TUTORIAL)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets_of(page)], ids=name_of)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """One after the other, in a process that imports JAX anew."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(snippets_of(page))],
        cwd=tmp_path,  # where they save plans, reports and checkpoints
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def test_readme_is_short() -> None:
    assert README.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    missing = [link for link in links_of(page) if not (page.parent / link).is_file()]
    assert not missing
