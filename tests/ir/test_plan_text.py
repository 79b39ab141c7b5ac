"""How a plan prints, against the text."""

import dataclasses
import io

import pytest
from rich.console import Console

from autopar.ir.plan import LeafPlan
from autopar.ir.plan_text import fold
from autopar.ir.sharding import Sharding
from autopar.ir.units import bytes_text, metric_text, ranges_text, seconds_text
from tests.ir.plans import PLAN, ROWS, WHOLE, state

# Memory of the first stage: (64 + 32 + 0.1 + 1) of 1023 KiB = 9.5 %.
TEXT = """\
Plan for train_step by method auto on cluster lab (8 devices)
Batch 32 = 4 microbatches × 8, 2 stages, 1f1b
Predicted: 12.3 ms per step, bubbles 25.0%, solver gap 0.10%

stage  devices  mesh     layers  forward ms  backward ms  once ms     state  gradients  activations  temporaries  of memory  computed again
0      0-3      x=2 y=2  0-2          1.000        2.500    0.333  64.0 KiB   32.0 KiB        100 B      1.0 KiB       9.5%  part of 2 blocks
1      4,6      x=2      3            2.000        0.000    0.000       0 B        0 B          0 B          0 B       0.0%  -

batch argument  shape        axis  sharding
batch['x']      int32[32,5]     0  [x·y,-]

state                           shape          stage  sharding
params['blocks'][0..1]['q'] ×2  float32[8,16]      0  [x,-]
params['blocks'][0..1]['b'] ×2  float32[16]        0  [-]
params['blocks'][2]['q']        float32[8,16]      0  [-,-]
params['blocks'][3]['q']        float32[8,16]      1  [x,-]
rate (read only)                float32[]          1  []
4 of 7 state leaves lie whole on every device of their stage

Note: stage 0: pad it"""  # noqa: E501


def test_a_plan_prints_as_tables() -> None:
    assert str(PLAN) == TEXT


def test_the_text_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "20", "FORCE_COLOR": "1", "TERM": "xterm-256color", "JPY_PARENT_PID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert str(PLAN) == TEXT


def test_rich_prints_the_same_tables() -> None:
    file = io.StringIO()
    Console(file=file, width=200, color_system=None).print(PLAN)
    assert [line.rstrip() for line in file.getvalue().splitlines()] == TEXT.splitlines()


def test_long_tables_are_cut_unless_asked() -> None:
    names = [chr(ord("a") + i // 26) + chr(ord("a") + i % 26) for i in range(45)]
    plan = dataclasses.replace(PLAN, leaves=tuple(state(f"params['{name}']", 0, ROWS) for name in names))
    text = str(plan)
    assert text.count("params[") == 40
    assert "params['bn']" in text and "params['bo']" not in text  # rows 40 and 41
    assert "... and 5 more rows: plan.to_text(max_rows=None) shows all" in text
    assert "0 of 45 state leaves" in text
    whole = plan.to_text(max_rows=None)
    assert whole.count("params[") == 45 and "more rows" not in whole
    assert plan.to_text(max_rows=45) == whole


def test_what_is_not_there_is_not_printed() -> None:
    text = str(dataclasses.replace(PLAN, leaves=(), num_microbatches=1, stages=PLAN.stages[:1]))
    assert "Batch 32 = 1 microbatch × 32, 1 stage, 1f1b" in text
    assert "state leaves" not in text and "batch argument" not in text


def paths(*leaves: LeafPlan) -> list[str]:
    return [row.path for row in fold(leaves)]


def test_rows_stand_for_exactly_their_leaves() -> None:
    def grid(*pairs: tuple[int, int]) -> list[str]:
        return paths(*(state(f"p[{i}]['w'][{j}]", 0, WHOLE) for i, j in pairs))

    assert grid((0, 0), (0, 1), (1, 0), (1, 1)) == ["p[0..1]['w'][0..1] ×4"]
    assert grid((0, 0), (0, 1), (1, 0)) == ["p[0]['w'][0..1] ×2", "p[1]['w'][0]"]
    assert grid((0, 0), (2, 0), (3, 0), (5, 0)) == ["p[0,2..3,5]['w'][0] ×4"]
    # In names: what Flax calls the layers of a model. A digit that is a part of a name is no index.
    names = ("['Dense_0']['k']", "['Dense_1']['k']", "['w1']", "['w2']")
    assert paths(*(state(name, 0, WHOLE) for name in names)) == ["['Dense_0..1']['k'] ×2", "['w1']", "['w2']"]
    # Not alike: the shape, the type, the stage, the sharding, the batch axis, whether it is state.
    one = state("p[0]", 0, WHOLE)
    for change in (
        {"shape": (8, 8)}, {"dtype": "int32"}, {"stage": 1}, {"sharding": ROWS}, {"batch_axis": 0}, {"state": False},
    ):  # fmt: skip
        assert paths(one, dataclasses.replace(one, path="p[1]", **change)) == ["p[0]", "p[1]"]
    assert paths(one, state("p[1]", 0, WHOLE)) == ["p[0..1] ×2"]
    assert paths() == []
    # Different depths.
    deep = (state("p[0]", 0, WHOLE), state("p[0][0]", 0, WHOLE), state("p[0][1]", 0, WHOLE))
    assert paths(*deep) == ["p[0]", "p[0][0..1] ×2"]


def test_an_axis_of_size_one_does_not_split() -> None:
    mesh = dataclasses.replace(PLAN.stages[0].mesh, shape=(1, 4))
    stage = dataclasses.replace(PLAN.stages[0], mesh=mesh)
    leaves = (state("a", 0, ROWS), state("b", 0, Sharding((("y",), ()))))
    text = str(dataclasses.replace(PLAN, stages=(stage,), leaves=leaves))
    assert "1 of 2 state leaves lie whole" in text


def test_markup_in_names_is_text() -> None:
    leaves = (state("params['[bold]x[/bold]']", 0, WHOLE),)
    text = str(dataclasses.replace(PLAN, function="[red]f", leaves=leaves))
    assert "Plan for [red]f by" in text
    assert "params['[bold]x[/bold]']" in text


def test_units() -> None:
    sizes = (0, 1023, 1024, 1536, 1023 * 1024, 1024 * 1024 - 1, 80 << 30, 3 << 40, 5 << 50)
    expected = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1023.0 KiB", "1.0 MiB", "80.0 GiB", "3.0 TiB", "5120.0 TiB"]
    assert [bytes_text(size) for size in sizes] == expected
    rates = (0, 5, 1e3, 3.125e8, 2.039e12, 1e15)
    assert [metric_text(rate, "B/s") for rate in rates] == [
        "0 B/s", "5 B/s", "1 kB/s", "312.5 MB/s", "2.039 TB/s", "1 PB/s",
    ]  # fmt: skip
    assert [seconds_text(t) for t in (0, 2.5e-6, 1e-3, 0.25, 1.5)] == ["0 us", "2.5 us", "1 ms", "250 ms", "1.5 s"]
    assert ranges_text([8, 0, 1, 3, 2]) == "0-3,8"
    assert ranges_text([]) == ""
