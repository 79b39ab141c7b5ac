"""The page of figures: `python -m benchmarks.figures` writes docs/figures.md from the results, `--check` compares.

The page is made of the files in benchmarks/results and of nothing else. A result says what its sources were
(`benchmarks.sources`); where they have changed since, the page says "as of COMMIT". So a change of the code makes the
page differ from what it should be, until it is written again, which takes seconds; the benchmarks need not be run.

`--check` (a part of `make lint`) fails where the page is not what the results and the sources give, where a result is
not of a whole suite, and where another page quotes a result with changed sources without "as of COMMIT".
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.sources import ROOT, Sources
from benchmarks.suites import RESULTS, SUITES, Suite

PAGE = ROOT / "docs" / "figures.md"
_INTRODUCTION = """\
# Figures

Written by `python -m benchmarks.figures` from the files in `benchmarks/results/`, which `python -m benchmarks.all`
records; do not edit it. "As of" a commit: the code that a figure depends on has changed since it was recorded there;
a + after a commit: with changes that were not committed. A value is held against its limit, which it must not exceed;
without one it is only told. n: of how many it is a mean, a quantile or the largest.

Of what a figure is: *held out*: nothing was fitted to it, though most of it was there to be looked at while the cost
model was made; *fitted*: a constant was fitted to it, so that the figure says little; *developed on*: no constant was
fitted to it, but the code was developed and chosen by it.
"""


class StaleError(Exception):
    """A page or a result that is not what it should be; the message says what to do."""


def fresh(suite: Suite, result: Mapping[str, Any], sources: Sources) -> bool:
    """Whether a result was recorded with the sources that there are."""
    return bool(result["provenance"]["sources"] == sources.fingerprint(suite.module))


def read(suites: Sequence[Suite], folder: pathlib.Path, *, whole: bool) -> dict[str, dict[str, Any]]:
    """The results that there are, by suite.

    Raises:
      StaleError: one does not say where it comes from, or (`whole`) is not of the whole suite.
    """
    found = {}
    for suite in suites:
        path = suite.result(folder)
        if path.exists():
            found[suite.name] = json.loads(path.read_text(encoding="utf-8"))
            origin = found[suite.name].get("provenance")
            remedy = f"python -m benchmarks.all --only {suite.name}"
            if not origin:
                raise StaleError(f"{path} does not say where it comes from: {remedy}")
            if whole and origin["arguments"] != list(suite.arguments):
                ran = " ".join([origin["suite"], *origin["arguments"]])
                raise StaleError(f"{path} was recorded by {ran}, which is not the whole suite: {remedy}")
    return found


def page(suites: Sequence[Suite], results: Mapping[str, Mapping[str, Any]], sources: Sources) -> str:
    """The whole page."""
    there = [suite for suite in suites if suite.name in results]
    summary = ["| suite | bars that hold | recorded |", "|---|---|---|"]
    for suite in suites:
        title = f"[{suite.title}](#{_anchor(suite.title)})"
        if suite in there:
            result = results[suite.name]
            limited = [bar for bar in result["bars"].values() if bar["limit"] is not None]
            summary.append(f"| {title} | {sum(bar['holds'] for bar in limited)} of {len(limited)} "
                           f"| {_when(result, fresh(suite, result, sources))} |")  # fmt: skip
        else:
            summary.append(f"| {title} | | no result |")
    parts = [_INTRODUCTION, "\n".join(summary) + "\n"]
    parts += [_section(suite, results.get(suite.name), sources) for suite in suites]
    return "\n".join(parts)


def _section(suite: Suite, result: Mapping[str, Any] | None, sources: Sources) -> str:
    text = f"## {suite.title}\n\n{textwrap.fill(suite.about, 120)}\n\n"
    if result is None:
        return f"{text}`{suite.command}`: no result is recorded.\n"
    machine, origin = result["machine"], result["provenance"]
    seconds, command = origin["seconds"], " ".join(["python -m", origin["suite"], *origin["arguments"]])
    took = "" if seconds is None else f", in {_duration(seconds)}"
    cores = f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''} of {machine['cpu']}"
    if gpus := machine.get("gpus"):
        cores += f" and {len(gpus)} {' and '.join(dict.fromkeys(gpus))}"
    text += (
        f"{_when(result, fresh(suite, result, sources)).capitalize()}{took}, on {cores} with jax {machine['jax']} and "
        f"Python {machine['python']}: `{command}`.\n\n"
        "| figure | value | limit | | n | of what |\n|---|---|---|---|---|---|\n"
    )
    order = {"held out": 0, None: 0, "developed on": 1, "fitted": 2}
    bars = sorted(result["bars"].items(), key=lambda item: order[item[1].get("sample")])  # stable
    return text + "".join(_row(name, bar) for name, bar in bars)


def _row(name: str, bar: Mapping[str, Any]) -> str:
    verdict = "" if bar["limit"] is None else "holds" if bar["holds"] else "**broken**"
    limit = "" if bar["limit"] is None else _number(bar["limit"], bar.get("unit"))
    cells = name.replace("_", " "), _value(bar), limit, verdict, bar.get("n", ""), bar.get("sample", "")
    return f"| {' | '.join(map(str, cells))} |\n"


def _value(bar: Mapping[str, Any]) -> str:
    """With as many digits as tell it from its limit."""
    value, limit, unit = bar["value"], bar["limit"], bar.get("unit")
    if value is None:
        return "none"  # NaN or infinity
    digits = 4
    while limit not in (None, value) and _number(value, unit, digits) == _number(limit, unit, digits):
        digits += 1
    return _number(value, unit, digits)


def _number(number: float, unit: str | None, digits: int = 4) -> str:
    if unit == "%":
        return f"{100 * number:.{digits - 1}g} %"
    return f"{number:.{digits}g}" + (f" {unit}" if unit else "")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def _when(result: Mapping[str, Any], is_fresh: bool) -> str:
    origin = result["provenance"]
    return f"{'at' if is_fresh else 'as of'} {origin['commit']}, {origin['date']}"


def _anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def quoted_stale(text: str, results: Mapping[str, tuple[str, bool]]) -> list[str]:
    """Where a page quotes a result that is not fresh without saying so; of each: its commit, and whether it is."""
    wrong = []
    for paragraph in re.split(r"\n\s*\n", text):
        for name in re.findall(r"benchmarks/results/([\w-]+\.json)", paragraph):
            commit, is_fresh = results.get(name, ("", False))
            if not is_fresh and not (commit and f"as of {commit}" in paragraph.lower()):
                wrong.append(f"{name}: {paragraph.strip()[:80]}")
    return wrong


def check() -> list[str]:
    """What is wrong with the pages of this checkout."""
    sources = Sources()
    try:
        results = read(SUITES, RESULTS, whole=True)
    except StaleError as error:
        return [str(error)]
    wrong = []
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page(SUITES, results, sources):
        wrong.append(f"{PAGE.relative_to(ROOT)} is not what the results and the code say: python -m benchmarks.figures")
    known = {suite.name for suite in SUITES}
    wrong += [f"{path} is of no suite" for path in sorted(RESULTS.glob("*.json")) if path.stem not in known]
    recorded = {
        suite.result().name: (results[suite.name]["provenance"]["commit"], fresh(suite, results[suite.name], sources))
        for suite in SUITES
        if suite.name in results
    }
    for other in sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")} - {PAGE}):
        stale = quoted_stale(other.read_text(encoding="utf-8"), recorded)
        wrong += [f'{other.name} quotes what is not fresh without "as of COMMIT": {each}' for each in stale]
    return wrong


def write(folder: pathlib.Path, path: pathlib.Path, *, whole: bool) -> None:
    """Write the page of a folder of results; `whole`: of whole suites only."""
    path.write_text(page(SUITES, read(SUITES, folder, whole=whole), Sources()), encoding="utf-8")
    print(f"wrote {path}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description="The page of figures.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where pages are wrong")
    arguments = parser.parse_args()
    if not arguments.check:
        write(RESULTS, PAGE, whole=True)
        return
    wrong = check()
    print(*wrong, sep="\n", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
