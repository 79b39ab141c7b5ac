"""The intra-op solver on contest instances: `python -m benchmarks.intra_op_solver [FILE...] --json FILE`.

Instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (google/iopddl), plain or gzipped, those in
`data/iopddl` unless others are named: one strategy per node, costs of nodes and edges, at every time a limit on the sum
of the live nodes' usages.

Rules, as the contest's:
1. Costs are integers. One of 1e18 or more is infinite: a choice that has it is no solution. Parallel edges add up.
2. Intervals are half-open; [t, t] is never live. A usage that equals the limit fits.
3. The time of an instance is wall time from opening the file to having the choice, compilation included.
`Instance.evaluate` knows only these rules and integers, nothing of the solver; what it says is what is reported.

Bars, of the instances whose best known cost is given (`best_costs.json` beside the files, or `--best`): mean of best
known cost / cost at least 0.995, none below 0.98, no lower bound above a best known cost, every choice feasible, and
no time over the limit. The limits in seconds are the contest's unless `--seconds` is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import pathlib
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.passes.solver.problem import Infeasible, Problem, Usage
from autopar.passes.solver.solve import solve
from benchmarks import common

INSTANCES = pathlib.Path(__file__).parent / "data" / "iopddl"
INFINITE = 10**18
SECONDS_PER_FIVE = 60  # the contest's limit: a minute for instances A to E, two for F to J, and so on
RESERVE = 0.08  # of the limit, for what a solver does after its own has passed: at least one second


@dataclasses.dataclass(frozen=True)
class Instance:
    """A contest file as it is: integers."""

    name: str
    intervals: list[tuple[int, int]]  # per node, half-open
    costs: list[list[int]]  # per node and strategy
    usages: list[list[int]]  # bytes per node and strategy
    edges: list[tuple[int, int]]
    edge_costs: list[list[int]]  # row-major [K_u, K_v]
    limit: int  # bytes

    @staticmethod
    def read(path: pathlib.Path) -> Instance:
        """From JSON, plain or gzipped."""
        content = path.read_bytes()
        problem = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["problem"]
        nodes, edges = problem["nodes"], problem["edges"]
        return Instance(
            problem.get("name", path.name.split(".")[0]),
            nodes["intervals"],
            nodes["costs"],
            nodes["usages"],
            edges["nodes"],
            edges["costs"],
            int(problem["usage_limit"]),
        )

    def evaluate(self, choice: Sequence[int]) -> int | None:
        """The cost of a choice; None if it is infinite or over the limit."""
        if len(choice) != len(self.costs):
            raise ValueError(f"a choice of {len(choice)} strategies for {len(self.costs)} nodes")
        terms = [costs[k] for costs, k in zip(self.costs, choice, strict=True)]
        for (u, v), costs in zip(self.edges, self.edge_costs, strict=True):
            terms.append(costs[choice[u] * len(self.costs[v]) + choice[v]])
        changes: dict[int, int] = {}
        for (start, end), usages, k in zip(self.intervals, self.usages, choice, strict=True):
            if end > start:
                changes[start] = changes.get(start, 0) + usages[k]
                changes[end] = changes.get(end, 0) - usages[k]
        load = peak = 0
        for instant in sorted(changes):
            load += changes[instant]
            peak = max(peak, load)
        if max(terms, default=0) >= INFINITE or peak > self.limit:
            return None
        return sum(terms)

    def problem(self) -> Problem:
        """The same in the solver's terms."""
        costs = tuple(_finite(costs) for costs in self.costs)
        edges = tuple(
            (u, v, _finite(pair).reshape(costs[u].size, costs[v].size))
            for (u, v), pair in zip(self.edges, self.edge_costs, strict=True)
        )
        usages = tuple(
            (Usage(start, end, np.array(amounts, dtype=np.float64)),) if end > start else ()
            for (start, end), amounts in zip(self.intervals, self.usages, strict=True)
        )
        return Problem(costs, edges, usages, float(self.limit))


