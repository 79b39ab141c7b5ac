"""What a benchmark depends on, in a small checkout that is made for the test, and in this one."""

from __future__ import annotations

import ast
import pathlib

import pytest

from benchmarks import sources
from benchmarks.sources import Sources

FILES = {
    "autopar/__init__.py": "from autopar.api import run\n",
    "autopar/api.py": "from autopar.passes import cut\n\ndef run():\n    return cut.pieces(3)\n",
    "passes/__init__.py": "",
    "passes/cut.py": "from . import half\n\ndef pieces(n):\n    return [half.VALUE] * n\n",
    "passes/half.py": "VALUE = 0.5\n",
    "passes/numbers.py": "import math\n\ndef root(x):\n    return math.sqrt(x)\n",
    "cost_model/__init__.py": "",
    "cost_model/hardware.py": "def preset(name):\n    return name + '.json'\n",
    "cost_model/data/v100.json": "{}",
    "benchmarks/__init__.py": "",
    "benchmarks/planner.py": "import autopar\nfrom autopar.cost_model import hardware\nFILE = 'plans.json'\n",
    "benchmarks/solver.py": "SCRIPT = 'solved.py'\nCOMMAND = ['python', '-m', 'benchmarks.command', 'run']\n",
    "benchmarks/command.py": "",
    "benchmarks/solved.py": "from autopar.passes.numbers import root\n",  # run by the one above
    "benchmarks/data/plans.json": "[]",
    "benchmarks/data/README.md": "Plans.",
}


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for room in ("passes", "cost_model"):
        (tmp_path / "autopar" / room).symlink_to(pathlib.Path("..") / room)
    return tmp_path


def changed(checkout: pathlib.Path, name: str, text: str) -> set[str]:
    """Which benchmarks have another hash after a file is written."""
    modules = ("benchmarks.planner", "benchmarks.solver")
    before = {module: Sources(checkout).fingerprint(module) for module in modules}
    (checkout / name).write_text(text)
    return {module.split(".")[1] for module in modules if Sources(checkout).fingerprint(module) != before[module]}


def test_modules_are_those_that_are_imported(checkout: pathlib.Path) -> None:
    found = Sources(checkout)
    assert set(found.modules("benchmarks.planner")) == {
        "benchmarks.planner", "autopar", "autopar.api", "autopar.passes.cut", "autopar.passes.half",
        "autopar.cost_model.hardware",
    }  # fmt: skip
    assert set(found.modules("benchmarks.solver")) == {
        "benchmarks", "benchmarks.solver", "benchmarks.command", "benchmarks.solved", "autopar.passes.numbers",
    }  # fmt: skip
    assert {path.name for path in found.data("benchmarks.planner")} == {"v100.json", "plans.json"}
    assert found.data("benchmarks.solver") == []


@pytest.mark.parametrize("condition", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_what_only_checkers_of_types_import_does_not_count(checkout: pathlib.Path, condition: str) -> None:
    """But what is imported instead of it does, and what is imported where no checker reads."""
    (checkout / "benchmarks/command.py").write_text(
        f"if {condition}:\n    from autopar.passes import cut\nelse:\n    from autopar.passes import numbers\n"
        f"if not {condition}:\n    from autopar.cost_model import hardware\n"
    )
    assert set(Sources(checkout).modules("benchmarks.command")) == {
        "benchmarks.command", "autopar.passes.numbers", "autopar.cost_model.hardware",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("passes/half.py", "VALUE = 0.25\n", {"planner"}),
        ("passes/numbers.py", "def root(x):\n    return x**0.5\n", {"solver"}),
        ("passes/cut.py", FILES["passes/cut.py"] + "\n\nX = 1\n", {"planner"}),
        ("autopar/other.py", "VALUE = 1\n", set()),  # which nothing imports
        ("cost_model/data/v100.json", "[]", {"planner"}),
        ("cost_model/data/h100.json", "{}", {"planner"}),
        ("benchmarks/data/plans.json", "{}", {"planner"}),  # which it names
        ("benchmarks/data/more.json", "{}", {"planner", "solver"}),  # which nobody names: it may be found by listing
        ("benchmarks/data/README.md", "More.", set()),
    ],
)
def test_a_change_makes_those_old_that_depend_on_it(
    checkout: pathlib.Path, name: str, text: str, expected: set[str]
) -> None:
    assert changed(checkout, name, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "# Why a half.\nVALUE = 0.5  # of one\n",
        '"""Halves."""\n\nVALUE = 0.5\n"""What remains."""\n',
        "VALUE = (\n    0.5\n)\n",
    ],
)
def test_comments_docstrings_and_layout_do_not_count(checkout: pathlib.Path, text: str) -> None:
    assert changed(checkout, "passes/half.py", text) == set()


def test_other_strings_count(checkout: pathlib.Path) -> None:
    (checkout / "passes/half.py").write_text('VALUE = ("a", "")\n')
    assert changed(checkout, "passes/half.py", 'VALUE = ("a",)\n') == {"planner"}


def test_a_tree_is_the_same_text_in_all_versions_of_python() -> None:
    text = 'def f(a, *, w=None):  # why\n  "A docstring."\n  return f"{a!r:>{w}}b" "c", ...\n'
    assert sources._plain(ast.parse(text)) == (
        "Module(body=[FunctionDef(name='f',args=arguments(args=[arg(arg='a')],kwonlyargs=[arg(arg='w')],"
        "kw_defaults=[Constant(value=None,kind=None)]),body=[Return(value=Tuple(elts=["
        "JoinedStr(FormattedValue(value=Name(id='a',ctx=Load()),conversion=114,format_spec=JoinedStr("
        "Constant(value='>',kind=None),FormattedValue(value=Name(id='w',ctx=Load()),conversion=-1))),"
        "Constant(value='bc',kind=None)),Constant(value=Ellipsis,kind=None)],ctx=Load()))])])"
    )


def test_the_solver_of_this_checkout_depends_on_no_costs() -> None:
    found = Sources()
    solver, accuracy = found.modules("benchmarks.intra_op_solver"), found.modules("benchmarks.accuracy")
    assert "autopar.passes.solver.relax" in solver
    assert not any(name.startswith("autopar.cost_model") for name in solver)
    assert {"autopar.cost_model.compute", "benchmarks.models.gpt", "benchmarks.published"} <= set(accuracy)
    data = {path.name for path in found.data("benchmarks.accuracy")}
    assert {"p3.16xlarge.json", "alpa_osdi22_measured.json", "a100-40gb.txtpb"} <= data
    assert "best_costs.json" not in data
    runtime = {"autopar.runtime.worker", "autopar.runtime.launcher"}
    pipeline = {"benchmarks.pipeline_processes", "autopar.__main__", *runtime}
    assert pipeline <= set(found.modules("benchmarks.pipeline"))
    assert "best_costs.json" in {path.name for path in found.data("benchmarks.intra_op_solver")}
