"""The command line: what it prints where, and with which exit code it ends."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import click.testing
import jax
import pytest

import autopar
from autopar import recipes
from autopar.calibration.timer import time_steps
from autopar.cli import arguments, options
from autopar.cli import main as cli
from autopar.cli.arguments import read_cluster, read_method
from autopar.errors import ArgumentError, UserError
from autopar.reporting.comparison import Candidate, Comparison
from tests.h100 import needs_cuda_compiler

MODEL = """
import jax
import jax.numpy as jnp

import autopar

print("a module that talks")
batch = {name: jax.ShapeDtypeStruct((32, 64), jnp.float32) for name in "xy"}
state = {
    "params": [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3,
    "key": jax.eval_shape(lambda: jax.random.key(0)),
    "count": jax.ShapeDtypeStruct((), jnp.int32),
}


def loss(params, batch, key):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"] + jax.random.normal(key, x.shape)) ** 2)


def train_step(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], batch, state["key"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "key": jax.random.split(state["key"])[0], "count": state["count"] + 1}, value


def train():
    return train_step, (state, batch)


def by_name():
    return train_step, (state,), {"batch": batch}


def zero_3():
    method, cluster = autopar.recipes.zero(3), autopar.load_preset("cpu")
    return autopar.parallelize(train_step, method=method, cluster=cluster), (state, batch)


ready = train_step, (state, batch)


def wants(width, depth=3):
    return ready


def no_tuple():
    return train_step


def no_step():
    return 3, (state, batch)


def loose():
    return train_step, batch


def buggy():
    return state["parms"]
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The current one, with the module `a_model`."""
    (tmp_path / "a_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "a_model", raising=False)
    return tmp_path


def invoke(*args: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli.main, args)


def answer(*args: str) -> Any:
    """The JSON that a command answers."""
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def mistake(*args: str, code: int = 2) -> str:
    """The one line that says what was wrong."""
    result = invoke(*args)
    assert result.exit_code == code, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert result.stderr.endswith(f"{lines[0]}\n")
    assert "Traceback" not in result.stderr
    if code == 2:
        assert not result.stdout
    return lines[0]


@pytest.mark.usefixtures("folder")
def test_plan_prints_a_plan_and_saves_it() -> None:
    result = invoke("plan", "a_model:train", "--cluster", "dgx-h100:2x4", "-o", "plan.json")
    assert result.exit_code == 0, result.stderr
    saved = autopar.Plan.load("plan.json")
    assert saved.cluster == autopar.load_preset("dgx-h100", num_hosts=2, devices_per_host=4)
    assert str(saved) in result.stdout
    assert "talks" not in result.stdout
    assert "talks" in result.stderr
    again = answer("plan", "a_model.py:train", "--plan", "plan.json")
    assert autopar.Plan.from_json(json.dumps(again)) == saved


def test_report_writes_a_page_and_a_trace(folder: pathlib.Path) -> None:
    options = ("--cluster", "cpu:1x4", "--method", "megatron(1, 2, 2, 2)", "--explain", "1")
    assert invoke("plan", "a_model:train", "--cluster", "cpu:1x4", "-o", "other.json").exit_code == 0
    files = ("--html", "report.html", "--trace", "trace.json", "--against", "other.json")
    content = answer("report", "a_model:train", *options, *files)
    assert content["format"] == "autopar-report"
    assert content["details"]["planning_seconds"] > 0
    assert content["diff"]["other"] == "auto on cpu (4 devices)"
    assert "</html>" in (folder / "report.html").read_text(encoding="utf-8")
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    result = invoke("report", "a_model:train", "--cluster", "cpu:1x2", "--verify", "--compare", "--all")
    assert result.exit_code == 0, result.stderr
    for words in ("Report on train_step", "compiled by jaxlib", "this plan: auto", "utilisation"):
        assert words in result.stdout


@pytest.mark.usefixtures("folder")
def test_a_page_that_cannot_be_drawn_is_said_before_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = mistake("report", "a_model:train", "--cluster", "cpu", "--html", "report.html")
    assert "pip install 'autopar[report]'" in message
    assert "a_model" not in sys.modules


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("target", ["a_model:by_name", "a_model:ready", "./a_model.py:train"])
def test_targets(target: str) -> None:
    plan = answer("plan", target, "--method", "zero(3)", "--cluster", "cpu")
    assert plan["method"] == "zero_3"
    assert plan["function"] == "train_step"


@pytest.mark.usefixtures("folder")
def test_a_parallelized_step_keeps_what_is_not_said() -> None:
    plan = answer("plan", "a_model:zero_3")
    assert (plan["method"], plan["cluster"]["name"]) == ("zero_3", "cpu")
    assert answer("plan", "a_model:zero_3", "--method", "data_parallel")["method"] == "data_parallel"
    number = sum(
        host["num_hosts"] for host in answer("plan", "a_model:zero_3", "--cluster", "cpu:2")["cluster"]["hosts"]
    )
    assert number == 2


@pytest.mark.usefixtures("folder")
def test_all_rows_are_printed_when_asked_for() -> None:
    plan = autopar.Plan.from_json(json.dumps(answer("plan", "a_model:train", "--cluster", "cpu")))
    assert plan.to_text(max_rows=None) in invoke("plan", "a_model:train", "--cluster", "cpu", "--all").stdout


@pytest.mark.usefixtures("folder")
def test_a_plan_is_verified_while_it_is_made() -> None:
    found = answer("plan", "a_model:train", "--cluster", "cpu:1x4", "--verify")
    assert found["notes"][-1].endswith("finds that every stage fits.")
    assert "--target is what --verify compiles for" in mistake(
        "plan", "a_model:train", "--cluster", "cpu:1x4", "--target", "cpu"
    )


def test_verify_holds_the_plan_against_xla(folder: pathlib.Path) -> None:
    verdict = answer("verify", "a_model:train", "--cluster", "cpu:1x4", "--method", "zero(2)", "-o", "verdict.json")
    assert (verdict["target"], verdict["fits"]) == ("cpu", True)
    assert json.loads((folder / "verdict.json").read_text()) == verdict
    text = invoke("verify", "a_model:train", "--cluster", "dgx-h100:1x4", "--target", "cpu")
    assert text.exit_code == 0, text.stderr
    assert "train_step for cpu" in text.stdout
    message = mistake("verify", "a_model:train", "--cluster", "cpu:1x4", "--most-operations", "1")
    assert "most_operations=1" in message


@pytest.mark.usefixtures("folder")
def test_what_does_not_fit_by_xla_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.ir.verification import Verification

    monkeypatch.setattr(Verification, "fits", property(lambda self: False))
    result = invoke("verify", "a_model:train", "--cluster", "cpu:1x2", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["fits"] is False


@pytest.mark.usefixtures("folder")
def test_compare_lists_the_quickest_first_and_what_does_not_fit_last() -> None:
    found = answer("compare", "a_model:train", "--cluster", "cpu:1x4")["methods"]
    fitting = [row for row in found if row["fits"]]
    times = [row["step_time"] for row in fitting]
    assert times == sorted(times)
    assert [row["ratio"] for row in fitting] == pytest.approx([t / times[0] for t in times])
    assert {"auto", "data_parallel", "zero_1", "zero_2", "zero_3", "intra_op_only"} <= {r["method"] for r in fitting}
    assert [row["method"] for row in found if not row["fits"]] == ["inter_op_only"]  # three layers, four devices
    assert found[-1]["method"] == "inter_op_only"


@pytest.mark.usefixtures("folder")
def test_compare_takes_methods_and_plan_files() -> None:
    assert invoke("plan", "a_model:train", "--cluster", "cpu:1x2", "-o", "two.json").exit_code == 0
    result = invoke("compare", "a_model:train", "--plan", "two.json", "--method", "zero(3)", "--method", "gpipe(64, 1)")
    assert result.exit_code == 0, result.stderr
    assert "plan 1: auto" in result.stdout
    assert "cpu (2 devices)" in result.stdout
    assert "gpipe: each stage needs a heavy operation" in result.stdout
    first, second, third = [line for line in result.stderr.splitlines() if line[:4] in ("plan", "zero", "gpip")]
    assert first.startswith("zero_3: ") and " per device, 1 stage, " in first
    assert second.startswith("gpipe: no plan: ") and third.startswith("plan 1: auto: ")
    nothing = invoke("compare", "a_model:train", "--cluster", "cpu", "--method", "gpipe(64, 1)", "--json")
    assert nothing.exit_code == 1
    assert [row["fits"] for row in json.loads(nothing.stdout)["methods"]] == [False]


def test_each_method_is_told_of_as_soon_as_it_is_planned() -> None:
    cluster = autopar.load_preset("cpu")
    told: list[str] = []

    def planned(name: str) -> autopar.Plan:
        told.append(f"{name} begins")
        raise autopar.UserError("f fits on no plan: too large.")

    trials = [(name, cluster, functools.partial(planned, name)) for name in ("a", "b")]
    Comparison.tried("f", trials, lambda done, of: None, told.append)
    assert told == ["a begins", "a: no plan: too large", "b begins", "b: no plan: too large"]


def test_a_reason_is_what_stands_behind_the_colon() -> None:
    cluster = autopar.load_preset("cpu")
    error = "f fits on no plan of 'g': stage 1 needs 1.5 MiB, 0.5 MiB are there. Use more."
    assert Candidate("g", cluster, None, error).reason == "stage 1 needs 1.5 MiB, 0.5 MiB are there"
    assert Candidate("g", cluster, None, "no.").reason == "no"


@pytest.mark.usefixtures("folder")
def test_run_measures_beside_the_prediction() -> None:
    timing = answer("run", "a_model:train", "--steps", "3", "--devices", "4", "--method", "zero(2)")
    assert len(timing["seconds"]) == 3
    assert timing["median"] == sorted(timing["seconds"])[1]
    assert (timing["num_devices"], timing["device_kind"], timing["method"]) == (4, "cpu", "zero_2")
    assert timing["predicted"] > 0
    assert "measured" in invoke("run", "a_model:by_name", "--steps", "1", "--devices", "2").stdout


@pytest.mark.usefixtures("folder")
def test_profile_shows_programs_beside_the_prediction() -> None:
    options = ("--steps", "2", "--devices", "4", "--method", "gpipe(2,2)", "--trace", "trace.json", "--html", "p.html")
    profile = answer("profile", "a_model:train", *options)
    assert len(profile["seconds"]) == 2 and profile["method"] == "gpipe"
    assert {(row["stage"], row["what"]) for row in profile["rows"]} >= {(0, "forward"), (1, "copy")}
    assert json.loads(pathlib.Path("trace.json").read_text())["traceEvents"]
    assert "figure-measured" in pathlib.Path("p.html").read_text()
    assert "predicted idle" in invoke("profile", "a_model:train", "--steps", "1", "--devices", "2").stdout


@pytest.mark.usefixtures("folder")
def test_run_takes_the_plan_of_a_file() -> None:
    assert invoke("plan", "a_model:train", "--cluster", "cpu:1x4", "-o", "four.json").exit_code == 0
    timing = answer("run", "a_model:train", "--steps", "1", "--plan", "four.json")
    assert timing["predicted"] == autopar.Plan.load("four.json").step_time
    message = mistake("run", "a_model:train", "--steps", "1", "--devices", "2", "--plan", "four.json")
    assert "the plan is for 4 devices, there are 2" in message


def test_timed_steps_follow_one_another() -> None:
    met: list[tuple[float, float]] = []

    def step(state: Any, flag: bool, x: Any) -> Any:
        jax.debug.callback(lambda a, b: met.append((float(a), float(b))), state["w"], x[0])
        return {"w": state["w"] + flag}, x.sum()

    parallel = autopar.parallelize(step, static_argnums=1, devices=jax.devices()[:1])
    shapes = {"w": jax.ShapeDtypeStruct((), "float32")}, True, jax.ShapeDtypeStruct((4,), "float32")
    timing = time_steps(parallel.compile(*shapes), 2)
    assert len(timing.seconds) == 2
    assert met == [(1, 1), (2, 1), (3, 1)]


# Mistakes


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("a_model", "names no function: write package.module:function"),
        ("a_modl:train", "cannot import a_modl: ModuleNotFoundError"),
        ("a_modl.py:train", "cannot import a_modl.py: FileNotFoundError"),
        ("a_model:trian", "a_model has no 'trian'; did you mean 'train'"),
        ("a_model:wants", "needs arguments (width): name a function without arguments"),
        ("a_model:train_step", "needs arguments (state, batch)"),
        ("a_model:no_tuple", "gives function"),
        ("a_model:loose", "gives a tuple of 2 (function, dict)"),
        ("a_model:no_step", "its step is int 3, which cannot be called"),
    ],
)
def test_a_target_that_is_none(target: str, words: str) -> None:
    assert words in mistake("plan", target, "--cluster", "cpu")


@pytest.mark.parametrize(
    "text", ["import nothing_there", "1 / 0", "def f(:", "raise SystemExit(4)", r"raise ValueError('of two\nlines')"]
)
def test_a_module_that_fails_is_named_with_its_line(folder: pathlib.Path, text: str) -> None:
    (folder / "broken.py").write_text(f"x = 1\n{text}\n")
    message = mistake("plan", "broken.py:train", "--cluster", "cpu")
    assert "cannot import broken.py: " in message
    assert "broken.py:2" in message or "broken.py, line 2" in message


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cluster", "dgx-h10"), "did you mean 'dgx-h100'"),
        (("--cluster", "dgx-h100:many"), "'many' is no number of hosts"),
        (("--cluster", "dgx-h100:0"), "num_hosts is 0"),
        (("--cluster", "none.json"), "cannot read the cluster file 'none.json'"),
        (("--method", "zro(2)"), "did you mean 'zero'"),
        (("--method", "zero"), "the recipe is zero(stage, num_microbatches=1)"),
        (("--method", "zero(9)"), "stage must be 1, 2 or 3"),
        (("--method", "zero(stage)"), "are literals"),
        (("--method", "zero(**{'stage': 2})"), "the recipe is zero("),
        (("--method", "pipeline(3)"), "the recipe is pipeline("),
        (("--method", "data_parallel(0)"), "num_microbatches is 0"),
        (("--method", "zero(2"), "is no recipe with its arguments"),
        (("--plan", "none.json"), "cannot read the plan file 'none.json'"),
        (("-o", "none/plan.json"), "make it first"),
        (("-o", "."), "is a folder"),
        (("--clustr", "cpu"), "--clustr"),
    ],
)
def test_an_option_that_is_none_ends_before_anything_is_imported(options: tuple[str, ...], words: str) -> None:
    message = mistake("plan", "a_model:train", *options)
    assert words in message
    assert options[0] in message
    assert "a_model" not in sys.modules


@pytest.mark.usefixtures("folder")
def test_other_mistakes() -> None:
    assert "'nothing'" in mistake("nothing")
    assert "did you mean 'h100'" in mistake("verify", "a_model:train", "--target", "h10")
    assert invoke("plan", "a_model:train", "--cluster", "cpu", "-o", "plan.json").exit_code == 0
    message = mistake("plan", "a_model:train", "--cluster", "cpu", "--plan", "plan.json")
    assert "--plan and --cluster exclude each other" in message
    message = mistake("run", "a_model:train", "--method", "auto", "--plan", "plan.json")
    assert "--plan and --method exclude each other" in message
    assert "--devices 99: there are 8 of platform cpu" in mistake("run", "a_model:train", "--devices", "99")


@pytest.mark.usefixtures("folder")
def test_what_fits_nowhere_ends_with_1() -> None:
    options = ("plan", "a_model:train", "--cluster", "cpu:1x2", "--method", "auto(memory_limit=1000)")
    assert "fits on cluster 'cpu' under no plan" in mistake(*options, code=1)
    result = invoke(*options, "--json")
    assert json.loads(result.stdout)["fits"] is False


@pytest.mark.usefixtures("folder")
def test_bugs_keep_their_traceback() -> None:
    result = invoke("plan", "a_model:buggy", "--cluster", "cpu")
    assert result.exit_code == 3
    assert "Traceback" in result.stderr
    assert "KeyError: 'parms'" in result.stderr
    assert "a_model.py" in result.stderr


# What is typed


def test_methods_are_python_calls_of_literals() -> None:
    assert read_method("auto") == recipes.auto()
    assert read_method(" zero(2) ") == recipes.zero(2)
    assert read_method("megatron(2,4,1,8)") == recipes.megatron(2, 4, 1, 8)
    assert read_method("auto(num_stages=2, mesh_shape=(2, 2))") == recipes.auto(num_stages=2, mesh_shape=(2, 2))
    assert read_method("pipeline([(1, (2,)), (2, (1, 2))])") == recipes.pipeline([(1, (2,)), (2, (1, 2))])
    assert set(arguments.RECIPES) >= {"auto", "data_parallel", "zero", "megatron", "gpipe", "intra_op_only"}
    for text in ("__import__('os')", "zero.__call__(2)", "zero(print())", "2"):
        with pytest.raises(ArgumentError):
            read_method(text)


def test_clusters_are_presets_with_counts_or_files(tmp_path: pathlib.Path) -> None:
    assert read_cluster("p3.16xlarge") == autopar.load_preset("p3.16xlarge")
    assert read_cluster("dgx-a100-40gb:2") == autopar.load_preset("dgx-a100-40gb", num_hosts=2)
    small = autopar.load_preset("dgx-h100", num_hosts=8, devices_per_host=4)
    assert read_cluster("dgx-h100:8x4") == small
    (tmp_path / "mine.json").write_text(autopar.cluster_to_json(small))
    assert read_cluster(str(tmp_path / "mine.json")) == small
    with pytest.raises(UserError):
        read_cluster("")


def test_presets_recipes_and_chips_are_completed() -> None:
    context = click.Context(cli.main)

    def completed(noun: options.Noun, incomplete: str) -> list[str]:
        found = noun.shell_complete(context, click.Option(["--x"]), incomplete)
        return [item.value for item in found if item.type == "plain"]

    assert completed(options.CLUSTER, "dgx-h") == ["dgx-h100"]
    assert completed(options.METHOD, "mega") == ["megatron"]
    assert completed(options.CHIP, "h") == ["h100", "h200"]
    assert completed(options.PLAN, "pl") == []
    assert options.PLAN.shell_complete(context, click.Option(["--x"]), "pl")[0].type == "file"


# Fresh processes


def run_module(folder: pathlib.Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    repository = pathlib.Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-m", "autopar", *args],
        cwd=folder, env={"PYTHONPATH": str(repository), **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_help_as_a_module(tmp_path: pathlib.Path) -> None:
    process = run_module(tmp_path, "--help")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("Usage: python -m autopar")
    for command in ("plan", "report", "verify", "compare", "run"):
        assert f"\n  {command} " in process.stdout


def test_as_many_virtual_devices_as_the_cluster_has(folder: pathlib.Path) -> None:
    process = run_module(folder, "verify", "a_model:train", "--cluster", "cpu:1x16", "--method", "zero(1)", "--json")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["target"] == "cpu"


def test_planning_for_a_cluster_wakes_no_device_but_cpus(folder: pathlib.Path) -> None:
    (folder / "says.py").write_text(f"{MODEL}\nprint('platforms', jax.config.values['jax_platforms'])\n")
    process = run_module(folder, "plan", "says:train", "--cluster", "cpu:1x2")
    assert process.returncode == 0, process.stderr
    assert "platforms cpu" in process.stderr


@needs_cuda_compiler
def test_chips_that_are_not_there_are_compiled_for_in_a_fresh_process(folder: pathlib.Path) -> None:
    """In which no platform has been started yet."""
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = run_module(folder, "verify", "a_model:train", "--cluster", "dgx-h100:1x2", "--json", **paths)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["target"] == "h100"
