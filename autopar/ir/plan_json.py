"""The file form of `Plan`:

    {"format": "autopar-plan", "version": 2, "function": "...", ..., "cluster": {...}, "stages": [...], "leaves": [...]}

Fields have the names that they have in the plan; the cluster is a cluster file. A sharding is written as it prints,
with a dot between axes: "[x.y,-]+z". Strategies, in the numbers of `strategy_numbers`, are grouped by program, then by
equation; layouts by program ("all" for values that all programs share), then by value.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import PlanError
from autopar.ir.cluster_json import cluster_data, read_cluster
from autopar.ir.graph import Block
from autopar.ir.json_file import (
    FieldError,
    Reader,
    bad,
    choice,
    mapping,
    number,
    optional,
    read_boolean,
    read_string,
    read_text,
    record,
    sequence,
    versioned,
    whole,
)
from autopar.ir.mesh import Cluster, Mesh
from autopar.ir.plan_record import LeafPlan, PlanRecord, StageMemory, StagePlan
from autopar.ir.schedule import schedule_names
from autopar.ir.sharding import Sharding

FORMAT = "autopar-plan"
VERSION = 2
_REMEDY = "make the plan again and save it with Plan.save"
_SHARED = "all"  # the key of layouts that belong to no single program


def plan_to_json(plan: PlanRecord) -> str:
    """The text of a plan file.

    Raises:
      PlanError: the plan holds what no plan file may hold.
    """
    data = {
        "format": FORMAT,
        "version": VERSION,
        **plan.fields(),
        "cluster": cluster_data(plan.cluster),
        "stages": [_stage_data(stage) for stage in plan.stages],
        "leaves": [
            {**_fields(leaf), "shape": list(leaf.shape), "sharding": _sharding_text(leaf.sharding)}
            for leaf in plan.leaves
        ],
        "notes": list(plan.notes),
    }
    text = _lines(data)
    parse_plan(text, f"plan for {plan.function!r}")
    return text


def parse_plan(text: str, where: str) -> dict[str, Any]:
    """The fields of the plan in a file's text, by name; `where` names the text in messages. Raises PlanError."""
    fields: dict[str, Any] = read_text(text, where, _read_plan, PlanError, _REMEDY)
    return fields


# Writing


def _fields(noun: Any) -> dict[str, Any]:
    return {field.name: getattr(noun, field.name) for field in dataclasses.fields(noun)}


def _stage_data(stage: StagePlan) -> dict[str, Any]:
    strategies: dict[str, dict[str, Any]] = {}
    for (program, equation), strategy in stage.strategies.items():
        strategies.setdefault(str(program), {})[str(equation)] = strategy
    layouts: dict[str, dict[str, str]] = {}
    for (program_or_none, value), sharding in stage.layouts.items():
        program_key = _SHARED if program_or_none is None else str(program_or_none)
        layouts.setdefault(program_key, {})[str(value)] = _sharding_text(sharding)
    return {
        **_fields(stage),
        "mesh": _fields(stage.mesh),
        "memory": _fields(stage.memory),
        "recomputed": list(map(_fields, stage.recomputed)),
        "strategies": strategies,
        "layouts": layouts,
    }


def _sharding_text(sharding: Sharding) -> str:
    dims = ",".join(".".join(dim) or "-" for dim in sharding.dims)
    return f"[{dims}]" + (f"+{'.'.join(sharding.partial)}" if sharding.partial else "")


