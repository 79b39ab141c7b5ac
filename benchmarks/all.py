"""All suites, one after the other: `python -m benchmarks.all [--quick] [--only NAME...] [--json DIR]`.

Each runs in a process of its own, since it may want other devices and its memory counts. A suite that fails leaves the
result that was there before; the others go on. What a suite needs and is not here (a GPU, Chromium, XLA's compiler for
GPUs) is told, and the suite left out. At the end the page that quotes the results is written.

Nothing else should run on the machine meanwhile. Exit code 1: a suite failed; bars that do not hold are no failure.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks import figures
from benchmarks.sources import ROOT
from benchmarks.suites import RESULTS, SUITES, Suite

QUICK = ROOT / "build" / "benchmarks"


def run(suite: Suite, folder: pathlib.Path, *, quick: bool, keep: pathlib.Path | None = None) -> str:
    """Run a suite, whose output goes where this process's goes; what to say of it.

    `keep`: where it finds what it had finished when it was ended early, if it can go on then.
    """
    missing = suite.missing()
    if missing:
        return f"left out: needs {missing}"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        written = suite.result(pathlib.Path(scratch))
        arguments = [*suite.arguments, *(suite.quick if quick else ()), "--json", str(written)]
        if keep is not None and suite.keeps:
            arguments += ["--keep", str(keep / suite.name)]
        code = subprocess.run([sys.executable, "-m", suite.module, *arguments], cwd=ROOT, check=False).returncode
        took = f"in {time.monotonic() - started:.0f} s"
        if code or not written.exists():
            return f"FAILED {took}, exit code {code}"
        bars = [bar for bar in json.loads(written.read_text())["bars"].values() if bar["limit"] is not None]
        shutil.move(written, suite.result(folder))
    return f"{sum(bar['holds'] for bar in bars)} of {len(bars)} bars hold, {took}"


def run_all(suites: Sequence[Suite], folder: pathlib.Path, *, quick: bool, keep: pathlib.Path | None = None) -> bool:
    """Run suites one after the other; whether none failed."""
    folder.mkdir(parents=True, exist_ok=True)
    started, said = time.monotonic(), []
    for at, suite in enumerate(suites, start=1):
        command = " ".join([suite.command, *(suite.quick if quick else ())])
        print(f"== [{at}/{len(suites)}] {suite.name}: {command}", flush=True)
        said.append(f"{suite.name}: {run(suite, folder, quick=quick, keep=keep)}")
        print(f"== [{at}/{len(suites)}] {said[-1]}", flush=True)
    print(f"== all in {time.monotonic() - started:.0f} s", *said, sep="\n   ", flush=True)
    return not any(": FAILED" in text for text in said)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description="All suites, one after the other.")
    parser.add_argument(
        "--quick", action="store_true", help=f"small parts of them; results go to {QUICK.relative_to(ROOT)}"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[suite.name for suite in SUITES],
        metavar="NAME",
        help=", ".join(suite.name for suite in SUITES),
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="DIR", help="where results and the page go instead")
    parser.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="planner: go on where a run was ended early")
    arguments = parser.parse_args()
    folder = (arguments.json or (QUICK if arguments.quick else RESULTS)).absolute()
    if arguments.quick and folder == RESULTS:
        parser.error(f"--quick: parts of suites never go to {RESULTS}, where those of whole suites are")

    chosen = [suite for suite in SUITES if not arguments.only or suite.name in arguments.only]
    keep = None if arguments.keep is None else arguments.keep.absolute()
    good = run_all(chosen, folder, quick=arguments.quick, keep=keep)
    page = figures.PAGE if folder == RESULTS else folder / "figures.md"
    figures.write(folder, page, whole=not arguments.quick)
    sys.exit(not good)


if __name__ == "__main__":
    main()
