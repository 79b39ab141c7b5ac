"""What the slow product has shown for this version: `python -m tests.equivalence.summary`."""

from __future__ import annotations

from typing import Any

from tests.equivalence import cases, results
from tests.equivalence.cases import Case


def summary(found: dict[str, dict[str, Any]], product: list[Case]) -> str:
    """A line per model and method, the worst deviations, and every case that failed or is still to be run."""
    lines = [" ".join(f"{name} {value}" for name, value in results.version().items())]
    done = [found[str(case)] for case in product if str(case) in found]
    failed = [entry for entry in done if not entry["passed"]]
    missing = [case for case in product if str(case) not in found]
    lines.append(f"{len(done) - len(failed)} of {len(product)} cases pass, {len(failed)} fail, {len(missing)} not run")
    groups = dict.fromkeys((case.model, case.method) for case in product)
    for model, method in groups:
        names = [str(case) for case in product if (case.model, case.method) == (model, method)]
        entries = [found[name] for name in names if name in found]
        measured = [entry for entry in entries if "loss" in entry]
        worst = (
            ", worst loss {:.1e}, tree {:.1e}, leaf {:.2f} of its limit".format(
                *(max(entry[field] for entry in measured) for field in ("loss", "tree", "leaf"))
            )
            if measured
            else ""
        )
        stages = sorted({entry["stages"] for entry in measured})
        passed = sum(entry["passed"] for entry in entries)
        lines.append(f"  {model} {method}: {passed} of {len(names)} pass{worst}; stages run: {stages}")
    lines += [f"  FAILED {entry['case']}: {entry['error'] or entry}" for entry in failed]
    lines += [f"  not run: {case}" for case in missing]
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(results.latest(), cases.everything()))
