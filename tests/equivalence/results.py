"""The slow product's memory: one JSON line per case that was run, so that an interrupted run can go on.

A result counts for the sources and versions that it was made with, and for no others.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from typing import Any

import jax

from tests.equivalence.cases import Case
from tests.equivalence.compare import Deviation

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = ROOT / ".cache" / "equivalence.jsonl"
# All that a case imports, and how it is compiled.
SOURCES = ("autopar", "benchmarks/models", "cost_model", "passes", "runtime", "tests/conftest.py", "tests/equivalence")


def _git(*arguments: str, environment: dict[str, str] | None = None) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def version() -> dict[str, str]:
    """What a result depends on: git's hash of the sources it is made with, uncommitted changes included, and versions.

    It is taken with a copy of the index, so that what the user has staged stays as it is.
    """
    with tempfile.TemporaryDirectory() as folder:
        index = pathlib.Path(folder) / "index"
        present = ROOT / _git("rev-parse", "--git-path", "index")
        if present.exists():
            shutil.copyfile(present, index)
        environment = {**os.environ, "GIT_INDEX_FILE": str(index)}
        _git("add", "--all", environment=environment)
        tree = _git("write-tree", environment=environment)
    trees = [_git("rev-parse", f"{tree}:{path}") for path in SOURCES]
    sources = hashlib.sha1("\n".join(trees).encode()).hexdigest()
    return {"sources": sources, "jax": jax.__version__, "python": platform.python_version()}


def append(case: Case, deviation: Deviation | None, error: str = "", file: pathlib.Path = FILE) -> None:
    """Write one result; one short write, so that several workers can share the file."""
    line = {
        "version": version(),
        "case": str(case),
        "passed": deviation is not None and not error,
        "error": error,
        **(dataclasses.asdict(deviation) if deviation is not None else {}),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def latest(file: pathlib.Path = FILE) -> dict[str, dict[str, Any]]:
    """The last result of each case for this version, by the case's name. A line cut short is passed over."""
    found: dict[str, dict[str, Any]] = {}
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry.get("version") == version():
            found[entry["case"]] = entry
    return found
