"""The page of figures: what it says of results, fresh and old, and what the check finds."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from benchmarks import figures
from benchmarks.sources import Sources
from benchmarks.suites import SUITES, Suite

SUITE = Suite("solver", "benchmarks.solver", "The solver's figures", "What it solves.", ("--seed", "1"))


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "solver.py").write_text("LIMIT = 3\n")
    return tmp_path


def result(sources: str | None, **bars: dict[str, Any]) -> dict[str, Any]:
    return {
        "provenance": {
            "suite": SUITE.module, "arguments": ["--seed", "1"], "sources": sources, "commit": "04a1148",
            "date": "2026-11-24", "seconds": 401.2,
        },
        "machine": {"cpu": "AMD EPYC", "cores": 2, "jax": "0.10.2", "python": "3.11.7"},
        "bars": bars, "rows": [],
    }  # fmt: skip


def recorded(checkout: pathlib.Path, **bars: dict[str, Any]) -> dict[str, Any]:
    return result(Sources(checkout).fingerprint(SUITE.module), **bars)


def written(checkout: pathlib.Path, found: dict[str, Any]) -> str:
    return figures.page([SUITE], {SUITE.name: found}, Sources(checkout))


def test_a_fresh_page(checkout: pathlib.Path) -> None:
    bars: dict[str, dict[str, Any]] = {
        "fitted_error": {"value": 0.01, "limit": None, "holds": True, "n": 3, "sample": "fitted", "unit": "%"},
        "error": {"value": 0.04838, "limit": 0.04, "holds": False, "n": 7, "sample": "held out", "unit": "%"},
        "seconds_to_solve": {"value": None, "limit": 60.0, "holds": False, "unit": "s"},
    }
    text = written(checkout, recorded(checkout, **bars))
    assert text == written(checkout, recorded(checkout, **bars))
    assert "| [The solver's figures](#the-solvers-figures) | 0 of 2 | at 04a1148, 2026-11-24 |" in text
    assert text.endswith(
        """
## The solver's figures

What it solves.

At 04a1148, 2026-11-24, in 7 minutes, on 2 cores of AMD EPYC with jax 0.10.2 and Python 3.11.7: \
`python -m benchmarks.solver --seed 1`.

| figure | value | limit | | n | of what |
|---|---|---|---|---|---|
| error | 4.84 % | 4 % | **broken** | 7 | held out |
| seconds to solve | none | 60 s | **broken** |  |  |
| fitted error | 1 % |  |  | 3 | fitted |
"""
    )


def test_a_figure_is_told_from_its_limit(checkout: pathlib.Path) -> None:
    bars: dict[str, dict[str, Any]] = {
        "ratio": {"value": 1.000464, "limit": 1.0, "holds": False},
        "at_the_limit": {"value": 1.0, "limit": 1.0, "holds": True},
        "share": {"value": 0.0999996, "limit": 0.1, "holds": True, "unit": "%"},
    }
    text = written(checkout, recorded(checkout, **bars))
    assert "| ratio | 1.0005 | 1 | **broken** |" in text
    assert "| at the limit | 1 | 1 | holds |" in text
    assert "| share | 9.99996 % | 10 % | holds |" in text


def test_a_changed_source_makes_the_page_old(checkout: pathlib.Path) -> None:
    found = recorded(checkout)
    before = written(checkout, found)
    (checkout / "benchmarks" / "solver.py").write_text("# Seconds.\nLIMIT = 3\n")
    assert written(checkout, found) == before
    (checkout / "benchmarks" / "solver.py").write_text("LIMIT = 4\n")
    after = written(checkout, found)
    assert after == before.replace("at 04a1148", "as of 04a1148").replace("At 04a1148", "As of 04a1148")
    assert after != before
    assert "as of 04a1148" in written(checkout, result(None))


def test_a_suite_without_a_result_is_on_the_page(checkout: pathlib.Path) -> None:
    text = figures.page([SUITE], {}, Sources(checkout))
    assert "`python -m benchmarks.solver --seed 1`: no result is recorded." in text


def test_results_are_of_whole_suites(tmp_path: pathlib.Path) -> None:
    found = result("")
    SUITE.result(tmp_path).write_text(json.dumps(found))
    assert figures.read([SUITE], tmp_path, whole=True) == {SUITE.name: found}
    found["provenance"]["arguments"] = ["--seed", "1", "--only", "A"]
    SUITE.result(tmp_path).write_text(json.dumps(found))
    assert figures.read([SUITE], tmp_path, whole=False) == {SUITE.name: found}
    with pytest.raises(figures.StaleError, match=r"benchmarks\.solver --seed 1 --only A, which is not the whole suite"):
        figures.read([SUITE], tmp_path, whole=True)
    SUITE.result(tmp_path).write_text(json.dumps({**found, "provenance": None}))
    with pytest.raises(figures.StaleError, match="does not say where it comes from"):
        figures.read([SUITE], tmp_path, whole=False)


def test_other_pages_quote_what_is_fresh_or_say_as_of() -> None:
    results = {"new.json": ("1111111", True), "old.json": ("2222222", False)}
    good = "3 (`benchmarks/results/new.json`).\n\nAs of 2222222, it was 4 (`benchmarks/results/old.json`)."
    assert figures.quoted_stale(good, results) == []
    bad = ["It is 4 (`benchmarks/results/old.json`).", "As of 1111111, it was 4 (`benchmarks/results/old.json`)."]
    bad.append("It is 5 (`benchmarks/results/gone.json`), as of .")
    assert len(figures.quoted_stale("\n\n".join([good, *bad]), results)) == 3


def test_the_check_looks_at_the_pages(
    checkout: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, docs = checkout / "benchmarks" / "results", checkout / "docs"
    results.mkdir()
    docs.mkdir()
    for name, value in {
        "ROOT": checkout, "PAGE": docs / "figures.md", "RESULTS": results, "SUITES": [SUITE],
        "Sources": lambda: Sources(checkout),
    }.items():  # fmt: skip
        monkeypatch.setattr(figures, name, value)
    SUITE.result(results).write_text(json.dumps(recorded(checkout)))
    [missing] = figures.check()
    assert "docs/figures.md is not what" in missing
    figures.write(results, docs / "figures.md", whole=True)
    assert figures.check() == []

    (checkout / "benchmarks" / "solver.py").write_text("LIMIT = 4\n")
    [stale] = figures.check()
    assert "python -m benchmarks.figures" in stale
    figures.write(results, docs / "figures.md", whole=True)
    assert figures.check() == []

    (checkout / "README.md").write_text("It is 4 (`benchmarks/results/solver.json`).")
    (results / "other.json").write_text("{}")
    assert [text.split()[0].split("/")[-1] for text in figures.check()] == ["other.json", "README.md"]


def test_suites_are_named_and_linked_apart() -> None:
    assert len({suite.name for suite in SUITES}) == len({suite.title for suite in SUITES}) == len(SUITES)
    known = Sources()
    assert all(known.modules(suite.module) for suite in SUITES)