def _lines(data: Mapping[str, Any]) -> str:
    """JSON with a line for each field, and for each item of a list: files of two plans can be compared by line."""
    fields = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {_dump(item)}" for item in value)
            fields.append(f" {json.dumps(key)}: [\n{items}\n ]")
        else:
            fields.append(f" {json.dumps(key)}: {_dump(value)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """numpy's integers, which are none to `json`."""
    if hasattr(value, "__index__"):
        return int(value)
    raise PlanError(f"a plan file cannot hold {value!r} of type {type(value).__name__}")


# Reading

_COUNT = whole("a whole number above 0", least=1)
_INDEX = whole("a whole number, 0 or more", least=0)
_BYTES = whole("a whole number of bytes, 0 or more", least=0)
_SECONDS = number("seconds, 0 or more", least=0)
_CHOICE = whole("a whole number", least=-(2**31))
_SPAN = sequence(_INDEX, "two whole numbers, the first and one past the last", length=2)
_WINDOW = "axis, start and stop of a piece, the pieces of a leaf one after the other, or null"
_SHAPE = sequence(_INDEX, "a list of sizes")


def _id(name: str, path: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,15}", name):
        raise FieldError(f"{path}: the field name {json.dumps(name)} must be a number, 0 or more")
    return int(name)


def _program(name: str, path: str) -> int | None:
    return None if name == _SHARED else _id(name, path)


def _read_span(value: Any, path: str) -> tuple[int, int]:
    start, stop = _SPAN(value, path)
    if stop < start:
        raise bad(path, value, "two whole numbers, the first and one past the last")
    return start, stop


def _read_sharding(value: Any, path: str) -> Sharding:
    expected = 'a sharding such as "[x.y,-]+z"'
    met = re.fullmatch(r"\[([^\[\]+]*)\](?:\+([^\[\]+,]+))?", read_string(value, path))
    if met is None:
        raise bad(path, value, expected)
    dims = tuple(() if dim == "-" else tuple(dim.split(".")) for dim in met[1].split(",")) if met[1] else ()
    sharding = Sharding(dims, tuple(met[2].split(".")) if met[2] else ())
    axes = [axis for dim in (*dims, sharding.partial) for axis in dim]
    if not all(axes) or "-" in axes or list(sharding.partial) != sorted(sharding.partial):
        raise bad(path, value, expected)
    if len(set(axes)) < len(axes):
        raise bad(path, value, "a sharding that names each axis once")
    return sharding


def _read_mesh(value: Any, path: str) -> Mesh:
    fields = _MESH(value, path)
    try:
        mesh = Mesh(**fields)
    except ValueError as error:
        raise FieldError(f"{path}: {error}; make shape and devices match") from None
    for name in ("devices", "axes"):
        entries = getattr(mesh, name)
        if not entries or len(set(entries)) < len(entries):
            raise bad(f"{path}.{name}", list(entries), "a list of different entries, at least one")
    return mesh


def _read_stage(value: Any, path: str) -> StagePlan:
    fields = _STAGE(value, path)
    mesh: Mesh = fields["mesh"]
    for (program, equation), strategy in _flat(fields, "strategies").items():
        for assignment in strategy:
            if len(assignment) != len(mesh.axes):
                at = f"{path}.strategies.{program}.{equation}"
                raise bad(at, strategy, f"one choice for each of the axes {', '.join(mesh.axes)} in each assignment")
    for (program, number_), sharding in _flat(fields, "layouts").items():
        at = f"{path}.layouts.{_SHARED if program is None else program}.{number_}"
        _check_axes(sharding, mesh, at)
    return StagePlan(**fields)


def _flat(fields: dict[str, Any], name: str) -> dict[Any, Any]:
    """Replace a field that is grouped by program by one with pairs as keys."""
    fields[name] = {(program, key): entry for program, group in fields[name].items() for key, entry in group.items()}
    return typing.cast(dict[Any, Any], fields[name])


def _check_axes(sharding: Sharding, mesh: Mesh, path: str) -> None:
    unknown = {axis for dim in (*sharding.dims, sharding.partial) for axis in dim} - set(mesh.axes)
    if unknown:
        raise bad(path, _sharding_text(sharding), f"a sharding over axes of its mesh, {', '.join(mesh.axes)}")


def _read_leaf(value: Any, path: str) -> LeafPlan:
    leaf = LeafPlan(**_LEAF(value, path))
    rank = len(leaf.shape)
    if len(leaf.sharding.dims) != rank:
        text = _sharding_text(leaf.sharding)
        raise bad(f"{path}.sharding", text, f"a sharding with {rank} entries, one for each dimension of {leaf.shape}")
    if leaf.batch_axis is not None and not -rank <= leaf.batch_axis < rank:
        raise bad(f"{path}.batch_axis", leaf.batch_axis, f"an axis of the shape {leaf.shape}, or null")
    if leaf.window is not None:
        axis, start, stop = leaf.window
        if axis >= rank or leaf.shape[axis] != stop - start:
            raise bad(f"{path}.window", list(leaf.window), f"a window of the size of its axis in {leaf.shape}")
    return leaf


def _read_leaves(value: Any, path: str) -> tuple[LeafPlan, ...]:
    leaves: tuple[LeafPlan, ...] = _LEAVES(value, path)
    for i, (before, leaf) in enumerate(itertools.pairwise((None, *leaves))):
        if leaf is None or leaf.window is None or leaf.window[1] == 0:
            continue
        axis, start, _ = leaf.window
        if before is None or before.window is None or (before.window[0], before.window[2]) != (axis, start):
            raise bad(f"{path}[{i}].window", list(leaf.window), _WINDOW)
    return leaves


def _read_block(value: Any, path: str) -> Block:
    block = Block(**_BLOCK(value, path))
    if block.start > block.stop or not all(block.start <= at < block.stop for at, _ in block.saved):
        raise bad(path, value, "equations from start to stop, and those of them whose results are saved")
    return block


def _read_memory(value: Any, path: str) -> StageMemory:
    return StageMemory(**_MEMORY(value, path))


_MESH = record(
    {
        "devices": sequence(_INDEX, "a list of device numbers"),
        "shape": sequence(_COUNT, "a list of sizes"),
        "axes": sequence(read_string, "a list of names"),
    }
)
_MEMORY = record(dict.fromkeys(("state", "gradients", "activations", "temporaries", "capacity"), _BYTES))
_BLOCK = record({
    "start": _INDEX,
    "stop": _INDEX,
    "saved": sequence(sequence(_INDEX, "the numbers of an equation and of its result", length=2), "a list of values"),
})  # fmt: skip
_STRATEGY = sequence(sequence(_CHOICE, "a list of choices, one for each mesh axis"), "a list of assignments")
_STAGE = record(
    {
        "mesh": _read_mesh,
        "layers": _read_span,
        "equations": _read_span,
        "strategies": mapping(_id, mapping(_id, _STRATEGY, "an object by equation"), "an object by program"),
        "layouts": mapping(_program, mapping(_id, _read_sharding, "an object by value"), "an object by program"),
        "reshard_after_forward": read_boolean,
        "forward": _SECONDS,
        "backward": _SECONDS,
        "once": _SECONDS,
        "compute": _SECONDS,
        "communication": _SECONDS,
        "memory": _read_memory,
        "recomputed": sequence(_read_block, "a list of blocks"),
        "weights": _SECONDS,
    },
    {"reshard_after_forward": False, "recomputed": (), "weights": 0.0},
)
_LEAF = record(
    {
        "path": read_string,
        "shape": _SHAPE,
        "dtype": read_string,
        "stage": _INDEX,
        "sharding": _read_sharding,
        "state": read_boolean,
        "batch_axis": optional(whole("a whole number or null", least=-(2**31))),
        "window": optional(sequence(_INDEX, _WINDOW, length=3)),
    }
)
_LEAVES = sequence(_read_leaf, "a list of leaves")
_FIELDS: Mapping[str, Reader] = {
    "function": read_string,
    "fingerprint": read_string,
    "method": read_string,
    "cluster": read_cluster,
    "num_microbatches": _COUNT,
    "batch_size": _COUNT,
    "schedule": lambda value, path: choice(schedule_names())(value, path),
    "stages": sequence(_read_stage, "a list of at least one stage", least=1),
    "leaves": _read_leaves,
    "step_time": _SECONDS,
    # A sum of times that rounding may leave a little above the whole.
    "bubble": number("a share of at most 1", most=1),
    "flops": number("FLOP, 0 or more", least=0),
    "lower_bound": number("seconds"),
    "gap": number("a share, 0 or more", least=0),
    "notes": sequence(read_string, "a list of sentences"),
    "padding": sequence(sequence(_COUNT, "a size and what it is padded to", length=2), "a list of pairs of sizes"),
}
_read_fields = versioned(FORMAT, VERSION, _FIELDS, _REMEDY, {"padding": ()})


def _read_plan(value: Any, path: str) -> dict[str, Any]:
    """All fields, each checked, and then against one another."""
    fields: dict[str, Any] = _read_fields(value, path)
    _check_devices(fields["cluster"], fields["stages"])
    if fields["batch_size"] % fields["num_microbatches"]:
        expected = f"a divisor of batch_size, {fields['batch_size']}"
        raise bad("num_microbatches", fields["num_microbatches"], expected)
    for index, leaf in enumerate(fields["leaves"]):
        if leaf.stage >= len(fields["stages"]):
            raise bad(f"leaves[{index}].stage", leaf.stage, f"one of the stages, 0 to {len(fields['stages']) - 1}")
        _check_axes(leaf.sharding, fields["stages"][leaf.stage].mesh, f"leaves[{index}].sharding")
    return fields


def _check_devices(cluster: Cluster, stages: Sequence[StagePlan]) -> None:
    """Each device has one stage, or every n-th where n groups of devices have several stages in turn."""
    groups = len({stage.mesh.devices for stage in stages})
    owner: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for position, device in enumerate(stage.mesh.devices):
            at = f"stages[{index}].mesh.devices[{position}]"
            if device >= cluster.num_devices:
                raise bad(at, device, f"a device of the cluster, 0 to {cluster.num_devices - 1}")
            first = owner.setdefault(device, index)
            if (index - first) % groups or stage.mesh.devices != stages[first].mesh.devices:
                raise bad(at, device, f"a device that no other stage has; stage {first} has it, too")
