"""A plan as text: its header, its stages as a table, and its leaves as a table of patterns."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.plan_record import LeafPlan, PlanRecord, StagePlan
from autopar.ir.units import array_text, bytes_text, count_text, ranges_text, seconds_text


def render(parts: Sequence[RenderableType]) -> str:
    """Plain text without control codes, as wide as it needs to be, whatever the terminal."""
    file = io.StringIO()
    console = Console(file=file, width=10_000, color_system=None, force_jupyter=False, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def plan_parts(plan: PlanRecord, max_rows: int | None = 40) -> list[RenderableType]:
    """What a plan prints; of the leaves' table at most `max_rows` rows."""
    notes = [Text(), *(Text(f"Note: {note}") for note in plan.notes)] if plan.notes else []
    return [_header(plan), Text(), _stages(plan), Text(), *_leaves(plan, max_rows), *notes]


def _header(plan: PlanRecord) -> Text:
    microbatches = f"{plan.num_microbatches} microbatch{'' if plan.num_microbatches == 1 else 'es'}"
    size = plan.batch_size // plan.num_microbatches
    cluster = f"{plan.cluster.name} ({count_text(plan.cluster.num_devices, 'device')})"
    stages = count_text(len(plan.stages), "stage")
    lines = [
        f"Plan for {plan.function} by method {plan.method} on cluster {cluster}",
        f"Batch {plan.batch_size} = {microbatches} × {size}, {stages}, {plan.schedule}",
        f"Predicted: {seconds_text(plan.step_time)} per step, bubbles {plan.bubble:.1%}, solver gap {plan.gap:.2%}",
    ]
    return Text("\n".join(lines))


def _table(*headers: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", overflow="fold")
    return table


def _stages(plan: PlanRecord) -> Table:
    apart = ("weights",) if any(stage.weights for stage in plan.stages) else ()
    times, kinds = ("forward", "backward", *apart, "once"), ("state", "gradients", "activations", "temporaries")
    right = (*(f"{name} ms" for name in times), *kinds, "of memory")
    recomputes = any(stage.recomputed for stage in plan.stages)
    table = _table("stage", "devices", "mesh", "layers", *right, *["computed again"] * recomputes, right=right)
    for index, stage in enumerate(plan.stages):
        start, stop = stage.layers
        memory = stage.memory
        table.add_row(
            str(index),
            ranges_text(stage.mesh.devices),
            Text(stage.mesh.text),
            ranges_text(range(start, stop)) or "-",
            *(f"{getattr(stage, name) * 1e3:.3f}" for name in times),
            *(bytes_text(getattr(memory, kind)) for kind in kinds),
            f"{memory.total / memory.capacity:.1%}" if memory.capacity else "-",
            *[_recomputed(stage)] * recomputes,
        )
    return table


def _recomputed(stage: StagePlan) -> str:
    """How much of a stage's blocks the backward pass computes again."""
    if not stage.recomputed:
        return "-"
    kind = "part of " if any(block.saved for block in stage.recomputed) else ""
    return f"{kind}{count_text(len(stage.recomputed), 'block')}"


# Leaves


def _leaves(plan: PlanRecord, max_rows: int | None) -> list[RenderableType]:
    batch = [leaf for leaf in plan.leaves if leaf.batch_axis is not None]
    rest = [leaf for leaf in plan.leaves if leaf.batch_axis is None]
    parts: list[RenderableType] = []
    if batch:
        table = _table("batch argument", "shape", "axis", "sharding", right=("axis",))
        for row in fold(batch):
            leaf = row.leaf
            table.add_row(Text(row.path), _shape(leaf), str(leaf.batch_axis), Text(str(leaf.sharding)))
        parts += [table, Text()]
    if rest:
        rows = fold(rest)
        table = _table("state", "shape", "stage", "sharding", right=("stage",))
        for row in rows[:max_rows]:
            leaf = row.leaf
            kept = "" if leaf.state else " (read only)"
            table.add_row(Text(row.path + kept), _shape(leaf), str(leaf.stage), Text(str(leaf.sharding)))
        parts.append(table)
        if max_rows is not None and len(rows) > max_rows:
            parts.append(Text(f"... and {len(rows) - max_rows} more rows: plan.to_text(max_rows=None) shows all"))
        whole = sum(_is_replicated(leaf, plan) for leaf in rest)
        parts.append(Text(f"{whole} of {len(rest)} state leaves lie whole on every device of their stage"))
    return parts


def _shape(leaf: LeafPlan) -> Text:
    return Text(array_text(leaf.dtype, leaf.shape))


def _is_replicated(leaf: LeafPlan, plan: PlanRecord) -> bool:
    mesh = plan.stages[leaf.stage].mesh
    return all(mesh.axis_size(axis) == 1 for axis in leaf.sharding.axes)


@dataclasses.dataclass(frozen=True)
class Row:
    """Leaves that are alike: their paths differ only in indices, and they take every combination of these."""

    pieces: tuple[str, ...]  # of the path, around the indices
    indices: tuple[frozenset[int], ...]
    leaf: LeafPlan  # one of them
    count: int

    @property
    def path(self) -> str:
        path = self.pieces[0]
        for numbers, piece in zip(self.indices, self.pieces[1:], strict=True):
            path += ranges_text(numbers, "..") + piece
        return path + (f" ×{self.count}" if self.count > 1 else "")


# A whole key of digits, or the number at the end of a name: [3], ['Dense_3'].
_INDEX = re.compile(r"(?<=\[)\d+(?=\])|(?<=_)\d+(?='\])")


def fold(leaves: Sequence[LeafPlan]) -> list[Row]:
    """The leaves as rows, in the order of each row's first leaf.

    Rows that are equal but for the numbers at one index are merged, index by index from the last, so that a row's
    pattern stands for exactly its leaves.
    """
    rows = [
        Row(tuple(_INDEX.split(leaf.path)), tuple(frozenset({int(n)}) for n in _INDEX.findall(leaf.path)), leaf, 1)
        for leaf in leaves
    ]
    for position in reversed(range(max((len(row.indices) for row in rows), default=0))):
        merged: dict[object, Row] = {}
        for row in rows:
            if position >= len(row.indices):
                merged[row.pieces, row.indices, row.leaf] = row
                continue
            others = row.indices[:position] + row.indices[position + 1 :]
            alike = dataclasses.replace(row.leaf, path="")
            first = merged.setdefault((row.pieces, others, alike), row)
            if first is not row:
                numbers = first.indices[position] | row.indices[position]
                indices = (*first.indices[:position], numbers, *first.indices[position + 1 :])
                merged[row.pieces, others, alike] = Row(row.pieces, indices, first.leaf, first.count + row.count)
        rows = list(merged.values())
    return rows
