"""The cost model against published measurements: `python -m benchmarks.accuracy --measured FILE... --json FILE`.

Every row is planned as it was published (stages, meshes, microbatches, what is data parallel, ZeRO; shardings that
Alpa's solver chose, by its objective) on the preset of its machine and priced; one set of constants per device kind and
link kind, the presets'. Rows whose plan is not known exactly count for the ranking only; suspect and projected ones,
and those that no method of ours says, are listed.

Bars: mean absolute error of the step time at most 10 % over the end-to-end rows of each family, 15 % over the ablation
of sharding within one stage, 10 % of the peak memory; out of memory predicted where it was measured; and of the pairs
of methods of a case that differ by more than 5 %, at most a tenth in the wrong order. Rows that a constant of a preset
was fitted to (`published.FITTED`) count for none of them: they are scored apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autopar.errors import InfeasiblePlanError, PlanError
from autopar.ir.mesh import Cluster
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.planning.traced import TracedStep
from benchmarks import common, published
from benchmarks.published import Measurement, Way
from benchmarks.traced import trace

DATA = pathlib.Path(__file__).parent / "data"
DEFAULT = (DATA / "alpa_osdi22_measured.json", DATA / "megatron_sc21_a100.csv")
CLEAR = 0.05  # relative: methods that differ by more have an order


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the plan says; no time where it does not fit."""

    seconds: float | None
    memory: float | None  # bytes, of what arrays take on the device that needs most
    planning: float  # CPU seconds
    error: str = ""


def predicted(rows: Iterable[Measurement], at_once: int) -> Iterator[tuple[Measurement, Prediction | None]]:
    """Each row by the best of its ways; None if there is none.

    Each program is planned once, in a process of its own: rows of different names may have run the same.
    """
    rows = list(rows)
    programs = {_key(row, way): (row, way) for row in rows for way in _counting(row)}
    plans = zip(programs, common.each_in_a_process(_predict, programs.values(), at_once), strict=True)
    seen: dict[Any, Prediction] = {}
    for row in rows:
        keys = [_key(row, way) for way in _counting(row)]
        while not seen.keys() >= set(keys):
            seen.update([next(plans)])
        found = [seen[key] for key in keys]
        yield row, min(found, key=lambda p: math.inf if p.seconds is None else p.seconds, default=None)


def _counting(row: Measurement) -> tuple[Way, ...]:
    """Its ways, where it is scored or counts for the order of methods."""
    return row.ways if row.ranked or not row.doubt else ()


def _key(row: Measurement, way: Way) -> Any:
    return json.dumps(row.spec, sort_keys=True), row.batch_size, row.cluster, way


def _predict(program: tuple[Measurement, Way]) -> Prediction:
    common.use_virtual_devices(1)
    row, way = program
    started = time.process_time()
    function, state, batch = row.step(way)
    method = dataclasses.replace(way.method, remat=False)  # what ran computed again what the model says
    try:
        with warnings.catch_warnings(action="ignore"):
            step = trace(
                function, state, batch, num_microbatches=way.num_microbatches, reduces_own_dtype=row.reduces_own_dtype
            )
            plan = _searched(step, row.cluster, method)
    except (InfeasiblePlanError, PlanError) as error:
        return Prediction(None, None, time.process_time() - started, f"{type(error).__name__}: {error}")
    return Prediction(plan.step_time, plan.peak_memory, time.process_time() - started)


def _searched(step: TracedStep, cluster: Cluster, method: Method) -> Plan:
    """The plan of a method, with the shardings that Alpa's solver would have chosen where they were its choice."""
    if method.objective == "step":
        return step.search(cluster, method)[0]
    found, _ = step.search(published.seen_by_alpa(cluster), method)
    plan = step.restore(dataclasses.replace(found, cluster=cluster), cluster).plan
    for number, stage in enumerate(plan.stages):
        if stage.memory.total > stage.memory.capacity:
            raise InfeasiblePlanError(f"stage {number} needs {stage.memory.total} of {stage.memory.capacity} bytes")
    return plan


def pairs(rows: Sequence[tuple[Measurement, Prediction]]) -> tuple[int, list[str]]:
    """How many pairs of methods of a case have an order, and those that are predicted in the other one."""
    cases: dict[str, list[tuple[Measurement, Prediction]]] = defaultdict(list)
    for row, found in rows:
        if row.ranked and (row.seconds is not None or not row.fits):
            cases[row.case].append((row, found))
    count, wrong = 0, []
    for case, members in cases.items():
        for (a, found_a), (b, found_b) in itertools.combinations(members, 2):
            measured = [math.inf if row.seconds is None else row.seconds for row in (a, b)]
            guessed = [math.inf if found.seconds is None else found.seconds for found in (found_a, found_b)]
            if max(measured) > (1 + CLEAR) * min(measured):
                count += 1
                if (measured[0] < measured[1]) != (guessed[0] < guessed[1]):
                    wrong.append(f"{case}: {a.method} {measured[0]:.4g} s ({guessed[0]:.4g}), "
                                 f"{b.method} {measured[1]:.4g} s ({guessed[1]:.4g})")  # fmt: skip
    return count, wrong


