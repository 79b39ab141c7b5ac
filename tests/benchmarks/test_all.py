"""Suites one after the other: what is written, what is left out, and that a suite that fails stops no other."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import pytest

from benchmarks import all as every
from benchmarks.memory_corpus import Row
from benchmarks.suites import RESULTS, Suite

BROKEN = Suite("broken", "benchmarks.memory_corpus", "Broken", "", ("--no-such-option",))
ABSENT = Suite("absent", "benchmarks.nothing", "Absent", "", missing=lambda: "a GPU")


def test_a_suite_that_fails_stops_no_other(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [dataclasses.asdict(Row("case", family, "step", 0, 1000, 1000)) for family in ("gpt", "moe")]
    compiled = tmp_path / "compiled.json"
    compiled.write_text(json.dumps({"rows": rows}))
    corpus = Suite("corpus", "benchmarks.memory_corpus", "The corpus", "", ("--rows", str(compiled)))
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "broken.json").write_text("what was there before")

    assert not every.run_all([BROKEN, ABSENT, corpus], folder, quick=True)
    assert {path.name for path in folder.iterdir()} == {"broken.json", "corpus.json"}
    assert (folder / "broken.json").read_text() == "what was there before"
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("== ")]
    assert lines[0] == "== [1/3] broken: python -m benchmarks.memory_corpus --no-such-option"
    assert lines[1].startswith("== [1/3] broken: FAILED in ")
    assert lines[3] == "== [2/3] absent: left out: needs a GPU"
    assert lines[5].startswith("== [3/3] corpus: 2 of 2 bars hold, in ")

    found = json.loads((folder / "corpus.json").read_text())["provenance"]
    assert (found["suite"], found["arguments"]) == (corpus.module, ["--rows", str(compiled)])
    assert len(found["sources"]) == 16
    assert found["seconds"] > 0


def test_parts_never_go_where_whole_suites_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--quick", "--json", str(RESULTS)])
    with pytest.raises(SystemExit, match="2"):
        every.main()
