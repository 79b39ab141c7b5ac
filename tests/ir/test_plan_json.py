"""Plan files: the round trip, and one clear error for every way in which a file can be wrong."""

import dataclasses
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import LeafPlan, Plan, StageMemory, StagePlan
from autopar.ir.sharding import Sharding
from tests.ir.plans import FIRST, PLAN, SECOND


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    loaded = Plan.load(path)
    assert type(loaded) is Plan
    assert loaded == PLAN == Plan.load(str(path)) == Plan.from_json(PLAN.to_json())
    assert path.read_text() == PLAN.to_json() == loaded.to_json()
    assert loaded.peak_memory == PLAN.peak_memory
    assert loaded != dataclasses.replace(PLAN, step_time=1.0)


def test_every_field_of_every_noun_is_in_the_file() -> None:
    data = json.loads(PLAN.to_json())

    def names(noun: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(noun)}

    assert data.keys() == names(Plan) | {"format", "version"}
    assert data["stages"][0].keys() == names(StagePlan)
    assert data["stages"][0]["mesh"].keys() == names(Mesh)
    assert data["stages"][0]["memory"].keys() == names(StageMemory)
    assert data["leaves"][0].keys() == names(LeafPlan)


def test_the_file_by_hand() -> None:
    lines = PLAN.to_json().splitlines()
    assert lines[:3] == ["{", ' "format": "autopar-plan",', ' "version": 2,']
    assert '"strategies":{"0":{"0":[[0,-1]],"1":[[1,-2],[-1,-1]]},"2":{"0":[[0,1]],"5":[]}}' in "".join(lines)
    assert '"layouts":{"all":{"4":"[x.y,-]","11":"[]"},"0":{"4":"[-,y]+x"},"2":{"3":"[-]+x.y"}}' in "".join(lines)
    leaf = '{"path":"rate","shape":[],"dtype":"float32","stage":1,"sharding":"[]","state":false,'
    assert "  " + leaf + '"batch_axis":null,"window":null},' in lines


def test_integers_of_numpy_are_written_as_such() -> None:
    mesh = dataclasses.replace(FIRST.mesh, devices=tuple(np.arange(4)))
    assert (
        Plan.from_json(dataclasses.replace(PLAN, stages=(dataclasses.replace(FIRST, mesh=mesh), SECOND)).to_json())
        == PLAN
    )


# --- writing ----------------------------------------------------------------------------------------------------