def error(predicted: float, measured: float) -> float:
    """Relative."""
    return predicted / measured - 1


def bars(rows: Sequence[tuple[Measurement, Prediction]]) -> dict[str, common.Bar]:
    """Of the rows with a prediction: held out ones first, then, without limits, those that constants were fitted to."""
    held_out = [(row, found) for row, found in rows if not row.fitted]
    fitted = [(row, found) for row, found in rows if row.fitted]
    result = _bars("", held_out, "held out")
    count, wrong = pairs(held_out)
    result |= _of_pairs("", count, len(wrong), "held out")
    for name, bar in _bars("fitted_", fitted, "fitted").items():
        result[name] = dataclasses.replace(bar, limit=None)
    count_all, wrong_all = pairs(rows)  # one of a pair may be held out
    for name, bar in _of_pairs("fitted_", count_all - count, len(wrong_all) - len(wrong), "fitted").items():
        result[name] = dataclasses.replace(bar, limit=None)
    return result


def _bars(prefix: str, rows: Sequence[tuple[Measurement, Prediction]], sample: common.Sample) -> dict[str, common.Bar]:
    times: dict[str, list[float]] = defaultdict(list)
    memory: list[float] = []
    judged = [(row, found) for row, found in rows if not row.doubt]
    for row, found in judged:
        if row.seconds is not None and found.seconds is not None:
            name = f"time_ablation_{row.family}" if row.ablation else f"time_{row.family}"
            times[name].append(abs(error(found.seconds, row.seconds)))
        if row.memory is not None and found.memory is not None:
            memory.append(abs(error(found.memory, row.memory)))
    result = {
        f"{prefix}{name}": common.Bar(
            statistics.fmean(errors), 0.15 if "ablation" in name else 0.1, len(errors), sample, "%"
        )
        for name, errors in sorted(times.items())
    }
    if memory:
        result[f"{prefix}memory"] = common.Bar(statistics.fmean(memory), 0.1, len(memory), sample, "%")
    missed = sum(row.fits != (found.seconds is not None) for row, found in judged)
    result[f"{prefix}wrong_about_fitting"] = common.Bar(missed, 0, len(judged), sample)
    return result


def _of_pairs(prefix: str, count: int, wrong: int, sample: common.Sample) -> dict[str, common.Bar]:
    return {f"{prefix}pairs_in_the_wrong_order": common.Bar(wrong / count, 0.1, count, sample, "%")} if count else {}


def _line(row: Measurement, found: Prediction | None) -> str:
    measured = "out of memory" if not row.fits else "no time" if row.seconds is None else f"{row.seconds:.4g} s"
    if row.memory is not None:
        measured += f", {row.memory / 2**30:.2f} GiB"
    if found is None:
        return f"{row.case} {row.method}: {measured}; not predicted: {row.doubt}"
    if found.seconds is None or found.memory is None:
        guess = f"does not fit ({found.error[:90]})"
    else:
        guess = f"{found.seconds:.4g} s, {found.memory / 2**30:.2f} GiB"
        if row.seconds is not None:
            guess += f" ({error(found.seconds, row.seconds):+.0%}"
            guess += f", memory {error(found.memory, row.memory):+.0%})" if row.memory is not None else ")"
    doubt = f" [not scored: {row.doubt}]" if row.doubt else f" [{row.fitted} was fitted to it]" if row.fitted else ""
    return f"{row.case} {row.method}: {measured}; predicted {guess}; planned in {found.planning:.1f} s{doubt}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description="The cost model against published measurements."
    )
    parser.add_argument("--measured", type=pathlib.Path, nargs="+", default=DEFAULT, help="files of measurements")
    parser.add_argument("--only", help="rows whose case and method contain this text")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers to this file")
    arguments = parser.parse_args()

    chosen = [
        row for path in arguments.measured for row in published.read(path)
        if arguments.only is None or arguments.only in f"{row.case} {row.method}"
    ]  # fmt: skip
    rows: list[tuple[Measurement, Prediction]] = []
    content = []
    for row, found in predicted(chosen, common.num_cores()):
        print(_line(row, found), flush=True)
        if found is not None:
            rows.append((row, found))
        content.append(
            {
                "case": row.case, "method": row.method, "seconds": row.seconds, "memory": row.memory,
                "fits": row.fits, "doubt": row.doubt, "fitted": row.fitted,
                **({} if found is None else {f"predicted_{k}": v for k, v in dataclasses.asdict(found).items()}),
            }
        )  # fmt: skip
    count, wrong = pairs(rows)
    print(f"{count} pairs of methods differ by more than {CLEAR:.0%}; in the wrong order:", *wrong, sep="\n  ")
    common.report(bars(rows), content, arguments.json)


if __name__ == "__main__":
    main()
