"""A report as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from autopar.ir.json_file import finite
from autopar.ir.why import Alternative, Why
from autopar.reporting.record import Details, ReportRecord


def report_to_json(report: ReportRecord) -> str:
    """All of it but the search's choices, which are in the plan file."""
    return json.dumps(finite(_content(report)), indent=1)


def _content(report: ReportRecord) -> dict[str, Any]:
    plan, details = report.plan, report.details
    split = report.split
    return {
        "format": "autopar-report",
        "version": 1,
        "function": plan.function,
        "fingerprint": plan.fingerprint,
        "method": plan.method,
        "cluster": {"name": plan.cluster.name, "num_devices": plan.cluster.num_devices},
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "batch_size": plan.batch_size,
        "step_time": plan.step_time,
        "examples_per_second": report.examples_per_second,
        "tokens_per_second": report.tokens_per_second,
        "utilisation": report.utilisation,
        "flops": plan.flops,
        "peak_memory": plan.peak_memory,
        "split": None if split is None else {**split.parts, "hidden": split.hidden},
        "xla_flags": report.xla_flags,
        "search": {
            "seconds": None if details is None else details.planning_seconds,
            "gap": plan.gap,
            "lower_bound": plan.lower_bound,
        },
        "notes": plan.notes,
        "groups": [dataclasses.asdict(group) for group in report.groups],
        "stages": [
            {
                "devices": stage.mesh.devices, "mesh": dict(zip(stage.mesh.axes, stage.mesh.shape, strict=True)),
                "layers": stage.layers, "forward": stage.forward, "backward": stage.backward,
                "weights": stage.weights, "once": stage.once, "memory": dataclasses.asdict(stage.memory),
                "recomputed_blocks": len(stage.recomputed),
            }
            for stage in plan.stages
        ],
        "leaves": [
            {
                "path": leaf.path, "shape": leaf.shape, "dtype": leaf.dtype, "stage": leaf.stage,
                "sharding": str(leaf.sharding), "state": leaf.state, "batch_axis": leaf.batch_axis,
                "window": leaf.window,
            }
            for leaf in plan.leaves
        ],
        "details": None if details is None else _details(details),
        "comparison": None if report.comparison is None else json.loads(report.comparison.to_json()),
        "verification": None if report.verification is None else json.loads(report.verification.to_json()),
        "diff": None if report.diff is None else report.diff.content(),
    }  # fmt: skip


def _details(details: Details) -> dict[str, Any]:
    content = {
        field.name: getattr(details, field.name) for field in dataclasses.fields(details) if field.name != "operators"
    }
    rows = {
        name: [dataclasses.asdict(row) for row in content[name]]
        for name in ("splits", "spans", "copies", "memory", "layers", "links")
    }
    operators = [
        {**dataclasses.asdict(dataclasses.replace(each, whys=())), "whys": [_why(why) for why in each.whys]}
        for each in details.operators
    ]
    return {**content, **rows, "operators": operators}


def _why(why: Why) -> dict[str, Any]:
    return {"stage": why.stage, "chosen": _alternative(why.chosen), "others": [_alternative(o) for o in why.others]}


def _alternative(one: Alternative) -> dict[str, Any]:
    sides = {"operands": [str(s) for s in one.operands], "results": [str(s) for s in one.results]}
    numbers = ("seconds", "stage_seconds", "operators_seconds", "resharding_seconds", "changed", "needed", "limit")
    return {**sides, **{name: getattr(one, name) for name in numbers}, "fits": one.fits}