def test_an_existing_file_is_replaced_whole(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)
    other = dataclasses.replace(PLAN, method="other")
    other.save(link)
    assert link.is_symlink()
    assert Plan.load(path) == other
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.json", "plan.json"]
    # As readable as any other new file.
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match=r"cannot write the plan file '.*plan\.json': .*No space left"):
        PLAN.save(path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for name in ("none/plan.json", "folder", "file/plan.json", "a\0b"):
        with pytest.raises(PlanError, match=r"cannot write the plan file .* pass a file name in a folder"):
            PLAN.save(tmp_path / name)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (dataclasses.replace(PLAN, step_time=math.nan), "plan for 'train_step': step_time is nan; it must be seconds"),
        (dataclasses.replace(PLAN, stages=()), "stages is []; it must be a list of at least one stage"),
        (
            dataclasses.replace(PLAN, stages=(dataclasses.replace(FIRST, layouts={(None, 1): Sharding((("z",),))}),)),
            'stages[0].layouts.all.1 is "[z]"; it must be a sharding over axes of its mesh, x, y',
        ),
        (
            dataclasses.replace(PLAN, stages=(dataclasses.replace(FIRST, strategies={(0, 3): ((0,),)}), SECOND)),
            "stages[0].strategies.0.3 is [[0]]; it must be one choice for each of the axes x, y in each assignment",
        ),
        (dataclasses.replace(PLAN, method=object()), "a plan file cannot hold <object object"),  # type: ignore[arg-type]
    ],
)
def test_a_plan_that_no_file_may_hold_is_not_written(plan: Plan, expected: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        plan.save(tmp_path / "plan.json")
    assert expected in str(error.value)
    assert list(tmp_path.iterdir()) == []


# --- reading ----------------------------------------------------------------------------------------------------


def test_files_that_are_no_plan_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    reads = "that this version of autopar reads"
    remedy = "; make the plan again and save it with Plan.save"
    with pytest.raises(PlanError, match=r"cannot read the plan file '.*plan\.json': .*No such file"):
        Plan.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="cannot read the plan file"):
        Plan.load(path)
    for text, expected in (
        ("", f"is not JSON: Expecting value: line 1 column 1 (char 0){remedy}"),
        (PLAN.to_json()[:-10], "is not JSON"),
        ("[1]", f"holds [1]; it must be an object{remedy}"),
        ("{}", f'format is null; it must be "autopar-plan", the only one {reads}{remedy}'),
        ('{"format": "autopar-cluster", "version": 2}', 'format is "autopar-cluster"; it must be "autopar-plan"'),
        (
            '{"format": "autopar-plan", "version": 1}',
            f"version is 1; it must be 2, the only one that this version of autopar reads{remedy}",
        ),
        ('{"format": "autopar-plan", "version": true}', "version is true; it must be 2"),
        ('{"format": "autopar-plan", "format": 1}', "gives the field format twice"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError) as error:
            Plan.load(path)
        assert str(error.value).startswith(f"plan file {str(path)!r}")
        assert expected in str(error.value)


MISSING = object()


def changed(path: str, value: Any) -> str:
    """The text of the plan with the value at a path such as "stages.0.mesh" put in place of what is there."""
    data = json.loads(PLAN.to_json())
    *parents, last = path.split(".")
    place = data
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if value is MISSING:
        del place[last]
    elif isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("function", 3, "function is 3; it must be a text"),
        ("gap", MISSING, "gap is missing; add it: the fields here are format, version, function"),
        ("stepp_time", 1, "stepp_time is no field of this file (value 1); did you mean 'step_time'"),
        ("schedule", "zero", 'schedule is "zero"; it must be one of "1f1b", "gpipe"'),
        ("step_time", -1, "step_time is -1; it must be seconds, 0 or more"),
        ("bubble", 1.5, "bubble is 1.5; it must be a share of at most 1"),
        ("num_microbatches", 0, "num_microbatches is 0; it must be a whole number above 0"),
        ("num_microbatches", 5, "num_microbatches is 5; it must be a divisor of batch_size, 32"),
        ("cluster.network.bandwidth", 0, "cluster.network.bandwidth is 0; it must be bytes per second above 0"),
        ("cluster.version", 1, "cluster.version is 1; it must be 2"),
        ("cluster", None, 'cluster is null; it must be an object with "format": "autopar-cluster"'),
        ("stages", {}, "stages is {}; it must be a list of at least one stage"),
        ("stages.1", 7, "stages[1] is 7; it must be an object with the fields mesh, layers"),
        ("stages.0.mesh.shape", [2, 3], "stages[0].mesh: mesh ('x', 'y')=(2, 3) does not match 4 devices"),
        ("stages.0.mesh.devices.3", 8, "stages[0].mesh.devices[3] is 8; it must be a device of the cluster, 0 to 7"),
        ("stages.0.mesh.devices.3", 0, "stages[0].mesh.devices is [0, 1, 2, 0]; it must be a list of different"),
        ("stages.1.mesh.devices.1", 3, "stages[1].mesh.devices[1] is 3; it must be a device that no other stage has"),
        ("stages.0.mesh.axes", ["x", "x"], 'stages[0].mesh.axes is ["x", "x"]; it must be a list of different'),
        ("stages.0.layers", [3, 0], "stages[0].layers is [3, 0]; it must be two whole numbers"),
        ("stages.0.layers", [0], "stages[0].layers is [0]; it must be two whole numbers"),
        ("stages.0.memory.state", 0.5, "stages[0].memory.state is 0.5; it must be a whole number of bytes"),
        ("stages.0.strategies.0.0", [[0]], "stages[0].strategies.0.0 is [[0]]; it must be one choice for each"),
        ("stages.0.strategies.0.0.0.1", "a", 'stages[0].strategies.0.0[0][1] is "a"; it must be a whole'),
        ("stages.0.strategies.one", {}, 'stages[0].strategies.one: the field name "one" must be a number'),
        ("stages.0.strategies.00", {}, 'the field name "00" must be a number'),
        ("stages.0.layouts.all.-1", "[]", 'stages[0].layouts.all.-1: the field name "-1" must be a number'),
        ("stages.0.layouts.all.4", "[x,z]", 'layouts.all.4 is "[x,z]"; it must be a sharding over axes of its mesh'),
        ("stages.0.layouts.0.4", "[x]+x", 'layouts.0.4 is "[x]+x"; it must be a sharding that names each axis once'),
        ("stages.0.layouts.all", [], "stages[0].layouts.all is []; it must be an object by value"),
        ("leaves.0.state", 1, "leaves[0].state is 1; it must be true or false"),
        ("leaves.0.stage", 2, "leaves[0].stage is 2; it must be one of the stages, 0 to 1"),
        ("leaves.5.sharding", "[y,-]", 'leaves[5].sharding is "[y,-]"; it must be a sharding over axes of its mesh, x'),
        ("leaves.0.sharding", "[-]", 'leaves[0].sharding is "[-]"; it must be a sharding with 2 entries'),
        ("leaves.7.batch_axis", 2, "leaves[7].batch_axis is 2; it must be an axis of the shape (32, 5), or null"),
        ("leaves.7.batch_axis", MISSING, "leaves[7].batch_axis is missing"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_with_its_value_and_the_remedy(path: str, value: Any, expected: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_json(changed(path, value))
    assert str(error.value).startswith("plan text: ")
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "x", "[", "[x", "[x]y", "[x]+", "[,]", "[x..y]", "[.x]", "[x]+-", "[-.x]", "[x]+y.x", "[]+x,y"]
)
def test_a_text_that_is_no_sharding(text: str) -> None:
    with pytest.raises(PlanError, match="it must be a sharding"):
        Plan.from_json(changed("stages.0.layouts.all.4", text))


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value in the file below the top, with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, str(key)), item
        yield from places(item, (*path, str(key)))


def kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def test_every_value_of_another_type_is_an_error_that_names_its_place() -> None:
    found = list(places(json.loads(PLAN.to_json())))
    assert len(found) > 150
    for path, met in found:
        for other in (None, True, "text", -(2**40), math.inf, [None], {"a": None}):
            if (kind(other) is kind(met) and not isinstance(other, float)) or (
                other is None and path[-1] == "batch_axis"
            ):
                continue
            name = next(key for key in reversed(path) if not key.isdigit())
            with pytest.raises(PlanError, match=f"^plan text: .*{name}"):
                Plan.from_json(changed(".".join(path), other))


def test_every_missing_field_is_an_error() -> None:
    # Of a cluster file.
    optional = {
        "num_hosts",
        "memory_reserve",
        "convolution_share",
        "batched_share",
        "attention_share",
        "collective_combine_threshold",
        "multiprocessors",
    }
    optional |= {"xla", "combines_contiguously", "hides_latency", "single_output", "split_k", "pair_bandwidth"}
    optional |= {"overlap_slowdown"}
    optional |= {"lone_bandwidth", "bfloat16", "padding"}
    optional |= {"reshard_after_forward", "recomputed", "weights"}
    for path, _ in places(json.loads(PLAN.to_json())):
        held = {"strategies", "layouts"} & set(path[:-1])  # what these hold depends on the step
        if not path[-1].isdigit() and path[-1] not in optional and not held:
            with pytest.raises(PlanError, match=f"{path[-1]} is (missing|null)|peak_flops is"):
                Plan.from_json(changed(".".join(path), MISSING))