def _finite(costs: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.array(costs, dtype=np.float64)
    return np.where(values >= INFINITE, np.inf, values)


def letter(path: pathlib.Path) -> str:
    """What the contest calls the instance: the X of `asplos-2025-iopddl-X.json.gz`; else the file's name."""
    found = re.fullmatch(r".*-([A-Z])\.json(\.gz)?", path.name)
    return found.group(1) if found else path.name.split(".")[0]


def contest_seconds(name: str) -> float:
    """The contest's limit; its shortest for other files."""
    group = (ord(name) - ord("A")) // 5 if re.fullmatch("[A-Y]", name) else 0
    return float(SECONDS_PER_FIVE * (1 + group))


def known_costs(paths: Sequence[pathlib.Path], best: pathlib.Path | None) -> dict[str, int]:
    """The best known cost of each instance that has one."""
    files = [best] if best else sorted({path.parent / "best_costs.json" for path in paths})
    found: dict[str, int] = {}
    for file in files:
        if best or file.exists():
            found |= {name: row["best_known"] for name, row in json.loads(file.read_text())["instances"].items()}
    return found


def run(path: pathlib.Path, seconds: float, seed: int, best_known: int | None) -> tuple[dict[str, Any], list[int]]:
    """Solve one instance; its row, and the choice."""
    started, worked = time.monotonic(), time.process_time()
    instance = Instance.read(path)
    problem = instance.problem()
    left = seconds - max(1.0, RESERVE * seconds) - (time.monotonic() - started)
    row: dict[str, Any] = {"instance": letter(path), "nodes": problem.num_nodes, "limit_seconds": seconds, "seed": seed}
    choice: list[int] = []
    try:
        solution = solve(problem, seconds=max(left, 0.0), seed=seed)
    except Infeasible as error:
        row |= {"cost": None, "lower_bound": None, "message": str(error)}
    else:
        choice = list(solution.choice)
        row |= {"lower_bound": solution.lower_bound, "optimal": solution.optimal}
    row |= {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - worked}
    row["peak_gib"] = common.most_memory() / 2**30  # of the process so far
    if choice:
        row["cost"] = instance.evaluate(choice)
    row["best_known"] = best_known
    row["ratio"] = best_known / row["cost"] if best_known is not None and row["cost"] else None
    return row, choice


def bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, common.Bar]:
    """What is held against the limits."""
    known = [row for row in rows if row["best_known"] is not None]
    losses = [1 - (row["ratio"] or 0.0) for row in known]
    found = {
        "infeasible": common.Bar(float(sum(row["cost"] is None for row in rows)), 0.0),
        "time_over_limit": common.Bar(max(row["seconds"] / row["limit_seconds"] for row in rows), 1.0),
    }
    if known:
        above = [(row["lower_bound"] or -math.inf) / row["best_known"] for row in known]
        found["mean_loss"] = common.Bar(statistics.fmean(losses), 0.005, len(known), "developed on", "%")
        found["largest_loss"] = common.Bar(max(losses), 0.02, len(known), "developed on", "%")
        found["bound_over_best_known"] = common.Bar(max(above), 1 + 1e-9, len(known))
        proved = sum(bool(row.get("optimal")) for row in known)
        found["proved_optimal"] = common.Bar(proved, None, len(known))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.intra_op_solver", description="The intra-op solver on contest instances."
    )
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE", help="instances; else those at hand")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="per instance; the contest's limit if not given")
    parser.add_argument("--best", type=pathlib.Path, help="best known costs; best_costs.json beside the files if there")
    parser.add_argument("--out", type=pathlib.Path, help="write the choices to this folder, a JSON list per instance")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()

    paths = arguments.files or sorted(INSTANCES.glob("*.json.gz"))
    best = known_costs(paths, arguments.best)
    rows = []
    for path in paths:
        name = letter(path)
        row, choice = run(path, arguments.seconds or contest_seconds(name), arguments.seed, best.get(name))
        rows.append(row)
        if arguments.out is not None and choice:
            common.write_json(arguments.out / f"{name}.json", {"choice": choice, "cost": row["cost"]})
        ratio = f", best known / cost {row['ratio']:.5f}" if row["ratio"] else ""
        print(
            f"{name}: cost {row['cost']}, lower bound {row['lower_bound']}"
            f"{' (optimal)' if row.get('optimal') else ''}{ratio}; {row['seconds']:.0f} s of "
            f"{row['limit_seconds']:.0f} s, {row['cpu_seconds']:.0f} s of CPU, {row['peak_gib']:.1f} GiB",
            flush=True,
        )
    common.report(bars(rows), rows, arguments.json)


if __name__ == "__main__":
    main()
