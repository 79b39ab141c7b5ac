"""Reports as pages, opened in a real browser: `python -m benchmarks.report --json FILE`.

Plans of GPT-39B on 64 H100s, its layers in a loop and unrolled, and a pipeline of it, are reported on, and the pages
opened in headless Chromium at the widths of a desk and of a phone. Bars: the size of the page, the seconds until all of
it is drawn, messages in the console, and pixels by which it is wider than its window.

Needs `pip install 'autopar[browser]'`, and Chromium with its driver.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import tempfile
import time
import warnings
from collections.abc import Mapping
from typing import Any

import autopar
from autopar import recipes
from autopar.ir.method import AUTO, Method
from benchmarks import common, published
from benchmarks.browser import PHONE, missing, opened

GPT_39B = {"vocab_size": 51200, "seq_len": 1024, "num_layers": 48, "hidden_size": 8192, "num_heads": 64}
WIDTHS = (1280, PHONE)
_TIMES = 5  # that a page is opened at each width; the median counts


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan of GPT-39B on 64 H100s."""

    scan: bool  # whether its layers are a loop
    method: Method


CASES: Mapping[str, Case] = {
    "gpt 39B, scanned": Case(True, AUTO),
    "gpt 39B, unrolled": Case(False, AUTO),
    "gpt 39B, unrolled, 8 stages": Case(False, recipes.megatron(1, 8, 8, 64)),
}


def reported(case: Case) -> tuple[str, dict[str, Any]]:
    """The page, and what it took to make."""
    common.use_virtual_devices(1)
    spec = {"family": "gpt", "alpa": False, "dtype": "bf16", "remat": True, **GPT_39B}
    function, state, batch = published.train_step(spec, 1024, 64, scan=case.scan)
    cluster = autopar.load_preset("dgx-h100", num_hosts=8)
    times = [time.perf_counter()]
    with warnings.catch_warnings(action="ignore"):
        plan = autopar.parallelize(function, cluster=cluster, method=case.method).plan(state, batch)
        times.append(time.perf_counter())
        report = plan.report()
        times.append(time.perf_counter())
        text = report.to_html()
    times.append(time.perf_counter())
    planning, gathering, writing = (after - before for before, after in itertools.pairwise(times))
    return text, {"planning_seconds": planning, "gathering_seconds": gathering, "writing_seconds": writing}


def rows_of(name: str, text: str, took: Mapping[str, float], folder: pathlib.Path) -> list[dict[str, Any]]:
    """A row for each width."""
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    rows = []
    for width in WIDTHS:
        seconds = []
        for _ in range(_TIMES):
            with opened(path, width) as page:
                seconds.append(page.seconds)
                errors, overflow = page.errors(), page.overflow
        median = sorted(seconds)[len(seconds) // 2]
        rows.append(
            {
                "case": name, "width": width, "megabytes": path.stat().st_size / 1e6, "seconds": median,
                "all_seconds": seconds, "errors": errors, "overflow": overflow, **took,
            }
        )  # fmt: skip
    return rows


def bars(rows: list[dict[str, Any]]) -> dict[str, common.Bar]:
    """Of the cases that were run."""
    return {
        "megabytes": common.Bar(max(row["megabytes"] for row in rows), 6.0, len(rows), unit="MB"),
        "seconds_to_open": common.Bar(max(row["seconds"] for row in rows), 3.0, len(rows), unit="s"),
        "console_messages": common.Bar(sum(len(row["errors"]) for row in rows), 0),
        "overflow": common.Bar(max(row["overflow"] for row in rows), 0),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description="Reports as pages, opened in a real browser."
    )
    parser.add_argument("--only", help="cases whose name contains this text")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the pages in this folder")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    if missing():
        parser.error(f"needs {missing()}, which is not here: apt-get install chromium chromium-driver")

    chosen = {name: case for name, case in CASES.items() if arguments.only is None or arguments.only in name}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        made = common.each_in_a_process(reported, chosen.values())
        for name, (text, took) in zip(chosen, made, strict=True):
            if arguments.keep is not None:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                (arguments.keep / f"{name.replace(', ', '-').replace(' ', '-')}.html").write_text(
                    text, encoding="utf-8"
                )
            mine = rows_of(name, text, took, pathlib.Path(folder))
            rows += mine
            for row in mine:
                print(
                    f"{name}, {row['width']} pixels: {row['megabytes']:.2f} MB, opened in {row['seconds']:.2f} s "
                    f"(planned in {row['planning_seconds']:.1f} s, reported in {row['gathering_seconds']:.1f} s)",
                    *row["errors"], sep="\n  ", flush=True,
                )  # fmt: skip
    common.report(bars(rows), rows, arguments.json)


if __name__ == "__main__":
    main()
